"""Memory of one process that another on this host maps: handles as plain values, and bytes from handles.

GPU memory goes by CUDA IPC, CPU memory as an open file in shared memory, which has no name and leaves nothing behind.
"""

from __future__ import annotations

import os
import re
from typing import Any

import torch

from weightsync.errors import PlacementError, ProtocolError
from weightsync.machine import describe_device

SHARED_MEMORY = "/dev/shm"
_CUDA_FIELDS = (
    "device", "handle", "nbytes", "offset_bytes", "counter_handle", "counter_offset", "event_handle", "event_sync",
)  # fmt: skip


def export(storage: torch.UntypedStorage) -> list[Any]:
    """[kind, fields] of a storage, for one reader: torch counts a release for each export, and keeps GPU memory until
    it has come. CPU memory is moved to shared memory the first time; all tensors that have it go with it, to another
    address. Raises `PlacementError`."""
    if storage.device.type == "cuda":
        return ["cuda", _export_cuda(storage)]
    if not storage.is_shared():
        info = os.statvfs(SHARED_MEMORY)
        if (free := info.f_bavail * info.f_frsize) < storage.nbytes():
            raise PlacementError(
                f"no room for {storage.nbytes()} bytes in {SHARED_MEMORY}, which has {free} left; give the container "
                "more shared memory"
            )
    fd, nbytes = storage._share_fd_cpu_()
    if fd < 0:
        raise PlacementError(f"{nbytes} bytes of a file cannot be exported: torch has closed it; copy them to memory")
    # A reader in another namespace of processes may find another file under this path.
    return ["fd", {"path": f"/proc/{os.getpid()}/fd/{fd}", "nbytes": nbytes, "inode": os.fstat(fd).st_ino}]


def open_exported(kind: str, fields: dict[str, Any], device: torch.device, owner: str) -> torch.Tensor:
    """The bytes of a storage that `owner` has exported, as a 1-D uint8 tensor; a GPU's are mapped for `device`, which
    may be another GPU. Raises `PlacementError` when they cannot be mapped."""
    if kind == "cuda":
        return _open_cuda(fields, device, owner)
    if kind == "fd":
        return _open_file(fields, owner)
    raise ProtocolError(f"{owner} has exported memory of unknown kind {kind!r}")


def _export_cuda(storage: torch.UntypedStorage) -> dict[str, Any]:
    """A CUDA IPC handle as plain bytes and integers: what torch itself sends between processes, without pickling."""
    try:
        fields = dict(zip(_CUDA_FIELDS, storage._share_cuda_(), strict=True))
    except RuntimeError as error:
        raise PlacementError(
            f"{storage.nbytes()} bytes on {storage.device} cannot be exported by CUDA IPC: {error}. If "
            "PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True, turn it off for this process"
        ) from error
    return {**fields, "gpu_uuid": describe_device(storage.device)[1]}


def _open_cuda(fields: dict[str, Any], device: torch.device, owner: str) -> torch.Tensor:
    # Opened under the reader's own index, also for another GPU's memory: so it maps over NVLink and this GPU's
    # kernels read it; under the owner's index the copies would run on the owner's GPU.
    given = [fields[name] for name in _CUDA_FIELDS]
    given[0] = device.index
    torch.cuda.init()  # or a process that has not used its GPU yet crashes in the next call
    try:
        storage = torch.UntypedStorage._new_shared_cuda(*given)
    except RuntimeError as error:
        raise PlacementError(
            f"cannot map GPU memory of {owner} on {device}: {error}. Both sides must run on GPUs of one host with peer "
            "access, as the same user, in containers that share --ipc=host and --pid=host"
        ) from error
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _open_file(fields: dict[str, Any], owner: str) -> torch.Tensor:
    path, nbytes = fields["path"], fields["nbytes"]
    if not re.fullmatch(r"/proc/\d+/fd/\d+", path):
        raise ProtocolError(f"{path!r} is no open file of a process")
    try:
        found = os.stat(path)
        if found.st_ino != fields["inode"] or found.st_size < nbytes:
            raise PlacementError(
                f"{path} is another file here than for {owner}. Both sides must be in containers that share --pid=host"
            )
        return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        raise PlacementError(
            f"cannot map shared memory {path} of {owner}: {error}. Both sides must run on one host, as the same user, "
            "in containers that share --ipc=host and --pid=host"
        ) from error
