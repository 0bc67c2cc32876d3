"""The layout of a checkpoint: the file and the bytes of each tensor. Pure arithmetic: no tensors, no file is touched.

A safetensors file has eight bytes with the length of the header, the header, and the tensors without gaps. The header
is JSON, padded with spaces to a multiple of eight bytes. A bucket is never spread over two files.

Within a file wider dtypes come first, as in files of the safetensors library. So each tensor begins at a multiple of
its element's size. Tensors of one width are in the order of the buckets. So a bucket is one run of bytes in its file
for each width.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from msgspec.structs import replace

from weightsync.errors import ConfigError
from weightsync.planning.bucketing import fill_buckets
from weightsync.planning.layout import Box, Manifest, TensorMeta, itemsize, row_major

MAX_SHARD_BYTES = 5 * 10**9
INDEX = "model.safetensors.index.json"
_METADATA = "__metadata__"
_HEADER_ALIGN_BYTES = 8
_CODES = {
    "bool": "BOOL",
    **{f"{kind}{bits}": f"{kind[0].upper()}{bits}" for kind in ("int", "uint", "float") for bits in (16, 32, 64)},
    "int8": "I8",
    "uint8": "U8",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}


@dataclass(frozen=True)
class CheckpointFile:
    """One file: its name, its header, and its size in bytes."""

    name: str
    header: bytes
    nbytes: int


@dataclass(frozen=True)
class Shards:
    """A checkpoint's files: each tensor's file, and its first byte there.

    `index` has the content of the index file, by its name. It is empty if there is only one file.
    """

    manifest: Manifest
    files: tuple[CheckpointFile, ...]
    file_of: dict[str, str]
    in_file: dict[str, int]
    index: dict[str, bytes]


def lay_out(manifest: Manifest, groups: Sequence[Sequence[str]], max_shard_bytes: int) -> Shards:
    """Return the files of a checkpoint, each of at most `max_shard_bytes` of tensors, but at least one group.

    `groups` have every name once, in the order of the files. A tied tensor is in the files under each of its names.
    Raises `ConfigError` for dtypes and names that safetensors does not have.
    """
    if unknown := {meta.name: meta.dtype for meta in manifest if meta.dtype not in _CODES}:
        name, dtype = next(iter(unknown.items()))
        raise ConfigError(f"{len(unknown)} tensors have a dtype without a name in safetensors, such as {name}: {dtype}")
    if _METADATA in manifest:
        raise ConfigError(
            f"a tensor is named {_METADATA}, and safetensors files reserve this name: use "
            "TensorSelection(exclude=...) or TensorSelection(rename=...)"
        )
    again = [replace(manifest[name], name=other) for other, name in manifest.tied]
    manifest, groups = Manifest((*manifest, *again), manifest.tied), [*groups, *([meta.name] for meta in again)]
    contents = [bucket.names for bucket in fill_buckets(manifest, map(tuple, groups), max_shard_bytes)]
    files: list[CheckpointFile] = []
    in_file: dict[str, int] = {}
    file_of: dict[str, str] = {}
    for number, names in enumerate(contents):
        metas = sorted((manifest[name] for name in names), key=lambda meta: -itemsize(meta.dtype))  # widest first
        header = _header(metas)
        at = len(header)
        for meta in metas:
            in_file[meta.name] = at
            at += meta.nbytes
        part = "" if len(contents) == 1 else f"-{number + 1:05}-of-{len(contents):05}"
        files.append(CheckpointFile(f"model{part}.safetensors", header, at))
        file_of.update({meta.name: files[-1].name for meta in metas})
    index: dict[str, bytes] = {}
    if len(files) > 1:
        rows = {"metadata": {"total_size": manifest.nbytes}, "weight_map": file_of}
        index[INDEX] = json.dumps(rows, indent=2, sort_keys=True).encode() + b"\n"
    return Shards(manifest, tuple(files), file_of, in_file, index)


def runs(shape: Sequence[int], box: Box) -> tuple[int, list[int]]:
    """Return the region `box` of a contiguous tensor of `shape` as runs of consecutive elements.

    The result is the length of a run, and the first element of each, in the order of the box's elements. `box` is not
    empty.
    """
    length, dim = 1, len(shape)
    while dim > 0:
        dim -= 1
        length *= box.size[dim]
        if box.size[dim] < shape[dim]:
            break
    strides = row_major(shape)
    first = sum(start * stride for start, stride in zip(box.start, strides, strict=True))
    outer = product(*(range(0, size * stride, stride) for size, stride in zip(box.size[:dim], strides, strict=False)))
    return length, [first + sum(offsets) for offsets in outer]


def _header(metas: Sequence[TensorMeta]) -> bytes:
    rows: dict[str, object] = {_METADATA: {"format": "pt"}}
    at = 0
    for meta in metas:
        end = at + meta.nbytes
        rows[meta.name] = {"dtype": _CODES[meta.dtype], "shape": meta.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(rows, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGN_BYTES)
    return len(text).to_bytes(8, "little") + text
