"""A trainer that is interrupted, as by Ctrl-C, at any line and once more while it cleans up: the next push succeeds."""

from __future__ import annotations

import gc
import linecache
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import test_lora_transport as lora
import test_shared_memory as single_copy
import torch
from engine_process import EngineProcess, fingerprint
from fake_engine import FakeEngine, ModuleHost, TinyEngineModel, checkpoint, cold, trainer_model
from faults import FaultyTransport
from ranks import run_ranks

import weightsync
import weightsync.strategies.lora
from weightsync import CheckpointTransport, EngineUnreachableError, ModuleBucketer, WeightSync, WeightSyncError
from weightsync.fleet.fleet import Fleet
from weightsync.net.ranks import Ranks
from weightsync.transports.ipc import IpcTransport
from weightsync.worker.loader import Receiver

OURS = str(Path(weightsync.__file__).parent)
FRAME = (f"{OURS}/sync.py", f"{OURS}/net/ranks.py", f"{OURS}/net/modes.py", f"{OURS}/net/uninterrupted.py")
"""Where every line is tried. Of all others some are."""
EVERY = 23


pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
"""Python itself closes a socket whose maker was interrupted before anyone owned it."""


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Let Python close such sockets in this test, and not in one where they are an error."""
    yield
    gc.collect()


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1)))
    yield engine
    engine.close()


class Lines:
    """The lines of weightsync that this thread runs. Before the one with number `at` it is interrupted, once."""

    def __init__(self, at: int, files: tuple[str, ...]) -> None:
        self.left, self.files = at, files
        self.where: str | None = None

    def begin(self) -> None:
        sys.settrace(self._trace)
        frame: Any = sys._getframe(1)
        while frame is not None:  # those that run already, too
            frame.f_trace = self._trace
            frame = frame.f_back

    def _trace(self, frame: Any, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self.files):
            return self._trace
        if event == "line":
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
            if line.startswith(("with ", "try:")):
                return self._trace  # Python raises nothing of a signal there, where a `with` would not exit
            self.left -= 1
            if self.left == 0:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._trace


def serves(engine: FakeEngine, seed: int) -> bool:
    return all(map(torch.equal, engine.hosts[0].live.parameters(), cold(checkpoint(seed)).parameters()))


@contextmanager
def no_trace_left() -> Iterator[None]:
    try:
        yield
    finally:
        sys.settrace(None)


def interrupted(call: Callable[[], Any], lines: Lines, first: Callable[[], None] | None = None) -> bool:
    """Call, and return whether a line was interrupted. Begin with the lines after `first` has been called, if given."""
    with no_trace_left():
        if first is None:
            lines.begin()
        try:
            call()
        except KeyboardInterrupt:
            pass
    return lines.where is not None


def check(sync: WeightSync, engine: FakeEngine, model: Any, seed: int, where: str | None) -> None:
    assert torch.is_grad_enabled(), where
    assert not torch.is_inference_mode_enabled(), where
    assert gc.isenabled(), where
    model.load_state_dict(checkpoint(seed))
    sync.push(model)
    assert serves(engine, seed), where
    assert not engine.version().startswith("POISONED"), where  # type: ignore[union-attr]
    assert engine.log[-1] == "resume", where


@pytest.mark.parametrize(("files", "every"), [(FRAME, 1), ((OURS,), EVERY)], ids=["each of the frame", "some of all"])
def test_a_push_that_is_interrupted_at_any_line_is_followed_by_one_that_succeeds(
    engine: FakeEngine, files: tuple[str, ...], every: int
) -> None:
    model = trainer_model(checkpoint(2))
    at = 1
    with WeightSync("fsdp", "ipc", engine, timeout_s=20.0) as sync:
        while True:
            lines = Lines(at, files)
            if not interrupted(lambda: sync.push(model), lines):
                break
            check(sync, engine, model, 2 + at % 5, lines.where)
            at += every
    assert at > 50


@pytest.mark.parametrize("fails", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("moment", ["prepare_push", "send"])
def test_a_second_interrupt_at_any_line_of_the_cleanup_changes_nothing(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, moment: str, fails: type[BaseException]
) -> None:
    model = trainer_model(checkpoint(2))
    at = 1
    with WeightSync("fsdp", "ipc", engine, timeout_s=20.0) as sync:
        sync.push(model)
        while True:
            version = engine.version()
            lines = Lines(at, (OURS,))

            def fail(*_: Any, lines: Lines = lines) -> Any:
                lines.begin()
                raise fails("first")

            with monkeypatch.context() as patched, no_trace_left():
                patched.setattr(IpcTransport, moment, fail)
                with pytest.raises((fails, weightsync.WeightSyncError, KeyboardInterrupt)):
                    sync.push(model)
            if lines.where is None:
                break
            if moment == "prepare_push":  # nothing was written
                assert engine.version() == version, lines.where
                assert engine.log.count("pause keep") == engine.log.count("resume"), lines.where
            check(sync, engine, model, 2 + at % 5, lines.where)
            at += 2
    assert at > 10


@pytest.mark.parametrize("where", [(Fleet, "fail"), (Ranks, "agree_on"), (Fleet, "explain"), (Ranks, "disconnect")])
@pytest.mark.parametrize("how", ["raised", "signal"])
def test_a_second_ctrl_c_in_the_middle_of_the_cleanup_is_raised_when_that_is_over(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, where: tuple[Any, str], how: str
) -> None:
    model = trainer_model(checkpoint(2))
    owner, name = where
    real, left = getattr(owner, name), 1

    def again(*args: Any) -> Any:
        nonlocal left
        left -= 1
        if left >= 0:
            if how == "signal":
                signal.raise_signal(signal.SIGINT)
            else:
                raise KeyboardInterrupt
        return real(*args)

    def fail(*_: Any) -> Any:
        monkeypatch.setattr(owner, name, again)
        raise KeyboardInterrupt

    with WeightSync("fsdp", "ipc", engine, timeout_s=20.0) as sync:
        sync.push(model)
        with monkeypatch.context() as patched:
            patched.setattr(IpcTransport, "prepare_push", fail)
            with pytest.raises(KeyboardInterrupt):
                sync.push(model)
        assert left < 1
        assert engine.version() == "1"
        assert engine.log.count("pause keep") == engine.log.count("resume")
        check(sync, engine, model, 3, name)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the worker's thread ends by it
def test_a_worker_that_is_asked_to_end_says_so(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(*_: Any) -> None:
        raise SystemExit  # as vLLM's handler of SIGTERM does

    model = trainer_model(checkpoint(2))
    with WeightSync("fsdp", "ipc", engine, timeout_s=20.0) as sync:
        sync.push(model)
        with monkeypatch.context() as patched:
            patched.setattr(Receiver, "run", end)
            with pytest.raises(EngineUnreachableError, match="the engine was asked to end"):
                sync.push(model)
        check(sync, engine, model, 3, None)


@pytest.mark.parametrize("transport", ["broadcast", "checkpoint"])
def test_a_push_over_another_transport_that_is_interrupted_is_followed_by_one(
    engine: FakeEngine, transport: str, tmp_path: Path
) -> None:
    model = trainer_model(checkpoint(2))
    at = 1
    with WeightSync(
        "fsdp", CheckpointTransport(tmp_path) if transport == "checkpoint" else transport, engine, timeout_s=20.0
    ) as sync:
        while True:
            lines = Lines(at, (OURS,))
            if not interrupted(lambda: sync.push(model), lines):
                break
            check(sync, engine, model, 2 + at % 5, lines.where)
            at += 5 * EVERY
    assert at > 500


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_a_push_after_a_close_that_is_interrupted_at_any_line_succeeds(engine: FakeEngine, transport: str) -> None:
    model, at = trainer_model(checkpoint(2)), 1
    with WeightSync("fsdp", transport, engine, timeout_s=20.0) as sync:
        sync.push(model)
        while True:
            lines = Lines(at, (OURS,))
            if not interrupted(sync.close, lines):
                break
            started = time.monotonic()
            check(sync, engine, model, 2 + at % 5, lines.where)
            assert time.monotonic() - started < 10.0, lines.where
            at += 1
    assert at > 5


def test_a_ctrl_c_in_close_is_raised_when_that_is_over(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    real, ended = Ranks.disconnect, []

    def disconnect(ranks: Ranks) -> None:
        signal.raise_signal(signal.SIGINT)
        real(ranks)
        ended.append(ranks)

    with WeightSync("fsdp", "ipc", engine, timeout_s=20.0) as sync:
        sync.push(trainer_model(checkpoint(2)))
        with monkeypatch.context() as patched:
            patched.setattr(Ranks, "disconnect", disconnect)
            with pytest.raises(KeyboardInterrupt):
                sync.close()
        assert ended


def test_writing_that_is_interrupted_at_any_line_is_followed_by_one_that_succeeds() -> None:
    at = 1
    with closing(FakeEngine(single_copy.host(1))) as engine, WeightSync("fsdp", "single_copy", engine) as sync:
        model = single_copy.on_meta()
        sync.attach(model)

        def write() -> None:
            with sync.writing():
                single_copy.write(model, 2)

        while True:
            lines = Lines(at, (f"{OURS}/strategies/", f"{OURS}/sync.py"))
            if not interrupted(write, lines):
                break
            with sync.writing():
                single_copy.write(model, 3 + at % 5)
            single_copy.assert_serves(engine, 3 + at % 5)
            assert engine.log[-1] == "resume", lines.where
            at += 1
    assert at > 50


def test_a_push_of_an_adapter_that_is_interrupted_at_any_line_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weightsync.strategies.lora, "_MEMORY", tmp_path)
    engine, model, at = lora.FakeEngine(), lora.wrapped("linear", torch.float32), 1
    with WeightSync("fsdp", "lora", engine, timeout_s=20.0) as sync:
        while True:
            lines = Lines(at, (OURS,))
            if not interrupted(lambda: sync.push(model), lines):
                break
            lora.fill_adapters(model, chr(at % 1000))
            sync.push(model)
            lora.assert_holds(engine, sync.adapter, lora.in_peft(model))
            assert len(engine.adapters) <= 4, lines.where
            at += 9 * EVERY
    assert at > 1000
    assert not [*tmp_path.rglob("*")]


@pytest.mark.forks
def test_a_rank_that_is_asked_to_end_in_a_push_ends_and_the_others_name_it(tmp_path: Path) -> None:
    engine = EngineProcess(tmp_path)
    try:
        for victim, how in enumerate((signal.SIGTERM, signal.SIGINT)):
            run_ranks(_one_is_asked_to_end, 2, engine.url, victim, how)
            assert engine.ask()["version"].startswith("POISONED")
            with WeightSync("fsdp", "ipc", engine.url, timeout_s=20.0) as sync:
                sync.push(trainer_model(checkpoint(3)))
            assert engine.ask()["weights"] == fingerprint(cold(checkpoint(3)))
    finally:
        engine.kill()


def _one_is_asked_to_end(rank: int, url: str, victim: int, how: signal.Signals) -> None:
    """Push until the victim gets a signal. The trainer's own handler of SIGTERM raises `SystemExit`."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    transport, model = FaultyTransport("ipc"), trainer_model(checkpoint(2))
    with WeightSync("fsdp", transport, url, timeout_s=60.0, bucketer=ModuleBucketer(64)) as sync:
        sync.push(model)
        asked_at = 0.0

        def ask() -> None:
            nonlocal asked_at
            asked_at = time.monotonic()
            os.kill(os.getpid(), how)

        def hold(chunk: int) -> None:
            transport.before_chunk = None
            if rank == victim:
                threading.Timer(0.5, ask).start()  # it has sent its part by then, and waits
            else:
                time.sleep(1.5)

        transport.before_chunk = hold
        with pytest.raises((KeyboardInterrupt, SystemExit) if rank == victim else WeightSyncError) as ended:
            sync.push(model)
        if rank == victim:
            assert time.monotonic() - asked_at < 10.0
        else:
            assert f"the trainer was interrupted; POISONED until the next success: engine 0 ({url})" in str(ended.value)
            assert f"[trainer rank {victim}, phase " in str(ended.value)
