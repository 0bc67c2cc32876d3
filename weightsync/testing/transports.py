"""The conformance check of transports: trainer ranks and engine workers of flesh and blood, only models are missing."""

from __future__ import annotations

import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weightsync.deadline import Deadline
from weightsync.errors import PlacementError, SyncTimeoutError, WeightSyncError
from weightsync.kernels.digest import WHOLE, digest
from weightsync.layout import Box, Manifest, Placement, TensorMeta, coverage
from weightsync.machine import boot_id, describe_device
from weightsync.testing.promises import PROMPT_S, region, require, same_bytes
from weightsync.testing.together import Mail, MailGroup, run_together
from weightsync.transports.base import Idle, Offer, Reads, Region, Shipment, Source, Transport, WorkerInfo, strided
from weightsync.wire import pack_placements, unpack_placements


def check_transport(
    make_transport: Callable[[], Transport],
    make_source: Callable[[torch.device], Source],
    *,
    rank_devices: Sequence[str] = ("cpu", "cpu"),
    worker_devices: Sequence[str] = ("cpu", "cpu"),
    wrong_pairings: Sequence[tuple[Sequence[WorkerInfo], Sequence[WorkerInfo]]] = (),
    in_processes: bool = False,
    timeout_s: float = 30.0,
) -> None:
    """Check a transport between as many trainer ranks (two at least) and engine workers as there are devices.

    The ranks hold tensors of many dtypes in uneven shards, replicas and strided views, some of which are computed as
    they are staged. They are delivered twice with other contents, then twice without those that are frozen, again after
    their storages have moved, again to workers that read different parts, some of them staged ahead; others are staged
    ahead and taken back; and then three deliveries are broken off: a
    deadline passes, the trainer aborts, bad news comes. After each the same transport must serve a new session, of
    workers that read everything or parts.

    `wrong_pairings` are (ranks, workers) that `Transport.check` must refuse. Every end runs in a thread of this
    process, or with `in_processes` in a process of its own, as GPUs need (no process can map its own memory by CUDA
    IPC); both `make_*` must then be functions of a module. No wait lasts longer than `timeout_s`.
    """
    require(len(rank_devices) >= 2, "check_transport needs two trainer ranks at least")
    transport = make_transport()
    transport.abort()  # from any state: also when nothing has happened
    for ranks, workers in wrong_pairings:
        try:
            transport.check(ranks, workers)
        except PlacementError:
            continue
        raise AssertionError(f"check accepts the ranks {list(ranks)} with the workers {list(workers)}")
    ends: list[Callable[[Mail], None]] = [
        *(_RunRank(make_transport, rank, device) for rank, device in enumerate(rank_devices)),
        *(_RunWorker(make_source, number, device) for number, device in enumerate(worker_devices)),
    ]
    run_together(ends, len(rank_devices), in_processes, timeout_s)


# What is delivered

_DTYPES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64"),
    *("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64"),
)


@dataclass(frozen=True)
class _Tensor:
    """One tensor of the trial: the dtype that the trainer has, the one that travels, and which rank holds which box."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    wire: str
    boxes: tuple[tuple[int, Box], ...]

    def values(self, contents: int) -> torch.Tensor:
        """Its values in the trainer's dtype: the same everywhere, others for other `contents`."""
        draw = torch.Generator().manual_seed(zlib.crc32(f"{self.name} {contents}".encode()))
        kind: torch.dtype = getattr(torch, self.dtype)
        if kind.is_floating_point:
            return torch.randn(self.shape, generator=draw).to(kind)
        return torch.randint(0, 2 if kind == torch.bool else 100, self.shape, generator=draw).to(kind)


def _whole(shape: tuple[int, ...], *ranks: int) -> tuple[tuple[int, Box], ...]:
    return tuple((rank, Box.full(shape)) for rank in ranks)


