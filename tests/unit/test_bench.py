"""`weightsync bench`: what it measures and what it leaves out, its lower bounds and results."""

from __future__ import annotations

import dataclasses
import json
import math
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from weightsync.errors import ConfigError
from weightsync.tools import cli
from weightsync.tools.bench.cases import (
    BROADCAST,
    CLIENTS,
    DEVICE_COPY,
    FILES,
    MEMCPY,
    NIXL_READ,
    PEER_COPY,
    PEERS,
    WAYS,
    Case,
    Layout,
    expand,
    floor,
    lay_out,
    refusal,
)
from weightsync.tools.bench.models import fill, make_trainer, save_checkpoint, stepper
from weightsync.tools.bench.run import medians
from weightsync.tools.bench.shapes import SHAPES, add_shapes, write_config
from weightsync.tools.bench.trainer import unchanged
from weightsync.tools.plan import checkpoint_tensors
from weightsync.tools.processes import Answer

CASE = Case("weightsync", "plain", 1, "ipc", "module", "bfloat16", "tiny", "none", 1, 1, "http")
PEER = dataclasses.replace(CASE, way=FILES, transport="", bucketer="")
ALL = frozenset({"deepspeed", "megatron"})
CPU = torch.device("cpu")


def case(**fields) -> Case:
    return dataclasses.replace(CASE, **fields)


def fsdp(**fields) -> Case:
    return case(backend="fsdp", **fields)


def moe(**fields) -> Case:
    return case(**{"shape": "tiny-moe", "expert_parallel": True, **fields})


def peer(way, **fields) -> Case:
    return dataclasses.replace(PEER, way=way, **fields)


def axes(**more) -> Namespace:
    return Namespace(**{**{name: [value] for name, value in vars(CASE).items()}, **more})


# Counted by their authors (model cards, the papers' tables); 8B also by what a push of it has moved.
@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        ("0.5B", 494_032_768),
        ("8B", 8_190_735_360),
        ("30B-A3B", 30_532_122_624),
        ("70B", 70_553_706_496),
        ("DeepSeek-V3", 671_026_419_200),
        ("Kimi-K2", 1_026_408_232_448),
    ],
)
def test_a_shape_has_as_many_parameters_as_its_model(shape, parameters, tmp_path):
    tensors = checkpoint_tensors(write_config(shape, tmp_path))[1]
    assert sum(math.prod(tensor.shape) for tensor in tensors) == parameters  # some are float32 in newer transformers


def test_a_checkpoint_of_a_tied_model_has_its_embedding_once(tmp_path):
    config = write_config("tiny", tmp_path) / "config.json"
    config.write_text(json.dumps(SHAPES["tiny"] | {"tie_word_embeddings": True}))
    save_checkpoint(str(tmp_path), "A", tmp_path / "saved", CPU)
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["tie_word_embeddings"]
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert "lm_head.weight" not in saved
    model = make_trainer("plain", str(tmp_path), torch.bfloat16, CPU)
    fill(model, "plain", "A", CPU)
    name = "model.embed_tokens.weight"
    assert torch.equal(saved[name], model.state_dict()[name])


def test_a_step_changes_weights_where_they_lie_and_keeps_them_numbers(tmp_path):
    model = make_trainer("plain", str(write_config("tiny", tmp_path)), torch.float32, CPU)
    fill(model, "plain", "A", CPU)
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.named_parameters()}
    stepper(model, "plain")()
    for name, tensor in model.named_parameters():
        address, _ = before[name]
        assert tensor.data_ptr() == address
        assert tensor.isfinite().all()
    assert not torch.equal(model.state_dict()["lm_head.weight"], before["lm_head.weight"][1])


def test_every_combination_once_and_peers_with_their_own_clients():
    cases = expand(axes(transport=["ipc", "broadcast"], ranks=[1, 2], tp=[1, 2], client=CLIENTS, way=WAYS))
    ours = [c for c in cases if c.way == "weightsync"]
    theirs = [c for c in cases if c.way in PEERS]
    assert len(ours) == len(set(ours)) == 2 * 2 * 2 * 3
    assert len(theirs) == len(set(theirs)) == 2 * 2 * sum(map(len, PEERS.values()))
    assert {c.client for c in theirs if c.way != FILES} == {"llm"}
    with pytest.raises(ConfigError, match="--tp 0"):
        expand(axes(tp=[1, 0]))
    with pytest.raises(ConfigError, match="--data-parallel-size 0"):
        expand(axes(data_parallel_size=[0]))


