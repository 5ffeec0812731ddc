"""Plans: what to keep of a step's tensors within so many bytes, with the least error that can be predicted.

Note [The error of a plan]
--------------------------
Of each state tensor: the relative noise, root mean square, that storing it leaves in the long run. It follows
from the recurrence (``Verdict.noise``, of dither) and grows with the distance of what a format can hold. Of
the parameters: what is lost of their displacement in :data:`STEPS` steps that each move a weight by
:data:`MOVE` of its size, as learning rates of 1e-5 move weights of 1. Roundings by dither add up like a
random walk; those to nearest lose what is below half of a distance. The root of the sum of the squares is
the error of the plan. It is a bound in size and no forecast, but puts plans in the order in which
docs/formats.md measures them.

A recorded step is compiled in parts, before all of its state is known. Its plan is that of a step which keeps
two averages of gradients for each parameter, as Adam does; one that turns out to hold more than the budget is
refused after its first step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from functorch import make_fx
from torch import Tensor

from collage_fx.errors import InvalidOptionError
from collage_fx.graph import (
    MOVE,
    InputInfo,
    Kind,
    Role,
    StateTensor,
    StepProgram,
    Strategy,
    copy_of,
    moves_as_a_parameter,
    placeholders,
    tensor_value,
)
from collage_fx.numerics import ERROR_FORMATS, PACKED_FORMATS, ErrorFormat, is_low_precision
from collage_fx.pipeline import Pass, run_pipeline, up_to_choosing

__all__ = ["PLANS", "Plan", "best_plan", "frontier", "plans_for", "plans_for_parts", "refuse_excess"]

#: Of the run for which the error of parameters is predicted.
STEPS = 1500

#: What a plan may take more than its budget: counts, tensors that are not packed.
TOLERANCE = 0.015

#: The relative distance of float32 numbers, in which steps compute.
_FLOAT32 = 2.0**-23


@dataclass(frozen=True)
class Plan:
    """The options of a backend that a budget leads to.

    Attributes:
        strategy, error_format, state: see :class:`~collage_fx.CollageBackend`.
        bytes: for each element of the low-precision parameters.
        error: Note [The error of a plan].
        not_packed: the state that most bytes are left in by a plan that packs state, and why; empty if none.
    """

    strategy: Strategy
    error_format: str
    state: str | None = None
    bytes: float = math.nan
    error: float = math.nan
    not_packed: str = ""

    def followed_by(self, program: StepProgram) -> StepProgram:
        """The program with the options of the plan."""
        packed = None if self.state is None else PACKED_FORMATS[self.state]
        error_format = ERROR_FORMATS[self.error_format]
        return replace(program, strategy=self.strategy, error_format=error_format, packed=packed)

    def __str__(self) -> str:
        state = "" if self.state is None else f", state={self.state!r}"
        return f"strategy={self.strategy!r}, error_format={self.error_format!r}{state}"


#: All plans: with dither in the place of error terms.
PLANS = (
    *(
        Plan("light", error_format, state)
        for state in ("block8", "block16")
        for error_format in ("byte", "exact")
    ),
    *(Plan(strategy, name) for strategy in ("light", "plus", "full") for name in ("byte", "exact")),
)


def plans_for(program: StepProgram, pipeline: Sequence[Pass]) -> list[Plan]:
    """All plans with their bytes and errors for a captured step, the smallest first.

    Args:
        program: that no pass has seen. It is left as it is.
        pipeline: that it will go through.
    """
    trial = replace(program, gm=copy_of(program.gm), rounding="dither")
    preparation, choosing = up_to_choosing(pipeline)
    found = []
    held = _wider_state(program)
    with torch.no_grad():
        run_pipeline(trial, preparation)
        for plan in PLANS:
            trial = plan.followed_by(trial)
            run_pipeline(trial, choosing)
            found.append(
                replace(plan, bytes=_bytes(trial, held), error=_error(trial), not_packed=_not_packed(trial))
            )
    return sorted(found, key=lambda plan: (plan.bytes, plan.error))


@functools.cache
def plans_for_parts(dtype: torch.dtype, pipeline: tuple[Pass, ...]) -> tuple[Plan, ...]:
    """All plans for the parts of a recorded step on parameters of ``dtype``: those for Adam's."""

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
    return tuple(plans_for(program, pipeline))


def best_plan(plans: Sequence[Plan], budget: float) -> Plan:
    """The plan of the least error within a budget; of those that are alike the smallest.

    Raises:
        InvalidOptionError: none is that small.
    """
    within = [plan for plan in plans if plan.bytes <= budget * (1 + TOLERANCE)]
    if not within:
        raise InvalidOptionError(
            f"bytes_per_parameter={budget:g}, where this step takes {plans[0].bytes:.3g} at least",
            where="bytes_per_parameter",
            remedy=f"give it {plans[0].bytes:.3g}{plans[0].not_packed and f' ({plans[0].not_packed})'}; "
            "strategy='none' takes what the optimizer makes",
        )
    return min(within, key=lambda plan: (plan.error, plan.bytes))


