"""What is published: the contents of wheel and sdist, and their use without this repository.

``python -m tests.test_package`` writes the lists of contents anew.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest

import collage_fx

#: What tests need that an environment without these tools lacks.
NEEDED = "needs what ./dev installs: pip install -e '.[dev]'"

ROOT = Path(__file__).resolve().parent.parent
LISTS = ROOT / "tests" / "support" / "package_contents"


def build(into: Path) -> tuple[Path, Path]:
    """The wheel, made from the sdist, and the sdist, of a copy of what git would have."""
    source = into / "source"
    shutil.copytree(
        ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(".*", "*.egg-info", "__pycache__")
    )
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(into), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,), (sdist,) = into.glob("*.whl"), into.glob("*.tar.gz")
    return wheel, sdist


def contents(path: Path) -> str:
    """The names of a package's files, a line each, without versions."""
    if path.suffix == ".whl":
        names = zipfile.ZipFile(path).namelist()
    else:
        with tarfile.open(path) as sdist:
            names = [member.name for member in sdist.getmembers() if member.isfile()]
    return "".join(f"{name.replace(collage_fx.__version__, 'VERSION')}\n" for name in sorted(names))


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    pytest.importorskip("build", reason=NEEDED)
    return build(tmp_path_factory.mktemp("packages"))


@pytest.fixture(scope="module")
def installed(packages: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed, and nothing else; what it depends on is this environment's."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    subprocess.run([*pip, str(folder), str(packages[0])], check=True)
    return folder


def run(installed: Path, *arguments: str, cwd: Path) -> str:
    """The output of Python outside of the repository, with the package that is installed there."""
    env = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, *arguments], env=env, cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_contents(packages: tuple[Path, Path], kind: str) -> None:
    found = contents(packages[kind == "sdist"])
    assert found == (LISTS / f"{kind}.txt").read_text(), "python -m tests.test_package writes the lists"


def test_the_version_is_that_of_the_package(packages: tuple[Path, Path]) -> None:
    assert f"-{collage_fx.__version__}-" in packages[0].name
    assert f'"{collage_fx.__version__}"' not in (ROOT / "pyproject.toml").read_text()


STEP = """
import torch
import collage_fx
from collage_fx import collage_backend, error_terms

p = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
p.grad = torch.ones_like(p)
step = torch.compile(torch.optim.SGD([p], lr=2.0**-12).step, backend=collage_backend)
for _ in range(3):
    step()
(rest,) = error_terms(p)
assert ((p.detach().float() + rest) == 1 - 3 * 2.0**-12).all()
print(collage_fx.__file__)
"""


def test_it_works_without_the_repository(installed: Path, tmp_path: Path) -> None:
    assert Path(run(installed, "-c", STEP, cwd=tmp_path).strip()).is_relative_to(installed)
    assert "All is well." in run(installed, "-m", "collage_fx", "doctor", cwd=tmp_path)
    assert "error terms" in run(installed, "-m", "collage_fx", "explain", "--optimizer", "SGD", cwd=tmp_path)


USER = """
import torch
import collage_fx
from collage_fx import CollageBackend, CollageReport, error_terms, explain, install

params = [torch.nn.Parameter(torch.ones(4))]
optimizer = install(torch.optim.SGD(params, lr=0.1), strategy="light")
report: CollageReport = explain(optimizer)
terms: tuple[torch.Tensor, ...] = error_terms(params[0])
backend = CollageBackend(strategy="light", metrics=True)
print(report.to_text(), terms, backend.metrics())
install(torch.optim.SGD(params), bytes_per_parameter=8)
explain(optimizer, error_format="byte", changes="as written", rounding="nearest", mode="reduce-overhead")
collage_fx.audit(torch.optim.AdamW, state="block8")
collage_fx.optim.AdamW(params, lr=1e-3, collage={"bytes_per_parameter": 5.1})
collage_fx.backend_for(strategy="full", strict=False)
collage_fx.gpu_code(optimizer, arch="sm_90", metrics=True)
collage_fx.offload(optimizer, backend=backend)
collage_fx.step_in_backward(torch.nn.Linear(2, 2), optimizer, strategy="light")
"""

