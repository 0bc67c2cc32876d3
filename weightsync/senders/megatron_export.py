"""The sender for Megatron models that a bridge exports: Megatron-Bridge, mbridge, or anything with their interface.

A bridge gathers whole tensors, one after the other, by collectives of the training job. So that the model never is in
memory as a whole, an export runs along with the push: it is advanced until it has given all of the next bucket, and
rank 0 lets go of the bucket before. Every rank advances it alike; rank 0 alone keeps what comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from weightsync.errors import ConfigError, ManifestError, UnsupportedError
from weightsync.layout import Box, Manifest, TensorMeta
from weightsync.senders.base import Model, Piece, TensorPolicy
from weightsync.senders.tensors import dtype_name


class ExportSender:
    """Tensors that a bridge exports from a Megatron model. See `Sender`; unlike others, `manifest` is collective, and
    the first one for a model runs an export for the names and shapes alone.

    bridge: an object with `export_hf_weights(chunks, cpu=False, show_progress=False)`, as Megatron-Bridge's
        `AutoBridge`, or `export_weights(chunks)`, as mbridge's `Bridge`. Either gives, on every rank and in the same
        order each time, pairs of a checkpoint name and a whole tensor.

    Memory on rank 0: one bucket, and what the bridge exports before the rest of its bucket. The training job's own
    collectives carry the tensors, so a rank that fails in the middle of an export is noticed by the others only when
    these time out. Raises `ConfigError` for an object without either interface, and for a policy that freezes tensors.
    """

    def __init__(self, policy: TensorPolicy, bridge: Any) -> None:
        if not (hasattr(bridge, "export_hf_weights") or hasattr(bridge, "export_weights")):
            raise ConfigError(
                f"bridge={bridge!r} is neither the name of a family nor an object with `export_hf_weights` "
                "(Megatron-Bridge) or `export_weights` (mbridge)"
            )
        if policy.frozen or policy.only_trained:
            raise ConfigError("with a bridge that exports whole tensors all of them are gathered anyway: freeze none")
        self.policy = policy
        self._bridge = bridge
        self._chunks: list[nn.Module] = []
        self._known: dict[str, Piece] = {}  # what an export gives, in its order
        self._export: Iterator[tuple[str, torch.Tensor]] | None = None
        self._awaited: set[str] = set()  # what the export under way has still to give
        self._bucket: tuple[str, ...] = ()
        self._arrived: dict[str, torch.Tensor] = {}

    def manifest(self, model: Model) -> Manifest:
        chunks = list(model) if isinstance(model, Sequence) else [model]
        if not self._known or [id(chunk) for chunk in chunks] != [id(chunk) for chunk in self._chunks]:
            self._chunks, self._known = chunks, {}
            placeholders: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
            for name, tensor in self._run():
                if name in self._known:
                    raise ManifestError(f"the bridge exports {name} twice", mismatched={name: "exported twice"})
                one = placeholders.setdefault((tensor.dtype, tensor.device), tensor.new_zeros(()))
                meta = _meta(name, tensor)
                take = partial(self._arrived.__getitem__, name)
                self._known[name] = Piece(meta, Box.full(meta.shape), one.expand(meta.shape), compute=take)
        return Manifest(tuple(piece.meta for piece in self._known.values()))

    def pieces(self, model: Model) -> list[Piece]:
        self.manifest(model)
        self._export, self._bucket = None, ()
        self._arrived.clear()
        return list(self._known.values()) if _rank() == 0 else []

    def close(self) -> None:
        self._chunks, self._known, self._export = [], {}, None
        self._arrived.clear()

    def gather(self, names: Sequence[str]) -> None:
        if self._export is None:
            self._export = self._run()
            self._awaited = set(self._known)
        for name in self._bucket:
            self._arrived.pop(name, None)
        self._bucket = tuple(names)
        while not self._awaited.isdisjoint(names):
            exported = next(self._export, None)
            if exported is None:
                raise UnsupportedError(f"the bridge's export ended without {min(self._awaited.intersection(names))}")
            name, tensor = exported
            if name not in self._awaited or self._known[name].meta != _meta(name, tensor):
                raise UnsupportedError(
                    f"the bridge exports {name} as {tuple(tensor.shape)} {tensor.dtype}, which is not what it exported "
                    "before; make a new WeightSync when the model has changed"
                )
            self._awaited.remove(name)
            if _rank() == 0:
                self._arrived[name] = tensor

    def _run(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A new export, without what the policy excludes."""
        if hasattr(self._bridge, "export_hf_weights"):
            export = self._bridge.export_hf_weights(self._chunks, cpu=False, show_progress=False)
        else:
            export = self._bridge.export_weights(self._chunks)
        for name, tensor in export:
            if not self.policy.excludes(name):
                yield name, tensor.detach()


def _meta(name: str, tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(name, tuple(tensor.shape), dtype_name(tensor))


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
