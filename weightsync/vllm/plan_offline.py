"""The actions of vLLM's loader for a model, from its config.json alone: no weights, no GPU, no running engine."""

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

# vLLM reads these when it is imported. By default its log goes to standard output, into the report.
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
from weightsync.vllm.pristine import build_on_meta, fresh_config
from weightsync.worker.repeated_layers import trace_by_example
from weightsync.worker.trace import Trace, named_tensors, uncovered

_LONGEST_REASON = 300
"""Most characters of vLLM's reason against a config.json. Some reasons list every known model."""


@dataclass(frozen=True)
class WorkerPlan:
    """One engine worker's plan for a manifest.

    params: its parameters and buffers, on the meta device.
    missing, doubled: the regions of its parameters filled by no tensor, and the regions filled twice.
    """

    trace: Trace
    params: dict[str, torch.Tensor]
    missing: dict[str, list[Box]]
    doubled: dict[str, list[Box]]


def plan_workers(
    model_dir: Path, manifest: Manifest, tp: int, dtype: str, *, expert_parallel: bool = False
) -> list[WorkerPlan]:
    """Return the plan of each of `tp` workers, in rank order.

    Args:
        model_dir: The folder of config.json.
        manifest: The trainer's tensors.
        tp: The number of tensor-parallel workers.
        dtype: vLLM's `--dtype`, "auto" for the config's own.
        expert_parallel: vLLM's `--enable-expert-parallel`.

    Raises:
        ConfigError: vLLM has no such model, or its sizes cannot be divided.
        UnsupportedError: A push into such an engine is refused.
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
    with set_current_vllm_config(config), _alone() as become:
        plans = []
        for rank in range(tp):
            become(rank, tp)
            plans.append(_plan(config, manifest))
        return plans


def _plan(config: VllmConfig, manifest: Manifest) -> WorkerPlan:
    try:
        model = build_on_meta(fresh_config(config), config.model_config, torch.device("cpu"))
    except Exception as error:  # wrong sizes or missing fields; assertions often give no text
        reason = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
        raise ConfigError(
            "vLLM cannot make a model of this config for "
            f"{config.parallel_config.tensor_parallel_size} tensor parallel workers: {reason}"
        ) from error
    compat.refuse_made_once(model)
    load_weights: Any = model.load_weights
    trace = trace_by_example(model, load_weights, manifest)
    missing, doubled = uncovered(model, trace)
    return WorkerPlan(trace, named_tensors(model), missing, doubled)


@contextmanager
def _alone() -> Iterator[Callable[[int, int], None]]:
    """Make process groups of vLLM with this process as their only member.

    Yield a function (rank, size) to give this process any rank of any number of workers. Building and loading a model
    need only these two numbers.
    """
    with tempfile.TemporaryDirectory() as folder:
        parallel_state.init_distributed_environment(
            world_size=1, rank=0, distributed_init_method=f"file://{folder}/store", local_rank=0, backend="gloo"
        )
        parallel_state.initialize_model_parallel(1, 1, backend="gloo")
        try:
            # Models without experts have no group for experts.
            groups = [group for group in (parallel_state._TP, parallel_state._EP) if group is not None]

            def become(rank: int, size: int) -> None:
                for group in groups:
                    group.rank_in_group, group.world_size = rank, size

            yield become
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
