"""Which transport a name stands for, and which memory a worker may map."""

from __future__ import annotations

import os
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from tcp_transport import TcpReceiver, TcpTransport

from weightsync import transports
from weightsync.errors import ConfigError, PlacementError, ProtocolError
from weightsync.transports import GROUP, open_receiver, open_transport
from weightsync.transports.files import FilesReceiver
from weightsync.transports.ipc import IpcReceiver, IpcTransport, filled
from weightsync.transports.nccl import NcclReceiver, NcclTransport
from weightsync.transports.shared_handles import SharedFile, open_exported

CPU = torch.device("cpu")
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
    with pytest.raises(ConfigError, match=r"needs a folder: pass transport=CheckpointTransport\(folder\)"):
        open_transport("checkpoint")


def test_open_transport_of_an_instance_gives_it_back():
    own = IpcTransport("ipc")
    assert open_transport(own) is own


@pytest.mark.parametrize("transport", ["carrier pigeon", 5, None])
def test_open_transport_of_what_is_none_raises_what_there_is(transport: Any):
    with pytest.raises(ConfigError, match=f'"ipc", "broadcast".*{GROUP}'):
        open_transport(transport)


def test_open_receiver_of_an_unknown_name_raises_what_to_install():
    with pytest.raises(ProtocolError, match=r"'carrier pigeon', which this .* does not know; install"):
        open_receiver("carrier pigeon", CPU)


def test_open_transport_of_an_entry_point_gives_both_of_its_ends(monkeypatch: pytest.MonkeyPatch):
    point = EntryPoint("tcp", f"{__name__}:ENDS", GROUP)
    monkeypatch.setattr(
        transports, "entry_points", lambda group, name: [point] if (group, name) == (GROUP, "tcp") else []
    )
    assert isinstance(open_transport("tcp"), TcpTransport)
    assert isinstance(open_receiver("tcp", CPU), TcpReceiver)


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "/dev/shm/other",
        "/dev/shm/weightsync-1-0123456789abcdef/x",
        "/dev/shm/../etc/weightsync-1-0123456789abcdef",
        "/tmp/weightsync-1-0123456789abcdef",
        "/dev/shm/weightsync-1-0123456789abcdef\n",
    ],
)
def test_open_exported_of_a_path_that_weightsync_does_not_make_raises_protocol_error(path: str):
    with pytest.raises(ProtocolError, match="is no shared memory of weightsync"):
        open_exported("shm", {"path": path, "nbytes": 8}, CPU, "trainer rank 0")


def test_open_exported_of_a_shared_file_sees_what_its_owner_writes_also_when_the_name_is_gone():
    file = SharedFile(4096)
    kind, fields = file.handle()
    try:
        mapped = open_exported(kind, fields, CPU, "trainer rank 0")
        with pytest.raises(PlacementError, match="is shorter here than 8192 bytes"):
            open_exported(kind, {**fields, "nbytes": 8192}, CPU, "trainer rank 0")
    finally:
        file.unlink()
    file.unlink()  # more than once
    assert not os.path.exists(fields["path"])
    file.data.fill_(7)
    assert mapped.eq(7).all()
    with pytest.raises(PlacementError, match="cannot map shared memory"):
        open_exported(kind, fields, CPU, "trainer rank 0")


def test_shared_file_without_room_raises_placement_error_and_leaves_nothing():
    before = set(Path("/dev/shm").iterdir())
    with pytest.raises(PlacementError, match=r"no room for .* bytes in /dev/shm"):
        SharedFile(1 << 60)
    assert not [path for path in set(Path("/dev/shm").iterdir()) - before if f"-{os.getpid()}-" in path.name]


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([(0, 8, 8), (8, 16, 8)], [(0, 16)]),
        ([(8, 16, 8), (0, 8, 8), (0, 8, 8)], [(0, 16)]),
        ([(0, 8, 8), (16, 24, 8)], [(0, 8), (16, 24)]),
        ([(0, 8, 4)], []),
        ([(0, 16, 8), (0, 16, 8), (32, 40, 8)], [(32, 40)]),
    ],
)
def test_filled_of_runs_joins_neighbours_and_leaves_out_those_with_gaps(runs: Any, expected: Any):
    assert filled(runs) == expected
