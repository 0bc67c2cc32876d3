"""An engine without vLLM, each of whose workers is a process of its own, as those of an engine with TP=2 are.

The first worker's process is also the core: it pauses, and has the version. A call is answered after the one before,
but for whether the process is alive.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import tiny_models
import torch
from fake_engine import ModuleHost
from recorders import RecordedEngine
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor

from weightsync.engines import LoraAdapter
from weightsync.engines.calls import limit_s, too_late
from weightsync.errors import EngineUnreachableError, WeightSyncError
from weightsync.net import timeouts
from weightsync.net.wire import CLEAN, POISONED

HEADS, WIDTH, LAYERS, TP = 4, 6, 3, 2
NAME = "engine 0 (stand-in)"


class Layer(nn.Module):
    """q, k and v are one parameter, of which each of `tp` workers has its rows."""

    def __init__(self, tp: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * HEADS // tp, bias=False)
        self.norm = nn.Linear(WIDTH, 1, bias=False)


class EngineModel(nn.Module):
    def __init__(self, rank: int = 0, tp: int = 1) -> None:
        super().__init__()
        self.rank, self.rows = rank, HEADS // tp
        self.layers = nn.ModuleList(Layer(tp) for _ in range(LAYERS))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            _, layer, part, _ = name.split(".")
            module = self.layers[int(layer)]
            if part == "norm":
                module.norm.weight.data.copy_(tensor)
            else:
                at = "qkv".index(part) * self.rows
                own = tensor.narrow(0, self.rank * self.rows, self.rows)
                module.qkv.weight.data[at : at + self.rows].copy_(own)


class TrainerLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for part in "qkv":
            self.add_module(part, nn.Linear(WIDTH, HEADS, bias=False))
        self.norm = nn.Linear(WIDTH, 1, bias=False)


class TrainerModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TrainerLayer() for _ in range(LAYERS))


def tensors(weights: str) -> dict[str, torch.Tensor]:
    model = TrainerModel()
    fill(model, weights)
    return model.state_dict()


def fill(model: nn.Module, weights: str) -> None:
    """Give a model these weights, sharded or not. A small letter stands for A with a column of its matrices changed."""
    matrices = [param for param in model.parameters() if param.dim() > 1]
    params = [param.to_local() if isinstance(param, DTensor) else param for param in matrices]
    with torch.no_grad():
        tiny_models.fill(model, weights.upper())
        columns = [param[..., :1].clone() for param in params]
        tiny_models.fill(model, weights if weights.isupper() else "A")
        for param, column in zip(params, columns, strict=True):
            param[..., :1] = column


def adapted_model() -> nn.Module:
    """Return a model with an adapter."""
    import peft

    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], bias="none")
    return peft.get_peft_model(tiny_models.build("qwen3", "A"), config, autocast_adapter_dtype=False)


@functools.cache
def adapter(weights: str) -> dict[str, torch.Tensor]:
    """Return what PEFT would save of the adapter of `weights`."""
    import peft

    model = adapted_model()
    tiny_models.fill(model, weights)
    state = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    return {name: tensor.detach() for name, tensor in state.items()}


class StandInWorker(RecordedEngine):
    """Lives in a worker's process, which `Remote` started: number `rank` of `TP`."""

    def __init__(self, rank: int, weights: str, address: str) -> None:
        torch.set_num_threads(1)
        make = functools.partial(EngineModel, rank, TP)
        super().__init__(ModuleHost(make, tensors(weights), rank=rank, world=TP))
        self.rank, self.is_paused = rank, False
        self.connections: list[Connection] = []
        self._loaded: dict[str, dict[str, torch.Tensor]] = {}
        """The adapters by name, the newest last."""
        self._one_at_a_time = threading.Lock()
        self._listener = Listener(address, "AF_UNIX", backlog=64)
        threading.Thread(target=self._serve, name="stand-in", daemon=True).start()

    def pause(self, mode: str) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False

    def load_adapter(self, adapter: LoraAdapter) -> None:
        super().load_adapter(adapter)
        self._loaded[adapter.name] = load_file(Path(adapter.path) / "adapter_model.safetensors")

    def unload_adapter(self, adapter: LoraAdapter) -> None:
        super().unload_adapter(adapter)
        self._loaded.pop(adapter.name, None)

    def look_at_adapter(self, known: str) -> tuple[str, str]:
        """Return which of the `known` the newest adapter is, and its version."""
        if not self._loaded:
            return "", "0"
        name, found = [*self._loaded.items()][-1]
        expected = {weights: adapter(weights) for weights in known}
        alike = [
            w
            for w, own in expected.items()
            if own.keys() == found.keys() and all(map(torch.equal, own.values(), (found[n] for n in own)))
        ]
        return "".join(alike), name.split("-")[1]

    def look(self, known: str) -> tuple[str, str, bool, str, bool]:
        """Return the worker's state, which of the `known` weights it has whole, whether it is paused, its version, and
        whether it serves a trainer, or is about to."""
        live = self.hosts[0].live.state_dict()
        found = ""
        for weights in known:
            cold = ModuleHost(functools.partial(EngineModel, self.rank, TP), tensors(weights)).live.state_dict()
            if all(torch.equal(live[name], tensor) for name, tensor in cold.items()):
                found = weights
        session = self.sessions[0]
        answers = CLEAN
        try:
            self.hosts[0].check_before_answer()
        except WeightSyncError:
            answers = POISONED
        return answers, found, self.is_paused, self.version() or "", session._serving or self._one_at_a_time.locked()

    def _serve(self) -> None:
        while True:
            caller = self._listener.accept()
            threading.Thread(target=self._answer, args=(caller,), name="stand-in call", daemon=True).start()

    def _answer(self, caller: Connection) -> None:
        with caller:
            try:
                method, args = caller.recv()
                if method == "is_alive":
                    caller.send((None, True))
                    return
                with self._one_at_a_time:
                    outcome = _outcome(getattr(self, method), args)
                caller.send(outcome)
            except (EOFError, OSError):
                pass  # the trainer is gone


