"""How the other trainer ranks learn where rank 0 listens: through the store of the default process group.

Rank 0 numbers its offers, and each other rank takes them one by one, as it would collective calls. What rank 0 has
given up fails on the rank that comes late as well. The training job's own collectives stay in step, since none is used.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from weightsync.errors import PeerError, SyncTimeoutError
from weightsync.net import timeouts
from weightsync.net.runtime import Deadline

ALL_PUSH = "every rank must call push, and none may take longer for its part"
_NO = "! "
"""What a text begins with that says why nothing is offered."""


class Rendezvous:
    """The ranks of a process group, or of the default one, at the default store. Raises `PeerError` where the store is
    gone."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        name = "weightsync" if group is None else f"weightsync/{group.group_name}"
        self._store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        self._calls: list[str] = []  # which rank's, and which of its calls

    def hosts(self, deadline: Deadline) -> list[str]:
        """Return the address that each other rank has said, on rank 0. Waits for those that have not come yet."""
        return [self._wait(f"host/{rank}", f"trainer rank {rank}", deadline) for rank in range(1, self.size)]

    def invite(self, lost: Sequence[int], what: str) -> None:
        """Begin the next offer to each of these ranks, on rank 0. They wait for what `say` says.

        what: rank 0's call, as another rank compares it with its own.
        """
        with _store():
            self._calls = [f"{rank}/{self._store.add(f'calls/{rank}', 1)}" for rank in lost]
            for call in self._calls:
                self._store.set(f"what/{call}", what)

    def publish(self, offer: str, refusal: str = "") -> None:
        """Make the offer, or say why there is none, on rank 0."""
        with _store():
            for call in self._calls:
                self._store.set(f"offer/{call}", _NO + refusal if refusal else offer)

    def check(self, offer: str) -> None:
        """Raise what kept a rank from taking the offer, if anything did, on rank 0."""
        with _store():
            why = self._store.get(f"lost/{offer}").decode() if self._store.check([f"lost/{offer}"]) else ""
        if why:
            raise PeerError(why, phase="connect")

    def fetch(self, host: str, deadline: Deadline, what: str, hears: bool) -> str:
        """Return the next offer to this rank, on another rank. `host` is this rank's address, `what` is its call.

        Rank 0 may have given an offer up. Where its call was the same, this rank has come late: `PeerError` with rank
        0's reason is raised, if this rank `hears`. Other offers that were given up are left out. Raises
        `SyncTimeoutError` where there is none.
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
            except PeerError:
                if hears and is_same:
                    raise

    def report_failure(self, why: str) -> None:
        """Tell rank 0 why this rank cannot come. Raises `PeerError` when rank 0 has given up by itself."""
        offer = self._offer()
        with _store():
            self._store.set(f"lost/{offer}", why)

    def _offer(self) -> str:
        with _store():
            offer = str(self._store.get(f"offer/{self._calls[0]}").decode())
        if offer.startswith(_NO):
            raise PeerError(offer.removeprefix(_NO), phase="connect")
        return offer

    def _wait(self, key: str, who: str, deadline: Deadline) -> str:
        # A blocking `get` would keep other threads of this process from their store.
        pause_s = timeouts.RENDEZVOUS_POLL_S
        with _store():
            while not self._store.check([key]):
                if deadline.passed():
                    text = f"no answer from {who} within {deadline.timeout_s:g} s: {ALL_PUSH}"
                    raise SyncTimeoutError(text, phase="connect", waiting_for=[who])
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
