"""Pushed equals cold: an engine that was pushed to answers as one that was started from these weights, to the bit."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny_models
import torch
from engines import (
    ANSWER_TOKENS,
    EXTENSION,
    PROMPTS,
    TIMEOUT_S,
    Answer,
    Engines,
    Remote,
    Trainer,
    Trainers,
    answer_of,
    assert_same,
)

from weightsync import PushReport, WeightSync
from weightsync.errors import ManifestError
from weightsync.fleet import connect
from weightsync.tools.testing import check_engine
from weightsync.transports import nccl
from weightsync.transports.shared_handles import SHARED_MEMORY

pytest_plugins = ["engine_fixtures"]
pytestmark = pytest.mark.engine

BUCKETS: dict[str, dict[str, Any]] = {
    "one chunk": {"bucketer": "threshold", "max_bytes": 1 << 30},
    "small chunks": {"bucketer": "module", "max_bytes": 1 << 14},
    "a bucket for each parameter": {"bucketer": "parameter"},
}
# Other families of models: test_models.py.
SERVED = [("qwen3", 1), ("qwen3-moe", 1), ("qwen3", 2), ("qwen3-moe", 2)]

# ---------------------------------------------------------------------------------------------------------------
# What runs in the other processes. A trainer is either two ranks with FSDP2, or a plain module beside the engine.


def load(
    trainer: Trainer | Engines, model: str, transport: str, options: dict[str, Any], dtype: torch.dtype = torch.bfloat16
) -> None:
    trainer.release()
    trainer.model = tiny_models.build(model, "A", dtype)
    if isinstance(trainer, Trainer):
        tiny_models.shard(trainer.model)
        engine = trainer.engine
    else:
        engine = trainer.llm
    trainer.sync = WeightSync("fsdp", transport, engine, timeout_s=TIMEOUT_S, **options)


def push(trainer: Trainer | Engines, weights: str) -> PushReport:
    tiny_models.fill(trainer.model, weights)
    return trainer.sync.push(trainer.model)


# ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "fsdp2"])
@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
@pytest.mark.parametrize(("model", "tp"), SERVED, ids=[f"{model}-tp{tp}" for model, tp in SERVED])
def test_pushed_equals_cold(engines: Remote, trainers: Trainers, model: str, tp: int, transport: str, kind: str):
    check_equals_cold(engines, trainers, model, tp, transport, kind)


@pytest.mark.parametrize("kind", ["plain", "fsdp2"])
def test_pushed_over_nixl_equals_cold(engines: Remote, trainers: Trainers, kind: str):
    pytest.importorskip("nixl")
    check_equals_cold(engines, trainers, *SERVED[-1], "nixl", kind)  # it is still running


def check_equals_cold(engines: Remote, trainers: Trainers, model: str, tp: int, transport: str, kind: str) -> None:
    cold = engines.call(Engines.serve, model, tp, timeout_s=240)
    assert cold["A"] != cold["B"]
    trainer = engines if kind == "plain" else trainers
    for (buckets, options), pushes in zip(BUCKETS.items(), ("BBA", "BA", "B"), strict=True):
        trainer.call(load, model, transport, options)
        for number, weights in enumerate(pushes):
            trainer.call(push, weights)
            assert_same(engines.call(Engines.ask), cold[weights], f"push {number} ({weights}) in {buckets}")


def check_client(engines: Engines) -> None:
    (engine,) = connect(engines.llm, TIMEOUT_S)
    check_engine(engine, timeout_s=TIMEOUT_S)


def test_an_engine_of_two_workers_keeps_what_every_engine_promises(engines: Remote):
    model, tp = SERVED[-1]  # it is still running
    engines.call(Engines.serve, model, tp, timeout_s=240)
    before = engines.call(Engines.ask)
    engines.call(check_client)
    assert_same(engines.call(Engines.ask), before, "nothing was pushed")


def mappings(engines: Engines) -> int:
    """Count the mappings of shared memory in the engine's workers."""
    maps = [Path(f"/proc/{worker.pid}/maps").read_text() for worker in psutil.Process().children()]
    return sum(each.count(f" {SHARED_MEMORY}/#") for each in maps)


