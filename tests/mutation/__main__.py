"""``./dev mutants``: put small faults into changed lines of the library, and see that tests find them.

A usual run, with the rotating tests of all days, measures which tests execute which lines. Each fault is
then put into a copy of the repository, and the tests run that execute its line; for a line that importing
executes, those that ``tests/README.md`` names for the file; for one that a usual run does not execute, all
of those, with ``--all``. A fault that no test finds survives, and is printed as a diff: write the test that
finds it, or delete the line.
"""

from __future__ import annotations

import argparse
import datetime
import difflib
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from coverage import CoverageData

from tests.mutation.mutants import Mutant, drawn, lines_beside, mutants_of
from tests.support.rows import row_of, rows

#: Folders whose files are mutated.
SOURCES = ("collage_fx", "collage_tools", "passes")

#: Part of the mutants that tests have to find.
KILLED = 0.95

#: Seconds for a mutant, and for each of its tests, some ten times the mean: a loop may never end.
PATIENCE = 3600.0
PATIENCE_OF_TEST = 3.0


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./dev mutants", description=__doc__)
    parser.add_argument(
        "--since", default="2 weeks ago", help="commit, or date, after which lines have changed; 'ever': all"
    )
    parser.add_argument("--count", type=int, default=40, help="number of mutants")
    parser.add_argument("--seed", type=int, help="of the draw; by default that of the day")
    parser.add_argument("--list", action="store_true", help="print the mutants, and run nothing")
    parser.add_argument(
        "--coverage",
        type=Path,
        metavar="FILE",
        help="which tests execute which lines: measured by a usual run and kept there, if there is none yet",
    )
    parser.add_argument("--jobs", type=int, default=2, help="number of mutants that are tested at a time")
    parser.add_argument("--tests", nargs="+", help="tests to run; by default those that execute the line")
    parser.add_argument("files", nargs="*", type=Path, help="files to mutate; by default all of the library")
    return parser.parse_args(argv)


class Outcome(NamedTuple):
    """Result of the tests of one mutant.

    Attributes:
        mutant: the mutant.
        killer: the test that failed, or what else ended the tests; empty if all passed.
        seconds: time that the tests took.
    """

    mutant: Mutant
    killer: str
    seconds: float


class Repository:
    """Working tree whose files are mutated, in a copy."""

    def __init__(self, root: Path, tests: Sequence[str] | None) -> None:
        self.root = root
        self.tests = tests
        self.rows = rows((root / "tests" / "README.md").read_text(encoding="utf-8"))

    def source(self, path: Path) -> str:
        return (self.root / path).read_text(encoding="utf-8")

    def git(self, *args: str) -> str:
        ran = subprocess.run(["git", *args], cwd=self.root, capture_output=True, text=True, check=True)
        return ran.stdout

    def base_of(self, since: str) -> str:
        """Return the commit that a name or a date means; the empty tree if all commits are younger."""
        found = subprocess.run(
            ["git", "rev-parse", "--verify", "--quiet", f"{since}^{{commit}}"],
            cwd=self.root,
            capture_output=True,
            text=True,
            check=False,
        )
        if since == "ever":
            return self.git("hash-object", "-t", "tree", "/dev/null").strip()
        named = found.stdout.strip()
        before = named or self.git("rev-list", "-1", f"--before={since}", "HEAD").strip()
        return before or self.base_of("ever")

    def changed_lines(self, since: str) -> dict[Path, set[int]]:
        """Return the lines of source files that differ from those of a commit or date."""
        found: defaultdict[Path, set[int]] = defaultdict(set)
        path = Path()
        diff = self.git("diff", "--unified=0", "--no-ext-diff", self.base_of(since), "--", *SOURCES)
        for line in diff.splitlines():
            if line.startswith("+++ "):
                path = Path(line.removeprefix("+++ ").removeprefix("b/"))
            elif path.suffix == ".py" and (hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line)):
                first, count = int(hunk[1]), int(hunk[2] or 1)
                found[path] |= {*range(first, first + count)}
        return found

    def copy_to(self, folder: Path) -> None:
        """Copy the files that git does not ignore."""
        for name in self.git("ls-files", "--cached", "--others", "--exclude-standard", "-z").split("\0"):
            if name and os.path.lexists(self.root / name):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(self.root / name, folder / name, follow_symlinks=False)

    def tests_of(self, mutant: Mutant, file: Path) -> list[str]:
        """Return the tests that execute the line of a mutant, those of the file's row first."""
        if self.tests:
            return [*self.tests]
        row = row_of(mutant.path, self.rows)
        (coverage := CoverageData(str(file))).read()
        measured = [each for each in coverage.measured_files() if each.endswith(f"/{mutant.path.as_posix()}")]
        of_lines = coverage.contexts_by_lineno(measured[0]) if measured else {}
        lines = [mutant.line, *lines_beside(mutant.line, self.source(mutant.path))]
        contexts = next(({*of_lines[each]} for each in lines if any(of_lines.get(each, ()))), {*()})
        if not contexts - {""}:
            return row if any(each in of_lines for each in lines) else [*row, "--all"]
        found = {each.partition("|")[0] for each in contexts if each}
        own = f"/test_{mutant.path.stem}.py::"
        return sorted(found, key=lambda test: (own not in test, not test.startswith((*row,)), test))

    def outcomes(
        self, mutants: Sequence[Mutant], folders: Sequence[Path], coverage: Path
    ) -> Iterator[Outcome]:
        """Run the tests of each mutant in a copy; several copies at a time."""
        free = queue.SimpleQueue[Path]()
        for folder in folders:
            free.put(folder)

        def judged(mutant: Mutant) -> Outcome:
            tests = self.tests_of(mutant, coverage)
            target = (folder := free.get()) / mutant.path
            target.write_text(mutant.text(source := self.source(mutant.path)), encoding="utf-8")
            try:
                return Outcome(mutant, *run_tests(folder, tests))
            finally:
                target.write_text(source, encoding="utf-8")
                free.put(folder)

        with ThreadPoolExecutor(len(folders)) as pool:
            for each in as_completed([pool.submit(judged, mutant) for mutant in mutants]):
                yield each.result()

    def difference(self, mutant: Mutant) -> str:
        """Return what a mutant changes, as a diff."""
        source, name = self.source(mutant.path), mutant.path.as_posix()
        before, after = source.splitlines(), mutant.text(source).splitlines()
        return "\n".join(difflib.unified_diff(before, after, name, name, lineterm="", n=1))


