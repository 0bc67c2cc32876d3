"""`weightsync bench`: what it measures and what it leaves out, its floors and reports; and one real run on CPUs."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from weightsync import cli
from weightsync.bench import measure
from weightsync.bench.cases import CHECKPOINT_ENGINE, FILES, PEERS, Case, Layout, Machine, expand, lay_out, refusal
from weightsync.bench.floors import DEVICE_COPY, HOST_COPY, MEMCPY, PEER_COPY, broadcast_to, floor, memory
from weightsync.bench.models import save_checkpoint, values
from weightsync.bench.results import Result, failures, from_json, markdown, row_of, text_table, to_json
from weightsync.bench.shapes import SHAPES, write_config
from weightsync.cli.bench import too_large
from weightsync.cli.plan_report import checkpoint_tensors
from weightsync.errors import ConfigError
from weightsync.layout import Manifest, TensorMeta
from weightsync.trial import ChildError

CPU = Machine(0, 10**12, 0, 10**12, 10**12, frozenset({"deepspeed", "megatron-core"}))
CASE = Case("weightsync", "fsdp", 1, "ipc", "module", "bfloat16", "tiny", None, 1, 1)
PEER = dataclasses.replace(CASE, way=FILES, transport="", bucketer="")
GPUS = dataclasses.replace(CPU, gpus=8, installed=frozenset({CHECKPOINT_ENGINE}))


def case(**fields) -> Case:
    return dataclasses.replace(CASE, **fields)


def peer(way, **fields) -> Case:
    return dataclasses.replace(PEER, way=way, **fields)


def axes(**more):
    return {
        "backends": ["fsdp"],
        "ranks": [1],
        "transports": ["ipc"],
        "bucketers": ["module"],
        "dtypes": ["bfloat16"],
        "shapes": ["tiny"],
        "quantizations": [None],
        "engines": [1],
        "tps": [1],
        "peers": (),
        **more,
    }


# Counted by their authors (model cards, the papers' tables); 8B also by what a push of it has moved.
@pytest.mark.parametrize(
    ("shape", "parameters"),
    [("0.5B", 494_032_768), ("8B", 8_190_735_360), ("30B-A3B", 30_532_122_624), ("70B", 70_553_706_496)],
)
def test_a_shape_has_as_many_parameters_as_its_model(shape, parameters, tmp_path):
    tensors = checkpoint_tensors(write_config(shape, tmp_path))[1]
    assert sum(tensor.nbytes for tensor in tensors) // 2 == parameters


def test_a_checkpoint_of_a_tied_model_has_its_embedding_once(tmp_path):
    config = write_config("tiny", tmp_path) / "config.json"
    config.write_text(json.dumps(SHAPES["tiny"] | {"tie_word_embeddings": True}))
    save_checkpoint(str(tmp_path), "A", tmp_path / "saved", torch.device("cpu"))
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["tie_word_embeddings"]
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert "lm_head.weight" not in saved
    name = "model.embed_tokens.weight"
    assert torch.equal(saved[name], values("A", name, tuple(saved[name].shape), torch.device("cpu")))


def test_every_combination_once_and_those_that_share_engines_together():
    cases = expand(**axes(transports=["ipc", "broadcast"], ranks=[1, 2], tps=[1, 2], peers=PEERS))
    assert len(cases) == len(set(cases)) == 2 * 2 * (2 + len(PEERS))
    setups = [c.setup for c in cases]
    assert len(set(setups)) == 2 * 4  # TP=1 and 2: weightsync's backend, vLLM's nccl and ipc, checkpoint-engine's
    assert [s for n, s in enumerate(setups) if n == 0 or setups[n - 1] != s] == list(dict.fromkeys(setups))
    with pytest.raises(ConfigError, match="--tp 0"):
        expand(**axes(tps=[1, 0]))


@pytest.mark.parametrize(
    ("refused", "machine", "why"),
    [
        (peer("vllm nccl"), CPU, "nccl engine moves GPU memory, and there is no GPU"),
        (peer("vllm nccl", ranks=2), GPUS, "from one rank"),
        (peer("vllm ipc", tp=2), GPUS, "vllm ipc wants a rank on each worker's GPU: 1 ranks, 2 workers"),
        (peer("vllm ipc packed", ranks=2, engines=2), GPUS, "one at a time"),
        (peer(CHECKPOINT_ENGINE), CPU, "checkpoint-engine moves GPU memory, and there is no GPU"),
        (peer(CHECKPOINT_ENGINE), dataclasses.replace(CPU, gpus=1), "checkpoint-engine is not installed"),
        (peer(CHECKPOINT_ENGINE, ranks=2), GPUS, "a rank on each worker's GPU"),
        (peer(CHECKPOINT_ENGINE, quantization="fp8"), GPUS, "unquantised engines alone"),
        (case(backend="megatron", shape="0.5B"), CPU, "dense Qwen3 shapes alone"),
        (case(backend="megatron", ranks=4), CPU, "4 ranks cannot share 2 key and value heads"),
        (case(backend="deepspeed"), dataclasses.replace(CPU, installed=frozenset()), "deepspeed is not installed"),
        (case(tp=3), CPU, "3 workers cannot share 4 attention heads"),
        (dataclasses.replace(PEER, backend="deepspeed"), CPU, "from FSDP2 alone"),
        (case(bucketer="parameter"), dataclasses.replace(CPU, gpus=1), "all is one bucket"),
        (case(transport="broadcast"), dataclasses.replace(CPU, gpus=1), "needs 2 GPUs"),
        (case(ranks=2, tp=2), dataclasses.replace(CPU, gpus=1), "needs 2 GPUs"),
    ],
)
def test_what_cannot_run_says_why(refused, machine, why):
    assert why in (refusal(refused, machine) or "")


def test_what_can_run_is_not_refused():
    two = dataclasses.replace(CPU, gpus=2)
    assert [refusal(c, CPU) for c in (CASE, PEER, case(transport="broadcast", ranks=2, tp=2, engines=2))] == [None] * 3
    assert [refusal(c, two) for c in (CASE, case(ranks=2, tp=2), case(transport="broadcast"))] == [None] * 3
    theirs = (peer("vllm nccl"), peer("vllm ipc", ranks=2, tp=2), peer(CHECKPOINT_ENGINE, ranks=4, tp=2, engines=2))
    assert [refusal(c, GPUS) for c in theirs] == [None] * 3


def test_trainers_share_the_engines_gpus_except_where_nccl_broadcasts():
    assert lay_out(case(ranks=2, engines=2), 4) == Layout((0, 1), ((0,), (1,)))
    assert lay_out(case(ranks=2, tp=2, transport="broadcast"), 4) == Layout((2, 3), ((0, 1),))
    assert lay_out(peer("vllm nccl packed", tp=2), 4) == Layout((2,), ((0, 1),))
    assert lay_out(case(ranks=2), 0) == Layout((), ())


def test_a_floor_is_the_bytes_over_the_limit_that_they_pass():
    limits = {MEMCPY: 20, broadcast_to(1): 5, broadcast_to(2): 2, DEVICE_COPY: 1000, PEER_COPY: 100}
    gb = 10**9
    alone = floor(case(), gb, limits, gpus=0)
    assert (alone.seconds, alone.limit) == (pytest.approx(0.05), MEMCPY)
    crowded = floor(case(ranks=4, tp=4, engines=3), gb, limits, gpus=0)
    assert (crowded.seconds, crowded.limit) == (pytest.approx(0.15), MEMCPY)  # 3 GB in all
    two = floor(case(transport="broadcast", tp=2), gb, limits, gpus=0)
    assert (two.seconds, two.limit) == (pytest.approx(0.5), broadcast_to(2))
    assert floor(case(), gb, limits, gpus=1).seconds == pytest.approx(0.001)
    staged = floor(peer(CHECKPOINT_ENGINE, ranks=2, tp=2), gb, {**limits, HOST_COPY: 50}, gpus=2)
    assert (staged.seconds, staged.limit) == (pytest.approx(0.02), HOST_COPY)  # each rank's half, there and back
    pulled = floor(case(ranks=2, tp=2), gb, limits, gpus=2)
    assert (pulled.seconds, pulled.limit) == (pytest.approx(0.25e-3 + 2.5e-3), PEER_COPY)


def test_memory_counts_shards_and_the_buckets_under_way():
    tensors = Manifest(
        tuple(TensorMeta(f"model.layers.{n}.mlp.up_proj.weight", (500, 1000), "float32") for n in (0, 1))
    )
    # 2 MB as it travels; the default buckets hold both tensors, "parameter" one each
    one = memory(case(transport="broadcast", bucketer="parameter", ranks=2, dtype="float32"), tensors, gpus=0)
    assert one.trainer_rank == 2 * 10**6 + 2 * 10**6
    assert one.engine_worker == 2 * 10**6 + 2 * 10**6
    assert (one.shared, one.disk) == (0, 2 * 10**6)
    ipc = memory(case(tp=2), tensors, gpus=0)
    assert (ipc.trainer_rank, ipc.engine_worker, ipc.shared) == (2 * 10**6, 10**6, 2 * 10**6)
    assert memory(case(tp=2), tensors, gpus=1).shared == 0
    assert too_large(ipc, CPU) is None
    assert too_large(ipc, dataclasses.replace(CPU, shared_bytes=10**6)) == (
        "needs 2.00 MB of /dev/shm, and there are 1.00 MB"
    )


def result(of: Case = CASE, answers: float = 0.0) -> Result:
    repeats = tuple({"total_s": seconds, "load_s": seconds / 2} for seconds in (0.3, 0.1, 0.2))
    where = {"python": "3.11", "gpus": []}
    return Result(of, where, {MEMCPY: 5.0}, 10**6, 0.01, MEMCPY, {"total_s": 1.0}, repeats, answers)


def test_results_survive_json_with_every_repeat():
    wrong = result(PEER, answers=float("inf"))
    failed = Result(CASE, {}, {}, 10**6, 0.01, MEMCPY, error="the engine died\nits log")
    assert from_json(to_json([result(), wrong, failed])) == [result(), wrong, failed]
    rows = json.loads(to_json([result(), wrong, failed]))
    assert rows[0]["seconds"]["total_s"] == {"median": 0.2, "least": 0.1, "most": 0.3}
    assert rows[0]["seconds"]["load_s"]["median"] == 0.1
    assert [row["right"] for row in rows] == [True, False, False]
    assert rows[1]["answers"] == "other tokens"


def test_a_table_says_when_answers_differ_and_a_peer_is_no_failure():
    assert row_of(result())[:3] == ("200 ms", "100 ms - 300 ms", "1000 ms")
    assert row_of(result(answers=0.5))[5] == "other logps"
    assert row_of(result(answers=float("inf")))[5] == "other tokens"
    ours, theirs = result(answers=0.5), result(PEER, answers=0.5)
    assert failures([result(), ours, theirs]) == [ours]


def test_a_table_has_no_ratio_to_a_lower_bound_that_is_hardly_any_time():
    assert row_of(result())[3:5] == (f"{MEMCPY}: 10 ms", "20.0 x")
    assert row_of(dataclasses.replace(result(), floor_s=0.0009))[3:5] == (f"{MEMCPY}: 0.9 ms", "-")


def test_a_text_table_is_as_wide_as_its_cells():
    assert text_table(("push", "case"), [("1 ms", "a"), ("1000 ms", "a longer one")], "><") == [
        "   push  case",
        "   1 ms  a",
        "1000 ms  a longer one",
    ]


def test_the_report_has_limits_times_phases_and_what_is_missing():
    failed = Result(CASE, {}, {}, 10**6, 0.01, MEMCPY, error="the engine died\nits log")
    text = markdown([result(), failed], [(PEER, "too | large"), (CASE, "too | large")], ["phases.png"])
    assert "| memcpy | 5.0 |" in text
    assert "| 200 ms | 100 ms - 300 ms | 1000 ms | memcpy: 10 ms | 20.0 x | equal |" in text
    assert f"| {CASE} | the engine died |" in text
    assert f"| {PEER}, and 1 more case | too / large |" in text
    assert text.endswith("![phases.png](phases.png)\n")


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs the extra `bench`")
def test_plots_are_drawn_when_there_is_something_to_compare(tmp_path):
    from weightsync.bench.plots import draw

    assert draw([result()], tmp_path) == ["phases.png"]
    larger = dataclasses.replace(result(case(engines=2)), nbytes=10**7)
    assert draw([result(), larger], tmp_path) == ["phases.png", "bytes.png", "receivers.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())


def test_engines_that_do_not_start_fail_their_cases_alone(monkeypatch, tmp_path):
    def start(case, *_):
        if case.tp == 2:
            raise ChildError("engine 0 ended with exit code 1")
        return [], []

    monkeypatch.setattr(measure, "_start_engines", start)
    monkeypatch.setattr(measure, "_run_case", lambda *_: {"answers": 0.0})
    tensors = Manifest((TensorMeta("weight", (8, 8), "bfloat16"),))
    limits = {MEMCPY: 1.0}
    begun: list[str] = []
    cases = [case(tp=2, ranks=1), case(), case(tp=2, ranks=2)]
    found = list(measure.run(cases, {"tiny": tensors}, limits, 0, 0, 1, tmp_path, begun.append))
    assert [(r.case.tp, r.error) for r in found] == [(2, "engine 0 ended with exit code 1")] * 2 + [(1, None)]
    assert len(begun) == 2  # engines were started once for each set-up
    assert failures(found) == found[:2]


def test_a_dry_run_shows_the_plan_and_starts_nothing(capsys):
    arguments = ["bench", "--dry-run", "--gpus", "0", "--shape", "8B", "--tp", "2", "--transport", "broadcast"]
    assert cli.main([*arguments, "checkpoint"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    # 16.38 GB at 2.4 GB/s to two workers, each of which holds half and two buckets: the embedding is the largest
    assert "broadcast to 2: 6826 ms 18.87 GB 10.68 GB" in printed
    assert printed.startswith("lower bound memory: per rank per worker host disk case ")
    assert "8B bfloat16, fsdp x1, checkpoint/module, to 1 x TP=2 (16.38 GB)" in printed
    assert "there is no GPU" in printed


def test_a_dry_run_may_assume_gpus(capsys):
    arguments = ["bench", "--dry-run", "--gpus", "4", "--shape", "70B", "--ranks", "4", "--tp", "4", "--no-peers"]
    assert cli.main(arguments) == 0
    # A worker reads 35 GB: a quarter from its own GPU, the rest over the link.
    assert "peer copy: 71 ms 35.28 GB 35.28 GB" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["bench", "--gpus", "4096"]) == 2


@pytest.mark.engine
def test_a_run_measures_checks_and_reports(tmp_path):
    command = [sys.executable, "-m", "weightsync.cli", "bench", "--gpus", "0", "--no-peers", "--dtype", "float32"]
    command += ["--num-iters", "2", "--num-iters-warmup", "1", "--output-json", "out.json", "--report", "report"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=560)
    assert run.returncode == 0, run.stdout + run.stderr
    (found,) = from_json((tmp_path / "out.json").read_text())
    assert found.right
    assert len(found.repeats) == 2
    assert found.nbytes == 722_432
    for seconds in (found.first, *found.repeats):
        assert 0 < seconds["load_s"] < seconds["total_s"]
    assert found.floor_s < found.spread().least
    assert "| equal |" in (tmp_path / "report" / "report.md").read_text()
    assert "no plots" in run.stdout or (tmp_path / "report" / "phases.png").is_file()
