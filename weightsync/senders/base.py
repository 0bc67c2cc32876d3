"""What every trainer backend answers: which tensors there are, under their checkpoint names, and where their bytes lie.

`manifest` and `pieces` move no bytes and talk to no other process, but for those of a bridge's export. Only what must
be computed from the tensors of several ranks (adapters, scales, a bridge's export) is fetched, bucket by bucket, in
`gather`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Protocol, TypeAlias

from torch import nn

from weightsync.errors import ConfigError
from weightsync.layout import itemsize

if TYPE_CHECKING:
    import torch

    from weightsync.layout import Box, Manifest, TensorMeta

Model: TypeAlias = nn.Module | Sequence[nn.Module]
"""What a trainer holds: one module, or the chunks of a pipeline rank in their order."""


def one_module(model: Model) -> nn.Module:
    """The model of a backend that has no chunks. Raises `ConfigError` for several, and for what is no module."""
    if isinstance(model, nn.Module):
        return model
    if isinstance(model, Sequence):
        raise ConfigError(f'push was given {len(model)} modules; only the chunks of backend="megatron" come as several')
    raise ConfigError(f"push takes the model itself, a torch.nn.Module, not its tensors; got a {type(model).__name__}")


@dataclass(frozen=True, slots=True)
class Piece:
    """One rank's region of one tensor: `tensor` is a detached view of the trainer's memory, on CPU or CUDA, whose shape
    is `box.size`. It may be strided. `meta` has the full shape and the dtype that the trainer holds. `trains` is False
    for what training leaves as it is: a parameter that needs no gradient. Buffers count as trained.

    With `compute` the values are not those of `tensor`, which has their shape, dtype and device alone: each push calls
    it for new ones, in memory of its own. Only valid after `Sender.gather`."""

    meta: TensorMeta
    box: Box
    tensor: torch.Tensor
    trains: bool = True
    compute: Callable[[], torch.Tensor] | None = None


class Sender(Protocol):
    """One trainer backend. `manifest` and `pieces` are local, not collective: every rank may call them on its own, at a
    time when no forward or backward is running, and the trainer's pending GPU work need not have finished."""

    def manifest(self, model: Model) -> Manifest:
        """Every tensor that this rank knows of, in the order in which the model exports them: full shapes, the
        trainer's dtypes. A pipeline stage knows its own; the ranks' manifests together are what a push delivers.
        Raises `UnsupportedError` that lists all tensors it cannot read."""

    def pieces(self, model: Model) -> list[Piece]:
        """What this rank holds, in the manifest's order; may be empty. The ranks' pieces together cover each tensor;
        replicas (HSDP, DDP, buffers) each report their own. The views stay valid until the trainer moves its storages.
        Raises as `manifest` does."""

    def gather(self, names: Sequence[str]) -> None:
        """Collective: every trainer rank calls this, at each push, for one bucket after the other. Fetch from other
        ranks what the `compute` of these tensors' pieces needs; nothing, where they have none. What an earlier call
        has fetched may be let go."""

    def close(self) -> None:
        """Let go of the model. May be used again afterwards."""


UNQUANTIZED = (
    "*embed*",
    "*.wte.weight",
    "*.wpe.weight",
    "*lm_head.weight",
    "*.gate.weight",
    "*_gate.weight",
    "*router*",
)
"""Two-dimensional weights that quantised checkpoints leave as they are: embeddings, output layers and routers."""


@dataclass(frozen=True)
class TensorPolicy:
    """Which tensors travel, and as what. Patterns are shell patterns on checkpoint names (`*.mlp.gate.weight`), case
    sensitive; `*` matches dots too.

    `exclude`: never pushed. `buffers`: whether persistent buffers travel; the others never do. `dtypes`: pattern to
    torch's dtype name on the wire, in place of the narrower of the trainer's and the engine's; the first that matches
    counts.
    Raises `ConfigError` for a dtype that does not exist.

    `unquantized`: with `WeightSync(quantize=...)`, what travels as it is of the two-dimensional tensors that are called
    `....weight`; all others of these are quantised. It must be what the engine's checkpoint has left as it is.

    `frozen`: sent by the first push and not again, as long as this `WeightSync` goes on and no push fails; with
    `only_trained` parameters that need no gradient (`requires_grad` is False, and no adapter is on them) are frozen as
    well. Nobody looks whether a frozen tensor has changed after all: its new values reach no engine. What shares an
    engine parameter with something that trains, or a module that must be loaded whole, still travels. Engines must not
    lose or change weights on their own in between (vLLM's sleep at level 2 does): close the `WeightSync` then.
    """

    exclude: tuple[str, ...] = ()
    buffers: bool = True
    frozen: tuple[str, ...] = ()
    only_trained: bool = False
    dtypes: Mapping[str, str] = field(default_factory=dict)
    unquantized: tuple[str, ...] = UNQUANTIZED

    def __post_init__(self) -> None:
        for pattern, dtype in self.dtypes.items():
            try:
                itemsize(dtype)
            except ConfigError as error:
                raise ConfigError(f"dtypes[{pattern!r}]: {error.message}") from None

    def excludes(self, name: str) -> bool:
        """Whether `name` never travels."""
        return any(fnmatchcase(name, pattern) for pattern in self.exclude)

    def freezes(self, name: str, trains: bool) -> bool:
        """Whether `name`, which `trains` or not, is sent by the first push alone."""
        return (self.only_trained and not trains) or any(fnmatchcase(name, pattern) for pattern in self.frozen)

    def wire_dtype(self, name: str) -> str | None:
        """The dtype that `name` is declared to travel in; None where it is left to what trainer and engine have."""
        return next((dtype for pattern, dtype in self.dtypes.items() if fnmatchcase(name, pattern)), None)

    def quantizes(self, name: str) -> bool:
        """Whether `name`, if it has two dimensions, is a weight to be quantised where weights are."""
        return name.endswith(".weight") and not any(fnmatchcase(name, pattern) for pattern in self.unquantized)
