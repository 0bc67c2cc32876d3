"""Workers, and an engine without vLLM, for tests of `weightsync.hybrid`. They run in Ray's processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from fake_engine import FakeEngine, ModuleHost, PlainTrainer, TinyEngineModel, checkpoint
from safetensors.torch import load_file, save_file
from tensordict import TensorDict

from weightsync.errors import ManifestError
from weightsync.hybrid import Dispatch, Worker, column, register


class Unreadable:
    """A value that cannot be read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


class Policy(Worker):
    def init_model(self, seed: int) -> None:
        self.model = PlainTrainer(checkpoint(seed))
        self.calls: list[str] = []

    @register(Dispatch.ONE_TO_ALL)
    def where(self, *roles: str) -> dict[str, Any]:
        total = torch.tensor(self.rank + 1)
        dist.all_reduce(total)
        pid = {name: worker.pid() for name, worker in self.roles.items() if name in roles}
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        return {"total": int(total), "pid": os.getpid(), "roles": pid, **{name: os.environ[name] for name in names}}

    @register(Dispatch.DP)
    def scale(self, batch: TensorDict, by: int = 1) -> TensorDict:
        return TensorDict({"scaled": batch["number"] * by, "text": batch.get("text")}, batch.batch_size)

    @register(Dispatch.DP_PADDED)
    def echo(self, batch: TensorDict) -> TensorDict:
        return batch

    @register(Dispatch.DP_PADDED)
    def add(self, first: TensorDict, second: TensorDict) -> TensorDict:
        """Return the sum of two columns, and of each row the number of rows that its rank got."""
        rows = torch.full(first.batch_size, len(first))
        return TensorDict({"sum": first["number"] + second["number"], "rows": rows}, first.batch_size)

    @register(Dispatch.ALL_TO_ALL)
    def numbers(self, batch: TensorDict) -> list[int]:
        return list(batch["number"].tolist())

    @register(Dispatch.ALL_TO_ALL)
    def note(self, call: str, seconds: float) -> list[str]:
        time.sleep(seconds)
        self.calls.append(call)
        return self.calls

    @register(Dispatch.RANK_ZERO)
    def nothing(self) -> int:
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def fail(self, kind: str, rank: int, until: Path | None = None) -> None:
        if self.rank == rank:
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ManifestError("one is missing", missing=["q"]) if kind == "ours" else KeyError(kind)
        if kind == "kill":
            dist.barrier()
        while until is not None and not until.exists():
            time.sleep(0.05)

    @register(Dispatch.ONE_TO_ALL)
    def unreadable(self) -> Any:
        return Unreadable()

    @register(Dispatch.ONE_TO_ALL)
    def change(self, seed: int) -> None:
        with torch.no_grad():
            for name, tensor in checkpoint(seed).items():
                self.model.get_parameter(name).copy_(tensor)

    def unregistered(self) -> None: ...


class Learner(Worker):
    """A step adds one to every weight, and saves the weights."""

    def init_model(self, folder: Path) -> None:
        self.file = folder / "weights.safetensors"
        saved = load_file(self.file) if self.file.exists() else {**checkpoint(0), "steps": torch.zeros(())}
        self.steps = int(saved.pop("steps"))
        self.model = PlainTrainer(saved)

    @register(Dispatch.ONE_TO_ALL)
    def step(self) -> int:
        self.steps += 1
        weights = {name: tensor + self.steps for name, tensor in checkpoint(0).items()}
        with torch.no_grad():
            for name, tensor in weights.items():
                self.model.get_parameter(name).copy_(tensor)
        if self.rank == 0:
            self.file.parent.mkdir(exist_ok=True)
            save_file({**weights, "steps": torch.tensor(self.steps)}, self.file)
        dist.barrier()
        return self.steps

    @register(Dispatch.ALL_TO_ALL)
    def wait(self, seconds: float) -> None:
        time.sleep(seconds)


