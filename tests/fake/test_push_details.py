"""What a push must not forget: constants that only the loader knows, other engines' dtypes, the engine's dice."""

from __future__ import annotations

import ast
import copy
import functools
import gc
import os
import re
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_process
from fake_engine import (
    ROWS,
    Attention,
    FakeEngine,
    ModuleHost,
    PlainTrainer,
    TinyEngineModel,
    checkpoint,
    cold,
    fail_once_after,
    open_shared_files,
    trainer_model,
)
from fake_server import FakeServer
from ranks import run_ranks
from torch import nn
from trainer_process import TrainerProcess

from weightsync import (
    CheckpointTransport,
    ConfigError,
    EngineError,
    ManifestError,
    ModuleBucketer,
    PlacementError,
    TensorSelection,
    UnsupportedError,
    WeightSync,
    WeightSyncError,
)
from weightsync.fleet.fleet import Fleet
from weightsync.net.runtime import spawn
from weightsync.planning.layout import Manifest, TensorMeta
from weightsync.transports import ipc, nccl
from weightsync.transports.base import Transport
from weightsync.transports.files import FilesTransport
from weightsync.transports.ipc import IpcTransport
from weightsync.transports.nccl import NcclTransport
from weightsync.transports.shared_handles import export, open_exported
from weightsync.transports.staging import Packer
from weightsync.worker.loader import Receiver

TIMEOUT_S = 10.0


class OneWeight(nn.Module):
    """An engine's model that holds its one tensor in `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 4, dtype=dtype))

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            dict(self.named_parameters())[name].data.copy_(tensor)


def test_padding_is_set_in_an_engine_that_never_loaded_any_or_has_slept() -> None:
    host = ModuleHost(TinyEngineModel, checkpoint(1))
    with torch.no_grad():
        host.live.embed.weight.fill_(7.0)  # as `load_format="dummy"` leaves it
    model = trainer_model(checkpoint(2))
    with closing(FakeEngine(host)) as engine, WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) as sync:
        sync.push(model)
        assert torch.equal(host.live.embed.weight, cold(checkpoint(2)).embed.weight)
        assert not host.live.embed.weight[ROWS:].any()
        host.live.embed.weight.data.fill_(torch.nan)  # as vLLM's sleep at level 2 may leave it
        sync.push(model)
    assert torch.equal(host.live.embed.weight, cold(checkpoint(2)).embed.weight)


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_each_engine_gets_all_that_its_dtype_holds(dtypes: tuple[torch.dtype, ...], transport: str) -> None:
    old, new = torch.zeros(8, 4), torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    hosts = [ModuleHost(functools.partial(OneWeight, dtype), {"weight": old}) for dtype in dtypes]
    with ExitStack() as stack:
        engines = [stack.enter_context(closing(FakeEngine(host))) for host in hosts]
        sync = stack.enter_context(WeightSync("fsdp", transport, engines, timeout_s=TIMEOUT_S))
        sync.push(trainer_model({"weight": new}))
    for host, dtype in zip(hosts, dtypes, strict=True):
        assert torch.equal(host.live.weight, new.to(dtype))


class OddShapes(OneWeight):
    """A model with a scalar, a parameter without elements, and one that the trainer holds transposed."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.scalar, self.empty = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(0, 4))


def test_a_sync_that_has_pushed_is_copied_by_nobody() -> None:
    host = ModuleHost(TinyEngineModel, checkpoint(1))
    with closing(FakeEngine(host)) as engine, WeightSync("fsdp", engine=engine, timeout_s=TIMEOUT_S) as sync:
        sync.push(trainer_model(checkpoint(2)))
        with pytest.raises(TypeError, match="holds connections, and cannot be copied or pickled"):
            copy.deepcopy(sync)
        assert sync.push(trainer_model(checkpoint(1))).version == 2


@pytest.mark.parametrize("transport", ["ipc", "broadcast", "checkpoint"])
def test_tensors_of_odd_shapes_arrive(transport: str, tmp_path: Path) -> None:
    new = {"weight": torch.arange(32.0).view(4, 8).t(), "empty": torch.ones(0, 4), "scalar": torch.tensor(3.0)}
    host = ModuleHost(OddShapes, {"weight": torch.zeros(8, 4)})
    over: Any = CheckpointTransport(tmp_path) if transport == "checkpoint" else transport
    with closing(FakeEngine(host)) as engine, WeightSync("fsdp", over, engine, timeout_s=TIMEOUT_S) as sync:
        sync.push(trainer_model(new))
    assert all(torch.equal(tensor, new[name]) for name, tensor in host.live.state_dict().items())


