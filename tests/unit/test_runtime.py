"""Threads that are kept: used again, ended when nobody wants them, and none of a parent's in a forked child."""

from __future__ import annotations

import gc
import os
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from weightsync.errors import ConfigError
from weightsync.net import runtime, timeouts, uninterrupted
from weightsync.net.runtime import close_in_thread, collector_paused, describe_device, is_running, spawn, this_process

TIMEOUT_S = 10.0


@pytest.fixture(autouse=True)
def nobody_idle() -> Iterator[None]:
    others = runtime._idle[:]
    runtime._idle.clear()
    yield
    runtime._idle.extend(others)


def run_one() -> threading.Thread:
    """The thread that a function ran in, once that is idle."""
    ran_in: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()
    spawn("work", lambda: ran_in.put(threading.current_thread()))
    thread = ran_in.get(timeout=TIMEOUT_S)
    while not runtime._idle and thread.is_alive():
        pass
    return thread


def test_a_process_is_identified_whatever_its_name_is() -> None:
    """The kernel cuts a script's name off after 15 bytes, also inside of a letter."""
    name, before = Path("/proc/self/comm"), this_process()
    was = name.read_bytes()
    try:
        name.write_bytes(b") " + "\N{CYRILLIC SMALL LETTER TE}".encode() * 8)
        assert this_process() == before
        assert is_running(before)
    finally:
        name.write_bytes(was)


def test_one_thread_serves_call_after_call() -> None:
    first = run_one()
    assert first.daemon
    assert first is not threading.main_thread()
    assert run_one() is first
    names: queue.SimpleQueue[str] = queue.SimpleQueue()
    spawn("update", lambda: names.put(threading.current_thread().name))
    assert names.get(timeout=TIMEOUT_S) == "weightsync update"


def test_a_call_does_not_wait_for_the_one_before_it() -> None:
    go_on, done = threading.Event(), threading.Event()
    spawn("long", lambda: (go_on.wait(TIMEOUT_S), None)[1])
    spawn("short", done.set)
    assert done.wait(TIMEOUT_S)
    go_on.set()


def test_a_thread_that_nobody_wants_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "IDLE_THREAD_S", 0.2)
    thread = run_one()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert thread not in runtime._idle
    assert run_one() is not thread


def test_a_thread_that_is_wanted_when_it_is_about_to_end_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "IDLE_THREAD_S", 1.0)
    thread = run_one()
    done = threading.Event()
    assert runtime._idle.pop() is thread  # as `spawn` does, which is then held up until the thread has given up
    time.sleep(1.5)
    assert thread.is_alive()
    thread.work.put(("late", done.set))
    assert done.wait(TIMEOUT_S)


def test_a_forked_child_starts_threads_of_its_own() -> None:
    run_one()
    assert runtime._idle
    if (child := os.fork()) == 0:
        done = threading.Event()
        spawn("short", done.set)
        os._exit(0 if done.wait(TIMEOUT_S) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_close_that_needs_a_lock_of_the_caller_ends_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "CLOSING_S", 0.1)
    lock, closed = threading.Lock(), threading.Event()

    def close(how: str) -> None:
        with lock:
            assert how == "given"
            closed.set()

    with lock:
        close_in_thread(close, "given")
        assert not closed.is_set()
    assert closed.wait(TIMEOUT_S)


@pytest.mark.parametrize("fails", [ValueError, SystemExit, KeyboardInterrupt])
def test_a_close_that_fails_says_nothing(fails: type[BaseException], capfd: pytest.CaptureFixture[str]) -> None:
    def close() -> None:
        raise fails("odd")

    close_in_thread(close)
    assert capfd.readouterr() == ("", "")


def test_a_close_is_given_up_where_no_thread_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    runtime._idle.clear()
    close_in_thread(pytest.fail, "closed")


def test_the_collector_runs_again_after_a_failure() -> None:
    @collector_paused()
    def fail() -> None:
        with collector_paused():
            pass
        raise ValueError(f"the collector is {'on' if gc.isenabled() else 'off'}")

    with pytest.raises(ValueError, match="the collector is off"):
        fail()
    assert gc.isenabled()


def test_a_gpu_that_torch_did_not_count_is_named(monkeypatch: pytest.MonkeyPatch):
    def refuse(device: torch.device) -> None:
        raise AssertionError("Invalid device id")

    monkeypatch.setattr(torch.cuda, "get_device_properties", refuse)
    with pytest.raises(ConfigError, match=r"has counted \d+ GPUs in this process, and cuda:1 is none of them"):
        describe_device(torch.device("cuda", 1))


def test_uninterrupted_work_is_done_where_no_thread_starts(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(uninterrupted, "submit", refuse)
    assert uninterrupted.UninterruptedWork(lambda: 3).result() == 3
