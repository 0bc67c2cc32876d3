"""The conformance check of transports: real trainer ranks and engine workers, without models."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch

from weightsync.errors import PlacementError
from weightsync.kernels.digest import MASK, WHOLE, digest
from weightsync.net.ranks import Ranks
from weightsync.net.runtime import Deadline, boot_id, describe_device
from weightsync.net.update import Update
from weightsync.net.wire import MachineInfo, typed
from weightsync.planning.layout import Box, ShardLocation, TensorMeta, coverage, itemsize
from weightsync.planning.transfer_plan import TransferPlan, make_chunks
from weightsync.planning.wire_types import ByteRange, ChunkLayout, Storage
from weightsync.sources.base import TensorShard
from weightsync.sources.edits import region
from weightsync.strategies.base import locate
from weightsync.tools.testing.assertions import PROMPT_S, must_end, require, same_bytes
from weightsync.tools.testing.runner import Mail, run_together
from weightsync.tools.testing.trial import (
    COMPUTED,
    FROZEN,
    MANIFEST,
    MAX_BYTES,
    SHARED,
    TRIAL,
    TrialTensor,
    reads_of,
    values_of,
)
from weightsync.transports import Seal, Transport, TransportReceiver
from weightsync.transports.base import DIGEST_BYTES, LocalTensors, RouteRequest, strided
from weightsync.transports.proof import MemoryFingerprint


def check_transport(
    make_transport: Callable[[], Transport],
    open_receiver: Callable[[torch.device], TransportReceiver],
    *,
    rank_devices: Sequence[str] = ("cpu", "cpu"),
    worker_devices: Sequence[str] = ("cpu", "cpu"),
    wrong_pairings: Sequence[tuple[Sequence[MachineInfo], Sequence[MachineInfo]]] = (),
    in_processes: bool = False,
    timeout_s: float = 30.0,
) -> None:
    """Check a transport by pushes between stand-ins for trainer ranks and for engine workers.

    The ranks hold tensors of many dtypes in uneven shards, replicas and strided views. Some tensors lie in shared
    memory, some are computed when they are sent (`TensorShard.compute`), some are frozen. One tensor is larger than a
    chunk. Each push has new values. Some plans have workers that read all tensors, others have workers with parts.

    Some pushes end early: a deadline passes, `abort` is called, or a wait raises. After each such push the same
    transport must serve a new plan.

    Args:
        make_transport: A function that returns the trainer's end. Every rank calls the function.
        open_receiver: A function that returns a worker's end for a device. Every worker calls the function.
        rank_devices: The device of each trainer rank. Two ranks at least.
        worker_devices: The device of each worker.
        wrong_pairings: Pairs (ranks, workers) of machines that `Transport.invite` or `route` must refuse.
        in_processes: Whether every end runs in a process of its own, not in a thread. CUDA IPC needs this: no process
            can map its own memory. Both functions must then be module-level functions.
        timeout_s: The most seconds of each wait.

    Raises:
        AssertionError: The transport breaks a promise of transports/base.py.
    """
    require(len(rank_devices) >= 2, "check_transport needs two trainer ranks at least")
    transport = make_transport()
    transport.abort()  # from any state, also before any other call
    for ranks, workers in wrong_pairings:
        reads = [reads_of(worker, len(workers), False) for worker in range(len(workers))]
        try:
            transport.invite(ranks, workers, "127.0.0.1")
            transport.route(RouteRequest(ranks, workers, MANIFEST, [], reads))
        except PlacementError:
            continue
        transport.abort()
        raise AssertionError(f"route accepts the ranks {list(ranks)} with the workers {list(workers)}")
    ends: list[Callable[[Mail], None]] = [
        *(partial(_run_rank, make_transport, device) for device in rank_devices),
        *(partial(_run_worker, open_receiver, device) for device in worker_devices),
    ]
    run_together(ends, len(rank_devices), in_processes, timeout_s)


# The trainer's end


def _run_rank(make_transport: Callable[[], Transport], device: str, mail: Mail) -> None:
    rank = _Rank(make_transport(), _use(device), mail)
    try:
        for cut in (False, True):
            rank.connect(cut)
            rank.push(1, WHOLE)
            rank.push(2, 3)
            rank.push(3, None)
            rank.drop_last_worker()
        for end, reason in _BREAKS:
            rank.break_off(end, reason)
            rank.connect(cut=end == "worker")
            rank.push(4, WHOLE)
            rank.push(5, WHOLE)
        rank.order({"do": "end"})
    finally:
        rank.transport.abort()
        rank.transport.abort()  # twice is as good as once


class _Rank:
    """A trainer rank. Rank 0 sends orders to the workers."""

    def __init__(self, transport: Transport, device: torch.device, mail: Mail) -> None:
        self.transport, self.device, self.mail = transport, device, mail
        self.update = Update(cast(Ranks, mail), mail.timeout_s)
        self.version = 0
        self.breaking = False
        self.gathered: set[str] = set()
        self.had: set[str] = set()  # names gathered in this push
        own = _introduce(f"trainer rank {mail.rank}", device)
        self.ranks = [MachineInfo(*row) for row in mail.gather(own, "plan")]
        self.workers = [MachineInfo(*mail.receive(end)) for end in mail.workers] if mail.rank == 0 else []

    def order(self, *orders: dict[str, Any]) -> None:
        """Send each worker its own order, or all the same one. Rank 0 sends, other ranks do nothing."""
        if self.mail.rank == 0:
            for at, end in enumerate(self.mail.workers):
                self.mail.send(end, orders[at % len(orders)])

    def hear(self) -> None:
        """Wait until every rank is here, and every worker has carried out its order."""
        self.mail.gather(None, "done")
        if self.mail.rank == 0:
            for end in self.mail.workers:
                self.mail.receive(end)
        self.mail.broadcast(None, "done")

    def connect(self, cut: bool) -> None:
        transport, mail = self.transport, self.mail
        self.held = _hold(mail.rank, self.device)
        shards = []
        for tensor, box, view in self.held:
            meta = TensorMeta(tensor.name, tensor.shape, tensor.dtype)
            computed = tensor.name in COMPUTED
            lies = torch.zeros_like(view) if computed else view
            shards.append(
                TensorShard(meta, box, lies, True, partial(self.compute, tensor.name, view) if computed else None)
            )
        tensors = LocalTensors(locate(shards, mail.rank), self.gather)
        unmapped = sorted({location.name for location, each in tensors.at.items() if not transport.can_map(each)})
        everyone = mail.gather(([*tensors.at], unmapped), "plan", tuple[list[ShardLocation], list[str]])
        first = transport.invite(self.ranks, self.workers, mail.host) if mail.rank == 0 else []
        if invited := mail.broadcast(first[: len(self.ranks)], "plan"):
            transport.meet(invited[mail.rank], self.device, self.update.deadline())
        made = self.compile(everyone, cut) if mail.rank == 0 else None
        self.plan = mail.broadcast(made, "plan", TransferPlan)
        self.pushes = 0
        endpoints = transport.prepare(self.plan, tensors, self.update)
        self.version = max(self.version, transport.newest_version)
        rows = mail.gather([[each.storages for each in endpoints], transport.in_place()], "connect")
        self.order(
            *(
                {
                    "do": "connect",
                    "invitation": first[len(self.ranks) + at] if first else {},
                    "storages": [row for storages, _ in rows for row in storages[at]],
                    "in_place": [row for _, those in rows for row in those],
                    "arrivals": endpoint.arrivals,
                    "staged": [not chunk.in_place for chunk in self.plan.chunks],
                    "cut": [at, len(endpoints), cut],
                    "fields": endpoint.fields,
                }
                for at, endpoint in enumerate(endpoints if mail.rank == 0 else [])
            )
        )
        transport.connect(self.update.deadline())
        self.hear()

    def compile(self, everyone: Sequence[Any], cut: bool) -> TransferPlan:
        locations = [location for own, _ in everyone for location in own]
        reads = tuple(reads_of(worker, len(self.workers), cut) for worker in range(len(self.workers)))
        chains = self.transport.route(RouteRequest(self.ranks, self.workers, MANIFEST, locations, reads))
        in_place = frozenset(TRIAL).difference(*(names for _, names in everyone))
        changing = [name for name in TRIAL if name not in FROZEN]
        buckets = [*(changing[at : at + 4] for at in range(0, len(changing), 4)), *([name] for name in FROZEN)]
        in_place = frozenset() if chains else in_place
        chunks = make_chunks(MANIFEST, chains, buckets, FROZEN, in_place, locations, MAX_BYTES, {})
        return TransferPlan(MANIFEST, chains, chunks, len(reads), {})

    def gather(self, names: Sequence[str]) -> None:
        """Stand in for a source's `gather`. All ranks must ask for the same names, once in a push."""
        if not self.breaking:  # in a broken-off push some ranks never come here
            require(self.mail.broadcast(list(names), "gather") == list(names), "ranks gather different names")
        require(not self.had.intersection(names), f"{self.had.intersection(names)} are gathered twice in a push")
        self.had.update(names)
        self.gathered = set(names)

    def compute(self, name: str, view: torch.Tensor) -> torch.Tensor:
        require(name in self.gathered, f"{name} is computed without being gathered last, or twice in a push")
        self.gathered.remove(name)
        return view.clone()

    def drop_last_worker(self) -> None:
        """Drop the last worker, and push to the others, if the transport can."""
        last = self.plan.workers - 1
        drops = self.mail.broadcast(bool(last) and self.mail.rank == 0 and self.transport.drop_workers([last]), "drop")
        if drops and self.mail.rank:
            require(self.transport.drop_workers([last]), "drop_workers answers otherwise than on rank 0")
        for contents in (4, 5) if drops else ():  # the second waits for what the first has left in slots
            self.push(contents, WHOLE, left=1)

    def push(self, contents: int, sample: int | None, left: int = 0) -> None:
        """Push these contents to all workers but the last `left`."""
        for tensor, box, view in self.held:
            view.copy_(values_of(tensor.name, contents)[region(box)])
        self.had.clear()
        self.version += 1
        digests = self.look(self.pushes if sample is not None else None)
        due = [*self.plan.due(first=self.pushes == 0)]
        told = {"do": "push", "due": due, "sample": sample, "version": self.version, "contents": contents}
        told |= {"place_sample": self.pushes, "digests": digests}
        seal = None if sample is None else Seal(sample, self.version)
        self.transport.begin_send(seal)
        self.order(*[told] * (self.plan.workers - left), *[{"do": "leave"}] * left)
        self.transport.send(due, seal, self.update)
        self.hear()
        if self.mail.rank == 0:
            self.transport.on_commit(self.version)
        self.mail.broadcast(None, "commit")
        if self.mail.rank == 0:
            self.transport.after_commit()
        self.pushes += 1

    def look(self, sample: int | None) -> list[int]:
        """Have every rank look before any rank sends."""
        digests = self.mail.gather(self.transport.prepare_push(sample), "look")
        self.mail.broadcast(None, "look")
        return digests

    def break_off(self, end: str, reason: str) -> None:
        """Make one end of a push wait for another that does nothing."""
        due = [*self.plan.due(first=False)]
        self.breaking = True
        self.look(WHOLE)
        if end == "worker":
            self.order({"do": "wait", "due": due, "reason": reason})
            self.hear()
        else:
            update = Update(self.update.ranks, _SHORT_S if reason == "deadline" else 2 * PROMPT_S)
            abort = threading.Timer(0.3, self.transport.abort)
            with must_end("send", reason) as check:
                update.check = check
                self.had.clear()
                if reason == "abort":
                    abort.start()
                self.transport.send(due, Seal(WHOLE, self.version + 1), update)
            if reason == "abort":
                abort.join()
            self.mail.gather(None, "done")
        self.order({"do": "leave"})  # not before: a worker's EOF would end the waits of others
        self.hear()
        self.transport.abort()
        self.breaking = False


