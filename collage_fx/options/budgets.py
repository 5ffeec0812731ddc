"""Budgets: the options that are chosen for a limit on the bytes of a parameter and its state.

Note [The order of budgets]
---------------------------
The bytes of each combination of options in :data:`BUDGETS` are computed for the captured step. The place in
the table says how precise a combination is. The order is that of the study in docs/formats.md: the geometric
mean of the errors measured for AdamW with beta2 = 0.999, three learning rates and two sizes of weights. The
study has no ``byte`` with ``"block16"``, ``"plus"`` or ``"full"``. These stand just before ``byte`` with
dithered state, as most of the error is that of the parameters there. One order for all is an approximation:
weights of 1 with a learning rate of 1e-5, for example, lose more by ``byte`` than by ``"block8"``.

A recorded step is compiled in parts, before all of its state is known, and packs nothing. Its budget is that
of a step which keeps two averages of gradients for each parameter, as Adam does. If it turns out to hold more
than the limit, it is refused after its first step.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import get_args

import torch
from functorch import make_fx
from torch import Tensor

from collage_fx.choices import Strategy
from collage_fx.errors import InvalidOptionError
from collage_fx.graph import InputInfo, Role, StepProgram, copy_of, placeholders, tensor_value
from collage_fx.numerics import ERROR_FORMATS, PACKED_FORMATS, WEIGHT_FORMATS, ErrorFormat, is_low_precision
from collage_fx.pipeline import Pass, run_pipeline, up_to_choosing

#: Share of the limit that a budget may exceed it by, for counts and tensors that are not packed.
TOLERANCE = 0.015


@dataclass(frozen=True)
class Budget:
    """Options of a backend, and the bytes that a step takes with them."""

    strategy: Strategy
    error_format: str
    state: str | None = None
    bytes: float = 0.0  # for each element of the parameters; 0 in :data:`BUDGETS`
    not_packed: str = ""  # the state with most bytes that is not packed although ``state`` is given, and why
    weights: str | None = None

    def is_within(self, limit: float) -> bool:
        """Return whether the bytes are within a limit."""
        return self.bytes <= limit * (1 + TOLERANCE)

    @property
    def formats(self) -> set[str]:
        """Names of the formats of tensors that are updated."""
        return {self.error_format, self.weights or self.error_format}

    @property
    def of_parameters(self) -> ErrorFormat:
        """Format of parameters, as far as their rows allow it."""
        return ERROR_FORMATS[self.error_format] if self.weights is None else WEIGHT_FORMATS[self.weights]

    def applied_to(self, program: StepProgram) -> StepProgram:
        """Return the program with these options."""
        packed = None if self.state is None else PACKED_FORMATS[self.state]
        fmt = ERROR_FORMATS[self.error_format]
        weights = None if self.weights is None else WEIGHT_FORMATS[self.weights]
        return replace(program, strategy=self.strategy, error_format=fmt, packed=packed, weights=weights)

    def rank(self) -> int:
        """Index in :data:`BUDGETS`: the smaller, the more precise."""
        return BUDGETS.index(replace(self, bytes=0.0, not_packed=""))

    def __str__(self) -> str:
        packed = (("state", self.state), ("weights", self.weights))
        given = "".join(f", {name}={value!r}" for name, value in packed if value is not None)
        return f"strategy={self.strategy!r}, error_format={self.error_format!r}{given}"


#: Combinations of options, the most precise first: Note [The order of budgets]. Other state is dithered.
BUDGETS = (
    Budget("full", "exact"),
    Budget("light", "exact", "block16"),
    Budget("plus", "exact"),
    Budget("plus", "exact", "bf16"),
    Budget("light", "exact"),
    Budget("light", "exact", "bf16"),
    Budget("full", "byte"),
    Budget("light", "byte", "block16"),
    Budget("plus", "byte"),
    Budget("light", "byte"),
    Budget("light", "byte", "bf16"),
    Budget("light", "exact", "block8"),
    Budget("light", "byte", "block8"),
    Budget("light", "byte", "block8", weights="int16x32"),
)


def budgets_for(program: StepProgram, pipeline: Sequence[Pass]) -> list[Budget]:
    """Compute the bytes of each budget for a step as captured, before any pass; the smallest comes first."""
    trial = replace(program, gm=copy_of(program.gm), rounding="repay")
    preparation, choosing = up_to_choosing(pipeline)
    found = []
    with torch.no_grad():
        run_pipeline(trial, preparation)
        for budget in BUDGETS:
            trial = budget.applied_to(trial)
            run_pipeline(trial, choosing)
            found.append(replace(budget, bytes=_bytes(trial), not_packed=_not_packed(trial)))
    return sorted(found, key=lambda budget: (budget.bytes, budget.rank()))


@functools.cache
def budgets_for_parts(dtype: torch.dtype, pipeline: tuple[Pass, ...]) -> tuple[Budget, ...]:
    """Return the budgets for the parts of a recorded step on parameters of ``dtype``: Adam's, unpacked."""

    def adam(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
        moment, square = m * 0.9 + g * 0.1, v * 0.999 + g * g * 0.001
        p.copy_(p - moment / (square.sqrt() + 1e-8) * 1e-3)
        m.copy_(moment)
        v.copy_(square)

    inputs = [torch.empty(256, 256, dtype=dtype) for _ in range(4)]
    roles = (Role.PARAMETER, Role.GRADIENT, Role.STATE, Role.STATE)
    infos = [InputInfo(name, name, role) for name, role in zip("pgmv", roles, strict=True)]
    gm = make_fx(adam, tracing_mode="fake")(*inputs)
    program = StepProgram(gm, infos, "light", "wide", ERROR_FORMATS["exact"])
    return tuple(each for each in budgets_for(program, pipeline) if not (each.state or each.weights))


def best_budget(budgets: Sequence[Budget], limit: float, others: str = "") -> Budget:
    """Return the most precise of some budgets, the smallest first, within a limit on bytes per parameter.

    ``others`` names optimizers that have chosen their budget for the same parameters before.

    Raises:
        InvalidOptionError: no budget is that small.
    """
    within = [budget for budget in frontier(budgets) if budget.is_within(limit)]
    if not within:
        least = budgets[0]
        equal = (budget.not_packed for budget in budgets if budget.bytes == least.bytes)
        why = next((f" ({each})" for each in equal if each), "")
        remedy = f"give it {least.bytes:.3g}{why}; strategy='none' takes what the optimizer makes"
        raise InvalidOptionError(
            f"bytes_per_parameter={limit:g}, where this step takes {least.bytes:.3g} at least"
            + (f", with what {others} holds for the same parameters" if others else ""),
            where="bytes_per_parameter",
            remedy="give strategy and error_format in its place" if others else remedy,
        )
    return within[-1]


def frontier(budgets: Sequence[Budget]) -> list[Budget]:
    """Return the budgets, of some with the smallest first, that are more precise than each of no more bytes.

    Two of as many bytes for the same error format treat all tensors alike: the simpler stands for both.
    """
    alike: dict[tuple[float, str], list[Budget]] = defaultdict(list)
    for budget in budgets:
        alike[budget.bytes, budget.error_format].append(budget)
    best, least, strategies = [], len(BUDGETS), get_args(Strategy)
    for group in sorted(alike.values(), key=lambda group: (group[0].bytes, min(map(Budget.rank, group)))):
        rank = min(map(Budget.rank, group))
        if rank < least:
            simplest = min(group, key=lambda each: (each.state is not None, strategies.index(each.strategy)))
            best.append(simplest)
            least = rank
    return best


def _other_state(program: StepProgram) -> int:
    """Sum the bytes of state that no budget changes: wider, or only read. It is not in ``program.states``.

    State of float64 parameters is not counted, and neither are numbers (0-d).
    """
    counted = {state.position for state in program.states}
    inputs = [
        (program.infos[copy], i, value)
        for i, node in enumerate(placeholders(program.gm.graph))
        if i not in counted and (value := tensor_value(node)) is not None and value.dim()
        for copy in program.repetition.copies[i]
    ]
    parameters = ((info.name, value) for info, _, value in inputs if info.role is Role.PARAMETER)
    wider = {name for name, value in parameters if not is_low_precision(value.dtype)}
    return sum(
        value.nbytes + (program.error_format.nbytes(value) if i in program.already_compensated else 0)
        for info, i, value in inputs
        if info.role is Role.STATE and wider.isdisjoint(accumulate(info.name.split("."), "{}.{}".format))
    )


def _bytes(program: StepProgram) -> float:
    """Compute the bytes for each element of the low-precision and float32 parameters.

    Gradients, which some steps overwrite, count with their error terms alone.
    """
    elements, held = 0, _other_state(program)
    for state in program.states:
        copies, value = len(program.repetition.copies[state.position]), state.value
        own, beside = state.nbytes(value)
        held += copies * (beside if state.info.role is Role.GRADIENT else own + beside)
        elements += copies * value.numel() * (state.info.role is Role.PARAMETER)
    return held / elements if elements else 0.0


def _not_packed(program: StepProgram) -> str:
    """Describe the state with most bytes that is not packed, and why; empty if there is none."""
    held = Counter[str]()
    for state in program.states:
        if state.not_packed:
            left = f"{state.info.symbol} is not packed: {state.not_packed}"
            held[left] += len(program.repetition.copies[state.position]) * state.value.nbytes
    return max(held, key=held.__getitem__, default="")
