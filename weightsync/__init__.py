"""Move updated policy weights from an RL trainer into a running vLLM."""

from weightsync.bucketing import ModuleBucketer, ParameterBucketer, ThresholdBucketer
from weightsync.errors import (
    ConfigError,
    DigestError,
    EngineBusyError,
    EngineError,
    EngineUnreachableError,
    ManifestError,
    PeerError,
    PlacementError,
    ProtocolError,
    SyncTimeoutError,
    UnsupportedError,
    WeightSyncError,
)
from weightsync.report import PushReport, WorkerReport
from weightsync.senders.base import TensorPolicy
from weightsync.sync import WeightSync

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "DigestError",
    "EngineBusyError",
    "EngineError",
    "EngineUnreachableError",
    "ManifestError",
    "ModuleBucketer",
    "ParameterBucketer",
    "PeerError",
    "PlacementError",
    "ProtocolError",
    "PushReport",
    "SyncTimeoutError",
    "TensorPolicy",
    "ThresholdBucketer",
    "UnsupportedError",
    "WeightSync",
    "WeightSyncError",
    "WorkerReport",
]
