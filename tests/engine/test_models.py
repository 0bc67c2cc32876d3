"""The families of models that people train: pushed equals cold for each, and `docs/evidence/families.md` says so.

The document is what this module found. A run of all of it fails when the document says something else; to write it:

    WEIGHTSYNC_WRITE_DOCS=1 python -m pytest tests/engine/test_models.py
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import tiny_models
import torch
from engines import (
    TIMEOUT_S,
    Engines,
    Remote,
    Trainer,
    Trainers,
    VllmRemote,
    assert_same,
    has_plug_ins,
    know_class,
    sleep_mode,
)

from weightsync import PushReport, WeightSync
from weightsync.errors import UnsupportedError
from weightsync.planning.layout import LoadCopy, Manifest, coverage
from weightsync.selection import TensorSelection
from weightsync.sources.fsdp import FsdpSource

pytest_plugins = ["engine_fixtures"]
pytestmark = pytest.mark.engine

DOCUMENT = Path(__file__).parents[2] / "docs/evidence/families.md"


@dataclass(frozen=True)
class Family:
    """`experts`: its layers have some, which transformers keeps fused and checkpoints do not."""

    title: str
    notes: str = ""
    experts: bool = False


FAMILIES = {
    "llama2": Family("Llama 2"),
    "llama3": Family("Llama 3, 3.1", "`llama3` rope scaling"),
    "llama-tied": Family("Llama 3.2", "tied embeddings"),
    "yi": Family("Yi", "Llama-shaped; one key and value head"),
    "deepseek-coder": Family("DeepSeek-Coder", "Llama-shaped; linear rope scaling"),
    "mistral": Family("Mistral"),
    "mixtral": Family("Mixtral", experts=True),
    "qwen2": Family("Qwen2"),
    "qwen2.5": Family("Qwen2.5", "a Qwen2 with tied embeddings"),
    "qwen2-moe": Family("Qwen2-MoE", "shared expert with a gate", experts=True),
    "qwen3": Family("Qwen3"),
    "qwen3-tied": Family("Qwen3, small", "tied embeddings"),
    "qwen3-moe": Family("Qwen3-MoE", "one key and value head, which both workers of TP=2 hold", experts=True),
    "qwen3-next": Family("Qwen3-Next", "layers of linear attention; shared expert", experts=True),
    "phi2": Family("Phi-2"),
    "phi3": Family("Phi-3, Phi-4", "query, key and value fused in the checkpoint, gate and up too"),
    "gemma": Family("Gemma"),
    "gemma2": Family("Gemma 2", "vocabulary that the workers pad"),
    "gemma3": Family("Gemma 3, text"),
    "deepseek-v2": Family("DeepSeek-V2", "MLA, shared expert", experts=True),
    "deepseek-v3": Family("DeepSeek-V3, R1", "MLA, expert bias", experts=True),
    "glm4-moe": Family("GLM-4.5", "expert bias, shared expert", experts=True),
    "starcoder2": Family("StarCoder2"),
    "olmo2": Family("OLMo 2"),
    "smollm3": Family("SmolLM3"),
    "granite": Family("Granite"),
    "gpt-oss": Family("GPT-OSS", "attention sinks; experts fused in the checkpoint", experts=True),
    "bloom": Family("BLOOM", "ALiBi; tied embeddings"),
    "apertus": Family("Apertus", "xIELU, whose constructor computes"),
}
# The most used, and those whose loader does something else for two workers: a fused checkpoint, a vocabulary with
# padding, MLA. Qwen3 and Qwen3-MoE are in test_push_equals_cold.py, over all transports.
TWO_WORKERS = ["llama2", "llama-tied", "mistral", "qwen2", "phi3", "gemma2", "deepseek-v2"]
ELSEWHERE = ["qwen3", "qwen3-moe"]
SERVED = [*((model, 1) for model in FAMILIES), *((model, 2) for model in TWO_WORKERS)]


@dataclass
class Found:
    """What this run found out about a family."""

    engine: str = ""
    load_paths: str = ""
    equal: set[int] = field(default_factory=set)  # numbers of workers with which pushed equalled cold
    planned: bool = False


FOUND = {model: Found() for model in FAMILIES}


# ---------------------------------------------------------------------------------------------------------------
# Real engines


WAYS: list[tuple[str, dict[str, Any]]] = [("broadcast", {"bucketer": "module", "max_bytes": 1 << 14}), ("ipc", {})]


def connect(
    trainer: Trainer, model: str, transport: str, options: dict[str, Any], checkpoint: Path | None = None
) -> None:
    """A trainer of `model`, or with the tensors of a checkpoint under the checkpoint's own names."""
    from torch.distributed.fsdp import fully_shard

    trainer.release()
    if checkpoint is None:
        trainer.model = tiny_models.shard(tiny_models.build(model, "A"))
    else:
        trainer.model = fully_shard(tiny_models.as_saved(checkpoint))
    trainer.sync = WeightSync("fsdp", transport, trainer.engine, timeout_s=TIMEOUT_S, **options)


