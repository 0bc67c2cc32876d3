"""Which transport a name stands for, and which memory a worker may map."""

from __future__ import annotations

import ast
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from tcp_transport import TcpReceiver, TcpTransport

from weightsync import transports
from weightsync.errors import ConfigError, PlacementError, ProtocolError
from weightsync.net.runtime import Deadline
from weightsync.transports import GROUP, members, open_receiver, open_transport, shared_handles
from weightsync.transports.base import LocalTensors
from weightsync.transports.files import FilesReceiver
from weightsync.transports.ipc import IpcReceiver, IpcTransport, filled
from weightsync.transports.nccl import NcclReceiver, NcclTransport
from weightsync.transports.shared_handles import SharedFile, export, open_exported

CPU = torch.device("cpu")
INVITATION = {"place": ["127.0.0.1", 1, "x"], "size": 4, "device": "cpu", "rank": 2}
ENDS = (lambda name: TcpTransport()), TcpReceiver


@pytest.mark.parametrize(
    ("name", "transport", "receiver"),
    [
        ("ipc", IpcTransport, IpcReceiver),
        ("cuda_ipc", IpcTransport, IpcReceiver),
        ("broadcast", NcclTransport, NcclReceiver),
        ("nccl", NcclTransport, NcclReceiver),
    ],
)
def test_open_transport_of_a_name_gives_the_end_whose_receiver_has_that_name(name: str, transport: Any, receiver: Any):
    opened = open_transport(name)
    assert (type(opened), opened.name) == (transport, name)
    assert type(open_receiver(opened.name, CPU)) is receiver


def test_open_receiver_of_checkpoint_reads_files_though_its_transport_needs_a_folder():
    assert isinstance(open_receiver("checkpoint", CPU), FilesReceiver)
    with pytest.raises(ConfigError, match=r"needs a folder: pass transport=weightsync.CheckpointTransport\(folder\)"):
        open_transport("checkpoint")


def test_open_transport_of_an_instance_gives_it_back():
    own = IpcTransport("ipc")
    assert open_transport(own) is own


@pytest.mark.parametrize("transport", ["carrier pigeon", 5, None])
def test_open_transport_of_what_is_none_raises_what_there_is(transport: Any):
    with pytest.raises(ConfigError, match=f'"ipc", "broadcast".*{GROUP}'):
        open_transport(transport)


def test_open_receiver_of_an_unknown_name_raises_what_to_install():
    with pytest.raises(ProtocolError, match=r"'carrier pigeon', and this engine has none of that name; install"):
        open_receiver("carrier pigeon", CPU)


def test_open_transport_of_an_entry_point_gives_both_of_its_ends(monkeypatch: pytest.MonkeyPatch):
    point = EntryPoint("tcp", f"{__name__}:ENDS", GROUP)
    monkeypatch.setattr(
        transports, "entry_points", lambda group, name: [point] if (group, name) == (GROUP, "tcp") else []
    )
    assert isinstance(open_transport("tcp"), TcpTransport)
    assert isinstance(open_receiver("tcp", CPU), TcpReceiver)


@pytest.fixture
def file() -> Iterator[SharedFile]:
    made = SharedFile(4096)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        *(("fd", {"pid": pid}) for pid in ["self", "1/../2", -1, True, 1.0]),
        ("fd", {"path": "/proc/self/fd/0"}),
        ("fd", {"nbytes": -1}),
        ("fd", {"inode": None}),
        ("shm", {}),
        ("cuda", {}),
        ("file", {}),
    ],
)
def test_fields_that_weightsync_does_not_make_are_refused(file: SharedFile, kind: str, changes: dict[str, Any]):
    fields = file.handle()[1]
    with pytest.raises(ProtocolError, match=r"sent no \w+Handle|unknown kind"):
        open_exported(kind, {**fields, **changes}, CPU, "trainer rank 0")


def test_a_shared_file_is_seen_as_its_owner_writes_it_also_when_it_is_closed(file: SharedFile):
    kind, fields = file.handle()
    assert stat.S_IMODE(os.stat(f"/proc/self/fd/{fields['fd']}").st_mode) == 0o600
    mapped = open_exported(kind, fields, CPU, "trainer rank 0")
    for wrong in ({"nbytes": 8192}, {"inode": fields["inode"] + 1}):
        with pytest.raises(PlacementError, match="is not the memory exported by trainer rank 0"):
            open_exported(kind, {**fields, **wrong}, CPU, "trainer rank 0")
    file.close()
    file.close()  # more than once
    file.data.fill_(7)
    assert mapped.eq(7).all()
    with pytest.raises(PlacementError, match="cannot map shared memory"):
        open_exported(kind, fields, CPU, "trainer rank 0")


