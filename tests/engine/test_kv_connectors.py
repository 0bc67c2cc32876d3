"""Keys and values that a connector keeps outside of the engine: none of older weights answers after a push."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import tiny_models
from engines import TIMEOUT_S, Engines, Remote, assert_same

from weightsync import EngineError, UnsupportedError, WeightSync

pytest_plugins = ["engine_fixtures"]
pytestmark = pytest.mark.engine

OWN = {"kv_connector_module_path": "kv_store"}
EXAMPLE, OFFLOADING, NIXL = ({"kv_connector": f"{name}Connector"} for name in ("Example", "Offloading", "Nixl"))
RESETTABLE, NOTHING, NOT_YET = ({"kv_connector": n, **OWN} for n in ("ResettableStore", "SaysNothing", "CannotYet"))


def offloading(**extra: Any) -> dict[str, Any]:
    return {**OFFLOADING, "kv_connector_extra_config": extra}


FILES = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [{"type": "fs", "path": "/tmp"}]}


def several(*inner: dict[str, Any]) -> dict[str, Any]:
    each = [{"kv_role": "kv_both", **one} for one in inner]
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": each}}


RESETS: list[tuple[dict[str, Any] | None, str]] = [
    (None, ""),
    (OFFLOADING, ""),
    (offloading(cpu_bytes_to_use=1, spec_name="CPUOffloadingSpec"), ""),
    (offloading(spec_name="TieringOffloadingSpec", secondary_tiers=[]), ""),
    (offloading(**FILES), "OffloadingConnector .*clears CPU memory alone, not tier fs"),
    (offloading(spec_name="Own", spec_module_path="own"), "clears CPU memory alone, not Own"),
    (several(RESETTABLE, offloading(**FILES)), "clears CPU memory alone"),
    (RESETTABLE, ""),
    (NIXL, ""),
    (several(RESETTABLE, NIXL), ""),
    (EXAMPLE, "ExampleConnector .*has no reset_cache"),
    ({"kv_connector": "HF3FSKVConnector"}, "HF3FSKVConnector .*has no reset_cache"),
    (NOTHING, "SaysNothing .*never answers True"),
    (NOT_YET, "CannotYet .*never answers True"),
    (several(RESETTABLE, EXAMPLE), "ExampleConnector .*has no reset_cache"),
    (several(RESETTABLE, several(NOTHING)), "SaysNothing .*never answers True"),
]
OLDER: list[tuple[tuple[int, int], int, dict[str, Any], str]] = [
    ((0, 25), 1, OFFLOADING, ""),
    ((0, 25), 1, NIXL, ""),
    ((0, 25), 1, RESETTABLE, "a server of vLLM before 0.26 does not report"),
    ((0, 25), 1, several(OFFLOADING, RESETTABLE), "a server of vLLM before 0.26 does not report"),
    ((0, 23), 1, offloading(spec_name="TieringOffloadingSpec"), "not TieringOffloadingSpec"),
    ((0, 23), 1, offloading(spec_name="CPUOffloadingSpec"), ""),
    ((0, 31), 1, RESETTABLE, ""),
    ((0, 31), 2, OFFLOADING, ""),
    ((0, 31), 2, RESETTABLE, "before 0.32 reports for the first data parallel core alone"),
    ((0, 32), 2, RESETTABLE, ""),
]
KEYS: list[tuple[dict[str, Any] | None, str]] = [
    (None, ""),
    (OFFLOADING, ""),
    (several(OFFLOADING, NIXL), ""),
    (RESETTABLE, "ResettableStore may mix"),
    (several(OFFLOADING, EXAMPLE), "ExampleConnector may mix"),
]


def find_what_is_refused(engines: Engines) -> None:
    from vllm.config import KVTransferConfig

    from weightsync.vllm import compat
    from weightsync.vllm.kv_connectors import check_adapters, check_resets

    sys.path.insert(0, str(Path(__file__).parent))
    for check, cases in ((check_resets, RESETS), (check_adapters, KEYS)):
        for given, words in cases:
            transfer = given and KVTransferConfig(kv_role="kv_both", **given)
            config: Any = SimpleNamespace(kv_transfer_config=transfer, ec_transfer_config=None)
            if words:
                with pytest.raises(UnsupportedError, match=words):
                    check(config)
            else:
                check(config)
    for release, cores, given, words in OLDER:
        older: Any = SimpleNamespace(
            kv_transfer_config=KVTransferConfig(kv_role="kv_both", **given),
            ec_transfer_config=None,
            parallel_config=SimpleNamespace(data_parallel_size=cores),
        )
        with mock.patch.object(compat, "release", return_value=release):
            if words:
                with pytest.raises(UnsupportedError, match=words):
                    check_resets(older)
            else:
                check_resets(older)
    encoders: Any = SimpleNamespace(ec_connector="ECExampleConnector")
    with pytest.raises(UnsupportedError, match="ECExampleConnector keeps encoder outputs"):
        check_resets(SimpleNamespace(kv_transfer_config=None, ec_transfer_config=encoders))


def start_with(engines: Engines, connector: dict[str, Any], store: Path) -> Any:
    """Start an engine of the weights A, and let it fill its store."""
    transfer = {"kv_role": "kv_both", "kv_connector_extra_config": {"shared_storage_path": str(store)}, **connector}
    engines.start(engines.checkpoint("qwen3", "A"), block_size=32, kv_transfer_config=transfer)
    return engines.ask()


def push_with_a_store(engines: Engines, folder: Path) -> None:
    answers = engines.serve("qwen3", block_size=32)
    model = tiny_models.build("qwen3", "B")
    engines._running = ()
    assert_same(start_with(engines, RESETTABLE, folder / "store"), answers["A"], "an engine with a store")
    assert os.listdir(folder / "store")
    from kv_store import ResettableStore

    with WeightSync("fsdp", "ipc", engines.llm, timeout_s=TIMEOUT_S) as sync:
        sync.push(model)
        assert_same(engines.ask(), answers["B"], "pushed")
        tiny_models.fill(model, "A")
        for answer, words in ((False, "could not reset its prefix cache or its KV connector"), (OSError("x"), "x")):
            ResettableStore.answer = answer
            with pytest.raises(EngineError, match=words):
                sync.push(model)
            assert "this engine does not answer: it is POISONED" in engines.refusal()
        if hasattr(engines.llm, "get_weight_version"):  # from vLLM 0.27 on
            assert engines.llm.get_weight_version().startswith("POISONED")
        ResettableStore.answer = True
        sync.push(model)
        assert_same(engines.ask(), answers["A"], "pushed after a reset that failed")


def refuse_a_store(engines: Engines, folder: Path) -> None:
    first = start_with(engines, EXAMPLE, folder / "store")
    model = tiny_models.build("qwen3", "B")
    with (
        WeightSync("fsdp", "ipc", engines.llm, timeout_s=TIMEOUT_S) as sync,
        pytest.raises(UnsupportedError, match="ExampleConnector keeps keys and values outside of the engine"),
    ):
        sync.push(model)
    assert_same(engines.ask(), first, "an engine that was refused")


def test_no_engine_answers_from_a_store_of_older_keys_and_values(engines: Remote, tmp_path: Path):
    engines.call(find_what_is_refused)
    engines.call(push_with_a_store, tmp_path / "resettable")
    engines.call(refuse_a_store, tmp_path / "example")
