"""Predict the seconds of a push on other machines. The module is pure: it runs nothing.

`docs/evidence/scaling.md` explains each formula and constant. `S` is the bytes that travel, `R` the trainer's ranks,
`W` the engines' workers, `E` the engines, `C` the bytes of a chunk.

    ipc          S / tp / copying * max(here / device_copy, (1 - here) / peer_copy) + control
    broadcast    busiest / link + (E - 1) c / busiest S / tp / link + control
                 `busiest` is the larger of S / R and S / tp
                 c = min(C, max(busiest / (32 (E - 1)), `least_mib`)); with one engine c = C
    nixl         as broadcast, with `read` for the network's speed and `peer_copy` on one host
                 + C / R / device_copy + S / tp / c notice_s
    deltas       max(d busiest / link, encode_s S / R, decode_s S / tp) + a chunk of the other two + control
                 `d` is the share of the bytes that a difference has
    changes      max(d busiest / link, compare_s S / R) + d (E - 1) c / busiest S / tp / link + write_s S / tp + 8 heads
                 between GPUs; `d` is the share of the bytes that the changed words have
    checkpoint   max(S / file_write, H S / file_read) + C / file_read + control; `H` is the engines' hosts
    control      fixed + (E - 1) engine_s + 4 (R - 1 + W) message_s
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from weightsync.errors import ConfigError
from weightsync.planning.bucketing import DEFAULT_MAX_BYTES
from weightsync.planning.transfer_plan import CHUNKS_PER_HOP

_COPYING = 0.93
"""The push's share of the device's copy speed."""
_BY_ROWS = 2 / 3
"""The share of a transformer's weights that both tensor parallelism and FSDP or ZeRO divide by rows."""
_ENCODE_S, _DECODE_S = (0.9, 15.5), (0.1, 12.0)
"""Seconds of a core for 1 GB: without any change, and in addition if everything has changed."""
_COMPARE_S, _WRITE_S = (0.6e-3, 3.9e-3), (0.15e-3, 3.6e-3)
"""Seconds of an H200 for 1 GB: without any change, and in addition if everything has changed."""
_HEADS_S = 8 * 0.3e-3
"""The messages before the parts of a push of changes, one after the other."""
_MESSAGES = 4
"""The messages between rank 0 and each participant: ranks look, go, done, commit; workers go, done, commit, answer."""
COLUMNS = ("GPUs", "hosts", "ranks", "engines", "chunk", "transport", "push", "control", "longest part")


@dataclass(frozen=True)
class Topology:
    """Hosts, their connections, and the places of ranks and workers. Speeds are GB/s of payload.

    `ranks` of the trainer hold equal shards. `engines` of `tp` workers each hold the model. `cards` is the network
    cards of a host; 0 stands for eight on hosts with eight GPUs, and for one on others. `changed` is the share of
    bfloat16 values that a step changes, most of them by little. With 1 there are no deltas. `shards` is the number of
    ranks that share one tensor, experts apart; 0 stands for all ranks. It matters to the first push alone.
    """

    hosts: int = 1
    gpus_per_host: int = 8
    cards: int = 0
    ranks: int = 8
    engines: int = 1
    tp: int = 8
    shards: int = 0
    chunk_mib: int = DEFAULT_MAX_BYTES >> 20
    changed: float = 1.0
    gpu_memory_gb: float = 141
    device_copy: float = 2140
    peer_copy: float = 397
    broadcast: float = 369
    relaying: float = 0.8
    least_mib: float = 16
    network: float = 50
    read: float = 44
    notice_s: float = 300e-6
    file_write: float = 20
    file_read: float = 40
    fixed_s: float = 0.0038
    fixed_ranks_s: float = 0.006
    engine_s: float = 0.0033
    message_s: float = 30e-6

    @classmethod
    def parse(cls, text: str) -> Topology:
        """Return the topology of "hosts=16,ranks=64,engines=8,tp=8" and defaults. Raise `ConfigError` for bad text."""
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
            most = 1 if name == "changed" else math.inf
            if not 0 < found[name] <= most:
                raise ConfigError(f"{name}={found[name]}: expected a number above 0 and at most {most}")
        return cls(**found)

    @property
    def gpus(self) -> int:
        return self.hosts * self.gpus_per_host

    @property
    def workers(self) -> int:
        return self.engines * self.tp

    def link(self, on_each: int) -> float:
        """Return the GB/s of each of a host's `on_each` ranks or workers, if all of them send or receive at once."""
        if self.hosts == 1:
            return self.broadcast
        cards = self.cards or (8 if self.gpus_per_host == 8 else 1)
        return self.network * min(1.0, cards / min(on_each, self.gpus_per_host))

    def reading(self) -> Topology:
        """Return this topology with the speeds of one-sided reads in place of a broadcast's."""
        return replace(self, network=self.read, broadcast=self.peer_copy)


