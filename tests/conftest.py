from __future__ import annotations

import faulthandler
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from tests.support import substitutes
from tests.support.processes import Processes
from tests.support.slow import IN_TURN, TODAYS_THIRD, Clock, Times, left_out


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all", action="store_true", help="tests that are slow or of prose, too: see tests/support/slow.py"
    )
    parser.addoption("--third", default=str(TODAYS_THIRD), help="of the rotating tests: 0, 1, 2 or all")
    parser.addoption("--first-seed", type=int, default=0, help="run the drawn tests alone, from this seed on")
    parser.addoption("--write-slow", action="store_true", help="write slow.txt from the times measured")


def pytest_report_header(config: pytest.Config) -> str:
    return f"rotating tests: --third {config.getoption('third')}"


def pytest_configure(config: pytest.Config) -> None:
    too_slow = hypothesis.HealthCheck.too_slow  # so is any strategy on a machine that others use, too
    hypothesis.settings.register_profile("any machine", suppress_health_check=[too_slow])
    hypothesis.settings.load_profile("any machine")
    config.pluginmanager.register(Clock())
    if not hasattr(config, "workerinput"):  # workers of pytest-xdist send their reports to this process
        is_all = config.getoption("all") and not _is_chosen(config) and not config.getoption("keyword")
        config.pluginmanager.register(Times(write=config.getoption("write_slow"), is_all=is_all))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Write the tracebacks of a worker that crashes to a file, for the report of the test."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker and _has_cache(session.config):
        crash = _crash_file(session.config, worker).open("w", encoding="utf-8")
        faulthandler.enable(crash)
        session.config.add_cleanup(faulthandler.disable)
        session.config.add_cleanup(crash.close)


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: Any, sched: Any) -> None:
    """Say how the worker of pytest-xdist ended that crashed in a test, and what it did then."""
    worker = report.node
    report.longrepr += f"\nits exit status: {worker.gateway._io.wait()}"
    if _has_cache(worker.config):
        report.longrepr += "\n" + _crash_file(worker.config, worker.gateway.id).read_text(encoding="utf-8")


def _has_cache(config: pytest.Config) -> bool:
    """Return whether pytest has a folder for files; with ``-p no:cacheprovider`` it has none."""
    return getattr(config, "cache", None) is not None


def _crash_file(config: pytest.Config, worker: str) -> Path:
    assert config.cache is not None
    return config.cache.mkdir("crashes") / f"{worker}.txt"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m gpu`` only files with such tests are imported: a lent machine may lack what others need."""
    if config.getoption("markexpr") != "gpu" or collection_path.suffix != ".py":
        return None
    return "mark.gpu" not in collection_path.read_text(encoding="utf-8") or None


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Draw other members with ``--first-seed``, as many as there are."""
    if first := metafunc.config.getoption("first_seed"):
        marks = metafunc.definition.own_markers
        for i, mark in enumerate(marks):
            if mark.name == "parametrize" and mark.args[0] == "seed":
                marks[i] = pytest.mark.parametrize("seed", [first + seed for seed in mark.args[1]]).mark


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("first_seed"):
        items[:] = [item for item in items if "seed" in getattr(item, "fixturenames", ())]
    elif not config.getoption("markexpr") and not config.getoption("all"):
        named = tuple(each for each in config.args if "::" in each)
        is_everything = {Path(each).resolve() for each in config.args} == {Path(__file__).parent}
        in_turn = IN_TURN if is_everything else ()  # so in workers of pytest-xdist, too
        third = config.getoption("third")
        out = left_out(items, None if third == "all" else int(third), in_turn=in_turn)
        slow = [item for item in out if not _is_named(item, named)]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in set(slow)]


def _is_named(item: pytest.Item, names: tuple[str, ...]) -> bool:
    """Return whether a test is one that ``FILE::NAME`` on the command line names, or a case of it."""
    name = item.nodeid.partition("::")[2]
    return any(
        Path(file).resolve() == item.path and f"{name}[".startswith((f"{chosen}[", f"{chosen}::"))
        for file, _, chosen in (each.partition("::") for each in names)
    )


def _is_chosen(config: pytest.Config) -> bool:
    """Return whether tests have been chosen by a mark or by name, so that none of them is left out."""
    return bool(config.getoption("markexpr")) or any("::" in each for each in config.args)


@pytest.fixture(autouse=True)
def _fresh_start() -> Iterator[None]:
    """No test meets code or recompilation limits that another has left in Dynamo's caches, or its optimizers.

    Recorded functions look at all optimizers of the process, and tell of what was written to their tensors.
    """
    substitutes.forget_steps()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True, scope="module")
def _short_collections() -> None:
    """Exempt what torch and earlier files keep from garbage collection, which took a fifth of all time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    processes = Processes(2, tmp_path_factory.mktemp("store"))
    yield processes
    processes.stop()


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def by_inductor() -> Iterator[None]:
    """Let Inductor write all kernels."""
    with substitutes.by_inductor():
        yield
