"""Only what changed: what is frozen is sent by the first push, by a push after a failure, and not again."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import tiny_models
import torch
from engines import TIMEOUT_S, Engines, Remote, Trainer, Trainers, assert_same
from fake_engine import (
    Attention,
    EngineModel,
    FakeEngine,
    ModuleHost,
    checkpoint,
    cold,
    fail_once_after,
    trainer_model,
)
from torch import nn

from weightsync import ConfigError, PushReport, TensorPolicy, WeightSync, WeightSyncError
from weightsync.agreement import frozen_everywhere
from weightsync.deadline import Deadline
from weightsync.errors import ProtocolError
from weightsync.layout import Box, Manifest, Placement, TensorMeta, row_major
from weightsync.receiver.receiver import Receiver
from weightsync.transports.base import Shipment
from weightsync.transports.ipc import _regroup, filled

pytest_plugins = ["engine_fixtures"]

PATTERNS = ("embed.weight", "*.norm.*", "*.log_rate", "layers.1.*")


def transpose(module: nn.Module) -> None:
    """Attention, weight and bias, takes the reload road."""
    if isinstance(module, Attention):
        module.weight = nn.Parameter(module.weight.data.t().contiguous(), requires_grad=False)


def as_it_is(module: nn.Module) -> None:
    """All modules but those that are loaded by arithmetic are loaded in place."""


@pytest.fixture(params=[as_it_is, transpose], ids=["in place", "reload"])
def post_process(request: pytest.FixtureRequest) -> Callable[[nn.Module], None]:
    return request.param


@pytest.fixture
def host(post_process: Callable[[nn.Module], None]) -> ModuleHost:
    return ModuleHost(EngineModel, checkpoint(1), post_process)


@pytest.fixture
def engine(host: ModuleHost) -> Iterator[FakeEngine]:
    with closing(FakeEngine(host)) as engine:
        yield engine


class Pusher:
    """A trainer with a model that holds `tensors`, and a `WeightSync` with this policy."""

    def __init__(self, engine: Any, policy: TensorPolicy, transport: str = "ipc", seed: int = 2) -> None:
        self.model = trainer_model(checkpoint(seed))
        self.engine = engine
        self.sync = WeightSync("fsdp", transport, engine, policy=policy, max_bytes=1, timeout_s=TIMEOUT_S)

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
    trainer = Pusher(engine, TensorPolicy(frozen=PATTERNS), transport)
    whole = trainer.push()
    trainer.check(host)
    assert whole.nbytes == trained_bytes("")
    for seed in (3, 4, 5):
        trainer.change(seed, "layers.0.attn")
        partial = trainer.push()
        trainer.check(host)
        assert partial.nbytes == trained_bytes("layers.0.attn")
        assert 0 < partial.buckets < whole.buckets
        assert engine.conversations[0].receiver.version == partial.version
    trainer.sync.close()


def test_a_frozen_tensor_that_changes_after_all_reaches_nobody(host: ModuleHost, engine: FakeEngine):
    trainer = Pusher(engine, TensorPolicy(frozen=PATTERNS))
    trainer.push()
    trainer.change(3)
    trainer.push()
    trainer.change(2, "layers.1", "embed", "norm", "rate")  # as the engine still has them
    trainer.check(host)
    trainer.sync.close()


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_two_workers_each_keep_their_slices(post_process: Callable[[nn.Module], None], transport: str):
    makes = [functools.partial(EngineModel, rank, 2) for rank in (0, 1)]
    hosts = [ModuleHost(make, checkpoint(1), post_process, n, 2) for n, make in enumerate(makes)]
    with closing(FakeEngine(*hosts)) as engine:
        trainer = Pusher(engine, TensorPolicy(frozen=PATTERNS), transport)
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
    trainer = Pusher(engine, TensorPolicy(only_trained=True))
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
    trainer = Pusher(engine, TensorPolicy(frozen=("*.attn.q.weight", "*.attn.*.bias", "layers.1.*")))
    trainer.push()
    trainer.change(seed, "layers.0.attn.k.weight", "layers.0.attn.v.weight", "embed")
    report = trainer.push()
    trainer.check(host)
    reloaded = host.post_process is transpose
    left_out = trained_bytes("layers.1.") + (0 if reloaded else trained_bytes(*(f"0.attn.{p}.bias" for p in "qkv")))
    assert report.nbytes == trained_bytes("") - left_out
    trainer.sync.close()


def test_everything_frozen_is_refused(host: ModuleHost, engine: FakeEngine):
    before = host.live.state_dict()
    trainer = Pusher(engine, TensorPolicy(frozen=("*",)))
    with pytest.raises(ConfigError, match="tensors are frozen: there is nothing for a second push to change"):
        trainer.push()
    assert all(torch.equal(tensor, before[name]) for name, tensor in host.live.state_dict().items())


def test_what_trains_on_any_rank_is_not_frozen():
    ranks = [
        {"placements": [["a"], ["b"], ["c"]], "frozen": ["a", "b"]},
        {"placements": [["a"], ["b"], ["d"]], "frozen": ["a", "d"]},
        {"placements": [], "frozen": []},
    ]
    assert frozen_everywhere(ranks) == {"a", "d"}


def test_tensors_that_are_read_where_they_lie_are_one_bucket_or_two():
    manifest = Manifest(tuple(TensorMeta(name, (1,), "float32") for name in "abcdef"))
    buckets = (("a", "b"), ("c",), ("d", "e"), ("f",))
    direct = {"b", "c", "e"}
    assert _regroup(Shipment(manifest, buckets, (), (), ""), direct) == [("a",), ("d",), ("f",), ("b", "c", "e")]
    shipment = Shipment(manifest, buckets, (), (), "", frozen=frozenset("def"))
    assert _regroup(shipment, direct) == [("a",), ("b", "c"), ("d",), ("f",), ("e",)]
    assert _regroup(shipment, set("abcdef")) == [("a", "b", "c"), ("d", "e", "f")]
    assert _regroup(shipment, set()) == list(buckets)


# ---------------------------------------------------------------------------------------------------------------
# Whoever cannot know that the engine still has what it was sent, sends everything


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
@pytest.mark.parametrize("bucket", [0, 2])
def test_after_a_failed_push_everything_is_sent(host: ModuleHost, engine: FakeEngine, bucket: int, transport: str):
    trainer = Pusher(engine, TensorPolicy(frozen=PATTERNS), transport)
    trainer.push()
    trainer.change(3, "layers.0.attn")
    receiver = engine.conversations[0].receiver
    fail_once_after(receiver, bucket)
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
    first = Pusher(engine, TensorPolicy(frozen=PATTERNS))
    first.push()
    first.sync.close()
    other = Pusher(engine, TensorPolicy(frozen=PATTERNS), seed=5)
    other.push()
    other.check(host)
    other.sync.close()
    first.push()
    first.check(host)
    first.sync.close()


def test_after_another_trainers_push_behind_a_lost_connection(host: ModuleHost, engine: FakeEngine):
    first = Pusher(engine, TensorPolicy(frozen=PATTERNS))
    first.push()
    engine.conversations[0]._channel.close()  # the network, not the trainer
    other = Pusher(engine, TensorPolicy(), seed=5)
    other.push()
    other.sync.close()
    with pytest.raises(WeightSyncError):
        first.push()
    first.push()
    first.check(host)
    first.sync.close()


def test_after_an_engines_restart_everything_is_sent(post_process: Callable[[nn.Module], None]):
    class Restarting:
        """An engine whose processes can be replaced."""

        def __init__(self) -> None:
            self.start_again()

        def start_again(self) -> None:
            self.host_ = ModuleHost(EngineModel, checkpoint(9), post_process)
            self.now = FakeEngine(self.host_)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.now, name)

    engine = Restarting()
    trainer = Pusher(engine, TensorPolicy(frozen=PATTERNS))
    trainer.push()
    trainer.push()
    engine.now.close()
    engine.start_again()
    with pytest.raises(WeightSyncError):
        trainer.push()
    assert trainer.push().nbytes == trained_bytes("")
    trainer.check(engine.host_)
    trainer.sync.close()
    engine.now.close()


# ---------------------------------------------------------------------------------------------------------------
# The engine's own count


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
    policy = TensorPolicy(frozen=("a.*",))
    with closing(FakeEngine(host)) as engine, WeightSync("fsdp", "ipc", engine, policy=policy) as sync:
        for value in (2.0, 3.0):
            with torch.no_grad():
                model.b.weight.fill_(value)
            sync.push(model)
            assert host.live.a.weight.tolist() == [1, 1, 1, 0]
            assert host.live.b.weight.tolist() == [value] * 3 + [0]


class Arena:
    """Storage for one rank's tensors, and the bytes of a source without a way."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.placements = []
        self.data = torch.cat([t.reshape(-1) for t in tensors.values()]).view(torch.uint8)
        offset = 0
        for name, t in tensors.items():
            box, stride = Box.full(t.shape), row_major(t.shape)
            self.placements.append(Placement(name, box, 0, 0, offset, stride, "float32"))
            offset += t.numel()


