"""Rank 0's address, given to the other trainer ranks through the store of the default process group.

Rank 0 numbers its offers, one for each call, and each other rank takes them in order. An offer that rank 0 has given up
raises on a late rank, too. No collective operation is used, so the training job's own collectives stay in step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from msgspec import json

from weightsync.errors import ErrorFields, PeerError, WeightSyncError, from_fields
from weightsync.net import timeouts
from weightsync.net.runtime import Deadline

ALL_PUSH = (
    "every rank must call push, or save with the same folder, within this time, and make its WeightSync objects in the "
    "same order"
)
_NO = "! "
"""Prefix of rank 0's error, as JSON, in the place of an offer."""


class Rendezvous:
    """The ranks of a process group, or of the default group, at the default store.

    Every method raises `PeerError` when the store is gone.
    """

    def __init__(self, group: dist.ProcessGroup | None, name: str) -> None:
        """Meet the ranks with the same `name`. Ranks with another one have offers of their own."""
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        prefix = "weightsync" if group is None else f"weightsync/{group.group_name}"
        self._store = dist.PrefixStore(f"{prefix}/{name}", dist.distributed_c10d._get_default_store())
        self._calls: list[str] = []  # "rank/number of the rank's offer"

    def hosts(self, deadline: Deadline) -> list[str]:
        """Return each other rank's own address, in rank order. Called on rank 0. Waits for ranks that are late."""
        return [self._wait(f"host/{rank}", f"trainer rank {rank}", deadline) for rank in range(1, self.size)]

    def invite(self, lost: Sequence[int], what: str) -> None:
        """Begin the next offer to each `lost` rank. Called on rank 0. These ranks wait for `publish`.

        what: rank 0's call, `CollectiveCall.what()`. Each rank compares it with its own.
        """
        with _store():
            self._calls = [f"{rank}/{self._store.add(f'calls/{rank}', 1)}" for rank in lost]
            for call in self._calls:
                self._store.set(f"what/{call}", what)

    def publish(self, offer: str | WeightSyncError) -> None:
        """Make the offer, or give the error in its place. Called on rank 0."""
        if isinstance(offer, WeightSyncError):
            offer = _NO + json.encode(offer.to_fields()).decode()
        with _store():
            for call in self._calls:
                self._store.set(f"offer/{call}", offer)

    def check(self, offer: str) -> None:
        """Raise the `PeerError` of a rank that could not connect, if any. Called on rank 0."""
        with _store():
            why = self._store.get(f"lost/{offer}").decode() if self._store.check([f"lost/{offer}"]) else ""
        if why:
            raise PeerError(why, phase="connect")

    def fetch(self, host: str, deadline: Deadline, what: str, hears: bool) -> str:
        """Return the next offer to this rank. Called on another rank than 0.

        Offers that rank 0 has given up are passed over, except in the case below.

        Args:
            host: this rank's address.
            deadline: the limit of the wait for an offer.
            what: this rank's call, `CollectiveCall.what()`.
            hears: raise rank 0's error when it has given up the offer of the same call.

        Raises:
            WeightSyncError: rank 0's error, see `hears`: this rank is late.
            SyncTimeoutError: rank 0 made no offer.
        """
        with _store():
            self._store.set(f"host/{self.rank}", host)
        while True:
            with _store():
                self._calls = [f"{self.rank}/{self._store.add(f'taken/{self.rank}', 0) + 1}"]
            self._wait(f"offer/{self._calls[0]}", "trainer rank 0", deadline)
            with _store():
                self._store.add(f"taken/{self.rank}", 1)
                is_same = self._store.get(f"what/{self._calls[0]}").decode() == what
            try:
                return self._offer()
            except WeightSyncError:
                if hears and is_same:
                    raise

    def report_failure(self, why: str) -> None:
        """Tell rank 0 why this rank cannot connect. Raises rank 0's error when it has given up by itself."""
        offer = self._offer()
        with _store():
            self._store.set(f"lost/{offer}", why)

    def _offer(self) -> str:
        with _store():
            offer = str(self._store.get(f"offer/{self._calls[0]}").decode())
        if offer.startswith(_NO):
            raise from_fields(json.decode(offer.removeprefix(_NO), type=ErrorFields))
        return offer

    def _wait(self, key: str, who: str, deadline: Deadline) -> str:
        # Polls: a blocking `get` holds the store's lock, and other threads of this process use the store.
        pause_s = timeouts.RENDEZVOUS_POLL_S
        with _store():
            while not self._store.check([key]):
                if deadline.passed():
                    raise deadline.expired(f"no answer from {who}", "connect", [who], ALL_PUSH)
                time.sleep(pause_s)
                pause_s = min(1.5 * pause_s, timeouts.RENDEZVOUS_LONGEST_POLL_S)
            return str(self._store.get(key).decode())


@contextmanager
def _store() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerError(
            f"another trainer rank has ended: the store of the default process group does not answer ({error})",
            phase="connect",
        ) from error
