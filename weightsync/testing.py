"""One conformance suite for every sender, transport and engine client, ours and those of plug-ins.

Each check drives one implementation through what the rest of weightsync does with it, and raises `AssertionError` that
says in plain words which promise was broken. The promises are in the docstrings of `weightsync.senders.base`,
`weightsync.transports.base` and `weightsync.engines`. docs/conformance.md shows how to call the checks; they need
neither pytest nor vLLM.
"""

from __future__ import annotations

import itertools
import multiprocessing
import secrets
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from weightsync.channel import Call, Channel, Deadline, Hub
from weightsync.engines import Engine
from weightsync.errors import (
    EngineUnreachableError,
    ManifestError,
    PlacementError,
    SyncTimeoutError,
    WeightSyncError,
)
from weightsync.kernels.digest import digest
from weightsync.layout import Box, Manifest, Placement, TensorMeta, coverage
from weightsync.machine import boot_id, describe_device
from weightsync.ranks import RankGroup
from weightsync.senders.base import Sender, TensorPolicy
from weightsync.transports.base import Idle, Offer, Shipment, Source, Transport, WorkerInfo, strided
from weightsync.wire import (
    PREFIX_BYTES,
    Committed,
    Release,
    Value,
    decode,
    encode,
    pack_manifest,
    pack_placements,
    unpack_manifest,
    unpack_placements,
)


def _require(condition: bool, words: str) -> None:
    if not condition:
        raise AssertionError(words)


# ---------------------------------------------------------------------------------------------------------------
# Senders


def check_sender(
    make_sender: Callable[[TensorPolicy], Sender],
    model: torch.nn.Module,
    expected: Mapping[str, torch.Tensor],
    *,
    timeout_s: float = 60.0,
) -> None:
    """Check a trainer backend. Collective where a default process group exists: every trainer rank calls this.

    `model` is the trainer's model on this rank; `expected` has every tensor that a push delivers, under its checkpoint
    name, whole, with the values and in the dtype that the trainer holds. Raises the same `AssertionError` on all ranks.
    """
    alone = not torch.distributed.is_available() or not torch.distributed.is_initialized()
    hub = Hub() if alone or torch.distributed.get_rank() == 0 else None
    ranks = RankGroup(hub, timeout_s)
    try:
        view: list[Any] = []
        try:
            _check_own_pieces(make_sender, model, expected, view)
            problem = None
        except AssertionError as error:
            problem = f"rank {ranks.rank}: {error}"
        except Exception:
            problem = f"rank {ranks.rank}: {traceback.format_exc()}"
        views = ranks.gather([problem, view], "check")
        problem = ranks.share(_first_problem(views) if ranks.rank == 0 else None, "check")
        _require(problem is None, str(problem))
    finally:
        ranks.close()
        if hub is not None:
            hub.close()