def push(trainer: Trainer, weights: str | None = None) -> PushReport:
    if weights is not None:
        tiny_models.fill(trainer.model, weights)
    return trainer.sync.push(trainer.model)


def live_class(engines: Engines) -> str:
    return type(engines.live_model()).__name__


@pytest.mark.parametrize(("model", "tp"), SERVED, ids=[f"{model}-tp{tp}" for model, tp in SERVED])
def test_pushed_equals_cold(engines: Remote, trainers: Trainers, model: str, tp: int):
    cold = engines.call(Engines.serve, model, tp, timeout_s=240)
    assert cold["A"] != cold["B"]
    for transport, options in WAYS:
        trainers.call(connect, model, transport, options)
        for weights in "BA":
            report, *_ = trainers.call(push, weights)
            assert_same(engines.call(Engines.ask), cold[weights], f"push of {weights} over {transport}")
    if tp == 1:
        assert engines.call(Engines.odd_state) == [], "what the engine's modules hold"
    if FAMILIES[model].experts:
        trainers.call(connect, model, "ipc", {}, engines.call(Engines.checkpoint, model, "B"))
        trainers.call(push)
        assert_same(engines.call(Engines.ask), cold["B"], "from a trainer that names each expert")
    FOUND[model].equal.add(tp)
    if tp == 1:
        FOUND[model].engine = engines.call(live_class)
        counts = {path.replace("_", " "): count for path, count in report.load_paths.items() if count}
        FOUND[model].load_paths = ", ".join(f"{count} {path}" for path, count in counts.items())


def balance_experts(engines: Engines, is_balanced: bool) -> None:
    """Say what vLLM itself refuses on a CPU."""
    worker = engines.llm.llm_engine.model_executor.driver_worker.worker
    worker.vllm_config.parallel_config.enable_eplb = is_balanced


def keep_what_a_forward_makes(engines: Engines, attribute: str, value: object) -> None:
    """Let a layer look like one of GLM-5 Next, which vLLM runs on GPUs alone, and the like."""
    state = vars(engines.live_model().model.layers[0].self_attn)
    for name in ("_merged_conv_weight", "_fse_fuse_gate", "specialized_decode_config"):
        state.pop(name, None)
    state[attribute] = value


def load_from(engines: Engines, load_format: str) -> None:
    worker = engines.llm.llm_engine.model_executor.driver_worker.worker
    worker.vllm_config.load_config.load_format = load_format


def know_older_releases(engines: Engines) -> None:
    """Stand in for runners and schedulers of releases that are not installed."""
    from weightsync.vllm import compat

    drafter = torch.nn.Linear(1, 1)
    for name in ("drafter", "speculator"):  # before 0.26, by the generation of the model runner
        runner = SimpleNamespace(drafter=None) if name == "speculator" else SimpleNamespace()
        setattr(runner, name, SimpleNamespace(model=drafter))
        assert compat.drafter_of(SimpleNamespace(model_runner=runner)) is drafter
    for release, is_async, drops in (((0, 21), True, True), ((0, 21), False, False), ((0, 22), True, False)):
        config: Any = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=is_async))
        with mock.patch.object(compat, "release", return_value=release):
            assert compat.drops_a_token(config) == drops


