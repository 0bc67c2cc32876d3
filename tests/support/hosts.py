"""Hosts made of namespaces: each has a network, /dev/shm, /tmp, a name, a boot id and processes of its own.

    with Hosts("A", "B", shared=tmp_path) as hosts:
        hosts.python("A").call(push, hosts.address("B"))    # `push(host, address)` in a process on A
        hosts.start("B", ["vllm", "serve", ...])            # any program
        hosts.block("A", 29600, refuse=True)

A cable leads from each host to one switch. `shared` is the one folder of /tmp that all hosts see, as by NFS. Nothing
outside of the hosts is changed. When they go down, or the process that made them ends, all that runs there ends too.
It needs root, `ip`, `tc`, `unshare` and `nsenter`. Another user gets there by `unshare --map-root-user --net --mount`.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from engines import Remote

_OF_A_HOST = "--net", "--mount", "--uts", "--ipc"
_PREFIXES = {4: "10.77.0.", 6: "fd77::"}
_NOBODY, _NO_MAC = 250, "02:00:00:00:00:fa"
"""A host that is not there. What is sent to it is lost."""
_REFUSERS = 100
"""The number of the first host's refuser."""


class Hosts:
    """Hosts by their names, from `with` until its end. Skips the test where there can be none."""

    def __init__(self, *names: str, shared: Path) -> None:
        self._numbers = {name: number for number, name in enumerate(names, 1)}
        self._shared = shared
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._remotes: list[Remote] = []
        self._started: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Hosts:
        if (reason := _why_impossible()) is not None:
            pytest.skip(f"no hosts of namespaces here: {reason}")
        try:
            self._hold("switch", ["--net"], "ip link add br0 type bridge mcast_snooping 0 && ip link set br0 up")
            for name in self._numbers:
                self._add(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for remote in self._remotes:
            remote.close()
        for name in reversed([*self._holders]):  # the switch is the first
            self.down(name)
        for process in self._started:
            process.wait(10)

    def _add(self, name: str) -> None:
        number = self._numbers[name]
        known = [f"{self.address(each, v)} {each}{'' if v == 4 else '-v6'}" for v in (4, 6) for each in self._numbers]
        files = {
            "/etc/hosts": "\\n".join(["127.0.0.1 localhost", "::1 localhost", *known]),
            "/etc/hostname": name,
            "/etc/resolv.conf": "nameserver 127.0.0.1",  # which refuses at once; another would be waited for
            "/proc/sys/kernel/random/boot_id": str(uuid.uuid4()),
        }
        steps = ["mount --make-rprivate /", f"hostname {name}", "mount -t tmpfs none /mnt"]
        for path, text in files.items():
            copy = f"/mnt/{Path(path).name}"
            steps += [f"printf '{text}\\n' > {copy}", f"mount --bind {copy} {path}"]
        kept = {"/mnt/shared": self._shared, "/mnt/checkout": Path(__file__).parents[2]}  # where they lie in /tmp
        steps += [f"mkdir {aside} && mount --bind {path} {aside}" for aside, path in kept.items()]
        steps += [f"mount -t tmpfs -o mode=1777 none {folder}" for folder in ("/dev/shm", "/tmp")]
        steps += [f"mkdir -p {path} && mount --bind {aside} {path}" for aside, path in kept.items()]
        self._hold(name, _OF_A_HOST, " && ".join(steps))
        self._plug_in(name, number)
        self.sh(name, "ip route add default dev eth0")
        for prefix in _PREFIXES.values():
            self.sh(name, f"ip neigh add {prefix}{_NOBODY} lladdr {_NO_MAC} dev eth0 nud permanent")

    def _plug_in(self, name: str, number: int) -> None:
        # A packet is up to 64 KiB before it is cut for the cable, and sockets keep the size that they find. A link with
        # a rate would cut such a packet by itself, which takes four times the processor's time.
        port = f"ip link add port{number} type veth peer name eth0 netns {self._pid(name)}"
        self._in_network("switch", f"{port} && ip link set port{number} gso_max_size 16384 master br0 up")
        addresses = [f"{_PREFIXES[4]}{number}/24", f"{_PREFIXES[6]}{number}/64 nodad"]
        ups = ["ip link set lo up", "ip link set eth0 gso_max_size 16384 up"]
        self._in_network(name, "\n".join([*ups, *(f"ip addr add {address} dev eth0" for address in addresses)]))

    def address(self, name: str, version: int = 4) -> str:
        """Return a host's address of this version of IP. Its name stands for the first, "NAME-v6" for the other."""
        return f"{_PREFIXES[version]}{self._numbers[name]}"

    def command(self, name: str, argv: Sequence[str]) -> list[str]:
        """Return the command that runs `argv` on a host, in this process's folder."""
        return ["nsenter", "-t", str(self._pid(name)), *_OF_A_HOST, "--pid", f"--wd={os.getcwd()}", *argv]

    def start(self, name: str, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a program. It ends with its host, and not with the process here, which waits for it."""
        self._started.append(subprocess.Popen(self.command(name, argv), **options))
        return self._started[-1]

    def sh(self, name: str, *commands: str) -> str:
        """Run shell commands one after the other, and return what they print."""
        return _checked(self.command(name, ["sh", "-ec", "\n".join(commands)]))

    def python(self, name: str) -> Remote:
        """Return a new process on a host, which runs functions; each gets a `Host` as its first argument."""
        self._remotes.append(Remote(Host, name, self._pid(name)))
        return self._remotes[-1]

    def down(self, name: str) -> None:
        """Switch a host off, with all that runs there. Nobody is told."""
        if name in self._numbers:
            self.cut(name)
        holder = self._holders.pop(name)
        for end in (holder.stdin, holder.stdout):
            assert end is not None
            end.close()
        holder.wait(10)

    def link(self, name: str, rate: str = "") -> None:
        """Give a host's cable a rate in both directions, as tc has it; without one, all that the machine can do."""
        for where, device in ((name, "eth0"), ("switch", f"port{self._numbers[name]}")):
            command = f"tc qdisc del dev {device} root 2>/dev/null || true"
            if rate:
                command = f"tc qdisc replace dev {device} root tbf rate {rate} burst 64kb latency 100ms"
            self._in_network(where, command)

    def move_away(self, name: str, delay_ms: float, loss: float) -> None:
        """Make a host's cable a long one, which delays every packet and loses a share of them, in both directions.

        It cannot be cut. No netem is needed: see `long_cable.py`.
        """
        port, near, far = (f"{end}{self._numbers[name]}" for end in ("port", "near", "far"))
        joined = f"ip link add {far} type veth peer name {near} && ip link set {far} master br0 up"
        self._in_network("switch", f"ip link set {port} nomaster && {joined} && ip link set {near} up")
        script = [sys.executable, str(Path(__file__).with_name("long_cable.py"))]
        self._in_network(name, " ".join([*script, "eth0"]))
        self._in_network("switch", " ".join([*script, far]))
        cable = self.start("switch", [*script, port, near, str(delay_ms), str(loss)], stdout=subprocess.PIPE)
        assert cable.stdout is not None
        with cable.stdout as says:
            assert says.readline() == b"up\n"

    def cut(self, name: str) -> None:
        """Take the host's cable out of the switch. Nobody is told."""
        self._in_network("switch", f"ip link set port{self._numbers[name]} nomaster")

    def heal(self, name: str) -> None:
        """Put the cable back."""
        self._in_network("switch", f"ip link set port{self._numbers[name]} master br0")

    def block(self, name: str, ports: int | str, refuse: bool = False) -> None:
        """Let nobody else reach these TCP ports of a host, such as "1024-65535": refused at once, or without an answer.

        `ip` has no firewall, so it is done by the others' routes. What is refused goes to a namespace where the host's
        address is, too, and where nobody listens. What is dropped goes to a host that is not there.
        """
        if refuse and (refuser := f"refuser of {name}") not in self._holders:
            arp = "/proc/sys/net/ipv4/conf/all/arp"
            self._hold(refuser, ["--net"], f"echo 1 > {arp}_ignore && echo 2 > {arp}_announce")
            self._plug_in(refuser, self._numbers[name] + _REFUSERS)
            self._in_network(refuser, "\n".join(f"ip addr add {self.address(name, v)} dev lo" for v in (4, 6)))
        self._rules("add", name, ports, refuse)

    def unblock(self, name: str, ports: int | str, refuse: bool = False) -> None:
        """Take back what `block` did."""
        self._rules("del", name, ports, refuse)

    def _rules(self, what: str, name: str, ports: int | str, refuse: bool) -> None:
        table = via = self._numbers[name] + _REFUSERS if refuse else _NOBODY
        for other in self._holders.keys() & self._numbers.keys() - {name}:
            for v in (4, 6):
                self.sh(
                    other,
                    f"ip -{v} route replace default via {_PREFIXES[v]}{via} dev eth0 table {table}",
                    f"ip -{v} rule {what} pref 10 to {self.address(name, v)} ipproto tcp dport {ports} lookup {table}",
                )

    def _hold(self, name: str, spaces: Sequence[str], script: str) -> None:
        # Process 1 of its namespace, which ends when this process's end of its input is closed.
        command = [*_unshare(*spaces), f"{script} && echo up && exec cat"]
        holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._holders[name] = holder
        assert holder.stdout is not None
        if holder.stdout.readline() != b"up\n":
            raise RuntimeError(f"{name} did not come up: {script}")

    def _pid(self, name: str) -> int:
        pid = self._holders[name].pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())

    def _in_network(self, name: str, script: str) -> str:
        """Run a script in a host's network, and with this machine's process ids."""
        return _checked(["nsenter", "-t", str(self._pid(name)), "--net", "sh", "-ec", script])


class Host:
    """A process on a host, as the functions that it runs see it."""

    def __init__(self, name: str, pid: int) -> None:
        self.name = name
        self.connections: list[Any] = []
        self.model: Any = None
        self.kept: list[Any] = []
        """What functions leave for those after them; closed at the end."""
        libc = ctypes.CDLL(None, use_errno=True)
        _go_on_in_a_child()  # setns refuses a process with threads, which imports may have started
        for descriptor in [
            os.open(f"/proc/{pid}/ns/{space}", os.O_RDONLY) for space in ("ipc", "uts", "net", "pid", "mnt")
        ]:
            if libc.setns(descriptor, 0):
                raise OSError(ctypes.get_errno(), f"cannot enter host {name}")
            os.close(descriptor)
        _go_on_in_a_child()  # only children are in the namespace of processes

    def close(self) -> None:
        for each in self.kept:
            each.close()


def _go_on_in_a_child() -> None:
    """Fork, and return in the child, where no other thread is; the parent ends as the child does."""
    if (child := os.fork()) != 0:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)


def _why_impossible() -> str | None:
    probe = "ip link add eth0 type veth peer name eth1; ip link add br0 type bridge; mount -t tmpfs none /mnt; tc qdisc"
    if sys.platform != "linux" or os.geteuid() != 0:
        return "they need root on Linux"
    try:
        _checked([*_unshare(*_OF_A_HOST), f"set -e; {probe}"])
    except (OSError, RuntimeError) as error:
        return str(error)
    return None


def _unshare(*spaces: str) -> list[str]:
    """Return the beginning of the command of process 1 of new namespaces, a shell."""
    return ["unshare", *spaces, "--pid", "--fork", "--mount-proc", "sh", "-c"]


def _checked(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[-1:])}: {done.stderr.strip()}")
    return done.stdout
