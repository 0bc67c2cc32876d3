"""The port of gloo: closed to newcomers once the members have met.

gloo keeps every connection that it is offered, for as long as it has a port, and ends the process when it can take no
more. It needs the port only until its members are connected. Closing it under gloo would end the process too.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import stat
import struct
from contextlib import suppress

import torch.distributed as dist

logger = logging.getLogger(__name__)

_ATTACH_FILTER = 26
"""The kernel's SO_ATTACH_FILTER."""
_DROP_ALL = struct.pack("=HBBI", 6, 0, 0, 0)
"""A packet filter of one instruction: return 0 bytes."""


def close_to_newcomers(store: dist.Store, member: int) -> None:
    """Drop every packet that comes to the port of this member of a gloo group. Its connections are left as they are.

    `store` is where the members have met.
    """
    told = store.get(f"0/{member}") if store.check([f"0/{member}"]) else b""
    instruction = ctypes.create_string_buffer(_DROP_ALL)
    program = struct.pack("@HP", 1, ctypes.addressof(instruction))
    closed = 0
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # another thread has closed it meanwhile
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                with socket.socket(fileno=os.dup(fd)) as opened:
                    if opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and _address(opened) in told:
                        opened.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)
                        closed += 1
    if not closed:
        logger.warning("the port of gloo stays open to strangers: see docs/security.md")


def _address(opened: socket.socket) -> bytes:
    """Return the address of a TCP socket as the kernel has it, and as gloo tells it to other members."""
    family = opened.family
    if family not in (socket.AF_INET, socket.AF_INET6):
        raise OSError("it is not a TCP socket")
    host, port, *_ = opened.getsockname()
    flow = bytes(4) if family == socket.AF_INET6 else b""
    return struct.pack("=H", family) + struct.pack(">H", port) + flow + socket.inet_pton(family, host)
