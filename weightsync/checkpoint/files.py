"""Writing a checkpoint: every rank its own regions, into files that get their last name when they are complete.

Ranks write with `pwrite`, not through a shared mapping: a mapping is written back in whole pages, so that ranks on two
hosts of a network file system would undo each other's bytes where their regions meet, and a disk that fails would
end the trainer by a signal instead of an error.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from weightsync.checkpoint.shards import INDEX, Shards, runs
from weightsync.errors import PlacementError
from weightsync.kernels.digest import digest
from weightsync.layout import Box, Manifest, Placement, coverage, itemsize

logger = logging.getLogger(__name__)

_VERSION = re.compile(r"version-(\d{8,})")
_REMOVED = ".removed-"
_MOST_DIGESTS = 16
"""Of one region. Columns of a large matrix are thousands of runs, of which each would take longer to look at than to
write; what is late or misplaced is so in all of them."""


def check_whole(manifest: Manifest, placements: Sequence[Placement]) -> None:
    """Raise `PlacementError` when the ranks together do not hold each tensor once, though perhaps in equal boxes on
    several ranks."""
    boxes: dict[str, set[Box]] = {meta.name: set() for meta in manifest}
    problems = []
    for placement in placements:
        boxes[placement.name].add(placement.box)
    for meta in manifest:
        missing, doubled = coverage(meta.shape, boxes[meta.name])
        problems += [f"{meta.name}{box} is held by no rank" for box in missing]
        problems += [f"{meta.name}{box} is held in boxes that overlap without being the same" for box in doubled]
    if problems:
        raise PlacementError(
            f"the trainer's ranks do not hold the whole model: {'; '.join(problems[:5])}"
            f"{'; ...' if len(problems) > 5 else ''}",
            problems=problems,
        )


def check_seen(incoming: Path, who: str) -> None:
    """Raise `PlacementError` when `who` cannot open the folder that trainer rank 0 has just made."""
    try:
        os.listdir(incoming)
    except OSError as error:
        raise PlacementError(
            f"{who} cannot open {incoming}, which trainer rank 0 has just made ({error}): all trainer ranks and engine "
            "workers must see the folder of checkpoints under the same path, and may read it"
        ) from error


def create(folder: Path, shards: Shards, beside: Mapping[str, bytes]) -> None:
    """Trainer rank 0, before any rank writes: make `folder`, and in it the files at their full sizes, with all that
    they hold but the tensors. `beside` has further files by name. Raises `PlacementError`, also when there is no
    room."""
    with _io(f"cannot write a checkpoint of {sum(shard.nbytes for shard in shards.files)} bytes to {folder}"):
        folder.mkdir()
        for shard in shards.files:
            with _opened(folder / shard.name, os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
                os.posix_fallocate(fd, 0, shard.nbytes)  # a full disk is an error here, before anything is loaded
                _write_at(fd, memoryview(shard.header), 0)
        for name, content in ({} if shards.index is None else {INDEX: shards.index}).items() | beside.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


def spans(shards: Shards, region: Placement) -> list[tuple[int, int]]:
    """What `write` gives digests of: the first byte in its bucket and the bytes of each run of `region`, or of some of
    them where these are many, as of columns."""
    if not region.box.numel:
        return []
    meta = shards.manifest[region.name]
    length, starts = runs(meta.shape, region.box)
    size, first = itemsize(meta.dtype), shards.in_bucket[region.name]
    return [(first + start * size, length * size) for start in starts[:: _every(starts)]]


def _every(starts: Sequence[int]) -> int:
    return -(-len(starts) // _MOST_DIGESTS)


def write(
    folder: Path, shards: Shards, bucket: int, regions: Iterable[tuple[Placement, torch.Tensor]], part: int | None
) -> list[int]:
    """Write a rank's regions of a bucket, in the manifest's dtypes, and wait until they are on the disk: so readers on
    other hosts find them too. Gives the digest of `part` of each of their `spans`, or nothing with `part` None. Raises
    `PlacementError`."""
    digests: list[int] = []
    shard = shards.files[shards.buckets[bucket].shard]
    with _io(f"cannot write to {folder / shard.name}"), _opened(folder / shard.name, os.O_RDWR) as fd:
        for placement, region in regions:
            if not placement.box.numel:
                continue
            meta = shards.manifest[placement.name]
            values = region.to(device="cpu", dtype=getattr(torch, meta.dtype)).contiguous()
            data = values.view(-1).view(torch.uint8)
            memory = memory_of(data)
            length, starts = runs(meta.shape, placement.box)
            nbytes, every = length * itemsize(meta.dtype), _every(starts)
            for number, start in enumerate(starts):
                at, first = number * nbytes, start * itemsize(meta.dtype)
                _write_at(fd, memory[at : at + nbytes], shards.in_file[meta.name] + first)
                if part is not None and number % every == 0:
                    digests.append(digest(data[at : at + nbytes], part))
        os.fdatasync(fd)
    return digests


def publish(incoming: Path, target: Path) -> None:
    """Give a complete checkpoint its name, once it is on the disk; whoever sees the name sees all of it, and so it is
    after a crash. `target` must not exist, or be an empty folder. Raises `PlacementError`."""
    with _io(f"cannot complete the checkpoint {target}"):
        for path in [*incoming.rglob("*"), incoming]:
            _sync(path)
        incoming.rename(target)
        _sync(target.parent)


def lock(path: Path) -> int | None:
    """Take the lock file `path`, which is made when it is missing; None when another process has it. A process that
    ends lets go of it. Raises `OSError`."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return fd


def unlock(held: int) -> None:
    """Let go of what `lock` gave."""
    fcntl.flock(held, fcntl.LOCK_UN)  # closing is not enough when a child of this process has it too
    os.close(held)


def version_name(version: int) -> str:
    return f"version-{version:08}"


def versions(folder: Path) -> dict[int, Path]:
    """The versions in a folder, by number."""
    found = {path: _VERSION.fullmatch(path.name) for path in folder.iterdir()}
    return {int(match[1]): path for path, match in found.items() if match and path.is_dir() and not path.is_symlink()}


def prune(folder: Path, keep_last: int) -> None:
    """Remove all but the newest versions; each loses its name before its files. What cannot be removed is logged: the
    version that was just written is complete nevertheless."""
    found = versions(folder)
    for number in sorted(found)[:-keep_last]:
        with _logged(found[number]):
            found[number].rename(folder / f"{_REMOVED}{secrets.token_hex(4)}")
    for path in folder.glob(f"{_REMOVED}*"):
        with _logged(path):
            shutil.rmtree(path)


@contextmanager
def _logged(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        logger.warning("cannot remove %s, which is older than the versions that are kept: %s", path, error)


def memory_of(data: torch.Tensor) -> memoryview:
    """The bytes of a contiguous 1-D uint8 tensor on a CPU. They keep it alive."""
    memory = (ctypes.c_ubyte * data.numel()).from_address(data.data_ptr())
    memory.tensor = data  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def _write_at(fd: int, data: memoryview, at: int) -> None:
    while data:
        done = os.pwrite(fd, data, at)
        data, at = data[done:], at + done


def _sync(path: Path) -> None:
    with _opened(path, os.O_RDONLY) as fd:
        os.fsync(fd)


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _io(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PlacementError(f"{what}: {error}") from error
