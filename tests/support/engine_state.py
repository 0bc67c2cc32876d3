"""All that an engine's model holds, to be compared with a cold engine's."""

from __future__ import annotations

import torch
from torch import nn

State = dict[str, torch.Tensor]


def state_of(model: nn.Module) -> State:
    """Return copies of all tensors that the modules hold: parameters, buffers of any kind, and plain attributes."""
    found: State = {}
    for name, module in model.named_modules():
        held = {**vars(module), **module._parameters, **module._buffers, "kv_cache": None}
        found |= {f"{name}.{key}": t.detach().clone() for key, t in held.items() if isinstance(t, torch.Tensor)}
    return found


def differing(found: State, expected: State) -> list[str]:
    """Return the tensors of one state that are not those of the other, to the bit."""
    odd = [*(found.keys() ^ expected.keys())]
    for name in found.keys() & expected.keys():
        ours, theirs = found[name], expected[name]
        same = (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        if not same or not torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (ours, theirs))):
            odd.append(name)
    return sorted(odd)