@pytest.mark.parametrize("transport", [IpcTransport(), NcclTransport("broadcast")], ids=["ipc", "broadcast"])
def test_a_transport_that_another_sync_uses_is_refused(transport: Transport) -> None:
    model = trainer_model(checkpoint(2))
    engines = [FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1))) for _ in range(2)]
    first, second = (WeightSync("fsdp", transport, engine, timeout_s=TIMEOUT_S) for engine in engines)
    with closing(engines[0]), closing(engines[1]), second:
        with first:
            first.push(model)
            with pytest.raises(ConfigError, match="another WeightSync uses the transport"):
                second.push(model)
            assert first.push(model).version == 2
        assert second.push(model).version == 1


class NoElements(OneWeight):
    """A model whose one tensor has no elements."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.zeros(0, 4))


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_a_push_of_no_chunks_is_a_push(transport: str) -> None:
    engine = FakeEngine(ModuleHost(NoElements, {}))
    with closing(engine), WeightSync("fsdp", transport, engine, timeout_s=TIMEOUT_S) as sync:
        report = sync.push(trainer_model({"weight": torch.zeros(0, 4)}))
    assert (report.version, report.chunks, report.nbytes) == (1, 0, 0)


class Passing(OneWeight):
    """A loader that passes over what it has no parameter for, as vLLM's do for a tower that was left out."""

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        params = dict(self.named_parameters())
        for name, tensor in weights:
            if name in params:
                params[name].data.copy_(tensor)


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_a_part_that_the_engine_was_started_without_is_not_pushed(
    transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    make = functools.partial(Passing, torch.float32)
    host, whole = (ModuleHost(make, {"weight": torch.zeros(8, 4)}) for _ in range(2))
    host.left_out["visual"] = make
    model = trainer_model({"weight": torch.ones(8, 4), "visual.weight": torch.ones(8, 4)})
    caplog.set_level("INFO", "weightsync")
    with closing(FakeEngine(whole)) as engine:
        sync = WeightSync("fsdp", transport, engine, timeout_s=TIMEOUT_S)
        with sync, pytest.raises(ManifestError, match=r"Unexpected 1: visual\.weight"):
            sync.push(model)
    chosen = TensorSelection(frozen=("visual.*",), dtypes={"visual.*": "bfloat16", "*": "float32"})
    with (
        closing(FakeEngine(host)) as engine,
        WeightSync("fsdp", transport, engine, selection=chosen, timeout_s=TIMEOUT_S) as sync,
    ):
        reports = [sync.push(model), sync.push(model)]
    assert "without effect" not in caplog.text
    assert torch.equal(host.live.weight, torch.ones(8, 4))
    assert [report.nbytes for report in reports] == [8 * 4 * 4] * 2
    told = [record.getMessage() for record in caplog.records if "not loaded" in record.getMessage()]
    assert told == ["1 tensors are not loaded, such as visual.weight: the engine does not run their part of the model"]


class ShallowTower(nn.Module):
    """A model whose loader passes over a norm of its tower, as the engine needs no more than the layers before."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.tower = OneWeight(torch.float32), OneWeight(torch.float32)

    load_weights = Passing.load_weights


@pytest.mark.parametrize("others", [[], ["text.norm"], ["norm"], ["towers.norm"]])
def test_what_a_loader_passes_over_stays_behind_in_a_tower_alone(others: list[str]) -> None:
    zeros = torch.zeros(8, 4)
    host = ModuleHost(ShallowTower, {"text.weight": zeros, "tower.weight": zeros})
    host.towers.append("tower")
    names = ["text.weight", "tower.weight", "tower.norm", *others]
    model = trainer_model({name: torch.ones(8, 4) for name in names})
    with closing(FakeEngine(host)) as engine, WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) as sync:
        if others:
            with pytest.raises(ManifestError, match=rf"Unexpected 1: {others[0]}"):
                sync.push(model)
        else:
            assert sync.push(model).nbytes == 2 * 8 * 4 * 4
            assert torch.equal(host.live.tower.weight, torch.ones(8, 4))


def _doubled(module: nn.Module) -> None:
    if isinstance(module, OneWeight):
        module.weight.data.mul_(2)


def test_a_tensor_that_a_forward_replaces_between_pushes_is_no_weight() -> None:
    host = ModuleHost(functools.partial(OneWeight, torch.float32), {"weight": torch.zeros(8, 4)}, _doubled)
    chosen = host.live.state = types.SimpleNamespace(topk_ids=torch.zeros(4))  # as a router of experts keeps it
    with closing(FakeEngine(host)) as engine, WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) as sync:
        for number in (1.0, 2.0, 3.0):
            report = sync.push(trainer_model({"weight": torch.full((8, 4), number)}))
            assert report.load_paths["reload"] == 1
            chosen.topk_ids = torch.ones(8)  # the forward of the requests in between
    assert torch.equal(host.live.weight, torch.full((8, 4), 6.0))


def test_a_report_sets_the_engines_calls_apart_from_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(then: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (time.sleep(0.2), then(*args))[1]

    model, host = trainer_model(checkpoint(2)), ModuleHost(TinyEngineModel, checkpoint(1))
    with closing(FakeEngine(host)) as engine, WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) as sync:
        sync.push(model)
        with monkeypatch.context() as patch:
            patch.setattr(engine, "resume", slowly(engine.resume))
            called = sync.push(model)
        with monkeypatch.context() as patch:
            patch.setattr(Receiver, "run", slowly(Receiver.run))
            loaded = sync.push(model)
    assert 0.2 < called.control_s < called.total_s - called.gather_s
    assert loaded.control_s < loaded.total_s - 0.2


def test_bytes_are_made_readable_while_the_engine_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    model, host = trainer_model(checkpoint(2)), ModuleHost(TinyEngineModel, checkpoint(1))
    looked = threading.Event()
    with closing(FakeEngine(host)) as engine, WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) as sync:
        sync.push(model)
        look, pause = IpcTransport.prepare_push, engine.pause

        def look_and_tell(*args: Any) -> Any:
            digest = look(*args)
            looked.set()
            return digest

        def pause_when_looked(mode: str) -> None:
            assert looked.wait(TIMEOUT_S)
            pause(mode)

        monkeypatch.setattr(IpcTransport, "prepare_push", look_and_tell)
        monkeypatch.setattr(engine, "pause", pause_when_looked)
        assert sync.push(model).version == 2


@pytest.mark.parametrize("lost", [False, True])
def test_an_engine_that_pauses_late_goes_on_when_the_push_has_failed_meanwhile(
    monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    asked, started, go_on = threading.Event(), threading.Event(), threading.Event()

    def run_out(*args: Any) -> Any:  # once both have been asked of the engine, or they never will be
        assert asked.wait(TIMEOUT_S)
        assert started.wait(TIMEOUT_S)
        raise MemoryError("no room for this chunk")

    monkeypatch.setattr("weightsync.net.timeouts.FAREWELL_S", 1.0)
    model, host = trainer_model(checkpoint(2)), ModuleHost(TinyEngineModel, checkpoint(1))
    with closing(FakeEngine(host)) as engine, WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) as sync:
        sync.push(model)
        engine.log.clear()
        pause, start = engine.pause, engine.start

        def start_and_tell() -> None:
            start()
            started.set()

        def pause_late(mode: str) -> None:
            asked.set()
            go_on.wait(TIMEOUT_S)
            pause(mode)
            if lost:
                raise EngineError("the answer is lost")

        with monkeypatch.context() as patch:
            patch.setattr(engine, "pause", pause_late)
            patch.setattr(engine, "start", start_and_tell)
            patch.setattr(IpcTransport, "prepare_push", run_out)
            with pytest.raises(WeightSyncError, match="no room for this chunk"):
                sync.push(model)
            assert engine.log == ["start", "finish", "resume"]
        # The next push waits until that has paused and gone on, or it would go on in the middle of this one.
        threading.Timer(0.5, go_on.set).start()
        assert sync.push(model).version == 2
        late, pushed = engine.log[3:5], engine.log[5:]
        assert late == ["pause keep", "resume"]
        assert sorted(pushed) == ["finish", "pause keep", "reset caches", "resume", "start"]
        assert pushed[-1] == "resume"


@pytest.mark.forks
def test_a_trainer_that_exits_leaves_no_slow_engine_paused(tmp_path: Path) -> None:
    """The engine takes one call after the other, and its trainer ends once the push has raised."""
    one_at_a_time = threading.Lock()

    class Slow(FakeEngine):
        is_paused = False

        def pause(self, mode: str) -> None:
            with one_at_a_time:
                self.is_paused = True

        def resume(self) -> None:
            with one_at_a_time:
                self.is_paused = False

        def set_version(self, version: str) -> None:
            with one_at_a_time:
                if self.is_paused and self._version == "default":
                    time.sleep(trainer_process.TIMEOUT_S + 1)
                super().set_version(version)

    server = FakeServer(Slow(ModuleHost(TinyEngineModel, checkpoint(1))), 0)
    spawn("server", server.serve_forever)
    trainer = TrainerProcess(tmp_path, "ipc", [f"http://127.0.0.1:{server.server_port}"])
    with closing(server):
        try:
            trainer.order(push=2)
            assert trainer.process.stdin is not None
            trainer.process.stdin.close()  # after which it ends
            assert trainer.answer(60.0)["error"] == "SyncTimeoutError"
            trainer.process.wait(60.0)
        finally:
            trainer.kill()
        assert (server.engine.is_paused, server.engine.version()) == (False, "default")


def fail_to_join(rank: int) -> None:
    engine = FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1))) if rank == 0 else None
    if rank == 1:
        nccl.NcclTransport.connect = refuse_to_join
    started = time.monotonic()
    with (
        WeightSync("fsdp", "broadcast", engine, timeout_s=30.0) as sync,
        pytest.raises(WeightSyncError, match="no way to these workers") as raised,
    ):
        sync.push(trainer_model(checkpoint(2)))
    assert raised.value.who == "trainer rank 1"
    assert time.monotonic() - started < 15.0
    if engine is not None:
        assert engine.log == []
        engine.close()


def refuse_to_join(*_: object) -> None:
    raise PlacementError("no way to these workers")


def test_a_rank_that_cannot_join_is_named_at_once_on_every_rank() -> None:
    run_ranks(fail_to_join, 2)


def push_and_move(rank: int, transport: str, way: str) -> None:
    """Three pushes of a model that stays where it is, one when it has moved on the last rank, two more; and one of what
    the last rank cannot read."""
    last = torch.distributed.get_world_size() - 1
    tensors = checkpoint(1)
    if way == "of both" and rank == 0:
        tensors = {name: tensor for name, tensor in tensors.items() if "norm" not in name}
    model, host = trainer_model(tensors), ModuleHost(TinyEngineModel, checkpoint(9))
    engine = FakeEngine(host) if rank == 0 else None

    def equal(seed: int) -> bool:
        return engine is None or all(map(torch.equal, host.live.parameters(), cold(checkpoint(seed)).parameters()))

    with WeightSync("fsdp", transport, engine, timeout_s=TIMEOUT_S) as sync, torch.no_grad():
        for seed in range(1, 7):
            if seed == 4 and rank == last:
                model.embed.weight = nn.Parameter(torch.empty_like(model.embed.weight))
            for name, param in model.named_parameters():
                param.copy_(checkpoint(seed)[name])
            assert sync.push(model).version == seed
            assert equal(seed), seed
        for name, param in model.named_parameters():
            param.copy_(checkpoint(7)[name])
        weight = model.embed.weight
        if rank == last:
            model.embed.weight = nn.Parameter(torch.empty_like(weight, device="meta"))
        with pytest.raises(UnsupportedError, match="meta"):
            sync.push(model)
        assert equal(6)
        if engine is not None:
            assert engine.log.count("resume") == engine.log.count("pause keep")
            assert host.live.embed.weight.isfinite().all()
        model.embed.weight = weight
        assert sync.push(model).version == 7
        assert equal(7)
    if engine is not None:
        engine.close()


@pytest.mark.parametrize(
    ("ranks", "transport", "way"),
    [
        (1, "ipc", ""),
        (2, "ipc", ""),
        (1, "broadcast", ""),
        (2, "broadcast", ""),
        (2, "broadcast", "of both"),
    ],
)
def test_a_model_that_moves_on_one_rank_is_pushed_from_where_it_is(ranks: int, transport: str, way: str) -> None:
    run_ranks(push_and_move, ranks, transport, way)


def push_while_a_rank_is_late(rank: int, is_shared: bool) -> None:
    """A rank whose optimizer takes long on its GPU, and is not done when the push begins."""
    look, send, writes = IpcTransport.prepare_push, IpcTransport.send, []

    def look_late(*args: Any) -> int:
        time.sleep(0.3 * rank)
        while writes:
            writes.pop()()
        return look(*args)

    def send_late(*args: Any) -> None:
        time.sleep(0.3 * rank)
        send(*args)

    IpcTransport.prepare_push, IpcTransport.send = look_late, send_late
    host = ModuleHost(TinyEngineModel, checkpoint(9))
    model = trainer_model({name: tensor for i, (name, tensor) in enumerate(checkpoint(1).items()) if i % 2 == rank})
    if is_shared:
        model.share_memory()
    engine = FakeEngine(host) if rank == 0 else None

    def write(seed: int) -> None:
        for name, param in model.named_parameters():
            param.copy_(checkpoint(seed)[name])

    with WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S, verify="full") as sync, torch.no_grad():
        for seed in range(1, 5):
            writes.append(functools.partial(write, seed))
            sync.push(model)
            if engine is not None:
                assert all(map(torch.equal, host.live.parameters(), cold(checkpoint(seed)).parameters())), seed
    if engine is not None:
        engine.close()


@pytest.mark.parametrize("is_shared", [True, False])
def test_workers_read_nothing_that_a_rank_has_yet_to_write(is_shared: bool) -> None:
    run_ranks(push_while_a_rank_is_late, 2, is_shared)


def test_memory_that_was_freed_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("prepare_push", "prepare"):
        method = getattr(IpcTransport, name)
        monkeypatch.setattr(IpcTransport, name, lambda *a, n=name, m=method: (calls.append(n), m(*a))[1])
    model, host = trainer_model(checkpoint(2)), ModuleHost(TinyEngineModel, checkpoint(1))
    with closing(FakeEngine(host)) as engine, WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) as sync:
        for _ in range(3):
            calls.clear()
            sync.push(model)
        assert calls == ["prepare_push"], "a model that stays where it is"
        calls.clear()
        other = checkpoint(3)["embed.weight"]  # before the memory is free, or it may get the same
        model.embed.weight.data.untyped_storage().resize_(0)  # as those do that offload a model
        model.embed.weight.data = other
        sync.push(model)
        assert calls[0] == "prepare"
    assert torch.equal(host.live.embed.weight, cold(checkpoint(3)).embed.weight)


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_storage_that_was_resized_is_read_where_it_is_now(transport: str) -> None:
    """As Megatron's buffers are when a framework offloads them: the tensors stay, and move with their storage."""
    model, host = trainer_model(checkpoint(1)), ModuleHost(TinyEngineModel, checkpoint(3))
    params = list(model.parameters())
    flat = torch.cat([param.detach().flatten() for param in params])
    for param, part in zip(params, flat.split([param.numel() for param in params]), strict=True):
        param.data = part.view(param.shape)
    with closing(FakeEngine(host)) as engine, WeightSync("fsdp", transport, engine, timeout_s=TIMEOUT_S) as sync:
        sync.push(model)
        address, storage = flat.data_ptr(), flat.untyped_storage()
        storage.resize_(2 * storage.nbytes())  # takes the new memory before it frees the old
        assert flat.data_ptr() != address
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(checkpoint(2)[name])
        sync.push(model)
    assert all(map(torch.equal, host.live.parameters(), cold(checkpoint(2)).parameters()))


@pytest.mark.parametrize(("pushes", "pause"), [(0, "keep"), (1, "keep"), (1, "abort")])
def test_a_model_that_does_not_fit_is_refused_and_the_engine_goes_on(pushes: int, pause: str) -> None:
    model, host = trainer_model(checkpoint(2)), ModuleHost(TinyEngineModel, checkpoint(1))
    sync = WeightSync("fsdp", "ipc", engine := FakeEngine(host), timeout_s=TIMEOUT_S, pause=pause)
    with closing(engine), sync:
        for _ in range(pushes):
            sync.push(model)
        engine.log.clear()
        before = host.live.state()
        model.embed.weight = nn.Parameter(torch.ones(1, 1))
        with pytest.raises(ManifestError):
            sync.push(model)
        if (pushes, pause) == (1, "keep"):
            assert ({*engine.log[:2]}, engine.log[2:]) == ({"pause keep", "start"}, ["finish", "resume"])
        else:
            assert engine.log == []
        assert engine.version() == (str(pushes) if pushes else "default")
        assert all(torch.equal(tensor, before[name]) for name, tensor in host.live.state().items())


class WholeEngineModel(nn.Module):
    """A model with another one as its part, as in most checkpoints. Its parameters have other names than tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TinyEngineModel()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if not name.startswith("model."):
                raise ValueError(f"There is no module or parameter named {name.partition('.')[0]!r}")
            self.model.load_weights([(name.removeprefix("model."), tensor)])


@pytest.mark.parametrize("prefix", ["", "policy.model.", "module._orig_mod.model."])
def test_a_model_under_another_prefix_is_told_how_to_rename_it(prefix: str) -> None:
    theirs = {f"model.{name}": tensor for name, tensor in checkpoint(1).items()}
    ours = {prefix + name: tensor for name, tensor in checkpoint(2).items()}
    host = ModuleHost(WholeEngineModel, theirs)
    with closing(engine := FakeEngine(host)):
        with pytest.raises(ManifestError, match=r"another prefix.*Nothing was written") as refused:
            WeightSync("stream", engine=engine).push(ours)
        assert refused.value.missing == [*theirs]
        (text,) = re.findall(r"rename=(\{.*?\})", str(refused.value))
        selection = TensorSelection(rename=ast.literal_eval(text))
        with WeightSync("stream", engine=engine, selection=selection) as sync:
            sync.push(ours)
    assert all(map(torch.equal, host.live.parameters(), cold(checkpoint(2)).parameters()))


def test_an_engine_stays_paused_and_marked_when_its_post_processing_fails() -> None:
    is_broken = False

    def repack(module: nn.Module) -> None:
        if isinstance(module, Attention):
            if is_broken:
                raise MemoryError("no memory left to repack this")
            module.weight = nn.Parameter(module.weight.data.t().flip(0).contiguous(), requires_grad=False)

    model, host = trainer_model(checkpoint(2)), ModuleHost(TinyEngineModel, checkpoint(1), repack)
    with closing(FakeEngine(host)) as engine, WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) as sync:
        sync.push(model)
        for _ in range(2):  # also where it was marked before
            engine.log.clear()
            is_broken = True
            with pytest.raises(WeightSyncError, match="no memory left to repack this"):
                sync.push(model)
            assert "pause keep" in engine.log
            assert "resume" not in engine.log
            assert (engine.version() or "").startswith("POISONED")
            assert engine.sessions[0].receiver.state == "POISONED"
        is_broken = False
        sync.push(model)
        assert engine.log[-1] == "resume"
        assert engine.version() == "2"
    for name, param in host.live.named_parameters():
        assert torch.equal(param, cold(checkpoint(2), repack).get_parameter(name)), name


@pytest.mark.parametrize("transport", ["ipc", "broadcast", "checkpoint"])
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_the_model_is_kept_after_close(transport: str, fails: bool, tmp_path: Path) -> None:
    tensors = checkpoint(2)
    arrays = {name: tensor.numpy().copy() for name, tensor in tensors.items()}
    alive = {name: weakref.ref(array) for name, array in arrays.items()}  # as long as the storage of the parameter
    model = PlainTrainer({name: torch.from_numpy(array) for name, array in arrays.items()})
    host = ModuleHost(TinyEngineModel, checkpoint(1))
    way = CheckpointTransport(tmp_path) if transport == "checkpoint" else transport
    with closing(FakeEngine(host)) as engine:
        sync = WeightSync("fsdp", way, engine, timeout_s=TIMEOUT_S)
        sync.push(model)
        sync.push(model)
        if fails:
            fail_once_after(engine.sessions[0].receiver, 0)
            with pytest.raises(WeightSyncError, match="no memory left"):
                sync.push(model)
        sync.close()
        del model, arrays
        gc.collect()
        assert [name for name, array in alive.items() if array() is not None] == []


def test_vllm_is_told_to_finish_once_though_its_caches_cannot_be_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that are asked twice raise, and then their answers to older calls are taken for those to later ones. The
    weights are whole then, and what was computed with older ones is still there."""

    def refuse(*_: object) -> None:
        raise EngineError("the prefix cache could not be reset")

    model, host = trainer_model(checkpoint(2)), ModuleHost(TinyEngineModel, checkpoint(1))
    with closing(FakeEngine(host)) as engine, WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) as sync:
        sync.push(model)
        engine.log.clear()
        with monkeypatch.context() as patch:
            finish = engine.finish
            patch.setattr(engine, "finish", lambda version: (time.sleep(0.5), finish(version)))
            patch.setattr(engine, "reset_caches", refuse)
            with pytest.raises(EngineError, match="could not be reset"):
                sync.push(model)
        assert engine.log.count("finish") == 1
        assert "resume" not in engine.log
        assert (engine.version() or "").startswith("POISONED")
        paused = threading.Event()
        pause = engine.pause

        def refuse_when_paused(*_: object) -> None:  # or it never will be
            assert paused.wait(TIMEOUT_S)
            refuse()

        monkeypatch.setattr(engine, "pause", lambda mode: (pause(mode), paused.set()))
        with WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) as another:
            for one, method in (
                (sync, (Fleet, "go")),
                (sync, (Receiver, "run")),
                (another, (Fleet, "go")),
            ):
                paused.clear()
                with monkeypatch.context() as patch:
                    patch.setattr(*method, refuse_when_paused)
                    with pytest.raises(EngineError, match="could not be reset"):
                        one.push(model)
        assert engine.log.count("pause keep") == 4
        assert "resume" not in engine.log
        sync.push(model)
        assert engine.log[-1] == "resume"
        engine.log.clear()
        with monkeypatch.context() as patch:
            patch.setattr(IpcTransport, "prepare_push", refuse)
            with pytest.raises(EngineError, match="could not be reset"):
                sync.push(model)
        # Whether it had been paused by then is the order of two threads.
        assert engine.log.count("resume") == engine.log.count("pause keep")


