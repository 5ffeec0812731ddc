"""Reports as text: for a terminal of 100 columns, and in Markdown.

Tensors of equal treatment share a row, and an explanation below the table: the recurrence, the number behind
the verdict on plain low precision, and how they are stored here, and why.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence

from tabulate import tabulate

from collage_fx.numerics import short_name
from collage_fx.options.budgets import Budget, frontier
from collage_fx.report.tensors import TensorReport, Treatment, bytes_per_parameter, treatments

#: Largest width of a line.
TEXT_WIDTH = 100
#: Least width of the column of names, so that a name is broken into few lines.
NAME_WIDTH = 16
#: Length at which a recurrence or a list of names is cut unless the report is full.
SHORTENED = 3 * TEXT_WIDTH


def section(
    subject: str, rows: Sequence[TensorReport], other_state: int = 0, *, full: bool, markdown: bool
) -> str:
    """Write heading, table, numbered explanations and totals of one subject, as text or GitHub's Markdown."""
    groups, summary = treatments(rows), summary_line(rows, other_state)
    cells = [*_cells(rows, groups, full=full)]
    headers = ("tensor", "shape", "kind", plainly(rows), "here", "bytes")
    widths = [max(len(header) + 2, *map(len, texts)) for header, *texts in zip(headers, *cells, strict=True)]
    room = max(TEXT_WIDTH - sum(widths[1:]) - 2 * len(widths[1:]), NAME_WIDTH)
    if not markdown:
        cells = [[_at_dots(name, room), *others] for name, *others in cells]
    table = tabulate(
        cells,
        headers=headers,
        tablefmt="github" if markdown else "simple",
        maxcolwidths=[None if markdown else room] + [None] * (len(headers) - 1),
        colalign=["left"] * (len(headers) - 1) + ["right"],
        disable_numparse=True,
    )
    numbered = [(i, _explanation(group, full=full)) for i, group in enumerate(groups, 1)]
    if markdown:
        notes = [f"{i}. `{recurrence}`\n   " + "\n   ".join(others) for i, (recurrence, *others) in numbered]
        return "\n".join([f"## {subject}\n", table, "", *notes, "", summary])
    notes = [_wrapped(f"({i}) ", paragraphs) for i, paragraphs in numbered]
    return "\n".join([f"{subject}\n", table, "", *notes, "", textwrap.fill(summary, TEXT_WIDTH)])


def plainly(rows: Sequence[TensorReport]) -> str:
    """Return the heading of the verdicts on storage without this package: ``plain bf16``."""
    dtypes = {short_name(row.dtype) for row in rows}
    return f"plain {dtypes.pop()}" if len(dtypes) == 1 else "plain"


#: Caption of :func:`budget_table`.
BUDGET_CAPTION = "Budgets: each row is more precise than the rows above it, as docs/formats.md measures."


def budget_table(budgets: Sequence[Budget], style: str, *, compensates: bool) -> str:
    """Make the table of budgets for a step, the used one first, with an arrow at the budget that is used.

    Budgets that take no fewer bytes than a more precise one are left out. If no tensor of the step has error
    terms (``compensates``), ``state`` alone is shown. ``style`` is a table format of tabulate.
    """
    used, *others = budgets
    shown = [*frontier(others), used]
    rows = [each for each in others if each in shown]
    names = [str(each) if compensates else f"state={each.state!r}" for each in rows]
    arrows = ["→" if each == used else "" for each in rows]
    cells = [*zip(arrows, names, (f"{each.bytes:.4g}" for each in rows), strict=True)]
    headers, aligned = ("", "options", "bytes per parameter"), ("left", "left", "right")
    return tabulate(cells, headers, tablefmt=style, colalign=aligned)


def summary_line(rows: Sequence[TensorReport], other_state: int = 0) -> str:
    """Count the tensors with error terms, and sum up bytes per parameter."""
    done = sum(row.compensated for row in rows)
    amounts = bytes_per_parameter(rows, other_state)
    total = amounts.pop("total")
    parts = ", ".join(f"{name} {value:.4g}" for name, value in amounts.items())
    return f"{done} of {len(rows)} tensors have error terms. Bytes per parameter: {total:.4g} ({parts})."


def _cells(rows: Sequence[TensorReport], groups: Sequence[Treatment], *, full: bool) -> Iterator[list[str]]:
    number = {id(row): i for i, group in enumerate(groups, 1) for row in group.rows}
    for each in [Treatment((row,)) for row in rows] if full else groups:
        row, verdict = each.example, f"{each.example.verdict} ({number[id(each.example)]})"
        yield [each.what, each.layout, row.kind.value, verdict, row.here, f"{each.bytes:,}"]


def _at_dots(name: str, room: int) -> str:
    """Split a name into lines of at most ``room`` characters, before dots where that is possible."""
    lines = [""]
    for part in re.findall(r"\.?[^.]*", name):
        lines = [*lines[:-1], lines[-1] + part] if len(lines[-1] + part) <= room else [*lines, part]
    return "\n".join(filter(None, lines))


def _explanation(group: Treatment, *, full: bool) -> Iterator[str]:
    yield _cut(group.example.recurrence, full=full)
    yield group.example.why
    if len(group.rows) > 1 and not full:
        yield _cut(f"of {', '.join(group.names)}", full=full)


def _wrapped(mark: str, texts: Iterator[str]) -> str:
    indent = " " * len(mark)
    lines = (textwrap.fill(x, TEXT_WIDTH, initial_indent=indent, subsequent_indent=indent) for x in texts)
    return mark + "\n".join(lines)[len(mark) :]


def _cut(text: str, *, full: bool) -> str:
    return text if full or len(text) <= SHORTENED else f"{text[: SHORTENED - 1]}…"
