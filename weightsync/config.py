"""The options of a `WeightSync`, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from weightsync.errors import ConfigError
from weightsync.net import timeouts
from weightsync.selection import TensorSelection

BackendName = Literal["fsdp", "deepspeed", "megatron", "stream"]
BucketerName = Literal["module", "threshold", "parameter"]
Pause = Literal["keep", "wait", "abort", "caller"]
Verify = Literal["sampled", "full", "none"]
Quantize = Literal["fp8", "int8"]
OnEngineFailure = Literal["raise", "drop"]
Encoding = Literal["auto", "delta"]
NonFinite = Literal["warn", "refuse", "ignore"]

_CHOICES = {"pause": Pause, "verify": Verify, "on_engine_failure": OnEngineFailure, "non_finite": NonFinite}


@dataclass(frozen=True)
class WeightSyncConfig:
    """The options of a `WeightSync` in a form for YAML, hydra and command lines. `WeightSync.from_config` takes it.

    `WeightSync` documents each option, and has the same defaults. The annotations are the types that a file can hold.
    Objects, such as an `LLM`, are given to `from_config` beside the config.

    Attributes:
        selection: A `TensorSelection`, or a mapping of its options.

    Raises:
        ConfigError: A value outside of an option's range.
    """

    backend: str
    transport: str = "ipc"
    engine: list[str] | None = None
    bucketer: str | None = None
    max_bytes: int | None = None
    selection: Any = None
    pause: str | None = None
    timeout_s: float = 300.0
    hold_s: float | None = None
    verify: str | None = None
    quantize: str | None = None
    on_engine_failure: str | None = None
    encoding: str | None = None
    non_finite: str | None = None
    progress: bool | None = None
    megatron_bridge: str | None = None
    vocab_size: int | None = None
    ranks: str | None = None

    def __post_init__(self) -> None:
        for name, kind in _CHOICES.items():
            choices = get_args(kind)
            if (given := getattr(self, name)) not in (None, *choices):
                raise ConfigError(f"{name}={given!r}; choose one of {', '.join(choices)}")
        if not _is_number(self.timeout_s, float) or not 0 < self.timeout_s <= timeouts.MAX_TIMEOUT_S:
            raise ConfigError(
                f"timeout_s={self.timeout_s!r}; it must be positive seconds, {timeouts.MAX_TIMEOUT_S:.0f} at most"
            )
        if self.hold_s is not None and (not _is_number(self.hold_s, float) or not self.hold_s > 0):
            raise ConfigError(f"hold_s={self.hold_s!r}; it must be positive seconds, or None for no limit")
        for name, unit in (("max_bytes", "bytes, such as 67108864 for 64 MiB"), ("vocab_size", "rows")):
            if (given := getattr(self, name)) is not None and not _is_number(given, int):
                raise ConfigError(f"{name}={given!r}; it must be a whole number of {unit}")
        object.__setattr__(self, "selection", _selection(self.selection))


def read_config(config: WeightSyncConfig | Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a config by name. Raises `ConfigError` for an unknown option."""
    if isinstance(config, WeightSyncConfig):
        return dict(vars(config))
    if not isinstance(config, Mapping):
        raise ConfigError(f"config={config!r}; expected a WeightSyncConfig or a mapping of its fields")
    return _known("a WeightSyncConfig", WeightSyncConfig, config)


def _selection(given: Any) -> TensorSelection:
    if given is None or isinstance(given, TensorSelection):
        return given or TensorSelection()
    if not isinstance(given, Mapping):
        raise ConfigError(f"selection={given!r}; expected a TensorSelection, such as TensorSelection(**options)")
    return TensorSelection(**_known("a TensorSelection", TensorSelection, given))


def _known(what: str, of: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given fields of a dataclass. Raise `ConfigError` for an unknown name."""
    names = [each.name for each in fields(of)]
    if unknown := [str(name) for name in given if name not in names]:
        raise ConfigError(f"{what} has no {', '.join(unknown)}; its fields are {', '.join(names)}")
    return {str(name): value for name, value in given.items()}


def check_count(name: str, given: object, reason: str) -> None:
    """Raise `ConfigError` for anything but a whole number from 1 on."""
    if not isinstance(given, int) or given < 1:
        raise ConfigError(f"{name}={given!r}; it must be a whole number from 1 on: {reason}")


def _is_number(value: object, kind: type[int] | type[float]) -> bool:
    return isinstance(value, (int, kind)) and not isinstance(value, bool)
