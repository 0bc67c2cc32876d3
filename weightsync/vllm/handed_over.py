"""A check for requests between prefill in one engine and decoding in another, before weights change.

Such a request has keys and values of older weights. Its blocks are leased, and vLLM cannot reset them. While both
engines are paused, the lease expires. The decoding engine reads the blocks all the same when it resumes.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

from weightsync.errors import EngineError, UnsupportedError
from weightsync.net import timeouts

_ON_THEIR_WAY = "_reqs_to_send", "_recving_metadata"
"""The notes of requests under way, in both directions, in the workers of Nixl's connectors."""


class HandedOver:
    """The requests that this engine hands over, or takes over, by Nixl's connectors."""

    def __init__(self) -> None:
        self._expired_at: list[float] = []
        self._is_watched = False

    def watch(self) -> None:
        """Note expired leases from now on. Raise `UnsupportedError` if requests under way cannot be seen."""
        for worker in () if self._is_watched else _workers():
            hidden = [name for name in _ON_THEIR_WAY if not hasattr(worker, name)]
            if hidden and type(worker).__name__.startswith("Nixl"):
                raise UnsupportedError(
                    f"{type(worker).__name__} of this vLLM has no {hidden[0]}, so a push cannot see requests between "
                    "prefill and decode. Start the engine without this kv_transfer_config, or with an earlier vLLM"
                )
            stats: Any = type(getattr(worker, "xfer_stats", None))
            record = getattr(stats, "record_kv_expired_req", None)

            def note(own: Any, record: Any = record) -> None:
                self._expired_at.append(time.monotonic())
                record(own)

            if record is not None:
                stats.record_kv_expired_req = note
        self._is_watched = True

    def forget_expired(self) -> None:
        """Forget expired leases, as the engine answers: they did not expire in a pause that still lasts."""
        self._expired_at.clear()

    def check(self) -> None:
        """Raise `EngineError` if requests are on their way, or were when this pause began."""
        waiting = sum(len(getattr(each, name, ())) for each in _workers() for name in _ON_THEIR_WAY)
        waiting += sum(time.monotonic() - at < timeouts.EXPIRED_LEASE_S for at in self._expired_at)
        self.forget_expired()
        if waiting:
            raise EngineError(
                f"{waiting} requests are between prefill and decode, with keys and values of the weights before this "
                "push. Nothing was written. Finish all requests, or pause the engines that prefill first, and the "
                'others once they have taken all requests over: WeightSync(pause="caller")'
            )


def _workers() -> list[Any]:
    """Return the worker's side of each connector of this process."""
    connector: Any = get_kv_transfer_group() if has_kv_transfer_group() else None
    return [getattr(each, "connector_worker", None) for each in getattr(connector, "_connectors", [connector])]
