"""Threads that show msgspec a kind for the first time at once, as the workers of one process do when they connect."""

from __future__ import annotations

import subprocess
import sys
import threading

import msgspec

from weightsync.net.wire import typed

THREADS, KINDS = 4, 100


def show_new_kinds() -> None:
    sys.setswitchinterval(1e-6)
    for number in range(KINDS):
        names = [f"f{i}" for i in range(20)]
        inner = msgspec.defstruct(f"Inner{number}", [(name, "int | str | None") for name in names])
        kind = msgspec.defstruct(f"Kind{number}", [("inner", list[inner])])
        value, together, found = {"inner": [dict.fromkeys(names, 1)]}, threading.Barrier(THREADS), []

        def show(value=value, kind=kind, together=together, found=found) -> None:
            together.wait()
            found.append(typed(value, kind))

        threads = [threading.Thread(target=show) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == THREADS


def test_threads_may_read_a_kind_for_the_first_time_at_once() -> None:
    """In a process of its own, which would end by a signal."""
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    show_new_kinds()