def test_older_releases_are_known(engines: Remote):
    engines.call(know_older_releases)


class StagedAttention(torch.nn.Module):
    """KDA on AMD: its hook stages the weight of another module."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1d = torch.nn.Linear(2, 3, bias=False)
        self.register_buffer("decode_conv1d_weight", torch.zeros(2, 3), persistent=False)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        self.decode_conv1d_weight.copy_(self.conv1d.weight.t())


def stage_weights(engines: Engines) -> None:
    from weightsync.vllm import compat

    layer = StagedAttention()
    with torch.no_grad():
        for attention in compat.post_processed_attention(torch.nn.Sequential(layer)):
            compat.call_attention_hook(attention, torch.float32)
    assert torch.equal(layer.decode_conv1d_weight, layer.conv1d.weight.t())


def test_an_attention_layers_staged_weights_are_found(engines: Remote):
    engines.call(stage_weights)


def fill_buffers_as_at_a_dummy_start(engines: Engines) -> tuple[set[str], set[str]]:
    """Return the buffers filled by vLLM's dummy loader, and the buffers that a push then brings back."""
    from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight

    from weightsync.vllm.dummy_start import overwritten_buffers

    model = torch.nn.Module()
    for dtype in ("float32", "bfloat16", "float8_e4m3fn", "int8", "uint8", "int32", "int64", "bool"):
        model.register_buffer(f"of_{dtype}", torch.ones(64).to(getattr(torch, dtype)))
    buffers = dict(model.named_buffers())
    before = {name: buffer.tolist() for name, buffer in buffers.items()}
    for buffer in buffers.values():
        initialize_single_dummy_weight(buffer)
    changed = {name for name, buffer in buffers.items() if buffer.tolist() != before[name]}
    return changed, set(overwritten_buffers(model))


def test_all_buffers_that_a_dummy_start_fills_are_brought_back(engines: Remote):
    changed, found = engines.call(fill_buffers_as_at_a_dummy_start)
    assert changed | {"of_int8", "of_uint8"} == found  # before vLLM 0.33 integers stay


def test_what_no_push_can_renew_is_refused(engines: Remote, trainers: Trainers):
    checkpoint = engines.call(Engines.checkpoint, "qwen3-moe", "A")
    engines.call(Engines.start, checkpoint, timeout_s=240)
    engines.call(balance_experts, True)
    trainers.call(connect, "qwen3-moe", "ipc", {})
    with pytest.raises(UnsupportedError, match="vLLM's loader fills the first slots"):
        trainers.call(push, "B")
    engines.call(balance_experts, False)
    engines.call(load_from, "ipc_cache")
    with pytest.raises(UnsupportedError, match="the parameters are another process's memory"):
        trainers.call(push, "B")
    engines.call(load_from, "auto")
    kept = {
        "_merged_conv_weight": (None, r"checkpoint \["),
        "_fse_fuse_gate": (True, "without VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS"),
        "specialized_decode_config": ("settings", "without decode_backend"),
    }
    for attribute, (value, way_out) in kept.items():
        engines.call(keep_what_a_forward_makes, attribute, value)
        with pytest.raises(UnsupportedError, match=rf"once, by \w+\.{attribute}, and.*{way_out}"):
            trainers.call(push, "B")
    assert engines.call(Engines.refusal) == ""
    engines.call(keep_what_a_forward_makes, "_fse_fuse_gate", False)
    trainers.call(push, "B")


