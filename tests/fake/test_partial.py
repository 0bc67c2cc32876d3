"""Only what changed: what is frozen is sent by the first push, by a push after a failure, and not again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import TIMEOUT_S
from fake_engine import (
    Attention,
    Embedding,
    FakeEngine,
    ModuleHost,
    TinyEngineModel,
    checkpoint,
    cold,
    fail_once_after,
    trainer_model,
)
from torch import nn

from weightsync import (
    CheckpointTransport,
    ConfigError,
    PushReport,
    TensorSelection,
    UnsupportedError,
    WeightSync,
    WeightSyncError,
)
from weightsync.net.wire import MachineInfo, Value
from weightsync.planning.layout import Box, Manifest, ShardLocation, TensorMeta
from weightsync.strategies.inventory import Inventory, frozen_everywhere

PATTERNS = ("embed.weight", "*.norm.*", "*.log_rate", "layers.1.*")


def repack(module: nn.Module) -> None:
    """Attention, weight and bias, takes the reload road."""
    if isinstance(module, Attention):
        module.weight = nn.Parameter(module.weight.data.t().flip(0).contiguous(), requires_grad=False)


def as_it_is(module: nn.Module) -> None:
    """All modules but those that are loaded by arithmetic are loaded in place."""


@pytest.fixture(params=[as_it_is, repack], ids=["in place", "reload"])
def post_process(request: pytest.FixtureRequest) -> Callable[[nn.Module], None]:
    return request.param


@pytest.fixture
def host(post_process: Callable[[nn.Module], None]) -> ModuleHost:
    return ModuleHost(TinyEngineModel, checkpoint(1), post_process)


@pytest.fixture
def engine(host: ModuleHost) -> Iterator[FakeEngine]:
    with closing(FakeEngine(host)) as engine:
        yield engine


class Pusher:
    """A trainer with a model that holds `tensors`, and a `WeightSync` with this selection."""

    def __init__(self, engine: Any, selection: TensorSelection, transport: Any = "ipc", seed: int = 2) -> None:
        self.model = trainer_model(checkpoint(seed))
        self.engine = engine
        self.sync = WeightSync("fsdp", transport, engine, selection=selection, max_bytes=1, timeout_s=TIMEOUT_S)

    def change(self, seed: int, *parts: str) -> None:
        """Give the parameters with one of `parts` in their name, or all of them, the values of another checkpoint."""
        with torch.no_grad():
            for name, param in self.model.named_parameters():
                if not parts or any(part in name for part in parts):
                    param.copy_(checkpoint(seed)[name])

    def push(self) -> PushReport:
        return self.sync.push(self.model)

    def check(self, host: ModuleHost) -> None:
        """The engine is as one that was started from what the trainer holds."""
        tensors = {name: param.detach().clone() for name, param in self.model.named_parameters()}
        expected = cold(tensors, host.post_process).state_dict()
        for name, tensor in host.live.state_dict().items():
            assert torch.equal(tensor, expected[name]), name


def trained_bytes(*parts: str) -> int:
    return sum(tensor.nbytes for name, tensor in checkpoint(1).items() if any(part in name for part in parts))


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_what_is_frozen_is_sent_once(host: ModuleHost, engine: FakeEngine, transport: str):
    trainer = Pusher(engine, TensorSelection(frozen=PATTERNS), transport)
    whole = trainer.push()
    trainer.check(host)
    assert whole.nbytes == trained_bytes("")
    for seed in (3, 4, 5):
        trainer.change(seed, "layers.0.attn")
        partial = trainer.push()
        trainer.check(host)
        assert partial.nbytes == trained_bytes("layers.0.attn")
        assert 0 < partial.chunks < whole.chunks
        assert engine.sessions[0].receiver.version == partial.version
    trainer.sync.close()


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_engine_that_has_lost_what_is_frozen_gets_everything(host: ModuleHost, engine: FakeEngine, transport: str):
    """VLLM's sleep at level 2 gives the memory of the weights back, and wakes up with anything in it."""
    trainer = Pusher(engine, TensorSelection(frozen=PATTERNS), transport)
    trainer.push()
    for seed in (3, 4):
        for param in host.live.parameters():
            param.data.fill_(torch.nan)
        trainer.change(seed, "layers.0.attn")
        assert trainer.push().nbytes == trained_bytes("")
        trainer.check(host)
        host.check_before_answer()
    trainer.change(5, "layers.0.attn")
    assert trainer.push().nbytes == trained_bytes("layers.0.attn")
    trainer.check(host)
    trainer.sync.close()


