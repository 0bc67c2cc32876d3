"""Adapters on experts, which vLLM runs on GPUs alone: an engine answers as with the files that PEFT has saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import PROMPTS, TIMEOUT_S, Answer, Engines, Remote, answer_of, assert_same
from test_lora import fill_adapters, wrapped
from test_lora_transport import EXPERTS

from weightsync import WeightSync

pytest_plugins = ["engine_fixtures"]
pytestmark = [
    pytest.mark.engine,
    pytest.mark.gpu(1),
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys"),
]
STARTED = {
    "qwen3-moe": {"moe_backend": "triton", "enable_mixed_moe_lora_format": True},
    "gpt-oss": {"moe_backend": "triton"},
}


def ask(engines: Engines, adapter: Any = None) -> Answer:
    from weightsync.vllm.compat import lora_request

    request = None if adapter is None else lora_request(*adapter)
    outputs = [
        engines.llm.generate([{"prompt_token_ids": prompt}], engines.sampling(8), use_tqdm=False, lora_request=request)
        for prompt in PROMPTS
    ]
    return [answer_of(output) for (output,) in outputs]


def compare(engines: Engines, name: str, folder: Path) -> dict[str, tuple[Answer, Answer]]:
    """Return, for each adapter, the answers with PEFT's files and with a push, and those without an adapter."""
    options: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16, **STARTED[name]}
    engines.start(engines.checkpoint(name, "A"), **options)
    model, base = wrapped("linear", model=name, **EXPERTS[name]), ask(engines)
    found = {"none": (base, base)}
    with WeightSync("fsdp", "lora", engines.llm, timeout_s=TIMEOUT_S) as sync:
        for number, weights in enumerate("AB", 1):
            fill_adapters(model, weights)
            model.save_pretrained(folder / weights, save_embedding_layers=False)
            cold = ask(engines, (weights, number, str(folder / weights)))
            sync.push(model)
            found[weights] = cold, ask(engines, sync.adapter)
    return found


@pytest.mark.parametrize("name", STARTED)
def test_pushed_equals_what_peft_saved(engines: Remote, name: str, tmp_path: Path) -> None:
    found = engines.call(compare, name, tmp_path, timeout_s=300)
    for weights in "AB":
        cold, pushed = found[weights]
        assert cold != found["none"][0], "the adapter does nothing"
        assert_same(pushed, cold, f"{weights} of {name}")
    assert found["A"] != found["B"]
