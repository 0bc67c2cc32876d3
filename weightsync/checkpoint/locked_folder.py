"""A folder with one writer, the holder of its lock.

    folder/.lock                held by the writer
    folder/.incoming-3f2a9c01   a subfolder that is not complete
    folder/.removed-3f2a9c01    a subfolder that is being removed
    folder/version-00000007     a complete subfolder

The kernel releases the lock when the writer's process ends, in whatever way. So a hidden subfolder that is found under
the lock is rubbish, and is removed. `shard_files.publish` gives a complete subfolder its name. A subfolder loses its
name before its files, so a reader never opens a half of one.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import shutil
from contextlib import AbstractContextManager
from pathlib import Path

from weightsync.checkpoint.own_files import discard, open_plain
from weightsync.checkpoint.shard_files import make_folder, placement_errors
from weightsync.errors import ConfigError
from weightsync.net.wire import MAX_VERSION

logger = logging.getLogger(__name__)

LOCK = ".lock"
_INCOMING = ".incoming-"
_REMOVED = ".removed-"
_VERSION = re.compile(r"version-(\d{8,19})", re.ASCII)


class LockedFolder:
    """A folder that this process alone writes, until `close`. It is made if it is missing.

    content: its content for errors, such as "checkpoints".

    Raises `PlacementError` for an unusable folder, also for a lock that is a link or a pipe, and `ConfigError` for the
    folder of another writer.
    """

    def __init__(self, path: Path, content: str) -> None:
        self.path, self._content = path, content
        with self.errors():
            make_folder(path)
            held = lock(path / LOCK)
            if held is None:
                raise ConfigError(
                    f"another trainer writes {content} to {path}: close its WeightSync first, or use another folder"
                )
            try:
                for left in path.glob(f"{_INCOMING}*"):  # of a killed writer
                    discard(left)
            except OSError:
                unlock(held)
                raise
        self._held, self._incoming = held, path / _INCOMING
        _finish_removals(path)

    def errors(self) -> AbstractContextManager[None]:
        """Return a context that turns an `OSError` into a `PlacementError` about this folder."""
        return placement_errors(f"cannot write {self._content} to {self.path}")

    def incoming(self) -> Path:
        """Return a new path for a subfolder that is not complete. Remove the last one, if it is left."""
        shutil.rmtree(self._incoming, ignore_errors=True)
        self._incoming = self.path / f"{_INCOMING}{secrets.token_hex(4)}"
        return self._incoming

    def remove(self, path: Path) -> None:
        """Remove a complete subfolder. Raises `OSError` if it keeps its name, and logs that files stay."""
        path.rename(path.with_name(f"{_REMOVED}{secrets.token_hex(4)}"))
        _finish_removals(path.parent)

    def close(self) -> None:
        """Remove the incomplete subfolder, and release the lock. Another process may write the folder then."""
        shutil.rmtree(self._incoming, ignore_errors=True)
        unlock(self._held)


class VersionFolder(LockedFolder):
    """A folder of checkpoints, one for each version."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "checkpoints")

    def named(self, version: int) -> Path:
        """Return the path of a version."""
        return self.path / f"version-{version:08}"

    def newest(self) -> int:
        """Return the newest version, or 0. Raises `PlacementError`."""
        with self.errors():
            return max(self._versions(), default=0)

    def prune(self, keep_last: int) -> None:
        """Remove all but the newest versions.

        Failures are logged and not raised: the version just written is complete.
        """
        try:
            found = self._versions()[:-keep_last]
        except OSError as error:
            logger.warning("cannot look for old versions in %s: %s", self.path, error)
            return
        for number in found:
            try:
                self.remove(self.named(number))
            except OSError as error:
                logger.warning("cannot remove %s, which is older than all kept versions: %s", self.named(number), error)

    def _versions(self) -> list[int]:
        """Return the versions in the folder, oldest first. Folders with a name that no push writes are left out."""
        found = {int(match[1]) for path in self.path.iterdir() if (match := _VERSION.fullmatch(path.name))}
        paths = ((number, self.named(number)) for number in sorted(found) if number <= MAX_VERSION)
        return [number for number, path in paths if path.is_dir() and not path.is_symlink()]


def lock(path: Path) -> int | None:
    """Take the lock file `path`, and make it if it is missing. Return None if another process has it.

    The kernel releases the lock when the process ends. Raises `OSError`, also for any link.
    """
    fd = open_plain(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return fd


def unlock(held: int) -> None:
    """Release the descriptor of `lock`."""
    fcntl.flock(held, fcntl.LOCK_UN)  # closing is not enough if a child has the descriptor too
    os.close(held)


def _finish_removals(folder: Path) -> None:
    """Remove the files of all subfolders without a name. Log the files that stay: the next removal tries again."""
    for path in folder.glob(f"{_REMOVED}*"):
        try:
            discard(path)
        except OSError as error:
            logger.warning("cannot remove %s, which no version needs: %s", path, error)
