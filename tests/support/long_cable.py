"""A cable between two network devices that delays and loses frames, as `tc netem` does where a kernel has it.

python long_cable.py eth0                   # before: what leaves this device is complete
python long_cable.py port1 near1 10 0.01    # 10 ms and 1 % in each direction, until it is ended
"""

from __future__ import annotations

import ctypes
import fcntl
import random
import select
import socket
import struct
import sys
import time
from collections import deque
from contextlib import suppress

_ALL_PROTOCOLS = 3
_MOST_BYTES = 65536
_SIOCETHTOOL, _SET_SENDERS_CHECKSUM = 0x8946, 0x17


def finish_frames(device: str) -> None:
    """Let the kernel write checksums and cut segments before a frame leaves this device, as no other device will."""
    value = ctypes.create_string_buffer(struct.pack("II", _SET_SENDERS_CHECKSUM, 0))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sP", device.encode(), ctypes.addressof(value))
        fcntl.ioctl(any_socket, _SIOCETHTOOL, request)


def carry(devices: tuple[str, str], delay_s: float, loss: float) -> None:
    ends = []
    for device in devices:
        ends.append(socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0))
        ends[-1].bind((device, _ALL_PROTOCOLS))
    others = dict(zip(ends, reversed(ends), strict=True))
    frames: deque[tuple[float, socket.socket, bytes]] = deque()
    print("up", flush=True)
    while True:
        wait_s = max(0.0, frames[0][0] - time.monotonic()) if frames else None
        for end in select.select(ends, [], [], wait_s)[0]:
            frame, (_, _, kind, *_) = end.recvfrom(_MOST_BYTES)
            if kind != socket.PACKET_OUTGOING and random.random() >= loss:
                frames.append((time.monotonic() + delay_s, others[end], frame))
        while frames and frames[0][0] <= time.monotonic():
            _, to, frame = frames.popleft()
            to.send(frame)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        finish_frames(sys.argv[1])
    else:
        with suppress(OSError):  # the cable was pulled out
            carry((sys.argv[1], sys.argv[2]), float(sys.argv[3]) / 1000, float(sys.argv[4]))
