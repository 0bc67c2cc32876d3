"""A ratchet: measures of the code's size and prose. Each may fall, and none may rise."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

LIMITS = {
    "code lines of the core": 20_710,
    "code lines of the longest file": 350,
    "functions over 60 lines": 1,
    "classes of the core of over 12 attributes": 4,
    "mean lines of a function": 8.0,
    "relative words in 100 words of docstrings and comments": 1.2,
    "lines of the longest docstring": 72,
    "names of tests over 80 characters": 0,
    "lines of tests outside of tests/unit that touch private attributes": 160,
}
"""Lower a limit when you improve its measure, never raise it. A mean is rounded to one digit."""

# Counted apart from the core: the library works without them.
APART = ("weightsync/hybrid/", "weightsync/tools/", "weightsync/vllm/rollout.py")

MOST_FUNCTION_LINES = 60
MOST_ATTRIBUTES = 12
MOST_NAME_CHARACTERS = 80
RELATIVE = re.compile(r"\b(who|which|that|what|those|whose|where)\b", re.IGNORECASE)
NO_CODE = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}


@dataclass(frozen=True)
class Measure:
    """A number, and its largest contributors for the error."""

    value: float
    places: list[str]


@dataclass(frozen=True)
class Module:
    """One file of the package. Lines of a function are those without its docstring."""

    path: str
    code_lines: int
    functions: dict[str, int]
    attributes: dict[str, int]
    docstrings: dict[str, int]
    words: int
    relative_words: int


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield all statements below a node. Expressions are passed over, for speed."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            if isinstance(child, ast.stmt):
                yield child
            yield from statements(child)


def is_text(statement: ast.stmt) -> bool:
    """Return whether a statement is a string: a docstring, or the text below an attribute."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def is_mutable_class(statement: ast.stmt) -> bool:
    """Return whether a statement defines a class whose objects may change: no record of values."""
    if not isinstance(statement, ast.ClassDef):
        return False
    bases = [ast.unparse(base) for base in statement.bases]
    is_frozen = any("frozen=True" in ast.unparse(decorator) for decorator in statement.decorator_list)
    return not is_frozen and not any(base.startswith(("Struct", "Message", "NamedTuple")) for base in bases)


def attributes_of(node: ast.ClassDef) -> set[str]:
    """Return the attributes that a class declares, and those that its methods set."""
    declared = {each.target.id for each in node.body if isinstance(each, ast.AnnAssign)}
    return declared | {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }


def lines_of(node: ast.AST) -> range:
    """Return the numbers of a node's lines."""
    return range(node.lineno, node.end_lineno + 1)


