"""What was done to an optimizer's state tensors, and why.

The answer of ``backend.report()`` and ``explain()``.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import sympy
import torch
from tabulate import tabulate
from torch.fx import GraphModule

from collage_fx.program import Kind, Role, StateTensor, StepProgram

__all__ = ["CollageReport", "GraphReport", "TensorReport"]

#: Widest the printed table gets. What is cut there is whole in :class:`TensorReport`.
TABLE_WIDTH = 140
NAME_WIDTH = 40
HEADERS = ("tensor", "shape", "kind", "recurrence", "verdict", "error", "bytes")

SHORT_DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}


@dataclass(frozen=True)
class TensorReport:
    """One state tensor of a step.

    Attributes:
        name: as the user knows it.
        shape, dtype, role: of the tensor.
        kind: ``accumulation``, ``moving average``, ``overwrite`` or ``other``.
        recurrence: ``symbol' = ...``.
        lossy: whether its storage format loses the update.
        reason: the number that says so.
        compensated: whether it has error terms.
        selection: why, or why not.
        error_format: name of the format, or an empty string.
        bytes: of the tensor itself.
        error_bytes: of its error terms.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    role: Role
    kind: Kind
    recurrence: str
    lossy: bool
    reason: str
    compensated: bool
    selection: str
    error_format: str
    bytes: int
    error_bytes: int

    @property
    def numel(self) -> int:
        return self.bytes // self.dtype.itemsize


@dataclass(frozen=True)
class GraphReport:
    """One compilation.

    Attributes:
        before: the graph as captured.
        after: the graph that was lowered.
        subject: whose step it is: the optimizer's class, numbered where a backend serves several, or the
            function's name.
        tensors: its low-precision state tensors.
        wider_bytes: bytes of its float32 and float64 state, which is left alone.
        passes: ``(name, what it did)`` of every pass that ran.
        note: why the graph was lowered as it was, where nothing was rewritten.
    """

    before: GraphModule
    after: GraphModule
    subject: str
    tensors: tuple[TensorReport, ...]
    wider_bytes: int = 0
    passes: tuple[tuple[str, str], ...] = ()
    note: str = ""


@dataclass
class CollageReport:
    """Every compilation of a backend so far. ``str()`` of it is a table.

    Attributes:
        graphs: one per compilation, oldest first.
    """

    graphs: list[GraphReport] = field(default_factory=list)

    @property
    def tensors(self) -> list[TensorReport]:
        """One row per state tensor, as it was treated by the newest compilation that updates it."""
        return [row for rows in self._by_subject().values() for row in rows]

    def _by_subject(self) -> dict[str, list[TensorReport]]:
        newest: dict[str, dict[str, TensorReport]] = {}
        for graph in self.graphs:
            newest.setdefault(graph.subject, {}).update({row.name: row for row in graph.tensors})
        return {subject: list(rows.values()) for subject, rows in newest.items() if rows}

    def bytes_per_parameter(self) -> dict[str, float]:
        """Bytes per element of the low-precision parameters, by what they are for, and in ``total``.

        ``state`` counts the low-precision state; wider state tensors are not collage_fx's to report on, apart
        from their sum in :attr:`GraphReport.wider_bytes`.
        """
        return _bytes_per_parameter(self.tensors)

    def __str__(self) -> str:
        sections = [_section(subject, rows) for subject, rows in self._by_subject().items()]
        notes = list(dict.fromkeys(graph.note for graph in self.graphs if graph.note))
        nothing = "nothing has been compiled yet: the report fills at the first call of the step"
        return "\n\n".join([*sections, *notes]) or nothing


def _section(subject: str, rows: Sequence[TensorReport]) -> str:
    """One subject's heading, table, numbered reasons and totals."""
    reasons: dict[str, int] = {}
    cells = []
    for row in rows:
        mark = reasons.setdefault(_reason(row), len(reasons) + 1)
        cells.append(
            [
                row.name,
                f"{SHORT_DTYPES.get(row.dtype, row.dtype)}[{','.join(map(str, row.shape))}]",
                row.kind.value,
                row.recurrence,
                f"{'lossy' if row.lossy else 'fine'} ({mark})",
                row.error_format or "-",
                f"{row.bytes + row.error_bytes:,}",
            ]
        )
    table = tabulate(
        _fitted(cells),
        headers=HEADERS,
        maxcolwidths=[NAME_WIDTH] + [None] * 6,
        colalign=["left"] * 6 + ["right"],
        disable_numparse=True,
    )
    done = sum(row.compensated for row in rows)
    totals = ", ".join(f"{name} {value:.4g}" for name, value in _bytes_per_parameter(rows).items())
    footer = f"{done} of {len(rows)} tensors have error terms. Bytes per parameter: {totals}."
    return "\n".join([f"{subject}\n", table, "", *_numbered(reasons), "", footer])


def _fitted(cells: list[list[str]]) -> list[list[str]]:
    """The recurrences cut to the room that the other columns leave."""
    column = HEADERS.index("recurrence")
    # tabulate makes a column two characters wider than its header
    widths = [max(len(header) + 2, *map(len, texts)) for header, *texts in zip(HEADERS, *cells, strict=True)]
    widths[0] = min(widths[0], NAME_WIDTH)
    room = max(TABLE_WIDTH - sum(widths) + widths[column] - 2 * (len(widths) - 1), len(HEADERS[column]))
    return [[*row[:column], _shortened(row[column], room), *row[column + 1 :]] for row in cells]


def _reason(row: TensorReport) -> str:
    return f"{row.reason}; {'' if row.compensated else 'no '}error terms ({row.selection})"


def _numbered(reasons: Mapping[str, int]) -> Iterator[str]:
    for reason, number in reasons.items():
        mark = f"({number}) "
        yield textwrap.fill(reason, TABLE_WIDTH, initial_indent=mark, subsequent_indent=" " * len(mark))


def _bytes_per_parameter(rows: Sequence[TensorReport]) -> dict[str, float]:
    parameters = sum(row.numel for row in rows if row.role is Role.PARAMETER)
    sums = {
        "parameters": sum(row.bytes for row in rows if row.role is Role.PARAMETER),
        "state": sum(row.bytes for row in rows if row.role is not Role.PARAMETER),
        "error terms": sum(row.error_bytes for row in rows),
    }
    sums["total"] = sum(sums.values())
    return {name: value / parameters if parameters else 0.0 for name, value in sums.items()}


def tensor_report(program: StepProgram, state: StateTensor) -> TensorReport:
    """The row of one state tensor, free of references to graphs and tensors."""
    assert state.recurrence is not None
    assert state.verdict is not None
    value = state.value
    specs = program.error_format.auxiliaries(value.dtype) if state.compensated else ()
    numel = int(value.numel())
    error_bytes = sum(
        spec.dtype.itemsize * (numel if spec.shape is None else int(torch.Size(spec.shape).numel()))
        for spec in specs
    )
    return TensorReport(
        name=state.info.name,
        shape=tuple(int(size) for size in value.shape),
        dtype=value.dtype,
        role=state.info.role,
        kind=state.recurrence.kind,
        recurrence=f"{state.info.symbol}' = {sympy.sstr(state.recurrence.expression)}",
        lossy=state.verdict.lossy,
        reason=state.verdict.reason,
        compensated=state.compensated,
        selection=state.selection,
        error_format=program.error_format.name if state.compensated else "",
        bytes=numel * value.dtype.itemsize,
        error_bytes=error_bytes,
    )


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"
