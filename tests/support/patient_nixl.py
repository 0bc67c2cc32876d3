"""A worker extension with which vLLM's NIXL agents pause between two looks at their peers.

The thread of an agent takes a core otherwise, even when the agent is idle.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.distributed.nixl_utils import NixlWrapper  # noqa: F401  # before NIXL: it sets a variable of UCX's

from nixl import _api  # isort: skip

PAUSE_US = 100

_bindings = _api.nixlBind


def _agent(name: str, config: Any) -> Any:
    config.pthrDelay = PAUSE_US
    return _bindings.nixlAgent(name, config)


_api.nixlBind = SimpleNamespace(**{**vars(_bindings), "nixlAgent": _agent})


class Pauses:
    """The extension, which only has to be imported."""
