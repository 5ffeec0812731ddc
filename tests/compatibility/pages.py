"""The pages of measured optimizers: a short one with the answer, and one with a row for each class."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tabulate import tabulate

from collage_tools.audit import COMPENSATED, FAILED, REFUSED, UNSUPPORTED
from tests.compatibility.catalog import BEFORE_SAVED, OTHER_SHAPES, SHAPES, STEPS
from tests.compatibility.table import NOT_TRIED, Key, Line, error_in, is_good

__all__ = ["NO", "REMARK", "UNDER_A_BUDGET", "WORKS", "Subject", "answer", "details", "subjects"]

#: Results of a class, as columns of the first table.
WORKS, REMARK, NO = "works", "works, with a remark", "refused, or fails"

#: Lines of the second table.
UNDER_A_BUDGET: tuple[Key, ...] = (
    ("torch", "AdamW", "defaults", "bf16"),
    ("torch", "Adagrad", "defaults", "bf16"),
    ("torch", "RMSprop", "centered=True", "bf16"),
    ("torch", "Adam", "amsgrad=True", "bf16"),
    ("torch", "Muon", "defaults", "bf16"),
    ("torch", "Adafactor", "defaults", "bf16"),
    ("lion-pytorch", "Lion", "defaults", "bf16"),
    ("prodigyopt", "Prodigy", "defaults", "bf16"),
    ("torch-optimi", "Adan", "kahan_sum=False", "bf16"),
)

ANSWER = """\
# Does it work with my optimizer?

Very likely. `collage_fx.install(opt)` takes any `torch.optim.Optimizer`: it is compiled, not replaced. Of
{count} measured classes, {works} work, {remarks} work with a remark, and {no} do not. *Works* means: all
parameters are compensated with every option that was tried, and where plain bfloat16 loses much, at most a
tenth of that loss is left.

{table}

{notes}

Your optimizer is not here? `collage-fx audit --optimizer package.Class --lr 1e-4`: half a minute
([audit](audit.md)). Each class has a row in [every optimizer, measured](compatibility-rows.md). The options
and dtypes of each, {lines} combinations, are in `tests/compatibility/measured.json`.

## What does a budget cost?

*error* compares the weights with a float64 run of the same gradients: 1 is as good as not moving at all. In
brackets are the bytes for each parameter: weight, state and error terms.

{budgets}

