"""Trainer ranks and engine workers for a check: they run at once and talk to each other in plain values."""

from __future__ import annotations

import multiprocessing
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from weightsync.deadline import Deadline
from weightsync.testing.promises import require
from weightsync.wire import PREFIX_BYTES, Value, decode, encode

_PATIENCE = 8
"""Whoever waits for an end that has several waits of its own waits this many times as long."""


class AnotherEndFailed(Exception):  # noqa: N818 (it is a consequence, not the error)
    """Another end has failed; its own error says why."""


class Mail:
    """One end's connections to the others: ranks come first, then workers. Messages are msgpack, so that what an
    implementation wants to have told is seen to be plain values."""

    host = "127.0.0.1"

    def __init__(
        self, ranks: int, readers: dict[int, Connection], writers: dict[int, Connection], timeout_s: float
    ) -> None:
        self.ranks = ranks
        self.workers = len(readers) + 1 - ranks
        self.timeout_s = timeout_s
        self._readers, self._writers = readers, writers
        self._read: dict[int, list[Any]] = {end: [] for end in readers}

    def send(self, end: int, value: Any) -> None:
        self._writers[end].send_bytes(encode(Value({"value": value})))

    def receive(self, end: int, *, patient: bool = False) -> Any:
        deadline = Deadline(self.timeout_s * (_PATIENCE if patient else 1))
        while not self._read[end]:
            require(not deadline.passed(), f"no answer from {title(end, self.ranks)} within {deadline.timeout_s:g} s")
            self._look(min(0.1, deadline.left_s()))
        return self._read[end].pop(0)

    def tell_workers(self, order: dict[str, Any]) -> None:
        for end in range(self.ranks, self.ranks + self.workers):
            self.send(end, order)

    def hear_workers(self) -> list[Any]:
        return [self.receive(end) for end in range(self.ranks, self.ranks + self.workers)]

    def idle(self, seconds: float) -> None:
        """An `Idle` of the transports: raises when any end has failed."""
        time.sleep(seconds)
        self._look(0)

    def fail(self) -> None:
        """Tell all others that this end has failed."""
        for writer in self._writers.values():
            try:
                writer.send_bytes(encode(Value({"failed": True})))
            except OSError:
                continue

    def _look(self, wait_s: float) -> None:
        for reader in wait(list(self._readers.values()), wait_s):
            end = next(number for number, one in self._readers.items() if one is reader)
            try:
                message = decode(self._readers[end].recv_bytes()[PREFIX_BYTES:])
            except EOFError:
                raise AnotherEndFailed(title(end, self.ranks)) from None
            assert isinstance(message, Value)
            if "failed" in message.value:
                raise AnotherEndFailed(title(end, self.ranks))
            self._read[end].append(message.value["value"])


class MailGroup:
    """The trainer's ranks as `weightsync.transports.base.Group`."""

    def __init__(self, rank: int, mail: Mail) -> None:
        self.rank, self.size = rank, mail.ranks
        self.host = mail.host
        self._mail = mail

    def gather(self, value: Any, phase: str) -> list[Any]:
        if self.rank:
            self._mail.send(0, value)
            return []
        return [value, *(self._mail.receive(rank) for rank in range(1, self.size))]

    def idle(self, seconds: float) -> None:
        self._mail.idle(seconds)

    def share(self, value: Any, phase: str) -> Any:
        if self.rank:
            return self._mail.receive(0, patient=True)
        for rank in range(1, self.size):
            self._mail.send(rank, value)
        return value


def title(end: int, ranks: int) -> str:
    return f"trainer rank {end}" if end < ranks else f"worker {end - ranks}"


def run_together(ends: Sequence[Callable[[Mail], None]], ranks: int, in_processes: bool, timeout_s: float) -> None:
    """Run all ends at once, the first `ranks` of them trainer ranks. Raises the error of an end that did not only
    suffer from another's."""
    pipes = {(a, b): multiprocessing.Pipe(duplex=False) for a in range(len(ends)) for b in range(len(ends)) if a != b}
    reports = [multiprocessing.Pipe(duplex=False) for _ in ends]
    runners: list[Any] = []
    for number, end in enumerate(ends):
        readers = {a: reader for (a, b), (reader, _) in pipes.items() if b == number}
        writers = {b: writer for (a, b), (_, writer) in pipes.items() if a == number}
        args = (end, Mail(ranks, readers, writers, timeout_s), reports[number][1])
        if in_processes:
            runners.append(multiprocessing.get_context("spawn").Process(target=_run, args=args, daemon=True))
        else:
            runners.append(threading.Thread(target=_run, args=args, daemon=True))
    for runner in runners:
        runner.start()
    deadline = Deadline(timeout_s * _PATIENCE)
    errors = []
    for number, ((reader, _), runner) in enumerate(zip(reports, runners, strict=True)):
        while not reader.poll(0.1) and runner.is_alive() and not deadline.passed():
            pass
        text = reader.recv_bytes().decode() if reader.poll() else "it ended without a word, or did not end"
        if text:
            errors.append(f"{title(number, ranks)}: {text}")
    for runner in runners:
        runner.join(5)
        if in_processes and runner.is_alive():
            runner.kill()
    for reader, writer in (*pipes.values(), *reports):
        reader.close()
        writer.close()
    causes = [text for text in errors if AnotherEndFailed.__name__ not in text] or errors
    require(not causes, "".join(causes[:1]))


def _run(end: Callable[[Mail], None], mail: Mail, report: Connection) -> None:
    try:
        end(mail)
        text = ""
    except AssertionError as error:
        text = str(error) or traceback.format_exc()
    except BaseException:
        text = traceback.format_exc()
    if text:
        mail.fail()
    report.send_bytes(text.encode())
