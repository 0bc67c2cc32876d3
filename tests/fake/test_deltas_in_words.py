"""Pushes of changed words, as between GPUs, written into the engine's parameters. Here they travel over TCP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import megatron_models
import pytest
import torch
import torch.distributed as dist
import zero
from engines import TIMEOUT_S, Trainers
from fake_engine import FakeEngine, ModuleHost, PlainTrainer, TinyEngineModel, checkpoint, cold, module_of
from megatron_models import Mesh, hf_config
from ranks import run_ranks
from test_deltas import NBYTES, ROWS, Trainer, engine_host
from test_fused_quantize import quantise
from test_source_quantize import quantized
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from weightsync import DigestError, MegatronBackend, ProtocolError, TensorSelection, WeightSync, WeightSyncError
from weightsync.kernels.changed_words import ChangeFinder
from weightsync.kernels.digest import SAMPLES
from weightsync.kernels.quantize import Form, fp8_per_channel, int8_per_channel
from weightsync.transports import nccl, nccl_sender
from weightsync.transports.base import Changes, Seal
from weightsync.transports.changes import Found, head
from weightsync.transports.communicator import Communicator, Operation
from weightsync.transports.nccl import NcclTransport
from weightsync.worker.changed_runs import ChangedRuns
from weightsync.worker.load_planner import FUSED_QUANTIZE

pytest_plugins = ["engine_fixtures"]


@pytest.fixture(autouse=True)
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "finds_words", lambda device: True)


@pytest.fixture
def host() -> ModuleHost:
    return engine_host()


@pytest.fixture
def engine(host: ModuleHost) -> Iterator[FakeEngine]:
    with closing(FakeEngine(host)) as engine:
        yield engine


def bits(host: ModuleHost) -> list[torch.Tensor]:
    return [param.data.view(torch.int16).clone() for param in host.live.parameters()]


def push_often(trainer: Trainer) -> None:
    """Push as often as it takes to compare all bytes."""
    for _ in range(SAMPLES):
        trainer.push()


def test_a_word_that_was_written_in_the_engine_is_found_before_anything_is(host: ModuleHost, engine: FakeEngine):
    trainer = Trainer(engine)
    trainer.push()
    host.live.get_parameter("layers.3").data[7, 11] += 1
    before = bits(host)
    with pytest.raises(DigestError, match="Nothing was written"):
        push_often(trainer)
    assert all(map(torch.equal, bits(host), before))
    trainer.step()
    assert trainer.push().sent_bytes >= NBYTES
    trainer.check(host)
    trainer.sync.close()


def test_changes_that_were_damaged_on_the_way_are_not_written(
    host: ModuleHost, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
    trainer = Trainer(engine)
    trainer.push()
    trainer.step()
    before, add = bits(host), ChangedRuns.add

    def damage(runs: ChangedRuns, changes: Changes, sample: int | None) -> None:
        changes.body[-1] += 1
        add(runs, changes, sample)

    with monkeypatch.context() as patch:
        patch.setattr(ChangedRuns, "add", damage)
        with pytest.raises(DigestError, match="damaged"):
            trainer.push()
    assert all(map(torch.equal, bits(host), before))
    assert trainer.push().sent_bytes >= NBYTES
    trainer.check(host)
    trainer.sync.close()


def test_a_part_without_its_changes_is_not_loaded(
    host: ModuleHost, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
    trainer = Trainer(engine)
    trainer.push()
    trainer.step()
    before, find = bits(host), nccl_sender.Bases.find

    def lose(bases: nccl_sender.Bases, number: int, seal: Seal | None) -> list[Found]:
        found = find(bases, number, seal)
        nothing = torch.empty(0, dtype=torch.uint8)
        return found if number != 1 else [Found(chain, nothing, checksum) for chain, _, checksum in found]

    with monkeypatch.context() as patch:
        patch.setattr(nccl_sender.Bases, "find", lose)
        with pytest.raises(ProtocolError, match="changes of 0 bytes came, expected at least"):
            trainer.push()
    assert all(map(torch.equal, bits(host), before))
    assert trainer.push().sent_bytes >= NBYTES
    trainer.check(host)
    trainer.sync.close()


def test_changes_are_found_in_no_memory_that_is_still_sent(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch):
    exchange, wait, find = Communicator.exchange, Operation.wait, ChangeFinder.find
    in_flight: dict[Operation, list[range]] = {}
    most = list[int]()

    def memory_of(data: torch.Tensor) -> range:
        return range(data.data_ptr(), data.data_ptr() + data.numel())

    def start(self: Communicator, number: int, sends: Any, *args: Any) -> Operation:
        operation = exchange(self, number, sends, *args)
        if sends and self.rank == 0:
            in_flight[operation] = [memory_of(data) for data, _ in sends]
        return operation

    def end(self: Operation, *args: Any) -> None:
        wait(self, *args)
        in_flight.pop(self, None)

    def compare(self: ChangeFinder, group: int, body: torch.Tensor, sample: int) -> None:
        own, sent = memory_of(body), [each for sends in in_flight.values() for each in sends]
        most.append(len(sent))
        assert not [each for each in sent if each.start < own.stop and own.start < each.stop]
        find(self, group, body, sample)

    trainer = Trainer(engine)
    trainer.push()
    trainer.step()
    with monkeypatch.context() as patch:
        patch.setattr(Communicator, "exchange", start)
        patch.setattr(Operation, "wait", end)
        patch.setattr(ChangeFinder, "find", compare)
        assert trainer.push().sent_bytes < NBYTES / 40
    assert max(most) >= 2  # a head and a body, while a later part is compared
    trainer.sync.close()


@pytest.mark.parametrize("calls", [1, 3, 4])
def test_a_trainer_that_fails_between_two_parts_leaves_the_old_weights(
    host: ModuleHost, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, calls: int
):
    trainer = Trainer(engine)
    trainer.push()
    trainer.step()
    before, left = bits(host), [None] * calls

    def fail(*args: Any) -> torch.Tensor:
        left.pop()
        if not left:
            raise MemoryError("no memory left for a head")
        return head(*args)

    with monkeypatch.context() as patch:
        patch.setattr(nccl_sender, "head", fail)
        with pytest.raises(WeightSyncError, match="no memory left"):
            trainer.push()
    assert all(map(torch.equal, bits(host), before))
    assert trainer.push().sent_bytes >= NBYTES
    trainer.check(host)
    trainer.sync.close()


def test_a_measured_push_allocates_nothing(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch):
    log, after = list[str](), iter([1, 0, 2, 1, 0, 0])

    class Rests(nccl_sender.Choice):
        def begin(self) -> None:
            log.append("begin")

        def after(self) -> int:
            return next(after)

    class Allocated(nccl_sender.Bases):
        def __init__(self, *args: Any) -> None:
            log.append("allocate")
            super().__init__(*args)

    monkeypatch.setattr(nccl_sender, "Choice", Rests)
    monkeypatch.setattr(nccl_sender, "Bases", Allocated)
    trainer = Trainer(engine, "auto")
    sent = []
    for _ in range(6):
        trainer.step()
        sent.append(trainer.push().sent_bytes >= NBYTES)
    trainer.sync.close()
    assert sent == [True, True, False, True, True, False]
    # The fourth push frees the copy, and the last whole one before changes allocates it again.
    assert log == ["allocate", *["begin"] * 4, "allocate", *["begin"] * 2]


def test_after_a_comparison_without_its_push_everything_is_sent(
    host: ModuleHost, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
    trainer, begin = Trainer(engine), NcclTransport.begin_send
    trainer.push()

    def begin_twice(transport: NcclTransport, seal: Seal | None) -> None:
        begin(transport, seal)
        begin(transport, seal)

    with monkeypatch.context() as patch:
        patch.setattr(NcclTransport, "begin_send", begin_twice)
        trainer.step()
        assert trainer.push().sent_bytes >= NBYTES
        trainer.check(host)
    trainer.step()
    assert trainer.push().sent_bytes < NBYTES / 40
    trainer.check(host)
    trainer.sync.close()


def rank_whose_changes_find_no_room(rank: int) -> None:
    nccl.finds_words = lambda device: True
    with ExitStack() as stack:
        hosts = [engine_host(), engine_host()] if rank == 0 else []
        engines = [stack.enter_context(closing(FakeEngine(host))) for host in hosts]
        trainer = Trainer(engines or None)
        fully_shard(trainer.model, mesh=init_device_mesh("cpu", (2,)))
        sent = []
        for number in range(4):
            trainer.step()
            if number == 2:
                for master in trainer.master.values():
                    master[ROWS // 2 :] *= -1
                trainer.step()
            sent.append(trainer.push().sent_bytes > NBYTES)
            trainer.check(*hosts)
        trainer.sync.close()
        assert sent == [True, False, True, False]


def test_all_ranks_send_everything_where_one_finds_no_room():
    run_ranks(rank_whose_changes_find_no_room, 2)


def first_exchange(rank: int, encoding: Any, by_words: bool) -> None:
    nccl.finds_words = lambda device: by_words
    link = Communicator.link
    sent: dict[tuple[int, int], int] = {}
    received: dict[tuple[int, int], int] = {}

    def note(self: Communicator, sends: Any, receives: Any, *rest: Any) -> None:
        sent.update({(self.rank, member): data.numel() for data, member in sends})
        received.update({(member, self.rank): data.numel() for data, member in receives})
        link(self, sends, receives, *rest)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Communicator, "link", note))
        hosts = [engine_host(), engine_host()] if rank == 0 else []
        trainer = Trainer([stack.enter_context(closing(FakeEngine(host))) for host in hosts] or None, encoding=encoding)
        fully_shard(trainer.model, mesh=init_device_mesh("cpu", (2,)))
        trainer.push()
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, (sent, received))
        trainer.sync.close()
    (sent, received), (other_sent, other_received) = everyone
    sent, received = sent | other_sent, received | other_received
    assert {(0, 2), (1, 2), (2, 3)} == sent.keys()
    assert sent == received


@pytest.mark.parametrize(("encoding", "by_words"), [(None, False), ("delta", False), ("delta", True)])
def test_both_ends_of_a_first_exchange_expect_equal_sizes(encoding: str | None, by_words: bool):
    """NCCL would wait for the missing bytes."""
    run_ranks(first_exchange, 2, encoding, by_words)


@pytest.mark.parametrize("form", [fp8_per_channel, int8_per_channel], ids=["fp8", "int8"])
def test_an_engine_that_quantises_keeps_the_bytes_of_its_weights(form: Form):
    host = ModuleHost(TinyEngineModel, checkpoint(1), partial(quantise, form))
    with closing(FakeEngine(host)) as engine:
        model = module_of(checkpoint(2))
        sync = WeightSync("fsdp", "broadcast", engine, encoding="delta", max_bytes=2000, timeout_s=TIMEOUT_S)
        whole = sync.push(model).sent_bytes
        for seed in range(3, 6):
            for name, param in model.named_parameters():
                param.data.view(-1)[seed::50] = checkpoint(seed)[name].view(-1)[seed::50]
            report = sync.push(model)
            assert report.sent_bytes < whole
            assert FUSED_QUANTIZE in report.load_paths
            pushed = {name: param.detach().clone() for name, param in model.named_parameters()}
            expected = cold(pushed, post_process=partial(quantise, form)).state_dict()
            for name, tensor in host.live.state_dict().items():
                assert tensor.flatten().view(torch.uint8).equal(expected[name].flatten().view(torch.uint8)), name
        sync.close()


# Trainers of two ranks. The third of their pushes has no room for its changes, and sends everything.


class Named(PlainTrainer):
    """Matrices and vectors under the names of a checkpoint, in an engine."""

    def __init__(self, like: dict[str, torch.Tensor]) -> None:
        super().__init__({name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in like.items()})

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


class Pushes:
    """A rank that pushes changed words, on rank 0 into engines that began with `like`."""

    def __init__(self, backend: Any, like: dict[str, torch.Tensor], **options: Any) -> None:
        self.make = partial(ModuleHost, partial(Named, like), like)
        self.engines = [FakeEngine(self.make())] if dist.get_rank() == 0 else []
        self.patch = mock.patch.object(nccl, "finds_words", return_value=True)
        self.patch.start()
        how = {"max_bytes": 40_000, "timeout_s": TIMEOUT_S, **options}
        self.sync = WeightSync(backend, "broadcast", [*self.engines] or None, encoding="delta", **how)

    def join(self) -> None:
        """Add an engine."""
        if self.engines:
            self.engines.append(FakeEngine(self.make()))
            self.sync.engines.add(self.engines[-1])

    def push(self, model: Any, expected: dict[str, torch.Tensor], is_whole: bool) -> None:
        report = self.sync.push(model)
        assert (report.sent_bytes >= report.nbytes, report.sent_bytes < report.nbytes / 12) == (is_whole, not is_whole)
        for engine in self.engines:
            for name, param in engine.hosts[0].live.named_parameters():
                assert param.view(torch.uint8).equal(expected[name].view(torch.uint8)), name

    def close(self) -> None:
        self.sync.close()
        self.patch.stop()
        for engine in self.engines:
            engine.close()


class Net(nn.Module):
    """Sizes that two ranks cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(131, 131) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x


