"""Engines in which a second model drafts tokens: a push fills it too, or says that it does not.

What a drafter drafts decides how fast an engine answers, and hardly what. So these tests compare its drafts as well.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import megatron_models
import pytest
import tiny_models
import torch
from drafter_checkpoints import LAYOUTS, MTP, checkpoint, eagle
from engines import (
    ANSWER_TOKENS,
    EXTENSION,
    PROMPTS,
    TIMEOUT_S,
    Answer,
    Engines,
    Remote,
    Trainer,
    Trainers,
    answer_of,
    assert_same,
    has_plug_ins,
    sleep_mode,
)
from megatron_models import Mesh
from torch import nn

from weightsync import MegatronBackend, TensorSelection, WeightSync
from weightsync.errors import UnsupportedError

pytest_plugins = ["engine_fixtures"]
pytestmark = pytest.mark.engine

# ---------------------------------------------------------------------------------------------------------------
# What runs in the engines' process

Drafts = list[Any]


def start(engines: Engines, folder: Path, speculative: dict[str, Any], **options: Any) -> None:
    engines.start(folder, speculative_config=speculative, **options)


def ask(engines: Engines) -> tuple[Answer, Drafts]:
    """What the engine answers, and what was drafted for it."""
    worker = engines.llm.llm_engine.model_executor.driver_worker.worker
    drafter, drafts = worker.model_runner.drafter, []
    propose = drafter.propose

    def recorded(*args: Any, **kwargs: Any) -> Any:
        drafted = propose(*args, **kwargs)
        drafts.append(drafted.tolist() if isinstance(drafted, torch.Tensor) else drafted)
        return drafted

    drafter.propose = recorded
    try:
        answers = []
        for prompt in PROMPTS:
            sampling = engines.sampling(3 * ANSWER_TOKENS)
            (output,) = engines.llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
            answers.append(answer_of(output))
        return answers, drafts
    finally:
        drafter.propose = propose


def cold(engines: Engines, layout: str, speculative: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Answers of engines that start from the weights "B" and "A"; the latter goes on running."""
    answers = {}
    for weights in "BA":
        start(engines, checkpoint(engines, layout, weights), speculative, **options)
        answers[weights] = ask(engines)
    return answers


def connect(engines: Engines, layout: str, selection: TensorSelection | None = None) -> None:
    engines.release()
    engines.model = tiny_models.as_saved(checkpoint(engines, layout, "A"))
    selection = selection or TensorSelection()
    engines.sync = WeightSync("fsdp", "ipc", engines.llm, timeout_s=TIMEOUT_S, selection=selection, max_bytes=1 << 14)


def push(engines: Engines, weights: str) -> list[str]:
    """Push, and give what the log says."""
    tiny_models.fill(engines.model, weights)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("weightsync")
    logger.addHandler(handler)
    try:
        engines.sync.push(engines.model)
    finally:
        logger.removeHandler(handler)
    return lines


def drafters_tensors(engines: Engines) -> dict[str, torch.Tensor]:
    worker = engines.llm.llm_engine.model_executor.driver_worker.worker
    drafter: nn.Module = worker.model_runner.get_draft_model()
    return {name: tensor.clone() for name, tensor in drafter.state_dict().items()}


# ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, EXTENSION], ids=["plug-in", "extension"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_that_predict_more_tokens_are_pushed_too(engines: Remote, layout: str, options: dict[str, Any]):
    answers = engines.call(cold, layout, MTP, options, timeout_s=300)
    assert answers["A"][0] != answers["B"][0]
    assert answers["A"][1] != answers["B"][1]
    engines.call(connect, layout)
    for weights in "BAB":
        lines = engines.call(push, weights)
        assert not any("drafter" in line for line in lines)
        answer, drafts = engines.call(ask)
        assert_same(answer, answers[weights][0], f"push of {weights}")
        assert drafts == answers[weights][1]


@pytest.mark.parametrize("drafts", ["from another checkpoint", "from layers that the trainer lacks"])
def test_a_drafter_that_no_tensor_is_for_stays_and_the_log_says_so(engines: Remote, drafts: str):
    layout, selection, is_apart = (
        "mimo",
        TensorSelection(exclude=("*mtp_layers*",)),
        drafts == "from another checkpoint",
    )
    speculative: dict[str, Any] = MTP
    if is_apart:
        other = engines.call(Engines.checkpoint, "qwen2", "C")
        speculative = {"method": "draft_model", "model": str(other), "num_speculative_tokens": 2}
    answers = engines.call(cold, layout, speculative, {}, timeout_s=300)
    assert answers["A"][0] != answers["B"][0]
    engines.call(connect, layout, selection)
    before = engines.call(drafters_tensors)
    for number, weights in enumerate("BA"):
        told = [line for line in engines.call(push, weights) if "of the engine's drafter keep their values" in line]
        assert len(told) == (number == 0)
        answer, drafted = engines.call(ask)
        assert_same(answer, answers[weights][0], f"push of {weights}")
        assert drafted == answers[weights][1] or not is_apart
    after = engines.call(drafters_tensors)
    shared = () if is_apart else ("embed_tokens.weight", "lm_head.weight")
    assert [name for name in before if not torch.equal(before[name], after[name]) and not name.endswith(shared)] == []


