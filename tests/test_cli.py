"""``collage-fx``, as a user calls it."""

from __future__ import annotations

import contextlib
import errno
import os
import pty
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch._inductor import config

import collage_fx
from collage_fx import choices
from collage_fx.numerics import ERROR_FORMATS, PACKED_FORMATS
from collage_fx.torch_compat import PATCHES
from collage_fx.torch_compat.patching import Patch
from collage_tools import cli, doctor
from collage_tools.cli import main
from collage_tools.gpu_code import imaginary_cuda
from tests.support.substitutes import (
    doctor_compiles,
    doctor_expects,
    doctor_finds,
    doctor_interrupted,
    without_pinning,
)

ROOT = Path(__file__).resolve().parents[1]


def test_explain_any_optimizer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    command = "explain --optimizer torch.optim.AdamW --lr 3e-4 --strategy light --kw betas=(0.9,0.95)"
    assert main([*command.split(), "--html", str(page)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("AdamW\n")
    assert "exp_avg_sq' = 0.95*exp_avg_sq + 0.05*g**2" in printed
    assert "light: every parameter" in printed
    assert "p' = -0.0003*exp_avg'*sqrt(" in printed  # in as many digits as a person reads
    assert f"Written: {page}" in printed
    assert "<math" in page.read_text()


def test_explain_prints_what_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    command = (
        "explain --optimizer SGD --dtype float16 --shape 3,4 --shape 5 --kw momentum=0.9 --full --markdown"
    )
    assert main(command.split()) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("## SGD\n")
    assert "f16[3,4]" in printed
    assert len(re.findall(r"momentum_buffer +\|", printed)) == 2


def test_kernels_are_those_of_a_compiled_step(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    command = f"explain --optimizer SGD --lr 0.1 --shape 4 --html {page} --kernels"
    assert main(command.split()) == 0
    assert "1 of 1 tensors have error terms" in capsys.readouterr().out
    assert "extern" in page.read_text()


@pytest.mark.parametrize(
    ("command", "status", "told"),
    [
        ("explan --optimizer SGD", 2, "no command 'explan'; did you mean explain or plan?"),
        ("explain --optimizer AdanW", 2, "no optimizer 'AdanW' in torch.optim; did you mean AdamW"),
        ("explain --optimizer torch.optm.AdamW", 2, "no module 'torch.optm'; did you mean optim?"),
        ("explain --optimizer tarch.optim.AdamW", 2, "no module 'tarch'; did you mean torch"),
        (
            "explain --optimizer SGD --kw momentun=0.9",
            2,
            "SGD has no argument 'momentun'; did you mean momentum?",
        ),
        ("explain --optimizer SGD --kw lrr=1", 2, "SGD has no argument 'lrr'; did you mean --lr?"),
        ("explain --optimizer SGD --kw momentum", 2, "--kw takes NAME=VALUE"),
        ("explain --optimizer SGD --strategy pluss", 2, "'pluss' is not allowed; did you mean plus?"),
        ("explain --optimizer SGD --dtype bf16", 2, "bfloat16"),
        (
            "explain --optimizer SGD --stratgy plus",
            2,
            "explain has no option '--stratgy'; did you mean --strategy or --state?",
        ),
        ("explain --optimizer SGD --shape 3x4", 2, "--shape takes positive integers"),
        ("explain --optimizer Muon", 2, "set others with --shape"),
        ("explain", 2, "--optimizer"),
        ("", 2, "give a command: explain, audit, "),
        ("explain --optimizer SGD --shape 0", 2, "--shape takes positive integers"),
        ("explain --optimizer SGD --shape=-3", 2, "--shape takes positive integers"),
        ("explain --optimizer SGD --shape 4,0", 2, "--shape takes positive integers"),
        ("explain --optimizer nopkg.Adam", 2, "no module 'nopkg'; is it installed, or its folder in"),
        ("checkup nowhere.pt", 2, "there is no file or folder 'nowhere.pt'"),
        ("convert nowhere.pt out.pt", 2, "there is no file or folder 'nowhere.pt'"),
        ("explain --optimizer SGD --html /no/such/folder/x.html", 2, "there is no folder '/no/such/folder'"),
        ("explain --optimizer SGD --html /", 2, "'/' is a folder; name a file in it"),
        ("explain --optimizer SGD --bytes-per-parameter 2", 2, "CFX001"),
        ("explain --optimizer SGD --bytes-per-parameter 8 --strategy light", 2, "CFX001"),
        ("explain --optimizer SGD --state block8 --arithmetic native", 2, "CFX001"),
        ("audit --optimizer SGD --dtype float32", 2, "it needs no compensation"),
        ("audit --optimizer SGD --steps 1", 2, "steps=1 is not allowed"),
        ("explain --optimizer LBFGS", 1, "where: LBFGS.step\n"),
        ("explain --optimizer torch.optim.adamw", 2, "did you mean AdamW?"),
        ("explain --optimiser SGD", 2, "explain has no option '--optimiser'; did you mean --optimizer?"),
        ("explain torch.optim.SGD", 2, "takes its optimizer by an option: --optimizer torch.optim.SGD"),
        ("explain --optimizer SGD adam", 2, "explain takes no argument 'adam'"),
        (
            "explain --optimizer AdamW --kw betas=(0.9,0.95",
            2,
            "--kw betas=(0.9,0.95: the value is incomplete",
        ),
        ("explain --optimizer AdamW --kw eps=small", 2, "AdamW(eps='small') is refused: "),
        ("explain --optimizer SGD --kernels", 2, "--kernels adds kernels to the HTML page: add --html FILE"),
        ("explain --optimizer SGD --arch sm_80", 2, "--arch chooses the GPU of --code: add --code triton"),
        ("audit --html x", 2, "audit has no option '--html'; explain, checkup and plan have it"),
        ("doctor extra", 2, "doctor takes no argument 'extra'"),
        ("plan --hf c.json --gpu 80", 2, "required: --seq; collage-fx plan --help lists all options"),
        ("convert pyproject.toml", 2, "required: OUT\nusage: collage-fx convert"),
    ],
)
def test_what_is_wrong_is_said_with_a_way_out(
    capsys: pytest.CaptureFixture[str], command: str, status: int, told: str
) -> None:
    assert main(command.split()) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("collage-fx: ")
    assert told in captured.err


def test_a_page_that_cannot_be_written_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert main(f"explain --optimizer SGD --shape 4 --html {tmp_path}/x.html".split()) == 2
    assert "x.html cannot be written: No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_that_is_not_utf8_gets_what_it_can_show(encoding: str) -> None:
    """A budget's table has an arrow."""
    command = ["explain", "--optimizer", "SGD", "--shape", "4", "--bytes-per-parameter", "4"]
    done = subprocess.run(
        [sys.executable, "-m", "collage_fx", *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"\n?   strategy=" in done.stdout


def test_a_pipe_that_is_closed_is_no_traceback() -> None:
    command = [sys.executable, "-m", "collage_fx", "error", "CFX001"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 1
    assert said == b""


def test_doctor_is_content_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines if line.startswith("cpu ")][1:] == [
        ["cpu", "bfloat16", "ok"],
        ["cpu", "float16", "ok"],
    ]
    assert lines[0] == "All is well."
    assert len(lines) < 20


def test_patches_are_listed_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    """Each with the reason, and with what would make it go."""
    assert main(["doctor", "--patches"]) == 0
    words = capsys.readouterr().out
    lines = words.splitlines()
    listed = [line.split()[0] for line in lines if " everybody " in line or " nobody else " in line]
    assert listed == [patch.name for patch in PATCHES if patch.is_needed]
    assert " ".join(words.split()).count("Goes with:") == len(listed)
    assert max(map(len, lines)) <= 100


def test_doctor_shows_what_no_longer_fits(capsys: pytest.CaptureFixture[str]) -> None:
    lost = Patch(name="lost", target="torch.optim:Optimizer.lost", why="a test")
    with doctor_expects(lost), doctor_finds():
        assert main(["doctor"]) == 1
        lines = capsys.readouterr().out.splitlines()
        assert main(["doctor", "--patches"]) == 1
    assert lines[0] == "Do not rely on error terms here: see the rows marked FAILED."
    (line,) = (line for line in lines if " everybody " in line or " nobody else " in line)
    assert line.split()[0] == "lost"
    assert "FAILED" in line
    assert "torch.optim:Optimizer.lost" in line


@pytest.mark.usefixtures("by_inductor")
def test_doctor_finds_a_compiler_that_drops_roundings(capsys: pytest.CaptureFixture[str]) -> None:
    """With roundings left to Inductor as ordinary casts, it computes in float32 and drops them."""
    with doctor_finds("cpu"), without_pinning():
        assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED" in printed
    assert "error term is zero" in " ".join(printed.split())


def test_doctor_asks_nothing_of_a_device_that_is_not_supported(capsys: pytest.CaptureFixture[str]) -> None:
    with doctor_finds("cpu", "mps:0"):
        assert main(["doctor"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "not supported: steps on it are refused; supported are cpu, cuda" in out
    assert "All is well." in out


def test_doctor_says_what_is_assumed_of_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(name="a card", total_memory=64 << 30, warp_size=64)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    assert doctor._description("cuda:0") == "a card, 64 GiB"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    told = doctor._description("cuda:0")
    assert told.startswith("a card, 64 GiB, ROCm 7.0, 64 threads a warp\nassumed")


def test_doctor_gives_the_reason_where_nothing_compiles(capsys: pytest.CaptureFixture[str]) -> None:
    with doctor_compiles(fails=RuntimeError("\nno working C++ compiler")):
        assert main(["doctor"]) == 1
    assert "RuntimeError: no working C++ compiler" in " ".join(capsys.readouterr().out.split())


def test_doctor_is_not_content_without_a_compiler(capsys: pytest.CaptureFixture[str]) -> None:
    no_compiler = config.patch({"cpp.cxx": (None, "no-such-compiler")})
    with doctor_finds("cpu"), no_compiler, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert len(re.findall(r"^cpu +b?float16 +SLOW +Run operation by operation", printed, re.MULTILINE)) == 2
    first = printed.splitlines()[0]
    assert first.endswith("each step is 10 to 50 times slower: install g++, or set CXX.")


def test_demo_passes_its_options_on_to_the_example(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--help"]) == 0
    told = capfd.readouterr().out
    for module in ("matplotlib", "tqdm"):
        pytest.importorskip(module)
    source = (ROOT / "examples" / "train_gpt.py").read_text()
    assert set(re.findall(r"^ *(--\w+) ", told, re.MULTILINE)) == set(
        re.findall(r'add_argument\("(--\w+)"', source)
    )
    assert main(["demo", "--steps", "many"]) == 2


def test_the_demo_says_what_it_lacks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["demo"]) == 2
    assert "pip install 'collage-fx[demo]'" in capsys.readouterr().err


#: Start of the console script, with one argument.
SCRIPT = (
    "import sys; sys.argv = ['/usr/bin/collage-fx', {!r}]; from collage_tools.cli import main; exit(main())"
)
MODULE = ("-m", "collage_fx")


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ((*MODULE, "--help"), 0),
        ((*MODULE, "--version"), 0),
        ((*MODULE, "explain", "--help"), 0),
        ((*MODULE, "audit", "--help"), 0),
        ((*MODULE, "doctor", "--help"), 0),
        ((*MODULE, "explan"), 2),
        ((*MODULE, "explain", "--optimizer", "SGD", "--strategy", "pluss"), 2),
        ((*MODULE, "explain", "--optimizer", "SGD", "--error-format", "exakt"), 2),
        ((*MODULE, "explain", "--optimizer", "SGD", "--stratgy", "plus"), 2),
        ((*MODULE, "explain", "--optimizer", "SGD", "--shape", "3x4"), 2),
        ((*MODULE, "explain", "--optimizer", "SGD", "--kernels"), 2),
        ((*MODULE, "error", "CFX001"), 0),
        ((*MODULE, "demo", "--help"), 0),
        (("-c", SCRIPT.format("--help")), 0),
        (("-c", SCRIPT.format("explan")), 2),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else " ".join(value)[-40:],
)
def test_help_and_mistakes_need_no_torch(arguments: tuple[str, ...], status: int) -> None:
    command = [sys.executable, "-X", "importtime", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    imported = re.findall(r"^import time: .* (\S+)$", done.stderr, re.MULTILINE)
    assert "collage_fx.choices" in imported
    assert {"torch", "sympy", "tabulate"}.isdisjoint(imported)


def test_versions(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert not ended.value.code
    told = capsys.readouterr().out
    assert told.startswith(f"collage-fx {collage_fx.__version__} (torch {torch.__version__}, Python 3.")


def test_help_says_what_exit_statuses_mean(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    for status in (0, cli.FAILED, cli.MISUSED, cli.INTERRUPTED):
        assert f"{status} = " in told


def test_the_package_is_whole_when_a_command_runs() -> None:
    """Its help needs no torch; then torch is changed as in any other program."""
    program = """
import sys
sys.argv = ["/usr/bin/collage-fx"]
import collage_fx
print("torch" in sys.modules)
collage_fx._complete()
print(set(collage_fx.__all__) <= set(dir(collage_fx)), callable(collage_fx.install))
from collage_fx.torch_compat import PATCHES
print(sorted(each.name for each in PATCHES if each.is_needed and each.is_in_place))
"""
    lazy, eager = (
        subprocess.run(
            [sys.executable, "-c", each], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.splitlines()
        for each in (program, program.replace("/usr/bin/collage-fx", "train.py"))
    )
    assert lazy[0] == "False"
    assert eager[0] == "True"
    assert lazy[1:] == eager[1:]
    assert lazy[1] == "True True"
    assert "flat-states" in lazy[2]


def _written_to(terminal: int) -> Iterator[str]:
    """Text written to a terminal, until the process at its other end has closed it."""
    with contextlib.suppress(OSError):  # EIO, by which Linux says that it is closed
        while text := os.read(terminal, 4096):
            yield text.decode()


def test_a_terminal_shows_what_takes_long() -> None:
    program = """
import sys
sys.argv = ["/usr/bin/collage-fx", "explain", "--optimizer", "SGD", "--shape", "4"]
import collage_fx.clock as clock
from collage_tools import cli
clock.PATIENCE = clock.PERIOD = 0.01
sys.exit(cli.main())
"""
    master, slave = pty.openpty()
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=slave) as process:
        os.close(slave)
        written = "".join(_written_to(master))
        assert process.stdout is not None
        shown = process.stdout.read()
    assert "\rcollage-fx: importing torch, 0 s" in written
    assert "\rcollage-fx: compiling the step of SGD, 0 s" in written
    assert written.endswith(" \r"), "it is erased"
    piped = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    assert (piped.stdout, piped.stderr) == (shown, b"")


def test_an_interrupted_command_is_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with doctor_interrupted():
        assert main(["doctor"]) == cli.INTERRUPTED
    assert capsys.readouterr().err == ""


def test_names_in_types_are_those_that_are_registered() -> None:
    """Types cannot be made of what is registered when a program runs."""
    for names, known in (
        (choices.ErrorFormatName, ERROR_FORMATS),
        (choices.PackedFormatName, PACKED_FORMATS),
        (choices.Architecture, imaginary_cuda.ARCHITECTURES),
    ):
        assert list(get_args(names)) == list(known)[: len(get_args(names))]  # then those of plug-ins
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in get_args(choices.Dtype))


def test_it_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "collage_fx", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in ("explain", "doctor", "demo"):
        assert name in done.stdout