def steps_of_zero_3(_: object) -> None:
    torch.manual_seed(1)
    settings = zero.config(3, param_persistence_threshold=200)
    settings["optimizer"]["params"] |= {"lr": 1e-6, "weight_decay": 0.0}
    engine = zero.initialize(Net(), settings)
    draw = torch.Generator().manual_seed(dist.get_rank())
    with closing(Pushes("deepspeed", zero.gathered(engine))) as pushes:
        now: dict[str, torch.Tensor] = {}
        for lr, is_whole in ((1e-6, True), (1e-6, False), (0.1, True), (1e-6, False)):
            for group in engine.optimizer.param_groups:
                group["lr"] = lr
            engine.backward(engine(torch.randn(2, 131, generator=draw).bfloat16()).float().square().mean())
            engine.step()
            now, before = zero.gathered(engine), now
            assert any(not now[name].equal(tensor) for name, tensor in before.items()) or not before
            pushes.push(engine, now, is_whole)
    engine.destroy()


def test_zero_3_sends_the_words_that_its_steps_have_changed(trainers: Trainers):
    trainers.call(steps_of_zero_3)


def pushes_of_megatron(_: object, folder: Path, mesh: Mesh, frozen: tuple[str, ...]) -> None:
    from transformers import AutoModelForCausalLM

    config = hf_config("llama")
    state = megatron_models.checkpoint(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), folder)
    chunks = megatron_models.build(config, mesh, torch.bfloat16, padding=5)
    selection = TensorSelection(frozen=frozen)
    backend = MegatronBackend(vocab_size=config.vocab_size)
    with closing(Pushes(backend, state, selection=selection)) as pushes:
        for seed, step in enumerate((50, 100, 1, 100)):
            for name, tensor in state.items():
                if not (seed and selection.freezes(name, trains=True)):
                    tensor.view(-1)[seed::step] += 1
            megatron_models.load(chunks, config, state)
            pushes.push(chunks, state, step != 100)


