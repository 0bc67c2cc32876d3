"""TRL's own trainers, whose engines answer as cold ones after three steps through `weightsync.integrations.trl`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trl_ranks
from engines import ANSWER_TOKENS, NOT_COMPILED, PROMPTS, Answer, Engines, Remote, answer_of, assert_same, noted
from ranks import run_ranks

from weightsync import CheckpointTransport, ConfigError, LoraTransport, SingleCopyTransport, UnsupportedError
from weightsync.engines.server import VllmServer
from weightsync.net.child import free_port

pytest_plugins = ["engine_fixtures"]
pytestmark = pytest.mark.engine

trl_ranks.preload()

# As TRL starts its engines; a kernel of vLLM's that only eager engines take rounds otherwise.
AS_TRL = {"enforce_eager": False, "logprobs_mode": "processed_logprobs"}


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


def test_what_cannot_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from weightsync.integrations import trl

    with pytest.raises(ConfigError, match="has no `vllm_generation`; make it with use_vllm=True"):
        trl.attach(object())
    colocated = SimpleNamespace(vllm_generation=SimpleNamespace(mode="colocate"))
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
    monkeypatch.setattr(trl, "version", lambda name: "1.17.0")
    with pytest.raises(UnsupportedError, match=r"TRL 1\.17\.0 may synchronise"):
        trl.attach(object())
    with pytest.raises(UnsupportedError, match=r"TRL 1\.17\.0 may synchronise"), trl.no_communicator():
        raise AssertionError("the body must not run")


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
