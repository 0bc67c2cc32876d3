"""Trainer ranks and engine workers for a check. All run at once, and exchange plain values with rank 0."""

from __future__ import annotations

import multiprocessing
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from weightsync.errors import ErrorFields
from weightsync.net.runtime import Deadline
from weightsync.net.wire import PREFIX_BYTES, Failure, Value, decode, encode
from weightsync.planning.wire_types import Plain
from weightsync.tools.testing.assertions import require

_FAILED = Failure(ErrorFields("WeightSyncError", "this end has failed", None, None, {}))
_PATIENCE = 8
"""Factor of `timeout_s` for a wait for an end with several waits of its own."""


class AnotherEndFailed(Exception):  # noqa: N818 (it is a consequence, not the error)
    """Another end has failed. Its own error has the cause."""


class Mail:
    """One end's connections: rank 0's to all others, another end's to rank 0.

    It has the methods of `Ranks` that transports call. Messages are msgpack. This proves that an implementation sends
    plain values. Ranks are numbered before workers.
    """

    host = "127.0.0.1"

    def __init__(self, number: int, ranks: int, ends: int, pipes: dict[int, Connection], timeout_s: float) -> None:
        self.rank, self.size, self.timeout_s = number, ranks, timeout_s
        self.workers = range(ranks, ends)
        self._pipes = pipes
        self._read: dict[int, list[Value]] = {end: [] for end in pipes}

    def send(self, end: int, value: Any) -> None:
        """Send a plain value."""
        self._pipes[end].send_bytes(encode(Value.of(value)))

    def receive(self, end: int, kind: Any = Plain) -> Any:
        """Return the next value, of this kind, from an end. Raises `AnotherEndFailed`."""
        deadline = Deadline(self.timeout_s * _PATIENCE)
        while not self._read[end]:
            require(not deadline.passed(), f"no answer from {title(end, self.size)} within {deadline.timeout_s:g} s")
            self.wait(0.1)
        return self._read[end].pop(0).read(kind)

    def gather(self, value: Any, phase: str, kind: Any = Plain) -> list[Any]:
        """Return every rank's value on rank 0."""
        if self.rank:
            self.send(0, value)
            return []
        return [value, *(self.receive(rank, kind) for rank in range(1, self.size))]

    def broadcast(self, value: Any, phase: str, kind: Any = Plain) -> Any:
        """Return rank 0's value."""
        if self.rank:
            return self.receive(0, kind)
        for rank in range(1, self.size):
            self.send(rank, value)
        return value

    def wait(self, seconds: float) -> None:
        """Sleep for at most `seconds`, or until a message arrives. Raise `AnotherEndFailed`."""
        for pipe in wait(list(self._pipes.values()), seconds):
            end = next(number for number, one in self._pipes.items() if one is pipe)
            try:
                message = decode(self._pipes[end].recv_bytes()[PREFIX_BYTES:])
            except (EOFError, OSError):
                message = _FAILED
            if not isinstance(message, Value):
                raise AnotherEndFailed(title(end, self.size))
            self._read[end].append(message)

    def fail(self) -> None:
        """Tell the others that this end has failed."""
        for pipe in self._pipes.values():
            with suppress(OSError):
                pipe.send_bytes(encode(_FAILED))


def title(end: int, ranks: int) -> str:
    """Return an end's name for people."""
    return f"trainer rank {end}" if end < ranks else f"worker {end - ranks}"


def run_together(ends: Sequence[Callable[[Mail], None]], ranks: int, in_processes: bool, timeout_s: float) -> None:
    """Run all ends at once, the first `ranks` of them trainer ranks.

    Raises `AssertionError` with the earliest error. Errors that follow from another end's failure count last.
    """
    pairs = [multiprocessing.Pipe() for _ in ends[1:]]
    pipes = [{at + 1: mine for at, (mine, _) in enumerate(pairs)}, *({0: theirs} for _, theirs in pairs)]
    reports = [multiprocessing.Pipe(duplex=False) for _ in ends]
    start: Any = multiprocessing.get_context("spawn").Process if in_processes else threading.Thread
    runners = []
    for number, end in enumerate(ends):
        mail = Mail(number, ranks, len(ends), pipes[number], timeout_s)
        runners.append(start(target=_run, args=(end, mail, reports[number][1]), daemon=True))
        runners[-1].start()
    deadline = Deadline(timeout_s * _PATIENCE)
    errors: list[tuple[float, str]] = []
    for number, ((reader, _), runner) in enumerate(zip(reports, runners, strict=True)):
        while not reader.poll(0.1) and runner.is_alive() and not deadline.passed():
            pass
        text = reader.recv_bytes().decode() if reader.poll() else "inf it ended without a word, or did not end"
        if text:
            at, _, words = text.partition(" ")
            errors.append((float(at), f"{title(number, ranks)}: {words}"))
    for runner in runners:
        runner.join(5)
        if in_processes and runner.is_alive():
            runner.kill()
    for each in (*pairs, *reports):
        for connection in each:
            connection.close()
    causes = [error for error in errors if AnotherEndFailed.__name__ not in error[1]] or errors
    require(not causes, min(causes, default=(0.0, ""))[1])


def _run(end: Callable[[Mail], None], mail: Mail, report: Connection) -> None:
    text = ""
    try:
        end(mail)
    except AssertionError as error:
        text = str(error) or traceback.format_exc()
    except BaseException:
        text = traceback.format_exc()
    if text:
        text = f"{time.monotonic()} {text}"  # the same clock in every process
        mail.fail()
    report.send_bytes(text.encode())
