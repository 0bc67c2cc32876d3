"""What a push allocates: chunks, and nothing that grows with the model."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
from fake_engine import FakeEngine, ModuleHost
from ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weightsync import WeightSync
from weightsync.kernels.digest import digest

WIDTH = 256
LAYER_BYTES = 4 * WIDTH * WIDTH
CHUNK_BYTES = 2 * LAYER_BYTES
SLACK_BYTES = 4096  # scalars, and the alignment of what lies in a chunk


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that were made under it, and are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._made: set[int] = set()
        self._lock = threading.RLock()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        given = {id(leaf.untyped_storage()) for leaf in leaves if isinstance(leaf, torch.Tensor)}
        given |= {id(leaf) for leaf in leaves if isinstance(leaf, torch.UntypedStorage)}  # which another tensor views
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                if id(storage) not in given and id(storage) not in self._made:
                    self._add(id(storage), storage.nbytes())
                    weakref.finalize(storage, self._remove, id(storage), storage.nbytes())
        return out

    def _add(self, key: int, nbytes: int) -> None:
        with self._lock:
            self._made.add(key)
            self.now += nbytes
            self.peak = max(self.peak, self.now)

    def _remove(self, key: int, nbytes: int) -> None:
        with self._lock:
            self._made.discard(key)
            self.now -= nbytes


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(WIDTH, WIDTH, bias=False)


class Linears(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(layers)])

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = dict(self.named_parameters())
        for name, tensor in weights:
            own[name].data.copy_(tensor)


class MeasuredHost(ModuleHost):
    def __init__(self, layers: int) -> None:
        super().__init__(lambda: Linears(layers), Linears(layers).state_dict())
        self.live_bytes = LiveBytes()

    def scope(self) -> AbstractContextManager[Any]:
        stack = contextlib.ExitStack()
        stack.enter_context(torch.no_grad())
        stack.enter_context(self.live_bytes)
        return stack


def push_twice(model: nn.Module, hosts: Sequence[MeasuredHost], transport: str) -> tuple[int, int]:
    """The most bytes that a push allocates on the trainer's side, and in any engine."""
    engines = [FakeEngine(host) for host in hosts]
    digest(torch.zeros(8, dtype=torch.uint8))  # makes its table of half a MiB, once in a process
    live = LiveBytes()
    with (
        # A push leaves its caller's modes of operators, and would not be counted.
        mock.patch("weightsync.net.modes._disable_current_modes", contextlib.nullcontext),
        WeightSync("fsdp", transport, engines or None, max_bytes=CHUNK_BYTES, timeout_s=30.0) as sync,
        live,
    ):
        sync.push(model)
        sync.push(model)
    for engine in engines:
        engine.close()
    return live.peak, max((host.live_bytes.peak for host in hosts), default=0)


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
@pytest.mark.parametrize("layers", [4, 16])
def test_a_push_needs_two_chunks_on_each_side_whatever_the_models_size(transport: str, layers: int):
    trainer, engine = push_twice(Linears(layers), [MeasuredHost(layers)], transport)
    assert CHUNK_BYTES <= trainer <= 2 * CHUNK_BYTES + SLACK_BYTES
    # Workers map the trainer's slots, which is counted here too; a broadcast arrives in memory of their own.
    assert CHUNK_BYTES <= engine <= 2 * CHUNK_BYTES + SLACK_BYTES


def push_from_shards(rank: int, layers: int, engines: int) -> None:
    torch.manual_seed(0)
    model = Linears(layers)
    for layer in model.layers:
        fully_shard(layer)
    hosts = [MeasuredHost(layers) for _ in range(engines if rank == 0 else 0)]
    trainer, engine = push_twice(model, hosts, "broadcast")
    # Each rank has its parts of two chunks. To three engines, where rank 0 gathers, it has two whole ones.
    most = 2 * CHUNK_BYTES if engines == 3 and rank == 0 else CHUNK_BYTES
    assert CHUNK_BYTES // 4 <= trainer <= most + SLACK_BYTES, trainer
    assert engine <= 2 * CHUNK_BYTES + SLACK_BYTES, engine


@pytest.mark.parametrize("engines", [1, 3])
def test_shards_need_no_third_chunk(engines: int):
    run_ranks(push_from_shards, 2, 16, engines)
