"""What vLLM's workers answer to verl's own updates, over verl's own sender."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

from weightsync import ConfigError
from weightsync.integrations.verl_worker import WorkerExtension


async def send(handle: str, names: list[str]) -> None:
    async def weights() -> AsyncIterator[tuple[str, torch.Tensor]]:
        for name in names:
            yield name, torch.ones(3)

    await BucketedWeightSender(handle, 1, use_shm=True).async_send_weights(weights())


def receive(handle: str) -> None:
    worker = SimpleNamespace(_get_zmq_handle=lambda: handle, device=torch.device("cpu"))
    WorkerExtension.update_weights_from_ipc(worker, use_shm=True)


def test_empty_update_is_answered_and_another_is_refused_once_its_sender_is_done(tmp_path: Path) -> None:
    handle = f"ipc://{tmp_path}/socket"
    with ThreadPoolExecutor(1) as thread:
        sent = thread.submit(asyncio.run, send(handle, []))
        receive(handle)
        sent.result(20)
        sent = thread.submit(asyncio.run, send(handle, ["a"]))
        with pytest.raises(ConfigError, match="verl itself has sent 1 tensors, such as a"):
            receive(handle)
        sent.result(20)
