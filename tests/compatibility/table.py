"""``docs/compatibility.md``: made of measurements, read back to keep rows and to be checked.

A document is a line a row; each line's cells are texts, and errors are rounded to what another run of the
same versions gives again.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields

import torch
from tabulate import tabulate

from tests.compatibility.catalog import Row
from tests.compatibility.measure import COMPENSATED, REFUSED, STEPS, UNSUPPORTED, Measurement

__all__ = ["Line", "differences", "document", "line_of", "read"]

#: Two writings of an error may differ by as much, relatively: both have two digits, and between processors
#: the last digit of what plain low precision loses can differ.
WITHIN = 0.1
#: Errors below are not told apart: that is float32's own, which depends on the processor's libraries.
FLOOR = 1e-3

LONGEST_REASON = 200


@dataclass(frozen=True)
class Line:
    """One line of the document.

    Attributes:
        optimizer: package and class.
        options: keyword arguments.
        dtype: of parameters and gradients.
        foreach: settings that the class takes with these options.
        graphs: captured in the first step.
        compilations: graphs compiled in all steps.
        state: low-precision state tensors found.
        error_terms: those that got error terms.
        left: those that did not, and why.
        plain, single, compensated: relative errors of the net displacement; the largest over ``foreach``.
        outcome: and its reason.
    """

    optimizer: str
    options: str
    dtype: str
    foreach: str
    graphs: str
    compilations: str
    state: str
    error_terms: str
    left: str
    plain: str
    single: str
    compensated: str
    outcome: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.optimizer, self.options, self.dtype


ERRORS = ("plain", "single", "compensated")
HEADERS = {
    "optimizer": "optimizer",
    "options": "options",
    "dtype": "dtype",
    "foreach": "foreach",
    "graphs": "graphs",
    "compilations": "compilations",
    "state": "state tensors",
    "error_terms": "with error terms",
    "left": "without",
    "plain": "error, plain",
    "single": "error, fp32",
    "compensated": "error, compensated",
    "outcome": "outcome",
}


def line_of(row: Row, measured: Mapping[str, Measurement]) -> Line:
    """A row's line.

    Args:
        row: the row.
        measured: by the name of its variants, all of them.
    """
    tried = [(variant, measured[variant.name]) for variant in row.variants()]
    # A setting of foreach that the class refuses with these options is not a combination to report on.
    usable = [(v, m) for v, m in tried if m.outcome != UNSUPPORTED] or tried
    found = [m for _, m in usable]
    return Line(
        optimizer=row.subject.path,
        options=row.options_text or "defaults",
        dtype=row.dtype,
        foreach=", ".join(str(value) for variant, _ in usable for value in variant.foreach.values()),
        graphs=_range(m.graphs for m in found),
        compilations=_range(m.compilations for m in found),
        state=_range(len(m.compensated) + len(m.left) for m in found),
        error_terms=_counted(m.compensated for m in found),
        left=_counted(m.left for m in found),
        plain=_error(m.plain for m in found),
        single=_error(m.single for m in found),
        compensated=_error(m.error for m in found),
        outcome="; ".join(dict.fromkeys(map(_outcome, found))),
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


def _outcome(measured: Measurement) -> str:
    if measured.outcome == COMPENSATED:
        return measured.outcome
    reason = " ".join(measured.reason.replace("|", "/").split())
    if len(reason) > LONGEST_REASON:
        reason = reason[: LONGEST_REASON - 1] + "…"
    return f"{measured.outcome}: {reason}"


def document(lines: Sequence[Line]) -> str:
    """The whole document."""
    ours = [line for line in lines if line.optimizer.startswith("torch.optim.")]
    others = [line for line in lines if line not in ours]
    return "\n".join(
        [
            "# Which optimizers work",
            "",
            f"Written by `./dev compat` (torch {torch.__version__}, {platform.system()} "
            f"{platform.machine()}); not to be edited.",
            "",
            f"Every row is {STEPS} steps of an optimizer, unmodified, through "
            "`torch.compile(opt.step, backend=CollageBackend())`, on weights from N(0, 1) and with steps of "
            "1e-5 to 1e-4, most of which plain bfloat16 loses. Errors are ‖Δ − Δ64‖ / ‖Δ64‖, where Δ is how "
            "far the parameters went and Δ64 how far they go in float64 from the same weights with the same "
            "gradients: *plain* is eager and low-precision, *fp32* eager and float32, *compensated* is what "
            "`full_value` says. A row covers every setting of `foreach` that is named in it and gives the "
            "largest errors.",
            "",
            "*Compensated*: every parameter has error terms that are not zero, and nothing is compiled in the "
            "second half of the steps.",
            "",
            "## torch.optim",
            "",
            _summary(ours),
            "",
            _table(ours),
            "",
            *(("## Other packages", "", _summary(others), "", _table(others), "") if others else ()),
        ]
    )


def _summary(lines: Sequence[Line]) -> str:
    """How many classes there are, and how many do what."""
    by_class: dict[str, list[Line]] = {}
    for line in lines:
        by_class.setdefault(line.optimizer, []).append(line)
    outcomes = Counter(_of_class(of_class) for of_class in by_class.values())
    counts = ", ".join(f"{number} {outcome}" for outcome, number in outcomes.most_common())
    return f"{len(by_class)} classes: {counts}."


def _of_class(lines: Sequence[Line]) -> str:
    """What becomes of a class with its default options."""
    return lines[0].outcome.partition(":")[0]


def _table(lines: Sequence[Line]) -> str:
    return tabulate(
        [astuple(line) for line in lines],
        headers=list(HEADERS.values()),
        tablefmt="github",
        disable_numparse=True,
    )


def read(text: str) -> dict[tuple[str, str, str], Line]:
    """The lines of a document, by key."""
    lines = {}
    for text_line in text.splitlines():
        cells = [cell.strip() for cell in text_line.strip("|").split("|")]
        if len(cells) == len(HEADERS) and cells != list(HEADERS.values()) and set(cells[0]) - set("-: "):
            line = Line(*cells)
            lines[line.key] = line
    return lines


def differences(written: Line, measured: Line) -> list[str]:
    """Where a line of the document is not what was measured, apart from noise."""
    found = []
    for cell in fields(Line):
        old, new = getattr(written, cell.name), getattr(measured, cell.name)
        if old != new and not (cell.name in ERRORS and _same_error(old, new)):
            found.append(f"{HEADERS[cell.name]}: {old!r} is written, {new!r} was measured")
    return found


def _same_error(old: str, new: str) -> bool:
    if not old or not new:
        return False
    low, high = sorted(float(text.removeprefix("< ")) for text in (old, new))
    return high - low <= WITHIN * high
