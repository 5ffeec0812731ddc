"""The words of the library: first lines of docstrings, and the glossary.

A reader often sees the first line of a docstring alone, in a list or a tooltip. So it says what the thing is:
it begins with a verb in the imperative for a function, with a noun for anything else, and has no pronoun for
a missing noun.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "collage_fx", ROOT / "passes", ROOT / "collage_tools"
GLOSSARY = ROOT / "docs" / "glossary.md"
FEWEST_TERMS = 25

#: First words of functions. Add a verb that is missing.
VERBS = frozenset(
    """
    accept add adopt allocate append apply ask assign attach await begin bind bring build cache call
    capture cast cat change check choose claim clear close collect combine compare compensate compile
    compute configure connect convert copy count create cut decide declare decode decompose define delay
    delete describe detach determine disable dispatch divide draw drop emulate enable encode end ensure
    enter erase estimate evaluate examine execute exit expand explain export extend fill filter find
    finish fit fold follow forget format forward fuse gather generate give go group guard hand handle
    hide hoist hold ignore import include index initialize inline insert inspect install intercept
    invert iterate join judge keep label launch leave limit link list load log look lower make map mark
    match measure merge mirror move multiply name negate normalize note open order overwrite pack pad
    parse pass patch perform permute pick plan plot predict prepare print process propagate publish put
    raise read realize rebuild recognize recompute record reduce refuse register reject release remember
    remove rename render reorder repeat replace replay report reserve reset resolve restore return reuse
    reverse rewrite round run sample save say scale schedule search seed select send separate set share
    show simplify skip sort split start state step stop store strip subtract sum suppress swap switch
    synchronize take tell test trace track transform translate try turn typeset undo unify uninstall unpack
    unwrap update use validate verify visit wait walk warn wrap write yield zero
    """.split()  # noqa: SIM905
)

#: Words that a noun phrase does not begin with: pronouns, question words, prepositions, auxiliary verbs.
NO_NOUNS = frozenset(
    """
    and as at behind beside between but by for from had has have how if in into it its let like of on
    one ones or same such that their them these they this those to under until what when where which
    while who whose why with within without
    """.split()  # noqa: SIM905
)

CONTEXT = "Context manager: "

#: An object after the first word, which is then a verb: "Writes the rows", but not "Rows of a table".
OBJECT = r" (?:(?:an?|the|each|every|all|its|their|whether|what)\b|``|:\w+:)"

#: Pronouns for a missing noun: "those", "what" unless reported or said, "one" unless it counts a noun.
RIDDLE = re.compile(
    r"\b(?:those|ones)\b|(?<!report )(?<!say )(?<!says )(?<!show )(?<!shows )\bwhat\b"
    r"|\bone(?='s\b|$|[.,;:)]|\s+(?:that|which|who|whose|is|are|has|was|for|in|on|at|with|by|to|from|after"
    r"|behind|before|as|and|or|than|where|if|but|may|can)\b)",
    re.IGNORECASE,
)

#: An entry of Args or Attributes without a noun: "shapes: of the parameters".
ENTRY = re.compile(
    r"^    +\w[\w, *]*: (?:of|those|that|what|it|in|likewise|within|have|let|whose)\b", re.IGNORECASE
)


class Line(NamedTuple):
    """First line of a docstring, or of a comment that documents a value."""

    where: str
    kind: str
    text: str


def _files() -> list[Path]:
    return sorted(path for folder in LIBRARY for path in folder.rglob("*.py"))


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _kind(node: ast.AST) -> str:
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return "value"
    calls = [each.func if isinstance(each, ast.Call) else each for each in node.decorator_list]
    decorators = {ast.unparse(each).rpartition(".")[2] for each in calls}
    returned = "" if node.returns is None else ast.unparse(node.returns)
    if "contextmanager" in decorators or "AbstractContextManager" in returned.partition("[")[0]:
        return "context manager"
    return "value" if decorators & {"property", "cached_property"} else "function"


def _docstrings(path: Path) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text is not None:
                yield node, text


def _lines(path: Path) -> Iterator[Line]:
    for node, text in _docstrings(path):
        where = f"{_name(path)}:{getattr(node, 'lineno', 1)} {getattr(node, 'name', '')}"
        yield Line(where, _kind(node), text.splitlines()[0])
    before = ""
    for number, line in enumerate(map(str.strip, path.read_text().splitlines()), 1):
        if line.startswith("#: ") and not before.startswith("#:"):
            yield Line(f"{_name(path)}:{number}", "value", line.removeprefix("#: "))
        before = line


def _is_verb_of_sentence(text: str) -> bool:
    word = text.split()[0].lower()
    stems = {word[:-1], word[:-2], f"{word[:-3]}y"} if word.endswith("s") else set()
    return not VERBS.isdisjoint(stems) and re.match(rf"\w+{OBJECT}", text) is not None


def fault(kind: str, text: str) -> str:
    """Return what is wrong with the first line of a docstring; empty if nothing is."""
    found = re.match(r"[\w'-]+", text)
    word = "" if found is None else found[0]
    if kind == "context manager":
        return "" if text.startswith(CONTEXT) else f"does not begin with {CONTEXT!r}"
    if kind == "function" and word.lower() not in VERBS:
        return f"{word!r} is no verb in the imperative"
    if kind == "value" and (
        word.lower() in NO_NOUNS or text.startswith("The same") or _is_verb_of_sentence(text)
    ):
        return f"{word!r} is no noun"
    riddle = RIDDLE.search(re.sub(r"``|Note \[[^]]*\]|one by one|one after another", "", text))
    return "" if riddle is None else f"{riddle[0]!r} stands for a noun"


def faults(path: Path) -> list[str]:
    """Return a text for each docstring of a file that breaks a rule."""
    found = [
        f"{line.where}: {line.text}\n    {why}"
        for line in _lines(path)
        if (why := fault(line.kind, line.text))
    ]
    for node, text in _docstrings(path):
        entries = filter(ENTRY.match, text.splitlines())
        where = f"{_name(path)}:{getattr(node, 'lineno', 1)} {getattr(node, 'name', '')}"
        found += [f"{where}: {entry.strip()}\n    an entry without a noun" for entry in entries]
    return found


@pytest.mark.parametrize("path", _files(), ids=_name)
def test_first_lines_can_be_read_alone(path: Path) -> None:
    found = faults(path)
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("function", "Whether a node is a cast."),
        ("function", "The new value."),
        ("function", "Returns the new value."),
        ("function", "Have Dynamo trace a step again."),
        ("function", "Return what a step stores."),
        ("function", "Return the new value, or the old one."),
        ("value", "What a packed tensor is decoded from."),
        ("value", "Of the table, the rows."),
        ("value", "Writes the rows of a table."),
        ("value", "The same for a list."),
        ("value", "Values of those that are packed."),
        ("context manager", "Within, nothing is recorded."),
    ],
)
def test_riddles_are_found(kind: str, text: str) -> None:
    assert fault(kind, text)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("function", "Return whether a node is a cast."),
        ("function", "Report what compiling a step would do."),
        ("function", "Print one kernel for all rules."),
        ("value", "Rows of a table."),
        ("value", "Whether a step is measured."),
        ("value", "``OptimizersContainer.Config`` with options."),
        ("context manager", "Context manager: nothing is recorded."),
    ],
)
def test_plain_lines_have_no_fault(kind: str, text: str) -> None:
    assert not fault(kind, text)


def _glossary() -> dict[str, str]:
    return dict(re.findall(r"^- \*\*(.+?)\*\*: (.+)$", GLOSSARY.read_text(), re.MULTILINE))


def _used_text() -> str:
    pages = [page.read_text() for page in sorted((ROOT / "docs").glob("*.md")) if page != GLOSSARY]
    return " ".join([*(path.read_text() for path in _files()), *pages]).lower()


def test_the_glossary_is_of_words_that_are_used() -> None:
    terms, text = _glossary(), _used_text()
    assert len(terms) >= FEWEST_TERMS
    for section in GLOSSARY.read_text().split("\n## ")[1:]:
        names = re.findall(r"^- \*\*(.+?)\*\*: ", section, re.MULTILINE)
        assert names == sorted(names, key=str.lower)
    unused = [term for term in terms if re.search(rf"\b{term.lower()}", text) is None]
    assert not unused
