"""TRL's own trainers, whose engines answer as cold ones after three steps through `weightsync.integrations.trl`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trl_ranks
from engines import ANSWER_TOKENS, NOT_COMPILED, PROMPTS, Answer, Engines, Remote, answer_of, assert_same, noted
from ranks import run_ranks

from weightsync import (
    CheckpointTransport,
    ConfigError,
    LoraTransport,
    ManifestError,
    SingleCopyTransport,
    UnsupportedError,
)
from weightsync.engines.server import VllmServer
from weightsync.net.child import free_port

pytest_plugins = ["engine_fixtures"]
pytestmark = pytest.mark.engine

trl_ranks.preload()

# As TRL starts its engines; a kernel of vLLM's that only eager engines take rounds otherwise.
AS_TRL = {"enforce_eager": False, "logprobs_mode": "processed_logprobs"}


class Generation:
    """TRL's `VLLMGeneration`, without an engine."""

    def __init__(self, mode: str) -> None:
        self.mode = mode

    def sync_weights(self) -> None:
        raise AssertionError("weightsync replaces it")

    def generate(self, prompts: str) -> str:
        return prompts


def cold(engines: Engines, checkpoint: Path, options: dict[str, Any]) -> Answer:
    engines.start(checkpoint, **AS_TRL, **options)
    return engines.ask()


def cold_with_adapter(engines: Engines, checkpoint: Path, adapter: Path) -> Answer:
    from vllm.lora.request import LoRARequest

    engines.start(checkpoint, **AS_TRL, enable_lora=True)
    asked = {"lora_request": LoRARequest("adapter", 1, str(adapter)), "use_tqdm": False}
    sampling = engines.sampling(ANSWER_TOKENS)
    return [answer_of(engines.llm.generate([{"prompt_token_ids": p}], sampling, **asked)[0]) for p in PROMPTS]


@pytest.mark.parametrize(
    ("method", "ranks", "options"),
    [
        pytest.param("Distillation", 1, {"vllm_enable_sleep_mode": True}, id="one rank, asleep between"),
        pytest.param("RLOO", 1, {"adapters": True}, id="merged adapters"),
        pytest.param("GRPO", 2, {}, id="DDP"),
        pytest.param("GRPO", 2, {"deepspeed": trl_ranks.ZERO}, id="ZeRO-3"),
        pytest.param("RLOO", 2, {"fsdp": True, "vllm_tensor_parallel_size": 2}, id="FSDP2 to an engine of two ranks"),
        pytest.param("GRPO", 2, {"fsdp": True, "adapters": True}, id="merged adapters under FSDP2"),
        pytest.param("GRPO", 2, {"deepspeed": trl_ranks.ZERO, "adapters": True}, id="merged adapters under ZeRO-3"),
    ],
)
def test_colocated_engine_equals_a_cold_one(
    engines: Remote, tmp_path: Path, method: str, ranks: int, options: dict[str, Any]
) -> None:
    checkpoint = trl_ranks.save(tmp_path / "tiny")
    trl_ranks.clear_shared_memory()
    run_ranks(trl_ranks.colocate, ranks, ranks, free_port(), method, checkpoint, options, timeout_s=100)
    parallel = {"tensor_parallel_size": options.get("vllm_tensor_parallel_size", 1)}
    trained = engines.call(cold, tmp_path / "trained", parallel)
    for rank in range(ranks):
        assert trained != noted(tmp_path / f"untrained-{rank}.json"), "three steps changed nothing"
        assert_same(noted(tmp_path / f"pushed-{rank}.json"), trained, f"the engine of rank {rank}")


def test_callback_pushes_from_a_trainer_that_does_not_generate(engines: Remote, tmp_path: Path) -> None:
    checkpoint = trl_ranks.save(tmp_path / "tiny")
    options = {"dtype": "bfloat16", "max_model_len": 256, "distributed_executor_backend": "external_launcher"}
    run_ranks(trl_ranks.fine_tune, 1, free_port(), checkpoint, {**AS_TRL, **options}, timeout_s=200)
    trained = engines.call(cold, tmp_path / "trained", {})
    assert trained != engines.call(cold, checkpoint, {}), "three steps changed nothing"
    assert_same(noted(tmp_path / "pushed-0.json"), trained, "the engine")


@pytest.mark.filterwarnings("ignore:TRL currently supports vLLM")
def test_what_cannot_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from weightsync.integrations import trl

    with pytest.raises(ConfigError, match="has no `vllm_generation`; make it with use_vllm=True"):
        trl.attach(object())
    colocated = SimpleNamespace(vllm_generation=Generation("colocate"))
    for transport in ("single_copy", SingleCopyTransport(), SingleCopyTransport("/run/vllm")):
        with pytest.raises(ConfigError, match=r"steps inside of `writing\(\)`, unlike TRL's"):
            trl.attach(colocated, transport)
    for transport in ("lora", LoraTransport(), LoraTransport(name="mine", base_is_pushed=True)):
        with pytest.raises(ConfigError, match="takes no adapters"):
            trl.attach(colocated, transport)
    with pytest.raises(ConfigError, match="restarts weightsync's own server"):
        trl.attach(colocated, CheckpointTransport("/shared", restart=True))
    with pytest.raises(ConfigError, match="every=0; it must be a whole number from 1 on"):
        trl.PushCallback(object(), every=0)
    other = SimpleNamespace(vllm_generation=Generation("colocate"))
    with pytest.raises(UnsupportedError, match=r"has no llm, enable_sleep_mode in its Generation"):
        trl.attach(other)
    old = SimpleNamespace(vllm_generation=Generation("server"))
    old.vllm_generation.vllm_client = object()
    with pytest.raises(UnsupportedError, match="generates through its own server"):
        trl.attach(old)
    monkeypatch.delattr("trl.generation.vllm_client.VLLMClient.init_communicator")
    with pytest.raises(UnsupportedError, match="no init_communicator in its VLLMClient"), trl.no_communicator():
        raise AssertionError("the body must not run")


