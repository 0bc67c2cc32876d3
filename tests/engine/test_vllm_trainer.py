"""vLLM's own interface for trainers, with `backend="weightsync"`: pushed equals cold, and failures are weightsync's."""

from __future__ import annotations

import importlib.util
import inspect
import runpy
from types import SimpleNamespace

import pytest
import tiny_models
from engines import TIMEOUT_S, Engines, Remote, Trainer, Trainers, assert_same

from weightsync import ConfigError, ManifestError, UnsupportedError

pytest_plugins = ["engine_fixtures"]
pytestmark = pytest.mark.engine


def load(trainer: Trainer, transport: str) -> None:
    from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory

    from weightsync.integrations.vllm_trainer import WeightSyncTrainerInitInfo
    from weightsync.vllm.plugin import register

    trainer.release()
    register()  # vLLM's plug-ins do this, before a framework imports the init info or after
    trainer.model = tiny_models.shard(tiny_models.build("qwen3", "A"))
    options = {"timeout_s": TIMEOUT_S, "max_bytes": 1 << 16}
    info = WeightSyncTrainerInitInfo(rank=trainer.rank, transport=transport, engine=trainer.engine, options=options)
    source = ModuleSource(trainer.model)
    sender = WeightTransferTrainerFactory.trainer_init(info, client=SimpleNamespace(), source=source)
    trainer.sync = SimpleNamespace(send=sender.send_weights, close=sender.shutdown, sender=sender)


def send(trainer: Trainer, weights: str) -> int:
    tiny_models.fill(trainer.model, weights)
    trainer.sync.send()
    return trainer.sync.sender.last_report.version


def lose_a_layer(trainer: Trainer) -> None:
    del trainer.model.model.layers[-1]


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_what_vllms_trainer_engine_sends_equals_cold(engines: Remote, trainers: Trainers, transport: str) -> None:
    from vllm.distributed.weight_transfer import factory

    if not hasattr(factory, "WeightTransferTrainerFactory"):
        pytest.skip("this vLLM has no interface for trainers")
    if "config" in inspect.signature(factory.WeightTransferTrainerFactory.trainer_init).parameters:
        pytest.skip("this vLLM's interface for trainers is another one, and is refused")
    cold = engines.call(Engines.serve, "qwen3", timeout_s=240)
    trainers.call(load, transport, timeout_s=240)
    for weights in "BAB":
        trainers.call(send, weights)
        assert_same(engines.call(Engines.ask), cold[weights], weights)
    trainers.call(lose_a_layer)
    with pytest.raises(ManifestError, match=r"model\.layers\.1"):
        trainers.call(send, "A")
    assert_same(engines.call(Engines.ask), cold["B"], "refused before anything was written")


def test_the_interface_of_vllm_0_26_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    def trainer_init(backend: object, config: object, init_info: object, *, client: object, source: object) -> None: ...

    monkeypatch.setattr(WeightTransferTrainerFactory, "trainer_init", trainer_init)
    path = importlib.util.find_spec("weightsync.integrations.vllm_trainer").origin
    with pytest.raises(UnsupportedError, match=r"use vLLM 0\.27 or later, or push the WeightSource"):
        runpy.run_path(path)


def test_what_a_trainer_engine_cannot_use_is_refused() -> None:
    from weightsync.integrations.vllm_trainer import WeightSyncTrainerEngine, WeightSyncTrainerInitInfo

    def init(client: object = None, source: object = "a source", **info: object) -> None:
        WeightSyncTrainerEngine.trainer_init(
            WeightSyncTrainerInitInfo(**{"rank": 0, **info}), client=client, source=source
        )

    for refused, match in (
        ({"source": None}, "reads a WeightSource"),
        ({"client": SimpleNamespace()}, "does not tell its engines' addresses"),
        ({"transport": "lora"}, "demands more than `send_weights`"),
        ({"rank": 1}, "this process is rank 0 of 1"),
    ):
        with pytest.raises(ConfigError, match=match):
            init(**refused)
    init(SimpleNamespace(base_url="http://localhost:8000"))
