"""Which address this host offers to whom, at which port, and what is said of one that cannot be reached."""

from __future__ import annotations

import socket
import time

import pytest

from weightsync.errors import ConfigError, PeerError
from weightsync.net.addresses import HOST, PORTS, address_facing, host_port, is_here, listen, reach
from weightsync.net.child import free_port
from weightsync.net.runtime import Deadline


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (HOST, PORTS):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("host", "address"), [("127.0.0.1", "127.0.0.1"), ("127.0.1.1", "127.0.0.1"), ("::1", "::1"), ("localhost", None)]
)
def test_this_host_faces_itself_by_its_loopback(host: str, address: str | None) -> None:
    assert address_facing(host) in ([address] if address else ["127.0.0.1", "::1"])
    assert is_here(host)


def test_a_name_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(OSError, match=r"not known|resolution|address"):
        address_facing("nobody.invalid")


@pytest.mark.parametrize(("said", "address"), [("lo", "127.0.0.1"), ("127.0.0.2", "127.0.0.2"), ("::1", "::1")])
def test_an_address_or_an_interface_may_be_said(monkeypatch: pytest.MonkeyPatch, said: str, address: str) -> None:
    monkeypatch.setenv(HOST, said)
    assert address_facing("127.0.0.1") == address
    with listen(address) as listener:
        reach(address, listener.getsockname()[1], "a test", "itself", Deadline(10)).close()


def test_what_is_neither_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nobody.invalid", ".nobody"):
        monkeypatch.setenv(HOST, name)
        with pytest.raises(ConfigError, match=rf"{HOST}={name}: .*its interfaces \(lo"):
            address_facing("127.0.0.1")
    for anywhere in ("0.0.0.0", "::"):  # in an `init` call these mean that the trainer dials
        monkeypatch.setenv(HOST, anywhere)
        with pytest.raises(ConfigError, match=rf"{HOST}={anywhere}: no engine can dial.*its interfaces \(lo"):
            address_facing("127.0.0.1")
    monkeypatch.setenv(HOST, "192.0.2.1")
    with pytest.raises(ConfigError, match=rf"cannot listen at 192\.0\.2\.1, {HOST}=192\.0\.2\.1: "):
        listen(address_facing("127.0.0.1"))


def test_only_ports_that_are_said_are_taken_until_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_port()
    monkeypatch.setenv(PORTS, f"{first}-{first}")
    with listen("127.0.0.1") as listener:
        assert listener.getsockname()[1] == first
        with pytest.raises(ConfigError, match=rf"cannot listen at 127\.0\.0\.1, {PORTS}={first}-{first}: .*in use"):
            listen("127.0.0.1")
    monkeypatch.setenv(PORTS, str(first))
    listen("127.0.0.1").close()


def test_ports_forwarded_by_another_machine_are_listened_to_on_all_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a container's host forwards the ports that it publishes."""
    monkeypatch.setenv(HOST, "192.0.2.1")
    monkeypatch.setenv(PORTS, str(port := free_port()))
    assert address_facing("127.0.0.1") == "192.0.2.1", "engines are told the other machine's address"
    with listen("192.0.2.1"), reach("127.0.0.1", port, "a worker", "the trainer", Deadline(5.0)):
        pass


@pytest.mark.parametrize("said", ["x", "29650-29600", "0-10", "65000-70000", "-5"])
def test_what_are_no_ports_is_refused(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.setenv(PORTS, said)
    with pytest.raises(ConfigError, match="expected ports such as 29600-29650"):
        listen("127.0.0.1")


def test_who_cannot_be_reached_is_named_with_both_ends() -> None:
    port = free_port()
    expected = (
        rf"engine 0 worker tp=1 on {socket.gethostname()} could not reach trainer rank 0 at 127\.0\.0\.1:{port}: "
    )
    with pytest.raises(PeerError, match=expected + r"Connection refused\. On trainer rank 0, set WEIGHTSYNC_HOST"):
        reach("127.0.0.1", port, "engine 0 worker tp=1", "trainer rank 0", Deadline(30))


def test_who_does_not_answer_is_given_up_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.net.timeouts.REACH_S", 0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        place = full.getsockname()
        waiting = [socket.socket() for _ in range(4)]  # more than the kernel keeps for those that do not accept
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(place)
        started = time.monotonic()
        with pytest.raises(PeerError, match=rf"at {host_port(*place)}: no answer within 0\.2 s"):
            reach(*place, "a test", "itself", Deadline(30))
        assert time.monotonic() - started < 10
        for each in waiting:
            each.close()
