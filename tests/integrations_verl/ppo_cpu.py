"""The platform of `verl_cpu` for verl's whole trainer, and the reward function of the test."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import verl_cpu
from verl.plugin.platform.platform_manager import PlatformRegistry

_ANSWERS = {
    "is_available": False,
    "current_device": "cpu",
    "mem_get_info": (1 << 33, 1 << 34),
    "get_device_name": "H100",  # verl knows how fast it is
    "get_rng_state": torch.get_rng_state(),
}


class _Device:
    """What verl calls of `torch.cuda`. It does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # such as the mark of an abstract method
            raise AttributeError(name)
        return lambda *_: _ANSWERS.get(name, 0)


class _Place(str):
    """A device's name, and its index where verl writes it behind one."""

    def __format__(self, _: str) -> str:
        return "0"


@PlatformRegistry.register("cpu")
class WholeCpu(verl_cpu.Cpu):
    device_module = _Device()

    def current_device(self) -> Any:
        return _Place("cpu")

    def device_count(self) -> int:
        return 1

    def communication_backend_name(self) -> str:
        return "gloo"

    def set_device(self, device_index: int) -> None: ...
    def synchronize(self, device_index: int | None = None) -> None: ...
    def manual_seed(self, seed: int) -> None: ...
    def manual_seed_all(self, seed: int) -> None: ...


_init_process_group = torch.distributed.init_process_group


def _init(backend: str = "gloo", **options: Any) -> None:
    """Take one backend for CPU tensors. verl names one for CPUs and one for the device."""
    _init_process_group(backend.replace("cpu:gloo,cpu:gloo", "cpu:gloo"), **options)


torch.distributed.init_process_group = _init
# FSDP1 refuses to broadcast the first rank's weights from a CPU, which gloo can.
mock.patch("torch.distributed.fsdp._init_utils._check_module_states_for_sync_module_states").start()


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float:
    words = solution_str.split()
    return sum(word < "t2" for word in words) / max(len(words), 1)
