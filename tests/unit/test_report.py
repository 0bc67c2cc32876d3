"""What a report says to a tracker, the bar that follows a push, and when it shows itself."""

from __future__ import annotations

import errno
import io
import os

import pytest

from weightsync import report
from weightsync.net.update import Timeline
from weightsync.report import Progress, PushReport, WorkerReport


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, show: bool | None, here: bool = True) -> str:
    """Iterate over three chunks, and return what the bar has printed."""
    monkeypatch.setattr("sys.stderr", stream)
    with Progress(show, "push 7", range(4, 7), here) as numbers:
        assert list(numbers) == [4, 5, 6]
        assert (len(numbers), numbers[1]) == (3, 5)
    return stream.getvalue()


def test_the_repr_of_a_report_is_one_short_line():
    short = repr(PushReport(version=3, nbytes=16_380_000_000, control_s=0.1, load_s=0.1, total_s=0.0148273645182937))
    assert short.startswith("<PushReport version 3: 16.38 GB in 14.8 ms, generation paused ")
    assert len(short) < 200


def test_a_bar_shows_itself_on_a_terminal_or_where_it_is_wanted(monkeypatch):
    monkeypatch.setattr(report, "_BAR_AFTER_S", 0.0)
    assert "push 7" in printed(monkeypatch, Terminal(), None)
    assert "push 7" in printed(monkeypatch, io.StringIO(), True)


def test_a_bar_that_has_ended_leaves_its_line_empty(monkeypatch):
    monkeypatch.setattr(report, "_BAR_AFTER_S", 0.0)
    *_, last, end = printed(monkeypatch, Terminal(), True).split("\r")
    assert (last.strip(" "), end) == ("", "")


def test_a_bar_stays_hidden_elsewhere(monkeypatch):
    monkeypatch.setattr(report, "_BAR_AFTER_S", 0.0)
    assert printed(monkeypatch, io.StringIO(), None) == ""
    assert printed(monkeypatch, Terminal(), False) == ""
    assert printed(monkeypatch, Terminal(), True, here=False) == ""


def test_a_short_push_shows_no_bar(monkeypatch):
    assert "push 7" not in printed(monkeypatch, Terminal(), True)


class Broken(Terminal):
    """A terminal with a broken pipe behind it, from the second write on."""

    def write(self, text: str) -> int:
        if self.getvalue():
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        return super().write(text)


def closed() -> io.TextIOBase:
    with open(os.devnull, "w", encoding="utf-8") as stream:
        return stream


@pytest.mark.parametrize("show", [None, True])
@pytest.mark.parametrize("stream", [Broken, closed, lambda: None], ids=["broken", "closed", "none"])
def test_a_push_goes_on_when_its_bar_cannot_be_shown(monkeypatch, stream, show):
    monkeypatch.setattr(report, "_BAR_AFTER_S", 0.0)
    monkeypatch.setattr("sys.stderr", stream())
    with Progress(show, "push 7", range(4, 7), True) as numbers:
        assert next(iter(numbers)) == 4
        numbers.refresh()


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (16_380_000_000, "16.38 GB")]
)
def test_sizes_are_in_decimal_units(nbytes, text):
    assert report.format_bytes(nbytes) == text


def test_a_timeline_reports_the_seconds_of_its_phases(monkeypatch):
    now = [0]
    monkeypatch.setattr("time.perf_counter_ns", lambda: now[0])
    timeline = Timeline()

    def spend(phase: str, seconds: int) -> None:
        with timeline.during(phase):
            now[0] += seconds * 10**9

    now[0] += 7 * 10**9  # before the first phase
    with timeline.during("plan"):
        spend("pause", 1)
    for phase, seconds in {"pause": 2, "transfer": 4, "load": 8, "write": 16}.items():
        spend(phase, seconds)
    with timeline.during("commit"):
        now[0] += 32 * 10**9
        workers = [WorkerReport("a", 5, 1.0, 3.0, 5.0), WorkerReport("b", 6, 2.0, 2.0, 4.0)]
        found = timeline.report(workers, away_s=16.0, version=7, nbytes=10)
    assert (found.plan_s, found.gather_s, found.total_s) == (1.0, 4.0, 47.0)
    assert found.control_s == 1 + 2 + 32
    assert (found.transfer_s, found.verify_s, found.load_s) == (2.0, 3.0, 5.0)
    assert found.workers == tuple(workers)
    assert timeline.seconds("pause") == 3.0


def test_metrics_are_flat_and_numbers():
    report = PushReport(
        version=7, nbytes=10, control_s=0.5, load_s=1.0, total_s=2.0, load_paths={"reload": 3}, left_out=("engine 1",)
    )
    assert report.metrics("sync/") == {
        "sync/version": 7.0,
        "sync/nbytes": 10.0,
        "sync/chunks": 0.0,
        "sync/sent_bytes": 0.0,
        "sync/plan_s": 0.0,
        "sync/control_s": 0.5,
        "sync/gather_s": 0.0,
        "sync/transfer_s": 0.0,
        "sync/verify_s": 0.0,
        "sync/load_s": 1.0,
        "sync/pause_s": 0.0,
        "sync/total_s": 2.0,
        "sync/load_paths/reload": 3.0,
        "sync/left_out": 1.0,
    }
    assert "weightsync/total_s" in report.metrics()
