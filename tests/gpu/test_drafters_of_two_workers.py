"""Drafters of an engine with two workers: after a push they draft what they draft after a cold start."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models
from drafter_checkpoints import MTP, checkpoint, eagle
from engines import PROMPTS, TIMEOUT_S, Answer, Engines, Remote, answer_of, assert_same
from torch import nn

from weightsync import WeightSync

pytest_plugins = ["engine_fixtures"]
pytestmark = [pytest.mark.engine, pytest.mark.gpu(2)]


def start(engines: Engines, kind: str, weights: str) -> nn.Module:
    """Start an engine from `weights`, and return a trainer that has them."""
    if kind == "mtp":
        source = checkpoint(engines, "mimo", weights)
        trainer, speculative = tiny_models.as_saved(source), MTP
    else:
        source, head, trainer = eagle(engines, kind, weights)
        speculative = {"method": kind, "model": str(head), "num_speculative_tokens": 2}
    engines.start(source, tensor_parallel_size=2, speculative_config=speculative)
    return trainer.cuda()


def ask(engines: Engines) -> tuple[Answer, list[Any]]:
    """Return the answers, and what each worker's drafter drafted for them."""
    engines.llm.collective_rpc(record)
    answers = [answer_of(engines.generate(prompt)) for prompt in PROMPTS]
    return answers, engines.llm.collective_rpc(recorded)


def record(worker: Any) -> None:
    runner, worker.drafts = worker.model_runner, []
    drafter = runner.drafter if hasattr(runner, "drafter") else runner.speculator  # as vLLM's second runner has it
    propose = type(drafter).propose

    def propose_and_note(*args: Any, **kwargs: Any) -> Any:
        drafted = propose(drafter, *args, **kwargs)
        worker.drafts.append(drafted.tolist())
        return drafted

    drafter.propose = propose_and_note


def recorded(worker: Any) -> list[Any]:
    drafts: list[Any] = worker.drafts
    return drafts


def compare(engines: Engines, kind: str) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    """Return what cold engines of both weights do, and what the last of them does after each push."""
    trainers, cold, found = {}, {}, []
    for weights in "BA":
        trainers[weights] = start(engines, kind, weights)
        cold[weights] = ask(engines)
    with WeightSync("fsdp", "ipc", engines.llm, timeout_s=TIMEOUT_S) as sync:
        for weights in "BAB":
            sync.push(trainers[weights])
            found.append((weights, ask(engines)))
    return cold, found


@pytest.mark.parametrize("kind", ["mtp", "eagle", "eagle3"])
def test_pushed_equals_cold(engines: Remote, kind: str) -> None:
    cold, found = engines.call(compare, kind, timeout_s=400)
    assert cold["A"][0] != cold["B"][0]
    assert cold["A"][1] != cold["B"][1]
    for weights, (answer, drafts) in found:
        assert_same(answer, cold[weights][0], f"{kind}, {weights}")
        assert drafts == cold[weights][1], f"{kind}, {weights}"
