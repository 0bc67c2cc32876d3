"""Memory that both sides map: CUDA IPC for GPU tensors, POSIX shared memory for CPU tensors.

GPU tensors, and CPU tensors that the trainer has moved to shared memory (`model.share_memory()`), are exported where
they lie, and workers read them there: a push copies every byte once. Other CPU tensors are copied by their owner into
an arena in shared memory, which has room for two buckets: workers read one while the next is being filled. What is
computed for each push is staged like this too, in GPU memory where it is made there. No rank gathers anything: each
exposes what it holds.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from weightsync.deadline import Deadline
from weightsync.errors import PlacementError, ProtocolError
from weightsync.kernels.digest import Digests, warm_up
from weightsync.layout import Manifest, Placement, choose_owners, itemsize, row_major
from weightsync.memory import SHARED_MEMORY, export, open_exported
from weightsync.transports.base import SLOTS, Group, Idle, Offer, Region, Shipment, WorkerInfo, align
from weightsync.transports.packing import Packer

ARENA = 0
"""The number of a rank's arena among its storages; exported tensors' storages count from 1."""


class _Span(NamedTuple):
    """A run of bytes of one of this rank's storages, from byte `first` on."""

    storage: int
    first: int
    data: torch.Tensor


class IpcTransport:
    """The trainer's end. `name` is "ipc", or "cuda_ipc" to refuse CPU tensors."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._rank = 0
        self._arena: _Arena | None = None
        self._packers: list[Packer] = []  # of each bucket
        self._spans: list[list[_Span]] = []  # of each bucket: what of it gets digests
        self._digests: list[Digests] = []  # of each bucket's spans
        self._exports: dict[int, torch.UntypedStorage] = {}
        self._handles: dict[tuple[int, int], list[Any]] = {}
        self._gpus: set[torch.device] = set()
        self._ahead = False  # the first bucket of the next push has been made readable

    def check(self, ranks: Sequence[WorkerInfo], workers: Sequence[WorkerInfo]) -> None:
        strangers = [w.peer for w in workers if w.boot_id != ranks[0].boot_id]
        strangers += [r.peer for r in ranks if r.boot_id != ranks[0].boot_id]
        if strangers:
            raise PlacementError(
                f"transport {self.name!r} maps memory of one host, but {', '.join(strangers)} runs on another than "
                'trainer rank 0; use transport="broadcast"'
            )
        if any(r.device == "cuda" for r in ranks) and (cpu := [w.peer for w in workers if w.device == "cpu"]):
            raise PlacementError(
                f"the trainer's tensors are on GPUs and {', '.join(cpu)} runs on a CPU: it cannot map them"
            )

    def prepare(self, shipment: Shipment, pieces: Mapping[Placement, Region], group: Group) -> Offer:
        if self.name == "cuda_ipc":
            on_cpu = _anywhere([p.name for p, region in pieces.items() if not region.tensor.is_cuda], group)
            if on_cpu:
                raise PlacementError(
                    f'transport="cuda_ipc" takes GPU tensors only; {len(on_cpu)} are on a CPU, such as {min(on_cpu)}'
                )
        to_stage = _anywhere([p.name for p, region in pieces.items() if not _can_be_mapped(region)], group)
        self._rank = group.rank
        in_place = {p.name for p in shipment.placements} - to_stage
        direct = [p for p in shipment.placements if p.name in in_place]
        staged = choose_owners([p for p in shipment.placements if p.name not in in_place])
        buckets = _regroup(shipment, in_place)
        in_arena, slot_bytes = arena_layout(shipment.manifest, buckets, staged)
        self._make_arena(buckets, staged, in_arena, slot_bytes, pieces)
        self._exports = {p.storage: r.tensor.untyped_storage() for p, r in pieces.items() if p.name in in_place}
        if self._arena is not None and self._arena.data.is_cuda:
            self._exports[ARENA] = self._arena.data.untyped_storage()
        here = {storage.data_ptr() for storage in self._exports.values()}
        self._handles = {key: row for key, row in self._handles.items() if key[1] in here}
        self._gpus = {region.tensor.device for region in pieces.values() if region.tensor.is_cuda}
        self._spans = self._find_spans(buckets, direct)
        self._digests = [Digests([span.data for span in spans]) for spans in self._spans]
        for device in self._gpus:
            warm_up(device)
        return Offer(((*in_arena, *direct),) * len(shipment.reads), tuple(buckets), {})

    def _make_arena(
        self,
        buckets: list[tuple[str, ...]],
        staged: list[Placement],
        in_arena: list[Placement],
        slot_bytes: dict[int, int],
        pieces: Mapping[Placement, Region],
    ) -> None:
        self._drop_arena()
        if not (mine := [(old, new) for old, new in zip(staged, in_arena, strict=True) if old.rank == self._rank]):
            return
        device = next((r.tensor.device for old, _ in mine if not (r := pieces[old]).tensor.is_cuda), None)
        device = device or pieces[mine[0][0]].tensor.device
        self._arena = _Arena.create(SLOTS * slot_bytes[self._rank], device)
        number = {name: i for i, names in enumerate(buckets) for name in names}
        regions: list[list[tuple[Placement, Placement, Region]]] = [[] for _ in buckets]
        for old, new in mine:
            regions[number[old.name]].append((new, old, pieces[old]))
        self._packers = [Packer(self._arena.data, those) for those in regions]

    def storages(self, worker: int) -> list[list[Any]]:
        rows: list[list[Any]] = []
        if self._arena is not None and self._arena.path is not None:
            rows.append([self._rank, ARENA, "shm", {"path": str(self._arena.path), "nbytes": self._arena.data.numel()}])
        for number, storage in self._exports.items():
            # One export per reader: torch counts one release for each, and keeps the memory until it has come.
            key = (worker, storage.data_ptr())
            if key not in self._handles or self._handles[key][1]["nbytes"] != storage.nbytes():
                self._handles[key] = export(storage)
            rows.append([self._rank, number, *self._handles[key]])
        return rows

    def spans(self) -> list[list[int]]:
        return [
            [bucket, self._rank, span.storage, span.first, span.data.numel()]
            for bucket, spans in enumerate(self._spans)
            for span in spans
        ]

    def invite(self, worker: int) -> dict[str, Any]:
        return {}

    def join(self, deadline: Deadline) -> None:
        return

    def joined(self) -> None:
        # Every worker has mapped the arena: its name can go, so that nothing is left behind whatever happens.
        if self._arena is not None:
            self._arena.unlink()

    def stage_ahead(self, bucket: int, part: int | None, idle: Idle, deadline: Deadline) -> bool:
        self._make_readable(bucket)
        if part is not None:
            self._digests[bucket].begin(part)
        self._ahead = True
        return True

    def stage(self, bucket: int, part: int | None, idle: Idle, deadline: Deadline) -> list[int]:
        if not self._ahead:
            self._make_readable(bucket)
        self._ahead = False
        return [] if part is None else self._digests[bucket].of(part)

    def _make_readable(self, bucket: int) -> None:
        for device in self._gpus:
            # Readers are other processes: what the optimizer has queued must have happened.
            torch.cuda.current_stream(device).synchronize()
        if self._arena is not None:
            self._packers[bucket].fill()
            if self._arena.data.is_cuda:
                torch.cuda.current_stream(self._arena.data.device).synchronize()

    def _find_spans(self, buckets: list[tuple[str, ...]], direct: list[Placement]) -> list[list[_Span]]:
        """What this rank stages of each bucket, and what it has in GPU memory. (To look at a sample takes a GPU nothing
        beside a copy. It takes a CPU a third of one, for memory which is the very same.)"""
        spans: list[list[_Span]] = [[] for _ in buckets]
        for number, packer in enumerate(self._packers):
            first, last = packer.span
            if first < last and self._arena is not None:
                spans[number].append(_Span(ARENA, first, self._arena.data[first:last]))
        number_of = {name: i for i, names in enumerate(buckets) for name in names}
        runs: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for p in direct:
            if p.rank == self._rank and p.box.numel and self._exports[p.storage].device.type == "cuda":
                last = p.offset + sum((n - 1) * step for n, step in zip(p.box.size, p.stride, strict=True))
                size = itemsize(p.dtype)
                run = (p.offset * size, (last + 1) * size, p.box.numel * size)
                runs.setdefault((number_of[p.name], p.storage), []).append(run)
        for (bucket, storage), those in runs.items():
            exported = self._exports[storage]
            data = torch.empty(0, dtype=torch.uint8, device=exported.device).set_(exported)
            spans[bucket] += [_Span(storage, first, data[first:last]) for first, last in filled(those)]
        return spans

    def post(self, bucket: int) -> None:
        return

    def withdraw(self, idle: Idle, deadline: Deadline) -> None:
        return

    def finish(self, version: int, idle: Idle, deadline: Deadline) -> None:
        return

    def abort(self) -> None:
        self._drop_arena()
        self._exports.clear()
        self._handles.clear()

    def _drop_arena(self) -> None:
        if self._arena is not None:
            self._arena.unlink()
            self._arena = None
        self._packers, self._spans, self._digests = [], [], []
        self._ahead = False


class IpcSource:
    """The worker's end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: dict[tuple[int, int], tuple[dict[str, Any], torch.Tensor]] = {}

    def connect(self, storages: list[list[Any]], fields: dict[str, Any], idle: Idle, deadline: Deadline) -> None:
        before, self._open = self._open, {}
        for rank, number, kind, row in storages:
            known = before.pop((rank, number), None)
            if known is not None and known[0] == row:
                self._open[rank, number] = known
            elif kind == "shm":
                self._open[rank, number] = (row, _Arena.attach(row["path"], row["nbytes"]))
            else:
                self._open[rank, number] = (row, open_exported(kind, row, self._device, f"trainer rank {rank}"))

    def storage(self, rank: int, storage: int) -> torch.Tensor:
        return self._open[rank, storage][1]

    def fetch(self, bucket: int, following: int | None, idle: Idle, deadline: Deadline) -> None:
        return

    def expect(self, bucket: int) -> bool:
        return True

    def withdraw(self, idle: Idle, deadline: Deadline) -> None:
        return

    def close(self) -> None:
        self._open.clear()