def lose_slopes_and_push(engines: Engines) -> tuple[bool, bool]:
    """Return whether ALiBi's slopes were found, and whether a push brought them back. A CPU's engine never sleeps."""
    with sleep_mode():
        engines.start(engines.checkpoint("bloom", "A"), enable_sleep_mode=True)
    kernels = [layer.self_attention.attn.impl for layer in engines.live_model().transformer.h]
    values = [kernel.alibi_slopes.clone() for kernel in kernels]
    with WeightSync("fsdp", "ipc", engines.llm, timeout_s=TIMEOUT_S) as sync:
        sync.push(tiny_models.build("bloom", "B"))
        for kernel in kernels:
            kernel.alibi_slopes.zero_()
        sync.push(tiny_models.build("bloom", "B"))
    found = [torch.equal(kernel.alibi_slopes, value) for kernel, value in zip(kernels, values, strict=True)]
    return all(value.any() for value in values), all(found)


def test_slopes_that_sleep_has_discarded_come_back(engines: Remote):
    if not has_plug_ins():
        pytest.skip("this vLLM does not tell whether it has slept")
    assert engines.call(lose_slopes_and_push) == (True, True)


# ---------------------------------------------------------------------------------------------------------------
# Load plans, for which no engine has to run


@dataclass(frozen=True)
class WorkersPlan:
    """What plans promise of one worker: `problems` are words, empty when there are none."""

    copies: list[LoadCopy]
    computed: set[str]
    problems: list[str]


class Planner:
    """Lives in a process of its own, which imports vLLM once."""

    connections = ()

    def plan_whole(self, *args: Any) -> list[WorkersPlan]:
        """`plan`, with the loader traced for every tensor."""
        from weightsync.worker.trace import trace_loader

        with mock.patch("weightsync.vllm.plan_offline.trace_by_example", trace_loader):
            return self.plan(*args)

    def plan_changed(self, method: str, replacement: Callable[..., Any], *args: Any) -> list[WorkersPlan]:
        """`plan`, with another method of vLLM's class for Llama."""
        from vllm.model_executor.models.llama import LlamaForCausalLM

        with mock.patch.object(LlamaForCausalLM, method, replacement, create=True):
            return self.plan(*args)

    def plan(self, folder: Path, manifest: Manifest, tp: int, expert_parallel: bool) -> list[WorkersPlan]:
        from weightsync.vllm.plan_offline import plan_workers

        know_class(folder)
        return [
            WorkersPlan(
                worker.trace.copies,
                set().union(*worker.trace.computed.values()),
                [
                    *(f"unknown: {name}" for name in worker.trace.unknown),
                    *(f"refused: {name}: {reason}" for name, reason in worker.trace.refused.items()),
                    *(f"missing: {name}" for name in worker.missing),
                    *(f"written twice: {name}" for name in worker.doubled),
                ],
            )
            for worker in plan_workers(folder, manifest, tp, "auto", expert_parallel=expert_parallel)
        ]

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def planner() -> Iterator[Remote]:
    remote = VllmRemote(Planner)
    yield remote
    remote.close()


def offered(folder: Path, model: str) -> Manifest:
    """The manifest of a model, whose config.json is written to `folder`."""
    built = tiny_models.build(model, "A")
    built.config.architectures = [type(built).__name__]
    built.config.save_pretrained(folder)
    return FsdpSource(TensorSelection()).read(built).manifest


def check_complete(manifest: Manifest, workers: list[WorkersPlan]) -> None:
    """Every parameter of every worker is filled once, and the workers together read every tensor whole."""
    assert [worker.problems for worker in workers] == [[] for _ in workers]
    for meta in manifest:
        if not any(meta.name in worker.computed for worker in workers):
            boxes = {copy.box for worker in workers for copy in worker.copies if copy.name == meta.name}
            assert not coverage(meta.shape, list(boxes))[0], f"no worker reads all of {meta.name}"


