"""Adapters alone: a real engine answers as one that loaded what PEFT has saved."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tiny_models
import torch
import zero
from engines import (
    PROMPTS,
    TIMEOUT_S,
    Answer,
    Engines,
    PipeEngine,
    Remote,
    Trainer,
    Trainers,
    answer_of,
    assert_same,
)
from test_lora import fill_adapters, wrapped
from test_lora_transport import KINDS

from weightsync import ConfigError, LoraTransport, TensorSelection, UnsupportedError, WeightSync

pytest_plugins = ["engine_fixtures"]
pytestmark = pytest.mark.engine


OPTIONS = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}


def ask(engines: Engines, adapter: Any = None) -> Answer:
    from vllm.lora.request import LoRARequest

    request = None if adapter is None else LoRARequest(*adapter)
    outputs = [
        engines.llm.generate([{"prompt_token_ids": prompt}], engines.sampling(8), use_tqdm=False, lora_request=request)
        for prompt in PROMPTS
    ]
    return [answer_of(output) for (output,) in outputs]


def cold(engines: Engines, folder: Path, kinds: Iterable[str], tp: int) -> dict[str, Answer]:
    """What an engine of the weights "B" answers that has loaded what PEFT has saved; then one of "A" runs."""
    found: dict[str, Answer] = {}
    for base in "BA":
        engines.start(engines.checkpoint("qwen3", base), tensor_parallel_size=tp, **OPTIONS)
        engines._running = ()
        found[base] = ask(engines)
        for number, kind in enumerate(kinds):
            for weights in "AB":
                saved = folder / f"{kind}-{weights}"
                if base == "B":
                    model = wrapped(kind)
                    fill_adapters(model, weights)
                    model.save_pretrained(saved, save_embedding_layers=False)
                found[base + kind + weights] = ask(engines, (str(saved), 1 + 2 * number + (weights == "B"), str(saved)))
    return found


def push(engines: Engines, kind: str) -> dict[str, Answer]:
    """What the engine answers after a push of adapter A and one of adapter B, and then with each and with none."""
    model = wrapped(kind)
    found: dict[str, Answer] = {}
    engines.sync = WeightSync("fsdp", "lora", engines.llm, timeout_s=TIMEOUT_S)
    adapters = {}
    for weights in "AB":
        fill_adapters(model, weights)
        engines.sync.push(model)
        adapters[weights] = engines.sync.adapter
        found[weights] = ask(engines, adapters[weights])
    found |= {weights + " again": ask(engines, adapters[weights]) for weights in "AB"}
    found["base"] = ask(engines)
    engines.release()
    assert not engines.llm.llm_engine.list_loras()
    return found


class AdapterPipe(PipeEngine):
    """An `AdapterEngine` for a trainer in another process than its `LLM`."""

    max_lora_rank, load_adapter, unload_adapter, has_adapter, adapters_in_use = (
        partialmethod(PipeEngine._call, method)
        for method in ("max_lora_rank", "load_adapter", "unload_adapter", "has_adapter", "adapters_in_use")
    )


def connect_zero(trainer: Trainer, kind: str) -> None:
    trainer.model = zero.initialize(wrapped(kind), zero.config(3))
    engine = AdapterPipe(trainer.calls) if trainer.calls is not None else None
    trainer.sync = WeightSync("deepspeed", "lora", engine, timeout_s=TIMEOUT_S)


def push_zero(trainer: Trainer, weights: str) -> Any:
    with zero.to_fill(trainer.model):
        fill_adapters(trainer.model, weights)
    trainer.sync.push(trainer.model)
    return trainer.sync.adapter


def end_zero(trainer: Trainer) -> None:
    engine = trainer.model
    trainer.release()
    engine.destroy()


def push_while_a_request_runs(engines: Engines) -> Answer:
    """What a request is answered that began with adapter A, in an engine with room for one adapter, which then gets
    B, C and D."""
    from vllm.lora.request import LoRARequest

    model = wrapped("linear")
    engine = engines.llm.llm_engine
    with WeightSync("fsdp", LoraTransport(keep_last=1), engines.llm, timeout_s=TIMEOUT_S) as sync:
        sync.push(model)
        first = sync.adapter
        prompt = {"prompt_token_ids": PROMPTS[0]}
        engine.add_request("running", prompt, engines.sampling(8), lora_request=LoRARequest(*first))
        for weights in "BCD":
            engine.step()
            fill_adapters(model, weights)
            sync.push(model)
            assert Path(first.path).exists()
        while not (outputs := [output for output in engine.step() if output.finished]):
            pass
        sync.push(model)
        sync.push(model)
        assert not Path(first.path).exists()
    return [answer_of(outputs[0])]


def push_base_beside(engines: Engines) -> dict[str, Answer]:
    """An adapter, then the weights "B" of the base under it, which trains as well, and the adapter once more."""
    model = wrapped("linear")
    model.base_model.model.model.norm.weight.requires_grad_(True)
    with (
        WeightSync("fsdp", LoraTransport(base_is_pushed=True), engines.llm, timeout_s=TIMEOUT_S) as adapters,
        WeightSync("fsdp", "ipc", engines.llm, timeout_s=TIMEOUT_S) as weights,
    ):
        adapters.push(model)
        asked = ask(engines, adapters.adapter)
        base = model.base_model.model
        with model.disable_adapter(), torch.no_grad():
            for name, tensor in tiny_models.build("qwen3", "B").named_parameters():
                path, _, last = name.rpartition(".")
                module = base.get_submodule(path)
                getattr(getattr(module, "base_layer", module), last).copy_(tensor)
            weights.push(model)
        found = {"before": asked, "base": ask(engines), "adapter": ask(engines, adapters.adapter)}
        adapters.push(model)
        return found | {"pushed again": ask(engines, adapters.adapter)}


def refuse(engines: Engines) -> None:
    with WeightSync("fsdp", "lora", engines.llm, timeout_s=TIMEOUT_S) as sync:
        with pytest.raises(ConfigError, match="rank 16, and the engine takes at most 8"):
            sync.push(wrapped("linear", r=16))
        sync.push(wrapped("linear"))


class Policy(torch.nn.Module):
    """A module of a user's own that holds the model."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.policy = model


