"""Layers point one way: formats < arithmetic < graph tools < passes < pipeline < backend."""

import ast
from pathlib import Path

import pytest

import collage_fx

ROOT = Path(collage_fx.__file__).parent

#: From the bottom up; a module imports only from lower rows. ``passes`` is imported by the pipeline alone.
LAYERS = [
    {"wrapping", "suggestions", "mathml", "sums_in_cpp"},
    {"formats", "averaging", "torch_compat"},
    {"arithmetic", "errors", "measures"},
    {"operators", "error_formats", "graph", "composites"},
    {"metrics", "retype", "program", "scalars", "partition", "pictures"},
    {"feedback", "recurrence", "verify", "kernels", "treatments", "dumps", "svg"},
    {"passes"},
    {"pipeline"},
    {"error_terms", "names"},
    {"admission", "checkpoint", "sharing", "compilations", "plots", "tables"},
    {"metering", "page", "repetition"},
    {"report", "families", "layouts"},
    {"lowering", "recorder", "options"},
    {"recording"},
    {"eager"},
    {"capture"},
    {"backend"},
    {"explain", "doctor"},
    {"__init__", "cli"},
    {"__main__"},
]
RANK = {module: rank for rank, layer in enumerate(LAYERS) for module in layer}


def _imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("collage_fx"):
            head = node.module.split(".")[1:2]
            names |= set(head) if head else {alias.name for alias in node.names}
    return names


@pytest.mark.parametrize("path", sorted(ROOT.glob("*.py")), ids=lambda path: path.stem)
def test_a_module_imports_only_from_lower_layers(path: Path) -> None:
    assert path.stem in RANK, f"say which layer {path.stem} belongs to"
    higher = {name for name in _imports(path) if name in RANK and RANK[name] >= RANK[path.stem]}
    assert not higher, f"{path.stem} imports {higher} from its own layer or above"


def test_only_the_pipeline_imports_passes() -> None:
    assert [path.stem for path in ROOT.glob("*.py") if "passes" in _imports(path)] == ["pipeline"]


@pytest.mark.parametrize("path", sorted((ROOT / "passes").glob("*.py")), ids=lambda path: path.stem)
def test_passes_do_not_know_the_backend(path: Path) -> None:
    assert all(RANK[name] <= RANK["passes"] for name in _imports(path))