def push_and_close(engines: Engines, model: str) -> tuple[int, int]:
    """Return how many mappings a push adds to those that workers have without a trainer, and a close leaves."""
    found = []
    for _ in range(2):
        load(engines, model, "ipc", {})
        push(engines, "B")
        during = mappings(engines)
        engines.release()
        found += [during, mappings(engines)]
    _, before, during, after = found
    return during - before, after - before


def test_workers_unmap_a_trainer_that_has_closed(engines: Remote):
    model, tp = SERVED[-1]  # it is still running
    engines.call(Engines.serve, model, tp, timeout_s=240)
    added, left = engines.call(push_and_close, model)
    assert added > 0
    assert left == 0


def push_between(trainer: Trainer, share: float) -> PushReport:
    """Push the weights "A" with this share of the values of "B"."""
    params = [param.to_local().detach() for param in trainer.model.parameters()]
    tiny_models.fill(trainer.model, "B")
    others = [param.clone() for param in params]
    tiny_models.fill(trainer.model, "A")
    draw = torch.Generator().manual_seed(trainer.rank)
    for param, other in zip(params, others, strict=True):
        param.copy_(torch.where(torch.rand(param.shape, generator=draw) < share, other, param))
    return trainer.sync.push(trainer.model)


def choose_kind(trainer: Trainer, is_words: bool) -> None:
    nccl.finds_words = lambda device: is_words


@pytest.mark.parametrize("is_words", [False, True], ids=["messages", "changed words"])
def test_pushed_as_differences_equals_cold(engines: Remote, trainers: Trainers, is_words: bool):
    """Changed words are for GPUs. Here they travel between CPUs."""
    model, tp = SERVED[-1]
    cold = engines.call(Engines.serve, model, tp, timeout_s=240)
    trainers.call(choose_kind, is_words)
    trainers.call(load, model, "broadcast", {**BUCKETS["small chunks"], "encoding": "delta"})
    sent = {}
    for number, share in enumerate([0.0, 0.01, 0.02, 0.0, 0.02, 1.0]):
        sent[number] = trainers.call(push_between, share)[0].sent_bytes
        if share in (0.0, 1.0):
            assert_same(engines.call(Engines.ask), cold["B" if share else "A"], f"push {number}")
    trainers.call(choose_kind, False)
    assert max(sent[number] for number in (1, 2, 3, 4)) < sent[0] / 5


@pytest.mark.parametrize("kind", ["plain", "fsdp2"])
@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_a_trainer_in_float32_equals_the_checkpoint_in_the_dtype_of_the_engine(
    engines: Remote, trainers: Trainers, transport: str, kind: str
):
    cold = engines.call(Engines.serve, "qwen2", timeout_s=240)
    trainer = engines if kind == "plain" else trainers
    trainer.call(load, "qwen2", transport, {}, torch.float32)
    for weights in "AB":
        trainer.call(push, weights)
        assert_same(engines.call(Engines.ask), cold[weights], f"push of {weights}")


# ---------------------------------------------------------------------------------------------------------------
# The comparison itself


def push_with_one_wrong_element(engines: Engines, name: str) -> None:
    tiny_models.fill(engines.model, "B")
    with torch.no_grad():
        dict(engines.model.named_parameters())[name].view(-1)[17] += 0.25
    engines.sync.push(engines.model)


def test_one_wrong_element_does_not_pass_as_equal(engines: Remote):
    cold = engines.call(Engines.serve, "llama", timeout_s=240)
    engines.call(load, "llama", "ipc", {})
    for name in ("model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight"):
        engines.call(push_with_one_wrong_element, name)
        with pytest.raises(AssertionError, match=r"the cold engine|log-probabilities"):
            assert_same(engines.call(Engines.ask), cold["B"], name)
    engines.call(push, "B")
    assert_same(engines.call(Engines.ask), cold["B"], "put right")


# ---------------------------------------------------------------------------------------------------------------
# Beside the weights


