"""Pushed equals cold from each kind of trainer: two ranks on two GPUs, into an engine of two workers on these GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import megatron_models
import pytest
import tiny_models
import torch
import zero
from megatron_models import Mesh
from ranks import run_ranks
from torch import distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from weightsync import MegatronBackend, WeightSync
from weightsync.net.child import free_port
from weightsync.tools.processes import Answer, Server, generate, visible_gpus

MODEL, TIMEOUT_S = "qwen3-moe", 60.0
PADDING = 5  # rows of Megatron's embedding, to the next multiple of 8
PROMPTS = [[5, 6, 7, 8], [9, 9, 3]]

Trainer = tuple[Any, Callable[[str], Any]]
"""A backend, and a function that gives the trainer other weights and returns what is pushed."""


def built(device: torch.device) -> Any:
    return tiny_models.build(MODEL, "A").to(device)


def ddp(device: torch.device, _: Path) -> Trainer:
    model = DistributedDataParallel(built(device))

    def filled(weights: str) -> Any:
        tiny_models.fill(model.module, weights)
        return model

    return "fsdp", filled


def fsdp1(device: torch.device, _: Path, *, use_orig_params: bool = True) -> Trainer:
    model = FullyShardedDataParallel(built(device), device_id=device, use_orig_params=use_orig_params)

    def filled(weights: str) -> Any:
        with FullyShardedDataParallel.summon_full_params(model):
            tiny_models.fill(model.module, weights)
        return model

    return "fsdp", filled


def fsdp1_flat(device: torch.device, folder: Path) -> Trainer:
    return fsdp1(device, folder, use_orig_params=False)


def streamed(device: torch.device, _: Path) -> Trainer:
    model = tiny_models.shard(built(device))

    def filled(weights: str) -> Iterator[tuple[str, torch.Tensor]]:
        tiny_models.fill(model, weights)
        return ((name, tensor.full_tensor()) for name, tensor in model.state_dict().items())

    return "stream", filled


def deepspeed(stage: int) -> Callable[[torch.device, Path], Trainer]:
    def make(device: torch.device, _: Path) -> Trainer:
        import deepspeed as library

        library.ops.__compatible_ops__ = {}  # or it compiles an all-reduce of its own first
        model = built(device)
        engine, *_ = library.initialize(model=model, model_parameters=model.parameters(), config=zero.config(stage))

        def filled(weights: str) -> Any:
            whole = library.zero.GatheredParameters(list(model.parameters()), modifier_rank=0)
            with whole if stage == 3 else nullcontext():
                tiny_models.fill(model, weights)
            return engine

        return "deepspeed", filled

    return make


def megatron(mesh: Mesh) -> Callable[[torch.device, Path], Trainer]:
    def make(device: torch.device, folder: Path) -> Trainer:
        from safetensors.torch import load_file

        config = tiny_models.CONFIGS[MODEL]()
        chunks = [each.to(device) for each in megatron_models.build(config, mesh, torch.bfloat16, PADDING)]

        def filled(weights: str) -> Any:
            megatron_models.load(chunks, config, load_file(folder / weights / "model.safetensors"))
            return chunks

        return MegatronBackend(vocab_size=config.vocab_size), filled

    return make


TRAINERS: dict[str, Callable[[torch.device, Path], Trainer]] = {
    "DDP": ddp,
    "FSDP1": fsdp1,
    "FSDP1 with flat parameters": fsdp1_flat,
    "ZeRO 0": deepspeed(0),
    "ZeRO 1": deepspeed(1),
    "ZeRO 2": deepspeed(2),
    "ZeRO 3": deepspeed(3),
    "Megatron TP": megatron(Mesh(tp=2)),
    "Megatron PP": megatron(Mesh(pp=2)),
    "Megatron EP": megatron(Mesh(ep=2)),
    "stream": streamed,
}


def push_both(rank: int, port: int, kind: str, folder: Path, url: str) -> None:
    """Push B, A and B, and write down what the engine answers with each."""
    dist.destroy_process_group()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    backend, filled = TRAINERS[kind](device, folder)
    answers = []
    with WeightSync(backend, "ipc", url if rank == 0 else None, timeout_s=TIMEOUT_S, max_bytes=2**16) as sync:
        for weights in "BAB":
            sync.push(filled(weights))
            answers.append(generate(url, PROMPTS) if rank == 0 else [])
    if rank == 0:
        (folder / kind).write_text(repr(answers))
    dist.barrier()
    os._exit(0)  # frameworks leave threads that outlast the group


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str, dict[str, list[Answer]]]]:
    """A folder with the checkpoints A and B, the address of a server that started from A, and cold answers of both."""
    folder = tmp_path_factory.mktemp("served")
    options = {"tensor_parallel_size": 2, "kv_cache_memory_bytes": 2**26}
    servers = {}
    try:
        for weights in "BA":
            checkpoint = tiny_models.save(tiny_models.build(MODEL, weights), folder / weights)
            log = folder / f"{weights}.log"
            servers[weights] = Server(checkpoint, "auto", log, visible_gpus([0, 1]), options)
        cold = {}
        for weights, server in servers.items():
            server.wait(240)
            cold[weights] = generate(server.url, PROMPTS)
        servers.pop("B").stop()
        yield folder, servers["A"].url, cold
    finally:
        for server in servers.values():
            server.stop()


@pytest.mark.gpu(2)
@pytest.mark.parametrize("kind", TRAINERS)
def test_pushed_from_each_trainer_equals_cold(served: tuple[Path, str, dict[str, list[Answer]]], kind: str) -> None:
    folder, url, cold = served
    assert cold["A"] != cold["B"]
    run_ranks(push_both, 2, free_port(), kind, folder, url, timeout_s=120)
    assert (folder / kind).read_text() == repr([cold[weights] for weights in "BAB"])