_ROWS = ((0, Box((0, 0), (3, 3))), (1, Box((3, 0), (2, 3))))
_COLUMNS = ((0, Box((0, 0), (4, 4))), (1, Box((0, 4), (4, 3))))
# Of both ranks more than 1 MiB, and no whole number of them: so samples are other than all of it.
_LONG = ((0, Box((0,), (400_000,))), (1, Box((400_000,), (333_333,))))
_TRIAL = {
    tensor.name: tensor
    for tensor in (
        *(_Tensor(f"rows.{dtype}", (5, 3), dtype, dtype, _ROWS) for dtype in _DTYPES),
        _Tensor("columns", (4, 7), "float32", "float32", _COLUMNS),
        _Tensor("one_row", (1, 4), "float32", "float32", _whole((1, 4), 0)),
        _Tensor("scalar", (), "float32", "float32", _whole((), 0, 1)),
        _Tensor("replicated", (6,), "int64", "int64", _whole((6,), 0, 1)),
        _Tensor("cast", (5, 3), "float32", "bfloat16", _ROWS),
        _Tensor("long", (733_333,), "float32", "float32", _LONG),
        _Tensor("rank1.only", (3, 2), "bfloat16", "bfloat16", _whole((3, 2), 1)),
    )
}
_MANIFEST = Manifest(tuple(TensorMeta(tensor.name, tensor.shape, tensor.wire) for tensor in _TRIAL.values()))
_SPREAD = _MANIFEST.names[:-1]
# More buckets than there are slots, of different sizes, the last with nothing of rank 0.
_BUCKETS = (*(_SPREAD[at : at + 4] for at in range(0, len(_SPREAD), 4)), _MANIFEST.names[-1:])
_FROZEN = frozenset(_BUCKETS[-1])


