"""Time and memory of rank 0's merging in a first push of DeepSeek-V3's shape to 64 stand-in workers.

    python benchmarks/merge_plans.py --parallel tp --ranks 8
    python benchmarks/merge_plans.py --parallel ep

"tp" is 8 replicas of 8 tensor-parallel workers, "ep" is 64 expert-parallel ones. It prints one line of JSON: the
seconds of CPU of each step, the added MiB, and the bytes of each participant's messages. "all" is the steps up to the
encoded transfer plan.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from weightsync.fleet.fleet import Fleet
from weightsync.net.wire import Connect, MachineInfo, PackedLoadPlan, PlanRequest, Value, decode, encode
from weightsync.planning.bucketing import open_bucketer
from weightsync.planning.layout import Box, Manifest, ShardLocation, TensorMeta, row_major
from weightsync.planning.load_plan import LoadPlan
from weightsync.planning.transfer_plan import PackedPlan
from weightsync.selection import TensorSelection
from weightsync.strategies.compile import compile_plan
from weightsync.strategies.inventory import Inventory
from weightsync.transports import open_transport
from weightsync.transports.staging import endpoint, receive_layout

WORKERS, DENSE_LAYERS, EXPERTS, HIDDEN, INNER = 64, 3, 256, 7168, 2048
Tensor = tuple[str, tuple[int, ...], int | None]
"""Name, shape, and the dimension cut by tensor parallelism."""


def tensors(layers: int) -> Iterator[Tensor]:
    yield "model.embed_tokens.weight", (129280, HIDDEN), 0
    for layer in range(layers):
        at, attention = f"model.layers.{layer}", f"model.layers.{layer}.self_attn"
        yield f"{attention}.q_a_proj.weight", (1536, HIDDEN), None
        yield f"{attention}.q_a_layernorm.weight", (1536,), None
        yield f"{attention}.q_b_proj.weight", (128 * 192, 1536), 0
        yield f"{attention}.kv_a_proj_with_mqa.weight", (576, HIDDEN), None
        yield f"{attention}.kv_a_layernorm.weight", (512,), None
        yield f"{attention}.kv_b_proj.weight", (128 * 256, 512), 0
        yield f"{attention}.o_proj.weight", (HIDDEN, 128 * 128), 1
        if layer < DENSE_LAYERS:
            yield from mlp(f"{at}.mlp", 18432)
        else:
            yield f"{at}.mlp.gate.weight", (EXPERTS, HIDDEN), None
            for part in range(3):  # in the order of the fused parameters
                for expert in range(EXPERTS):
                    yield list(mlp(f"{at}.mlp.experts.{expert}", INNER))[part]
            yield from mlp(f"{at}.mlp.shared_experts", INNER)
        yield f"{at}.input_layernorm.weight", (HIDDEN,), None
        yield f"{at}.post_attention_layernorm.weight", (HIDDEN,), None
    yield "model.norm.weight", (HIDDEN,), None
    yield "lm_head.weight", (129280, HIDDEN), 0


def mlp(at: str, inner: int) -> Iterator[Tensor]:
    yield f"{at}.gate_proj.weight", (inner, HIDDEN), 0
    yield f"{at}.up_proj.weight", (inner, HIDDEN), 0
    yield f"{at}.down_proj.weight", (HIDDEN, inner), 1


def expert_of(name: str) -> int | None:
    return int(name.split(".experts.")[1].split(".")[0]) if ".experts." in name else None


def rows(shape: tuple[int, ...], dim: int, number: int, count: int) -> Box:
    low, high = shape[dim] * number // count, shape[dim] * (number + 1) // count
    start = tuple(low if at == dim else 0 for at in range(len(shape)))
    return Box(start, tuple(high - low if at == dim else length for at, length in enumerate(shape)))


def load_plan(everything: Sequence[Tensor], parallel: str, worker: int) -> LoadPlan:
    """Return the plan of one worker. Its experts are reloaded."""
    names, partial, parameters = [], {}, {}
    for name, shape, dim in everything:
        expert = expert_of(name)
        if parallel == "ep" and expert is not None and expert * WORKERS // EXPERTS != worker:
            continue
        if parallel == "tp" and dim is not None:
            partial[name] = (rows(shape, dim, worker, 8),)
        names.append(name)
        module, _, leaf = name.removesuffix(".weight").rpartition(".")
        fused = {"gate_proj": "w13", "up_proj": "w13", "q_a_proj": "a", "kv_a_proj_with_mqa": "a"}.get(leaf, leaf)
        owner = module if expert is None else module.partition(".experts.")[0]
        parameters.setdefault((owner, expert is None, fused), []).append(name)
    experts: dict[str, list[str]] = {}
    for (owner, is_dense, _), group in parameters.items():
        if not is_dense:
            experts.setdefault(owner, []).extend(group)
    reloads = list(experts.values())
    paths = {"in_place": len(parameters), "fused_quantize": 0, "reload": len(reloads), "native_loader": 0}
    used, groups = dict.fromkeys(names, "bfloat16"), list(parameters.values())
    return LoadPlan(used, partial, {}, groups, reloads, [], [], paths, [], [], [], {})


def inventory(everything: Sequence[Tensor], manifest: Manifest, rank: int, ranks: int) -> Inventory:
    """Return a rank's inventory: its share of the experts, and its rows of all other tensors."""
    locations = []
    for number, (name, shape, _) in enumerate(everything, 1):
        expert = expert_of(name)
        if expert is None:
            box = rows(shape, 0, rank, ranks)
        elif expert * ranks // EXPERTS == rank:
            box = Box.full(shape)
        else:
            continue
        locations.append(ShardLocation(name, box, rank, number, 0, row_major(box.size), "bfloat16"))
    machine = MachineInfo(f"trainer rank {rank}", "cuda", f"GPU {rank}", f"host {rank // 8}")
    return Inventory(Value.of(manifest).value, locations, [], [], machine)


