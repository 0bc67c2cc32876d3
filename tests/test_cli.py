"""The command `weightsync`: what it teaches, what it prints, and how it fails."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from weightsync import cli
from weightsync.cli import doctor
from weightsync.cli.demo import lay_out
from weightsync.errors import ConfigError
from weightsync.trial import Answer, ChildError, Responder, ask, difference, free_port, tiny_model


def weightsync(*arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weightsync.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--help"], ["weightsync demo", "weightsync plan ", "weightsync bench", "weightsync doctor", "Exit status"]),
        (["demo", "--help"], ["--transport {ipc,broadcast}", "--steps", "--layers"]),
        (
            ["plan", "--help"],
            ["MODEL_DIR", "--tp", "--expert-parallel", "--bucketer", "--max-bytes", "--dtype", "--all", "--simulate"],
        ),
        (
            ["bench", "--help"],
            [
                "--num-iters N",
                "--num-iters-warmup N",
                "--dry-run",
                "--output-json FILE",
                "--report DIR",
                "Exit status 1",
            ],
        ),
        (["doctor", "--help"], ["--engine URL", "--model DIR", "--no-engine", "--quantization SCHEME"]),
        (["--version"], ["weightsync 0."]),
    ],
)
def test_help(arguments, words, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert [word for word in words if word not in printed] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "/nonexistent"], "/nonexistent has no config.json"),
        (["plan", "/nonexistent", "--bucketer", "parameter", "--max-bytes", "1"], "has no meaning"),
        (["plan", "Qwen/Qwen3-8B"], "hf download Qwen/Qwen3-8B config.json --local-dir Qwen3-8B"),
        (["plan", "70B"], "a size goes with --simulate: weightsync plan 70B --simulate"),
        (["plan", "/nonexistent", "--simulate", "hosts=2"], "no size such as 70B"),
        (["plan", "70B", "--simulate", "hosts=2", "--tp", "1"], "--tp says nothing to --simulate: put tp=1 into"),
        (["plan", "70B", "--simulate", "", "--max-bytes", "1GB"], "--max-bytes says nothing to --simulate: put bucket"),
        (["plan", "70B", "--simulate", "", "--all"], "--all says nothing to --simulate: leave it out"),
        (["plan", "70B", "--simulate", "gpus=2"], "a topology has no 'gpus'"),
        (["demo", "--steps", "0"], "--steps 0"),
        (["bench", "--num-iters", "0"], "--num-iters 0"),
        (["bench", "--ranks", "2", "0"], "--ranks 0"),
        (["doctor", "--engine", "http://127.0.0.1:1"], "--engine and --model go together"),
        (["doctor", "--engine", "http://127.0.0.1:1", "--model", "/nonexistent", "--no-engine"], "exclude each other"),
        (["doctor", "--no-engine", "--quantization", "fp8"], "engines of the doctor's own"),
        (["doctor", "--engine", "localhost:8000", "--model", "/nonexistent"], "is not the URL of a server"),
        (["doctor", "--engine", "http://127.0.0.1:1", "--model", "/nonexistent"], "/nonexistent has no config.json"),
    ],
)
def test_a_call_that_cannot_work_is_one_message_and_status_2(arguments, message, capsys):
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_plan_shows_what_fuses_where_and_in_which_buckets(tmp_path, monkeypatch):
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    model = tiny_model(tmp_path, layers=3)
    run = weightsync("plan", str(model), "--tp", "2", "--bucketer", "threshold", "--max-bytes", "90kB", timeout_s=60)
    assert (run.returncode, run.stderr) == (0, "")
    lines = [line.strip() for line in run.stdout.splitlines()]
    assert "36 tensors, 952.45 kB in the dtypes that the engine holds" in lines
    # Worker 0 of 2 keeps the first half of each: 4 query heads of 32 and 2 key and value heads, over a width of 128.
    at = lines.index("model.layers.*.self_attn.qkv_proj.weight  [128, 128] bfloat16  x 3")
    assert lines[at + 1 : at + 4] == [
        "[0:64, 0:128]   <- model.layers.*.self_attn.q_proj.weight[0:64, 0:128]",
        "[64:96, 0:128]  <- model.layers.*.self_attn.k_proj.weight[0:32, 0:128]",
        "[96:128, 0:128] <- model.layers.*.self_attn.v_proj.weight[0:32, 0:128]",
    ]
    assert "3 tensors  model.layers.*.self_attn.{q_proj,k_proj,v_proj}.weight  x 3" in lines
    assert "2 tensors  model.layers.*.mlp.{gate_proj,up_proj}.weight  x 3" in lines
    assert "0   32.77 kB      1 tensor  model.embed_tokens.weight" in lines


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        ("{ cut off", [], "is not a valid JSON file"),
        ("{}", [], "Should have a `model_type`"),
        ('{"model_type": "nonesuch"}', [], "model type `nonesuch`"),
        (None, ["--tp", "3"], "vLLM refuses it: Total number of attention heads (4) must be divisible by"),
    ],
)
def test_plan_of_what_no_engine_serves_is_one_line_and_status_2(config, arguments, message, tmp_path, capsys):
    file = tiny_model(tmp_path, layers=1) / "config.json"
    if config is not None:
        file.write_text(config)
    assert cli.main(["plan", str(file), *arguments]) == 2
    *warnings, line = capsys.readouterr().err.splitlines()
    assert line.startswith("weightsync plan: ")
    assert message in line
    assert all("WARNING" in warning for warning in warnings), "vLLM's, of variables that tests have set"


def test_plan_says_which_sizes_cannot_be_shared_out(tmp_path, capsys):
    file = tiny_model(tmp_path, layers=1) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"intermediate_size": 258}))  # its 4 heads can
    assert cli.main(["plan", str(file), "--tp", "4"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "vLLM cannot make a model of this config for 4 tensor parallel workers: assert all(output_size" in line


def test_the_help_of_bench_begins_with_what_it_does(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    usage, text, *_ = capsys.readouterr().out.split("\n\n")
    assert len(usage.splitlines()) == 1
    assert text.startswith("Starts vLLM servers")


def test_sizes_are_bytes_or_have_a_unit(capsys):
    assert [cli._size(text) for text in ("90000", "256MiB", "1GB", "4kB")] == [90000, 256 << 20, 10**9, 4000]
    with pytest.raises(SystemExit, match="2"):
        cli.main(["plan", "/nonexistent", "--max-bytes", "1MX"])
    assert "'1MX': expected bytes, such as 268435456 or 256MiB" in capsys.readouterr().err


def test_no_command_at_all_shows_what_there_is(capsys):
    assert cli.main([]) == 2
    assert "weightsync demo" in capsys.readouterr().out


def test_plan_of_everything_shows_every_layer_and_worker(tmp_path):
    run = weightsync("plan", str(tiny_model(tmp_path, layers=2)), "--tp", "2", "--all", timeout_s=60)
    assert run.returncode == 0, run.stderr
    assert "load plan of worker tp=1" in run.stdout
    assert "<- model.layers.1.self_attn.v_proj.weight[32:64, 0:128]" in run.stdout
    assert "*" not in run.stdout


def test_plan_predicts_a_push_on_other_machines(capsys):
    arguments = ["plan", "70B", "--simulate", "", "--simulate", "hosts=8,ranks=32,engines=4"]
    assert cli.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "70B, 140.00 GB in bfloat16: predicted, not measured"
    rows = [re.split(r" {2,}", line.strip()) for line in lines[2:]]
    assert rows[0] == ["GPUs", "hosts", "ranks", "engines", "bucket", "transport", "push", "longest part"]
    assert rows[1] == ["8", "1", "8", "1 x TP=8", "256 MiB", "ipc", "22 ms", "peer copy, 62%"]
    impossible = ["-", "not possible: ipc needs trainer and engine on one host"]
    assert rows[4] == ["64", "8", "32", "4 x TP=8", "256 MiB", "ipc", *impossible]
    assert len(rows) == 1 + 2 * 3
    assert {line.index("  not possible") for line in lines if "not possible" in line} == {lines[2].index("  longest")}


def test_doctor_checks_the_machine():
    run = weightsync("doctor", "--no-engine", timeout_s=60)
    assert run.returncode == 0, run.stdout + run.stderr
    found = {line[6:29].strip(): line[:4] for line in run.stdout.splitlines() if line[:4] in ("pass", "FAIL", "skip")}
    assert found.keys() >= {"python", "weightsync", "torch", "msgpack", "/dev/shm", "loopback port", "vLLM plug-in"}
    assert found["shared memory"] == "pass", run.stdout
    assert found["engine"] == "skip"


def test_doctor_fails_where_vllm_would_not_load_the_plug_in(monkeypatch, capsys):
    monkeypatch.setenv("VLLM_PLUGINS", "lora_resolver")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert cli.main(["doctor", "--no-engine"]) == 1
    printed = capsys.readouterr().out
    assert "FAIL  vLLM plug-in           VLLM_PLUGINS=lora_resolver keeps it out: add weightsync to the list" in printed
    assert "FAIL  expandable_segments    on, by PYTORCH_CUDA_ALLOC_CONF" in printed
    assert "2 checks failed" in printed


def test_doctor_does_not_begin_without_weights_to_push(tmp_path, capsys):
    model = tiny_model(tmp_path, layers=1)
    assert cli.main(["doctor", "--engine", "http://127.0.0.1:1", "--model", str(model)]) == 2
    printed = capsys.readouterr()
    assert f"{model} has no weights (no *.safetensors and no *.bin); expected the checkpoint" in printed.err
    assert printed.out == ""


@contextmanager
def server(answers: dict[str, object]) -> Iterator[str]:
    """The URL of a server with these paths; a number is the status of a failure, and other paths are not found."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            answer = answers.get(self.path, 404)
            self.send_response(answer if isinstance(answer, int) else 200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def do_GET(self) -> None:
            self.do_POST()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as found:
        threading.Thread(target=found.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{found.server_port}"
        finally:
            found.shutdown()


MODELS = {"/v1/models": {"data": [{"id": "tiny"}]}}
COMPLETIONS = {"/v1/completions": {"choices": [{"logprobs": {"tokens": ["token_id:7"], "token_logprobs": [-0.5]}}]}}


def given_engine(url: str, model: Path) -> list[tuple[str, str, str]]:
    return [(f.status, f.check, f.text) for f in doctor._given_engine(url, model, "ipc")]


def test_doctor_does_not_blame_an_engine_that_it_never_reached(tmp_path):
    (engine, afterwards) = given_engine(f"http://127.0.0.1:{free_port()}", tmp_path)
    assert engine[:2] == ("FAIL", "engine")
    assert "is the server running, and is this its address?" in engine[2]
    assert afterwards == ("skip", "afterwards", "nothing was pushed")


def test_doctor_tells_an_engine_that_fails_before_any_push_from_a_push_that_fails(tmp_path):
    with server({**MODELS, "/v1/completions": 500}) as url:
        (generate, afterwards) = given_engine(url, tmp_path)
    assert generate[:2] == ("FAIL", "generate")
    assert generate[2].startswith("the engine fails before any push; its log says why: /v1/completions: status 500")
    assert afterwards == ("skip", "afterwards", "nothing was pushed")


def test_doctor_tells_what_is_no_vllm(tmp_path):
    with server({"/v1/models": "<html>"}) as url:
        (generate, _) = given_engine(url, tmp_path)
    assert generate[:2] == ("FAIL", "generate")
    assert "/v1/models: the answer is not vLLM's: '\"<html>\"'; is it a vLLM?" in generate[2]


def test_doctor_says_when_a_refused_push_has_changed_nothing(tmp_path):
    config = AutoConfig.from_pretrained(tiny_model(tmp_path, layers=1))
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path)
    with server({**MODELS, **COMPLETIONS}) as url:  # and no routes for weights, as without VLLM_SERVER_DEV_MODE=1
        (push, afterwards) = given_engine(url, tmp_path)
    assert push[:2] == ("FAIL", "push")
    assert afterwards[:2] == ("pass", "afterwards")
    assert "the engine serves what it did before" in afterwards[2]


def test_doctor_says_when_a_checkpoint_cannot_be_loaded(tmp_path):
    (tiny_model(tmp_path, layers=1) / "model.safetensors").write_bytes(b"cut off")
    with server({**MODELS, **COMPLETIONS}) as url:
        (model, afterwards) = given_engine(url, tmp_path)
    assert model[:2] == ("FAIL", "model")
    assert str(tmp_path) in model[2]
    assert afterwards == ("skip", "afterwards", "nothing was pushed")


@pytest.mark.engine
def test_doctor_pushes_to_an_engine_of_its_own():
    run = weightsync("doctor", timeout_s=200)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "the answers are unchanged" in run.stdout
    assert "other weights, other answers" in run.stdout
    assert "exactly their answers" in run.stdout


@pytest.mark.engine
def test_doctor_compares_a_quantised_engine_with_a_cold_one_and_an_unquantised_one():
    run = weightsync("doctor", "--quantization", "weightsync_int8", timeout_s=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "in weightsync_int8 answers" in run.stdout
    assert "answers exactly as the one that B was pushed to" in run.stdout
    (gap,) = re.findall(r"by ([0-9.]+) on average and ([0-9.]+) at most", run.stdout)
    assert 0 < float(gap[0]) <= float(gap[1]) < 0.5


@pytest.mark.engine
def test_demo_proves_pushed_equal_to_cold():
    run = weightsync("demo", "--steps", "1", "--layers", "2", timeout_s=400)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "PASS identical: 32 tokens of 4 prompts" in run.stdout


def test_demo_lays_out_trainers_and_engine_by_what_gpus_there_are(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert lay_out(0, "broadcast").trainers == ("cpu", "cpu")
    assert lay_out(1, "ipc").trainers == ("cuda:0",)
    assert (lay_out(4, "ipc").trainers, lay_out(4, "ipc").engine) == (("cuda:0", "cuda:1"), "cuda:0")
    with pytest.raises(ConfigError, match="this machine has one"):
        lay_out(1, "broadcast")
    two = lay_out(2, "broadcast")
    assert (two.trainers, two.engine, two.engine_environment) == (("cuda:0",), "cuda:1", {"CUDA_VISIBLE_DEVICES": "1"})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    three = lay_out(3, "broadcast")
    assert (three.trainers, three.engine_environment) == (("cuda:0", "cuda:1"), {"CUDA_VISIBLE_DEVICES": "7"})


def test_answers_differ_by_tokens_or_by_log_probabilities():
    one = Answer((1, 2), (-0.5, -1.0))
    assert difference([one], [one]) == 0
    assert difference([one], [Answer((1, 2), (-0.5, -1.25))]) == 0.25
    assert difference([one], [Answer((1, 3), (-0.5, -1.0))]) == float("inf")


def responder(tmp_path: Path, code: str) -> Responder:
    return Responder("the responder", [sys.executable, "-c", code], {}, tmp_path / "log")


def test_a_child_that_dies_is_an_error_with_the_end_of_its_log(tmp_path):
    child = responder(tmp_path, "import sys; print('out of luck', file=sys.stderr); input(); sys.exit(3)")
    try:
        with pytest.raises(ChildError, match=r"the responder ended with exit code 3(.|\n)*out of luck"):
            ask([child], {"do": "it"}, timeout_s=30)
    finally:
        child.stop()


def test_a_child_that_does_not_answer_is_an_error_in_time(tmp_path):
    child = responder(tmp_path, "import time; time.sleep(100)")
    started = time.monotonic()
    try:
        with pytest.raises(ChildError, match=r"no answer from the responder within 0\.5 s"):
            ask([child], {}, timeout_s=0.5)
    finally:
        child.stop()
    assert time.monotonic() - started < 10


def test_stopping_a_child_ends_what_it_has_started(tmp_path):
    code = """
import json, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
print(json.dumps({"pid": grandchild.pid}), flush=True)
input()
sys.exit()
"""
    child = responder(tmp_path, code)
    (answer,) = ask([child], {}, timeout_s=30)
    child.stop()
    assert not running(answer["pid"])


def running(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not yet waited for does not."""
    for _ in range(50):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return False
        except FileNotFoundError:
            return False
        time.sleep(0.1)
    return True


def test_a_tiny_model_is_a_config_alone(tmp_path):
    config = json.loads((tiny_model(tmp_path / "model", layers=5) / "config.json").read_text())
    assert (config["model_type"], config["num_hidden_layers"]) == ("qwen3", 5)
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["config.json"]
