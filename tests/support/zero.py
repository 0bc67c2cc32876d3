"""DeepSpeed engines on CPUs with gloo, in a process that has a default process group."""

from __future__ import annotations

import copy
import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import torch
from ranks import not_compiled
from torch import distributed as dist
from torch import nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def config(stage: int, dtype: str = "bf16", **zero: Any) -> dict[str, Any]:
    """What DeepSpeed is told; `zero` goes into its section "zero_optimization"."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        # DeepSpeed's own Adam would be compiled first.
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": stage,
            "memory_efficient_linear": False,  # it replaces torch's `linear`, for the rest of the process
            **zero,
        },
        **({} if dtype == "fp32" else {dtype: {"enabled": True}}),
        **({"fp16": {"enabled": True, "initial_scale_power": 4}} if dtype == "fp16" else {}),
    }


def prepare() -> Any:
    """DeepSpeed, ready to be used with the process group that exists."""
    os.environ["DS_ACCELERATOR"] = "cpu"  # also where there is a GPU, since the group is gloo's
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    with not_compiled():
        import deepspeed

        with suppress(ModuleNotFoundError):  # 0.17.0 lacks it
            import deepspeed.runtime.zero.muon.muon_optimizer  # by every engine of ZeRO 1 to 3

    # Or it compiles an all-reduce of its own first, which takes a minute.
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)
    # Or each engine of ZeRO 3 looks for garbage in all that its process has imported.
    deepspeed.runtime.zero.utils.gc = SimpleNamespace(collect=lambda: 0)
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True  # it says no where it would be slow
    deepspeed.init_distributed("gloo", verbose=False)
    return deepspeed


def initialize(model: nn.Module, settings: dict[str, Any]) -> Any:
    """Collective: every rank calls this. The engine that trains `model`."""
    settings = copy.deepcopy(settings)  # DeepSpeed takes keys out of it, so the next engine would lack them
    return prepare().initialize(model=model, model_parameters=model.parameters(), config=settings)[0]


@contextmanager
def to_fill(model: nn.Module) -> Iterator[None]:
    """Meanwhile every rank has all parameters, of which rank 0's values count. Any other model is as it was."""
    partitioned = [param for param in model.parameters() if hasattr(param, "ds_id")]
    with prepare().zero.GatheredParameters(partitioned, modifier_rank=0) if partitioned else nullcontext():
        yield


def gathered(engine: Any) -> dict[str, torch.Tensor]:
    """Collective. The model's state dict as DeepSpeed itself gathers it, each storage once, under its first name."""
    deepspeed = prepare()
    model = getattr(engine, "module", engine)
    state: dict[str, torch.Tensor] = {}
    with ExitStack() as gathers:
        # One at a time: DeepSpeed before 0.19.8 waits for the last of several gathers. gloo's end in any order.
        for param in model.parameters():
            gathers.enter_context(deepspeed.zero.GatheredParameters([param]))
        seen: set[int] = set()
        for name, tensor in model.state_dict().items():
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                state[name] = tensor.detach().clone()
    return state
