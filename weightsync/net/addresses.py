"""Addresses and ports at which processes of other hosts reach this one, and connections to theirs.

The kernel's routing table gives this host's address that faces another host. $WEIGHTSYNC_HOST overrides the table.
$WEIGHTSYNC_PORTS names the ports open in a firewall. With WEIGHTSYNC_HOST=none on trainer rank 0, it dials the workers.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Sequence

from weightsync.errors import ConfigError, PeerError
from weightsync.net import timeouts
from weightsync.net.runtime import Deadline

HOST, PORTS = "WEIGHTSYNC_HOST", "WEIGHTSYNC_PORTS"
LOOPBACK = "127.0.0.1"
_NONE = "none"
ANYWHERE = "0.0.0.0", "::"
"""All interfaces, of IPv4 and of IPv6."""
NOT_DIALLED = (
    f"Publish each worker's port, also through NAT, and name it in {PORTS} on trainer rank 0, too. If engines can "
    f'dial the trainer, do not set {HOST}={_NONE}. transport="lora" needs only the port of the engine\'s own server'
)
_MOST_DIALLED = 128
"""Most ports to dial. Each has a thread of its own."""
_BACKLOG = 1024
_GET_ADDRESS = 0x8915
"""The kernel's SIOCGIFADDR."""


def address_facing(host: str) -> str:
    """Return the address of this host to offer to `host`: $WEIGHTSYNC_HOST, or the address of the interface facing it.

    Raises `OSError` when no route exists, `ConfigError` when $WEIGHTSYNC_HOST resolves to no address.
    """
    return _configured() or local_and_peer_address(host)[0]


def local_and_peer_address(host: str) -> tuple[str, str]:
    """Return both addresses of a route to `host`: this host's, then the other's. Raises `OSError` without a route."""
    problem = OSError(f"{host} has no address")
    for family, kind, protocol, _, place in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(place)  # UDP: sends nothing, only consults the routing table
            except OSError as error:
                problem = error
                continue
            return str(probe.getsockname()[0]), str(probe.getpeername()[0])
    raise problem


def is_here(host: str) -> bool:
    """Return whether `host` names this host. Raises `OSError` for an unknown name."""
    this, other = local_and_peer_address(host)
    return this == other or is_loopback(this)


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def host_port(address: str, port: int) -> str:
    """Return "address:port", with an IPv6 address in brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def is_behind_nat() -> bool:
    """Return whether no engine worker can dial this host, by WEIGHTSYNC_HOST=none."""
    return os.environ.get(HOST, "").strip() == _NONE


def published_ports(workers: int = 1) -> range:
    """Return $WEIGHTSYNC_PORTS, the ports at which trainer rank 0 dials workers. Raises `ConfigError` for too few."""
    if not workers <= len(found := _ports()) <= _MOST_DIALLED:
        raise ConfigError(
            f"{PORTS} names {len(found)} ports, expected {workers} to {_MOST_DIALLED}. With {HOST}={_NONE}, trainer "
            f"rank 0 dials each engine worker at a port of its own. Set {PORTS} on each engine to ports that it "
            "publishes, one for each worker. Set it on the trainer to those of all engines"
        )
    return found


def listen(address: str, ports: Sequence[int] = ()) -> socket.socket:
    """Listen at an address of this host, on the first free port of $WEIGHTSYNC_PORTS, or on any port if it is unset.

    If $WEIGHTSYNC_PORTS is set, the address may be another machine's, such as a container's host. It forwards these
    ports, and this host listens on all interfaces.

    ports: those to try in place of $WEIGHTSYNC_PORTS. A trainer that dials its workers has their ports there.

    Raises `ConfigError` when no such port is free, or the address is not this host's and no port is set.
    """
    family, problem = socket.AF_INET6 if ":" in address else socket.AF_INET, None
    ports = ports or (() if is_behind_nat() else _ports())
    place = "" if ports and not _is_own(address, family) else address
    for port in ports or (0,):
        try:
            return socket.create_server((place, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            problem = error
    said = "".join(f", {name}={os.environ[name]}" for name in (HOST, PORTS) if os.environ.get(name))
    raise ConfigError(f"cannot listen at {address}{said}: {problem}") from problem


def _is_own(address: str, family: int) -> bool:
    """Return whether an interface of this host has the address."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def reach(address: str, port: int, me: str, peer: str, deadline: Deadline) -> socket.socket:
    """Connect to `peer`, which listens at this address. Raise a `PeerError` within seconds; it names both ends."""
    limit_s = min(deadline.left_s(), timeouts.REACH_S)
    try:
        return socket.create_connection((address, port), timeout=max(limit_s, 0.001))
    except OSError as error:
        why = f"no answer within {limit_s:.2g} s" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise PeerError(
            f"{me} on {socket.gethostname()} could not reach {peer} at {host_port(address, port)}: {why}. On {peer}, "
            f"set {HOST} to a reachable address or interface of its host, and {PORTS} to ports open in the firewall. "
            f"Behind NAT or in a container, publish these ports. If no engine can dial the trainer, set {HOST}={_NONE} "
            "there: it then dials the engines' published ports. Engines updated with rolling=True need not reach each "
            'other. transport="lora" needs only the port of the engine\'s own server',
            phase="connect",
        ) from error


def _configured() -> str | None:
    """Return the address in $WEIGHTSYNC_HOST, which may name an interface. None: the variable has none."""
    said = os.environ.get(HOST, "").strip()
    if said in ("", _NONE):
        return None
    try:
        if said in (name for _, name in socket.if_nameindex()):
            return _address_of(said)
        if (found := str(socket.getaddrinfo(said, None)[0][4][0])) in ANYWHERE:
            raise OSError("no engine can dial this address")
        return found
    except (OSError, UnicodeError) as error:
        names = ", ".join(name for _, name in socket.if_nameindex())
        raise ConfigError(
            f"{HOST}={said}: {error}; expected an address of this host, or one of its interfaces ({names})"
        ) from error


def _address_of(interface: str) -> str:
    """Return the IPv4 address of an interface, or else its first IPv6 address that is not link-local."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            found = fcntl.ioctl(any_socket, _GET_ADDRESS, struct.pack("256s", interface.encode()))
            return socket.inet_ntoa(found[20:24])
        except OSError:
            with open("/proc/net/if_inet6") as file:
                rows = [line.split() for line in file]
            for digits, *_, name in rows:
                address = ipaddress.IPv6Address(bytes.fromhex(digits))
                if name == interface and not address.is_link_local:
                    return str(address)
            raise


def _ports() -> range:
    """Return the ports in $WEIGHTSYNC_PORTS. Empty: the variable is unset."""
    if not (said := os.environ.get(PORTS, "")):
        return range(0)
    first, _, last = said.partition("-")
    try:
        found = range(int(first), int(last or first) + 1)
    except ValueError:
        found = range(0)
    if not found or found[0] < 1 or found[-1] > 65535:
        raise ConfigError(f"{PORTS}={said}: expected ports such as 29600-29650")
    return found
