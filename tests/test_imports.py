"""Who may import whom, and what `import weightsync` costs."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# The pure modules at the bottom: all that each may import from the package.
PURE = {
    "weightsync.errors": [],
    "weightsync.layout": ["weightsync.errors"],
    "weightsync.bucketing": ["weightsync.errors", "weightsync.layout"],
    "weightsync.wire": ["weightsync.errors", "weightsync.layout"],
    "weightsync.checkpoint.shards": ["weightsync.errors", "weightsync.layout"],
    "weightsync.simulate": ["weightsync.errors"],
    "weightsync.bench.shapes": ["weightsync.errors"],
    "weightsync.bench.cases": ["weightsync.errors", "weightsync.bench.shapes"],
}

# What a module, or a package and everything in it, must not import.
FORBIDDEN = {
    # They hold no tensors, so that they can be tested and read without any.
    "weightsync.errors": ["torch", "numpy"],
    "weightsync.layout": ["torch", "numpy"],
    "weightsync.bucketing": ["torch", "numpy"],
    "weightsync.wire": ["torch", "numpy"],
    "weightsync.checkpoint.shards": ["torch", "numpy"],
    "weightsync.simulate": ["torch", "numpy"],
    "weightsync.bench.shapes": ["torch", "numpy"],
    "weightsync.bench.cases": ["torch", "numpy"],
    "weightsync.bench.results": ["torch", "numpy"],
    # A sender works with every transport, a transport with every sender and receiver.
    "weightsync.senders": ["weightsync.transports", "weightsync.receiver", "weightsync.vllm", "weightsync.sync"],
    "weightsync.transports": ["weightsync.senders", "weightsync.receiver", "weightsync.vllm", "weightsync.sync"],
    # It talks to engines from outside.
    "weightsync.lora": ["weightsync.receiver", "weightsync.vllm", "weightsync.sync", "weightsync.session"],
    # The engine's side needs nothing of the trainer's.
    "weightsync.receiver": ["weightsync.senders", "weightsync.sync"],
    "weightsync.vllm": ["weightsync.senders", "weightsync.sync"],
    # Nothing is pickled or unpickled.
    "weightsync": ["pickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal"],
}

TRITON = [f"weightsync.kernels.{name}_triton" for name in ("copies", "digest", "rows")]

# A foreign package is imported in one room only; those of trainers also where a benchmark builds trainers of its own.
ROOM = {
    "vllm": ["weightsync.vllm"],
    "deepspeed": ["weightsync.senders.deepspeed", "weightsync.bench.models"],
    "megatron": ["weightsync.senders.megatron", "weightsync.bench.models"],
    "ray": ["weightsync.engines.ray_actor"],
    "peft": ["weightsync.senders.peft"],
    "triton": TRITON,
    "matplotlib": ["weightsync.bench.plots"],
}

# Not on `import`, but inside the function that needs it. A room that is all about its package may import it at the top.
LAZY = ["vllm", "deepspeed", "megatron", "ray", "transformers", "peft", "triton", "matplotlib"]
AT_THE_TOP = [
    "weightsync.vllm",
    "weightsync.senders.deepspeed",
    "weightsync.senders.megatron",
    *TRITON,
]


@dataclass(frozen=True)
class Import:
    """Line `line` of `module` imports `target`, for `from a import b` "a.b"; `lazy` when only a call executes it."""

    module: str
    line: int
    target: str
    lazy: bool

    def __str__(self) -> str:
        return f"{self.module}, line {self.line}: {self.target}"


def inside(name: str, room: str) -> bool:
    """Whether dotted `name` is `room` or lies in it."""
    return name == room or name.startswith(room + ".")


def imports_of(module: str, package: str, source: str) -> list[Import]:
    """Every import statement and every `import_module("...")` in `source`, the code of `module` in `package`."""
    found: list[Import] = []

    def visit(node: ast.AST, lazy: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(module, node.lineno, alias.name, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            found.extend(Import(module, node.lineno, f"{base}.{alias.name}", lazy) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
            if called in ("import_module", "__import__"):
                found.append(Import(module, node.lineno, str(node.args[0].value), lazy))
        for_types_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        deferred = lazy or for_types_only or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, deferred)

    visit(ast.parse(source), lazy=False)
    return found


@cache
def all_imports() -> list[Import]:
    found: list[Import] = []
    for path in sorted((ROOT / "weightsync").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        package = ".".join(parts[:-1])
        module = package if parts[-1] == "__init__" else ".".join(parts)
        found += imports_of(module, package, path.read_text(encoding="utf-8"))
    assert found, f"no import found below {ROOT / 'weightsync'}: is the test looking at the right folder?"
    return found


def fail_on(violations: list[Import], rule: str) -> None:
    lines = "".join(f"\n  {violation}" for violation in violations)
    assert not violations, f"{rule} Found:{lines}"


def test_imports_are_found_wherever_they_stand():
    source = """
