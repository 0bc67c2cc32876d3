"""A push reads what streams have queued: `push_async` the caller's, since a thread of torch has a current stream of its
own, and `non_finite="refuse"` any other's."""

from __future__ import annotations

import asyncio

import pytest
import tiny_models
import torch
from engines import TIMEOUT_S, Answer, Engines, Remote, assert_same

from weightsync import NonFiniteError, WeightSync

pytest_plugins = ["engine_fixtures"]
pytestmark = [pytest.mark.engine, pytest.mark.gpu(1)]


def keep_busy() -> None:
    """Let the current stream wait for over a second."""
    torch.cuda._sleep(3_000_000_000)  # clock cycles


def push_behind_a_busy_stream(engines: Engines) -> tuple[bool, list[Answer]]:
    """Return whether the weights were still to be written when the push began, and what the engine answers."""
    engines.start(engines.checkpoint("qwen3", "A"))
    model = tiny_models.build("qwen3", "A").cuda()
    tiny_models.fill(model, "B")
    trained = [param.detach().clone() for param in model.parameters()]
    tiny_models.fill(model, "A")
    with WeightSync("fsdp", "ipc", engines.llm, timeout_s=TIMEOUT_S) as sync:
        sync.push(model)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.no_grad():
            torch._foreach_copy_([*map(torch.clone, trained)], trained)  # CUDA loads a kernel once nothing runs
            keep_busy()
            torch._foreach_copy_(list(model.parameters()), trained)
            is_to_come = not stream.query()
            asyncio.run(sync.push_async(model))
    return is_to_come, engines.ask()


def test_a_push_waits_for_what_the_callers_stream_has_queued(engines: Remote) -> None:
    cold = engines.call(Engines.serve, "qwen3", timeout_s=300)
    is_to_come, answers = engines.call(push_behind_a_busy_stream, timeout_s=300)
    assert is_to_come
    assert_same(answers, cold["B"], "the engine after a push from a busy stream")


def refuse_behind_a_busy_stream(engines: Engines) -> tuple[bool, list[Answer], list[Answer]]:
    """Return whether NaN was still to be written when the push began, and what the engine answers before and after."""
    engines.start(engines.checkpoint("qwen3", "A"))
    model = tiny_models.build("qwen3", "A").cuda()
    with WeightSync("fsdp", "ipc", engines.llm, non_finite="refuse", timeout_s=TIMEOUT_S) as sync:
        sync.push(model)
        before = engines.ask()
        spoilt = torch.full_like(model.lm_head.weight, torch.nan)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.no_grad():
            keep_busy()
            model.lm_head.weight.copy_(spoilt)  # no kernel, which CUDA would load once nothing runs
            is_to_come = not stream.query()
        with pytest.raises(NonFiniteError):
            sync.push(model)
    return is_to_come, before, engines.ask()


def test_a_push_refuses_what_another_stream_has_queued(engines: Remote) -> None:
    is_to_come, before, after = engines.call(refuse_behind_a_busy_stream, timeout_s=300)
    assert is_to_come
    assert_same(after, before, "the engine after a push that was refused")
