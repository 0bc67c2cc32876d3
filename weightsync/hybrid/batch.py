"""Batches: a `TensorDict` with rows as its first dimension, joined, split and padded without a change of order.

A column is a tensor, a nested tensor or, for anything else, a `NonTensorStack` with one value for each row. Meta
information is a `NonTensorData`: one value for the whole batch. It is never split, and a part of a batch has all of it.
    No function writes into its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.tensorclass import NonTensorStack

from weightsync.errors import ConfigError
from weightsync.hybrid.columns import (
    Ragged,
    bytes_of,
    check,
    is_equal,
    is_meta,
    join,
    meta,
    pick,
    span,
    tensor_of,
)


def column(values: Sequence[Any]) -> Any:
    """Return a column of values other than tensors, one for each row."""
    return NonTensorStack(*values)


def is_batch(value: Any) -> bool:
    """Return whether a value has rows, so that a call may split it. `rows` refuses other classes than `TensorDict`."""
    return isinstance(value, TensorDictBase)


def rows(batch: TensorDict) -> int:
    """Return the number of rows of a batch. Raise `ConfigError` for a batch without a dimension of rows."""
    if not isinstance(batch, TensorDict):
        raise ConfigError(
            f"a batch is a {type(batch).__name__}; expected a TensorDict: pad the rows alike, or make a nested tensor"
        )
    if len(batch.batch_size) != 1:
        raise ConfigError(f"a batch has the size {list(batch.batch_size)}; expected one dimension, its rows")
    return int(batch.batch_size[0])


def union(first: TensorDict, *others: TensorDict) -> TensorDict:
    """Return the columns and the meta information of all batches.

    Raises `ConfigError` if the numbers of rows differ, or if two batches have a column or meta information with
    different values.
    """
    joined = _columns(first)
    for other in others:
        if rows(other) != rows(first):
            raise ConfigError(f"batches of {rows(first)} and {rows(other)} rows cannot be joined column by column")
        for name, values in _columns(other).items():
            if name in joined and not is_equal(joined[name], values):
                raise ConfigError(f"two batches have a column {name!r} with different values: rename one of them")
            joined[name] = values
    return TensorDict(joined, [rows(first)])


def split(batch: TensorDict, parts: int) -> list[TensorDict]:
    """Return `parts` batches in order. Their numbers of rows differ by at most one."""
    if rows(batch) < parts:
        raise ConfigError(
            f"a batch of {rows(batch)} rows cannot be split over {parts} data-parallel ranks without an empty one: "
            "use Dispatch.DP_PADDED or a larger batch"
        )
    ends = [rows(batch) * part // parts for part in range(parts + 1)]
    return [cut(batch, start, end) for start, end in pairwise(ends)]


def cut(batch: TensorDict, start: int, end: int) -> TensorDict:
    """Return the rows from `start` to before `end`."""
    return _each(batch, end - start, lambda values: span(values, start, end))


def concat(batches: Sequence[TensorDict]) -> TensorDict:
    """Return the rows of all batches, in order, with the meta information of all.

    Raises `ConfigError` if their columns, a column's row sizes or their meta information differ.
    """
    counts = list(map(rows, batches))
    columns = list(map(_columns, batches))
    names = [sorted(name for name, values in each.items() if not is_meta(values)) for each in columns]
    if mixed := set().union(*names) & {name for each in columns for name in each if is_meta(each[name])}:
        raise ConfigError(
            f"{', '.join(map(repr, sorted(mixed)))}: a column of some batches, and meta information of others. Give "
            "column(values) in all batches, or NonTensorData(value)"
        )
    if not batches or any(other != names[0] for other in names):
        raise ConfigError(f"batches with the columns {names} cannot be put one below the other")
    every = dict.fromkeys(name for each in columns for name in each)
    found = {name: join(name, [each[name] for each in columns if name in each]) for name in every}
    return TensorDict(found, [sum(counts)])


def pad(batch: TensorDict, multiple: int) -> TensorDict:
    """Return the batch with its first rows repeated until their number is a multiple. `cut` undoes it."""
    count = rows(batch)
    if not count:
        raise ConfigError("a batch without rows cannot be padded: there is nothing to repeat")
    wanted = -(-count // multiple) * multiple
    return batch if wanted == count else take(batch, [row % count for row in range(wanted)])


def take(batch: TensorDict, order: Sequence[int]) -> TensorDict:
    """Return these rows, in this order. A row may come several times."""
    return _each(batch, len(order), lambda values: pick(values, order))


def balance(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Return the rows of each part, so that the sums of `sizes` of all parts are about equal."""
    found: list[list[int]] = [[] for _ in range(parts)]
    load = [0] * parts
    for row in sorted(range(len(sizes)), key=lambda row: -sizes[row]):
        least = min(range(parts), key=lambda part: (load[part], len(found[part])))
        found[least].append(row)
        load[least] += sizes[row]
    return [sorted(part) for part in found]


@dataclass(frozen=True)
class Packed:
    """A batch on its way through Ray.

    Pickling a tensor view copies its whole storage, and pickling a `NonTensorStack` pickles each value by itself.
    Arrays of bytes and lists avoid both.
    """

    rows: int
    tensors: dict[str, tuple[torch.dtype, torch.Size, Any]]
    nested: dict[str, tuple[Ragged, list[torch.Size], Any]]
    lists: dict[str, list[Any]]
    meta: dict[str, Any]


def pack(value: Any) -> Any:
    """Return a batch as it travels, with tensors of a GPU in host memory. Return other values unchanged."""
    if not isinstance(value, TensorDict) or len(value.batch_size) != 1:
        return value
    packed = Packed(rows(value), {}, {}, {}, {})
    for name, values in _columns(value).items():
        if is_meta(values):
            packed.meta[name] = values.data
        elif not isinstance(values, torch.Tensor):
            packed.lists[name] = values.tolist()
        elif values.is_nested:
            each = values.detach().cpu().unbind()
            data = np.concatenate([np.empty(0, np.uint8), *map(bytes_of, each)])
            packed.nested[name] = Ragged.of(values), [row.shape for row in each], data
        else:
            packed.tensors[name] = values.dtype, values.shape, bytes_of(values.detach().cpu())
    return packed


def unpack(value: Any) -> Any:
    """Return the argument of `pack`, in writable memory."""
    if not isinstance(value, Packed):
        return value
    columns: dict[str, Any] = {name: column(values) for name, values in value.lists.items()}
    for name, (dtype, shape, data) in value.tensors.items():
        columns[name] = tensor_of(data.copy(), dtype).reshape(shape)
    for name, (kind, shapes, data) in value.nested.items():
        flat = tensor_of(data.copy(), kind.dtype).split([shape.numel() for shape in shapes])
        columns[name] = kind.join([row.reshape(shape) for row, shape in zip(flat, shapes, strict=True)])
    columns |= {name: meta(found) for name, found in value.meta.items()}
    return TensorDict(columns, [value.rows])


def _columns(batch: TensorDict) -> dict[str, Any]:
    """Return the columns and the meta information by name. Raise `ConfigError` for other values."""
    count, found = rows(batch), dict(batch.items())
    for name, values in found.items():
        check(name, values, count)
    return found


def _each(batch: TensorDict, count: int, change: Callable[[Any], Any]) -> TensorDict:
    return TensorDict({name: change(values) for name, values in _columns(batch).items()}, [count])
