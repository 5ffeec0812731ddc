"""The report's rows: what was done to each state tensor, and which tensors were treated alike."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from collage_fx.graph import Kind, Role, StateTensor
from collage_fx.numerics import short_name
from collage_fx.torch_compat import current_size


@dataclass(frozen=True)
class TensorReport:
    """A row of the report: one state tensor of a step.

    Attributes:
        name: as the user knows it.
        symbol: what it is in recurrences: ``p`` for a parameter, else such as ``exp_avg``.
        shape, dtype, role: of the tensor; of sizes that change, those that it was compiled for.
        kind: ``accumulation``, ``moving average``, ``overwrite`` or ``other``.
        expression: the new value; other state tensors' new values appear as primed symbols.
        lossy: whether its storage format loses the update where it is rounded to nearest.
        reason: the number that says so.
        compensated: whether it has error terms.
        selection: why, or why not.
        error_format: name of the format in which it is stored, or an empty string.
        packed: whether that format is all that is kept of it.
        bytes: of the tensor itself, or of what its format keeps in its place.
        error_bytes: of what the format keeps beside it.
        inputs: names of the graph inputs that it and its error terms are.
    """

    name: str
    symbol: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    role: Role
    kind: Kind
    expression: sympy.Expr
    lossy: bool
    reason: str
    compensated: bool
    selection: str
    error_format: str
    packed: bool
    bytes: int
    error_bytes: int
    inputs: tuple[str, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def recurrence(self) -> str:
        """The equation ``symbol' = expression`` as text."""
        return f"{self.symbol}' = {sympy.sstr(self.expression)}"

    @property
    def why(self) -> str:
        """The reasons for the verdict and for the selection, in one line."""
        treated = "packed" if self.packed else "error terms" if self.compensated else "no error terms"
        return f"{self.reason}; {treated} ({self.selection})"


def tensor_report(state: StateTensor) -> TensorReport:
    """The row of one state tensor, free of references to graphs and tensors."""
    value = state.value
    shape = tuple(map(current_size, value.shape))
    like = torch.empty(shape, dtype=value.dtype, device="meta")  # of numbers where those of value are symbols
    fmt = state.chosen_format
    is_dithered = fmt is not None and fmt.is_dithered
    return TensorReport(
        name=state.info.name,
        symbol=state.info.symbol,
        shape=shape,
        dtype=value.dtype,
        role=state.info.role,
        kind=state.recurrence.kind,
        expression=_readable(state.recurrence.expression),
        lossy=state.verdict.lossy,
        reason=state.verdict.reason + (", rounded to nearest" if is_dithered else ""),
        compensated=state.compensated,
        selection=state.selection,
        error_format="" if fmt is None else fmt.name,
        packed=state.packed,
        bytes=state.error_format.nbytes(like) if state.packed else like.nbytes,
        error_bytes=0 if fmt is None or state.packed else fmt.nbytes(like),
        inputs=(state.placeholder.name, *(node.name for node in state.added)),
    )


def _readable(expression: sympy.Expr) -> sympy.Expr:
    """An expression whose computed numbers are shortened like those of the graph: 1/3e-4 is 3333.33."""
    numbers = expression.atoms(sympy.Float)
    return expression.xreplace({number: sympy.Float(f"{float(number):.6g}") for number in numbers})


@dataclass(frozen=True)
class Treatment:
    """Tensors that differ in name and shape alone: what holds for one of them holds for all."""

    rows: tuple[TensorReport, ...]

    @property
    def example(self) -> TensorReport:
        return self.rows[0]

    @property
    def what(self) -> str:
        """The tensor's name, or number and kind of several: ``148 parameters``, ``148 × exp_avg``."""
        return self.example.name if len(self.rows) == 1 else self.counted

    @property
    def counted(self) -> str:
        """The number and kind of the tensors, as in ``1 parameter``."""
        number = len(self.rows)
        if self.example.role is Role.PARAMETER:
            return f"{number} parameter{'s' * (number > 1)}"
        return f"{number} × {self.example.symbol}"

    @property
    def layout(self) -> str:
        """Data type and shape, or the number of elements in all where shapes differ."""
        dtype = short_name(self.example.dtype)
        if len({row.shape for row in self.rows}) == 1:
            return f"{dtype}[{','.join(map(str, self.example.shape))}]"
        return f"{sum(row.numel for row in self.rows):,} {dtype}"

    @property
    def bytes(self) -> int:
        """The bytes of the tensors and of their error terms."""
        return sum(row.bytes + row.error_bytes for row in self.rows)

    @property
    def names(self) -> list[str]:
        """The tensors' names, those that differ in numbers alone as one: ``blocks.*.mlp.weight``."""
        patterns: dict[str, list[str]] = {}
        for row in self.rows:
            patterns.setdefault(re.sub(r"\d+", "*", row.name), []).append(row.name)
        return [pattern if len(names) > 1 else names[0] for pattern, names in patterns.items()]


def treatments(rows: Iterable[TensorReport]) -> list[Treatment]:
    """Groups of equal treatment, in the order of their first tensors."""
    groups: dict[Any, list[TensorReport]] = {}
    for row in rows:
        groups.setdefault(_treatment(row), []).append(row)
    return [Treatment(tuple(group)) for group in groups.values()]


def _treatment(row: TensorReport) -> tuple[Any, ...]:
    return (
        *(row.dtype, row.role, row.symbol, row.kind, row.expression, row.lossy, row.reason),
        *(row.compensated, row.selection, row.error_format),
    )


def bytes_per_parameter(rows: Sequence[TensorReport]) -> dict[str, float]:
    """Bytes per element of the low-precision parameters, by what they are for, and in ``total``.

    Of gradients, which some steps overwrite, the error terms alone.
    """
    bytes_of = dict.fromkeys(Role, 0)
    for row in rows:
        bytes_of[row.role] += row.bytes
    parameters = sum(row.numel for row in rows if row.role is Role.PARAMETER)
    sums = {
        "parameters": bytes_of.pop(Role.PARAMETER),
        "state": sum(bytes_of.values()) - bytes_of[Role.GRADIENT],
        "error terms": sum(row.error_bytes for row in rows),
    }
    sums["total"] = sum(sums.values())
    return {name: value / parameters if parameters else 0.0 for name, value in sums.items()}
