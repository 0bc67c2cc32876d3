"""Processes with a gloo group, for tests that need more than one rank."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any
from unittest import mock

from gloo_loop import share_loop

FORKSERVER = multiprocessing.get_context("forkserver")
"""As clean as "spawn", without importing in every process again what the test files import."""
FORKSERVER.set_forkserver_preload(
    [
        "hypothesis.strategies",
        "peft",
        "pytest",
        "transformers.modeling_utils",
        "weightsync.checkpoint.save",
        "weightsync.sources.fsdp",
        "weightsync.sync",
        "weightsync.worker.session",
    ]
)


@contextmanager
def not_compiled() -> Iterator[None]:
    """Meanwhile `torch.compile` does nothing. DeepSpeed, Megatron and bitsandbytes call it as they are imported, and
    the first call imports inductor, which takes each process longer than they do."""
    with mock.patch.dict(os.environ, {"TORCHDYNAMO_DISABLE": "1"}):
        yield


def no_barrier() -> None:
    """Stand in for the barrier that a push gives to a source's `gather`."""


def run_ranks(
    fn: Callable[..., None],
    world_size: int,
    *args: Any,
    timeout_s: float = 120,
    context: SpawnContext | ForkServerContext = FORKSERVER,
) -> None:
    """Run `fn(rank, *args)` in `world_size` new processes with gloo initialised; `fn` is a module-level function.

    context: "spawn" for ranks with engines, which are forked from the zygote then.

    Raises AssertionError with the traceback of the first rank that failed, or with the stacks of the ranks that had
    not finished after `timeout_s`. No process is left behind.
    """
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(
                target=_main, args=(fn, rank, world_size, folder, deadline, dict(os.environ), args), daemon=True
            )
            for rank in range(world_size)
        ]
        for rank, process in enumerate(ranks):
            Path(folder, f"rank{rank}.txt").touch()
            process.start()
        try:
            running = dict(enumerate(ranks))
            while running:
                left_s = max(0.0, deadline - time.monotonic())
                wait([process.sentinel for process in running.values()], timeout=left_s)
                ended = {rank: process.exitcode for rank, process in running.items() if process.exitcode is not None}
                failed = [rank for rank, code in ended.items() if code != 0]
                if failed:
                    first = min(failed, key=lambda rank: Path(folder, f"rank{rank}.txt").stat().st_mtime_ns)
                    raise AssertionError(f"rank {first} ended with {ended[first]}\n{_report(folder, first)}")
                running = {rank: process for rank, process in running.items() if rank not in ended}
                if running and time.monotonic() >= deadline:
                    stacks = "\n".join(f"rank {rank}:\n{_report(folder, rank)}" for rank in running)
                    raise AssertionError(f"ranks {list(running)} had not finished after {timeout_s} s\n{stacks}")
        finally:
            for process in ranks:
                process.kill()
                process.join(10)


def take_environment(environment: dict[str, str]) -> None:
    """Give this process the environment of the one that asked for it. A fork server's is that of its first user."""
    os.environ.clear()
    os.environ.update(environment)


def look_less_for_garbage() -> None:
    """Do not look through what was imported before: DeepSpeed collects garbage often. Python itself does so seldom."""
    gc.freeze()
    gc.set_threshold(50_000)


def assert_in_step() -> None:
    """Fail where an earlier collective of the default group meets a later one of another rank. Collective."""
    import torch
    import torch.distributed as dist

    ones = torch.ones(3)
    dist.all_reduce(ones)
    assert ones.tolist() == [dist.get_world_size()] * 3, "a collective of the job has met another one"


def _report(folder: str, rank: int) -> str:
    return Path(folder, f"rank{rank}.txt").read_text() or "(it left no traceback)"


def _main(
    fn: Callable[..., None],
    rank: int,
    world_size: int,
    folder: str,
    deadline: float,
    environment: dict[str, str],
    args: tuple[Any, ...],
) -> None:
    take_environment(environment)
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch starts its threads
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    share_loop()
    look_less_for_garbage()
    with Path(folder, f"rank{rank}.txt").open("w") as report:
        left_s = max(2.0, deadline - time.monotonic())
        # Shortly before the parent gives up, so that it can show where this rank hangs.
        faulthandler.dump_traceback_later(left_s - 1, file=report)
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/store",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=left_s),
            )
            fn(rank, *args)
            if dist.is_initialized():  # an engine in this process may have ended with it
                dist.destroy_process_group()
        except BaseException:
            traceback.print_exc(file=report)
            report.flush()
            os._exit(1)  # a clean exit may wait for peers that now wait for this rank
        finally:
            faulthandler.cancel_dump_traceback_later()