def test_a_push_whose_transport_fails_in_the_end_is_not_committed(tmp_path: Path, monkeypatch: Any) -> None:
    """It has all been loaded then; but it is no version, and may become one yet."""
    model, host = trainer_model(checkpoint(2)), ModuleHost(TinyEngineModel, checkpoint(1))
    transport = CheckpointTransport(tmp_path)
    with closing(FakeEngine(host)) as engine, WeightSync("fsdp", transport, engine, timeout_s=TIMEOUT_S) as sync:
        sync.push(model, 1)
        engine.log.clear()

        def refuse(*_: object) -> None:
            time.sleep(0.3)  # a worker that had been told to commit would have
            raise OSError("no space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(FilesTransport, "on_commit", refuse)
            with pytest.raises(WeightSyncError, match="no space left"):
                sync.push(model, 7)
        assert "POISONED" in engine.sessions[0].status()
        assert "resume" not in engine.log
        assert sync.push(model, 7).version == 7
        assert engine.log[-1] == "resume"


def test_a_worker_has_its_whole_time_for_each_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    left_s: list[float] = []
    wait_until, fill = ipc.wait_until, Packer.fill

    def note_and_wait(late: Any, what: str, wait: Any, deadline: Any) -> None:
        if what == "send a chunk":
            left_s.append(deadline.left_s())
        wait_until(late, what, wait, deadline)

    def fill_late(*args: Any) -> None:
        time.sleep(0.3)
        fill(*args)

    monkeypatch.setattr(ipc, "wait_until", note_and_wait)
    monkeypatch.setattr(Packer, "fill", fill_late)
    with (
        closing(FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1)))) as engine,
        WeightSync("fsdp", "ipc", engine, timeout_s=2.0, max_bytes=200) as sync,
    ):
        report = sync.push(trainer_model(checkpoint(2)))
    assert len(left_s) == report.chunks > 3
    assert min(left_s) > 2.2, "2 seconds, and some more than ranks wait for each other"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda sync, model: sync.push(model.state_dict()), "push got a OrderedDict, expected the model"),
        (lambda sync, model: sync.push(model.parameters()), "push got a generator, expected the model"),
        (lambda sync, model: sync.push([model]), "a list of length 1, expected one torch.nn.Module"),
        (lambda sync, model: sync.push(model, version="step-1"), "version='step-1'; it must be a whole number"),
        (lambda sync, model: sync.push(model, version=True), "version=True; it must be a whole number"),
        (lambda sync, model: sync.push(model, version=0), "not newer than 0.* give at least 1"),
        (lambda sync, model: WeightSync("fsdp", None), "transport=None; choose"),
        (
            lambda sync, model: WeightSync("fsdp", "ipc", bucketer=ModuleBucketer(), max_bytes=5),
            "max_bytes=5 has no effect",
        ),
        (lambda sync, model: WeightSync("fsdp", "lora", pause="wait", verify="full"), "^verify, pause: no effect"),
        (
            lambda sync, model: WeightSync("fsdp", "single_copy", max_bytes=5),
            "max_bytes: no effect with this Single",
        ),
        (
            lambda sync, model: WeightSync("fsdp", CheckpointTransport("v", restart=True), pause="wait"),
            "pause: no effect with this CheckpointTransport",
        ),
        *(
            (lambda sync, model, way=way: WeightSync("fsdp", way, progress=True), "^progress: no effect with this")
            for way in ("lora", "single_copy", CheckpointTransport("v", restart=True))
        ),
        (lambda sync, model: WeightSync("fsdp", "broadcast", encoding="delta", verify="none"), "leave one of the two"),
        (lambda sync, model: WeightSync("fsdp", "gloo"), "choose .*CheckpointTransport"),
        (lambda sync, model: WeightSync("ipc", "fsdp"), "choose .*plain modules"),
        (lambda sync, model: WeightSync("fsdp", "single_copy").push(model), "call `attach"),
    ],
)
def test_what_cannot_be_pushed_is_refused_before_the_engine_pauses(call: Any, words: str) -> None:
    with (
        closing(FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1)))) as engine,
        WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) as sync,
    ):
        with pytest.raises(ConfigError, match=words):
            call(sync, trainer_model(checkpoint(2)))
        assert "pause keep" not in engine.log


