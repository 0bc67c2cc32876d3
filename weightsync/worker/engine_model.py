"""What the receiver needs of the engine that it runs in. The `vllm` package implements it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from weightsync.kernels.rows import AllReduceMax

DRAFTER = "drafter"
"""The name of the drafter in the trees of an engine's model, live and never loaded."""


@dataclass(frozen=True)
class WorkerIdentity:
    """Which worker of its engine this is: number `rank` of `world`. `name` is for people ("tp=1 pp=0 dp=0")."""

    rank: int
    world: int
    name: str


class EngineModel(Protocol):
    """One engine worker's model, and the engine's own functions around it.

    `dtype` is that of the model's weights and activations, where they are not quantised.
    """

    identity: WorkerIdentity
    device: torch.device
    dtype: torch.dtype
    all_reduce_max: AllReduceMax | None
    """Among the workers that have parts of the same modules. None where this worker is the only one."""
    unreachable_params: Sequence[str]
    """Parameters that no push reaches: those of a drafter that is not in `pristine()`."""

    @property
    def live(self) -> nn.Module:
        """The running model."""

    def pristine(self) -> nn.Module:
        """Return a copy of the model as it is before any weight is loaded, on the `meta` device. Made once.

        A child `DRAFTER` is the model that drafts tokens, with a loader of its own.
        Modules that the engine shares between the two are shared here too.
        """

    def load_weights(self, model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """Apply the engine's own loader to `model`, which is `pristine()` or its drafter.

        The tensors of a drafter that has a checkpoint of its own are named `drafter.` and their names there.
        """

    def passes_over(self, name: str) -> bool:
        """Return whether the engine's loader has a rule that leaves a tensor of this name out."""

    def parts(self, module: nn.Module) -> list[Any]:
        """Return the objects that hold the post-processed state of `module`."""

    def with_missing_towers(self, model: nn.Module) -> AbstractContextManager[list[str]]:
        """Give `model`, a never loaded copy, the towers that the engine was started without, until the context ends.

        A vision tower is one where no prompt may have images. The context's value is the paths of all towers.
        """

    def post_process(self, module: nn.Module) -> None:
        """Bring a freshly loaded module into its kernel's format, as the engine does once at its start."""

    def find_lost(self, filled: Collection[str]) -> None:
        """Find the values of what the engine's start has overwritten, and neither a checkpoint nor a push fills.

        `filled` are the tensors that a push fills, by name. Raises `UnsupportedError` where a value is not to be found.
        """

    def restore_lost(self) -> None:
        """Give what `find_lost` has found the values that a cold start gives it, once."""

    def is_asleep(self) -> bool:
        """Return whether the memory of the parameters is given back, so that it must be woken before it is written."""

    def guard_forward(self, check: Callable[[], None]) -> None:
        """Call `check` before the model answers anything, from now on. What it raises ends the answer."""

    def refresh_derived_state(self) -> bool:
        """Update what the engine derives from several modules once all are loaded. Return whether there was any."""

    def clear_kv_cache(self) -> bool:
        """Clear what requests have cached where it is not finite, and return whether it was.

        All requests compute theirs anew after a push. NaN of earlier weights would spoil them from blocks that they
        fill in part.
        """

    def end_process(self, reason: str) -> None:
        """End this worker, whose thread waits for ever, and the engine with it. Say why in the log.

        Do nothing but that in a process that is not the engine's own.
        """

    def scope(self) -> AbstractContextManager[Any]:
        """Enter the engine's configuration and the worker's device. Every use of this object happens inside."""