def push_to_an_engine_without_weights(engines: Engines, model: str, weights: str) -> Answer:
    engines.start(engines.checkpoint(model, weights), load_format="dummy")
    load(engines, model, "ipc", {})
    push(engines, weights)
    return engines.ask()


@pytest.mark.parametrize("model", ["gemma2", "qwen3-moe"])
def test_an_engine_may_start_with_dummy_weights(engines: Remote, model: str):
    cold = engines.call(Engines.serve, model, timeout_s=240)
    assert_same(engines.call(push_to_an_engine_without_weights, model, "B"), cold["B"], "the first push")


def push_to_a_fresh_engine(engines: Engines, model: str, weights: str) -> tuple[Answer, Answer]:
    """What the engine answers before and after a push of the weights that it was started from."""
    engines.start(engines.checkpoint(model, weights))
    before = engines.ask()
    load(engines, model, "ipc", {})
    push(engines, weights)
    return before, engines.ask()


def test_experts_are_the_same_after_a_push_of_the_same(engines: Remote):
    # On CPUs with AVX512 vLLM's own reload puts experts where packed ones belong, and the output changes.
    before, after = engines.call(push_to_a_fresh_engine, "qwen3-moe", "B")
    assert_same(after, before, "identity push")


LONG = [(5 * i * i + 3) % 251 for i in range(200)]


def ask_long(engines: Engines) -> tuple[int, Answer]:
    """How many of the prompt's tokens came from the prefix cache, and the answer."""
    output = engines.generate(LONG)
    return output.num_cached_tokens, [answer_of(output)]


def ask_long_of_a_cold_engine(engines: Engines, model: str, weights: str) -> tuple[int, Answer]:
    engines.start(engines.checkpoint(model, weights))
    return ask_long(engines)


def test_nothing_is_answered_from_what_older_weights_left_in_the_prefix_cache(engines: Remote):
    _, cold = engines.call(ask_long_of_a_cold_engine, "qwen3", "B")
    engines.call(ask_long_of_a_cold_engine, "qwen3", "A")
    cached, _ = engines.call(ask_long)
    assert cached > 0, "the prompt is not cached at all, so this test would show nothing"
    engines.call(load, "qwen3", "ipc", {})
    engines.call(push, "B")
    cached, pushed = engines.call(ask_long)
    assert cached == 0
    assert_same(pushed, cold, "a prompt that had been answered before the push")


def push_by_the_extension(engines: Engines, tp: int) -> list[tuple[int, Answer, Answer]]:
    """For each push, of B, what cannot be pushed, and A: how many tokens came from the prefix cache after it, and the
    answers."""
    engines.start(engines.checkpoint("qwen3", "A"), tensor_parallel_size=tp, **EXTENSION)
    if tp == 1 and not torch.cuda.is_available():
        engines.llm.llm_engine.model_executor.driver_worker.worker.device = None  # as in vLLM's workers before 0.23
    found = []
    load(engines, "qwen3", "ipc", {})
    for weights in "BxA":
        ask_long(engines)
        if weights == "x":
            bias = torch.nn.Parameter(torch.zeros(7))
            engines.model.model.norm.register_parameter("bias", bias)
            with pytest.raises(ManifestError, match=r"Unexpected 1: model\.norm\.bias"):
                engines.sync.push(engines.model)
            del engines.model.model.norm.bias
        else:
            push(engines, weights)
        cached, long = ask_long(engines)
        found.append((cached, engines.ask(), long))
    return found


@pytest.mark.parametrize("tp", [1, 2])
def test_an_engine_with_the_worker_extension_in_place_of_the_plug_in(engines: Remote, tp: int):
    cold = engines.call(Engines.serve, "qwen3", tp, timeout_s=240)
    after_b, after_nothing, after_a = engines.call(push_by_the_extension, tp, timeout_s=240)
    assert_same(after_b[1], cold["B"], "push of B")
    assert_same(after_nothing[1], cold["B"], "nothing was pushed")
    assert_same(after_a[1], cold["A"], "push of A")
    assert (after_b[0], after_a[0]) == (0, 0)
    assert after_nothing[0] > 0, "the prompt is not cached at all, so this test would show nothing"
    assert after_nothing[2] == after_b[2] != after_a[2]


