"""The processes of `engines.py` as fixtures: started when the first test asks for them, shared by all that follow."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from engines import Engines, Remote, Trainers


@pytest.fixture(scope="session")
def engine_calls() -> tuple[Connection, Connection]:
    """The way from the trainers to the engine; each side is given its end as it starts."""
    return multiprocessing.Pipe()


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory, engine_calls: tuple[Connection, Connection]) -> Iterator[Remote]:
    remote = Remote(Engines, tmp_path_factory.mktemp("checkpoints"), engine_calls[1])
    yield remote
    remote.close()


@pytest.fixture(scope="session")
def trainers(
    tmp_path_factory: pytest.TempPathFactory, engine_calls: tuple[Connection, Connection]
) -> Iterator[Trainers]:
    ranks = Trainers(2, tmp_path_factory.mktemp("trainers"), engine_calls[0])
    yield ranks
    ranks.close()
