"""An engine without vLLM: the real receiver and conversation around a small module, one thread for each worker."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weightsync.worker.engine_model import WorkerIdentity
from weightsync.worker.session import WorkerSession


class ModuleHost:
    """A `EngineModel` of what `make` makes, a module with a `load_weights` method.

    `live` was loaded from `weights` and post-processed, as an engine is when it starts.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        weights: dict[str, torch.Tensor],
        post_process: Callable[[nn.Module], None] = lambda module: None,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.identity = WorkerIdentity(rank, world, f"tp={rank}")
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.all_reduce_max = None
        self.sharing = 1
        self.may_discard = False
        self.unreachable_params: list[str] = []
        self.post_process = post_process
        self.refreshed = 0
        self.sleeps = False
        self.left_out: dict[str, Callable[[], nn.Module]] = {}
        """Children that the engine was started without."""
        self.towers: list[str] = []
        """Children that are towers, and that the engine has."""
        with torch.device("meta"):
            self._pristine = make()
        self.live = make()
        with torch.no_grad():
            self.load_weights(self.live, list(weights.items()))
            for module in self.live.modules():
                post_process(module)

    def pristine(self) -> nn.Module:
        return self._pristine

    def load_weights(self, model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        return model.load_weights(weights)  # type: ignore[operator]

    @contextmanager
    def with_missing_towers(self, model: nn.Module) -> Iterator[list[str]]:
        with torch.device("meta"):
            for name, make in self.left_out.items():
                model.add_module(name, make())
        yield [*self.towers, *self.left_out]
        for name in self.left_out:
            delattr(model, name)

    def parts(self, module: nn.Module) -> list[Any]:
        return [module]

    def passes_over(self, name: str) -> bool:
        return False

    def find_lost(self, filled: Collection[str], kept: Sequence[str]) -> None:
        pass

    def check_kept(self, kept: Sequence[str]) -> None:
        pass

    def restore_lost(self) -> None:
        pass

    def is_asleep(self) -> bool:
        return self.sleeps

    def guard_forward(self, check: Callable[[], None]) -> None:
        self.check_before_answer = check

    def end_process(self, reason: str) -> None:
        raise AssertionError(f"this worker would have ended: {reason}")

    def refresh_derived_state(self) -> bool:
        self.refreshed += 1
        return False

    def check_requests(self) -> None:
        pass

    def search_kv_cache(self) -> Callable[[], bool]:
        return lambda: False

    def scope(self) -> AbstractContextManager[Any]:
        return torch.no_grad()


def module_of(tensors: dict[str, torch.Tensor]) -> nn.Module:
    """A trainer's module with these parameters."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        owner = root
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(last, nn.Parameter(tensor.clone()))
    return root


class FakeEngine:
    """An `Engine` of `weightsync.engines` with a worker for each of `hosts`."""

    name = "a fake engine"
    host = "127.0.0.1"

    def __init__(self, *hosts: ModuleHost) -> None:
        self.hosts = hosts
        self.sessions = [WorkerSession(host) for host in hosts]
        self.log: list[str] = []
        self._version = "default"

    def init(self, init_info: dict[str, Any]) -> None:
        self._on_all(lambda session: session.init(init_info))

    def start(self) -> None:
        self.log.append("start")
        self._on_all(lambda session: session.start())

    def update(self, update_info: dict[str, Any]) -> None:
        self._on_all(lambda session: session.update(update_info))

    def finish(self, version: str | None) -> None:
        self.log.append("finish")
        self._on_all(lambda session: session.finish())
        if version is not None:
            self._version = version

    def pause(self, mode: str) -> None:
        self.log.append(f"pause {mode}")

    def resume(self) -> None:
        self.log.append("resume")

    def reset_caches(self) -> None:
        self.log.append("reset caches")

    def set_version(self, version: str) -> None:
        self._version = version

    def version(self) -> str | None:
        return self._version

    def is_alive(self) -> bool:
        return True

    def close(self) -> None:
        for session in self.sessions:
            session.close()

    def _on_all(self, call: Callable[[WorkerSession], None]) -> None:
        errors: list[Exception] = []

        def run(session: WorkerSession) -> None:
            try:
                call(session)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(one,), daemon=True) for one in self.sessions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


def fail_once_after(receiver: Any, chunk: int) -> None:
    """Let a receiver raise once, in the middle of this chunk of its next push, or of the last one where there are
    fewer: what is copied into live parameters has been, and nothing else."""
    run = receiver.run

    def run_and_fail(go: Any, *args: Any) -> Any:
        del receiver.run
        plan = receiver._plan
        fail_once_copied(plan._paths[0], min(chunk, plan._arrivals.chunks(not plan.is_committed)[-1]))
        if (changed := plan.changed) is not None:
            changed.write = functools.partial(write_and_fail, changed.write)
        return run(go, *args)

    receiver.run = run_and_fail


def write_and_fail(write: Any) -> None:
    write()
    raise MemoryError("no memory left for these changes")


def fail_once_copied(in_place: Any, chunk: int) -> None:
    """Let the load path of what is copied in place raise once, when it has copied what this chunk has for it."""
    load = in_place.load

    def load_and_fail(number: int) -> int:
        nbytes: int = load(number)
        if number == chunk:
            del in_place.load
            raise MemoryError("no memory left for this chunk")
        return nbytes

    in_place.load = load_and_fail


# ---------------------------------------------------------------------------------------------------------------
# A model, as the engine has it and as the trainer has it

ROWS, PADDED_ROWS, WIDTH, HEADS = 5, 8, 6, 4


class Attention(nn.Module):
    """q, k and v are one weight, each with a bias."""

    def __init__(self, tp: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3 * HEADS // tp, WIDTH))
        self.bias = nn.Parameter(torch.empty(3 * HEADS // tp))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t() + self.bias


class Decay(nn.Module):
    """Loaded by arithmetic: the checkpoint has its logarithm."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.empty(HEADS))


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH))
        self.register_buffer("seen", torch.zeros(()))


