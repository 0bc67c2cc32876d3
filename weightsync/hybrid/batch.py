"""Batches: a `TensorDict` whose first dimension is the rows, joined, split and padded without a change of order.

A column is a tensor or, for anything else, a `NonTensorStack` with one value for each row. No function writes into what
it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, is_non_tensor
from tensordict.tensorclass import NonTensorStack

from weightsync.errors import ConfigError


def column(values: Sequence[Any]) -> Any:
    """Return a column of values that are no tensors, one for each row."""
    return NonTensorStack(*values)


def rows(batch: TensorDict) -> int:
    """Return how many rows a batch has. Raises `ConfigError` for a batch without a dimension of rows."""
    if len(batch.batch_size) != 1:
        raise ConfigError(f"a batch has the size {list(batch.batch_size)}; expected one dimension, its rows")
    return int(batch.batch_size[0])


def union(first: TensorDict, *others: TensorDict) -> TensorDict:
    """Return the columns of all batches. Raises `ConfigError` where the numbers of rows or a column's values differ."""
    joined: dict[str, Any] = dict(first.items())
    for other in others:
        if rows(other) != rows(first):
            raise ConfigError(f"batches of {rows(first)} and {rows(other)} rows cannot be joined column by column")
        for name, values in other.items():
            if name in joined and not _equal(joined[name], values):
                raise ConfigError(f"two batches have a column {name!r} with different values: rename one of them")
            joined[name] = values
    return TensorDict(joined, [rows(first)])


def split(batch: TensorDict, parts: int) -> list[TensorDict]:
    """Return `parts` batches in order, whose numbers of rows differ by at most one."""
    if rows(batch) < parts:
        raise ConfigError(
            f"a batch of {rows(batch)} rows cannot be split over {parts} data-parallel ranks, which would leave some "
            "without a row: use Dispatch.DP_PADDED or a larger batch"
        )
    ends = [rows(batch) * part // parts for part in range(parts + 1)]
    return [batch[start:end] for start, end in pairwise(ends)]


def concat(batches: Sequence[TensorDict]) -> TensorDict:
    """Return the rows of all batches, in order.

    Raises `ConfigError` where their columns differ, or the sizes of the rows of one.
    """
    names = [sorted(batch.keys()) for batch in batches]
    if not batches or any(other != names[0] for other in names):
        raise ConfigError(f"batches with the columns {names} cannot be put one below the other")
    found: dict[str, Any] = {}
    for name in names[0]:
        values = [batch.get(name) for batch in batches]
        shapes = dict.fromkeys(each.shape[1:] if isinstance(each, torch.Tensor) else None for each in values)
        if len(shapes) > 1:
            sizes = ", ".join("no tensors" if shape is None else str(list(shape)) for shape in shapes)
            raise ConfigError(f"the rows of the column {name!r} are of the sizes {sizes}: pad them alike first")
        if isinstance(values[0], torch.Tensor):
            found[name] = _joined(values)
        else:
            found[name] = column([value for each in values for value in each.tolist()])
    return TensorDict(found, [sum(map(rows, batches))])


def pad(batch: TensorDict, multiple: int) -> TensorDict:
    """Return the batch with its first rows repeated until their number is a multiple. `batch[:rows]` undoes it."""
    count = rows(batch)
    if not count:
        raise ConfigError("a batch without rows cannot be padded: there is nothing to repeat")
    wanted = -(-count // multiple) * multiple
    return batch if wanted == count else take(batch, [row % count for row in range(wanted)])


def take(batch: TensorDict, order: Sequence[int]) -> TensorDict:
    """Return these rows, in this order. A row may come several times."""
    return batch[torch.tensor(order, dtype=torch.long)]


def balance(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Return which rows each part gets, so that the sizes of all parts are about equal."""
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

    Pickle takes all of the memory that a tensor is a part of, and each value of a `NonTensorStack` by itself. Arrays of
    bytes and lists are what they are.
    """

    rows: int
    tensors: dict[str, tuple[torch.dtype, torch.Size, Any]]
    lists: dict[str, list[Any]]


def pack(value: Any) -> Any:
    """Return a batch as it travels, with tensors of a GPU in host memory, and anything else as it is."""
    if not isinstance(value, TensorDict) or len(value.batch_size) != 1:
        return value
    tensors, lists = {}, {}
    for name, each in value.items():
        if is_non_tensor(each):
            lists[name] = each.tolist()
        elif isinstance(each, torch.Tensor):
            tensors[name] = each.dtype, each.shape, _bytes_of(each.detach().cpu())
        else:
            raise ConfigError(f"the column {name!r} is a {type(each).__name__}; expected a tensor or column(values)")
    return Packed(rows(value), tensors, lists)


def unpack(value: Any) -> Any:
    """Return what was given to `pack`, in memory that may be written into."""
    if not isinstance(value, Packed):
        return value
    columns: dict[str, Any] = {name: column(values) for name, values in value.lists.items()}
    for name, (dtype, shape, data) in value.tensors.items():
        columns[name] = _tensor_of(data.copy(), dtype).reshape(shape)
    return TensorDict(columns, [value.rows])


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    first = parts[0]
    kinds = {(part.dtype, part.shape[1:], part.device.type, part.requires_grad) for part in parts}
    if kinds != {(first.dtype, first.shape[1:], "cpu", False)}:
        return torch.cat(parts)
    # On a CPU torch copies with all threads, and those that have ended their part spin on the cores of the workers.
    joined = _tensor_of(np.concatenate([_bytes_of(part) for part in parts]), first.dtype)
    return joined.reshape(sum(len(part) for part in parts), *first.shape[1:])


def _bytes_of(tensor: torch.Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _tensor_of(data: Any, dtype: torch.dtype) -> torch.Tensor:
    # An empty array has a stride that no other dtype can be read with.
    return torch.from_numpy(data).view(dtype) if data.size else torch.empty(0, dtype=dtype)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return bool(((one == other) | ((one != one) & (other != other))).all())  # NaN is what NaN is
    return type(one) is type(other) and one.tolist() == other.tolist()