def _check_own_pieces(
    make_sender: Callable[[TensorPolicy], Sender],
    model: torch.nn.Module,
    expected: Mapping[str, torch.Tensor],
    view: list[Any],
) -> None:
    """What one rank can see on its own; leaves its manifest's digest and its boxes in `view`."""
    sender = make_sender(TensorPolicy())
    manifest = sender.manifest(model)
    pieces = sender.pieces(model)
    view += [manifest.digest(), pack_manifest(manifest)]
    view.append([[piece.meta.name, list(piece.box.start), list(piece.box.size)] for piece in pieces])

    absent, extra = sorted(set(expected) - set(manifest.names)), sorted(set(manifest.names) - set(expected))
    _require(not absent, f"the manifest lacks {absent}")
    _require(not extra, f"the manifest has {extra}, which are not expected")
    for meta in manifest:
        want = expected[meta.name]
        _require(meta.shape == tuple(want.shape), f"{meta.name}: shape {meta.shape}, expected {tuple(want.shape)}")
        _require(meta.dtype == _name(want.dtype), f"{meta.name}: dtype {meta.dtype}, expected {_name(want.dtype)}")
    place = {name: at for at, name in enumerate(manifest.names)}
    order = [place[piece.meta.name] for piece in pieces]
    _require(order == sorted(order), "pieces are not in the manifest's order")
    for piece in pieces:
        what = f"the piece {piece.box} of {piece.meta.name}"
        _require(piece.meta == manifest[piece.meta.name], f"{what}: its meta is not the manifest's")
        _require(Box.full(piece.meta.shape).intersect(piece.box) == piece.box, f"{what} is empty or reaches outside")
        _require(tuple(piece.tensor.shape) == piece.box.size, f"{what}: its tensor has shape {piece.tensor.shape}")
        _require(_name(piece.tensor.dtype) == piece.meta.dtype, f"{what}: its tensor is {piece.tensor.dtype}")
        _require(piece.tensor.device.type in ("cpu", "cuda"), f"{what} is on {piece.tensor.device}")
        _require(not piece.tensor.requires_grad, f"{what} is not detached")
        want = expected[piece.meta.name][_index(piece.box)].to(piece.tensor.device)
        _require(_same_bytes(piece.tensor, want), f"{what} has other values than expected")

    again = sender.pieces(model)
    _require(sender.manifest(model).digest() == manifest.digest(), "a second manifest of the same model differs")
    _require(
        [(piece.tensor.data_ptr(), piece.tensor.stride()) for piece in pieces]
        == [(piece.tensor.data_ptr(), piece.tensor.stride()) for piece in again],
        "pieces are not views of the trainer's memory: a second call gives other addresses",
    )

    left_out = manifest.names[0]
    without = make_sender(TensorPolicy(exclude=(left_out,)))
    if len(manifest) > 1:
        found = without.manifest(model).names
        _require(found == manifest.names[1:], f"exclude=({left_out!r},) leaves {found} in the manifest")
        _require(
            all(piece.meta.name != left_out for piece in without.pieces(model)), f"there are pieces of {left_out}, excluded"
        )
    try:
        make_sender(TensorPolicy(exclude=("*",))).manifest(model)
    except ManifestError:
        return
    raise AssertionError("with everything excluded there must be a ManifestError, not an empty manifest")


def _first_problem(views: Sequence[Any]) -> str | None:
    """What is wrong on any rank, or with what the ranks hold together."""
    for problem, _ in views:
        if problem is not None:
            return str(problem)
    digests = [view[0] for _, view in views]
    for rank, found in enumerate(digests):
        if found != digests[0]:
            return f"rank {rank} has another manifest than rank 0: names, order, shapes and dtypes must be the same"
    boxes: dict[str, set[Box]] = defaultdict(set)
    for rank, (_, view) in enumerate(views):
        times = Counter((name, Box(tuple(start), tuple(size))) for name, start, size in view[2])
        for (name, box), count in times.items():
            if count > 1:
                return f"rank {rank} reports {name}{box} {count} times"
            boxes[name].add(box)
    for meta in unpack_manifest(views[0][1][1]):
        missing, doubled = coverage(meta.shape, boxes[meta.name])
        if missing:
            return f"no rank holds {meta.name}{missing[0]}"
        if doubled:
            return f"ranks hold {meta.name}{doubled[0]} in boxes that overlap without being the same"
    return None


# ---------------------------------------------------------------------------------------------------------------
# Transports


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

    The ranks hold tensors of every dtype in uneven shards, replicas and strided views. They are delivered twice with
    other contents, again after their storages have moved, and then three deliveries are broken off: a deadline passes,
    the trainer aborts, bad news comes. After each the same transport must serve a new session.

    `wrong_pairings` are (ranks, workers) that `Transport.check` must refuse. Every end runs in a thread of this
    process, or with `in_processes` in a process of its own, as GPUs need (no process can map its own memory by CUDA
    IPC); both `make_*` must then be functions of a module. No wait lasts longer than `timeout_s`.
    """
    _require(len(rank_devices) >= 2, "check_transport needs two trainer ranks at least")
    transport = make_transport()
    transport.abort()  # from any state: also when nothing has happened
    for ranks, workers in wrong_pairings:
        try:
            transport.check(ranks, workers)
        except PlacementError:
            continue
        raise AssertionError(f"check accepts the ranks {list(ranks)} with the workers {list(workers)}")
    ends: list[Callable[[_Mail], None]] = [
        *(_RankEnd(make_transport, n, device, len(worker_devices), timeout_s) for n, device in enumerate(rank_devices)),
        *(_WorkerEnd(make_source, device, n, timeout_s) for n, device in enumerate(worker_devices)),
    ]
    _run_together(ends, len(rank_devices), in_processes, timeout_s)


_DTYPES = (
    "bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2", "int16", "float16", "bfloat16", "int32", "float32", "int64",
    "float64",
)  # fmt: skip
_SHORT_S = 1.0
"""The deadline that is made to pass."""
_PROMPT_S = 10.0
"""How soon a wait must end after there is a reason to."""


@dataclass(frozen=True)
class _Tensor:
    """One tensor of the trial: the dtype that the trainer has, the one that travels, and who holds which box."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    wire: str
    boxes: tuple[tuple[int, Box], ...]

    def values(self, contents: int) -> torch.Tensor:
        """Its values in the trainer's dtype: the same everywhere, others for other `contents`."""
        draw = torch.Generator().manual_seed(_seed(f"{self.name} {contents}"))
        kind: torch.dtype = getattr(torch, self.dtype)
        if kind == torch.bool:
            return torch.randint(0, 2, self.shape, generator=draw).to(kind)
        if kind.is_floating_point:
            return torch.randn(self.shape, generator=draw, dtype=torch.float32).to(kind)
        return torch.randint(0, 100, self.shape, generator=draw).to(kind)


