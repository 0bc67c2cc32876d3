"""Versions of a checkpoint in a shared folder: trainer ranks write them, and live engines load them.

    folder/.lock                    held by the trainer that writes here
    folder/.incoming-3f2a/rank-0    rank 0's progress: one digest for each chunk
    folder/.incoming-3f2a/1/        the first push of this connection, while it is under way
    folder/version-00000007/        complete

Every rank writes its part of each chunk to its place in the safetensors files. When the part is on the disk, the rank
appends its digest to the rank's own progress file. A worker reads a chunk after every rank with a part of it has done
so. When all workers have loaded all chunks, the folder gets its name. Network file systems cache names. So no name is
used twice, and a rank's progress file exists before a worker opens it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from msgspec import Meta, Struct

from weightsync.checkpoint import shard_files
from weightsync.checkpoint.locked_folder import LOCK, VersionFolder
from weightsync.checkpoint.own_files import opened_plain
from weightsync.checkpoint.safetensors import Shards, lay_out, runs
from weightsync.checkpoint.sidecars import Ties, apart_when_loaded, files_beside, with_configs
from weightsync.errors import ConfigError, PlacementError
from weightsync.net.runtime import Deadline
from weightsync.net.update import Update
from weightsync.net.wire import typed
from weightsync.planning.layout import Box, Count, Manifest, ShardLocation, itemsize
from weightsync.planning.transfer_plan import Chain, TransferPlan
from weightsync.planning.wire_types import Storage
from weightsync.transports import base, staging
from weightsync.transports.staging import Packer, by_rank, endpoint, slot_bytes, still_open, wait_until

_SLOT = 0
_READ_BYTES = 64 * 2**20
"""Most bytes of one read. The deadline is checked between reads."""


class _Piece(Struct, frozen=True, array_like=True):
    """A box of a tensor, with its place in the slot. The tensor begins at byte `first_byte` of `file`."""

    file: Annotated[str, Meta(pattern=r"^\w[\w.-]*\Z")]  # a name without a folder
    first_byte: Count
    shape: tuple[Count, ...]
    box: Box
    itembytes: Count
    first: Count


class FilesEndpoint(Struct, frozen=True, forbid_unknown_fields=True):
    """A worker's data about a folder of checkpoints. `pieces` and `runs` are lists by chunk, then by run."""

    incoming: Annotated[str, Meta(pattern=r"(^|/)\.incoming-[0-9a-f]{8}\Z")]
    pieces: list[list[list[_Piece]]]
    slot_bytes: Count
    runs: list[list[tuple[Count, Count, Count]]]


