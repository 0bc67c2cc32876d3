"""Memory shared between processes of one host: handles as plain values, and tensors from handles.

GPU memory travels by CUDA IPC. CPU memory travels as an open file without a name. Such a file leaves nothing behind,
even if its users are killed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
from typing import Annotated, Any, BinaryIO, TypeAlias

import torch
from msgspec import Meta, Struct
from msgspec.structs import asdict
from torch.multiprocessing.reductions import StorageWeakRef, shared_cache, storage_from_cache

from weightsync.errors import PlacementError, ProtocolError
from weightsync.net.runtime import describe_device
from weightsync.net.wire import typed
from weightsync.planning.layout import Count

SHARED_MEMORY = "/dev/shm"
_MAP_FIXED = 0x10
"""The kernel's flag. Python's `mmap` does not have it."""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]

_EXPANDABLE = (
    "an expandable segment of torch's allocator, and few processes may map it. Start the trainer without "
    "expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF, switch it off while the model's memory is allocated, or use "
    'transport="broadcast"'
)
_EXPANDABLE_TAG = b"e"
"""The second byte of torch's handle for such memory. The first is its version."""


class OpenFileHandle(Struct, frozen=True, forbid_unknown_fields=True):
    """An open file of a process, without a name: a `SharedFile`, or memory shared by torch."""

    pid: Count
    fd: Count
    nbytes: Count
    inode: Count


Hex = Annotated[str, Meta(pattern=r"^([0-9a-f]{2})*\Z")]


class CudaHandle(Struct, frozen=True, forbid_unknown_fields=True):
    """A CUDA IPC handle: torch's fields for another process, and the GPU of the memory."""

    device: Count
    handle: Hex
    nbytes: Count
    offset_bytes: Count
    counter_handle: Hex
    counter_offset: Count
    event_handle: Hex
    event_sync: bool
    gpu_uuid: str


Handle: TypeAlias = tuple[str, dict[str, Any]]
"""The kind of memory, and the fields that open it."""


class SharedFile:
    """A new file in shared memory, private to this user, zeroed and mapped as 1-D uint8 `data`. It never has a name.

    Raises `PlacementError` if there is no room, or no such memory.
    """

    def __init__(self, nbytes: int) -> None:
        file: BinaryIO | None = None
        try:
            fd = os.open(SHARED_MEMORY, os.O_TMPFILE | os.O_RDWR, 0o600)
            file = os.fdopen(fd, "rb")
            os.posix_fallocate(fd, 0, nbytes)  # a full /dev/shm raises here, and would otherwise crash the first write
            self.data = torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=nbytes, dtype=torch.uint8)
        except (OSError, RuntimeError) as error:
            if file is not None:
                file.close()
            raise PlacementError(
                f"no room for {nbytes} bytes in {SHARED_MEMORY}: {error}; use smaller chunks (max_bytes), or give the "
                "container a writable tmpfs there with more memory"
            ) from error
        self._file = file

    def handle(self) -> Handle:
        """Return [kind, fields], for any number of readers, until `close`."""
        return _open_file(self.fileno(), self.data.numel())

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        """Close the file: no further process can open it. Existing mappings stay. May be called again."""
        self._file.close()


def export(storage: torch.UntypedStorage) -> Handle:
    """Return [kind, fields] of a storage, for one reader.

    torch expects a release for each export, and keeps GPU memory until then. The first export of CPU memory moves it,
    and all tensors in it, to shared memory at another address. Raises `PlacementError`.
    """
    if storage.device.type == "cuda":
        return "cuda", asdict(_export_cuda(storage))
    if not storage.is_shared():
        info = os.statvfs(SHARED_MEMORY)
        if (free := info.f_bavail * info.f_frsize) < storage.nbytes():
            raise PlacementError(
                f"no room for {storage.nbytes()} bytes in {SHARED_MEMORY}, which has {free} left; give the container "
                "more shared memory"
            )
    fd, nbytes = storage._share_fd_cpu_()
    if fd < 0:
        raise PlacementError(f"cannot export {nbytes} bytes of a file closed by torch; copy them to memory")
    return _open_file(fd, nbytes)


def _open_file(fd: int, nbytes: int) -> Handle:
    # The inode guards readers in another PID namespace: there the same numbers may name another file.
    return "fd", asdict(OpenFileHandle(os.getpid(), fd, nbytes, os.fstat(fd).st_ino))


