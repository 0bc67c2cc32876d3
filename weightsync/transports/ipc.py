"""Memory of one host, mapped by trainer ranks and engine workers: CUDA IPC for GPUs, shared memory for CPUs.

Workers read two kinds of tensors in place: GPU tensors, and CPU tensors in shared memory (`model.share_memory()`). The
owning rank stages all others: CPU tensors, and tensors computed for each push. A rank has two slots: workers read one
chunk while the rank fills the next. Counters in shared memory pace both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from msgspec import Struct

from weightsync.errors import PlacementError, ProtocolError
from weightsync.net.runtime import Deadline
from weightsync.net.update import Update
from weightsync.net.wire import typed
from weightsync.planning.layout import Count, ShardLocation, itemsize
from weightsync.planning.transfer_plan import Chain, TransferPlan
from weightsync.planning.wire_types import ByteRange, ChunkLayout, Storage
from weightsync.transports import base
from weightsync.transports.proof import MemoryFingerprint
from weightsync.transports.shared_handles import Handle, SharedFile, export, open_exported
from weightsync.transports.staging import Layout, Packer, arrival, by_rank, lay_out, slot_bytes, still_open, wait_until

_COUNTERS = 0
"""Storage number of a rank's counters. Its slots have -1 and -2. Exported tensors count from 1."""
_CACHE_LINE_BYTES = 64
_Counters: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


class IpcTransport(base.Transport):
    """The trainer's end. `name` is "ipc", or "cuda_ipc" to refuse CPU tensors."""

    def __init__(self, name: str = "ipc") -> None:
        self.name = name
        self._handles: dict[tuple[int, int], Handle] = {}  # by worker and address
        self._sender: _SlotSender | None = None
        self._forget()

    def _forget(self) -> None:
        if self._sender is not None:
            self._sender.close()
        self._sender = None
        self._gpus: set[torch.device] = set()
        self._runs: list[ByteRange] = []
        self._proof = MemoryFingerprint([[]])

    def route(self, request: base.RouteRequest) -> tuple[Chain, ...]:
        ranks, workers = request.ranks, request.workers
        if strangers := [each.peer for each in (*workers, *ranks) if each.boot_id != ranks[0].boot_id]:
            raise PlacementError(
                f"transport {self.name!r} maps memory of one host, but {', '.join(strangers)} runs on another host "
                'than trainer rank 0. Use transport="broadcast", or with shared GPUs CheckpointTransport(folder)'
            )
        if any(r.device == "cuda" for r in ranks) and (cpu := [w.peer for w in workers if w.device == "cpu"]):
            raise PlacementError(
                f"{', '.join(cpu)} runs on a CPU and cannot map the trainer's GPUs; use CheckpointTransport"
            )
        return ()

    def can_map(self, tensor: base.LocalTensor) -> bool:
        if tensor.compute is not None:
            return False
        if tensor.tensor.is_cuda:
            return True
        storage = tensor.tensor.untyped_storage()
        # Memory shared by a file's name has no descriptor to export. torch would move it to get one.
        if not storage.is_shared() or torch.multiprocessing.get_sharing_strategy() != "file_descriptor":
            return False
        return storage.filename is None and int(storage._share_fd_cpu_()[0]) >= 0  # nor does a file mapped by torch

    def prepare(self, plan: TransferPlan, tensors: base.LocalTensors, update: Update) -> list[base.Endpoint]:
        on_cpu = [location.name for location, each in tensors.at.items() if not each.tensor.is_cuda]
        if self.name == "cuda_ipc" and on_cpu:
            raise PlacementError(
                f'transport="cuda_ipc" takes GPU tensors only; {len(on_cpu)} are on a CPU, such as {min(on_cpu)}'
            )
        self._forget()
        rank = update.ranks.rank
        staged = [number for number, chunk in enumerate(plan.chunks) if not chunk.in_place]
        layout: Layout = [{} for _ in plan.chunks]
        for at, number in enumerate(staged):
            for owner, pieces in by_rank(plan.chunks[number].pieces).items():
                layout[number] |= lay_out(plan.manifest, {owner: pieces}, -1 - at % base.SLOTS)
        mine = [{rank: those[rank]} if rank in those else {} for those in layout]
        sender = self._sender = _SlotSender(plan, tensors, rank, mine)
        storages = self._export(plan, tensors, rank, sender)
        arrivals: tuple[ChunkLayout, ...] = ()
        fields: dict[str, Any] = {}
        if rank == 0:
            arrivals = tuple(
                ChunkLayout(chunk.pieces) if chunk.in_place else arrival(those)
                for chunk, those in zip(plan.chunks, layout, strict=True)
            )
            fields = {"parts": [None if c.in_place else [*b] for c, b in zip(plan.chunks, layout, strict=True)]}
        return [base.Endpoint(rows, arrivals, {**fields, "worker": worker}) for worker, rows in enumerate(storages)]

    def _export(
        self, plan: TransferPlan, tensors: base.LocalTensors, rank: int, sender: _SlotSender
    ) -> list[list[Storage]]:
        """Return each worker's storages: shared files, and a handle of each GPU slot and each tensor read in place.

        Also set the runs to digest and the GPUs to synchronise.
        """
        read = [p for chunk in plan.chunks if chunk.in_place for p in chunk.pieces if p.rank == rank]
        numbers = {piece.storage for piece in read}
        exports = {p.storage: each.tensor.untyped_storage() for p, each in tensors.at.items() if p.storage in numbers}
        self._find_runs(read, exports, rank)
        exports |= {number: slot.untyped_storage() for number, slot in sender.slots.items() if slot.is_cuda}
        self._gpus = tensors.gpus
        here = {storage.data_ptr() for storage in exports.values()}
        self._handles = {key: row for key, row in self._handles.items() if key[1] in here}
        rows = []
        for worker in range(plan.workers):
            rows.append([*sender.files])
            for number, storage in exports.items():
                # One export per reader: torch expects one release for each export, and keeps the memory until then.
                key = (worker, storage.data_ptr())
                if key not in self._handles or self._handles[key][1]["nbytes"] != storage.nbytes():
                    self._handles[key] = export(storage)
                rows[-1].append((rank, number, *self._handles[key]))
        return rows

    def _find_runs(self, read: Sequence[ShardLocation], exports: dict[int, torch.UntypedStorage], rank: int) -> None:
        spans: dict[int, list[tuple[int, int, int]]] = {number: [] for number in exports}
        for p in read:
            last = p.offset + sum((n - 1) * step for n, step in zip(p.box.size, p.stride, strict=True))
            size = itemsize(p.dtype)
            spans[p.storage].append((p.offset * size, (last + 1) * size, p.box.numel * size))
        memory = []
        for number, those in spans.items():
            data = torch.empty(0, dtype=torch.uint8, device=exports[number].device).set_(exports[number])
            for first, last in filled(those):
                self._runs.append(ByteRange(rank, number, first, last - first))
                memory.append(data[first:last])
        self._proof = MemoryFingerprint([memory])

    def in_place(self) -> list[ByteRange]:
        return self._runs

    def prepare_push(self, sample: int | None) -> int:
        for gpu in self._gpus:
            # Readers are other processes: the optimizer's queued work, on any stream, must be done before they read.
            torch.cuda.synchronize(gpu)
        return 0 if sample is None else self._proof.of(sample)[0]

    def drop_workers(self, workers: Collection[int]) -> bool:
        if self._sender is not None:
            self._sender.left.update(workers)
        return True

    def send(self, chunks: Sequence[int], seal: base.Seal | None, update: Update) -> None:
        sender = still_open(self._sender)
        sender.close_files()  # every worker has mapped them: closed files vanish even if a process is killed
        sender.send(chunks, seal, update)

    def abort(self) -> None:
        self._forget()
        self._handles.clear()


