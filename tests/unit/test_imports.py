"""Who may import whom, and what `import weightsync` costs."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# The pure modules at the bottom: all that each may import from the package.
PURE = {
    "weightsync.errors": [],
    "weightsync.planning.grouping": [],
    "weightsync.planning.layout": ["weightsync.errors", "weightsync.planning.grouping"],
    "weightsync.planning.bucketing": ["weightsync.errors", "weightsync.planning.layout"],
    "weightsync.net.timeouts": [],
    "weightsync.net.wire": [
        "weightsync.net.timeouts",
        "weightsync.errors",
        "weightsync.planning.grouping",
        "weightsync.planning.layout",
        "weightsync.planning.load_plan",
        "weightsync.planning.wire_types",
    ],
    "weightsync.checkpoint.safetensors": [
        "weightsync.errors",
        "weightsync.planning.bucketing",
        "weightsync.planning.layout",
    ],
    "weightsync.planning.load_plan": [
        "weightsync.errors",
        "weightsync.planning.grouping",
        "weightsync.planning.layout",
    ],
    "weightsync.planning.merge": ["weightsync.errors", "weightsync.planning.layout"],
    "weightsync.planning.wire_types": ["weightsync.errors", "weightsync.planning.layout"],
    "weightsync.planning.transfer_plan": [
        "weightsync.errors",
        "weightsync.planning.grouping",
        "weightsync.planning.layout",
        "weightsync.planning.load_plan",
        "weightsync.planning.wire_types",
    ],
    "weightsync.tools.simulate": [
        "weightsync.errors",
        "weightsync.planning.bucketing",
        "weightsync.planning.transfer_plan",
    ],
    "weightsync.tools.first_push": [
        "weightsync.net.wire",
        "weightsync.planning.layout",
        "weightsync.report",
        "weightsync.tools.simulate",
    ],
    "weightsync.tools.bench.shapes": ["weightsync.errors"],
    "weightsync.tools.bench.cases": ["weightsync.errors", "weightsync.tools.bench.shapes"],
}

# The product from the bottom up: a module imports from its own layer and from those below, whenever it imports.
# A module is in the layer with the longest name that it lies in.
ORDER = [
    ["weightsync.errors"],
    ["weightsync.planning", "weightsync.report", "weightsync.selection"],
    ["weightsync.net"],
    ["weightsync.telemetry"],
    ["weightsync.config"],
    ["weightsync.kernels"],
    ["weightsync.sources"],
    ["weightsync.checkpoint"],
    ["weightsync.transports"],
    ["weightsync.worker"],
    ["weightsync.vllm"],
    ["weightsync.engines"],
    ["weightsync.fleet"],
    ["weightsync.strategies"],
    ["weightsync.sync"],
    ["weightsync.hybrid", "weightsync.integrations"],
    ["weightsync"],
    ["weightsync.tools", "weightsync.__main__"],
]

# A user's option object is what opens its strategy, and a folder of checkpoints opens that of `CopyWeights` too.
NAMES_A_STRATEGY = {
    "CopyWeights": ["weightsync.strategies.restart"],
    "LoraAdapters": [],
    "SaveAndRestart": [],
    "SharedMemory": [],
}

MAX_CODE_LINES = 350

# What a module, or a package and everything in it, must not import.
FORBIDDEN = {
    # They hold no tensors, so that they can be tested and read without any.
    "weightsync.errors": ["torch", "numpy"],
    "weightsync.planning.layout": ["torch", "numpy"],
    "weightsync.planning.bucketing": ["torch", "numpy"],
    "weightsync.net.wire": ["torch", "numpy"],
    "weightsync.checkpoint.safetensors": ["torch", "numpy"],
    "weightsync.tools.simulate": ["torch", "numpy"],
    "weightsync.tools.first_push": ["torch", "numpy"],
    "weightsync.tools.bench.shapes": ["torch", "numpy"],
    "weightsync.tools.bench.cases": ["torch", "numpy"],
    # A source works with every transport, a transport with every source and receiver.
    "weightsync.sources": [
        "weightsync.tools",
        "weightsync.transports",
        "weightsync.receiver",
        "weightsync.vllm",
        "weightsync.sync",
    ],
    "weightsync.transports": [
        "weightsync.tools",
        "weightsync.sources",
        "weightsync.receiver",
        "weightsync.vllm",
        "weightsync.sync",
    ],
    # It talks to engines from outside.
    "weightsync.strategies.lora": [
        "weightsync.receiver",
        "weightsync.vllm",
        "weightsync.sync",
        "weightsync.fleet.fleet",
    ],
    # The engine's side needs nothing of the trainer's.
    "weightsync.receiver": ["weightsync.sources", "weightsync.sync"],
    "weightsync.vllm": ["weightsync.sources", "weightsync.sync"],
    # Nothing is pickled or unpickled.
    "weightsync": ["pickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal"],
}

VERL = [f"weightsync.integrations.verl{name}" for name in ("", "_trainer", "_worker")]
TRITON = [f"weightsync.kernels.{name}_triton" for name in ("changed_words", "copies", "digest", "rows")]

# A foreign package is imported in one room only; those of trainers also where a benchmark builds trainers of its own.
ROOM = {
    "vllm": [
        "weightsync.vllm",
        "weightsync.integrations.vllm_trainer",
        "weightsync.tools.bench.engines",
        "weightsync.tools.bench.peers",
    ],
    "deepspeed": ["weightsync.sources.deepspeed", "weightsync.tools.bench.models"],
    "megatron": ["weightsync.sources.megatron", "weightsync.tools.bench.models"],
    "ray": ["weightsync.engines.ray_actor", "weightsync.hybrid", *VERL[:2]],
    "tensordict": ["weightsync.hybrid"],
    "bitsandbytes": ["weightsync.sources.four_bits"],
    "peft": ["weightsync.sources.peft"],
    "prometheus_client": ["weightsync.telemetry"],
    "opentelemetry": ["weightsync.telemetry"],
    "skyrl": ["weightsync.integrations.skyrl"],
    "trl": ["weightsync.integrations.trl"],
    "verl": [
        "weightsync.integrations.verl",
        "weightsync.integrations.verl_trainer",
        "weightsync.integrations.verl_worker",
    ],
    "triton": TRITON,
    "matplotlib": ["weightsync.tools.bench.plot"],
}

# Not on `import`, but inside the function that needs it. A room that is all about its package may import it at the top.
LAZY = [
    "vllm",
    "deepspeed",
    "megatron",
    "ray",
    "tensordict",
    "transformers",
    "peft",
    "trl",
    "verl",
    "triton",
    "prometheus_client",
    "opentelemetry",
    "matplotlib",
]
AT_THE_TOP = [
    "weightsync.hybrid",
    "weightsync.integrations",
    "weightsync.vllm",
    "weightsync.sources.deepspeed",
    "weightsync.sources.megatron",
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


def layer_of(module: str) -> int:
    places = [(len(room), number) for number, layer in enumerate(ORDER) for room in layer if inside(module, room)]
    return max(places)[1]


@cache
def sources() -> dict[str, str]:
    """Return the code of every module."""
    found = {}
    for path in sorted((ROOT / "weightsync").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return found


def target_of(found: Import) -> str:
    """Return the module that an import of the package executes last: of "a.b.Name" it is "a.b"."""
    module = found.target
    while module not in sources():
        module = module.rpartition(".")[0]
    return module


def ours() -> list[Import]:
    return [i for i in all_imports() if inside(i.target, "weightsync")]


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """Return modules of which each imports the next and the last the first, or nothing."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return path[path.index(module) :]
        if module in done:
            return []
        done.add(module)
        return next((found for other in sorted(graph[module]) if (found := visit(other, [*path, module]))), [])

    return next((found for module in graph if (found := visit(module, []))), [])