@pytest.mark.parametrize("model", FAMILIES)
def test_two_workers_are_complete(planner: Remote, tmp_path: Path, model: str):
    manifest = offered(tmp_path, model)
    check_complete(manifest, planner.call(Planner.plan, tmp_path, manifest, 2, False))
    if FAMILIES[model].experts:
        check_complete(manifest, planner.call(Planner.plan, tmp_path, manifest, 2, True))
    FOUND[model].planned = True


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_plans_by_example_are_those_of_the_whole_trace(planner: Remote, tmp_path: Path, expert_parallel: bool):
    request = tmp_path, offered(tmp_path, "qwen2-moe"), 2, expert_parallel
    found, whole = planner.call(Planner.plan, *request), planner.call(Planner.plan_whole, *request)
    for ours, theirs in zip(found, whole, strict=True):
        assert sorted(ours.copies, key=by_target) == sorted(theirs.copies, key=by_target)
        assert (ours.computed, ours.problems) == (theirs.computed, theirs.problems)


def by_target(copy: LoadCopy) -> tuple[str, int]:
    return copy.param, copy.offset


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_plans_of_experts_that_do_not_divide_evenly(planner: Remote, tmp_path: Path, expert_parallel: bool):
    manifest = offered(tmp_path, "qwen3-moe-of-5")
    check_complete(manifest, planner.call(Planner.plan, tmp_path, manifest, 2, expert_parallel))


def test_too_many_and_too_few_experts_are_found(planner: Remote, tmp_path: Path):
    four, five = offered(tmp_path / "4", "qwen3-moe"), offered(tmp_path / "5", "qwen3-moe-of-5")
    (few,) = planner.call(Planner.plan, tmp_path / "5", four, 1, True)
    assert any("missing: model.layers.0.mlp.experts" in problem for problem in few.problems)
    many = planner.call(Planner.plan, tmp_path / "4", five, 2, True)
    read = {copy.name for worker in many for copy in worker.copies}
    assert "model.layers.0.mlp.experts.4.down_proj.weight" not in read


def load_and_note(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    model.is_scaled = True
    return [name for name, _ in weights]


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("process_weights_after_loading", "from weights once, by LlamaForCausalLM"),
        ("load_weights", r"sets LlamaForCausalLM\.is_scaled"),
    ],
)
def test_a_model_that_a_push_refuses_has_no_plan(planner: Remote, tmp_path: Path, method: str, reason: str):
    request = tmp_path, offered(tmp_path, "llama"), 1, False
    with pytest.raises(UnsupportedError, match=reason):
        planner.call(Planner.plan_changed, method, load_and_note, *request)
    planner.call(Planner.plan, *request)


# ---------------------------------------------------------------------------------------------------------------
# The document


def versions(engines: Engines) -> str:
    """What the findings depend on."""
    import torch
    import transformers
    import vllm

    return (
        f"vLLM {vllm.__version__}, transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}"
    )


def cpu() -> str:
    import torch

    return torch.backends.cpu.get_cpu_capability()


