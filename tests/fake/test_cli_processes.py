"""The command `weightsync` in processes of its own, with vLLM's loader, and against servers that are no engine."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

from weightsync.net.child import Child, free_port
from weightsync.tools import cli, doctor
from weightsync.tools.bench import run as bench
from weightsync.tools.bench.cases import expand
from weightsync.tools.processes import ChildError, generate, run_trainers, tiny_model, wait_for_first


def weightsync(*arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    command = [Path(sysconfig.get_path("scripts"), "weightsync"), *arguments]  # as it is installed
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)


def forked(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `weightsync`. In a test that is marked `forks`, its process has vLLM imported."""
    command = [sys.executable, "-m", "weightsync", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_locale_without_the_letters_of_an_output_ends_no_command(tmp_path):
    example = Path(__file__).parents[2] / "examples" / "place_ppo.json"
    job = tmp_path / "job.json"
    job.write_text(
        example.read_text(encoding="utf-8").replace("actor", "\N{CYRILLIC SMALL LETTER A}ctor"), encoding="utf-8"
    )
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "weightsync", "place", job]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert r"\u0430ctor" in ran.stdout


def test_plan_shows_what_fuses_where_and_on_a_terminal_what_it_waits_for(tmp_path, monkeypatch):
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = os.openpty()
    words = ["plan", str(tiny_model(tmp_path, layers=3)), "--tp", "2", "--bucketer", "threshold", "--max-bytes", "90kB"]
    command = [Path(sysconfig.get_path("scripts"), "weightsync"), *words]  # as it is installed
    with (tmp_path / "plan").open("wb") as file, subprocess.Popen(command, stdout=file, stderr=theirs) as child:
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # the end of a terminal is an error
            while part := os.read(ours, 1 << 16):
                shown += part
        os.close(ours)
    assert child.returncode == 0
    # The step between them, "making the model", may end before the terminal is refreshed.
    assert shown.index(b"loading vLLM") < shown.index(b"tracing vLLM's loader")
    assert not re.search(rb"INFO|WARNING|Error", shown)
    lines = [line.strip() for line in (tmp_path / "plan").read_text().splitlines()]
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


def test_a_command_that_is_interrupted_while_it_loads_ends_in_one_word():
    """Imports of torch take seconds."""
    command = [sys.executable, "-m", "weightsync", "doctor", "--no-engine"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while "libtorch" not in Path(f"/proc/{child.pid}/maps").read_text():
        assert child.poll() is None
        time.sleep(0.01)
    child.send_signal(signal.SIGINT)
    printed, told = child.communicate(timeout=60)
    assert "interrupted" in told, (child.returncode, printed)
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        ("{ cut off", [], "is not a valid JSON file"),
        ('{"quantization_config": {', [], "is not a valid JSON file"),
        ("{}", [], "Should have a `model_type`"),
        ('{"model_type": "nonesuch"}', [], "model type `nonesuch`"),
        (None, ["--tp", "3"], "vLLM refuses it: Total number of attention heads (4) must be divisible by"),
    ],
)
@pytest.mark.forks
def test_plan_of_what_no_engine_serves_is_one_line_and_status_2(config, arguments, message, tmp_path):
    file = tiny_model(tmp_path, layers=1) / "config.json"
    if config is not None:
        file.write_text(config)
    run = forked("plan", str(file), *arguments)
    assert run.returncode == 2
    *warnings, line = run.stderr.splitlines()
    assert line.startswith("weightsync plan: ")
    assert message in line
    assert all("WARNING" in warning for warning in warnings), "vLLM's, of variables that tests have set"


@pytest.mark.forks
def test_plan_says_which_sizes_cannot_be_shared_out(tmp_path):
    file = tiny_model(tmp_path, layers=1) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"intermediate_size": 258}))  # its 4 heads can
    run = forked("plan", str(file), "--tp", "4")
    assert run.returncode == 2
    line = run.stderr.splitlines()[-1]
    assert "vLLM cannot make a model of this config for 4 tensor parallel workers: assert all(output_size" in line


@pytest.mark.forks
def test_plan_of_a_quantised_checkpoint_is_of_an_unquantised_engine(tmp_path):
    file = tiny_model(tmp_path, layers=2) / "config.json"
    quantisation = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantisation}))
    run = forked("plan", str(file))
    printed = run.stdout
    assert run.returncode == 0, printed + run.stderr
    assert "The plan is of an unquantised engine" in printed
    assert "no tensor fills it" not in printed


