"""The processes of `engines.py` as fixtures: started when the first test asks for them, shared by all that follow.

After each test the trainers let go of the engine, so that a test that failed half-way does not spoil the next.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
from engines import Engines, Remote, Trainer, Trainers, VllmRemote


@pytest.fixture(scope="session")
def engine_calls() -> tuple[Connection, Connection]:
    """The way from the trainers to the engine; each side is given its end as it starts."""
    return multiprocessing.Pipe()


@pytest.fixture(scope="session")
def engine_process(
    tmp_path_factory: pytest.TempPathFactory, engine_calls: tuple[Connection, Connection]
) -> Iterator[Remote]:
    base = tmp_path_factory.getbasetemp()
    known = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "known"
    known.mkdir(exist_ok=True)
    remote = VllmRemote(Engines, tmp_path_factory.mktemp("checkpoints"), known, engine_calls[1])
    yield remote
    remote.close()


@pytest.fixture(scope="session")
def trainer_processes(
    tmp_path_factory: pytest.TempPathFactory, engine_calls: tuple[Connection, Connection]
) -> Iterator[Trainers]:
    ranks = Trainers(2, tmp_path_factory.mktemp("trainers"), engine_calls[0])
    yield ranks
    ranks.close()


@pytest.fixture
def engines(engine_process: Remote) -> Iterator[Remote]:
    yield engine_process
    engine_process.call(Engines.release)


@pytest.fixture
def trainers(trainer_processes: Trainers) -> Iterator[Trainers]:
    yield trainer_processes
    trainer_processes.call(Trainer.release)
