"""Results as tables, on the terminal and in the document."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.peers import PEERS
from benchmarks.sizes import SIZES

BEGIN = "<!-- written by ./dev bench -->"
END = "<!-- end of what ./dev bench writes -->"

Results = dict[str, Any]

HEADERS = (
    "optimizer",
    "bytes",
    "ms",
    "light's ms",
    "host ms",
    "× its copy",
    "× in place",
    "light ÷ it",
    "plus ÷ it",
    "extra bytes",
    "cold s",
    "warm s",
    "launches",
    "instructions",
)
MEASURED = "measured"


def table(results: Results, size: str, style: str = "simple") -> str:
    """One line a peer; what was not measured says why."""
    rows = {row["peer"]: row for row in results["rows"] if row["size"] == size}
    lines = [_line(rows[name], results["instructions"].get(name)) for name in PEERS if name in rows]
    return tabulate(lines, headers=HEADERS, tablefmt=style, disable_numparse=True, colalign=_alignment(lines))


def compile_table(results: Results, style: str = "simple") -> str:
    """One line for each optimizer and size."""
    lines = [
        [
            row["optimizer"] if row["status"] == MEASURED else f"{row['optimizer']}: {row['status']}",
            f"({row['size']})",
            *(_number(row.get(key), 1) for key in ("cold_s", "warm_s", "explain_s")),
        ]
        for row in results["compile_times"]
    ]
    headers = ("optimizer", "size", "cold s", "warm s", "explain s")
    alignment = ["left", "left", *["right"] * 3] if lines else []
    return tabulate(lines, headers=headers, tablefmt=style, disable_numparse=True, colalign=alignment)


def _alignment(lines: Sequence[Sequence[str]]) -> Sequence[str]:
    return ["left", *["right"] * (len(HEADERS) - 1)] if lines else []


def _line(row: dict[str, Any], instructions: Any) -> list[str]:
    count = _number(instructions if isinstance(instructions, float) else None, 1)
    seconds = [_number(row.get(key), 1) for key in ("cold_s", "warm_s")]
    name = row["peer"]
    if row["status"] != MEASURED:
        name = f"{name}: {row['status']}"
    return [
        name,
        _number(row["bytes"], 2),
        *(_number(row.get(key), 2) for key in ("ms", "light_ms", "host_ms")),
        *(_ratio(row, key) for key in ("over_copy", "over_rewriting", "light_over", "plus_over")),
        _number(row.get("extra_bytes_per_parameter"), 2),
        *seconds,
        _number(row.get("launches"), 0),
        count,
    ]


def _ratio(row: dict[str, Any], key: str) -> str:
    spread = row.get(f"{key}_spread")
    return _number(row.get(key), 2) + (f" ± {spread:.2f}" if spread else "")


def _number(value: float | None, digits: int) -> str:
    if value is None:
        return ""
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if digits == 2 and value == int(value) else text


def heading(results: Results, size: str) -> str:
    number = results["parameters"][size] / 1e6
    unit = f"{number:.1f} M" if number < 1000 else f"{number / 1000:.2f} B"
    return (
        f"({size}) {SIZES[size].about}: {unit} parameters"
        if number >= 0.1
        else f"({size}) {SIZES[size].about}"
    )


def write_document(document: Path, results: Path) -> None:
    """Put the tables of all results in a folder between the document's marks."""
    sections = []
    for path in sorted(results.glob("*.json")):
        found = json.loads(path.read_text())
        if "rows" not in found:  # of another command
            continue
        measured = {row["size"] for row in found["rows"]}
        sizes = [size for size in found["parameters"] if SIZES[size].devices and size in measured]
        if not sizes:
            continue
        sections.append(f"### {found['machine']}, torch {found['torch']}")
        sections.append(f"{found['about']}.")
        for size in sizes:
            sections += [f"#### {heading(found, size)}", table(found, size, "github")]
        if found.get("compile_times"):
            sections += ["#### Compilation, strategy `plus`", compile_table(found, "github")]
    put_between(document, BEGIN, END, "\n\n".join(sections) or "Nothing has been measured yet.")


def markdown(headers: Sequence[str], rows: Iterable[Sequence[object]], texts: int | None = None) -> str:
    """Return a table in Markdown, with numbers as they are written.

    Args:
        headers: one for each column.
        rows: cells.
        texts: number of columns before those that are aligned to the right; None = all.
    """
    align = None if texts is None else ["left"] * texts + ["right"] * (len(headers) - texts)
    return tabulate(list(rows), headers, tablefmt="github", disable_numparse=True, colalign=align)


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all, in a folder that need not be there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)


def place(page: str, module: str) -> tuple[Path, str, str]:
    """Return a page of docs/ and the marks between which a module writes, for :func:`put_between`."""
    path = Path(__file__).resolve().parent.parent / "docs" / page
    return path, f"<!-- written by python -m benchmarks.{module} -->", "<!-- end -->"


def put_between(document: Path, begin: str, end: str, text: str) -> None:
    """Replace what stands between two marks of a document."""
    pattern = re.escape(begin) + ".*?" + re.escape(end)
    new, replaced = re.subn(
        pattern, lambda match: f"{begin}\n\n{text}\n\n{end}", document.read_text(), flags=re.DOTALL
    )
    if replaced != 1:
        raise ValueError(f"{document} must have the marks {begin} and {end} once")
    document.write_text(new)
