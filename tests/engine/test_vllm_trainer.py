"""vLLM's own interface for trainers, with `backend="weightsync"`: pushed equals cold, and failures are weightsync's."""

from __future__ import annotations

import importlib.util
import inspect
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import tiny_models
from engines import TIMEOUT_S, Answer, Engines, Remote, Trainer, Trainers, assert_same

from weightsync import ConfigError, ManifestError, UnsupportedError

pytest_plugins = ["engine_fixtures"]
pytestmark = pytest.mark.engine


def need_the_interface() -> None:
    from vllm.distributed.weight_transfer import factory

    if not hasattr(factory, "WeightTransferTrainerFactory"):
        pytest.skip("this vLLM has no interface for trainers")
    if "config" in inspect.signature(factory.WeightTransferTrainerFactory.trainer_init).parameters:
        pytest.skip("this vLLM's interface for trainers is another one, and is refused")


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
    need_the_interface()
    cold = engines.call(Engines.serve, "qwen3", timeout_s=240)
    trainers.call(load, transport, timeout_s=240)
    for weights in "BAB":
        trainers.call(send, weights)
        assert_same(engines.call(Engines.ask), cold[weights], weights)
    trainers.call(lose_a_layer)
    with pytest.raises(ManifestError, match=r"model\.layers\.1"):
        trainers.call(send, "A")
    assert_same(engines.call(Engines.ask), cold["B"], "refused before anything was written")


def push_by_skyrls_page(engines: Engines, line: Path, colocate_all: bool) -> list[Answer]:
    """Push "B" and then "A" by the engine of this line's function, with stand-ins for the names of SkyRL in it."""
    from vllm.distributed.weight_transfer import ModuleSource

    capabilities = type("SkyrlTrainerCapabilities", (), {"skyrl_handles_prefix_cache_reset": False})
    made, model = runpy.run_path(str(line)), tiny_models.build("qwen3", "A")
    stand_ins = {
        "skyrl.backends.skyrl_train.weight_sync.weight_senders": SimpleNamespace(SkyrlTrainerCapabilities=capabilities),
        "skyrl.train.utils.utils": SimpleNamespace(str_to_torch_dtype=str),
    }
    with mock.patch.dict(sys.modules, stand_ins):
        sender = made["build_trainer_engine"](
            ie_cfg=SimpleNamespace(model_dtype="bfloat16"),
            colocate_all=colocate_all,
            rank=0,
            inference_world_size=1,
            source_factory=lambda dtype, backend: ModuleSource(model),
            server_urls=(engines.llm,),
            data_parallel_size=1,
        )
    assert isinstance(sender, capabilities)
    assert sender.skyrl_handles_prefix_cache_reset
    answers = []
    for weights in "BA":
        tiny_models.fill(model, weights)
        sender.send_weights()
        answers.append(engines.ask())
    sender.shutdown()
    return answers


@pytest.mark.parametrize("colocate_all", [True, False])
def test_the_line_of_skyrls_page_pushes_what_equals_cold(engines: Remote, tmp_path: Path, colocate_all: bool) -> None:
    need_the_interface()
    page = Path(__file__).resolve().parents[2] / "docs/use/skyrl.md"
    (line,) = [each for each in page.read_text().split("```python\n") if each.startswith("# skyrl/backends")]
    (tmp_path / "line.py").write_text(line.partition("```")[0])
    cold = engines.call(Engines.serve, "qwen3", timeout_s=240)
    for weights, answer in zip(
        "BA", engines.call(push_by_skyrls_page, tmp_path / "line.py", colocate_all), strict=True
    ):
        assert_same(answer, cold[weights], weights)


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
