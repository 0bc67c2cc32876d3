"""Answers and checkpoints of `weightsync.hybrid` without Ray: an engine without vLLM, and groups in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weightsync.errors import ConfigError, EngineError
from weightsync.hybrid import Worker, newest_job, save_job
from weightsync.vllm.rollout import AsyncRolloutEngine


class Interrupted:
    """An `AsyncLLM` with two completions of each request. `reasons` has their finish reasons, request by request."""

    def __init__(self, *reasons: tuple[str, str]) -> None:
        self.reasons = list(reasons)
        self.errored = False

    async def generate(self, prompt: dict[str, list[int]], params: Any, request_id: str) -> AsyncIterator[Any]:
        yield SimpleNamespace(outputs=[completion(reason) for reason in self.reasons.pop(0)])


def completion(reason: str) -> SimpleNamespace:
    tokens = [7] if reason == "abort" else [7, 8, 9]
    logprobs = [{token: SimpleNamespace(logprob=-0.5)} for token in tokens]
    return SimpleNamespace(token_ids=tokens, logprobs=logprobs, finish_reason=reason)


def answers(llm: Interrupted) -> Any:
    engine = AsyncRolloutEngine.__new__(AsyncRolloutEngine)
    engine.llm, engine._sampling, engine._final_only = llm, dict, None
    return asyncio.run(engine.generate([[1, 2]], {"n": 2}))


def test_a_prompt_with_an_aborted_answer_is_asked_again():
    llm = Interrupted(("abort", "abort"), ("stop", "abort"), ("stop", "length"))
    assert answers(llm) == [[([7, 8, 9], [-0.5] * 3)] * 2]
    assert not llm.reasons


def test_an_answer_that_failed_is_an_error():
    with pytest.raises(EngineError, match="cut an answer short after 3 tokens, with the finish reason 'error'"):
        answers(Interrupted(("stop", "error")))


class Saver(Worker):
    """A worker that makes its folders, as `torch.distributed.checkpoint` does."""

    def save_state(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "weights").write_text("")


def test_a_folder_that_a_node_does_not_share_gets_no_checkpoint(tmp_path: Path):
    def call_all(method: str, folder: Path) -> None:
        getattr(Saver(), method)(tmp_path / "other node" / folder.relative_to(tmp_path / "node"))

    group: Any = SimpleNamespace(role="Saver", call_all=call_all)
    with pytest.raises(ConfigError, match=r"no .*other node.* on this node.*: save to shared storage"):
        save_job(tmp_path / "node" / "jobs", {}, group)
    assert newest_job(tmp_path / "node" / "jobs") is None
