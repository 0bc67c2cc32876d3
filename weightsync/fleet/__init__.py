"""Which engines a `WeightSync` pushes to, what was asked of each, and what is taken back when a push fails."""

from __future__ import annotations

from weightsync.fleet.roster import ENGINE_VARIABLE, EngineList, connect, public_name

__all__ = ["ENGINE_VARIABLE", "EngineList", "connect", "public_name"]
