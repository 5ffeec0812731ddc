"""The law of the house: which part of collage_fx may know which, read off the syntax trees.

Each folder of ``collage_fx/`` is a room, each file beside them a room of its own.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import collage_fx

ROOT = Path(collage_fx.__file__).parent

#: A room -> the rooms that its files may import from. ``collage_fx/__init__.py`` is ``__init__``.
LAW: dict[str, set[str]] = {
    "torch_compat": set(),
    "numerics": set(),
    "errors": {"torch_compat"},
    "graph": {"torch_compat", "numerics", "errors"},
    "passes": {"graph", "numerics"},
    "pipeline": {"passes", "graph", "errors"},
    "options": {"pipeline", "graph", "numerics", "errors"},
    "runtime": {"torch_compat", "numerics", "errors", "graph"},
    "capture": {"torch_compat", "numerics", "errors", "graph", "runtime"},
    "lowering": {"torch_compat", "numerics", "errors", "graph", "runtime"},
    "report": {"torch_compat", "numerics", "errors", "graph", "runtime", "pipeline"},
}
LAW["compilation"] = {*LAW, "compilation"} - {"passes", "compilation"}
LAW["backend"] = {*LAW} - {"passes", "backend"}
LAW["explain"] = LAW["doctor"] = {*LAW} - {"passes"}
LAW["cli"] = {*LAW} - {"passes", "cli"}
LAW["__init__"] = {*LAW} - {"passes", "cli"}
LAW["__main__"] = {"cli"}


def _files() -> Iterator[Path]:
    yield from sorted({*ROOT.rglob("*.py"), *(ROOT / "passes").glob("*.py")})  # a link, which rglob passes by


def _room(path: Path) -> str:
    inside = path.relative_to(ROOT)
    return inside.parts[0] if len(inside.parts) > 1 else inside.stem


def _imported(tree: ast.AST) -> Iterator[tuple[str, list[str]]]:
    """Modules that a file imports, at any depth, and the names that it takes from each."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            yield str(node.module), [alias.name for alias in node.names]


def _rooms_of(path: Path) -> set[str]:
    """The rooms, other than its own, that a file imports from."""
    found = set()
    for module, names in _imported(ast.parse(path.read_text(encoding="utf-8"))):
        package, _, inner = module.partition(".")
        if package != "collage_fx":
            continue
        rooms = [inner.split(".")[0]] if inner else names
        for room in rooms:
            assert room in LAW, f"{path} imports {room} from collage_fx itself, which re-exports it"
            found.add(room)
    return found - {_room(path)}


@pytest.mark.parametrize("path", _files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_knows_only_those_that_the_law_permits(path: Path) -> None:
    assert _room(path) in LAW, f"say which rooms {_room(path)} may import from"
    forbidden = _rooms_of(path) - LAW[_room(path)]
    assert not forbidden, f"{path.relative_to(ROOT)} imports from {sorted(forbidden)}"


def test_the_law_has_no_circle() -> None:
    order: list[str] = []
    while len(order) < len(LAW):
        ready = [room for room in LAW if room not in order and LAW[room] <= set(order)]
        assert ready, f"in a circle: {sorted(set(LAW) - set(order))}"
        order += ready


@pytest.mark.parametrize("path", _files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_names_of_another_room_come_through_its_door(path: Path) -> None:
    """Its ``__init__.py``, but for names that are a module's too."""
    for module, names in _imported(ast.parse(path.read_text(encoding="utf-8"))):
        parts = module.split(".")
        if parts[0] == "collage_fx" and len(parts) > 2 and parts[1] != _room(path) and parts[1] != "passes":
            assert parts[-1] in names or _room(path) == "__init__", (
                f"{path}: import from {'.'.join(parts[:2])}"
            )


def test_every_package_is_packed() -> None:
    """The list in pyproject.toml; an editable install would find one that is missing there."""
    text = (ROOT.parent / "pyproject.toml").read_text()
    listed = re.search(r"^packages = (\[.*?\])$", text, re.MULTILINE | re.DOTALL)
    assert listed
    found = {".".join(path.parent.relative_to(ROOT.parent).parts) for path in ROOT.rglob("__init__.py")}
    found |= {"collage_fx.passes", "collage_fx.examples"}  # which stand at the top of the repository
    assert set(ast.literal_eval(listed[1])) == found
