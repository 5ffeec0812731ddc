"""The environment: torch's build for CUDA, and the libraries that it is linked with.

Nothing here imports torch, or anything beside Python.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support.fake_cuda import DEVICES, HERE

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = Path(__file__).resolve().parent

#: Versions of Triton, by those of torch.
VERSIONS = {"2.13.0": "3.7.1", "2.11.0": "3.6.0"}
NEWEST = "2.13.0"

#: Requirements of torch and the tests.
REQUIRED = (
    *(
        "setuptools>=77.0.3",
        "numpy",
        "sympy",
        "networkx",
        "jinja2",
        "filelock",
        "fsspec",
        "typing_extensions",
    ),
    *("tabulate", "pytest>=8", "pytest-xdist", "hypothesis", "expecttest"),
)
#: Headers of the runtime.
HEADERS = "nvidia-cuda-runtime===13.0.96"

#: NVIDIA's checker of accesses: the emulator checks all of them, so that it only has to run the program.
SANITIZER = """#!/bin/sh
while case $1 in --*) true ;; *) false ;; esac; do
    case $1 in --tool | --error-exitcode) shift 2 ;; *) shift ;; esac
done
exec "$@"
"""


def version(asked: str) -> str:
    """Return the version of torch that begins like this, such as 2.11.0 of 2.11."""
    found = [each for each in VERSIONS if f"{each}.".startswith(f"{asked}.")]
    if not found:
        raise ValueError(f"torch {asked}: there are {' and '.join(VERSIONS)}")
    return found[0]


@dataclass(frozen=True)
class Environment:
    """A folder with a Python, torch's build for CUDA, and a driver.

    Args:
        folder: is made by :meth:`set_up`, and may be deleted.
        torch: a version of :data:`VERSIONS`.
    """

    folder: Path
    torch: str = NEWEST

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def libraries(self) -> Path:
        return self.folder / "fake_cuda"

    def set_up(self, compiler: str = "g++") -> None:
        """Bring up to date: install the first time, compile the driver when its source has changed."""
        wanted = f"torch {self.torch}, triton {VERSIONS[self.torch]}, {' '.join(REQUIRED)}, {HEADERS}\n"
        stamp = self.folder / "fake_cuda.stamp"
        if not (stamp.is_file() and stamp.read_text() == wanted):
            self._install()
            stamp.write_text(wanted)
        sources = [*(PACKAGE / "driver").iterdir(), PACKAGE / "libraries.py"]
        built = self.libraries / "built"
        newest = max(each.stat().st_mtime for each in sources)
        if not built.is_file() or built.stat().st_mtime < newest:
            _say("compiling the driver")
            self._build(compiler)
            sanitizer = self.folder / "bin" / "compute-sanitizer"
            sanitizer.write_text(SANITIZER)
            sanitizer.chmod(0o755)
            built.touch()

    def _install(self) -> None:
        _say(f"creating {self.folder.name}")
        subprocess.run([sys.executable, "-m", "venv", str(self.folder)], check=True)
        pip = [str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _say("installing the requirements of tests (40 MB)")
        subprocess.run([*pip, *REQUIRED], check=True)
        # Three equals signs: two are satisfied by a build for CPUs. No dependencies: those are NVIDIA's
        # libraries, of which the headers alone are needed.
        pip += ["--no-deps", "--only-binary=:all:"]
        triton = VERSIONS[self.torch]
        _say(f"installing torch {self.torch} for CUDA (530 MB) and triton {triton} (190 MB): some minutes")
        subprocess.run([*pip, f"torch==={self.torch}", f"triton==={triton}"], check=True)
        subprocess.run([*pip, "--upgrade", "--target", str(self.folder / "headers"), HEADERS], check=True)

    def _build(self, compiler: str) -> None:
        from tests.support.fake_cuda.libraries import build

        (packages,) = self.folder.glob("lib/python*/site-packages")
        includes = [
            self.folder / "headers" / "nvidia" / "cu13" / "include",
            packages / "triton" / "backends" / "nvidia" / "include",
        ]
        build(packages / "torch", PACKAGE / "driver", includes, self.libraries, compiler)

    def variables(self) -> dict[str, str]:
        """Return the variables with which each Python of the environment has the card."""
        paths = {
            "PATH": [self.folder / "bin"],
            "PYTHONPATH": [PACKAGE / "startup", ROOT],
            "LD_LIBRARY_PATH": [self.libraries],
        }
        found = {
            name: os.pathsep.join([*map(str, first), *filter(None, [os.environ.get(name)])])
            for name, first in paths.items()
        }
        usual = {
            DEVICES: "2",
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "cache"),
            # A kernel that comes out of a bundle has no PTX beside it.
            "TORCHINDUCTOR_BUNDLE_TRITON_INTO_FX_GRAPH_CACHE": "0",
            "TRITON_HOME": str(self.folder / "triton"),
        }
        return {
            **os.environ,
            **{name: os.environ.get(name, value) for name, value in usual.items()},
            **found,
            HERE: "1",
            "PYTEST_PLUGINS": "tests.support.fake_cuda.plugin",
            "TRITON_LIBCUDA_PATH": str(self.libraries),
        }

    def run(self, *command: str) -> int:
        """Run a command of the environment in the current folder; return its exit status."""
        variables = self.variables()
        found = shutil.which(command[0], path=variables["PATH"]) or command[0]
        return subprocess.run([found, *command[1:]], env=variables, check=False).returncode


def _say(text: str) -> None:
    print(f"fake CUDA: {text}", file=sys.stderr, flush=True)
