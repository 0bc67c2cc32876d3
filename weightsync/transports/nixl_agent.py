"""This process's NIXL agent: registered memory that other agents read, and reads of theirs.

NIXL is NVIDIA's library for one-sided transfers. Its UCX backend takes InfiniBand, RoCE, CUDA IPC, shared memory or
TCP, whatever the two processes have in common. An agent with another agent's metadata can read the other agent's
registered memory. So metadata is a secret between a trainer and its engines.

Agents tell each other counts, in notifications of NIXL's. A count only grows.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import py_object, pythonapi
from importlib import import_module, metadata
from typing import Any

import torch
from msgspec import Struct

from weightsync.errors import ConfigError, PeerError, PlacementError, ProtocolError, WeightSyncError
from weightsync.net import timeouts
from weightsync.net.runtime import submit
from weightsync.planning.layout import Count
from weightsync.transports.shared_handles import Hex

BACKEND = "WEIGHTSYNC_NIXL_BACKEND"
"""The environment variable with the name of NIXL's backend. UCX without it."""
PIECE_BYTES = {"cpu": 2**20, "cuda": 2**26}
"""Most bytes of one descriptor, by the reader's device.

UCX reads larger and smaller ones slower between CPUs. Between GPUs each descriptor is a call of the driver.
"""
_PROGRESS_US = 100
"""Pause of an agent's own thread between two looks at its peers. Without it the thread takes a core, even when idle."""
_OPTIONS = {"UCX": {"num_workers": "2"}}
"""Options of a backend. With one worker, telling a count would spin until no peer reads."""
_INSTALL = 'install it beside the trainer and beside the engine: pip install "weightsync[nixl]"'


class AgentAddress(Struct, frozen=True, array_like=True):
    """An agent's address: for reads of its slots, or for counts alone.

    agent: the agent's name. `member` is its member's, for errors. Rank 0 fills it in.
    metadata: NIXL's description of the agent, as hexadecimal digits. For counts alone it has no registered memory.
    gpu: the number of the slots' GPU in the agent's process. None: they lie in a CPU's memory.
    slots: the slots' addresses.
    """

    agent: str
    member: str
    metadata: Hex
    gpu: Count | None
    slots: list[Count]


def load_nixl() -> Any:
    """Import NIXL.

    Raises:
        ConfigError: NIXL is missing, or its packages are of several versions.
    """
    raises = logging.raiseExceptions
    try:
        nixl = import_module("nixl")
    except ImportError as error:
        raise ConfigError(f'transport="nixl" needs NIXL, and it cannot be imported ({error}): {_INSTALL}') from error
    finally:
        logging.raiseExceptions = raises  # NIXL's import changes it for the whole process
    if "NIXL_LOG_LEVEL" not in os.environ:
        logging.getLogger("nixl").setLevel(logging.WARNING)  # its steps would go to the program's standard output
    return nixl


def nixl_version() -> str:
    """Return the version of NIXL. Raises `ConfigError` as `load_nixl` does."""
    nixl, found = load_nixl(), {}
    for module in (nixl, getattr(nixl, "_pkg", nixl)):  # a build from source has one package
        name = module.__name__.replace("_", "-")
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    if len({*found.values()}) > 1:
        both = " and ".join(f"{name} {version}" for name, version in found.items())
        raise ConfigError(f"NIXL's packages are of two versions, {both}. Remove both, and {_INSTALL}")
    return next(iter(found.values()), "unknown")


