"""Prefill in one engine and decoding in another: both get each push, and answer together as two cold engines."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import tiny_models
import torch
from engines import ANSWER_TOKENS, PROMPTS, TIMEOUT_S, Answer, Engines, Remote, answer_of, assert_same
from test_engines import loop_in_a_thread
from test_single_copy import on_meta

from weightsync import CheckpointTransport, ConfigError, EngineError, UnsupportedError, WeightSync
from weightsync.net.child import free_port

pytest_plugins = ["engine_fixtures"]
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed"),
]

PENDING = {"do_remote_decode": True, "do_remote_prefill": False}
ASKED = [*PROMPTS, [(5 * i * i + 3) % 251 for i in range(100)]]
LEASE_S = 6
OTHER = [(9 * i + 5) % 251 for i in range(100)]
BETWEEN = "1 requests are between prefill and decode"


class Pair:
    """An engine that prefills, and one that takes its keys and values over by NIXL and decodes."""

    def __init__(self, engines: Engines, weights: str) -> None:
        self._sampling = engines.sampling
        # Left as they are, weights can be shared with a trainer.
        plain = {"block_size": 32, "quantization": "weightsync_plain", "worker_extension_cls": "patient_nixl.Pauses"}
        options = {**engines.options(engines.checkpoint("qwen3", weights)), **plain}
        self.both = [self._start(options, role) for role in ("kv_producer", "kv_consumer")]

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """Return what vLLM's proxy hands over to the engine that decodes."""
        return self.generate(0, prompt, 1, PENDING).kv_transfer_params

    def decode(self, prompt: list[int], handed: dict[str, Any]) -> Any:
        return self.generate(1, prompt, ANSWER_TOKENS, handed)

    def ask(self) -> Answer:
        return [answer_of(self.decode(prompt, self.prefill(prompt))) for prompt in ASKED]

    def generate(self, number: int, prompt: list[int], tokens: int, handed: dict[str, Any] | None = None) -> Any:
        sampling = self._sampling(tokens)
        sampling.extra_args = handed and {"kv_transfer_params": handed}
        return self._answer(self.both[number], {"prompt_token_ids": prompt}, sampling)

    def close(self) -> None:
        for llm in self.both:
            llm.llm_engine.engine_core.shutdown()

    def _start(self, options: dict[str, Any], role: str) -> Any:
        device = {} if torch.cuda.is_available() else {"kv_buffer_device": "cpu"}
        extra = {"kv_lease_duration": LEASE_S}
        transfer = {"kv_connector": "NixlConnector", "kv_role": role, "kv_connector_extra_config": extra, **device}
        # Each core is a process of its own: a process has one connector.
        own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
        with mock.patch.dict(os.environ, own):
            return self._make({**options, "kv_transfer_config": transfer})

    def _make(self, options: dict[str, Any]) -> Any:
        import vllm

        return vllm.LLM(**options)

    def _answer(self, llm: Any, prompt: Any, sampling: Any) -> Any:
        (output,) = llm.generate([prompt], sampling, use_tqdm=False)
        return output


class AsyncPair(Pair):
    """A `Pair` of `AsyncLLM`s: these generate while a push pauses the other one."""

    def __init__(self, engines: Engines, weights: str, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        super().__init__(engines, weights)

    def is_paused(self, number: int) -> bool:
        return self._within_loop(self.both[number].is_paused())

    def close(self) -> None:
        async def end() -> None:
            for llm in self.both:
                llm.shutdown()

        self._within_loop(end())

    def _make(self, options: dict[str, Any]) -> Any:
        import vllm

        async def make() -> Any:
            return vllm.AsyncLLMEngine.from_engine_args(vllm.AsyncEngineArgs(**options))

        return self._within_loop(make(), 120)

    def _answer(self, llm: Any, prompt: Any, sampling: Any) -> Any:
        async def answer() -> Any:
            return [output async for output in llm.generate(prompt, sampling, str(time.monotonic_ns()))][-1]

        return self._within_loop(answer())

    def _within_loop(self, coroutine: Coroutine[Any, Any, Any], timeout_s: float = TIMEOUT_S) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)