def test_the_memory_of_several_engines_cannot_be_one_copy() -> None:
    with ExitStack() as stack:
        engines = [
            stack.enter_context(closing(FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1))))) for _ in range(2)
        ]
        sync = stack.enter_context(WeightSync("fsdp", "single_copy", engines, timeout_s=TIMEOUT_S))
        with torch.device("meta"):
            model = OneWeight(torch.float32)
        with pytest.raises(PlacementError, match="shares the memory of one engine, got 2 engines"):
            sync.attach(model)
        assert all(engine.log == [] for engine in engines)


def test_a_version_that_is_not_newer_is_refused_before_the_engine_pauses() -> None:
    model, host = trainer_model(checkpoint(2)), ModuleHost(TinyEngineModel, checkpoint(1))
    with closing(FakeEngine(host)) as engine, WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) as sync:
        sync.push(model, version=7)
        engine.log.clear()
        with pytest.raises(ConfigError, match="version 7 is not newer than 7"):
            sync.push(model, version=7)
        assert engine.log == []


def test_shared_memory_of_the_trainer_is_read_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("nothing may be staged")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    model, host = trainer_model(checkpoint(2)), ModuleHost(TinyEngineModel, checkpoint(1))
    with closing(FakeEngine(host)) as engine, WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) as sync:
        with pytest.raises(PlacementError, match="nothing may be staged"):
            sync.push(model)
        with monkeypatch.context() as patch:  # memory of which other processes know the name must stay where it is
            patch.setattr(torch.multiprocessing, "get_sharing_strategy", lambda: "file_system")
            with pytest.raises(PlacementError, match="nothing may be staged"):
                sync.push(model.share_memory())
        for factor in (1, 3):
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(factor)
            sync.push(model)
            expected = cold({name: tensor * factor for name, tensor in checkpoint(2).items()})
            for name, param in host.live.named_parameters():
                assert torch.equal(param, expected.get_parameter(name)), name


