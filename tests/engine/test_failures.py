"""Whatever goes wrong is a clear error on every trainer rank, in time; the engine is as it was, or poisoned and says
so; and the next good push heals it.

The engines are real: one `LLM` in a process of its own, and one server. So are the trainers: two ranks with FSDP2, or
a plain module beside the `LLM`. What runs in those processes are the functions that take a `Side`.
"""

from __future__ import annotations

import copy
import http.client
import json
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from engines import (
    IN_CORE,
    PROMPTS,
    Answer,
    Engines,
    Remote,
    Trainer,
    Trainers,
    assert_same,
    has_plug_ins,
    session_of,
)
from fake_engine import fail_once_after
from faults import FaultyTransport
from ranks import run_ranks
from torch import nn

from weightsync import (
    ConfigError,
    DigestError,
    EngineBusyError,
    EngineError,
    EngineUnreachableError,
    FencedError,
    ManifestError,
    ModuleBucketer,
    PeerError,
    PlacementError,
    SyncTimeoutError,
    TensorSelection,
    UnsupportedError,
    WeightSync,
    WeightSyncError,
)
from weightsync.net.runtime import started_ticks
from weightsync.tools.processes import Server, generate
from weightsync.transports.base import Endpoint

pytest_plugins = ["engine_fixtures"]
pytestmark = pytest.mark.engine

Side = Trainer | Engines
Outcome = tuple[WeightSyncError | None, float]
"""What a push raised, and after how many seconds."""

TIMEOUT_S = 20.0
SHORT_S = 4.0
GRACE_S = 15.0
"""What telling everybody may take after a deadline has passed."""
SMALL = {"bucketer": ModuleBucketer()}
"""Many chunks, so that there is a middle to fail in."""


# ---------------------------------------------------------------------------------------------------------------
# What runs in the trainers' processes, and in the one of the LLM


def connect(side: Side, engine: Any, transport: str = "ipc", timeout_s: float = TIMEOUT_S) -> None:
    """A new model and a new `WeightSync`. `engine` is "LLM", for the one in this process, a URL, or a list of these."""
    if isinstance(side, Engines):
        own = [side.llm if one == "LLM" else one for one in (engine if isinstance(engine, list) else [engine])]
        engine = own if isinstance(engine, list) else own[0]
    side.release()
    new_model(side)
    side.sync = WeightSync("fsdp", FaultyTransport(transport), engine, timeout_s=timeout_s, **SMALL)


def new_model(side: Side, name: str = "qwen3") -> None:
    side.model = tiny_models.build(name, "A")
    if isinstance(side, Trainer):
        tiny_models.shard(side.model)


def push(side: Side, weights: str, version: int | None = None) -> Outcome:
    tiny_models.fill(side.model, weights)
    started = time.monotonic()
    try:
        side.sync.push(side.model, version)
    except WeightSyncError as error:
        return error, time.monotonic() - started
    return None, time.monotonic() - started


def spoil(side: Side, how: Callable[..., None], *args: Any) -> None:
    how(side, *args)


def flip_a_byte(side: Side, in_chunk: int, rank: int = 0) -> None:
    """Once, after the digest was taken."""
    if isinstance(side, Engines) or side.rank == rank:
        transport_of(side).flip_a_byte_of = in_chunk


def raise_in_send(side: Side, in_chunk: int, error: BaseException, rank: int = 0) -> None:
    """Once, before anything of the chunk is sent."""
    if isinstance(side, Trainer) and side.rank != rank:
        return
    transport = transport_of(side)

    def fail(chunk: int) -> None:
        if chunk == in_chunk:
            transport.before_chunk = None
            raise error

    transport.before_chunk = fail


def transport_of(side: Side) -> FaultyTransport:
    transport: FaultyTransport = side.sync._strategy._sessions._transport
    return transport


def raise_in_source(side: Side, rank: int) -> None:
    """Once."""
    source = side.sync._strategy._source
    if isinstance(side, Trainer) and side.rank == rank:

        def read(model: nn.Module) -> None:
            del source.read
            raise ZeroDivisionError("no such luck")

        source.read = read


def raise_in_worker(engines: Engines, chunk: int) -> None:
    """Once, in the middle of this chunk."""
    fail_once_after(session_of(engines).receiver, chunk)


def state_of(engines: Engines) -> tuple[str, Any]:
    """The worker's state, and the version that vLLM reports. None before vLLM 0.27."""
    version = getattr(engines.llm, "get_weight_version", lambda: None)()
    return session_of(engines).receiver.state, version


