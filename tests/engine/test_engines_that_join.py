"""A real server beside an `LLM`: it joins and leaves, and is updated before the other. Both answer as cold ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import zygote
from engines import IN_CORE, PROMPTS, TIMEOUT_S, Answer, Engines, Remote, Trainer, Trainers, assert_same
from optional_transports import NIXL
from recorders import sent_messages

from weightsync import EngineReport, WeightSync
from weightsync.engines import HttpEngine
from weightsync.tools import processes
from weightsync.tools.processes import Server, generate

pytest_plugins = ["engine_fixtures"]
pytestmark = pytest.mark.engine

START_S = 240.0
A_PUSH = {"Ready", "Go", "Commit"}
OF_A_NEW_CHAIN = A_PUSH | {"PlanRequest", "Connect", "Release"}


# ---------------------------------------------------------------------------------------------------------------
# What runs on each rank of the trainer


def connect(trainer: Trainer, transport: str) -> None:
    trainer.release()
    trainer.model = tiny_models.shard(tiny_models.build("qwen3", "A"))
    trainer.sync = WeightSync("fsdp", transport, trainer.engine, timeout_s=TIMEOUT_S)


def change(trainer: Trainer, how: str, url: str) -> None:
    if trainer.rank == 0:
        getattr(trainer.sync.engines, how)(url)


def push(trainer: Trainer, weights: str, how: str = "push") -> tuple[int, dict[int, set[str]]]:
    """Push, or catch up. Return the version, and which messages the workers of each engine were sent."""
    tiny_models.fill(trainer.model, weights)
    with sent_messages() as sent:
        report = getattr(trainer.sync, how)(trainer.model)
    asked: dict[int, set[str]] = {}
    for peer, message in sent:
        if peer.startswith("engine "):
            asked.setdefault(int(peer.split()[1]), set()).add(message)
    return report.version, asked


def catch_up(trainer: Trainer) -> tuple[int, dict[int, set[str]]]:
    with sent_messages() as sent:
        report = trainer.sync.catch_up(trainer.model)
    return report.version, {int(peer.split()[1]): {"some"} for peer, _ in sent if peer.startswith("engine ")}


def connect_rolling(trainer: Trainer, url: str) -> None:
    connect(trainer, "broadcast")
    engines = [trainer.engine, url] if trainer.rank == 0 else None
    trainer.sync = WeightSync("fsdp", "broadcast", engines, rolling=True, timeout_s=TIMEOUT_S)


def push_and_report(trainer: Trainer, weights: str) -> list[EngineReport]:
    tiny_models.fill(trainer.model, weights)
    return [*trainer.sync.push(trainer.model, label=weights).engines]


def throttle(engines: Engines, closed: Path) -> None:
    """Let the worker of the `LLM` wait in each push, for a second and until `closed` is gone."""
    receiver = engines.llm.llm_engine.model_executor.driver_worker.worker.weight_transfer_engine.session.receiver

    def run(*args: Any) -> Any:
        time.sleep(1.0)
        while closed.exists():
            time.sleep(0.1)
        return type(receiver).run(receiver, *args)

    receiver.run = run


def unthrottle(engines: Engines) -> None:
    del engines.llm.llm_engine.model_executor.driver_worker.worker.weight_transfer_engine.session.receiver.run


# ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(engine_process: Remote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    checkpoint = engine_process.call(Engines.checkpoint, "qwen3", "B")
    with zygote.forking(False):  # as a user starts a server, with all its imports
        found = Server(checkpoint, "auto", tmp_path_factory.mktemp("server") / "log", IN_CORE)
        found.wait(START_S)
    yield found
    found.stop()


def version_of(server: Server) -> str | None:
    return HttpEngine(server.url, name="the server", timeout_s=20.0).version()


def assert_as_cold(found: list[processes.Answer], cold: Answer) -> None:
    """A server answers with more tokens than the cold `LLM` was asked for, and gives the likeliest ones alone."""
    for answer, (tokens, logprobs) in zip(found, cold, strict=True):
        assert list(answer.token_ids[: len(tokens)]) == tokens
        assert list(answer.logprobs[: len(tokens)]) == [at[token] for token, at in zip(tokens, logprobs, strict=True)]


@pytest.mark.parametrize("transport", ["broadcast", "ipc", NIXL])
def test_a_server_joins_catches_up_and_leaves(
    engines: Remote, server: Server, trainers: Trainers, transport: str
) -> None:
    cold = engines.call(Engines.serve, "qwen3", timeout_s=START_S)
    assert cold["A"] != cold["B"]
    trainers.call(connect, transport)
    version, _ = trainers.call(push, "A")[0]
    assert_same(engines.call(Engines.ask), cold["A"], "alone")
    is_new = version_of(server) == "default"  # later it has had the versions of the first trainer
    trainers.call(change, "add", server.url)
    if is_new:
        assert_as_cold(generate(server.url, PROMPTS), cold["B"])
        late, asked = trainers.call(catch_up)[0]
        assert (late, asked) == (version, {1: {"some"}})
        assert_as_cold(generate(server.url, PROMPTS), cold["A"])
        assert version_of(server) == str(version)
    version, asked = trainers.call(push, "B")[0]
    to_one_that_stays = OF_A_NEW_CHAIN if is_new and transport != "ipc" else A_PUSH
    assert asked[0] == to_one_that_stays
    assert_same(engines.call(Engines.ask), cold["B"], "together")
    pushed = generate(server.url, PROMPTS)
    assert_as_cold(pushed, cold["B"])
    trainers.call(change, "remove", server.url)
    answers, over = [], threading.Event()

    def keep_generating() -> None:
        while not over.is_set():
            answers.append(generate(server.url, PROMPTS))

    generating = threading.Thread(target=keep_generating)
    generating.start()
    _, asked = trainers.call(push, "A")[0]
    over.set()
    generating.join()
    assert asked == {0: to_one_that_stays, 1: {"Release"}}
    assert answers == [pushed] * len(answers), "the engine that left was disturbed"
    assert_as_cold(generate(server.url, PROMPTS), cold["B"])
    assert version_of(server) == str(version)
    assert_same(engines.call(Engines.ask), cold["A"], "alone again")


def test_a_server_answers_from_new_weights_while_a_slow_engine_receives_them(
    engines: Remote, server: Server, trainers: Trainers, tmp_path: Path
) -> None:
    cold = engines.call(Engines.serve, "qwen3", timeout_s=START_S)
    closed = tmp_path / "closed"
    engines.call(throttle, closed)
    try:
        trainers.call(connect_rolling, server.url)
        trainers.call(push_and_report, "A")
        closed.touch()
        with ThreadPoolExecutor(1) as background:
            pushing = background.submit(trainers.call, push_and_report, "B")
            while version_of(server) != "B":
                assert not pushing.done(), pushing.result()
                time.sleep(0.2)
            meanwhile = generate(server.url, PROMPTS)
            assert not pushing.done()
            closed.unlink()
            first, last = pushing.result()[0]
    finally:
        engines.call(unthrottle)
    assert server.url in first.name
    assert first.pause_s < last.pause_s
    assert_as_cold(meanwhile, cold["B"])
    assert_same(engines.call(Engines.ask), cold["B"], "the slow engine")
