"""Move updated policy weights from an RL trainer into a running vLLM."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from weightsync.config import WeightSyncConfig
from weightsync.errors import (
    ConfigError,
    DigestError,
    EngineAsleepError,
    EngineBusyError,
    EngineError,
    EngineUnreachableError,
    FencedError,
    FrozenLostError,
    ManifestError,
    NonFiniteError,
    PeerError,
    PlacementError,
    ProtocolError,
    SyncTimeoutError,
    UnsupportedError,
    WeightSyncError,
)
from weightsync.planning.bucketing import Bucket, Bucketer, ModuleBucketer, ParameterBucketer, ThresholdBucketer
from weightsync.report import PushReport, WorkerReport
from weightsync.selection import TensorSelection

if TYPE_CHECKING:
    from weightsync.checkpoint.save import save
    from weightsync.engines import LoraAdapter
    from weightsync.sources.megatron import MegatronBackend
    from weightsync.sources.stream import StreamBackend
    from weightsync.strategies.lora import LoraTransport
    from weightsync.strategies.restart import CheckpointTransport
    from weightsync.strategies.shared_memory import SingleCopyTransport
    from weightsync.sync import WeightSync

__version__ = "0.1.0"

__all__ = [
    "Bucket",
    "Bucketer",
    "CheckpointTransport",
    "ConfigError",
    "DigestError",
    "EngineAsleepError",
    "EngineBusyError",
    "EngineError",
    "EngineUnreachableError",
    "FencedError",
    "FrozenLostError",
    "LoraAdapter",
    "LoraTransport",
    "ManifestError",
    "MegatronBackend",
    "ModuleBucketer",
    "NonFiniteError",
    "ParameterBucketer",
    "PeerError",
    "PlacementError",
    "ProtocolError",
    "PushReport",
    "SingleCopyTransport",
    "StreamBackend",
    "SyncTimeoutError",
    "TensorSelection",
    "ThresholdBucketer",
    "UnsupportedError",
    "WeightSync",
    "WeightSyncConfig",
    "WeightSyncError",
    "WorkerReport",
    "save",
]

# Names with an import of torch. It takes seconds, and the command line must answer `--help` without it.
_LAZY = {
    "CheckpointTransport": "weightsync.strategies.restart",
    "LoraAdapter": "weightsync.engines",
    "LoraTransport": "weightsync.strategies.lora",
    "MegatronBackend": "weightsync.sources.megatron",
    "SingleCopyTransport": "weightsync.strategies.shared_memory",
    "StreamBackend": "weightsync.sources.stream",
    "WeightSync": "weightsync.sync",
    "save": "weightsync.checkpoint.save",
}


def __getattr__(name: str) -> Any:
    """Import the module of a name of `_LAZY` on its first use."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
