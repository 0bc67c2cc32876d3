"""The report of a push: its sizes and seconds."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from tqdm import tqdm


@dataclass(frozen=True)
class WorkerReport:
    """One engine worker's share of a push.

    Attributes:
        name: The worker's name.
        nbytes: Bytes written to its model.
        transfer_s, verify_s, load_s: Its own seconds.
    """

    name: str
    nbytes: int
    transfer_s: float
    verify_s: float
    load_s: float


@dataclass(frozen=True)
class EngineReport:
    """One engine's share of a push.

    Attributes:
        name: The engine's name.
        pause_s: Seconds from its confirmed pause until all engines of its update generate, or their caller may resume
            them. With `rolling=True` an update has one engine, otherwise all.
    """

    name: str
    pause_s: float


@dataclass(frozen=True, kw_only=True)
class PushReport:
    """One push, the same on every trainer rank. Rank 0 measures all seconds, except the workers' own.

    Attributes:
        version: The version of the weights.
        nbytes: The size of the weights in their dtypes on the wire, each tensor counted once.
        chunks: The number of chunks.
        sent_bytes: Bytes sent by the trainer's ranks. Zero if workers read memory or files themselves.
        plan_s: Seconds to compare the tensors' addresses with the last push, and to make a new plan after a change.
        control_s: Seconds before the transfer starts and after the last engine has loaded, `plan_s` included.
        gather_s: Seconds in which rank 0 gathers and sends its part, or saves its part.
        transfer_s, verify_s, load_s: The most seconds of a worker: waiting for bytes, comparing digests, and writing
            parameters. All three overlap with `gather_s`.
        pause_s: The longest pause of an engine. It may begin during `plan_s`.
        total_s: Seconds of the whole call, without the body of `writing()`.
        load_paths: The number of engine modules on each load path: "in_place", "fused_quantize", "reload",
            "native_loader".
        workers: One `WorkerReport` for each worker. A push of an adapter has one for each engine.
        engines: One `EngineReport` for each paused engine, in the order of the updates.
        left_out: The names of the lost engines. A lost engine does not serve this version.

    A push of an adapter pauses no engine. With `restart=True`, both `load_s` and `pause_s` are the seconds of the
    restart.
    """

    version: int
    nbytes: int
    chunks: int = 0
    sent_bytes: int = 0
    plan_s: float = 0.0
    control_s: float
    gather_s: float = 0.0
    transfer_s: float = 0.0
    verify_s: float = 0.0
    load_s: float
    pause_s: float = 0.0
    total_s: float
    load_paths: dict[str, int] = field(default_factory=dict)
    workers: tuple[WorkerReport, ...] = ()
    engines: tuple[EngineReport, ...] = ()
    left_out: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = ("control", "gather", "transfer", "verify", "load")
        return (
            f"version {self.version}: {format_bytes(self.nbytes)} in {format_seconds(self.total_s)}, generation paused "
            f"{format_seconds(self.pause_s)}; overlapping: "
            + ", ".join(f"{part} {format_seconds(getattr(self, part + '_s'))}" for part in parts)
        )

    def __repr__(self) -> str:
        """Return one short line. A notebook shows it as the value of a cell."""
        return f"<PushReport {self}>"

    def metrics(self, prefix: str = "weightsync/") -> dict[str, float]:
        """Return the report as numbers by name, such as "weightsync/total_s", for an experiment tracker."""
        numbers = {name: float(value) for name, value in vars(self).items() if isinstance(value, (int, float))}
        numbers |= {f"load_paths/{path}": float(count) for path, count in self.load_paths.items()}
        numbers |= {f"pause_s/{engine.name}": engine.pause_s for engine in self.engines}
        numbers["left_out"] = float(len(self.left_out))
        return {prefix + name: number for name, number in numbers.items()}


def format_seconds(seconds: float) -> str:
    """Return seconds such as "12.8 ms" or "1.53 s"."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def format_bytes(nbytes: int) -> str:
    """Return a size such as "16.38 GB", in decimal units, like the speeds of storage and networks."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} B"


_BAR_AFTER_S = 1.0


class Progress(tqdm):  # type: ignore[misc]
    """The chunk numbers of a push, with a progress bar over their iteration.

    The bar appears after a second. It never does if standard error is no terminal (`show=None`), with `show=False`, or
    on ranks that are not `here`. A failure to write the bar must not end a push, as when standard error is closed.
    """

    def __init__(self, show: bool | None, title: str, numbers: Sequence[int], here: bool) -> None:
        hidden = not here or (None if show is None else not show)
        try:
            super().__init__(numbers, title, leave=False, delay=_BAR_AFTER_S, disable=hidden)
        except Exception:
            super().__init__(numbers, disable=True)

    def __getitem__(self, index: int) -> int:
        return int(self.iterable[index])

    def display(self, *shown: object, **named: object) -> bool:
        with suppress(Exception):
            return bool(super().display(*shown, **named))
        return False

    def close(self) -> None:
        with suppress(Exception):
            super().close()