@pytest.fixture
def connected(post_process: Callable[[nn.Module], None], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Receiver]:
    """A receiver that was told of these buckets, the last `once` of them frozen."""
    tensors = checkpoint(2)
    arena = Arena(tensors)

    class Source:
        def connect(self, *args: Any) -> None:
            return

        def storage(self, rank: int, storage: int) -> torch.Tensor:
            return arena.data

        def fetch(self, *args: Any) -> None:
            return

        def close(self) -> None:
            return

    monkeypatch.setattr("weightsync.receiver.receiver.make_source", lambda name, device: Source())

    def connect(receiver: Receiver | None, buckets: list[list[str]], once: int) -> Receiver:
        if receiver is None:
            receiver = Receiver(ModuleHost(EngineModel, checkpoint(1), post_process))
            receiver.plan(Manifest(tuple(TensorMeta(n, tuple(t.shape), "float32") for n, t in tensors.items())))
        receiver.connect("test", [], arena.placements, buckets, once, [], {}, time.sleep, Deadline(1.0))
        return receiver

    return connect


BUCKETS = [
    [name for name in checkpoint(1) if part in name] for part in ("layers.0.attn", "layers.0.decay", "layers.0.norm")
]
BUCKETS.append([name for name in checkpoint(1) if not any(name in names for names in BUCKETS)])


