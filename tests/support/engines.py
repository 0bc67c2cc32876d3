"""Real vLLM engines, and trainers of two ranks, in processes of their own, so that pytest's process stays free of vLLM.

    engines   one process that imports vLLM once and holds one engine at a time (with TP=1 inside of it)
    trainers  two processes with gloo, for FSDP2; rank 0 reaches the engine in the other process

A test module gets both as fixtures with `pytest_plugins = ["engine_fixtures"]`; they last for the whole run. What runs
in these processes are module-level functions of the tests, which get the process's `Engines` or `Trainer` as their
first argument.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import threading
import time
import traceback
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any
from unittest import mock

import tiny_models
import torch
import zygote
from engine_state import State, differing, state_of
from gloo_loop import share_loop
from ranks import FORKSERVER, look_less_for_garbage, take_environment

from weightsync.engines.base import CalledEngine
from weightsync.engines.calls import PLUG_INS_SINCE
from weightsync.errors import EngineUnreachableError, SyncTimeoutError, WeightSyncError

TIMEOUT_S = 60.0
EXTENSION = {
    "weight_transfer_config": None,
    "worker_extension_cls": "weightsync.vllm.extension.WeightSyncWorkerExtension",
}
"""For an engine with the worker extension in the place of the plug-in."""
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # else asking for a GPU starts CUDA, which no fork survives
NOT_COMPILED = {} if torch.cuda.is_available() else {"TORCHDYNAMO_DISABLE": "1"}
"""For an engine's processes. Eager engines too compile what ranks the log-probabilities, each process for itself. On a
GPU that is quick, and what quantises there is compiled too."""
IN_CORE = {**NOT_COMPILED, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""For a server whose one worker is to live in the process of the engine's core, where a GPU's worker lives."""
GRAPHS = {"enforce_eager": False, "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
"""For an engine on a GPU with CUDA graphs. Nothing is compiled for it."""
LINEAR_ATTENTION = {} if find_spec("flashinfer") else {"gdn_prefill_backend": "triton"}
"""VLLM's `additional_config`: on Hopper it wants FlashInfer's kernel, also where that is not installed."""
ANSWER_TOKENS = 4
"""Every weight has a part in the first one's log-probabilities, and the cache of keys and values in the others."""
PROMPTS = [[5, 6, 7, 8], [9, 9, 3], [(7 * i * i + 11) % 251 for i in range(40)]]

Answer = list[tuple[list[int], list[dict[int, float]]]]
"""For each prompt: the token ids, and at each of them the log-probabilities of the likeliest tokens."""


def assert_same(found: Answer, expected: Answer, what: str) -> None:
    """Token ids and log-probabilities are equal to the bit."""
    for number, ((tokens, logprobs), (cold_tokens, cold_logprobs)) in enumerate(zip(found, expected, strict=True)):
        assert tokens == cold_tokens, f"{what}: prompt {number} was answered {tokens}, the cold engine {cold_tokens}"
        for at, (one, other) in enumerate(zip(logprobs, cold_logprobs, strict=True)):
            assert one == other, f"{what}: prompt {number}, token {at}: log-probabilities {one}, cold {other}"


# ---------------------------------------------------------------------------------------------------------------
# A process that does what it is told


class Remote:
    """A process that makes a `kind(*args)` and then runs functions on it, one at a time, until `close`."""

    context: BaseContext = FORKSERVER

    def __init__(self, kind: Callable[..., Any], *args: Any) -> None:
        self.connection, theirs = self.context.Pipe()
        # Not a daemon: those must not have processes of their own, and engines have.
        self.process = self.context.Process(  # type: ignore[attr-defined]
            target=_main, args=(theirs, dict(os.environ), kind, args), daemon=False
        )
        self.process.start()
        theirs.close()

    def begin(self, fn: Callable[..., Any], *args: Any) -> None:
        """Let the process run `fn(its object, *args)`; `result` gives what it returned."""
        self.connection.send((fn, args))

    def result(self, timeout_s: float = 300.0) -> Any:
        if not self.connection.poll(timeout_s):
            self.close()
            raise AssertionError(f"no answer from process {self.process.pid} within {timeout_s:g} s; it was ended")
        try:
            error, value = self.connection.recv()
        except EOFError:
            self.process.join(10)
            raise AssertionError(f"process {self.process.pid} ended with {self.process.exitcode}") from None
        if error is None:
            return value
        if hasattr(error, "add_note"):  # not in Python 3.10
            error.add_note(f"In process {self.process.pid}:\n{value}")
        raise error

    def call(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 300.0) -> Any:
        self.begin(fn, *args)
        return self.result(timeout_s)

    def close(self) -> None:
        self.connection.close()
        self.process.join(30)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(10)


class VllmRemote(Remote):
    """A `Remote` that needs vLLM. It is forked from the zygote, which has vLLM imported."""

    context = multiprocessing.get_context("spawn")


def _main(commands: Connection, environment: dict[str, str], kind: Callable[..., Any], args: tuple[Any, ...]) -> None:
    take_environment(environment)
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch starts its threads
    share_loop()
    look_less_for_garbage()
    subject = kind(*args)
    try:
        while True:
            for connection in wait([commands, *subject.connections]):
                assert isinstance(connection, Connection)
                connection.send(_outcome(subject, *connection.recv()))
    except (EOFError, OSError):
        pass  # whoever told us what to do has closed its end
    finally:
        subject.close()


def _outcome(subject: Any, fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Exception | None, Any]:
    try:
        return None, fn(subject, *args)
    except Exception as error:
        text = traceback.format_exc()
        try:
            multiprocessing.reduction.ForkingPickler.dumps(error)
        except Exception:
            error = AssertionError(f"{type(error).__name__}: {error}")
        return error, text


# ---------------------------------------------------------------------------------------------------------------
# Engines


class Engines:
    """Lives in the engines' process: one engine at a time. What engines that were started cold have answered is kept in
    the folder `known`, which all processes of a run share."""

    def __init__(self, folder: Path, known: Path, calls: Connection) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # an `LLM` with one worker lives in this process
        os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"  # below, it warns of everything that these models lack
        os.environ |= NOT_COMPILED
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # whole GiB, which take longer to clear than all else to start
        import vllm

        self.connections = [calls]  # from trainers in other processes: calls of `PipeEngine`
        self.llm: Any = None
        self.model: Any = None  # a trainer in this process
        self.sync: Any = None
        self._vllm = vllm
        self.folder = folder
        self._running: tuple[Any, ...] = ()
        self._cold_state: State | None = None
        self._known = known

    def serve(self, model: str, tp: int = 1, **options: Any) -> dict[str, Answer]:
        """Have an engine running that was started from the weights "A" of `model`, and that may have been pushed to
        since. Gives what engines that were started cold from the weights "A" and "B" answer."""
        key = (model, tp, repr(options))
        files = {w: self._known / f"{zlib.crc32(repr((key, w)).encode()):08x}.json" for w in ("B", "A")}
        if self._running != key:
            # Both before an engine starts: where vLLM runs transformers' own classes, it changes them in its process.
            folders = {weights: self.checkpoint(model, weights) for weights in files}
            for weights, file in files.items():
                if weights == "A" or not file.exists():
                    self.start(folders[weights], tensor_parallel_size=tp, **options)
                    note(self.ask(), file)
            self._running = key
            self._cold_state = state_of(self.live_model()) if tp == 1 else None
        return {weights: noted(file) for weights, file in files.items()}

    def odd_state(self) -> list[str]:
        """Return the tensors of the engine's modules that are not as they were when `serve` started it from "A"."""
        assert self._cold_state is not None
        return differing(state_of(self.live_model()), self._cold_state)

    def checkpoint(self, model: str, weights: str) -> Path:
        folder = self.folder / f"{model}-{weights}"
        return folder if folder.exists() else tiny_models.save(tiny_models.build(model, weights), folder)

    def save(self, name: str, save: Callable[[str, Path], object]) -> None:
        """Have the checkpoints that `serve` calls `name`. `save` writes one, of the weights "A" or "B", to a folder."""
        for weights in "AB":
            if not (folder := self.folder / f"{name}-{weights}").exists():
                save(weights, folder)

    def start(self, checkpoint: Path, **options: Any) -> None:
        """Start an `LLM`, `self.llm`, after ending the one that runs."""
        self.end()
        from vllm.compilation.monitor import set_cudagraph_capturing_enabled

        set_cudagraph_capturing_enabled(True)  # vLLM's V1 runner forbids it at its end, and its V2 runner inherits that
        zygote.freeze()  # or each end of an engine looks through all that the process has imported since the zygote
        try:
            self.llm = self._vllm.LLM(**in_this_process({**self.options(checkpoint), **options}))
        finally:
            torch.set_default_dtype(torch.float32)  # older vLLM leaves its own where an engine does not start

    def ask(self) -> Answer:
        return [answer_of(self.generate(prompt)) for prompt in PROMPTS]

    def refusal(self) -> str:
        """Return why the `LLM` of this process does not answer, "" where it does. No forward raises for it."""
        try:
            session_of(self)._check_whole()
        except WeightSyncError as error:
            return str(error)
        return ""

    def generate(self, prompt: list[int]) -> Any:
        """VLLM's own output. One prompt at a time: what else is in a batch may change the last bits."""
        (output,) = self.llm.generate([{"prompt_token_ids": prompt}], self.sampling(ANSWER_TOKENS), use_tqdm=False)
        return output

    def sampling(self, max_tokens: int) -> Any:
        return self._vllm.SamplingParams(
            max_tokens=max_tokens, temperature=0, logprobs=5, ignore_eos=True, detokenize=False
        )

    def options(self, checkpoint: Path) -> dict[str, Any]:
        """How every engine of the tests is started."""
        know_class(checkpoint)
        return options_of(checkpoint)

    def live_model(self) -> Any:
        """The module that an engine in this process runs."""
        worker = self.llm.llm_engine.model_executor.driver_worker.worker
        return worker.model_runner.model

    def end(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        self.release()  # whoever holds an engine keeps it alive, and its end then disturbs the next one
        if self.llm is not None:
            with mock.patch.object(gc, "collect"):  # once is enough: each of five looks through all that is imported
                self.llm, self._running = None, ()
                cleanup_dist_env_and_memory()
            gc.collect()

    close = end

    def release(self) -> None:
        """Let the trainer in this process go."""
        if self.sync is not None:
            self.sync.close()
        self.sync = self.model = None


def sleep_mode() -> AbstractContextManager[object]:
    """Let a CPU's engine start with `enable_sleep_mode`. Its sleep gives no memory back."""
    from vllm.platforms import current_platform as platform

    can = dict.fromkeys(("is_sleep_mode_available", "is_cumem_allocator_available"), lambda: True)
    return mock.patch.multiple(platform, create=True, **can)


def answers_around_sleep(engines: Engines, model: str) -> tuple[Answer, Answer]:
    """Return what an engine of "A" answers cold, and after a push of "B", sleep of level 2 and a push of "A"."""
    from weightsync import WeightSync

    cold = engines.ask()
    trainer = tiny_models.build(model, "B").cuda()
    with WeightSync("fsdp", "ipc", engines.llm, timeout_s=TIMEOUT_S) as sync:
        sync.push(trainer)
        assert engines.ask() != cold
        tiny_models.fill(trainer, "A")
        engines.llm.sleep(2)
        engines.llm.wake_up()
        sync.push(trainer)
    return cold, engines.ask()


def session_of(engines: Engines) -> Any:
    """The `WorkerSession` of an engine's worker in this process."""
    worker = engines.llm.llm_engine.model_executor.driver_worker.worker
    engine = worker.weight_transfer_engine
    return worker._weightsync() if engine is None else engine.session


def note(answer: Answer, file: Path) -> None:
    """Keep an answer; floats in JSON are exact."""
    draft = file.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(answer))
    draft.rename(file)  # another process may write the same


def noted(file: Path) -> Answer:
    rows = json.loads(file.read_text())
    return [(tokens, [{int(t): p for t, p in at.items()} for at in logprobs]) for tokens, logprobs in rows]


def has_plug_ins() -> bool:
    from vllm.version import __version_tuple__ as release

    return release >= PLUG_INS_SINCE


def in_this_process(options: dict[str, Any]) -> dict[str, Any]:
    """Options with which vLLM before 0.23 keeps a CPU's only worker in the process of its `LLM`, as later ones do."""
    from vllm.version import __version_tuple__ as release

    if release >= (0, 23) or torch.cuda.is_available():
        return options
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join("0" * options.get("tensor_parallel_size", 1))  # 0.20 has to know
    if options.get("tensor_parallel_size", 1) > 1:
        return options
    return {"distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor", **options}


def options_of(checkpoint: Path) -> dict[str, Any]:
    """What an engine with the plug-in is started with, or before vLLM 0.25 one with the worker extension."""
    plug_in = {"weight_transfer_config": {"backend": "weightsync"}}
    return {
        "model": str(checkpoint),
        "dtype": "bfloat16",
        "enforce_eager": True,
        "max_model_len": 256,
        "kv_cache_memory_bytes": 16 * 2**20,
        "gpu_memory_utilization": 0.1,  # what has to be free as it starts: others may be on the same GPU
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        **(plug_in if has_plug_ins() else EXTENSION),
    }


def know_class(checkpoint: Path) -> None:
    """Look at the class of a checkpoint's model in this process. VLLM looks at an architecture that is new to the
    machine in a process of its own, which takes 10 s for each."""
    from transformers import AutoConfig
    from vllm import ModelRegistry

    (architecture,) = AutoConfig.from_pretrained(checkpoint).architectures
    if architecture in ModelRegistry.models:  # it makes others of those that it has
        ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())