UNBOUND = {
    "backbone": (lambda model: model.model, "layers.0.mlp.down_proj"),
    "wrapped": (Policy, "policy.model.layers.0.mlp.down_proj"),
}


def refuse_unbound(engines: Engines) -> None:
    """Adapters of whose modules vLLM binds none, without a word. Nothing of them stays in the engine."""
    import peft

    config = peft.LoraConfig(r=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    before = engines.llm.llm_engine.list_loras()
    for wrap, first in UNBOUND.values():
        model = peft.get_peft_model(wrap(tiny_models.build("qwen3", "A")), config)
        with WeightSync("fsdp", "lora", engines.llm, timeout_s=TIMEOUT_S) as sync:
            with pytest.raises(UnsupportedError, match=r"4 modules .* would have no effect") as raised:
                sync.push(model)
            assert sync.adapter is None
        assert raised.value.adapter_modules[0] == first
        assert "model.layers.0.self_attn.q_proj" in raised.value.engine_modules
        assert engines.llm.llm_engine.list_loras() == before
    # Under the engine's names it acts.
    whole = tiny_models.build("qwen3", "A")
    answers = []
    for inner, rename in ((whole.model, {r"^": "model."}), (whole, None)):
        torch.manual_seed(0)
        model = peft.get_peft_model(inner, config)
        with WeightSync(
            "fsdp", "lora", engines.llm, timeout_s=TIMEOUT_S, selection=TensorSelection(rename=rename)
        ) as sync:
            sync.push(model)
            answers.append(ask(engines, sync.adapter))
        model.unload()
    assert answers[0] != ask(engines)
    assert_same(answers[0], answers[1], "an adapter of the backbone under the engine's names")


def find_bound(engines: Engines, folder: Path) -> None:
    """What a worker says of adapters, of what it has loaded, and under rules that leave modules out."""
    from vllm.model_executor.models.utils import WeightsMapper

    from weightsync.net.wire import NEWEST, NOT_LOADED
    from weightsync.vllm.adapters import adapter_modules

    path = str(folder / "linear-A")
    names = ["self_attn.q_proj", "mlp.down_proj"]
    worker = engines.llm.llm_engine.model_executor.driver_worker.worker
    manager, model = worker.model_runner.lora_manager._adapter_manager, engines.live_model()
    nothing = {"unbound": [], "twice": [], "modules": [], "error": ""}
    ask(engines, ("bound", 77, path))
    for number in (NOT_LOADED, 77, NEWEST, 78):
        assert adapter_modules(worker, path, number) == nothing
    # A CPU has no layer for adapters on experts. A stand-in has its name, and starts as one for single experts.
    single = type("FusedMoEWithLoRA", (), {})()
    with mock.patch.dict(manager.modules, {"model.layers.1.mlp.down_proj": single}):
        refusal = adapter_modules(worker, path, NOT_LOADED)["error"]
        assert "model.layers.1.mlp.down_proj for each expert alone" in refusal
        with mock.patch.object(manager.lora_config, "enable_mixed_moe_lora_format", True, create=True):
            assert adapter_modules(worker, path, NOT_LOADED) == nothing
    loras = manager.get_adapter(77).loras
    loras["model.layers.0.self_attn.qkv_proj"].lora_a[0] = None  # q, of q, k and v
    del loras["model.layers.1.mlp.down_proj"]
    unbound = ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"]
    for number in (77, NEWEST):
        assert sorted(adapter_modules(worker, path, number)["unbound"]) == unbound
    assert adapter_modules(worker, path, NOT_LOADED) == nothing
    engines.llm.llm_engine.remove_lora(77)
    renamed = model.hf_to_vllm_mapper if hasattr(model, "hf_to_vllm_mapper") else None
    try:
        model.lora_skip_prefixes = ["model.layers.1."]
        found = adapter_modules(worker, path, NOT_LOADED)["unbound"]
        assert found
        assert all(name.startswith("model.layers.1.") for name in found)
        model.lora_skip_prefixes = None
        model.hf_to_vllm_mapper = WeightsMapper(orig_to_new_prefix={"model.layers.1.": "model.layers.0."})
        found = adapter_modules(worker, path, NOT_LOADED)["twice"]
        assert {f"model.layers.{layer}.{name}" for layer in (0, 1) for name in names} <= {*found}
    finally:
        del model.lora_skip_prefixes
        del model.hf_to_vllm_mapper
        if renamed is not None:
            model.hf_to_vllm_mapper = renamed
    assert "no such file" in adapter_modules(worker, str(folder / "nowhere"), NOT_LOADED)["error"].lower()


def refuse_experts(engines: Engines) -> None:
    """No engine with adapters on experts starts on a CPU, so a layer of another kind stands for them."""
    from vllm.lora.layers import BaseLayerWithLoRA

    from weightsync.vllm.compat import without_lora

    live = engines.live_model()
    plain = without_lora(live)
    names = [name for name, _ in plain.named_parameters()]
    assert len(names) == len(list(live.named_parameters()))
    assert not [name for name in names if "base_layer" in name]
    name = "model.layers.0.self_attn.o_proj"
    assert plain.get_submodule(name) is live.get_submodule(f"{name}.base_layer")
    experts = BaseLayerWithLoRA()
    experts.base_layer = torch.nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match=r"model\.1, a Linear with adapters"):
        without_lora(torch.nn.Sequential(torch.nn.Identity(), experts))