class Agent:
    """One NIXL agent. Its calls wait for each other, so any thread may make them. None works after `close`.

    name: a random name. Other agents know this one by it.
    """

    def __init__(self, backend: str) -> None:
        """Start an agent with this backend of NIXL's. Raises `PlacementError` if the backend does not start."""
        self._nixl = nixl = load_nixl()
        self.name = secrets.token_hex(8)
        self.slots: list[torch.Tensor] = []
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._early: defaultdict[str, set[int]] = defaultdict(set)  # counts above a missing one
        self._reads: list[int] = []  # under way
        self._registered: Any = None
        config = nixl.nixlAgentConfig()
        config.useProgThread, config.pthrDelay, config.syncMode = True, _PROGRESS_US, nixl.NIXL_THREAD_SYNC_STRICT
        self._agent: Any = None
        _agents.add(self)
        try:
            self._agent = nixl.nixlAgent(self.name, config)
            backends = [self._agent.createBackend(backend, _OPTIONS.get(backend, {}))]
            self._contact = self._agent.getLocalPartialMD(nixl.nixlRegDList(nixl.DRAM_SEG), True, backends)
        except Exception as error:
            self.close()
            raise PlacementError(
                f"NIXL's backend {backend} does not start ({type(error).__name__}: {error}). Install its libraries "
                f"and let {BACKEND} and UCX_TLS allow one here, with cuda_copy for GPUs. UCX_LOG_LEVEL=info says why"
            ) from error.with_traceback(None)

    def register(self, slots: Sequence[torch.Tensor]) -> None:
        """Register memory for other agents' reads, and for this agent's own reads into it. Called once.

        Raises:
            PlacementError: The memory cannot be registered.
        """
        kept = [slot for slot in slots if slot.numel()]
        try:
            with self._calls("NIXL refuses"):
                if kept:
                    gpu = gpu_of(kept[0])
                    rows = [(slot.data_ptr(), slot.nbytes, gpu or 0, "") for slot in kept]
                    registered = self._nixl.nixlRegDList(self._kind(gpu), rows)
                    self._agent.registerMem(registered, [])
                    self._registered = registered
                self.slots = [*slots]
        except PeerError as error:
            nbytes, device = sum(slot.nbytes for slot in kept), kept[0].device
            advice = "raise the limit of locked memory (`ulimit -l unlimited`), or push smaller chunks (max_bytes)"
            if device.type == "cuda":
                advice = (
                    "load the kernel module nvidia_peermem or use a driver with DMA-BUF, leave cuda_copy and cuda_ipc "
                    f"in UCX_TLS, or {advice}"
                )
            raise PlacementError(f"NIXL cannot register {nbytes} bytes on {device} ({error}): {advice}") from error

    def address(self) -> AgentAddress:
        """Return this agent's address for reads of the slots."""
        with self._calls("NIXL does not describe this process"):
            told = self._agent.getLocalMD()
        gpu = gpu_of(self.slots[0]) if self.slots else None
        return AgentAddress(self.name, "", told.hex(), gpu, [slot.data_ptr() for slot in self.slots])

    def contact(self) -> AgentAddress:
        """Return this agent's address for counts alone. It opens no memory."""
        return AgentAddress(self.name, "", self._contact.hex(), None, [])

    def add(self, peer: AgentAddress) -> None:
        """Take note of another agent."""
        with self._calls(f"{peer.member}'s NIXL agent is not understood"):
            name = self._agent.loadRemoteMD(bytes.fromhex(peer.metadata))
        if name not in (peer.agent, peer.agent.encode()):
            raise ProtocolError(f"the metadata of {peer.member}'s NIXL agent is of another agent")

    def tell(self, peer: AgentAddress, count: int) -> None:
        """Tell another agent a count. Raises `PeerError` if the other agent has gone."""
        with self._calls(f"{peer.member} cannot be told of a chunk"):
            self._agent.genNotif(peer.agent, b"%d" % count)

    def counts(self) -> Counter[str]:
        """Return the last count of each other agent, by the agent's name. All counts below it have come too."""
        with self._calls("NIXL has lost its notifications"):
            for name, counts in self._agent.getNotifs({}, []).items():
                self._early[name].update(map(int, counts))
                while self._counts[name] + 1 in self._early[name]:  # reads may end in another order than they began
                    self._counts[name] += 1
                    self._early[name].remove(self._counts[name])
        return self._counts

    def read(self, peer: AgentAddress, slot: int, at: int, room: torch.Tensor, count: int) -> int:
        """Begin to read bytes of another agent's slot. Tell it the count once they are read.

        Some of UCX's ways read before this returns.

        Args:
            peer: The other agent.
            slot: The number of its slot.
            at: The first byte in its slot.
            room: The bytes of a slot of this agent's to read into.
            count: The count.

        Returns:
            The read, for `is_read`.

        Raises:
            PeerError: The other agent has gone.
        """
        note = b"%d" % count
        piece_bytes = PIECE_BYTES[room.device.type]
        pieces = [(first, min(piece_bytes, room.nbytes - first)) for first in range(0, room.nbytes, piece_bytes)]
        here = self._descriptors(room.data_ptr(), pieces, gpu_of(room))
        there = self._descriptors(peer.slots[slot] + at, pieces, peer.gpu)
        with self._calls(f"{peer.member}'s memory cannot be read"):
            read: int = self._agent.createXferReq(self._nixl.NIXL_READ, here, there, peer.agent, note, [])
            self._reads.append(read)
            self._agent.postXferReq(read, note)
        return read

    def is_read(self, read: int, peer: AgentAddress) -> bool:
        """Return whether a read has ended. Raises `PeerError` if it has failed."""
        with self._calls(f"{peer.member}'s memory cannot be read"):
            if (state := self._agent.getXferStatus(read)) == self._nixl.NIXL_IN_PROG:
                return False
            self._reads.remove(read)
            self._agent.releaseXferReq(read)
        if state != self._nixl.NIXL_SUCCESS:
            raise PeerError(f"a read of {peer.member}'s memory ended with {state}")
        return True

    def close(self) -> None:
        """Close the slots to other agents, after the end of this agent's reads. Does not wait. May be called again."""
        with self._lock:
            agent, reads, registered, slots = self._agent, self._reads, self._registered, self.slots
            self._agent, self._reads, self._registered, self.slots = None, [], None, []

        def end() -> None:
            nonlocal agent
            until = time.monotonic() + timeouts.FAREWELL_S
            gpu = torch.cuda.device_of(slots[0] if slots else torch.empty(0))  # NIXL needs its context
            for read in reads:
                with suppress(Exception), gpu:
                    while agent.getXferStatus(read) == self._nixl.NIXL_IN_PROG and time.monotonic() < until:
                        time.sleep(timeouts.READ_POLL_S)
                    agent.releaseXferReq(read)
            with suppress(Exception), gpu:
                agent.deregisterMem(registered, [])
            agent = None
            slots.clear()  # after the agent, whose thread may be answering a read of them

        with suppress(RuntimeError):  # no thread starts, as at the exit of the interpreter
            if reads:  # NIXL cannot cancel them. Over TCP, UCX may end the process that is read if its reader leaves.
                submit("nixl", end)
                return
        end()

    @contextmanager
    def _calls(self, what: str) -> Iterator[None]:
        """Make calls of the agent in the body. NIXL's errors become `PeerError`s, which begin with `what`."""
        with self._lock:
            if self._agent is None:
                raise WeightSyncError("the transport was closed while it was in use")
            try:
                yield
            except WeightSyncError:
                raise
            except Exception as error:
                # Not with its traceback: that keeps NIXL's agent, and so the peer's way into this memory.
                raise PeerError(f"{what}: {type(error).__name__}: {error}") from error.with_traceback(None)

    def _descriptors(self, address: int, pieces: Sequence[tuple[int, int]], gpu: int | None) -> Any:
        """Return NIXL's descriptors of pieces of memory: first byte behind the address, and size."""
        return self._nixl.nixlXferDList(self._kind(gpu), [(address + at, nbytes, gpu or 0) for at, nbytes in pieces])

    def _kind(self, gpu: int | None) -> Any:
        return self._nixl.DRAM_SEG if gpu is None else self._nixl.VRAM_SEG


_agents: weakref.WeakSet[Agent] = weakref.WeakSet()
# A forked child must never free them: UCX would take the parent's sockets out of the common epoll, and end the parent.
os.register_at_fork(after_in_child=lambda: [pythonapi.Py_IncRef(py_object(agent._agent)) for agent in _agents])


def gpu_of(tensor: torch.Tensor) -> int | None:
    """Return the number of a tensor's GPU. None: it lies in a CPU's memory."""
    return tensor.get_device() if tensor.is_cuda else None