def _outcome(method: Any, args: tuple[Any, ...]) -> tuple[Exception | None, Any]:
    try:
        return None, method(*args)
    except Exception as error:
        return error, None


class StandInEngine:
    """An `AdapterEngine` of `weightsync.engines`: how rank 0 calls the processes at `addresses`."""

    name = NAME

    def __init__(self, addresses: list[str], host: str, timeout_s: float) -> None:
        self.addresses, self.host, self.timeout_s = addresses, host, timeout_s

    def init(self, init_info: dict[str, Any]) -> None:
        self._everywhere("init", init_info)

    def start(self) -> None:
        self._everywhere("start")

    def update(self, update_info: dict[str, Any]) -> None:
        self._everywhere("update", update_info)

    def finish(self, version: str | None) -> None:
        self._everywhere("finish", version)

    def pause(self, mode: str) -> None:
        self._core("pause", mode)

    def resume(self) -> None:
        self._core("resume")

    def reset_caches(self) -> None:
        self._core("reset_caches")

    def set_version(self, version: str) -> None:
        self._core("set_version", version)

    def version(self) -> str | None:
        return self._core("version")

    def is_alive(self) -> bool:
        try:
            self._everywhere("is_alive")
        except WeightSyncError:
            return False
        return True

    def max_lora_rank(self) -> int | None:
        return None

    def load_adapter(self, adapter: LoraAdapter) -> None:
        self._core("load_adapter", adapter)

    def unload_adapter(self, adapter: LoraAdapter) -> None:
        self._core("unload_adapter", adapter)

    def has_adapter(self, adapter: LoraAdapter) -> bool:
        return self._core("has_adapter", adapter)

    def adapters_in_use(self) -> set[str]:
        return self._core("adapters_in_use")

    def _core(self, method: str, *args: Any) -> Any:
        return self._call(self.addresses[0], method, *args)

    def _everywhere(self, method: str, *args: Any) -> None:
        pool = ThreadPoolExecutor(len(self.addresses))
        calls = [pool.submit(self._call, address, method, *args) for address in self.addresses]
        pool.shutdown(wait=False)
        wait(calls, return_when=FIRST_EXCEPTION)
        for call in calls:
            if call.done():
                call.result()

    def _call(self, address: str, method: str, *args: Any) -> Any:
        serving = {"init": "init_weight_transfer_engine", "update": "update_weights"}.get(method, method)
        limit = (
            min(self.timeout_s / 2, timeouts.HEALTH_TIMEOUT_S)
            if method == "is_alive"
            else limit_s(serving, self.timeout_s)
        )
        try:
            with Client(address, "AF_UNIX") as connection:
                connection.send((method, args))
                if not connection.poll(limit):
                    raise too_late(method, limit, self.name)
                error, value = connection.recv()
        except (EOFError, OSError) as gone:
            if isinstance(gone, TimeoutError):
                raise
            raise EngineUnreachableError(f"its process is gone ({method}): {gone}", who=self.name) from gone
        if error is not None:
            raise error
        return value