def check_pushes(engines: Remote, expected: dict[str, Answer], kinds: Iterable[str]) -> None:
    for kind in kinds:
        found = engines.call(push, kind)
        assert expected["A"] != expected["A" + kind + "A"] != expected["A" + kind + "B"]
        for weights in "AB":
            assert_same(found[weights], expected["A" + kind + weights], f"{kind} {weights}")
            assert_same(found[weights + " again"], expected["A" + kind + weights], f"{kind} {weights} again")
        assert_same(found["base"], expected["A"], "the base")
    found = engines.call(push_base_beside)
    assert_same(found["before"], expected["AlinearA"], "the adapter over the old base")
    assert_same(found["base"], expected["B"], "the new base")
    for which in ("adapter", "pushed again"):
        assert_same(found[which], expected["BlinearA"], f"the {which} over the new base")


def test_a_real_engine_answers_as_one_that_loaded_what_peft_saved(engines: Remote, trainers: Trainers, tmp_path: Path):
    expected = engines.call(cold, tmp_path, KINDS, 1, timeout_s=240)
    assert_same(engines.call(push_while_a_request_runs), expected["AlinearA"][:1], "the request that ran")
    engines.call(refuse)
    engines.call(refuse_unbound)
    engines.call(find_bound, tmp_path)
    engines.call(refuse_experts)
    trainers.call(connect_zero, "linear")
    for weights in "AB":
        adapter = trainers.call(push_zero, weights)[0]
        assert_same(engines.call(ask, adapter), expected["Alinear" + weights], f"{weights} of two ranks under ZeRO-3")
    trainers.call(end_zero)
    check_pushes(engines, expected, KINDS)


def test_two_workers_share_an_adapter_out(engines: Remote, tmp_path: Path):
    expected = engines.call(cold, tmp_path, ["linear"], 2, timeout_s=240)
    check_pushes(engines, expected, ["linear"])
