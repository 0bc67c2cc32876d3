"""What is measured: the cases of a benchmark, on which devices each runs, and which cannot run and why. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from weightsync.bench.shapes import SHAPES
from weightsync.errors import ConfigError

BACKENDS = ("fsdp", "deepspeed", "megatron")
TRANSPORTS = ("ipc", "broadcast", "checkpoint")
BUCKETERS = ("module", "threshold", "parameter")
DTYPES = ("bfloat16", "float32")
WEIGHTSYNC = "weightsync"
FILES = "vllm reload"
NATIVE = {
    "vllm nccl": ("nccl", False),
    "vllm nccl packed": ("nccl", True),
    "vllm ipc": ("ipc", False),
    "vllm ipc packed": ("ipc", True),
}
"""Ways of vLLM's own transfer engines: the backend's name, and whether tensors are packed into buffers."""
CHECKPOINT_ENGINE = "checkpoint-engine"
"""MoonshotAI's package of this name: the weights go to pinned memory of the host, and from there into each GPU, where
vLLM's workers read them over CUDA IPC."""
PEERS = (FILES, *NATIVE, CHECKPOINT_ENGINE)
"""Other ways to bring the same weights into the same engine. `FILES`: `save_pretrained`, then vLLM's `reload_weights`.
One tensor at a time over a broadcast, as trainers used to do, is weightsync's own with bucketer="parameter"."""


@dataclass(frozen=True)
class Case:
    """One measurement. `way` is `WEIGHTSYNC` or one of `PEERS`, which have no `transport` and `bucketer` (""). `ranks`
    of the trainer hold the model in `dtype`; the engines hold it in bfloat16, or quantise it."""

    way: str
    backend: str
    ranks: int
    transport: str
    bucketer: str
    dtype: str
    shape: str
    quantization: str | None
    engines: int
    tp: int

    @property
    def receivers(self) -> int:
        """Engine workers that take weights."""
        return self.engines * self.tp

    @property
    def setup(self) -> tuple[str, str | None, int, int, str]:
        """What the engines must be: cases with equal setups share them. The last is vLLM's weight transfer backend, or
        `CHECKPOINT_ENGINE` where its worker extension is wanted instead."""
        backend = CHECKPOINT_ENGINE if self.way == CHECKPOINT_ENGINE else WEIGHTSYNC
        if self.way in NATIVE:
            backend = NATIVE[self.way][0]
        return self.shape, self.quantization, self.engines, self.tp, backend

    def __str__(self) -> str:
        way = f"{self.transport}/{self.bucketer}" if self.way == WEIGHTSYNC else self.way
        engine = f"{self.engines} x TP={self.tp}" + (f" {self.quantization}" if self.quantization else "")
        return f"{self.shape} {self.dtype}, {self.backend} x{self.ranks}, {way}, to {engine}"


@dataclass(frozen=True)
class Machine:
    """What this machine has; `gpus` is 0 when all runs on CPUs. `shared_bytes` are free in /dev/shm. `installed` are
    distributions that some cases need: of trainers and of peers."""

    gpus: int
    memory_bytes: int
    gpu_memory_bytes: int
    disk_bytes: int
    shared_bytes: int
    installed: frozenset[str]


@dataclass(frozen=True)
class Layout:
    """Which GPU each trainer rank has, and which each engine's workers have; none on a machine without."""

    trainers: tuple[int, ...]
    engines: tuple[tuple[int, ...], ...]


def expand(
    *,
    backends: Sequence[str],
    ranks: Sequence[int],
    transports: Sequence[str],
    bucketers: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[str],
    quantizations: Sequence[str | None],
    engines: Sequence[int],
    tps: Sequence[int],
    peers: Iterable[str],
) -> list[Case]:
    """Every combination, those that can share engines side by side. Raises `ConfigError` for numbers below 1."""
    for name, numbers in (("--ranks", ranks), ("--engines", engines), ("--tp", tps)):
        if wrong := [number for number in numbers if number < 1]:
            raise ConfigError(f"{name} {wrong[0]}: expected a number, at least 1")
    ways = [(WEIGHTSYNC, transport, bucketer) for transport, bucketer in product(transports, bucketers)]
    ways += [(peer, "", "") for peer in peers]
    cases = [
        Case(way, backend, size, transport, bucketer, dtype, shape, quantization, count, tp)
        for shape, quantization, count, tp, backend, size, dtype, (way, transport, bucketer) in product(
            shapes, quantizations, engines, tps, backends, ranks, dtypes, ways
        )
    ]
    setups = list(dict.fromkeys(case.setup for case in cases))
    return sorted(dict.fromkeys(cases), key=lambda case: setups.index(case.setup))


