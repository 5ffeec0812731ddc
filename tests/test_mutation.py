"""``./dev mutants``: which faults it puts into which lines, and what it says of those that tests miss."""

from __future__ import annotations

import subprocess
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray", reason="pip install cosmic-ray, for ./dev mutants")
pytest.importorskip("pytest_cov", reason="pip install pytest-cov, for ./dev mutants")

from tests.mutation.__main__ import main
from tests.mutation.mutants import drawn, lines_beside, mutants_of

PATH = Path("collage_fx/clipped.py")

SOURCE = '''\
"""Module of a test."""

from __future__ import annotations


@staticmethod
def clipped(value: int | None, seen: list[int]) -> int | None:
    """Return a value between 0 and 7, noted."""
    assert value is not None
    seen.append(value)
    if value > 7 and seen:
        raise ValueError(7 + value)
    return value + 1


def never_called(value: int) -> int:
    return value - 1
'''


def test_faults_are_in_code_that_runs_alone() -> None:
    found = mutants_of(PATH, SOURCE, range(1, 100))
    assert {(each.line, each.operator) for each in found} == {
        (10, "delete"),
        (11, "AddNot"),
        (11, "NumberReplacer"),
        (11, "ReplaceAndWithOr"),
        (11, "ReplaceComparisonOperator_Gt_GtE"),
        (13, "NumberReplacer"),
        (13, "ReplaceBinaryOperator_Add_Sub"),
        (17, "NumberReplacer"),
        (17, "ReplaceBinaryOperator_Sub_Add"),
    }
    (deleted,) = (each for each in found if each.operator == "delete")
    assert "\n    pass\n    if value > 7" in deleted.text(SOURCE)


def test_what_zip_asserts_is_no_fault_and_an_option_of_the_same_name_is() -> None:
    source = (
        "def f(a: object) -> object:\n    zip(a, strict=True)\n    report(a, strict=True)\n    return a\n"
    )
    found = {(each.line, each.operator) for each in mutants_of(PATH, source, range(1, 5))}
    assert (3, "ReplaceTrueWithFalse") in found
    assert (2, "ReplaceTrueWithFalse") not in found


def test_the_star_in_front_of_keywords_is_no_fault() -> None:
    source = "def f(a, b=1, *, c=2):\n    return a\n"
    texts = {each.text(source) for each in mutants_of(PATH, source, {1, 2})}
    assert not any("/" in text for text in texts)
    assert any("b=1" not in text for text in texts)


def test_faults_are_in_changed_lines_alone() -> None:
    assert {each.line for each in mutants_of(PATH, SOURCE, {6, 7, 8, 13})} == {13}


def test_each_function_has_a_fault_before_any_has_two() -> None:
    found = mutants_of(PATH, SOURCE, range(1, 100))
    for seed in range(20):
        chosen = drawn(found, 4, seed, {PATH: SOURCE})
        assert len({*chosen}) == 4
        assert len({each.function for each in chosen[:2]}) == 2
        assert chosen == drawn(found, 4, seed, {PATH: SOURCE})
    assert len(drawn(found, 100, 0, {PATH: SOURCE})) == len(found)


def test_a_line_belongs_to_the_statement_around_it() -> None:
    source = (
        "def f(a):\n    if (a\n            and a > 1):\n        g(\n            a,\n        )\n    return a\n"
    )
    assert [lines_beside(line, source) for line in range(1, 8)] == [
        [1],
        [2, 3],
        [2, 3],
        [4, 5, 6],
        [4, 5, 6],
        [4, 5, 6],
        [7],
    ]


#: Options of this repository's tests that are given to those of a repository.
OPTIONS = """\
def pytest_addoption(parser):
    parser.addoption("--all", action="store_true")
    parser.addoption("--third")

"""