def code_lines(source: str) -> int:
    """Return how many lines have code: no blank line, comment or docstring."""
    tree = ast.parse(source)
    strings = [node for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    docstrings = [node for node in strings if isinstance(node.value.value, str)]
    words = {line for node in docstrings for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    return sum(
        bool(line.strip()) and not line.lstrip().startswith("#") and number not in words
        for number, line in enumerate(source.splitlines(), 1)
    )


def test_packages_import_only_downward():
    # The package's root names lazily what users import from it; nobody imports that root.
    violations = [i for i in ours() if layer_of(target_of(i)) > layer_of(i.module)]
    fail_on(violations, "A module imports from its own layer and those below; the table ORDER in this test has them.")


def test_the_picture_for_contributors_has_the_layers():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    lines = re.findall(r"^```text\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[0].splitlines()
    drawn = [re.split(r" {2,}", line)[0].split(", ") for line in lines]
    assert drawn[::-1] == [[module.removeprefix("weightsync.") for module in layer] for layer in ORDER]


def test_modules_import_each_other_in_no_circle():
    graph: dict[str, set[str]] = {module: set() for module in sources()}
    for found in ours():
        if not found.lazy and target_of(found) != found.module:
            graph[found.module].add(target_of(found))
    assert circle_in(graph) == []


def test_a_circle_is_found():
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c"]


def test_a_transport_is_not_asked_which_it_is():
    asked = [
        f"{module}, line {node.lineno}"
        for module, source in sources().items()
        if not inside(module, "weightsync.tools")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance"
        # Whether it is one at all may be asked, because users pass an object.
        if re.search(r"\w(Transport|Strategy)\b", ast.unparse(node.args[1]))
    ]
    assert asked == [], "transports and strategies differ in their methods, not in who calls them"


@pytest.mark.parametrize("strategy", NAMES_A_STRATEGY)
def test_a_strategys_class_is_named_where_it_is_opened_alone(strategy: str):
    homes = [module for module, source in sources().items() if f"class {strategy}(" in source]
    assert len(homes) == 1, f"{strategy} is in {homes}: is the table in this test out of date?"
    naming = {
        module
        for module, source in sources().items()
        for node in ast.walk(ast.parse(source))
        if strategy in (getattr(node, "id", None), getattr(node, "name", None), getattr(node, "attr", None))
    }
    allowed = {*homes, "weightsync.strategies", "weightsync", *NAMES_A_STRATEGY[strategy]}
    assert naming <= allowed, f"{sorted(naming - allowed)} name {strategy}"


def test_no_file_is_long():
    long = {module: n for module, source in sources().items() if (n := code_lines(source)) > MAX_CODE_LINES}
    assert long == {}, f"more than {MAX_CODE_LINES} lines of code: cut these where they do two things"


def test_lines_of_code_are_counted_without_words():
    assert code_lines('"""Say.\n\nMore.\n"""\n\n# why\nx = """\na"""\n\ndef f():\n    """Do."""\n    return x\n') == 4


@pytest.mark.parametrize("room", FORBIDDEN)
def test_forbidden_imports(room: str):
    violations = [
        i for i in all_imports() if inside(i.module, room) and any(inside(i.target, other) for other in FORBIDDEN[room])
    ]
    fail_on(violations, f"{room} must not import {FORBIDDEN[room]}; the table FORBIDDEN in this test says why.")


def test_the_product_imports_no_tools():
    tools = "weightsync.tools"
    violations = [i for i in all_imports() if inside(i.target, tools) and not inside(i.module, tools)]
    allowed = [i for i in violations if i.module == "weightsync.__main__"]
    fail_on([i for i in violations if i not in allowed], "Users install weightsync for the library: it needs no tools.")


def test_the_product_imports_no_controller():
    violations = [
        i for i in ours() if inside(i.target, "weightsync.hybrid") and not inside(i.module, "weightsync.hybrid")
    ]
    fail_on(violations, "Who pushes from a trainer of their own needs neither Ray nor a controller.")


def test_the_product_imports_no_integration():
    integrations = "weightsync.integrations"
    violations = [i for i in ours() if inside(i.target, integrations) and not inside(i.module, integrations)]
    fail_on(violations, "Frameworks change with each release, and weightsync works without any of them.")


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


def test_errors_are_an_attribute_of_the_package():
    program = "import weightsync; print(weightsync.errors.WeightSyncError is weightsync.WeightSyncError)"
    assert subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True) == "True\n"


@pytest.mark.parametrize("code", ["import weightsync", "from weightsync.tools.cli import main; main([])"])
def test_a_cheap_start_loads_no_heavy_package(code: str):
    program = f"import json, sys; {code}; print(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    modules = json.loads(run.stdout.splitlines()[-1])
    heavy = ["torch", "numpy", "rich", *LAZY]
    loaded = sorted(name for name in modules if any(inside(name, package) for package in heavy))
    assert not loaded, f"{code!r} loads {loaded[:5]}: import them inside the function that needs them"


def test_every_public_name_can_be_imported():
    import weightsync

    assert [name for name in weightsync.__all__ if not hasattr(weightsync, name)] == []
    assert set(weightsync._LAZY) == set(weightsync.__all__)
    assert {*dir(weightsync)} == {*weightsync.__all__, "__version__"}
    with pytest.raises(AttributeError, match="no attribute 'nonesuch'"):
        _ = weightsync.nonesuch
