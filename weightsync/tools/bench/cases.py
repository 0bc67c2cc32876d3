"""The cases of a benchmark, the GPUs of each, and the reasons against impossible ones. Pure."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import product

from weightsync.errors import ConfigError
from weightsync.tools.bench.shapes import SHAPES

BACKENDS = ("plain", "fsdp", "deepspeed", "megatron")
TRANSPORTS = ("ipc", "broadcast", "nixl", "checkpoint")
BUCKETERS = ("module", "threshold", "parameter")
DTYPES = ("bfloat16", "float32")
ENCODINGS = ("none", "auto", "delta")
LOAD_FORMATS = ("auto", "dummy")
"""The start of engines: from a checkpoint of the trainer's first weights, or without any."""
HTTP, LLM, EXTENSION = CLIENTS = ("http", "llm", "extension")
"""The trainer's client of an engine: a server, or an `LLM` in rank 0's process with plug-in or extension."""
GRAPHS = ("off", "decode", "compiled")
"""off: none. decode: CUDA graphs without torch.compile, for a faster start. compiled: vLLM's default."""
WEIGHTSYNC, FILES = "weightsync", "vllm reload"
NATIVE = {
    "vllm nccl": ("nccl", False),
    "vllm nccl packed": ("nccl", True),
    "vllm ipc": ("ipc", False),
    "vllm ipc packed": ("ipc", True),
}
"""Ways of vLLM's own transfer engines: the backend's name, and whether tensors are packed into buffers."""
PEERS = {FILES: (HTTP, LLM), **dict.fromkeys(NATIVE, (LLM,))}
"""Other ways to bring the same weights into the same engine, each with its clients."""
WAYS = (WEIGHTSYNC, *PEERS)

MEMCPY, FILE_WRITE, DEVICE_COPY, PEER_COPY, BROADCAST = "memcpy", "file write", "device copy", "peer copy", "broadcast"
NIXL_READ = "NIXL read"
ASSUMED = {MEMCPY: 20.0, FILE_WRITE: 1.5, DEVICE_COPY: 2140.0, PEER_COPY: 397.0, BROADCAST: 369.0, NIXL_READ: 365.0}
"""GB/s of H200s, for dry runs. Both of the last reach `ASSUMED_CPU` between CPUs."""
ASSUMED_CPU = 5.0


@dataclass(frozen=True)
class Case:
    """One measurement. `way` is `WEIGHTSYNC` or one of `PEERS`. Peers have no `transport` and `bucketer` ("").

    `ranks` of the trainer hold the model in `dtype`. The engines hold it in bfloat16, or quantise it. A step changes
    the share `changed` of the values.
    """

    way: str
    backend: str
    ranks: int
    transport: str
    bucketer: str
    dtype: str
    shape: str
    quantization: str
    engines: int
    tp: int
    client: str
    data_parallel_size: int = 1
    expert_parallel: bool = False
    load_format: str = "auto"
    encoding: str = "none"
    changed: float = 1.0

    @property
    def engine_workers(self) -> int:
        """The number of one engine's workers."""
        return self.tp * self.data_parallel_size

    @property
    def receivers(self) -> int:
        """The number of engine workers that receive weights."""
        return self.engines * self.engine_workers

    @property
    def replicas(self) -> int:
        """The number of an engine's copies of most weights. Expert parallelism divides them among all workers."""
        return 1 if self.expert_parallel else self.data_parallel_size

    @property
    def starts_cold(self) -> bool:
        """Whether the engines start from a checkpoint, and so give the right answers before a push."""
        return self.load_format != "dummy"

    @property
    def apart(self) -> bool:
        """Whether each rank and worker has a GPU of its own. NCCL needs it, and NIXL is measured beside NCCL."""
        return self.transport in ("broadcast", "nixl") or NATIVE.get(self.way, ("", False))[0] == "nccl"

    @property
    def engine(self) -> str:
        """The number of engines, and how each is parallel."""
        parallel = f" DP={self.data_parallel_size}" * (self.data_parallel_size > 1) + " EP" * self.expert_parallel
        return f"{self.engines} x TP={self.tp}{parallel}"

    def __str__(self) -> str:
        way = f"{self.transport}/{self.bucketer}" if self.way == WEIGHTSYNC else self.way
        way += f" encoding={self.encoding}" * (self.encoding != "none")
        way += f", {self.changed:.4g} of the values changed" * (self.changed < 1)
        engine = self.engine + f" {self.quantization}" * (self.quantization != "none")
        engine += "" if self.starts_cold else " from dummy weights"
        return f"{self.shape} {self.dtype}, {self.backend} x{self.ranks}, {way}, to {engine} by {self.client}"


@dataclass(frozen=True)
class Layout:
    """The GPU of each trainer rank, and the GPUs of each engine's workers. Empty on a machine without GPUs."""

    trainers: tuple[int, ...]
    engines: tuple[tuple[int, ...], ...]


def expand(options: Namespace) -> list[Case]:
    """Return every combination of the command's options once. Raise `ConfigError` for numbers below 1."""
    for name in ("ranks", "engines", "tp", "data_parallel_size"):
        if wrong := [number for number in getattr(options, name) if number < 1]:
            raise ConfigError(f"--{name.replace('_', '-')} {wrong[0]}: expected a number, at least 1")
    own = [(WEIGHTSYNC, transport, bucketer) for transport, bucketer in product(options.transport, options.bucketer)]
    ways = [choice for way in options.way for choice in (own if way == WEIGHTSYNC else [(way, "", "")])]
    axes = [field.name for field in fields(Case) if field.name not in ("way", "transport", "bucketer")]
    found = []
    for values in product(ways, *(getattr(options, axis) for axis in axes)):
        (way, transport, bucketer), chosen = values[0], dict(zip(axes, values[1:], strict=True))
        if chosen["client"] in PEERS.get(way, CLIENTS):
            found.append(Case(way, transport=transport, bucketer=bucketer, **chosen))
    return list(dict.fromkeys(found))


