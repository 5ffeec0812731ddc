"""What ./dev says and returns when the machine lacks something; nothing here installs anything."""

import importlib.machinery
import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    for name, told in (("tset", "'tset'; did you mean test?\n"), ("zz", "'zz'\nusage: ./dev COMMAND")):
        result = dev(name)
        assert result.returncode == 2
        assert result.stderr.startswith(f"dev: no command {told}")


def test_the_options_of_the_demo_are_shown_without_an_installation() -> None:
    result = dev("demo", "--steps", "9", "--help")
    assert result.returncode == 0
    assert "./dev demo [OPTION ...]" in result.stdout
    assert "--quick" in result.stdout


def test_a_fake_gpu_needs_a_compiler() -> None:
    result = dev("test", "--fake-gpu")
    assert result.returncode == 1
    assert "no C++ compiler found" in result.stderr


def test_a_fake_gpu_of_an_unknown_torch(script: Script) -> None:
    result = dev("test", "--fake-gpu=1.0", CXX=script("c++", "exit 0"))
    assert result.returncode == 2
    assert "torch 1.0: there are 2.13.0 and 2.11.0" in result.stderr


# Setting up, by a Python that only notes what pip is to do. -------------------------------------------------


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """./dev as a module, for a repository in a folder of its own."""
    loader = importlib.machinery.SourceFileLoader("loaded_dev", str(DEV))
    spec = importlib.util.spec_from_loader("loaded_dev", loader)
    assert spec
    module: Any = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "loaded_dev", module)
    loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.delenv("COLLAGE_FX_TORCH", raising=False)
    (tmp_path / "pyproject.toml").write_text("[project]")
    return module


def set_up(loaded: Any, script: Script, root: Path, extra: str) -> list[str]:
    """Set an extra up; the calls of pip so far."""
    facts = json.dumps({"version": [3, 12, 0], "include": str(root), "missing": []})
    base = script(
        "base",
        f"""case "$2" in
venv) mkdir -p "$4/bin"; cp "$0" "$4/bin/python" ;;
pip) echo "$@" >> {root}/calls ;;
*metadata*) [ ! -f {root}/calls ] || echo {loaded.PINNED_TORCH}+cpu ;;
*) echo '{facts}' ;;
esac""",
    )
    assert loaded.set_up(loaded.inspect(base, []), extra) == str(root / ".venv" / "bin" / "python")
    return (root / "calls").read_text().splitlines()


def test_the_demo_installs_its_own_extra_once(loaded: Any, script: Script, tmp_path: Path) -> None:
    torch, extra = set_up(loaded, script, tmp_path, loaded.COMMANDS["demo"].extra)
    assert torch.endswith(f"install --quiet torch=={loaded.PINNED_TORCH}")
    assert extra.endswith(f"torch=={loaded.PINNED_TORCH} -e .[demo]")  # and no triton
    assert len(set_up(loaded, script, tmp_path, "demo")) == 2, "is there"
    assert len(set_up(loaded, script, tmp_path, "dev")) == 3, "torch is there"
    assert len(set_up(loaded, script, tmp_path, "docs")) == 3, "the extra dev contains it"
    (tmp_path / "pyproject.toml").write_text("[project] changed")
    assert len(set_up(loaded, script, tmp_path, "docs")) == 4


def test_extras_contain_what_is_said_of_them(loaded: Any) -> None:
    text = (DEV.parent / "pyproject.toml").read_text()
    of = {
        name: text.partition(f"\n{name} = [")[2].partition("]\n")[0]
        for name in ("dev", "peers", "test", "examples")
    }
    for inner, outer in (("demo", "examples"), ("examples", "test"), ("test", "dev"), ("docs", "dev")):
        assert inner in of[outer].partition('"collage-fx[')[2].partition('"')[0], (inner, outer)
    assert '"collage-fx[compat,test]"' in of["peers"]
    assert loaded.CONTAINED_IN == {"demo": ("dev", "peers"), "docs": ("dev",), "compat": ("peers",)}


def test_two_terminals_do_not_set_up_at_once(
    loaded: Any, script: Script, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other = threading.Thread(target=set_up, args=(loaded, script, tmp_path, "demo"))
    with loaded.alone_in(tmp_path / ".venv"):
        other.start()
        other.join(1)
        assert other.is_alive()
        assert not (tmp_path / "calls").exists()
    other.join(60)
    assert len((tmp_path / "calls").read_text().splitlines()) == 2
    assert "another ./dev is setting up .venv: waiting for it" in capfd.readouterr().err
