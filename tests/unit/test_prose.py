"""The prose of docstrings, error texts and documents: sentences that can be read once, links and names that exist."""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from test_budgets import RELATIVE

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "weightsync").rglob("*.py"))
CODE = ("weightsync", "tests", "examples", "benchmarks")
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
PAGES = [ROOT / "README.md", CONTRIBUTING, *sorted((ROOT / "docs").rglob("*.md"))]
HOME = "https://github.com/weightsync/weightsync/blob/main/"
"""The address of a file of this repository, for links that leave `docs` and for PyPI's page."""
DECISIONS = sorted((ROOT / "docs/internals/decisions").glob("[0-9]*.md"))

MOST_WORDS = 25
"""In one sentence of a docstring, a comment, a decision, an error, a log line or another text for users."""
MOST_RELATIVE_WORDS = 1
GUIDES = [page for page in PAGES if page.parent.name in ("docs", "start", "use", "operate", "extend")]
"""The pages that are read from top to bottom."""
DECISION_PARTS = ["Context", "Decision", "Consequences", "What would change it"]
MOST_DECISION_LINES = 40

# An imperative verb is none of these. A property is read like an attribute, so it may begin with a noun.
NO_VERB = re.compile(
    "(A|All|An|Any|Are|As|At|Because|Both|But|By|Collective|Each|Every|For|From|Has|How|If|In|Is|It|Its|Let|Like|Never|"
    "No|None|Of|On|Only|Or|Our|Such|That|The|Their|Them|There|These|They|This|Those|To|What|When|Where|Whether|Which|"
    "Who|Why|With|Yes)"
)
PRIVATE_WORDS = re.compile(r"\b(whoever|nobody|somebody)\b", re.IGNORECASE)

# Files that do not keep these rules yet. The list only shrinks.
NOT_YET: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Docstring:
    """A docstring, or a string below an attribute. `owner` is what it documents."""

    line: int
    owner: ast.AST
    text: str


def docstrings(source: str) -> Iterator[Docstring]:
    """Yield every string that is a statement."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for number, statement in enumerate(body if isinstance(body, list) else []):
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield Docstring(statement.lineno, statement if number else node, inspect.cleandoc(text))


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield every string that is no docstring, with its line. An expression in an f-string counts as one word."""
    todo: list[ast.AST] = [ast.parse(source)]
    while todo:
        match todo.pop():
            case ast.Expr(value=ast.Constant()):
                continue
            case ast.Constant(value=str(text), lineno=line):
                yield line, text
            case ast.JoinedStr(values=values, lineno=line):
                yield line, "".join(str(part.value) if isinstance(part, ast.Constant) else "`it`" for part in values)
                todo += [part.value for part in values if isinstance(part, ast.FormattedValue)]
            case node:
                todo += ast.iter_child_nodes(node)


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield every comment with its last line. Lines of comments alone that follow each other are one comment."""
    found: list[tuple[int, str]] = []
    above = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, text = token.start[0], token.string.lstrip("# ")
            is_alone = token.line.lstrip().startswith("#")
            if is_alone and above == line - 1:
                text = f"{found.pop()[1]}\n{text}"
            found.append((line, text))
            above = line if is_alone else -1
    yield from found


def sentences(text: str) -> list[str]:
    """Return the sentences of a docstring without its code, tables and lists of symbols."""
    lines = [line.rstrip() for line in text.splitlines()]
    prose = ["" if re.search(r"\S {2,}\S|^\s*\+--|^ {4,}\S.*[=(]", line) else line for line in lines]
    # An entry of a list, "- ..." or "name: ...", begins a paragraph.
    paragraphs = re.split(r"\n\s*\n|\n(?=\s*- )|\n(?=\s*[\w, ]+: )", "\n".join(prose))
    joined = [" ".join(paragraph.split()) for paragraph in paragraphs]
    return [found for paragraph in joined for found in re.split(r"(?<=[.!?])[)\"]?\s+", paragraph) if found]


def count_words(sentence: str) -> int:
    """Return the number of words; what stands in backticks is one."""
    return len(re.findall(r"\w+", re.sub(r"`[^`]*`", "code", sentence)))


def begins_with_a_verb(text: str) -> bool:
    """Return whether a text may begin with an imperative verb."""
    first = re.match(r"[A-Z][a-z-]+(?=[ ,.:]|$)", text)
    if first is None or NO_VERB.fullmatch(first[0]):
        return False
    return re.search(r"(ss|^Bring|^String)$", first[0]) is not None or not first[0].endswith(("s", "ing"))


def is_property(node: ast.AST) -> bool:
    """Return whether a function is read like an attribute."""
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


def faults_of_sentences(text: str) -> Iterator[str]:
    """Yield what is wrong with the sentences of a text."""
    for sentence in sentences(text):
        if (words := count_words(sentence)) > MOST_WORDS:
            yield f"a sentence of {words} words, at most {MOST_WORDS}: {sentence[:60]}..."
        relative = RELATIVE.findall(re.sub(r"`[^`]*`", "", sentence))
        if len(relative) > MOST_RELATIVE_WORDS:
            yield f"{' and '.join(relative)} in one sentence, at most {MOST_RELATIVE_WORDS}: {sentence[:60]}..."


def faults(source: str) -> list[str]:
    """Return what the prose of a module lacks, each with its line."""
    found = []
    for doc in docstrings(source):
        found += [f"line {doc.line}: {fault}" for fault in faults_of_sentences(doc.text)]
        is_function = isinstance(doc.owner, ast.FunctionDef | ast.AsyncFunctionDef) and not is_property(doc.owner)
        if is_function and not begins_with_a_verb(doc.text):
            found.append(f"line {doc.line}: begins with no imperative verb: {doc.text[:60]!r}")
    for line, text in (*texts(source), *comments(source)):
        found += [f"line {line}: {fault}" for fault in faults_of_sentences(text)]
    for number, line in enumerate(source.splitlines(), 1):
        if word := PRIVATE_WORDS.search(line):
            found.append(f"line {number}: name the actor in place of {word[0]!r}")
    return found


def name_of(path: Path) -> str:
    """Return a file's path inside of the repository."""
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", [path for path in SOURCES if name_of(path) not in NOT_YET], ids=name_of)
def test_prose_of_a_module_follows_the_rules(path: Path):
    found = faults(path.read_text(encoding="utf-8"))
    assert not found, "\n  ".join([f"{name_of(path)}:", *found])