def by_columns(module: nn.Module) -> None:
    """Keep an embedding transposed in memory, as vLLM keeps weights in 8 bits."""
    if isinstance(module, Embedding):
        module.weight.data = module.weight.data.t().contiguous().t()


def test_engine_that_has_lost_frozen_weights_in_another_order_gets_everything():
    host = ModuleHost(TinyEngineModel, checkpoint(1), by_columns)
    with closing(FakeEngine(host)) as engine:
        trainer = Pusher(engine, TensorSelection(frozen=("embed.weight",)))
        trainer.push()
        assert trainer.push().nbytes < trained_bytes("")
        for param in host.live.parameters():
            param.data.fill_(torch.nan)
        assert trainer.push().nbytes == trained_bytes("")
        trainer.check(host)
        trainer.sync.close()


def test_frozen_weights_with_gaps_in_an_engine_that_sleeps_are_refused():
    def widen(module: nn.Module) -> None:
        if isinstance(module, Embedding):
            module.weight.data = torch.cat([module.weight.data] * 2, 1)[:, : module.weight.shape[1]]

    host = ModuleHost(TinyEngineModel, checkpoint(1), widen)
    host.may_discard = True
    with closing(FakeEngine(host)) as engine:
        trainer = Pusher(engine, TensorSelection(frozen=("embed.weight",)))
        with pytest.raises(UnsupportedError, match="no frozen tensor lies in a parameter"):
            trainer.push()
        assert engine.sessions[0].receiver.state == "CLEAN"
        trainer.sync.close()


def test_a_frozen_tensor_that_changes_after_all_reaches_nobody(host: ModuleHost, engine: FakeEngine):
    trainer = Pusher(engine, TensorSelection(frozen=PATTERNS))
    trainer.push()
    trainer.change(3)
    trainer.push()
    trainer.change(2, "layers.1", "embed", "norm", "rate")  # as the engine still has them
    trainer.check(host)
    trainer.sync.close()


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_two_workers_each_keep_their_slices(post_process: Callable[[nn.Module], None], transport: str):
    makes = [functools.partial(TinyEngineModel, rank, 2) for rank in (0, 1)]
    hosts = [ModuleHost(make, checkpoint(1), post_process, n, 2) for n, make in enumerate(makes)]
    with closing(FakeEngine(*hosts)) as engine:
        trainer = Pusher(engine, TensorSelection(frozen=PATTERNS), transport)
        for seed in (3, 4):
            trainer.change(seed, "layers.0.attn")
            trainer.push()
        tensors = {name: param.detach() for name, param in trainer.model.named_parameters()}
        for host, make in zip(hosts, makes, strict=True):
            expected = ModuleHost(make, tensors, post_process).live.state_dict()
            for name, tensor in host.live.state_dict().items():
                assert torch.equal(tensor, expected[name]), name
        trainer.sync.close()


def test_what_trains_is_all_that_is_sent(host: ModuleHost, engine: FakeEngine):
    trainer = Pusher(engine, TensorSelection(only_trained=True))
    for name, param in trainer.model.named_parameters():
        param.requires_grad_("layers.0.attn" in name)
    trainer.push()
    trainer.change(3, "layers.0.attn")
    assert trainer.push().nbytes == trained_bytes("layers.0.attn")
    trainer.check(host)

    # What is thawed was not sent all the time: everything is agreed on anew.
    for param in trainer.model.parameters():
        param.requires_grad_()
    trainer.change(4)
    assert trainer.push().nbytes == trained_bytes("")
    trainer.check(host)
    trainer.sync.close()