def refuse_excess(held: float, budget: float) -> None:
    """Raise ``InvalidOptionError`` if so many bytes for each parameter are more than a budget."""
    if held > budget * (1 + TOLERANCE):
        raise InvalidOptionError(
            f"bytes_per_parameter={budget:g}, where this optimizer holds {held:.3g} by the plan for it",
            where="bytes_per_parameter",
            remedy=f"give it {held:.3g}, or strategy, error_format and state in its place",
        )


def frontier(plans: Sequence[Plan]) -> list[Plan]:
    """The plans that have a smaller error than each that takes no more.

    Args:
        plans: the smallest first.
    """
    best: list[Plan] = []
    for plan in plans:
        if not best or plan.error < best[-1].error:
            best.append(plan)
    return best


def _wider_state(program: StepProgram) -> int:
    """The bytes of state of other dtypes, which is left as it is, but for that of parameters of such.

    Numbers (0-d) are not counted.

    In a recorded step's parts it is not told from values that one hands to another.
    """
    if program.is_recorded:
        return 0
    inputs = [
        (program.infos[copy], value)
        for node, copies in zip(placeholders(program.gm.graph), program.repetition.copies, strict=True)
        if (value := tensor_value(node)) is not None and value.dim() and not is_low_precision(value.dtype)
        for copy in copies
    ]
    wider = {info.name for info, _ in inputs if info.role is Role.PARAMETER}
    return sum(
        value.nbytes
        for info, value in inputs
        if info.role is Role.STATE and wider.isdisjoint(accumulate(info.name.split("."), "{}.{}".format))
    )


def _bytes(program: StepProgram, held: int) -> float:
    """The bytes for each element of the low-precision parameters, with those that are held besides.

    Of gradients, which some steps overwrite, the error terms alone.
    """
    elements = 0
    for state in program.states:
        copies, value = len(program.repetition.copies[state.position]), state.value
        fmt = state.chosen_format
        held += copies * (0 if state.packed or state.info.role is Role.GRADIENT else value.nbytes)
        held += copies * (0 if fmt is None else fmt.nbytes(value))
        elements += copies * value.numel() * (state.info.role is Role.PARAMETER)
    return held / elements if elements else 0.0


def _not_packed(program: StepProgram) -> str:
    """The state that most bytes are left in where state is packed, and why; empty if there is none."""
    held: dict[str, int] = {}
    for state in program.states:
        if state.not_packed:
            left = f"{state.info.symbol} is not packed: {state.not_packed}"
            held[left] = (
                held.get(left, 0) + len(program.repetition.copies[state.position]) * state.value.nbytes
            )
    return max(held, key=held.__getitem__, default="")


def _error(program: StepProgram) -> float:
    """The error for the tensors that it is largest for, one of each kind of state and of the parameters."""
    errors: dict[str, float] = {}
    for state in program.states:
        if state.info.role is Role.GRADIENT:
            continue
        weight = state.value.numel() * len(program.repetition.copies[state.position])
        is_parameter = state.info.role is Role.PARAMETER
        moves = is_parameter or moves_as_a_parameter(program, state)
        error = _of_parameter(state) if moves else _of_state(state)
        key = "" if is_parameter else state.info.symbol
        errors[key] = errors.get(key, 0.0) + weight * error**2
    total = sum(
        state.value.numel() * len(program.repetition.copies[state.position])
        for state in program.states
        if state.info.role is Role.PARAMETER
    )
    return math.sqrt(sum(errors.values()) / total) if total else 0.0


def _distance(fmt: ErrorFormat, state: StateTensor) -> float:
    """The relative distance of numbers that a format can hold; in blocks, of the largest."""
    bound = fmt.error_bound(state.value.dtype)
    return max(2 * float(max(bound.relative, bound.of_largest)), _FLOAT32)


def _of_parameter(state: StateTensor) -> float:
    fmt = state.chosen_format
    if fmt is None:
        return 1.0
    distance = _distance(fmt, state)
    if fmt.is_dithered:
        return distance / (MOVE * math.sqrt(6 * STEPS))
    return min(1.0, distance / (2 * MOVE))


def _of_state(state: StateTensor) -> float:
    """The relative noise of a state, or that of the update of a parameter where it is more there."""
    fmt, unit, noise = state.chosen_format, 2 * float(state.format.unit_roundoff), state.verdict.noise
    if fmt is None:
        left = unit if state.recurrence.kind is Kind.OVERWRITE else 1.0
    elif noise is None or math.isinf(noise):
        # What grows by as much at each step has been smaller when it was rounded before.
        left = _distance(fmt, state) * math.sqrt(STEPS / 18)
    else:
        left = noise * _distance(fmt, state) / unit
    return left * max(1.0, state.amplification)