@pytest.mark.parametrize(
    ("refused", "gpus", "why"),
    [
        (peer("vllm nccl"), 0, "vllm nccl moves GPU memory, found no GPU"),
        (peer("vllm nccl", ranks=2, backend="fsdp"), 8, "sends from one rank"),
        (peer("vllm ipc", tp=2), 8, "vllm ipc needs a rank on each worker's GPU"),
        (peer("vllm ipc packed", ranks=2, engines=2, backend="fsdp"), 8, "one at a time"),
        (peer(FILES, quantization="fp8"), 0, "into unquantised engines"),
        (peer(FILES, load_format="dummy"), 0, "vllm reload wants an engine that read a checkpoint at its start"),
        (peer(FILES, backend="deepspeed"), 0, "from a plain module or FSDP2"),
        (case(ranks=2), 0, "a plain module has one rank"),
        (case(backend="megatron", shape="0.5B"), 0, "dense Qwen3 shapes"),
        (case(backend="megatron", ranks=4), 0, "4 ranks cannot share 2 heads"),
        (case(tp=3), 0, "3 workers cannot share 4 attention heads"),
        (case(tp=2, expert_parallel=True), 0, "tiny has no experts"),
        (moe(), 0, "one worker has all experts: add --tp or --data-parallel-size"),
        (moe(data_parallel_size=2, client="llm"), 0, "an LLM has no data parallelism: use --client http"),
        (moe(tp=2, data_parallel_size=2), 2, "4 workers need 4 GPUs"),
        (moe(tp=2), 0, "engine for CPUs crashes when experts are parallel"),
        (moe(data_parallel_size=2, expert_parallel=False), 0, "crashes when experts are parallel"),
        (case(transport="broadcast"), 1, "need 2 GPUs, found 1"),
        (fsdp(ranks=2, tp=2), 1, "need 2 GPUs"),
    ],
)
def test_what_cannot_run_says_why(refused, gpus, why):
    assert why in (refusal(refused, gpus, ALL) or "")


def test_an_llm_in_the_process_of_one_of_several_ranks_is_refused():
    for client in ("llm", "extension"):
        why = refusal(fsdp(ranks=2, client=client), 0, ALL, core_in_process=True) or ""
        assert "Unset it, or use --client http or --ranks 1" in why
        assert refusal(fsdp(ranks=2, client=client), 0, ALL) is None
    for able in (fsdp(ranks=1, client="llm"), fsdp(ranks=2, client="http"), fsdp(ranks=2, client="llm", tp=2)):
        assert refusal(able, 0, ALL, core_in_process=True) is None


def test_a_backend_that_is_not_installed_is_refused():
    assert refusal(case(backend="deepspeed"), 0, frozenset()) == "deepspeed is not installed"


@pytest.mark.parametrize(
    ("able", "gpus"),
    [
        (CASE, 0),
        (PEER, 0),
        (fsdp(transport="broadcast", ranks=2, tp=2, engines=2), 0),
        (CASE, 1),
        (peer("vllm ipc"), 1),
        (moe(tp=2, data_parallel_size=2), 4),
        (fsdp(ranks=2, tp=2), 2),
        (case(transport="broadcast"), 2),
        (peer("vllm nccl"), 2),
        (peer("vllm ipc", ranks=2, tp=2, backend="fsdp", quantization="fp8_per_channel"), 2),
    ],
    ids=str,
)
def test_what_can_run_is_not_refused(able, gpus):
    assert refusal(able, gpus, ALL) is None


def test_trainers_share_the_engines_gpus_except_where_nccl_broadcasts():
    assert lay_out(case(ranks=2, engines=2), 4) == Layout((0, 1), ((0,), (1,)))
    assert lay_out(case(ranks=2, tp=2, transport="broadcast"), 4) == Layout((2, 3), ((0, 1),))
    assert lay_out(peer("vllm nccl packed", tp=2), 4) == Layout((2,), ((0, 1),))
    assert lay_out(case(ranks=2), 0) == Layout((), ())
    of_four = case(transport="broadcast", tp=2, data_parallel_size=2)
    assert lay_out(of_four, 5) == Layout((4,), ((0, 1, 2, 3),))


@pytest.mark.parametrize(
    ("of", "gpus", "seconds", "limit"),
    [
        (case(), 0, 0.05, MEMCPY),
        (case(ranks=4, tp=4, engines=3), 0, 0.15, MEMCPY),  # 3 GB in all
        (case(transport="broadcast", tp=2), 0, 0.2, BROADCAST),
        (case(transport="checkpoint"), 0, 1.0, "file write"),
        (case(transport="broadcast"), 2, 0.2, BROADCAST),
        (case(transport="broadcast", ranks=8, tp=8), 16, 0.025, BROADCAST),  # eight links
        (case(transport="broadcast", ranks=8, tp=2), 16, 0.1, BROADCAST),
        (case(transport="nixl", ranks=2, tp=4), 6, 1 / 6, NIXL_READ),
        (case(transport="broadcast", encoding="delta", changed=0.01), 2, 0.001, DEVICE_COPY),
        (case(transport="broadcast", encoding="auto"), 0, 0.05, MEMCPY),
        (case(), 1, 0.001, DEVICE_COPY),
        (case(ranks=2, tp=2), 2, 5e-4, DEVICE_COPY),  # a rank holds as much as the worker on its GPU needs
        (case(ranks=4, tp=2), 4, 2.5e-3, PEER_COPY),  # a quarter of the model lies on each GPU
        (case(tp=2), 2, 5e-3, PEER_COPY),  # the second GPU has no rank
        (case(ranks=2, data_parallel_size=2), 2, 5e-3, PEER_COPY),
        (case(ranks=2, data_parallel_size=1, engines=2), 2, 5e-3, PEER_COPY),
        (case(data_parallel_size=2), 0, 0.1, MEMCPY),
        (case(data_parallel_size=2), 2, 0.01, PEER_COPY),
        (moe(data_parallel_size=2), 2, 0.005, PEER_COPY),  # at least, if all were experts
    ],
)
def test_a_floor_is_the_bytes_over_the_limit_that_they_pass(of, gpus, seconds, limit):
    limits = {MEMCPY: 20, BROADCAST: 5, NIXL_READ: 3, DEVICE_COPY: 1000, PEER_COPY: 100, "file write": 1}
    assert floor(of, 10**9, limits, gpus) == (pytest.approx(seconds), limit)


