"""Measured lines of optimizers: made of measurements, kept in ``measured.json``, and checked against it.

A line's cells are texts. Within them, ``{reason}`` is a note.
"""

from __future__ import annotations

import json
import math
import platform
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

import torch

from collage_fx.options.budgets import TOLERANCE
from collage_tools.audit import COMPENSATED, INACCURATE, REFUSED, UNSUPPORTED, Measurement, falls_short
from tests.compatibility.catalog import BUDGETS, ON_OTHER_SHAPES, RESUMED, Row

__all__ = [
    "NOT_TRIED",
    "SAME_BITS",
    "Key",
    "Line",
    "differences",
    "dump",
    "error_in",
    "is_good",
    "key_of",
    "line_of",
    "read",
    "torch_version",
    "worse",
]

#: Package, class, options, dtype.
Key = tuple[str, str, str, str]

#: Two writings of an error may differ by as much, relatively: both have two digits, and between processors
#: the last digit of what plain low precision loses can differ.
WITHIN = 0.1
#: Errors below are not told apart: that is float32's own, which depends on the processor's libraries.
FLOOR = 1e-3

LONGEST_NOTE = 400

#: What stands where a row is not tried under budgets.
NOT_TRIED = "–"
#: What stands where a resumed run has the bits of one that goes on.
SAME_BITS = "same bits"


@dataclass(frozen=True)
class Line:
    """Measured line of the table.

    Attributes:
        package: and its version.
        optimizer: the class.
        options: keyword arguments.
        dtype: of parameters and gradients.
        foreach: the settings that the class takes with these options.
        graphs: captured in the first step.
        compilations: graphs compiled in all steps.
        seconds: until nothing was compiled any more; the most over ``foreach``. Empty where not measured.
        state: low-precision state tensors found.
        error_terms: those that got error terms.
        left: those that did not, and why.
        plain, single, error: relative errors of the net displacement; the largest over ``foreach``. The last
            with how many times as large that of plain is.
        bytes: held for each element of the parameters.
        error_8, bytes_8, error_5, bytes_5: the same under budgets of 8 and 5.1 bytes, of one setting of
            ``foreach``; instead of an error that there is not, the outcome.
        outcome: and its reason.
        other_shapes: the largest error of a parameter on other shapes than the usual ones, likewise, with the
            shapes that the class does not take.
        resumed: whether a run that is saved and loaded has the bits of one that goes on.
    """

    package: str
    optimizer: str
    options: str
    dtype: str
    foreach: str
    graphs: str
    compilations: str
    seconds: str
    state: str
    error_terms: str
    left: str
    plain: str
    single: str
    error: str
    bytes: str
    error_8: str
    bytes_8: str
    error_5: str
    bytes_5: str
    outcome: str
    other_shapes: str = NOT_TRIED
    resumed: str = NOT_TRIED

    @property
    def key(self) -> Key:
        return self.package.split()[0], self.optimizer, self.options, self.dtype

    @property
    def outcomes(self) -> set[str]:
        """The outcomes without reasons."""
        return set(re.sub(r" \{.*?\}", "", self.outcome).split("; "))

    @property
    def falls_short(self) -> bool:
        """Whether the errors of a row fall short: see :func:`collage_fx.audit.falls_short`."""
        return bool(self.plain and self.error) and falls_short(_value(self.plain), _value(self.error))

    @property
    def error_value(self) -> float:
        """The error as a number; -1 if there is none."""
        return _value(self.error) if self.error else -1.0

    @property
    def worse_than_plain(self) -> list[str]:
        """The budgets under which the error is larger than plain low precision's."""
        errors = {"8 B": self.error_8, "5.1 B": self.error_5}
        return [
            name
            for name, error in errors.items()
            if _ERROR.match(error) and self.plain and not _value(error) <= _value(self.plain)
        ]


ERRORS = ("plain", "single", "error", "error_8", "error_5", "other_shapes")

#: Cells of which a row gets worse, and outcomes from good to bad, as the cells begin.
GRADED = ("error", "error_8", "error_5", "bytes", "bytes_8", "bytes_5", "other_shapes", "resumed", "outcome")
GRADES = (SAME_BITS, COMPENSATED, UNSUPPORTED, REFUSED, INACCURATE)

#: Bytes that a cell may have.
LIMITS = {"bytes_8": 8.0, "bytes_5": 5.1}

