"""The reference pages say what the code says. To write them: `WEIGHTSYNC_WRITE_DOCS=1 python -m pytest` this file."""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
import textwrap
from pathlib import Path

import pytest
from reference_pages import PAGES, PUBLIC, ROOT, definition, names_of

import weightsync
from weightsync import errors
from weightsync.fleet.engine_handle import UpdateState
from weightsync.net.wire import PROTOCOL

REFERENCE = ROOT / "docs/reference"


@pytest.mark.parametrize("name", PAGES)
def test_a_reference_page_is_what_the_code_says(name: str):
    if name == "cli" and sys.version_info >= (3, 13):
        pytest.skip("argparse lays out its help otherwise")
    page, text = REFERENCE / f"{name}.md", PAGES[name]()
    if os.environ.get("WEIGHTSYNC_WRITE_DOCS"):
        page.write_text(text, encoding="utf-8")
    said = page.read_text(encoding="utf-8")
    assert said == text, f"{page} is stale: WEIGHTSYNC_WRITE_DOCS=1 python -m pytest {Path(__file__).name}"


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_documented(module: str):
    undocumented = [name for name in names_of(module) if not definition(module, name).text]
    assert not undocumented


def methods(module: str) -> dict[str, str]:
    """Return the docstrings of all public methods of a public module's classes, by "Class.method"."""
    classes = [node for name in names_of(module) if isinstance(node := definition(module, name).node, ast.ClassDef)]
    return {
        f"{each.name}.{node.name}": ast.get_docstring(node) or ""
        for each in classes
        for node in each.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_")
    }


def test_public_methods_are_documented_or_those_of_a_documented_interface():
    found = {name: text for module in PUBLIC for name, text in methods(module).items()}
    documented = {name.partition(".")[2] for name, text in found.items() if text}
    foreign = {
        "PushCallback",
        "Transfer",
        "WeightSyncCheckpointEngine",
    }  # TRL, transformers and verl say what theirs do
    undocumented = [name for name, text in found.items() if not text and name.partition(".")[2] not in documented]
    assert [name for name in undocumented if name.partition(".")[0] not in foreign] == []


def read(name: str) -> str:
    return (REFERENCE / f"{name}.md").read_text(encoding="utf-8")


def test_every_error_is_in_the_tree_and_has_a_row():
    tree = re.search(r"^    WeightSyncError\n(?:    .*\n)+", inspect.cleandoc(errors.__doc__), re.MULTILINE)
    assert tree
    assert f"```text\n{textwrap.dedent(tree[0])}```" in read("errors")
    classes = {name for name in weightsync.__all__ if name.endswith("Error")}
    assert set(re.findall(r"^\| `(\w+Error)` \|", read("errors"), re.MULTILINE)) == classes - {"WeightSyncError"}


def test_every_environment_variable_of_weightsync_is_listed():
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "weightsync").rglob("*.py"))
    named = set(re.findall(r"\bWEIGHTSYNC_[A-Z_]+\b", code)) - {"WEIGHTSYNC_PARENT"}  # between our own processes
    assert set(re.findall(r"WEIGHTSYNC_[A-Z_]+", read("environment"))) == named


def test_the_diagram_of_states_is_that_of_an_engine():
    page = (ROOT / "docs/internals/architecture.md").read_text(encoding="utf-8")
    edges = set(re.findall(r"^    ([A-Z]+) --> ([A-Z]+): ", page, re.MULTILINE))
    *path, failed = (state.name for state in UpdateState)  # in the order of a push
    assert edges == {
        *zip(path, [*path[1:], path[0]], strict=True),
        ("OPEN", "CLOSED"),  # `Fleet.cancel`
        *((state, failed) for state in path),
    }


def test_texts_to_look_for_are_in_the_code():
    page = (ROOT / "docs/operate/troubleshooting.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \|", page.partition("## It hangs")[0], re.MULTILINE)
    wanted = {part for row in rows for text in re.findall(r"`([^`]+)`", row) for part in text.split(" ... ")}
    code = " ".join(path.read_text(encoding="utf-8") for path in (ROOT / "weightsync").rglob("*.py"))
    joined = re.sub(r'"\s+f?"', "", code)  # strings that Python joins
    assert wanted
    assert not {text for text in wanted if text not in joined}


def test_the_doctor_on_the_page_speaks_the_protocol_of_today():
    page = (ROOT / "docs/operate/hosts.md").read_text(encoding="utf-8")
    assert re.findall(r"wire protocol (\d+)", page) == [str(PROTOCOL)]


def test_pages_import_public_names_alone():
    pages = [
        path for folder in ("start", "use", "operate", "extend") for path in (ROOT / "docs" / folder).rglob("*.md")
    ]
    shown = "\n".join(path.read_text(encoding="utf-8") for path in [ROOT / "README.md", ROOT / "docs/index.md", *pages])
    imports = re.findall(r"^\s*from (weightsync(?:\.\w+)*) import \(?([\w, \n]+)\)?$", shown, re.MULTILINE)
    names = {(module, name) for module, listed in imports for name in re.findall(r"\w+", listed)}
    public = {(module, name) for module in PUBLIC for name in names_of(module)}
    assert names
    assert names <= public