def push_after_sleep(engines: Engines, layout: str, speculative: dict[str, Any]) -> str:
    """Push to an engine that has slept and lost nothing, and to one that has lost its drafter. Return the refusal."""
    with sleep_mode():
        start(engines, checkpoint(engines, layout, "A"), speculative, enable_sleep_mode=True)
    connect(engines, layout, TensorSelection(exclude=("*mtp_layers*",)))
    worker = engines.llm.llm_engine.model_executor.driver_worker.worker
    assert worker.sleep_mode_backend is not None  # made at the first sleep
    push(engines, "B")
    model = {id(param) for param in worker.model_runner.model.parameters()}
    for param in worker.model_runner.get_draft_model().parameters():
        if id(param) not in model:
            param.data.zero_()
    with pytest.raises(UnsupportedError) as refused:
        push(engines, "A")
    return str(refused.value)


@pytest.mark.parametrize("drafts", ["from another checkpoint", "from layers that the trainer lacks"])
def test_a_drafter_that_sleep_has_discarded_is_missed(engines: Remote, drafts: str):
    if not has_plug_ins():
        pytest.skip("this vLLM does not tell whether it has slept")
    speculative: dict[str, Any] = MTP
    if drafts == "from another checkpoint":
        other = engines.call(Engines.checkpoint, "qwen2", "C")
        speculative = {"method": "draft_model", "model": str(other), "num_speculative_tokens": 2}
    refused = engines.call(push_after_sleep, "mimo", speculative)
    assert re.match(r"this push leaves drafter\.\S+, .*sleep\(level=2\) has discarded them", refused)
    assert engines.call(Engines.refusal) == ""


def cold_eagle(engines: Engines, method: str) -> dict[str, Any]:
    engines.release()
    answers, engines.trainers = {}, {}
    for weights in "BA":
        source, head, engines.trainers[weights] = eagle(engines, method, weights)
        start(engines, source, {"method": method, "model": str(head), "num_speculative_tokens": 2})
        answers[weights] = ask(engines)
    engines.sync = WeightSync("fsdp", "ipc", engines.llm, timeout_s=TIMEOUT_S, max_bytes=1 << 14)
    return answers


def push_eagle(engines: Engines, weights: str, has_head: bool = True) -> tuple[Answer, Drafts]:
    trainer = engines.trainers[weights]
    if not has_head:
        del trainer.drafter
    engines.sync.push(trainer)
    return ask(engines)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_head_that_the_trainer_has_is_pushed_with_the_model(engines: Remote, method: str):
    answers = engines.call(cold_eagle, method, timeout_s=300)
    assert answers["A"][0] != answers["B"][0]
    assert answers["A"][1] != answers["B"][1]
    for weights in "BA":
        answer, drafts = engines.call(push_eagle, weights)
        assert_same(answer, answers[weights][0], f"push of {weights}")
        assert drafts == answers[weights][1]
    answer, _ = engines.call(push_eagle, "B", False)
    assert_same(answer, answers["B"][0], "push of B to a head that stays")


def serve_two_workers(engines: Engines, speculative: dict[str, Any]) -> dict[str, Answer]:
    return engines.serve("qwen2", 2, speculative_config=speculative)


def connect_plain(engines: Engines) -> None:
    engines.release()
    engines.model = tiny_models.build("qwen2", "A")
    engines.sync = WeightSync("fsdp", "ipc", engines.llm, timeout_s=TIMEOUT_S)


def test_where_drafts_come_from_the_prompt_there_is_only_the_model(engines: Remote):
    # Its workers are processes: in one that has drafted so, vLLM's engine for CPUs does not start a second time.
    speculative = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    answers = engines.call(serve_two_workers, speculative, timeout_s=240)
    assert answers["A"] != answers["B"]
    engines.call(connect_plain)
    for weights in "BA":
        assert not any("drafter" in line for line in engines.call(push, weights))
        assert_same(engines.call(Engines.ask), answers[weights], f"push of {weights}")


def load_megatron(trainer: Trainer) -> None:
    trainer.release()
    config = tiny_models.CONFIGS["deepseek-v3"]()
    trainer.model = megatron_models.build(config, Mesh(tp=2, etp=2), torch.bfloat16, 5, mtp_num_layers=1)
    backend = MegatronBackend(vocab_size=config.vocab_size)
    trainer.sync = WeightSync(backend, "broadcast", trainer.engine, timeout_s=TIMEOUT_S)


def push_megatron(trainer: Trainer, folder: Path) -> None:
    from safetensors.torch import load_file

    state = load_file(folder / "model.safetensors")
    megatron_models.load(trainer.model, tiny_models.CONFIGS["deepseek-v3"](), state)
    trainer.sync.push(trainer.model)


def test_megatrons_layers_that_predict_more_tokens_fill_the_drafter(engines: Remote, trainers: Trainers):
    answers = engines.call(cold, "deepseek-v3", MTP, {}, timeout_s=300)
    trainers.call(load_megatron)
    for weights in "BA":
        trainers.call(push_megatron, engines.call(checkpoint, "deepseek-v3", weights))
        answer, drafts = engines.call(ask)
        assert_same(answer, answers[weights][0], f"push of {weights}")
        assert drafts == answers[weights][1]


def refuse_a_quantised_head(engines: Engines) -> str:
    """Let the drafter have what vLLM 0.33 gives it on GPUs. A CPU's engine refuses the option."""
    start(engines, checkpoint(engines, "mimo", "A"), MTP)
    connect(engines, "mimo")
    speculative = engines.llm.llm_engine.model_executor.driver_worker.worker.vllm_config.speculative_config
    speculative.draft_lm_head_quantization = "fp8"
    with pytest.raises(UnsupportedError) as refused:
        push(engines, "B")
    speculative.draft_lm_head_quantization = None
    push(engines, "B")
    return str(refused.value)


def test_a_drafter_with_a_quantised_copy_of_the_models_head_is_refused(engines: Remote):
    assert "start the engine without draft_lm_head_quantization" in engines.call(refuse_a_quantised_head)