def leave_out(side: Side, name: str) -> None:
    side.sync._strategy._options.source.selection = TensorSelection(exclude=(name,))


def add_unknown(side: Side) -> None:
    side.model.model.extra_norm = nn.Linear(4, 4, dtype=torch.bfloat16)


def misshape(side: Side) -> None:
    side.model.model.layers[1].mlp.up_proj = nn.Linear(128, 64, bias=False, dtype=torch.bfloat16)


def double(side: Side) -> None:
    """The engine takes q, k and v alone, and all three as one tensor; both at once land on one another."""
    side.model.model.layers[0].self_attn.qkv_proj = nn.Linear(128, 256, bias=False, dtype=torch.bfloat16)


def idle_threads(side: Side) -> list[str]:
    """The threads of weightsync that are still there after a moment, and whether this process is busy with nothing."""
    deadline = time.monotonic() + 20
    while (names := [t.name for t in threading.enumerate() if " of engine " in t.name]) and time.monotonic() < deadline:
        time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.15)
    return names + (["something spins"] if time.process_time() - before > 0.1 else [])


# ---------------------------------------------------------------------------------------------------------------
# The engines


@pytest.fixture
def cold(engines: Remote) -> dict[str, Answer]:
    """What the LLM answers when it is started from the weights "A" and "B"."""
    answers: dict[str, Answer] = engines.call(Engines.serve, "qwen3", timeout_s=240)
    return answers


@pytest.fixture
def llm(engines: Remote, cold: dict[str, Answer]) -> Remote:
    """The LLM's process, with the LLM connected to and pushed to."""
    engines.call(connect, "LLM")
    assert engines.call(push, "A")[0] is None
    return engines


class Http:
    """A server of our own, and what it answers when it has been pushed the weights "A" and "B"."""

    def __init__(self, server: Server, trainers: Trainers) -> None:
        self.url = server.url
        self.server = server
        self.expected = {}
        trainers.call(connect, self.url, "broadcast")
        for weights in ("B", "A"):
            assert [error for error, _ in trainers.call(push, weights)] == [None, None]
            self.expected[weights] = self.ask()
        trainers.call(Trainer.release)
        assert self.expected["A"] != self.expected["B"]

    def ask(self) -> Any:
        return generate(self.url, PROMPTS)

    def get(self, path: str) -> Any:
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=20)
        try:
            connection.request("GET", path)
            return json.loads(connection.getresponse().read() or b"null")
        finally:
            connection.close()

    def is_paused(self) -> bool:
        return bool(self.get("/is_paused")["is_paused"])

    def version(self) -> Any:
        """None before vLLM 0.27."""
        return self.get("/weight_info").get("weight_version")

    def log(self) -> str:
        return self.server.log.read_text()


@pytest.fixture(scope="module")
def http_server(
    engine_process: Remote, trainer_processes: Trainers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Http]:
    if not has_plug_ins():
        pytest.skip("`weightsync serve` gives servers the plug-in, which this vLLM has no place for")
    checkpoint = engine_process.call(Engines.checkpoint, "qwen3", "A")
    options = {"quantization": "weightsync_plain"}  # one test shares its memory
    server = Server(checkpoint, "auto", tmp_path_factory.mktemp("server") / "log", IN_CORE, options)
    try:
        server.wait(300)
        yield Http(server, trainer_processes)
    finally:
        server.stop()


@pytest.fixture
def served(http_server: Http, trainers: Trainers) -> Http:
    """The server, connected to and pushed to by the two ranks. Start it again where a test has ended it."""
    if http_server.server.exit_report() is not None:
        http_server.server.stop()
        http_server.server.start()
    trainers.call(connect, http_server.url)
    assert [error for error, _ in trainers.call(push, "A")] == [None, None]
    return http_server


def failed(outcomes: list[Outcome], kind: type[WeightSyncError], within_s: float) -> WeightSyncError:
    """Every rank raised the same error, of this kind, in time."""
    errors = [error for error, _ in outcomes]
    assert [type(error) for error in errors] == [kind] * len(errors), errors
    assert {str(error) for error in errors} == {str(errors[0])}
    assert max(seconds for _, seconds in outcomes) < within_s
    assert errors[0] is not None
    return errors[0]


