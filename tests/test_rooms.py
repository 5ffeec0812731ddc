"""The law of the house: which part of collage_fx may know which, read off the syntax trees.

Each folder of ``collage_fx/`` is a room; a file beside them, or one that the law names, is a room of its own.
``collage_tools/`` is another house, which knows what a user knows, and a few doors.
"""

import ast
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

import collage_fx
from collage_fx.torch_compat import PATCHES

ROOT = Path(collage_fx.__file__).parent
#: Package of the tools.
TOOLS = ROOT.parent / "collage_tools"

#: A room -> the rooms that its files may import from. ``collage_fx/__init__.py`` is ``__init__``.
LAW: dict[str, set[str]] = {
    "choices": set(),
    "clock": set(),
    "torch_compat": set(),
    "numerics": set(),
    "errors": {"torch_compat"},
    "graph": {"choices", "torch_compat", "numerics", "errors"},
    "passes": {"graph", "numerics"},
    "pipeline": {"choices", "passes", "graph", "errors"},
    "options": {"choices", "pipeline", "graph", "numerics", "errors"},
    "codegen": {"torch_compat", "numerics", "graph"},
    "state": {"choices", "torch_compat", "numerics", "errors", "graph", "codegen"},
    "runtime": {"torch_compat", "numerics", "errors", "graph", "codegen", "state"},
    "metrics": {"torch_compat", "numerics", "errors", "graph", "state", "runtime"},
    "capture": {
        "clock",
        "torch_compat",
        "numerics",
        "errors",
        "graph",
        "codegen",
        "state",
        "runtime",
    },
    "lowering": {"choices", "torch_compat", "numerics", "errors", "graph", "codegen", "runtime"},
    "options.budgets": {"choices", "pipeline", "graph", "numerics", "errors"},
    "report": {
        "torch_compat",
        "numerics",
        "errors",
        "graph",
        "state",
        "metrics",
        "pipeline",
        "options.budgets",
    },
}
LAW["report"] |= {"choices"}
LAW["backend"] = {*LAW} - {"passes"}
LAW["installation"] = {*LAW} - {"passes"}
LAW["wings.gradient_release"] = {*LAW} - {"passes"}
LAW["wings.offload"] = {*LAW} - {"passes"}
LAW["wings.conversion"] = {*LAW, "tools"} - {"passes"}
LAW["wings.weight_changes"] = {"choices", "torch_compat", "errors", "codegen", "state"}
LAW["wings.full_precision"] = {"torch_compat", "numerics", "errors", "graph", "state"}
LAW["optim"] = {room for room in LAW if not room.startswith(("passes", "wings."))}
LAW["tools"] = LAW["optim"]
LAW["integrations"] = LAW["tools"] - {"capture", "torch_compat"} | {"wings.gradient_release"}
LAW["__init__"] = {*LAW} - {"passes"}
LAW["__main__"] = set()


def _files() -> Iterator[Path]:
    yield from sorted({*ROOT.rglob("*.py"), *(ROOT / "passes").glob("*.py")})  # a link, which rglob passes by


def _files_of_tools() -> Iterator[Path]:
    yield from sorted(TOOLS.rglob("*.py"))


def _all_files() -> Iterator[Path]:
    yield from _files()
    yield from _files_of_tools()


def _inside(path: Path) -> str:
    """The path of a file in ``collage_fx/``; that of a tool begins with ``collage_tools/``."""
    return path.relative_to(ROOT if path.is_relative_to(ROOT) else ROOT.parent).as_posix()


def _room(path: Path) -> str:
    """The room of a file; of one of the tools, its folder there."""
    inside = path.relative_to(ROOT if path.is_relative_to(ROOT) else TOOLS)
    return _room_of([*inside.parts[:-1], inside.stem])


def _room_of(parts: Sequence[str]) -> str:
    return inner if (inner := ".".join(parts[:2])) in LAW else parts[0]


def _imported(tree: ast.AST) -> Iterator[tuple[str, list[str]]]:
    """Modules that a file imports, at any depth, and the names that it takes from each.

    Names of a room are taken by importing them, or as attributes of the room: after ``from collage_fx import
    graph``, as ``graph.copy_of``.
    """
    rooms = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            yield str(node.module), [alias.name for alias in node.names]
            rooms |= {alias.name for alias in node.names} if node.module == "collage_fx" else set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in rooms:
            yield f"collage_fx.{node.value.id}", [node.attr]