def _reads(worker: int, workers: int, cut: bool) -> Reads:
    """All of everything; or, of what has rows enough, one share of the rows, and of the rest all."""
    reads: dict[str, tuple[Box, ...]] = {}
    for tensor in _TRIAL.values():
        whole = Box.full(tensor.shape)
        if cut and tensor.shape and tensor.shape[0] >= workers:
            first, last = (tensor.shape[0] * number // workers for number in (worker, worker + 1))
            whole = Box((first, *whole.start[1:]), (last - first, *whole.size[1:]))
        reads[tensor.name] = (whole,)
    return reads


_COMPUTED = ("rows.float16", "columns", "cast", "long")
"""What is made anew for each delivery: where it seems to lie there are zeros."""


# The trainer's end


@dataclass(frozen=True)
class _RunRank:
    make_transport: Callable[[], Transport]
    rank: int
    device: str

    def __call__(self, mail: Mail) -> None:
        device = _use(self.device)
        _Rank(self.make_transport(), self.rank, device, mail).run()


class _Rank:
    """A trainer rank. Rank 0 tells the workers what to do, as `weightsync.sync` and `weightsync.session` have it."""

    def __init__(self, transport: Transport, rank: int, device: torch.device, mail: Mail) -> None:
        self.transport = transport
        self.rank = rank
        self.device = device
        self.mail = mail
        self.group = MailGroup(rank, mail)
        self.held: list[tuple[_Tensor, Box, torch.Tensor]] = []
        self.offer = Offer((), (), {})
        self.spans: list[list[int]] = []
        self.version = 0
        self.contents = 0  # of what it holds

    def run(self) -> None:
        infos = self.group.gather(_introduction(f"trainer rank {self.rank}", self.device), "plan")
        if self.rank == 0:
            workers = self.mail.hear_workers()
            self.transport.check([WorkerInfo(*row) for row in infos], [WorkerInfo(*row) for row in workers])
        try:
            self.connect()
            self.push(contents=1)
            self.push(contents=2, part=3)
            self.push(contents=3, only_changed=True)
            self.push(contents=4, only_changed=True)
            self.take_back(contents=9)
            self.connect()  # its storages have moved
            self.push(contents=5, part=None)
            self.take_back(contents=9)
            self.connect(cut=True)
            self.push(contents=1)
            self.push(contents=2, part=3)
            self.push(contents=3, only_changed=True)
            self.take_back(contents=9)
            self.connect(cut=True)
            self.push(contents=5)
            for ending, cut in (("deadline", False), ("abort", True), ("news", False)):
                self.break_off(ending)
                self.connect(cut)
                self.push(contents=6)
                self.push(contents=7)
            self.tell({"do": "end"})
        finally:
            self.transport.abort()
            self.transport.abort()  # twice is as good as once

    def tell(self, order: dict[str, Any]) -> None:
        if self.rank == 0:
            self.mail.tell_workers(order)

    def hear(self) -> None:
        if self.rank == 0:
            self.mail.hear_workers()

    def connect(self, cut: bool = False) -> None:
        self.held = _hold(self.rank, self.device)
        numbers: dict[int, int] = {}
        pieces: dict[Placement, Region] = {}
        for tensor, box, view in self.held:
            computed = tensor.name in _COMPUTED
            region = Region(torch.zeros_like(view), view.clone) if computed else Region(view)
            lies = region.tensor
            number = numbers.setdefault(lies.untyped_storage().data_ptr(), len(numbers) + 1)
            offset, stride = int(lies.storage_offset()), tuple(lies.stride())
            pieces[Placement(tensor.name, box, self.rank, number, offset, stride, tensor.dtype)] = region
        everyone = self.group.share(self.group.gather(pack_placements(pieces), "plan"), "plan")
        placements = tuple(unpack_placements(row for rows in everyone for row in rows))
        workers = range(self.mail.workers)
        reads = tuple(_reads(worker, len(workers), cut) for worker in workers)
        shipment = Shipment(_MANIFEST, _BUCKETS, placements, reads, self.mail.host, _FROZEN)
        self.offer = self.transport.prepare(shipment, pieces, self.group)
        self.version = max(self.version, self.offer.newest)
        offered = [name for names in self.offer.buckets for name in names]
        require(sorted(offered) == sorted(_TRIAL), "the buckets of the offer are not every tensor once")
        rows = self.group.gather([self.transport.storages(worker) for worker in workers], "connect")
        self.spans = self.transport.spans()
        spans = self.group.gather(self.spans, "connect")
        if self.rank == 0:
            require(len(self.offer.placements) == len(workers), "the offer has not placements for each of the workers")
            for worker in workers:
                invitation = self.transport.invite(worker)
                order = {
                    "do": "connect",
                    "storages": [row for rank_rows in rows for row in rank_rows[worker]],
                    "placements": pack_placements(self.offer.placements[worker]),
                    "spans": [span for rank_spans in spans for span in rank_spans],
                    "cut": [worker, len(workers), cut],
                    "buckets": [list(names) for names in self.offer.buckets],
                    "fields": {**self.offer.fields, **invitation},
                }
                self.mail.send(self.mail.ranks + worker, order)
        self.transport.join(Deadline(self.mail.timeout_s))
        self.hear()
        self.group.share(None, "connect")
        self.transport.joined()

    def push(self, contents: int, part: int | None = WHOLE, only_changed: bool = False) -> None:
        self.hold(contents)
        self.version += 1
        sent = self.version % 2 > 0 and self.send_ahead(part)
        buckets = self.offer.buckets
        if only_changed:
            while _FROZEN.issuperset(buckets[-1]):
                buckets = buckets[:-1]
        for bucket in range(len(buckets)):
            if bucket >= 2:
                self.hear()
            self.send(bucket, contents, bucket + 1 if bucket + 1 < len(buckets) else None, part, sent and bucket == 0)
        for _ in buckets[-2:]:
            self.hear()
        if self.rank == 0:
            self.transport.finish(self.version, self.mail.idle, Deadline(self.mail.timeout_s))
        self.group.share(None, "commit")  # until now workers may have been reading this rank's memory

    def hold(self, contents: int) -> None:
        for tensor, box, view in self.held:
            view.copy_(tensor.values(contents)[region(box)])
        self.contents = contents

    def send_ahead(self, part: int | None = WHOLE) -> bool:
        """The first bucket, up to where it is to be known whether the workers shall load it. Whether it was sent."""
        can = self.transport.stage_ahead(0, part, self.mail.idle, Deadline(self.mail.timeout_s))
        answers = self.group.share(self.group.gather(can, "plan"), "plan")
        require(len({*answers}) == 1, f"stage_ahead gives {answers} on the ranks")
        if can:
            self.tell({"do": "expect", "bucket": 0})
            if self.rank == 0:
                self.transport.post(0)
            self.hear()
        return can

    def take_back(self, contents: int) -> None:
        """A push that is not to be."""
        self.hold(contents)
        if self.send_ahead():
            self.tell({"do": "withdraw"})
            self.transport.withdraw(self.mail.idle, Deadline(self.mail.timeout_s))
            self.hear()

    def send(
        self, bucket: int, contents: int, following: int | None, part: int | None = WHOLE, sent: bool = False
    ) -> None:
        """One bucket, up to where the workers load it; it may have been sent already."""
        self.group.share(None, "gather")
        digests = self.transport.stage(bucket, part, self.mail.idle, Deadline(self.mail.timeout_s))
        expected = 0 if part is None else [row[0] for row in self.spans].count(bucket)
        require(
            len(digests) == expected,
            f"stage gives {len(digests)} digests of bucket {bucket} where part is {part}, expected {expected}",
        )
        together = [value for values in self.group.gather(digests, "gather") for value in values]
        order = {"do": "load", "bucket": bucket, "following": following, "contents": contents}
        self.tell({**order, "part": part, "digests": together})
        if self.rank == 0 and not sent:
            self.transport.post(bucket)

    def break_off(self, ending: str) -> None:
        """The first bucket of a push, and then a second that workers wait for and nobody posts."""
        self.send(0, self.contents, following=1)
        self.hear()
        self.group.share(None, "load")
        self.tell({"do": "wait", "bucket": 1, "ending": ending})
        if ending == "abort":
            self.hear()  # they are about to wait
            time.sleep(0.3)
        elif ending == "news" and self.rank != 0:
            # A rank that has something to send, and a rank 0 that has other things to do.
            bucket = next(n for n, names in enumerate(self.offer.buckets) if "long" in names)
            _must_end("stage", ending, self.mail, lambda idle, until: self.transport.stage(bucket, WHOLE, idle, until))
        if ending != "abort":
            self.hear()
            self.group.share(None, "fail")
        self.transport.abort()
        if ending == "abort":
            self.hear()
        self.group.gather(None, "fail")
        self.group.share(None, "fail")


def _hold(rank: int, device: torch.device) -> list[tuple[_Tensor, Box, torch.Tensor]]:
    """A rank's regions, without values. Of each dtype the first lies within a larger storage, others are transposed."""
    seen: set[str] = set()
    held = []
    for tensor, box in [(t, box) for t in _TRIAL.values() for holder, box in t.boxes if holder == rank]:
        kind: torch.dtype = getattr(torch, tensor.dtype)
        if tensor.dtype in seen:
            view = torch.zeros(box.size[::-1], dtype=kind, device=device).permute(list(range(len(box.size)))[::-1])
        else:
            view = torch.zeros(box.numel + 5, dtype=kind, device=device)[3 : 3 + box.numel].view(box.size)
        seen.add(tensor.dtype)
        held.append((tensor, box, view))
    return held


# The worker's end


@dataclass(frozen=True)
class _RunWorker:
    make_source: Callable[[torch.device], Source]
    number: int
    device: str

    def __call__(self, mail: Mail) -> None:
        device = _use(self.device)
        mail.send(0, _introduction(f"worker {self.number}", device))
        worker = _Worker(lambda: self.make_source(device), mail)
        try:
            while (order := mail.receive(0, patient=True))["do"] != "end":
                getattr(worker, order["do"])(order)
                mail.send(0, "done")
        finally:
            worker.leave()


class _Worker:
    """An engine worker: does what rank 0 says, and compares what it reads with what the trainer has."""

    def __init__(self, make_source: Callable[[], Source], mail: Mail) -> None:
        self.make_source = make_source
        self.mail = mail
        self.source: Source | None = None
        self.placements: dict[str, list[Placement]] = {}
        self.reads: Reads = {}
        self.buckets: list[list[str]] = []
        self.spans: list[list[int]] = []

    def connect(self, order: dict[str, Any]) -> None:
        if self.source is None:
            self.source = self.make_source()
        self.source.connect(order["storages"], order["fields"], self.mail.idle, Deadline(self.mail.timeout_s))
        self.placements, self.buckets, self.spans = defaultdict(list), order["buckets"], order["spans"]
        self.reads = _reads(*order["cut"])
        for placement in unpack_placements(order["placements"]):
            self.placements[placement.name].append(placement)

    def load(self, order: dict[str, Any]) -> None:
        assert self.source is not None
        self.source.fetch(order["bucket"], order["following"], self.mail.idle, Deadline(self.mail.timeout_s))
        read = {(placement.rank, placement.storage) for those in self.placements.values() for placement in those}
        spans = [span for bucket, *span in self.spans if bucket == order["bucket"]]
        for (rank, storage, first, nbytes), sent in zip(spans, order["digests"], strict=order["part"] is not None):
            if (rank, storage) not in read:
                continue  # another worker's
            found = digest(self.source.storage(rank, storage)[first : first + nbytes], order["part"])
            where = f"bytes {first} to {first + nbytes} of storage {storage} of rank {rank}"
            require(found == sent, f"{where} arrived with another digest than they were sent with")
        for name in self.buckets[order["bucket"]]:
            self.compare(self.source, name, order["contents"])

    def expect(self, order: dict[str, Any]) -> None:
        assert self.source is not None
        self.source.expect(order["bucket"])

    def withdraw(self, order: dict[str, Any]) -> None:
        assert self.source is not None
        self.source.withdraw(self.mail.idle, Deadline(self.mail.timeout_s))

    def compare(self, source: Source, name: str, contents: int) -> None:
        tensor = _TRIAL[name]
        wire: torch.dtype = getattr(torch, tensor.wire)
        expected = tensor.values(contents).to(wire)
        boxes = {placement.box for placement in self.placements[name]}
        doubled = coverage(tensor.shape, boxes)[1]
        for wanted in self.reads[name]:
            parts = {Box(tuple(a - b for a, b in zip(box.start, wanted.start, strict=True)), box.size) for box in boxes}
            require(not coverage(wanted.size, parts)[0], f"no placement is offered for all of {name}{wanted}")
        require(not doubled, f"{name}{doubled[:1]} is offered in boxes that overlap without being the same")
        for p in self.placements[name]:
            found = strided(source.storage(p.rank, p.storage), p.dtype, p.offset, p.box.size, p.stride).to(wire)
            require(
                same_bytes(found.cpu(), expected[region(p.box)]),
                f"reads other values of {name}{p.box} than trainer rank {p.rank} has, as {p.dtype} at element "
                f"{p.offset} of storage {p.storage}",
            )

    def wait(self, order: dict[str, Any]) -> None:
        assert self.source is not None
        fetch = self.source.fetch
        if order["ending"] == "abort":
            self.mail.send(0, "about to wait")
        _must_end("fetch", order["ending"], self.mail, lambda idle, until: fetch(order["bucket"], None, idle, until))
        self.leave()

    def leave(self) -> None:
        if self.source is not None:
            self.source.close()
            self.source = None


# Waits that nobody answers

_SHORT_S = 1.0
"""The deadline that is made to pass."""
_ENDINGS: dict[str, tuple[str, type[WeightSyncError]]] = {
    "deadline": ("its deadline had passed", SyncTimeoutError),
    "abort": ("the trainer had aborted", WeightSyncError),
    "news": ("idle had raised", PlacementError),
}


def _must_end(what: str, ending: str, mail: Mail, wait_for: Callable[[Idle, Deadline], Any]) -> None:
    """A wait must end soon when there is a reason to. Where there is nothing to wait for it may simply return."""
    started = time.monotonic()
    reason, expected = _ENDINGS[ending]

    def idle(seconds: float) -> None:
        mail.idle(seconds)
        if ending == "news" and time.monotonic() - started > 0.2:
            raise PlacementError("bad news")

    try:
        wait_for(idle, Deadline(_SHORT_S if ending == "deadline" else PROMPT_S + _SHORT_S))
    except WeightSyncError as error:
        require(isinstance(error, expected), f"{what} raised {error!r} when {reason}, expected {expected.__name__}")
    except Exception as error:
        raise AssertionError(f"{what} raised {error!r}, which is no WeightSyncError, when {reason}") from error
    took_s = time.monotonic() - started
    require(took_s < PROMPT_S, f"{what} went on for {took_s:.1f} s although {reason}")


def _use(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _introduction(peer: str, device: torch.device) -> list[str]:
    kind, gpu_uuid = describe_device(device)
    return [peer, kind, gpu_uuid, boot_id()]