class Fixed:
    """An engine with these answers."""

    def __init__(self, *tokens: int) -> None:
        self.answers = [Answer((token,), (-1.0,)) for token in tokens]

    def generate(self, prompts):
        return self.answers


@pytest.mark.parametrize(("engines", "expected"), [([(1, 2), (3, 4)], 0), ([(1, 2), (5, 6)], 2), ([(1, 6), (3, 4)], 1)])
def test_each_engine_and_each_core_has_to_answer_otherwise_after_other_weights(engines, expected):
    before = [Fixed(5, 6).answers, Fixed(5, 6).answers]
    assert unchanged([Fixed(*tokens) for tokens in engines], before) == expected


def test_medians_have_every_phase_with_its_range():
    pushes = [{"total_s": seconds, "load_s": seconds / 2} for seconds in (0.3, 0.1, 0.2)]
    assert medians(pushes) == {
        "total_s": {"median": 0.2, "least": 0.1, "most": 0.3},
        "load_s": {"median": 0.1, "least": 0.05, "most": 0.15},
    }


def test_a_dry_run_shows_the_plan_and_starts_nothing(capsys):
    arguments = ["bench", "--dry-run", "--gpus", "0", "--shape", "8B", "--tp", "2", "--transport", "broadcast"]
    assert cli.main([*arguments, "checkpoint", "--client", "llm"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    # 16.38 GB at 5 GB/s
    assert (
        "broadcast at 5 GB/s 3.28 s 8B bfloat16, plain x1, broadcast/module, to 1 x TP=2 by llm (16.38 GB)" in printed
    )
    assert "8B bfloat16, plain x1, checkpoint/module, to 1 x TP=2 by llm (16.38 GB)" in printed
    assert "not measured: 8B bfloat16, plain x1, vllm nccl, to 1 x TP=2 by llm: vllm nccl moves GPU memory" in printed


def test_a_dry_run_may_assume_gpus(capsys):
    arguments = ["bench", "--dry-run", "--gpus", "4", "--shape", "70B", "--ranks", "4", "--tp", "4", "2"]
    assert cli.main([*arguments, "--backend", "fsdp", "--way", "weightsync"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    # A worker of four needs 35 GB, as many as its GPU's rank holds. A worker of two gets 35 GB more over the link.
    assert "device copy at 2140 GB/s 16.5 ms" in printed
    assert "peer copy at 397 GB/s 88.9 ms" in printed
    assert cli.main(["bench", "--gpus", "4096"]) == 2


def test_a_dry_run_shows_parallel_engines_and_cut_models(capsys, monkeypatch):
    monkeypatch.setitem(SHAPES, "DeepSeek-V3-4-layers", {})  # removed at the end
    arguments = ["bench", "--dry-run", "--gpus", "8", "--shape", "DeepSeek-V3", "--layers", "4", "--tp", "2"]
    arguments += ["--data-parallel-size", "2", "--enable-expert-parallel", "--load-format", "dummy"]
    assert cli.main([*arguments, "--way", "weightsync"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "DeepSeek-V3-4-layers bfloat16, plain x1" in printed
    assert "to 1 x TP=2 DP=2 EP from dummy weights by http (30.22 GB)" in printed


FAMILIES = Path(__file__).parents[2] / "benchmarks" / "families.json"


def test_each_family_of_the_file_is_a_shape_with_a_config(monkeypatch, tmp_path):
    monkeypatch.setattr("weightsync.tools.bench.shapes.SHAPES", shapes := dict(SHAPES))
    names = add_shapes(FAMILIES)
    assert len(names) >= 30
    assert shapes.keys() == SHAPES.keys() | set(names)
    assert json.loads((write_config(names[0], tmp_path) / "config.json").read_text()) == shapes[names[0]]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", "--families"),
        ("[1]", "expected config.json's by name"),
        ('{"mine": {"model_type": "llama"}}', "mine has no architectures"),
        ('{"mine": 3}', "mine has no architectures"),
    ],
)
def test_a_file_of_families_that_is_none_is_refused(content, named, tmp_path):
    (tmp_path / "families.json").write_text(content)
    with pytest.raises(ConfigError, match=named):
        add_shapes(tmp_path / "families.json")


def test_a_file_of_families_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--families .*none\.json"):
        add_shapes(tmp_path / "none.json")
