"""A trace by example: the loader is traced for a few layers, and layers alike to them repeat their trace.

A mixture of experts has tens of thousands of tensors in some dozens of layers. Three layers are examples. Another layer
repeats them under three conditions. Its tensors have the examples' names, shapes and dtypes. The loader does the same
with all examples. The layer's modules are alike to an example's, attribute by attribute. All other tensors are traced.

The result must fill each parameter of the repeated layers once. Otherwise, the loader is traced for every tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from weightsync.planning.alike_layers import AlikeLayers, LayerName, alike_layers
from weightsync.planning.layout import LoadCopy, Manifest, TensorMeta
from weightsync.worker.loader_marks import refuse_marks
from weightsync.worker.reachable import LEAVES, children_of, code_of, same_layout
from weightsync.worker.trace import Feed, LoadWeights, Trace, run_loader, trace_loader, uncovered

_WORTH = 1000
"""Least number of tensors in repeated layers. Fewer are traced within a fraction of a second."""
_MOST_OBJECTS = 20_000
"""Most objects of a layer to compare. Modules that reach more of them may hold the whole model."""


def trace_by_example(model: nn.Module, load_weights: LoadWeights, manifest: Manifest) -> Trace:
    """Trace a loader as `trace_loader` does, with fewer tensors if the model repeats its layers.

    Raises `UnsupportedError` for a loader with a memory of its own.
    """
    alike = alike_layers(manifest)
    repeats = sum(len(each.names(each.others)) for each in alike) >= _WORTH
    with refuse_marks(model):
        trace = _trace_examples(model, load_weights, manifest, alike) if repeats else None
        return trace or trace_loader(model, load_weights, manifest)


def _trace_examples(
    model: nn.Module, load_weights: LoadWeights, manifest: Manifest, alike: Sequence[AlikeLayers]
) -> Trace | None:
    """Return the trace of all tensors.

    Returns None if the loader refuses some of them, or if the trace does not fill each parameter of the repeated layers
    once.
    """
    left = set().union(*(each.names(each.others) for each in alike))
    trace = _run(model, load_weights, [meta for meta in manifest if meta.name not in left])
    if trace is None:
        return None
    repeated: set[tuple[str, int]] = set()
    for each in (each for each in alike if each.others):
        examples = each.examples
        first, *more = (_part(trace, each.layers, number) for number in examples)
        places = {name: LayerName.of(name) for name in first.filled() | first.read()}
        targets = {places[param].layers for param in first.filled()}
        are_alike = (part == _moved(first, places, at) for part, at in zip(more, examples[1:], strict=True))
        if not targets or not all(are_alike):
            continue
        for number in each.others:
            if any(_have_alike_modules(model, targets, example, number) for example in examples):
                trace = _joined(trace, _moved(first, places, number))
                repeated |= {(target, number) for target in targets}
                left -= each.names([number])
    rest = _run(model, load_weights, [meta for meta in manifest if meta.name in left])
    if rest is None:
        return None
    trace = _joined(trace, rest)
    wrong = (LayerName.of(param) for params in uncovered(model, trace) for param in params)
    return None if any(place[:2] in repeated for place in wrong) else trace


def _run(model: nn.Module, load_weights: LoadWeights, tensors: list[TensorMeta]) -> Trace | None:
    try:
        return run_loader(model, load_weights, Feed(tensors)) if tensors else Trace()
    except Exception:  # the loader may need all tensors, or refuse one: the whole trace tells
        return None


def _joined(trace: Trace, more: Trace) -> Trace:
    """Return the work of both. A loader may set the same constants in each run."""
    fills = list(dict.fromkeys([*trace.fills, *more.fills]))
    return Trace(trace.copies + more.copies, fills, trace.computed | more.computed)


def _part(trace: Trace, layers: str, number: int) -> Trace:
    """Return the loader's work with the tensors of one layer, and its constants in the same parameters."""

    def is_in(name: str) -> bool:
        return LayerName.of(name)[:2] == (layers, number)

    part = Trace(
        copies=[copy for copy in trace.copies if is_in(copy.name)],
        computed={param: names for param, names in trace.computed.items() if any(map(is_in, names))},
    )
    filled = part.filled()
    part.fills = [fill for fill in trace.fills if fill.param in filled]
    return part


def _moved(part: Trace, places: Mapping[str, LayerName], number: int) -> Trace:
    """Return the same work for another layer. `places` has all names of the part."""
    names = {name: place.in_layer(number) for name, place in places.items()}
    return Trace(
        copies=[LoadCopy(names[c.name], c.box, names[c.param], c.offset, c.stride) for c in part.copies],
        fills=[replace(fill, param=names[fill.param]) for fill in part.fills],
        computed={names[param]: [names[name] for name in own] for param, own in part.computed.items()},
    )


def _have_alike_modules(model: nn.Module, targets: Iterable[str], example: int, number: int) -> bool:
    try:
        pairs = [[model.get_submodule(f"{target}{at}") for at in (example, number)] for target in targets]
    except AttributeError:  # another pipeline stage has the layer
        return False
    return all(_are_alike(old, new, example, number) for old, new in pairs)


def _are_alike(old: nn.Module, new: nn.Module, number: int, other: int) -> bool:
    """Return whether two layers' modules differ in the layers' numbers alone, in everything that they hold."""
    seen: set[tuple[int, int]] = set()
    stack: list[tuple[Any, Any]] = [(old, new)]
    while stack:
        a, b = stack.pop()
        if a is b or (id(a), id(b)) in seen:
            continue
        seen.add((id(a), id(b)))
        if type(a) is not type(b) or code_of(a) is not code_of(b) or len(seen) > _MOST_OBJECTS:
            return False
        if isinstance(a, LEAVES):
            if a != b and (type(a) is not int or (a, b) != (number, other)) and _renumbered(a, number, other) != b:
                return False
            continue
        if isinstance(a, torch.Tensor):
            is_index = not (a.is_meta or a.is_floating_point())
            if not same_layout(a, b) or a.device != b.device or (is_index and not torch.equal(a, b)):
                return False
            mine, theirs = [*a.__dict__.items()], [*b.__dict__.items()]
        else:
            mine, theirs = children_of(a) or [], children_of(b) or []
        keys, others = [key for key, _ in mine], [key for key, _ in theirs]
        if keys != others and [_renumbered(key, number, other) for key in keys] != others:
            return False
        stack += [(one, two) for (_, one), (_, two) in zip(mine, theirs, strict=True)]
    return True


def _renumbered(value: Any, number: int, other: int) -> Any:
    """Return a name with the number of another layer, and any other value as it is."""
    if not isinstance(value, str) or str(number) not in value:
        return value
    return ".".join(str(other) if part == str(number) else part for part in value.split("."))
