"""What vLLM's engine for CPUs lacks to run expert and data parallelism, for `worker_extension_cls`.

Its kernel of experts reads an expert's global number as the local one, beyond the end of the local weights. Its
communicator cannot gather or scatter tensors of unequal length. A worker imports this module before its model is built.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.experts import cpu_moe


class RunsExperts:
    """A worker extension to run experts, and to break a push in one core of several."""

    def fail_next_push(self, core: int) -> None:
        """Raise once the weights are loaded."""
        self._break_next_push(core, _fail)

    def end_in_next_push(self, core: int) -> None:
        """End the worker's process once the weights are loaded."""
        self._break_next_push(core, lambda: os._exit(1))

    def nap(self, core: int) -> None:
        """Keep one core from its next step, for which the others wait."""
        if self._core == core:
            time.sleep(1.0)

    @property
    def _core(self) -> int:
        number: int = self.vllm_config.parallel_config.data_parallel_index  # type: ignore[attr-defined]
        return number

    def _break_next_push(self, core: int, act: Callable[[], None]) -> None:
        receiver = self.weight_transfer_engine.session.receiver  # type: ignore[attr-defined]
        run = receiver.run

        def run_and_break(*args: Any) -> None:
            receiver.run = run
            run(*args)
            act()

        if self._core == core:
            receiver.run = run_and_break


def _fail() -> None:
    raise RuntimeError("this core fails")


_experts = cpu_moe.CPUUnquantizedExperts
_apply = _experts.apply


def _apply_own(self: Any, *args: Any, **kwargs: Any) -> None:
    """Leave out the experts of other workers: they come to nothing here."""
    if (expert_map := kwargs.get("expert_map")) is not None:
        local = expert_map[kwargs["topk_ids"].long()]
        kwargs["topk_weights"] = kwargs["topk_weights"].masked_fill(local < 0, 0.0)
        kwargs["topk_ids"] = local.clamp(min=0).to(kwargs["topk_ids"].dtype)
    _apply(self, *args, **kwargs)


def _all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    if isinstance(input_, list):
        return [_all_gatherv(self, each, dim, sizes) for each in input_]
    assert dim == 0
    lengths = sizes or [len(input_)] * self.world_size
    found = [input_.new_empty(length, *input_.shape[1:]) for length in lengths]
    found[self.rank_in_group].copy_(input_)
    for rank, each in zip(self.ranks, found, strict=True):
        dist.broadcast(each, rank, group=self.device_group)
    return torch.cat(found)


def _reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
    assert dim == 0
    total = input_.clone()
    dist.all_reduce(total, group=self.device_group)
    return total.split(sizes or [len(input_) // self.world_size] * self.world_size)[self.rank_in_group]


_experts.apply = _apply_own  # type: ignore[method-assign]
CpuCommunicator.all_gatherv = _all_gatherv  # type: ignore[method-assign]
CpuCommunicator.reduce_scatterv = _reduce_scatterv  # type: ignore[method-assign]
