"""Pushed equals cold under expert and data parallelism, in an `LLM` of two workers, and an `AsyncLLM` and a server of
two cores.

An engine of several cores is one engine. All cores get the weights or none.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from engines import ANSWER_TOKENS, NOT_COMPILED, PROMPTS, TIMEOUT_S, Answer, Engines, Remote, answer_of, assert_same

from weightsync import WeightSync
from weightsync.engines import HttpEngine, LoraAdapter
from weightsync.errors import UnsupportedError, WeightSyncError
from weightsync.tools.processes import Server

pytest_plugins = ["engine_fixtures"]
pytestmark = pytest.mark.engine

EXPERTS = {"enable_expert_parallel": True, "worker_extension_cls": "cpu_experts.RunsExperts"}
MODEL = "qwen3-moe-of-5"
CORES = 2
LONG = 120
"""Tokens that take a core longer than a push."""
ASKED = 8
"""Questions to two API servers behind one address: one of them misses all of these once in 128 times."""


def serve(engines: Engines) -> dict[str, Answer]:
    return engines.serve(MODEL, 2, **EXPERTS)


def push_all(engines: Engines, transport: str, pushes: str) -> list[Answer]:
    """Push each of these weights from a trainer in the engine's process, and return the answers after each."""
    model, answers = tiny_models.build(MODEL, "B"), []
    with WeightSync("fsdp", transport, engines.llm, timeout_s=TIMEOUT_S) as sync:
        for weights in pushes:
            tiny_models.fill(model, weights)
            sync.push(model)
            answers.append(engines.ask())
    engines.release()
    return answers


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_experts_of_two_workers_that_share_them_unevenly(engines: Remote, transport: str):
    cold = engines.call(serve, timeout_s=240)
    for weights, answer in zip("BA", engines.call(push_all, transport, "BA"), strict=True):
        assert_same(answer, cold[weights], f"{weights} over {transport}")


# ---------------------------------------------------------------------------------------------------------------
# Two cores