# ---------------------------------------------------------------------------------------------------------------
# Two engines in one push, one of them with a request in flight

Flight = dict[str, Any]


def push_with_a_request_in_flight(engines: Engines, model: str) -> dict[str, Flight]:
    """Push to the engine that is running and to an `AsyncLLM`, once by each transport. Empty where vLLM does not say
    which weights gave a token."""
    import vllm

    if "weight_versions" not in vllm.CompletionOutput.__dataclass_fields__:
        return {}
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def within_loop(coroutine: Coroutine[Any, Any, Any], timeout_s: float = TIMEOUT_S) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(timeout_s)

    async def start() -> Any:
        arguments = vllm.AsyncEngineArgs(**engines.options(engines.checkpoint(model, "A")))
        return vllm.AsyncLLMEngine.from_engine_args(arguments)

    async def generate(prompt: list[int], tokens: int, under_way: threading.Event | None = None) -> Any:
        request = llm.generate({"prompt_token_ids": prompt}, engines.sampling(tokens), str(time.monotonic_ns()))
        async for output in request:
            if under_way is not None and len(output.outputs[0].token_ids) >= 5:
                under_way.set()
        return output

    def push_in_flight(transport: str, before: str, weights: str) -> Flight:
        under_way = threading.Event()
        with WeightSync("fsdp", transport, [engines.llm, llm], timeout_s=TIMEOUT_S, pause="keep") as sync:
            trained = tiny_models.build(model, before)
            for _ in range(10):  # on a busy machine the request may be over before the engine pauses
                tiny_models.fill(trained, before)
                sync.push(trained)  # or the request might be over before all is agreed upon
                tiny_models.fill(trained, weights)
                under_way.clear()
                request = asyncio.run_coroutine_threadsafe(generate(PROMPTS[0], 200, under_way), loop)
                assert under_way.wait(TIMEOUT_S), "the request did not begin"
                version = sync.push(trained).version
                kept = request.result(TIMEOUT_S).outputs[0]
                *_, last = kept.weight_versions
                if last.start > 0:
                    break
        tokens = list(kept.token_ids)
        continued = within_loop(generate(PROMPTS[0] + tokens[: last.start], len(tokens) - last.start))
        return {
            "version": str(version),
            "finish_reason": kept.finish_reason,
            "tokens": tokens,
            "last": last,
            "continued": tokens[: last.start] + list(continued.outputs[0].token_ids),
            "llm": engines.ask(),
            "async": [answer_of(within_loop(generate(prompt, ANSWER_TOKENS))) for prompt in PROMPTS],
        }

    async def end() -> None:
        llm.shutdown()

    llm = within_loop(start(), 120)
    try:
        flights = {
            "ipc": push_in_flight("ipc", "A", "B"),
            "broadcast": push_in_flight("broadcast", "B", "A"),
        }
        (engine,) = connect(llm, TIMEOUT_S)
        check_engine(engine, timeout_s=TIMEOUT_S)  # here because an engine takes long to start
        return flights
    finally:
        within_loop(end())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(TIMEOUT_S)
        loop.close()


def test_a_request_in_flight_goes_on_with_the_new_weights(engines: Remote):
    cold = engines.call(Engines.serve, "qwen3", timeout_s=240)
    if not (flights := engines.call(push_with_a_request_in_flight, "qwen3", timeout_s=240)):
        pytest.skip("this vLLM does not say which weights gave a token")
    for (transport, flight), weights in zip(flights.items(), "BA", strict=True):
        assert_same(flight["llm"], cold[weights], f"the LLM after {transport}")
        assert_same(flight["async"], cold[weights], f"the AsyncLLM after {transport}")
        assert (flight["finish_reason"], len(flight["tokens"])) == ("length", 200)
        # It was cut in the middle, and what followed is what the new weights make of what was there: its KV too.
        assert flight["last"].version == flight["version"]
        assert 5 <= flight["last"].start < 200
        assert flight["tokens"] == flight["continued"]
