"""Mutual authentication of the two ends of a connection.

    dialer      greeting: a tag, and a nonce
    listener    greeting, and its proof
    dialer      Hello, and from here on both send frames with a seal each

Proof and seals are made from the session's token and the key of $WEIGHTSYNC_KEY, if one is set. Without a key both ends
must be processes of one user on one host. Only a greeting is read from a peer before it has proven itself.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import stat
import struct
import sys
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

from weightsync.errors import ConfigError, PeerError, ProtocolError
from weightsync.net.runtime import Deadline
from weightsync.net.tls import SET_THEM, TlsSocket

KEY, KEY_FILE = "WEIGHTSYNC_KEY", "WEIGHTSYNC_KEY_FILE"
SET_A_KEY = (
    f"Set {KEY} to one secret on the trainer and on the engine, such as the output of `openssl rand -hex 32`, or "
    f"{KEY_FILE} to its file"
)
GREETING_BYTES = 48
ANSWER_BYTES = GREETING_BYTES + 32
SEAL_BYTES = 16
TAGS = _WITH_KEY, _WITHOUT_KEY = b"weightsync:key\0\0", b"weightsync:user\0"
_LEAST_KEY_BYTES = 32
_SOCK_DIAG, _BY_FAMILY, _ANY = 4, 20, 0xFFFFFFFF
_REQUEST = struct.Struct("=IHH8xBBxxI36s4x8s")
"""An `nlmsghdr` and an `inet_diag_req_v2`. The answer is an `nlmsghdr` and an `inet_diag_msg`."""


def read_key() -> bytes:
    """Return the key shared by trainer and engines. Empty: none is set.

    Raises `ConfigError` for a key that is too short, and for a key file with wrong contents, owner or permissions.
    """
    key = os.environb.get(KEY.encode(), b"").strip()  # as bytes: a key need be no text
    if not key and (path := os.environ.get(KEY_FILE)):
        named = f"{KEY_FILE}={path}"
        try:
            with Path(path).open("rb") as file:
                found = os.fstat(file.fileno())
                if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
                    raise ConfigError(f"{named} must be a file of this user without read access for others: chmod 600")
                key = file.read(1 << 16).strip()
        except OSError as error:
            raise ConfigError(f"cannot read {named}: {error}") from error
        if not key:
            raise ConfigError(f"{named} is empty. {SET_A_KEY}")
    if key and len(key) < _LEAST_KEY_BYTES:
        raise ConfigError(f"a key of {len(key)} bytes is too short, expected {_LEAST_KEY_BYTES} at least. {SET_A_KEY}")
    return key


class FrameMac:
    """The seals of one direction of a connection. A seal authenticates one frame and the frame's number."""

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def of(self, *frame: bytes) -> bytes:
        """Return the seal of the next frame, given in one or more parts."""
        seal = hashlib.blake2b(self._count.to_bytes(8, "little"), digest_size=SEAL_BYTES, key=self._key)
        for part in frame:
            seal.update(part)
        self._count += 1
        return seal.digest()


def greeting(key: bytes) -> bytes:
    """Return a greeting with a new nonce."""
    return (_WITH_KEY if key else _WITHOUT_KEY) + secrets.token_bytes(32)


def derive_keys(key: bytes, token: str, dialer: bytes, listener: bytes) -> tuple[bytes, FrameMac, FrameMac]:
    """Return the listener's proof, the seals of the dialer's frames, and the seals of the listener's frames.

    dialer, listener: their greetings.
    """
    secret = hmac.digest(key, token.encode(), "sha256")
    labels = b"listener's proof", b"dialer's frames", b"listener's frames"
    proof, sent, received = (hmac.digest(secret, label + dialer + listener, "sha256") for label in labels)
    return proof, FrameMac(sent), FrameMac(received)


def explain_mismatch(greeting: bytes, key: bytes) -> str:
    """Return a reason, for people, why a peer with this greeting cannot prove itself."""
    if greeting[:16] not in TAGS:
        return "it does not speak weightsync's protocol"
    if greeting[:16] == (_WITH_KEY if key else _WITHOUT_KEY):
        return f"it has another key, or another session's token. {SET_A_KEY}"
    return f"it has {'no key' if key else 'a key'}, and this process has {'one' if key else 'none'}. {SET_A_KEY}"


