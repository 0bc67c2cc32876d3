"""A check that KV connectors forget their keys and values outside of the engine when vLLM asks them to.

vLLM takes a connector's None for success, and a connector without `reset_cache` answers None.
"""

from __future__ import annotations

import dis
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from weightsync.errors import UnsupportedError
from weightsync.vllm import compat

_VLLM = "vllm.distributed.kv_transfer."
_NIXL = {"NixlConnector", "NixlPullConnector", "NixlPushConnector"}
_KEEP_NOTHING = {"ExampleHiddenStatesConnector", "MoRIIOConnector", "MooncakeConnector"} | _NIXL
"""vLLM's connectors that answer only from blocks of an engine. Blocks of a transfer under way are in use, and a reset
of the prefix cache fails meanwhile."""
_KNOW_ADAPTERS = {"MooncakeStoreConnector", "OffloadingConnector", "SimpleCPUOffloadConnector"}
"""vLLM's connectors that look up keys and values by hashes of blocks. A hash covers an adapter's name and path."""
_OF_ONE_ENGINE = {"ExampleHiddenStatesConnector", "OffloadingConnector", "SimpleCPUOffloadConnector"}
"""vLLM's connectors without a way from one engine's keys and values to another engine."""


def check_resets(config: VllmConfig) -> None:
    """Raise `UnsupportedError` if the engine would answer from keys and values of older weights after a push."""
    for connector, transfer in _connectors(config.kv_transfer_config):
        reset: Any = getattr(connector, "reset_cache", None)
        extra = transfer.kv_connector_extra_config or {}
        if _is_one_of(connector, _KEEP_NOTHING):
            continue
        if reset is None or reset is getattr(KVConnectorBase_V1, "reset_cache", None):
            problem = "has no reset_cache"
        elif answers_none_alone(reset):
            problem = "has a reset_cache that never answers True"
        elif _is_one_of(connector, {"OffloadingConnector"}) and (stores := _stores_left(extra)):
            problem = f"has a reset_cache that clears CPU memory alone, not {', '.join(stores)}"
        elif _is_one_of(connector, {"OffloadingConnector"}):  # its reset does not fail
            continue
        elif compat.is_before(0, 26):
            problem = "may fail to forget them, which a server of vLLM before 0.26 does not report"
        elif compat.is_before(0, 32) and config.parallel_config.data_parallel_size > 1:
            problem = "may fail to forget them, which vLLM before 0.32 reports for the first data parallel core alone"
        else:
            continue
        raise UnsupportedError(
            f"the KV connector {connector.__name__} keeps keys and values outside of the engine, and {problem}. After "
            "a push the engine would answer from keys and values of older weights. Start it without this "
            "kv_transfer_config, or with a connector that reset_cache clears, such as OffloadingConnector"
        )
    if (transfer := getattr(config, "ec_transfer_config", None)) is not None:
        raise UnsupportedError(
            f"the connector {transfer.ec_connector} keeps encoder outputs outside of the engine, and vLLM cannot "
            "reset them. After a push the engine would answer from outputs of older weights. Start it without this "
            "ec_transfer_config"
        )


def check_adapters(config: VllmConfig) -> None:
    """Raise `UnsupportedError` if the engine may answer with one adapter from keys and values of another."""
    for connector, _ in _connectors(config.kv_transfer_config):
        if not _is_one_of(connector, _KEEP_NOTHING | _KNOW_ADAPTERS):
            raise UnsupportedError(
                f"the KV connector {connector.__name__} may mix keys and values of adapters and of the base. Start "
                f"the engine without this kv_transfer_config, or with one of {', '.join(sorted(_KNOW_ADAPTERS))}"
            )


def shared_role(config: KVTransferConfig | None) -> str:
    """Return vLLM's role of an engine that shares keys and values with other engines. "": it shares none."""
    roles = {str(transfer.kv_role) for one, transfer in _connectors(config) if not _is_one_of(one, _OF_ONE_ENGINE)}
    return "kv_both" if len(roles) > 1 else "".join(roles)


def count_of_nixl(config: KVTransferConfig | None) -> int:
    """Return the number of Nixl's connectors among an engine's."""
    return sum(_is_one_of(connector, _NIXL) for connector, _ in _connectors(config))


def answers_none_alone(function: Any) -> bool:
    """Return whether every `return` of a Python function gives None, written or not. False for any other callable."""
    code = getattr(function, "__code__", None)
    if code is None:
        return False
    steps = list(dis.get_instructions(code))
    returned = [one.argval for one in steps if one.opname == "RETURN_CONST"]
    for before, one in pairwise(steps):
        if one.opname == "RETURN_VALUE":
            returned.append(before.argval if before.opname == "LOAD_CONST" else ...)
    return all(value is None for value in returned)


def _stores_left(extra: Mapping[str, Any]) -> list[str]:
    """Return the stores left by an OffloadingConnector's `reset_cache`, which answers True: tiers, or a class."""
    tiers = [f"tier {tier.get('type')}" for tier in extra.get("secondary_tiers") or ()]
    own = extra.get("spec_name", "CPUOffloadingSpec")
    # Before 0.24 the class for tiers has no reset of its own.
    is_known = own == "CPUOffloadingSpec" or (own == "TieringOffloadingSpec" and not compat.is_before(0, 24))
    return tiers if is_known else [own, *tiers]


def _connectors(config: KVTransferConfig | None) -> list[tuple[type, KVTransferConfig]]:
    """Return the classes of an engine's connectors, each with its configuration.

    A connector of several connectors is replaced by its members.
    """
    if config is None or config.kv_connector is None:
        return []
    connector = KVConnectorFactory.get_connector_class(config)
    several = (config.kv_connector_extra_config or {}).get("connectors")
    if not hasattr(connector, "_get_connector_classes_and_configs") or several is None:
        return [(connector, config)]
    return [each for one in several for each in _connectors(KVTransferConfig(**one))]


def _is_one_of(connector: type, names: set[str]) -> bool:
    return connector.__name__ in names and connector.__module__.startswith(_VLLM)
