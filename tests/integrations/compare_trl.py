"""Synchronise the same trainers with TRL's own method and with weightsync's, in turn: `make compare-trl`.

Seconds, memory and gathered bytes are the largest of all ranks. Both ways run in one process, after each other, and
each finds an engine whose parameters are zeros. Only a server has one of the two ways, so each way has its own, which
was started from untrained weights.

vLLM on a CPU packs linear layers, and TRL's method finds nothing there to load into. So these engines keep them plain.
On GPUs the model is larger, memory is the trainer's on its GPU, and there is a case of a server.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import conftest  # noqa: F401  # sets the environment of the engines
import torch
import trl_ranks
from engines import Answer, note, noted
from ranks import FORKSERVER, run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from weightsync.engines.http import HttpEngine
from weightsync.engines.server import VllmServer
from weightsync.integrations.trl import attach
from weightsync.net.child import Child, free_port
from weightsync.tools.processes import visible_gpus

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
ON_GPU = torch.cuda.is_available()
if ON_GPU:
    CASES |= {"a server": (1, {"vllm_mode": "server"})}
    ENGINE: dict[str, Any] = {"enforce_eager": True, "gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 2**28}
    SIZES = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28}
else:
    ENGINE = {"enforce_eager": False, "quantization": "weightsync_plain"}
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
    if ON_GPU:
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def forget_peak() -> None:
    """Let the peak be what there is now."""
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def measure(sync: Callable[[], None]) -> dict[str, float]:
    forget_peak()
    before, seconds, gathered = peak_bytes(), [], Gathered()
    for _ in range(ROUNDS):
        torch.distributed.barrier()
        if ON_GPU:
            torch.cuda.synchronize()
        started, gathered.nbytes = time.perf_counter(), 0
        with gathered:
            sync()
        if ON_GPU:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    least = min(seconds[1:])
    return {"first": seconds[0], "later": least, "memory": peak_bytes() - before, "gathered": gathered.nbytes}


def spoil(llm: Any) -> None:
    for param in llm.llm_engine.model_executor.driver_worker.model_runner.model.parameters():
        param.data.zero_()


def compare(rank: int, size: int, port: int, checkpoint: Path, urls: list[str], options: dict[str, Any]) -> None:
    """Compare both ways with engines in the ranks, or with the servers of TRL's way and of weightsync's."""
    trl_ranks.place(rank, size, port)
    trl_ranks.start_engines(**ENGINE)
    if urls:
        options = {"vllm_server_base_url": urls[0], **options}
    else:
        options = {"vllm_mode": "colocate", "vllm_max_model_length": 256, **options}
    trainer = trl_ranks.make("GRPO", checkpoint, optim="sgd", **options)
    generation, folder = trainer.vllm_generation, checkpoint.parent
    with nullcontext() if urls else attach(trainer):
        trainer.train()

    def compare_one(way: str, sync: Callable[[], None]) -> None:
        if not urls:
            spoil(generation.llm)
        figures = measure(sync)
        answer = trl_ranks.ask_server(generation.vllm_client) if urls else trl_ranks.ask(generation.llm)
        note(answer, folder / f"{way}-{rank}.json")
        (folder / f"{way}-{rank}.figures").write_text(json.dumps(figures))

    compare_one("TRL", lambda: type(generation).sync_weights(generation))
    if urls:
        generation.vllm_client.base_url = urls[1]
    with attach(trainer, "broadcast" if urls else "ipc"):
        compare_one("weightsync", generation.sync_weights)
        torch.distributed.barrier()  # none closes while another looks
    trl_ranks.save_trained(trainer, checkpoint, folder / "trained")


@contextmanager
def servers(checkpoint: Path) -> Iterator[list[str]]:
    """Run a server for TRL's way and one for weightsync's on the second GPU, and give their addresses."""
    options = ["--max-model-len=256", "--dtype=bfloat16", "--logprobs-mode=processed_logprobs"]
    for name, value in ENGINE.items():
        option = f"--{name.replace('_', '-')}"
        options.append(option if value is True else f"{option}={value}")
    url, second = f"http://127.0.0.1:{free_port()}", visible_gpus([1])
    serve = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(checkpoint), *options]
    serve += [f"--port={url.rpartition(':')[2]}", '--weight-transfer-config={"backend": "nccl"}']
    ours = VllmServer(checkpoint, *options, log=checkpoint.parent / "our-log", environment=second)
    with ExitStack() as cleanup:
        theirs = Child("TRL's server", serve, {"VLLM_SERVER_DEV_MODE": "1", **second}, checkpoint.parent / "their-log")
        cleanup.callback(theirs.stop)
        cleanup.callback(ours.stop)
        ours.launch()
        engine = HttpEngine(url, name=url, timeout_s=20)
        while not engine.is_alive():
            assert theirs.exit_report() is None, theirs.exit_report()
            time.sleep(0.5)
        ours.wait(120)
        yield [url, ours.url]


def cold(checkpoint: Path, tp: int) -> Answer:
    import engines

    ours = engines.Engines(checkpoint.parent, checkpoint.parent, FORKSERVER.Pipe()[0])
    ours.start(checkpoint, logprobs_mode="processed_logprobs", tensor_parallel_size=tp, **ENGINE)
    answer = ours.ask()
    ours.end()
    return answer


def row(case: str) -> list[str]:
    size, options = CASES[case]
    with tempfile.TemporaryDirectory() as name, ExitStack() as cleanup:
        folder = Path(name)
        checkpoint = trl_ranks.save(folder / "model", **SIZES)
        trl_ranks.clear_shared_memory()
        urls = cleanup.enter_context(servers(checkpoint)) if "vllm_mode" in options else []
        run_ranks(compare, size, size, free_port(), checkpoint, urls, options, timeout_s=150)
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
