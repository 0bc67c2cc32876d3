"""The tensors that the conformance check of transports delivers: all dtypes, shards, replicas, casts, computed ones."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import lru_cache

import torch

from weightsync.planning.layout import Box, Manifest, TensorMeta
from weightsync.planning.wire_types import ReadRegions

_DTYPES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64"),
    *("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64"),
)
MAX_BYTES = 3 * 2**20
"""Each rank's part of a full chunk is more than 1 MiB, so that a sample of it is not all of it."""


@dataclass(frozen=True)
class TrialTensor:
    """One tensor: the trainer's dtype, the dtype that travels, and the boxes with their ranks."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    wire: str
    boxes: tuple[tuple[int, Box], ...]


def _whole(shape: tuple[int, ...], *ranks: int) -> tuple[tuple[int, Box], ...]:
    return tuple((rank, Box.full(shape)) for rank in ranks)


_ROWS = ((0, Box((0, 0), (3, 3))), (1, Box((3, 0), (2, 3))))
_COLUMNS = ((0, Box((0, 0), (4, 4))), (1, Box((0, 4), (4, 3))))
_LONG = ((0, Box((0, 0), (1000, 1000))), (1, Box((1000, 0), (1001, 1000))))
TRIAL = {
    tensor.name: tensor
    for tensor in (
        *(TrialTensor(f"rows.{dtype}", (5, 3), dtype, dtype, _ROWS) for dtype in _DTYPES),
        TrialTensor("columns", (4, 7), "float32", "float32", _COLUMNS),
        TrialTensor("one_row", (1, 4), "float32", "float32", _whole((1, 4), 0)),
        TrialTensor("scalar", (), "float32", "float32", _whole((), 0, 1)),
        TrialTensor("replicated", (6,), "int64", "int64", _whole((6,), 0, 1)),
        TrialTensor("cast", (5, 3), "float32", "bfloat16", _ROWS),
        TrialTensor("long", (2001, 1000), "float32", "float32", _LONG),
        TrialTensor("long.computed", (2001, 1000), "float32", "bfloat16", _LONG),
        TrialTensor("rank1.only", (3, 2), "bfloat16", "bfloat16", _whole((3, 2), 1)),
    )
}
MANIFEST = Manifest(tuple(TensorMeta(tensor.name, tensor.shape, tensor.wire) for tensor in TRIAL.values()))
FROZEN = frozenset({"rows.uint8", "rank1.only"})
COMPUTED = frozenset({"rows.float16", "columns", "cast", "long.computed"})
SHARED = frozenset({"rows.int32", "rows.float16", "replicated", "scalar"})
"""Tensors in shared memory on a CPU, so that a transport may map them."""


@lru_cache(maxsize=64)
def values_of(name: str, contents: int) -> torch.Tensor:
    """Return a tensor's values in the trainer's dtype. They are the same on every end, and differ by `contents`."""
    tensor = TRIAL[name]
    draw = torch.Generator().manual_seed(zlib.crc32(f"{name} {contents}".encode()))
    kind: torch.dtype = getattr(torch, tensor.dtype)
    if kind.is_floating_point:
        return torch.randn(tensor.shape, generator=draw).to(kind)
    return torch.randint(0, 2 if kind == torch.bool else 100, tensor.shape, generator=draw).to(kind)


def reads_of(worker: int, workers: int, cut: bool) -> ReadRegions:
    """Return a worker's regions: all, or with `cut` its share of the rows of each tensor with enough rows."""
    reads: dict[str, tuple[Box, ...]] = {}
    for tensor in TRIAL.values():
        box = Box.full(tensor.shape)
        if cut and tensor.shape and tensor.shape[0] >= workers:
            first, last = (tensor.shape[0] * number // workers for number in (worker, worker + 1))
            box = Box((first, *box.start[1:]), (last - first, *box.size[1:]))
        reads[tensor.name] = (box,)
    return reads
