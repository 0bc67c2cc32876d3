"""A few cells of the failure matrix that take no time. `make matrix` runs them all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import page
import pytest
from cells import MUTE, UNTOUCHED, Cell
from driver import Bench, Result, wrong_errors
from looks import Look, state_of

SAMPLE = [
    ("rank 0 - rank 1", "closed", "open"),
    ("rank 0 - worker", "closed", "plan"),
    ("rank 0 - worker", "closed", "done"),
    ("rank 0 - worker", "closed", "close"),
    ("rank 0", "killed", "open"),
    ("rank 0", "killed", "commit"),
    ("rank 1", "killed", "connect"),
    ("rank 1", "killed", "open"),
    ("worker", "killed", "run"),
    ("core", "killed", "commit"),
    ("rank 1", "stopped", "run"),
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench("stand-in", "ipc", tmp_path_factory.mktemp("matrix"), 4.0)
    yield bench
    bench.close()


@pytest.mark.parametrize(("who", "how", "phase"), SAMPLE)
def test_cell_holds(bench: Bench, who: str, how: str, phase: str) -> None:
    result = bench.run(Cell("stand-in", "ipc", who, how, phase))
    assert result.holds, result


def test_cells_of_adapters_hold(tmp_path: Path) -> None:
    with closing(Bench("stand-in", "lora", tmp_path, 4.0)) as bench:
        for who, how, phase in (("rank 0 - rank 1", "closed", "save"), ("rank 0", "killed", "loaded")):
            result = bench.run(Cell("stand-in", "lora", who, how, phase))
            assert result.holds, result


def test_a_cell_of_a_single_copy_holds(tmp_path: Path) -> None:
    with closing(Bench("stand-in", "single_copy", tmp_path, 4.0)) as bench:
        result = bench.run(Cell("stand-in", "single_copy", "rank 0 - worker", "closed", "done"))
        assert result.holds, result


def test_cells_of_changes_hold(tmp_path: Path) -> None:
    with closing(Bench("stand-in", "changes", tmp_path, 4.0)) as bench:
        for who, how, phase in (
            ("rank 0 - worker", "damaged", "run"),
            ("rank 0 - worker", "closed", "last"),
            ("rank 1", "killed", "run"),
        ):
            result = bench.run(Cell("stand-in", "changes", who, how, phase))
            assert result.holds, result


def test_page_keeps_what_was_not_run_again() -> None:
    before = Path("docs/evidence/failure-matrix.md").read_text()
    signs = page.signs_on(before)
    assert page.page_of(signs) == before
    assert f"{len(signs)} cells were run" in before
    cell, other = [*signs][3], [*signs][-1]
    broken = page.sign(Result(cell, state="a LIE", faults=["it says: A", "and\nB"]))
    with_fault = page.page_of(signs | {cell: broken})
    assert f"1. {cell}: it says: A; and B\n" in with_fault
    assert "✗ 1 |" in with_fault
    assert f" {len(signs) - 1} hold" in with_fault
    later = page.signs_on(with_fault) | {other: page.sign(Result(other, seconds=7.4, state=MUTE))}
    assert later == signs | {cell: broken, other: "P 7"}
    assert page.page_of(later | {cell: signs[cell], other: signs[other]}) == before
    gone = page.page_of(signs | {Cell("stand-in", "ipc", "server", "killed", "run"): "="})
    assert page.signs_on(gone) == signs


@pytest.mark.parametrize(
    ("look", "state"),
    [
        (Look("A", False, False, "7"), UNTOUCHED),
        (Look("", True, True, "POISONED: a push is under way"), MUTE),
        (Look("", False, False, "7"), "a LIE"),
        (Look("B", False, False, "7"), "a LIE"),
        (Look("A", False, False, "8"), "a LIE"),
        (Look("A", False, True, "7"), "as it was, and paused"),
        (Look("", True, False, "7"), "POISONED without a mark"),
        (Look("", True, False, "POISONED: a push is under way"), "marked and not paused"),
        (Look("", False, True, "POISONED: a push is under way"), "a mixture that would answer"),
    ],
)
def test_engine_that_lies_is_found_out(look: Look, state: str) -> None:
    assert state_of(look, "A", "B", 7).startswith(state)


def test_errors_that_do_not_tell_the_cause_are_found_out() -> None:
    told = ("PeerError", "trainer rank 1 closed its connection")
    assert list(wrong_errors({told}, ("PeerError",), ("trainer rank 1",), False)) == []
    assert list(wrong_errors({told, ("PeerError", "broken")}, ("PeerError",), ("trainer rank 1",), False)) != []
    assert list(wrong_errors({told}, ("SyncTimeoutError",), ("trainer rank 1",), False)) != []
    assert list(wrong_errors({told}, ("PeerError",), ("engine 0",), False)) != []
    assert list(wrong_errors({("", "")}, ("PeerError",), ("trainer rank 1",), False)) != []