def heal_llm(llm: Remote, cold: dict[str, Answer], untouched: bool) -> None:
    """The LLM answers as before where it is untouched, and after one good push as if started from it."""
    state, version = llm.call(state_of)
    assert state == ("CLEAN" if untouched else "POISONED")
    assert version is None or ("POISONED" in version) is not untouched
    if untouched:
        assert_same(llm.call(Engines.ask), cold["A"], "untouched")
    assert llm.call(push, "B")[0] is None
    assert_same(llm.call(Engines.ask), cold["B"], "healed")
    assert llm.call(state_of)[0] == "CLEAN"
    assert llm.call(idle_threads) == []


def heal_server(served: Http, trainers: Trainers, untouched: bool) -> None:
    assert served.is_paused() is not untouched
    assert (version := served.version()) is None or ("POISONED" in version) is not untouched
    if untouched:
        assert served.ask() == served.expected["A"]
    assert [error for error, _ in trainers.call(push, "B")] == [None, None]
    assert not served.is_paused()
    assert served.ask() == served.expected["B"]
    assert trainers.call(idle_threads) == [[], []]


# ---------------------------------------------------------------------------------------------------------------
# Tensors that do not fit


@pytest.mark.parametrize("connected", ["at the first push", "later"])
@pytest.mark.parametrize(
    ("how", "args", "fact", "words"),
    [
        (
            leave_out,
            ("model.layers.1.mlp.up_proj.weight",),
            {"missing": ["model.layers.1.mlp.up_proj.weight"]},
            "Missing 1",
        ),
        (add_unknown, (), {"unexpected": ["model.extra_norm.weight", "model.extra_norm.bias"]}, "Unexpected 2"),
        (misshape, (), {"mismatched": ["model.layers.1.mlp.up_proj.weight"]}, "Not fitting 1"),
        (
            double,
            (),
            {"mismatched": [f"model.layers.0.self_attn.{n}_proj.weight" for n in ("k", "q", "qkv", "v")]},
            "is written twice",
        ),
    ],
    ids=["missing", "unknown", "misshapen", "doubled"],
)
def test_tensors_that_do_not_fit(
    llm: Remote, cold: dict[str, Answer], how: Any, args: Any, fact: Any, words: str, connected: str
):
    if connected == "at the first push":
        llm.call(connect, "LLM")
    llm.call(spoil, how, *args)
    error = failed([llm.call(push, "B")], ManifestError, TIMEOUT_S)
    assert isinstance(error, ManifestError)
    assert words in str(error)
    assert "Nothing was written" in str(error)
    found = {"missing": error.missing, "unexpected": error.unexpected, "mismatched": sorted(error.mismatched)}
    assert {name: value for name, value in found.items() if value} == fact
    llm.call(leave_out, "nothing")
    llm.call(new_model)
    heal_llm(llm, cold, untouched=True)


@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3", "qwen3-moe", "qwen2"])
def test_a_model_of_another_architecture(llm: Remote, cold: dict[str, Answer], name: str):
    llm.call(new_model, name)
    error = failed([llm.call(push, "B")], ManifestError, TIMEOUT_S)
    assert isinstance(error, ManifestError)
    assert error.missing or error.mismatched
    llm.call(new_model)
    heal_llm(llm, cold, untouched=True)


def test_ranks_that_hold_different_models(served: Http, trainers: Trainers):
    trainers.call(spoil, one_rank_has_more)
    error = failed(trainers.call(push, "B"), ManifestError, TIMEOUT_S)
    assert "Unexpected 2: model.extra_norm" in str(error)
    trainers.call(new_model)
    heal_server(served, trainers, untouched=True)


def one_rank_has_more(side: Trainer) -> None:
    if side.rank == 1:
        add_unknown(side)


def test_a_version_that_is_not_newer(served: Http, trainers: Trainers):
    now = int(served.version())
    for version in (now, now - 1, 0, -3):
        error = failed(trainers.call(push, "B", version), ConfigError, TIMEOUT_S)
        assert f"version {version} is not newer than {now}" in str(error)
    assert served.version() == str(now)
    assert [error for error, _ in trainers.call(push, "A", now + 10)] == [None, None]
    assert served.version() == str(now + 10)
    heal_server(served, trainers, untouched=True)
    assert served.version() == str(now + 11)


# ---------------------------------------------------------------------------------------------------------------
# Engines that cannot be reached, or do not want to be


@pytest.fixture
def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_nothing_listens_at_the_address_of_the_engine(trainers: Trainers, closed_port: str):
    trainers.call(connect, closed_port)
    error = failed(trainers.call(push, "A"), EngineUnreachableError, GRACE_S)
    assert closed_port in str(error)
    assert "check that the server runs" in str(error)
    # The same object finds the server once it is there; here, that it is still not there.
    failed(trainers.call(push, "A"), EngineUnreachableError, GRACE_S)
    assert trainers.call(idle_threads) == [[], []]