def _taken(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Rooms and the names that a file takes from each: by import, and as attributes of an imported room."""
    whole = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "collage_fx"
        for alias in node.names
    }
    for module, names in _imported(tree):
        if module.startswith("collage_fx."):
            yield from ((module.removeprefix("collage_fx."), name) for name in names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in whole:
            yield whole[node.value.id], node.attr


@functools.cache
def _handed_out(room: str) -> frozenset[str]:
    """Return the names that the ``__init__.py`` of a room imports."""
    nodes = ast.walk(_tree(ROOT / room / "__init__.py"))
    imports = (node for node in nodes if isinstance(node, ast.ImportFrom))
    return frozenset(alias.asname or alias.name for node in imports for alias in node.names)


def _rooms_of(path: Path) -> set[str]:
    """The rooms, other than its own, that a file imports from."""
    found = set()
    for module, names in _imported(_tree(path)):
        package, _, inner = module.partition(".")
        if package != "collage_fx":
            continue
        rooms = [_room_of([*inner.split("."), name]) for name in names or [""]] if inner else names
        for room in rooms:
            assert room in LAW, f"{path} imports {room} from collage_fx itself, which re-exports it"
            found.add(room)
    return found - {_room(path)}


@pytest.mark.parametrize("path", list(_files()), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_knows_only_those_that_the_law_permits(path: Path) -> None:
    if path.relative_to(ROOT).as_posix() == "wings/__init__.py":
        assert not [*_imported(_tree(path))], "each wing is a door"
        return
    assert _room(path) in LAW, f"say which rooms {_room(path)} may import from"
    forbidden = _rooms_of(path) - LAW[_room(path)]
    assert not forbidden, f"{path.relative_to(ROOT)} imports from {sorted(forbidden)}"


def test_a_compilation_knows_no_backend() -> None:
    modules = {module for module, _ in _imported(_tree(ROOT / "backend" / "compilation.py"))}
    assert not any(re.match(r"collage_fx\.backend\b", module) for module in modules)


#: Most entries of ``collage_fx/`` that a reader of the folder sees, since when: the number only falls.
MOST_ENTRIES = (("2026-11-27", 25),)


def test_the_house_has_few_doors_to_the_street() -> None:
    entries = [path.name for path in ROOT.iterdir() if path.name not in ("__pycache__", "py.typed")]
    assert len(entries) <= MOST_ENTRIES[-1][1], sorted(entries)


def test_the_law_has_no_circle() -> None:
    order: list[str] = []
    while len(order) < len(LAW):
        ready = [room for room in LAW if room not in order and LAW[room] <= set(order)]
        assert ready, f"in a circle: {sorted(set(LAW) - set(order))}"
        order += ready


ROOMS = sorted(path.parent.name for path in ROOT.glob("*/__init__.py") if path.parent.name in LAW)


@pytest.mark.parametrize("path", list(_files()), ids=lambda path: str(path.relative_to(ROOT)))
def test_names_of_another_room_come_through_its_door(path: Path) -> None:
    """Its ``__init__.py``, but for names that are a module's too."""
    for module, names in _imported(_tree(path)):
        parts = module.split(".")
        if parts[0] != "collage_fx" or len(parts) < 3 or ".".join(parts[1:]) in LAW:
            continue
        if parts[1] not in (_room(path), "passes"):
            assert parts[-1] in names or _room(path) == "__init__", (
                f"{path}: import from {'.'.join(parts[:2])}"
            )
    for room, name in _taken(_tree(path)):
        if room in ROOMS and room != _room(path) and _room(path) != "__init__":
            is_module = (ROOT / room / f"{name}.py").exists()
            assert name in _handed_out(room) or is_module or name.startswith("__"), f"{path}: {room}.{name}"


#: Names of a room that are for users alone.
FOR_USERS = {
    "AuxiliarySpec",
    "Blocks",
    "Byte",
    "Dither",
    "ErrorBound",
    "Exact",
    "Fp32",
    "Mcf",
    "Weights",
    "blocks_of",
    "collage",
    "from_blocks",
    "why_no_blocks",
}


@pytest.mark.parametrize("room", ROOMS)
def test_a_door_names_what_it_hands_out_and_nothing_else(room: str) -> None:
    """Every name that its ``__init__.py`` imports is taken by another room, or is for users."""
    tree = _tree(ROOT / room / "__init__.py")
    assert not any("*" in names for _, names in _imported(tree))
    handed_out = {name for module, names in _imported(tree) if "collage_fx" in module for name in names}
    handed_out -= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    taken = {
        name
        for path in _all_files()
        if TOOLS in path.parents or _room(path) != room
        for each, name in _taken(_tree(path))
        if each == room
    }
    unused = handed_out - taken - FOR_USERS
    assert not unused, f"collage_fx/{room}/__init__.py: nobody takes {sorted(unused)}"


def test_every_package_is_packed() -> None:
    """The list in pyproject.toml; an editable install would find one that is missing there."""
    text = (ROOT.parent / "pyproject.toml").read_text()
    listed = re.search(r"^packages = (\[.*?\])$", text, re.MULTILINE | re.DOTALL)
    assert listed
    doors = [*ROOT.rglob("__init__.py"), *TOOLS.rglob("__init__.py")]
    found = {".".join(path.parent.relative_to(ROOT.parent).parts) for path in doors}
    found |= {"collage_fx.passes", "collage_fx.examples", "collage_tools.error_pages"}  # links
    assert set(ast.literal_eval(listed[1])) == found


# The tools. -------------------------------------------------------------------------------------------------

#: A room of ``collage_tools`` -> the rooms there that its files may import from.
LAW_OF_TOOLS: dict[str, set[str]] = {
    "__init__": set(),
    "audit": set(),
    "doctor": set(),
    "pages": set(),
    "checkup": {"pages"},
    "gpu_code": set(),
    "plan": {"pages"},
    "conversion": {"checkup"},
    "cli": {"checkup", "conversion", "doctor", "gpu_code", "plan"},
}

#: Modules of the core whose names are public: docs/api.md lists them.
PUBLIC = {"collage_fx.errors", "collage_fx.graph", "collage_fx.numerics", "collage_fx.pipeline"}

#: Doors of the core for the tools: what else they may import. Docstrings there say what it does.
DOORS = {
    "collage_fx": {"__file__", "__version__", "_complete"},
    "collage_fx.choices": {
        "AUDIT_STEPS",
        "Architecture",
        "Dtype",
        "ErrorFormatName",
        "OptionFields",
        "Strategy",
        "did_you_mean",
        "names_of",
        "takes_options",
    },
    "collage_fx.clock": {"clock"},
    "collage_fx.metrics": {"Metrics", "UpdateQuality"},
    "collage_fx.options": {"GivenOptions"},
    "collage_fx.report": {
        "BUDGET_CAPTION",
        "GraphReport",
        "TensorReport",
        "Treatment",
        "budget_table",
        "bytes_per_parameter",
        "plainly",
        "summary_line",
        "treatments",
    },
    "collage_fx.torch_compat": {"FakeTensorMode", "TorchDispatchMode"},
    "collage_fx.tools": {
        "PATCHES",
        "DeviceLaunch",
        "SafetensorsFile",
        "bytes_held",
        "conversions",
        "cpp_compilers",
        "forget_counts",
        "known_tensors",
        "launches_elsewhere",
        "misfits",
        "no_kernels_ahead",
        "recompile_reasons",
        "refuse_unknown",
        "try_updates",
    },
}

#: Files of the core that import from the tools, each when it needs them, which no training program does.
WITH_TOOLS = {
    "__init__.py",
    "__main__.py",
    "backend/backend.py",
    "report/dumps.py",
    "report/graphs.py",
    "report/report.py",
}


def _taken_by_tools(path: Path) -> Iterator[tuple[str, str]]:
    """Modules that a file names, and what it takes from each; also as text, for ``mock``."""
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "the whole") for alias in node.names if alias.name != "collage_fx")
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "collage_fx":
            yield "collage_fx", node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from ((str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Constant) and re.fullmatch(r"collage_fx(\.\w+)+", str(node.value)):
            module, _, name = str(node.value).rpartition(".")
            yield module, name


@pytest.mark.parametrize("path", list(_files_of_tools()), ids=_inside)
def test_a_tool_knows_public_names_and_its_doors(path: Path) -> None:
    allowed = {**DOORS, "collage_fx": {*DOORS["collage_fx"], *collage_fx.__all__}}
    for module, name in _taken_by_tools(path):
        if module.partition(".")[0] == "collage_fx":
            assert name != "the whole", f"{_inside(path)} imports {module} as a whole"
            is_public = not PUBLIC.isdisjoint({module, f"{module}.{name}"})
            assert is_public or name in allowed.get(module, ()), f"{_inside(path)}: {module}.{name}"
        if module.partition(".")[0] == "collage_tools":
            room = module.split(".")[1]
            assert room in LAW_OF_TOOLS[_room(path)] | {_room(path)}, f"{_inside(path)}: {module}"
            assert room == _room(path) or module.count(".") == 1, f"{_inside(path)}: import from its door"


def test_each_door_is_needed() -> None:
    taken = {each for path in _files_of_tools() for each in _taken_by_tools(path)}
    assert not {(module, name) for module, names in DOORS.items() for name in names} - taken


def test_public_modules_are_documented() -> None:
    api = (ROOT.parent / "docs" / "api.md").read_text(encoding="utf-8")
    assert all(f"`{module}`" in api for module in PUBLIC)


#: Conditions that are false when a module is imported.
NOT_AT_IMPORT = {"TYPE_CHECKING", "__name__ == '__main__'"}


def _at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run when a module is imported: not in a function, nor for type checkers alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) in NOT_AT_IMPORT:
            continue
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield child
            yield from _at_import(child)


