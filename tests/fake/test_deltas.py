"""Pushes that send what has changed: the engine is as one that was given everything, whatever was lost in between."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
import torch
from engines import TIMEOUT_S
from fake_engine import FakeEngine, ModuleHost, TinyEngineModel, checkpoint, cold, fail_once_after, module_of
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from weightsync import ConfigError, PushReport, TensorSelection, WeightSync, WeightSyncError
from weightsync.planning import transfer_plan
from weightsync.transports import encoding, nccl

ROWS, WIDTH, LAYERS = 256, 512, 6
NBYTES = 2 * ROWS * WIDTH * LAYERS
MESSAGES, WORDS = "messages", "changed words"


class Layers(nn.Module):
    """Rank `rank` of `tp`, which has as many rows of each matrix as another."""

    def __init__(self, rank: int = 0, tp: int = 1) -> None:
        super().__init__()
        self.rank = rank
        self.layers = nn.ParameterList(torch.empty(ROWS // tp, WIDTH, dtype=torch.bfloat16) for _ in range(LAYERS))

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            param = self.get_parameter(name)
            param.data.copy_(tensor.narrow(0, self.rank * param.shape[0], param.shape[0]))


@pytest.fixture(params=[MESSAGES, WORDS], autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kind of encoding. That of GPUs runs on CPUs here, over TCP."""
    monkeypatch.setattr(nccl, "finds_words", lambda device: request.param == WORDS)
    return str(request.param)


def weights(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {f"layers.{n}": 0.02 * torch.randn(ROWS, WIDTH, generator=draw) for n in range(LAYERS)}


class Trainer:
    """A policy in float32, whose steps change few of the bfloat16 values that travel."""

    def __init__(
        self, engine: Any, encoding: str | None = "delta", seed: int = 1, backend: str = "fsdp", **options: Any
    ) -> None:
        self.master = weights(seed)
        self.draw = torch.Generator().manual_seed(seed)
        self.sync = WeightSync(
            backend, "broadcast", engine, encoding=encoding, timeout_s=TIMEOUT_S, max_bytes=NBYTES // 4, **options
        )
        self.model = module_of({name: tensor.bfloat16() for name, tensor in self.master.items()})

    def step(self, lr: float = 1e-6) -> None:
        for name, param in self.model.named_parameters():
            self.master[name] += 0.3 * lr * torch.randn(ROWS, WIDTH, generator=self.draw)
            whole = self.master[name].bfloat16()
            if isinstance(param, DTensor):
                whole = whole.chunk(param.device_mesh.size())[param.device_mesh.get_rank()]
                param.to_local().detach().copy_(whole)
            else:
                param.data.copy_(whole)

    def push(self) -> PushReport:
        return self.sync.push(self.model)

    def check(self, *hosts: ModuleHost) -> None:
        """The engines hold what the trainer holds, to the bit."""
        for host in hosts:
            rank, world = host.identity.rank, host.identity.world
            for name in self.master:
                own = self.master[name].bfloat16().chunk(world)[rank].view(torch.int16)
                assert torch.equal(host.live.get_parameter(name).data.view(torch.int16), own), name


def engine_host(rank: int = 0, tp: int = 1) -> ModuleHost:
    tensors = {name: tensor.bfloat16() for name, tensor in weights(0).items()}
    return ModuleHost(lambda: Layers(rank, tp), tensors, rank=rank, world=tp)


@pytest.fixture
def host() -> ModuleHost:
    return engine_host()


@pytest.fixture
def engine(host: ModuleHost) -> Iterator[FakeEngine]:
    with closing(FakeEngine(host)) as engine:
        yield engine


def test_a_push_sends_what_has_changed(kind: str, host: ModuleHost, engine: FakeEngine):
    trainer = Trainer(engine)
    assert trainer.push().sent_bytes >= NBYTES
    factors = {1e-6: 60, 1e-5: 15, 0.0: 1000} if kind == MESSAGES else {1e-6: 45, 1e-5: 8, 0.0: 380}
    for lr, factor in [*factors.items(), (1e-6, factors[1e-6])]:
        trainer.step(lr)
        report = trainer.push()
        trainer.check(host)
        assert (report.nbytes, report.chunks > 2) == (NBYTES, True)
        assert report.sent_bytes < NBYTES / factor
    trainer.sync.close()


STREAMS: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "dict": lambda tensors: tensors,
    "function": lambda tensors: lambda: ((name, tensor.clone()) for name, tensor in tensors.items()),
    "iterator": lambda tensors: iter(tensors.items()),
}


@pytest.mark.parametrize("form", STREAMS)
def test_a_stream_sends_what_has_changed_and_is_read_once(host: ModuleHost, engine: FakeEngine, form: str):
    trainer = Trainer(engine, backend="stream")
    for lr, sends_changes in ((0.0, False), (1e-6, True), (1.0, False), (1e-6, True)):
        trainer.step(lr)
        stream = STREAMS[form](dict(trainer.model.named_parameters()))
        assert (trainer.sync.push(stream).sent_bytes < NBYTES / 40) is sends_changes
        trainer.check(host)
    trainer.sync.close()


