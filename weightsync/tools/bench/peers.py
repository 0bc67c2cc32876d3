"""Other ways to bring a trainer's weights into an engine, as their documentation shows them."""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weightsync.errors import UnsupportedError
from weightsync.net.child import free_port
from weightsync.tools.bench.cases import FILES, NATIVE, Case
from weightsync.tools.bench.engines import Engines

Push = Callable[[], dict[str, float]]
_PACKED_BYTES = 2 << 30


def make_peer_push(case: Case, model: Any, engines: Engines, folder: Path) -> Push:
    """Return a function that pushes by `case.way` and returns its seconds. Collective. Only rank 0 has `engines`.

    Raise `UnsupportedError` if this vLLM lacks the way.
    """
    if case.way == FILES:
        return lambda: _push_files(model, engines, folder)
    return _native_push(model, *NATIVE[case.way], engines, case.tp)


def _push_files(model: Any, engines: Engines, folder: Path) -> dict[str, float]:
    """Gather the state dict on rank 0, save it as transformers does, and have vLLM reload the files."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    started = time.perf_counter()
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if engines:
        shutil.rmtree(folder, ignore_errors=True)
        model.save_pretrained(folder, state_dict=state)
    saved = time.perf_counter()
    for engine in engines:
        engine.reload(folder)
    return {"save_s": saved - started, "load_s": time.perf_counter() - saved}


def _native_push(model: nn.Module, backend: str, packed: bool, engines: Engines, tp: int) -> Push:
    """Push by vLLM's own engine of 0.26. Later releases have other classes for it, and are refused."""
    module = importlib.import_module(f"vllm.distributed.weight_transfer.{backend}_engine")
    prefix = backend.upper()
    if not hasattr(module, f"{prefix}TrainerSendWeightsArgs"):
        raise UnsupportedError(f"this vLLM has no {prefix}TrainerSendWeightsArgs: use vLLM 0.26 for this case")
    source = getattr(module, f"{prefix}WeightTransferEngine")
    arguments = getattr(module, f"{prefix}TrainerSendWeightsArgs")
    llm: Any = engines[0].target if engines else None
    params = list(model.named_parameters())

    def update(fields: Any) -> None:
        if llm is not None:
            given = {key: value for key, value in vars(fields).items() if key != "ipc_handles_pickled"}
            llm.update_weights({"update_info": given})

    if backend == "ipc":
        # Its buffer must have room for the largest tensor. The default is too small for an 8B model's embedding.
        buffer = max(_PACKED_BYTES, *(param.nbytes for _, param in params))
        how = arguments(send_mode=update, packed=packed, packed_buffer_size_bytes=buffer)
    else:
        assert llm is not None
        place = {"master_address": "127.0.0.1", "master_port": free_port(), "world_size": tp + 1}
        with _meanwhile(lambda: llm.init_weight_transfer_engine({"init_info": {**place, "rank_offset": 1}})):
            how = arguments(group=source.trainer_init(place), packed=packed)

    def push() -> dict[str, float]:
        weights = ((name, _whole(param)) for name, param in params)  # gathered on the stream of the reader
        if llm is not None:
            llm.start_weight_update()
        if backend == "ipc":
            source.trainer_send_weights(weights, how)
        else:
            assert llm is not None
            info = {
                "names": [name for name, _ in params],
                "dtype_names": [str(param.dtype).removeprefix("torch.") for _, param in params],
                "shapes": [list(param.shape) for _, param in params],
                "packed": packed,
            }
            with _meanwhile(lambda: llm.update_weights({"update_info": info})):
                source.trainer_send_weights(weights, how)
        if llm is not None:
            llm.finish_weight_update()
            llm.reset_prefix_cache()
        return {}

    return push


def _whole(param: torch.Tensor) -> torch.Tensor:
    """Return the full tensor. Collective for a sharded tensor, and no copy for others."""
    param = param.detach()
    return param.full_tensor() if isinstance(param, DTensor) else param


def _or_end(call: Callable[[], object]) -> None:
    """Make a call into vLLM beside a thread that waits for the call's effect.

    If the call fails, that thread would wait for ever. So this process logs the error and ends.
    """
    try:
        call()
    except Exception:
        logging.getLogger(__name__).exception("a call into vLLM has failed, and the push waits for it")
        os._exit(1)


@contextmanager
def _meanwhile(call: Callable[[], Any]) -> Any:
    """Run a call into vLLM in a thread during a `with` block. The block ends after both."""
    thread = threading.Thread(target=_or_end, args=(call,), daemon=True)
    thread.start()
    yield
    thread.join()
