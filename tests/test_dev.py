"""What ./dev says and returns when the machine lacks something; nothing here installs anything."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

DEV = Path(__file__).parent.parent / "dev"

Script = Callable[[str, str], str]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Writes an executable shell script of that name; its path."""

    def write(name: str, text: str) -> str:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    return write


def dev(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs ./dev with an empty PATH and nothing but `env` beside it."""
    return subprocess.run(
        [sys.executable, DEV, *args], env={"PATH": "", **env}, capture_output=True, text=True, check=False
    )


def interpreter(script: Script, tmp_path: Path, **changed: object) -> str:
    """A Python with headers and every module that ./dev asks about, which exits with 7 whatever it runs."""
    (tmp_path / "Python.h").touch()
    facts = {"version": [3, 12, 0], "include": str(tmp_path), "missing": [], **changed}
    return script("python", f"[ \"$1\" = -c ] || exit 7\necho '{json.dumps(facts)}'")


@pytest.mark.parametrize("command", ["demo", "test", "compat", "bench"])
def test_missing_compiler_is_named_with_its_package(command: str) -> None:
    result = dev(command)
    assert result.returncode == 1
    assert "no C++ compiler found" in result.stderr
    assert "apt-get install g++" in result.stderr
    assert "Traceback" not in result.stderr


def test_cxx_that_does_not_run(script: Script) -> None:
    result = dev("test", CXX=script("broken-c++", "exit 1"))
    assert result.returncode == 1
    assert "broken-c++ does not run" in result.stderr


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"version": [3, 9, 1]}, "is Python 3.9.1; collage_fx needs 3.10 or newer"),
        ({"include": "/nowhere"}, "no Python.h in /nowhere"),
        ({"missing": ["torch", "xdist"]}, "has no torch."),  # xdist is only a help
    ],
)
def test_unfit_interpreter_is_refused(
    changed: dict[str, object], message: str, script: Script, tmp_path: Path
) -> None:
    python = interpreter(script, tmp_path, **changed)
    result = dev("test", CXX=script("c++", "exit 0"), COLLAGE_FX_PYTHON=python)
    assert result.returncode == 1
    assert message in result.stderr


@pytest.mark.parametrize("command", ["test", "lint", "demo", "compat", "bench", "formats"])
def test_exit_status_is_passed_on(command: str, script: Script, tmp_path: Path) -> None:
    python = interpreter(script, tmp_path)
    assert dev(command, CXX=script("c++", "exit 0"), COLLAGE_FX_PYTHON=python).returncode == 7


def test_unknown_command() -> None:
    result = dev("tset")
    assert result.returncode == 2
    assert "no command 'tset'" in result.stderr


def test_a_fake_gpu_needs_a_compiler() -> None:
    result = dev("test", "--fake-gpu")
    assert result.returncode == 1
    assert "no C++ compiler found" in result.stderr


def test_a_fake_gpu_of_an_unknown_torch(script: Script) -> None:
    result = dev("test", "--fake-gpu=1.0", CXX=script("c++", "exit 0"))
    assert result.returncode == 2
    assert "torch 1.0: there are 2.13.0 and 2.11.0" in result.stderr
