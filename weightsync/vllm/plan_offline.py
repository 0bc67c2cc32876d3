"""What vLLM's loader would do with a model, found out from its config.json: no weights, no GPU, no running engine."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

# Read when vllm is imported; its log goes to standard output otherwise, among the report.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")

import torch
from pydantic import ValidationError
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs

from weightsync.errors import ConfigError
from weightsync.planning.layout import Box, Manifest
from weightsync.vllm import compat
from weightsync.vllm.pristine import build_on_meta
from weightsync.worker.trace import Trace, named_tensors, trace_loader, uncovered

_LONGEST_REASON = 300
"""Characters of what vLLM says against a config.json; some of it lists every model that there is."""


@dataclass(frozen=True)
class WorkerPlan:
    """What one engine worker makes of a manifest.

    params: its parameters and buffers, on the meta device.
    missing, doubled: the regions of its parameters that no tensor fills, or that are filled twice.
    """

    trace: Trace
    params: dict[str, torch.Tensor]
    missing: dict[str, list[Box]]
    doubled: dict[str, list[Box]]


def plan_workers(
    model_dir: Path, manifest: Manifest, tp: int, dtype: str, *, expert_parallel: bool = False
) -> list[WorkerPlan]:
    """Return the plan of each of `tp` workers, in rank order.

    dtype: vLLM's `--dtype`, "auto" for the config's own. expert_parallel: its `--enable-expert-parallel`. Raises
    `ConfigError` where vLLM has no such model, or its sizes cannot be divided.
    """
    arguments = EngineArgs(
        model=str(model_dir),
        dtype=dtype,
        skip_tokenizer_init=True,
        enforce_eager=True,
        tensor_parallel_size=tp,
        enable_expert_parallel=expert_parallel,
    )
    try:
        config = arguments.create_engine_config()
    except Exception as error:
        told = error.errors()[0]["msg"].removeprefix("Value error, ") if isinstance(error, ValidationError) else error
        raise ConfigError(f"vLLM refuses it: {shorten(str(told), _LONGEST_REASON, placeholder=' ...')}") from error
    compat.check_experts(config)
    with set_current_vllm_config(config), _alone() as become:
        plans = []
        for rank in range(tp):
            become(rank, tp)
            plans.append(_plan(config, manifest))
        return plans


def _plan(config: VllmConfig, manifest: Manifest) -> WorkerPlan:
    try:
        model = build_on_meta(config, config.model_config, torch.device("cpu"))
    except Exception as error:  # sizes that it does not take, or fields that it lacks; assertions often say nothing
        reason = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
        raise ConfigError(
            "vLLM cannot make a model of this config for "
            f"{config.parallel_config.tensor_parallel_size} tensor parallel workers: {reason}"
        ) from error
    load_weights: Any = model.load_weights
    trace = trace_loader(model, load_weights, manifest)
    missing, doubled = uncovered(model, trace)
    return WorkerPlan(trace, named_tensors(model), missing, doubled)


@contextmanager
def _alone() -> Iterator[Callable[[int, int], None]]:
    """Make process groups of vLLM with this process as their only member.

    Yield a function that makes this process take any rank of any number. Building and loading a model only ask for
    these two numbers.
    """
    with tempfile.TemporaryDirectory() as folder:
        parallel_state.init_distributed_environment(
            world_size=1, rank=0, distributed_init_method=f"file://{folder}/store", local_rank=0, backend="gloo"
        )
        parallel_state.initialize_model_parallel(1, 1, backend="gloo")
        try:
            groups = [parallel_state.get_tp_group()]
            if parallel_state._EP is not None:  # models without experts have none
                groups.append(parallel_state.get_ep_group())

            def become(rank: int, size: int) -> None:
                for group in groups:
                    group.rank_in_group, group.world_size = rank, size

            yield become
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