@pytest.mark.forks
def test_plan_of_everything_shows_every_layer_and_worker(tmp_path):
    run = forked("plan", str(tiny_model(tmp_path, layers=2)), "--tp", "2", "--all")
    assert run.returncode == 0
    printed = run.stdout
    assert "loading vLLM" not in run.stderr, "it is no terminal"
    assert "load plan of worker tp=1" in printed
    assert "<- model.layers.1.self_attn.v_proj.weight[32:64, 0:128]" in printed
    assert "*" not in printed


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["serve", "--help"], ["plan", "1T", "--simulate", "hosts=128,ranks=512,engines=16,tp=32"]],
    ids=" ".join,
)
def test_what_needs_no_torch_starts_within_a_second(arguments):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert weightsync(*arguments, timeout_s=60).returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Of computing: how long it waits for a core is for others to say.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["bench", "--dry-run", "--gpus", "0"], 0, "lower bound"),
        (["demo", "--steps", "0"], 2, "both must be at least 1"),
    ],
)
def test_commands_that_start_engines_are_installed(arguments: list[str], code: int, words: str):
    run = weightsync(*arguments, timeout_s=60)
    assert (run.returncode, words in run.stdout.lower() + run.stderr) == (code, True), run.stdout + run.stderr


@pytest.mark.forks
def test_doctor_checks_the_machine():
    run = forked("doctor", "--no-engine")
    assert run.returncode == 0, run.stdout + run.stderr
    found = {line[6:29].strip(): line[:4] for line in run.stdout.splitlines() if line[:4] in ("pass", "FAIL", "skip")}
    assert found.keys() >= {"python", "weightsync", "torch", "msgspec", "/dev/shm", "loopback port", "vLLM plug-in"}
    assert found["shared memory"] == "pass", run.stdout
    assert found["engine"] == "skip"


@pytest.mark.forks
def test_doctor_fails_where_vllm_would_not_load_the_plug_in(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "lora_resolver")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    run = forked("doctor", "--no-engine")
    assert run.returncode == 1
    assert (
        "FAIL  vLLM plug-in           VLLM_PLUGINS=lora_resolver leaves weightsync out: add it to the list"
        in run.stdout
    )
    assert "FAIL  expandable_segments    on, by PYTORCH_CUDA_ALLOC_CONF" in run.stdout
    assert "2 checks failed" in run.stdout


def test_doctor_does_not_begin_without_weights_to_push(tmp_path, capsys):
    model = tiny_model(tmp_path, layers=1)
    assert cli.main(["doctor", "--engine", "http://127.0.0.1:1", "--model", str(model)]) == 2
    printed = capsys.readouterr()
    assert f"{model} has no weights (no *.safetensors and no *.bin); expected the folder of" in printed.err
    assert printed.out == ""


