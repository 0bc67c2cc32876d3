"""Prove pushes of vision-language models: `python vision_pushes.py KIND:tower|left-out|adapters|merged|text|sleep...`.

The engines are asked in words and about pictures. Each answer to pushed weights has to be that of an engine which was
started cold from them, to the bit.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import subprocess
import sys
import tempfile
import zlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import zygote
from engine_state import State, differing, state_of
from engines import EXTENSION, GRAPHS, LINEAR_ATTENTION, NOT_COMPILED
from torch import nn
from vision_models import PROMPTS, QWEN_PROMPT, make_vision_model

Answers = list[list[tuple[int, float]]]
WORDS = ([5, 6, 7, 8], [40, 41], list(range(20, 60)))
HERE = Path(__file__).parent
TORCHVISION = Path(sys.prefix, "torchvision")
"""Where `make` puts torchvision on a machine without a GPU, as it loads with `torchvision_python` alone."""


def run(*cases: str) -> None:
    """Prove it in a process of its own, whose memory is free afterwards. A case is "KIND:tower", "KIND:left-out",
    "KIND:adapters", "KIND:merged", "KIND:text" or "KIND:sleep"."""
    path = [HERE, HERE.parents[1]]
    if not find_spec("torchvision"):
        if not TORCHVISION.exists():
            pytest.skip(f"transformers reads pictures with torchvision, which `make` puts into {TORCHVISION}")
        path += [HERE / "torchvision_python", TORCHVISION]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, path), os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
        **NOT_COMPILED,
    }
    if not torch.cuda.is_available():
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process imports vLLM, not two
        environment.pop("VLLM_CPU_KVCACHE_SPACE", None)  # whole GiB, which take longer to clear than all else to start
    command = [sys.executable, __file__, *cases]
    with zygote.forking(False):  # the zygote has imported transformers, which found no torchvision
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=570)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert [line for line in done.stdout.splitlines() if line.startswith("equal")] == [
        f"equal {case}" for case in cases
    ]


def prove(kind: str, has_tower: bool, folder: Path) -> None:
    from weightsync import TensorSelection, UnsupportedError, WeightSync

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = make_vision_model(kind, folder, device)
    if device.type == "cpu":
        model.share_memory()
    cold = {}
    state: State = {}
    llm: Any = None
    for weights in "BA":
        end(llm)
        llm = None
        fill(model, weights)
        model.save_pretrained(folder)
        if kind == "gemma3":  # tied, and its head is stored all the same
            store_head(folder / "model.safetensors")
        llm = start(kind, has_tower, folder)
        cold[weights] = ask(llm, kind, has_tower)
    assert cold["A"] != cold["B"]
    if has_tower:  # the pushes make up for all that a start with random weights has overwritten
        state = state_of_live(llm)
        end(llm)
        llm = start(kind, has_tower, folder, load_format="dummy")
        without = TensorSelection(exclude=["*visual.*", "*vision_tower.*"], keep=["vis*"])
        refused = pytest.raises(UnsupportedError, match='load_format="dummy" made it up')
        with WeightSync("fsdp", "ipc", llm, selection=without) as sync, refused:
            sync.push(model)

    told = Told()
    logging.getLogger("weightsync").addHandler(told)
    with WeightSync("fsdp", "ipc", llm, selection=TensorSelection(only_trained=True)) as sync:
        for weights in "ABBA":  # two of them are planned before
            fill(model, weights)
            sync.push(model)
            assert ask(llm, kind, has_tower) == cold[weights], f"after {weights}"
        if has_tower:
            assert differing(state_of_live(llm), state) == []
            words, pictures = cold["A"]
            fill(model, "B", only="vis")
            sync.push(model)
            mixed = ask(llm, kind, has_tower)
            assert mixed[0] == words, "the tower alone was trained, and words are answered otherwise"
            assert mixed[1] != pictures, "the tower alone was trained, and pictures look as before"

            for name, param in model.named_parameters():
                param.requires_grad_("vis" not in name)
            sync.push(model)
            fill(model, "B")
            trained = [param for param in model.parameters() if param.requires_grad]
            assert sync.push(model).nbytes == sum(param.numel() * param.itemsize for param in trained)
            assert ask(llm, kind, has_tower) == cold["B"], "with the tower frozen"
        else:
            assert len(told.lines) == 1, told.lines
    logging.getLogger("weightsync").removeHandler(told)
    end(llm)


def prove_adapters(kind: str, folder: Path) -> None:
    """An adapter acts under the names of the whole model, and one of a text model is refused: vLLM would bind none."""
    import peft
    from transformers import AutoModelForCausalLM

    from weightsync import UnsupportedError, WeightSync

    model = make_vision_model(kind, folder, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    text = AutoModelForCausalLM.from_config(model.config.text_config, dtype=torch.bfloat16).to(model.device)
    config = peft.LoraConfig(r=8, target_modules=r"model\.(language_model\.)?layers\..*\.(q|down)_proj")
    whole, alone = (peft.get_peft_model(one, config) for one in (model, text))
    for name, param in (*whole.named_parameters(), *alone.named_parameters()):
        if "lora_B" in name:
            nn.init.normal_(param, std=0.1)
    whole.save_pretrained(folder / "adapter", save_embedding_layers=False)
    llm = start(kind, False, folder, enable_lora=True, max_loras=1, max_lora_rank=8)
    base = ask(llm, kind, False)
    cold = ask(llm, kind, False, ("saved", 7, str(folder / "adapter")))
    assert cold != base
    with WeightSync("fsdp", "lora", llm) as sync:
        with pytest.raises(UnsupportedError, match=r"4 modules .* would have no effect") as raised:
            sync.push(alone)
        assert raised.value.adapter_modules[0] == "model.layers.0.mlp.down_proj"
        assert "language_model.model.layers.0.mlp.down_proj" in raised.value.engine_modules
        assert ask(llm, kind, False) == base
        sync.push(whole)
        assert ask(llm, kind, False, sync.adapter) == cold
    end(llm)


def prove_merged(kind: str, folder: Path) -> None:
    """Adapters on the tower's convolution and on layers of the text model are merged as they travel."""
    import peft

    from weightsync import WeightSync

    model = make_vision_model(kind, folder, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    llm = start(kind, True, folder)
    base = ask(llm, kind, True)
    targets = r".*(patch_embed\.proj|layers\.\d+\.self_attn\.q_proj)"
    trained: Any = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=targets))
    for name, param in trained.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param, std=0.1)
    with WeightSync("fsdp", "ipc", llm) as sync:
        for _ in range(2):
            sync.push(trained)
        pushed = ask(llm, kind, True)
    end(llm)
    trained.merge_and_unload().save_pretrained(folder)
    llm = start(kind, True, folder)
    assert pushed == ask(llm, kind, True)
    assert all(now != before for now, before in zip(pushed, base, strict=True)), "words and pictures"
    end(llm)


