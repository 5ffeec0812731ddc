"""What a usual run of the tests leaves out."""

from tests.support.slow import FILE, MOST_SECONDS, SECONDS, slow_ones


def test_each_function_keeps_a_case_and_what_fits() -> None:
    cases = {f"tests/a.py::one[{case}]": 0.4 * SECONDS for case in range(5)}
    alone = {"tests/a.py::two": MOST_SECONDS - 1, "tests/a.py::three": MOST_SECONDS + 1}
    slow = slow_ones(cases | alone)
    assert "tests/a.py::three" in slow
    assert len(slow) == 4
    assert sum(name in cases for name in slow) == 3


def test_what_is_left_out_exists() -> None:
    tests = FILE.parent
    for name in FILE.read_text().splitlines():
        file, _, function = name.partition("[")[0].rpartition("::")
        file, _, _ = file.partition("::")
        assert f"def {function}(" in (tests.parent / file).read_text(), name
