"""Dispatch modes: each turns a call of a group into calls of its workers, and their results into one result.

    ONE_TO_ALL   the same arguments to every rank                     a list of all results
    ALL_TO_ALL   each argument is a list with one value for each rank   a list of all results
    DP           batches are split over data-parallel ranks            the concatenated batch
    DP_PADDED    as DP, with rows repeated so that all parts are equal  the concatenated batch, without these rows
    RANK_ZERO    to rank 0 alone                                       its result

With `DP`, all ranks of a model-parallel group get the same part. One of them gives its result: in Megatron's terms the
first tensor-parallel rank of the last pipeline stage. If the results are not batches, `DP` returns a list with one
result of each data-parallel rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

from tensordict import TensorDict

from weightsync.errors import ConfigError
from weightsync.hybrid.batch import concat, cut, is_batch, pad, rows, split

Function = TypeVar("Function", bound=Callable[..., Any])
_ATTRIBUTE = "_weightsync_dispatch"


class Place(NamedTuple):
    """A rank's data-parallel rank, and whether its results count for its model-parallel group.

    The other ranks are for modes of your own. The built-in modes do not read them.
    """

    data_parallel_rank: int
    collects: bool
    tensor_parallel_rank: int = 0
    pipeline_parallel_rank: int = 0


class Call(NamedTuple):
    """The arguments of one rank's call.

    rows: The first rows of the result that count. The rest answers rows of padding. None: all rows count.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: int | None = None


@dataclass(frozen=True)
class Layout:
    """The places of all ranks of a group."""

    places: tuple[Place, ...]

    def __post_init__(self) -> None:
        collecting = sorted(place.data_parallel_rank for place in self.places if place.collects)
        if collecting != sorted({place.data_parallel_rank for place in self.places}) or collecting != list(
            range(len(collecting))
        ):
            raise ConfigError(
                f"the workers' places are {[tuple(place) for place in self.places]}; expected data-parallel ranks "
                "from 0 on, each with one collecting rank: correct Worker.place"
            )

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.places)

    @property
    def data_parallel_size(self) -> int:
        """Number of data-parallel ranks."""
        return 1 + max(place.data_parallel_rank for place in self.places)


@dataclass(frozen=True)
class Dispatch:
    """A dispatch mode. Make your own with `Dispatch(split, collect)`, two pure functions.

    `split` runs at the controller, and raises before any rank is called. For a call with a `CallFuture` among its
    arguments, `split` runs in each rank. `collect` runs in the process that takes the result.

    Attributes:
        split: Takes the layout and the call of the group. Returns one `Call` for each rank, or None to leave a rank
            out.
        collect: Takes the layout and the results of all ranks, with None for ranks left out. Returns the result of the
            group.
    """

    split: Callable[[Layout, Call], Sequence[Call | None]]
    collect: Callable[[Layout, list[Any]], Any]

    ONE_TO_ALL: ClassVar[Dispatch]
    ALL_TO_ALL: ClassVar[Dispatch]
    DP: ClassVar[Dispatch]
    DP_PADDED: ClassVar[Dispatch]
    RANK_ZERO: ClassVar[Dispatch]


def register(dispatch: Dispatch) -> Callable[[Function], Function]:
    """Mark a method of a `Worker` for its `WorkerGroup`: the group gets a method of this name.

    Args:
        dispatch: The dispatch mode of the group's method.
    """

    def mark(function: Function) -> Function:
        setattr(function, _ATTRIBUTE, dispatch)
        return function

    return mark


def answer(method: Callable[..., Any], call: Call) -> Any:
    """Return a rank's result without the rows of the padding. Raise `ConfigError` if they cannot be found."""
    result = method(*call.args, **call.kwargs)
    if call.rows is None or not isinstance(result, TensorDict):
        return result
    if rows(result) != (given := _rows_of(call)):
        raise ConfigError(
            f"the result of {given} rows has {rows(result)} rows, and the rows of the padding cannot be found. Return "
            "a row for each row, or use Dispatch.DP"
        )
    return cut(result, 0, call.rows)


def dispatch_of(function: Any) -> Dispatch | None:
    """Return the dispatch mode of a registered method, or None."""
    found: Dispatch | None = getattr(function, _ATTRIBUTE, None)
    return found


def _one_to_all(layout: Layout, call: Call) -> list[Call]:
    return [call] * layout.size


def _all_to_all(layout: Layout, call: Call) -> list[Call]:
    for name, value in (*enumerate(call.args), *call.kwargs.items()):
        if not isinstance(value, (list, tuple)) or len(value) != layout.size:
            raise ConfigError(f"argument {name} must be a list with a value for each of the {layout.size} ranks")
    return [
        Call(tuple(value[rank] for value in call.args), {name: value[rank] for name, value in call.kwargs.items()})
        for rank in range(layout.size)
    ]


def _rank_zero(layout: Layout, call: Call) -> list[Call | None]:
    return [call, *[None] * (layout.size - 1)]


def _over_data_parallel(layout: Layout, call: Call) -> list[Call]:
    parts = layout.data_parallel_size
    _rows_of(call)

    def share_out(value: Any) -> list[Any]:
        return split(value, parts) if is_batch(value) else [value] * parts

    args = [share_out(value) for value in call.args]
    kwargs = {name: share_out(value) for name, value in call.kwargs.items()}
    calls = [
        Call(tuple(each[part] for each in args), {name: each[part] for name, each in kwargs.items()})
        for part in range(parts)
    ]
    return [calls[place.data_parallel_rank] for place in layout.places]


def _over_data_parallel_padded(layout: Layout, call: Call) -> list[Call]:
    def fill(value: Any) -> Any:
        return pad(value, layout.data_parallel_size) if is_batch(value) else value

    count = _rows_of(call)
    padded = Call(tuple(map(fill, call.args)), {name: fill(value) for name, value in call.kwargs.items()})
    calls = _over_data_parallel(layout, padded)
    size = _rows_of(calls[0])
    return [
        each._replace(rows=min(max(count - size * place.data_parallel_rank, 0), size)) if place.collects else each
        for place, each in zip(layout.places, calls, strict=True)
    ]


def _all(layout: Layout, results: list[Any]) -> list[Any]:
    return results


def _first(layout: Layout, results: list[Any]) -> Any:
    return results[0]


def _concat(layout: Layout, results: list[Any]) -> Any:
    collected = sorted((place.data_parallel_rank, rank) for rank, place in enumerate(layout.places) if place.collects)
    parts = [results[rank] for _, rank in collected]
    return concat(parts) if all(isinstance(part, TensorDict) for part in parts) else parts


def _rows_of(call: Call) -> int:
    """Return the number of rows of a call's batches. All must have the same number."""
    counts = {rows(value) for value in (*call.args, *call.kwargs.values()) if is_batch(value)}
    if len(counts) != 1:
        found = f"batches of {sorted(counts)} rows" if counts else "no batch"
        raise ConfigError(f"a call split over data-parallel ranks got {found}; expected TensorDicts of one size")
    return counts.pop()


Dispatch.ONE_TO_ALL = Dispatch(_one_to_all, _all)
Dispatch.ALL_TO_ALL = Dispatch(_all_to_all, _all)
Dispatch.DP = Dispatch(_over_data_parallel, _concat)
Dispatch.DP_PADDED = Dispatch(_over_data_parallel_padded, _concat)
Dispatch.RANK_ZERO = Dispatch(_rank_zero, _first)
