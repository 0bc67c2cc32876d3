"""Pushes of vLLM's `WeightSource` objects: the form up to vLLM 0.32, and the one from 0.33 on."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_engine import FakeEngine, ModuleHost, TinyEngineModel, checkpoint, cold
from ranks import assert_in_step, run_ranks

from weightsync import ManifestError, TensorSelection, WeightSync
from weightsync.sources.declared import has_shards, is_declared

NAMES = list(checkpoint(1))


@dataclass(frozen=True)
class Meta:
    """vLLM's `ParamMeta`: its first three fields, and the others of vLLM 0.33."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = None
    mesh_shape: tuple[int, ...] | None = None
    placements: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class Shard:
    dim: int


class Replicate: ...


class Old:
    """A source as for vLLM 0.32. `held`: the names that this rank holds, and None for all."""

    def __init__(self, seed: int, held: Collection[str] | None = None) -> None:
        self.tensors, self.held, self.lie = checkpoint(seed), held, 0

    def metadata(self) -> list[Meta]:
        return [Meta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def held_names(self) -> Collection[str] | None:
        return self.held

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        for name, tensor in list(self.tensors.items())[self.lie :]:
            if dist.is_initialized():
                assert_in_step()  # reading gathers
            yield name, tensor if self.held is None or name in self.held else None


class New:
    """A source as for vLLM 0.33, on this rank. Rows of large tensors are cut over a mesh of the ranks."""

    def __init__(self, seed: int, rank: int, mesh: tuple[int, ...], *, local: bool) -> None:
        self.tensors, self.rank, self.mesh, self.local = checkpoint(seed), rank, mesh, local
        self.pieces: dict[str, torch.Tensor] = {}

    @cached_property
    def metadata(self) -> list[Meta]:
        return [
            Meta(name, tensor.dtype, tuple(tensor.shape), *self.layout(number, tensor))
            for number, (name, tensor) in enumerate(self.tensors.items())
        ]

    def layout(self, number: int, tensor: torch.Tensor) -> tuple[Any, Any, Any]:
        size = torch.Size(self.mesh).numel()
        match number % 3:
            case 0:
                return None, None, None
            case 1:  # one rank's alone
                return (number % size,), None, None
        placements = (Shard(0), Replicate() if tensor.dim() < 2 else Shard(tensor.dim() - 1))
        return tuple(reversed(range(size))), self.mesh, placements[: len(self.mesh)]

    def implements_iter_local(self) -> bool:
        return self.local

    def _owned(self) -> list[Meta]:
        return [meta for meta in self.metadata if meta.owners is None or self.rank in meta.owners]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        for meta in self._owned():
            yield meta.name, self.tensors[meta.name]

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        for meta in self._owned():
            piece = self.tensors[meta.name]
            if meta.owners is not None and meta.placements is not None:
                at = torch.arange(len(meta.owners)).view(meta.mesh_shape).eq(meta.owners.index(self.rank)).nonzero()[0]
                for index, chunks, placement in zip(at, meta.mesh_shape or (), meta.placements, strict=True):
                    if isinstance(placement, Shard):
                        pieces = piece.chunk(chunks, placement.dim)
                        empty = piece.narrow(placement.dim, 0, 0)
                        piece = pieces[index] if index < len(pieces) else empty
            yield meta.name, self.pieces.setdefault(meta.name, piece.contiguous())


def push(rank: int, kind: str, transport: str) -> None:
    """Push three versions from this rank. Rank 0 looks at the engine."""
    size = dist.get_world_size() if dist.is_initialized() else 1

    def source(seed: int) -> Any:
        match kind:
            case "held":
                return Old(seed, NAMES[rank::size])
            case "all":
                return Old(seed)
        return New(seed, rank, (2, size // 2) if size > 2 else (size,), local=kind == "local")

    with ExitStack() as stack:
        engine = (
            stack.enter_context(closing(FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1))))) if not rank else None
        )
        sync = stack.enter_context(WeightSync("stream", transport, engine, timeout_s=30.0, max_bytes=512))
        for seed in (2, 3, 4):
            sync.push(source(seed))
            if engine is not None:
                assert all(map(torch.equal, engine.hosts[0].live.parameters(), cold(checkpoint(seed)).parameters()))
            if dist.is_initialized():
                dist.barrier()


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
@pytest.mark.parametrize("kind", ["all", "full", "local"])
def test_a_source_of_one_rank_is_pushed(kind: str, transport: str) -> None:
    push(0, kind, transport)


@pytest.mark.parametrize("kind", ["all", "held", "full", "local"])
def test_ranks_push_what_each_of_them_holds(kind: str) -> None:
    run_ranks(push, 4 if kind == "local" else 2, kind, "ipc" if kind == "local" else "broadcast")


def test_iteration_other_than_declared_is_refused() -> None:
    engine = FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1)))
    shifted, shards = Old(2), New(2, 0, (1,), local=True)
    shifted.lie = 1
    shards.pieces[NAMES[2]] = torch.zeros(1)
    with closing(engine), WeightSync("stream", "ipc", engine, timeout_s=30.0) as sync:
        with pytest.raises(ManifestError, match=f"the stream gives {NAMES[1]} .*expected {NAMES[0]}"):
            sync.push(shifted)
        with pytest.raises(ManifestError, match=f"the weight source gives {NAMES[2]} as .*Both must agree"):
            sync.push(shards)
    assert not engine.version().startswith("POISONED")


def test_excluded_tensors_do_not_travel() -> None:
    class More(Old):
        def __init__(self, seed: int) -> None:
            super().__init__(seed)
            self.tensors |= {"more": torch.ones(2)}

    engine = FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1)))
    without = TensorSelection(exclude=["more"])
    with closing(engine), WeightSync("stream", "ipc", engine, selection=without, timeout_s=30.0) as sync:
        sync.push(More(2))
    assert all(map(torch.equal, engine.hosts[0].live.parameters(), cold(checkpoint(2)).parameters()))


def test_only_weight_sources_count_as_such() -> None:
    assert is_declared(Old(1))
    assert is_declared(New(1, 0, (1,), local=True))
    assert has_shards(New(1, 0, (1,), local=True))
    for other in (checkpoint(1), list(checkpoint(1).items()), iter(()), None, torch.nn.Linear(1, 1), lambda: ()):
        assert not is_declared(other)
        assert not has_shards(other)