def test_not_yet_has_only_files_with_faults():
    faulty = {name_of(path) for path in SOURCES if faults(path.read_text(encoding="utf-8"))}
    assert not sorted(NOT_YET - faulty), "these keep the rules now, or are gone: take them off NOT_YET"


@pytest.mark.parametrize(
    ("docstring", "fault"),
    [
        ("Return the name.", ""),
        ("Pass it on.", ""),
        ("The name.", "no imperative verb"),
        ("Whether it is whole.", "no imperative verb"),
        ("Let the worker go.", "no imperative verb"),
        ("Returns the name.", "no imperative verb"),
        ("return the name.", "no imperative verb"),
        ("Return " + "a " * 24 + "name.", "a sentence of 26 words"),
        ("Return " + "a " * 23 + "name. Raise an error.", ""),
        ("Return the name that is there, which is one.", "that and which in one sentence"),
        ("Return `" + "a " * 60 + "`.", ""),
        ("Return x.\n\nfirst: " + "a " * 20 + "\nsecond: " + "a " * 20, ""),
        ("Tell whoever asks.", "name the actor"),
    ],
)
def test_faults_of_a_docstring_are_found(docstring: str, fault: str):
    found = faults(f'def name():\n    """{docstring}"""\n')
    assert len(found) == (1 if fault else 0), found
    assert fault in "".join(found)


def test_faults_leaves_nouns_of_classes_and_properties_alone():
    source = 'class A:\n    """The class."""\n    @property\n    def b(self):\n        """The b."""\n'
    assert faults(source) == []
    assert len(faults(source.replace("@property", "@staticmethod"))) == 1


