"""vLLM's own transfer engines from the trainer's side, for `weightsync bench`: as the documentation of vLLM 0.26 shows
them. GPUs only. Later releases have other classes for it, and are refused."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weightsync.cli.trial import free_port
from weightsync.engines import HttpEngine
from weightsync.errors import UnsupportedError

_PACKED_BYTES = 2 << 30


def native_push(
    model: nn.Module, backend: str, packed: bool, url: str, tp: int, timeout_s: float
) -> Callable[[], dict[str, float]]:
    """What brings the weights of a single trainer rank into the server at `url`, which was started with this `backend`,
    "nccl" or "ipc", and gives the seconds. Raises `UnsupportedError` for a vLLM that does it otherwise."""
    module = importlib.import_module(f"vllm.distributed.weight_transfer.{backend}_engine")
    prefix = backend.upper()
    if not hasattr(module, f"{prefix}TrainerSendWeightsArgs"):
        raise UnsupportedError(f"this vLLM has no {prefix}TrainerSendWeightsArgs: vLLM 0.26 is what is measured here")
    sender = getattr(module, f"{prefix}WeightTransferEngine")
    arguments = getattr(module, f"{prefix}TrainerSendWeightsArgs")
    engine = HttpEngine(url, name="the engine", timeout_s=timeout_s)
    if backend == "ipc":
        how = arguments(send_mode="http", url=url, packed=packed, packed_buffer_size_bytes=_PACKED_BYTES)
    else:
        place = {"master_address": "127.0.0.1", "master_port": free_port(), "world_size": tp + 1}
        with _meanwhile(lambda: engine.init({**place, "rank_offset": 1})):
            how = arguments(group=sender.trainer_init(place), packed=packed)

    def push() -> dict[str, float]:
        started = time.perf_counter()
        named = [(name, _whole(param)) for name, param in model.named_parameters()]
        engine.start()
        if backend == "ipc":
            sender.trainer_send_weights(iter(named), how)
        else:
            info = {
                "names": [name for name, _ in named],
                "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in named],
                "shapes": [list(tensor.shape) for _, tensor in named],
                "packed": packed,
            }
            with _meanwhile(lambda: engine.update(info)):
                sender.trainer_send_weights(iter(named), how)
        engine.finish(None)
        engine.reset_caches()
        return {"total_s": time.perf_counter() - started}

    return push


class _meanwhile:  # noqa: N801, it reads as a statement
    """Run a call in a thread during a `with` block, which ends when both have; raises what the call has raised."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)

    def _run(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._error = error

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: Any) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error


def _whole(param: torch.Tensor) -> torch.Tensor:
    return param.full_tensor() if isinstance(param, DTensor) else param.detach()
