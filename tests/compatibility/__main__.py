"""``./dev compat``: measure the optimizers, and write ``measured.json`` and its pages in ``docs/``.

What has been measured with these sources is kept in build/compat: a run that is cut off goes on, and after
``--part 1/2`` and ``--part 2/2``, in two processes, a run without ``--part`` writes what both have measured.
A row that is worse than in the file is printed, is not written, and makes the command fail.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError

from collage_tools.audit import Measurement
from tests.compatibility import results
from tests.compatibility.catalog import Row, Variant
from tests.compatibility.dtypes import section_of
from tests.compatibility.pages import answer, details
from tests.compatibility.rows import ROWS
from tests.compatibility.table import Line, differences, dump, key_of, line_of, read, worse
from tests.compatibility.worker import Worker

MEASURED = results.ROOT / "tests" / "compatibility" / "measured.json"
ANSWER = results.ROOT / "docs" / "compatibility.md"
DETAILS = results.ROOT / "docs" / "compatibility-rows.md"


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./dev compat", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="classes or packages")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--torch", action="store_true", help="torch.optim alone")
    which.add_argument("--third-party", action="store_true", help="the other packages alone")
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument(
        "--accept", action="store_true", help="write also rows that are worse than those in the file"
    )
    parser.add_argument(
        "--part",
        default="1/1",
        metavar="N/M",
        help="the N-th of M parts, for several processes; implies --check",
    )
    which.add_argument(
        "--pages", action="store_true", help="measure nothing; write the pages of what has been measured"
    )
    parser.add_argument("--again", action="store_true", help="measure also what has been measured")
    parser.add_argument("--time-limit", type=float, default=300, help="seconds for one measurement")
    return parser.parse_args(argv)


def selected(options: argparse.Namespace) -> list[Row]:
    rows = [
        row
        for row in ROWS
        if (row.subject.package == "torch" or not options.torch)
        and (row.subject.package != "torch" or not options.third_party)
        and (options.only is None or {row.subject.name, row.subject.package} & set(options.only))
    ]
    if not rows:
        raise SystemExit(f"no such optimizer or package: {' '.join(options.only or ())}")
    number, _, parts = options.part.partition("/")
    return rows[int(number) - 1 :: int(parts)]


def require_installed(rows: Sequence[Row]) -> None:
    missing = set()
    for package in {row.subject.package: row.subject for row in rows}.values():
        try:
            package.version  # noqa: B018
        except PackageNotFoundError:
            missing.add(package.package)
    if missing:
        raise SystemExit(
            f"not installed: {', '.join(sorted(missing))}. Install the extra 'compat' (pip install "
            "-e '.[compat]'), or measure torch.optim alone: ./dev compat --torch"
        )


def measure_all(rows: Sequence[Row], *, again: bool, time_limit: float) -> list[Line]:
    """The rows' lines; what is already measured is not measured again."""
    lines = []
    worker, package = Worker(time_limit), ""
    try:
        for number, row in enumerate(rows, 1):
            if row.subject.package != package:  # packages patch torch: each has processes of its own
                worker.stop()
                package = row.subject.package
            measured = {v.name: _measured(v, worker, again=again) for v in row.variants()}
            lines.append(line_of(row, measured))
            print(f"[{number}/{len(rows)}] {row.name}: {lines[-1].outcome}", flush=True)
    finally:
        worker.stop()
    return lines


def _measured(variant: Variant, worker: Worker, *, again: bool) -> Measurement:
    known = None if again else results.load(variant)
    if known is not None:
        return known
    measured = worker.measure(variant.name)
    results.save(variant, measured)
    return measured


def compare(lines: Sequence[Line]) -> list[Line]:
    """Print how lines differ from those in the file; return those that are worse."""
    written = read(MEASURED.read_text()) if MEASURED.exists() else {}
    found = []
    for line in lines:
        if line.key not in written:
            print(f"{' '.join(line.key)}: not in the file")
            continue
        bad = worse(written[line.key], line)
        if bad:
            found.append(line)
        for difference in dict.fromkeys([*bad, *differences(written[line.key], line)]):
            print(f"{'WORSE: ' if difference in bad else ''}{' '.join(line.key)}: {difference}")
    print(f"{len(found)} of {len(lines)} rows are worse than in {MEASURED.name}")
    return found


def write(lines: Sequence[Line]) -> None:
    """Write the file and the pages: these lines, and of the other rows what has been measured so far."""
    known = read(MEASURED.read_text()) if MEASURED.exists() else {}
    known.update({line.key: line for line in lines})
    keys = [key_of(row) for row in ROWS]
    MEASURED.write_text(dump(known[key] for key in keys if key in known))
    missing = [key for key in keys if key not in known]
    print(f"wrote {MEASURED}" + (f"; {len(missing)} rows have never been measured" if missing else ""))
    write_pages()


def pages() -> tuple[str, str]:
    """The two pages of what is in the file; the section on dtypes stays as it is."""
    text = MEASURED.read_text()
    about = {name: value for name, value in json.loads(text).items() if name != "lines"}
    lines = read(text)
    section = section_of(DETAILS.read_text()) if DETAILS.exists() else ""
    written = details(lines.values(), about)
    return answer(lines, about), f"{written}\n{section}" if section else written


def write_pages() -> None:
    for path, text in zip((ANSWER, DETAILS), pages(), strict=True):
        path.write_text(text)
        print(f"wrote {path}")


def main(argv: Sequence[str]) -> int:
    options = parse_arguments(argv)
    if options.pages:
        write_pages()
        return 0
    rows = selected(options)
    require_installed(rows)
    started = time.perf_counter()
    lines = measure_all(rows, again=options.again, time_limit=options.time_limit)
    print(f"{len(rows)} rows in {time.perf_counter() - started:.0f} s")
    for line in lines:
        if line.falls_short:
            print(f"too inaccurate: {' '.join(line.key)}: {line.error}, where plain has {line.plain}")
        for budget in line.worse_than_plain:
            print(f"worse than plain: {' '.join(line.key)} with {budget}")
    bad = compare(lines)
    if not options.check and options.part == "1/1":
        write([line for line in lines if options.accept or line not in bad])
    return 1 if bad and not options.accept else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
