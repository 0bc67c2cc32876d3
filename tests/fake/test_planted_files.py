"""What another user of the host has put where weightsync looks: it is neither followed, nor adopted, nor waited for."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine import FakeEngine, ModuleHost, TinyEngineModel, checkpoint, trainer_model
from test_forks import in_a_fork
from test_lora import wrapped
from test_lora_transport import FakeEngine as AdapterEngine
from test_lora_transport import memory

import weightsync
from weightsync import (
    CheckpointTransport,
    ConfigError,
    LoraTransport,
    PlacementError,
    SingleCopyTransport,
    WeightSync,
    WeightSyncError,
)
from weightsync.checkpoint.locked_folder import lock, unlock
from weightsync.transports import handle_file

OTHER = 65534
ADAPTER = "policy-7-0123abcd"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's files")

__all__ = ["memory"]


def plant(folder: Path, mode: int = 0o755) -> Path:
    """Make another user's folder with an adapter in it."""
    (folder / ADAPTER).mkdir(parents=True)
    (folder / ADAPTER / "adapter_config.json").write_text("{}")
    for path in (*folder.rglob("*"), folder):
        os.chown(path, OTHER, OTHER)
    folder.chmod(mode)
    return folder


def push_adapter(folder: Path | None = None) -> str:
    """Return the name of the adapter that a trainer has pushed."""
    engine = AdapterEngine()
    with WeightSync("fsdp", LoraTransport(folder=folder), engine) as sync:
        sync.push(wrapped("linear", torch.float32))
        assert sync.adapter is not None
        assert engine.log[0] == f"load {sync.adapter.name}"
        return sync.adapter.name


@as_root
@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_a_folder_of_another_user_in_memory_is_left_alone(memory: Path, tmp_path: Path, mode: int) -> None:
    outside = tmp_path / "outside"
    planted = plant(memory / "weightsync-lora-planted", mode)
    (planted / ".lock").symlink_to(outside)
    (memory / "weightsync-lora-link").symlink_to(planted)
    (memory / "weightsync-lora-dangling").symlink_to(tmp_path / "nothing")
    (memory / "weightsync-lora-file").write_text("")
    assert push_adapter().startswith("policy-1-")
    assert not outside.exists(), "a lock is made where the link leads"
    assert (planted / ADAPTER / "adapter_config.json").exists()
    assert len(os.listdir(memory)) == 4, "the trainer's own folder is given back"


@as_root
def test_what_others_may_write_is_not_adopted_though_it_is_the_users_own(memory: Path) -> None:
    own = memory / "weightsync-lora-own"
    (own / ADAPTER).mkdir(parents=True)
    own.chmod(0o777)
    push_adapter()
    assert (own / ADAPTER).exists()


def test_what_an_earlier_trainer_of_the_user_has_left_in_memory_goes(memory: Path, tmp_path: Path) -> None:
    own = memory / "weightsync-lora-own"
    own.mkdir(mode=0o700)
    (own / ADAPTER).mkdir()
    (own / "policy-8-0123abcd").symlink_to(tmp_path / "nothing")
    (own / "policy-9-0123abcd").mkdir()
    os.mkfifo(own / ".removed-pipe")
    push_adapter()
    assert not (own / "policy-9-0123abcd").exists()
    assert os.listdir(memory) in ([], ["weightsync-lora-own"])


def test_links_and_pipes_in_a_folder_of_adapters_stop_no_push(tmp_path: Path) -> None:
    folder, outside = tmp_path / "run", tmp_path / "outside"
    outside.mkdir()
    folder.mkdir()
    os.mkfifo(folder / ".removed-1")
    os.mkfifo(folder / ADAPTER)
    (folder / ".incoming-1").symlink_to(outside)
    (folder / "policy-9-0123abcd").symlink_to(outside)
    (folder / "policy-8-0123abcd").symlink_to(tmp_path / "nothing")
    assert push_adapter(folder).startswith("policy-1-")
    assert outside.exists()
    assert sorted(path.name for path in folder.glob(".*")) == [".lock"]


@as_root
def test_adapters_of_another_user_in_a_folder_of_the_users_are_not_adopted(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    plant(folder)
    os.chown(folder, os.geteuid(), os.getegid())
    assert push_adapter(folder).startswith("policy-1-")
    assert (folder / ADAPTER).exists()


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "folder"])
@pytest.mark.parametrize("transport", [LoraTransport, CheckpointTransport])
def test_a_lock_is_a_file_of_its_own(transport: type, kind: str, tmp_path: Path) -> None:
    folder, outside = tmp_path / "run", tmp_path / "outside"
    folder.mkdir()
    at = folder / ".lock"
    if kind == "link":
        outside.write_text("")
    if "link" in kind:
        at.symlink_to(outside)
    else:
        os.mkfifo(at) if kind == "pipe" else at.mkdir()
    engine = AdapterEngine() if transport is LoraTransport else FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1)))
    model = wrapped("linear", torch.float32) if transport is LoraTransport else trainer_model(checkpoint(2))
    with WeightSync("fsdp", transport(folder=folder), engine, timeout_s=60.0) as sync:
        with pytest.raises(PlacementError, match=r"cannot write .*\.lock"):
            sync.push(model)
        assert outside.exists() is (kind == "link")
        at.rmdir() if kind == "folder" else at.unlink()
        sync.push(model)
    if isinstance(engine, FakeEngine):
        engine.close()


