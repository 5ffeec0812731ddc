"""Layers point one way: formats < arithmetic < graph tools < passes < pipeline < backend."""

import ast
import re
from pathlib import Path

import pytest

import collage_fx

ROOT = Path(collage_fx.__file__).parent

#: From the bottom up; a module imports only from lower rows. ``passes`` is imported by the pipeline alone.
LAYERS = [
    {"wrapping", "suggestions", "mathml", "sums_in_cpp"},
    {"formats", "averaging", "fused", "torch_compat"},
    {"arithmetic", "errors", "measures"},
    {"batches", "operators", "error_formats", "graph", "composites"},
    {"metrics", "retype", "program", "scalars", "partition", "pictures"},
    {"skipping"},
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


COMPAT = ROOT / "torch_compat"

#: Likewise within torch_compat.
COMPAT_LAYERS = [
    {
        "version",
        "tensors",
        "fake_tensors",
        "optim_frames",
        "dynamo_trace",
        "aot_autograd",
        "inductor_libraries",
    },
    {
        "dynamo_optimizers",
        "dynamo_graph_breaks",
        "dynamo_numbers",
        "inductor_cpp_conversions",
        "inductor_cpp_loads",
    },
    {"dynamo_conversions", "inductor", "inductor_cpp_sums"},
    {"inductor_cpp", "inductor_lowerings"},
    {"__init__"},
]
COMPAT_RANK = {module: rank for rank, layer in enumerate(COMPAT_LAYERS) for module in layer}


def _imports(path: Path, package: str = "collage_fx") -> set[str]:
    """The package's modules that a file imports from."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and f"{node.module}.".startswith(f"{package}."):
            inner = node.module.removeprefix(package).split(".")[1:2]
            names |= set(inner) if inner else {alias.name for alias in node.names}
    return names


@pytest.mark.parametrize("path", sorted(ROOT.glob("*.py")), ids=lambda path: path.stem)
def test_a_module_imports_only_from_lower_layers(path: Path) -> None:
    assert path.stem in RANK, f"say which layer {path.stem} belongs to"
    higher = {name for name in _imports(path) if name in RANK and RANK[name] >= RANK[path.stem]}
    assert not higher, f"{path.stem} imports {higher} from its own layer or above"


@pytest.mark.parametrize("path", sorted(COMPAT.glob("*.py")), ids=lambda path: path.stem)
def test_a_module_of_torch_compat_imports_only_from_lower_layers(path: Path) -> None:
    names = _imports(path)
    higher = {name for name in names - {"torch_compat"} if RANK[name] >= RANK["torch_compat"]}
    assert not higher, f"{path.stem} imports {higher} from torch_compat's own layer or above"
    assert path.stem in COMPAT_RANK, f"say which layer of torch_compat {path.stem} belongs to"
    within = _imports(path, "collage_fx.torch_compat")
    higher = {name for name in within if COMPAT_RANK[name] >= COMPAT_RANK[path.stem]}
    assert not higher, f"{path.stem} imports {higher} from its own layer or above"


def test_only_the_pipeline_imports_passes() -> None:
    assert [path.stem for path in ROOT.glob("*.py") if "passes" in _imports(path)] == ["pipeline"]


@pytest.mark.parametrize("path", sorted((ROOT / "passes").glob("*.py")), ids=lambda path: path.stem)
def test_passes_do_not_know_the_backend(path: Path) -> None:
    assert all(RANK[name] <= RANK["passes"] for name in _imports(path))


def test_every_package_is_packed() -> None:
    """The list in pyproject.toml; an editable install would find one that is missing there."""
    listed = re.search(r"^packages = (\[.*\])$", (ROOT.parent / "pyproject.toml").read_text(), re.MULTILINE)
    assert listed
    found = {f"collage_fx.{path.parent.name}" for path in ROOT.glob("*/__init__.py")}
    assert set(ast.literal_eval(listed[1])) == {"collage_fx", "collage_fx.examples", *found}
