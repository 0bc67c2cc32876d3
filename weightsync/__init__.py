"""Move updated policy weights from an RL trainer into a running vLLM."""

TYPE_CHECKING = False  # for type checkers alone: the import of `typing` takes time
if TYPE_CHECKING:
    from typing import Any

    from weightsync.checkpoint.save import save
    from weightsync.config import WeightSyncConfig
    from weightsync.engines import LoraAdapter
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
    from weightsync.report import EngineReport, PushReport, WorkerReport
    from weightsync.selection import TensorSelection
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
    "EngineReport",
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

# Each name is imported on its first use. The command line answers `--help` without torch, whose import takes seconds.
# It catches a Ctrl-C before it imports anything, since the import of this package alone takes no time.
_NAMES = {
    "weightsync.checkpoint.save": ("save",),
    "weightsync.config": ("WeightSyncConfig",),
    "weightsync.engines": ("LoraAdapter",),
    "weightsync.errors": tuple(name for name in __all__ if name.endswith("Error")),
    "weightsync.planning.bucketing": tuple(name for name in __all__ if "Bucket" in name),
    "weightsync.report": ("EngineReport", "PushReport", "WorkerReport"),
    "weightsync.selection": ("TensorSelection",),
    "weightsync.sources.megatron": ("MegatronBackend",),
    "weightsync.sources.stream": ("StreamBackend",),
    "weightsync.strategies.lora": ("LoraTransport",),
    "weightsync.strategies.restart": ("CheckpointTransport",),
    "weightsync.strategies.shared_memory": ("SingleCopyTransport",),
    "weightsync.sync": ("WeightSync",),
}
_LAZY = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> "Any":
    """Import the module of a name of `_LAZY`, or `weightsync.errors`, on its first use."""
    from importlib import import_module

    if name == "errors":
        return import_module("weightsync.errors")
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