def load(receiver: Receiver, version: int, *buckets: int) -> None:
    for bucket in buckets:
        receiver.load(version, bucket, None, b"", lambda seconds: None, Deadline(1.0))


def test_an_engine_commits_what_is_whole_and_nothing_else(connected: Callable[..., Receiver]):
    receiver = connected(None, BUCKETS, 2)
    load(receiver, 1, 0, 1)
    with pytest.raises(ProtocolError, match="before all of its buckets were loaded"):
        receiver.commit(1)  # what is frozen was never loaded
    load(receiver, 1, 3, 2)
    receiver.commit(1)

    with pytest.raises(ProtocolError, match="bucket 2 of version 2 was announced, which has 2"):
        load(receiver, 2, 0, 2)
    with pytest.raises(ProtocolError, match="before all of its buckets were loaded"):
        receiver.commit(2)
    load(receiver, 2, 1)
    receiver.commit(2)
    assert (receiver.state, receiver.version) == ("CLEAN", 2)

    load(receiver, 3, 0)  # and no more: it is given up
    load(receiver, 4, 0, 1)
    with pytest.raises(ProtocolError, match="before all of its buckets were loaded"):
        receiver.commit(4)
    load(receiver, 4, 2, 3)
    receiver.commit(4)

    connected(receiver, BUCKETS, 1)
    load(receiver, 5, 0, 1, 2)
    with pytest.raises(ProtocolError, match="before all of its buckets were loaded"):
        receiver.commit(5)