class FilesTransport(base.Transport):
    """The trainer's end of `CheckpointTransport(folder)`. See `CheckpointTransport` for the arguments."""

    name = "checkpoint"
    sends_unread = True  # a version is whole, whatever part of the model the engines run

    def __init__(
        self, folder: Path, keep_last: int, max_shard_bytes: int, saved_beside: Sequence[Any], takes_configs: bool
    ) -> None:
        self._path, self._keep_last = folder, keep_last
        self._max_shard_bytes, self._saved_beside = max_shard_bytes, saved_beside
        self._takes_configs = takes_configs  # use the model's own configs if none are given
        self._folder: VersionFolder | None = None  # rank 0 only
        self._writer: _ShardWriter | None = None
        self._files_beside: Callable[[], dict[str, bytes]] = dict

    def route(self, request: base.RouteRequest) -> tuple[Chain, ...]:
        shard_files.check_whole(request.manifest, request.locations)
        # Every worker checks in `connect` that it sees the folder. No worker passes bytes on, so one stands for all.
        boxes = {meta.shape: (Box.full(meta.shape),) for meta in request.manifest}
        return (Chain((0,), {meta.name: boxes[meta.shape] for meta in request.manifest}),)

    def prepare(self, plan: TransferPlan, tensors: base.LocalTensors, update: Update) -> list[base.Endpoint]:
        ranks = update.ranks
        # No chunk has tensors without elements.
        order = dict.fromkeys([*(name for chunk in plan.chunks for name in chunk.names), *plan.manifest.names])
        apart = apart_when_loaded(plan.manifest, tensors.model()) if ranks.rank == 0 else ()
        saved = Manifest(plan.manifest.tensors, ranks.broadcast(apart, "connect", Ties))
        shards = lay_out(saved, [(name,) for name in order], self._max_shard_bytes)
        opened = self._open(ranks.size) if ranks.rank == 0 else None
        incoming, self.newest_version = ranks.broadcast(opened, "connect")
        shard_files.check_seen(Path(incoming), f"trainer rank {ranks.rank}")
        model = tensors.model if self._takes_configs else lambda: None
        self._files_beside = lambda: files_beside(with_configs(model(), *self._saved_beside), plan.manifest)
        self._writer = _ShardWriter(plan, tensors, shards, Path(incoming), ranks.rank)
        if ranks.rank:
            return [base.Endpoint() for _ in range(plan.workers)]
        layout = [staging.lay_out(plan.manifest, by_rank(chunk.pieces), _SLOT) for chunk in plan.chunks]
        pieces = [[[_piece(shards, place) for place in each.places] for each in those.values()] for those in layout]
        return [endpoint(layout, [], incoming=incoming, pieces=pieces) for _ in range(plan.workers)]

    def _open(self, ranks: int) -> tuple[str, int]:
        """Take the folder, on rank 0. Return the folder of this connection's pushes, and the newest version."""
        folder = self._folder = self._folder or VersionFolder(self._path)
        with folder.errors():
            incoming = folder.incoming()
            incoming.mkdir()
            for rank in range(ranks):
                _progress(incoming, rank).touch()
        return str(incoming), folder.newest()

    def prepare_push(self, sample: int | None) -> int:
        # Anew in each push: the trainer may have changed its config.
        still_open(self._writer).prepare_push(None if self._folder is None else self._files_beside())
        return 0

    def withdraw(self) -> None:
        if self._folder is not None and self._writer is not None:  # no other process has looked for the name yet
            shutil.rmtree(self._writer.folder(1), ignore_errors=True)

    def drop_workers(self, workers: Collection[int]) -> bool:
        return True  # workers read files: nothing is sent to them

    def send(self, chunks: Sequence[int], seal: base.Seal | None, update: Update) -> None:
        still_open(self._writer).pushes += 1
        for number in chunks:
            still_open(self._writer).write(number, seal)
            update.wait(0.0)

    def on_commit(self, version: int) -> None:
        if version > self.newest_version:  # else engines catch up with a version of the folder
            shard_files.publish(still_open(self._writer).folder(), still_open(self._folder).named(version))

    def after_commit(self) -> None:
        shutil.rmtree(still_open(self._writer).folder(), ignore_errors=True)  # left by a catch-up
        still_open(self._folder).prune(self._keep_last)

    def abort(self) -> None:
        if self._folder is not None:
            self._folder.close()
        self._folder, self._writer, self._files_beside = None, None, dict


class _ShardWriter:
    """One rank's writes for one plan: each push into a folder of its own, inside of `incoming`."""

    def __init__(
        self, plan: TransferPlan, tensors: base.LocalTensors, shards: Shards, incoming: Path, rank: int
    ) -> None:
        self._shards, self._incoming, self._rank, self._gpus = shards, incoming, rank, tensors.gpus
        own = [[piece for piece in chunk.pieces if piece.rank == rank] for chunk in plan.chunks]
        self._layout = [staging.lay_out(plan.manifest, {0: pieces}, _SLOT) for pieces in own]
        self._slot = torch.empty(slot_bytes(self._layout), dtype=torch.uint8)
        self.packer = Packer(plan, tensors, self._layout, {_SLOT: self._slot})
        self.pushes = 0

    def folder(self, later: int = 0) -> Path:
        """Return the folder of the push under way, or `later` pushes after it."""
        return self._incoming / str(self.pushes + later)

    def prepare_push(self, beside: Mapping[str, bytes] | None) -> None:
        """Wait for the tensors. Make the folder of the next push on rank 0, which has the files beside the tensors."""
        for gpu in self._gpus:
            torch.cuda.synchronize(gpu)  # the optimizer's writes may be queued on another stream
        if beside is not None:
            prepare = shard_files.write_beside if self.folder(1).exists() else shard_files.create
            prepare(self.folder(1), self._shards, beside)

    def write(self, number: int, seal: base.Seal | None) -> None:
        """Write this rank's part of a chunk, and then its digest into the rank's progress file."""
        sections = self._layout[number].values()
        for section in sections:
            section.clear_gaps(self._slot)
        self.packer.fill(number, seal)
        digest = bytes(base.DIGEST_BYTES)
        for section in sections:
            regions = ((p, base.strided(self._slot, p.dtype, p.offset, p.box.size, p.stride)) for p in section.places)
            shard_files.write(self.folder(), self._shards, regions)
            if seal is not None:
                digest = self._slot[section.end - base.DIGEST_BYTES : section.end].numpy().tobytes()
        shard_files.append(_progress(self._incoming, self._rank), digest)