def lay_out(case: Case, gpus: int) -> Layout:
    """Engines on the first GPUs, so that cases can share them. Trainer ranks on the same ones, from the first on; where
    NCCL broadcasts, which wants a GPU for each of its members, on those after the engines'. Raises `ConfigError` when
    there are too few."""
    if gpus == 0:
        return Layout((), ())
    apart = case.transport == "broadcast" or NATIVE.get(case.way, ("", False))[0] == "nccl"
    first = case.receivers if apart else 0
    needed = max(first + case.ranks, case.receivers)
    if needed > gpus:
        why = f"NCCL wants a GPU for each of {case.ranks} ranks and {case.receivers} workers" if apart else "one each"
        raise ConfigError(f"needs {needed} GPUs ({why}), and there are {gpus}")
    workers = [tuple(range(e * case.tp, (e + 1) * case.tp)) for e in range(case.engines)]
    return Layout(tuple(range(first, first + case.ranks)), tuple(workers))


def refusal(case: Case, machine: Machine) -> str | None:
    """Why this case cannot run on this machine, whatever its memory; None when it can."""
    config = SHAPES[case.shape]
    if case.way in NATIVE and machine.gpus == 0:
        return f"vLLM's {NATIVE[case.way][0]} engine moves GPU memory, and there is no GPU"
    if case.way == CHECKPOINT_ENGINE and machine.gpus == 0:
        return "checkpoint-engine moves GPU memory, and there is no GPU"
    if case.way == CHECKPOINT_ENGINE and CHECKPOINT_ENGINE not in machine.installed:
        return "checkpoint-engine is not installed: pip install checkpoint-engine"
    if case.way in PEERS and case.backend != "fsdp":
        return "peers are measured from FSDP2 alone: what they take is the gathered model, whoever gathers it"
    native = NATIVE[case.way][0] if case.way in NATIVE else None
    if native and case.engines > 1:
        return "vLLM's engines are measured one at a time"
    if native == "nccl" and case.ranks > 1:
        return "vLLM's nccl engine is measured from one rank, which sends"
    if (native == "ipc" or case.way == CHECKPOINT_ENGINE) and case.ranks != case.receivers:
        return f"{case.way} wants a rank on each worker's GPU: {case.ranks} ranks, {case.receivers} workers"
    if case.way in (FILES, CHECKPOINT_ENGINE) and case.quantization:
        return f"{case.way} is measured into unquantised engines alone"
    distribution = {"deepspeed": "deepspeed", "megatron": "megatron-core"}.get(case.backend)
    if distribution and distribution not in machine.installed:
        return f"{distribution} is not installed: pip install 'weightsync[{case.backend}]'"
    if case.backend == "megatron" and config["model_type"] != "qwen3":
        return "the benchmark builds Megatron models of dense Qwen3 shapes alone: tiny, 4B, 8B, 14B, 32B"
    if case.backend == "megatron" and config["num_key_value_heads"] % case.ranks:
        return f"Megatron's {case.ranks} ranks cannot share {config['num_key_value_heads']} key and value heads"
    if config["num_attention_heads"] % case.tp:
        return f"{case.tp} workers cannot share {config['num_attention_heads']} attention heads"
    if case.transport == "ipc" and case.bucketer != "module":
        return "over ipc nothing is staged, so all is one bucket: --bucketer module alone"
    try:
        lay_out(case, machine.gpus)
    except ConfigError as error:
        return error.message
    return None
