"""Measure how much of a policy a step of GRPO changes, and how short the difference is.

    python tests/support/delta_density.py [STEPS]

The policies are the tiny one of examples/grpo.py and one of 20 million parameters, trained by that example's own
functions: AdamW over float32 masters, pushed in bfloat16. The rollouts are sampled by torch, in bfloat16, from what a
push would have delivered. It prints the first table of docs/evidence/deltas.md.
"""

from __future__ import annotations

import argparse
import copy
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config

from weightsync.kernels.delta import encode

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import grpo

LEARNING_RATES = 1e-6, 1e-5, 1e-4
NEVER_DEFLATED = 1e30
LAYERS = {"tiny": (16, 64, 128, 2), "20M": (4096, 512, 1536, 4)}


class TorchEngine:
    """Samples with torch what an engine would sample that serves the policy in bfloat16."""

    def __init__(self, policy: nn.Module) -> None:
        self.served = copy.deepcopy(policy).to(torch.bfloat16)

    def push(self, policy: nn.Module) -> None:
        for served, own in zip(self.served.parameters(), policy.parameters(), strict=True):
            served.data.copy_(own.data)

    @torch.no_grad()
    def sample(self, prompts: list[list[int]], options: argparse.Namespace, adapter: Any) -> tuple[Any, Any]:
        tokens, logprobs = torch.tensor(prompts).repeat_interleave(options.group_size, 0), []
        for _ in range(options.answer_length):
            shares = self.served(input_ids=tokens).logits[:, -1].float().log_softmax(-1)
            chosen = shares.exp().multinomial(1)
            logprobs.append(shares.gather(1, chosen))
            tokens = torch.cat([tokens, chosen], 1)
        return tokens[:, options.prompt_length :].tolist(), torch.cat(logprobs, 1).tolist()


def build(size: str) -> nn.Module:
    torch.manual_seed(0)
    vocabulary, hidden, inner, layers = LAYERS[size]
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=hidden // 32, num_key_value_heads=hidden // 64, head_dim=32, max_position_embeddings=128,
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).float()


def flat(policy: nn.Module) -> torch.Tensor:
    """Return the policy's bytes as they travel."""
    return torch.cat([param.detach().to(torch.bfloat16).view(-1) for param in policy.parameters()]).view(torch.uint8)


def measure(size: str, lr: float, steps: int) -> list[str]:
    """Return the cells of a row: means over the later half of the steps."""
    policy = build(size)
    options = argparse.Namespace(
        prompts=4, group_size=8, prompt_length=4, answer_length=8, stride=1, batch_size=32, clip=0.2, kl_coefficient=0.0
    )
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, weight_decay=0.0)
    engine, vocabulary = TorchEngine(policy), LAYERS[size][0]
    base, rows = flat(policy), []
    for step in range(steps):
        prompts = torch.randint(vocabulary, (options.prompts, options.prompt_length))
        rollouts = grpo.roll_out(engine, None, prompts, vocabulary, options)  # type: ignore[arg-type]
        rollouts.rewards += 0.01 * torch.rand(len(rollouts.rewards))  # most answers of the larger one earn nothing
        grpo.train(policy, None, optimizer, rollouts, options, torch.device("cpu"), nullcontext)
        engine.push(policy)
        new = flat(policy)
        changed = torch.ne(new.view(torch.int16), base.view(torch.int16))
        shares = [float(changed.float().mean()), float(torch.ne(new, base).float().mean())]
        lengths = [6 * int(changed.sum())]
        lengths += [
            new.numel() if e is None else e.numel() for e in (encode(new, base, s) for s in (NEVER_DEFLATED, 0))
        ]
        rows.append([*shares, *(new.numel() / max(length, 1) for length in lengths)])
        base = new
        print(f"{size} {lr:g} step {step}: reward {rollouts.rewards.mean():.3f}, {rows[-1]}", file=sys.stderr)
    values, nbytes, *factors = torch.tensor(rows[steps // 2 :], dtype=torch.float64).mean(0).tolist()
    return [size, f"{lr:g}", f"{100 * values:.2f} %", f"{100 * nbytes:.2f} %", *(f"{factor:.1f}" for factor in factors)]


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    print("| policy | lr | changed values | changed bytes | indices and values | planes | planes, deflated |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for size in LAYERS:
        for lr in LEARNING_RATES:
            print("|", " | ".join(measure(size, lr, steps)), "|", flush=True)


if __name__ == "__main__":
    main()
