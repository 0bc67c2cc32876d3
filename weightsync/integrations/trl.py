"""Pushes of weightsync in TRL's trainers.

    trainer = GRPOTrainer(model, args=GRPOConfig(use_vllm=True, vllm_mode="colocate"), ...)
    sync = attach(trainer)      # every rank calls this
    trainer.train()             # TRL decides when; weightsync pushes

TRL makes the engine and calls `VLLMGeneration.sync_weights` before it generates with a new policy. `attach` replaces
this method of one trainer by a push. No other trainer of the process changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch
from transformers import TrainerCallback

from weightsync.config import BackendName, check_count
from weightsync.errors import ConfigError, UnsupportedError
from weightsync.strategies import demands_of
from weightsync.sync import WeightSync

_KNOWN = ("1.16.",)
"""The known releases of TRL. This module depends on their `VLLMGeneration`."""


def attach(trainer: Any, transport: Any = "ipc", **options: Any) -> WeightSync:
    """Push to the vLLM of `trainer` when TRL would synchronise its weights. Every rank calls this, before `train`.

    TRL's mode "colocate" needs nothing else. In its mode "server" the server needs weightsync's plug-in, and the
    trainer must be made inside of `no_communicator()`.

    Args:
        trainer: A trainer with an engine, made with `use_vllm=True`, such as TRL's for GRPO, RLOO and distillation.
        transport: As for `WeightSync`. With "lora" the server then generates with the adapter.
        **options: The options of `WeightSync`, except backend and engine. The trainer determines these two.

    Returns:
        The `WeightSync` that pushes. `sync.last_report` describes the last push. `sync.close()` disconnects the engine.

    Raises:
        ConfigError: The trainer has no engine, or TRL cannot use the transport.
        UnsupportedError: The release of TRL is not known.
    """
    _check_release()
    generation = getattr(trainer, "vllm_generation", None)
    if generation is None:
        raise ConfigError(
            f"this {type(trainer).__name__} has no `vllm_generation`; make it with use_vllm=True, or push with "
            "PushCallback(WeightSync(backend, transport, engine))"
        )
    colocated = generation.mode == "colocate"
    demands = demands_of(transport)
    if demands == "writing":
        raise ConfigError('single_copy needs steps inside of `writing()`, unlike TRL\'s; choose "ipc"')
    if demands == "server":
        raise ConfigError("restart=True restarts weightsync's own server, and TRL has its own engine: leave it out")
    if colocated and demands == "adapter":
        raise ConfigError(
            "TRL's engine in the trainer's process takes no adapters. Choose \"ipc\" to merge them as they travel, or "
            "a server started with --enable-lora"
        )
    client = None if colocated else getattr(generation, "vllm_client", None)  # rank 0's alone
    if colocated:
        from weightsync.vllm.plugin import plug_into

        plug_into(generation.llm)
    backend: BackendName = "deepspeed" if trainer.is_deepspeed_enabled else "fsdp"
    sync = WeightSync(backend, transport, generation.llm if colocated else client and client.base_url, **options)

    def sync_weights() -> None:
        if colocated and generation.enable_sleep_mode:
            torch.cuda.empty_cache()  # or memory that the trainer freed stays in torch's cache
            generation.llm.wake_up(tags=["weights"])
            generation._llm_weights_sleeping = False  # TRL's own flag
        sync.push(trainer.model_wrapped)
        if client is not None and sync.adapter is not None:
            client.model = sync.adapter.name

    generation.sync_weights = sync_weights
    return sync


@contextmanager
def no_communicator() -> Iterator[None]:
    """Stop trainers made inside from opening TRL's NCCL group with their vLLM servers.

        with no_communicator():
            trainer = GRPOTrainer(model, args=GRPOConfig(use_vllm=True, vllm_mode="server"), ...)
        attach(trainer)

    Raises `UnsupportedError` for an unknown release of TRL.
    """
    _check_release()
    from trl.generation.vllm_client import VLLMClient

    opened = VLLMClient.init_communicator
    VLLMClient.init_communicator = lambda *args, **kwargs: None
    try:
        yield
    finally:
        VLLMClient.init_communicator = opened


class Transfer:
    """A value for `AsyncGRPOTrainer(weight_transfer=...)`: TRL's `WeightTransferProtocol`.

        sync = WeightSync("stream", "ipc", "http://localhost:8000", ranks="alone")
        trainer = AsyncGRPOTrainer(model, ..., weight_transfer=Transfer(sync))

    TRL gathers each tensor, merges adapters, and calls rank 0 alone. A push pauses the server and resumes it.
    """

    def __init__(self, sync: WeightSync) -> None:
        self._sync = sync

    def init_weight_transfer(self) -> None:
        return

    def pause(self) -> None:
        return

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        self._sync.push(iterator)

    def resume(self) -> None:
        return

    def destroy(self) -> None:
        self._sync.close()


class PushCallback(TrainerCallback):
    """A callback for any trainer of transformers or TRL. It pushes when training begins, and after steps.

    Each rank's trainer has a callback with its own `WeightSync`.

    Args:
        sync: The `WeightSync` of this rank.
        every: Push after each `every` steps.

    Raises:
        ConfigError: `every` is below 1.
    """

    def __init__(self, sync: WeightSync, every: int = 1) -> None:
        check_count("every", every, "a push follows so many steps")
        self._sync, self._every = sync, every

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self._sync.push(objects["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if state.global_step % self._every == 0:
            self._sync.push(objects["model"])


def _check_release() -> None:
    found = version("trl")
    if not found.startswith(_KNOWN):
        raise UnsupportedError(
            f"TRL {found} may synchronise weights otherwise than {', '.join(_KNOWN)}x; install one of these versions, "
            "or push with PushCallback"
        )
