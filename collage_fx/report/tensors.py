"""Rows of the report: the treatment of each state tensor, and groups of equal treatment."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import sympy
import torch

from collage_fx.graph import Kind, Role, StateTensor
from collage_fx.numerics import short_name
from collage_fx.torch_compat import current_size


@dataclass(frozen=True)
class TensorReport:
    """Row of the report for one state tensor of a step.

    Attributes:
        name: name that the user knows.
        symbol: name in recurrences: ``p`` for a parameter, or such as ``exp_avg``.
        shape, dtype, role: properties of the tensor. Sizes that change are from this compilation.
        kind: ``accumulation``, ``moving average``, ``overwrite`` or ``other``.
        expression: new value; new values of other state tensors are primed symbols.
        lossy: whether the storage format loses the update when it is rounded to nearest.
        reason: number behind ``lossy``, in words.
        compensated: whether the tensor has error terms.
        selection: why the tensor has error terms or is packed, or why not.
        error_format: name of the format that the tensor is stored in; empty if it has none.
        packed: whether the format keeps no hi.
        is_repaid: whether each update makes up for the rounding of the tensor.
        bytes: bytes of the tensor, or of its packed form.
        error_bytes: bytes of the auxiliaries beside the tensor.
        inputs: names of the graph inputs of the tensor and its auxiliaries.
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
    is_repaid: bool
    bytes: int
    error_bytes: int
    inputs: tuple[str, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def recurrence(self) -> str:
        """Equation ``symbol' = expression`` as text."""
        return f"{self.symbol}' = {sympy.sstr(self.expression)}"

    def with_symbols(self, symbols: Mapping[str, str]) -> TensorReport:
        """Return the row with symbols of the recurrence renamed: old names to new names."""
        renamed = {sympy.Symbol(old): sympy.Symbol(new) for old, new in symbols.items()}
        return replace(self, expression=self.expression.xreplace(renamed)) if renamed else self

    @property
    def verdict(self) -> str:
        """Verdict on the storage format alone: ``loses updates``, ``loses little`` or ``fine``."""
        little = self.dtype == torch.float32
        return "loses little" if self.lossy and little else "loses updates" if self.lossy else "fine"

    @property
    def here(self) -> str:
        """Format that the tensor is stored in, or the verdict if it is stored as without this package."""
        return self.error_format or self.verdict

    @property
    def why(self) -> str:
        """Reasons for the verdict on the storage format alone, and for the treatment here, in one line."""
        treated = "packed" if self.packed else "error terms" if self.compensated else "no error terms"
        return f"plain {short_name(self.dtype)}: {self.reason}; here: {treated} ({self.selection})"


def tensor_report(state: StateTensor, shape: Sequence[int] | None = None) -> TensorReport:
    """Make the row of a state tensor, or of another member of its family, without graphs and tensors."""
    value = state.value
    shape = tuple(map(current_size, shape or value.shape))
    like = torch.empty(shape, dtype=value.dtype, device="meta")  # sizes of value may be symbols
    own, beside = state.nbytes(like)
    expression = state.recurrence.expression
    rounded = {each: sympy.Float(f"{float(each):.6g}") for each in expression.atoms(sympy.Float)}
    return TensorReport(
        name=state.info.name,
        symbol=state.info.symbol,
        shape=shape,
        dtype=value.dtype,
        role=state.info.role,
        kind=state.recurrence.kind,
        expression=expression.xreplace(rounded),  # 1/3e-4 is 3333.33
        lossy=state.verdict.lossy,
        reason=state.verdict.reason,
        compensated=state.compensated,
        selection=state.selection,
        error_format="" if state.chosen_format is None else state.chosen_format.name,
        packed=state.packed,
        is_repaid=bool(state.rounded),
        bytes=own,
        error_bytes=beside,
        inputs=(state.placeholder.name, *(node.name for node in state.added_inputs)),
    )


@dataclass(frozen=True)
class Treatment:
    """Tensors with the same treatment, which differ only in name and shape."""

    rows: tuple[TensorReport, ...]

    @property
    def example(self) -> TensorReport:
        return self.rows[0]

    @property
    def what(self) -> str:
        """Name of the tensor, or number and kind of several: ``148 parameters``, ``148 × exp_avg``."""
        return self.example.name if len(self.rows) == 1 else self.counted

    @property
    def counted(self) -> str:
        """Number and kind of the tensors, as in ``1 parameter``."""
        number = len(self.rows)
        if self.example.role is Role.PARAMETER:
            return f"{number} parameter{'s' * (number > 1)}"
        return f"{number} × {self.example.symbol}"

    @property
    def layout(self) -> str:
        """Data type and shape; the number of all elements if shapes differ."""
        dtype = short_name(self.example.dtype)
        if len({row.shape for row in self.rows}) == 1:
            return f"{dtype}[{','.join(map(str, self.example.shape))}]"
        return f"{sum(row.numel for row in self.rows):,} {dtype}"

    @property
    def bytes(self) -> int:
        """Bytes of the tensors and their error terms."""
        return sum(row.bytes + row.error_bytes for row in self.rows)

    @property
    def names(self) -> list[str]:
        """Names of the tensors; numbers that differ are replaced by ``*``: ``blocks.*.mlp.weight``."""
        patterns: dict[str, list[str]] = {}
        for row in self.rows:
            patterns.setdefault(re.sub(r"\d+", "*", row.name), []).append(row.name)
        return [pattern if len(names) > 1 else names[0] for pattern, names in patterns.items()]


def treatments(rows: Iterable[TensorReport]) -> list[Treatment]:
    """Group rows by equal treatment, in the order of their first tensors."""
    groups = defaultdict[Any, list[TensorReport]](list)
    for row in rows:
        groups[_treatment(row)].append(row)
    return [Treatment(tuple(group)) for group in groups.values()]


_treatment = attrgetter(
    *("dtype", "role", "symbol", "kind", "expression", "lossy", "reason"),
    *("compensated", "selection", "error_format"),
)


def treated(rows: Sequence[TensorReport]) -> str:
    """Count rows by treatment: ``148 parameters compensated, 2.0 extra bytes/param``."""
    counts = defaultdict[Any, list[TensorReport]](list)
    for row in rows:
        if row.compensated:
            counts[row.role, row.symbol].append(row)
    done = [Treatment(tuple(rows)).counted for rows in counts.values()]
    packed = sum(row.packed for row in rows)
    also = [f"{packed} state tensors packed"] if packed else []
    if done or not packed:
        listed = " and ".join([", ".join(done[:-1]), done[-1]] if len(done) > 1 else done) or "nothing"
        extra = bytes_per_parameter(rows)["error terms"]
        cost = [f"{extra:.1f} extra bytes/param"] if extra > 0 else []
        also = [f"{listed} compensated", *cost, *also]
    return ", ".join(also)


def bytes_per_parameter(rows: Sequence[TensorReport], other_state: int = 0) -> dict[str, float]:
    """Compute bytes per element of low-precision parameters: parameters, state, error terms, and total.

    Gradients count with their error terms alone; ``other_state`` is the bytes of state without rows.
    """
    bytes_of = dict.fromkeys(Role, 0)
    for row in rows:
        bytes_of[row.role] += row.bytes
    parameters = sum(row.numel for row in rows if row.role is Role.PARAMETER)
    sums = {
        "parameters": bytes_of.pop(Role.PARAMETER),
        "state": sum(bytes_of.values()) - bytes_of[Role.GRADIENT] + other_state,
        "error terms": sum(row.error_bytes for row in rows),
    }
    sums["total"] = sum(sums.values())
    return {name: value / parameters if parameters else math.nan for name, value in sums.items()}
