"""Pushes of weightsync in TRL's trainers.

    trainer = GRPOTrainer(model, args=GRPOConfig(use_vllm=True, vllm_mode="colocate"), ...)
    sync = attach(trainer)      # every rank calls this
    trainer.train()             # TRL decides when; weightsync pushes

TRL makes the engine and calls `VLLMGeneration.sync_weights` before it generates with a new policy. `attach` replaces
this method of one trainer by a push. No other trainer of the process changes.

No release of TRL promises these names. `attach` looks for each of them, and the first generation shows whether TRL has
called the replacement.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch
from transformers import TrainerCallback

from weightsync.config import BackendName, check_count
from weightsync.errors import ConfigError, ManifestError, UnsupportedError
from weightsync.report import PushReport
from weightsync.strategies import demands_of
from weightsync.sync import WeightSync

logger = logging.getLogger(__name__)

_TESTED = (1, 5), (1, 16)
"""The first and the last release of TRL that ran."""


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
        UnsupportedError: This release of TRL lacks a name that the push needs. Or, from `train`: TRL would generate
            before any push.
    """
    generation = getattr(trainer, "vllm_generation", None)
    if generation is None:
        raise ConfigError(
            f"this {type(trainer).__name__} has no `vllm_generation`; make it with use_vllm=True, or push with "
            "PushCallback(WeightSync(backend, transport, engine))"
        )
    _require(generation, "mode", "sync_weights", "generate")
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
    if client is not None and not hasattr(client, "model"):
        raise UnsupportedError(
            f"TRL {version('trl')} generates through its own server, which has no place for weightsync's plug-in. "
            'Choose vllm_mode="colocate", or TRL 1.13 or later with `weightsync serve`'
        )
    if colocated:
        from weightsync.vllm.plugin import plug_into

        _require(generation, "llm", "enable_sleep_mode")
        plug_into(generation.llm)
    backend: BackendName = "deepspeed" if trainer.is_deepspeed_enabled else "fsdp"
    sync = WeightSync(backend, transport, generation.llm if colocated else client and client.base_url, **options)

    def sync_weights() -> None:
        if colocated and generation.enable_sleep_mode:
            torch.cuda.empty_cache()  # or memory that the trainer freed stays in torch's cache
            generation.llm.wake_up(tags=["weights"])
            generation._llm_weights_sleeping = False  # TRL's own flag. Releases before 1.10 do without it
        _report(trainer, sync.push(trainer.model_wrapped))
        # A live teacher, of SDPO and SDFT, is the policy itself on the server.
        for asking in (client, getattr(trainer, "teacher_client", None)):
            if asking is not None and sync.adapter is not None:
                asking.model = sync.adapter.name

    def generate(*args: Any, **kwargs: Any) -> Any:
        if sync.last_report is None:
            raise UnsupportedError(
                f"TRL {version('trl')} generates, and has not called VLLMGeneration.sync_weights: no weights were "
                "pushed. Push with PushCallback"
            )
        return type(generation).generate(generation, *args, **kwargs)

    generation.sync_weights, generation.generate = sync_weights, generate
    _expect_push(trainer)
    trainer.add_callback(_AfterTraining(trainer))
    _warn_of_release()
    logger.info("TRL %s synchronises its weights through %r", version("trl"), sync)
    return sync


def _report(trainer: Any, report: PushReport) -> None:
    """Add a push's metrics to the trainer's own, which TRL averages and logs. A trainer without them gets none."""
    mode = "train" if trainer.model.training else "eval"
    if (metrics := getattr(trainer, "_metrics", {}).get(mode)) is not None:
        for name, value in report.metrics().items():
            metrics[name].append(value)


def _expect_push(trainer: Any) -> None:
    """Make TRL synchronise before it generates next, whatever it has noted."""
    if hasattr(trainer, "_last_loaded_step"):
        trainer._last_loaded_step = -1
    if hasattr(trainer, "_last_vllm_sync_step"):
        trainer._last_vllm_sync_step = -trainer.vllm_sync_frequency


class _AfterTraining(TrainerCallback):
    """Lets an evaluation after `train` synchronise: with `load_best_model_at_end` the model has other weights."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        _expect_push(self._trainer)


@contextmanager
def no_communicator() -> Iterator[None]:
    """Stop trainers made inside from opening TRL's NCCL group with their vLLM servers.

        with no_communicator():
            trainer = GRPOTrainer(model, args=GRPOConfig(use_vllm=True, vllm_mode="server"), ...)
        attach(trainer)

    Raises `UnsupportedError` for a release of TRL without this group.
    """
    from trl.generation.vllm_client import VLLMClient

    _require(VLLMClient, "init_communicator")
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
        try:
            self._sync.push(iterator)
        except ManifestError as error:
            if error.missing:
                error.message += (
                    ". TRL's asynchronous trainer sends no parameter with requires_grad=False: let them train, or push "
                    "the whole model with PushCallback"
                )
            raise

    def resume(self) -> None:
        return

    def destroy(self) -> None:
        self._sync.close()


class PushCallback(TrainerCallback):
    """A callback for any trainer of transformers or TRL. It pushes when training begins, after steps, and at the end.

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

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if state.global_step % self._every or args.load_best_model_at_end:
            self._sync.push(objects["model"])


def _require(found: Any, *names: str) -> None:
    """Raise `UnsupportedError` if TRL's object lacks one of these names."""
    if lacking := [name for name in names if not hasattr(found, name)]:
        owner = found if isinstance(found, type) else type(found)
        raise UnsupportedError(
            f"TRL {version('trl')} has no {', '.join(lacking)} in its {owner.__name__}, and weightsync needs it. Push "
            "with PushCallback"
        )


def _warn_of_release() -> None:
    release = version("trl")
    first, last = _TESTED
    if not first <= tuple(int(part) for part in release.split(".")[:2]) <= last:
        logger.warning(
            "weightsync ran with TRL %d.%d to %d.%d, and never with %s. Its first prompt shows whether TRL calls it",
            *first,
            *last,
            release,
        )
