"""Synchronise the same trainers with TRL's own method and with weightsync's, in turn: `make compare-trl`.

Seconds, memory and gathered bytes are the largest of all ranks. Both ways run in one process, after each other, and
each finds an engine whose parameters are zeros.

vLLM on a CPU packs linear layers, and TRL's method finds nothing there to load into. So these engines keep them plain.
"""

from __future__ import annotations

import json
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

trl_ranks.preload()
ROUNDS = 5
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "one rank, merged adapters": (1, {"adapters": True}),
    "DDP, an engine in each of 2 ranks": (2, {}),
    "DDP, an engine of 2 ranks": (2, {"vllm_tensor_parallel_size": 2}),
    "FSDP2, an engine in each of 2 ranks": (2, {"fsdp": True}),
    "FSDP2, an engine of 2 ranks": (2, {"fsdp": True, "vllm_tensor_parallel_size": 2}),
    "ZeRO-3, an engine in each of 2 ranks": (2, {"deepspeed": trl_ranks.ZERO}),
    "ZeRO-3, merged adapters": (2, {"deepspeed": trl_ranks.ZERO, "adapters": True}),
}
PLAIN = {"quantization": "weightsync_plain"}
SIZES = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8}


class Gathered(TorchDispatchMode):
    """Counts the bytes that collectives gather in this process."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "c10d" in func.namespace and "gather" in func.__name__:
            gathered = result if func.namespace == "_c10d_functional" else args[0]
            tensors = torch.utils._pytree.tree_leaves(gathered)
            self.nbytes += sum(each.nbytes for each in tensors if isinstance(each, torch.Tensor))
        return result


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def measure(sync: Callable[[], None]) -> dict[str, float]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    before, seconds, gathered = peak_bytes(), [], Gathered()
    for _ in range(ROUNDS):
        torch.distributed.barrier()
        started, gathered.nbytes = time.perf_counter(), 0
        with gathered:
            sync()
        seconds.append(time.perf_counter() - started)
    least = min(seconds[1:])
    return {"first": seconds[0], "later": least, "memory": peak_bytes() - before, "gathered": gathered.nbytes}


def spoil(llm: Any) -> None:
    for param in llm.llm_engine.model_executor.driver_worker.model_runner.model.parameters():
        param.data.zero_()


def compare(rank: int, size: int, port: int, checkpoint: Path, options: dict[str, Any]) -> None:
    from weightsync.integrations.trl import attach

    trl_ranks.place(rank, size, port)
    trl_ranks.start_engines(**PLAIN)
    trainer = trl_ranks.make(
        "GRPO", checkpoint, vllm_mode="colocate", vllm_max_model_length=256, optim="sgd", **options
    )
    generation, folder = trainer.vllm_generation, checkpoint.parent
    with attach(trainer):
        trainer.train()

    def compare_one(way: str, sync: Callable[[], None]) -> None:
        spoil(generation.llm)
        figures = measure(sync)
        note(trl_ranks.ask(generation.llm), folder / f"{way}-{rank}.json")
        (folder / f"{way}-{rank}.figures").write_text(json.dumps(figures))

    compare_one("TRL", lambda: type(generation).sync_weights(generation))
    with attach(trainer):
        compare_one("weightsync", generation.sync_weights)
        torch.distributed.barrier()  # none closes while another looks
    trl_ranks.save_trained(trainer, checkpoint, folder / "trained")


def cold(checkpoint: Path, tp: int) -> Answer:
    import engines

    ours = engines.Engines(checkpoint.parent, checkpoint.parent, FORKSERVER.Pipe()[0])
    ours.start(checkpoint, enforce_eager=False, logprobs_mode="processed_logprobs", tensor_parallel_size=tp, **PLAIN)
    answer = ours.ask()
    ours.end()
    return answer


def row(case: str) -> list[str]:
    size, options = CASES[case]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint = trl_ranks.save(folder / "model", **SIZES)
        trl_ranks.clear_shared_memory()
        run_ranks(compare, size, size, free_port(), checkpoint, options, timeout_s=150)
        with ProcessPoolExecutor(1, FORKSERVER) as process:
            tp = options.get("vllm_tensor_parallel_size", 1)
            expected = process.submit(cold, folder / "trained", tp).result(200)
        lines = []
        for way in ("TRL", "weightsync"):
            figures = [json.loads((folder / f"{way}-{rank}.figures").read_text()) for rank in range(size)]
            most = {key: max(each[key] for each in figures) for key in figures[0]}
            equal = all(noted(folder / f"{way}-{rank}.json") == expected for rank in range(size))
            lines.append(
                f"| {case} | {way} | {most['first']:.2f} | {most['later']:.3f} | {most['memory'] / 1e6:.0f} | "
                f"{most['gathered'] / 1e6:.0f} | {'yes' if equal else 'no'} |"
            )
        print(f"{(folder / 'trained/model.safetensors').stat().st_size / 1e6:.0f} MB", file=sys.stderr)
        return lines


def main() -> None:
    print("| trainer | sync | first, s | later, s | more memory, MB | gathered, MB | equals a cold engine |")
    print("| --- | --- | ---: | ---: | ---: | ---: | --- |")
    for case in sys.argv[1:] or CASES:
        print("\n".join(row(case)), flush=True)


if __name__ == "__main__":
    main()
