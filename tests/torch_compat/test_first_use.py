"""Names that are imported when they are first used, and the hooks that act before: Note [First use]."""

import importlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from collage_fx import full_value, install
from collage_fx.torch_compat.first_use import is_used

#: An ``__init__.py`` that takes its time, and fails as often as a file says.
PACKAGE = """
import pathlib
import time
from collage_fx.torch_compat.first_use import at_first_use, is_used

if is_used(__name__):
    from late import inner
    failures = pathlib.Path(__file__).with_name("failures")
    if failures.exists():
        failures.unlink()
        raise OSError("not yet")
    time.sleep(0.05)
    name = inner.value
else:
    __getattr__ = at_first_use(__name__)
"""


@pytest.fixture
def late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder of a package whose names are imported at their first use."""
    folder = tmp_path / "late"
    folder.mkdir()
    (folder / "__init__.py").write_text(PACKAGE)
    (folder / "inner.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in ("late", "late.inner"):
        sys.modules.pop(name, None)
    importlib.import_module("collage_fx.torch_compat.first_use")._used.discard("late")


def test_threads_that_use_a_name_first_at_once_all_find_it(late: Path) -> None:
    package, found = importlib.import_module("late"), []
    assert not is_used("late")
    threads = [threading.Thread(target=lambda: found.append(package.name)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [3] * 4


def test_a_first_use_that_fails_is_tried_again(late: Path) -> None:
    package = importlib.import_module("late")
    (late / "failures").touch()
    with pytest.raises(OSError, match="not yet"):
        _ = package.name
    assert package.name == 3


def test_an_unknown_name_is_an_attribute_error(late: Path) -> None:
    package = importlib.import_module("late")
    with pytest.raises(AttributeError, match="'late' has no attribute 'nmae'"):
        _ = package.nmae
    assert not hasattr(package, "__wrapped__")


#: Programs that import torch and use no name of the library before a hook of the import has to act.
PROGRAMS = {
    "averages are stored with error terms": """
import collage_fx
update = torch.optim.swa_utils.AveragedModel(model).update_parameters
torch.compile(update, backend="collage")(model)
torch.compile(update, backend="collage")(model)
assert all(collage_fx.error_terms(p) for p in update.__self__.module.parameters())
""",
    "eager steps are counted": """
import collage_fx
optimizer.step()
assert "collage_fx.backend" in sys.modules
collage_fx.install(optimizer).step()  # state of more steps than were counted would be taken for loaded
assert all(map(collage_fx.error_terms, model.parameters()))
""",
    "a float32 model gets what was saved of 16 bits": """
import collage_fx
saved = torch.load(sys.argv[1])
wide = [torch.nn.Parameter(p.float()) for p in saved["hi"]]
optimizer = torch.optim.SGD(wide)
optimizer.load_state_dict(saved["checkpoint"])
optimizer.step()
assert all(map(torch.equal, wide, saved["wide"]))
""",
    "packed state is known to torch.load": """
import collage_fx
state = torch.load(sys.argv[1])["packed"]["state"][0]["exp_avg"]
assert type(state) is not torch.Tensor and state.float().abs().max() > 0
""",
    "a pickle of an installed optimizer is installed": """
optimizer = torch.load(sys.argv[1].replace("saved", "pickled"), weights_only=False)
import collage_fx
assert collage_fx.backend_of(optimizer) is not None
""",
}

HEAD = """
import sys, warnings
import torch
warnings.filterwarnings("error", message="collage_fx")
torch.manual_seed(0)
model = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(4, dtype=torch.bfloat16)).sum().backward()
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """File with state dicts of installed optimizers; one of them is pickled beside it."""
    path = tmp_path_factory.mktemp("files") / "saved"
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    optimizer = install(torch.optim.SGD(model.parameters(), lr=2.0**-12))
    weights = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    packed = install(torch.optim.AdamW([weights]), strategy="light", state="block8")
    for p in (*model.parameters(), weights):
        p.grad = torch.ones_like(p)
    optimizer.step()
    packed.step()
    wide = [full_value(p).float() for p in model.parameters()]
    assert any((p.float() != value).any() for p, value in zip(model.parameters(), wide, strict=True))
    both = {"checkpoint": optimizer.state_dict(), "packed": packed.state_dict()}
    torch.save({**both, "hi": [p.detach() for p in model.parameters()], "wide": wide}, path)
    torch.save(optimizer, path.with_name("pickled"))
    return path


@pytest.mark.parametrize("said", PROGRAMS)
def test_the_hooks_of_the_import_act_before_a_name_is_used(said: str, saved: Path) -> None:
    before = "assert 'collage_fx.backend' not in sys.modules\n"
    program = HEAD + PROGRAMS[said].replace("import collage_fx\n", f"import collage_fx\n{before}", 1)
    if said.startswith("a pickle"):
        program = program.replace(before, "")
    done = subprocess.run([sys.executable, "-c", program, saved], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr


#: Imports each module named on the command line first, in a process of its own.
EACH_FIRST = """
import importlib, os, sys
import torch, torch._inductor.compile_fx, collage_fx
for name in sys.argv[1:]:
    if not (child := os.fork()):
        importlib.import_module(name)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(name)
"""


def test_each_part_of_the_library_can_be_imported_first() -> None:
    """As a program's first line, and a worker process that unpickles a function, do."""
    root = Path(importlib.import_module("collage_fx").__file__ or "").parent
    packages = [f"collage_fx.{path.parent.relative_to(root)}" for path in root.rglob("*/__init__.py")]
    names = [*(name.replace("/", ".") for name in packages), "collage_fx.torch_compat.tensors"]
    assert len(names) > 15
    subprocess.run([sys.executable, "-c", EACH_FIRST, *names, "collage_fx.options.budgets"], check=True)
