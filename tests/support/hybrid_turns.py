"""Measure a trainer and an engine that take turns on one GPU, and compare the engine with a cold one.

    PYTHONPATH=.:tests/support python tests/support/hybrid_turns.py 8B --levels 1 2 --output turns.json

Of each turn it tells how long the first token takes once `update` has returned, and the GiB in use at each stage. The
shapes are those of `weightsync bench`. The engine starts with weights that it makes up. Without a GPU nothing sleeps,
and the rest is done all the same.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import torch
from tensordict import TensorDict
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from weightsync.hybrid import Dispatch, ResourcePool, RolloutGroup, Worker, WorkerGroup, register
from weightsync.tools.bench.models import fill, make_trainer
from weightsync.tools.bench.shapes import write_config

ON_GPU = torch.cuda.is_available()
ON_ONE_GPU = {
    "gpu_memory_utilization": 0.3,
    "max_num_seqs": 16,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},  # compiling takes longer than all turns
}
ENGINE: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 512,
    "skip_tokenizer_init": True,
    "disable_log_stats": True,
    "timeout_s": 580.0,
    **(ON_ONE_GPU if ON_GPU else {"kv_cache_memory_bytes": 1 << 26, "enforce_eager": True}),
}


class Trained(Worker):
    """A model under FSDP2, trained with Adam."""

    def init_model(self, model_dir: Path) -> None:
        self.model: Any = make_trainer("fsdp", str(model_dir), torch.bfloat16, self.device)
        fill(self.model, "fsdp", "start", self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    @register(Dispatch.DP)
    def update(self, batch: TensorDict) -> float:
        tokens = torch.cat([batch["prompts"], batch["answers"]], dim=1).to(self.device)
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if ON_GPU:
            torch.cuda.empty_cache()  # gives back what the engine needs when it wakes
        return loss.item()

    @register(Dispatch.RANK_ZERO)
    def memory_gib(self) -> dict[str, float]:
        """Return what is in use on the GPU, and what of it the trainer holds."""
        if not ON_GPU:
            return {}
        free, total = torch.cuda.mem_get_info()
        return {"all": (total - free) / 2**30, "trainer": torch.cuda.memory_reserved() / 2**30}

    @register(Dispatch.ONE_TO_ALL)
    def save(self, folder: Path) -> None:
        state = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if self.rank == 0:
            self.model.save_pretrained(folder, state_dict=state)


def prompts_of(count: int, length: int) -> TensorDict:
    ids = (torch.arange(length) * 7 + 11 * torch.arange(count)[:, None]) % 251
    return TensorDict({"prompts": ids}, [count])


def answers(engine: RolloutGroup) -> TensorDict:
    """Return the likeliest answers and their log-probabilities.

    The prompts come one by one and begin as no others do: last bits depend on the batch, and on cached prefixes.
    """
    prompts = 250 - prompts_of(4, 24)["prompts"]
    found = [
        engine.generate(TensorDict({"prompts": prompt[None]}, [1]), max_tokens=8, temperature=0, ignore_eos=True)
        for prompt in prompts
    ]
    return torch.cat([each.select("answers", "sampled_logprobs") for each in found])


def measure(folder: Path, shape: str, levels: list[int], turns: int) -> dict[str, Any]:
    """Return what was measured, turn by turn, and whether the engine answers at the end as a cold one does."""
    start = write_config(shape, folder / "start")
    pool = ResourcePool([1])
    measured = []
    with WorkerGroup(pool, Trained, start, timeout_s=580.0) as actor:
        with (
            RolloutGroup(pool, model=str(start), load_format="dummy", **ENGINE) as engine,
            engine.follow(actor) as sync,
        ):
            made_up = answers(engine)
            for level in [level for level in levels for _ in range(turns)]:
                gib = {}
                batch = engine.generate(prompts_of(8, 64), max_tokens=64, temperature=1.0, ignore_eos=True)
                gib["generated"] = actor.memory_gib()
                sync.sleep(level)
                gib["asleep"] = actor.memory_gib()
                actor.update(batch)
                updated = time.perf_counter()
                gib["updated"] = actor.memory_gib()
                report = sync.push()
                push_s = time.perf_counter() - updated
                engine.generate(prompts_of(1, 64), max_tokens=1)
                first_token_s = time.perf_counter() - updated
                gib["pushed"] = actor.memory_gib()
                seconds = {"push_and_wake": push_s, "push_alone": report.total_s, "first_token": first_token_s}
                measured.append({"level": level, "seconds": seconds, "nbytes": report.nbytes, "gib": gib})
            pushed = answers(engine)
            actor.save(folder / "end")
        with RolloutGroup(pool, model=str(folder / "end"), **ENGINE) as engine:
            cold = answers(engine)
    pool.close()
    equal = {name: torch.equal(pushed[name], cold[name]) for name in ("answers", "sampled_logprobs")}
    changed = not torch.equal(pushed["sampled_logprobs"], made_up["sampled_logprobs"])
    device = torch.cuda.get_device_name() if ON_GPU else "CPU"
    return {"shape": shape, "device": device, "turns": measured, "equal": equal, "changed": changed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", nargs="?", default="tiny")
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--turns", type=int, default=3, help="with each level")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    ray.init(include_dashboard=False, log_to_driver=False, object_store_memory=400 * 10**6)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options.shape, options.levels, options.turns)
    ray.shutdown()
    for turn in found["turns"]:
        print(json.dumps(turn))
    print(json.dumps({name: value for name, value in found.items() if name != "turns"}))
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
