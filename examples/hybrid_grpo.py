"""Train with GRPO under one controller: workers with FSDP2 and vLLM engines on Ray, a push after each step.

    python examples/hybrid_grpo.py                          # engines on the trainer's places, a tiny model, on CPUs
    python examples/hybrid_grpo.py --placement split        # engines on places of their own
    python examples/hybrid_grpo.py --sync-every 0           # the control: nothing is pushed, nothing is learnt
    python examples/hybrid_grpo.py --placement split --behind 1     # rollouts one version behind, while workers train
    python examples/hybrid_grpo.py --checkpoint DIR         # saved at a push; started again, it goes on from there
    python examples/hybrid_grpo.py --model-name Qwen/Qwen3-0.6B --lr 1e-6 --group-size 8

The task is that of grpo.py: to count. `main` is the algorithm, and runs in one process. `pools_of` is the placement.
`Policy` is the computation, and could be any other trainer. On a cluster, run it where `ray.init()` finds the cluster.

With `--behind 1` the engines answer the next prompts with the weights before the step, while the workers take the step.
The ratio between the policy and the probabilities that the engine sampled with corrects for it.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
import torch
import torch.distributed.checkpoint as dcp
from tensordict import TensorDict
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from weightsync.hybrid import (
    Dispatch,
    GroupSync,
    ResourcePool,
    RolloutGroup,
    Rollouts,
    Worker,
    WorkerGroup,
    newest_job,
    register,
    save_job,
    union,
)
from weightsync.vllm.rollout import AsyncRolloutEngine, RolloutEngine

SAVE_EVERY = 10
"""Steps between checkpoints. Each waits for a push, so that its weights are those of its version."""

# --- Computation: what runs on the workers


class Policy(Worker):
    """A causal language model under FSDP2."""

    def init_model(self, name: str, lr: float, clip: float) -> None:
        torch.set_num_threads(1)
        self.clip = clip
        model: nn.Module = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).to(self.device)
        for layer in model.get_submodule("model.layers").children():
            fully_shard(layer)
        self.model = fully_shard(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=0.0)

    @register(Dispatch.DP)
    def update(self, batch: TensorDict) -> float:
        """Take one step on this rank's rows. Collective."""
        batch = batch.to(self.device)
        ratio = (answer_logprobs(self.model, batch) - batch["sampled_logprobs"]).exp()
        clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
        advantage = batch["advantages"][:, None]
        gain = torch.minimum(ratio * advantage, clipped * advantage)
        loss = -(gain * batch["answer_mask"]).sum() / batch["answer_mask"].sum()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()

    def save_state(self, folder: Path) -> None:
        dcp.save(self.state(), checkpoint_id=folder)

    def load_state(self, folder: Path) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}


def answer_logprobs(model: nn.Module, batch: TensorDict) -> torch.Tensor:
    """Return the log-probability of each token of the answers."""
    prompts, answers = batch["prompts"], batch["answers"]
    logits = model(input_ids=torch.cat([prompts, answers], dim=1)).logits[:, prompts.shape[1] - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, answers[..., None]).squeeze(-1)


# --- Placement: which group runs where


def pools_of(placement: str, workers: int, engines: int) -> dict[str, ResourcePool]:
    train = ResourcePool([workers])
    return {"train": train, "rollout": train if placement == "colocated" else ResourcePool([engines])}


# --- The algorithm: runs in this process alone


def rewards(batch: TensorDict, vocabulary: int) -> TensorDict:
    """Return the share of each answer's tokens that are one more than the token before."""
    before = torch.cat([batch["prompts"][:, -1:], batch["answers"][:, :-1]], dim=1)
    right = (batch["answers"] == (before + 1) % vocabulary) & batch["answer_mask"]
    return TensorDict({"rewards": right.sum(1) / batch["answer_mask"].sum(1)}, batch.batch_size)


def advantages(batch: TensorDict, group_size: int) -> TensorDict:
    """Return each answer's reward relative to its group's, in units of the group's standard deviation."""
    groups = batch["rewards"].view(-1, group_size)
    relative = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    return TensorDict({"advantages": relative.flatten()}, batch.batch_size)


