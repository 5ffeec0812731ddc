"""What a usual run of the tests leaves out."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.slow import FILE, IN_TURN, LAWS, MOST_SECONDS, SECONDS, Times, left_out, slow_ones


def test_each_function_keeps_a_case_and_what_fits() -> None:
    cases = {f"tests/a.py::one[{case}]": 0.4 * SECONDS for case in range(5)}
    alone = {"tests/a.py::two": MOST_SECONDS - 1, "tests/a.py::three": MOST_SECONDS + 1}
    slow = slow_ones(cases | alone)
    assert "tests/a.py::three" in slow
    assert len(slow) == 4
    assert sum(name in cases for name in slow) == 3


def test_laws_hold_for_every_file() -> None:
    assert LAWS
    assert slow_ones({f"{file}::one[{case}]": 2 * SECONDS for file in LAWS for case in range(3)}) == []


def test_cases_that_are_not_measured_stay_left_out() -> None:
    known = ["tests/a.py::one[0]", "tests/a.py::one[1]"]
    assert slow_ones({known[0]: 0.1}, known) == [known[1]]


def test_names_that_are_gone_are_dropped_where_all_is_measured() -> None:
    known = ["tests/a.py::one[old]", "tests/b.py::two[0]"]
    assert slow_ones({"tests/a.py::one[new]": 0.1}, known, is_all=True) == [known[1]]


def test_a_run_says_how_long_cases_take_that_are_not_yet_in_the_file() -> None:
    times = Times(write=False, is_all=False)
    for case in range(3):
        properties = [("processor seconds", 0.75 * SECONDS)]
        report = SimpleNamespace(nodeid=f"tests/a.py::one[{case}]", user_properties=properties, keywords=())
        times.pytest_runtest_logreport(report)  # type: ignore[arg-type]
    assert times.late() == 2 * 0.75 * SECONDS


def test_each_rotating_test_has_its_day() -> None:
    items = [
        SimpleNamespace(nodeid=str(i), get_closest_marker=lambda name: name if name == "rotating" else None)
        for i in range(300)
    ]
    run = [[item for item in items if item not in left_out(items, third)] for third in range(3)]
    assert sorted(int(item.nodeid) for third in run for item in third) == list(range(300))
    assert min(map(len, run)) > 70


def test_a_run_of_everything_has_a_third_of_the_files_in_turn() -> None:
    items = [
        SimpleNamespace(nodeid=f"{IN_TURN[0]}::{i}", get_closest_marker=lambda name: None) for i in range(60)
    ]
    run = [[item for item in items if item not in left_out(items, third, (), IN_TURN)] for third in range(3)]
    assert sorted(int(item.nodeid.partition("::")[2]) for third in run for item in third) == list(range(60))
    assert min(map(len, run)) > 10
    assert left_out(items, 0, ()) == []
    assert all(Path(file).is_file() for file in IN_TURN)


TOLD = ("mul_", "copy_")


def expects_by_condition(write: str, seed: int, is_long: bool = False) -> None:
    told = seed
    if write in TOLD and seed:
        assert told == 1


def expects_by_assertion(write: str, seed: int, is_long: bool = False) -> None:
    told = seed
    assert told == (write in TOLD), write


def expects_the_same(write: str, seed: int, is_long: bool = False) -> None:
    write = f"{write}."
    told = [write for write in TOLD if write]
    if write in TOLD or told:
        assert told == [write, seed]


def cases_of(function: Callable[..., None], kept: str, *, is_long: bool = False) -> list[str]:
    """Names of the cases that run where slow.txt has all but one."""
    items = [
        SimpleNamespace(
            nodeid=f"tests/a.py::one[{write}]",
            function=function,
            callspec=SimpleNamespace(params={"write": write, "seed": 1, "is_long": is_long}),
            get_closest_marker=lambda _: None,
        )
        for write in ("zero_", "data.zero_", "mul_", "copy_")
    ]
    names = {item.nodeid for item in items if item.nodeid != f"tests/a.py::one[{kept}]"}
    return [item.nodeid for item in items if item not in left_out(items, 0, names)]


@pytest.mark.parametrize("kept", ["data.zero_", "copy_"])
@pytest.mark.parametrize("function", [expects_by_condition, expects_by_assertion])
def test_a_case_that_expects_something_else_is_put_back(function: Callable[..., None], kept: str) -> None:
    run = cases_of(function, kept)
    assert len(run) == 2
    assert f"tests/a.py::one[{kept}]" in run
    assert len({name.endswith(("[mul_]", "[copy_]")) for name in run}) == 2


def test_cases_that_expect_the_same_are_left_out() -> None:
    assert cases_of(expects_the_same, "mul_") == ["tests/a.py::one[mul_]"]


def test_a_function_that_is_left_out_as_a_whole_stays_so() -> None:
    assert cases_of(expects_by_assertion, "none of them") == []


def test_a_case_of_each_value_that_is_true_or_false_runs() -> None:
    items = [
        SimpleNamespace(
            nodeid=f"tests/a.py::one[{i}]",
            function=expects_the_same,
            callspec=SimpleNamespace(params={"write": "mul_", "is_long": i == 2}),
            get_closest_marker=lambda _: None,
        )
        for i in range(4)
    ]
    left = left_out(items, 0, {item.nodeid for item in items[1:]})
    assert [item.nodeid for item in items if item not in left] == ["tests/a.py::one[0]", "tests/a.py::one[2]"]


def test_documents_are_compiled_with_all_alone(pytestconfig: pytest.Config) -> None:
    item = SimpleNamespace(nodeid="a", get_closest_marker=lambda name: name if name == "prose" else None)
    assert left_out([item], third=0) == [item]
    assert any(mark.startswith("prose:") for mark in pytestconfig.getini("markers"))


def test_what_is_left_out_exists() -> None:
    tests = FILE.parent
    for name in FILE.read_text().splitlines():
        file, _, function = name.partition("[")[0].rpartition("::")
        file, _, _ = file.partition("::")
        assert f"def {function}(" in (tests.parent / file).read_text(), name
