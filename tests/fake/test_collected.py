"""A `WeightSync` that nobody has closed: it lets go of its engines and its folder when it is collected."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, ModuleHost, TinyEngineModel, checkpoint, trainer_model

from weightsync import CheckpointTransport, ConfigError, PushReport, WeightSync

pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
"""The collector may come to a socket before it comes to the owner."""

ENDS = """
import os, sys
from types import ModuleType
from fake_engine import FakeEngine, ModuleHost, TinyEngineModel, checkpoint, trainer_model
from weightsync import WeightSync

class Trainer:
    def __init__(self, engine):
        self.sync = WeightSync("fsdp", "ipc", engine, timeout_s=20.0)

    def __del__(self, write=os.write, is_finalizing=sys.is_finalizing):
        {del_line}
        write(1, b"finalizing" if is_finalizing() else b"running")  # nothing flushes a buffer any more

sys.modules["kept"] = ModuleType("kept")  # freed before Python clears the modules of weightsync
sys.modules["kept"].trainer = Trainer(FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1))))
sys.modules["kept"].trainer.sync.push(trainer_model(checkpoint(2)))
"""


class Trainer:
    """A usual cycle: an object with its own method as a callback."""

    def __init__(self, transport: Any, engine: Any) -> None:
        self.sync = WeightSync("fsdp", transport, engine, timeout_s=20.0)
        self.on_step = self.step

    def step(self, model: Any) -> PushReport:
        return self.sync.push(model)


def test_a_folder_is_free_when_its_trainer_is_collected_in_a_cycle(tmp_path: Path) -> None:
    model = trainer_model(checkpoint(2))
    with closing(FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1)))) as engine:
        for version in (1, 2, 3):
            trainer = Trainer(CheckpointTransport(tmp_path), engine)
            assert trainer.on_step(model).version == version
            del trainer
            gc.collect()


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_one_whose_options_were_refused_is_collected_in_silence() -> None:
    with pytest.raises(ConfigError):
        WeightSync("fsdp", "ipc", max_bytes="none")
    gc.collect()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from Python 3.12 on: this process has threads
def test_a_fork_that_collects_one_in_a_cycle_leaves_the_folder_to_its_parent(tmp_path: Path) -> None:
    model = trainer_model(checkpoint(2))
    first, second = (FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1))) for _ in range(2))
    with closing(first), closing(second):
        trainer = Trainer(CheckpointTransport(tmp_path), first)
        trainer.on_step(model)
        if (child := os.fork()) == 0:
            del trainer
            gc.collect()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        other = Trainer(CheckpointTransport(tmp_path), second)
        with pytest.raises(ConfigError, match="another trainer writes checkpoints to"):
            other.on_step(model)
        assert trainer.on_step(model).version == 2
        trainer.sync.close()
        other.sync.close()


@pytest.mark.parametrize("del_line", ["self.sync.close()", "pass"], ids=["closed", "left"])
def test_a_process_ends_though_the_interpreter_finalizes_before_the_end_of_one(del_line: str) -> None:
    """No other thread runs then."""
    command = [sys.executable, "-c", ENDS.format(del_line=del_line)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert ended.stdout == "finalizing", ended.stderr
    assert ended.returncode == 0
    assert "Exception ignored" not in ended.stderr