#: Calls that a type checker has to find: names and values that are misspelt, and values of another type.
WRONG = (
    'install(optimizer, strategy="pluss")',
    "install(optimizer, bytes_per_param=8)",
    'install(optimizer, bytes_per_parameter="8")',
    'CollageBackend(error_format="exakt")',
    "CollageBackend(bytes_per_param=8)",
    'CollageBackend(mode="max-autotun")',
    'explain(optimizer, state="block4")',
    'explain(optimizer, arithmetik="wide")',
    'collage_fx.audit(torch.optim.AdamW, rounding="up")',
    "collage_fx.audit(torch.optim.AdamW, metric=True)",
    'collage_fx.backend_for(changes="sum")',
    'collage_fx.gpu_code(optimizer, arch="sm90")',
    'collage_fx.offload(optimizer, stategy="light")',
    'collage_fx.step_in_backward(torch.nn.Linear(2, 2), optimizer, strategy="lite")',
    'collage_fx.optim.AdamW(params, collage={"bytes_per_param": 8})',
    "collage_fx.instal(optimizer)",
)


CHECKERS = {
    "mypy": ["--strict", "--follow-imports=silent"],
    "basedpyright": ["--level", "error", "--pythonpath", sys.executable],
}


@pytest.mark.parametrize("checker", CHECKERS)
def test_types_are_seen_from_outside(installed: Path, tmp_path: Path, checker: str) -> None:
    pytest.importorskip(checker, reason=NEEDED)
    settings = {"extraPaths": [str(installed)], "typeCheckingMode": "standard"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    env = {**os.environ, "MYPYPATH": str(installed)}
    command = [sys.executable, "-m", checker, *CHECKERS[checker], "user.py"]
    first = len(USER.splitlines()) + 1
    for program, wrong in ((USER, set()), (USER + "\n".join(WRONG), {*range(first, first + len(WRONG))})):
        (tmp_path / "user.py").write_text(program)
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        found = {int(line) for line in re.findall(r"user\.py:(\d+):.* error", done.stdout)}
        assert found == wrong, done.stdout + done.stderr
        assert (done.returncode == 0) == (not wrong)


def test_who_is_cited_is_the_package_and_the_paper() -> None:
    yaml = pytest.importorskip("yaml", reason=NEEDED)
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
    assert "2405.03637" in json.dumps(cited["references"])


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ("vendor.github-workflows", ".github/workflows/ci.yml"),
        ("vendor.citation-file-format", "CITATION.cff"),
    ],
)
def test_files_that_others_read_are_as_they_expect(schema: str, path: str) -> None:
    pytest.importorskip("check_jsonschema", reason=NEEDED)
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, str(ROOT / path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_workflow_runs_ci_on_every_version_that_is_named() -> None:
    yaml = pytest.importorskip("yaml", reason=NEEDED)
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    versions = [row["torch"].rpartition(".")[0] for row in job["strategy"]["matrix"]["include"]]
    assert versions == ["2.11", "2.13", "2.15"]
    assert job["steps"][-1]["run"] == ".ci/run"
    assert all(name in (ROOT / "README.md").read_text() for name in versions)


@pytest.mark.parametrize("name", collage_fx.__all__)
def test_the_page_of_public_names_has_them_all(name: str) -> None:
    assert f"`{name}`" in (ROOT / "docs" / "api.md").read_text()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        LISTS.mkdir(exist_ok=True)
        for path, kind in zip(build(Path(folder)), ("wheel", "sdist"), strict=True):
            (LISTS / f"{kind}.txt").write_text(contents(path))


if __name__ == "__main__":
    main()


def test_what_the_examples_write_is_ignored() -> None:
    """Default folders, so that a run in a checkout leaves nothing to be committed by mistake."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "examples").rglob("*.py")]
    written = r'(?:"--out".*default=|^    train\()Path\("(\w+)'
    folders = {name for text in texts for name in re.findall(written, text, re.MULTILINE)}
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert len(folders) >= 3
    assert {f"/{folder}/" for folder in folders} <= set(ignored)
