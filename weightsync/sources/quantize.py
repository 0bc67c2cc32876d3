"""Weights in 8 bits: a source around another source. It quantises tensors when they are sent.

A linear's weight becomes two tensors, as in checkpoints of compressed-tensors. `....weight` is float8 or int8, and
`....weight_scale` has one float32 number for each row. A row's scale needs the largest magnitude of the whole row. If
no rank cuts rows (FSDP2, Megatron's column-parallel layers), each rank finds it alone. Otherwise (ZeRO-3, FSDP1,
Megatron's row-parallel layers) the ranks find the maxima together, in `gather`. The values equal
`weightsync.kernels.quantize` of the whole weight, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

import torch

from weightsync.errors import UnsupportedError
from weightsync.kernels.quantize import Form, fp8_per_channel, int8_per_channel, row_maxima
from weightsync.planning.layout import Box, Manifest, TensorMeta
from weightsync.selection import TensorSelection
from weightsync.sources.base import Barrier, Model, Reading, ShardSource, SteadySource, TensorShard
from weightsync.sources.edits import stand_in

FORMS = {"fp8": fp8_per_channel, "int8": int8_per_channel}
_FROM = ("bfloat16", "float16", "float32")


class QuantizingSource(SteadySource):
    """The tensors of `source`, with the weights in 8 bits that `selection.quantizes` names. See `ShardSource`.

    form: "fp8" or "int8", both with one scale for each output channel.
    largest: Replaces each of `values` by the largest of any rank's. Every rank calls `largest(values)` alike.

    A float32 weight is rounded to bfloat16 first, as on its way to an engine that quantises itself. So both give the
    same bits. `selection.dtypes` may name another dtype for a weight, float32 too.

    Holds the 8-bit values of one shard at a time, and a strip of float32.
    """

    def __init__(
        self, source: ShardSource, form: str, selection: TensorSelection, largest: Callable[[torch.Tensor], None]
    ) -> None:
        super().__init__(source)
        self._selection = selection
        self._largest = largest
        self._form: Form = FORMS[form]
        self._made: set[str] = set()  # names of scales: `source` does not know them

    def _forget(self) -> None:
        super()._forget()
        self._held: dict[str, dict[Box, TensorShard]] = {}  # shards to quantise, by name of the weight
        self._scales: dict[tuple[str, Box], torch.Tensor] = {}  # of the rows of `_held`, of the last `gather`

    def read(self, model: Model) -> Reading:
        self._scales = {}
        return super().read(model)

    def _derive(self, given: Reading) -> Reading:
        # The stand-ins do not move with the weights. So moved weights give the same addresses.
        return replace(given, manifest=self._manifest(given.manifest), shards=self._shards(given.shards))

    def _manifest(self, given: Manifest) -> Manifest:
        found: list[TensorMeta] = []
        refused: dict[str, str] = {}
        for meta in given:
            if not self._takes(meta):
                found.append(meta)
                continue
            source = self._source_dtype(meta)
            if meta.dtype not in _FROM or source not in _FROM:
                refused[meta.name] = f"{meta.dtype}, to be quantised from {source}"
            weight, scale = self._metas(meta)
            self._made.add(scale.name)
            found += [weight] if self._selection.excludes(scale.name) else [weight, scale]
        if refused:
            lines = "\n".join(f"  {name}: {reason}" for name, reason in refused.items())
            raise UnsupportedError(
                f"{len(refused)} weights cannot be quantised: quantisation takes {', '.join(_FROM)}. Name weights "
                f"that stay as they are in TensorSelection.unquantized:\n{lines}",
                tensors=refused,
            )
        tied = [pair for pair in given.tied if self._selection.quantizes(pair[0]) or not self._takes(given[pair[1]])]
        scales = [(f"{other}_scale", f"{name}_scale") for other, name in tied if self._takes(given[name])]
        tied += [pair for pair in scales if not any(map(self._selection.excludes, pair))]
        return Manifest(tuple(found), tuple(tied))

    def _shards(self, given: Sequence[TensorShard]) -> list[TensorShard]:
        self._held = {}
        found: list[TensorShard] = []
        for meta, held in groupby(given, key=lambda piece: piece.meta):
            if not self._takes(meta):
                found += held
                continue
            weight, scale = self._metas(meta)
            self._held[meta.name] = own = {piece.box: piece for piece in held}
            for box, piece in own.items():
                compute = partial(self._values_of, meta.name, box)
                values = stand_in(self._form.dtype, piece.tensor.device).expand(box.size)
                found.append(TensorShard(weight, box, values, piece.trains, compute))
            for box, piece in own.items():
                # The rank with a row's first element gives its scale. Otherwise two ranks would give it in different
                # boxes.
                if box.start[1] == 0 and not self._selection.excludes(scale.name):
                    rows = Box((box.start[0], 0), (box.size[0], 1))
                    compute = partial(self._scale, meta.name, box)
                    values = stand_in(torch.float32, piece.tensor.device).expand(rows.size)
                    found.append(TensorShard(scale, rows, values, piece.trains, compute))
        return found

    def gather(self, names: Sequence[str], barrier: Barrier) -> None:
        super().gather([name for name in names if name not in self._made], barrier)
        self._scales = {}
        rows = torch.tensor([self._cut_rows(name) for name in names], dtype=torch.int64)
        if names:
            self._largest(rows)
        cut = {name: count for name, count in zip(names, rows.tolist(), strict=True) if count > 0}
        held = [(name, box, piece) for name in cut for box, piece in self._held.get(name, {}).items()]
        device = held[0][2].tensor.device if held else torch.device("cpu")
        maxima = torch.zeros((sum(cut.values()), 1), dtype=torch.float32, device=device)
        # Each (rows, 1), a view of `maxima`.
        of = dict(zip(cut, maxima.split(list(cut.values())), strict=True))
        mine = [(name, box, piece, of[name][box.start[0] : box.start[0] + box.size[0]]) for name, box, piece in held]
        for _, _, piece, at in mine:
            at.copy_(torch.maximum(at, row_maxima(self._read(piece)).to(device)))
        if cut:
            self._largest(maxima)
        self._scales = {(name, box): self._form.scale(at.to(piece.tensor.device)) for name, box, piece, at in mine}

    def _takes(self, meta: TensorMeta) -> bool:
        return len(meta.shape) == 2 and self._selection.quantizes(meta.name)

    def _metas(self, meta: TensorMeta) -> tuple[TensorMeta, TensorMeta]:
        """Return the two tensors that travel in place of a weight."""
        scale = TensorMeta(f"{meta.name}_scale", (meta.shape[0], 1), "float32")
        return TensorMeta(meta.name, meta.shape, _name(self._form)), scale

    def _cut_rows(self, name: str) -> int:
        """Return the rows of a weight if this rank holds some of them in part, else 0."""
        held = self._held.get(name, {})
        return max((piece.meta.shape[0] for box, piece in held.items() if box.size[1] < piece.meta.shape[1]), default=0)

    def _source_dtype(self, meta: TensorMeta) -> str:
        """Return the dtype of a weight before quantisation. The weight is rounded to it."""
        return self._selection.wire_dtype(meta.name) or ("bfloat16" if meta.dtype == "float32" else meta.dtype)

    def _read(self, piece: TensorShard) -> torch.Tensor:
        return piece.values().to(getattr(torch, self._source_dtype(piece.meta)))

    def _values_of(self, name: str, box: Box) -> torch.Tensor:
        weight = self._read(self._held[name][box])
        return self._form.values(weight, self._scale(name, box, weight))

    def _scale(self, name: str, box: Box, weight: torch.Tensor | None = None) -> torch.Tensor:
        """Return the scales of these rows. `weight`: the rows, if they have been read."""
        if (name, box) not in self._scales:  # of whole rows: `gather` finds the scales of cut rows
            rows = self._read(self._held[name][box]) if weight is None else weight
            self._scales[name, box] = self._form.scale(row_maxima(rows))
        return self._scales[name, box]


def pairs(manifest: Manifest) -> list[tuple[str, str]]:
    """Return the names of each quantised weight and of its scales."""
    kinds = {_name(form) for form in FORMS.values()}
    weights = [meta.name for meta in manifest if meta.dtype in kinds]
    return [(name, f"{name}_scale") for name in weights if f"{name}_scale" in manifest]


def _name(form: Form) -> str:
    """Return torch's name of the dtype of its values."""
    return str(form.dtype).removeprefix("torch.")
