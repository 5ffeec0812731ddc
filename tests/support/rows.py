"""Rows of ``tests/README.md``: which tests to run for a file of the library."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path


def rows(page: str) -> dict[str, list[str]]:
    """Return the table "You touched": file, pattern of files, or folder with a slash at the end -> tests."""
    table: dict[str, list[str]] = {}
    for line in page.partition("## You touched")[2].partition("\n## ")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[0].startswith("`"):
            tests = [each for each in cells[1].strip("`").split() if not each.startswith("--")]
            table |= {name.strip(" `"): tests for name in cells[0].split(",")}
    return table


def row_of(path: Path, table: Mapping[str, list[str]]) -> list[str]:
    """Return the tests of a file's row, or of the first pattern or folder that it fits; none if none does."""
    name = path.as_posix()
    around = (tests for key, tests in table.items() if fnmatch(name, f"{key}*" if key.endswith("/") else key))
    return table.get(name) or next(around, [])