def filled(runs: Sequence[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Of runs as (first, beyond the last, bytes that are read between them), with those that touch made one: where no
    byte is left out, since what lies in a gap is not ours and may change. Pure."""
    found: list[tuple[int, int, int]] = []
    for first, last, nbytes in sorted(set(runs)):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(last, found[-1][1]), found[-1][2] + nbytes
        else:
            found.append((first, last, nbytes))
    return [(first, last) for first, last, nbytes in found if nbytes == last - first]


def _can_be_mapped(region: Region) -> bool:
    if region.compute is not None:
        return False
    if region.tensor.is_cuda:
        return True
    storage = region.tensor.untyped_storage()
    # Memory that is shared by a file's name has no descriptor to hand on, and torch would move it to get one.
    if not storage.is_shared() or torch.multiprocessing.get_sharing_strategy() != "file_descriptor":
        return False
    return storage.filename is None and int(storage._share_fd_cpu_()[0]) >= 0  # nor has a file that torch maps


def _anywhere(names: Sequence[str], group: Group) -> set[str]:
    """Collective: the names that any rank gives."""
    return set(group.share(sorted(set().union(*group.gather(sorted(set(names)), "plan"))), "plan"))


def _regroup(shipment: Shipment, direct: Set[str]) -> list[tuple[str, ...]]:
    """The buckets with what is read where it lies taken out: nothing is copied before workers read it, so there is
    nothing to take turns with, and it makes one bucket. What is frozen is kept apart, at the end."""
    buckets: list[tuple[str, ...]] = []
    for frozen in (False, True):
        part = [names for names in shipment.buckets if shipment.frozen.issuperset(names) is frozen]
        buckets += [tuple(name for name in names if name not in direct) for names in part]
        buckets.append(tuple(name for names in part for name in names if name in direct))
    return [names for names in buckets if names]


def arena_layout(
    manifest: Manifest, buckets: Sequence[Sequence[str]], owned: Sequence[Placement]
) -> tuple[list[Placement], dict[int, int]]:
    """Where each owned region lies in its rank's arena: bucket n in slot n modulo 2, packed, aligned, in the dtype that
    travels. Gives the new placements, in the order of `owned`, and the bytes of one slot for each rank. Pure."""
    number = {name: i for i, names in enumerate(buckets) for name in names}
    used: dict[tuple[int, int], int] = {}  # (rank, bucket) -> bytes
    first: list[int] = []
    for placement in owned:
        key = (placement.rank, number[placement.name])
        first.append(used.get(key, 0))
        used[key] = align(first[-1] + placement.box.numel * itemsize(manifest[placement.name].dtype))
    slot_bytes: dict[int, int] = {}
    for (rank, _), nbytes in used.items():
        slot_bytes[rank] = max(slot_bytes.get(rank, 0), nbytes)
    moved = []
    for placement, start in zip(owned, first, strict=True):
        dtype = manifest[placement.name].dtype
        start += number[placement.name] % SLOTS * slot_bytes[placement.rank]
        moved.append(
            replace(
                placement,
                storage=ARENA,
                offset=start // itemsize(dtype),
                stride=row_major(placement.box.size),
                dtype=dtype,
            )
        )
    return moved, slot_bytes


class _Arena:
    """A file in shared memory, private to this user, mapped as one uint8 tensor; or GPU memory, without a file."""

    def __init__(self, path: Path | None, data: torch.Tensor) -> None:
        self.path = path
        self.data = data

    @classmethod
    def create(cls, nbytes: int, device: torch.device) -> _Arena:
        if device.type == "cuda":
            return cls(None, torch.empty(nbytes, dtype=torch.uint8, device=device))
        path = Path(SHARED_MEMORY) / f"weightsync-{os.getpid()}-{secrets.token_hex(8)}"
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(fd, 0, nbytes)  # a full /dev/shm is an error here, not a crash at the first write
            data = torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)
        except (OSError, RuntimeError) as error:
            path.unlink()
            raise PlacementError(
                f"no room for a staging area of {nbytes} bytes in {SHARED_MEMORY}: {error}; use smaller buckets "
                "(max_bytes) or give the container more shared memory"
            ) from error
        finally:
            os.close(fd)
        return cls(path, data)

    @staticmethod
    def attach(path: str, nbytes: int) -> torch.Tensor:
        if Path(path).parent != Path(SHARED_MEMORY):
            raise ProtocolError(f"{path!r} is no shared memory of this host")
        try:
            if (found := os.stat(path).st_size) != nbytes:
                raise PlacementError(f"shared memory {path} has {found} bytes, the trainer announced {nbytes}")
            return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
        except (OSError, RuntimeError) as error:
            raise PlacementError(
                f"cannot map the trainer's shared memory {path}: {error}. Trainer and engine must see the same "
                f'{SHARED_MEMORY} (same container, or --ipc=host) and be the same user; else use transport="broadcast"'
            ) from error

    def unlink(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)
