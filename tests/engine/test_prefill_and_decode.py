"""Prefill in one engine and decoding in another: both get each push, and answer together as two cold engines."""

from __future__ import annotations

import os
import time
from contextlib import closing
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import tiny_models
import torch
from engines import ANSWER_TOKENS, PROMPTS, TIMEOUT_S, Answer, Engines, Remote, answer_of, assert_same

from weightsync import EngineError, WeightSync
from weightsync.net.child import free_port

pytest_plugins = ["engine_fixtures"]
pytestmark = pytest.mark.engine

PENDING = {"do_remote_decode": True, "do_remote_prefill": False}
ASKED = [*PROMPTS, [(5 * i * i + 3) % 251 for i in range(100)]]
LEASE_S = 6
OTHER = [(9 * i + 5) % 251 for i in range(100)]


class Pair:
    """An engine that prefills, and one that takes its keys and values over by NIXL and decodes."""

    def __init__(self, engines: Engines, weights: str) -> None:
        self._sampling = engines.sampling
        options = engines.options(engines.checkpoint("qwen3", weights))
        self.both = [_start(options, role) for role in ("kv_producer", "kv_consumer")]

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
        (output,) = self.both[number].generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        return output

    def close(self) -> None:
        for llm in self.both:
            llm.llm_engine.engine_core.shutdown()


def _start(options: dict[str, Any], role: str) -> Any:
    import vllm

    device = {} if torch.cuda.is_available() else {"kv_buffer_device": "cpu"}
    extra = {"kv_lease_duration": LEASE_S}
    transfer = {"kv_connector": "NixlConnector", "kv_role": role, "kv_connector_extra_config": extra, **device}
    # Each core is a process of its own: a process has one connector.
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
    with mock.patch.dict(os.environ, own):
        return vllm.LLM(**options, block_size=32, kv_transfer_config=transfer)


def push_to_both(engines: Engines) -> None:
    engines.end()
    with closing(Pair(engines, "B")) as cold:
        answers = {"B": cold.ask()}
    with closing(Pair(engines, "A")) as pair:
        answers["A"] = pair.ask()
        assert answers["A"] != answers["B"]
        mixed = answer_of(pair.decode(OTHER, pair.prefill(ASKED[-1])))
        assert mixed != answer_of(pair.generate(0, OTHER, ANSWER_TOKENS)), "the engine that decodes has prefilled"
        model = tiny_models.build("qwen3", "B")
        with WeightSync("fsdp", "ipc", pair.both, timeout_s=TIMEOUT_S) as sync:
            for weights in "BAB":
                tiny_models.fill(model, weights)
                sync.push(model)
                assert_same(pair.ask(), answers[weights], f"pushed {weights}")
            handed = pair.prefill(ASKED[-1])
            tiny_models.fill(model, "A")
            for _ in range(2):
                with pytest.raises(EngineError, match="1 requests are between prefill and decode"):
                    sync.push(model)
            assert_same([answer_of(pair.decode(ASKED[-1], handed))], answers["B"][-1:], "handed over in refused pushes")
            sync.push(model)
            assert_same(pair.ask(), answers["A"], "pushed once the keys and values were taken over")
            pair.prefill(ASKED[-1])
            time.sleep(LEASE_S + 1)
            with pytest.raises(EngineError, match="1 requests are between prefill and decode"):
                sync.push(model)  # as after a pause that has lasted for longer than the lease
            sync.push(model)


@pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed")
def test_prefill_and_decode_apart_answer_as_cold_engines(engines: Remote) -> None:
    engines.call(push_to_both)
