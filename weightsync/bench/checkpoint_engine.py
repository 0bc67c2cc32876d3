"""MoonshotAI's checkpoint-engine as a peer: what its README and its example for vLLM do. GPUs only."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weightsync.trial import free_port, request
from weightsync.vllm.native import or_end, whole

_NAME = "weights"


def checkpoint_engine_push(
    model: nn.Module, urls: list[str], tp: int, timeout_s: float
) -> Callable[[], dict[str, float]]:
    """Collective, with a rank on the GPU of each engine worker, in their order. What brings the weights into the
    servers at `urls`, each with `tp` workers that have the package's extension, and gives the seconds."""
    port = torch.tensor(free_port(), device=next(model.parameters()).device)
    dist.broadcast(port, 0)
    # The trainer has a process group already; on its own (auto_pg) it would set one up anew for each update.
    server: Any = importlib.import_module("checkpoint_engine.ps").ParameterServer(
        auto_pg=False, master_port=int(port.item())
    )
    rank, size = dist.get_rank(), dist.get_world_size()
    first = rank // tp * tp  # of the ranks beside this engine's workers; it makes the call

    def call(sockets: list[tuple[str, str]]) -> None:
        if rank == first:
            paths = dict(sockets[first : first + tp])
            body = {"method": "update_weights_from_ipc", "args": [paths], "timeout": timeout_s}
            or_end(lambda: request(urls[rank // tp], "POST", "/collective_rpc", body, timeout_s))

    def push() -> dict[str, float]:
        started = time.perf_counter()
        named = {}
        for number, (name, param) in enumerate(model.named_parameters()):
            tensor = whole(param)
            if number % size == rank:
                named[name] = tensor
        gathered = time.perf_counter()
        # The shared pool keeps its pinned memory from push to push: the cheapest way that there is.
        server.register_checkpoint(_NAME, named_tensors=named, use_shared_memory_pool=True)
        del named
        registered = time.perf_counter()
        server.gather_metas(_NAME)
        server.update(_NAME, call, timeout=timedelta(seconds=timeout_s))
        server.unregister_checkpoint(_NAME)
        updated = time.perf_counter()
        if rank == first:
            request(urls[rank // tp], "POST", "/reset_prefix_cache", None, timeout_s)
        return {
            "gather_s": gathered - started,
            "register_s": registered - gathered,
            "transfer_s": updated - registered,
            "total_s": time.perf_counter() - started,
        }

    return push
