"""The names by which the ranks of each `WeightSync` meet."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest

from weightsync import WeightSync, sync


class World:
    """A default process group."""


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    job = SimpleNamespace(WORLD=World())
    given = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, group=job)
    for name, value in {"_names": {}, "_named_for": None, "dist": given}.items():
        monkeypatch.setattr(sync, name, value)
    return job


def test_names_of_open_objects_differ_and_are_free_after_close(jobs: SimpleNamespace):
    first, second = (WeightSync("fsdp", "ipc") for _ in range(2))
    names = [each._ranks.name for each in (first, second)]
    assert len({*names}) == 2
    first.close()
    third = WeightSync("fsdp", "ipc")
    assert third._ranks.name == names[0]
    first.close()  # it has no name to give back any more
    assert WeightSync("fsdp", "ipc")._ranks.name not in names


def test_objects_are_counted_anew_in_another_process_group(jobs: SimpleNamespace):
    kept = [WeightSync("fsdp", "ipc") for _ in range(2)]
    jobs.WORLD = World()
    assert WeightSync("fsdp", "ipc")._ranks.name == kept[0]._ranks.name


def test_copies_take_a_name_of_their_own(jobs: SimpleNamespace):
    assert copy.deepcopy(WeightSync("fsdp", "ipc"))._ranks.name == ""