class Layer(nn.Module):
    def __init__(self, tp: int) -> None:
        super().__init__()
        self.attn = Attention(tp)
        self.decay = Decay()
        self.norm = Norm()


class Embedding(nn.Module):
    """Padded to a multiple of 8 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(PADDED_ROWS, WIDTH))


class TinyEngineModel(nn.Module):
    """Rank `rank` of `tp`. Its loader knows the names of `checkpoint`."""

    def __init__(self, rank: int = 0, tp: int = 1) -> None:
        super().__init__()
        self.rank, self.tp = rank, tp
        self.embed = Embedding()
        self.layers = nn.ModuleList([Layer(tp), Layer(tp)])
        self.head = Embedding()
        self.head.weight = self.embed.weight

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        tensors = dict(self.named_parameters()) | dict(self.named_buffers())
        for name, tensor in weights:
            owner, _, last = name.rpartition(".")
            module, _, part = owner.rpartition(".")
            if last == "log_rate":
                tensors[f"{owner}.rate"].data.copy_(-torch.exp(tensor.float()))
            elif part in ("q", "k", "v"):
                size = HEADS // self.tp
                at = "qkv".index(part) * size
                tensors[f"{module}.{last}"].data[at : at + size].copy_(tensor.narrow(0, self.rank * size, size))
            elif name == "embed.weight":
                if tensor.shape[0] != ROWS:
                    raise ValueError(f"expected {ROWS} rows, got {tensor.shape[0]}")
                tensors[name].data[:ROWS].copy_(tensor)
                tensors[name].data[ROWS:].fill_(0)
            else:
                tensors[name].data.copy_(tensor)

    def state(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.state_dict().items()}


def checkpoint(seed: int) -> dict[str, torch.Tensor]:
    """Every tensor of a trainer's model by name."""
    draw = torch.Generator().manual_seed(seed)
    found = {"embed.weight": torch.randn(ROWS, WIDTH, generator=draw)}
    for layer in (0, 1):
        for part in "qkv":
            found[f"layers.{layer}.attn.{part}.weight"] = torch.randn(HEADS, WIDTH, generator=draw)
            found[f"layers.{layer}.attn.{part}.bias"] = torch.randn(HEADS, generator=draw)
        found[f"layers.{layer}.decay.log_rate"] = torch.randn(HEADS, generator=draw)
        found[f"layers.{layer}.norm.weight"] = torch.randn(WIDTH, generator=draw)
        found[f"layers.{layer}.norm.seen"] = torch.randn((), generator=draw)
    return found


def trainer_model(tensors: dict[str, torch.Tensor]) -> nn.Module:
    """A module whose parameters have these names."""
    model = nn.Module()
    give(model, {name: nn.Parameter(tensor.clone()) for name, tensor in tensors.items()})
    return model


def give(model: nn.Module, params: dict[str, nn.Parameter]) -> None:
    """Let a module have these parameters, in modules that their names say."""
    for name, param in params.items():
        *path, last = name.split(".")
        module = model
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, param)


def cold(
    tensors: dict[str, torch.Tensor], post_process: Callable[[nn.Module], None] = lambda module: None, **where: int
) -> nn.Module:
    """The live model of an engine that was started from these tensors."""
    return ModuleHost(functools.partial(TinyEngineModel, **where), tensors, post_process).live


class PlainTrainer(nn.Module):
    """A plain module with these tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        give(self, {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()})


def open_shared_files() -> list[str]:
    """Return the files in shared memory that this process has open for others to map."""
    found = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return [name for name in found if name.startswith("/dev/shm/#")]
