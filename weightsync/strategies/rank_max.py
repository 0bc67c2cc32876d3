"""The maximum over trainer ranks, for `quantize=`.

Over NCCL, ranks exchange values in a communicator of their own: a failed push may leave a rank waiting in it. Without
NCCL they exchange values over their connections to rank 0. The training job's process groups stay in step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from weightsync.errors import WeightSyncError
from weightsync.net.ranks import Ranks, uses_nccl
from weightsync.net.runtime import Deadline
from weightsync.net.update import Update
from weightsync.transports.nccl_group import NcclGroup, RendezvousStore


class RankMax:
    """A function `largest(values)`: it replaces each of `values` by the maximum over all ranks. Collective.

    members: as in `Ranks`.
    wait: called as `wait(seconds)` while this rank waits for others. It sleeps, and may raise.
    """

    def __init__(self, members: Any, wait: Callable[[float], None]) -> None:
        self._members, self._wait = members, wait
        self._timeout_s = 0.0
        self._names: list[str] = []
        self._ranks: Ranks | None = None
        self._group: NcclGroup | None = None

    def connect(self, update: Update, on_gpu: bool) -> None:
        """Meet the other ranks, once. Collective.

        on_gpu: whether this rank holds tensors on a GPU. Rank 0's value decides.
        """
        ranks = self._ranks = update.ranks
        self._timeout_s = update.deadline_after_workers().timeout_s
        if ranks.size == 1 or self._group is not None:
            return
        self._names = [f"trainer rank {rank}" for rank in range(ranks.size) if rank != ranks.rank]
        # NCCL refuses ranks on one GPU. Ranks of a job on NCCL share none.
        if ranks.rank == 0 and on_gpu and uses_nccl(self._members):
            rendezvous = RendezvousStore(ranks.host)
            self._group = _group_at([rendezvous.host, rendezvous.port, rendezvous.name], ranks, rendezvous)
        place = ranks.broadcast(self._group and self._group.place, "connect")
        if place is not None:
            self._group = self._group or _group_at(place, ranks)
            self._group.meet(update.deadline())
            self._group.link([], [], update.wait, update.deadline())

    def __call__(self, values: torch.Tensor) -> None:
        ranks = self._ranks
        if ranks is None:
            raise WeightSyncError("the trainer's ranks have disconnected")
        if ranks.size == 1:
            return
        deadline = Deadline(self._timeout_s)
        if self._group is None:
            check = partial(self._wait, 0.0)
            own, kind = values.flatten().tolist(), list[int | float]
            everyone = ranks.gather(own, "transfer", kind, check, deadline)
            # Not of torch's default dtype and device, which are the trainer's own.
            made = partial(torch.tensor, dtype=values.dtype, device="cpu")
            found = ranks.broadcast(made(everyone).amax(0).tolist() if everyone else None, "transfer", kind)
            values.copy_(made(found).view(values.shape))
        else:
            there = values.to(self._group.device)
            self._group.largest(there, self._names).wait(self._wait, deadline, "transfer")
            values.copy_(there)

    def abort(self) -> None:
        """Leave the communicator, and break the waits in it. The next `connect` makes a new one."""
        if self._group is not None:
            self._group.abort()
        self._group = self._ranks = None


def _group_at(place: list[Any], ranks: Ranks, rendezvous: RendezvousStore | None = None) -> NcclGroup:
    device = torch.device("cuda", torch.cuda.current_device())
    return NcclGroup(place, rendezvous, ranks.rank, ranks.size, device)
