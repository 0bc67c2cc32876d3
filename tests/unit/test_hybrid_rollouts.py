"""Answers and checkpoints of `weightsync.hybrid` without Ray: an engine without vLLM, and groups in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

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


def engine_with(llm: Any) -> AsyncRolloutEngine:
    engine = AsyncRolloutEngine.__new__(AsyncRolloutEngine)
    engine.llm, engine._sampling, engine._final_only = llm, dict, None
    engine._answering, engine._waiting = set(), None
    return engine


def answers(llm: Interrupted) -> Any:
    return asyncio.run(engine_with(llm).generate([[1, 2]], {"n": 2}))


def test_a_prompt_with_an_aborted_answer_is_asked_again():
    llm = Interrupted(("abort", "abort"), ("stop", "abort"), ("stop", "length"))
    assert answers(llm) == [[([7, 8, 9], [-0.5] * 3)] * 2]
    assert not llm.reasons


def test_an_answer_that_failed_is_an_error():
    with pytest.raises(EngineError, match="cut an answer short after 3 tokens, with the finish reason 'error'"):
        answers(Interrupted(("stop", "error")))


class Slow:
    """An `AsyncLLM` whose requests end when `may_end` is set. `calls` has the calls of sleep and wake-up."""

    def __init__(self, is_paused: bool) -> None:
        self.paused, self.errored = is_paused, False
        self.may_end = asyncio.Event()
        self.calls: list[Any] = []

    async def generate(self, prompt: dict[str, list[int]], params: Any, request_id: str) -> AsyncIterator[Any]:
        await self.may_end.wait()
        yield SimpleNamespace(outputs=[completion("stop")])

    async def is_paused(self) -> bool:
        return self.paused

    async def sleep(self, level: int) -> None:
        self.calls.append(level)

    async def wake_up(self, tags: list[str]) -> None:
        self.calls.append(tags)


@pytest.mark.parametrize(
    ("is_paused", "wakes", "calls"), [(False, False, [2]), (True, False, [2]), (False, True, [["weights"]])]
)
def test_sleep_waits_for_answers_that_can_come_and_until_a_wake_up(is_paused: bool, wakes: bool, calls: list[Any]):
    async def run() -> list[Any]:
        llm = Slow(is_paused)
        engine = engine_with(llm)
        answering = asyncio.create_task(engine.generate([[1]], {}))
        await asyncio.sleep(0)
        sleeping = asyncio.create_task(engine.sleep(2))
        for _ in range(20):
            await asyncio.sleep(0)
        assert llm.calls == (calls if is_paused else [])
        if wakes:
            await engine.wake_up(["weights"])
        llm.may_end.set()
        await asyncio.wait([sleeping])
        assert len(await answering) == 1
        return llm.calls

    assert asyncio.run(run()) == calls


IDLE = SimpleNamespace(check_steps=lambda doing: None)


class Trainer:
    """A `WorkerGroup` with a count of steps as its weights."""

    role, processes = "Policy", IDLE

    def __init__(self) -> None:
        self.steps = 0
        self.saved: list[int] = []

    def update(self, batch: TensorDict) -> list[float]:
        self.steps += 1
        return [0.0]

    def call_all(self, method: str, folder: Path) -> None:
        if method == "save_state":
            self.saved.append(self.steps)
            (folder / "steps").write_text(str(self.steps))
        elif method == "load_state":
            self.steps = int((folder / "steps").read_text())


class Engines:
    """A `RolloutGroup`, its sync, and its answers. `served` has the steps behind each version."""

    transport, reason, takes_turns = "none", "", False

    def __init__(self) -> None:
        self.generate = self
        self.version = self.pushes = 0
        self.served: dict[int, int] = {}

    def follow(self, trainer: Trainer, **_: Any) -> Engines:
        self.trainer = trainer
        return self

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: object) -> None: ...

    def remote(self, prompts: TensorDict, *, n: int, max_tokens: int, **_: Any) -> SimpleNamespace:
        count = n * len(prompts)
        found = {
            "prompts": prompts["prompts"].repeat_interleave(n, 0),
            "answers": torch.zeros(count, max_tokens, dtype=torch.long),
            "answer_mask": torch.ones(count, max_tokens, dtype=torch.bool),
        }
        return SimpleNamespace(result=lambda: TensorDict(found, [count]))

    def sleep(self, level: int) -> None: ...

    def wake_up(self) -> None: ...

    def push(self, version: int | None = None) -> SimpleNamespace:
        self.version = self.version + 1 if version is None else version
        self.pushes += 1
        self.served[self.version] = self.trainer.steps
        return SimpleNamespace(total_s=0.0)


@pytest.mark.parametrize(("every", "saved"), [(1, [10, 20]), (3, [12, 21]), (15, [15])])
def test_grpo_saves_the_weights_of_the_version_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int, saved: list[int]
):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    import hybrid_grpo

    def train(steps: int) -> tuple[Trainer, Engines]:
        words = f"--sync-every {every} --training-steps {steps} --checkpoint {tmp_path} --prompts 2 --group-size 2"
        trainer, engines = Trainer(), Engines()
        hybrid_grpo.train(hybrid_grpo.parse(words.split()), trainer, engines, 16)
        return trainer, engines

    trainer, engines = train(25)
    assert trainer.saved == saved
    newest = newest_job(tmp_path)
    assert newest is not None
    assert engines.served[newest.state["version"]] == newest.state["taken"] == saved[-1]
    _, resumed = train(saved[-1])
    assert resumed.served == {newest.state["version"]: saved[-1]}


def test_grpo_refuses_checkpoints_without_pushes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    import hybrid_grpo

    with pytest.raises(SystemExit):
        hybrid_grpo.parse(["--sync-every", "0", "--checkpoint", "folder"])
    assert "--checkpoint saves at pushes" in capsys.readouterr().err


class Saver(Worker):
    """A worker that makes its folders, as `torch.distributed.checkpoint` does."""

    def save_state(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "weights").write_text("")


def test_a_folder_that_a_node_does_not_share_gets_no_checkpoint(tmp_path: Path):
    def call_all(method: str, folder: Path) -> None:
        getattr(Saver(), method)(tmp_path / "other node" / folder.relative_to(tmp_path / "node"))

    group: Any = SimpleNamespace(role="Saver", call_all=call_all, processes=IDLE)
    with pytest.raises(ConfigError, match=r"no .*other node.* on this node.*: save to shared storage"):
        save_job(tmp_path / "node" / "jobs", {}, group)
    assert newest_job(tmp_path / "node" / "jobs") is None
