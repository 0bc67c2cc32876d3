"""A process that was forked from a trainer shares its sockets, and must neither send on them nor close them."""

from __future__ import annotations

import atexit
import gc
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_engine import FakeEngine, ModuleHost, TinyEngineModel, checkpoint, cold, trainer_model

from weightsync import ConfigError, WeightSync
from weightsync.fleet import engine_call
from weightsync.fleet.engine_call import BackgroundCall, wait_at_exit
from weightsync.net.listener import Listener

CALLS: dict[str, Callable[[WeightSync, Any], Any]] = {
    "push": lambda sync, model: sync.push(model),
    "catch_up": lambda sync, model: sync.catch_up(model),
    "attach": lambda sync, model: sync.attach(model),
    "writing": lambda sync, model: sync.writing().__enter__(),
    "close": lambda sync, model: sync.close(),
}


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1)))
    yield engine
    engine.close()


def in_a_fork(work: Callable[[], str]) -> str:
    """Return what a child process says, or how it failed. It ends at once."""
    gc.collect()  # or the child frees what earlier tests have left, whose threads it does not have
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            said = work()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(into, said.encode())
        os._exit(0)
    os.close(into)
    with os.fdopen(out) as file:
        said = file.read()
    os.waitpid(pid, 0)
    return said


def serves(engine: FakeEngine, seed: int) -> bool:
    return all(map(torch.equal, engine.hosts[0].live.parameters(), cold(checkpoint(seed)).parameters()))


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_a_forked_process_is_refused_and_its_parent_pushes_on(engine: FakeEngine, transport: str) -> None:
    model = trainer_model(checkpoint(2))
    with WeightSync("fsdp", transport, engine, timeout_s=20.0) as sync:
        sync.push(model)
        for seed, (name, call) in enumerate(CALLS.items(), 3):
            said = in_a_fork(lambda call=call: str(call(sync, model)))
            assert said.startswith("ConfigError: this WeightSync is connected in process"), name
            assert f"process {os.getpid()}, and process" in said
            model.load_state_dict(checkpoint(seed))
            assert sync.push(model).version == seed - 1
            assert serves(engine, seed)


def test_a_forked_process_that_forgets_it_closes_nothing_of_its_parent(engine: FakeEngine) -> None:
    model = trainer_model(checkpoint(2))
    sync = WeightSync("fsdp", "ipc", engine, timeout_s=20.0)
    sync.push(model)

    def leave() -> str:
        nonlocal sync
        with sync:
            pass
        del sync
        gc.collect()
        return "left"

    assert in_a_fork(leave) == "left"
    with sync:
        model.load_state_dict(checkpoint(3))
        sync.push(model)
    assert serves(engine, 3)


def test_a_forked_process_may_use_one_that_was_not_connected(engine: FakeEngine) -> None:
    sync = WeightSync("fsdp", "ipc", engine, timeout_s=20.0)
    assert in_a_fork(lambda: str(sync.close())) == "None"
    with pytest.raises(ConfigError, match="there is no version to catch up with"):
        sync.catch_up(trainer_model(checkpoint(2)))
    sync.close()


def test_a_forked_process_waits_for_none_of_its_parents_calls() -> None:
    listener = Listener()
    call = BackgroundCall(listener, "a call", time.sleep, 1.0, who="engine 0")
    wait_at_exit([call])

    def end() -> str:
        started = time.monotonic()
        engine_call._wait_for_owed()
        return "soon" if time.monotonic() - started < 0.5 else "late"

    assert in_a_fork(end) == "soon"
    call.join(10.0)
    atexit.unregister(engine_call._wait_for_owed)
    listener.close()