def test_an_unknown_release_is_told_of_and_watched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from weightsync.integrations import trl

    def attached() -> Any:
        made: list[Any] = []
        state = {"_last_loaded_step": 0}  # TRL's note of an evaluation before `attach`
        trainer = SimpleNamespace(is_deepspeed_enabled=False, add_callback=made.append, **state)
        trainer.vllm_generation = Generation("server")  # another rank than 0
        trl.attach(trainer, timeout_s=5.0)
        assert vars(trainer).items() >= {"_last_loaded_step": -1}.items()
        vars(trainer).update(state)
        made[0].on_train_end(None, None, None)  # with load_best_model_at_end the model has other weights
        assert vars(trainer).items() >= {"_last_loaded_step": -1}.items()
        return trainer

    with caplog.at_level("INFO", "weightsync.integrations.trl"):
        attached()
        assert [record.levelname for record in caplog.records] == ["INFO"]
        assert "synchronises its weights through <WeightSync(backend='fsdp'" in caplog.text
        for release in ("1.4.0", "1.17.0", "2.0.0.dev0"):
            monkeypatch.setattr(trl, "version", lambda name, release=release: release)
            caplog.clear()
            trainer = attached()
            assert f"never with {release}" in caplog.text
    with pytest.raises(UnsupportedError, match="generates, and has not called"):
        trainer.vllm_generation.generate("a prompt")


@pytest.mark.parametrize(("every", "steps", "best", "pushes"), [(1, 3, False, 4), (2, 3, False, 3), (1, 3, True, 5)])
def test_a_callback_leaves_the_engine_with_the_models_last_weights(
    every: int, steps: int, best: bool, pushes: int
) -> None:
    from weightsync.integrations.trl import PushCallback

    pushed: list[str] = []
    callback, args = (
        PushCallback(SimpleNamespace(push=pushed.append), every),
        SimpleNamespace(load_best_model_at_end=best),
    )
    callback.on_train_begin(args, SimpleNamespace(global_step=0), None, model="first")
    for step in range(1, steps + 1):
        callback.on_step_end(args, SimpleNamespace(global_step=step), None, model="trained")
    callback.on_train_end(args, SimpleNamespace(global_step=steps), None, model="best" if best else "trained")
    assert len(pushed) == pushes
    assert pushed[-1] == ("best" if best else "trained")


def test_tensors_that_trl_does_not_send_are_explained() -> None:
    from weightsync.integrations import trl

    class Refused:
        def push(self, stream: object) -> None:
            raise ManifestError("missing 1", missing=["frozen"])

    with pytest.raises(ManifestError, match=r"missing 1. TRL's asynchronous trainer sends no parameter with"):
        trl.Transfer(Refused()).send_weights(iter(()))


def test_server_equals_a_cold_engine(engines: Remote, tmp_path: Path) -> None:
    adapters, weights, streams = (
        trl_ranks.save(tmp_path / name / "tiny") for name in ("adapters", "weights", "streams")
    )
    options = ("--enable-lora", "--max-model-len=256", "--dtype=bfloat16", "--logprobs-mode=processed_logprobs")
    with VllmServer(adapters, *options, log=tmp_path / "log", environment=NOT_COMPILED) as server:
        url, limit = server.url, {"timeout_s": 200}
        zero = {"deepspeed": trl_ranks.ZERO, "adapters": True}
        run_ranks(trl_ranks.serve, 2, 2, free_port(), "GRPO", adapters, url, "lora", zero, **limit)
        run_ranks(trl_ranks.serve, 2, 2, free_port(), "GRPO", weights, url, "ipc", {}, **limit)
        run_ranks(trl_ranks.asynchronous, 1, free_port(), streams, url, **limit)
    untrained = noted(adapters.parent / "untrained-0.json")
    adapted = engines.call(cold_with_adapter, adapters, adapters.parent / "trained")
    assert untrained != adapted, "three steps changed nothing"
    assert_same(noted(adapters.parent / "pushed-0.json"), adapted, "the server with the adapter")
    for folder in (weights.parent, streams.parent):
        trained = engines.call(cold, folder / "trained", {"enable_lora": True})
        assert untrained != trained, "three steps changed nothing"
        assert_same(noted(folder / "pushed-0.json"), trained, f"the server with new {folder.name}")
