"""The entry point `vllm.general_plugins`: vLLM calls `register` in every one of its processes.

It must never raise nor import anything heavy. A plug-in that raises keeps every vLLM on the machine from starting, also
for users who do not use weightsync.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

BACKEND = "weightsync"
"""What users write in `weight_transfer_config={"backend": "weightsync"}`."""


def register() -> None:
    """Register the weight transfer backend "weightsync" and the quantisations "weightsync_int8", "weightsync_plain".

    May be called any number of times.
    """
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        WeightTransferEngineFactory.register_engine(BACKEND, "weightsync.vllm.engine", "WeightSyncEngine")
    except Exception:
        logger.debug("registered already, or this vLLM has no weight transfer engines", exc_info=True)
    try:
        from weightsync.vllm.quant_schemes import register as register_quantisations

        register_quantisations()
    except Exception:
        logger.debug("this vLLM does not know how to register a quantisation", exc_info=True)