@dataclass(frozen=True)
class Prediction:
    """The seconds of each part of one push. `impossible` has the reason if there are none."""

    transport: str
    parts: dict[str, float]
    impossible: str | None = None

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def longest(self) -> str:
        return max(self.parts, key=lambda name: self.parts[name])


def predict(nbytes: int, topology: Topology) -> list[Prediction]:
    """Return one push of `nbytes` over each transport."""
    formulas = {"ipc": _ipc, "broadcast": _broadcast, "nixl": _nixl, "checkpoint": _checkpoint}
    if topology.changed < 1:
        formulas |= {"deltas": _deltas, "changes": _changes}
    found = []
    for transport, formula in formulas.items():
        impossible = _impossible(transport, nbytes, topology)
        parts = {} if impossible else {**formula(nbytes, topology), "control": _control(topology)}
        found.append(Prediction(transport, parts, impossible))
    return found


def _impossible(transport: str, nbytes: int, t: Topology) -> str | None:
    if transport == "ipc" and t.hosts > 1:
        return "ipc needs trainer and engine on one host"
    sends = transport in ("broadcast", "deltas", "changes")
    for_engines = t.gpus - t.ranks if sends else t.gpus
    if t.ranks > t.gpus or t.workers > for_engines:
        return f"{t.ranks} ranks and {t.workers} workers do not find a place on {t.gpus} GPUs"
    shard_gb, share_gb = nbytes / t.ranks / 1e9, nbytes / t.tp / 1e9
    shared = not sends and t.ranks + t.workers > t.gpus
    needed_gb = shard_gb + share_gb if shared else max(shard_gb, share_gb)
    return f"{needed_gb:.0f} GB of weights on a GPU of {t.gpu_memory_gb:g} GB" if needed_gb > t.gpu_memory_gb else None


def _ipc(nbytes: int, t: Topology) -> dict[str, float]:
    share = nbytes / t.tp
    here = 1 / t.ranks if t.workers <= t.ranks else 0.0  # the slowest worker's share
    if t.ranks == t.tp == t.workers:
        here = _BY_ROWS + (1 - _BY_ROWS) / t.ranks
    near_s = share * here / (t.device_copy * 1e9 * _COPYING)
    far_s = share * (1 - here) / (t.peer_copy * 1e9 * _COPYING)
    return {"device copy" if near_s >= far_s else "peer copy": max(near_s, far_s)}


def _broadcast(nbytes: int, t: Topology) -> dict[str, float]:
    """Return the parts of a push along chains: each rank sends to the first engine, and its workers pass on."""
    duplex = t.relaying if t.hosts == 1 and t.engines > 1 else 1.0
    sent_s = nbytes / t.ranks / (t.link(t.ranks) * 1e9)
    received_s = nbytes / t.tp / (t.link(t.workers) * 1e9 * duplex)
    passing_s = chunk_share(nbytes, t) * (t.engines - 1) * received_s
    return {"sending along chains": max(sent_s, received_s), "passing on the first chunk": passing_s}


def _nixl(nbytes: int, t: Topology) -> dict[str, float]:
    """Return the parts of a push by one-sided reads along the same chains, out of packed slots."""
    share = chunk_share(nbytes, t)
    packing_s = share * nbytes / t.ranks / (t.device_copy * 1e9)
    reading_s, passing_s = _broadcast(nbytes, t.reading()).values()
    return {
        "reading along chains": reading_s,
        "passing on the first chunk": passing_s,
        "notices of chunks": t.notice_s / share,
        "packing the first chunk": packing_s,
    }


def chunk_share(nbytes: int, t: Topology) -> float:
    """Return the share of a chunk in the busiest member's bytes, over `broadcast`."""
    busiest, hops, chunk = nbytes / min(t.ranks, t.tp), t.engines - 1, float(t.chunk_mib << 20)
    if hops:
        chunk = min(chunk, max(busiest / (CHUNKS_PER_HOP * hops), t.least_mib * 2**20))
    return min(1.0, chunk / busiest)


