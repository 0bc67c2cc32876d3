"""What a push did and how long it took."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field


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
    """One push, the same on every trainer rank.

    `nbytes` is the size of the weights in the dtypes that travel, counted once. The seconds are the trainer's
    clock: `plan_s` agreeing on what travels and how (near zero when nothing changed), `control_s` that and the
    engine's own calls: all before the first bucket and after the last; `gather_s` making the bytes readable,
    `pause_s` from the pause of generation to its resumption, which may begin while it is planned, `total_s` the
    whole call. `transfer_s`, `verify_s` and `load_s` are those of the slowest worker; they overlap with `gather_s`,
    so the parts do not add up to the total. `roads` counts how the engines' modules were loaded: "in place",
    "straight", by "reload", by the engine's own "loader". Of an adapter alone, for which nothing is paused, there
    are `plan_s`, which is `control_s` too, `gather_s`, `load_s` and `total_s`, and a row for each engine in
    `workers`; of a restart, what it takes is `control_s`, `load_s` and `pause_s`.
    """

    version: int
    nbytes: int
    buckets: int = 0
    plan_s: float = 0.0
    control_s: float
    gather_s: float = 0.0
    transfer_s: float = 0.0
    verify_s: float = 0.0
    load_s: float
    pause_s: float = 0.0
    total_s: float
    roads: dict[str, int] = field(default_factory=dict)
    workers: tuple[WorkerReport, ...] = ()

    def __str__(self) -> str:
        parts = ("control", "gather", "transfer", "verify", "load")
        return (
            f"version {self.version}: {format_bytes(self.nbytes)} in {format_seconds(self.total_s)}, generation paused "
            f"{format_seconds(self.pause_s)}; overlapping: "
            + ", ".join(f"{part} {format_seconds(getattr(self, part + '_s'))}" for part in parts)
        )

    def to_json(self) -> str:
        """The report as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_dict(cls, fields: dict[str, object]) -> PushReport:
        """The report that `dataclasses.asdict` or `json.loads` gave the fields of."""
        workers = fields["workers"]
        assert isinstance(workers, (list, tuple))
        return cls(**{**fields, "workers": tuple(WorkerReport(**row) for row in workers)})  # type: ignore[arg-type]


def format_seconds(seconds: float) -> str:
    """Such as 12.8 ms, or 1.53 s."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def format_bytes(nbytes: int) -> str:
    """Such as 16.38 GB: decimal units, as storage and network speeds are given in."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"