def test_shared_memory_that_cannot_be_mapped_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("unable to mmap")

    monkeypatch.setattr(torch, "from_file", refuse)
    host = ModuleHost(TinyEngineModel, checkpoint(1))
    with (
        closing(FakeEngine(host)) as engine,
        WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) as sync,
        pytest.raises(PlacementError, match="unable to mmap"),
    ):
        sync.push(trainer_model(checkpoint(2)))
    assert not open_shared_files()


def test_a_mapped_file_is_staged(tmp_path: Path) -> None:
    tensors = checkpoint(2)
    name, tensor = next(iter(tensors.items()))
    (tmp_path / "file").write_bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    for shared in (True, False):
        model, host = trainer_model(tensors), ModuleHost(TinyEngineModel, checkpoint(1))
        mapped = torch.from_file(str(tmp_path / "file"), shared=shared, size=tensor.numel(), dtype=tensor.dtype)
        model.get_parameter(name).data = mapped.view(tensor.shape)
        with closing(FakeEngine(host)) as engine, WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) as sync:
            sync.push(model)
        for key, param in host.live.named_parameters():
            assert torch.equal(param, cold(tensors).get_parameter(key)), key


def test_only_the_file_that_was_announced_is_mapped() -> None:
    tensor = torch.arange(10.0)
    kind, fields = export(tensor.untyped_storage())
    opened = open_exported(kind, fields, torch.device("cpu"), "a trainer")
    assert torch.equal(opened.view(torch.float32), tensor)
    with pytest.raises(PlacementError, match=r"not the memory exported by a trainer.*--pid=host"):
        open_exported(kind, {**fields, "inode": fields["inode"] + 1}, torch.device("cpu"), "a trainer")


