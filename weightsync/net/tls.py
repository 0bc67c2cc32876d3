"""TLS under the connections to trainer rank 0. Both ends show a certificate of one authority."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from weightsync.errors import ConfigError

VARIABLES = CERT, KEY, CA = "WEIGHTSYNC_TLS_CERT", "WEIGHTSYNC_TLS_KEY", "WEIGHTSYNC_TLS_CA"
SET_THEM = f"Set {CERT}, {KEY} and {CA} on trainer and engine to certificates of one authority, or on neither"


def read_certificates(is_listener: bool) -> ssl.SSLContext | None:
    """Return the TLS context of this end. None: none of the three variables is set.

    Raises `ConfigError` when one of them is missing, or names no usable file.
    """
    paths = [os.environ.get(name) for name in VARIABLES]
    if not any(paths):
        return None
    cert, key, ca = paths
    if not (cert and key and ca):
        missing = [name for name, path in zip(VARIABLES, paths, strict=True) if not path]
        raise ConfigError(f"not set: {', '.join(missing)}. {SET_THEM}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_listener else ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(ca)
        context.load_cert_chain(cert, key, password="")  # None would prompt at the terminal for a key's password
    except OSError as error:
        raise ConfigError(f"cannot use {CERT}={cert}, {KEY}={key}, {CA}={ca}: {error}. {SET_THEM}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # A job's hosts have no fixed names to check. Any certificate of this authority is accepted.
    context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
    context.sslsocket_class = TlsSocket
    return context


def wrap(sock: socket.socket, context: ssl.SSLContext | None, is_listener: bool) -> socket.socket:
    """Return a connected socket wrapped in TLS. Without a context, return the socket itself.

    The first send or receive does the handshake.
    """
    if context is None:
        return sock
    return context.wrap_socket(sock, server_side=is_listener, do_handshake_on_connect=False)


class TlsSocket(ssl.SSLSocket):
    """A TLS socket for several threads. It raises `BlockingIOError` where it would block, as a plain socket does."""

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        with self._turn():
            return super().recv(buflen, flags)

    def send(self, data: bytes | bytearray | memoryview, flags: int = 0) -> int:  # type: ignore[override]
        with self._turn():
            return super().send(data, flags)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        # OpenSSL has one state for both directions, so threads take turns. `SSLSocket` offers no hook to create the
        # lock earlier: it has no usable constructor.
        with self.__dict__.setdefault("_lock", threading.Lock()):
            try:
                yield
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                raise BlockingIOError(str(error)) from None