class _SlotSender:
    """One rank's staged chunks of one plan: its slots take them in turn. Counters pace it with the workers.

    layout: this rank's sections.
    """

    def __init__(self, plan: TransferPlan, tensors: base.LocalTensors, rank: int, layout: Layout) -> None:
        self.slots: dict[int, torch.Tensor] = {}
        self.files: list[Storage] = []  # storages that are shared files
        self.left: set[int] = set()  # workers
        self._open_files: list[SharedFile] = []
        self._counters: _Counters | None = None
        self._workers, self._filled = plan.workers, 0
        self._make_slots(rank, layout, tensors)
        self._has_part = [None if chunk.in_place else bool(own) for chunk, own in zip(plan.chunks, layout, strict=True)]
        self.packer: Packer | None = Packer(plan, tensors, layout, self.slots)

    def _make_slots(self, rank: int, layout: Layout, tensors: base.LocalTensors) -> None:
        """Allocate slots and counters if this rank stages any tensor."""
        staged = {source.name for sections in layout for section in sections.values() for source in section.sources}
        if not staged:
            return
        devices = [each.tensor.device for location, each in tensors.at.items() if location.name in staged]
        device = next((device for device in devices if device.type == "cpu"), devices[0])
        nbytes = {_COUNTERS: (1 + self._workers) * _CACHE_LINE_BYTES}
        nbytes |= dict.fromkeys((-1 - slot for slot in range(base.SLOTS)), slot_bytes(layout))
        for number, size in nbytes.items():
            if number != _COUNTERS and device.type == "cuda":
                self.slots[number] = torch.empty(size, dtype=torch.uint8, device=device)
                continue
            file = SharedFile(size)
            self._open_files.append(file)
            self.files.append((rank, number, *file.handle()))
            if number == _COUNTERS:
                self._counters = _counters_in(file.data)
            else:
                self.slots[number] = file.data

    def send(self, chunks: Sequence[int], seal: base.Seal | None, update: Update) -> None:
        """Send as `Transport.send` does."""
        begun = self._filled
        for number in chunks:
            if (has_part := self._has_part[number]) is None:
                continue
            packer = still_open(self.packer)
            if has_part:
                # Wait for the chunk before the last one: it used the same slot. Wait for all chunks of earlier pushes,
                # too.
                taken = max(self._filled - base.SLOTS + 1, begun)
                wait_until(partial(self._late, taken), "take a chunk", update.wait, update.deadline_after_workers())
            packer.fill(number, seal)
            for slot in self.slots.values():
                base.finish_stream(slot.device)
            self._filled += 1
            if self._counters is not None:
                self._counters[0] = self._filled

    def _late(self, taken: int) -> list[str]:
        """Return the workers that have taken fewer than `taken` chunks."""
        counters = still_open(self._counters)
        staying = [worker for worker in range(self._workers) if worker not in self.left]
        return [f"engine worker {worker}" for worker in staying if counters[1 + worker] < taken]

    def close(self) -> None:
        """Break a `send` under way, and close the shared files."""
        self.packer = self._counters = None
        self.close_files()

    def close_files(self) -> None:
        """Close the shared files. Mapped memory stays."""
        for file in self._open_files:
            file.close()