def test_faults_reads_the_text_below_an_attribute():
    assert "26 words" in "".join(faults('LIMIT = 1\n"""The ' + "a " * 24 + 'limit."""\n'))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('"' + "a " * 24 + 'name"', ""),
        ('"' + "a " * 25 + 'name"', "a sentence of 26 words"),
        ('"' + "a " * 24 + 'name. Push again"', ""),
        ('f"' + "a " * 23 + '{x} {first(x, 1, 2)}"', ""),
        ('f"' + "a " * 24 + '{x} " "name"', "a sentence of 26 words"),
        ('f"the engine {x} that fails" + " which one"', ""),
        ('f"the engine {x} that fails" " which one"', "that and which in one sentence"),
    ],
)
def test_faults_of_an_error_text_are_found(text: str, fault: str):
    found = faults(f"raise ConfigError({text})")
    assert len(found) == (1 if fault else 0), found
    assert fault in "".join(found)


def test_faults_reads_comments_as_whole_sentences():
    lines = "# " + "a " * 15 + "\n"
    assert "30 words" in "".join(faults(2 * lines))
    assert faults(f"{lines}x = 1\n{lines}y = 2  {lines}") == []


# ---------------------------------------------------------------------------------------------------------------
# Documents


def without_code(text: str) -> str:
    """Return a page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", without_code(page.read_text(encoding="utf-8")), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return frozenset(re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain)


def broken_links(page: Path) -> list[str]:
    """Return the relative links of a page that lead nowhere."""
    links = re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8")))
    return [link for link in links if (HOME in link or "://" not in link) and not leads_somewhere(page, link)]


def leads_somewhere(page: Path, link: str) -> bool:
    """Return whether a link's file exists, and the heading in it that the link names."""
    path, _, anchor = link.partition("#")
    target = ROOT / path.removeprefix(HOME) if HOME in path else page.parent / path if path else page
    return target.exists() and (not anchor or anchor in anchors(target.resolve()))


def unknown_names(page: Path) -> list[str]:
    """Return the dotted names of weightsync on a page that nothing in the package defines."""
    text = page.read_text(encoding="utf-8")
    names = set(re.findall(r"(?<![\w./-])weightsync(?:\.[A-Za-z_]\w*)+", text))
    for module, imported in re.findall(r"from (weightsync(?:\.\w+)*) import ([\w, ]+)", text):
        names |= {f"{module}.{name.strip()}" for name in imported.split(",")}
    return sorted(name for name in names if not is_defined(name))


def is_defined(name: str) -> bool:
    """Return whether a dotted name is a module, what a module has, or what a class of it has. Imports nothing."""
    path, rest = ROOT, name.split(".")
    while rest and (path / rest[0]).is_dir():
        path /= rest.pop(0)
    if rest and (path / f"{rest[0]}.py").exists():
        path = path / f"{rest.pop(0)}.py"
    else:
        path /= "__init__.py"
    body: list[ast.stmt] | None = ast.parse(path.read_text(encoding="utf-8")).body
    while rest:
        if body is None or rest[0] not in (defined := members(body)):
            return False
        body = defined[rest.pop(0)]
    return True


def members(body: list[ast.stmt]) -> dict[str, list[ast.stmt] | None]:
    """Return what a module or class defines or imports, each class with its own body."""
    found: dict[str, list[ast.stmt] | None] = {}
    for node in body:
        match node:
            case ast.ClassDef():
                found[node.name] = node.body
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                found[node.name] = None
            case ast.Import() | ast.ImportFrom():
                found |= dict.fromkeys((alias.asname or alias.name for alias in node.names), None)
            case ast.Assign():
                targets = [name for target in node.targets for name in ast.walk(target)]
                found |= dict.fromkeys((name.id for name in targets if isinstance(name, ast.Name)), None)
            case ast.AnnAssign(target=ast.Name(id=name)):
                found[name] = None
            case ast.If() | ast.Try():  # for type checkers, or what an extra brings
                found |= members(node.body)
    return found


def test_pages_that_code_names_exist():
    code = [ROOT / "Makefile", *(path for folder in CODE for path in sorted((ROOT / folder).rglob("*.py")))]
    named = {
        (path, name) for path in code for name in re.findall(r"\bdocs/[\w/-]+\.md", path.read_text(encoding="utf-8"))
    }
    assert named, "no page is named anywhere: does the test look at the right folders?"
    assert not sorted(f"{name_of(path)}: {name}" for path, name in named if not (ROOT / name).exists())