def measure(folder: Path, file: Path) -> None:
    """Run the tests in a copy and write which of them execute which lines of the library."""
    sources = [f"--cov={each}" for each in SOURCES if (folder / each).is_dir()]
    pytest = sys.executable, "-m", "pytest", "-q"
    ran = subprocess.run(
        [*pytest, "--third", "all", "-n2", *sources, "--cov-context=test", "--cov-report="],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "COVERAGE_FILE": str(file.resolve())},
        check=False,
    )
    if ran.returncode:
        raise SystemExit("tests fail without any mutant")


def refuse_unknown(folder: Path, tests: Sequence[str]) -> None:
    """Raise if tests of a coverage file are not in the repository: pytest would fail, whatever the mutant."""
    ran = pytest_of(folder, tests, "--collect-only")
    if unknown := re.search(r"^ERROR: not found: (.+)", ran.stdout + ran.stderr, re.MULTILINE):
        raise SystemExit(f"no test {unknown[1]}: the coverage file is of other tests; measure it again")


def pytest_of(folder: Path, tests: Sequence[str], *options: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on tests of a copy."""
    (folder / "build").mkdir(exist_ok=True)
    (listed := folder / "build" / "mutated.txt").write_text("\n".join(tests), encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, f"@{listed}"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=PATIENCE + PATIENCE_OF_TEST * len(tests),
        check=False,
    )


def run_tests(folder: Path, tests: Sequence[str]) -> tuple[str, float]:
    """Run tests in a copy; return the first that fails, or what else ended the run, and the seconds."""
    begun = time.monotonic()
    try:
        ran = pytest_of(folder, tests, "-x", "--show-capture=no", "--tb=no", "-rfE")
    except subprocess.TimeoutExpired:
        return "no end", time.monotonic() - begun
    seconds = time.monotonic() - begun
    if ran.returncode == 0:
        return "", seconds
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", ran.stdout, re.MULTILINE)
    if failed is None and "no tests ran" in ran.stdout:
        raise SystemExit(f"no tests in {' '.join(tests)}:\n{ran.stdout[-2000:]}\n{ran.stderr[-2000:]}")
    return failed[1] if failed else f"exit status {ran.returncode}", seconds


def main(argv: Sequence[str], root: Path) -> int:
    given = parse_arguments(argv)
    repository = Repository(root, given.tests)
    seed = datetime.date.today().toordinal() if given.seed is None else given.seed
    only = {each.resolve().relative_to(root) for each in given.files}
    changed = {
        path: lines
        for path, lines in repository.changed_lines(given.since).items()
        if (path in only or not only) and row_of(path, repository.rows)
    }
    sources = {path: repository.source(path) for path in changed}
    found = [each for path in sources for each in mutants_of(path, sources[path], changed[path])]
    mutants = drawn(found, given.count, seed, sources)
    print(f"{len(found)} mutants in {sum(map(len, changed.values()))} lines of {len(changed)} files changed")
    print(f"since {given.since}; {len(mutants)} of them drawn: --seed {seed}", flush=True)
    if given.list:
        print("\n".join(map(repository.difference, mutants)))
        return 0
    survivors = []
    with tempfile.TemporaryDirectory(prefix="mutants") as temporary:
        folders = [Path(temporary) / f"copy{each}" for each in range(given.jobs)]
        for folder in folders:
            repository.copy_to(folder)
        file = given.coverage or Path(temporary) / "coverage"
        if not (file.is_file() or given.tests):
            measure(folders[0], file)
        if not given.tests:
            named = {test for each in mutants for test in repository.tests_of(each, file) if "::" in test}
            refuse_unknown(folders[0], sorted(named))
        for mutant, killer, seconds in repository.outcomes(mutants, folders, file):
            print(f"{mutant.path}:{mutant.line}: {killer or 'SURVIVES'} ({seconds:.0f} s)", flush=True)
            if not killer:
                survivors.append(mutant)
    for mutant in survivors:
        print(f"\n{repository.difference(mutant)}")
    killed = len(mutants) - len(survivors)
    print(f"\n{killed} of {len(mutants)} killed; {KILLED:.0%} have to be")
    return int(killed < KILLED * len(mutants))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Path(__file__).resolve().parents[2]))
