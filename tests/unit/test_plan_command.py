"""What `weightsync plan` makes of a config.json before vLLM reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from weightsync.tools.plan import _unquantised

FP8 = {"quant_method": "fp8"}


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": FP8, "a": 1},
        {"compression_config": FP8},
        {"text_config": {"quantization_config": FP8, "b": 2}, "quantization_config": None},
    ],
)
def test_a_plan_is_without_the_quantisation_wherever_vllm_finds_it(tmp_path: Path, config: dict[str, Any]):
    (tmp_path / "config.json").write_text(json.dumps(config))
    (made := tmp_path / "made").mkdir()
    assert _unquantised(tmp_path, made, Console(quiet=True)) == made
    left = json.loads((made / "config.json").read_text())
    assert "quant_method" not in str(left)
    assert left.get("a") == config.get("a")


@pytest.mark.parametrize("text", ['{"quantization_config": null}', '{"text_config": null}', "[]", "{"])
def test_a_config_without_a_quantisation_stays_where_it_is(tmp_path: Path, text: str):
    (tmp_path / "config.json").write_text(text)
    assert _unquantised(tmp_path, tmp_path / "made", Console(quiet=True)) == tmp_path
