"""The port of gloo: open only to the addresses of members, and to no address once the members have met.

gloo listens in each member's process, a trainer rank or an engine worker, and accepts every connection. Once no file
descriptor is left, gloo aborts this process. It needs the port only until its members are connected. Closing the port's
socket breaks gloo, so a packet filter on the socket drops what arrives later.
"""

from __future__ import annotations

import ctypes
import ipaddress
import logging
import os
import socket
import stat
import struct
import threading
from collections.abc import Collection
from contextlib import suppress

import torch.distributed as dist

from weightsync.errors import ProtocolError
from weightsync.net.addresses import local_and_peer_address
from weightsync.net.authentication import read_key, refuse_other_users

logger = logging.getLogger(__name__)

_ATTACH_FILTER, _DETACH_FILTER = 26, 27
"""The kernel's SO_ATTACH_FILTER and SO_DETACH_FILTER."""
_LOAD_WORD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
"""Instructions of the kernel's packet filters."""
_DROP = struct.pack("=HBBI", _RETURN, 0, 0, 0)
_TAKE = struct.pack("=HBBI", _RETURN, 0, 0, 0xFFFFFFFF)
_IP_HEADER = 0x100000000 - 0x100000
"""Offset of the packet's IP header in filters of a TCP socket."""
_SOURCE = {4: 12, 6: 8}
"""Offset of the sender's address in the IP header, by version of IP."""
_LOOKING = threading.Lock()
"""Held while a thread has copies of this process's sockets. Threads that copy each other's copies run out of files."""


def meet_addresses(store: dist.Store, member: int, size: int, address: str) -> set[str]:
    """Return the addresses from which the other members of a gloo group will connect to this one.

    Each member listens at its `address`. Blocks until all members have written theirs to the store.
    """
    store.set(f"at/{member}", address)
    listening = {at.decode() for at in store.multi_get([f"at/{each}" for each in range(size)])}
    mine = {address}
    for at in listening:
        with suppress(OSError):  # no route: gloo raises its own error later
            mine.add(local_and_peer_address(at)[0])
    store.set(f"from/{member}", " ".join(mine))
    told = store.multi_get([f"from/{each}" for each in range(size)])
    return {address for each in told for address in each.decode().split()}


class GlooPort:
    """A device of gloo, and the port that it opens at `address`. From the start only `members` reach the port.

    A context. Leave it once the members have met, or have failed to meet.
    """

    def __init__(self, members: Collection[str], address: str) -> None:
        with _LOOKING:
            known = set(map(_inode, before := _sockets(listening=True)))
            _close(before)
            self.device = dist.ProcessGroupGloo.create_device(hostname=address)
            found = _sockets(listening=True)
            self._opened = [opened for opened in found if _inode(opened) not in known]
            _close([opened for opened in found if opened not in self._opened])
        program = _only_from(members, ipaddress.ip_address(address).version)
        for opened in self._opened:
            if opened.getsockname()[0] == address:
                with suppress(OSError):  # too many addresses for one filter
                    _attach(opened, program)

    def __enter__(self) -> GlooPort:
        return self

    def __exit__(self, *_: object) -> None:
        _close(self._opened)

    def close(self, store: dist.Store, member: int) -> None:
        """Drop every packet to the port, and end other users' connections to it.

        With a key, members may be other users, and their connections stay. `store` is the group's store. This process
        is number `member` in it.
        """
        told = store.get(f"0/{member}") if store.check([f"0/{member}"]) else b""
        closed = 0
        for opened in self._opened:
            if _as_told(opened) in told:
                _attach(opened, _DROP)
                closed += 1
                if not read_key():
                    _end_others(opened.getsockname())
            else:  # another thread's port, opened at the same moment
                with suppress(OSError):  # it has no filter
                    opened.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)
        if not closed:
            logger.warning("gloo's port accepts connections of any process: see docs/security.md")


def _only_from(addresses: Collection[str], version: int) -> bytes:
    """Return a filter that accepts only packets from these addresses, without those of another version of IP."""
    program = b""
    for address in map(ipaddress.ip_address, addresses):
        if address.version != version:
            continue
        words = struct.unpack(f">{len(address.packed) // 4}I", address.packed)
        for number, word in enumerate(words):
            at = _IP_HEADER + _SOURCE[version] + 4 * number
            past = 2 * (len(words) - number) - 1  # skip the rest of this address, and its TAKE instruction
            program += struct.pack("=HBBI", _LOAD_WORD, 0, 0, at) + struct.pack("=HBBI", _IF_EQUAL, 0, past, word)
        program += _TAKE
    return program + _DROP


def _attach(opened: socket.socket, program: bytes) -> None:
    instructions = ctypes.create_string_buffer(program, len(program))
    count = len(program) // len(_DROP)
    pointer = struct.pack("@HP", count, ctypes.addressof(instructions))
    opened.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, pointer)


def _end_others(port: tuple[str, int]) -> None:
    """End other users' connections to a port of this process. Such a connection may stand in for a member."""
    with _LOOKING:
        connected = _sockets(listening=False)
        for opened in connected:
            with suppress(OSError):  # the peer has disconnected
                if opened.getsockname() == port and opened.getpeername():
                    try:
                        refuse_other_users(opened, "a process connected to gloo's port")
                    except ProtocolError as error:
                        logger.warning("%s", error)
                        opened.shutdown(socket.SHUT_RDWR)
        _close(connected)


def _sockets(listening: bool) -> list[socket.socket]:
    """Return copies of this process's TCP sockets: of the listening ones, or of all others."""
    found = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # another thread may close it meanwhile
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                opened = socket.socket(fileno=os.dup(fd))
                is_tcp = opened.family in (socket.AF_INET, socket.AF_INET6)
                if is_tcp and bool(opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) is listening:
                    found.append(opened)
                else:
                    opened.close()
    return found


def _inode(opened: socket.socket) -> int:
    return os.fstat(opened.fileno()).st_ino


def _close(sockets: Collection[socket.socket]) -> None:
    for opened in sockets:
        opened.close()


def _as_told(opened: socket.socket) -> bytes:
    """Return the address of a TCP socket in the kernel's form. gloo sends it to other members in this form."""
    family = opened.family
    host, port, *_ = opened.getsockname()
    flow = bytes(4) if family == socket.AF_INET6 else b""
    return struct.pack("=H", family) + struct.pack(">H", port) + flow + socket.inet_pton(family, host)
