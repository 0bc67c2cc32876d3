"""What a push did and how long it took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tqdm import tqdm


@dataclass(frozen=True)
class WorkerReport:
    """One engine worker's share of a push: bytes written to its model, and its own seconds."""

    name: str
    nbytes: int
    transfer_s: float
    verify_s: float
    load_s: float


@dataclass(frozen=True, kw_only=True)
class PushReport:
    """One push, the same on every trainer rank. Seconds are of rank 0's clock.

    nbytes: the size of the weights in the dtypes that travel, each tensor counted once.
    chunks: how many chunks they travelled in.
    sent_bytes: how many bytes the trainer's ranks have sent. Zero where workers read them themselves.
    plan_s: agreeing on what travels and how; near zero when nothing has moved.
    control_s: everything before the engines were told to go and after the last of them was done, `plan_s` included.
    gather_s: rank 0's part of sending.
    transfer_s, verify_s, load_s: those of the slowest worker. They overlap with `gather_s`.
    pause_s: from when an engine says that it is paused until all generate again, which may begin during `plan_s`.
    total_s: the whole call.
    load_paths: how many of the engines' modules took each load path: "in_place", "fused_quantize", "reload",
        "native_loader".
    left_out: the names of the engines that do not serve this version, since they were lost.

    A push of an adapter pauses nothing, and has a row for each engine in `workers`. A restart's `control_s`, `load_s`
    and `pause_s` are the seconds of the restart.
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
    left_out: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = ("control", "gather", "transfer", "verify", "load")
        return (
            f"version {self.version}: {format_bytes(self.nbytes)} in {format_seconds(self.total_s)}, generation paused "
            f"{format_seconds(self.pause_s)}; overlapping: "
            + ", ".join(f"{part} {format_seconds(getattr(self, part + '_s'))}" for part in parts)
        )

    def metrics(self, prefix: str = "weightsync/") -> dict[str, float]:
        """Return the report as numbers by name, such as "weightsync/total_s", for a tracker of experiments."""
        numbers: dict[str, float] = {
            name: float(value) for name, value in vars(self).items() if isinstance(value, (int, float))
        }
        numbers |= {f"load_paths/{path}": float(count) for path, count in self.load_paths.items()}
        numbers["left_out"] = float(len(self.left_out))
        return {prefix + name: number for name, number in numbers.items()}


def format_seconds(seconds: float) -> str:
    """Return seconds such as "12.8 ms" or "1.53 s"."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def format_bytes(nbytes: int) -> str:
    """Return a size such as "16.38 GB", in decimal units, as storage and network speeds are given in."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"


_BAR_AFTER_S = 1.0


class Progress(tqdm):  # type: ignore[misc]
    """The numbers of a push's chunks, and a bar that follows their iteration.

    The bar shows itself once a push has lasted a second. It never does when standard error is no terminal
    (`show=None`), with `show=False`, or on ranks that are not `here`.
    """

    def __init__(self, show: bool | None, title: str, numbers: Sequence[int], here: bool) -> None:
        hidden = not here or (None if show is None else not show)
        super().__init__(numbers, title, leave=False, delay=_BAR_AFTER_S, disable=hidden)

    def __getitem__(self, index: int) -> int:
        number: int = self.iterable[index]
        return number