def _piece(shards: Shards, place: ShardLocation) -> _Piece:
    """Return a worker's description of the piece at this place of its slot."""
    size, shape = itemsize(place.dtype), shards.manifest[place.name].shape
    file, first = shards.file_of[place.name], shards.in_file[place.name]
    return _Piece(file, first, shape, place.box, size, place.offset * size)


class FilesReceiver(base.TransportReceiver):
    """The worker's end: a slot for one chunk on the engine's device. Bytes reach a GPU through pinned memory."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.close()

    def close(self) -> None:
        self._slot = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._read_into = torch.empty(0, dtype=torch.uint8)
        self._memory = memoryview(b"")

    def connect(self, storages: list[Storage], fields: dict[str, Any], wait: base.Wait, deadline: Deadline) -> None:
        told = typed(fields, FilesEndpoint)
        self._incoming, self._runs, self._pieces = Path(told.incoming), told.runs, told.pieces
        shard_files.check_seen(self._incoming, "this engine worker")
        with _reading(self._incoming.parent / LOCK):
            pass  # every folder of checkpoints has a lock file: refuse to read elsewhere
        self._pushes = self._seen = 0
        if self._slot.numel() != told.slot_bytes:
            self.close()  # free the old buffers first
            on_gpu = self.device.type == "cuda"
            self._read_into = torch.empty(told.slot_bytes, dtype=torch.uint8, pin_memory=on_gpu)
            self._slot = torch.empty_like(self._read_into, device=self.device) if on_gpu else self._read_into
            self._memory = self._read_into.numpy().data

    def storage(self, rank: int, storage: int) -> torch.Tensor:
        return self._slot

    def chunks(self, numbers: Sequence[int], wait: base.Wait, deadline: Callable[[], Deadline]) -> Iterator[int]:
        self._pushes += 1
        for number in numbers:
            self._seen += 1
            runs = self._runs[number]
            wait_until(partial(self._late, [rank for rank, *_ in runs]), "write a chunk", wait, deadline())
            for (rank, _, end), pieces in zip(runs, self._pieces[number], strict=True):
                self._read(pieces, wait, deadline())
                with _reading(_progress(self._incoming, rank)) as fd:
                    _read_at(fd, self._memory[end - base.DIGEST_BYTES : end], (self._seen - 1) * base.DIGEST_BYTES)
            if self._slot is not self._read_into:
                last = max(end for _, _, end in runs)
                self._slot[:last].copy_(self._read_into[:last])
            yield number

    def _late(self, ranks: Sequence[int]) -> list[str]:
        late = []
        for rank in ranks:
            # Open anew each time: network file systems fetch other hosts' writes only on open.
            with _reading(_progress(self._incoming, rank)) as fd:
                if os.fstat(fd).st_size < self._seen * base.DIGEST_BYTES:
                    late.append(f"trainer rank {rank}")
        return late

    def _read(self, pieces: Sequence[_Piece], wait: base.Wait, deadline: Deadline) -> None:
        """Read one rank's pieces, and zero the gaps between them. The rank's digest covers zeroed gaps too."""
        for piece in pieces:
            at, (length, starts) = piece.first, runs(piece.shape, piece.box)
            with _reading(self._incoming / str(self._pushes) / piece.file) as fd:
                for begin in starts:
                    end = at + length * piece.itembytes
                    ahead = piece.first_byte + begin * piece.itembytes - at  # of the slot's byte `at`, in the file
                    while at < end:
                        at += _read_at(fd, self._memory[at : min(end, at + _READ_BYTES)], ahead + at)
                        if deadline.passed():
                            raise deadline.expired("a chunk was not read", "transfer", ["the disk"])
            wait(0.0)
            self._read_into[at : base.align(at)].zero_()


def _progress(incoming: Path, rank: int) -> Path:
    return incoming / f"rank-{rank}"


@contextmanager
def _reading(path: Path) -> Iterator[int]:
    with shard_files.placement_errors(f"cannot read {path}"), opened_plain(path, os.O_RDONLY) as fd:
        yield fd


def _read_at(fd: int, memory: memoryview, at: int) -> int:
    if not (done := os.preadv(fd, [memory], at)):
        raise PlacementError(f"a file of the checkpoint ends at byte {at}, expected {len(memory)} bytes more")
    return done


def _without_folder(name: str) -> base.Transport:
    raise ConfigError(f"transport={name!r} needs a folder: pass transport=weightsync.CheckpointTransport(folder)")


ENDS = _without_folder, FilesReceiver