@pytest.mark.parametrize("seed", [3, 4])
def test_what_fuses_with_something_that_trains_travels(host: ModuleHost, engine: FakeEngine, seed: int):
    """q, k and v share a parameter; the biases share another one, of the same module."""
    trainer = Pusher(engine, TensorSelection(frozen=("*.attn.q.weight", "*.attn.*.bias", "layers.1.*")))
    trainer.push()
    trainer.change(seed, "layers.0.attn.k.weight", "layers.0.attn.v.weight", "embed")
    report = trainer.push()
    trainer.check(host)
    reloaded = host.post_process is repack
    left_out = trained_bytes("layers.1.") + (0 if reloaded else trained_bytes(*(f"0.attn.{p}.bias" for p in "qkv")))
    assert report.nbytes == trained_bytes("") - left_out
    trainer.sync.close()


def test_a_pattern_that_matches_nothing_is_told(engine: FakeEngine, caplog: pytest.LogCaptureFixture):
    trainer = Pusher(engine, TensorSelection(frozen=(*PATTERNS, "layer.0.*"), dtypes={"*.rooter.*": "float32"}))
    trainer.push()
    (told,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "patterns without effect: layer.0.*, *.rooter.*. The trainer's nearest names are layers.*." in told
    trainer.sync.close()


@pytest.mark.parametrize("transport", ["ipc", "checkpoint"])
def test_an_excluded_name_that_no_rank_has_is_told(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture, transport: str, tmp_path: Path
):
    way = CheckpointTransport(tmp_path) if transport == "checkpoint" else transport
    trainer = Pusher(engine, TensorSelection(exclude=("lm_head.*",)), way)
    trainer.push()
    (told,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "patterns without effect: lm_head.*. The trainer's nearest names are" in told
    trainer.sync.close()


def test_everything_frozen_is_refused(host: ModuleHost, engine: FakeEngine):
    before = host.live.state_dict()
    trainer = Pusher(engine, TensorSelection(frozen=("*",)))
    with pytest.raises(ConfigError, match="all tensors with elements are frozen: a second push"):
        trainer.push()
    assert all(torch.equal(tensor, before[name]) for name, tensor in host.live.state_dict().items())


def test_what_trains_on_any_rank_is_not_frozen():
    def rank(names: str, frozen: str) -> Inventory:
        metas = tuple(TensorMeta(name, (2,), "float32") for name in "abcd")
        locations = [ShardLocation(name, Box((0,), (2,)), 0, 0, 0, (1,), "float32") for name in names]
        return Inventory(Value.of(Manifest(metas)).value, locations, [], [*frozen], MachineInfo("", "cpu", "", ""))

    assert frozen_everywhere([rank("abc", "ab"), rank("abd", "ad"), rank("", "")]) == {"a", "d"}


# ---------------------------------------------------------------------------------------------------------------
# Whoever cannot know that the engine still has what it was sent, sends everything


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
@pytest.mark.parametrize("chunk", [0, 2])
def test_after_a_failed_push_everything_is_sent(host: ModuleHost, engine: FakeEngine, chunk: int, transport: str):
    trainer = Pusher(engine, TensorSelection(frozen=PATTERNS), transport)
    trainer.push()
    trainer.change(3, "layers.0.attn")
    receiver = engine.sessions[0].receiver
    fail_once_after(receiver, chunk)
    with pytest.raises(WeightSyncError, match="no memory left"):
        trainer.push()
    assert receiver.state == "POISONED"
    assert trainer.push().nbytes == trained_bytes("")
    trainer.check(host)
    trainer.change(4, "layers.0.attn")
    assert trainer.push().nbytes < trained_bytes("")
    trainer.check(host)
    trainer.sync.close()


def test_after_another_trainers_push_everything_is_sent(host: ModuleHost, engine: FakeEngine):
    first = Pusher(engine, TensorSelection(frozen=PATTERNS))
    first.push()
    first.sync.close()
    other = Pusher(engine, TensorSelection(frozen=PATTERNS), seed=5)
    other.push()
    other.check(host)
    other.sync.close()
    first.push()
    first.check(host)
    first.sync.close()


def test_after_another_trainers_push_behind_a_lost_connection(host: ModuleHost, engine: FakeEngine):
    first = Pusher(engine, TensorSelection(frozen=PATTERNS))
    first.push()
    engine.sessions[0]._connection.close()  # the network, not the trainer
    other = Pusher(engine, TensorSelection(), seed=5)
    other.push()
    other.sync.close()
    assert first.push().nbytes == trained_bytes("")
    first.check(host)
    first.sync.close()


def test_after_an_engines_restart_everything_is_sent(post_process: Callable[[nn.Module], None]):
    class Restarting:
        """An engine whose processes can be replaced."""

        def __init__(self) -> None:
            self.start_again()

        def start_again(self) -> None:
            self.host_ = ModuleHost(TinyEngineModel, checkpoint(9), post_process)
            self.now = FakeEngine(self.host_)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.now, name)

    engine = Restarting()
    trainer = Pusher(engine, TensorSelection(frozen=PATTERNS))
    trainer.push()
    trainer.push()
    engine.now.close()
    engine.start_again()
    assert trainer.push().nbytes == trained_bytes("")
    trainer.check(engine.host_)
    trainer.sync.close()
    engine.now.close()


# ---------------------------------------------------------------------------------------------------------------
# Buffers


def test_buffer_that_an_earlier_push_filled_has_to_come_again():
    host = ModuleHost(TinyEngineModel, checkpoint(1))
    buffers = [name for name in checkpoint(1) if name.endswith("norm.seen")]
    with closing(FakeEngine(host)) as engine:
        sync = WeightSync("stream", "ipc", engine, timeout_s=TIMEOUT_S)
        without = {name: tensor for name, tensor in checkpoint(2).items() if name not in buffers}
        sync.push(without)  # as the checkpoint of the start has them
        sync.push(checkpoint(3))
        with pytest.raises(UnsupportedError, match=rf"{buffers[0]}, {buffers[1]}.*without .*\(buffers=False\)"):
            sync.push(without)
        assert torch.equal(host.live.embed.weight, cold(checkpoint(3)).embed.weight), "a refused push has written"
        with WeightSync("stream", "ipc", engine, selection=TensorSelection(keep=["layers.1.*"])) as other:
            other.push({name: tensor for name, tensor in checkpoint(3).items() if "layers.1" not in name})
        sync.push(checkpoint(4))
        expected = cold(checkpoint(4)).state_dict()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in host.live.state_dict().items())
        sync.close()


# ---------------------------------------------------------------------------------------------------------------
# Constants


class Cleared(nn.Module):
    """Two parameters, each set to zero before it is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Module()
        self.a.weight = nn.Parameter(torch.empty(4))
        self.b = nn.Module()
        self.b.weight = nn.Parameter(torch.empty(4))

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            param = dict(self.named_parameters())[name].data
            param.zero_()
            param[:3].copy_(tensor)


def test_constants_of_the_loader_leave_alone_what_is_not_sent_again():
    host = ModuleHost(Cleared, {"a.weight": torch.zeros(3), "b.weight": torch.zeros(3)})
    model = trainer_model({"a.weight": torch.ones(3), "b.weight": torch.ones(3)})
    selection = TensorSelection(frozen=("a.*",))
    with closing(FakeEngine(host)) as engine, WeightSync("fsdp", "ipc", engine, selection=selection) as sync:
        for value in (2.0, 3.0):
            with torch.no_grad():
                model.b.weight.fill_(value)
            sync.push(model)
            assert host.live.a.weight.tolist() == [1, 1, 1, 0]
            assert host.live.b.weight.tolist() == [value] * 3 + [0]