class StandIns:
    """A fleet of workers with these frames as their answers."""

    host = "10.0.0.1"
    handles = (SimpleNamespace(number=0, engine=SimpleNamespace(name="the engine"), workers=()),)

    def __init__(self, frames: Sequence[bytes]) -> None:
        self.frames, self.request_bytes = frames, 0
        machines = [
            MachineInfo(f"worker {n}", "cuda", f"engine GPU {n}", f"engine host {n // 8}") for n in range(WORKERS)
        ]
        self.workers = [
            SimpleNamespace(machine=each, hello=SimpleNamespace(group=0, shares_experts=False)) for each in machines
        ]

    def plan(self, *manifest_and_invitations: Any) -> list[LoadPlan]:
        return Fleet.plan(self, *manifest_and_invitations)  # type: ignore[arg-type]

    def _ask(self, requests: Sequence[PlanRequest], *kinds: Any) -> list[Any]:
        self.request_bytes = len(encode(requests[0]))
        return [decode(frame[4:]) for frame in self.frames]


def added_mib(base: int = 0) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024 - base


def measure(parallel: str, ranks: int, layers: int) -> dict[str, Any]:
    everything = list(tensors(layers))
    names = [name for name, _, _ in everything]
    own = Manifest(tuple(TensorMeta(name, shape, "bfloat16") for name, shape, _ in everything))
    frames = [
        encode(PackedLoadPlan.of(load_plan(everything, parallel, n), names))
        for n in range(8 if parallel == "tp" else WORKERS)
    ]
    told = [encode(Value.of(inventory(everything, own, rank, ranks))) for rank in range(ranks)]
    fleet = StandIns([frames[number % len(frames)] for number in range(WORKERS)])
    gc.collect()
    gc.disable()  # as a push does
    base, begin = added_mib(), time.process_time()
    inventories = [decode(frame[4:]).read(Inventory) for frame in told]  # type: ignore[attr-defined]
    read = time.process_time()
    options: Any = SimpleNamespace(selection=TensorSelection(), quantize=None, source=None, pause="keep", rolling=False)
    bucketer = open_bucketer("threshold", None)
    plan = compile_plan(fleet, own, inventories, open_transport("broadcast"), bucketer, options)  # type: ignore[arg-type]
    merged = time.process_time()
    plan_bytes = len(encode(Value.of(PackedPlan.of(plan))))
    end = time.process_time()
    found = {
        "parallel": parallel,
        "ranks": ranks,
        "tensors": len(everything),
        "seconds": {
            "inventories": read - begin,
            "merging": merged - read,
            "encoding": end - merged,
            "all": end - begin,
        },
        "added_mib": added_mib(base),
        "chains": len(plan.chains),
        "chunks": len(plan.chunks),
    }
    begin = time.process_time()
    arrivals = endpoint(receive_layout(plan, 0, 2), [])
    laid_out = time.process_time()
    connect = Connect("broadcast", [], list(arrivals.arrivals), 0, [], [], arrivals.fields)
    connect_bytes = len(encode(connect))
    found["seconds"] |= {"layout of a chain": laid_out - begin, "encoding of a connect": time.process_time() - laid_out}
    found["bytes"] = {
        "inventory, from each rank": max(map(len, told)),
        "request, to each worker": fleet.request_bytes,
        "load plan, from each worker": max(map(len, frames)),
        "transfer plan, to each rank": plan_bytes,
        "connect, to a worker": connect_bytes,
    }
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parallel", choices=("tp", "ep"), default="tp")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--layers", type=int, default=61)
    arguments = parser.parse_args()
    sys.stdout.write(json.dumps(measure(arguments.parallel, arguments.ranks, arguments.layers)) + "\n")
    sys.stdout.flush()
    os._exit(0)  # freeing so many objects takes longer
