"""Results of ``checkup`` as text, JSON, and a page with histograms."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import torch
from tabulate import tabulate
from torch import Tensor

from collage_fx.numerics import short_name
from collage_tools.checkup.code_counts import (
    CODES,
    MAGNITUDES,
    Moves,
    PileUp,
    binades,
    first_exponent,
    power_sums,
    values,
)
from collage_tools.pages import histogram, html_document, html_table

if TYPE_CHECKING:
    from collage_tools.checkup.verdicts import Checkup, Group

#: Largest width of a line of text, and of the column of names.
TEXT_WIDTH, NAME_WIDTH = 100, 40
#: Number of codes on each side of a power of two, or of a constant, in a histogram.
BESIDE = 40
#: Number of bars from one label to the next.
LABEL_EVERY = 16
#: Fields of a tensor in JSON.
TENSOR_FIELDS = (
    "name shape dtype held entries constant at_constant is_mixed is_trained zeros not_finite stuck moves"
)
#: Largest number of powers of two with a histogram.
MOST_HISTOGRAMS = 6


def text_of(found: Checkup, *, full: bool) -> str:
    """Write verdict, reasons and table; ``full``: a row for each tensor."""
    headers, rows = _table(found, full=full)
    table = tabulate(
        rows,
        headers,
        colalign=["left"] * 2 + ["right"] * (len(headers) - 2),
        maxcolwidths=[NAME_WIDTH] + [None] * (len(headers) - 1),
        disable_numparse=True,
    )
    marked = [("- ", each) for each in (*found.reasons, *found.findings)]
    lines = [
        textwrap.fill(text, TEXT_WIDTH, initial_indent=mark, subsequent_indent=" " * len(mark))
        for mark, text in (*marked, *(("  ", note) for note in found.notes))
    ]
    return "\n".join([_subject(found), "", table, "", f"Verdict: {found.verdict}.", *lines])


def _subject(found: Checkup) -> str:
    entries = sum(each.entries for each in found.tensors)
    since = f", compared with {found.earlier}" if found.earlier else ""
    return f"{found.path}: {len(found.tensors)} tensors, {entries:,} entries{since}"


def _table(found: Checkup, *, full: bool) -> tuple[list[str], list[list[str]]]:
    """Return headers and rows; columns that no row fills are left out."""
    lr = "" if found.lr is None else f"{found.lr:g}"
    headers = [
        *("tensor", "dtype", "entries", "constant", "at it", "pile-up"),
        *(f"stuck at lr {lr}", "moved", "expected"),
    ]
    groups = [group for each in found.groups for group in (_singles(each) if full else [each])]
    rows = [_row(each) for each in groups]
    kept = [i for i in range(len(headers)) if i < 3 or any(row[i] for row in rows)]
    return [headers[i] for i in kept], [[row[i] for i in kept] for row in rows]


def _singles(group: Group) -> list[Group]:
    return [type(group)(each.name, (each,)) for each in group.tensors]


def _row(group: Group) -> list[str]:
    first = group.tensors[0]
    number = f" ({len(group.tensors)})" if len(group.tensors) > 1 else ""
    held = "" if first.held is first.dtype else f" as {short_name(first.dtype)}"
    pile_up = group.pile_up
    tested = "" if pile_up is None else f"{pile_up.factor:.1f} x" if pile_up.is_certain else "none"
    return [
        group.name + number,
        short_name(first.held) + held,
        f"{group.entries:,}",
        "" if group.constant is None else f"{group.constant:g}",
        "" if group.constant is None else f"{group.at_constant:.0%}",
        tested,
        *("" if share is None else f"{share:.1%}" for share in (group.stuck, group.moved, group.expected)),
    ]


def json_of(found: Checkup) -> str:
    """Write all numbers as JSON, a list item for each tensor."""
    about = _fields(found, "path earlier verdict is_good reasons findings notes lr weight_decay steps")
    of_tensors = [_fields(each, TENSOR_FIELDS) for each in found.tensors]
    groups = [
        {**_fields(each, "name entries pile_up"), "tensors": len(each.tensors)} for each in found.groups
    ]
    moments = [_fields(each, "name dtype decay entries is_stuck") for each in found.second_moments]
    return json.dumps(
        {**about, "tensors": of_tensors, "groups": groups, "second_moments": moments},
        indent=1,
        default=_as_json,
    )


def _fields(value: object, names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names.split()}


def _as_json(value: Any) -> object:
    """Return a value that JSON has for a dtype, moves or a pile-up; raise for anything else."""
    if isinstance(value, torch.dtype):
        return short_name(value)
    if isinstance(value, PileUp):
        return {**vars(value), "factor": value.factor, "is_certain": value.is_certain}
    if isinstance(value, Moves):
        return vars(value)
    raise TypeError(f"JSON has no {type(value).__name__}")


# The page. --------------------------------------------------------------------------------------------------


def page_of(found: Checkup) -> str:
    """Write the page: verdict, reasons, table, and histograms around powers of two and constants."""
    headers, rows = _table(found, full=False)
    reasons = "".join(f"<li>{escape(each)}</li>" for each in (*found.reasons, *found.findings))
    notes = "".join(f"<p class='names'>{escape(each)}</p>" for each in found.notes)
    body = [
        f"<p>{escape(_subject(found))}</p><h2>Verdict: {escape(found.verdict)}</h2><ul>{reasons}</ul>{notes}",
        html_table(rows, headers, len(headers) - 2),
        *(part for dtype, counts in found.histograms.items() for part in _of_powers(counts, dtype)),
        *(part for dtype, counts in found.vectors.items() for part in _of_constants(counts, dtype)),
    ]
    return html_document(found.path, "Checkup of a checkpoint", "".join(body))


def _of_powers(counts: Tensor, dtype: torch.dtype) -> Iterator[str]:
    """Draw the counts around the powers of two with the most entries, and a smooth density."""
    at, below, above, *_ = power_sums(counts, dtype)
    largest = at.topk(min(MOST_HISTOGRAMS, len(at))).indices.sort().values.tolist()
    width = binades(counts, dtype).shape[1]
    yield f"<h2>Matrices in {short_name(dtype)}: counts around powers of two</h2>"
    yield (
        "<p>A bar for each number that the format has, ± taken together; counts below the power are doubled, "
        "as numbers are twice as dense there. The power itself is marked. The line is a smooth density.</p>"
    )
    for column in largest:
        if not at[column]:
            continue
        center = (column + 2) * width
        around = counts[center - BESIDE : center + BESIDE + 1].double()
        around[:BESIDE] *= 2
        line = [float(below[column])] * BESIDE + [0.75 * max(float(below[column]), float(above[column]))]
        line += [float(above[column])] * BESIDE
        exponent = first_exponent(dtype) + column
        yield f"<h3>2**{exponent} = {2.0**exponent:g}</h3>"
        yield histogram(around.tolist(), labels=_labels(center, dtype), marked=[BESIDE], line=line)


def _of_constants(counts: Tensor, dtype: torch.dtype) -> Iterator[str]:
    """Draw the counts of vectors around their most frequent value."""
    center = int(counts.argmax())
    if not BESIDE <= center % MAGNITUDES < MAGNITUDES - BESIDE:
        return
    constant = float(values(dtype)[center])
    yield f"<h2>Vectors in {short_name(dtype)}: counts around {constant:g}</h2>"
    around: Sequence[float] = counts[center - BESIDE : center + BESIDE + 1].tolist()
    yield histogram(around, labels=_labels(center, dtype), marked=[BESIDE])


def _labels(center: int, dtype: torch.dtype) -> dict[int, str]:
    return {
        i: f"{float(values(dtype)[(center + i - BESIDE) % CODES]):.4g}"
        for i in range(BESIDE % LABEL_EVERY, 2 * BESIDE, LABEL_EVERY)
    }
