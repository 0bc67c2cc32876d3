"""The records of a push: its steps at debug, its plan and its end at info, its failure at error."""

from __future__ import annotations

import logging
from contextlib import closing

import pytest
from fake_engine import FakeEngine, ModuleHost, TinyEngineModel, checkpoint

from weightsync import ConfigError, WeightSync


def test_a_push_can_be_followed_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "weightsync")
    engine = FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1)))
    with closing(engine), WeightSync("stream", engine=engine) as sync:
        sync.push(checkpoint(2))
        first = [(record.levelname, record.getMessage()) for record in caplog.records]
        caplog.clear()
        sync.push(checkpoint(2))
        second = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]
    (planned,) = [text for level, text in first if level == "INFO" and text.startswith("planned")]
    assert planned == (
        f"planned a push over ipc: {len(checkpoint(1))} tensors in 1 chunks, from 1 ranks to 1 workers of a fake engine"
    )
    steps = [text for level, text in first if level == "DEBUG" and text.endswith("begins")]
    assert {"plan begins", "init of a fake engine begins", "connect begins", "load begins"} <= {*steps}
    assert [step for step in steps if " of " not in step][-2:] == ["load begins", "commit begins"]
    assert any(text.startswith("transfer took ") for _, text in first)
    assert [text.partition(":")[0] for text in second] == ["pushed version 2"]


def test_a_push_that_fails_leaves_a_record(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1)))
    with closing(engine), WeightSync("stream", engine=engine) as sync:
        sync.push(checkpoint(2), version=3)
        with pytest.raises(ConfigError) as raised:
            sync.push(checkpoint(2), version=2)
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == ("ERROR", f"push failed: {raised.value}")
