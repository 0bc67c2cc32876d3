"""Memory of one process that another on this host maps: handles as plain values, and bytes from handles.

GPU memory goes by CUDA IPC. CPU memory that a trainer shares goes as an open file, which has no name and leaves nothing
behind. What weightsync allocates itself has a name until every reader has opened it.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path
from typing import Any, TypeAlias

import torch

from weightsync.control.runtime import describe_device
from weightsync.errors import PlacementError, ProtocolError

SHARED_MEMORY = "/dev/shm"
_FILE = re.compile(r"/dev/shm/weightsync-\d+-[0-9a-f]{16}")
_CUDA_FIELDS = (
    "device", "handle", "nbytes", "offset_bytes", "counter_handle", "counter_offset", "event_handle", "event_sync",
)  # fmt: skip

Handle: TypeAlias = tuple[str, dict[str, Any]]
"""What kind of memory it is, and the fields that open it."""


class SharedFile:
    """A new file in shared memory, private to this user, zeroed and mapped as 1-D uint8 `data`.

    Raises `PlacementError` when there is no room.
    """

    def __init__(self, nbytes: int) -> None:
        self._path = Path(SHARED_MEMORY) / f"weightsync-{os.getpid()}-{secrets.token_hex(8)}"
        fd = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(fd, 0, nbytes)  # a full /dev/shm is an error here, not a crash at the first write
            self.data = torch.from_file(str(self._path), shared=True, size=nbytes, dtype=torch.uint8)
        except (OSError, RuntimeError) as error:
            self.unlink()
            raise PlacementError(
                f"no room for {nbytes} bytes in {SHARED_MEMORY}: {error}; use smaller chunks (max_bytes) or give the "
                "container more shared memory"
            ) from error
        finally:
            os.close(fd)

    def handle(self) -> Handle:
        """Return [kind, fields], for any number of readers."""
        return "shm", {"path": str(self._path), "nbytes": self.data.numel()}

    def unlink(self) -> None:
        """Remove the name. The memory stays for those who have opened it. More than once."""
        self._path.unlink(missing_ok=True)


def export(storage: torch.UntypedStorage) -> Handle:
    """Return [kind, fields] of a storage, for one reader.

    Torch counts a release for each export, and keeps GPU memory until it has come. CPU memory is moved to shared memory
    the first time, to another address, and all tensors in it move too. Raises `PlacementError`.
    """
    if storage.device.type == "cuda":
        return "cuda", _export_cuda(storage)
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
    return "fd", {"path": f"/proc/{os.getpid()}/fd/{fd}", "nbytes": nbytes, "inode": os.fstat(fd).st_ino}


def open_exported(kind: str, fields: dict[str, Any], device: torch.device, owner: str) -> torch.Tensor:
    """Return the bytes of a storage that `owner` has exported, as a 1-D uint8 tensor.

    A GPU's are mapped for `device`, which may be another GPU. Raises `PlacementError` when they cannot be mapped, and
    `ProtocolError` for a path that `export` does not make.
    """
    if kind == "cuda":
        return _open_cuda(fields, device, owner)
    if kind == "fd":
        return _open_file(fields, owner)
    if kind == "shm":
        return _open_named(fields, owner)
    raise ProtocolError(f"{owner} has exported memory of unknown kind {kind!r}")


def _export_cuda(storage: torch.UntypedStorage) -> dict[str, Any]:
    """Return a CUDA IPC handle as plain bytes and integers: what torch sends between processes, without pickling."""
    try:
        fields = dict(zip(_CUDA_FIELDS, map(_as_plain, storage._share_cuda_()), strict=True))
    except RuntimeError as error:
        raise PlacementError(
            f"{storage.nbytes()} bytes on {storage.device} cannot be exported by CUDA IPC: {error}. If "
            "PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True, turn it off for this process"
        ) from error
    return {**fields, "gpu_uuid": describe_device(storage.device)[1]}


def _as_plain(value: Any) -> Any:
    return value.hex() if isinstance(value, bytes) else value


def _open_cuda(fields: dict[str, Any], device: torch.device, owner: str) -> torch.Tensor:
    # Opened under the reader's own index, also for another GPU's memory: so it maps over NVLink and this GPU's
    # kernels read it; under the owner's index the copies would run on the owner's GPU.
    given = [bytes.fromhex(fields[name]) if name.endswith("handle") else fields[name] for name in _CUDA_FIELDS]
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


def _open_named(fields: dict[str, Any], owner: str) -> torch.Tensor:
    path, nbytes = fields["path"], fields["nbytes"]
    if not _FILE.fullmatch(path):
        raise ProtocolError(f"{path!r} is no shared memory of weightsync")
    if (found := _map(path, nbytes, owner, None)) is None:
        raise PlacementError(f"shared memory {path} of {owner} is shorter here than {nbytes} bytes")
    return found


def _open_file(fields: dict[str, Any], owner: str) -> torch.Tensor:
    path = fields["path"]
    if not re.fullmatch(r"/proc/\d+/fd/\d+", path):
        raise ProtocolError(f"{path!r} is no open file of a process")
    if (found := _map(path, fields["nbytes"], owner, fields["inode"])) is None:
        raise PlacementError(
            f"{path} is another file here than for {owner}. Both sides must be in containers that share --pid=host"
        )
    return found


def _map(path: str, nbytes: int, owner: str, inode: int | None) -> torch.Tensor | None:
    """Return a file's bytes, or None where it has another inode or fewer bytes."""
    try:
        found = os.stat(path)
        if found.st_size < nbytes or (inode is not None and found.st_ino != inode):
            return None
        return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        raise PlacementError(
            f"cannot map shared memory {path} of {owner}: {error}. Both sides must run on one host, as the same user, "
            'in containers that share --ipc=host and --pid=host; else use transport="broadcast"'
        ) from error