class AsyncCores:
    """An `AsyncLLM` of two cores with an event loop in a thread of its own."""

    def __init__(self, engines: Engines, checkpoint: Path, **options: Any) -> None:
        import vllm

        self._engines, self._loop = engines, asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        arguments = {**engines.options(checkpoint), **EXPERTS, "data_parallel_size": CORES, **options}

        async def start() -> Any:
            return vllm.AsyncLLMEngine.from_engine_args(vllm.AsyncEngineArgs(**arguments))

        self.llm: Any = self.run(start(), 240)

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout_s: float = TIMEOUT_S) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    async def _generate(self, prompt: list[int], core: int, tokens: int) -> Any:
        number = f"{time.monotonic_ns()}-{core}"
        asked = self._engines.sampling(tokens)
        request = self.llm.generate({"prompt_token_ids": prompt}, asked, number, data_parallel_rank=core)
        return [output async for output in request][-1]

    def begin(self, core: int) -> Any:
        """Have a core generate, and return what waits for its end."""
        return asyncio.run_coroutine_threadsafe(self._generate(PROMPTS[0], core, LONG), self._loop)

    def ask(self) -> list[Answer]:
        """Return each core's answers."""
        return [
            [answer_of(self.run(self._generate(prompt, core, ANSWER_TOKENS))) for prompt in PROMPTS]
            for core in range(CORES)
        ]

    def nap(self) -> None:
        """Keep the last core from its next step for a while. Return when the other core waits for this step."""
        asyncio.run_coroutine_threadsafe(self.llm.collective_rpc("nap", args=(CORES - 1,)), self._loop)
        time.sleep(0.2)

    def end(self) -> None:
        async def end() -> None:
            self.llm.shutdown()

        self.run(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(TIMEOUT_S)


@contextmanager
def cores(engines: Engines, weights: str, **options: Any) -> Iterator[AsyncCores]:
    found = AsyncCores(engines, engines.checkpoint(MODEL, weights), **options)
    try:
        yield found
    finally:
        found.end()


def push_to_cores(engines: Engines) -> dict[str, Any]:
    engines.end()
    seen: dict[str, Any] = {}
    with cores(engines, "A") as engine:
        seen["cold"] = engine.ask()
    with cores(engines, "A", load_format="dummy") as engine:
        model = tiny_models.build(MODEL, "A")
        with WeightSync("fsdp", "ipc", engine.llm, timeout_s=TIMEOUT_S) as sync:
            requests = [engine.begin(core) for core in range(CORES)]
            while engine.llm.output_processor.get_num_unfinished_requests() < CORES:
                time.sleep(0.01)
            engine.nap()  # the last core's next call is the push's
            sync.push(model)
            seen["ran on"] = [len(request.result(TIMEOUT_S).outputs[0].token_ids) for request in requests]
            seen["A"] = engine.ask()
            tiny_models.fill(model, "B")
            engine.run(engine.llm.collective_rpc("fail_next_push", args=(1,)))
            with pytest.raises(WeightSyncError) as failed:
                sync.push(model)
            seen["failed"] = str(failed.value)
            seen["version"] = engine.run(engine.llm.get_weight_version())
            seen["paused"] = engine.run(engine.llm.is_paused())
            sync.push(model)
            seen["B"] = engine.ask()
        with WeightSync("fsdp", "broadcast", engine.llm, timeout_s=TIMEOUT_S) as sync:
            tiny_models.fill(model, "A")
            sync.push(model)
            seen["A again"] = engine.ask()
            engine.run(engine.llm.collective_rpc("end_in_next_push", args=(1,)))
            began = time.monotonic()
            with pytest.raises(WeightSyncError) as lost:
                sync.push(model)
            seen["lost"] = str(lost.value)
            seen["lost after"] = time.monotonic() - began
    return seen


def test_an_engine_of_two_cores_is_one_engine(engines: Remote):
    seen = engines.call(push_to_cores, timeout_s=400)
    for core in range(CORES):
        for after in ("A", "A again"):
            assert_same(seen[after][core], seen["cold"][core], f"{after} in core {core}")
        assert seen["B"][core] != seen["cold"][core]
    assert seen["ran on"] == [LONG] * CORES  # a push waits for both, whatever they were doing
    assert "dp=1" in seen["failed"]
    assert seen["version"].startswith("POISONED")
    assert seen["paused"]
    assert "dp=1 closed its connection" in seen["lost"]
    assert seen["lost after"] < TIMEOUT_S / 2


def test_a_server_of_two_cores_behind_two_api_servers_is_one_engine(engine_process: Remote, tmp_path: Path):
    """Each request may reach either API server, and each of these all cores."""
    checkpoint = engine_process.call(Engines.checkpoint, "qwen3", "A")
    options: dict[str, Any] = {
        "data_parallel_size": CORES,
        "api_server_count": 2,
        "worker_extension_cls": EXPERTS["worker_extension_cls"],
    }
    extension = [str(Path(tiny_models.__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = NOT_COMPILED | {"PYTHONPATH": os.pathsep.join(extension)}
    server = Server(checkpoint, "auto", tmp_path / "log", environment, options)
    try:
        server.wait(400)
        engine = HttpEngine(server.url, name="the server", timeout_s=TIMEOUT_S)
        before, model = server.generate(PROMPTS), tiny_models.build("qwen3", "B")
        with WeightSync("fsdp", "broadcast", server.url, timeout_s=TIMEOUT_S) as sync:
            assert len(sync.push(model).workers) == CORES
            after = server.generate(PROMPTS)
            tiny_models.fill(model, "A")
            engine.call("POST", "/collective_rpc", {"method": "fail_next_push", "args": [1]})
            with pytest.raises(WeightSyncError, match="dp=1"):
                sync.push(model)
            assert all((engine.version() or "").startswith("POISONED") for _ in range(ASKED))
            assert all(engine.is_paused() for _ in range(ASKED))
            version = sync.push(model).version
            assert {engine.version() for _ in range(ASKED)} == {str(version)}
            assert server.generate(PROMPTS) == before
            tiny_models.fill(model, "B")
            sync.push(model)
            assert server.generate(PROMPTS) == after
        with pytest.raises(UnsupportedError, match="--api-server-count 1"):
            engine.load_adapter(LoraAdapter("adapter", 1, str(tmp_path)))
    finally:
        server.stop()
    first, second = after[: len(PROMPTS)], after[len(PROMPTS) :]
    assert first == second != before[: len(PROMPTS)]
