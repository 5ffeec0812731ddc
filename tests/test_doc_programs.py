"""Every Python program that the documentation shows runs, each page's blocks one after the other."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import environment

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)

MODEL = """\
import torch, collage_fx
def Model():
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
def train(step, steps):
    for _ in range(steps):
        model.zero_grad()
        model(torch.randn(4, 64).bfloat16()).square().mean().backward()
        step()
model = Model().bfloat16()
opt = torch.optim.AdamW(model.named_parameters(), lr=1e-4)
"""
#: What a page takes for granted: a model, an optimizer, names that it does not define.
GIVEN = {
    "README.md": MODEL,
    "audit.md": "import torch\nMyOptimizer = torch.optim.SGD",
    "checkpoints.md": f"{MODEL}\ncollage_fx.install(opt)\ntrain(opt.step, 2)\npath = 'optimizer.pt'",
    "full-precision.md": f"""{MODEL}
model.head = torch.nn.Linear(8, 8).bfloat16()
model.norm = torch.nn.RMSNorm(64).bfloat16()
""",
    "inspecting.md": MODEL,
    "metrics.md": f"""{MODEL}
class Writer:
    def add_scalar(self, name, value, number): assert isinstance(value, float), name
import sys, types
sys.modules["torch.utils.tensorboard"] = torch.utils.tensorboard = types.SimpleNamespace(SummaryWriter=Writer)
number = 50
""",
    "memory.md": f"""{MODEL}
batches = [torch.randn(4, 64).bfloat16() for _ in range(2)]
def loss_of(batch): return model(batch).square().mean()
schedule = torch.optim.lr_scheduler.ConstantLR(opt)
""",
    "between-steps.md": f"{MODEL}\ncollage_fx.install(opt)",
    "training.md": MODEL,
    "unit-scaling.md": """
import collage_fx
import unit_scaling, unit_scaling.optim
width, vocabulary, layers, heads = 32, 64, 1, 2
""",
    "writing-a-format.md": (ROOT / "examples" / "own_format.py")
    .read_text()
    .partition("class NearestByte")[0],
    "writing-a-pass.md": (ROOT / "examples" / "own_pass.py").read_text().partition("@dataclass")[0]
    + "opt = torch.optim.SGD([torch.nn.Parameter(torch.ones(8).bfloat16())], lr=0.1)",
    "writing-an-error.md": "import torch\noptimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])",
}
#: What stands for a training on a page.
ELLIPSIS = {"metrics.md": "train(step, 50)"}
NEEDS = {"unit-scaling.md": ("unit_scaling",), "inspecting.md": ("triton",)}


#: Pages that show Python; those of errors, in a folder below, are run by tests/test_errors.py.
PAGES = [
    path
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md")))
    if BLOCK.search(path.read_text())
]


def program(page: Path) -> str:
    """What the page takes for granted, and its blocks."""
    blocks = "\n".join(BLOCK.findall(page.read_text()))
    if page.name in ELLIPSIS:
        blocks = re.sub(r"^\.\.\.$", ELLIPSIS[page.name], blocks, flags=re.MULTILINE)
    return f"{GIVEN.get(page.name, '')}\n{blocks}"


def printed(page: Path, folder: Path) -> str:
    """What the page's programs print, in a process and a folder of their own."""
    command = [sys.executable, "-c", program(page)]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.prose
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_programs_of_a_page_run(page: Path, tmp_path: Path) -> None:
    for name in NEEDS.get(page.name, ()):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{page.name} shows a program that imports {name}, which is not installed")
    told = printed(page, tmp_path)
    if page.name == "README.md":
        shown = re.findall(r"```\n\n    (.*)\n", page.read_text())
        assert shown == told.splitlines()


def test_pages_with_programs_are_found() -> None:
    names = {page.name for page in PAGES}
    assert {*GIVEN} <= names
