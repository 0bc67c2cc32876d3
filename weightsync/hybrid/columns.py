"""The columns of a batch. They are of four kinds, and each function here takes a column of any kind.

    torch.Tensor            a row for each index of the first dimension
    nested torch.Tensor     rows of different sizes, jagged or strided
    NonTensorStack          rows are any values
    NonTensorData           meta information: one value for the whole batch, and no rows

A jagged tensor keeps its ragged dimension, even if all rows have one size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, is_non_tensor
from tensordict.tensorclass import NonTensorStack

from weightsync.errors import ConfigError

_LONGEST = 60
"""Number of a value's characters in an error."""


def check(name: str, values: Any, count: int) -> None:
    """Raise `ConfigError` for a column of another kind, in a batch of `count` rows."""
    if not isinstance(values, torch.Tensor) and not is_non_tensor(values):
        raise ConfigError(f"the column {name!r} is a {type(values).__name__}; expected a tensor or column(values)")
    if isinstance(values, torch.Tensor) and not values.is_nested and values.layout is not torch.strided:
        raise ConfigError(f"the column {name!r} is a tensor of the layout {values.layout}: make it dense first")
    # verl's users have such an array in `non_tensor_batch`. `batch[name] = array` would make it meta information.
    value = values.data if is_meta(values) else None
    if isinstance(value, np.ndarray) and value.dtype.kind in "OSU" and value.shape[:1] == (count,):
        raise ConfigError(
            f"{name!r} is an array of {count} objects in a batch of {count} rows. Give column(array) for a column, "
            "and a list for meta information of the whole batch"
        )


def is_meta(values: Any) -> bool:
    """Return whether a value is meta information: one value for the whole batch."""
    return is_non_tensor(values) and not isinstance(values, NonTensorStack)


def meta(value: Any) -> Any:
    """Return meta information with this value."""
    return NonTensorData(value)


def span(values: Any, start: int, end: int) -> Any:
    """Return these rows of a column. They share its memory if the kind of column allows it."""
    if is_meta(values):
        return meta(values.data)
    if isinstance(values, torch.Tensor) and values.is_nested:
        return Ragged.of(values).join(values.unbind()[start:end])
    return values[start:end]


def pick(values: Any, order: Sequence[int]) -> Any:
    """Return these rows of a column, in this order."""
    if is_meta(values):
        return meta(values.data)
    if isinstance(values, torch.Tensor) and values.is_nested:
        rows = values.unbind()
        return Ragged.of(values).join([rows[row] for row in order])
    return values[torch.tensor(order, dtype=torch.long)]


def join(name: str, parts: Sequence[Any]) -> Any:
    """Return the rows of all parts of a column, in order. Raise `ConfigError` for parts that do not fit together."""
    if all(map(is_meta, parts)):
        for part in parts[1:]:
            if not is_equal(parts[0], part):
                raise ConfigError(
                    f"{name!r} is meta information of whole batches, and its values differ: {_shown(parts[0].data)} "
                    f"and {_shown(part.data)}. Make it a column, or give all batches one value"
                )
        return meta(parts[0].data)
    parts = [part for part in parts if not _is_formless(part)] or parts[:1]
    sizes = dict.fromkeys(map(_sizes, parts))
    if len(sizes) > 1:
        raise ConfigError(f"the rows of the column {name!r} are of the sizes {', '.join(sizes)}: pad them alike first")
    if not isinstance(parts[0], torch.Tensor):
        return NonTensorStack(*(value for part in parts for value in part.tolist()))
    if parts[0].is_nested:
        return Ragged.of(parts[0]).join([row for part in parts for row in part.unbind()])
    return _join_dense(parts)


def is_equal(one: Any, other: Any) -> bool:
    """Return whether two columns have the same kind, rows and values. NaN equals NaN."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.is_nested or other.is_nested:
            return _sizes(one) == _sizes(other) and _is_same(list(one.unbind()), list(other.unbind()))
        return _is_same(one, other)
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor) or is_meta(one) != is_meta(other):
        return False
    return _is_same(one.data, other.data) if is_meta(one) else _is_same(one.tolist(), other.tolist())


@dataclass(frozen=True)
class Ragged:
    """The common properties of a nested tensor's rows.

    dim: the ragged dimension of the whole tensor. None: the tensor is strided.
    sizes: the sizes of a row, with 0 for the ragged dimension.
    """

    dim: int | None
    sizes: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, values: Any) -> Ragged:
        if values.layout is not torch.jagged:
            return cls(None, (0,) * (values.dim() - 1), values.dtype)
        dim = int(values._ragged_idx)
        sizes = tuple(values.values().shape)
        return cls(dim, (*sizes[: dim - 1], 0, *sizes[dim:]), values.dtype)

    def join(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the tensor with these rows."""
        if self.dim is None and not rows:
            return torch.nested.nested_tensor([], dtype=self.dtype)
        if self.dim is None:
            return torch.nested.as_nested_tensor(list(rows))
        at = self.dim - 1
        values = torch.cat(tuple(rows), at) if rows else torch.empty(self.sizes, dtype=self.dtype)
        offsets = torch.tensor([0, *accumulate(row.shape[at] for row in rows)], device=values.device)
        return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=self.dim)


def bytes_of(tensor: torch.Tensor) -> Any:
    """Return a tensor's bytes as an array. The array shares the memory of a contiguous tensor."""
    flat = tensor.reshape(-1)
    if flat.stride(0) != 1:  # one column of a table
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy()


def tensor_of(data: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the 1-D tensor with these bytes."""
    # `view` of an empty array fails: its stride fits no other dtype.
    return torch.from_numpy(data).view(dtype) if data.size else torch.empty(0, dtype=dtype)


def _join_dense(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    first = parts[0]
    kinds = {(part.dtype, part.shape[1:], part.device.type, part.requires_grad) for part in parts}
    if kinds != {(first.dtype, first.shape[1:], "cpu", False)}:
        return torch.cat(tuple(parts))
    # numpy copies on one thread. torch's threads would spin on the workers' cores after their part of a copy.
    joined = tensor_of(np.concatenate([bytes_of(part) for part in parts]), first.dtype)
    return joined.reshape(sum(len(part) for part in parts), *first.shape[1:])


def _sizes(values: Any) -> str:
    """Return the properties that joined columns must share, as text for an error."""
    if is_meta(values):
        return "meta information"
    if not isinstance(values, torch.Tensor):
        return "no tensors"
    if not values.is_nested:
        return str(list(values.shape[1:]))
    kind = Ragged.of(values)
    sizes = ["*" if kind.dim in (None, at) else str(size) for at, size in enumerate(kind.sizes, 1)]
    return f"[{', '.join(sizes)}] ({'strided' if kind.dim is None else 'jagged'}, {kind.dtype})"


def _is_formless(values: Any) -> bool:
    """Return whether a value is a strided nested tensor without rows. Such a tensor has lost its rows' sizes."""
    return isinstance(values, torch.Tensor) and values.is_nested and values.dim() == 1


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two values are equal, with all their items."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        other = other.to(one.device)
        return bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and _is_same(one.tolist(), other.tolist())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return bool(one == other) or (one != one and other != other)