OWNER = """
import os, sys
from weightsync.transports.shared_handles import SharedFile
files = [SharedFile(4096), SharedFile(8192)]
files[0].data.fill_(7)
print([file.handle() for file in files], flush=True)
sys.stdin.read()
"""


def test_nothing_is_left_in_shared_memory_of_a_process_that_is_killed():
    with subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        handles = ast.literal_eval(owner.stdout.readline().decode())
        mapped = [open_exported(*handle, CPU, "trainer rank 0") for handle in handles]
        owner.kill()
    assert mapped[0].eq(7).all(), "what is mapped stays"
    assert not {fields["inode"] for _, fields in handles} & {entry.inode() for entry in os.scandir("/dev/shm")}


def test_a_file_of_another_user_is_not_mapped(file: SharedFile, monkeypatch: pytest.MonkeyPatch):
    handle = file.handle()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PlacementError, match="is not the memory exported by trainer rank 0"):
        open_exported(*handle, CPU, "trainer rank 0")


def test_an_open_file_that_has_a_name_is_never_mapped(tmp_path: Path):
    """Such as a private key that this process, or another of this user's, has open."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 4096)
    kind, fields = export(torch.zeros(4).share_memory_().untyped_storage())
    assert kind == "fd"
    with secret.open("rb") as opened:
        found = os.fstat(opened.fileno())
        told = {**fields, "fd": opened.fileno(), "inode": found.st_ino, "nbytes": 4096}
        with pytest.raises(PlacementError, match="is not the memory") as raised:
            open_exported(kind, told, CPU, "trainer rank 0")
    assert "sss" not in str(raised.value)
    for number in (0, 1, 2):
        with pytest.raises(PlacementError):
            open_exported(kind, {**fields, "fd": number}, CPU, "trainer rank 0")


def told(folder: Path, **changes: Any) -> dict[str, Any]:
    """What a worker is told of a checkpoint in `folder`, of one tensor of 8 bytes."""
    piece = ["model.safetensors", 0, [8], [[0], [8]], 1, 0]
    fields = {"incoming": str(folder), "pieces": [[[piece]]], "slot_bytes": 512, "runs": [[[0, 0, 264]]]}
    return {**fields, **changes}


@pytest.fixture
def incoming(tmp_path: Path) -> Path:
    """A folder of checkpoints with one push under way."""
    folder = tmp_path / ".incoming-0123abcd"
    (folder / "1").mkdir(parents=True)
    (tmp_path / ".lock").touch()
    (folder / "rank-0").write_bytes(bytes(8))
    (folder / "1" / "model.safetensors").write_bytes(b"12345678")
    return folder


def read_from(fields: dict[str, Any]) -> bytes:
    receiver = FilesReceiver(CPU)
    receiver.connect([], fields, lambda seconds: None, Deadline(5))
    assert list(receiver.chunks([0], lambda seconds: None, lambda: Deadline(5))) == [0]
    return bytes(receiver.storage(0, 0)[:8].tolist())


def test_a_worker_reads_a_folder_of_checkpoints(incoming: Path):
    assert read_from(told(incoming)) == b"12345678"


def test_a_worker_reads_in_no_other_folder(incoming: Path, tmp_path: Path):
    for other in (tmp_path, tmp_path / ".incoming-0123abcd" / "1", Path("/etc"), Path(f"{incoming}/../.incoming-x")):
        with pytest.raises(ProtocolError, match=r"the peer sent no FilesEndpoint"):
            read_from(told(other))
    (tmp_path / ".lock").unlink()
    with pytest.raises(PlacementError, match=r"cannot read .*\.lock"):
        read_from(told(incoming))


@pytest.mark.parametrize("name", ["/etc/passwd", "../rank-0", "..", ".", "", "a/b", "a\0", "model.safetensors\n"])
def test_a_worker_reads_no_file_that_is_elsewhere(incoming: Path, name: str):
    with pytest.raises(ProtocolError, match="the peer sent no FilesEndpoint"):
        read_from(told(incoming, pieces=[[[[name, 0, [8], [[0], [8]], 1, 0]]]]))


@pytest.mark.parametrize("which", ["1/model.safetensors", "rank-0"])
@pytest.mark.parametrize("trick", ["link", "pipe", "folder"])
def test_a_worker_follows_no_link_and_waits_for_no_pipe(incoming: Path, tmp_path: Path, which: str, trick: str):
    (tmp_path / "secret").write_bytes(b"s" * 64)
    path = incoming / which
    path.unlink()
    {"link": lambda: path.symlink_to(tmp_path / "secret"), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}[
        trick
    ]()
    with pytest.raises(PlacementError, match=r"cannot read|not a plain file"):
        read_from(told(incoming))


def test_shared_file_without_room_raises_placement_error_and_leaves_nothing():
    before = os.listdir("/proc/self/fd")
    with pytest.raises(PlacementError, match=r"no room for .* bytes in /dev/shm"):
        SharedFile(1 << 60)
    assert os.listdir("/proc/self/fd") == before


def test_a_machine_without_shared_memory_raises_placement_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shared_handles, "SHARED_MEMORY", str(tmp_path / "missing"))
    with pytest.raises(PlacementError, match=r"No such file.*give the container a writable tmpfs there"):
        SharedFile(64)


def test_what_a_worker_was_not_told_of_memory_is_a_protocol_error(file: SharedFile):
    counters, deadline = (0, 0, *file.handle()), Deadline(5)

    def connect(parts: Any, worker: Any = 0, storages: Any = (counters,)) -> IpcReceiver:
        receiver = IpcReceiver(CPU)
        receiver.connect([*storages], {"worker": worker, "parts": parts}, lambda seconds: None, deadline)
        return receiver

    receiver = connect([[0]])
    with pytest.raises(ProtocolError, match="storage 3 of trainer rank 0, but no endpoint names it"):
        receiver.storage(0, 3)
    with pytest.raises(ProtocolError, match="of 1 of 2 chunks"):
        next(receiver.chunks(range(2), lambda seconds: None, lambda: deadline))
    for parts, worker, storages in (([[1]], 0, [counters]), ([[0]], 10**6, [counters]), ([[0]], 0, [])):
        with pytest.raises(ProtocolError, match=f"stages chunks and has no counter for worker {worker}"):
            connect(parts, worker, storages)
    for parts, worker in ((None, 0), ([0], 0), ([["a"]], 0), ([[0]], -1), ([[0]], "0")):
        with pytest.raises(ProtocolError, match="the peer sent no"):
            connect(parts, worker)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"runs": [[[0, 0, 9]]]}, "does not lie in a slot of 8 bytes"),
        ({"runs": [[[0, 5, 4]]]}, "does not lie in a slot of 8 bytes"),
        ({"runs": [[[0, 0, 8]]], "encoders": [0], "origins": [[]]}, "do not name their rank"),
        ({"pushes": 1}, "has not kept the last push"),
        ({"slots": 0}, "the peer sent no"),
        ({"slot_bytes": -1}, "the peer sent no"),
        ({"slot_bytes": None}, "the peer sent no"),
        ({"senders": 1}, "the peer sent no"),
        ({"more": 1}, "the peer sent no"),
    ],
)
def test_runs_that_lie_in_no_slot_are_a_protocol_error(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], words: str
):
    fields = {"runs": [], "slot_bytes": 8, "senders": [0], "slots": 2, "onward": None, "before": [], "after": []}
    fields |= {"encoders": [], "by_words": False, "origins": [], "pushes": 0}
    monkeypatch.setattr(members, "TcpLinks", mock.Mock())
    receiver = NcclReceiver(CPU)
    receiver.meet(INVITATION, Deadline(1))
    with pytest.raises(ProtocolError, match=words):
        receiver.connect([], {**fields, **changes}, lambda seconds: None, Deadline(1))


@pytest.mark.parametrize("changes", [{"place": ["127.0.0.1", "0", "x"]}, {"device": "tpu"}, {"more": 1}])
def test_an_invitation_of_another_form_is_a_protocol_error(changes: dict[str, Any]):
    with pytest.raises(ProtocolError, match="the peer sent no Invitation"):
        NcclReceiver(CPU).meet({**INVITATION, **changes}, Deadline(1))


def test_a_worker_of_a_broadcast_connects_only_when_it_was_invited():
    with pytest.raises(ProtocolError, match="Connect came without an invitation"):
        NcclReceiver(CPU).connect([], {}, lambda seconds: None, Deadline(1))


@pytest.mark.parametrize("computes", [True, False])
def test_a_rank_of_a_broadcast_knows_when_another_one_computes_what_it_sends(computes: bool):
    ranks: Any = SimpleNamespace(gather=lambda own, _: [own, [["cpu"], computes]], broadcast=lambda value, _: value)
    assert NcclTransport("broadcast")._agree(LocalTensors({}), ranks) == (CPU, computes)


def test_a_worker_that_passes_chunks_on_says_whom_its_gpu_may_wait_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(members, "TcpLinks", mock.Mock())
    receiver = NcclReceiver(CPU)
    receiver.meet(INVITATION, Deadline(1))
    fields = {"runs": [], "slot_bytes": 8, "senders": [1], "slots": 2, "onward": 3}
    fields |= {
        "before": ["worker 0"],
        "after": ["worker 2"],
        "encoders": [],
        "by_words": False,
        "origins": [],
        "pushes": 0,
    }
    receiver.connect([], fields, lambda seconds: None, Deadline(1))
    assert receiver.waiting_for == ["worker 0", "worker 2"]


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([(0, 8, 8), (8, 16, 8)], [(0, 16)]),
        ([(8, 16, 8), (0, 8, 8), (0, 8, 8)], [(0, 16)]),
        ([(0, 8, 8), (16, 24, 8)], [(0, 8), (16, 24)]),
        ([(0, 8, 4)], []),
        ([(0, 16, 8), (0, 16, 8), (32, 40, 8)], [(32, 40)]),
        ([(0, 8, 8), (4, 12, 8), (12, 16, 4)], [(0, 16)]),
        ([(0, 16, 16), (4, 8, 4)], [(0, 16)]),
        ([(0, 16, 8), (4, 8, 4)], []),
    ],
)
def test_filled_of_runs_joins_neighbours_and_leaves_out_those_with_gaps(runs: Any, expected: Any):
    assert filled(runs) == expected


class GpuStorage:
    """A stand-in for a storage of a GPU, which torch refuses to export."""

    device = torch.device("cuda", 0)

    def data_ptr(self) -> int:
        return 0x2100

    def nbytes(self) -> int:
        return 64

    def _share_cuda_(self) -> Any:
        raise RuntimeError("invalid argument")


@pytest.mark.parametrize(
    ("segments", "words"),
    [
        ([{"address": 0x2000, "total_size": 0x1000, "is_expandable": True}], "an expandable segment of torch's"),
        ([{"address": 0x2000, "total_size": 0x1000, "is_expandable": False}], 'transport="broadcast"'),
        ([{"address": 0x3000, "total_size": 0x1000, "is_expandable": True}], 'transport="broadcast"'),
    ],
)
def test_memory_that_cannot_be_exported_is_said_to_be_expandable(
    monkeypatch: pytest.MonkeyPatch, segments: list[dict[str, Any]], words: str
) -> None:
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    with pytest.raises(PlacementError, match=words) as raised:
        export(GpuStorage())  # type: ignore[arg-type]
    assert ("expandable" in str(raised.value)) is ("expandable" in words)


@pytest.mark.parametrize(("kind", "words"), [(b"e", "an expandable segment of torch's"), (b"c", "--ipc=host")])
def test_memory_that_cannot_be_mapped_is_said_to_be_expandable(
    monkeypatch: pytest.MonkeyPatch, kind: bytes, words: str
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("pidfd_getfd: Operation not permitted")

    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", refuse)
    names = ("device", "handle", "nbytes", "offset_bytes", "counter_handle", "counter_offset", "event_handle")
    values = (0, (b"\x02" + kind + bytes(64)).hex(), 64, 0, "", 0, "")
    fields = {**dict(zip(names, values, strict=True)), "event_sync": False, "gpu_uuid": "GPU-1"}
    with pytest.raises(PlacementError, match=words) as raised:
        open_exported("cuda", fields, torch.device("cuda", 0), "trainer rank 0")
    assert ("expandable" in str(raised.value)) is (kind == b"e")