def test_engines_in_a_chain_pass_differences_on():
    hosts = [[engine_host(rank, 2) for rank in range(2)] for _ in range(3)]
    with ExitStack() as stack:
        engines = [stack.enter_context(closing(FakeEngine(*own))) for own in hosts]
        trainer = Trainer(engines)
        first = trainer.push()
        for _ in range(3):
            trainer.step()
            report = trainer.push()
            trainer.check(*(host for own in hosts for host in own))
            assert report.sent_bytes < first.sent_bytes / 40
        trainer.sync.close()


def rank_of_two(rank: int) -> None:
    with ExitStack() as stack:
        pairs = [[engine_host(number, 2) for number in range(2)] for _ in range(3)] if rank == 0 else []
        engines = [stack.enter_context(closing(FakeEngine(*pair))) for pair in pairs]
        trainer = Trainer(engines[:2] or None)
        fully_shard(trainer.model, mesh=init_device_mesh("cpu", (2,)))
        sent = []
        for number in range(5):
            if number == 2:
                if rank == 0:
                    trainer.sync.engines.add(engines[2])
                assert trainer.sync.catch_up(trainer.model) is not None
            trainer.step()
            sent.append(trainer.push().sent_bytes)
            trainer.check(*(host for pair in pairs[: 2 + (number >= 2)] for host in pair))
        trainer.sync.close()
        assert max(sent[1:]) < sent[0] / 40


def test_each_of_two_ranks_sends_its_own_differences_to_a_chain():
    run_ranks(rank_of_two, 2)