def _seed(text: str) -> int:
    return int.from_bytes(text.encode(), "big") % (2**31 - 1)


def _trial() -> list[_Tensor]:
    def whole(shape: tuple[int, ...], *ranks: int) -> tuple[tuple[int, Box], ...]:
        return tuple((rank, Box.full(shape)) for rank in ranks)

    rows = ((0, Box((0, 0), (3, 3))), (1, Box((3, 0), (2, 3))))
    columns = ((0, Box((0, 0), (4, 4))), (1, Box((0, 4), (4, 3))))
    long = ((0, Box((0,), (40_000,))), (1, Box((40_000,), (33_333,))))
    return [
        *(_Tensor(f"rows.{dtype}", (5, 3), dtype, dtype, rows) for dtype in _DTYPES),
        _Tensor("columns", (4, 7), "float32", "float32", columns),
        _Tensor("rank1.only", (3, 2), "bfloat16", "bfloat16", whole((3, 2), 1)),
        _Tensor("one_row", (1, 4), "float32", "float32", whole((1, 4), 0)),
        _Tensor("scalar", (), "float32", "float32", whole((), 0, 1)),
        _Tensor("replicated", (6,), "int64", "int64", whole((6,), 0, 1)),
        _Tensor("cast", (5, 3), "float32", "bfloat16", rows),
        _Tensor("long", (73_333,), "float32", "float32", long),
    ]


