"""The record of the last push. A joining engine gets the same weights under the same version, or an error.

torch counts most writes to a tensor, but none through `.data`. So digests are compared too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from weightsync.errors import DigestError
from weightsync.kernels.digest import WHOLE
from weightsync.kernels.runs import Run, join_runs
from weightsync.net.runtime import submit
from weightsync.sources.base import Model, Reading
from weightsync.sources.module_tree import modules, own_tensors
from weightsync.sources.wrapped_tensors import inner_tensor
from weightsync.transports.proof import MemoryFingerprint


@dataclass(frozen=True)
class Pushed:
    """The last pushed version, its label, and this rank's state `had` at that time. `sample` is the digests' sample."""

    version: int
    label: str | None
    sample: int | None
    had: Any


class TrainerMemory:
    """This rank's memory that determines the bytes of a push.

    It is the memory of the shards. If some shards are computed, it includes all tensors of the model, such as adapter
    factors.

    pushed: the record of the last push. None after a failure.
    catches_up: whether engines have caught up. Digests then cover all bytes, and before that a sample.
    """

    def __init__(self, verify: str) -> None:
        self.catches_up = False
        self._verify = verify
        self._finding: Future[None] | None = None
        self.clear()

    def clear(self) -> None:
        with suppress(Exception):  # of a push that has failed already
            self._await()
        self.pushed: Pushed | None = None
        self._reading: Reading | None = None  # None also if it does not tell whether all tensors hold
        self._settings: Callable[[], object] = tuple
        self._places: list[Any] = []
        self._proof = MemoryFingerprint([])
        self._counted: dict[int, tuple[str, torch.Tensor]] = {}  # by base: views share their base's count of writes
        self._is_on_gpu = False
        self._sample: int | None = None
        self._before: tuple[list[int], Callable[[], list[int] | None] | None] = [], None

    def find(self, model: Model, reading: Reading) -> None:
        """Begin to find the memory of a push, in the background. Call it before the other methods, in each push."""
        self._await()
        if reading is not self._reading:
            self._finding = submit("memory", partial(self._find, model, reading))

    def _await(self) -> None:
        """Wait for the memory. Raise the error of the search."""
        finding, self._finding = self._finding, None
        if finding is not None:
            finding.result()

    def _find(self, model: Model, reading: Reading) -> None:
        self._reading, self._settings = reading, reading.settings
        named = [(shard.meta.name, shard.tensor) for shard in reading.lying]
        runs = reading.runs
        if len(named) < len(reading.shards):  # a computed shard may depend on any tensor of the model
            self._reading = None
            chunks = [model] if isinstance(model, nn.Module) else model if isinstance(model, Sequence) else []
            tensors = [own for chunk in chunks if isinstance(chunk, nn.Module) for own in _tensors(chunk)]
            named += [(f"a tensor of shape {tuple(each.shape)}", each) for each in tensors]
            runs = join_runs([tensor for _, tensor in named])
        found = [tensor for _, tensor in named]
        places = [*map(id, found), *map(torch.Tensor.data_ptr, found), *map(torch.Tensor.stride, found)]
        if places != self._places:
            self._places = places
            counted = [(name, each) for name, each in named if not each.is_inference()]  # the others have no count
            self._counted = {id(each if each._base is None else each._base): (name, each) for name, each in counted}
            self._proof = MemoryFingerprint(_bytes_of(runs))
            self._is_on_gpu = all(tensor.is_cuda for tensor in found)

    def begin(self, version: int) -> None:
        """Record write counts, and begin digests, before a push of `version` reads any tensor.

        Waits for the digests with "full": a later write must not change them.
        """
        self._await()
        whole = self._verify == "full" or self.catches_up
        self._sample = None if self._verify == "none" else WHOLE if whole else version
        # On a GPU also for "sampled": workers on the same GPU would otherwise wait for the digests.
        early = cache(self._begin_digests()) if self._verify == "full" or self._is_on_gpu else None
        if early is not None and self._verify == "full":
            early()
        self._before = self._writes(), early

    def note(self, version: int, label: str | None) -> None:
        """Record a push as `pushed`, after it has read all tensors. May wait for the current streams.

        Raises `DigestError` if a tensor was written since `begin`: engines then have a mixture.
        """
        counted, before = self._before
        writes, digests = self._writes(), (before or self._begin_digests())()
        is_same = self._verify != "full" or digests == self._begin_digests()()
        names = (name for name, _ in self._counted.values())
        changed = [name for name, a, b in zip(names, counted, writes, strict=True) if a != b]
        if self._verify != "none" and (changed or not is_same):
            raise DigestError(
                f"a thread wrote {changed[0] if changed else 'weights through .data'} while a push read it: push "
                "when no thread writes weights"
            )
        self.pushed = Pushed(version, label, self._sample, (self._settings(), writes, digests))

    def _begin_digests(self) -> Callable[[], list[int] | None]:
        """Begin the digests of this push's sample, if it has one. Return a function for them."""
        return (lambda: None) if self._sample is None else self._proof.begin(self._sample)

    def is_as_pushed(self) -> bool:
        """Return whether a push would send the bytes of the last push again."""
        if self.pushed is None:
            return False
        self._await()
        digests = None if self.pushed.sample is None else self._proof.of(self.pushed.sample)
        return bool(self.pushed.had == (self._settings(), self._writes(), digests))

    def _writes(self) -> list[int]:
        """Return torch's count of writes to each tensor."""
        return [tensor._version for _, tensor in self._counted.values()]


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    """Return this rank's part of the model's parameters and buffers."""
    found = [tensor for module in modules(model) for _, tensor in own_tensors(module)]
    # A DTensor has its shard in `_local_tensor`, and a parameter of ZeRO-3 its partition in `ds_tensor`.
    parts = [getattr(each, "_local_tensor", getattr(each, "ds_tensor", each)) for each in found]
    parts = list(map(inner_tensor, parts))
    plain = [part for part in parts if not is_traceable_wrapper_subclass(part) and part.layout == torch.strided]
    return [part for part in plain if not part.is_meta]


def _bytes_of(runs: Sequence[Run]) -> list[list[torch.Tensor]]:
    """Return the bytes of the runs, each once, by device. A tensor with gaps counts as its whole storage."""
    found: dict[torch.device, dict[tuple[int, int], torch.Tensor]] = defaultdict(dict)
    for run, _ in runs:
        if run.is_contiguous():
            data = run.view(torch.uint8)
        else:
            data = torch.empty(0, dtype=torch.uint8, device=run.device).set_(run.untyped_storage())
        found[run.device].setdefault((data.data_ptr(), data.numel()), data)
    return [[*those.values()] for those in found.values()]
