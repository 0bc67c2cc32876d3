"""What every trainer backend answers: which tensors there are, under their checkpoint names, and where their bytes lie.

A sender moves no bytes and talks to no other process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Protocol

from weightsync.errors import ConfigError
from weightsync.layout import itemsize

if TYPE_CHECKING:
    import torch

    from weightsync.layout import Box, Manifest, TensorMeta


@dataclass(frozen=True, slots=True)
class Piece:
    """One rank's region of one tensor: `tensor` is a detached view of the trainer's memory, on CPU or CUDA, whose shape
    is `box.size`. It may be strided. `meta` has the full shape and the dtype that the trainer holds."""

    meta: TensorMeta
    box: Box
    tensor: torch.Tensor


class Sender(Protocol):
    """One trainer backend. Both methods are local, not collective: every rank may call them on its own, at a time when
    no forward or backward is running, and the trainer's pending GPU work need not have finished."""

    def manifest(self, model: torch.nn.Module) -> Manifest:
        """Every tensor that a push delivers, in the order of the unwrapped model's state dict: full shapes, the
        trainer's dtypes, the same on every rank. Raises `UnsupportedError` that lists all tensors it cannot read."""

    def pieces(self, model: torch.nn.Module) -> list[Piece]:
        """What this rank holds, in the manifest's order; may be empty. The ranks' pieces together cover each tensor;
        replicas (HSDP, DDP, buffers) each report their own. The views stay valid until the trainer moves its storages.
        Raises as `manifest` does."""


@dataclass(frozen=True)
class TensorPolicy:
    """Which tensors travel, and as what. Patterns are shell patterns on checkpoint names (`*.mlp.gate.weight`), case
    sensitive; `*` matches dots too.

    `exclude`: never pushed. `buffers`: whether persistent buffers travel; the others never do. `dtypes`: pattern to
    torch's dtype name on the wire, in place of the dtype that the engine holds; the first pattern that matches counts.
    Raises `ConfigError` for a dtype that does not exist.
    """

    exclude: tuple[str, ...] = ()
    buffers: bool = True
    dtypes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for pattern, dtype in self.dtypes.items():
            try:
                itemsize(dtype)
            except ConfigError as error:
                raise ConfigError(f"dtypes[{pattern!r}]: {error.message}") from None

    def excludes(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.exclude)

    def wire_dtype(self, name: str) -> str | None:
        """The dtype that `name` is declared to travel in; None means the one that the engine holds it in."""
        return next((dtype for pattern, dtype in self.dtypes.items() if fnmatchcase(name, pattern)), None)