def test_a_host_that_does_not_exist(trainers: Trainers):
    trainers.call(connect, "http://no-such-host.invalid:8000")
    error = failed(trainers.call(push, "A"), EngineUnreachableError, 2 * GRACE_S)
    assert "no-such-host.invalid" in str(error)


def test_an_address_that_accepts_and_never_answers(trainers: Trainers):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        trainers.call(connect, f"http://127.0.0.1:{listener.getsockname()[1]}", "ipc", SHORT_S)
        error = failed(trainers.call(push, "A"), SyncTimeoutError, SHORT_S + GRACE_S)
    assert "engine 0" in str(error)
    assert trainers.call(idle_threads) == [[], []]


def test_the_address_of_another_server(trainers: Trainers):
    """It answers everything with "not found"."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        answering = threading.Thread(target=not_found, args=(listener, 1))
        answering.start()
        trainers.call(connect, f"http://127.0.0.1:{listener.getsockname()[1]}")
        error = failed(trainers.call(push, "A"), UnsupportedError, GRACE_S)
        answering.join(5)
    assert "there is no route /version (status 404)" in str(error)
    assert "check the address" in str(error)


def not_found(listener: socket.socket, times: int) -> None:
    for _ in range(times):
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


def test_an_engine_with_fewer_workers_than_it_says(llm: Remote, cold: dict[str, Answer]):
    llm.call(connect, "LLM", "ipc", SHORT_S)
    llm.call(pretend_to_have_workers, 2)
    error = failed([llm.call(push, "B")], SyncTimeoutError, SHORT_S + GRACE_S)
    assert "workers of engine 0 (1 of 2 have connected" in str(error)
    llm.call(pretend_to_have_workers, 1)
    heal_llm(llm, cold, untouched=True)


def pretend_to_have_workers(engines: Engines, world: int) -> None:
    model = session_of(engines).receiver.model
    model.identity = replace(model.identity, world=world)


def test_a_second_trainer_is_turned_away_and_the_first_is_not_disturbed(served: Http, trainers: Trainers):
    model = tiny_models.build("qwen3", "B")
    second = WeightSync("fsdp", "ipc", served.url, timeout_s=SHORT_S, **SMALL)
    for _ in range(2):
        started = time.monotonic()
        with pytest.raises(EngineBusyError, match="another trainer is connected to this engine"):
            second.push(model)
        assert time.monotonic() - started < GRACE_S
        assert served.ask() == served.expected["A"]
    assert [error for error, _ in trainers.call(push, "B")] == [None, None]
    assert served.ask() == served.expected["B"]
    # Once the first has let go, the second is welcome, and knows the version.
    version = int(served.version())
    trainers.call(Trainer.release)
    tiny_models.fill(model, "A")
    with second:
        assert second.push(model).version == version + 1
        assert served.ask() == served.expected["A"]
    trainers.call(connect, served.url)
    heal_server(served, trainers, untouched=True)


def test_a_second_trainer_in_the_middle_of_a_push(served: Http, trainers: Trainers, tmp_path: Path):
    """Over HTTP it queues behind the first; in one process, where nothing queues, it is refused."""
    there = tmp_path / "there"
    trainers.call(spoil, pause_in_send, 3, there)
    outcomes: list[Any] = []
    first = threading.Thread(target=lambda: outcomes.extend(trainers.call(push, "B")))
    first.start()
    wait_for(there.exists)
    threading.Timer(2.0, there.unlink).start()  # while the second waits
    with (
        WeightSync("fsdp", "ipc", served.url, timeout_s=TIMEOUT_S, **SMALL) as second,
        pytest.raises(EngineBusyError, match="another trainer is connected"),
    ):
        second.push(tiny_models.build("qwen3", "A"))
    first.join(60)
    assert [error for error, _ in outcomes] == [None, None]
    assert served.ask() == served.expected["B"]


def pause_in_send(side: Side, in_chunk: int, there: Path) -> None:
    """On rank 0, pause in this chunk: say so by a file, until somebody removes it."""
    if isinstance(side, Trainer) and side.rank != 0:
        return

    def pause(chunk: int) -> None:
        if chunk == in_chunk:
            there.touch()
            wait_for(lambda: not there.exists())

    transport_of(side).before_chunk = pause


def test_a_second_trainer_in_the_engines_own_process(llm: Remote, cold: dict[str, Answer], tmp_path: Path):
    there = tmp_path / "there"
    llm.call(spoil, pause_in_send, 3, there)
    assert llm.call(push_twice_at_once, there) == [None, "EngineBusyError"]
    assert_same(llm.call(Engines.ask), cold["B"], "the first push")


def push_twice_at_once(engines: Engines, there: Path) -> list[str | None]:
    outcomes: list[Outcome] = []
    first = threading.Thread(target=lambda: outcomes.append(push(engines, "B")))
    first.start()
    wait_for(there.exists)
    with WeightSync("fsdp", "ipc", engines.llm, timeout_s=TIMEOUT_S) as second:
        try:
            second.push(tiny_models.build("qwen3", "A"))
            error = None
        except WeightSyncError as busy:
            error = busy
    there.unlink()
    first.join(60)
    return [None if one is None else type(one).__name__ for one in (outcomes[0][0], error)]


# ---------------------------------------------------------------------------------------------------------------
# Trainers that fail


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("connected", ["at the first push", "later"])
def test_a_rank_that_raises_in_its_source(served: Http, trainers: Trainers, rank: int, connected: str):
    if connected == "at the first push":
        trainers.call(connect, served.url)
    trainers.call(spoil, raise_in_source, rank)
    error = failed(trainers.call(push, "B"), WeightSyncError, GRACE_S)
    assert str(error) == f"ZeroDivisionError: no such luck [trainer rank {rank}, phase plan]"
    heal_server(served, trainers, untouched=True)


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("chunk", [0, 3])
def test_a_rank_that_raises_in_send(served: Http, trainers: Trainers, rank: int, chunk: int, transport: str):
    trainers.call(connect, served.url, transport)
    trainers.call(spoil, raise_in_send, chunk, ZeroDivisionError("no such luck"), rank)
    error = failed(trainers.call(push, "B"), WeightSyncError, GRACE_S)
    mixed = f"; POISONED until the next success: engine 0 ({served.url})" if served.is_paused() else ""
    assert str(error) == f"ZeroDivisionError: no such luck{mixed} [trainer rank {rank}, phase transfer]"
    # Rank 0 may not have told the workers to go yet when another rank fails at its first chunk. Over TCP this is so at
    # any small chunk, since the kernel takes it before the receiver asks.
    may_be_early = rank == 1 and (chunk == 0 or transport == "broadcast")
    heal_server(served, trainers, untouched=may_be_early and not served.is_paused())


def test_a_poisoned_engine_stays_paused_though_the_next_push_fails_before_it_writes(served: Http, trainers: Trainers):
    trainers.call(spoil, raise_in_send, 3, ZeroDivisionError("no such luck"), 1)
    failed(trainers.call(push, "B"), WeightSyncError, GRACE_S)
    trainers.call(spoil, raise_in_send, 0, ZeroDivisionError("again"), 1)
    failed(trainers.call(push, "B"), WeightSyncError, GRACE_S)
    trainers.call(spoil, raise_in_source, 1)
    failed(trainers.call(push, "B"), WeightSyncError, GRACE_S)
    heal_server(served, trainers, untouched=False)


def test_an_interrupted_push(served: Http, trainers: Trainers):
    trainers.call(spoil, raise_in_send, 3, KeyboardInterrupt(), 0)
    one, other = trainers.call(push_until_interrupted, "B")
    assert one == "KeyboardInterrupt"
    mixed = f"POISONED until the next success: engine 0 ({served.url})"
    assert other == f"the trainer was interrupted; {mixed} [trainer rank 0, phase transfer]"
    heal_server(served, trainers, untouched=False)


def push_until_interrupted(side: Trainer, weights: str) -> str:
    try:
        return str(push(side, weights)[0])
    except KeyboardInterrupt:
        return "KeyboardInterrupt"


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_a_rank_that_dies_in_send(http_server: Http, trainers: Trainers, transport: str):
    run_ranks(_dies_in_send, 2, http_server.url, transport)
    trainers.call(connect, http_server.url, transport)
    may_be_early = transport == "broadcast"  # as in `test_a_rank_that_raises_in_send`
    heal_server(http_server, trainers, untouched=may_be_early and not http_server.is_paused())


def _dies_in_send(rank: int, url: str, transport: str) -> None:
    trainer = bare_trainer(rank)
    connect(trainer, url, transport)
    assert push(trainer, "A")[0] is None
    if rank == 1:
        transport_of(trainer).before_chunk = lambda chunk: os._exit(0) if chunk == 3 else None
    error, seconds = push(trainer, "B")
    assert isinstance(error, PeerError), repr(error)
    assert "trainer rank 1" in str(error)
    assert seconds < GRACE_S
    os._exit(0)  # the default group waits for the dead


def bare_trainer(rank: int) -> Any:
    """A `Trainer` in a process that has its group already."""
    trainer = object.__new__(Trainer)
    trainer.rank, trainer.size, trainer.calls, trainer.sync = rank, 2, None, None
    return trainer


@pytest.mark.parametrize("where", ["send", "start"])
def test_rank_0_dies_in_a_push(http_server: Http, trainers: Trainers, where: str):
    before = http_server.log()
    run_ranks(_rank_0_dies, 2, http_server.url, where)
    assert http_server.get("/health") is None
    assert http_server.is_paused()
    assert http_server.version().startswith("POISONED"), "though nobody is left who could say so"
    if where == "send":
        wait_for(lambda: "POISONED: a push after version" in http_server.log()[len(before) :])
    trainers.call(connect, http_server.url)
    assert [error for error, _ in trainers.call(push, "B")] == [None, None]
    assert http_server.ask() == http_server.expected["B"]
    assert not http_server.is_paused()


def _rank_0_dies(rank: int, url: str, where: str) -> None:
    trainer = bare_trainer(rank)
    connect(trainer, url)
    assert push(trainer, "A")[0] is None
    if rank == 0 and where == "send":
        transport_of(trainer).before_chunk = lambda chunk: os._exit(0) if chunk == 3 else None
    if rank == 0 and where == "start":
        trainer.sync._strategy._fleet.handles[0].engine.update = lambda info: os._exit(0)
    error, seconds = push(trainer, "B")
    assert isinstance(error, PeerError), repr(error)
    assert "trainer rank 0" in str(error)
    assert seconds < GRACE_S
    os._exit(0)


def test_a_trainer_that_is_stopped_in_a_push_is_fenced_off(http_server: Http, trainers: Trainers, tmp_path: Path):
    """It goes on when the next trainer has pushed, and must leave that one's weights and version alone."""
    there, over, before = tmp_path / "there", tmp_path / "over", http_server.log()
    stopped = multiprocessing.get_context("spawn").Process(target=_is_stopped, args=(http_server.url, there, over))
    stopped.start()
    wait_for(there.exists, 120)
    assert stopped.pid is not None
    os.kill(stopped.pid, signal.SIGSTOP)
    try:
        wait_for(lambda: "gave up" in http_server.log()[len(before) :], 60)
        trainers.call(connect, http_server.url)
        assert [error for error, _ in trainers.call(push, "B")] == [None, None]
    finally:
        over.touch()
        os.kill(stopped.pid, signal.SIGCONT)
    stopped.join(60)
    assert stopped.exitcode == 0, "it raised FencedError"
    assert not http_server.is_paused()
    assert "POISONED" not in http_server.version()
    assert http_server.ask() == http_server.expected["B"]
    assert [error for error, _ in trainers.call(push, "A")] == [None, None]
    assert http_server.ask() == http_server.expected["A"]


