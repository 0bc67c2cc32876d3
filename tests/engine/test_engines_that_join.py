"""Real servers join and leave a trainer's fleet: each answers as a cold one, and those that stay are asked nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from engines import IN_CORE, PROMPTS, TIMEOUT_S, Engines, Remote, Trainer, Trainers
from recorders import sent_messages

from weightsync import WeightSync
from weightsync.engines import HttpEngine
from weightsync.tools.processes import Server, generate

pytest_plugins = ["engine_fixtures"]
pytestmark = pytest.mark.engine

START_S = 240.0
A_PUSH = {"Ready", "Go", "Commit"}


# ---------------------------------------------------------------------------------------------------------------
# What runs on each rank of the trainer


def connect(trainer: Trainer, transport: str, url: str) -> None:
    trainer.release()
    trainer.model = tiny_models.shard(tiny_models.build("qwen3", "A"))
    trainer.sync = WeightSync("fsdp", transport, [url] if trainer.rank == 0 else None, timeout_s=TIMEOUT_S)


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


# ---------------------------------------------------------------------------------------------------------------


class Cold:
    """Two servers, started from the weights "A" and "B", and what each has answered then."""

    def __init__(self, engines: Remote, folder: Path) -> None:
        self.servers = []
        self.answers: dict[str, Any] = {}
        for weights in "AB":
            checkpoint = engines.call(Engines.checkpoint, "qwen3", weights)
            self.servers.append(Server(checkpoint, "auto", folder / f"{weights}.log", IN_CORE))
        for server, weights in zip(self.servers, "AB", strict=True):
            server.wait(START_S)
            self.answers[weights] = generate(server.url, PROMPTS)
        assert self.answers["A"] != self.answers["B"]

    def check(self, server: Server, weights: str, version: int) -> None:
        assert generate(server.url, PROMPTS) == self.answers[weights]
        assert HttpEngine(server.url, name="the server", timeout_s=20.0).version() == str(version)


@pytest.fixture(scope="module")
def cold(engine_process: Remote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cold]:
    found = Cold(engine_process, tmp_path_factory.mktemp("servers"))
    yield found
    for server in found.servers:
        server.stop()


@pytest.mark.parametrize("transport", ["broadcast", "ipc"])
def test_servers_join_catch_up_and_leave(cold: Cold, trainers: Trainers, transport: str) -> None:
    first, second = cold.servers
    trainers.call(connect, transport, first.url)
    version, _ = trainers.call(push, "A")[0]
    cold.check(first, "A", version)
    before = HttpEngine(second.url, name="the server", timeout_s=20.0).version()
    if before == "default":  # later it has had the versions of the first trainer
        trainers.call(change, "add", second.url)
        late, asked = trainers.call(catch_up)[0]
        assert (late, asked) == (version, {1: {"some"}})
        cold.check(second, "A", version)
    else:
        trainers.call(change, "add", second.url)
    version, asked = trainers.call(push, "B")[0]
    assert asked[0] == A_PUSH, "the engine that stays was asked again"
    cold.check(first, "B", version)
    cold.check(second, "B", version)
    trainers.call(change, "remove", first.url)
    answers, over = [], threading.Event()

    def keep_generating() -> None:
        while not over.is_set():
            answers.append(generate(first.url, PROMPTS))

    generating = threading.Thread(target=keep_generating)
    generating.start()
    left_at, (version, asked) = version, trainers.call(push, "A")[0]
    over.set()
    generating.join()
    assert asked == {0: {"Release"}, 1: A_PUSH}
    assert answers == [cold.answers["B"]] * len(answers), "the engine that left was disturbed"
    cold.check(first, "B", left_at)
    cold.check(second, "A", version)
    trainers.call(Trainer.release)
