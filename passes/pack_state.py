"""The pass that chooses which state is packed, and how: by its recurrence, and by what is done with it.

A state is packed into integers of 8 or 16 bits with a scale for a block of them: Note [Blocks] in
``numerics/blocks.py``. There is a map for numbers of either sign and one for numbers that are never negative,
in which none but zero becomes zero. What a step divides by, or takes a root of, has to be of the latter kind:
were a divisor zero beside a dividend that is not, the update would have no bound. So a state is left alone

* of which a divisor or a radicand is made that is not known to stay positive: where a difference is rooted,
  as in centered RMSprop, or divided by;
* that is not known to be never negative, if it is divided by or rooted itself;
* whose old value is multiplied by what is no number, or by more than 1: rounding errors would grow with it;
* that stands for parameters (Lookahead's slow weights, averages), or into which goes what they lose (Kahan's
  term): what a moment may lose in relation to its own size is not what a parameter may lose of a step;
* that is of few elements, or of no rows of whole blocks;
* that is in pieces, where the format is one of whole tensors, or of sizes that are not numbers.

A recorded step packs nothing: each of its parts sees only some of what the step does with a state. Its
optimizer is refused before its first step (``capture/recording.py``).

A plug-in's formats get the same state. Whether they keep a divisor from becoming zero is theirs to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from sympy import Expr, Symbol
from torch.fx import Node

from collage_fx.graph import (
    Kind,
    Role,
    Signs,
    StateTensor,
    StepProgram,
    facts_of,
    is_copy_to_input,
    moves_as_a_parameter,
    new_value,
    operands_of,
    reached,
    stays_positive,
)
from collage_fx.numerics import ErrorFormat
from collage_fx.passes.base import Pass

aten = torch.ops.aten

#: Elements from which on packing saves more than it costs; of a tensor in pieces, in all of them, so that its
#: bits don't depend on how many there are.
FEWEST = 4096

#: Operators of which a number near zero makes a large one.
_ROOTS = {aten.sqrt, aten.rsqrt, aten.reciprocal, aten.log}


@dataclass(frozen=True)
class PackState(Pass):
    """Gives the state that it may be packed in a packed format; the rest stays as ``analyze`` has it."""

    name = "pack-state"
    after = ("analyze",)

    def applies_to(self, program: StepProgram) -> bool:
        return program.packed is not None and program.strategy != "none"

    def run(self, program: StepProgram) -> str:
        assert program.packed is not None
        signed, positive = program.packed
        states = [state for state in program.states if state.info.role is Role.STATE]
        positive_states = [state for state in states if stays_positive(state)]
        values = [value for state in positive_states for value in (state.placeholder, new_value(state))]
        divided_by = _divided_by(program, values)
        chosen = []
        for state in states:
            is_positive = state in positive_states
            fmt = positive if is_positive else signed
            why_not = _why_not_stored(state, fmt) or _why_not(program, state, divided_by)
            state.not_packed = why_not
            if why_not:
                state.selection += f"; not packed: {why_not}"
            else:
                state.chosen_format = fmt
                state.selection = "never negative" if is_positive else "of either sign"
                chosen.append(state)
        return f"{len(chosen)} of {len(states)} state tensors"


def _why_not_stored(state: StateTensor, fmt: ErrorFormat) -> str:
    """The reason why the format cannot store a state, whatever the step does with it; empty if it can."""
    if not all(isinstance(size, int) for size in state.value.shape):
        return "its sizes may be others at each step"
    if max(state.value.numel(), state.info.cut_from) < FEWEST:
        return f"it has less than {FEWEST} elements"
    if not state.value.numel():
        return "this process has none of its elements"
    if state.info.cut_from and not fmt.by_rows:
        return f"it is in pieces, and {fmt.name} is of whole tensors"
    return fmt.why_not(state.value)


def _why_not(program: StepProgram, state: StateTensor, divided_by: dict[Node, str]) -> str:
    """The reason why a state may not be packed for what the step does with it; empty if it may."""
    if (what := divided_by.get(state.placeholder)) is not None:
        return what
    if not all(slope.is_number and 0 <= slope <= 1 for slope in _slopes(state)):
        return "its old value is not multiplied by numbers up to 1"
    if _is_given_to_a_parameter(program, state.placeholder):
        return "a parameter is overwritten with it"
    if moves_as_a_parameter(program, state):
        return "it accumulates numbers of either sign"
    value = new_value(state)
    made_of = {value, *reached([value], operands_of)}
    for other in program.states:
        if other.info.role is Role.PARAMETER and new_value(other) in made_of:
            return "it is made of what a parameter becomes"
    if state.is_weight_sized or state.amplification > 1:
        return "it is as large as weights, beside which their updates are small"
    return ""


def _is_given_to_a_parameter(program: StepProgram, placeholder: Node) -> bool:
    """Whether a parameter is overwritten with a value that is made of an input."""
    for other in program.states:
        is_overwritten = other.info.role is Role.PARAMETER and other.recurrence.kind is Kind.OVERWRITE
        if is_overwritten and placeholder in {other.stored, *reached([other.stored], operands_of)}:
            return True
    return False


def _slopes(state: StateTensor) -> tuple[Expr, ...]:
    """The coefficients of the old value; an unknown one where it is in the new value, but not linearly."""
    recurrence = state.recurrence
    return (Symbol("nonlinear"),) if recurrence.path and not recurrence.slopes else recurrence.slopes


def _divided_by(program: StepProgram, positive: Sequence[Node]) -> dict[Node, str]:
    """Find the states of which divisors or radicands are made that may become negative, and say which.

    Args:
        program: whose state is looked at.
        positive: values that are never negative.
    """
    known = Signs(positive, numbers_are_positive=True)
    inputs = {state.placeholder for state in program.states}
    found: dict[Node, str] = {}
    for node in program.gm.graph.nodes:
        for what, operand in _critical(node):
            if not known.never_negative(operand):
                for each in inputs & {operand, *reached([operand], operands_of)}:
                    found.setdefault(each, f"{what} {operand.name} is made of it, and may be negative")
    return found


def _critical(node: Node) -> Iterator[tuple[str, Node]]:
    """The operands of a node near zero which its results are large, or do not exist."""
    if node.op != "call_function" or is_copy_to_input(node):
        return
    packet = getattr(node.target, "overloadpacket", node.target)
    divides = facts_of(node.target).sign == "/"
    is_root = packet in _ROOTS or (packet is aten.pow and not _is_natural(node.args[1]))
    operand = node.args[1] if divides else node.args[0] if is_root else None
    if isinstance(operand, Node):
        yield ("the divisor" if divides else "the radicand"), operand


def _is_natural(exponent: object) -> bool:
    return isinstance(exponent, (int, float)) and exponent >= 0 and exponent % 1 == 0
