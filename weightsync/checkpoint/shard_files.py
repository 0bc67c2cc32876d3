"""Write a checkpoint: every rank writes its own regions. Files get their final name when they are complete.

Ranks write with `pwrite`, not through a shared mapping. A mapping is written back in whole pages. Ranks on two hosts of
a network file system would then overwrite each other's bytes at the border of their regions. With a mapping, a failing
disk would kill the trainer by a signal instead of an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from operator import itemgetter
from pathlib import Path

import torch

from weightsync.checkpoint.own_files import discard, opened_plain
from weightsync.checkpoint.safetensors import Shards, runs
from weightsync.errors import PlacementError
from weightsync.planning.grouping import grouped
from weightsync.planning.layout import Manifest, ShardLocation, coverage, itemsize

_SEE_THE_FOLDER = (
    "give all trainer ranks and engine workers the folder of checkpoints under the same path, and the right to read it"
)


def check_whole(manifest: Manifest, locations: Sequence[ShardLocation]) -> None:
    """Raise `PlacementError` unless the ranks together hold each tensor once. Several ranks may hold equal boxes."""
    held = grouped(locations, lambda location: location.name)
    problems = []
    for meta in manifest:
        missing, doubled = coverage(meta.shape, {location.box for location in held.get(meta.name, ())})
        problems += [f"{meta.name}{box} is held by no rank" for box in missing]
        problems += [f"ranks hold {meta.name}{box} in boxes that overlap and differ" for box in doubled]
    if problems:
        raise PlacementError(
            f"the trainer's ranks do not hold the whole model: {'; '.join(problems[:5])}"
            f"{'; ...' if len(problems) > 5 else ''}",
            problems=problems,
        )


def check_seen(incoming: Path, who: str, advice: str = _SEE_THE_FOLDER) -> None:
    """Raise `PlacementError`, with advice, if `who` cannot open the folder that trainer rank 0 has just made."""
    try:
        os.listdir(incoming)
    except OSError as error:
        found = f"{who} cannot open {incoming}, a new folder of trainer rank 0 ({error})"
        raise PlacementError(f"{found}: {advice}") from error


def create(folder: Path, shards: Shards, beside: Mapping[str, bytes]) -> None:
    """Make `folder` with all files at their full sizes, and write everything but the tensors.

    Trainer rank 0 calls this before any rank writes. `beside` has further files by name. Raises `PlacementError`, also
    if there is no room.
    """
    with placement_errors(f"cannot write a checkpoint of {sum(one.nbytes for one in shards.files)} bytes to {folder}"):
        folder.mkdir()
        for shard in shards.files:
            with opened_plain(folder / shard.name, os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
                os.posix_fallocate(fd, 0, shard.nbytes)  # a full disk fails here, before anything is written
                _write_at(fd, memoryview(shard.header), 0)
    write_beside(folder, shards, beside)


def write_beside(folder: Path, shards: Shards, beside: Mapping[str, bytes]) -> None:
    """Write the index and further files by name, in place of all files but the tensors'. Raises `PlacementError`."""
    with placement_errors(f"cannot write to {folder}"):
        for old in {*folder.iterdir()}.difference(folder / shard.name for shard in shards.files):
            discard(old)
        for name, content in {**shards.index, **beside}.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


def write(folder: Path, shards: Shards, regions: Iterable[tuple[ShardLocation, torch.Tensor]]) -> None:
    """Write a rank's regions, in the manifest's dtypes and under all their names. Wait until they are on the disk.

    Then readers on other hosts find them. Raises `PlacementError`.
    """
    with placement_errors(f"cannot write to {folder}"), ExitStack() as stack:
        files: dict[str, int] = {}
        tied = grouped(shards.manifest.tied, itemgetter(1))
        for location, region in regions:
            if not location.box.numel:
                continue
            meta = shards.manifest[location.name]
            values = region.to(device="cpu", dtype=getattr(torch, meta.dtype)).contiguous()
            memory = values.view(-1).view(torch.uint8).numpy().data
            length, starts = runs(meta.shape, location.box)
            nbytes = length * itemsize(meta.dtype)
            for name in (meta.name, *(other for other, _ in tied.get(meta.name, ()))):
                if (file := shards.file_of[name]) not in files:
                    files[file] = stack.enter_context(opened_plain(folder / file, os.O_RDWR))
                for number, start in enumerate(starts):
                    first = shards.in_file[name] + start * itemsize(meta.dtype)
                    _write_at(files[file], memory[number * nbytes : (number + 1) * nbytes], first)
        for fd in files.values():
            os.fdatasync(fd)


def append(path: Path, content: bytes) -> None:
    """Append to a file, and wait until it is on the disk. Raises `PlacementError`."""
    with placement_errors(f"cannot write to {path}"), opened_plain(path, os.O_WRONLY | os.O_APPEND) as fd:
        os.write(fd, content)
        os.fdatasync(fd)


def publish(incoming: Path, target: Path) -> None:
    """Give a complete checkpoint its name, after all of it is on the disk.

    A process that sees the name sees the whole checkpoint, after a crash too. `target` must not exist, or be an empty
    folder. Raises `PlacementError`.
    """
    with placement_errors(f"cannot complete the checkpoint {target}"):
        for path in [*incoming.rglob("*"), incoming]:
            sync_path(path)
        incoming.rename(target)
        sync_path(target.parent.resolve())


def _write_at(fd: int, data: memoryview, at: int) -> None:
    while data:
        done = os.pwrite(fd, data, at)
        data, at = data[done:], at + done


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, if they are missing. Wait until they are on the disk. Raises `OSError`."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_path(folder.parent.resolve())


def sync_path(path: Path) -> None:
    """Wait until a file, or a folder's entries, are on the disk. Raises `OSError`, also for a link."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def placement_errors(what: str) -> Iterator[None]:
    """Raise an `OSError` of the body as a `PlacementError`. `what` begins its message."""
    try:
        yield
    except OSError as error:
        raise PlacementError(f"{what}: {error}") from error
