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

Of a recorded step, a part sees what itself does with a state. It packs what it makes of the old value, or of
gradients, and of no parameter that another part has updated. What another part packs and it only reads, it
reads so, or has it unpacked for good where it divides by it or gives it to a parameter (``to_unpack``).

A plug-in's formats get the same state. Whether they keep a divisor from becoming zero is theirs to say.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from sympy import Expr, Symbol
from torch.fx import Node

from collage_fx.graph import (
    InputInfo,
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
    placeholders,
    reached,
    stays_positive,
    tensor_value,
)
from collage_fx.numerics import ErrorFormat
from collage_fx.passes.base import Pass

aten = torch.ops.aten

#: Elements from which on packing saves more than it costs; of a tensor in pieces, in all of them, so that its
#: bits don't depend on how many there are.
FEWEST = 4096

#: Why what has symbols for sizes is not packed.
SIZES_CHANGE = "its sizes may be others at each step"

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
        already = program.packed_already
        positive_states = [
            state for state in states if already.get(state.position) is not signed and stays_positive(state)
        ]
        read = _only_read(program)
        positive_reads = [node for i, node in read.items() if already[i] is positive]
        values = [value for state in positive_states for value in (state.placeholder, new_value(state))]
        divided_by = _divided_by(program, [*values, *positive_reads], [*read.values()])
        chosen = []
        program.to_unpack = {}
        for state in states:
            is_positive = state in positive_states
            fmt = positive if is_positive else signed
            never = _why_not_ever(state, fmt)
            why_not = never or _why_not(program, state, divided_by, fmt)
            if why_not and program.is_recorded and (state.position in already or not never):
                program.to_unpack[state.position] = why_not
            if not why_not and _is_only_scaled(program, state) and state.position not in already:
                why_not = "another part of the step makes it what it is"
            state.not_packed = why_not
            if why_not:
                state.selection += f"; not packed: {why_not}"
            else:
                state.chosen_format = fmt
                state.selection = "never negative" if is_positive else "of either sign"
                chosen.append(state)
        for position, node in read.items():
            why_not = "" if _has_known_sizes(node) else SIZES_CHANGE
            if why_not := why_not or divided_by.get(node) or _given_to_a_parameter(program, node):
                program.to_unpack[position] = why_not
        return f"{len(chosen)} of {len(states)} state tensors"


def _only_read(program: StepProgram) -> dict[int, Node]:
    """The inputs that another part of a recorded step packs, and that this one does not update."""
    updated = {state.position for state in program.states}
    nodes = placeholders(program.gm.graph)
    return {i: nodes[i] for i in program.packed_already if i not in updated}


def _has_known_sizes(node: Node) -> bool:
    """Whether the sizes of a tensor are numbers."""
    return all(isinstance(size, int) for size in node.meta["val"].shape)


def _why_not_ever(state: StateTensor, fmt: ErrorFormat) -> str:
    """The reason why a state can't be packed, whatever the step does with it; empty if it can."""
    if state.info.stays:
        return state.info.stays
    if state.info.is_made:
        return "the step makes it anew"
    if not _has_known_sizes(state.placeholder):
        return SIZES_CHANGE
    if max(state.value.numel(), state.info.cut_from) < FEWEST:
        return f"it has less than {FEWEST} elements"
    if not state.value.numel():
        return "this process has none of its elements"
    if state.info.cut_from and not fmt.by_rows:
        return f"it is in pieces, and {fmt.name} is of whole tensors"
    return fmt.why_not(state.value)


def _why_not(program: StepProgram, state: StateTensor, divided_by: dict[Node, str], fmt: ErrorFormat) -> str:
    """The reason why a state may not be packed for what the step does with it; empty if it may."""
    if (what := divided_by.get(state.placeholder)) is not None:
        return what
    if not all(slope.is_number and 0 <= slope <= 1 for slope in _slopes(state)):
        return "its old value is not multiplied by numbers up to 1"
    if why_not := _given_to_a_parameter(program, state.placeholder):
        return why_not
    if moves_as_a_parameter(program, state):
        return "it accumulates numbers of either sign"
    value = new_value(state)
    made_of = {value, *reached([value], operands_of)}
    for other in program.states:
        if other.info.role is Role.PARAMETER and new_value(other) in made_of:
            return "it is made of what a parameter becomes"
    if state.is_weight_sized or state.amplification > 1:
        return "it is as large as weights, beside which their updates are small"
    if program.packed_already.get(state.position, fmt) is not fmt:
        return "elsewhere in the step it is never negative"
    return _made_elsewhere(program, state, made_of) if program.is_recorded else ""


def _given_to_a_parameter(program: StepProgram, placeholder: Node) -> str:
    for other in program.states:
        is_overwritten = other.info.role is Role.PARAMETER and other.recurrence.kind is Kind.OVERWRITE
        if is_overwritten and placeholder in {other.stored, *reached([other.stored], operands_of)}:
            return "a parameter is overwritten with it"
    return ""


def _is_only_scaled(program: StepProgram, state: StateTensor) -> bool:
    """Whether a part of a recorded step makes a state of nothing but its old value: of any sign, then."""
    value = new_value(state)
    others = _others({value, *reached([value], operands_of)}, program, state)
    return program.is_recorded and state.carries_its_old_value and not any(others)


def _others(made_of: Collection[Node], program: StepProgram, state: StateTensor) -> Iterator[InputInfo]:
    """The inputs, besides its old value and numbers, among those that a state is made of."""
    for node, info in zip(placeholders(program.gm.graph), program.inputs, strict=False):
        value = tensor_value(node)
        is_number = value is None or (value.dim() == 0 and info.role is not Role.CARRIED)
        if node in made_of and node is not state.placeholder and not is_number:
            yield info


def _made_elsewhere(program: StepProgram, state: StateTensor, made_of: Collection[Node]) -> str:
    """The reason why a part of a recorded step does not know what it makes a state of; empty if it does."""
    for info in _others(made_of, program, state):
        if info.role is Role.PARAMETER and info.is_updated:
            return "it is made of what a parameter has become"
        if not state.carries_its_old_value and info.role is not Role.GRADIENT:
            return "another part of the step computes it"
    return ""


def _slopes(state: StateTensor) -> tuple[Expr, ...]:
    """The coefficients of the old value; an unknown one where it is in the new value, but not linearly."""
    recurrence = state.recurrence
    return (Symbol("nonlinear"),) if recurrence.path and not recurrence.slopes else recurrence.slopes


def _divided_by(program: StepProgram, positive: Sequence[Node], read: Sequence[Node]) -> dict[Node, str]:
    """Inputs of which divisors or radicands are made that may become negative, and what they are.

    Args:
        program: whose state is looked at.
        positive: values that are never negative.
        read: inputs that are looked at besides.
    """
    known = Signs(positive, numbers_are_positive=True)
    inputs = {*read, *(state.placeholder for state in program.states)}
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
