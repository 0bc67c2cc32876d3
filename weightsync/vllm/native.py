"""vLLM's own transfer engines from the trainer's side, for `weightsync bench`: as the documentation of vLLM 0.26 shows
them. GPUs only. Later releases have other classes for it, and are refused."""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from weightsync.engines import HttpEngine
from weightsync.errors import UnsupportedError
from weightsync.trial import free_port

_PACKED_BYTES = 2 << 30


def native_push(
    model: nn.Module, backend: str, packed: bool, url: str, tp: int, timeout_s: float
) -> Callable[[], dict[str, float]]:
    """Collective; "nccl" takes a single rank, "ipc" one on each worker's GPU. What brings the weights into the server
    at `url`, which was started with this `backend`, and gives the seconds. Raises `UnsupportedError` for a vLLM that
    does it otherwise."""
    module = importlib.import_module(f"vllm.distributed.weight_transfer.{backend}_engine")
    prefix = backend.upper()
    if not hasattr(module, f"{prefix}TrainerSendWeightsArgs"):
        raise UnsupportedError(f"this vLLM has no {prefix}TrainerSendWeightsArgs: vLLM 0.26 is what is measured here")
    sender = getattr(module, f"{prefix}WeightTransferEngine")
    arguments = getattr(module, f"{prefix}TrainerSendWeightsArgs")
    engine = HttpEngine(url, name="the engine", timeout_s=timeout_s)
    params = list(model.named_parameters())
    if backend == "ipc":
        # Its buffer must have room for the largest tensor, which the default has not for an 8B model's embedding.
        buffer = max(_PACKED_BYTES, *(param.numel() * param.element_size() for _, param in params))
        how = arguments(send_mode="http", url=url, packed=packed, packed_buffer_size_bytes=buffer)
    else:
        place = {"master_address": "127.0.0.1", "master_port": free_port(), "world_size": tp + 1}
        with _meanwhile(lambda: engine.init({**place, "rank_offset": 1})):
            how = arguments(group=sender.trainer_init(place), packed=packed)

    def push() -> dict[str, float]:
        started = time.perf_counter()
        weights = ((name, whole(param)) for name, param in params)  # gathered on the stream that will read them
        if dist.get_rank() == 0:
            engine.start()
        if backend == "ipc":
            sender.trainer_send_weights(weights, how)
        else:
            info = {
                "names": [name for name, _ in params],
                "dtype_names": [str(param.dtype).removeprefix("torch.") for _, param in params],
                "shapes": [list(param.shape) for _, param in params],
                "packed": packed,
            }
            with _meanwhile(lambda: engine.update(info)):
                sender.trainer_send_weights(weights, how)
        if dist.get_rank() == 0:
            engine.finish(None)
            engine.reset_caches()
        return {"total_s": time.perf_counter() - started}

    return push


def whole(param: torch.Tensor) -> torch.Tensor:
    """Collective for a tensor that is spread over ranks; no copy for one that a single rank has."""
    param = param.detach()
    return param.full_tensor() if isinstance(param, DTensor) else param


def or_end(call: Callable[[], object]) -> None:
    """Make a call into vLLM beside a thread that waits for what the call sets going: when it fails, that thread would
    wait for ever, so this process ends, and its log says why."""
    try:
        call()
    except Exception:
        logging.getLogger(__name__).exception("a call into vLLM has failed, and the push waits for it in vain")
        os._exit(1)


@contextmanager
def _meanwhile(call: Callable[[], None]) -> Iterator[None]:
    """Run a call into vLLM in a thread during a `with` block, which ends when both have."""
    thread = threading.Thread(target=or_end, args=(call,), daemon=True)
    thread.start()
    yield
    thread.join()
