"""Synchronise the same trainers with TRL's own method and with weightsync's, in turn: `make compare-trl`.

Seconds, memory and gathered bytes are the largest of all ranks. Both ways run in one process, after each other.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import conftest  # noqa: F401  # sets the environment of the engines
import torch
import trl_ranks
from engines import Answer, note, noted
from ranks import FORKSERVER, run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from weightsync.engines.child import free_port

ROUNDS = 5
ZERO = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "DDP, an engine in each of 2 ranks": (2, {}),
    "DDP, an engine of 2 ranks": (2, {"vllm_tensor_parallel_size": 2}),
    "ZeRO-3, an engine in each of 2 ranks": (2, {"deepspeed": ZERO}),
    "one rank, merged adapters": (1, {"adapters": True}),
}
SIZES = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6}


class Gathered(TorchDispatchMode):
    """Counts the bytes that collectives gather in this process."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and "gather" in func.__name__:
            tensors = torch.utils._pytree.tree_leaves(args[0])
            self.nbytes += sum(each.nbytes for each in tensors if isinstance(each, torch.Tensor))
        return func(*args, **(kwargs or {}))


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def measure(sync: Callable[[], None]) -> dict[str, float]:
    torch.distributed.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    before, started, gathered = peak_bytes(), time.perf_counter(), Gathered()
    with gathered:
        sync()
    return {"s": time.perf_counter() - started, "memory": peak_bytes() - before, "gathered": gathered.nbytes}


def compare(rank: int, size: int, port: int, checkpoint: Path, options: dict[str, Any]) -> None:
    from trl.generation.vllm_generation import VLLMGeneration

    from weightsync.integrations.trl import attach

    trl_ranks.place(rank, size, port)
    trainer = trl_ranks.make(
        "GRPO", checkpoint, vllm_mode="colocate", vllm_max_model_length=256, optim="sgd", **options
    )
    generation, folder = trainer.vllm_generation, checkpoint.parent
    with attach(trainer):
        trainer.train()
        ways = {"weightsync": generation.sync_weights, "TRL": lambda: VLLMGeneration.sync_weights(generation)}
        for way, sync in ways.items():
            try:
                rounds = [measure(sync) for _ in range(ROUNDS)]
            except AttributeError as error:
                # A kernel of a CPU keeps weights in a format of its own, which TRL's method knows nothing of.
                (folder / f"{way}.error").write_text(f"{type(error).__name__}: {error}")
                break
            note(trl_ranks.ask(generation.llm), folder / f"{way}-{rank}.json")
            first = {f"first_{name}": value for name, value in rounds[0].items()}
            found = first | {name: statistics.median(one[name] for one in rounds[1:]) for name in rounds[0]}
            (folder / f"{way}-{rank}.figures").write_text(json.dumps(found))
        torch.distributed.barrier()
    model = trainer.accelerator.unwrap_model(trainer.model)
    if "deepspeed" in options:
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            state = {name: param.detach().clone() for name, param in model.named_parameters()}
        if rank == 0:
            trl_ranks.save_state(state, checkpoint, folder / "trained")
    elif rank == 0:
        (model.merge_and_unload() if options.get("adapters") else model).save_pretrained(folder / "trained")
    torch.distributed.barrier()


def cold(checkpoint: Path, tp: int) -> Answer:
    import engines

    ours = engines.Engines(checkpoint.parent, checkpoint.parent, FORKSERVER.Pipe()[0])
    ours.start(checkpoint, enforce_eager=False, logprobs_mode="processed_logprobs", tensor_parallel_size=tp)
    answer = ours.ask()
    ours.end()
    return answer


def row(case: str) -> list[str]:
    size, options = CASES[case]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint = trl_ranks.save(folder / "model", **SIZES)
        run_ranks(compare, size, size, free_port(), checkpoint, options, timeout_s=400)
        with ProcessPoolExecutor(1, FORKSERVER) as process:
            tp = options.get("vllm_tensor_parallel_size", 1)
            expected = process.submit(cold, folder / "trained", tp).result(200)
        lines = []
        for way in ("weightsync", "TRL"):
            if (raised := folder / f"{way}.error").exists():
                lines.append(f"| {case} | {way} | | | | | | raises `{raised.read_text()}` |")
                continue
            figures = [json.loads((folder / f"{way}-{rank}.figures").read_text()) for rank in range(size)]
            most = {key: max(each[key] for each in figures) for key in figures[0]}
            equal = all(noted(folder / f"{way}-{rank}.json") == expected for rank in range(size))
            lines.append(
                f"| {case} | {way} | {most['first_s']:.2f} | {most['s']:.2f} | {most['first_memory'] / 1e6:.0f} | "
                f"{most['memory'] / 1e6:.0f} | {most['gathered'] / 1e6:.0f} | {'equal' if equal else 'differs'} |"
            )
        return lines


def main() -> None:
    print("| trainer | sync | first, s | later, s | first, MB more | later, MB more | gathered, MB | a cold engine |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |")
    for case in sys.argv[1:] or CASES:
        print("\n".join(row(case)), flush=True)


if __name__ == "__main__":
    main()
