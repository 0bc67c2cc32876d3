"""The weight source of a stream: pairs of a checkpoint name and a whole tensor, one pair after the other.

A push advances the stream until it has given all of the next bucket. Rank 0 then frees the bucket before. So the whole
model is never in memory. Tensors of a stream cannot be mapped, and are staged.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, ItemsView, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from weightsync.errors import ConfigError, ManifestError, UnsupportedError
from weightsync.net.ranks import place_among
from weightsync.planning.layout import Box, Manifest, TensorMeta
from weightsync.report import format_bytes
from weightsync.selection import TensorSelection
from weightsync.sources.base import Barrier, Model, Reading, TensorShard, dtype_name, settled, wait_for_copies
from weightsync.sources.declared import declared, has_shards, held_names, is_declared, local_shards, whole_tensors
from weightsync.sources.module import ON_META, readable

logger = logging.getLogger(__name__)

_Arrival = tuple[TensorMeta, torch.Tensor | None]
"""A tensor of the stream. None: this rank's `WeightSource` does not hold it."""


@dataclass(frozen=True)
class StreamBackend:
    """Streams of whole tensors, with options: `WeightSync(StreamBackend(tensors=model.state_dict()), "ipc")`.

    Args:
        tensors: An object with `shape` and `dtype` for each name, in the stream's order, such as a tensor on the meta
            device. Another tensor in a push is a `ManifestError`. None: learned from the first stream. That stream is
            read twice, or kept in CPU memory if it is an iterator. Every rank gives the same.
    """

    tensors: Mapping[str, Any] | None = None

    def open(self, selection: TensorSelection, ranks: Any) -> StreamSource:
        """Return the source. Raises `ConfigError` for a selection without effect."""
        return StreamSource(selection, self.tensors, ranks=ranks)


@dataclass
class _Run:
    """One push's way through its stream.

    coming: the tensors still to come. None: this rank's stream gives nothing.
    at: the number of known tensors that have come.
    bucket: the names of the last `gather`, whose tensors have `arrived`.
    """

    coming: Iterator[_Arrival] | None = None
    at: int = 0
    bucket: tuple[str, ...] = ()
    arrived: dict[str, torch.Tensor] = field(default_factory=dict)