import a.b
from c import d as e
from . import f
if TYPE_CHECKING:
    import g
def function():
    from .h import i
    importlib.import_module("j.k")
"""
    found = [(i.target, i.lazy) for i in imports_of("p.q", "p", source)]
    assert found == [
        ("a.b", False),
        ("c.d", False),
        ("p.f", False),
        ("g", True),
        ("p.h.i", True),
        ("j.k", True),
    ]


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_import_only_downward(module: str):
    violations = [
        i
        for i in all_imports()
        if i.module == module
        and inside(i.target, "weightsync")
        and not any(inside(i.target, permitted) for permitted in PURE[module])
    ]
    fail_on(violations, f"Of the package, {module} may import {PURE[module] or 'nothing'}, so that it stays pure.")


@pytest.mark.parametrize("room", FORBIDDEN)
def test_forbidden_imports(room: str):
    violations = [
        i for i in all_imports() if inside(i.module, room) and any(inside(i.target, other) for other in FORBIDDEN[room])
    ]
    fail_on(violations, f"{room} must not import {FORBIDDEN[room]}; the table FORBIDDEN in this test says why.")


@pytest.mark.parametrize("package", ROOM)
def test_foreign_packages_stay_in_their_room(package: str):
    violations = [
        i
        for i in all_imports()
        if inside(i.target, package) and not any(inside(i.module, room) for room in ROOM[package])
    ]
    fail_on(violations, f"{package} is imported in {' and '.join(ROOM[package])} and nowhere else.")


def test_heavy_packages_are_imported_lazily():
    violations = [
        i
        for i in all_imports()
        if not i.lazy
        and any(inside(i.target, package) for package in LAZY)
        and not any(inside(i.module, room) for room in AT_THE_TOP)
    ]
    fail_on(violations, f"{LAZY} are imported inside the function that needs them.")


def test_import_loads_no_engine_and_no_trainer_framework():
    code = "import json, sys, weightsync; print(json.dumps(sorted(sys.modules)))"
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    loaded = sorted(name for name in json.loads(printed) if any(inside(name, package) for package in LAZY))
    assert not loaded, f"`import weightsync` loads {loaded[:5]}: import them inside the function that needs them"


def test_import_costs_little_more_than_torch():
    code = """
import time
start = time.perf_counter()
import torch
torch_s = time.perf_counter() - start
start = time.perf_counter()
import weightsync
print(torch_s, time.perf_counter() - start)
"""
    # Timing on a busy machine only ever errs upward, so one good run is enough.
    measured = []
    for _ in range(5):
        printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
        torch_s, extra_s = map(float, printed.stdout.split())
        if extra_s <= max(0.3, 0.2 * torch_s):
            return
        measured.append(f"{extra_s:.2f} s on top of torch's {torch_s:.2f} s")
    raise AssertionError(
        f"`import weightsync` costs {'; '.join(measured)}: at most 0.3 s or 20% are allowed. "
        "`python -X importtime -c 'import weightsync'` shows where the time goes."
    )