def authenticate(sock: socket.socket, token: str, peer: str, deadline: Deadline) -> tuple[FrameMac, FrameMac]:
    """Greet the listener at the other end of a new socket. Return the seals of sent and of received frames.

    Raises `ProtocolError` unless the listener proves itself, `PeerError` when it closes the socket or does not answer.
    """
    key = read_key()
    mine, answer = greeting(key), b""
    try:
        sock.settimeout(deadline.left_s() or 0.001)
        sock.sendall(mine)
        while len(answer) < ANSWER_BYTES and (data := sock.recv(ANSWER_BYTES - len(answer))):
            answer += data
            sock.settimeout(deadline.left_s() or 0.001)
    except OSError as error:
        certificates = f". {SET_THEM}" if isinstance(sock, TlsSocket) else ""
        raise PeerError(f"{peer} did not answer a greeting: {error}{certificates}", who=peer) from error
    if len(answer) < ANSWER_BYTES:
        raise PeerError(f"{peer} refused this process's key or certificate. {SET_A_KEY}. {SET_THEM}", who=peer)
    theirs = answer[:GREETING_BYTES]
    proof, sent, received = derive_keys(key, token, mine, theirs)
    if not hmac.compare_digest(proof, answer[GREETING_BYTES:]):
        raise ProtocolError(f"{peer} cannot prove itself: {explain_mismatch(theirs, key)}", who=peer)
    if not key:
        refuse_other_users(sock, peer)
    return sent, received


def _user_of(local: tuple[str, int], remote: tuple[str, int]) -> int | None:
    """Return the user id that owns the end of a connection with these addresses. None: it is not listed.

    The kernel writes a table of all connections in many milliseconds, and finds one in some microseconds. Where it
    cannot be asked for one, as in some containers, the table is read.

    Raises `OSError` when the table cannot be read.
    """
    with suppress(OSError):
        if _ask_kernel(remote, local) is not None:  # this process's end, so it finds the other one if there is one
            return _ask_kernel(local, remote)
    text = Path("/proc/net/tcp6" if ":" in local[0] else "/proc/net/tcp").read_text()
    at = text.find(f": {_as_listed(*local)} {_as_listed(*remote)} ")
    return None if at < 0 else int(text[at : text.find("\n", at)].split()[7])


def _ask_kernel(local: tuple[str, int], remote: tuple[str, int]) -> int | None:
    """Ask for `_user_of` one connection. None: the kernel finds none, or another one, or knows no such request."""
    ends = struct.pack("!HH16s16s", local[1], remote[1], *(ip_address(host).packed for host, _ in (local, remote)))
    family = socket.AF_INET6 if ":" in local[0] else socket.AF_INET
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        kernel.send(_REQUEST.pack(_REQUEST.size, _BY_FAMILY, 1, family, socket.IPPROTO_TCP, _ANY, ends, b"\xff" * 8))
        answer = kernel.recv(512, socket.MSG_DONTWAIT)
    return int.from_bytes(answer[80:84], sys.byteorder) if answer[20:56] == ends else None


def refuse_other_users(sock: socket.socket, peer: str) -> None:
    """Raise `ProtocolError` unless the other end of a connected socket is a process of this user on this host."""
    try:
        user = _user_of(sock.getpeername()[:2], sock.getsockname()[:2])
    except OSError as error:
        raise ProtocolError(f"cannot find the user of {peer}'s process: {error}. {SET_A_KEY}", who=peer) from error
    if user != os.geteuid():
        whose = "of another host or container" if user is None else f"of user {user}"
        raise ProtocolError(
            f"{peer} is {whose}, and without a key only processes of user {os.geteuid()} on this host are trusted. "
            f"{SET_A_KEY}",
            who=peer,
        )


def _as_listed(host: str, port: int) -> str:
    """Return an address as /proc/net/tcp and tcp6 write it: 32-bit words in the machine's byte order."""
    return "".join(f"{word:08X}" for (word,) in struct.iter_unpack("=I", ip_address(host).packed)) + f":{port:04X}"
