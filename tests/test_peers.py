"""``./dev peers`` on a suite of a few tests: what it reports of each, and a run that goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peers.__main__ import main, row
from tests.peers.listed import LISTED, Listed
from tests.peers.recording import Result
from tests.peers.runs import Options, run
from tests.peers.suites import SUITES, Suite
from tests.peers.verdicts import apart, verdict

#: A suite whose tests know whether their optimizer is installed.
TESTS = """
import os, sys, time
import pytest, torch

def make():
    p = torch.nn.Parameter(torch.ones(4, 8))
    optimizer = torch.optim.SGD([p], lr=0.1)
    return p, "step" in vars(optimizer)

def test_passes():
    p, _ = make()
    assert p.dtype == torch.bfloat16
    p.data += 1

def test_fails_plainly():
    assert not make()

def test_is_skipped():
    pytest.skip("there is nothing to see")

def test_looks_at_the_step():
    assert not make()[1], "an own step"

def test_is_listed():
    assert not make()[1], "an own step"

def test_ends_the_process():
    if make()[1]:
        os._exit(3)

def test_hangs():
    if make()[1]:
        time.sleep(1000)

def test_runs_after_the_others():
    make()
"""


def suite(folder: Path, text: str = TESTS) -> Suite:
    path = folder / "tests"  # as our own folder is called
    path.mkdir(parents=True)
    (path / "__init__.py").touch()
    (path / "test_steps.py").write_text(text)
    return Suite("small", "torch", ("tests",), release="1", shipped=folder)


@pytest.mark.slow
def test_each_test_gets_its_verdict(tmp_path: Path) -> None:
    small = suite(tmp_path / "suite")
    options = Options(folder=tmp_path, time_limit=5)
    results = run(small, "bf16", options)
    listed = (Listed("small", "*::test_is_listed", "an own step", "for this test"),)
    found = verdict("small", "bf16", *results, listed)
    assert row(found) == ("small", "bf16", 7, 6, 2, 0, 1, 3)
    assert found.needed == set(listed)
    errors = {result.test.rpartition("::")[2]: result.error for result in found.failed}
    assert errors["test_hangs"] == "took more than 5 s"
    assert errors["test_ends_the_process"] == "ended with exit status 3"
    assert "an own step" in errors["test_looks_at_the_step"]
    assert not verdict("small", "float32", *results, listed[:0]).listed

    (tmp_path / "suite" / "tests" / "test_steps.py").unlink()
    assert run(small, "bf16", options) == results  # results are kept, nothing is run


#: A suite of two tests that end elsewhere when their optimizer is installed.
UNSTABLE = """
import torch

def end_elsewhere(update):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.rand(4, 8))
    optimizer = torch.optim.SGD([p], lr=0.1)
    if "step" in vars(optimizer):
        p.data *= 1 + 1e-6
    p.grad = update(p.detach())
    optimizer.step()

def test_hangs_on_the_last_bits():
    end_elsewhere(lambda p: torch.sin(1e8 * p))

def test_ends_elsewhere():
    end_elsewhere(lambda p: 1e-5 * p)
"""


@pytest.mark.slow
def test_parameters_may_end_as_far_off_as_they_do_plainly_if_they_begin_an_ulp_apart(tmp_path: Path) -> None:
    results = run(suite(tmp_path / "suite", UNSTABLE), "float32", Options(folder=tmp_path, time_limit=60))
    found = verdict("small", "float32", *results)
    assert row(found) == ("small", "float32", 2, 2, 1, 1, 0, 1)
    assert [each.test.rpartition("::")[2] for each in found.failed] == ["test_ends_elsewhere"]


def test_a_suite_that_cannot_be_collected_is_an_error(tmp_path: Path) -> None:
    small = suite(tmp_path / "suite", "import a_package_that_is_not_there")
    with pytest.raises(RuntimeError, match="a_package_that_is_not_there"):
        run(small, "float32", Options(folder=tmp_path))


def test_float32_that_ends_elsewhere_has_failed() -> None:
    plain = Result("test", "passed", moved=[[3.0, 4.0]])
    other = Result("test", "passed", moved=[[3.0, 4.5]])
    assert apart(plain.moved, other.moved) == 0.1
    assert verdict("small", "float32", {"test": plain}, {"test": other}).failed[0].error.startswith("Apart")
    assert verdict("small", "bf16", {"test": plain}, {"test": other}).passed == 1
    assert verdict("small", "float32", {"test": plain}, {}).failed[0].error == "has no result"


def test_every_entry_of_the_list_has_a_suite_and_a_reason() -> None:
    names = {each.name for each in SUITES}
    assert all(entry.suite in names and entry.error and len(entry.reason) > 20 for entry in LISTED)


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Suite("absent", "a-package-that-is-not-there", ("tests",))
    monkeypatch.setattr("tests.peers.__main__.SUITES", (absent,))
    with pytest.raises(SystemExit, match="not installed: a-package-that-is-not-there"):
        main([])
