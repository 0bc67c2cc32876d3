"""`weightsync bench --plot`: the words and numbers of a picture, and the pictures of the documents."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from weightsync.tools import cli
from weightsync.tools.bench.plot import describe, draw, numbers
from weightsync.tools.bench.run import read_results

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PICTURES = {
    "benchmarks-experts.svg": ["2026-11-27-h200-experts.json"],
    "benchmarks-dense.svg": [
        "2026-11-27-h200-fsdp-tp2.json",
        "2026-11-25-h200-fsdp.json",
        "2026-11-25-h100-broadcast.json",
    ],
}


def row(median_s: float = 0.02, **case: Any) -> dict[str, Any]:
    ours = {"way": "weightsync", "backend": "plain", "ranks": 1, "transport": "ipc", "bucketer": "module"}
    engine = {"shape": "8B", "dtype": "bfloat16", "quantization": "none", "engines": 1, "tp": 1, "client": "llm"}
    total = {"median": median_s, "least": 0.9 * median_s, "most": 1.2 * median_s}
    return {
        "schema": 3,
        "case": {**ours, **engine, **case},
        "environment": {"gpus": ["NVIDIA H200"]},
        "nbytes": 16_381_470_720,
        "floor_s": 0.0078,
        "floor_limit": "device copy",
        "graphs": "decode",
        "first": {"total_s": 2.0},
        "seconds": {"in_training": {"total_s": total}, "back_to_back": {"total_s": total}},
        "extra_bytes": [],
        "answers": 0,
    }


def peer(median_s: float) -> dict[str, Any]:
    return row(median_s, way="vllm ipc packed", transport="", bucketer="")


def failed() -> dict[str, Any]:
    kept = {"case", "environment", "nbytes", "floor_s", "floor_limit"}
    return {name: value for name, value in row(tp=2).items() if name in kept} | {"error": "no memory"}


def texts(picture: Path) -> str:
    return "\n".join(ElementTree.parse(picture).getroot().itertext())


def test_properties_of_all_cases_are_the_title_and_the_others_are_labels():
    title, labels = describe([row(), row(quantization="fp8"), peer(0.155)])
    trainer, engine = "trainer plain x1, bfloat16, by module", "engine 1 x TP=1, client llm, CUDA graphs decode"
    assert title == f"NVIDIA H200, 8B (16.38 GB), {trainer}, {engine}"
    assert labels == ["ipc, unquantised", "ipc, fp8", "vllm ipc packed, unquantised"]


def test_a_single_case_is_named_by_the_title():
    title, labels = describe([row()])
    assert "ipc, by module, engine 1 x TP=1, unquantised" in title
    assert labels == [""]


def test_numbers_of_a_case_are_median_limit_and_first_push():
    assert numbers(row()) == ("20.0 ms", "7.8 ms", "2.00 s")
    assert numbers(failed()) == ("failed", "7.8 ms", "")


def test_equal_results_make_equal_pictures(tmp_path: Path):
    pytest.importorskip("matplotlib")
    rows = [row(), peer(0.155), failed()]
    for name in ("a.svg", "b.svg", "c.png"):
        draw(rows, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    found = texts(tmp_path / "a.svg")
    assert all(text in found for text in ("vllm ipc packed", "155.0 ms", "failed", "a peer", "lower bound"))


def test_results_of_an_earlier_run_are_shown_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture):
    pytest.importorskip("matplotlib")
    (tmp_path / "found.json").write_text(json.dumps([row(), row(quantization="fp8")]))
    assert cli.main(["bench", "--from", f"{tmp_path}/found.json", "--plot", f"{tmp_path}/found.svg"]) == 0
    assert "20.0 ms" in capsys.readouterr().out
    assert "fp8" in texts(tmp_path / "found.svg")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--plot", "found.pdf"], "ends in .svg or .png"),
        (["--plot", "/nonexistent/found.svg"], "there is no folder /nonexistent"),
        (["--dry-run", "--plot", "found.svg"], "--dry-run has no results"),
        (["--from", "/nonexistent"], "--from /nonexistent: "),
        (["--from", str(RESULTS / "2026-11-25-h200-hybrid.json")], "expected cases of schema 2 or 3"),
        (["--from", str(RESULTS / "2026-11-23-h200-bench-0.5B.json")], "expected cases of schema 2 or 3"),
    ],
)
def test_what_cannot_be_drawn_is_one_message_and_status_2(arguments: list[str], message: str, capsys):
    assert cli.main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_picture_without_matplotlib_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["bench", "--plot", "found.svg"]) == 2
    assert "pip install 'weightsync[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize("picture", PICTURES)
def test_pictures_of_the_documents_show_the_results(picture: str):
    rows = read_results([RESULTS / name for name in PICTURES[picture]])
    found, (title, labels) = texts(ROOT / "docs" / "reference" / picture), describe(rows)
    expected = [title, *labels, *(text for each in rows for text in numbers(each))]
    assert [text for text in expected if text not in found] == [], "run `make pictures`"


def test_the_timeline_of_the_documents_shows_the_results():
    pushes = json.loads((RESULTS / "2026-11-27-h200-push-timeline.json").read_text())["pushes"]
    stages = [f"{stage['lane']}: {stage['stage']}" for push in pushes for stage in push["stages"]]
    found = texts(ROOT / "docs" / "internals" / "push-timeline.svg")
    assert [stage for stage in stages if stage not in found] == [], "run `make pictures`"