class Adam(Worker):
    """A model whose steps depend on the batch, on the optimizer's state and on a random generator."""

    def init_model(self) -> None:
        self.model = PlainTrainer(checkpoint(0))
        self.optimizer = torch.optim.Adam(self.model.requires_grad_().parameters(), lr=0.01)
        self.draw = torch.Generator().manual_seed(3)

    @register(Dispatch.DP)
    def update(self, batch: TensorDict) -> None:
        mean = (batch["number"] * batch["version"]).float().mean()
        dist.all_reduce(mean)
        for parameter in self.model.parameters():
            parameter.grad = (mean * torch.randn(parameter.shape, generator=self.draw)).to(parameter.dtype)
        self.optimizer.step()

    @register(Dispatch.RANK_ZERO)
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}

    def save_state(self, folder: Path) -> None:
        states = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**states, "draw": self.draw.get_state()}, folder / f"rank-{self.rank}.pt")
        if (folder.parent.parent / "die").exists() and self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def load_state(self, folder: Path) -> None:
        saved = torch.load(folder / f"rank-{self.rank}.pt", weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.draw.set_state(saved["draw"])


class Neighbour(Worker):
    """Another role."""

    def pid(self) -> int:
        return os.getpid()

    @register(Dispatch.RANK_ZERO)
    def ask(self) -> int:
        return self.roles["Policy"].rank

    @register(Dispatch.RANK_ZERO)
    def texts(self, batch: TensorDict) -> list[str]:
        return list(batch.get("text").tolist())

    @register(Dispatch.RANK_ZERO)
    def count(self, batch: TensorDict) -> int:
        return len(batch)


class FailingRole(Worker):
    def init_model(self) -> None:
        raise ValueError("no model")


class LLM:
    """What `connect` takes for vLLM's `LLM`, around the real receiver. `log` has all calls."""

    __module__ = "vllm.entrypoints.llm"

    def __init__(self) -> None:
        self.host = ModuleHost(TinyEngineModel, checkpoint(0))
        self.engine = FakeEngine(self.host)
        self.log: list[Any] = []
        self.version = "default"
        config = SimpleNamespace(
            weight_transfer_config=SimpleNamespace(backend="weightsync"),
            parallel_config=SimpleNamespace(worker_extension_cls=""),
            model_config=SimpleNamespace(is_multimodal_model=False, is_encoder_decoder=False),
        )
        self.llm_engine = SimpleNamespace(vllm_config=config)

    def collective_rpc(self, method: str, timeout: Any = None, args: Any = (), kwargs: Any = None) -> None:
        self.log.append(method)
        called = {"init_weight_transfer_engine": "init", "update_weights": "update"}
        getattr(self.engine, called.get(method) or method.partition("_")[0])(
            *(args if method in called else [None] * (method == "finish_weight_update"))
        )

    def reset_prefix_cache(self, **_: Any) -> None:
        self.log.append("reset_prefix_cache")

    def update_weight_version(self, version: str) -> None:
        self.version = version

    def get_weight_version(self) -> str:
        return self.version


class StandIn:
    """What `weightsync.vllm.rollout.RolloutEngine` is, without vLLM."""

    def __init__(self, devices: str, options: dict[str, Any]) -> None:
        self.given = devices, options["enable_sleep_mode"]
        self.llm = LLM()
        self.asleep: set[str] = set()
        self.failing, self.fails_late = "", False

    def fail_once(self, method: str, late: bool = False) -> None:
        """Let the next call of a method raise, before it has done anything. `late`: once it has done all, by waking."""
        self.failing, self.fails_late = method, late

    def begin(self, *call: Any) -> None:
        self.llm.log.append(call)
        if not self.fails_late:
            self.fail(call[0])

    def fail(self, method: str) -> None:
        if self.failing == method:
            self.failing, self.fails_late = "", False
            raise RuntimeError(f"no {method}")

    def generate(self, prompts: list[list[int]], sampling: dict[str, Any]) -> Any:
        assert not self.asleep
        self.llm.log.append(("generate", len(prompts)))
        time.sleep(sampling.get("wait_s", 0))
        return [[([*prompt, n], [-0.5] * (len(prompt) + 1)) for n in range(sampling["n"])] for prompt in prompts]

    def sleep(self, level: int) -> None:
        self.begin("sleep", level)
        self.asleep = {"weights", "kv_cache"}
        self.llm.host.sleeps = True

    def wake_up(self, tags: list[str]) -> None:
        self.begin("wake_up", tags)
        if {*tags} <= self.asleep:  # else vLLM logs a warning, and wakes nothing
            self.asleep -= {*tags}
            self.llm.host.sleeps = "weights" in self.asleep
        self.fail("wake_up")

    def sleeping(self) -> set[str]:
        return self.asleep

    def gpus_and_sleep_mode(self) -> tuple[str, bool]:
        return self.given

    def calls(self) -> list[Any]:
        log, self.llm.log = self.llm.log, []
        return log

    def state(self) -> dict[str, torch.Tensor]:
        return self.llm.host.live.state()


class Versioned(StandIn):
    """An engine that answers with the version that it serves, 0 before any push."""

    def generate(self, prompts: list[list[int]], sampling: dict[str, Any]) -> Any:
        version = 0 if self.llm.version == "default" else int(self.llm.version)
        return [[([version], [-0.5])] for _ in super().generate(prompts, {"n": 1, **sampling})]


class Gated(Versioned):
    """An engine that starts when a file exists, and fails if the file is not empty."""

    def __init__(self, devices: str, options: dict[str, Any]) -> None:
        while not options["gate"].exists():
            time.sleep(0.05)
        if text := options["gate"].read_text():
            raise ValueError(text)
        super().__init__(devices, options)


def prompts_of(count: int) -> TensorDict:
    """Return prompts of up to four tokens."""
    ids = torch.arange(count)[:, None] + torch.arange(4)
    mask = torch.arange(4) >= (torch.arange(count) % 4)[:, None]  # padded on the left
    columns = {"prompts": ids, "prompt_mask": mask, "text": column([f"prompt {n}" for n in range(count)])}
    return TensorDict(columns, [count])
