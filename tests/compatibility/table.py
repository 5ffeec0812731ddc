"""The table ``docs/compatibility.md``: made of measurements, and read back, to keep rows and to be checked.

A line's cells are texts. Within them, ``{reason}`` stands in the document as the number of a note, ``[1]``.
"""

from __future__ import annotations

import platform
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields

import torch
from tabulate import tabulate

from collage_fx.tools.audit import COMPENSATED, UNSUPPORTED, Measurement, falls_short
from tests.compatibility.catalog import BUDGETS, SHAPES, STEPS, Row

__all__ = [
    "NOT_TRIED",
    "UNDER_A_BUDGET",
    "Key",
    "Line",
    "differences",
    "document",
    "key_of",
    "line_of",
    "read",
    "torch_version",
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

#: What is said of lines that are kept from when bytes and budgets were not measured yet.
OLDER = (
    "Where *bytes* is empty, in {} lines, the errors are older: of parameters of 24×16 and 24, and of state "
    "that was rounded to nearest."
)

#: The rows of the table at the top.
UNDER_A_BUDGET: tuple[Key, ...] = (
    ("torch", "AdamW", "defaults", "bf16"),
    ("torch", "Adagrad", "defaults", "bf16"),
    ("torch", "RMSprop", "centered=True", "bf16"),
    ("torch", "Adam", "amsgrad=True", "bf16"),
    ("torch-optimi", "Adan", "kahan_sum=False", "bf16"),
    ("lion-pytorch", "Lion", "defaults", "bf16"),
    ("torch", "Muon", "defaults", "bf16"),
    ("torch", "Adafactor", "defaults", "bf16"),
    ("transformers", "Adafactor", "lr=0.0001, relative_step=False, scale_parameter=False", "bf16"),
    ("prodigyopt", "Prodigy", "defaults", "bf16"),
)


@dataclass(frozen=True)
class Line:
    """One line of the document.

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
    def worse_than_plain(self) -> list[str]:
        """The budgets under which the error is larger than plain low precision's."""
        errors = {"8 B": self.error_8, "5.1 B": self.error_5}
        return [
            name
            for name, error in errors.items()
            if _ERROR.match(error) and self.plain and not _value(error) <= _value(self.plain)
        ]


HEADERS = (
    "package",
    "optimizer",
    "options",
    "dtype",
    "foreach",
    "graphs",
    "compiled",
    "seconds",
    "state",
    "with error terms",
    "without",
    "plain",
    "fp32",
    "compensated",
    "bytes",
    "8 B",
    "8 B: bytes",
    "5.1 B",
    "5.1 B: bytes",
    "outcome",
)
ERRORS = ("plain", "single", "error", "error_8", "error_5")

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
    tried = [(variant, met) for variant, met in every if variant.budget is None]
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


def _outcome(measured: Measurement) -> str:
    notes = "".join(f" {_note(note)}" for note in (measured.reason, *measured.notes) if note)
    return measured.outcome + notes


def _note(reason: str) -> str:
    # Neither where something is installed nor where it lies in memory is the same in another run.
    lasting = re.sub(r"[^\s\"']*/(?:site-packages|python3\.\d+)/", "", re.sub(r"0x[0-9a-f]+", "0x…", reason))
    text = " ".join(lasting.split()).translate(str.maketrans("{}[]|", "()()/"))
    return f"{{{text if len(text) <= LONGEST_NOTE else f'{text[: LONGEST_NOTE - 1]}…'}}}"


# The document. ----------------------------------------------------------------------------------------------


def document(lines: Sequence[Line]) -> str:
    """The whole document."""
    ours = [line for line in lines if line.package.startswith("torch ")]
    others = [line for line in lines if line not in ours]
    older = [line for line in lines if line.error and not line.bytes]
    notes: dict[str, int] = {}
    paragraphs = [
        "# Which optimizers work",
        f"Written by `./dev compat` with torch {torch_version()} on {platform.system()} "
        f"{platform.machine()}; not to be edited.",
        f"Each line is {STEPS} steps (or as noted) of an unmodified optimizer, as `collage-fx audit` takes "
        "them after `collage_fx.install(opt)`, from N(0, 1) weights and with steps of some 1e-5 to 1e-4, "
        "most of which plain bfloat16 loses. The outcome *compensated* means that every parameter has error "
        "terms, not all of them zero, that nothing was compiled in the second half of the steps, and that "
        "the error is at most a tenth of plain's where that is 0.2 or more, and nowhere 5 % above it.",
        "*plain*, *fp32* and *compensated* are errors, ‖Δ − Δ64‖ / ‖Δ64‖: Δ is how far the parameters went "
        "in eager low precision, in eager float32, and by `full_value` in the compiled step, Δ64 how far "
        "they go in float64 from the same weights with the same gradients. Of several settings of `foreach`, "
        "the largest. *compiled* counts graphs in all steps, *seconds* is how long the steps took until "
        "nothing was compiled any more (with what Inductor's caches had), *state* counts the low-precision "
        "tensors that a step updates.",
        "Optimizers with Kahan summation (`kahan_sum=True`, `kahan_comp`) are at least as accurate as they "
        "are eagerly with their own term: what two numbers round off stays in it "
        "(`tests/test_self_compensating.py`).",
        "Numbers in brackets say how many times as large the error of plain low precision is. *bytes* are "
        "those of parameters, state and error terms, for each element of the parameters, as the optimizer "
        "holds them in the end. *8 B* and *5.1 B* are errors of the same run with `bytes_per_parameter=8` "
        "and `5.1`, and what it holds then. *refused* says that no budget of the step is that small, or that "
        "the optimizer of a [recorded](limits.md#recorded-steps) step holds more; "
        "those of such steps are from when they packed state. They are measured with one "
        "setting of `foreach`, and with the options that an optimizer is mostly used with; "
        f"{NOT_TRIED} stands elsewhere. Parameters are a matrix of {'×'.join(map(str, SHAPES[0]))}, the "
        f"smallest that is packed, and a vector of {SHAPES[1][0]}, which is too small for that and keeps "
        "state of 16 bits, rounded by dither (of Muon, two matrices).",
        *([OLDER.format(len(older))] if older else []),
        "## Under a budget",
        _budget_table(lines, notes),
        "## torch.optim",
        _summary(ours),
        _table(ours, notes),
    ]
    if others:
        paragraphs += ["## Other packages", _summary(others), _table(others, notes)]
    paragraphs += ["## Notes", "\n".join(f"- [{number}] {note}" for note, number in notes.items())]
    return "\n\n".join(paragraphs) + "\n"


def _summary(lines: Sequence[Line]) -> str:
    """A summary: how many classes do what, with all the options tried."""
    by_class: dict[str, set[str]] = {}
    for line in lines:
        by_class.setdefault(f"{line.package} {line.optimizer}", set()).update(line.outcomes)
    counts = Counter(" or ".join(sorted(outcomes)) for outcomes in by_class.values())
    runs = len(by_class) - counts[UNSUPPORTED]
    text = ", ".join(f"{number} {outcomes}" for outcomes, number in counts.most_common())
    whole = f"{counts[COMPENSATED]} of the {runs} that run at all are compensated with every option tried"
    return f"{len(by_class)} classes: {text}. That is, {whole}."


def _table(lines: Sequence[Line], notes: dict[str, int]) -> str:
    return _tabulated([astuple(line) for line in lines], HEADERS, notes)


def _budget_table(lines: Sequence[Line], notes: dict[str, int]) -> str:
    """The named rows: errors, with plain's as a multiple, and bytes, by default and under budgets."""
    known = {line.key: line for line in lines}
    rows = [
        (
            f"{line.package.split()[0]} {line.optimizer}",
            line.options,
            line.plain,
            *(line.bytes, line.error),
            *(line.bytes_8, line.error_8),
            *(line.bytes_5, line.error_5),
        )
        for line in (known[key] for key in UNDER_A_BUDGET if key in known)
    ]
    headers = ("optimizer", "options", "plain", "default: bytes", "error", "8 B: bytes", "error")
    return _tabulated(rows, (*headers, "5.1 B: bytes", "error"), notes)


def _tabulated(rows: Iterable[Sequence[str]], headers: Sequence[str], notes: dict[str, int]) -> str:
    """A table in whose cells notes are numbers."""

    def numbered(match: re.Match[str]) -> str:
        return f"[{notes.setdefault(match[1], len(notes) + 1)}]"

    cells = [[re.sub(r"\{(.*?)\}", numbered, cell) for cell in row] for row in rows]
    return tabulate(cells, headers=headers, tablefmt="github", disable_numparse=True)


def read(text: str) -> dict[Key, Line]:
    """The lines of a document, by key."""
    notes = dict(re.findall(r"^- \[(\d+)\] (.*)$", text, flags=re.MULTILINE))
    lines = {}
    for row in re.findall(r"^\|(.*)\|$", text, flags=re.MULTILINE):
        cells = [re.sub(r"\[(\d+)\]", lambda m: f"{{{notes[m[1]]}}}", c.strip()) for c in row.split("|")]
        if len(cells) == len(HEADERS) and tuple(cells) != HEADERS and not cells[0].startswith("-"):
            line = Line(*cells)
            lines[line.key] = line
    return lines


def differences(written: Line, measured: Line) -> list[str]:
    """The lines of the document that are not what was measured, apart from noise."""
    found = []
    for cell, header in zip(fields(Line), HEADERS, strict=True):
        old, new = getattr(written, cell.name), getattr(measured, cell.name)
        if old != new and cell.name != "seconds" and not (cell.name in ERRORS and _same_error(old, new)):
            found.append(f"{header}: {old!r} is written, {new!r} was measured")
    return found


def _same_error(old: str, new: str) -> bool:
    if not (_ERROR.match(old) and _ERROR.match(new)) or _ERROR.sub("", old, 1) != _ERROR.sub("", new, 1):
        return False
    low, high = sorted(map(_value, (old, new)))
    return high - low <= WITHIN * high


def _value(error: str) -> float:
    found = _ERROR.match(error)
    assert found is not None, error
    return float(found[1])
