"""A trainer of one rank without WeightSync: it drives receivers, through a transport that is memory of this process."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from msgspec.structs import replace

from weightsync.kernels.digest import MASK, WHOLE, digest, signed
from weightsync.net.runtime import Deadline
from weightsync.net.wire import Connect, Done, Go
from weightsync.planning.layout import Box, Manifest, ShardLocation, TensorMeta, row_major
from weightsync.planning.load_plan import LoadPlan
from weightsync.planning.transfer_plan import Chunk, make_chunks
from weightsync.planning.wire_types import ByteRange, ChunkLayout, Storage
from weightsync.transports.base import DIGEST_BYTES, SLOTS, Seal, TransportReceiver, Wait, align, strided
from weightsync.transports.proof import MemoryFingerprint
from weightsync.worker import loader as receiver_module
from weightsync.worker.engine_model import EngineModel
from weightsync.worker.loader import Receiver

TIMEOUT_S = 10.0


def manifest_of(tensors: Mapping[str, torch.Tensor]) -> Manifest:
    return Manifest(tuple(TensorMeta(name, tuple(t.shape), _dtype(t)) for name, t in tensors.items()))


class MemoryTrainer:
    """Pushes `tensors`, which tests change between pushes, into the models of one engine.

    Chunks hold at most `max_bytes`, of tensors in order, each a bucket of its own unless `buckets` says otherwise. The
    names in `in_place` are read from the tensors' own memory, all others from two slots of each receiver, which are
    overwritten as soon as they may be.
    """

    def __init__(
        self,
        *models: EngineModel,
        tensors: Mapping[str, torch.Tensor],
        max_bytes: int | None = None,
        buckets: Sequence[Sequence[str]] | None = None,
        in_place: Sequence[str] = (),
        frozen: Sequence[str] = (),
        receivers: Sequence[Receiver] = (),
    ) -> None:
        self.receivers = list(receivers) or [Receiver(model) for model in models]
        self.tensors = dict(tensors)
        self.in_place, self.frozen = frozenset(in_place), frozenset(frozen)
        self.corrupt: int | None = None
        """The number of a chunk that changes on its way."""
        self._version = 0
        self.written: list[int] = []
        """The chunks of the last push that the first receiver was given."""
        self.plans: list[LoadPlan] = self._on_all(lambda r: r.make_plan(manifest_of(self.tensors)))
        self.load_paths = {k: n for k, n in sum((Counter(p.load_paths) for p in self.plans), Counter()).items() if n}
        self._numbers = {name: SLOTS + number for number, name in enumerate(self.tensors)}
        self._buckets = buckets or [[name] for name in self.tensors]
        self._max_bytes = max_bytes
        self.memory = {self._numbers[name]: t for name, t in self.tensors.items() if name in self.in_place}
        self.chunks = self._make_chunks()
        self.arrivals = [self._lay_out(number, chunk) for number, chunk in enumerate(self.chunks)]
        self.slot_bytes = (
            max((run.nbytes for arrival in self.arrivals for run in arrival.runs), default=0) + DIGEST_BYTES
        )

    @property
    def message(self) -> Connect:
        """What every receiver is told to connect to."""
        mapped = [ByteRange(0, number, 0, _bytes(tensor).numel()) for number, tensor in self.memory.items()]
        return Connect(
            transport="memory",
            storages=[],
            chunks=self.arrivals,
            frozen=sum(chunk.frozen for chunk in self.chunks),
            in_place=mapped,
            proof=self._proof().of(WHOLE),
            fields={},
        )

    def connect(self, message: Connect | None = None) -> None:
        """Connect every receiver."""
        told = message or self.message
        with _opening(lambda device: MemoryReceiver(device, self)):
            self._on_all(lambda receiver: receiver.connect(told, _never, Deadline(TIMEOUT_S)))

    def run(self, version: int, sample: int | None = WHOLE) -> list[Done]:
        """Push without a commit."""
        self._version = version
        place_sample = sample if sample in (None, WHOLE) else version
        go = Go(version, sample, place_sample, [] if place_sample is None else self._proof().of(place_sample))
        return self._on_all(lambda receiver: receiver.run(go, _never, lambda: Deadline(TIMEOUT_S)))

    def push(self, version: int | None = None, sample: int | None = WHOLE) -> list[Done]:
        """Push and commit, after connecting where that was not done."""
        if self.receivers[0]._plan is None:
            self.connect()
        version = version or self.receivers[0].version + 1
        done = self.run(version, sample)
        self._on_all(lambda receiver: receiver.commit(version))
        return done

    def fill(self, number: int, slot: torch.Tensor) -> None:
        """Write a chunk and its digest in this push into a slot."""
        for location in self.arrivals[number].locations:
            if location.name not in self.in_place:
                region = tuple(slice(a, a + n) for a, n in zip(location.box.start, location.box.size, strict=True))
                target = strided(slot, location.dtype, location.offset, location.box.size, location.stride)
                target.copy_(self.tensors[location.name].detach()[region])
        for run in self.arrivals[number].runs:
            first, nbytes = run.first, run.nbytes
            sealed = digest(slot[first : first + nbytes]) + Seal(WHOLE, self._version).seed(number)
            sent = torch.tensor([signed(sealed & MASK)]).view(torch.uint8)
            slot[first + nbytes : first + nbytes + DIGEST_BYTES] = sent
            if number == self.corrupt:
                slot[first] ^= 1

    def _make_chunks(self) -> list[Chunk]:
        metas = [replace(meta, dtype=self._travels_as(meta)) for meta in manifest_of(self.tensors)]
        locations = [
            ShardLocation(m.name, Box.full(m.shape), 0, self._numbers[m.name], 0, row_major(m.shape), m.dtype)
            for m in metas
        ]
        manifest, no_chains = Manifest(tuple(metas)), ()
        made = make_chunks(
            manifest, no_chains, self._buckets, self.frozen, self.in_place, locations, self._max_bytes, {}
        )
        return list(made)

    def _travels_as(self, meta: TensorMeta) -> str:
        if meta.name in self.in_place:
            return meta.dtype
        return next((plan.used[meta.name] for plan in self.plans if meta.name in plan.used), meta.dtype)

    def _lay_out(self, number: int, chunk: Chunk) -> ChunkLayout:
        if chunk.in_place:
            return ChunkLayout(chunk.pieces)
        locations, first = [], 0
        for piece in chunk.pieces:
            nbytes = getattr(torch, piece.dtype).itemsize
            at = replace(piece, storage=number % SLOTS, offset=first // nbytes, stride=row_major(piece.box.size))
            locations.append(at)
            first += align(piece.box.numel * nbytes)
        return ChunkLayout(tuple(locations), (ByteRange(0, number % SLOTS, 0, first),))

    def _proof(self) -> MemoryFingerprint:
        return MemoryFingerprint([[_bytes(self.tensors[name]) for name in self.tensors if name in self.in_place]])

    def _on_all(self, call: Callable[[Receiver], Any]) -> list[Any]:
        """Call with every receiver, at the same time where there are several: some of what they do is collective."""
        if len(self.receivers) == 1:
            return [call(self.receivers[0])]
        found: dict[int, Any] = {}
        errors: list[BaseException] = []

        def run(number: int) -> None:
            try:
                found[number] = call(self.receivers[number])
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(len(self.receivers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [found[number] for number in range(len(self.receivers))]


class MemoryReceiver(TransportReceiver):
    """The worker's end: two slots of its own, and the tensors that are read in place."""

    def __init__(self, device: torch.device, trainer: MemoryTrainer) -> None:
        super().__init__(device)
        self._trainer = trainer
        self._slots = [torch.zeros(trainer.slot_bytes, dtype=torch.uint8) for _ in range(SLOTS)]
        self.closed = False

    def connect(self, storages: list[Storage], fields: dict[str, Any], wait: Wait, deadline: Deadline) -> None:
        return

    def storage(self, rank: int, storage: int) -> torch.Tensor:
        return self._slots[storage] if storage < SLOTS else _bytes(self._trainer.memory[storage])

    def chunks(self, numbers: Sequence[int], wait: Wait, deadline: Callable[[], Deadline]) -> Iterator[int]:
        self._trainer.written = []
        for number in numbers:
            self._trainer.fill(number, self._slots[number % SLOTS])
            self._trainer.written.append(number)
            yield number
            self._slots[number % SLOTS].fill_(0xA5)  # as the next chunk but one would

    def close(self) -> None:
        self.closed = True


@contextmanager
def _opening(make: Callable[[torch.device], TransportReceiver]) -> Iterator[None]:
    original = receiver_module.open_receiver
    receiver_module.open_receiver = lambda name, device: make(device)
    try:
        yield
    finally:
        receiver_module.open_receiver = original


def _never(seconds: float) -> None:
    raise AssertionError("memory is there at once")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