def test_pages_of_frameworks_show_their_recipes():
    recipes = sorted((ROOT / "examples/frameworks").glob("weightsync_*.py"))
    assert recipes
    for recipe in recipes:
        page = ROOT / "docs/use" / (recipe.stem.removeprefix("weightsync_").replace("_", "-") + ".md")
        assert f"```python\n{recipe.read_text(encoding='utf-8')}```" in page.read_text(encoding="utf-8"), page.name


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_of_a_page_lead_somewhere(page: Path):
    assert not broken_links(page)


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_sentences_of_a_guide_are_short(page: Path):
    text = re.sub(r"^(\||#).*$", "", without_code(page.read_text(encoding="utf-8")), flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)|\*\*|\[", "", re.sub(r"^\d+\. ", "- ", text, flags=re.MULTILINE))
    assert [sentence for sentence in sentences(text) if count_words(sentence) > MOST_WORDS] == []


def unlike_lines(page: Path) -> list[str]:
    """Return the lines that GitHub and the site lay out in two ways."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    kinds = (
        r"^(?:!!!|\?\?\?|===) .*",  # admonitions and tabs: the site's alone
        r"(?<=\n)(?![-|\d\s]).+\n(?=- |1\. |\|)",  # the site wants a blank line before a list and a table
        r"^ {1,3}- .*",  # the site nests a list by four spaces
    )
    return [found for kind in kinds for found in re.findall(kind, text, re.MULTILINE)]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_looks_alike_on_github_and_on_the_site(page: Path):
    assert unlike_lines(page) == []


def test_lines_that_look_otherwise_on_the_site_are_found(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("# A\n\nText\n- item\n\n- item\n  goes on\n  - nested\n\n!!! note\n\n| a |\n| - |\nText\n| b |\n")
    assert unlike_lines(page) == ["!!! note", "Text\n", "Text\n", "  - nested"]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_names_on_a_page_are_defined(page: Path):
    assert not unknown_names(page)


def test_tests_that_contributors_are_told_to_run_exist():
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", CONTRIBUTING.read_text(encoding="utf-8"), re.MULTILINE))
    assert rows.keys() == {path.parent.name for path in (ROOT / "weightsync").glob("*/__init__.py")}
    commands = re.findall(r"(tests/\w+/test_)(?:{([\w,]+)}|(\w+))\.py", "".join(rows.values()))
    named = {f"{start}{name}.py" for start, names, one in commands for name in (names or one).split(",")}
    assert named
    assert not sorted(name for name in named if not (ROOT / name).exists())


def test_decisions_are_numbered_and_listed_with_their_titles():
    assert [path.name[:5] for path in DECISIONS] == [f"{number:04}-" for number in range(1, len(DECISIONS) + 1)]
    listed = re.findall(
        r"^\| (\d{4}) \| \[(.+)\]\((.+)\) \|", (DECISIONS[0].parent / "README.md").read_text(), re.MULTILINE
    )
    titles = [path.read_text(encoding="utf-8").partition("\n")[0] for path in DECISIONS]
    assert [(f"# {number}. {title}", name) for number, title, name in listed] == [
        (title, path.name) for title, path in zip(titles, DECISIONS, strict=True)
    ]


@pytest.mark.parametrize("page", DECISIONS, ids=name_of)
def test_a_decision_has_four_parts_on_one_screen_of_plain_sentences(page: Path):
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == DECISION_PARTS
    assert len(text.splitlines()) <= MOST_DECISION_LINES
    assert [sentence for sentence in sentences(text) if count_words(sentence) > MOST_WORDS] == []


def test_broken_links_and_unknown_names_are_found(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b`, c\n[here](#a-b-c) [self](page.md#a-b-c) [gone](gone.md) [no heading](page.md#d) [web](https://x.y)\n"
        f"[file]({HOME}setup.py) [no file]({HOME}setup.rs)\n"
        "```\n[code](gone.md)\n```\n`weightsync.save` `weightsync.errors.PeerError.who` `weightsync.senders` "
        "`weightsync.errors.SyncTimeoutError.waiting_for`\nfrom weightsync.sources.base import ShardSource, Sender\n"
    )
    assert broken_links(page) == ["gone.md", "page.md#d", f"{HOME}setup.rs"]
    assert unknown_names(page) == [
        "weightsync.errors.PeerError.who",
        "weightsync.senders",
        "weightsync.sources.base.Sender",
    ]
