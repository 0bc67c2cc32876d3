"""verl's protocols 3D_PP_ONLY and 3D_ALL_MICRO_DP as dispatch modes of a user's own."""

from __future__ import annotations

from typing import Any

from weightsync.hybrid import Dispatch, Layout, Place


def of_first_model(layout: Layout, results: list[Any]) -> list[Any]:
    """Return the result of each pipeline stage, from its first tensor-parallel and data-parallel rank."""
    ranks = zip(layout.places, results, strict=True)
    firsts = [(at, each) for at, each in ranks if at.data_parallel_rank == at.tensor_parallel_rank == 0]
    return [each for _, each in sorted(firsts, key=lambda found: found[0].pipeline_parallel_rank)]


PP_ONLY = Dispatch(Dispatch.ONE_TO_ALL.split, of_first_model)
"""verl's 3D_PP_ONLY."""


def as_micro_dp(layout: Layout) -> Layout:
    """Return the layout with each pipeline stage of each model as a data-parallel rank."""
    stages = 1 + max(at.pipeline_parallel_rank for at in layout.places)
    ranks = [at.data_parallel_rank * stages + at.pipeline_parallel_rank for at in layout.places]
    return Layout(
        tuple(Place(rank, at.tensor_parallel_rank == 0) for rank, at in zip(ranks, layout.places, strict=True))
    )


ALL_MICRO_DP = Dispatch(
    lambda layout, call: Dispatch.DP.split(as_micro_dp(layout), call),
    lambda layout, results: Dispatch.DP.collect(as_micro_dp(layout), results),
)
"""verl's 3D_ALL_MICRO_DP, of engines as wide as the tensor-parallel groups of the trainer."""