def answer_of(output: Any) -> tuple[list[int], list[dict[int, float]]]:
    completion = output.outputs[0]
    logprobs = [{token: row.logprob for token, row in rows.items()} for rows in completion.logprobs]
    return list(completion.token_ids), logprobs


class PipeEngine(CalledEngine):
    """An `Engine` of `weightsync.engines` for a trainer in another process than the `LLM` of an `Engines`."""

    host = "127.0.0.1"

    def __init__(self, calls: Connection) -> None:
        self.name = "the engine in the other process"
        self._calls = calls
        self._one_at_a_time = threading.Lock()

    def is_alive(self) -> bool:
        return self._call("is_alive") is True

    def _call(self, method: str, *args: Any) -> Any:
        with self._one_at_a_time:
            try:
                self._calls.send((_call_engine, (method, *args)))
                if not self._calls.poll(TIMEOUT_S + 10):
                    raise SyncTimeoutError(f"no answer to {method}", who=self.name, waiting_for=[self.name])
                error, value = self._calls.recv()
            except (EOFError, OSError) as gone:
                raise EngineUnreachableError(f"its process is gone ({method})", who=self.name) from gone
        if error is not None:
            raise error
        return value


def _call_engine(engines: Engines, method: str, *args: Any) -> Any:
    from weightsync.engines.llm import LlmEngine

    return getattr(LlmEngine(engines.llm, name="the engine", timeout_s=TIMEOUT_S), method)(*args)