def repository(root: Path, source: tuple[str, str], tests: dict[str, str], conftest: str = "") -> None:
    """Write a repository of one file, given by its path and text, and its tests, the first in its row."""
    name, text = source
    row = f"| `{name.partition('/')[0]}/` | `tests/{next(iter(tests))}` | 1 |"
    files = {
        name: text,
        "tests/README.md": f"## You touched …\n\n{row}\n",
        "tests/conftest.py": OPTIONS + textwrap.dedent(conftest),
        **{f"tests/{each}": textwrap.dedent(test) for each, test in tests.items()},
    }
    for each, written in files.items():
        (root / each).parent.mkdir(exist_ok=True)
        (root / each).write_text(written, encoding="utf-8")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    subprocess.run(["git", "add", "."], cwd=root, check=True)


@pytest.mark.parametrize("found_by", ["test_doubled", "test_of_another_file", ""])
def test_what_no_test_finds_is_shown_and_is_a_failure(
    found_by: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A test of another file may find it, if it runs the line."""
    source = "def doubled(value: int) -> int:\n    return value + value\n"
    tests = {
        f"{name}.py": f"""\
            from collage_fx.doubled import doubled

            def {name}() -> None:
                assert doubled({3 * (found_by == name)}) == {6 * (found_by == name)}

            def test_of_something_else() -> None:
                pass
            """
        for name in ("test_doubled", "test_of_another_file")
    }
    repository(tmp_path, ("collage_fx/doubled.py", source), tests)
    status = main(["--since", "ever", "--seed", "0"], tmp_path)
    said = capsys.readouterr().out
    assert status == (not found_by)
    assert ("1 of 1 killed" if found_by else "0 of 1 killed") in said
    assert (f"tests/{found_by}.py::{found_by} (" in said) == bool(found_by)
    assert ("+    return value - value" in said) == (not found_by)
    assert (tmp_path / "collage_fx" / "doubled.py").read_text(encoding="utf-8") == source


def test_a_line_that_no_usual_test_runs_is_left_to_all_tests_of_its_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines that importing executes are left to the usual tests of the row."""
    source = "LIMIT = 7\n\n\ndef seldom_called(value: int) -> int:\n    return value + 1\n"
    conftest = """\
        def pytest_collection_modifyitems(config, items):
            items[:] = [each for each in items if config.option.all or "slow" not in each.name]
        """
    test = """\
        from passes.limits import LIMIT, seldom_called

        def test_limit() -> None:
            assert LIMIT == 7

        def test_slow() -> None:
            assert seldom_called(1) == 2
        """
    repository(tmp_path, ("passes/limits.py", source), {"test_limits.py": test}, conftest)
    file = tmp_path.parent / f"{tmp_path.name}.coverage"
    for _ in range(2):  # the second reads what the first has measured
        assert main(["--since", "ever", "--count", "2", "--coverage", str(file)], tmp_path) == 0
        said = capsys.readouterr().out
        assert "passes/limits.py:1: tests/test_limits.py::test_limit (" in said
        assert "passes/limits.py:5: tests/test_limits.py::test_slow (" in said
    assert file.is_file()


def test_a_coverage_file_of_other_tests_is_refused(tmp_path: Path) -> None:
    """Pytest would fail for each fault, as if a test had found it."""
    source = "def doubled(value: int) -> int:\n    return value + value\n"
    test = """\
        from collage_fx.doubled import doubled

        def test_doubled() -> None:
            assert doubled(3) == 6
        """
    repository(tmp_path, ("collage_fx/doubled.py", source), {"test_doubled.py": test})
    given = ["--since", "ever", "--coverage", str(tmp_path.parent / f"{tmp_path.name}.coverage")]
    assert main(given, tmp_path) == 0
    renamed = tmp_path / "tests" / "test_doubled.py"
    renamed.write_text(renamed.read_text().replace("test_doubled()", "test_twice()"))
    with pytest.raises(SystemExit, match=r"no test .*::test_doubled: the coverage file is of other tests"):
        main(given, tmp_path)
