"""The entry point `vllm.general_plugins`: vLLM calls `register` in every one of its processes.

`register` must never raise, and must not import large modules. A raising plug-in keeps every vLLM on the machine from
starting, even for users without weightsync.
"""

from __future__ import annotations

import logging
from typing import Any

from weightsync.errors import ConfigError
from weightsync.net.wire import BACKEND
from weightsync.vllm.llm_object import core_process

logger = logging.getLogger(__name__)


def register() -> None:
    """Register the backend "weightsync" of engines and trainers, and "weightsync_int8" and "weightsync_plain".

    The last two are quantisations. Also requests AMX.

    May be called any number of times.
    """
    for step in (_register_engine, _register_trainer, _register_quantisations, _request_amx):
        try:
            step()
        except Exception:
            logger.debug("done already, or this vLLM cannot do it: %s", step.__name__, exc_info=True)


def _register_engine() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(BACKEND, "weightsync.vllm.engine", "WeightSyncEngine")


def _register_trainer() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    trainer = "weightsync.integrations.vllm_trainer", "WeightSyncTrainerEngine"
    WeightTransferTrainerFactory.register_engine(BACKEND, *trainer)


def _register_quantisations() -> None:
    from weightsync.vllm.quant_schemes import register

    register()


def _request_amx() -> None:
    """Request AMX of Linux. Without a request, the first use of AMX's tiles ends the process by SIGILL.

    vLLM leaves the request to oneDNN, and calls oneDNN for large matrices alone. So an engine of a small model ends.
    """
    import torch
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        torch.cpu._init_amx()


def plug_into(llm: Any) -> None:
    """Give a running `LLM` the plug-in of `weight_transfer_config={"backend": "weightsync"}`.

    Raises:
        ConfigError: The engine or the workers of the `LLM` are other processes, and take the plug-in only at their
            start. Or the `LLM` has another weight transfer backend.
    """
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    config = llm.llm_engine.vllm_config
    if config.weight_transfer_config is not None:
        if config.weight_transfer_config.backend != BACKEND:
            raise ConfigError(f"this LLM was started with another backend: {config.weight_transfer_config}")
        return
    if core_process(llm) is not None:
        raise ConfigError(
            'the engine of this LLM is another process; start it with weight_transfer_config={"backend": '
            '"weightsync"}, or in this process with VLLM_ENABLE_V1_MULTIPROCESSING=0'
        )
    register()
    config.weight_transfer_config = WeightTransferConfig(backend=BACKEND)
    for wrapper in llm.collective_rpc(lambda worker: worker):
        worker = getattr(wrapper, "worker", wrapper)
        worker.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
            config.weight_transfer_config, config, worker.device, worker.model_runner.get_model()
        )
