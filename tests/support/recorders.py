"""Recorders of what a push says: to an engine, call by call, and on the wire, message by message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fake_engine import FakeEngine, ModuleHost

from weightsync.engines import LoraAdapter
from weightsync.net.connection import Connection

AT_ONCE = (("pause", "start"), ("finish", "reset"))
"""Calls that a fleet may make in either order, or at the same time."""


class RecordedEngine(FakeEngine):
    """A `FakeEngine` that notes every call, in `calls`, before it does anything. It also takes adapters."""

    def __init__(self, *hosts: ModuleHost) -> None:
        super().__init__(*hosts)
        self.calls: list[str] = []
        self.start_error: Exception | None = None
        self._adapters: list[str] = []

    def init(self, init_info: dict[str, Any]) -> None:
        self.calls.append("init")
        super().init(init_info)

    def start(self) -> None:
        self.calls.append("start")
        if self.start_error is not None:
            raise self.start_error
        super().start()

    def update(self, update_info: dict[str, Any]) -> None:
        self.calls.append("update")
        super().update(update_info)

    def finish(self, version: str | None) -> None:
        self.calls.append(f"finish {version}")
        super().finish(version)

    def pause(self, mode: str) -> None:
        self.calls.append(f"pause {mode}")
        super().pause(mode)

    def resume(self) -> None:
        self.calls.append("resume")
        super().resume()

    def reset_caches(self) -> None:
        self.calls.append("reset caches")
        super().reset_caches()

    def set_version(self, version: str) -> None:
        self.calls.append(f"mark {version}")
        super().set_version(version)

    def max_lora_rank(self) -> int | None:
        return None

    def load_adapter(self, adapter: LoraAdapter) -> None:
        self.calls.append("load adapter")
        self._adapters.append(adapter.name)

    def unload_adapter(self, adapter: LoraAdapter) -> None:
        if adapter.name in self._adapters:
            self.calls.append("unload adapter")
            self._adapters.remove(adapter.name)

    def has_adapter(self, adapter: LoraAdapter) -> bool:
        return adapter.name in self._adapters

    def adapters_in_use(self) -> set[str]:
        return set()

    def heard(self) -> str:
        """The calls since the last `heard`, one step a line. Calls that may be made at once are sorted."""
        calls, self.calls = self.calls, []
        steps: list[list[str]] = []
        for call in calls:
            kind = call.split()[0]
            together = next((group for group in AT_ONCE if kind in group), ())
            if steps and steps[-1][0].split()[0] in together and kind != steps[-1][0].split()[0]:
                steps[-1] = sorted([*steps[-1], call])
            else:
                steps.append([call])
        return "".join(f"{' + '.join(step)}\n" for step in steps)


@contextmanager
def sent_messages() -> Iterator[Counter[tuple[str, str]]]:
    """Counts what this process sends meanwhile: (to whom, which message) to how often. Workers of a `FakeEngine` are
    threads of this process, and their messages are counted too."""
    found: Counter[tuple[str, str]] = Counter()
    send = Connection.send

    def note_and_send(connection: Connection, message: Any, *args: Any) -> None:
        found[connection.peer, type(message).__name__] += 1
        send(connection, message, *args)

    Connection.send = note_and_send  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Connection.send = send  # type: ignore[method-assign]
