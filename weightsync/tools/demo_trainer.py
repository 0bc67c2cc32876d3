"""One trainer rank of `weightsync demo`: a Qwen3 under FSDP2 that learns to count, and pushes its weights.

The demo starts it with torchrun's variables and one argument: its order, as JSON.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from weightsync.net.child import end_with_parent
from weightsync.report import PushReport, format_bytes, format_seconds
from weightsync.sync import WeightSync
from weightsync.tools.bench.models import fill, join, make_trainer
from weightsync.tools.processes import VOCABULARY, Answer, generate
from weightsync.tools.tables import print_line

PROMPTS = ([5, 6, 7, 8], [40, 41], [100, 101, 102], [9, 3, 77, 1])
"""Prompts for the engines. The answer to the first is shown before and after each push."""
LEARNING_RATE = 5e-3
OPTIMIZER_STEPS = 4
"""Optimizer steps in each training step, before each push."""
_BATCH, _LENGTH = 16, 32
_MAX_BYTES = 2**19
"""Small, so that even this model travels in several chunks."""
_TIMEOUT_S = 60.0
_ROW = "{:>7} {:>6} {:>9} {:>10} {:>19}"


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
    """Write a bfloat16 checkpoint, without weightsync: the proof must not depend on the code under test. Collective."""
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_model_state_dict(model, options=whole)
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict={name: tensor.bfloat16() for name, tensor in state.items()})


def show_push(console: Console, report: PushReport, loss: float, before: Answer, after: Answer) -> None:
    times = format_seconds(report.total_s), format_seconds(report.pause_s)
    print_line(console, _ROW.format(report.version, f"{loss:.2f}", format_bytes(report.nbytes), *times))
    console.print(f"{'':>7} engine before  [dim]{before}[/dim]", highlight=False)
    console.print(f"{'':>7} engine after   [bold green]{after}[/bold green]", highlight=False)


def run(order: dict[str, Any], console: Console) -> None:
    """Train and push `order["steps"]` times, then save a checkpoint. Rank 0 shows each push. Collective."""
    rank = int(os.environ["RANK"])
    device, url = torch.device(order["devices"][rank]), order["engine"]
    join(device)
    model: Any = make_trainer("fsdp", order["model"], torch.float32, device)
    fill(model, "fsdp", "A", device)
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    if rank == 0:
        millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        print_line(console, f"{millions:.2f} M parameters, prompt {' '.join(map(str, PROMPTS[0]))}\n")
        print_line(console, _ROW.format("version", "loss", "bytes", "push", "generation paused"))
    settings: Any = {"max_bytes": _MAX_BYTES, "timeout_s": _TIMEOUT_S, "progress": False}
    with WeightSync("fsdp", order["transport"], url, **settings) as sync:
        for _ in range(order["steps"]):
            before = generate(url, PROMPTS[:1]) if rank == 0 else []
            loss = train(model, optimizer, device)
            report = sync.push(model)
            if rank == 0:
                show_push(console, report, loss, *before, *generate(url, PROMPTS[:1]))
    save(model, order["checkpoint"])
    dist.destroy_process_group()


def main() -> None:
    end_with_parent()
    shown = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints of other code go to the log
    logging.basicConfig(level=logging.INFO)
    run(json.loads(sys.argv[1]), Console(file=shown))
    shown.flush()
    sys.stderr.flush()
    # A gloo thread may still have to free a tensor of the last collective. Then torch aborts a process in which Python
    # shuts down (pytorch/pytorch#190489). `destroy_process_group` keeps the threads of a group that FSDP2's mesh holds.
    os._exit(0)


if __name__ == "__main__":
    main()