@contextmanager
def server(answers: dict[str, object]) -> Iterator[str]:
    """The URL of a server with these paths; a number is the status of a failure, and other paths are not found.

    A path with "#1" answers requests for core 1.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            core = self.headers.get("X-data-parallel-rank")
            answer = answers.get(self.path if core is None else f"{self.path}#{core}", 404)
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


def completion(token: int) -> dict[str, object]:
    return {"choices": [{"logprobs": {"tokens": [f"token_id:{token}"], "token_logprobs": [-0.5]}}]}


COMPLETIONS = {"/v1/completions": completion(7)}


def test_answers_come_from_the_core_that_was_asked():
    with server({f"/v1/completions#{core}": completion(core) for core in range(2)}) as url:
        assert [generate(url, [[1]], core)[0].token_ids for core in (1, 0)] == [(1,), (0,)]


def given_engine(url: str, model: Path) -> list[tuple[str, str, str]]:
    return [(f.status, f.check, f.text) for f in doctor._given_engine(url, model, "ipc")]


def test_doctor_does_not_blame_an_engine_that_it_never_reached(tmp_path):
    (engine, afterwards) = given_engine(f"http://127.0.0.1:{free_port()}", tmp_path)
    assert engine[:2] == ("FAIL", "engine")
    assert "check that the server runs at this address" in engine[2]
    assert afterwards == ("skip", "afterwards", "nothing was pushed")


def test_doctor_tells_an_engine_that_fails_before_any_push_from_a_push_that_fails(tmp_path):
    with server({"/v1/completions": 500}) as url:
        (asked, afterwards) = given_engine(url, tmp_path)
    assert asked[:2] == ("FAIL", "generate")
    assert asked[2].startswith("the engine fails before any push; look into its log: /v1/completions (status 500)")
    assert afterwards == ("skip", "afterwards", "nothing was pushed")


def test_doctor_tells_what_is_no_vllm(tmp_path):
    with server({"/v1/completions": "<html>"}) as url:
        (asked, _) = given_engine(url, tmp_path)
    assert asked[:2] == ("FAIL", "generate")
    assert "/v1/completions: the answer is not vLLM's: '\"<html>\"'" in asked[2]


def test_doctor_says_when_a_refused_push_has_changed_nothing(tmp_path):
    config = AutoConfig.from_pretrained(tiny_model(tmp_path, layers=1))
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path)
    with server(COMPLETIONS) as url:  # and no routes for weights, as without VLLM_SERVER_DEV_MODE=1
        (push, afterwards) = given_engine(url, tmp_path)
    assert push[:2] == ("FAIL", "push")
    assert afterwards[:2] == ("pass", "afterwards")
    assert "the engine serves its weights from before" in afterwards[2]


def test_doctor_says_when_a_checkpoint_cannot_be_loaded(tmp_path):
    (tiny_model(tmp_path, layers=1) / "model.safetensors").write_bytes(b"cut off")
    with server(COMPLETIONS) as url:
        (model, afterwards) = given_engine(url, tmp_path)
    assert model[:2] == ("FAIL", "model")
    assert str(tmp_path) in model[2]
    assert afterwards == ("skip", "afterwards", "nothing was pushed")


def python(tmp_path: Path, code: str) -> Child:
    return Child("the child", [sys.executable, "-c", code], {}, tmp_path / "log")


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


def test_a_child_that_dies_is_an_error_with_the_end_of_its_log(tmp_path):
    waits = python(tmp_path, "import time; time.sleep(100)")
    dies = python(tmp_path, "import sys; print('out of luck', file=sys.stderr); sys.exit(3)")
    try:
        with pytest.raises(ChildError, match=r"the child ended with exit code 3(.|\n)*out of luck"):
            wait_for_first([waits, dies], timeout_s=30)
    finally:
        waits.stop()


def test_a_benchmark_that_is_interrupted_ends_its_processes_and_begins_no_other_case(tmp_path, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    started = tmp_path / "started"
    code = f"import os, time; open({str(started)!r}, 'a').write(f'{{os.getpid()}} '); time.sleep(100)"
    (tmp_path / "busy_trainer.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(bench, "trainer", Namespace(__name__="busy_trainer"))
    monkeypatch.setattr(bench, "floor", lambda *_: (0.0, "none"))
    axes = {"backend": ["plain"], "ranks": [1], "dtype": ["bfloat16"], "shape": ["tiny"], "tp": [1]}
    axes |= {"transport": ["ipc"], "bucketer": ["module"], "quantization": ["none"], "engines": [1, 2, 3]}
    axes |= {"data_parallel_size": [1], "expert_parallel": [False], "load_format": ["auto"]}
    axes |= {"encoding": ["none"], "changed": [1.0]}
    options = Namespace(
        **axes, client=["http"], way=["weightsync"], jobs=1, cuda_graphs=None, trainer_on_cpu=False, max_bytes=None,
        num_iters_warmup=0, num_iters=1,
    )  # fmt: skip

    def when_it_has_begun() -> None:
        while not (started.exists() and started.read_text()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    threading.Thread(target=when_it_has_begun, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            list(bench._measure_all(expand(options), options, {"tiny": 1}, 0, {}, tmp_path, Console(quiet=True)))
    finally:
        signal.signal(signal.SIGUSR1, before)
    (pid,) = map(int, started.read_text().split())
    assert not running(pid)


def test_a_first_child_that_ends_well_is_waited_for_alone(tmp_path):
    waits = python(tmp_path, "import time; time.sleep(100)")
    try:
        wait_for_first([python(tmp_path, ""), waits], timeout_s=30)
        assert waits.process.poll() is None
    finally:
        waits.stop()


def test_a_child_that_does_not_end_is_an_error_in_time(tmp_path):
    child = python(tmp_path, "import time; time.sleep(100)")
    started = time.monotonic()
    try:
        with pytest.raises(ChildError, match=r"the child has not ended within 0\.5 s"):
            wait_for_first([child], timeout_s=0.5)
    finally:
        child.stop()
    assert time.monotonic() - started < 10


def test_trainers_get_their_order_and_torchruns_variables(tmp_path, capfd, monkeypatch):
    code = "import os, sys; print(os.environ['RANK'], os.environ['WORLD_SIZE'], *sys.argv[1:], flush=True)"
    (tmp_path / "echo_order.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run_trainers("echo_order", {"steps": 3}, 2, tmp_path, timeout_s=30, shows=True)
    assert capfd.readouterr().out == '0 2 {"steps": 3}\n'


def test_stopping_a_child_ends_what_it_has_started(tmp_path):
    code = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]).pid, flush=True)
time.sleep(1)
"""
    child = python(tmp_path, code)
    while not (text := child.log.read_text()).endswith("\n"):
        assert child.exit_report() is None
        time.sleep(0.05)
    child.stop()
    assert not running(int(text))


def test_a_child_ends_when_the_process_that_has_started_it_is_killed(tmp_path):
    theirs = """
import os, time
from weightsync.net.child import end_with_parent
end_with_parent()
print(os.getpid(), flush=True)
time.sleep(100)
"""
    log = tmp_path / "log"
    code = f"""
import sys, time
from pathlib import Path
from weightsync.net.child import Child
Child("the child", [sys.executable, "-c", {theirs!r}], {{}}, Path({str(log)!r}))
time.sleep(100)
"""
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        while not (log.exists() and log.read_text().endswith("\n")):
            assert parent.poll() is None
            time.sleep(0.05)
        parent.kill()
    assert not running(int(log.read_text()))


def test_a_child_is_no_rank_of_the_trainer_that_starts_it(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "1")
    child = python(tmp_path, "import os; print(*os.environ)")
    child.process.wait(60)
    assert not {"RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"} & {*child.log.read_text().split()}
