"""Checkpoints of a job: the state of its workers, and the values with which the controller goes on.

    FOLDER/00000007/Policy/...         as `Worker.save_state` of the role "Policy" has written it
    FOLDER/00000007/job.json           the controller's values
    FOLDER/00000008.partial            a checkpoint in progress, or the remains of one

A checkpoint gets its name when all its files are on the disk.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightsync.checkpoint.shard_files import make_folder, sync_path
from weightsync.errors import ConfigError
from weightsync.hybrid.worker_group import WorkerGroup

_STATE, _PARTIAL = "job.json", ".partial"


@dataclass(frozen=True)
class SavedJob:
    """A checkpoint of a job.

    Attributes:
        path: Its folder.
        state: The values of the controller.
    """

    path: Path
    state: dict[str, Any]

    def load(self, *groups: WorkerGroup) -> None:
        """Give the workers of these groups their saved states.

        Raises `ConfigError` for a role without a saved state. Raises the errors of `Worker.load_state`.
        """
        missing = [group.role for group in groups if not (self.path / group.role).is_dir()]
        if missing:
            saved = sorted(each.name for each in self.path.iterdir() if each.is_dir())
            raise ConfigError(f"{self.path} has no state of {', '.join(missing)}; it has {', '.join(saved)}")
        for group in groups:
            group.call_all("load_state", self.path / group.role)


def save_job(folder: str | Path, state: Mapping[str, Any], *groups: WorkerGroup, keep: int = 2) -> SavedJob:
    """Save the state of a job, and delete older checkpoints.

    One job writes to a folder. A crash at any time leaves the older checkpoints.

    Args:
        folder: A folder that all nodes share.
        state: The values with which the controller goes on, as JSON: versions, the position in the data.
        *groups: The groups with workers to save. Their class has `save_state` and `load_state`.
        keep: The number of checkpoints in the folder afterwards.

    Returns:
        The checkpoint.

    Raises:
        ConfigError: A value is not JSON, `keep` is less than 1, or a worker's node does not share the folder.
        WeightSyncError: As for a call of a `WorkerGroup`. Or the failure of an earlier `remote` call, if no `result()`
            has raised it.
    """
    try:
        text = json.dumps(dict(state), indent=2)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the state of a job must be JSON, and {error}: convert it first") from error
    if keep < 1:
        raise ConfigError(f"keep={keep}; expected at least 1, because the new checkpoint is one")
    for group in groups:
        group.processes.check_steps("the checkpoint")
    folder = Path(folder).absolute()  # workers have other working directories
    make_folder(folder)
    for remains in folder.glob(f"*{_PARTIAL}"):
        shutil.rmtree(remains)
    older = _checkpoints(folder)
    path = folder / f"{int(older[-1].name) + 1 if older else 1:08}"
    partial = path.with_suffix(f".{secrets.token_hex(4)}{_PARTIAL}")  # no node has one of this name from before
    partial.mkdir()
    for group in groups:
        (partial / group.role).mkdir()
        group.call_all("check_folder", partial / group.role)
    for group in groups:
        group.call_all("save_state", partial / group.role)
    (partial / _STATE).write_text(text)
    for each in (*partial.rglob("*"), partial):
        if not each.is_symlink():
            sync_path(each)
    partial.rename(path)
    sync_path(folder.resolve())
    for each in [*older, path][:-keep]:
        shutil.rmtree(each)
    return SavedJob(path, dict(state))


def newest_job(folder: str | Path) -> SavedJob | None:
    """Return the newest checkpoint in a folder, or None if there is none."""
    found = _checkpoints(Path(folder).absolute())
    return SavedJob(found[-1], json.loads((found[-1] / _STATE).read_text())) if found else None


def _checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints, the oldest first."""
    return sorted(each for each in folder.glob("*") if re.fullmatch(r"\d{8}", each.name))
