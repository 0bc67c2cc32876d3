"""One trainer rank of `weightsync demo`: a Qwen3 under FSDP2 that learns to count, and pushes what it has learnt.

The demo starts it with torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), and sends orders as lines of
JSON on its standard input: {"do": "train"}, {"do": "push"}, {"do": "save", "folder": ...}.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from weightsync.sync import WeightSync
from weightsync.tools.bench.models import fill, make_trainer
from weightsync.tools.processes import VOCABULARY, listen_for_orders

LEARNING_RATE = 5e-3
OPTIMIZER_STEPS = 4
"""In each training step, before each push."""
_BATCH, _LENGTH = 16, 32
_MAX_BYTES = 2**19
"""Small, so that even this model travels in several chunks."""
_TIMEOUT_S = 60.0


def train(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> float:
    """Take some optimizer steps on sequences that count up, and return the last loss on this rank. Collective."""
    loss = torch.zeros(())
    for _ in range(OPTIMIZER_STEPS):
        start = torch.randint(VOCABULARY, (_BATCH, 1), device=device)
        tokens = (start + torch.arange(_LENGTH, device=device)) % VOCABULARY
        logits = model(input_ids=tokens).logits.float()
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def save(model: Any, folder: str) -> None:
    """Write a bfloat16 checkpoint, without weightsync: a proof does not rest on what it proves. Collective."""
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_model_state_dict(model, options=whole)
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict={name: tensor.bfloat16() for name, tensor in state.items()})


def obey(order: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, sync: WeightSync) -> Any:
    """Do what `order` says, and return the fields of the answer. Collective."""
    match order["do"]:
        case "train":
            return {"loss": train(model, optimizer, next(model.parameters()).device)}
        case "push":
            return {"report": json.loads(sync.push(model).to_json())}
        case _:
            save(model, order["folder"])
            return {}


def main() -> None:
    parser = argparse.ArgumentParser(description="a trainer rank of `weightsync demo`, which starts it")
    for name in ("--model", "--engine", "--transport", "--device"):
        parser.add_argument(name, required=True)
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
        model: Any = make_trainer("fsdp", options.model, torch.float32, device)
        fill(model, "fsdp", "A", device)
        torch.manual_seed(1 + dist.get_rank())
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        with WeightSync(
            "fsdp", options.transport, options.engine, max_bytes=_MAX_BYTES, timeout_s=_TIMEOUT_S, progress=False
        ) as sync:
            answer(parameters=sum(parameter.numel() for parameter in model.parameters()))
            for line in orders:
                answer(**obey(json.loads(line), model, optimizer, sync))
        dist.destroy_process_group()
    except Exception as error:
        logging.getLogger(__name__).exception("this trainer rank has failed")
        answer(error=f"{type(error).__name__}: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
