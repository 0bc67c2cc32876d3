"""The port of gloo: open to the addresses of members alone, and to no address once these have met.

gloo keeps every connection that it is offered, for as long as it has a port, and ends the process when it can take no
more. It needs the port only until its members are connected. Closing it under gloo would end the process too.
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
"""Where filters of a TCP socket find the packet's IP header."""
_SOURCE = {4: 12, 6: 8}
"""Where the sender's address is in it."""
_LOOKING = threading.Lock()
"""Held while a thread has copies of this process's sockets. Threads that copied each other's would run out of files."""


def meet_addresses(store: dist.Store, member: int, size: int, address: str) -> set[str]:
    """Return the addresses from which the other members of a gloo group will connect to this one.

    Each listens at its `address`. Blocks until all have said theirs in the store, where they meet.
    """
    store.set(f"at/{member}", address)
    listening = {at.decode() for at in store.multi_get([f"at/{each}" for each in range(size)])}
    mine = {address}
    for at in listening:
        with suppress(OSError):  # gloo will say that there is no way
            mine.add(local_and_peer_address(at)[0])
    store.set(f"from/{member}", " ".join(mine))
    told = store.multi_get([f"from/{each}" for each in range(size)])
    return {address for each in told for address in each.decode().split()}


class GlooPort:
    """A device of gloo, and the port that it opens at `address`. From the start only `members` reach it.

    To be left, as a context, once the members have met, or will not meet.
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
                with suppress(OSError):  # a filter has no room for so many addresses
                    _attach(opened, program)

    def __enter__(self) -> GlooPort:
        return self

    def __exit__(self, *_: object) -> None:
        _close(self._opened)

    def close(self, store: dist.Store, member: int) -> None:
        """Drop every packet that comes to the port, and end the connections that other users have to it.

        With a key, members may be other users. `store` is where the members of the group have met, of which this is
        number `member`.
        """
        told = store.get(f"0/{member}") if store.check([f"0/{member}"]) else b""
        closed = 0
        for opened in self._opened:
            if _as_told(opened) in told:
                _attach(opened, _DROP)
                closed += 1
                if not read_key():
                    _end_others(opened.getsockname())
            else:  # another thread's, opened at the same moment
                with suppress(OSError):  # it has none
                    opened.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)
        if not closed:
            logger.warning("the port of gloo stays open to strangers: see docs/security.md")


def _only_from(addresses: Collection[str], version: int) -> bytes:
    """Return a filter that takes packets from these addresses alone, as far as they are of this version of IP."""
    program = b""
    for address in map(ipaddress.ip_address, addresses):
        if address.version != version:
            continue
        words = struct.unpack(f">{len(address.packed) // 4}I", address.packed)
        for number, word in enumerate(words):
            at = _IP_HEADER + _SOURCE[version] + 4 * number
            past = 2 * (len(words) - number) - 1  # the rest of this address, and that it is taken
            program += struct.pack("=HBBI", _LOAD_WORD, 0, 0, at) + struct.pack("=HBBI", _IF_EQUAL, 0, past, word)
        program += _TAKE
    return program + _DROP


def _attach(opened: socket.socket, program: bytes) -> None:
    instructions = ctypes.create_string_buffer(program, len(program))
    count = len(program) // len(_DROP)
    pointer = struct.pack("@HP", count, ctypes.addressof(instructions))
    opened.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, pointer)


def _end_others(port: tuple[str, int]) -> None:
    """End the connections to a port of this process that other users have. One may have a member's place."""
    with _LOOKING:
        connected = _sockets(listening=False)
        for opened in connected:
            with suppress(OSError):  # it has gone
                if opened.getsockname() == port and opened.getpeername():
                    try:
                        refuse_other_users(opened, "who has connected to the port of gloo")
                    except ProtocolError as error:
                        logger.warning("%s", error)
                        opened.shutdown(socket.SHUT_RDWR)
        _close(connected)


def _sockets(listening: bool) -> list[socket.socket]:
    """Return copies of this process's TCP sockets that listen, or of the others."""
    found = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # another thread has closed it meanwhile
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
    """Return the address of a TCP socket as the kernel has it, and as gloo tells it to other members."""
    family = opened.family
    host, port, *_ = opened.getsockname()
    flow = bytes(4) if family == socket.AF_INET6 else b""
    return struct.pack("=H", family) + struct.pack(">H", port) + flow + socket.inet_pton(family, host)