def _hold(rank: int, device: torch.device) -> list[tuple[TrialTensor, Box, torch.Tensor]]:
    """Allocate a rank's shards. Of each dtype the first is a view into a larger storage, others are transposed."""
    seen: set[str] = set()
    held = []
    for tensor, box in [(t, box) for t in TRIAL.values() for holder, box in t.boxes if holder == rank]:
        kind: torch.dtype = getattr(torch, tensor.dtype)
        storage = torch.zeros(box.numel + 5, dtype=kind, device=device)
        if tensor.name in SHARED and not storage.is_cuda:
            storage.share_memory_()
        within = storage[3 : 3 + box.numel]
        transposed = within.view(box.size[::-1]).permute(list(range(len(box.size)))[::-1])
        held.append((tensor, box, transposed if tensor.dtype in seen else within.view(box.size)))
        seen.add(tensor.dtype)
    return held


# The worker's end


def _run_worker(open_receiver: Callable[[torch.device], TransportReceiver], device: str, mail: Mail) -> None:
    where = _use(device)
    mail.send(0, _introduce("a worker", where))
    worker = _Worker(partial(open_receiver, where), mail)
    try:
        while (order := mail.receive(0))["do"] != "end":
            getattr(worker, order["do"])(order)
            mail.send(0, "done")
    finally:
        worker.leave({})