@pytest.mark.parametrize(
    ("verify", "samples"), [("sampled", [-1, 1, 2]), ("full", [-1, -1, -1]), ("none", [None, None, None])]
)
def test_the_first_push_is_checked_whole_and_later_ones_in_turn(
    monkeypatch: pytest.MonkeyPatch, verify: str, samples: list[int | None]
) -> None:
    seen: list[int | None] = []
    send = IpcTransport.send

    def watched(self: IpcTransport, chunks: Any, seal: Any, update: Any) -> None:
        seen.append(seal and seal.sample)
        send(self, chunks, seal, update)

    monkeypatch.setattr(IpcTransport, "send", watched)
    model, host = trainer_model(checkpoint(2)), ModuleHost(TinyEngineModel, checkpoint(1))
    with (
        closing(FakeEngine(host)) as engine,
        WeightSync("fsdp", "ipc", engine, verify=verify, timeout_s=TIMEOUT_S) as sync,
    ):
        for _ in samples:
            sync.push(model)
    assert seen == samples


def test_memory_that_is_shared_in_part_is_staged_in_part() -> None:
    model, host = trainer_model(checkpoint(2)), ModuleHost(TinyEngineModel, checkpoint(1))
    next(model.parameters()).share_memory_()
    with closing(FakeEngine(host)) as engine, WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) as sync:
        report = sync.push(model)
    assert report.chunks > 1
    for name, param in host.live.named_parameters():
        assert torch.equal(param, cold(checkpoint(2)).get_parameter(name)), name


def test_planning_leaves_the_engines_random_numbers_alone() -> None:
    tensors = checkpoint(2)
    manifest = Manifest(tuple(TensorMeta(name, tuple(t.shape), "float32") for name, t in tensors.items()))
    receiver = Receiver(ModuleHost(TinyEngineModel, checkpoint(1)))
    torch.manual_seed(0)
    expected = torch.rand(4)
    torch.manual_seed(0)
    receiver.make_plan(manifest)
    assert torch.equal(torch.rand(4), expected)