class IpcEndpoint(Struct, frozen=True, forbid_unknown_fields=True):
    """A worker's data about its transport. `parts` has, for each chunk, the ranks that stage a part of it."""

    worker: Count
    parts: list[list[Count] | None]


class IpcReceiver(base.TransportReceiver):
    """The worker's end."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._open: dict[tuple[int, int], tuple[dict[str, Any], torch.Tensor]] = {}

    def connect(self, storages: list[Storage], fields: dict[str, Any], wait: base.Wait, deadline: Deadline) -> None:
        before, self._open = self._open, {}
        self._counters: dict[int, _Counters] = {}
        for rank, number, kind, row in storages:
            known = before.pop((rank, number), None)
            if known is None or known[0] != row:
                known = (row, open_exported(kind, row, self.device, f"trainer rank {rank}"))
            self._open[rank, number] = known
            if number == _COUNTERS:
                self._counters[rank] = _counters_in(known[1])
        told = typed(fields, IpcEndpoint)
        self._worker, self._parts, self._taken = told.worker, told.parts, 0
        staging = {rank for ranks in told.parts for rank in ranks or ()}
        for rank in sorted(staging):
            if rank not in self._counters or len(self._counters[rank]) <= 1 + told.worker:
                raise ProtocolError(f"trainer rank {rank} stages chunks and has no counter for worker {told.worker}")

    def storage(self, rank: int, storage: int) -> torch.Tensor:
        if (rank, storage) not in self._open:
            raise ProtocolError(f"the plan reads storage {storage} of trainer rank {rank}, but no endpoint names it")
        return self._open[rank, storage][1]

    def chunks(self, numbers: Sequence[int], wait: base.Wait, deadline: Callable[[], Deadline]) -> Iterator[int]:
        if len(self._parts) < len(numbers):
            raise ProtocolError(f"the endpoint has the stagers of {len(self._parts)} of {len(numbers)} chunks")
        for number in numbers:
            if (ranks := self._parts[number]) is None:
                yield number
                continue
            self._taken += 1
            wait_until(partial(self._late, ranks), "send a chunk", wait, deadline())
            yield number
            base.finish_stream(self.device)
            for counters in self._counters.values():
                counters[1 + self._worker] = self._taken

    def _late(self, ranks: Sequence[int]) -> list[str]:
        return [f"trainer rank {rank}" for rank in ranks if self._counters[rank][0] < self._taken]

    def close(self) -> None:
        base.finish_stream(self.device)  # a failed push may still read memory unmapped below
        self._counters = {}
        self._open.clear()


def _counters_in(data: torch.Tensor) -> _Counters:
    """Return numbers of staged chunks: at 0 the chunks filled by a rank, at 1, 2, ... the chunks taken by each worker.

    Counters grow from push to push. Each has its own cache line. The array keeps the memory mapped.
    """
    size, stride = (data.numel() // _CACHE_LINE_BYTES,), (_CACHE_LINE_BYTES // 8,)
    return base.strided(data, "int64", 0, size, stride).numpy()


def filled(runs: Sequence[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Return the runs of memory, first byte and end, that are read without a gap. A gap's bytes may change. Pure.

    Runs that touch are joined.

    runs: (first byte, end, bytes read between them).
    """
    found: list[tuple[int, int, int]] = []
    for first, last, nbytes in sorted(set(runs)):
        if found and first <= found[-1][1]:
            start, end, before = found[-1]
            are_whole = (before, nbytes) == (end - start, last - first)  # then bytes read by both count once
            end = max(last, end)
            found[-1] = start, end, end - start if are_whole else before + nbytes
        else:
            found.append((first, last, nbytes))
    return [(first, last) for first, last, nbytes in found if nbytes == last - first]


ENDS = IpcTransport, IpcReceiver