#: An error, and how many times as large plain's is.
_ERROR = re.compile(r"(?:< )?([\d.]+(?:e[-+]\d+)?|nan|inf)(?: \([^)]*×\))?")


def torch_version() -> str:
    """The version of torch without the build's suffix, such as ``+cpu``."""
    return torch.__version__.partition("+")[0]


# Lines from measurements. -----------------------------------------------------------------------------------


def key_of(row: Row) -> Key:
    """The key of a row's line."""
    return row.subject.package, row.subject.name, row.options_text or "defaults", row.dtype


def line_of(row: Row, measured: Mapping[str, Measurement]) -> Line:
    """A row's line.

    Args:
        row: the row.
        measured: by the name of its variants, all of them.
    """
    every = [(variant, measured[variant.name]) for variant in row.variants()]
    checks = {variant.check: met for variant, met in every if variant.check}
    tried = [(variant, met) for variant, met in every if variant.budget is None and not variant.check]
    under = {variant.budget: met for variant, met in every if variant.budget is not None}
    budgets = [_under_budget(under.get(budget)) for budget in BUDGETS]
    (error_8, bytes_8), (error_5, bytes_5) = budgets
    # A setting of foreach that the class refuses with these options is not a combination to report on.
    usable = [(v, m) for v, m in tried if m.outcome != UNSUPPORTED] or tried
    found = [m for _, m in usable]
    package, optimizer, options, dtype = key_of(row)
    version = torch_version() if package == "torch" else row.subject.version
    return Line(
        package=f"{package} {version}",
        optimizer=optimizer,
        options=options,
        dtype=dtype,
        foreach=", ".join(str(value) for variant, _ in usable for value in variant.foreach.values()),
        graphs=_range(m.graphs for m in found),
        compilations=_range(m.compilations for m in found),
        seconds=f"{max(m.seconds for m in found):.0f}",
        state=_range(len(m.compensated) + len(m.left) for m in found),
        error_terms=_counted(m.compensated for m in found),
        left=_counted([f"{slot} {_note(why)}" for slot, why in m.left] for m in found),
        plain=_error(m.plain for m in found),
        single=_error(m.single for m in found),
        error=_compensated(found),
        bytes=_bytes(found),
        error_8=error_8,
        bytes_8=bytes_8,
        error_5=error_5,
        bytes_5=bytes_5,
        outcome="; ".join(dict.fromkeys(map(_outcome, found))),
        other_shapes=_on_other_shapes(checks.get(ON_OTHER_SHAPES)),
        resumed=_resumed(checks.get(RESUMED)),
    )


def _range(numbers: Iterable[int]) -> str:
    seen = sorted(set(numbers))
    return str(seen[0]) if len(seen) == 1 else f"{seen[0]} to {seen[-1]}"


def _counted(slots: Iterable[list[str]]) -> str:
    texts = (
        ", ".join(f"{number} × {slot}" for slot, number in sorted(Counter(names).items())) for names in slots
    )
    return "; ".join(dict.fromkeys(texts))


