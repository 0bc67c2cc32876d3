"""Tensors with two names, in the trainer or in the engine, such as an embedding shared with the output layer.

If the trainer alone ties the names, one tensor fills both parameters of the engine. If the engine alone ties them, both
tensors are for one parameter, and can be served only if they are equal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from msgspec import structs
from torch import nn

from weightsync.planning.layout import LoadCopy, Manifest
from weightsync.worker.trace import Trace


def with_other_names(manifest: Manifest) -> Manifest:
    """Return the manifest with one more tensor for each other name of a tied tensor."""
    tied = [(other, name) for other, name in manifest.tied if name in manifest and other not in manifest]
    return Manifest((*manifest.tensors, *(structs.replace(manifest[name], name=other) for other, name in tied)))


def under_first_names(trace: Trace, manifest: Manifest) -> Trace:
    """Return a trace of `with_other_names(manifest)` in terms of the tensors of `manifest`.

    A parameter that the loader computes from another name alone is refused: the loader would be given the first name.
    """
    first = {other: name for other, name in manifest.tied if name in manifest and other not in manifest}
    places = _places(trace)
    named = [
        structs.replace(copy, name=first[copy.name])
        for copy in trace.copies
        if copy.name in first and _place(copy) not in places[first[copy.name]]
    ]
    refused = {name: text for name, text in trace.refused.items() if name not in first}
    for param, names in trace.computed.items():
        for other in names:
            if other in first and first[other] not in names:
                refused[first[other]] = f"the engine computes {param} from {other}, and the trainer ties {other}"
    kept = without(trace, first)
    return replace(kept, copies=kept.copies + named, refused=refused)


def shared_parameters(model: nn.Module, without: str) -> dict[str, list[str]]:
    """Return the other names of each parameter with several names, by its first name.

    A module in two places has one name here. Names that begin with `without` do not count.
    """
    first: dict[nn.Parameter, str] = {}
    others: dict[str, list[str]] = defaultdict(list)
    for name, param in model.named_parameters(remove_duplicate=False):
        if not name.startswith(without) and (known := first.setdefault(param, name)) != name:
            others[known].append(name)
    return {name: own for name, names in others.items() if (own := [n for n in names if _end(n) != _end(name)])}


def fill_of_shared(trace: Trace, shared: Mapping[str, list[str]]) -> dict[str, str]:
    """Return the first tensor that fills each of the shared parameters, if there is one."""
    found: dict[str, str] = {}
    for param, name in trace.landed():
        if param in shared:
            found.setdefault(param, name)
    return found


def find_duplicates(trace: Trace, manifest: Manifest, shared: Mapping[str, list[str]]) -> dict[str, str]:
    """Return the tensors for a parameter already filled by another tensor, each with the name of the other.

    The loader may load both to the same place. Or it passes over a tensor with the shape of the other and with a
    module's name for the parameter. vLLM's loaders do so with the output layer of tied embeddings.
    """
    if not (filled := fill_of_shared(trace, shared)):
        return {}
    places = _places(trace)
    found = {
        copy.name: filled[copy.param]
        for copy in trace.copies
        if copy.param in filled and copy.name != filled[copy.param] and places[copy.name] <= places[filled[copy.param]]
    }
    read = trace.read().union(trace.refused)
    for param, name in filled.items():
        ends = {_end(other) for other in (param, *shared[param])} - {_end(name)}
        for meta in manifest:
            if meta.name not in read and _end(meta.name) in ends and meta.shape == manifest[name].shape:
                found[meta.name] = name
    return found


def without(trace: Trace, names: Mapping[str, str]) -> Trace:
    """Return the trace without these tensors."""
    return replace(
        trace,
        copies=[copy for copy in trace.copies if copy.name not in names],
        computed={param: [name for name in those if name not in names] for param, those in trace.computed.items()},
        unknown=[name for name in trace.unknown if name not in names],
    )


_Place = tuple[str, object, int, tuple[int, ...]]


def _place(copy: LoadCopy) -> _Place:
    return copy.param, copy.box, copy.offset, copy.stride


def _places(trace: Trace) -> dict[str, set[_Place]]:
    found: dict[str, set[_Place]] = defaultdict(set)
    for copy in trace.copies:
        found[copy.name].add(_place(copy))
    return found


def _end(name: str) -> tuple[str, ...]:
    """Return the last two parts of a name: the module's own name and the parameter's."""
    return tuple(name.split(".")[-2:])
