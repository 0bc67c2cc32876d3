"""The receiver's interface to an engine. The package `weightsync.vllm` implements it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from weightsync.kernels.rows import AllReduceMax

DRAFTER = "drafter"
"""The name of the drafter in the trees of an engine's model, live and never loaded."""


@dataclass(frozen=True)
class WorkerIdentity:
    """The worker's place in its engine core: number `rank` of `world`. `name` is for people ("tp=1 pp=0 dp=0").

    core: the core's number under data parallelism. None: the engine has one core.
    cores: the number of cores under data parallelism, of one engine or of several.
    kv_role: as in `Hello`.
    """

    rank: int
    world: int
    name: str
    core: int | None = None
    kv_role: str = ""
    cores: int = 1

    def in_engine(self, cores: int) -> WorkerIdentity:
        """Return the worker's place in an engine of this many cores. Their numbers follow each other."""
        if self.core is None:
            return self
        return replace(self, rank=self.core % cores * self.world + self.rank, world=cores * self.world)


def largest_of_all(numbers: Sequence[float], all_reduce_max: AllReduceMax | None, device: torch.device) -> list[float]:
    """Return the largest of all workers' numbers in each place. Collective, unless there are no numbers."""
    if all_reduce_max is None or not numbers:
        return [*numbers]
    found = torch.tensor(numbers, dtype=torch.float32, device=device)
    all_reduce_max(found)
    largest: list[float] = found.tolist()
    return largest


def any_worker(mine: bool, all_reduce_max: AllReduceMax | None, device: torch.device) -> bool:
    """Return whether this is true on any worker. Collective."""
    return largest_of_all([float(mine)], all_reduce_max, device) == [1.0]


class EngineModel(Protocol):
    """One engine worker's model, and the engine's own functions around it.

    dtype: the dtype of the model's unquantised weights and activations.
    """

    identity: WorkerIdentity
    device: torch.device
    dtype: torch.dtype
    all_reduce_max: AllReduceMax | None
    """A reduction among the workers with parts of the same modules. None if this is the only worker."""
    sharing: int
    """The number of these workers."""
    may_discard: bool
    """Whether sleep may discard the memory of parameters, and of tensors made in post-processing."""
    unreachable_params: Sequence[str]
    """The parameters out of reach of any push, such as a drafter's if `pristine()` lacks the drafter."""

    @property
    def live(self) -> nn.Module:
        """The running model."""

    def pristine(self) -> nn.Module:
        """Return a copy of the model as it is before any weight is loaded, on the `meta` device. Made once.

        A child `DRAFTER` is the drafter, the model for draft tokens, with a loader of its own. Modules that the engine
        shares between model and drafter are shared here too.
        """

    def load_weights(self, model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """Apply the engine's own loader to `model`, either `pristine()` or its drafter.

        If the drafter has a checkpoint of its own, its tensors are named `drafter.` and their names there.
        """

    def passes_over(self, name: str) -> bool:
        """Return whether a rule of the engine's loader leaves a tensor of this name out."""

    def parts(self, module: nn.Module) -> list[Any]:
        """Return the objects with the post-processed state of `module`."""

    def with_missing_towers(self, model: nn.Module) -> AbstractContextManager[list[str]]:
        """Give `model`, a never loaded copy, the towers missing from the running engine, until the context ends.

        The engine is started without its vision tower if no prompt may have images. The context's value is the paths of
        all towers.
        """

    def post_process(self, module: nn.Module) -> None:
        """Bring a freshly loaded module into its kernel's format, as the engine does once at its start."""

    def find_lost(self, filled: Collection[str], kept: Sequence[str]) -> None:
        """Find values overwritten by the engine's start and filled by neither a checkpoint nor a push.

        Args:
            filled: Names of the tensors that a push fills.
            kept: Names of the parameters that the trainer leaves to the engine's checkpoint.

        Raises:
            UnsupportedError: A value cannot be found.
        """

    def check_kept(self, kept: Sequence[str]) -> None:
        """Raise `UnsupportedError` if one of these parameters may have lost its value of the engine's start."""

    def restore_lost(self) -> None:
        """Give the tensors of `find_lost`, and constants lost in sleep, the values of a cold start."""

    def is_asleep(self) -> bool:
        """Return whether the memory of the parameters is given back. A write needs the engine awake."""

    def guard_forward(self, check: Callable[[], None]) -> None:
        """Call `check` before the model answers anything, from now on. An exception in it ends the answer."""

    def refresh_derived_state(self) -> bool:
        """Update the state derived from several modules by the engine. Return whether there was any.

        The receiver calls this once all modules are loaded.
        """

    def check_requests(self) -> None:
        """Raise `EngineError` if another engine has yet to take over a request of this engine, or this one of another.

        Keys and values of such a request are of the weights before a push.
        """

    def search_kv_cache(self) -> Callable[[], bool]:
        """Begin to search the requests' cache for numbers that are not finite. Writes nothing.

        Returns a function that clears a cache with such numbers, and returns whether it has. Call it before the next
        step of the engine. All requests compute their values anew after a push. NaN of earlier weights would spoil them
        from blocks that requests fill only in part.
        """

    def end_process(self, reason: str) -> None:
        """End this worker, and with it the engine. A thread of this worker waits for ever. Write the reason to the log.

        In a process that is not the engine's own, only write to the log.
        """

    def scope(self) -> AbstractContextManager[Any]:
        """Enter the engine's configuration and the worker's device. Every use of this object happens inside."""