def take_back(storage: torch.UntypedStorage) -> None:
    """Replace the memory of an exported CPU storage by a private copy, at the same address.

    Processes that have mapped the storage keep the old memory, and no longer share it. Raises `PlacementError` if there
    is no room.
    """
    fd, nbytes = storage._share_fd_cpu_()
    other = SharedFile(nbytes)
    other.data.untyped_storage().copy_(storage)
    os.dup2(other.fileno(), fd, inheritable=False)  # torch's next export uses this descriptor
    other.close()
    address, shared_and_fixed = storage.data_ptr(), mmap.MAP_SHARED | _MAP_FIXED
    if _libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, shared_and_fixed, fd, 0) != address:
        raise PlacementError(
            f"{nbytes} bytes at {address:#x} cannot be mapped again: {os.strerror(ctypes.get_errno())}"
        )


def open_exported(kind: str, fields: dict[str, Any], device: torch.device, owner: str) -> torch.Tensor:
    """Return the bytes of a storage exported by `owner`, as a 1-D uint8 tensor.

    GPU memory is mapped for `device`, even if it is on another GPU. Raises `PlacementError` for memory that cannot be
    mapped, or was not exported by this user. Raises `ProtocolError` for other fields.
    """
    if kind == "cuda":
        return _open_cuda(typed(fields, CudaHandle), device, owner)
    if kind == "fd":
        return _map(typed(fields, OpenFileHandle), owner)
    raise ProtocolError(f"{owner} has exported memory of unknown kind {kind!r}")


def _export_cuda(storage: torch.UntypedStorage) -> CudaHandle:
    try:
        given = storage._share_cuda_()
    except RuntimeError as error:
        what_to_do = f"They lie in {_EXPANDABLE}" if is_expandable(storage) else 'Use transport="broadcast"'
        raise PlacementError(
            f"{storage.nbytes()} bytes on {storage.device} cannot be exported by CUDA IPC: {error}. {what_to_do}"
        ) from error
    shared_cache[given[1], given[3]] = StorageWeakRef(storage)  # readers in this process cannot open the handle
    plain = [each.hex() if isinstance(each, bytes) else each for each in (*given, describe_device(storage.device)[1])]
    return typed(dict(zip(CudaHandle.__struct_fields__, plain, strict=True)), CudaHandle)


def is_expandable(storage: torch.UntypedStorage) -> bool:
    """Return whether a GPU storage lies in an expandable segment of torch's allocator. Snapshots all segments."""
    for segment in torch.cuda.memory_snapshot():
        if segment["address"] <= storage.data_ptr() < segment["address"] + segment["total_size"]:
            return bool(segment.get("is_expandable"))
    return False


def _open_cuda(fields: CudaHandle, device: torch.device, owner: str) -> torch.Tensor:
    # Open under the reader's own index, even for another GPU's memory. The memory then maps over NVLink, and this GPU's
    # kernels read it. Under the owner's index the copies would run on the owner's GPU.
    handle, counter, event = map(bytes.fromhex, (fields.handle, fields.counter_handle, fields.event_handle))
    given = handle, fields.nbytes, fields.offset_bytes, counter, fields.counter_offset, event, fields.event_sync
    torch.cuda.init()  # or the next call crashes in a process without a CUDA context
    own = storage_from_cache(torch.UntypedStorage, (handle, fields.offset_bytes))
    if own is not None and own.device == device:
        torch.UntypedStorage._release_ipc_counter(counter, fields.counter_offset, device=device)
        return torch.empty(0, dtype=torch.uint8, device=device).set_(own)
    try:
        storage = torch.UntypedStorage._new_shared_cuda(device.index, *given)
    except RuntimeError as error:
        what_to_do = (
            "Both sides must run on GPUs of one host with peer access, as the same user, in containers that share "
            "--ipc=host and --pid=host"
        )
        if handle[1:2] == _EXPANDABLE_TAG:
            what_to_do = f"It lies in {_EXPANDABLE}"
        raise PlacementError(f"cannot map GPU memory of {owner} on {device}: {error}. {what_to_do}") from error
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _map(fields: OpenFileHandle, owner: str) -> torch.Tensor:
    """Return the bytes of an exported file. Check first that it is the exported one, and has no name."""
    path = f"/proc/{fields.pid}/fd/{fields.fd}"
    try:
        # O_PATH has no side effects: a full open could act on a device.
        fd = os.open(path, os.O_PATH)
        try:
            found = os.fstat(fd)
            same = stat.S_ISREG(found.st_mode) and (found.st_ino, found.st_nlink) == (fields.inode, 0)
            if not same or found.st_uid != os.geteuid() or found.st_size < fields.nbytes:
                raise PlacementError(
                    f"{path} is not the memory exported by {owner}, or is another user's. Both sides must run as the "
                    "same user, in containers that share --ipc=host and --pid=host"
                )
            return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=fields.nbytes, dtype=torch.uint8)
        finally:
            os.close(fd)
    except (OSError, RuntimeError) as error:
        raise PlacementError(
            f"cannot map shared memory {path} of {owner}: {error}. Both sides must run on one host, as the same user, "
            'in containers that share --ipc=host and --pid=host; else use transport="broadcast"'
        ) from error
