"""``tests/README.md`` names all files and rooms; private parts of the library are replaced in one file."""

from __future__ import annotations

import ast
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.rows import row_of, rows

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
MAP = (TESTS / "README.md").read_text(encoding="utf-8")

#: What stands in backquotes, as far as it can be a path.
NAMED = frozenset(re.findall(r"`([\w./*]+)`", MAP))

#: Rooms of the library, and the folders beside it: folders with a slash at the end, and files.
ROOMS = sorted(
    [f"collage_fx/{path.parent.name}/" for path in (ROOT / "collage_fx").glob("*/__init__.py")]
    + [f"collage_fx/wings/{path.name}" for path in (ROOT / "collage_fx" / "wings").glob("[!_]*.py")]
    + [f"collage_fx/{path.name}" for path in (ROOT / "collage_fx").glob("*.py") if path.stem[0] != "_"]
    + [f"collage_tools/{path.parent.name}/" for path in (ROOT / "collage_tools").glob("*/__init__.py")]
    + [f"collage_tools/{path.name}" for path in (ROOT / "collage_tools").glob("*.py") if path.stem[0] != "_"]
    + ["benchmarks/", "examples/", "passes/"]
)
#: Links to folders at the top of the repository.
ROOMS = [room for room in ROOMS if room != "collage_fx/wings/" and not (ROOT / room.rstrip("/")).is_symlink()]

#: Folders that are named as a whole.
WHOLE = {"compatibility", "fake_cuda", "mutation", "peers", "reliability"}

#: The files of the tests, but for what is in a folder that is named as a whole.
FILES = sorted(
    str(path.relative_to(TESTS))
    for path in TESTS.rglob("*.py")
    if path.name != "__init__.py" and WHOLE.isdisjoint(path.parts)
)


@pytest.mark.parametrize("file", FILES)
def test_each_file_is_named(file: str) -> None:
    assert file in NAMED


@pytest.mark.parametrize("room", ROOMS)
def test_each_room_is_named(room: str) -> None:
    assert re.search(rf"^\|[^|]*`{re.escape(room)}`", MAP, re.MULTILINE), (
        f"no row says what to run for {room}"
    )


def test_all_that_is_named_is_there() -> None:
    paths = {name for name in NAMED if "/" in name or name.endswith((".py", ".txt"))}
    missing = [name for name in paths if not (any(TESTS.glob(name)) or any(ROOT.glob(name)))]
    assert not missing


def test_the_tests_of_each_row_are_there() -> None:
    table = rows(MAP)
    files = [Path(room) if room.endswith(".py") else Path(room, "a_file.py") for room in ROOMS]
    assert all(row_of(file, table) for file in files)
    assert row_of(Path("passes/widen.py"), table)[0] == "tests/passes"
    assert row_of(Path("collage_fx/options/budgets.py"), table)[0] == "tests/test_budgets.py"
    assert "tests/lowering" in row_of(Path("collage_fx/torch_compat/triton_tables.py"), table)
    for test in {test for tests in table.values() for test in tests}:
        file, _, function = test.partition("::")
        assert (ROOT / file).exists(), test
        assert not function or f"def {function}(" in (ROOT / file).read_text(encoding="utf-8"), test


# Private parts. ---------------------------------------------------------------------------------------------

#: The file that replaces private parts of the library, for all others.
SUBSTITUTES = TESTS / "support" / "substitutes.py"

#: Functions that replace an attribute or an item.
REPLACING = {"patch", "object", "dict", "setattr", "setitem", "delattr"}


def _replaced(tree: ast.Module) -> Iterator[str]:
    """Yield what a file replaces of the library, as it is written.

    That is an attribute named by a string, one of a module or class imported from a room, or a global of a
    function. Public names, those that ``collage_fx`` itself hands out, may be replaced.
    """
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and re.match(r"collage_fx\.|collage_tools\b", str(node.module))
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and isinstance(node.func, (ast.Attribute, ast.Name)):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            target = node.args[0]
            if called not in REPLACING:
                continue
            text = ast.unparse(target)
            is_path = bool(re.match(r"""f?['"]collage_(fx|tools)\.""", text))
            is_object = called != "setitem" and text.partition(".")[0] in imported
            if is_path or is_object or "__globals__" in text:
                yield text


@pytest.mark.parametrize("file", FILES)
def test_private_parts_are_replaced_in_one_file(file: str) -> None:
    path = TESTS / file
    if path != SUBSTITUTES:
        found = [*_replaced(ast.parse(path.read_text(encoding="utf-8")))]
        assert not found, f"tests/support/substitutes.py is the place for {found}"


@pytest.mark.parametrize(
    "place",
    sorted(set(re.findall(r'"(collage_(?:fx|tools)\.[\w.]+)"', SUBSTITUTES.read_text(encoding="utf-8")))),
)
def test_a_private_part_that_is_replaced_is_there(place: str) -> None:
    assert pkgutil.resolve_name(place) is not None


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("mock.patch('collage_fx.lowering.kernels.printed')", True),
        ("monkeypatch.setattr('collage_fx.state.PART', 1)", True),
        ("monkeypatch.setattr('collage_tools.pages.plot', None)", True),
        ("mock.patch.object(watch, 'COMPILATIONS', 1)", True),
        ("monkeypatch.setattr(watch.inner, 'COMPILATIONS', 1)", True),
        ("monkeypatch.setitem(lower.__globals__, 'kernel_of', None)", True),
        ("monkeypatch.setattr(CollageBackend, '__call__', None)", False),
        ("monkeypatch.setitem(watch, 'a format', 1)", False),
        ("mock.patch('torch.compile')", False),
    ],
)
def test_a_replacement_is_found(line: str, is_found: bool) -> None:
    head = "from collage_fx import CollageBackend\nfrom collage_fx.capture import watch\n"
    assert bool([*_replaced(ast.parse(head + line))]) == is_found
