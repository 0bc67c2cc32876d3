"""Pushes of changed words, as between GPUs, written into the engine's parameters. Here they travel over TCP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import pytest
import torch
from engines import TIMEOUT_S
from fake_engine import FakeEngine, ModuleHost, TinyEngineModel, checkpoint, cold, module_of
from ranks import run_ranks
from test_deltas import NBYTES, ROWS, Trainer, engine_host
from test_fused_quantize import quantise
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from weightsync import DigestError, WeightSync, WeightSyncError
from weightsync.kernels.digest import SAMPLES
from weightsync.kernels.quantize import Form, fp8_per_channel, int8_per_channel
from weightsync.transports import nccl, nccl_sender
from weightsync.transports.base import Changes
from weightsync.transports.changes import head
from weightsync.transports.nccl import NcclTransport
from weightsync.worker.changed_runs import ChangedRuns
from weightsync.worker.load_planner import FUSED_QUANTIZE


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


def test_after_a_comparison_without_its_push_everything_is_sent(
    host: ModuleHost, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
    trainer, begin = Trainer(engine), NcclTransport.begin_send
    trainer.push()

    def begin_twice(transport: NcclTransport, sample: int | None) -> None:
        begin(transport, sample)
        begin(transport, sample)

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
