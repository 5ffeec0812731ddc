"""``./dev peers``: run other packages' test suites, plain and with each optimizer installed.

Everything that passes plainly has to pass installed, or to be listed with a reason in tests/peers/listed.py.
Results stay in build/peers: a run that was cut off goes on where it stopped. The exit status is 1 for any
other failure.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError

from tabulate import tabulate

from tests.peers.listed import LISTED
from tests.peers.runs import Options, run
from tests.peers.suites import DTYPES, SUITES, Suite
from tests.peers.verdicts import Verdict, verdict

HEADERS = ("suite", "dtype", "tests", "pass plainly", "pass installed", "unstable", "listed", "new failures")


def _sample(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    k, n = int(part), int(parts)
    if not 0 <= k < n:
        raise ValueError
    return k, n


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./dev peers", description=__doc__)
    names = [suite.name for suite in SUITES]
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="SUITE", help=", ".join(names)
    )
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument(
        "--sample", type=_sample, default=(0, 1), metavar="K/N", help="the part K, from 0 on, of N parts"
    )
    parser.add_argument("--time-limit", type=float, default=300, help="seconds for one test")
    parser.add_argument("--again", action="store_true", help="run also what has a result with these sources")
    parser.add_argument(
        "--interpreted", action="store_true", help="compile no kernels: quicker, and another way than users'"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the worker, too
    arguments = parse_arguments(argv)
    options = Options(
        sample=arguments.sample,
        time_limit=arguments.time_limit,
        interpreted=arguments.interpreted,
        again=arguments.again,
    )
    chosen = [suite for suite in SUITES if suite.name in arguments.only]
    require_installed(chosen)
    verdicts = []
    for suite in chosen:
        for dtype in suite.dtypes:
            if dtype in arguments.dtype:
                print(f"{suite.name} {suite.version}, {dtype} ...", flush=True)
                verdicts.append(verdict(suite.name, dtype, *run(suite, dtype, options)))
                print_failures(verdicts[-1])
    print(tabulate(map(row, verdicts), headers=HEADERS))
    if options.sample[1] == 1:
        print_unneeded(verdicts)
    return int(any(found.failed for found in verdicts))


def require_installed(suites: Iterable[Suite]) -> None:
    missing = set()
    for suite in suites:
        try:
            suite.version  # noqa: B018
        except PackageNotFoundError:
            missing.add(suite.package)
    if missing:
        raise SystemExit(
            f"not installed: {', '.join(sorted(missing))}. Install the extra 'peers' (pip install "
            "-e '.[peers]'), or name the suites to run: ./dev peers --only ..."
        )


def row(found: Verdict) -> tuple[str, str, int, int, int, int, int, int]:
    counts = (found.tests, found.plain, found.passed, found.shaken, len(found.listed), len(found.failed))
    return (found.suite, found.dtype, *counts)


def print_failures(found: Verdict) -> None:
    for count, example in found.by_kind():
        print(f"  {count} x {example.error}\n      {example.test}\n      {example.where}", flush=True)


def print_unneeded(verdicts: Sequence[Verdict]) -> None:
    needed = {entry for found in verdicts for entry in found.needed}
    ran = {(found.suite, found.dtype) for found in verdicts}
    for entry in LISTED:
        if entry not in needed and ran.issuperset((entry.suite, dtype) for dtype in entry.dtypes):
            print(f"listed, and nothing fails so any more: {entry.suite} {entry.tests}: {entry.reason}")


if __name__ == "__main__":
    raise SystemExit(main())
