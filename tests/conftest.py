"""What every test runs under: the environment of the engines, and the `gpu` marker."""

from __future__ import annotations

import os

import hypothesis
import pytest

# For the engines that tests start, which read it when vllm is imported, and for the processes these start in turn.
# A value that the caller has set stays.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # the models are made here; nothing is looked up
    "OMP_NUM_THREADS": "1",  # several trainers and engines share few cores, and the models are tiny
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # or ray.init warns about a change to come
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_CI_ENV": "1",  # no warm-up runs
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; otherwise an engine takes most of the memory
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # "auto" needs a core to spare for each worker, of which it wants two
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a test process has threads and must not be forked
}
for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)

# How long an example takes is the machine's, which may be busy.
hypothesis.settings.register_profile("weightsync", deadline=None)
hypothesis.settings.load_profile("weightsync")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that ask for more GPUs than there are."""
    marked = [(item, marker) for item in items if (marker := item.get_closest_marker("gpu"))]
    if not marked:
        return
    import torch

    found = torch.cuda.device_count()
    for item, marker in marked:
        count = marker.args[0] if marker.args else marker.kwargs.get("count", 1)
        if found < count:
            item.add_marker(pytest.mark.skip(reason=f"needs {count} NVIDIA GPU(s), found {found}"))