def _is_stopped(url: str, there: Path, over: Path) -> None:
    transport = FaultyTransport("ipc")

    def be_stopped(chunk: int) -> None:
        if chunk == 3:
            there.touch()
            wait_for(over.exists, 120)  # or it would go on before it is stopped

    model = tiny_models.build("qwen3", "A")
    with WeightSync("fsdp", transport, url, timeout_s=SHORT_S, **SMALL) as sync:
        sync.push(model)
        transport.before_chunk = be_stopped
        with pytest.raises(FencedError, match="another trainer has taken over this engine"):
            sync.push(model)


def test_a_trainer_that_dies_while_it_writes(http_server: Http, trainers: Trainers):
    before = http_server.log()
    run_ranks(_writes_shared_memory, 1, http_server.url, "half")
    wait_for(lambda: "POISONED: a push after version" in http_server.log()[len(before) :])
    assert http_server.is_paused()
    assert http_server.version().startswith("POISONED")
    # Whoever comes next heals it: one that shares the memory again, or one that pushes.
    run_ranks(_writes_shared_memory, 1, http_server.url, "B")
    assert http_server.ask() == http_server.expected["B"]
    run_ranks(_writes_shared_memory, 1, http_server.url, "half")
    trainers.call(connect, http_server.url)
    assert [error for error, _ in trainers.call(push, "A")] == [None, None]
    assert not http_server.is_paused()
    assert http_server.ask() == http_server.expected["A"]