def push_with_a_request_between(pair: AsyncPair, before: Answer) -> Answer:
    """Push to a pair of the weights "B". The engine that decodes is listed first. Return the answers afterwards."""
    model = tiny_models.build("qwen3", "B")
    with (
        WeightSync("fsdp", "ipc", pair.both[::-1], timeout_s=TIMEOUT_S) as sync,
        ThreadPoolExecutor(1) as pool,
    ):
        sync.push(model)  # or agreeing on the tensors would outlast the lease
        tiny_models.fill(model, "A")
        handed = pair.prefill(ASKED[-1])
        pushing = pool.submit(sync.push, model)
        deadline = time.monotonic() + TIMEOUT_S
        while not pair.is_paused(0):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        first = answer_of(pair.generate(1, ASKED[-1], 1, handed))
        pushing.result(TIMEOUT_S)
    after = pair.ask()
    # The engine that decodes may pause before its first token. It then computes the request anew.
    assert first in [(tokens[:1], logprobs[:1]) for tokens, logprobs in (before[-1], after[-1])]
    return after


def push_and_refuse(pair: Pair, answers: dict[str, Answer], before: str, weights: str, sync: WeightSync) -> None:
    """Push with a request between the engines of a pair, and again once the request is taken over."""
    model = tiny_models.build("qwen3", before)
    sync.push(model)
    handed = pair.prefill(ASKED[-1])
    tiny_models.fill(model, weights)
    for _ in range(2):
        with pytest.raises(EngineError, match=BETWEEN):
            sync.push(model)
    assert_same([answer_of(pair.decode(ASKED[-1], handed))], answers[before][-1:], "handed over in refused pushes")
    sync.push(model)
    assert_same(pair.ask(), answers[weights], "pushed once the keys and values were taken over")


def write_into_one(pair: Pair, answers: dict[str, Answer]) -> None:
    """Write "B" into the shared memory of the engine that prefills, and push it into the other one."""
    prefills, decodes = pair.both
    with WeightSync("fsdp", "single_copy", prefills, timeout_s=TIMEOUT_S) as sync, pytest.raises(ConfigError):
        sync.attach(on_meta("qwen3"))
    with (
        WeightSync("fsdp", "single_copy", prefills, timeout_s=TIMEOUT_S, pause="caller") as shared,
        WeightSync("fsdp", "ipc", decodes, timeout_s=TIMEOUT_S, pause="caller") as copied,
    ):
        model = on_meta("qwen3")
        shared.attach(model)
        handed = pair.prefill(ASKED[-1])
        with pytest.raises(EngineError, match=BETWEEN), shared.writing():
            raise AssertionError("the body must not run")
        assert_same([answer_of(pair.decode(ASKED[-1], handed))], answers["A"][-1:], "nothing was written")
        with shared.writing():
            tiny_models.fill(model, "B")
        copied.push(tiny_models.build("qwen3", "B"))
        assert_same(pair.ask(), answers["B"], "written into one engine, pushed into the other")


