"""What the receiver needs of the engine that it runs in. The `vllm` room implements it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from weightsync.kernels.rows import Share


@dataclass(frozen=True)
class WorkerIdentity:
    """Which worker of its engine this is: number `rank` of `world`; `name` is for people ("tp=1 pp=0 dp=0")."""

    rank: int
    world: int
    name: str


class ModelHost(Protocol):
    """One engine worker's model, and the engine's own functions around it. `dtype` is that of its weights and
    activations, where they are not quantised."""

    identity: WorkerIdentity
    device: torch.device
    dtype: torch.dtype
    share: Share | None
    """Among the workers that have parts of the same modules; None where there is only this one."""

    @property
    def live(self) -> nn.Module:
        """The running model."""

    def pristine(self) -> nn.Module:
        """A copy of the model as it is before any weight is loaded, on the `meta` device; made once."""

    def load_weights(self, model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """The engine's own loader, applied to `model`."""

    def parts(self, module: nn.Module) -> list[Any]:
        """The objects that hold `module`'s post-processed state."""

    def post_process(self, module: nn.Module) -> None:
        """What the engine does to a freshly loaded module; nothing, where it does nothing."""

    def refresh(self) -> bool:
        """Bring up to date whatever the engine derives from several modules once all are loaded; whether there was
        any."""

    def scope(self) -> AbstractContextManager[Any]:
        """Every use of this object happens inside: the engine's configuration, the worker's device."""
