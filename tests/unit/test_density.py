"""The shares that benchmarks/density.py tells of a run, and their picture."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def density(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import density

    yield density
    del sys.modules["density"]


def test_changed_words_are_counted_by_layer(density: Any) -> None:
    policy = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))})
    policy["norm"] = torch.nn.LayerNorm(4)
    base = density.words_of(policy)
    with torch.no_grad():
        policy["layers"][1].weight[0, :3] *= 2
        policy["layers"][1].bias[0] += 1
        policy["norm"].weight[0] *= 1 + 1e-6  # less than half a unit in the last place of bfloat16
    assert density.count_changes(density.words_of(policy), base) == {"0": 0, "1": 4, "norm": 0}


def test_a_run_becomes_a_table_and_a_picture(density: Any, tmp_path: Path) -> None:
    def row(step: int, share: float) -> dict[str, Any]:
        layers = {"embed_tokens": share, "0": share / 2, "1": share * 2, "norm": 0.0}
        return {"step": step, "reward": 0.1 * step, "changed": share, "layers": layers}

    runs = [{"lr": lr, "steps": [row(1, 4e3 * lr), row(2, 1e3 * lr)]} for lr in (1e-6, 1e-5)]
    found = {"shape": "0.5B", "device": "a GPU", "runs": runs}
    assert density.table(found).splitlines()[2:] == [
        "| 1e-06 | 0.40 % | 0.10 % | 0.05 % | 0.20 % | 0.15 to 0.15 |",
        "| 1e-05 | 4.00 % | 1.00 % | 0.50 % | 2.00 % | 0.15 to 0.15 |",
    ]
    density.draw(found, tmp_path / "found.svg")
    texts = {each.text for each in ElementTree.parse(tmp_path / "found.svg").iter() if each.text}
    assert {"lr 1e-06", "lr 1e-05", "embed_tokens", "0.5B, GRPO on a GPU"} <= texts
