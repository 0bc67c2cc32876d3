"""Predict the planning of a first push by `broadcast` on other machines: each participant's messages and seconds. Pure.

Rank 0 plans for everyone. A rank tells it the `locations` that it holds. The transfer plan has `pieces`: each expert
once, each other tensor once for each rank with a shard. A worker is told the `parts` that it reads.
`docs/evidence/scaling.md` explains each constant.

    pieces   experts + others shards + cuts;  cuts = chunks shards, for the share of the bytes that are no experts
    parts    experts + 0.73 (others shards + cuts);  with expert parallelism, experts / tp
    seconds  rank 0: tensors, pieces, tp parts, bytes;  a rank: tensors, pieces;  a worker: tensors, parts
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from weightsync.net.wire import MAX_FRAME_BYTES
from weightsync.planning.layout import Manifest
from weightsync.report import format_bytes
from weightsync.tools.simulate import Topology, chunk_share, rounded

_EXPERT = re.compile(r"\.experts\.\d+\.")
_ROW, _LOCATION = 19, 33
"""Bytes of a manifest's row and of a location, beside the tensor's name."""
_IN_PLAN, _IN_CHAIN = 10.5, 20
"""Bytes of a load plan, and of a chain's regions, for each tensor that is no expert. Others are runs of positions."""
_READ = 0.73
"""The share of the pieces of such tensors that a tensor-parallel worker reads."""
_SENT_S, _ENCODED_S, _TAKEN_S = 1.3e-9, 3.5e-9, 5e-9
"""Rank 0's seconds for a byte: sent as it is, encoded for one worker and sent, received and decoded."""
_MERGED_TENSOR_S, _MERGED_PIECE_S, _LAID_OUT_S = 30e-6, 17e-6, 4e-6
"""Rank 0's seconds for a tensor, for a piece, and for a part of a chain."""
_READ_S, _PIECE_S = 10e-6, 4e-6
"""A rank's seconds to read a tensor of its model, and to take a piece of the plan."""
_TRACED_S, _CONNECTED_S = 25e-6, 9e-6
"""A worker's seconds to trace a tensor, and to connect a part."""
COLUMNS = ("GPUs", "ranks", "shards", "engines", "participant", "receives", "sends", "busy", "largest message")


@dataclass(frozen=True)
class Model:
    """A model's tensors. `experts` of them belong to single experts. `name_bytes` is the mean."""

    nbytes: int
    tensors: int
    experts: int
    expert_bytes: int
    name_bytes: float

    @classmethod
    def of(cls, manifest: Manifest) -> Model:
        experts = [tensor.nbytes for tensor in manifest if _EXPERT.search(tensor.name)]
        names = sum(len(name) for name in manifest.names) / len(manifest)
        return cls(manifest.nbytes, len(manifest), len(experts), sum(experts), names)


@dataclass(frozen=True)
class FirstPush:
    """The bytes of each message, by its name, and the seconds of rank 0, of each other rank and of each worker."""

    messages: dict[str, float]
    rank_0_s: float
    rank_s: float
    worker_s: float

    @property
    def seconds(self) -> float:
        """The time until the first byte. Rank 0 works alone, but for the tracing and the connecting."""
        return self.rank_0_s + max(self.worker_s, self.rank_s)


def predict(model: Model, t: Topology, expert_parallel: bool) -> FirstPush:
    """Return the planning of a first push. `expert_parallel`: a worker holds whole experts."""
    others, shards = model.tensors - model.experts, t.shards or t.ranks
    cuts = shards * (1 - model.expert_bytes / model.nbytes) / chunk_share(model.nbytes, t)
    held = (others * shards + model.experts) / t.ranks
    pieces = model.experts + others * shards + cuts
    parts = model.experts / (t.tp if expert_parallel else 1) + _READ * (others * shards + cuts)
    rows, place = model.tensors * (model.name_bytes + _ROW), model.name_bytes + _LOCATION
    has_ranks = t.ranks > 1  # rank 0 sends itself nothing
    sizes = {
        "Inventory": has_ranks * (rows + held * place),
        "PlanRequest": rows,
        "PackedLoadPlan": _IN_PLAN * others,
        "PackedPlan": has_ranks * (rows + pieces * place + t.tp * _IN_CHAIN * others),
        "Connect": parts * place,
    }
    own_s = (
        model.tensors * (_READ_S + _MERGED_TENSOR_S) + pieces * _MERGED_PIECE_S + t.tp * parts * _LAID_OUT_S
        + (t.ranks - 1) * (sizes["Inventory"] * _TAKEN_S + sizes["PackedPlan"] * _SENT_S)
        + t.workers * (sizes["PackedLoadPlan"] * _TAKEN_S + (sizes["PlanRequest"] + sizes["Connect"]) * _ENCODED_S)
    )  # fmt: skip
    rank_s = model.tensors * _READ_S + pieces * _PIECE_S
    return FirstPush(sizes, own_s, rank_s, model.tensors * _TRACED_S + parts * _CONNECTED_S)


def rows(model: Model, topologies: Sequence[Topology], expert_parallel: bool) -> list[tuple[str, ...]]:
    """Return the cells of `COLUMNS` for each topology: of each kind of participant, and of all together."""
    found: list[tuple[str, ...]] = []
    for t in topologies:
        push = predict(model, t, expert_parallel)
        inventory, request, answer, plan, connect = push.messages.values()
        ranks, to_worker = t.ranks - 1, request + connect
        most = max(push.messages, key=lambda name: push.messages[name])
        largest = f"{most}, {format_bytes(int(push.messages[most]))}"
        if push.messages[most] > MAX_FRAME_BYTES:
            largest += f", over the {format_bytes(MAX_FRAME_BYTES)} of a frame"
        place = str(t.gpus), str(t.ranks), str(t.shards or t.ranks), f"{t.engines} x TP={t.tp}"
        for name, received, sent, seconds in (
            ("rank 0", ranks * inventory + t.workers * answer, ranks * plan + t.workers * to_worker, push.rank_0_s),
            ("each other rank", plan, inventory, push.rank_s),
            ("each worker", to_worker, answer, push.worker_s),
        ):
            sizes = format_bytes(int(received)), format_bytes(int(sent))
            found.append((*place, name, *sizes, rounded(seconds), ""))
        found.append((*place, "all of them", "", "", rounded(push.seconds), largest))
    return found