def read_module(path: str, source: str) -> Module:
    """Parse one file."""
    found = list(statements(ast.parse(source)))
    texts = [statement for statement in found if is_text(statement)]
    functions = {
        f"{path}:{node.lineno} {node.name}": len(lines_of(node)) - is_text(node.body[0]) * len(lines_of(node.body[0]))
        for node in found
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    code, prose = set(), [re.sub(r"`[^`]*`", "code", text.value.value) for text in texts]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            prose.append(token.string)
        elif token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return Module(
        path,
        len(code - {line for text in texts for line in lines_of(text)}),
        functions,
        {f"{path}:{node.lineno} {node.name}": len(attributes_of(node)) for node in found if is_mutable_class(node)},
        {f"{path}:{text.lineno}": len(lines_of(text)) for text in texts},
        sum(len(re.findall(r"[A-Za-z']+", text)) for text in prose),
        sum(len(RELATIVE.findall(text)) for text in prose),
    )


def private_lines(source: str) -> set[int]:
    """Return the lines of code that name a private attribute of another object than `self` and `cls`.

    `os._exit` is public: its name sets it apart from `sys.exit`.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case (
                ast.Attribute(value=ast.Name(id="self" | "cls")) | ast.Attribute(value=ast.Name(id="os"), attr="_exit")
            ):
                continue
            case ast.Attribute(attr=name):
                pass
            case ast.Call(
                func=ast.Name(id="getattr" | "setattr") | ast.Attribute(attr="setattr"),
                args=[_, ast.Constant(value=str(name)), *_],
            ):
                pass
            case _:
                continue
        if name.startswith("_") and not name.startswith("__"):
            found.add(node.lineno)
    return found


def largest(sizes: dict[str, int], least: int = 0) -> list[str]:
    """Return the places of the ten largest sizes over `least`."""
    ordered = sorted(sizes.items(), key=lambda item: -item[1])[:10]
    return [f"{size} {place}" for place, size in ordered if size > least]


@cache
def measures() -> dict[str, Measure]:
    """Return all measures of this checkout by name."""
    paths = sorted((ROOT / "weightsync").rglob("*.py"))
    modules = [read_module(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in paths]
    sizes = {module.path: module.code_lines for module in modules}
    core = {path: size for path, size in sizes.items() if not path.startswith(APART)}
    functions = {place: size for module in modules for place, size in module.functions.items()}
    attributes = {place: n for each in modules if each.path in core for place, n in each.attributes.items()}
    docstrings = {place: size for module in modules for place, size in module.docstrings.items()}
    relative = {module.path: module.relative_words for module in modules}
    names, private = {}, {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        place, source = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        for name in re.findall(r"^ *(?:async )?def (test_\w+)", source, re.MULTILINE):
            names[f"{place} {name}"] = len(name)
        if not place.startswith("tests/unit/") and re.search(r"(?<!self)(?<!cls)\._[a-z]|attr\(", source):
            private[place] = len(private_lines(source))
    long = sum(size > MOST_FUNCTION_LINES for size in functions.values())
    long_names = sum(size > MOST_NAME_CHARACTERS for size in names.values())
    share = 100 * sum(relative.values()) / sum(module.words for module in modules)
    found = [
        Measure(sum(core.values()), largest(core)),
        Measure(max(sizes.values()), largest(sizes)),
        Measure(long, largest(functions, MOST_FUNCTION_LINES)),
        Measure(sum(size > MOST_ATTRIBUTES for size in attributes.values()), largest(attributes, MOST_ATTRIBUTES)),
        Measure(round(sum(functions.values()) / len(functions), 1), largest(functions)),
        Measure(round(share, 1), largest(relative)),
        Measure(max(docstrings.values()), largest(docstrings)),
        Measure(long_names, largest(names, MOST_NAME_CHARACTERS)),
        Measure(sum(private.values()), largest(private)),
    ]
    return dict(zip(LIMITS, found, strict=True))


@pytest.mark.parametrize("name", LIMITS)
def test_no_measure_is_over_its_limit(name: str):
    measure, limit = measures()[name], LIMITS[name]
    advice = f"{name}: {measure.value}, at most {limit}; lower this when you improve it, never raise it. The largest:"
    assert measure.value <= limit, "\n  ".join([advice, *measure.places])


def test_code_functions_and_prose_of_a_module_are_measured():
    words = '"""What it is."""\n\n# that is the reason\nLIMIT = """\n1"""\n\n\n'
    module = read_module("a.py", words + 'def f():\n    """Do `which`.\n\n    More.\n    """\n    return 1\n')
    assert module.code_lines == 4
    assert module.functions == {"a.py:8 f": 2}
    assert module.docstrings == {"a.py:1": 1, "a.py:9": 4}
    assert (module.words, module.relative_words) == (10, 2)


def test_attributes_are_counted_of_classes_whose_objects_change():
    body = ":\n  a: int = 1\n  def f(self):\n    self.b = self.c = 1\n    other.d = self.e\n"
    records = f"class B(Struct){body}@dataclass(frozen=True)\nclass C{body}"
    assert read_module("a.py", f"class A{body}{records}").attributes == {"a.py:1 A": 3}


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("self._mine\ncls._mine\nother.public\nother.__class__", set()),
        ("other._theirs\nself.other._theirs = 1\nf()._x", {1, 2, 3}),
        ('getattr(other, "_theirs")\nmonkeypatch.setattr(other, "_x", 1)\ngetattr(other, "x")', {1, 2}),
    ],
)
def test_private_attributes_of_others_are_found(code: str, lines: set[int]):
    assert private_lines(code) == lines


def test_the_largest_places_are_named():
    assert largest({"a": 3, "b": 61, "c": 70}, 60) == ["70 c", "61 b"]
