"""What was done to an optimizer's state tensors, and why: the answer of ``backend.report()`` and ``explain()``."""

from __future__ import annotations

from dataclasses import dataclass, field

import sympy
import torch
from tabulate import tabulate
from torch.fx import GraphModule

from collage_fx.program import Kind, Role, StateTensor, StepProgram

__all__ = ["CollageReport", "GraphReport", "TensorReport"]

#: Longest recurrence printed in the table; the whole of it is in :attr:`TensorReport.recurrence`.
RECURRENCE_WIDTH = 60


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
        tensors: its low-precision state tensors.
        wider_bytes: bytes of its float32 and float64 state, which is left alone.
        passes: ``(name, what it did)`` of every pass that ran.
        note: why the graph was lowered as it was, where nothing was rewritten.
    """

    before: GraphModule
    after: GraphModule
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
        newest = {row.name: row for graph in self.graphs for row in graph.tensors}
        return list(newest.values())

    def bytes_per_parameter(self) -> dict[str, float]:
        """Bytes per element of the low-precision parameters: ``parameters``, ``state``, ``error terms`` and ``total``.

        ``state`` counts the low-precision state; wider state tensors are not collage_fx's to report on, apart from their
        sum in :attr:`GraphReport.wider_bytes`.
        """
        rows = self.tensors
        parameters = sum(row.numel for row in rows if row.role is Role.PARAMETER)
        sums = {
            "parameters": sum(row.bytes for row in rows if row.role is Role.PARAMETER),
            "state": sum(row.bytes for row in rows if row.role is not Role.PARAMETER),
            "error terms": sum(row.error_bytes for row in rows),
        }
        sums["total"] = sum(sums.values())
        return {name: value / parameters if parameters else 0.0 for name, value in sums.items()}

    def __str__(self) -> str:
        rows = self.tensors
        if not rows:
            notes = {graph.note for graph in self.graphs if graph.note}
            return "\n".join(notes) or "nothing has been compiled yet: the report fills at the first call of the step"
        table = tabulate(
            [
                [
                    row.name,
                    "×".join(map(str, row.shape)) or "scalar",
                    str(row.dtype).removeprefix("torch."),
                    row.kind.value,
                    _shortened(row.recurrence),
                    "lossy" if row.lossy else "fine",
                    row.reason,
                    row.error_format or "-",
                    row.selection,
                    row.bytes + row.error_bytes,
                ]
                for row in rows
            ],
            headers=["tensor", "shape", "dtype", "kind", "recurrence", "verdict", "because", "error", "selected", "bytes"],
            maxcolwidths=[36, None, None, None, 36, None, 34, None, 26, None],
        )
        totals = ", ".join(f"{name} {value:.2f}" for name, value in self.bytes_per_parameter().items())
        done = sum(row.compensated for row in rows)
        return f"{table}\n\n{done} of {len(rows)} tensors compensated; bytes per parameter: {totals}"


def tensor_report(program: StepProgram, state: StateTensor) -> TensorReport:
    """The row of one state tensor, free of references to graphs and tensors."""
    assert state.recurrence is not None and state.verdict is not None
    value = state.value
    specs = program.error_format.auxiliaries(value.dtype) if state.compensated else ()
    numel = int(value.numel())
    error_bytes = sum(
        spec.dtype.itemsize * (numel if spec.shape is None else int(torch.Size(spec.shape).numel())) for spec in specs
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


def _shortened(text: str) -> str:
    return text if len(text) <= RECURRENCE_WIDTH else f"{text[: RECURRENCE_WIDTH - 1]}…"
