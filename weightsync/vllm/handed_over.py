"""A check for requests between prefill in one engine and decoding in another, before weights change.

Such a request has keys and values of older weights. Its blocks are leased, and vLLM cannot reset them. While both
engines are paused, the lease expires. The decoding engine reads the blocks all the same when it resumes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

from weightsync.errors import EngineError, UnsupportedError
from weightsync.net import timeouts
from weightsync.vllm.kv_connectors import count_of_nixl

_ON_THEIR_WAY = "_reqs_to_send", "_recving_metadata"
"""The notes of requests under way, in both directions, in the workers of Nixl's connectors."""
_RECORD = "record_kv_expired_req"
"""The method of such a worker's `xfer_stats` that vLLM calls for each expired lease."""


class HandedOver:
    """The requests that this engine hands over, or takes over, by Nixl's connectors."""

    def __init__(self) -> None:
        self._expired_at: list[float] = []
        self._workers: list[Any] = []

    def watch(self, config: KVTransferConfig | None) -> None:
        """Find the workers of the connectors in `config`, and note expired leases from now on.

        Raises `UnsupportedError` for workers of Nixl's connectors without the notes that `check` reads.
        """
        if self._workers:
            return
        workers = _workers()
        watched = [each for each in workers if hasattr(getattr(each, "xfer_stats", None), _RECORD)]
        legible = [each for each in watched if all(hasattr(each, name) for name in _ON_THEIR_WAY)]
        if len(legible) < (expected := count_of_nixl(config)):
            raise UnsupportedError(
                f"the engine has {expected} of Nixl's KV connectors, and {len(legible)} of these note requests between "
                f"prefill and decode as expected: {', '.join(_ON_THEIR_WAY)}, xfer_stats.{_RECORD}. Start the engine "
                "without this kv_transfer_config, or with an earlier vLLM"
            )
        for stats in {type(each.xfer_stats) for each in watched}:  # several connectors may have one class
            setattr(stats, _RECORD, self._noting(getattr(stats, _RECORD)))
        self._workers = workers

    def _noting(self, record: Callable[[Any], None]) -> Callable[[Any], None]:
        def note(stats: Any) -> None:
            self._expired_at.append(time.monotonic())
            record(stats)

        return note

    def forget_expired(self) -> None:
        """Forget expired leases, as the engine answers: they did not expire in a pause that still lasts."""
        self._expired_at.clear()

    def check(self) -> None:
        """Raise `EngineError` if requests are on their way, or were when this pause began."""
        noted = [getattr(each, name, ()) for each in self._workers for name in _ON_THEIR_WAY]
        waiting = len(set().union(*noted))
        waiting += sum(time.monotonic() - at < timeouts.EXPIRED_LEASE_S for at in self._expired_at)
        self.forget_expired()
        if waiting:
            raise EngineError(
                f"{waiting} requests are between prefill and decode, with keys and values of the weights before this "
                "push. Nothing was written. Finish these requests, and push again. Engines must pause in this order: "
                'kv_role="kv_producer", then "kv_both" as they are listed, then "kv_consumer"'
            )


def _workers() -> list[Any]:
    """Return the worker's side of each connector of this process, also of connectors in a MultiConnector."""
    connectors: list[Any] = [get_kv_transfer_group()] if has_kv_transfer_group() else []
    for each in connectors:  # grows
        connectors += getattr(each, "_connectors", ())
    return [each.connector_worker for each in connectors if getattr(each, "connector_worker", None) is not None]
