"""The command `weightsync`: what it teaches, what it prints, and how it fails."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

import weightsync.__main__
from weightsync.errors import ConfigError, UnsupportedError
from weightsync.tools import cli, doctor, handles
from weightsync.tools.demo import lay_out
from weightsync.tools.processes import Answer, difference, tiny_model
from weightsync.vllm import serve


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--help"], ["weightsync demo", "weightsync plan ", "weightsync bench", "weightsync doctor", "Exit status"]),
        (["demo", "--help"], ["--transport {ipc,broadcast,nixl}", "--steps", "--layers"]),
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
                "--json FILE",
                "--client NAME",
                "--cuda-graphs HOW",
                "Exit status 1",
            ],
        ),
        (
            ["serve", "--help"],
            ["usage: weightsync serve MODEL", "--bridge PATH", "`vllm serve --help` shows all other"],
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
        (["plan", "/nonexistent", "--bucketer", "parameter", "--max-bytes", "1"], "leave max_bytes=1 out"),
        (["plan", "Qwen/Qwen3-8B"], "hf download Qwen/Qwen3-8B config.json --local-dir Qwen3-8B"),
        (["plan", "70B"], "a size goes with --simulate: weightsync plan 70B --simulate"),
        (["plan", "/nonexistent", "--simulate", "hosts=2"], "no size such as 70B"),
        (["plan", "70B", "--simulate", "hosts=2", "--tp", "1"], "--tp has no effect on --simulate: put tp=1 into"),
        (["plan", "70B", "--simulate", "", "--max-bytes", "1GB"], "--max-bytes has no effect on --simulate: put chunk"),
        (["plan", "70B", "--simulate", "", "--all"], "--all has no effect on --simulate: leave it out"),
        (["plan", "70B", "--simulate", "gpus=2"], "a topology has no 'gpus'"),
        (["serve", "m", "--weight-transfer-config={}"], "leave --weight-transfer-config out"),
        (["demo", "--steps", "0"], "--steps 0"),
        (["bench", "--num-iters", "0"], "--num-iters 0"),
        pytest.param(
            *(["bench", "--ranks", "2", "0"], "--ranks 0"),
            marks=pytest.mark.skipif(not find_spec("vllm"), reason="without vLLM, bench asks for it first"),
        ),
        (["bench", "--layers", "0"], "--layers 0"),
        (["bench", "--json", "/nonexistent/found.json"], "there is no folder /nonexistent"),
        (["bench", "--folder", "/nonexistent"], "there is no folder /nonexistent"),
        (["doctor", "--model", "/nonexistent"], "--model needs --engine"),
        (["doctor", "--engine", "http://127.0.0.1:1", "--model", "/nonexistent", "--no-engine"], "exclude each other"),
        (["doctor", "--no-engine", "--quantization", "fp8"], "engines of the doctor's own"),
        (["doctor", "--engine", "localhost:8000", "--model", "/nonexistent"], "is not the URL of a server"),
        (["doctor", "--engine", "http://127.0.0.1:1", "--model", "/nonexistent"], "/nonexistent has no config.json"),
    ],
)
def test_a_call_that_cannot_work_is_one_message_and_status_2(arguments, message, capsys):
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_commands_say_which_package_they_lack(monkeypatch, capsys):
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    for arguments, package in [
        (["serve", "m"], "weightsync[vllm]"),
        (["bench", "--dry-run", "--gpus", "0"], "transformers"),
        (["plan", "tiny", "--simulate", ""], "transformers"),
    ]:
        assert cli.main(arguments) == 2
        assert re.search(rf"pip install '?{re.escape(package)}", capsys.readouterr().err)


def test_a_command_that_is_interrupted_before_it_runs_ends_in_one_word(monkeypatch, capsys):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_add_handles", interrupt)
    monkeypatch.setattr(sys, "argv", ["weightsync", "handles"])
    assert weightsync.__main__.main() == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_command_that_is_interrupted_at_its_first_import_ends_in_one_word():
    """The package itself imports nothing, so that `main` comes first."""
    program = (
        "import sys, weightsync.__main__ as command\n"
        "assert [name for name in sys.modules if name.startswith('weightsync.')] == ['weightsync.__main__']\n"
        "class Interrupt:\n"
        "    def find_spec(*_): raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt)\n"
        "sys.exit(command.main())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


@pytest.mark.parametrize(("arguments", "status"), [([], 1), (["--no-engine"], 0)])
def test_doctor_does_not_praise_an_engine_that_it_has_not_seen(monkeypatch, capsys, arguments, status):
    for name in ("_versions", "_gpus", "_shared_memory", "_handles", "check_nixl", "_settings", "_port", "_plug_in"):
        monkeypatch.setattr(doctor, name, lambda: iter(()))
    monkeypatch.setattr(doctor.processes, "vllm_version", lambda: None)
    assert cli.main(["doctor", *arguments]) == status
    assert capsys.readouterr().out.endswith("\nnothing failed, but no engine was looked at\n")


def test_what_weightsync_does_not_cover_is_status_2_too(monkeypatch, capsys):
    def refuse(*_: object) -> bool:
        raise UnsupportedError("this engine cannot be pushed to")

    monkeypatch.setattr(handles, "run", refuse)
    assert cli.main(["handles"]) == 2
    assert "this engine cannot be pushed to" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("release", "status"), [("0.19.1", "FAIL"), ("0.24.0", "skip"), ("0.25.0", "pass"), ("0.34.0rc1", "FAIL")]
)
def test_doctor_knows_releases_that_the_worker_extension_alone_serves(monkeypatch, release, status):
    monkeypatch.setattr(doctor.processes, "vllm_version", lambda: release)
    (found,) = [finding for finding in doctor._versions() if finding.check == "vllm"]
    assert found.status == status


def test_the_help_of_bench_begins_with_what_it_does(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    usage, text, *_ = capsys.readouterr().out.split("\n\n")
    assert len(usage.splitlines()) == 1
    assert text.startswith("Starts trainers")


def test_sizes_are_bytes_or_have_a_unit(capsys):
    assert [cli._size(text) for text in ("90000", "256MiB", "1GB", "4kB")] == [90000, 256 << 20, 10**9, 4000]
    with pytest.raises(SystemExit, match="2"):
        cli.main(["plan", "/nonexistent", "--max-bytes", "1MX"])
    assert "'1MX': expected bytes, such as 268435456 or 256MiB" in capsys.readouterr().err


def test_no_command_at_all_shows_what_there_is(capsys):
    assert cli.main([]) == 2
    assert "weightsync demo" in capsys.readouterr().out


def test_plan_predicts_a_push_on_other_machines(capsys):
    arguments = ["plan", "70B", "--simulate", "", "--simulate", "hosts=8,ranks=32,engines=4"]
    assert cli.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "70B, 140.00 GB in bfloat16: predicted, not measured"
    rows = [re.split(r" {2,}", line.strip()) for line in lines[2:]]
    assert rows[0] == ["GPUs", "hosts", "ranks", "engines", "chunk", "transport", "push", "control", "longest part"]
    assert rows[1] == ["8", "1", "8", "1 x TP=8", "256 MiB", "ipc", "22 ms", "8 ms", "peer copy, 64%"]
    impossible = ["-", "-", "not possible: ipc needs trainer and engine on one host"]
    assert rows[5] == ["64", "8", "32", "4 x TP=8", "256 MiB", "ipc", *impossible]
    assert len(rows) == 1 + 2 * 4
    assert {line.index("  not possible") for line in lines if "not possible" in line} == {lines[2].index("  longest")}


def test_plan_predicts_a_first_push_of_a_shape(capsys):
    arguments = ["plan", "tiny-moe", "--expert-parallel", "--simulate", "gpus_per_host=3,ranks=2,tp=1,engines=1"]
    assert cli.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("tiny-moe, ")
    rows = [re.split(r" {2,}", line.strip()) for line in lines[-5:]]
    assert rows[0][4:] == ["participant", "receives", "sends", "busy", "largest message"]
    assert [row[4] for row in rows[1:]] == ["rank 0", "each other rank", "each worker", "all of them"]
    assert all(row[:4] == ["3", "2", "2", "1 x TP=1"] for row in rows[1:])
    assert rows[4][-1].startswith("PackedPlan, ")


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
    assert difference([one], [Answer((1, 2), (-0.5, float("nan")))]) == float("inf")


def test_a_tiny_model_is_a_config_alone(tmp_path):
    config = json.loads((tiny_model(tmp_path / "model", layers=5) / "config.json").read_text())
    assert (config["model_type"], config["num_hidden_layers"]) == ("qwen3", 5)
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("before", "answers", "status"),
    [("default", 1, "pass"), ("default", 2, "FAIL"), (None, 2, "FAIL"), ("13", 1, "pass"), ("13", 2, "skip")],
)
def test_doctor_blames_no_push_for_the_weights_that_a_trainer_pushed_before(before, answers, status):
    own, start = ([Answer((token,), (-0.5,))] for token in (1, answers))
    found = doctor._identity(own, start, "1 kB in 1 s", before)
    assert found.status == status
    assert (status != "skip") or "version 13 had other weights than --model" in found.text
