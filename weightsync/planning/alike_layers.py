"""Layers that differ in their number alone, by the names, shapes and dtypes of their tensors. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from weightsync.planning.layout import TensorMeta

_NUMBER = re.compile(r"(?:^|\.)(0|[1-9]\d*)(?=\.|$)")


class LayerName(NamedTuple):
    """A name by its first number: "model.layers.3.mlp.up" is ".mlp.up" in layer 3 of the list "model.layers.".

    A name without a number is `layers`, and `number` is None.
    """

    layers: str
    number: int | None
    rest: str

    @classmethod
    def of(cls, name: str) -> LayerName:
        if (found := _NUMBER.search(name)) is None:
            return cls(name, None, "")
        return cls(name[: found.start(1)], int(found[1]), name[found.end(1) :])

    def in_layer(self, number: int) -> str:
        """Return the name of the same tensor in another layer."""
        return self.layers if self.number is None else f"{self.layers}{number}{self.rest}"


@dataclass(frozen=True)
class AlikeLayers:
    """The layers of a list whose tensors have the same names, shapes and dtypes.

    tensors: each layer's tensors, by its number.
    """

    layers: str
    tensors: Mapping[int, Sequence[TensorMeta]]

    @property
    def examples(self) -> list[int]:
        """The first, the middle and the last layer."""
        numbers = sorted(self.tensors)
        return [numbers[0], numbers[len(numbers) // 2], numbers[-1]]

    @property
    def others(self) -> list[int]:
        """All layers but the examples."""
        return sorted(self.tensors.keys() - set(self.examples))

    def names(self, numbers: Iterable[int]) -> set[str]:
        """Return the names of the tensors in these layers."""
        return {meta.name for number in numbers for meta in self.tensors[number]}


def alike_layers(tensors: Iterable[TensorMeta]) -> list[AlikeLayers]:
    """Return all layers, grouped by alike tensors."""
    of_layer: dict[tuple[str, int], list[tuple[str, TensorMeta]]] = defaultdict(list)
    for meta in tensors:
        layers, number, rest = LayerName.of(meta.name)
        if number is not None:
            of_layer[layers, number].append((rest, meta))
    alike: dict[Any, dict[int, list[TensorMeta]]] = defaultdict(dict)
    for (layers, number), own in of_layer.items():
        form = tuple((rest, meta.shape, meta.dtype) for rest, meta in own)
        alike[layers, form][number] = [meta for _, meta in own]
    return [AlikeLayers(layers, those) for (layers, _), those in alike.items()]
