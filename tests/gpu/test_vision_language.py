"""Vision-language models on a GPU, trained whole: an engine asked about pictures answers as its cold start did."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from support.vision_models import KINDS, PROMPTS, QWEN_PROMPT, make_vision_model
from torch import nn

Answers = list[list[tuple[int, float]]]
WORDS = ([5, 6, 7, 8], [40, 41], list(range(20, 60)))


@pytest.mark.gpu(1)
@pytest.mark.parametrize("tower", ["tower", "left-out"])
@pytest.mark.parametrize("kind", KINDS)
def test_whole_model_into_an_engine_leaves_it_as_its_cold_start(kind: str, tower: str) -> None:
    # A process of its own: the memory of the engine before is then surely free.
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, kind, tower]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


def fill(model: nn.Module, weights: str, only: str = "") -> None:
    """Overwrite the parameters whose names have `only` in them with the values that `weights` stands for."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            if only in name:
                draw = torch.Generator().manual_seed(zlib.crc32(f"{weights} {name}".encode()))
                noise = torch.randn(param.shape, generator=draw)
                param.copy_(1 + 0.1 * noise if param.dim() == 1 else 0.08 * noise)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main(kind: str, tower: str) -> None:
    from vllm import LLM

    from weightsync import WeightSync

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder = Path(tempfile.mkdtemp()) / kind
    model = make_vision_model(kind, folder, device)
    if device.type == "cpu":
        model.share_memory()
    fill(model, "A")
    model.save_pretrained(folder)
    graphs: dict[str, Any] = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
    llm = LLM(
        str(folder), dtype="bfloat16", max_model_len=512, max_num_seqs=4, kv_cache_memory_bytes=64 << 20,
        gpu_memory_utilization=0.1, enable_prefix_caching=False, seed=0,
        limit_mm_per_prompt={"image": int(tower == "tower")} | ({} if kind == "gemma3" else {"video": 0}),
        worker_extension_cls="weightsync.vllm.extension.WeightSyncWorkerExtension",
        **(graphs if device.type == "cuda" else {"enforce_eager": True}),
    )  # fmt: skip
    cold = words, pictures = ask(llm, kind, tower)
    with WeightSync("fsdp", "ipc", llm) as sync:
        fill(model, "B")
        sync.push(model)
        other = ask(llm, kind, tower)
        assert other[0] != words, "other weights were pushed, and the engine answers as before"
        assert tower == "left-out" or other[1] != pictures
        sync.push(model)  # once more, with the plan of the push before
        assert ask(llm, kind, tower) == other
        if tower == "tower":  # frozen but for the tower: what is asked in words alone cannot change
            fill(model, "A", only="vis")
            sync.push(model)
            mixed = ask(llm, kind, tower)
            assert mixed[0] == other[0]
            assert mixed[1] != other[1], "the tower alone was trained, and pictures look as before"
        fill(model, "A")
        sync.push(model)
        assert ask(llm, kind, tower) == cold
    llm.llm_engine.engine_core.shutdown()
    print("equal", kind, tower, flush=True)


def ask(llm: Any, kind: str, tower: str) -> tuple[Answers, Answers]:
    """Return what the engine answers in words, and about pictures, one request after the other."""
    import numpy as np
    from PIL import Image
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, logprobs=1, detokenize=False)

    def answer(prompt: dict[str, Any]) -> list[tuple[int, float]]:
        output = llm.generate([prompt], sampling, use_tqdm=False)[0].outputs[0]
        return [(t, entry[t].logprob) for t, entry in zip(output.token_ids, output.logprobs, strict=True)]

    words = [answer({"prompt_token_ids": prompt}) for prompt in WORDS]
    pictures = []
    for seed in (1, 2) if tower == "tower" else ():
        picture = Image.fromarray(np.random.default_rng(seed).integers(0, 255, (112, 112, 3), dtype=np.uint8))
        question = {"prompt": PROMPTS.get(kind, QWEN_PROMPT), "multi_modal_data": {"image": picture}}
        pictures.append(answer(question))
    return words, pictures


if __name__ == "__main__":
    main(*sys.argv[1:])