def test_a_pipe_or_a_link_among_versions_is_removed_and_not_followed(tmp_path: Path) -> None:
    folder, outside = tmp_path / "run", tmp_path / "outside"
    outside.mkdir()
    folder.mkdir()
    (folder / ".incoming-1").symlink_to(outside)
    os.mkfifo(folder / ".incoming-2")
    os.mkfifo(folder / ".removed-1")
    engine = FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1)))
    with WeightSync("fsdp", CheckpointTransport(folder), engine, timeout_s=60.0) as sync:
        sync.push(trainer_model(checkpoint(2)))
    assert outside.exists()
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "version-00000001"]
    engine.close()


def test_a_lock_that_is_taken_is_none(tmp_path: Path) -> None:
    held = lock(tmp_path / ".lock")
    assert held is not None
    assert lock(tmp_path / ".lock") is None
    unlock(held)


# ---------------------------------------------------------------------------------------------------------------
# Handle files


def handle_file_at(path: Path) -> Path:
    handle_file.write(path, "m", None, 1, [handle_file.WorkerHandles(0, os.getpid(), 1, "e", "cpu", "", {})])
    return path


@pytest.mark.parametrize("kind", ["pipe", "link", "dangling link", "folder", "others may write", "another user's"])
def test_a_handle_file_is_a_plain_file_of_the_users_own(kind: str, tmp_path: Path) -> None:
    if kind == "another user's" and os.geteuid() != 0:
        pytest.skip("only root can make another user's files")
    path = tmp_path / handle_file.FILE
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "link":
            path.symlink_to(handle_file_at(tmp_path / "other"))
        case "dangling link":
            path.symlink_to(tmp_path / "nothing")
        case "folder":
            path.mkdir()
        case "others may write":
            handle_file_at(path).chmod(0o666)
        case _:
            os.chown(handle_file_at(path), OTHER, OTHER)
    with pytest.raises(PlacementError, match=r"cannot read|is not trusted"):
        handle_file.read(path)
    handle_file.remove(path)
    assert path.is_symlink() or path.exists()
    if kind != "dangling link":
        with pytest.raises(PlacementError):
            SingleCopyTransport(path).engine_url()


@pytest.mark.parametrize("kind", ["link", "dangling link", "file", "others may write", "another user's"])
def test_a_runtime_folder_is_the_users_own(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "another user's" and os.geteuid() != 0:
        pytest.skip("only root can make another user's files")
    monkeypatch.delenv("LOGDIR", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(handle_file.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = tmp_path / f"weightsync-{os.getuid()}"
    if "link" in kind:
        (tmp_path / "target").mkdir()
        folder.symlink_to(tmp_path / ("target" if kind == "link" else "nothing"))
    elif kind == "file":
        folder.write_text("")
    else:
        folder.mkdir()
        folder.chmod(0o777 if kind == "others may write" else 0o755)
        if kind == "another user's":
            os.chown(folder, OTHER, OTHER)
    with pytest.raises(ConfigError, match="set LOGDIR"):
        handle_file.place_to_write()
    folder.rmdir() if folder.is_dir() and not folder.is_symlink() else folder.unlink()
    assert handle_file.place_to_write() == folder / handle_file.FILE


# ---------------------------------------------------------------------------------------------------------------
# What this user may not read


def refused(call: Callable[[], Any]) -> str:
    """Return the kind and the text of the error of ours that a call ends in."""
    try:
        return f"returned {call()}"
    except WeightSyncError as error:
        return f"{type(error).__name__} {error}"
    except Exception as error:
        return f"raw {error!r}"


def unreadable(folder: Path) -> dict[str, str]:
    """Return what calls of a user say that may not look into `folder`."""
    os.environ.pop("XDG_RUNTIME_DIR", None)
    os.environ["LOGDIR"] = str(folder / "logs")
    said = {"find in LOGDIR": refused(handle_file.find)}
    os.environ.pop("LOGDIR")
    os.environ["XDG_RUNTIME_DIR"] = str(folder / "run")
    said |= {"find": refused(handle_file.find), "place": refused(handle_file.place_to_write)}
    said["named"] = refused(lambda: SingleCopyTransport(folder / "file").engine_url())
    said["save"] = refused(lambda: weightsync.save(trainer_model(checkpoint(2)), folder / "saved"))
    return said


@as_root
def test_a_folder_that_the_user_may_not_read_is_an_error_of_ours(tmp_path: Path) -> None:
    folder = tmp_path / "private"
    folder.mkdir(mode=0o700)
    for parent in folder.parents:
        if parent.is_relative_to(tempfile.gettempdir()) and parent != Path(tempfile.gettempdir()):
            parent.chmod(0o755)
    refused(lambda: weightsync.save(trainer_model(checkpoint(2)), tmp_path / "first"))  # imports what it needs

    def as_other() -> str:
        os.setuid(OTHER)
        return json.dumps(unreadable(folder))

    said = json.loads(in_a_fork(as_other))
    kinds = {name: text.split()[0] for name, text in said.items()}
    expected = dict.fromkeys(("find in LOGDIR", "find", "place", "named"), "ConfigError") | {"save": "PlacementError"}
    assert kinds == expected, said


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_a_file_of_addresses_that_is_none_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "engines"
    os.mkfifo(path) if kind == "pipe" else path.mkdir()
    with (
        WeightSync("fsdp", "ipc", path) as sync,
        pytest.raises(ConfigError, match="cannot read the engines' addresses"),
    ):
        sync.push(trainer_model(checkpoint(2)))
