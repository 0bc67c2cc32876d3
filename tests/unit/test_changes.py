"""The choice between changes and whole pushes, and the heads of changes."""

from __future__ import annotations

import pytest
import torch

from weightsync import ProtocolError
from weightsync.transports import changes
from weightsync.transports.changes import WHOLE, Choice, head, parts_of, read_head

CPU = torch.device("cpu")


def run_pushes(choice: Choice, monkeypatch: pytest.MonkeyPatch, whole_s: float, changes_s: list[float]) -> str:
    """Return for each push whether it was whole. Pushes with changes take these seconds, one after the other."""
    now, left = 0.0, changes.first_whole(choice._measures)
    monkeypatch.setattr(changes.time, "perf_counter", lambda: now)
    told = ""
    seconds = iter(changes_s)
    while True:
        choice.begin()
        tries = not left
        try:
            now += next(seconds) if tries else whole_s
        except StopIteration:
            return told
        left = choice.after()
        choice.note_loaded(tries, tries)
        told += "c" if tries else "w"


def test_changes_that_pay_go_on(monkeypatch: pytest.MonkeyPatch):
    assert run_pushes(Choice(True), monkeypatch, 2.0, [1.0] * 5) == "wwccccc"


def test_changes_that_do_not_pay_rest_longer_and_longer(monkeypatch: pytest.MonkeyPatch):
    told = run_pushes(Choice(True), monkeypatch, 1.0, [2.0] * 12)
    assert told.startswith("ww" + "".join("cc" + "w" * rest for rest in (2, 4, 8, 16, 32)) + "cc")


def test_without_a_measurement_changes_go_on(monkeypatch: pytest.MonkeyPatch):
    assert run_pushes(Choice(False), monkeypatch, 1.0, [2.0] * 5) == "wccccc"


def test_heads_are_read_or_refused():
    assert read_head(head(20, 7, 3, CPU), 20, 3) == (20, 7)
    assert read_head(head(WHOLE, 0, 3, CPU), 0, 3) == (WHOLE, 0)
    for nbytes in (21, -2):
        with pytest.raises(ProtocolError, match="at most 20"):
            read_head(head(nbytes, 0, 3, CPU), 20, 3)
    with pytest.raises(ProtocolError, match="since push 2 came, and push 3"):
        read_head(head(20, 0, 2, CPU), 20, 3)


@pytest.mark.parametrize(("count", "sizes"), [(0, []), (1, [1]), (8, [1] * 8), (9, [2, 2, 2, 2, 1]), (64, [8] * 8)])
def test_parts_have_neighbouring_chunks(count: int, sizes: list[int]):
    parts = parts_of(range(count))
    assert [*map(len, parts)] == sizes
    assert [number for part in parts for number in part] == [*range(count)]
