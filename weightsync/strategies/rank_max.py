"""The maximum over trainer ranks, for `quantize=`.

Ranks exchange values over a communicator of their own. A failed push may leave a rank waiting in it. The training job's
process groups stay in step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weightsync.errors import WeightSyncError
from weightsync.net.ranks import uses_nccl
from weightsync.net.runtime import Deadline
from weightsync.net.update import Update
from weightsync.transports.communicator import Communicator, RendezvousStore


class RankMax:
    """A function `largest(values)`: it replaces each of `values` by the maximum over all ranks. Collective.

    members: as in `Ranks`.
    wait: called as `wait(seconds)` while this rank waits for others. It sleeps, and may raise.
    """

    def __init__(self, members: Any, wait: Callable[[float], None]) -> None:
        self._members, self._wait = members, wait
        self._size, self._timeout_s = 0, 0.0
        self._names: list[str] = []
        self._communicator: Communicator | None = None

    def connect(self, update: Update, on_gpu: bool) -> None:
        """Meet the other ranks, once. Collective.

        on_gpu: whether this rank holds tensors on a GPU. Rank 0's value decides.
        """
        ranks = update.ranks
        self._size, self._timeout_s = ranks.size, update.deadline_after_workers().timeout_s
        if ranks.size == 1 or self._communicator is not None:
            return
        self._names = [f"trainer rank {rank}" for rank in range(ranks.size) if rank != ranks.rank]
        rendezvous = RendezvousStore(ranks.host) if ranks.rank == 0 else None
        # gloo works for all ranks. NCCL refuses ranks that share a GPU. Ranks of a job on NCCL share none.
        kind = "cuda" if on_gpu and uses_nccl(self._members) else "cpu"
        place = rendezvous and [rendezvous.host, rendezvous.port, kind]
        host, port, kind = ranks.broadcast(place, "connect", tuple[str, int, str])
        device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        self._communicator = Communicator([host, port, kind], rendezvous, ranks.rank, ranks.size, device, [], [])
        self._communicator.meet(update.wait, update.deadline())

    def __call__(self, values: torch.Tensor) -> None:
        if self._size == 1:
            return
        if (communicator := self._communicator) is None:
            raise WeightSyncError("the communicator of the trainer's ranks was closed")
        there = values.to(communicator.device)
        communicator.largest(there, self._names).wait(self._wait, Deadline(self._timeout_s), "transfer")
        values.copy_(there)

    def abort(self) -> None:
        """Leave the communicator, and break the waits in it. The next `connect` makes a new one."""
        if self._communicator is not None:
            self._communicator.abort()
        self._communicator = None
