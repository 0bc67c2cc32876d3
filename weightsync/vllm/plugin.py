"""The entry point `vllm.general_plugins`: vLLM calls `register` in every one of its processes.

It must never fail nor import anything heavy, since a plug-in that raises keeps every vLLM on the machine from
starting, and that of people who do not use weightsync too.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

BACKEND = "weightsync"
"""What users write in `weight_transfer_config={"backend": "weightsync"}`."""


def register() -> None:
    """Make vLLM know the weight transfer backend "weightsync", and the quantisations "weightsync_int8" and
    "weightsync_plain". May be called any number of times."""
    _register_engine()
    _register_quantisations()


def _register_engine() -> None:
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        WeightTransferEngineFactory.register_engine(BACKEND, "weightsync.vllm.engine", "WeightSyncEngine")
    except Exception:
        logger.debug("registered already, or this vLLM has no weight transfer engines", exc_info=True)


def _register_quantisations() -> None:
    try:
        from weightsync.vllm import int8, plain

        int8.register()
        plain.register()
    except Exception:
        logger.debug("this vLLM does not know how to register a quantisation", exc_info=True)
