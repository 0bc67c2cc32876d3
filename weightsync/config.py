"""The options of a `WeightSync`, checked."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from msgspec import Meta, ValidationError, convert

from weightsync.errors import ConfigError
from weightsync.net.timeouts import MAX_TIMEOUT_S
from weightsync.selection import TensorSelection

BackendName = Literal["fsdp", "deepspeed", "megatron", "stream"]
BucketerName = Literal["module", "threshold", "parameter"]
Pause = Literal["keep", "wait", "abort", "caller"]
Verify = Literal["sampled", "full", "none"]
Quantize = Literal["fp8", "int8"]
OnEngineFailure = Literal["raise", "drop"]
Encoding = Literal["auto", "delta"]
EncodingBase = Literal["device", "host"]
NonFinite = Literal["warn", "refuse", "ignore"]

_Bytes = Annotated[int, Meta(description='it must be a whole number of bytes, such as 67108864 or "64MiB"')]
_Timeout = Annotated[
    float, Meta(gt=0, le=MAX_TIMEOUT_S, description=f"it must be positive seconds, {MAX_TIMEOUT_S:.0f} at most")
]
_Hold = Annotated[float, Meta(gt=0, description="it must be positive seconds, or None for no limit")]
_Switch = Annotated[bool, Meta(description="it must be true, false or None")]

_UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}

_CHECKED_WHERE_READ = ("backend", "transport", "engine", "bucketer", "selection", "encoding", "ranks")
"""Options with objects or names that only their readers know, such as a plug-in's transport."""
_NAMES = ("backend", "bucketer")
"""The options among these with no other names than those of their types."""
_HINTS = {
    "backend": '. "fsdp" is also for DDP and plain modules',
    "quantize": ", with a scale for each output channel. For other scales, push without it to an engine that quantises",
}
"""More to say about the choices of an option."""


@dataclass(frozen=True)
class WeightSyncConfig:
    """The options of a `WeightSync` in a form for YAML, hydra and command lines. `WeightSync.from_config` takes it.

    `WeightSync` documents each option, and has the same defaults. The annotations are the types that a file can hold.
    Objects, such as an `LLM`, are given to `from_config` beside the config.

    Attributes:
        max_bytes: Bytes, or text such as "64MiB" or "1GB". Text becomes a number.
        selection: A `TensorSelection`, or a mapping of its options.

    Raises:
        ConfigError: A value outside of an option's range.
    """

    backend: BackendName
    transport: str = "ipc"
    engine: list[str] | None = None
    bucketer: BucketerName | None = None
    max_bytes: _Bytes | None = None
    selection: Any = None
    pause: Pause | None = None
    rolling: _Switch | None = None
    timeout_s: _Timeout = 300.0
    hold_s: _Hold | None = None
    verify: Verify | None = None
    quantize: Quantize | None = None
    on_engine_failure: OnEngineFailure | None = None
    encoding: Encoding | None = None
    encoding_base: EncodingBase | None = None
    non_finite: NonFinite | None = None
    progress: _Switch | None = None
    ranks: Literal["alone"] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.max_bytes, str):
            object.__setattr__(self, "max_bytes", read_bytes(self.max_bytes))
        for name, kind in _TYPES.items():
            given = getattr(self, name)
            if name in _CHECKED_WHERE_READ and not (name in _NAMES and isinstance(given, str)):
                continue
            try:
                convert(given, kind)
            except ValidationError:
                raise ConfigError(f"{name}={given!r}; {_expected(kind)}{_HINTS.get(name, '')}") from None
        read_selection(self.selection)
        if self.encoding_base is not None and self.encoding is None:
            raise ConfigError(f"encoding_base={self.encoding_base!r} has no effect without an encoding: leave it out")
        if self.encoding is not None and self.verify == "none":
            raise ConfigError(
                f'encoding={self.encoding!r} sends changes to the bytes that an engine has, and verify="none" checks '
                "none of them: leave one of the two out"
            )


_TYPES = get_type_hints(WeightSyncConfig, include_extras=True)


def _one_kind(kind: Any) -> Any:
    """Return a type without `None`."""
    return next((part for part in get_args(kind) if get_args(part)), kind)


def _expected(kind: Any) -> str:
    """Return the description of a type, or the choices of a `Literal`."""
    kind = _one_kind(kind)
    if meta := getattr(kind, "__metadata__", None):
        return str(meta[0].description)
    return f"choose one of {', '.join(get_args(kind))}"


def _show_text() -> None:
    """Annotate for readers of files: text with choices in place of a `Literal`, which OmegaConf 2.3 refuses."""
    WeightSyncConfig.__annotations__["max_bytes"] = "int | str | None"
    for each in fields(WeightSyncConfig):
        kind = _one_kind(_TYPES[each.name])
        if get_origin(kind) is Literal:
            WeightSyncConfig.__annotations__[each.name] = "str" if kind is _TYPES[each.name] else "str | None"
            each.metadata = MappingProxyType({"choices": get_args(kind)})  # `HfArgumentParser` reads them


_show_text()


def read_bytes(text: str) -> int:
    """Return a size from text such as "67108864", "64MiB" or "1GB". Raise `ConfigError` for other text."""
    number = text.rstrip("BGKMik")
    try:
        return int(number) * _UNITS[text[len(number) :]]
    except (ValueError, KeyError):
        raise ConfigError(f"{text!r}: expected bytes, such as 268435456 or 256MiB") from None


def read_config(config: WeightSyncConfig | Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a config by name. Raises `ConfigError` for an unknown option."""
    if isinstance(config, WeightSyncConfig):
        return dict(vars(config))
    if not isinstance(config, Mapping):
        raise ConfigError(f"config={config!r}; expected a WeightSyncConfig or a mapping of its fields")
    return _known("a WeightSyncConfig", WeightSyncConfig, config)


def read_selection(given: Any) -> TensorSelection:
    """Return a copy of a `TensorSelection`, a mapping of its options as one, or one of all tensors for None."""
    if isinstance(given, TensorSelection):
        own = copy(given)
        vars(own).pop("_matched", None)  # a selection notes its matches, and a user may share it
        return own
    if not isinstance(given, Mapping | None):
        raise ConfigError(f"selection={given!r}; expected a TensorSelection, such as TensorSelection(**options)")
    return TensorSelection(**_known("a TensorSelection", TensorSelection, given or {}))


def _known(what: str, of: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given fields of a dataclass. Raise `ConfigError` for an unknown name."""
    names = [each.name for each in fields(of)]
    if unknown := [str(name) for name in given if name not in names]:
        raise ConfigError(f"{what} has no {', '.join(unknown)}; its fields are {', '.join(names)}")
    return {str(name): value for name, value in given.items()}


def check_count(name: str, given: object, reason: str) -> None:
    """Raise `ConfigError` for anything but a whole number from 1 on."""
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise ConfigError(f"{name}={given!r}; it must be a whole number from 1 on: {reason}")