RENAME, KEEP = {r"^model\.": "model.language_model."}, ["vision_tower.*", "multi_modal_projector.*"]


def prove_text(kind: str, folder: Path) -> None:
    """A trainer of the text model alone leaves the engine's tower as the checkpoint has it."""
    from weightsync import ManifestError, TensorSelection, WeightSync

    text, cold, llm = text_and_answers(kind, folder)
    with WeightSync("fsdp", "ipc", llm, selection=TensorSelection(rename=RENAME)) as sync:
        with pytest.raises(ManifestError, match=r"vision_tower.*TensorSelection\(keep=...\)"):
            sync.push(text)
        assert ask(llm, kind, True) == cold["A"]
    with WeightSync("fsdp", "ipc", llm, selection=TensorSelection(rename=RENAME, keep=KEEP)) as sync:
        for _ in range(2):
            sync.push(text)
            assert ask(llm, kind, True) == cold["B"]
    end(llm)


def text_and_answers(kind: str, folder: Path, **options: Any) -> tuple[nn.Module, dict[str, Any], Any]:
    """Return the text model of the weights B, the answers of the text models A and B beside one tower, and the engine
    of A."""
    from transformers import AutoModelForCausalLM

    model = make_vision_model(kind, folder, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    text = AutoModelForCausalLM.from_config(model.config.text_config, dtype=torch.bfloat16).to(model.device)
    cold = {}
    for weights in "BA":
        fill(model, "A")
        fill(model, weights, only="language_model")
        model.save_pretrained(folder)
        llm = start(kind, True, folder, **options)
        cold[weights] = ask(llm, kind, True)
        if weights == "B":
            end(llm)
    assert cold["A"] != cold["B"]
    trained = {name.replace("model.language_model.", "model."): param for name, param in model.named_parameters()}
    fill(model, "B", only="language_model")
    with torch.no_grad():
        for name, param in text.named_parameters():
            param.copy_(trained[name])
    return text, cold, llm


def prove_sleep(kind: str, folder: Path) -> None:
    """A tower that outlives sleep is kept, and one that sleep has discarded is missed, until vLLM has reloaded it."""
    from vllm.platforms import current_platform as platform

    from weightsync import TensorSelection, UnsupportedError, WeightSync

    if not torch.cuda.is_available():
        platform.is_sleep_mode_available = platform.is_cumem_allocator_available = lambda: True
    selection, plug_in = TensorSelection(rename=RENAME, keep=KEEP), {"backend": "weightsync"}
    text, cold, llm = text_and_answers(kind, folder, enable_sleep_mode=True, weight_transfer_config=plug_in)
    sleep(llm, 1)
    with WeightSync("fsdp", "ipc", llm, selection=selection, timeout_s=60.0) as sync:
        sync.push(text)
        assert ask(llm, kind, True) == cold["B"], "after sleep of level 1"
        sleep(llm, 1)
        sync.push(text)
        assert ask(llm, kind, True) == cold["B"], "after sleep of level 1 between pushes"
        sleep(llm, 2)
        for _ in range(2):
            with pytest.raises(UnsupportedError, match=r"vision_tower.*sleep\(level=2\).*reload_weights"):
                sync.push(text)
        llm.collective_rpc("reload_weights")
        sync.push(text)
        assert ask(llm, kind, True) == cold["B"], "reloaded after sleep of level 2"
    end(llm)
    for sleeps_first in (False, True):
        llm = start(kind, True, folder, enable_sleep_mode=True)
        if sleeps_first:
            sleep(llm, 1)
        with WeightSync("fsdp", "ipc", llm, selection=selection, timeout_s=60.0) as sync:
            if sleeps_first:
                with pytest.raises(UnsupportedError, match="slept before weightsync noted them"):
                    sync.push(text)
            else:
                sync.push(text)
                sleep(llm, 1)
                sync.push(text)
                assert ask(llm, kind, True) == cold["B"], "with the worker extension"
        end(llm)


def sleep(llm: Any, level: int) -> None:
    """Let an engine sleep and wake up. A CPU's worker ignores both, so do to it what they do on a GPU."""
    if torch.cuda.is_available():
        llm.sleep(level)
        llm.wake_up()
        return
    worker = llm.llm_engine.model_executor.driver_worker.worker
    assert worker.sleep_mode_backend is not None  # made at the first use, as by a GPU's worker
    for param in worker.model_runner.model.parameters() if level == 2 else ():
        param.data.zero_()


def store_head(file: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    head = tensors["language_model.model.embed_tokens.weight"].clone()
    save_file(tensors | {"language_model.lm_head.weight": head}, file, {"format": "pt"})


class Told(logging.Handler):
    """What is said of tensors that stay behind."""

    def __init__(self) -> None:
        super().__init__("INFO")
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "are not loaded" in record.getMessage():
            self.lines.append(record.getMessage())


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


def state_of_live(llm: Any) -> State:
    """Return what the engine's model holds, or nothing on a GPU, where it is in a process of its own."""
    executor = getattr(llm.llm_engine, "model_executor", None)
    return {} if executor is None else state_of(executor.driver_worker.worker.model_runner.model)


def start(kind: str, has_tower: bool, folder: Path, **more: Any) -> Any:
    from vllm import LLM

    options: dict[str, Any] = {**GRAPHS, "additional_config": LINEAR_ATTENTION}
    if not torch.cuda.is_available():
        from engines import know_class
        from vllm.platforms import current_platform as platform

        know_class(folder)
        # It looks through all that is imported, and the engines that follow find done what the first one did.
        platform.register_triton_kernel_overrides = functools.cache(platform.register_triton_kernel_overrides)
        options = {"enforce_eager": True}
    gc.collect()
    zygote.freeze()  # vLLM collects garbage often as it starts and ends, and would look through all that is imported
    return LLM(
        str(folder), dtype="bfloat16", max_model_len=512, max_num_seqs=4, kv_cache_memory_bytes=64 << 20,
        gpu_memory_utilization=0.1, enable_prefix_caching=False, seed=0,
        limit_mm_per_prompt={"image": int(has_tower)} | ({} if kind == "gemma3" else {"video": 0}),
        **({} if "weight_transfer_config" in more else EXTENSION), **options, **more,
    )  # fmt: skip


def end(llm: Any) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    if llm is not None:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()
    gc.collect()


def ask(llm: Any, kind: str, has_tower: bool, adapter: Any = None) -> tuple[Answers, Answers]:
    """Return what the engine answers in words, and about pictures, one request after the other."""
    import numpy as np
    from PIL import Image
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    request = None if adapter is None else LoRARequest(*adapter)
    sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=1, detokenize=False)

    def answer(prompt: dict[str, Any]) -> list[tuple[int, float]]:
        output = llm.generate([prompt], sampling, use_tqdm=False, lora_request=request)[0].outputs[0]
        return [(t, entry[t].logprob) for t, entry in zip(output.token_ids, output.logprobs, strict=True)]

    words = [answer({"prompt_token_ids": prompt}) for prompt in WORDS]
    pictures = []
    for seed in (1, 2) if has_tower else ():
        picture = Image.fromarray(np.random.default_rng(seed).integers(0, 255, (112, 112, 3), dtype=np.uint8))
        question = {"prompt": PROMPTS.get(kind, QWEN_PROMPT), "multi_modal_data": {"image": picture}}
        pictures.append(answer(question))
    return words, pictures


if __name__ == "__main__":
    gc.freeze = gc.unfreeze = lambda: None  # vLLM thaws as an engine ends
    gc.set_threshold(50_000)
    logging.getLogger("weightsync").setLevel("INFO")
    for case in sys.argv[1:]:
        kind, tower = case.split(":")
        with tempfile.TemporaryDirectory() as root:
            if tower == "adapters":
                prove_adapters(kind, Path(root, kind))
            elif tower == "merged":
                prove_merged(kind, Path(root, kind))
            elif tower == "text":
                prove_text(kind, Path(root, kind))
            elif tower == "sleep":
                prove_sleep(kind, Path(root, kind))
            else:
                prove(kind, tower == "tower", Path(root, kind))
        print("equal", case, flush=True)