@pytest.mark.parametrize("once", [-1, 4, 5])
def test_a_count_that_cannot_be_is_refused(connected: Callable[..., Receiver], once: int):
    with pytest.raises(ProtocolError, match="buckets are to be loaded only once"):
        connected(None, BUCKETS, once)


def test_a_module_that_is_loaded_as_a_whole_is_not_torn_apart(
    connected: Callable[..., Receiver], post_process: Callable[[nn.Module], None]
):
    biases = [name for name in BUCKETS[0] if name.endswith(".bias")]
    buckets = [[name for name in BUCKETS[0] if name not in biases], *BUCKETS[1:], biases]
    if post_process is as_it_is:
        connected(None, buckets, 1)
        return
    with pytest.raises(ProtocolError, match=r"layers\.0\.attn\.q\.weight and 5 more are loaded together each time"):
        connected(None, buckets, 1)


# ---------------------------------------------------------------------------------------------------------------
# Real engines, and a trainer of two ranks or in the engine's process: their attention trains, the rest is frozen

FROZEN = ("*embed_tokens*", "*.mlp.*", "*layernorm.weight", "model.norm.weight", "lm_head*")


def serve(engines: Engines, model: str, options: dict[str, Any]) -> Any:
    import repack_plugin  # noqa: F401  (it registers the quantisations)

    return engines.serve(model, **options)["A"]


def push_other_weights(engines: Engines, model: str) -> None:
    with WeightSync("fsdp", "ipc", engines.llm, timeout_s=TIMEOUT_S) as sync:
        sync.push(tiny_models.build(model, "B"))


def push_whole_and_partial(trainer: Trainer | Engines, model: str, transport: str) -> list[int]:
    """The weights "A" with other attention, and then "A"; the bytes that these pushes moved."""
    trainer.release()
    trainer.model = tiny_models.build(model, "A")
    if isinstance(trainer, Trainer):
        tiny_models.shard(trainer.model)
    trained = {name: param for name, param in trainer.model.named_parameters() if "self_attn" in name}
    new = {name: param.detach().clone() for name, param in trained.items()}
    engine = trainer.engine if isinstance(trainer, Trainer) else trainer.llm
    trainer.sync = WeightSync(
        "fsdp", transport, engine, policy=TensorPolicy(frozen=FROZEN), max_bytes=1 << 16, timeout_s=TIMEOUT_S
    )
    moved = []
    for attention in ({name: torch.zeros_like(param) for name, param in trained.items()}, new):
        with torch.no_grad():
            for name, param in trained.items():
                param.copy_(attention[name])
        moved.append(trainer.sync.push(trainer.model).nbytes)
    return moved


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["plain", "fsdp2"])
@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
@pytest.mark.parametrize(
    ("model", "options"),
    [("qwen3-moe", {}), ("qwen3", {"quantization": "test-transposed"}), ("qwen3", {})],
    ids=["moe", "reload", "dense"],
)
def test_a_real_engine_equals_a_cold_one(
    engines: Remote, trainers: Trainers, model: str, options: dict[str, Any], transport: str, kind: str
):
    cold_answer = engines.call(serve, model, options, timeout_s=240)
    engines.call(push_other_weights, model)
    if kind == "plain":
        whole, partial = engines.call(push_whole_and_partial, model, transport)
    else:
        (whole, partial), _ = trainers.call(push_whole_and_partial, model, transport)
    assert 0 < partial < whole / 2
    assert_same(engines.call(Engines.ask), cold_answer, "the second push")


def test_digests_leave_out_what_lies_between_regions():
    assert filled([(256, 512, 256), (0, 256, 256), (600, 700, 100)]) == [(0, 512), (600, 700)]
    assert filled([(0, 256, 256), (0, 256, 256)]) == [(0, 256)]  # tied
    assert filled([(0, 1000, 500)]) == []  # columns of a larger matrix
    assert filled([(0, 990, 500), (10, 1000, 500)]) == [(0, 1000)]  # and the others beside them
