"""A fleet that changes: engines join, leave, catch up and come back, and those that stay are asked nothing."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_trainer import with_adapter
from fake_engine import FakeEngine, ModuleHost, TinyEngineModel, checkpoint, cold, trainer_model
from optional_transports import NIXL
from ranks import run_ranks
from recorders import RecordedEngine, sent_messages
from torch import nn

from weightsync import (
    CheckpointTransport,
    ConfigError,
    EngineUnreachableError,
    ManifestError,
    TensorSelection,
    WeightSync,
    WeightSyncError,
)
from weightsync.fleet import EngineList
from weightsync.fleet.roster import Roster
from weightsync.transports.base import Transport
from weightsync.transports.ipc import IpcTransport
from weightsync.transports.nccl import NcclTransport
from weightsync.worker.load_planner import LoadPlanner
from weightsync.worker.loader import Receiver

TIMEOUT_S = 20.0
TRANSPORTS = ["ipc", "broadcast", NIXL, "checkpoint"]
A_PUSH = {"Ready", "Go", "Commit"}
"""What an engine that stays is sent."""


class Named(RecordedEngine):
    """An engine with a name, which may be away, and be started anew from its first weights."""

    def __init__(self, name: str) -> None:
        super().__init__(ModuleHost(TinyEngineModel, checkpoint(1)))
        self.name = name

    def start_anew(self) -> None:
        for session in self.sessions:
            session.close()
        self.__init__(self.name)  # type: ignore[misc]

    def serves(self, seed: int) -> bool:
        self.hosts[0].check_before_answer()
        expected = cold(checkpoint(seed)).state_dict()
        return all(torch.equal(tensor, expected[name]) for name, tensor in self.hosts[0].live.state_dict().items())


@pytest.fixture
def engines() -> Iterator[list[Named]]:
    engines = [Named(f"engine {number}") for number in range(6)]
    yield engines
    for engine in engines:
        engine.close()


def fill(model: nn.Module, seed: int) -> nn.Module:
    """Let a model hold another checkpoint, in the same memory."""
    model.load_state_dict(checkpoint(seed))
    return model


def way(transport: str, folder: Path) -> Any:
    return CheckpointTransport(folder) if transport == "checkpoint" else transport


def asked(sent: Counter[tuple[str, str]], number: int) -> set[str]:
    """Return which messages the worker of an engine was sent."""
    return {message for peer, message in sent if peer.startswith(f"engine {number} ")}


def count_traces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    traced: list[int] = []
    make = LoadPlanner.make
    monkeypatch.setattr(LoadPlanner, "make", lambda *args: (traced.append(1), make(*args))[1])
    return traced


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_engine_that_joins_serves_the_next_version_as_the_others_do(
    engines: list[Named], transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = engines[:2]
    model = trainer_model(checkpoint(2))
    with WeightSync("fsdp", way(transport, tmp_path), [first], timeout_s=TIMEOUT_S) as sync:
        sync.push(model)
        first.heard()
        traced = count_traces(monkeypatch)
        sync.engines.add(second)
        with sent_messages() as sent:
            report = sync.push(fill(model, 3))
        assert first.serves(3)
        assert second.serves(3)
        assert {worker.name for worker in report.workers} == {"engine 0 worker tp=0", "engine 1 worker tp=0"}
        assert len(traced) == 1, "the engine that stays traced its loader again"
        if transport != "checkpoint":  # of which there is one, whose folder is one
            assert asked(sent, 0) == A_PUSH
            assert "init" not in first.heard()
        sync.push(fill(model, 4))
        with sent_messages() as sent:
            sync.push(fill(model, 5))
        assert asked(sent, 0) == asked(sent, 1) == A_PUSH
    assert all(engine.serves(5) and engine.version() == "4" for engine in (first, second))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_engine_that_leaves_goes_on_untouched_and_the_others_are_pushed_to(
    engines: list[Named], transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaving, staying, another = engines[:3]
    model = trainer_model(checkpoint(2))
    with WeightSync("fsdp", way(transport, tmp_path), [leaving, staying, another], timeout_s=TIMEOUT_S) as sync:
        sync.push(model)
        traced = count_traces(monkeypatch)
        leaving.heard()
        staying.heard()
        sync.engines.remove(leaving)
        with sent_messages() as sent:
            sync.push(fill(model, 3))
        assert leaving.serves(2)
        assert leaving.version() == "1"
        assert leaving.heard() == ""
        assert asked(sent, 0) == {"Release"}
        assert staying.serves(3)
        assert another.serves(3)
        assert traced == []
        if transport not in ("broadcast", "nixl"):  # a communicator is of all its members
            assert asked(sent, 1) == A_PUSH
            assert "init" not in staying.heard()
        with WeightSync("fsdp", "ipc", leaving, timeout_s=TIMEOUT_S) as other:  # nobody holds it any more
            other.push(trainer_model(checkpoint(5)))
        sync.push(fill(model, 4))
    assert leaving.serves(5)
    assert staying.serves(4)


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_engine_that_joined_alone_stays_connected_when_the_first_leaves(engines: list[Named], transport: str) -> None:
    first, second = engines[:2]
    model = trainer_model(checkpoint(2))
    with WeightSync("fsdp", transport, [first], timeout_s=TIMEOUT_S) as sync:
        sync.push(model)
        sync.engines.add(second)
        sync.push(fill(model, 3))
        sync.engines.remove(first)
        with sent_messages() as sent:
            report = sync.push(fill(model, 4))
    assert asked(sent, 1) == A_PUSH
    assert [worker.name for worker in report.workers] == ["engine 1 worker tp=0"]
    assert first.serves(3)
    assert second.serves(4)


@pytest.mark.parametrize(("transport", "kind"), [("ipc", IpcTransport), ("broadcast", NcclTransport)])
def test_engine_that_was_told_nothing_goes_on_when_the_push_into_another_fails(
    engines: list[Named], transport: str, kind: type[Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = engines[:3]
    model = trainer_model(checkpoint(2))
    with WeightSync("fsdp", transport, [first], timeout_s=TIMEOUT_S) as sync:
        sync.push(model)
        sync.engines.add(second)
        sync.push(fill(model, 3))
        sync.engines.add(third)
        second.heard()
        fill(model, 4)
        with monkeypatch.context() as patched:
            patched.setattr(kind, "send", lambda *_: 1 / 0)
            with pytest.raises(WeightSyncError, match="division by zero") as raised:
                sync.push(model)
        assert raised.value.message.endswith(f"; POISONED until the next success: {first.name}")
        assert first.version().startswith("POISONED")
        assert second.version() == "2"
        assert second.serves(3)
        assert second.heard().endswith("finish None\nmark 2\nresume\n")
        sync.push(fill(model, 5))
    assert all(engine.serves(5) and engine.version() == "3" for engine in (first, second, third))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_late_engine_catches_up_while_the_others_generate_on(
    engines: list[Named], transport: str, tmp_path: Path
) -> None:
    first, second = engines[:2]
    model = trainer_model(checkpoint(2))
    with WeightSync("fsdp", way(transport, tmp_path), [first], timeout_s=TIMEOUT_S) as sync:
        sync.push(model)
        sync.push(fill(model, 3))
        first.heard()
        assert sync.catch_up(model) is None
        sync.engines.add(second)
        with sent_messages() as sent:
            report = sync.catch_up(model)
        assert report is not None
        assert report is sync.last_report
        assert report.version == 2
        assert [worker.name for worker in report.workers] == ["engine 1 worker tp=0"]
        assert asked(sent, 0) == set()
        assert first.heard() == ""
        assert all(engine.serves(3) and engine.version() == "2" for engine in (first, second))
        assert sync.catch_up(model) is None
        assert len(sync.push(fill(model, 4)).workers) == 2
        assert all(engine.serves(4) and engine.version() == "3" for engine in (first, second))
        with sent_messages() as sent:
            sync.push(fill(model, 5))
        assert asked(sent, 0) == asked(sent, 1) == A_PUSH
    assert all(engine.serves(5) for engine in (first, second))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_model_that_has_moved_reaches_engines_that_joined_alone(
    engines: list[Named], transport: str, tmp_path: Path
) -> None:
    with WeightSync("fsdp", way(transport, tmp_path), engines[:2], timeout_s=TIMEOUT_S) as sync:
        model = trainer_model(checkpoint(1))
        sync.push(model)
        sync.engines.add(engines[2])
        sync.push(model)
        sync.engines.remove(engines[0])
        for seed in (2, 3):
            moved = trainer_model(checkpoint(seed))
            sync.push(moved)
            assert all(engine.serves(seed) for engine in engines[1:3])
    assert engines[0].serves(1)


@pytest.mark.parametrize("transport", ["broadcast", NIXL])
def test_engines_that_have_joined_alone_are_in_the_chain_from_the_next_push_on(
    engines: list[Named], transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = trainer_model(checkpoint(1))
    with WeightSync("fsdp", transport, engines[:2], timeout_s=TIMEOUT_S) as sync:
        once = sync.push(model).sent_bytes
        for engine in engines[2:4]:
            sync.engines.add(engine)
            assert sync.catch_up(model) is not None
        traced = count_traces(monkeypatch)
        for engine in engines[:4]:
            engine.heard()
        assert sync.push(fill(model, 2)).sent_bytes == once
        assert traced == [], "an engine that has joined traced its loader again"
        assert [engine.heard().count("pause") for engine in engines[:4]] == [1] * 4
        assert sync.push(fill(model, 3)).sent_bytes == once
        sync.engines.add(engines[4])
        assert sync.push(fill(model, 4)).sent_bytes == 2 * once
        sync.engines.remove(engines[0])
        assert sync.push(fill(model, 5)).sent_bytes == once
    assert engines[0].serves(4)
    assert all(engine.serves(5) for engine in engines[1:5])


def test_nothing_catches_up_with_a_model_that_was_written_since(engines: list[Named]) -> None:
    model = trainer_model(checkpoint(2))
    with WeightSync("fsdp", "ipc", [engines[0]], timeout_s=TIMEOUT_S) as sync:
        with pytest.raises(ConfigError, match="there is no version to catch up with"):
            sync.catch_up(model)
        sync.push(model)
        sync.engines.add(engines[1])
        fill(model, 3)
        with pytest.raises(ConfigError, match="the model was written or moved since"):
            sync.catch_up(model)
        assert engines[0].serves(2)
        assert engines[1].serves(1)
        sync.push(model)
    assert all(engine.serves(3) for engine in engines[:2])


def write_data(model: Any) -> None:
    next(iter(model.parameters())).data[-1, -1] += 1


def step_of_factors(model: Any) -> None:
    with torch.no_grad():
        next(param for param in model.parameters() if param.requires_grad).add_(1)


def other_scale(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 3.0)


def other_factors(model: Any) -> None:
    next(param for param in model.parameters() if param.requires_grad).data.mul_(2)


WRITES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "data": (lambda: trainer_model(checkpoint(2)), write_data),
    "data of factors": (with_adapter, other_factors),
    "factors": (with_adapter, step_of_factors),
    "scale": (with_adapter, other_scale),
    "adapters disabled": (with_adapter, lambda model: model.base_model.disable_adapter_layers()),
}


@pytest.mark.parametrize("verify", ["sampled", "full"])
@pytest.mark.parametrize(("make", "write"), WRITES.values(), ids=WRITES)
def test_nothing_catches_up_with_what_was_written_unseen(
    engines: list[Named], make: Callable[[], Any], write: Callable[[Any], None], verify: str
) -> None:
    model = make()
    with WeightSync("fsdp", "ipc", [engines[0]], timeout_s=TIMEOUT_S, verify=verify) as sync:
        sync.push(model)
        before = list(map(torch.clone, engines[0].hosts[0].live.parameters()))
        sync.engines.add(engines[1])
        assert sync.catch_up(model) is not None
        sync.engines.add(engines[2])
        write(model)
        with pytest.raises(ConfigError, match="the model was written or moved since"):
            sync.catch_up(model)
        assert engines[2].serves(1)
        sync.push(model)
        served = [list(engine.hosts[0].live.parameters()) for engine in engines[:3]]
    assert all(all(map(torch.equal, served[0], own)) for own in served[1:])
    assert not all(map(torch.equal, served[0], before))


def test_nothing_catches_up_without_digests(engines: list[Named]) -> None:
    model = trainer_model(checkpoint(2))
    with WeightSync("fsdp", "ipc", [engines[0]], timeout_s=TIMEOUT_S, verify="none") as sync:
        sync.push(model)
        sync.engines.add(engines[1])
        write_data(model)
        with pytest.raises(ConfigError, match='with verify="none" a model cannot be compared'):
            sync.catch_up(model)
        assert engines[1].serves(1)


def test_engine_that_had_a_newer_version_does_not_catch_up(engines: list[Named]) -> None:
    with WeightSync("fsdp", "ipc", engines[1], timeout_s=TIMEOUT_S) as sync:
        sync.push(trainer_model(checkpoint(4)), version=9)
    model = trainer_model(checkpoint(2))
    with WeightSync("fsdp", "ipc", [engines[0]], timeout_s=TIMEOUT_S) as sync:
        sync.push(model)
        sync.engines.add(engines[1])
        with pytest.raises(ConfigError, match="catch up with version 1 has had version 9"):
            sync.catch_up(model)
        assert engines[1].serves(4)
        assert sync.push(model).version == 10
    assert all(engine.serves(2) for engine in engines[:2])


def test_engine_that_joins_gets_what_is_frozen(engines: list[Named]) -> None:
    model = trainer_model(checkpoint(2))
    for name, param in model.named_parameters():
        param.requires_grad_("attn" in name)
    selection = TensorSelection(only_trained=True)
    with WeightSync("fsdp", "ipc", [engines[0]], selection=selection, timeout_s=TIMEOUT_S) as sync:
        whole = sync.push(model).nbytes
        assert sync.push(model).nbytes < whole
        sync.engines.add(engines[1])
        assert sync.push(model).nbytes == whole
        assert sync.push(model).nbytes < whole
    assert all(engine.serves(2) for engine in engines[:2])


def test_links_of_many_that_joined_one_by_one_become_one(engines: list[Named]) -> None:
    model = trainer_model(checkpoint(1))
    sent: Counter[tuple[str, str]] = Counter()
    with WeightSync("fsdp", "ipc", [engines[0]], timeout_s=TIMEOUT_S) as sync:
        for seed, engine in enumerate(engines[1:], 2):
            sync.push(model)
            sync.engines.add(engine)
            with sent_messages() as sent:
                sync.push(fill(model, seed))
            assert engine.serves(seed)
        assert len(sync._strategy._sessions.negotiated) == 2
        assert all(engine.serves(6) for engine in engines)
        assert asked(sent, 0) == A_PUSH
        sync.engines.remove(engines[5])
        sync.push(fill(model, 7))
    assert all(engine.serves(7) for engine in engines[:5])


def test_engine_that_was_started_anew_between_pushes_is_pushed_to(engines: list[Named]) -> None:
    model = trainer_model(checkpoint(2))
    with WeightSync("fsdp", "ipc", engines[:2], timeout_s=TIMEOUT_S) as sync:
        sync.push(model)
        engines[1].start_anew()
        with sent_messages() as sent:
            assert sync.push(fill(model, 3)).left_out == ()
    assert asked(sent, 0) == A_PUSH
    assert all(engine.serves(3) for engine in engines[:2])


def test_engine_that_does_not_join_leaves_the_others_as_they_are(engines: list[Named]) -> None:
    first, absent = engines[:2]

    def refuse(info: dict[str, Any]) -> None:
        raise EngineUnreachableError("nothing answers there", who=absent.name)

    absent.init = refuse  # type: ignore[method-assign]
    model = trainer_model(checkpoint(2))
    with WeightSync("fsdp", "ipc", [first], timeout_s=TIMEOUT_S) as sync:
        sync.push(model)
        first.heard()
        sync.engines.add(absent)
        with pytest.raises(EngineUnreachableError, match="nothing answers there"):
            sync.catch_up(model)
        assert first.heard() == ""
        assert first.serves(2)
        sync.engines.remove(absent)
        sync.push(fill(model, 3))
    assert first.serves(3)


@pytest.mark.parametrize("transport", ["broadcast", NIXL])
def test_engine_that_does_not_come_into_the_chain_leaves_all_as_they_are(
    engines: list[Named], transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, late = engines[:2]

    def refuse(info: dict[str, Any]) -> None:
        raise EngineUnreachableError("nothing answers there", who=late.name)

    model = trainer_model(checkpoint(2))
    with WeightSync("fsdp", transport, [first], timeout_s=TIMEOUT_S) as sync:
        sync.push(model)
        sync.engines.add(late)
        assert sync.catch_up(model) is not None
        first.heard()
        fill(model, 3)
        with monkeypatch.context() as patched:
            patched.setattr(late, "init", refuse)
            with pytest.raises(EngineUnreachableError, match="nothing answers there"):
                sync.push(model)
        assert "pause" not in first.heard()
        assert all(engine.serves(2) and engine.version() == "1" for engine in (first, late))
        sync.push(fill(model, 4))
    assert all(engine.serves(4) and engine.version() == "2" for engine in (first, late))


def test_a_callable_and_a_file_are_read_before_each_push(engines: list[Named], tmp_path: Path) -> None:
    there = engines[:1]
    model = trainer_model(checkpoint(2))
    with WeightSync("fsdp", "ipc", lambda: there, timeout_s=TIMEOUT_S) as sync:
        sync.push(model)
        there = engines[:3]
        sync.push(fill(model, 3))
        there = engines[1:3]
        sync.push(fill(model, 4))
        with pytest.raises(ConfigError, match="change the list there"):
            sync.engines.add(engines[4])
    assert [engine.serves(seed) for engine, seed in zip(engines, (3, 4, 4), strict=False)] == [True] * 3
    file = tmp_path / "engines"
    with WeightSync("fsdp", "ipc", file, timeout_s=TIMEOUT_S) as sync:
        with pytest.raises(ConfigError, match=f"cannot read the engines' addresses from {file}"):
            sync.push(model)
        file.write_text("# none yet\n\n")
        with pytest.raises(ConfigError, match="the list of engines"):
            sync.push(model)
        file.write_text("http://127.0.0.1:9  # nobody listens there\n")
        with pytest.raises(EngineUnreachableError, match=r"127\.0\.0\.1:9"):
            sync.push(model)


def test_engines_are_added_and_removed_once(engines: list[Named]) -> None:
    sync = WeightSync("fsdp", "ipc", ["http://a:1", engines[0]], timeout_s=TIMEOUT_S)
    for known in ("http://a:1/", engines[0]):
        with pytest.raises(ConfigError, match="is among the engines already"):
            sync.engines.add(known)
    with pytest.raises(ConfigError, match="is not among the engines"):
        sync.engines.remove("http://b:1")
    sync.engines.add("http://b:1")
    before = sync.engines.engines()
    sync.engines.remove("http://a:1")
    assert sync.engines.engines() == before[1:]
    assert [one.name for one in before] == ["engine 0 (http://a:1)", "engine 0", "engine 2 (http://b:1)"]


def test_transports_of_one_engine_have_no_list() -> None:
    with pytest.raises(ConfigError, match="this transport has one fixed engine"):
        _ = WeightSync("fsdp", "single_copy").engines


def test_push_does_not_wait_for_a_lost_engine_that_does_not_answer(engines: list[Named]) -> None:
    """Nothing comes back from a host that is gone, not even a refusal."""
    over, asks = threading.Event(), []

    def is_alive() -> bool:
        asks.append(1)
        return over.wait(TIMEOUT_S)

    roster = Roster(EngineList(engines[:2], TIMEOUT_S), TIMEOUT_S)
    engines[1].is_alive = is_alive  # type: ignore[method-assign]
    roster.leave_out(["engine 1"])
    for _ in range(3):
        assert roster.engines() == engines[:1]
    assert asks == [1], "it is asked anew while nothing has come back"
    answer = roster._asked["engine 1"]
    over.set()
    assert answer.result(TIMEOUT_S)
    assert roster.engines() == engines[:2]
    assert roster.lost == set()


@pytest.mark.parametrize("leave", ["removed", "started anew"])
def test_push_after_a_refused_one_asks_nothing_of_an_engine_that_left(engines: list[Named], leave: str) -> None:
    model = trainer_model(checkpoint(2))
    with WeightSync("fsdp", "ipc", engines[:2], timeout_s=TIMEOUT_S) as sync:
        sync.push(model)
        if leave == "removed":
            sync.engines.remove(engines[1])
        else:
            engines[1].start_anew()
        with pytest.raises(ConfigError, match="expected one torch"):
            sync.push("no model")  # type: ignore[arg-type]
        sync.push(fill(model, 3))
        assert engines[0].serves(3)
        assert engines[1].serves(2 if leave == "removed" else 3)


class OneLayer(TinyEngineModel):
    def __init__(self) -> None:
        super().__init__()
        self.layers = self.layers[:1]


@pytest.mark.parametrize(
    ("make", "words"), [(OneLayer, "Unexpected 9"), (partial(TinyEngineModel, 0, 2), "no place for")]
)
def test_engine_that_would_be_refused_alone_is_refused_beside_another(
    engines: list[Named], make: Callable[[], nn.Module], words: str
) -> None:
    """The second one's loader takes a slice of attention that is too large, as vLLM's do."""
    own = {name: tensor for name, tensor in checkpoint(1).items() if make is not OneLayer or "layers.1" not in name}
    with (
        closing(FakeEngine(ModuleHost(make, own))) as other,
        WeightSync("fsdp", "ipc", [engines[0], other], timeout_s=TIMEOUT_S) as sync,
    ):
        other.name = "the other"
        with pytest.raises(ManifestError, match=f"do not fit the other's model.*{words}"):
            sync.push(trainer_model(checkpoint(2)))
        assert engines[0].serves(1)


def test_versions_of_a_folder_stay_as_they_are_while_engines_catch_up(
    engines: list[Named], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, commit, at_commit = trainer_model(checkpoint(2)), Receiver.commit, list[list[str]]()

    def look_and_commit(*args: Any) -> float:
        at_commit.append(sorted(path.name for path in tmp_path.glob(".incoming-*/*")))
        return commit(*args)

    monkeypatch.setattr(Receiver, "commit", look_and_commit)
    with WeightSync("fsdp", CheckpointTransport(tmp_path), [engines[0]], timeout_s=TIMEOUT_S) as sync:
        sync.push(model)
        written = (tmp_path / "version-00000001/model.safetensors").stat()
        sync.engines.add(engines[1])
        assert sync.catch_up(model) is not None
        (incoming,) = tmp_path.glob(".incoming-*")
        assert [path.name for path in incoming.iterdir()] == ["rank-0"], "the bytes are there twice"
        assert at_commit == [["rank-0"], ["1", "rank-0"]], "the engine was kept paused while files were removed"
        sync.engines.remove(engines[0])
        assert sync.push(fill(model, 3)).version == 2
    assert (tmp_path / "version-00000001/model.safetensors").stat() == written
    assert sorted(path.name for path in tmp_path.glob("version-*")) == ["version-00000001", "version-00000002"]
    assert [engine.serves(seed) for engine, seed in zip(engines, (2, 3), strict=False)] == [True] * 2


def change_from_ranks(rank: int, transport: str, folder: Path) -> None:
    engines = [Named(f"engine {number}") for number in range(3)]
    model = trainer_model(checkpoint(2))
    engine = engines[:2] if rank == 0 else None
    with WeightSync("fsdp", way(transport, folder), engine, timeout_s=TIMEOUT_S) as sync:
        sync.push(model)
        if rank == 0:
            sync.engines.add(engines[2])
        caught_up = sync.catch_up(model)
        assert caught_up is not None
        assert rank or all(engine.serves(2) for engine in engines)
        sync.push(fill(model, 3))
        assert rank or all(engine.serves(3) for engine in engines)
        if rank == 0:
            sync.engines.remove(engines[0])
        assert len(sync.push(fill(model, 4)).workers) == 2
        assert rank or [engine.serves(seed) for engine, seed in zip(engines, (3, 4, 4), strict=True)] == [True] * 3
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("transport", ["ipc", "broadcast", "checkpoint"])
def test_all_ranks_follow_what_rank_0_is_told(transport: str, tmp_path: Path) -> None:
    run_ranks(change_from_ranks, 2, transport, tmp_path)


def add_elsewhere(rank: int) -> None:
    engines = [Named("engine 0"), Named("engine 1")]
    model = trainer_model(checkpoint(2))
    with WeightSync("fsdp", "ipc", engines[rank], timeout_s=TIMEOUT_S) as sync:
        sync.push(model)
        if rank:
            sync.engines.add(engines[0])
        with pytest.raises(ConfigError, match="in the process of trainer rank 1 was added or removed"):
            sync.push(model)
    for engine in engines:
        engine.close()


def test_engine_that_another_rank_adds_in_its_process_is_refused() -> None:
    run_ranks(add_elsewhere, 2)