def _error(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    return f"< {FLOOR:g}" if max(known) < FLOOR else f"{max(known):.2g}"


def _compensated(found: Sequence[Measurement]) -> str:
    """The largest error of what was compiled, and how many times as large the largest of plain is."""
    error = _error(m.error for m in found)
    plain = max((m.plain for m in found if m.plain is not None), default=0.0)
    largest = max((m.error for m in found if m.error is not None), default=0.0)
    if not error or not plain:
        return error
    times = float(f"{plain / max(largest, FLOOR):.2g}")
    return f"{error} ({'> ' if largest < FLOOR else ''}{times:g}×)"


def _bytes(found: Iterable[Measurement]) -> str:
    known = [m.bytes for m in found if m.bytes is not None]
    return f"{max(known):.3g}" if known else ""


def _under_budget(measured: Measurement | None) -> tuple[str, str]:
    """The cells of a budget: the error, with the outcome if that is not what it should be, and the bytes."""
    if measured is None:
        return NOT_TRIED, NOT_TRIED
    parts = [_compensated([measured])]
    if measured.outcome != COMPENSATED:
        parts.append(_outcome(measured))
    return " ".join(filter(None, parts)), _bytes([measured])


def _on_other_shapes(measured: Measurement | None) -> str:
    """The cell of other shapes: the error, with the outcome if that is not what it should be, and notes."""
    if measured is None or measured.outcome != COMPENSATED:
        return _under_budget(measured)[0]
    return " ".join([_compensated([measured]), *map(_note, measured.notes)])


def _resumed(measured: Measurement | None) -> str:
    """The cell of a resumed run."""
    if measured is None:
        return NOT_TRIED
    return SAME_BITS if measured.outcome == COMPENSATED else _outcome(measured)


def _outcome(measured: Measurement) -> str:
    notes = "".join(f" {_note(note)}" for note in (measured.reason, *measured.notes) if note)
    return measured.outcome + notes


def _note(reason: str) -> str:
    # Neither where something is installed nor where it lies in memory is the same in another run.
    lasting = re.sub(r"[^\s\"']*/(?:site-packages|python3\.\d+)/", "", re.sub(r"0x[0-9a-f]+", "0x…", reason))
    text = " ".join(lasting.split()).translate(str.maketrans("{}[]|", "()()/"))
    return f"{{{text if len(text) <= LONGEST_NOTE else f'{text[: LONGEST_NOTE - 1]}…'}}}"


# In a file, one line each. ----------------------------------------------------------------------------------


def dump(lines: Iterable[Line]) -> str:
    """The file of measured lines."""
    head = f'{{\n "torch": "{torch_version()}",\n "machine": "{platform.system()} {platform.machine()}",\n'
    rows = (f"  {json.dumps(asdict(line), ensure_ascii=False)}" for line in lines)
    return head + ' "lines": [\n' + ",\n".join(rows) + "\n ]\n}\n"


def read(text: str) -> dict[Key, Line]:
    """The lines of a file, by key."""
    lines = (Line(**each) for each in json.loads(text)["lines"])
    return {line.key: line for line in lines}


def differences(written: Line, measured: Line) -> list[str]:
    """The cells of a written line that are not what was measured, apart from noise."""
    found = []
    for cell in fields(Line):
        old, new = getattr(written, cell.name), getattr(measured, cell.name)
        if old != new and cell.name != "seconds" and not (cell.name in ERRORS and _same_error(old, new)):
            found.append(f"{cell.name}: {old!r} is written, {new!r} was measured")
    return found


def worse(written: Line, measured: Line) -> list[str]:
    """The cells of a measured line that are worse than those of a written one, beyond noise.

    Worse is: an outcome that stands later in :data:`GRADES` (all others stand behind), a larger error with
    the same outcome, more bytes, and more of them than the limit that was given.
    """
    found = []
    for name in GRADED:
        old, new = getattr(written, name), getattr(measured, name)
        limit = LIMITS.get(name, math.inf) * (1 + TOLERANCE)
        if error_in(new) > limit >= error_in(old):
            found.append(f"{name}: {new} are held, beyond the limit")
            continue
        was_refused = name in LIMITS and not old
        if NOT_TRIED in (old, new) or old == new or was_refused or (name in ERRORS and _same_error(old, new)):
            continue
        before, after = _grade(old), _grade(new)
        if after > before or (after == before and error_in(new) > error_in(old)):
            found.append(f"{name}: {old!r} is written, {new!r} was measured")
    return found


def is_good(cell: str) -> bool:
    """Return whether a cell of a check is as it should be: an error, with notes at most, or the same bits."""
    return cell != NOT_TRIED and _grade(cell) <= GRADES.index(COMPENSATED)


def _grade(cell: str) -> int:
    """The place of a cell's worst outcome in the grades; that of no grade is behind them."""
    outcomes = re.sub(r" ?\{.*?\}", "", _ERROR.sub("", cell, 1) if _ERROR.match(cell) else cell).split("; ")
    known = [
        GRADES.index(each.strip() or COMPENSATED)
        for each in outcomes
        if (each.strip() or COMPENSATED) in GRADES
    ]
    return max(known) if len(known) == len(outcomes) else len(GRADES)


def error_in(cell: str) -> float:
    """The error or bytes in a cell; 0 if it has none, infinity if it is not a number."""
    number = _value(cell) if _ERROR.match(cell) else 0.0
    return math.inf if math.isnan(number) else number


def _same_error(old: str, new: str) -> bool:
    if not (_ERROR.match(old) and _ERROR.match(new)) or _ERROR.sub("", old, 1) != _ERROR.sub("", new, 1):
        return False
    low, high = sorted(map(_value, (old, new)))
    return math.isfinite(high) and high - low <= WITHIN * high


def _value(error: str) -> float:
    found = _ERROR.match(error)
    assert found is not None, error
    return float(found[1])
