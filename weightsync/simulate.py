"""How long a push would take on machines that are not at hand: a few formulas, with the constants that were measured.

Nothing is run. `S` is the bytes that travel, `R` the trainer's ranks, `W` the engines' workers, `B` the buckets.

    ipc          S / tp / copying * max(here / device_copy, (1 - here) / peer_copy) + fixed + messages of 1 bucket
                 `here` is the part of a worker's share that lies on its own GPU: 1 / R of it; nothing, when there are
                 more workers than ranks; with R = tp and one engine, 2 / 3 + 1 / 3R, since two thirds of a
                 transformer's weights are divided by rows on both sides
    broadcast    busiest / link + fixed + messages of B buckets, where each worker gets what it reads: `busiest` is what
                 the busiest member sends (S engines / R) or receives (S / tp), and between hosts those of one host
                 together; where that is more than S, S (R - 1) / R / link + S / broadcast instead, through rank 0.
                 Between hosts link and broadcast are one network card's. Buckets are filled and emptied meanwhile
    checkpoint   max(S / file_write, H S / file_read) + fixed + messages of B buckets
                 every worker reads every bucket, those of one host once together; H is the engines' hosts
    messages     2 (R - 1 + W) message_s for each bucket: rank 0 tells every other rank and worker, and is answered

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from weightsync.errors import ConfigError

_COPYING = 0.93
"""Of the device's and the links' speed, what the copies of a push reached: 8.2 ms for what a device copies in 7.65."""
_BY_ROWS = 2 / 3
"""Of a transformer's weights, those that tensor parallelism divides by rows, as FSDP and ZeRO divide all: q, k, v,
gate, up and embeddings."""


@dataclass(frozen=True)
class Topology:
    """Hosts, what connects them, and who has which part. Speeds are GB/s of payload.

    `ranks` of the trainer hold equal shards; `engines` times `tp` workers hold the model's copies. Between hosts a ring
    goes through one network card a host.

    Measured on H200s: `device_copy`, `peer_copy` and `broadcast` alone (NVLink, NVLS off); `fixed_s`, what a push by
    ipc takes beside its copies. Measured on a CPU: `message_s`, of rank 0 for one message to or from a rank or worker.
    From data sheets: `network`, 400 Gbit/s, and `gpu_memory_gb`. Assumed, so put in your own: `file_write` and
    `file_read`, of the file system as a whole.
    """

    hosts: int = 1
    gpus_per_host: int = 8
    ranks: int = 8
    engines: int = 1
    tp: int = 8
    bucket_mib: int = 256
    gpu_memory_gb: float = 141
    device_copy: float = 2140
    peer_copy: float = 397
    broadcast: float = 369
    network: float = 50
    file_write: float = 20
    file_read: float = 40
    fixed_s: float = 0.0038
    fixed_ranks_s: float = 0.006
    message_s: float = 80e-6

    @classmethod
    def parse(cls, text: str) -> Topology:
        """From "hosts=16,ranks=64,engines=8,tp=8"; what is not said keeps its default. Raises `ConfigError`."""
        kinds = {field.name: int if field.type == "int" else float for field in fields(cls)}
        found: dict[str, Any] = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            if name not in kinds:
                raise ConfigError(f"a topology has no {name!r}; it has {', '.join(kinds)}")
            try:
                found[name] = kinds[name](value)
            except ValueError:
                raise ConfigError(f"{part!r}: expected {name}=NUMBER") from None
        topology = cls(**found)
        if wrong := [name for name in kinds if not getattr(topology, name) > 0]:
            raise ConfigError(f"{wrong[0]}={getattr(topology, wrong[0])}: expected a number above 0")
        return topology

    @property
    def gpus(self) -> int:
        return self.hosts * self.gpus_per_host

    @property
    def workers(self) -> int:
        return self.engines * self.tp


@dataclass(frozen=True)
class Prediction:
    """One push. `parts` are the seconds of each part; what is not possible has none, and `impossible` says why."""

    transport: str
    parts: dict[str, float]
    impossible: str | None = None

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def limit(self) -> str:
        """The part that takes longest."""
        return max(self.parts, key=lambda name: self.parts[name])


def predict(nbytes: int, topology: Topology) -> list[Prediction]:
    """One push of `nbytes` over each transport."""
    return [
        _checked("ipc", nbytes, topology, topology.gpus),
        _checked("broadcast", nbytes, topology, topology.gpus - topology.ranks),
        _checked("checkpoint", nbytes, topology, topology.gpus),
    ]


def _checked(transport: str, nbytes: int, topology: Topology, for_engines: int) -> Prediction:
    """`for_engines` is the number of GPUs that engines may be on."""
    t = topology
    shard_gb, share_gb = nbytes / t.ranks / 1e9, nbytes / t.tp / 1e9
    shared = transport != "broadcast" and t.ranks + t.workers > t.gpus
    needed_gb = shard_gb + share_gb if shared else max(shard_gb, share_gb)
    if transport == "ipc" and t.hosts > 1:
        return Prediction(transport, {}, "ipc needs trainer and engine on one host")
    if t.ranks > t.gpus or t.workers > for_engines:
        return Prediction(
            transport, {}, f"{t.ranks} ranks and {t.workers} workers do not find a place on {t.gpus} GPUs"
        )
    if needed_gb > t.gpu_memory_gb:
        return Prediction(transport, {}, f"{needed_gb:.0f} GB of weights on a GPU of {t.gpu_memory_gb:g} GB")
    return Prediction(
        transport, {"ipc": _ipc, "broadcast": _broadcast, "checkpoint": _checkpoint}[transport](nbytes, t)
    )


def _ipc(nbytes: int, t: Topology) -> dict[str, float]:
    share = nbytes / t.tp
    here = 1 / t.ranks if t.workers <= t.ranks else 0.0  # of the slowest worker
    if t.ranks == t.tp == t.workers:
        here = _BY_ROWS + (1 - _BY_ROWS) / t.ranks
    near_s = share * here / (t.device_copy * 1e9 * _COPYING)
    far_s = share * (1 - here) / (t.peer_copy * 1e9 * _COPYING)
    return {
        "device copy" if near_s >= far_s else "peer copy": max(near_s, far_s),
        "messages": _messages(1, t),
        "calls into vLLM and plan": _fixed(t),
    }


def _broadcast(nbytes: int, t: Topology) -> dict[str, float]:
    ring, link = (t.broadcast, t.peer_copy) if t.hosts == 1 else (t.network, t.network)
    busiest = max(nbytes * t.engines / t.ranks, nbytes / t.tp)
    if busiest <= nbytes and (t.ranks > 1 or t.workers > 1):
        in_slot = busiest  # a bucket is what a member has room for
        if t.hosts > 1:
            sending, receiving = min(t.ranks, t.gpus_per_host), min(t.workers, t.gpus_per_host)
            busiest = max(nbytes * t.engines / t.ranks * sending, nbytes / t.tp * receiving)
        moving = {"sending to each worker": busiest / (ring * 1e9)}
    else:
        in_slot = nbytes
        gathering = nbytes * (t.ranks - 1) / t.ranks / (link * 1e9)
        moving = {"gathering to rank 0": gathering, "broadcast": nbytes / (ring * 1e9)}
    return {
        **moving,
        "messages": _messages(_buckets(in_slot, t), t),
        "calls into vLLM and plan": _fixed(t),
    }


def _checkpoint(nbytes: int, t: Topology) -> dict[str, float]:
    hosts = min(t.hosts, math.ceil(t.workers / t.gpus_per_host))
    writing, reading = nbytes / (t.file_write * 1e9), nbytes * hosts / (t.file_read * 1e9)
    name = "writing files" if writing >= reading else "reading files"
    return {
        name: max(writing, reading),
        "messages": _messages(_buckets(nbytes, t), t),
        "calls into vLLM and plan": _fixed(t),
    }


def _buckets(nbytes: float, t: Topology) -> int:
    return math.ceil(nbytes / (t.bucket_mib * 2**20))


def _messages(buckets: int, t: Topology) -> float:
    """For each bucket every other rank and every worker is told, and answers."""
    return buckets * 2 * (t.ranks - 1 + t.workers) * t.message_s


def _fixed(t: Topology) -> float:
    return t.fixed_s if t.ranks == 1 else t.fixed_ranks_s


def bfloat16_bytes(text: str) -> int:
    """The size of a model of so many parameters, given as "70B" or "1T". Raises `ConfigError`."""
    scale = {"M": 10**6, "B": 10**9, "T": 10**12}
    try:
        return int(float(text[:-1]) * scale[text[-1:].upper()]) * 2
    except (ValueError, KeyError):
        raise ConfigError(f"{text!r} is no size of a model such as 70B or 1T") from None


def simulation_table(nbytes: int, topologies: Sequence[Topology]) -> list[tuple[str, ...]]:
    """For each topology and transport: GPUs, hosts, ranks, engines, bucket, transport, seconds, and the part that takes
    longest, or why it is not possible."""
    return [
        (
            str(t.gpus),
            str(t.hosts),
            str(t.ranks),
            f"{t.engines} x TP={t.tp}",
            f"{t.bucket_mib} MiB",
            found.transport,
            *_outcome(found),
        )
        for t in topologies
        for found in predict(nbytes, t)
    ]


def _outcome(found: Prediction) -> tuple[str, str]:
    if found.impossible:
        return "-", f"not possible: {found.impossible}"
    s = found.seconds
    time = f"{s * 1e3:.0f} ms" if s < 0.1 else f"{s:.2f} s" if s < 10 else f"{s:.0f} s"
    return time, f"{found.limit}, {found.parts[found.limit] / s:.0%}"
