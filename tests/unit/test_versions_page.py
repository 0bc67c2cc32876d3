"""The page of `make test-versions`: what it reads from a page is what it wrote. And the lock of `make test-oldest`."""

import importlib.util
from pathlib import Path

import pytest
from reference_pages import accepted, locked

SCRIPT = Path(__file__).resolve().parents[1] / "versions/run.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("run_versions", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_page_has_its_rows(script):
    lost = dict.fromkeys(script.CHECKS, "skipped: never installed")
    mixed = dict.fromkeys(script.CHECKS, "yes") | {
        "ipc": "failure: x: 1 == 2",
        "fp8": "skipped: y",
        "LoRA": "skipped: y",
    }
    rows = {"0.32.0": mixed, "0.9.1": lost}
    assert script.rows_of(script.page(rows)) == rows


def test_the_committed_page_is_as_the_script_writes_it(script):
    text = script.PAGE.read_text()
    assert script.page(script.rows_of(text)) == text


def test_the_oldest_lock_has_the_oldest_accepted_versions():
    oldest = locked("oldest")
    for name in ("msgspec", "numpy", "ray", "rich", "tensordict", "torch", "tqdm"):
        assert f"{oldest[name]}.".startswith(accepted()[name].removeprefix(">=") + ".")
