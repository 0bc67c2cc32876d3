"""The recipes of examples/frameworks inside their frameworks: the engine answers as it did when it was started."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import recipe_actors
import recipe_ranks
import tiny_models
import trl_ranks
from engines import NOT_COMPILED
from ranks import run_ranks
from sources import FOLDERS, FRAMEWORKS, RECIPES, ROOT

from weightsync.engines.server import VllmServer

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = trl_ranks.save(tmp_path_factory.mktemp("models") / "B")  # with its tokenizer
    return tiny_models.save(tiny_models.build(recipe_ranks.MODEL, "B"), folder)


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[VllmServer]:
    options = ("--max-model-len=256", "--dtype=bfloat16", "--enforce-eager", "--served-model-name=policy")
    with VllmServer(checkpoint, *options, environment=NOT_COMPILED) as server:
        yield server


@pytest.mark.parametrize("colocated", [True, False], ids=["colocated", "GPUs of their own"])
def test_skyrl(server: VllmServer, colocated: bool) -> None:
    run_ranks(recipe_ranks.skyrl, 2, server.url, colocated, timeout_s=200)


@pytest.mark.parametrize("placement", ["colocated", "apart", "asleep"])
def test_skyrl_senders(server: VllmServer, tmp_path: Path, placement: str) -> None:
    sources = with_additions("SkyRL-senders", "skyrl.md", tmp_path)
    run_ranks(recipe_actors.skyrl_senders, 1, sources, server.url, placement, timeout_s=200)


def test_prime_rl(server: VllmServer, tmp_path: Path) -> None:
    sources = with_additions("prime-rl", "prime-rl.md", tmp_path)
    run_ranks(recipe_ranks.prime_rl, 2, sources, tmp_path / "outputs", server.url, timeout_s=200)


def with_additions(framework: str, page: str, folder: Path) -> Path:
    """Return a folder with the framework's sources, where the lines of a page are added to the files that it names."""
    sources = folder / "frameworks"
    shutil.copytree(FRAMEWORKS / framework, sources / framework)
    blocks = [block.partition("```")[0] for block in (ROOT / "docs/use" / page).read_text().split("```python\n")[1:]]
    for first, _, lines in [block.partition("\n") for block in blocks if re.match(r"# \S+\.py\n", block)]:
        with (sources / framework / first.removeprefix("# ")).open("a") as source:
            source.write(lines)
    return sources


def test_openrlhf(checkpoint: Path) -> None:
    folders = [ROOT, *(FRAMEWORKS / each for each in FOLDERS["openrlhf"]), Path(__file__).parent]
    named = {"FRAMEWORK": "openrlhf", "FRAMEWORKS": str(FRAMEWORKS)}
    environment = {**os.environ, **named, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [sys.executable, str(RECIPES / "weightsync_openrlhf.py"), "--help"]
    usage = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=True).stdout
    assert "--vllm.num_engines" in usage
    run_ranks(recipe_actors.openrlhf, 1, checkpoint, timeout_s=280)


def test_nemo_rl(checkpoint: Path) -> None:
    run_ranks(recipe_actors.nemo_rl, 1, checkpoint, timeout_s=280)