class StreamSource:
    """The tensors of a stream. See `ShardSource`. Its `model` is the stream of one push.

    `tensors` are as for `StreamBackend`, and `ranks` as for `WeightSync`.

    Rank 0's tensors travel. Another rank gives the same stream or None. Its stream is advanced with rank 0's, and its
    tensors are dropped. vLLM's `WeightSource` is a stream too. Each rank gives its own, and the tensors or shards that
    it holds travel.

    Streams of lists and dicts may differ from push to push. Any other stream must give the same names, shapes and
    dtypes as the first. `read` finds a first tensor that differs, and `gather` any later one. A tensor must keep its
    values until it has been sent. Raises `ConfigError` for a selection without effect.
    """

    def __init__(self, selection: TensorSelection, tensors: Mapping[str, Any] | None = None, ranks: Any = None) -> None:
        selection.refuse("a stream, which gives its own tensors in each push", "frozen", "only_trained", "buffers")
        self.selection = selection
        self._ranks = ranks
        self._given = [
            TensorMeta(name, tuple(each.shape), dtype_name(each))
            for name, each in (tensors or {}).items()
            if not selection.excludes(name)
        ]
        self.close()

    def close(self) -> None:
        self._known: list[TensorMeta] = []
        self._places: dict[str, int] = {}
        self._held: Collection[str] = ()
        self._reading: Reading | None = None
        self._device: torch.device | None = None
        self._kept: deque[_Arrival] | None = None
        self._run = _Run()

    def read(self, model: Model) -> Reading:
        self._run = _Run()
        if has_shards(model):
            reading = settled(local_shards(model, self._rank(), self.selection))
            self._know([*reading.manifest], ())
            return reading
        if is_declared(model):
            known = [meta for meta in declared(model) if not self.selection.excludes(meta.name)]
            self._know(known, held_names(model, self._rank()))
        else:
            self._learn(model)
        coming = self._pairs(model) if self._kept is None else _all_of(self._kept)
        self._kept = None
        first = next(coming, None)
        if first is not None:
            self._check(first[0], 0)
            self._device = self._device or _device_of(first[1])
            self._run.coming = _all_of(deque([first]), coming)
        elif self._held:
            raise ManifestError("the stream gives no tensors", missing=list(self._places))
        if self._reading is None:
            self._reading = Reading(Manifest(tuple(self._known)), self._stand_ins())
        return self._reading

    def gather(self, names: Sequence[str], barrier: Barrier) -> None:
        run = self._run
        for name in run.bucket:
            run.arrived.pop(name, None)
        run.bucket = tuple(names)
        barrier()
        if run.coming is None:
            return
        # Without names the push needs no more: run the stream to its end.
        end = 1 + (max(self._places.get(name, -1) for name in names) if names else len(self._known))
        while run.at < end:
            arrival = next(run.coming, None)
            self._check(None if arrival is None else arrival[0], run.at)
            if arrival is None:
                return
            run.at += 1
            if names and arrival[1] is not None and arrival[0].name in self._held:
                run.arrived[arrival[0].name] = arrival[1]

    def _rank(self) -> int:
        return place_among(self._ranks)[0]

    def _stand_ins(self) -> list[TensorShard]:
        """Return the shards of the tensors that this rank holds. `gather` fetches their values."""
        empty = {
            meta.dtype: torch.empty((), dtype=getattr(torch, meta.dtype), device=self._device) for meta in self._known
        }
        held = [meta for meta in self._known if meta.name in self._held]
        views = [(meta, Box.full(meta.shape), empty[meta.dtype].expand(meta.shape)) for meta in held]
        return [TensorShard(*view, compute=partial(self._value, view[0].name)) for view in views]

    def _value(self, name: str) -> torch.Tensor:
        return self._run.arrived[name]

    def _check(self, meta: TensorMeta | None, at: int) -> None:
        """Raise `ManifestError` if tensor number `at` of the stream is not `meta`. None: the stream has ended."""
        _compare(meta, self._known[at] if at < len(self._known) else None, () if meta else self._known[at:])

    def _learn(self, model: Model) -> None:
        """Read the stream's names and shapes if they are unknown or may have changed."""
        is_listed = isinstance(model, (Mapping, Sequence, ItemsView))
        if self._reading is not None and not is_listed:
            return
        known = {} if is_listed else {meta.name: meta for meta in self._given}
        if not known:
            # Reading an iterator for its names uses it up, on every rank alike.
            kept: deque[_Arrival] | None = deque() if isinstance(model, Iterator) else None
            for meta, tensor in self._pairs(model):
                if meta.name in known:
                    raise ManifestError(f"the stream gives {meta.name} twice", mismatched={meta.name: "given twice"})
                known[meta.name] = meta
                self._device = self._device or _device_of(tensor)
                if kept is not None and tensor is not None and self._rank() == 0:
                    kept.append((meta, tensor.to("cpu", copy=True)))
            if kept:
                logger.warning(
                    "the first push keeps %s of tensors in CPU memory: an iterator can be read once. Push a function "
                    "that returns an iterable, or describe the tensors in StreamBackend(tensors=...)",
                    format_bytes(sum(meta.nbytes for meta in known.values())),
                )
            self._kept = kept
        self._know([*known.values()], [*known] if self._rank() == 0 else ())

    def _know(self, known: list[TensorMeta], held: Collection[str]) -> None:
        """Take the stream's tensors, and the names that this rank gives."""
        due = self._given if known or self._rank() == 0 else []  # other ranks may give nothing
        for found, expected in zip_longest(known, due) if due else ():
            _compare(found, expected, due[len(known) :])
        if known != self._known or held != self._held:
            self._known, self._held, self._reading = known, held, None
            self._places = {meta.name: at for at, meta in enumerate(known)}

    def _pairs(self, stream: Any) -> Iterator[_Arrival]:
        """Yield the tensors of a stream, without excluded ones. Raise for anything but a whole tensor."""
        if isinstance(stream, nn.Module):
            raise ConfigError(
                'backend="stream" takes (name, tensor) pairs, got a module: push model.state_dict(), or choose its '
                'trainer\'s backend, such as "fsdp"'
            )
        if declares := is_declared(stream):
            given: Any = whole_tensors(stream, self._rank())
        else:
            given = stream() if callable(stream) else () if stream is None else stream
        for pair in given.items() if isinstance(given, Mapping) else given:
            match pair:
                case (str(name), torch.Tensor() as tensor):
                    if not self.selection.excludes(name):
                        wait_for_copies(tensor.is_cuda)
                        yield _arrival(name, tensor)
                case (str(name), None) if declares and name not in self._held:
                    if (at := self._places.get(name)) is not None:
                        yield self._known[at], None
                case _:
                    raise ConfigError(f"the stream gives a {type(pair).__name__}, expected pairs of name and tensor")


def _device_of(tensor: torch.Tensor | None) -> torch.device | None:
    """Return a tensor's device. None, for a tensor of other ranks, gives this rank's GPU, if there is one."""
    if tensor is not None:
        return tensor.device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


def _arrival(name: str, tensor: torch.Tensor) -> _Arrival:
    if hasattr(tensor, "full_tensor"):
        raise UnsupportedError(f"the stream gives {name} as a DTensor; give whole tensors, as `full_tensor()` returns")
    try:
        if tensor.is_meta:
            raise UnsupportedError(ON_META)
        return TensorMeta(name, tuple(tensor.shape), dtype_name(tensor)), readable(tensor)
    except UnsupportedError as error:
        raise UnsupportedError(f"the stream gives {name}: {error.message}", tensors={name: error.message}) from None


def _all_of(kept: deque[_Arrival], coming: Iterable[_Arrival] = ()) -> Iterator[_Arrival]:
    """Yield the kept tensors and free each, then the coming ones."""
    while kept:
        yield kept.popleft()
    yield from coming


def _compare(found: TensorMeta | None, expected: TensorMeta | None, left: Sequence[TensorMeta]) -> None:
    """Raise `ManifestError` if a tensor of the stream is not the expected one. None: there is no more.

    left: the tensors behind the stream's end.
    """
    if found != expected:
        told = [f"{meta.name} as {meta.shape} {meta.dtype}" if meta else "nothing more" for meta in (found, expected)]
        advice = "Give the same tensors in the same order at each push and in StreamBackend, or make a new WeightSync"
        text = f"the stream gives {told[0]}, expected {told[1]}. {advice}"
        wrong = {found.name: told[0]} if found else {}
        raise ManifestError(text, missing=[each.name for each in left], mismatched=wrong)