def document(packages: str) -> str:
    rows = [
        "| family | class in vLLM | TP=1 | TP=2 | expert parallel | load paths, modules at TP=1 | notes |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for model, family in FAMILIES.items():
        found = FOUND[model]
        two = "equal" if 2 in found.equal or model in ELSEWHERE else "plan"
        experts = "plan" if family.experts else ""
        cells = [family.title, f"`{found.engine}`", "equal", two, experts, found.load_paths, family.notes]
        rows.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    table = "\n".join(rows)
    return f"""# Families of models

The families of models for which the tests show that a push is right. `tests/engine/test_models.py` writes this file and
fails when it finds something else. [Models](../reference/models.md) has every model of vLLM's in one table.

Found with {packages}, on a CPU with {cpu()}.

- *equal*: two real vLLM engines answer with the same tokens and log-probabilities, to the bit. One was started cold
  from the weights. An FSDP2 trainer of two ranks pushed to the other, over `broadcast` and over `ipc`. Families with
  experts were also pushed by a trainer that names each expert as the checkpoint does.
- *plan*: the load plans traced from vLLM's loader fill every parameter of every worker once. Together they read every
  tensor whole. No engine ran.
- *load paths*: how the engine's modules took the weights, see [architecture](../internals/loading.md#load-paths).
  It depends on the kernels that vLLM chooses. On a GPU, and on a CPU with AVX-512, more modules are reloaded.

Each model is a tiny random model of that family's class. The results do not depend on size.

{table}

## On a GPU

With vLLM 0.26.0, transformers 5.17.0, CUDA graphs and a trainer in the engine's process, pushed equals cold for A, B
and A, with requests before, between and after.

On H200s these are 70 families of the 83 that were tried
([results](https://github.com/weightsync/weightsync/blob/main/benchmarks/results/2026-11-25-h200-families.json)). [The
registry](registry.md#equal-answers) lists them. Among them are DeepSeek-V2 and V3, dots.llm1, GLM-4.5,
GPT-OSS, Mixtral, OLMoE and Qwen3-MoE, whose routers and sinks have state of their own, and most hybrids and state-space
models. None answered otherwise. vLLM 0.26 did not start in that run for the other 13: BLOOM, Gemma 3n, Gemma 4, GLM-4
MoE Lite, Hunyuan, Hunyuan MoE, Mellum, MiMo-V2, MPT, Phi, Qwen3-Next, Qwen3.5 and Qwen3.5 MoE.

    weightsync bench --families benchmarks/families.json --way weightsync --num-iters 1 --jobs 11 --client extension

Equal on H200s too, with vLLM 0.26 and, but for the drafters, CUDA graphs:

- Qwen3-Next, and Qwen3.5 and Qwen3.5 MoE, both with their tower and without. Without FlashInfer these need
  `additional_config={{"gdn_prefill_backend": "triton"}}`.
- GPT-OSS in [MXFP4](../use/quantized.md#which-engines), as its own checkpoints are, also at the widths of the published
  20 B with one worker and two (`tests/gpu/test_mxfp4.py`). FlashInfer takes attention sinks on Blackwell alone.
- The drafters of MiMo (`mtp`) and of a Llama (`eagle`, `eagle3`) with two workers: answers and drafts
  (`tests/gpu/test_drafters_of_two_workers.py`).
- Gemma 3, Qwen2-VL, Qwen2.5-VL and Qwen3-VL with pictures in the prompts, also on an H100, and without their towers
  (`tests/gpu/test_pictures.py`). So are Gemma 3's adapters, and pushes of its text model alone
  (`tests/engine/test_vision_language.py`). LLaVA, LLaVA-OneVision and Mistral 3 do not start there: transformers 5.17
  lacks a class that vLLM 0.26 imports.
- A token classifier, BERT and rerankers of Qwen3 (`tests/engine/test_pooling.py`).
"""


def test_the_document_says_what_was_found(engine_process: Remote):
    incomplete = [model for model, found in FOUND.items() if not (1 in found.equal and found.planned)]
    incomplete += [model for model in TWO_WORKERS if 2 not in FOUND[model].equal]
    if incomplete:
        pytest.skip(f"only some of the families were found equal in this run: not {', '.join(incomplete)}")
    found = document(engine_process.call(versions))
    if os.environ.get("WEIGHTSYNC_WRITE_DOCS") == "1":
        DOCUMENT.write_text(found, encoding="utf-8")
    said = DOCUMENT.read_text(encoding="utf-8")
    if f"on a CPU with {cpu()}." not in said:  # other kernels take other load paths
        said, found = without_load_paths(said), without_load_paths(found)
    assert said == found, f"{DOCUMENT} is stale: WEIGHTSYNC_WRITE_DOCS=1 python -m pytest {Path(__file__).name}"


def without_load_paths(text: str) -> str:
    lines = [line for line in text.splitlines() if "on a CPU with" not in line]
    return "\n".join("|".join(line.split("|")[:6]) if line.startswith("|") else line for line in lines)