@pytest.mark.parametrize("path", list(_files()), ids=_inside)
def test_the_core_imports_no_tool_before_it_is_used(path: Path) -> None:
    def is_tool(module: str) -> bool:
        return module.partition(".")[0] == "collage_tools"

    early = {
        name
        for node in _at_import(_tree(path))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [str(node.module)]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert not any(map(is_tool, early))
    found = {module for module, _ in _imported(_tree(path)) if is_tool(module)}
    assert not found or _inside(path) in WITH_TOOLS
    assert all(module.count(".") == 1 for module in found), "a room of the tools has a door, too"


FRESH = """
import sys
import torch
import collage_fx

def tools():
    return sorted(name for name in sys.modules if name.partition(".")[0] == "collage_tools")

assert not tools(), tools()
assert {*collage_fx.__all__} <= {*dir(collage_fx)}
p = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
print(collage_fx.explain(torch.optim.SGD([p], lr=0.1)))
assert not tools(), tools()
assert callable(collage_fx.checkup)
assert "collage_tools.checkup" in tools() and "collage_tools.gpu_code" not in tools()
from collage_fx import *
assert gpu_code is collage_fx.gpu_code
try:
    collage_fx.chekup
except AttributeError as error:
    assert "chekup" in str(error)
else:
    raise AssertionError
"""


def test_importing_and_explaining_need_no_tool() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT.parent)}
    done = subprocess.run([sys.executable, "-c", FRESH], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# What is torch's, and private. ------------------------------------------------------------------------------

#: How many private names of torch's the library uses, since when. What has a public door comes through that:
#: the number only falls, and a lower one is typed below the last.
PRIVATE_NAMES = (("2026-11-24", 103), ("2026-11-25", 77), ("2026-11-27", 76), ("2026-11-30", 72))

#: A card that isn't there: replaces answers of torch's while a command looks at the code for it, which no
#: training program does. Its private names are counted apart.
IMAGINARY, PRIVATE_NAMES_OF_IT = TOOLS / "gpu_code" / "imaginary_cuda.py", 19

#: Names with a leading underscore that are not torch's.
NOT_TORCHS = {
    ("torch_compat/optim_frames.py", "._getframe"): "of sys",
    ("torch_compat/patch_conversions.py", "._getframe"): "of sys",
}

#: Operators are named in graphs as they are, some with a leading underscore.
OPERATORS = ("aten", "prims")


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def _our_names() -> set[str]:
    """Those that the library gives to functions, classes, variables and attributes of its own."""
    found = set()
    for node in (node for path in _all_files() for node in ast.walk(_tree(path))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if ast.unparse(node.value) == "self" else set()
    return found


def _private_names(path: Path, ours: set[str]) -> set[str]:
    """Torch's private names that a file imports, reaches from ``torch``, or names as what a patch replaces.

    And, with a dot in front, attributes of anything that have a leading underscore and are not ours.
    """
    found: set[str] = set()
    nodes = list(ast.walk(_tree(path)))
    inner = {node.value for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            whole = ast.unparse(node)
            if re.fullmatch(r"torch(\.\w+)+", whole):
                found |= {whole} if node not in inner else set()
            elif node.attr not in ours and ast.unparse(node.value) not in OPERATORS:
                found.add(f".{node.attr}")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "Patch":
            targets = (each.value for each in node.keywords if each.arg == "target")
            for module, _, name in (ast.literal_eval(each).partition(":") for each in targets):
                found.add(f"{module}.{re.split('[.( ]', name)[0]}")
    inside = _inside(path)
    torchs = {name for name in found if name.startswith((".", "torch.")) and (inside, name) not in NOT_TORCHS}
    return {name for name in torchs if _is_private(name)}


def test_private_names_of_torch_are_in_torch_compat_alone() -> None:
    ours = _our_names()
    for path in _all_files():
        if _room(path) != "torch_compat" and path != IMAGINARY:
            found = _private_names(path, ours)
            assert not found, f"{_inside(path)}: {sorted(found)}; torch_compat is the place"


def test_private_names_of_torch_become_fewer() -> None:
    ours = _our_names()
    paths = [path for path in _files() if _room(path) == "torch_compat"]
    found = set().union(*(_private_names(path, ours) for path in paths))
    counts = [count for _, count in PRIVATE_NAMES]
    assert counts == sorted(set(counts), reverse=True), "the number only falls"
    assert len(found) == counts[-1], f"type {len(found)} into PRIVATE_NAMES if that is less: {sorted(found)}"
    assert len(_private_names(IMAGINARY, ours) - found) == PRIVATE_NAMES_OF_IT


# What is not ours is changed in one way, by what is listed. -------------------------------------------------

#: The file that does change what isn't ours.
PATCHING = "torch_compat/patching.py"

#: Assignments to attributes of objects that may not be ours, and ``setattr``, elsewhere.
ASSIGNED = {
    ("choices.py", "taking.__doc__"): "of a function of ours, with the documentation of its options",
    ("choices.py", "shown.__signature__"): "likewise, with their names",
    ("state/packed.py", "piece.data"): "the memory of a state that is packed",
    ("state/packed.py", "local_tensor(tensor).data"): "likewise, given back to it",
    ("state/error_terms.py", "local_tensor(tensor).data"): "of state whose object the program has replaced",
    ("state/replaced_state.py", "piece.data"): "of state that is moved to another device, as is asked for",
    ("state/packed.py", "each.__class__"): "of a packed tensor: Note [A packed tensor]",
    (
        "graph/program.py",
        "state.placeholder",
    ): "of a StateTensor, as torch.fx.Graph has a method of that name",
    ("torch_compat/aot_autograd.py", "called._boxed_call"): "a mark on a function, or class, of ours",
    ("torch_compat/fused_updates.py", "twin.__kwdefaults__"): "of a copy of a function",
    ("torch_compat/inductor.py", "setattr"): "marks of ours, on a graph that is ours to edit",
    ("torch_compat/patch_steps.py", "cell.cell_contents"): "OWN_STEPS",
    ("torch_compat/patch_steps.py", "setattr"): "a mark on the switch of OWN_STEPS",
    ("torch_compat/own_steps.py", "setattr"): "a mark on a function of ours",
    ("installation.py", "cls.__init__"): "of a class that the user has asked to change",
    ("installation.py", "cell.cell_contents"): "of a wrapper's function that holds the step of before",
    ("torch_compat/tensors.py", "tensor.data"): "of a tensor that is converted, as is asked for",
    ("torch_compat/tensors.py", "setattr"): "likewise, the shard of a DTensor",
    ("torch_compat/patch_gathers.py", "setattr"): "a mark on a parameter for GATHERED_SHARDS",
    ("torch_compat/patch_gathers.py", "sharded._local_tensor"): "GATHERED_SHARDS, while FSDP2 reads it",
    ("wings/conversion.py", "twin.grad"): "of a piece that a copy of the optimizer steps",
    ("wings/gradient_release.py", "p.grad"): "of small parameters of its own",
    ("wings/gradient_release.py", "parameter.grad"): "a gradient that has been used, as zero_grad() does",
    ("wings/offload.py", "parameter.grad"): "a gradient that has been copied, as zero_grad() does",
    ("wings/offload.py", "twin.grad"): "of a parameter of our own",
    ("wings/offload.py", "twin.grad_dtype"): "of a parameter of our own",
    ("optim/__init__.py", "__init__.__signature__"): "of a function of ours",
    ("installation.py", "setattr"): "a mark on a function of ours",
    ("capture/watch.py", "parameter.grad"): "the same memory in another tensor, while Dynamo traces",
    ("collage_tools/audit.py", "parameter.grad"): "of parameters that the audit has made",
    ("collage_tools/cli.py", "p.grad"): "of parameters that the command has made",
    ("collage_tools/plan/activations.py", "p.grad"): "of a model that the command has made",
    ("collage_tools/plan/activations.py", "layer.forward"): "likewise",
    ("collage_tools/doctor.py", "p.grad"): "of a parameter that the self-test has made",
    ("tools/explain.py", "parameter.grad"): "of a copy of the optimizer",
    ("report/prediction.py", "p.grad"): "of samples that a copy of the optimizer steps",
    ("tools/explain.py", "copied.__kwdefaults__"): "of a copy of a function",
    ("tools/explain.py", "cell.cell_contents"): "of a copy of a function",
    ("torch_compat/patch_dtypes.py", "tensor.grad"): "None, while a fake tensor is made; GRADIENT_DTYPES",
    ("capture/rows.py", "p.grad"): "None, while a step is compiled for which something stands in for it",
}

#: Attributes of the nodes of a graph that is being edited.
OF_NODES = {"args", "kwargs", "meta", "target"}

#: Classes of torch's: an attribute of theirs is not taken for one of ours that has its name.
TORCHS_CLASSES = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, torch.fx.Graph, torch.fx.GraphModule)


@functools.cache
def _our_attributes() -> frozenset[str]:
    """Return the names of attributes that classes of the library declare and that none of torch's has."""
    found = set()
    for each in (
        each for path in _all_files() for each in ast.walk(_tree(path)) if isinstance(each, ast.ClassDef)
    ):
        for node in ast.walk(each):
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                found |= {node.attr} if ast.unparse(node.value) == "self" else set()
        for statement in each.body:
            if isinstance(statement, (ast.Assign, ast.AnnAssign)):
                found |= {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    return frozenset(found.difference(*map(dir, TORCHS_CLASSES)))


def _assigned(path: Path) -> Iterator[str]:
    """Yield the attributes that a file assigns to or deletes, but those of classes of ours, and ``setattr``.

    An attribute is of a class of ours by its name; that of something imported from elsewhere is never.
    """
    tree = _tree(path)
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    foreign = {
        (alias.asname or alias.name).partition(".")[0]
        for node in imports
        for alias in node.names
        if not (
            isinstance(node, ast.ImportFrom)
            and str(node.module).partition(".")[0] in ("collage_fx", "collage_tools")
        )
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            root = ast.unparse(node.value)
            is_ours = node.attr in _our_attributes() | OF_NODES and root.partition(".")[0] not in foreign
            if not is_ours and root != "self":
                yield ast.unparse(node)
        elif isinstance(node, ast.Name) and node.id in ("setattr", "delattr"):
            yield "setattr"


@pytest.mark.parametrize("path", list(_all_files()), ids=_inside)
def test_what_is_not_ours_is_changed_by_patches_alone(path: Path) -> None:
    inside = _inside(path)
    modules = {module for module, _ in _imported(_tree(path))}
    if path != IMAGINARY:
        assert not modules & {"mock", "unittest", "unittest.mock"}, f"{inside} replaces something in passing"
    if inside != PATCHING:
        found = {name for name in _assigned(path) if (inside, name) not in ASSIGNED}
        assert not found, f"{inside} assigns to {sorted(found)}; a Patch, or a reason in ASSIGNED"


def test_each_exception_is_needed() -> None:
    met = {(_inside(path), name) for path in _all_files() for name in _assigned(path)}
    assert not ASSIGNED.keys() - met


def test_a_variable_may_have_any_name(tmp_path: Path) -> None:
    """An attribute is judged by its own name and by what is imported, not by the variable in front."""
    file = tmp_path / "file.py"
    file.write_text(
        "from torch.optim import Adam, Optimizer as state\n"
        "def f(node, program):\n"
        "    node.step, program.rows, node.args, node.no_such_attribute = 1, 2, 3, 4\n"
        "    state.rows = 5\n"
    )
    assert {*_assigned(file)} == {"node.step", "node.no_such_attribute", "state.rows"}


def test_every_patch_is_listed() -> None:
    for path in _all_files():
        made = [node for node in ast.walk(_tree(path)) if isinstance(node, ast.Call)]
        names = [
            ast.literal_eval(each.value)
            for node in made
            if ast.unparse(node.func) == "Patch"
            for each in node.keywords
            if each.arg == "name"
        ]
        assert not names or path.name.startswith("patch_"), f"{path} is no file for patches"
        assert set(names) <= {patch.name for patch in PATCHES}, path


# Facts about the program's objects are in their records; a feature is a wing. -----------------------------

#: Tables of a process, and why they are no parts of a record: Note [Records] in ``torch_compat/records.py``.
TABLES = {
    ("torch_compat/records.py", "_PARTS"): "the records",
    ("state/error_terms.py", "_BY_OBJECT"): "error terms are found by tensor, and",
    ("state/error_terms.py", "_BY_STORAGE"): "by a region of its memory",
    ("capture/recorder.py", "_is_recording"): "of a thread: what runs now",
    ("capture/compiled.py", "_owner"): "of a thread: for whom it compiles now",
    ("capture/watch.py", "_conversion"): "of a thread: what Dynamo converts now",
    ("clock.py", "is_taken"): "of a thread: who shows how long something takes",
    ("runtime/step.py", "STAND_INS"): "of a thread: what stands for absent gradients now",
    ("torch_compat/inductor.py", "_generated"): "of a thread: code that Inductor writes now",
    ("torch_compat/patch_optimizers.py", "tracing_whole"): "of a thread: how Dynamo traces now",
    ("torch_compat/patching.py", "_entered"): "of a thread: patches that it has entered",
    ("torch_compat/patching.py", "_layers"): "what this package has replaced in torch",
    ("lowering/kernels.py", "_made"): "compiled kernels by rule",
    ("state/checkpoint.py", "_carried_along"): "who has something to say in files",
    ("state/checkpoint.py", "_own_loads"): "a stack: classes' own methods that run, and",
    ("state/checkpoint.py", "_own_saves"): "likewise",
    ("state/checkpoint.py", "_reducers"): "what copyreg had for a class",
}

#: Pattern of a feature's word -> in how many files it stood, and stands. The number only falls; a feature is
#: to stand in its own files and three doors.
FEATURES = {
    r"offload": (4,),
    r"in_backward|gradient_release|GradientRelease": (9, 7, 5),
    r"wings.conversion|\bConversion\b": (2,),
    r"full_precision": (2,),
    r"track_changes|changed_weights|[Cc]hanges\b|bitmap": (31, 16, 14, 8),
    r"[Mm]etric|measured": (22, 20, 14, 13),
    r"[Dd]ither|phase": (27, 24, 23, 20, 16),
    r"[Rr]ecord(ed|ing|er)\b": (23, 21, 20, 16),
    r"\bmember": (17, 16, 13),
    r"[Pp]acked|pack_state": (31, 30, 29, 28, 26, 25, 18, 16),
    r"DTensor": (6, 5),
}


def _tables(path: Path) -> Iterator[str]:
    """Yield the names of weak tables, context variables and empty containers that a process has."""
    body = _tree(path).body
    for node in [*body, *(each for kind in body if isinstance(kind, ast.ClassDef) for each in kind.body)]:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        text = "" if value is None else ast.unparse(value)
        is_weak = isinstance(value, ast.Call) and re.search(r"\b(Weak\w+|ContextVar|defaultdict)\b", text)
        if isinstance(target, ast.Name) and (is_weak or text in ("{}", "[]")):
            yield target.id


def test_what_belongs_to_an_object_is_in_its_record() -> None:
    own = (path for path in _all_files() if not {"examples", "passes"} & {*path.parts})
    found = {(_inside(path), name) for path in own for name in _tables(path)}
    assert found - {("capture/source.py", "names")} == {*TABLES}  # an attribute's value that nobody writes


@functools.cache
def _code(path: Path) -> str:
    """Return a file without docstrings and comments."""
    return re.sub(r'(?s)""".*?"""', "", re.sub(r"#.*", "", path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("word", FEATURES)
def test_a_feature_does_not_go_through_the_house(word: str) -> None:
    own = [path for path in _files() if "examples" not in path.relative_to(ROOT).parts]
    files = sorted(str(path.relative_to(ROOT)) for path in own if re.search(word, _code(path)))
    counts = FEATURES[word]
    assert list(counts) == sorted(set(counts), reverse=True), "the number only falls"
    assert len(files) == counts[-1], f"type {len(files)} into FEATURES if that is less: {files}"