def _writes_shared_memory(rank: int, url: str, weights: str) -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_models.CONFIGS["qwen3"](), dtype=torch.bfloat16)
    with WeightSync("fsdp", "single_copy", url, timeout_s=TIMEOUT_S) as sync:
        sync.attach(model)
        with sync.writing():
            tiny_models.fill(model, "B")
            if weights == "half":
                model.model.norm.weight.data.fill_(0)
                os._exit(0)


def wait_for(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# ---------------------------------------------------------------------------------------------------------------
# Bytes and workers that fail


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
@pytest.mark.parametrize("chunk", [0, 3])
def test_a_byte_that_changes_on_the_way(llm: Remote, cold: dict[str, Answer], chunk: int, transport: str):
    llm.call(connect, "LLM", transport)
    llm.call(spoil, flip_a_byte, chunk)
    error = failed([llm.call(push, "B")], DigestError, GRACE_S)
    assert f"chunk {chunk} from trainer rank 0 arrived with another digest" in str(error)
    state, version = llm.call(state_of)
    assert state == "POISONED"
    assert "POISONED" in version
    assert llm.call(push, "B")[0] is None
    assert_same(llm.call(Engines.ask), cold["B"], "healed")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_byte_that_changes_on_the_way_from_several_ranks(served: Http, trainers: Trainers, rank: int):
    trainers.call(spoil, flip_a_byte, 3, rank)
    error = failed(trainers.call(push, "B"), DigestError, GRACE_S)
    assert f"chunk 3 from trainer rank {rank} arrived" in str(error)
    heal_server(served, trainers, untouched=False)


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
@pytest.mark.parametrize("chunk", [0, 7])
def test_a_worker_that_raises_while_it_loads(llm: Remote, cold: dict[str, Answer], chunk: int, transport: str):
    llm.call(connect, "LLM", transport)
    llm.call(raise_in_worker, chunk)
    error = failed([llm.call(push, "B")], WeightSyncError, GRACE_S)
    mixed = "POISONED until the next success: engine 0 (LLM in this process)"
    assert error.message == f"MemoryError: no memory left for this chunk; {mixed}"
    assert error.who == "engine 0 worker tp=0 pp=0 dp=0"
    heal_llm(llm, cold, untouched=False)


def test_caches_that_cannot_be_reset(served: Http, trainers: Trainers):
    """The weights are new, but what was computed with older ones is still there: the engine must not go on."""
    trainers.call(refuse_to_reset_once)
    failed(trainers.call(push, "B"), EngineError, GRACE_S)
    heal_server(served, trainers, untouched=False)


def refuse_to_reset_once(side: Trainer) -> None:
    if side.rank == 0:
        engine = side.sync._strategy._fleet.handles[0].engine

        def reset_caches() -> None:
            del engine.reset_caches
            raise EngineError("vLLM could not reset its prefix cache")

        engine.reset_caches = reset_caches


def test_one_of_two_engines_fails(llm: Remote, cold: dict[str, Answer], http_server: Http):
    llm.call(connect, ["LLM", http_server.url])
    assert llm.call(push, "A")[0] is None
    assert http_server.ask() == http_server.expected["A"]
    llm.call(raise_in_worker, 7)
    error = failed([llm.call(push, "B")], WeightSyncError, GRACE_S)
    assert error.who == "engine 0 worker tp=0 pp=0 dp=0"
    assert http_server.is_paused()
    assert "POISONED" in http_server.version()
    heal_llm(llm, cold, untouched=False)
    assert not http_server.is_paused()
    assert http_server.ask() == http_server.expected["B"]


def test_one_of_two_engines_is_not_there(llm: Remote, cold: dict[str, Answer], closed_port: str):
    llm.call(connect, ["LLM", closed_port])
    error = failed([llm.call(push, "B")], EngineUnreachableError, GRACE_S)
    assert "engine 1" in str(error)
    llm.call(connect, "LLM")
    heal_llm(llm, cold, untouched=True)


# ---------------------------------------------------------------------------------------------------------------
# Last, for these end the engines


def test_workers_in_processes_of_their_own(engines: Remote):
    """A worker that raised would leave its answer in vLLM's queue, and the next push would be given it."""
    engines.call(start_another_engine, {"backend": "weightsync"}, 2, timeout_s=180)
    engines.call(connect, "LLM")
    expected = {}
    for weights in ("B", "A"):
        assert engines.call(push, weights)[0] is None
        expected[weights] = engines.call(Engines.ask)
    engines.call(spoil, flip_a_byte, 3)
    failed([engines.call(push, "B")], DigestError, GRACE_S)
    assert engines.call(push, "B")[0] is None
    assert_same(engines.call(Engines.ask), expected["B"], "healed")

    engines.call(connect, "LLM")
    engines.call(mislead_worker, 1)
    error = failed([engines.call(push, "A")], PlacementError, GRACE_S)
    assert error.who == "engine 0 worker tp=1 pp=0 dp=0"
    assert_same(engines.call(Engines.ask), expected["B"], "untouched")
    assert engines.call(push, "A")[0] is None
    assert_same(engines.call(Engines.ask), expected["A"], "healed")


def mislead_worker(engines: Engines, number: int) -> None:
    """Once: where it is told to look there is other memory."""

    def mislead(endpoints: list[Endpoint]) -> None:
        # Workers share the rows of files.
        rows = copy.deepcopy(endpoints[number].storages)
        rows[0][3]["inode"] += 1
        endpoints[number] = replace(endpoints[number], storages=rows)

    transport_of(engines).change_endpoints = mislead


@pytest.mark.parametrize(
    ("config", "words"), [(None, "weight transfer is not configured"), ({"backend": "nccl"}, "'nccl'")]
)
def test_an_engine_without_the_plug_in(engines: Remote, config: Any, words: str):
    engines.call(start_another_engine, config)
    engines.call(connect, "LLM")
    error = failed([engines.call(push, "A")], EngineError, GRACE_S)
    assert "the engine has no weightsync plug-in" in str(error)
    assert words in str(error)


def start_another_engine(engines: Engines, config: Any, tp: int = 1) -> None:
    engines.end()
    options = engines.options(engines.checkpoint("qwen3", "A")) | {"weight_transfer_config": config}
    engines.llm = engines._vllm.LLM(**options, tensor_parallel_size=tp)


def test_an_engine_that_is_woken_though_it_is_poisoned_does_not_answer(engines: Remote):
    """A server ends, as vLLM does where a forward raises; an `LLM` in the trainer's process raises to its caller."""
    engines.call(start_another_engine, {"backend": "weightsync"}, 1, timeout_s=180)
    before = engines.call(Engines.ask)
    assert "this engine does not answer: it is POISONED" in engines.call(ask_poisoned)
    assert engines.call(push, "A")[0] is None
    assert_same(engines.call(Engines.ask), before, "healed")


def ask_poisoned(engines: Engines) -> str:
    connect(engines, "LLM", "broadcast")
    raise_in_send(engines, 3, MemoryError("no memory"))
    assert push(engines, "B")[0] is not None
    try:
        return repr(engines.ask())
    except Exception as error:
        return str(error)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["asked to end", "killed"])