def lay_out(case: Case, gpus: int) -> Layout:
    """Return engines on the first GPUs. Trainers are on the same ones, or on the next ones if they are apart.

    Raise `ConfigError` if there are too few.
    """
    if gpus == 0:
        return Layout((), ())
    first = case.receivers if case.apart else 0
    needed = max(first + case.ranks, case.receivers)
    if needed > gpus:
        raise ConfigError(f"{case.ranks} ranks and {case.receivers} workers need {needed} GPUs, found {gpus}")
    size = case.engine_workers
    workers = [tuple(range(e * size, (e + 1) * size)) for e in range(case.engines)]
    return Layout(tuple(range(first, first + case.ranks)), tuple(workers))


def refusal(case: Case, gpus: int, installed: frozenset[str], core_in_process: bool = False) -> str | None:
    """Return the reason why this case cannot run with `gpus` GPUs and these modules, or None if it can.

    core_in_process: vLLM runs the core of an `LLM` in the process that makes it.
    """
    config = SHAPES[case.shape]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    has_experts, expert_parallel = any("experts" in name for name in config), case.expert_parallel
    on_gpus = case.way in NATIVE
    beside = on_gpus and not case.apart
    has_encoding = case.encoding == "none" or (case.way == WEIGHTSYNC and case.transport == "broadcast")
    reasons = {
        f"{case.way} moves GPU memory, found no GPU": on_gpus and gpus == 0,
        "NIXL is not installed: pip install 'weightsync[nixl]'": case.transport == "nixl" and "nixl" not in installed,
        "encodings are measured over broadcast": not has_encoding,
        f"--changed {case.changed:g}: expected a share, over 0 and at most 1": not 0 < case.changed <= 1,
        f"{case.backend} is not installed": case.backend in BACKENDS[2:] and case.backend not in installed,
        "peers are measured from a plain module or FSDP2": case.way in PEERS and case.backend not in BACKENDS[:2],
        "a plain module has one rank: use --backend fsdp": case.backend == "plain" and case.ranks > 1,
        "vLLM's own engines are measured one at a time": on_gpus and case.engines > 1,
        "vLLM's nccl engine sends from one rank": on_gpus and case.apart and case.ranks > 1,
        f"{case.way} needs a rank on each worker's GPU": beside and case.ranks != case.receivers,
        f"{case.way} is measured into unquantised engines": case.way == FILES and case.quantization != "none",
        f"{case.way} wants an engine that read a checkpoint at its start": case.way == FILES and not case.starts_cold,
        "Megatron models are of dense Qwen3 shapes": case.backend == "megatron" and config["model_type"] != "qwen3",
        f"{case.ranks} ranks cannot share {kv_heads} heads": case.backend == "megatron" and kv_heads % case.ranks,
        f"{case.tp} workers cannot share {heads} attention heads": heads % case.tp,
        f"{case.shape} has no experts": expert_parallel and not has_experts,
        "one worker has all experts: add --tp or --data-parallel-size": expert_parallel and case.engine_workers == 1,
        "an LLM has no data parallelism: use --client http": case.client != HTTP and case.data_parallel_size > 1,
        "vLLM's engine for CPUs crashes when experts are parallel": gpus == 0
        and (expert_parallel or (has_experts and case.data_parallel_size > 1)),
        # Such a worker would use the ranks' process group as its own, and wait in it for the other ranks.
        f"VLLM_ENABLE_V1_MULTIPROCESSING=0 puts an LLM of one worker into rank 0 of {case.ranks}. Unset it, or use "
        "--client http or --ranks 1": case.client != HTTP and case.ranks > 1 and case.tp == 1 and core_in_process,
    }
    try:
        lay_out(case, gpus)
    except ConfigError as error:
        reasons[error.message] = True
    return next((reason for reason, holds in reasons.items() if holds), None)


def floor(case: Case, nbytes: int, limits: Mapping[str, float], gpus: int) -> tuple[float, str]:
    """Return the least seconds for `nbytes`, and the name of the limit. `limits` has GB/s by name.

    Each worker copies its bytes into its GPU. Of these, the ranks' shards on that GPU cross no link. Between GPUs or
    hosts, each rank sends its shards over a link of its own. With an encoding it compares them with the last push's.
    """
    needed = nbytes * case.replicas / case.engine_workers
    if case.transport == "checkpoint" or case.way == FILES:
        passed = {FILE_WRITE: float(nbytes)}
    elif case.encoding != "none":
        passed = {DEVICE_COPY if gpus else MEMCPY: nbytes / case.ranks}
    elif case.apart:
        passed = {NIXL_READ if case.transport == "nixl" else BROADCAST: max(nbytes / case.ranks, needed)}
    elif gpus == 0:
        passed = {MEMCPY: float(case.engines * case.replicas * nbytes)}
    else:
        near = nbytes / case.ranks if case.receivers <= case.ranks else 0.0
        passed = {DEVICE_COPY: needed} | ({PEER_COPY: needed - near} if needed > near else {})
    return max((size / (limits[limit] * 1e9), limit) for limit, size in passed.items())