def push_to_both(engines: Engines, folder: Path) -> None:
    engines.end()
    answers: dict[str, Answer] = {}
    with loop_in_a_thread() as loop, closing(AsyncPair(engines, "B", loop)) as cold:
        answers["B"] = cold.ask()
        pushed = push_with_a_request_between(cold, answers["B"])
    with closing(Pair(engines, "A")) as pair:
        answers["A"] = pair.ask()
        assert answers["A"] != answers["B"]
        assert_same(pushed, answers["A"], "pushed to AsyncLLMs with a request between them")
        mixed = answer_of(pair.decode(OTHER, pair.prefill(ASKED[-1])))
        assert mixed != answer_of(pair.generate(0, OTHER, ANSWER_TOKENS)), "the engine that decodes has prefilled"
        model = tiny_models.build("qwen3", "B")
        for options, words in (({"rolling": True}, "leave rolling out"), ({"engine": pair.both[1]}, "of both roles")):
            options = {"engine": pair.both, "timeout_s": TIMEOUT_S, **options}
            with WeightSync("fsdp", "ipc", **options) as sync, pytest.raises(ConfigError, match=words):
                sync.push(model)
        assert_same(pair.ask(), answers["A"], "refused")
        with WeightSync("fsdp", "ipc", pair.both, timeout_s=TIMEOUT_S) as sync:
            for weights in "BAB":
                tiny_models.fill(model, weights)
                sync.push(model)
                assert_same(pair.ask(), answers[weights], f"pushed {weights}")
            push_and_refuse(pair, answers, "B", "A", sync)
            pair.prefill(ASKED[-1])
            time.sleep(LEASE_S + 1)
            with pytest.raises(EngineError, match=BETWEEN):
                sync.push(model)  # as after a pause that has lasted for longer than the lease
            sync.push(model)
        with WeightSync("fsdp", "broadcast", pair.both, timeout_s=TIMEOUT_S, encoding="delta") as sync:
            push_and_refuse(pair, answers, "A", "B", sync)
        with WeightSync("fsdp", CheckpointTransport(folder), pair.both, timeout_s=TIMEOUT_S) as sync:
            push_and_refuse(pair, answers, "B", "A", sync)
        write_into_one(pair, answers)


def test_prefill_and_decode_apart_answer_as_cold_engines(engines: Remote, tmp_path: Path) -> None:
    engines.call(push_to_both, tmp_path)


# ---------------------------------------------------------------------------------------------------------------
# The notes of vLLM's connectors, in its own classes


def connector_of(without: str = "") -> Any:
    """Return a connector, its worker without the attribute of this name."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import connector, stats

    worker = object.__new__(connector.NixlPullConnectorWorker)
    notes = {"_reqs_to_send": {}, "_recving_metadata": {}, "xfer_stats": stats.NixlKVConnectorStats()}
    vars(worker).update({name: value for name, value in notes.items() if name != without})
    return SimpleNamespace(connector_worker=worker)


def read_the_notes_of(*connectors: Any) -> Any:
    """Return a `HandedOver` of an engine with these connectors, several of them in a MultiConnector."""
    from vllm.config import KVTransferConfig

    from weightsync.vllm import handed_over

    one = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    config = KVTransferConfig(**one)
    group = connectors[0] if connectors else None
    if len(connectors) > 1:
        extra = {"connectors": [one] * len(connectors)}
        config = KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config=extra)
        group = SimpleNamespace(_connectors=list(connectors))
    found = handed_over.HandedOver()
    with (
        mock.patch.object(handed_over, "has_kv_transfer_group", return_value=group is not None),
        mock.patch.object(handed_over, "get_kv_transfer_group", return_value=group),
    ):
        found.watch(config)
    return found


def find_requests(engines: Engines) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats

    record = NixlKVConnectorStats.record_kv_expired_req
    first, second = connector_of(), connector_of()
    try:
        found = read_the_notes_of(first, second)
        found.check()
        notes = [vars(each.connector_worker) for each in (first, second)]
        for each in notes:
            each["_reqs_to_send"]["one request"] = 0.0
        notes[1]["_recving_metadata"]["another one"] = None
        with pytest.raises(EngineError, match="2 requests are between"):
            found.check()
        for each in notes:
            each["_reqs_to_send"].clear()
            each["_recving_metadata"].clear()
        notes[0]["xfer_stats"].record_kv_expired_req()
        with pytest.raises(EngineError, match=BETWEEN):
            found.check()
        assert notes[0]["xfer_stats"].data["num_kv_expired_reqs"] == [1]
        found.check()
        for unlike in (
            lambda: read_the_notes_of(connector_of("_reqs_to_send")),
            lambda: read_the_notes_of(connector_of("_recving_metadata")),
            lambda: read_the_notes_of(connector_of(), connector_of("xfer_stats")),
            lambda: read_the_notes_of(),
        ):
            with pytest.raises(UnsupportedError, match="note requests between prefill and decode as expected"):
                unlike()
    finally:
        NixlKVConnectorStats.record_kv_expired_req = record


def test_notes_of_requests_under_other_names_are_refused(engines: Remote) -> None:
    engines.call(find_requests)