"≥ 7.01 B" means that this optimizer cannot take fewer bytes: an error says so before the first step, or after
it if the step is [recorded](limits.md#recorded-steps).

## Which dtypes?

Parameters, gradients and state may each be bfloat16, float16 or float32. All 27 combinations are
[measured](compatibility-rows.md#dtypes-of-parameter-gradient-and-state) for each dense optimizer of
torch.optim.

Written by `./dev compat` with torch {torch} on {machine}."""

DETAILS = """\
# Every optimizer, measured

[The short answer](compatibility.md) comes first. Here is a row for each class.

Each measurement is {steps} steps of an unmodified optimizer after `collage_fx.install(opt)`, from weights
N(0, 1). The learning rate moves weights by 1e-5 to 1e-4 a step, which plain bfloat16 mostly loses.

- *error*: ‖Δ − Δ64‖ / ‖Δ64‖, the largest of all options and dtypes. Δ is how far the parameters went, Δ64 how
  far they go in float64 with the same gradients. 0 is perfect, 1 is as good as not moving. *plain* is eager
  bfloat16.
- *bytes* in brackets: parameters, state and error terms, for each parameter.
- *8 B*, *5.1 B*: the same with `bytes_per_parameter=8` and `5.1`, with the default options. "≥ 6 B": no
  smaller budget is accepted. {not_tried} means not measured.
- *other shapes*: the largest error of one parameter, on three each of {others} (those that the class takes in
  plain PyTorch).
- A run that is saved after {saved} steps, written to a file and loaded into new parameters and a new
  optimizer goes on with the same bits, unless a note says otherwise.
- Numbers such as [1] are notes of [the short answer](compatibility.md).
- Parameters are a matrix of {matrix} (the smallest that is packed) and a vector of {vector}, which keeps
  16-bit state; for Muon two matrices.

Optimizers with Kahan summation (`kahan_sum=True`) are at least as accurate as they are eagerly with their
own term.

{table}

Written by `./dev compat` with torch {torch} on {machine}."""


@dataclass
class Notes:
    """Texts of notes, with their numbers."""

    numbers: dict[str, int] = field(default_factory=dict)

    def mark(self, subject: Subject) -> str:
        """Return the mark of a class's remarks, such as `` [1]``; nothing for a class without remarks."""
        text = "; ".join(subject.remarks)
        return f" [{self.numbers.setdefault(text, len(self.numbers) + 1)}]" if text else ""

    def __str__(self) -> str:
        return "\n".join(f"- [{number}] {text}" for text, number in self.numbers.items())


@dataclass(frozen=True)
class Subject:
    """A class, with all its lines."""

    lines: tuple[Line, ...]

    @property
    def package(self) -> str:
        return self.lines[0].package

    @property
    def name(self) -> str:
        return self.lines[0].optimizer

    @property
    def remarks(self) -> list[str]:
        """Remarks in plain words, equal for lines that differ in names of nodes alone."""
        before = "without collage_fx, too: " if self.outcomes == {UNSUPPORTED} else ""
        notes = [note for line in self.lines for note in re.findall(r"\{(.*?)\}", line.outcome)]
        found = [before + _plain(note) for note in notes if not re.fullmatch(r"\d+ steps", note)]
        if not found and any(line.falls_short for line in self.lines):
            found = [f"float32 parameters are off by {self.lines[0].single}, too"]
        for name, where in (("other_shapes", "on other shapes"), ("resumed", "a resumed run")):
            for cell in filter(_is_bad, self._cells(name)):
                words = _words(cell)
                for reason in found:
                    words = words.replace(f"({reason.removeprefix(before)})", "for the same reason")
                found.append(f"{where}: {words}")
        return list(dict.fromkeys(found))

    def _cells(self, name: str) -> list[str]:
        return [getattr(line, name) for line in self.lines]

    @property
    def other_shapes(self) -> str:
        """Largest error on other shapes, or the outcome where there is no error."""
        cells = self._cells("other_shapes")
        return _cell(max(cells, key=lambda cell: (_is_bad(cell), error_in(cell))), "")

    @property
    def outcomes(self) -> set[str]:
        return {outcome for line in self.lines for outcome in line.outcomes}

    @property
    def result(self) -> str:
        if self.outcomes <= {REFUSED, FAILED, UNSUPPORTED}:
            return NO
        return REMARK if self.outcomes != {COMPENSATED} or self.remarks else WORKS


def _is_bad(cell: str) -> bool:
    """Return whether a check has been tried, and its cell is not as it should be."""
    return cell != NOT_TRIED and not is_good(cell)


def _words(cell: str) -> str:
    """Return a cell of a check as a remark."""
    outcome = re.sub(r"^[<\d.e+-]+ ?[\d.]*( ?\([^)]*×\))? ?", "", cell)
    return re.sub(r"\{(.*?)\}", lambda found: f"({_plain(found[1])})", outcome)


def _plain(note: str) -> str:
    """Return a note without what depends on a node, and without the way out, which the error's page has."""
    text = note.partition(" where: ")[0].removeprefix("collage_fx: ")
    text = re.sub(
        r"^\w+ \(aten\.(\w+)\.\w+\) reads it .*",
        r"the step's `\1` reads some state rounded to bfloat16",
        text,
    )
    text = re.sub(r"^(\w+Error): ", "", text)
    return re.sub(r" \([\w.()]+\)$", "", text)


def subjects(lines: Iterable[Line]) -> list[Subject]:
    """Return all classes, in the order of the lines."""
    found: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        found.setdefault((line.package, line.optimizer), []).append(line)
    return [Subject(tuple(each)) for each in found.values()]


def _notes(every: Sequence[Subject]) -> Notes:
    """Return the notes of all classes, numbered in the order of the page with the answer."""
    notes = Notes()
    for package in dict.fromkeys(each.package for each in every):
        for result in (REMARK, NO):
            for each in every:
                if (each.package, each.result) == (package, result):
                    notes.mark(each)
    return notes


def answer(lines: Mapping[Key, Line], about: Mapping[str, str]) -> str:
    """Return the page with the answer.

    Args:
        lines: all lines, by key.
        about: the version of torch and the machine.
    """
    every = subjects(lines.values())
    by_result = {result: [each for each in every if each.result == result] for result in (WORKS, REMARK, NO)}
    notes = _notes(every)
    rows = []
    for package in dict.fromkeys(each.package for each in every):
        cells = [
            ", ".join(
                each.name + ("" if result == WORKS else notes.mark(each))
                for each in found
                if each.package == package
            )
            for result, found in by_result.items()
        ]
        rows.append((package, *cells))
    known = (lines[key] for key in UNDER_A_BUDGET if key in lines)
    return ANSWER.format(
        count=len(every),
        packages=len(rows),
        works=len(by_result[WORKS]),
        remarks=len(by_result[REMARK]),
        no=len(by_result[NO]),
        table=_table(("package", WORKS, REMARK, NO), rows),
        notes=notes,
        lines=len(lines),
        budgets=_table(
            ("optimizer", "plain bf16", "default", "8 B", "5.1 B"),
            [(_named(line), line.plain, *_errors(line)) for line in known],
        ),
        **about,
    )


def _named(line: Line) -> str:
    name = f"{line.package.split()[0]} {line.optimizer}"
    return name if line.options == "defaults" else f"{name}, `{line.options}`"


def details(lines: Iterable[Line], about: Mapping[str, str]) -> str:
    """Return the page with a row for each class, without its section on dtypes."""
    every = subjects(lines)
    notes = _notes(every)
    rows = []
    for package in dict.fromkeys(each.package for each in every):
        rows.append((f"**{package}**", *[""] * 5))
        for each in (each for each in every if each.package == package):
            worst = max(each.lines, key=lambda line: (line.error_value, line.outcome))
            _, *budgets = _errors(each.lines[0])
            name = each.name + ("" if each.result == WORKS else notes.mark(each))
            rows.append((name, worst.plain, _errors(worst)[0], *budgets, each.other_shapes))
    headers = ("class", "plain", "default", "8 B", "5.1 B", "other shapes")
    return DETAILS.format(
        steps=STEPS,
        matrix="×".join(map(str, SHAPES[0])),
        vector=SHAPES[1][0],
        not_tried=NOT_TRIED,
        others=", ".join("×".join(map(str, shape)) or "a scalar" for shape in dict.fromkeys(OTHER_SHAPES)),
        saved=BEFORE_SAVED,
        table=_table(headers, rows),
        **about,
    )


def _errors(line: Line) -> tuple[str, str, str]:
    """Return cells of an error and its bytes: by default, within 8 and within 5.1 bytes."""
    return (
        _cell(line.error, line.bytes),
        _cell(line.error_8, line.bytes_8),
        _cell(line.error_5, line.bytes_5),
    )


def _cell(error: str, held: str) -> str:
    least = re.search(r"(?:takes|holds) ([\d.]+)", error)
    if error.startswith(REFUSED) and least:
        return f"≥ {least[1]} B"
    number = re.sub(r" ?\([^)]*×\)| ?\{.*?\}", "", error).replace("< 0.001", "<0.001")
    return f"{number} ({held} B)" if held and held != NOT_TRIED else number or NOT_TRIED


def _table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    return tabulate(list(rows), headers=headers, tablefmt="github", disable_numparse=True)
