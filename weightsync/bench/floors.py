"""What a push cannot be faster than, and what memory it needs: arithmetic on bytes and on the machine's limits. Pure.

A floor counts the passes over the bytes that no implementation of the transport avoids, at the speed that the machine
reaches when it does nothing else, and nothing for Python, HTTP, or waiting for each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weightsync.bench.cases import CHECKPOINT_ENGINE, FILES, NATIVE, Case
from weightsync.bucketing import make_bucketer
from weightsync.layout import Manifest, TensorMeta, itemsize
from weightsync.sync import DEFAULT_MAX_BYTES
from weightsync.transports.base import SLOTS

MEMCPY = "memcpy"
"""By all cores."""
FILE_WRITE = "file write"
DEVICE_COPY = "device copy"
PEER_COPY = "peer copy"
HOST_COPY = "host copy"
"""Between pinned memory of the host and a GPU."""

Limits = Mapping[str, float]
"""GB/s of payload by name: the names above, and `broadcast_to(n)`."""


def broadcast_to(receivers: int) -> str:
    """The name of the limit of one sender's raw broadcast to that many receivers."""
    return f"broadcast to {receivers}"


ASSUMED_CPU: Limits = {MEMCPY: 20.0, FILE_WRITE: 1.5, broadcast_to(1): 5.0, broadcast_to(2): 2.4}
"""For a dry run: two cores of a server, gloo on its loopback. Measuring replaces them."""
ASSUMED_GPU: Limits = {
    **ASSUMED_CPU,
    DEVICE_COPY: 2140.0,
    PEER_COPY: 397.0,
    HOST_COPY: 55.0,
    broadcast_to(1): 369.0,
    broadcast_to(2): 362.0,
}
"""For a dry run: measured between H200s of one host, NVLS off; `HOST_COPY` is what PCIe 5.0 carries."""

_PROCESS_BYTES = 10**9
"""What a process that imports torch and vLLM or transformers takes before it holds a weight."""


@dataclass(frozen=True)
class Floor:
    """`seconds` that `limit`, its name, takes for the bytes that must pass it."""

    seconds: float
    limit: str


@dataclass(frozen=True)
class Memory:
    """Bytes at most, estimated. `trainer_rank` and `engine_worker` are one's share of the weights and of the buckets
    under way, on a GPU or on the host; `shared` is in /dev/shm; `host` all that this host's memory must hold; `disk`
    what lies in files."""

    trainer_rank: int
    engine_worker: int
    shared: int
    host: int
    disk: int


def wire_manifest(manifest: Manifest) -> Manifest:
    """What travels: the tensors in the engine's dtype, bfloat16, which is the narrower one of all that is measured."""
    return Manifest(tuple(TensorMeta(tensor.name, tensor.shape, "bfloat16") for tensor in manifest))


def floor(case: Case, nbytes: int, limits: Limits, gpus: int) -> Floor:
    """The least time for `nbytes` that travel. Where several limits hold at once, the one that takes longest."""

    def at(limit: str, passed: float) -> Floor:
        return Floor(passed / (limits[limit] * 1e9), limit)

    share = nbytes / case.tp
    if case.transport == "checkpoint" or case.way == FILES:
        return at(FILE_WRITE, nbytes)
    if case.transport == "broadcast" or NATIVE.get(case.way, ("",))[0] == "nccl":
        # A dry run assumes few numbers of receivers; one with more is not faster.
        known = [n for n in range(1, case.receivers + 1) if broadcast_to(n) in limits]
        return at(broadcast_to(max(known)), nbytes)
    if gpus == 0:
        return at(MEMCPY, case.engines * nbytes)  # out of the trainer's memory, by workers that share the cores
    if case.way == CHECKPOINT_ENGINE:
        return at(HOST_COPY, 2 * nbytes / case.ranks)  # to the host and back, each rank its part over its own link
    # The slowest worker: on a GPU of its own it reads everything over the link, beside a trainer all but its part.
    here = share / case.ranks if case.receivers <= case.ranks else 0.0
    device = at(DEVICE_COPY, here if case.ranks > 1 or case.receivers > 1 else share)
    peer = at(PEER_COPY, share - here if case.ranks > 1 or case.receivers > 1 else 0.0)
    return Floor(device.seconds + peer.seconds, PEER_COPY if peer.seconds > device.seconds else DEVICE_COPY)


def memory(case: Case, manifest: Manifest, gpus: int) -> Memory:
    """What one case needs. `manifest` has the model's tensors in any dtype."""
    wire = wire_manifest(manifest)
    held = sum(tensor.nbytes for tensor in wire) // 2 * itemsize(case.dtype)
    bucket = 0
    if case.bucketer:
        limit = None if case.bucketer == "parameter" else DEFAULT_MAX_BYTES
        bucket = max(b.nbytes for b in make_bucketer(case.bucketer, limit).bucket(wire, None))
    staged = case.transport == "broadcast"
    in_shm = held if case.transport == "ipc" and gpus == 0 else 0
    rank = held // case.ranks + (SLOTS * bucket if staged else 0)
    worker_slots = SLOTS if staged else 1 if case.transport == "checkpoint" else 0
    worker = wire.nbytes // case.tp + worker_slots * bucket
    versions = 3 if case.transport == "checkpoint" else 2 if case.way == FILES else 1  # one to start from, two kept
    on_host = case.ranks * rank + case.receivers * worker if gpus == 0 else 0
    if case.way in (FILES, CHECKPOINT_ENGINE):
        on_host += held  # gathered
    processes = case.ranks + case.receivers + 2 * case.engines
    return Memory(rank, worker, in_shm, on_host + processes * _PROCESS_BYTES, versions * wire.nbytes)
