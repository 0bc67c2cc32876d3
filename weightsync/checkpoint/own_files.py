"""Safe use of paths that other users of the host can guess.

Another user may have put a folder, a link or a pipe there before. Files of other users are neither read nor written nor
removed, and no link is followed.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def is_own_folder(path: Path, owners: Collection[int] = ()) -> bool:
    """Return whether `path` is a folder, not a link, of this user and not writable by others.

    A folder of a user in `owners` also counts, and may be writable by others: this user has chosen that.
    """
    try:
        found = path.lstat()
    except OSError:
        return False
    is_mine = found.st_uid == os.geteuid() and not found.st_mode & _OTHERS_WRITE
    return stat.S_ISDIR(found.st_mode) and (is_mine or found.st_uid in owners)


@contextmanager
def opened_plain(path: Path, flags: int) -> Iterator[int]:
    """Open a plain file, and no link, pipe or device. Does not wait for the other end of a pipe. Raises `OSError`."""
    fd = open_plain(path, flags)
    try:
        yield fd
    finally:
        os.close(fd)


def open_plain(path: Path, flags: int) -> int:
    """Open as `opened_plain` does. Return the descriptor. The caller closes it."""
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "links are not followed: remove it", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a plain file: remove it", str(path))
    return fd


def discard(path: Path) -> None:
    """Remove a folder and its contents, or a link or file itself. Raises `OSError`."""
    if stat.S_ISDIR(path.lstat().st_mode):
        shutil.rmtree(path)
    else:  # `rmtree` would open a pipe, and wait for its other end
        path.unlink()
