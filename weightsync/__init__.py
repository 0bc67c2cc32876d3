"""Move updated policy weights from an RL trainer into a running vLLM."""

from weightsync.bucketing import ModuleBucketer, ParameterBucketer, ThresholdBucketer
from weightsync.checkpoint.save import save
from weightsync.engines import LoraAdapter
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
from weightsync.transports.checkpoint import CheckpointTransport
from weightsync.transports.lora import LoraTransport
from weightsync.transports.single_copy import SingleCopyTransport

__version__ = "0.1.0"

__all__ = [
    "CheckpointTransport",
    "ConfigError",
    "DigestError",
    "EngineBusyError",
    "EngineError",
    "EngineUnreachableError",
    "LoraAdapter",
    "LoraTransport",
    "ManifestError",
    "ModuleBucketer",
    "ParameterBucketer",
    "PeerError",
    "PlacementError",
    "ProtocolError",
    "PushReport",
    "SingleCopyTransport",
    "SyncTimeoutError",
    "TensorPolicy",
    "ThresholdBucketer",
    "UnsupportedError",
    "WeightSync",
    "WeightSyncError",
    "WorkerReport",
    "save",
]