def test_an_engine_that_ends_in_a_push(served: Http, trainers: Trainers, tmp_path: Path, how: signal.Signals):
    there = tmp_path / "there"
    trainers.call(spoil, pause_in_send, 3, there)
    outcomes: list[Outcome] = []
    pushing = threading.Thread(target=lambda: outcomes.extend(trainers.call(push, "B")))
    pushing.start()
    wait_for(there.exists)
    server = served.server.pid
    assert server is not None
    if how == signal.SIGTERM:
        everyone = [server, *descendants(server)]
        asking = http.client.HTTPConnection(served.url.removeprefix("http://"))
        asking.request("GET", "/weight_info")  # waits for the core, which waits for the push
        served.get("/health")  # the server has very likely read the first request by now
        os.kill(server, how)
        wait_for(lambda: not any(map(started_ticks, everyone)), GRACE_S)
        asking.close()
    else:
        os.killpg(server, how)
    there.unlink()
    pushing.join(60)
    errors = [error for error, _ in outcomes]
    assert len({str(error) for error in errors}) == 1
    assert isinstance(errors[0], (PeerError, EngineUnreachableError)), errors[0]
    assert "engine 0" in str(errors[0])
    assert max(seconds for _, seconds in outcomes) < GRACE_S
    failed(trainers.call(push, "B"), EngineUnreachableError, GRACE_S)
    assert trainers.call(idle_threads) == [[], []]


def descendants(pid: int) -> set[int]:
    """Return the processes that a process has started, and that these have."""
    tasks = [task / "children" for task in Path(f"/proc/{pid}/task").iterdir()]
    found = {int(child) for children in tasks for child in children.read_text().split()}
    return found.union(*map(descendants, found))
