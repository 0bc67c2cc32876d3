"""The engines of a `WeightSync`, the calls to each, and their rollback when a push fails."""

from __future__ import annotations

from weightsync.fleet.engine_list import ENGINE_VARIABLE, EngineList, connect, public_name

__all__ = ["ENGINE_VARIABLE", "EngineList", "connect", "public_name"]