class _Worker:
    """An engine worker. It carries out rank 0's orders, and compares the bytes that it reads with the trainer's."""

    def __init__(self, open_receiver: Callable[[], TransportReceiver], mail: Mail) -> None:
        self.open_receiver, self.mail = open_receiver, mail
        self.source: TransportReceiver | None = None

    def connect(self, order: dict[str, Any]) -> None:
        self.source = source = self.source or self.open_receiver()
        if order["invitation"]:
            source.meet(order["invitation"], Deadline(self.mail.timeout_s))
        storages = typed(order["storages"], list[Storage])
        source.connect(storages, order["fields"], self.mail.wait, Deadline(self.mail.timeout_s))
        self.chunks = [(arrival.locations, arrival.runs) for arrival in typed(order["arrivals"], list[ChunkLayout])]
        in_place = typed(order["in_place"], list[ByteRange])
        self.mapped_ranks = sorted({run.rank for run in in_place})
        self.proof = MemoryFingerprint(
            [[self.bytes_of(r) for r in in_place if r.rank == rank] for rank in self.mapped_ranks]
        )
        for (locations, runs), staged in zip(self.chunks, order["staged"], strict=True):
            for p in locations if staged else ():
                first = p.offset * itemsize(p.dtype)
                own = [r for r in runs if (r.rank, r.storage) == (p.rank, p.storage)]
                inside = any(r.first <= first < r.first + r.nbytes for r in own)
                require(inside, f"{p.name}{p.box} arrives outside of the runs that have digests")
        for name, (wanted,) in reads_of(*order["cut"]).items():
            boxes = {p.box for locations, _ in self.chunks for p in locations if p.name == name}
            missing, doubled = coverage(TRIAL[name].shape, boxes)
            lacks = [box for box in missing if wanted.intersect(box) is not None]
            require(not lacks, f"no chunk brings {name}{lacks[:1]}")
            require(not doubled, f"{name}{doubled[:1]} comes in boxes that overlap and differ")

    def bytes_of(self, run: ByteRange, behind: int = 0) -> torch.Tensor:
        assert self.source is not None
        return self.source.storage(run.rank, run.storage)[run.first :][: run.nbytes + behind]

    def push(self, order: dict[str, Any]) -> None:
        assert self.source is not None
        sample, came = order["sample"], []
        for number in self.source.chunks(order["due"], self.mail.wait, lambda: Deadline(self.mail.timeout_s)):
            came.append(number)
            locations, runs = self.chunks[number]
            for run in runs if sample is not None else ():
                sent = int.from_bytes(bytes(self.bytes_of(run, DIGEST_BYTES)[run.nbytes :].tolist()), "little")
                found = digest(self.bytes_of(run).clone(), sample) + Seal(sample, order["version"]).seed(number)
                require(found & MASK == sent, f"{run} of chunk {number} arrived with another digest")
            for p in locations:
                wire: torch.dtype = getattr(torch, TRIAL[p.name].wire)
                data = self.source.storage(p.rank, p.storage)
                found_values = strided(data, p.dtype, p.offset, p.box.size, p.stride).to(wire)
                expected = values_of(p.name, order["contents"]).to(wire)[region(p.box)]
                require(
                    same_bytes(found_values.cpu(), expected),
                    f"chunk {number} brings other values of {p.name}{p.box} than trainer rank {p.rank} has, as "
                    f"{p.dtype} at element {p.offset} of storage {p.storage}",
                )
        require(came == order["due"], f"chunks {came} came, expected {order['due']}")
        if sample is not None:
            for rank, found in zip(self.mapped_ranks, self.proof.of(order["place_sample"]), strict=True):
                expected = order["digests"][rank]
                require(found == expected, f"the mapped memory of rank {rank} has another digest than the trainer's")

    def wait(self, order: dict[str, Any]) -> None:
        assert self.source is not None
        timeout_s = _SHORT_S if order["reason"] == "deadline" else 2 * PROMPT_S
        with must_end("chunks", order["reason"]) as check:

            def wait(seconds: float) -> None:
                self.mail.wait(seconds)
                check()

            for _ in self.source.chunks(order["due"], wait, lambda: Deadline(timeout_s)):
                continue

    def leave(self, order: dict[str, Any]) -> None:
        if self.source is not None:
            self.source.close()
            self.source.close()  # twice is as good as once
            self.source = None


# Waits without an answer

_SHORT_S = 1.0
_BREAKS = (
    *(("rank", reason) for reason in ("deadline", "abort", "news")),
    *(("worker", reason) for reason in ("deadline", "news")),
)


def _use(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _introduce(peer: str, device: torch.device) -> list[str]:
    return [peer, *describe_device(device), boot_id()]
