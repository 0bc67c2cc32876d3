"""The ways to make engines serve a new version, by the value of `WeightSync(transport=...)`."""

from __future__ import annotations

from functools import partial
from typing import Any

from weightsync.strategies.base import Options, UpdateStrategy


def open_strategy(transport: Any, options: Options) -> UpdateStrategy:
    """Return the strategy of `transport`: a name, an option object, or a `Transport`.

    Raises `ConfigError` for anything else, and for options that the strategy cannot work with.
    """
    from weightsync.strategies.copy import CopyWeights
    from weightsync.transports import open_transport

    transport = _option_of(transport)
    if hasattr(transport, "open"):
        strategy: UpdateStrategy = transport.open(options)
        return strategy
    # A stream gives everything once, so all engines share one session.
    has_others = isinstance(transport, str) and not options.is_stream
    return CopyWeights(options, open_transport(transport), partial(open_transport, transport) if has_others else None)


def demands_of(transport: Any) -> str | None:
    """Return a transport's demands on its caller besides `push`, as in `StrategyOption.demands`."""
    demands: str | None = getattr(_option_of(transport), "demands", None)
    return demands


def _option_of(transport: Any) -> Any:
    """Return the option object of a strategy's name. Return anything else as it is."""
    match transport:
        case "single_copy":
            from weightsync.strategies.shared_memory import SingleCopyTransport

            return SingleCopyTransport()
        case "lora":
            from weightsync.strategies.lora import LoraTransport

            return LoraTransport()
    return transport
