"""What every test runs under: the environment of the engines, and the `gpu` marker."""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import zygote

# For the engines that tests start, which read it when vllm is imported, and for the processes these start in turn.
# A value that the caller has set stays.
ENVIRONMENT = {
    "NUMBA_DISABLE_JIT": "1",  # or each engine that drafts from its prompt compiles for ten seconds
    "HF_HUB_OFFLINE": "1",  # the models are made here; nothing is looked up
    "OMP_NUM_THREADS": "1",  # several trainers and engines share few cores, and the models are tiny
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # or ray.init warns about a change to come
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_CI_ENV": "1",  # no warm-up runs
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; otherwise an engine takes most of the memory
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # "auto" needs a core to spare for each worker, of which it wants two
    "VLLM_CPU_SIM_MULTI_NUMA": "0",  # or from 0.33 on each data parallel core wants a memory node of its own
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a test process has threads and must not be forked
}
for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)

# How long an example takes is the machine's, which may be busy.
hypothesis.settings.register_profile("weightsync", deadline=None)
hypothesis.settings.load_profile("weightsync")


@pytest.hookimpl(wrapper=True)
def pytest_sessionstart(session: pytest.Session) -> Generator[None, Any, Any]:
    """Fork xdist's workers from one zygote. Without a GPU, as no process forks once it has used CUDA."""
    with zygote.forking(not Path("/dev/nvidiactl").exists()):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, Any, Any]:
    """Do not look for garbage in all that test modules import, neither now nor later."""
    gc.disable()
    found = yield
    zygote.freeze()
    atexit.register(gc.unfreeze)  # or libraries report as leaked what is frozen
    gc.set_threshold(50_000)  # as in the processes that tests start
    gc.enable()
    return found


@pytest.fixture(scope="module", autouse=True)
def of_earlier_files() -> None:
    """Do not look for garbage in what earlier test files have imported and made. A push looks, where others were."""
    gc.collect()
    zygote.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fork what a test with an engine starts, its fixtures' processes included, and what one starts that is marked."""
    if not any(item.get_closest_marker(name) for name in ("engine", "forks")):
        with zygote.forking(False):  # xdist's workers were forked, and fork
            return (yield)
    import torch

    with zygote.forking(not torch.cuda.is_available()):  # no process forks once it has used CUDA
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that ask for more GPUs than there are, and those that NCCL refuses on a GPU."""
    marked = [item for item in items if item.get_closest_marker("gpu") or item.get_closest_marker("engine")]
    if not marked:
        return
    import torch

    found = torch.cuda.device_count()
    for item in marked:
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if marker := item.get_closest_marker("gpu"):
            count = marker.args[0] if marker.args else marker.kwargs.get("count", 1)
            if found < count:
                item.add_marker(pytest.mark.skip(reason=f"needs {count} NVIDIA GPU(s), found {found}"))
        elif found and params.get("transport") == "broadcast":
            item.add_marker(pytest.mark.skip(reason="NCCL wants a GPU for each rank and worker: see tests/gpu"))