# ---------------------------------------------------------------------------------------------------------------
# Trainers


@dataclass
class Trainer:
    """Lives in a trainer's process, rank `rank` of `size`."""

    rank: int
    size: int
    store: Path
    calls: Connection | None  # rank 0's way to the engine
    model: Any = None
    sync: Any = None
    connections: list[Connection] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        backend = "gloo"
        if torch.cuda.device_count() >= self.size:  # gloo crashes where a DTensor on GPUs is gathered
            torch.cuda.set_device(self.rank)
            backend = "cpu:gloo,cuda:nccl"
        torch.distributed.init_process_group(
            backend, init_method=f"file://{self.store}", rank=self.rank, world_size=self.size
        )

    @property
    def engine(self) -> PipeEngine | None:
        return PipeEngine(self.calls) if self.calls is not None else None

    def release(self) -> None:
        """Let go of the engine."""
        if self.sync is not None:
            self.sync.close()
        self.sync = self.model = None

    close = release


class Trainers:
    """The ranks of a trainer, which are told everything at once."""

    def __init__(self, size: int, folder: Path, calls: Connection) -> None:
        store = folder / f"store-{time.monotonic_ns()}"
        self._ranks = [Remote(Trainer, rank, size, store, calls if rank == 0 else None) for rank in range(size)]

    def call(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 300.0) -> list[Any]:
        """Every rank's result, in rank order. Raises what the first of them raised, once all are done."""
        for rank in self._ranks:
            rank.begin(fn, *args)
        results, errors = [], []
        for rank in self._ranks:
            try:
                results.append(rank.result(timeout_s))
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return results

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()