def main(arguments: list[str] | None = None) -> list[float]:
    options = parse(arguments)
    if not ray.is_initialized():
        cpus = None if torch.cuda.is_available() else options.workers + options.engines
        ray.init(num_cpus=cpus, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as scratch:
        name = options.model_name or tiny_model(Path(scratch) / "model")
        vocabulary = AutoConfig.from_pretrained(name).vocab_size
        pools = pools_of(options.placement, options.workers, options.engines)
        actor = WorkerGroup(pools["train"], Policy, name, options.lr, options.clip)
        kind = AsyncRolloutEngine if options.behind else RolloutEngine  # a push interrupts the first
        more = {"tensor_parallel_size": options.tp, "actor": kind, **engine_options(options)}
        engine = RolloutGroup(pools["rollout"], model=name, **more)
        with actor, engine:
            found = train(options, actor, engine, vocabulary)
        for pool in set(pools.values()):
            pool.close()
    if options.output is not None:
        options.output.write_text(json.dumps(found))
    return found


def train(options: argparse.Namespace, actor: WorkerGroup, engine: RolloutGroup, vocabulary: int) -> list[float]:
    """Return the mean reward of each step."""
    sampling = {"n": options.group_size, "temperature": 1.0, "max_tokens": options.answer_length, "ignore_eos": True}
    found: list[float] = []
    with engine.follow(actor, progress=False) as sync:
        print(f"pushes go over {sync.transport}: {sync.reason}", flush=True)
        first = resume(options.checkpoint, actor, sync)
        prompts = (prompts_of(step, vocabulary, options) for step in range(first, options.training_steps))
        started = time.perf_counter()
        for step, batch in enumerate(Rollouts(engine, prompts, behind=options.behind, **sampling), first):
            pushes = bool(options.sync_every) and (step + 1) % options.sync_every == 0
            sync.sleep(level=2 if pushes else 1)  # where the workers need the engines' memory
            batch = union(batch, rewards(batch, vocabulary))
            batch = union(batch, advantages(batch, options.group_size))
            losses = actor.update(batch)
            pushed = ""
            if pushes:
                pushed = f"  push {sync.push().total_s * 1e3:.0f} ms"
                if options.checkpoint is not None and (step + 1) % SAVE_EVERY < options.sync_every:
                    save_job(options.checkpoint, {"taken": step + 1, "version": engine.version}, actor)
            else:
                engine.wake_up()
            found.append(batch["rewards"].mean().item())
            bar = "#" * round(40 * found[-1])
            took, started = time.perf_counter() - started, time.perf_counter()
            print(
                f"step {step:3}  reward {found[-1]:.3f} {bar:40}  loss {losses[0]:+.3f}  {took:.2f} s{pushed}",
                flush=True,
            )
    return found


def resume(folder: Path | None, actor: WorkerGroup, sync: GroupSync) -> int:
    """Load the newest checkpoint, and push its version. Return the step to go on with."""
    saved = None if folder is None else newest_job(folder)
    if saved is None:
        return 0
    saved.load(actor)
    sync.push(saved.state["version"])
    return int(saved.state["taken"])


def prompts_of(step: int, vocabulary: int, options: argparse.Namespace) -> TensorDict:
    draw = torch.Generator().manual_seed(options.seed * 1_000_003 + step)
    ids = torch.randint(vocabulary, (options.prompts, options.prompt_length), generator=draw)
    return TensorDict({"prompts": ids}, [options.prompts])


# --- Setting up


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    on_gpu = torch.cuda.is_available()
    more: dict[str, Any] = {"gpu_memory_utilization": 0.4} if on_gpu else {"kv_cache_memory_bytes": 1 << 28}
    length = options.prompt_length + options.answer_length + 1
    return {
        "dtype": "bfloat16", "skip_tokenizer_init": True, "max_model_len": length, "enforce_eager": not on_gpu,
        "disable_log_stats": True, "seed": options.seed, **more,
    }  # fmt: skip


def tiny_model(folder: Path) -> str:
    """Save a Qwen3 with two layers and random weights, small enough to learn on a CPU. Return its folder."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=16, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=128, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return str(folder)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-name", help="a Hugging Face model; by default a tiny one is made on the spot")
    parser.add_argument("--placement", choices=("colocated", "split"), default="colocated")
    parser.add_argument("--workers", type=int, default=2, help="ranks of the trainer")
    parser.add_argument("--engines", type=int, default=1, help="places of engines, where they have their own")
    parser.add_argument("--tp", type=int, default=1, help="places of one engine")
    parser.add_argument("--behind", type=int, default=0, help="how many versions rollouts may be behind")
    parser.add_argument("--training-steps", type=int, default=45)
    parser.add_argument("--prompts", type=int, default=16, help="in each step")
    parser.add_argument("--group-size", type=int, default=16, help="answers to each prompt")
    parser.add_argument("--prompt-length", type=int, default=4)
    parser.add_argument("--answer-length", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--clip", type=float, default=0.2, help="how far the ratio may be from 1")
    parser.add_argument("--sync-every", type=int, default=1, help="steps between pushes; 0: never")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, help="a folder for checkpoints of the job")
    parser.add_argument("--output", type=Path, help="a file for the mean reward of each step, as JSON")
    options = parser.parse_args(arguments)
    if options.checkpoint is not None and not options.sync_every:
        parser.error("--checkpoint saves at pushes, and --sync-every 0 makes none: leave one of them out")
    return options


if __name__ == "__main__":
    main()
    ray.shutdown()