def _buckets(names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """More buckets than there are slots, of different sizes, one of them with nothing of rank 0."""
    rest = [name for name in names if name != "rank1.only"]
    return (*(tuple(rest[at : at + 5]) for at in range(0, len(rest), 5)), ("rank1.only",))


@dataclass(frozen=True)
class _RankEnd:
    """A trainer rank. Rank 0 tells the workers what to do, as `weightsync.sync` and `weightsync.session` do."""

    make_transport: Callable[[], Transport]
    rank: int
    device: str
    workers: int
    timeout_s: float

    def __call__(self, mail: _Mail) -> None:
        transport = self.make_transport()
        group = _Group(self.rank, mail)
        device = torch.device(self.device)
        infos = group.gather(_introduction(f"trainer rank {self.rank}", device), "plan")
        if self.rank == 0:
            workers = [mail.receive(end) for end in self._worker_ends(mail)]
            transport.check([WorkerInfo(*row) for row in infos], [WorkerInfo(*row) for row in workers])
        try:
            held = self._hold(device)
            offer = self._connect(transport, group, mail, held)
            for contents in (1, 2):
                self._push(transport, group, mail, offer, held, contents)
            held = self._hold(device)  # as after an optimizer that replaced its parameters
            offer = self._connect(transport, group, mail, held, digests=False)
            self._push(transport, group, mail, offer, held, 3, digests=False)
            for ending in ("deadline", "abort", "news"):
                self._break_off(transport, group, mail, offer, ending)
                held = self._hold(device)
                offer = self._connect(transport, group, mail, held)
                self._push(transport, group, mail, offer, held, 4)
            self._tell(mail, {"do": "end"})
        finally:
            transport.abort()
            transport.abort()  # twice is as good as once

    def _worker_ends(self, mail: _Mail) -> range:
        return range(mail.ranks, mail.ranks + self.workers)

    def _tell(self, mail: _Mail, order: dict[str, Any]) -> None:
        if self.rank == 0:
            for end in self._worker_ends(mail):
                mail.send(end, order)

    def _hear(self, mail: _Mail) -> list[Any]:
        return [mail.receive(end) for end in self._worker_ends(mail)] if self.rank == 0 else []

    def _hold(self, device: torch.device) -> list[tuple[_Tensor, Box, torch.Tensor]]:
        """This rank's regions, without values: every other one a strided view, the rest in one storage."""
        mine = [(tensor, box) for tensor in _trial() for rank, box in tensor.boxes if rank == self.rank]
        held = []
        for dtype, group in itertools.groupby(sorted(mine, key=lambda item: item[0].dtype), lambda item: item[0].dtype):
            kind: torch.dtype = getattr(torch, dtype)
            regions = list(group)
            flat = torch.zeros(3 + sum(box.numel for _, box in regions), dtype=kind, device=device)
            used = 3
            for number, (tensor, box) in enumerate(regions):
                if number % 2 and len(box.size) == 2:
                    view = torch.zeros(box.size[::-1], dtype=kind, device=device).t()
                else:
                    view = flat[used : used + box.numel].view(box.size)
                    used += box.numel
                held.append((tensor, box, view))
        return held

    def _connect(
        self,
        transport: Transport,
        group: _Group,
        mail: _Mail,
        held: Sequence[tuple[_Tensor, Box, torch.Tensor]],
        digests: bool = True,
    ) -> Offer:
        numbers: dict[int, int] = {}
        pieces: dict[Placement, torch.Tensor] = {}
        for tensor, box, view in held:
            number = numbers.setdefault(view.untyped_storage().data_ptr(), len(numbers) + 1)
            offset, stride = int(view.storage_offset()), tuple(view.stride())
            pieces[Placement(tensor.name, box, self.rank, number, offset, stride, tensor.dtype)] = view
        everyone = group.share(group.gather(pack_placements(pieces), "plan"), "plan")
        trial = _trial()
        shipment = Shipment(
            Manifest(tuple(TensorMeta(tensor.name, tensor.shape, tensor.wire) for tensor in trial)),
            _buckets([tensor.name for tensor in trial]),
            tuple(unpack_placements(row for rows in everyone for row in rows)),
            digests,
        )
        offer = transport.prepare(shipment, pieces, group)
        offered = [name for names in offer.buckets for name in names]
        _require(sorted(offered) == sorted(shipment.manifest.names), "the offer's buckets are not every tensor once")
        rows = group.gather([transport.storages(worker) for worker in range(self.workers)], "connect")
        if self.rank == 0:
            for worker, end in enumerate(self._worker_ends(mail)):
                order = {
                    "do": "connect",
                    "storages": [row for rank_rows in rows for row in rank_rows[worker]],
                    "placements": pack_placements(offer.placements),
                    "buckets": [list(names) for names in offer.buckets],
                    "fields": {**offer.fields, **transport.invite(worker, self.workers, mail.host)},
                }
                mail.send(end, order)
            transport.join(Deadline(self.timeout_s))
        self._hear(mail)
        group.share(None, "connect")
        transport.joined()
        return offer

    def _push(
        self,
        transport: Transport,
        group: _Group,
        mail: _Mail,
        offer: Offer,
        held: Sequence[tuple[_Tensor, Box, torch.Tensor]],
        contents: int,
        digests: bool = True,
    ) -> None:
        for tensor, box, view in held:
            view.copy_(tensor.values(contents)[_index(box)])
        for bucket in range(len(offer.buckets)):
            if bucket >= 2:
                self._hear(mail)
            rows = self._send(transport, group, mail, bucket, contents)
            _require(digests or not rows, "stage gives digests that nobody wants: Shipment.digests is False")
        for _ in offer.buckets[-2:]:
            self._hear(mail)
        if self.rank == 0:
            transport.finish(mail.idle, Deadline(self.timeout_s))

    def _send(
        self, transport: Transport, group: _Group, mail: _Mail, bucket: int, contents: int
    ) -> list[Any]:
        """One bucket, up to where the workers load it. Gives the digests of all ranks, on rank 0."""
        group.share(None, "gather")
        digests = group.gather(transport.stage(bucket, mail.idle, Deadline(self.timeout_s)), "gather")
        rows = [row for rank_rows in digests for row in rank_rows]
        self._tell(mail, {"do": "load", "bucket": bucket, "digests": rows, "contents": contents})
        if self.rank == 0:
            transport.post(bucket)
        return rows

    def _break_off(self, transport: Transport, group: _Group, mail: _Mail, offer: Offer, ending: str) -> None:
        """One bucket of a push, and then a second that workers wait for and nobody posts."""
        self._send(transport, group, mail, 0, 3 if ending == "deadline" else 4)
        self._hear(mail)
        self._tell(mail, {"do": "wait", "bucket": 1, "ending": ending})
        if ending == "abort":
            self._hear(mail)  # they are about to wait
            time.sleep(0.3)
        elif ending == "news" and self.rank != 0:
            # A rank that has something to send, and a rank 0 that has other things to do.
            bucket = next(n for n, names in enumerate(offer.buckets) if "long" in names)
            _must_end(lambda idle, deadline: transport.stage(bucket, idle, deadline), mail, "stage", "news")
        if ending != "abort":
            self._hear(mail)
            group.share(None, "fail")
        transport.abort()
        if ending == "abort":
            self._hear(mail)
        group.gather(None, "fail")
        group.share(None, "fail")


@dataclass(frozen=True)
class _WorkerEnd:
    """An engine worker: does what rank 0 says, and compares what it reads with what the trainer has."""

    make_source: Callable[[torch.device], Source]
    device: str
    number: int
    timeout_s: float

    def __call__(self, mail: _Mail) -> None:
        device = torch.device(self.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        mail.send(0, _introduction(f"worker {self.number}", device))
        source: Source | None = None
        placements: dict[str, list[Placement]] = defaultdict(list)
        buckets: list[list[str]] = []
        try:
            while (order := mail.receive(0, patient=True))["do"] != "end":
                if order["do"] == "connect":
                    source = self.make_source(device) if source is None else source
                    source.connect(order["storages"], {**order["fields"], "own_host": mail.host}, self._deadline())
                    placements, buckets = defaultdict(list), order["buckets"]
                    for placement in unpack_placements(order["placements"]):
                        placements[placement.name].append(placement)
                elif order["do"] == "load":
                    assert source is not None
                    source.fetch(order["bucket"], mail.idle, self._deadline())
                    _check_digests(source, order["digests"])
                    for name in buckets[order["bucket"]]:
                        self._check_contents(source, name, placements[name], order["contents"])
                else:
                    assert source is not None
                    if order["ending"] == "abort":
                        mail.send(0, "about to wait")
                    fetch = source.fetch
                    _must_end(
                        lambda idle, end, fetch=fetch, n=order["bucket"]: fetch(n, idle, end),  # type: ignore[misc]
                        mail,
                        "fetch",
                        order["ending"],
                    )
                    source.close()
                    source = None
                mail.send(0, "done")
        finally:
            if source is not None:
                source.close()

    def _deadline(self) -> Deadline:
        return Deadline(self.timeout_s)

    def _check_contents(self, source: Source, name: str, placements: Sequence[Placement], contents: int) -> None:
        tensor = next(tensor for tensor in _trial() if tensor.name == name)
        wire: torch.dtype = getattr(torch, tensor.wire)
        expected = tensor.values(contents).to(wire)
        missing, doubled = coverage(tensor.shape, {placement.box for placement in placements})
        _require(not missing, f"worker {self.number} is offered nothing for {name}{missing[:1]}")
        _require(not doubled, f"worker {self.number} is offered {name}{doubled[:1]} in boxes that overlap")
        for p in placements:
            found = strided(source.storage(p.rank, p.storage), p.dtype, p.offset, p.box.size, p.stride).to(wire)
            _require(
                _same_bytes(found.cpu(), expected[_index(p.box)]),
                f"worker {self.number} reads other values of {name}{p.box} than trainer rank {p.rank} has (contents "
                f"number {contents}, dtype {p.dtype})",
            )


def _check_digests(source: Source, rows: Sequence[Sequence[int]]) -> None:
    for rank, storage, first, nbytes, sent in rows:
        found = digest(source.storage(rank, storage)[first : first + nbytes])
        _require(found == sent, f"bytes {first} to {first + nbytes} of storage {storage} of rank {rank} have another digest")


class _News(WeightSyncError):
    """The bad news that an `idle` brings."""


def _must_end(wait_for: Callable[[Idle, Deadline], Any], mail: _Mail, what: str, ending: str) -> None:
    """A wait that nobody will answer must end, and soon: at its deadline, when the trainer aborts, or with bad news."""
    started = time.monotonic()

    def idle(seconds: float) -> None:
        mail.idle(seconds)
        if ending == "news" and time.monotonic() - started > 0.2:
            raise _News("bad news")

    deadline = Deadline(_SHORT_S if ending == "deadline" else _PROMPT_S + _SHORT_S)
    reason = {"deadline": "its deadline had passed", "abort": "the trainer aborted", "news": "idle raised"}[ending]
    try:
        wait_for(idle, deadline)  # where there is nothing to wait for, it may simply return
    except WeightSyncError as error:
        expected = {"deadline": SyncTimeoutError, "abort": WeightSyncError, "news": _News}[ending]
        _require(isinstance(error, expected), f"{what} raised {error!r} when {reason}, expected {expected.__name__}")
    except Exception as error:
        raise AssertionError(f"{what} raised {error!r}, which is no WeightSyncError, when {reason}") from error
    took_s = time.monotonic() - started
    _require(took_s < _PROMPT_S, f"{what} went on for {took_s:.1f} s although {reason}")


class _Mail:
    """One end's connections to the others: ranks first, then workers. Messages are msgpack, so that what an
    implementation wants to have told is seen to be plain values."""

    host = "127.0.0.1"

    def __init__(self, ranks: int, readers: dict[int, Connection], writers: dict[int, Connection], timeout_s: float):
        self.ranks = ranks
        self._readers, self._writers = readers, writers
        self._timeout_s = timeout_s
        self._read: dict[int, list[Any]] = {end: [] for end in readers}

    def send(self, end: int, value: Any) -> None:
        self._writers[end].send_bytes(encode(Value({"value": value})))

    def receive(self, end: int, *, patient: bool = False) -> Any:
        """The next message of an end. `patient`: of one that has several waits of its own meanwhile."""
        deadline = Deadline(self._timeout_s * (8 if patient else 1))
        while not self._read[end]:
            _require(not deadline.passed(), f"no answer from {self._title(end)} within {deadline.timeout_s:g} s")
            self._look(min(0.1, deadline.left_s()))
        return self._read[end].pop(0)

    def idle(self, seconds: float) -> None:
        """An `Idle` of the transports: raises when any end has failed."""
        time.sleep(seconds)
        self._look(0)

    def fail(self) -> None:
        """Tell all others that this end has failed."""
        for writer in self._writers.values():
            try:
                writer.send_bytes(encode(Value({"failed": True})))
            except OSError:
                continue

    def _look(self, wait_s: float) -> None:
        for reader in wait(list(self._readers.values()), wait_s):
            end = next(number for number, one in self._readers.items() if one is reader)
            try:
                message = decode(self._readers[end].recv_bytes()[PREFIX_BYTES:])
            except EOFError:
                raise _AnotherFailed(self._title(end)) from None
            assert isinstance(message, Value)
            if "failed" in message.value:
                raise _AnotherFailed(self._title(end))
            self._read[end].append(message.value["value"])

    def _title(self, end: int) -> str:
        return f"trainer rank {end}" if end < self.ranks else f"worker {end - self.ranks}"


class _AnotherFailed(Exception):
    """Another end has failed; its own error says why."""


class _Group:
    """A `weightsync.transports.base.Group` over `_Mail`."""

    def __init__(self, rank: int, mail: _Mail) -> None:
        self.rank, self.size = rank, mail.ranks
        self.host = self.own_host = mail.host
        self._mail = mail

    def gather(self, value: Any, phase: str) -> list[Any]:
        if self.rank:
            self._mail.send(0, value)
            return []
        return [value, *(self._mail.receive(rank) for rank in range(1, self.size))]

    def share(self, value: Any, phase: str) -> Any:
        if self.rank:
            return self._mail.receive(0, patient=True)
        for rank in range(1, self.size):
            self._mail.send(rank, value)
        return value


def _run_together(
    ends: Sequence[Callable[[_Mail], None]], ranks: int, in_processes: bool, timeout_s: float
) -> None:
    """Run all ends at once and raise the first error of those that did not only suffer from another's."""
    pipes = {(a, b): multiprocessing.Pipe(duplex=False) for a in range(len(ends)) for b in range(len(ends)) if a != b}
    mails = [
        _Mail(
            ranks,
            {a: reader for (a, b), (reader, _) in pipes.items() if b == end},
            {b: writer for (a, b), (_, writer) in pipes.items() if a == end},
            timeout_s,
        )
        for end in range(len(ends))
    ]
    spawn = multiprocessing.get_context("spawn")
    reports = [multiprocessing.Pipe(duplex=False) for _ in ends]
    runners: list[Any] = [
        spawn.Process(target=_run_end, args=(end, mail, report), daemon=True)
        if in_processes
        else threading.Thread(target=_run_end, args=(end, mail, report), daemon=True)
        for end, mail, (_, report) in zip(ends, mails, reports, strict=True)
    ]
    for runner in runners:
        runner.start()
    deadline = Deadline(timeout_s * 8)
    found = []
    for end, ((reader, _), runner) in enumerate(zip(reports, runners, strict=True)):
        while not reader.poll(0.1) and runner.is_alive() and not deadline.passed():
            pass
        text = reader.recv_bytes().decode() if reader.poll(0) else f"did not finish within {deadline.timeout_s:g} s"
        if text:
            found.append(f"{mails[0]._title(end)}: {text}")
    for runner in runners:
        runner.join(5)
        if in_processes and runner.is_alive():
            runner.kill()
    for reader, writer in (*pipes.values(), *reports):
        reader.close()
        writer.close()
    causes = [text for text in found if _AnotherFailed.__name__ not in text] or found
    _require(not causes, "\n".join(causes[:1]))


def _run_end(end: Callable[[_Mail], None], mail: _Mail, report: Connection) -> None:
    try:
        end(mail)
        text = ""
    except AssertionError as error:
        text = str(error) or traceback.format_exc()
    except BaseException:
        text = traceback.format_exc()
    if text:
        mail.fail()
    report.send_bytes(text.encode())


def _introduction(peer: str, device: torch.device) -> list[str]:
    kind, gpu_uuid = describe_device(device)
    return [peer, kind, gpu_uuid, boot_id()]


# ---------------------------------------------------------------------------------------------------------------
# Engine clients


def check_engine(engine: Engine, *, timeout_s: float = 60.0) -> None:
    """Check a client of a running engine with the weightsync plug-in, which no trainer is connected to.

    The engine's workers are called in as by a trainer, and let go again without a push: the weights stay what they
    are. The engine's version does not.
    """
    _require(isinstance(engine, Engine), f"{type(engine).__name__} lacks a method of weightsync.engines.Engine")
    _require(isinstance(engine.name, str) and bool(engine.name), "name must be a text for error messages")
    _require(isinstance(engine.host, str) and bool(engine.host), "host must be the address of the workers' host")
    _require(engine.is_alive() is True, "is_alive() of a running engine must be True")

    for mode in ("keep", "wait", "abort"):
        _succeed(f"pause({mode!r})", lambda mode=mode: engine.pause(mode))  # type: ignore[misc]
        _succeed("reset_caches()", engine.reset_caches)
        _succeed("resume()", engine.resume)
    _succeed("set_version()", lambda: engine.set_version("conformance 0"))
    _require_version(engine, "conformance 0", "after set_version")

    hub = Hub()
    trainers = [_Trainer(engine, hub, timeout_s) for _ in range(2)]
    try:
        first, second = trainers
        first.call_in()
        first.release("init")
        first.call_in_again()
        first.release("init, called by the same trainer again,")

        _succeed("start()", engine.start)
        first.update()
        first.release("update")
        _succeed("finish()", lambda: engine.finish("conformance 1"))
        _require_version(engine, "conformance 1", "after finish")

        _succeed("start(), for a second update,", engine.start)
        first.update()
        first.offend()
        _require(engine.is_alive() is True, "workers that gave an update up must leave the engine alive")
        _succeed("finish(None)", lambda: engine.finish(None))
        _require_version(engine, "conformance 1", "after finish(None), which stamps none,")
        first.close()

        second.call_in()
        second.release("init, called by another trainer,")
    finally:
        for trainer in trainers:
            trainer.close()
        hub.close()
    _succeed("reset_caches()", engine.reset_caches)
    _require(engine.is_alive() is True, "the engine did not live through the check")


def _succeed(what: str, call: Callable[[], None]) -> None:
    try:
        call()
    except Exception as error:
        raise AssertionError(f"{what} raised {error!r}") from error


def _require_version(engine: Engine, expected: str, when: str) -> None:
    found = engine.version()  # an engine without versions says None
    _require(found in (None, expected), f"{when} version() is {found!r}, expected {expected!r}")


def check_dead_engine(engine: Engine) -> None:
    """Check a client of an engine that has died or that nothing answers for: it must say so, and promptly."""
    calls: dict[str, Callable[[], Any]] = {
        "init": lambda: engine.init({}),
        "start": engine.start,
        "update": lambda: engine.update({}),
        "finish": lambda: engine.finish("1"),
        "pause": lambda: engine.pause("keep"),
        "resume": engine.resume,
        "reset_caches": engine.reset_caches,
        "set_version": lambda: engine.set_version("1"),
        "version": engine.version,
    }
    _require(engine.is_alive() is False, "is_alive() of a dead engine must be False")
    for name, call in calls.items():
        started = time.monotonic()
        try:
            call()
        except EngineUnreachableError as error:
            _require(bool(error.who), f"the error of {name} does not say which engine: `who` is empty")
        except Exception as error:
            raise AssertionError(f"{name} of a dead engine raised {error!r}, expected EngineUnreachableError") from error
        else:
            raise AssertionError(f"{name} of a dead engine must raise EngineUnreachableError; it returned")
        took_s = time.monotonic() - started
        _require(took_s < _PROMPT_S, f"{name} of a dead engine took {took_s:.1f} s to say so")


@dataclass
class _Trainer:
    """Calls an engine's workers in and lets them go."""

    engine: Engine
    hub: Hub
    timeout_s: float
    session: str = field(default_factory=lambda: secrets.token_hex(8))
    channels: list[Channel] = field(default_factory=list)
    call: Call | None = None

    def call_in(self) -> None:
        self._init()
        arrived = self.hub.admit("worker", 0, Deadline(self.timeout_s), "init", self._check)
        self.channels = [channel for _, channel in arrived]
        self._must_still_run("init")

    def call_in_again(self) -> None:
        """The workers are connected already, and wait to be spoken to."""
        self._init()
        self._must_still_run("init, called by the same trainer again,")

    def update(self) -> None:
        self.call = Call(self.hub, "update", self.engine.update, {"session": self.session})
        self._must_still_run("update")

    def release(self, what: str) -> None:
        for channel in self.channels:
            channel.send(Release(), Deadline(self.timeout_s), what)
        self._must_return(what)

    def offend(self) -> None:
        """Send what no worker expects: they report it here, and the engine's call returns as after a good one."""
        for channel in self.channels:
            channel.send(Committed(1, 0.0), Deadline(self.timeout_s), "update")
        for channel in self.channels:
            try:
                message = channel.receive(Deadline(self.timeout_s), "update")
            except WeightSyncError:
                continue
            raise AssertionError(f"{channel.peer} answered {message} to a message that it cannot know")
        self._must_return("update, given up by its workers,")

    def close(self) -> None:
        for channel in self.channels:
            channel.close()

    def _init(self) -> None:
        host, port = self.hub.listen(self.engine.host)
        info = {
            "session": self.session,
            "engine": 0,
            "host": host,
            "port": port,
            "token": self.hub.token.hex(),
            "timeout_s": self.timeout_s,
        }
        self.call = Call(self.hub, "init", self.engine.init, info)

    def _check(self) -> None:
        assert self.call is not None
        if self.call.error is not None:
            raise AssertionError(f"init raised {self.call.error!r} before any worker had come")

    def _must_still_run(self, what: str) -> None:
        assert self.call is not None
        self.call.join(0.2)
        _require(self.call.error is None, f"{what} raised {self.call.error!r}")
        _require(self.call.is_alive(), f"{what} returned before its workers were released")

    def _must_return(self, what: str) -> None:
        assert self.call is not None
        self.call.join(self.timeout_s)
        _require(not self.call.is_alive(), f"{what} did not return within {self.timeout_s:g} s")
        _require(self.call.error is None, f"{what} raised {self.call.error!r}")


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(box.start, box.size, strict=True))


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


