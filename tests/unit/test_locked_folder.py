"""A folder with one writer."""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightsync.checkpoint.locked_folder import LockedFolder, VersionFolder
from weightsync.errors import ConfigError, PlacementError


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_one_writer_has_the_folder_until_it_closes_it(tmp_path: Path):
    path = tmp_path / "made" / "anew"
    first = LockedFolder(path, "adapters")
    with pytest.raises(ConfigError, match=f"another trainer writes adapters to {path}"):
        LockedFolder(path, "adapters")
    first.close()
    LockedFolder(path, "adapters").close()


def test_what_a_killed_writer_has_left_goes_and_complete_subfolders_stay(tmp_path: Path):
    for name in (".incoming-0123abcd", ".removed-0123abcd", "version-00000001"):
        (tmp_path / name / "inside").mkdir(parents=True)
    LockedFolder(tmp_path, "checkpoints").close()
    assert names_in(tmp_path) == [".lock", "version-00000001"]


def test_a_folder_that_cannot_be_cleared_is_free_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / ".incoming-0123abcd").mkdir()

    def refuse(*_: object, **__: object) -> None:
        raise OSError("device or resource busy")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        with pytest.raises(PlacementError, match=f"cannot write checkpoints to {tmp_path}: device or resource busy"):
            LockedFolder(tmp_path, "checkpoints")
    LockedFolder(tmp_path, "checkpoints").close()


@pytest.mark.parametrize("ends", ["by the next one", "by close"])
def test_an_incomplete_subfolder_is_removed(ends: str, tmp_path: Path):
    folder = LockedFolder(tmp_path, "checkpoints")
    left = folder.incoming()
    left.mkdir()
    if ends == "by the next one":
        assert folder.incoming() != left
        assert not left.exists()
    folder.close()
    assert names_in(tmp_path) == [".lock"]


def test_files_that_stay_are_removed_with_the_next_subfolder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    folder = LockedFolder(tmp_path, "adapters")
    for name in "ab":
        (tmp_path / name).mkdir()

    def refuse(*_: object, **__: object) -> None:
        raise OSError("a reader has it open")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(shutil, "rmtree", refuse)
        folder.remove(tmp_path / "a")
    assert "a reader has it open" in caplog.text
    assert [name.startswith(".removed-") for name in names_in(tmp_path)] == [False, True, False]  # .lock, a, b
    folder.remove(tmp_path / "b")
    assert names_in(tmp_path) == [".lock"]
    with pytest.raises(FileNotFoundError):
        folder.remove(tmp_path / "b")
    folder.close()


def test_the_newest_versions_are_kept(tmp_path: Path):
    folder = VersionFolder(tmp_path)
    assert folder.newest() == 0
    strange = ["version-000000002", "version-7", "version-00000009", "other"]  # of another form, and a file
    for name in strange[:2] + strange[3:]:
        (tmp_path / name).mkdir()
    (tmp_path / "version-00000009").touch()
    for version in (1, 2, 123456789):
        folder.named(version).mkdir()
    assert folder.newest() == 123456789
    folder.prune(keep_last=2)
    assert names_in(tmp_path) == sorted([".lock", "version-00000002", "version-123456789", *strange])
    folder.close()


def test_a_folder_that_cannot_be_listed_fails_no_push(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    folder = VersionFolder(tmp_path)

    def stale(path: Path) -> Iterator[Path]:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Path, "iterdir", stale)
    folder.prune(keep_last=1)
    assert "Stale file handle" in caplog.text
    folder.close()


def test_a_version_that_cannot_be_removed_keeps_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    folder = VersionFolder(tmp_path)
    for version in (1, 2, 3):
        folder.named(version).mkdir()
    remove = folder.remove

    def busy(path: Path) -> None:
        if path == folder.named(1):
            raise OSError(errno.EBUSY, "Device or resource busy")
        remove(path)

    monkeypatch.setattr(folder, "remove", busy)
    folder.prune(keep_last=1)
    assert names_in(tmp_path) == [".lock", "version-00000001", "version-00000003"]
    assert "cannot remove" in caplog.text
    folder.close()