def _deltas(nbytes: int, t: Topology) -> dict[str, float]:
    """Return the parts of a push of differences. They are encoded, sent and decoded at the same time."""
    sending_s, passing_s = (_written(t.changed) * seconds for seconds in _broadcast(nbytes, t).values())
    encoding_s, decoding_s = (
        nbytes / holders / 1e9 * (least + more * t.changed)
        for holders, (least, more) in ((t.ranks, _ENCODE_S), (t.tp, _DECODE_S))
    )
    together = {"sending differences": sending_s, "encoding": encoding_s, "decoding": decoding_s}
    name = max(together, key=lambda each: together[each])
    ends_s = chunk_share(nbytes, t) * (sum(together.values()) - together[name])
    return {name: together[name], "the first and the last chunk": passing_s + ends_s}


def _changes(nbytes: int, t: Topology) -> dict[str, float]:
    """Return the parts of a push of changed words between GPUs. A part travels while the next one is compared."""
    share = (3 * t.changed + 1 / 256 + 8 / 8192) / 2  # 3 bytes of a changed word, a group's count, a tile's start
    sending_s, passing_s = (share * seconds for seconds in _broadcast(nbytes, t).values())
    comparing_s, writing_s = (
        nbytes / holders / 1e9 * (least + more * t.changed)
        for holders, (least, more) in ((t.ranks, _COMPARE_S), (t.tp, _WRITE_S))
    )
    name = "sending changes" if sending_s > comparing_s else "comparing"
    rest = {"writing": writing_s, "heads": _HEADS_S, "passing on the first part": passing_s}
    return {name: max(sending_s, comparing_s), **rest}


def _written(changed: float) -> float:
    """Return the bytes of a difference, as a share of the weights' bytes.

    Per bfloat16 value of 16 bits: 1.25 times the entropy of the changed positions, and `1 + 4 * changed` bits for a
    changed value.
    """
    least = -changed * math.log2(changed) - (1 - changed) * math.log2(1 - changed)
    return (1.25 * least + changed * (1 + 4 * changed)) / 16


def _checkpoint(nbytes: int, t: Topology) -> dict[str, float]:
    hosts = min(t.hosts, math.ceil(t.workers / t.gpus_per_host))
    writing, reading = nbytes / (t.file_write * 1e9), nbytes * hosts / (t.file_read * 1e9)
    name = "writing files" if writing >= reading else "reading files"
    return {name: max(writing, reading), "last chunk": (t.chunk_mib << 20) / (t.file_read * 1e9)}


def _control(t: Topology) -> float:
    fixed = t.fixed_s if t.ranks == 1 else t.fixed_ranks_s
    return fixed + (t.engines - 1) * t.engine_s + _MESSAGES * (t.ranks - 1 + t.workers) * t.message_s


def bfloat16_bytes(text: str) -> int:
    """Return the bytes of a model with "70B" or "1T" parameters. Raise `ConfigError` for other texts."""
    scale = {"M": 10**6, "B": 10**9, "T": 10**12}
    try:
        return int(float(text[:-1]) * scale[text[-1:].upper()]) * 2
    except (ValueError, KeyError):
        raise ConfigError(f"{text!r} is no size of a model such as 70B or 1T") from None


def rows(nbytes: int, topologies: Sequence[Topology]) -> list[tuple[str, ...]]:
    """Return the cells of `COLUMNS` for each topology and transport."""
    return [_row(t, found) for t in topologies for found in predict(nbytes, t)]


def _row(t: Topology, found: Prediction) -> tuple[str, ...]:
    place = (str(t.gpus), str(t.hosts), str(t.ranks), f"{t.engines} x TP={t.tp}", f"{t.chunk_mib} MiB", found.transport)
    if found.impossible:
        return *place, "-", "-", f"not possible: {found.impossible}"
    share = found.parts[found.longest] / found.seconds
    return *place, rounded(found.seconds), rounded(found.parts["control"]), f"{found.longest}, {share:.0%}"


def rounded(seconds: float) -> str:
    """Return "22 ms", "1.47 s" or "74 s"."""
    return f"{seconds * 1e3:.0f} ms" if seconds < 0.1 else f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"
