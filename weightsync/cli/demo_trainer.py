"""One trainer rank of `weightsync demo`: a Qwen3 under FSDP2 that learns to count, and pushes what it has learnt.

Started by the demo with torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) and told what to do by lines
of JSON on its standard input: {"do": "train"}, {"do": "push"}, {"do": "save", "folder": ...}.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from weightsync.sync import WeightSync
from weightsync.trial import VOCABULARY, listen_for_orders

LEARNING_RATE = 5e-3
OPTIMIZER_STEPS = 4
"""In each training step, before each push."""
_BATCH, _LENGTH = 16, 32
_MAX_BUCKET_BYTES = 2**19
"""Small, so that even this model travels in several buckets."""
_TIMEOUT_S = 60.0


def build(model_dir: str) -> nn.Module:
    """The model of `model_dir`'s config.json with random float32 weights, the same on every rank."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(model_dir)
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


def shard(model: nn.Module, device: torch.device) -> nn.Module:
    """Collective: every trainer rank calls this. FSDP2: each layer, then the rest; float32 shards, bfloat16 compute."""
    model.to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> float:
    """Collective: every trainer rank calls this. Some optimizer steps on sequences that count up from a random token;
    gives the last loss on this rank."""
    loss = torch.zeros(())
    for _ in range(OPTIMIZER_STEPS):
        start = torch.randint(VOCABULARY, (_BATCH, 1), device=device)
        tokens = (start + torch.arange(_LENGTH, device=device)) % VOCABULARY
        logits = model(input_ids=tokens).logits.float()
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def save(model: nn.Module, model_dir: str, folder: str) -> None:
    """Collective: every trainer rank calls this. Rank 0 writes a checkpoint, bfloat16 in safetensors: what an engine is
    started from when there is no weightsync."""
    full = {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().to(torch.bfloat16)
        for name, tensor in model.state_dict().items()
    }
    if dist.get_rank() == 0:
        plain: Any = build(model_dir).to(torch.bfloat16)
        plain.load_state_dict(full)
        plain.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="a trainer rank of `weightsync demo`, which starts it")
    parser.add_argument("--model", required=True)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--transport", required=True)
    parser.add_argument("--device", required=True)
    options = parser.parse_args()
    orders, answers = listen_for_orders()
    logging.basicConfig(level=logging.INFO)

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    try:
        device = torch.device(options.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        else:
            torch.set_num_threads(1)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        model = shard(build(options.model), device)
        torch.manual_seed(1 + dist.get_rank())
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        sync = WeightSync(
            "fsdp", options.transport, options.engine, max_bytes=_MAX_BUCKET_BYTES, timeout_s=_TIMEOUT_S, progress=False
        )
        answer(parameters=sum(parameter.numel() for parameter in model.parameters()))
        for line in orders:
            order = json.loads(line)
            match order["do"]:
                case "train":
                    answer(loss=train(model, optimizer, device))
                case "push":
                    answer(report=json.loads(sync.push(model).to_json()))
                case "save":
                    save(model, options.model, order["folder"])
                    answer()
        sync.close()
        dist.destroy_process_group()
    except Exception as error:
        logging.getLogger(__name__).exception("this trainer rank has failed")
        answer(error=f"{type(error).__name__}: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