STAGE_0 = "model.embed_tokens.*", "model.layers.0.*", "model.layers.1.*"


@pytest.mark.parametrize(
    ("mesh", "frozen"), [(Mesh(tp=2), ()), (Mesh(pp=2), STAGE_0)], ids=["TP", "PP, a frozen stage"]
)
def test_megatron_sends_changed_words(trainers: Trainers, tmp_path: Path, mesh: Mesh, frozen: tuple[str, ...]):
    trainers.call(pushes_of_megatron, tmp_path, mesh, frozen)


def pushes_of_streams(_: object) -> None:
    torch.manual_seed(1)
    state = {f"layers.{number}": torch.randn(50 + number, 333).bfloat16() for number in range(6)}

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in state.items():
            halves = tensor / 2
            dist.all_reduce(halves)
            yield name, halves

    with closing(Pushes("stream", state)) as pushes:
        for seed, step in enumerate((50, 100, 1, 100)):
            for tensor in state.values():
                tensor.view(-1)[seed::step] += 1
            pushes.push(gathered if seed % 2 else gathered(), state, step != 100)


def test_a_stream_that_ranks_gather_sends_changed_words(trainers: Trainers):
    trainers.call(pushes_of_streams)


def pushes_that_quantise(_: object, form: str) -> None:
    torch.manual_seed(1)
    state = {f"layers.{number}.weight": torch.randn(70 + number, 66).bfloat16() for number in range(6)}
    model = fully_shard(module_of(state), shard_placement_fn=lambda _: Shard(1))  # so ranks find scales together
    with closing(Pushes("fsdp", quantized(state, form), quantize=form)) as pushes:
        for seed, step in enumerate((50, 200, 1, 200, 200, 200)):
            if joins := seed == 4:
                pushes.join()
            for name, tensor in state.items():
                tensor.view(-1)[seed::step] += 0.5
                model.get_parameter(name).to_local().detach().copy_(tensor.chunk(2, 1)[dist.get_rank()])
            pushes.push(model, quantized(state, form), step != 200 or joins)


@pytest.mark.parametrize("form", ["fp8", "int8"])
def test_ranks_that_quantise_send_the_words_that_change_afterwards(trainers: Trainers, form: str):
    trainers.call(pushes_that_quantise, form)