def test_auto_sends_everything_over_a_fast_link(
    kind: str, host: ModuleHost, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
    if kind == WORDS:
        pytest.skip("changed words are tried first: tests/unit/test_changes.py")
    monkeypatch.setattr(encoding, "_PAYS_BELOW", 0.0)
    trainer = Trainer(engine, "auto")
    for _ in range(5):
        trainer.step()
        assert trainer.push().sent_bytes >= NBYTES
        trainer.check(host)
    trainer.sync.close()


def test_frozen_tensors_and_others_of_every_dtype_arrive():
    host = ModuleHost(TinyEngineModel, checkpoint(1))
    with closing(FakeEngine(host)) as engine:
        model = module_of(checkpoint(2))
        sync = WeightSync(
            "fsdp", "broadcast", engine, encoding="delta", max_bytes=1000, timeout_s=TIMEOUT_S,
            selection=TensorSelection(frozen=("embed.weight", "layers.1.*")),
        )  # fmt: skip
        for seed in range(4):
            for name, param in model.named_parameters():
                if seed and name.startswith("layers.0.attn"):
                    param.data.copy_(checkpoint(seed)[name])
            sync.push(model)
            expected = cold({name: param.detach().clone() for name, param in model.named_parameters()}).state_dict()
            assert all(torch.equal(tensor, expected[name]) for name, tensor in host.live.state_dict().items())
        sync.close()


# What has lost its base gets everything


@pytest.mark.parametrize("chunk", [0, 2])
def test_after_a_failed_push_everything_is_sent(host: ModuleHost, engine: FakeEngine, chunk: int):
    trainer = Trainer(engine)
    trainer.push()
    trainer.step()
    fail_once_after(engine.sessions[0].receiver, chunk)
    with pytest.raises(WeightSyncError, match="no memory left"):
        trainer.push()
    assert trainer.push().sent_bytes >= NBYTES
    trainer.check(host)
    trainer.step()
    assert trainer.push().sent_bytes < NBYTES / 40
    trainer.check(host)
    trainer.sync.close()


def test_an_engine_that_joins_is_sent_everything_once_and_then_what_has_changed(host: ModuleHost, engine: FakeEngine):
    late = engine_host()
    with closing(FakeEngine(late)) as other:
        trainer = Trainer([engine])
        trainer.push()
        trainer.step()
        assert trainer.push().sent_bytes < NBYTES / 40
        trainer.sync.engines.add(other)
        for most_bytes in (1.1 * NBYTES, 1.01 * NBYTES, NBYTES / 40):  # the second cuts the chunks for two engines
            trainer.step()
            assert trainer.push().sent_bytes < most_bytes
            trainer.check(host, late)
        trainer.sync.engines.remove(engine)
        for _ in range(2):
            trainer.step()
            assert trainer.push().sent_bytes < NBYTES / 40
            trainer.check(late)
        trainer.sync.close()


def odd_weights(seed: int) -> dict[str, torch.Tensor]:
    """Return tensors of sizes that leave gaps in a chunk, each chunk with other gaps."""
    draw = torch.Generator().manual_seed(seed)
    return {f"layers.{n}": 0.02 * torch.randn(251 + 7 * n, 333, generator=draw) for n in range(LAYERS)}


class OddLayers(Layers):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.rank = 0
        self.layers = nn.ParameterList(tensor.bfloat16() for tensor in odd_weights(0).values())


def test_engines_that_catch_up_alone_share_the_bases_of_the_first_and_die_with_them():
    tensors = {name: tensor.bfloat16() for name, tensor in odd_weights(0).items()}
    hosts = [ModuleHost(OddLayers, tensors) for _ in range(4)]
    with ExitStack() as stack:
        engines = [stack.enter_context(closing(FakeEngine(host))) for host in hosts]
        master = odd_weights(1)
        model = module_of({name: tensor.bfloat16() for name, tensor in master.items()})
        draw = torch.Generator().manual_seed(3)
        sync = WeightSync("fsdp", "broadcast", engines[:2], encoding="delta", timeout_s=TIMEOUT_S, max_bytes=500_000)

        def step_and_push() -> int:
            for name, param in model.named_parameters():
                master[name] += 3e-7 * torch.randn(master[name].shape, generator=draw)
                param.data.copy_(master[name])
            sent_bytes = sync.push(model).sent_bytes
            for host in hosts[: len(sync.engines.all())]:
                assert all(map(torch.equal, host.live.parameters(), model.parameters()))
            return sent_bytes

        whole = step_and_push()
        assert step_and_push() < whole / 40
        for engine in engines[2:]:
            sync.engines.add(engine)
            report = sync.catch_up(model)
            assert report is not None
            assert report.sent_bytes == whole
        for _ in range(3):
            assert step_and_push() < whole / 40
        fail_once_after(engines[2].sessions[0].receiver, 1)
        with pytest.raises(WeightSyncError, match="no memory left"):
            sync.push(model)
        assert step_and_push() >= whole
        assert step_and_push() < whole / 40
        sync.close()


def test_a_chain_of_more_than_twice_its_length_is_sent_everything_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(transfer_plan, "CHUNKS_PER_HOP", 4)  # so that chunks are not of the least size
    hosts = [engine_host() for _ in range(5)]
    with ExitStack() as stack:
        engines = [stack.enter_context(closing(FakeEngine(host))) for host in hosts]
        trainer = Trainer(engines[:2])
        chunks, sent = [], []
        for count in range(2, 6):
            if count > 2:
                trainer.sync.engines.add(engines[count - 1])
                assert trainer.sync.catch_up(trainer.model) is not None
            for _ in range(2):
                trainer.step()
                report = trainer.push()
                trainer.check(*hosts[:count])
                chunks.append(report.chunks)
                sent.append(report.sent_bytes >= NBYTES)
        trainer.sync.close()
    assert sent == [True, False, False, False, True, False, False, False]
    assert chunks[0] == chunks[3] < 0.7 * chunks[4] == 0.7 * chunks[7]


@pytest.mark.parametrize("frozen", [0, 2])
def test_a_model_that_has_moved_is_sent_in_what_has_changed(host: ModuleHost, engine: FakeEngine, frozen: int):
    names = [f"layers.{number}" for number in range(frozen)]
    trainer = Trainer(engine, selection=TensorSelection(frozen=tuple(names)))
    trainer.push()
    started = {name: trainer.master[name].clone() for name in names}
    for _ in range(2):
        trainer.step()
        trainer.master |= {name: started[name].clone() for name in names}
        trainer.model = module_of({name: master.bfloat16() for name, master in trainer.master.items()})
        assert trainer.push().sent_bytes < NBYTES * frozen / LAYERS + NBYTES / 40
        trainer.check(host)
    trainer.sync.close()


def test_a_hundred_pushes_with_losses_in_between_arrive_to_the_bit(kind: str, host: ModuleHost):
    chance = random.Random(7)
    losses = {"failure": 0, "restart": 0, "other trainer": 0}
    engine, trainer = FakeEngine(host), None
    whole = 0
    for number in range(100):
        if trainer is None:
            trainer, is_lost = Trainer(engine, seed=number), True
        loss = chance.choice([*losses, *[""] * 17])
        lr = chance.choice([1e-6, 1e-5, 1e-3])
        trainer.step(lr)
        if loss == "failure":
            fail_once_after(engine.sessions[0].receiver, chance.randrange(3))
            with pytest.raises(WeightSyncError):
                trainer.push()
            is_lost = True
        report = trainer.push()
        trainer.check(host)
        has_no_room = kind == WORDS and lr == 1e-3
        assert (report.sent_bytes > NBYTES) == (is_lost or has_no_room)
        whole, is_lost = whole + is_lost, False
        losses |= {loss: losses[loss] + 1} if loss else {}
        if loss == "restart":  # with other weights, and without what it was sent
            trainer.sync.close()
            engine.close()
            host = engine_host()
            engine = FakeEngine(host)
            master = trainer.master
            trainer, is_lost = Trainer(engine, seed=number), True
            trainer.master = master
        if loss == "other trainer":
            trainer.sync.close()
            trainer = None
    assert whole > 5
    assert min(losses.values()) > 0
    assert trainer is not None
    trainer.sync.close()
    engine.close()


@pytest.mark.parametrize("transport", ["ipc", "lora", "single_copy"])
def test_an_encoding_that_a_transport_has_not_is_refused(transport: str):
    with pytest.raises(ConfigError, match="encoding"):
        WeightSync("fsdp", transport, encoding="auto")


def test_an_unknown_encoding_is_refused():
    with pytest.raises(ConfigError, match="'auto', 'delta'"):
        WeightSync("fsdp", "broadcast", encoding="zstd")
