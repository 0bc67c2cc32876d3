"""Engines that classify and embed. Loaders make parameters, leave tensors out, and compute from what they have."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tiny_models
import torch
from engines import PROMPTS, TIMEOUT_S, Engines, Remote

from weightsync import WeightSync
from weightsync.errors import EngineError, UnsupportedError

pytest_plugins = ["engine_fixtures"]
pytestmark = pytest.mark.engine

_BERT = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def build(kind: str) -> Any:
    import transformers

    if kind == "bert":
        model = transformers.AutoModel.from_config(transformers.BertConfig(**_BERT), dtype=torch.bfloat16)
    else:
        config = tiny_models.CONFIGS["qwen3"]()
        config.num_labels = 3
        model = transformers.AutoModelForTokenClassification.from_config(config, dtype=torch.bfloat16)
    tiny_models.fill(model, "A")
    return model


def save(model: Any, folder: Path) -> Path:
    """Write a checkpoint with a tokenizer of words "t0", "t1" and so on."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{number}": number for number in range(251)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t2", pad_token="t0", unk_token="t0").save_pretrained(
        folder
    )
    return tiny_models.save(model, folder)


def start(engines: Engines, folder: Path, **more: Any) -> None:
    engines.start(folder, runner="pooling", skip_tokenizer_init=False, **more)


def ask(engines: Engines, task: str) -> list[list[float]]:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = [engines.llm.encode([prompt], pooling_task=task, use_tqdm=False)[0] for prompt in prompts]
    return [output.outputs.data.float().flatten().tolist() for output in outputs]


def push_and_compare(engines: Engines, kind: str, task: str, folder: Path) -> None:
    model = build(kind)
    checkpoint = save(model, folder / "A")
    tiny_models.fill(model, "B")
    start(engines, save(model, folder / "B"))
    cold = ask(engines, task)
    start(engines, checkpoint)
    assert ask(engines, task) != cold
    engines.sync = WeightSync("fsdp", "ipc", engines.llm, timeout_s=TIMEOUT_S)
    for _ in range(2):
        engines.sync.push(model)
        assert ask(engines, task) == cold


@pytest.mark.parametrize(("kind", "task"), [("token classifier, with a bias", "token_classify"), ("bert", "embed")])
def test_pushed_equals_cold(engines: Remote, tmp_path: Path, kind: str, task: str):
    """VLLM's loader makes a classifier's bias when it comes, and BERT's leaves the pooler out."""
    engines.call(push_and_compare, kind, task, tmp_path, timeout_s=240)


def push_between_chunks(engines: Engines, folder: Path) -> None:
    from vllm import PoolingParams

    model = build("token classifier")
    checkpoint = save(model, folder / "A")
    tiny_models.fill(model, "B")
    start(engines, save(model, folder / "B"))
    cold = ask(engines, "token_classify")[-1]
    start(engines, checkpoint, max_num_batched_tokens=16, max_num_seqs=4, enable_chunked_prefill=True)
    engine = engines.llm.llm_engine
    engine.add_request("long", {"prompt_token_ids": PROMPTS[-1]}, PoolingParams(task="token_classify"))
    assert not engine.step()
    engines.sync = WeightSync("fsdp", "ipc", engines.llm, timeout_s=TIMEOUT_S)
    engines.sync.push(model)
    while not (outputs := engine.step()):
        pass
    assert len(PROMPTS[-1]) > 2 * 16
    torch.testing.assert_close(outputs[0].outputs.data.float().flatten(), torch.tensor(cold), atol=0.01, rtol=0.01)


def test_a_push_between_the_chunks_of_a_request(engines: Remote, tmp_path: Path):
    """VLLM keeps the rows of chunks that it has computed, also of a request that it computes again."""
    engines.call(push_between_chunks, tmp_path, timeout_s=240)


def embedder_on_a_language_model() -> type:
    """Return a vLLM class that pools and still has what makes logits, as those of ColQwen and JinaVL."""
    from vllm.model_executor.layers.pooler.tokwise import pooler_for_token_embed
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

    class Embedder(Qwen3ForCausalLM):
        is_pooling_model = True

        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            self.pooler = pooler_for_token_embed(vllm_config.model_config.pooler_config)

    return Embedder


def fail_to_reset(engines: Engines, folder: Path) -> None:
    from vllm import ModelRegistry

    ModelRegistry.register_model("EmbedderForTest", embedder_on_a_language_model())
    model = tiny_models.build("qwen3", "A")
    overrides = {"architectures": ["EmbedderForTest"]}
    start(engines, save(model, folder / "A"), hf_overrides=overrides)
    engines.sync = WeightSync("fsdp", "ipc", engines.llm, timeout_s=TIMEOUT_S)
    engines.sync.push(model)
    assert ask(engines, "token_embed")
    failing = mock.patch.object(engines.llm, "reset_prefix_cache", return_value=False)
    with failing, pytest.raises(EngineError, match="could not reset its prefix cache"):
        engines.sync.push(model)
    with pytest.raises(EngineError, match="this engine does not answer: it is POISONED"):
        ask(engines, "token_embed")


def test_an_embedder_with_caches_of_other_weights_does_not_answer(engines: Remote, tmp_path: Path):
    engines.call(fail_to_reset, tmp_path)


def push_without_a_bias(engines: Engines, folder: Path) -> str:
    """Push to a classifier whose checkpoint has a bias, as some on the hub have. Transformers' class has none."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForSequenceClassification

    config = tiny_models.CONFIGS["qwen3"]()
    config.num_labels = 3
    trainer = AutoModelForSequenceClassification.from_config(config, dtype=torch.bfloat16)
    (file,) = save(trainer, folder).glob("*.safetensors")
    bias = {"score.bias": torch.tensor([5.0, -3.0, 1.0], dtype=torch.bfloat16)}
    save_file(load_file(file) | bias, file, {"format": "pt"})
    start(engines, folder)
    before = ask(engines, "classify")
    engines.sync = WeightSync("fsdp", "ipc", engines.llm, timeout_s=TIMEOUT_S)
    with pytest.raises(UnsupportedError) as refused:
        engines.sync.push(trainer)
    assert ask(engines, "classify") == before
    return str(refused.value)


def test_a_bias_that_only_the_engine_has_is_refused(engines: Remote, tmp_path: Path):
    refused = engines.call(push_without_a_bias, tmp_path)
    assert refused.startswith("the running model has score.bias, made by the engine's loader")


def push_a_reranker(engines: Engines, model: str, folder: Path) -> None:
    """VLLM computes what a reranker scores by from two rows of the output layer, which it has loaded before."""
    trainer = tiny_models.build(model, "B")
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["t3", "t5"],
        "is_original_qwen3_reranker": True,
    }
    start(engines, save(trainer, folder / "B"), hf_overrides=overrides)
    cold = ask(engines, "classify")
    tiny_models.fill(trainer, "A")
    start(engines, save(trainer, folder / "A"), hf_overrides=overrides)
    before = ask(engines, "classify")
    assert before != cold
    engines.sync = WeightSync("fsdp", "ipc", engines.llm, timeout_s=TIMEOUT_S)
    for weights, expected in (("B", cold), ("A", before), ("B", cold)):
        tiny_models.fill(trainer, weights)
        engines.sync.push(trainer)
        assert ask(engines, "classify") == expected


@pytest.mark.parametrize("model", ["qwen3", "qwen3-tied"])
def test_a_reranker_of_a_language_model(engines: Remote, tmp_path: Path, model: str):
    engines.call(push_a_reranker, model, tmp_path, timeout_s=240)
