"""The pass that chooses which state is packed, and in which format, from its recurrence and its uses.

A signed format holds numbers of either sign: Note [Blocks] in ``numerics/blocks.py``. A positive one holds
numbers that are never negative, and only zero becomes zero in it. A divisor or radicand of a step needs it:
if a divisor became zero and the dividend did not, the update would be unbounded. So a state is not packed

* if a divisor or radicand that may be negative is computed from it, as a difference in centered RMSprop;
* if the step divides by it or takes its root, and it is not known to be never negative;
* if its old value is multiplied by a tensor or by a number above 1: rounding errors would grow;
* if it holds values of parameters (Lookahead's slow weights, averages) or their rounding errors (Kahan's
  term): an error that is small relative to a moment can be large relative to a parameter's update;
* if the step keeps some elements of a row and changes others (``where`` with a mask): they share scales, so
  that the kept elements would be rounded again in each step, and the errors would add up;
* if it has few elements, or its rows are not made of whole blocks;
* if it is a shard and the format needs whole tensors, or if its sizes are symbols.

A recorded step packs nothing: each of its parts sees only some of what the step does with a state. Its
optimizer is refused before its first step (``capture/recording.py``).

State of float32 parameters is packed by the same rules; the parameters themselves stay float32. float32 state
of low-precision parameters is left alone. ``bf16`` packs float32 state only: other state has 16 bits anyway.

A plug-in's formats get the same state. Whether they keep a divisor from becoming zero is theirs to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.fx import Node

from collage_fx import graph
from collage_fx.graph import Kind, Role, Signs, StateTensor, StepProgram
from collage_fx.numerics import ErrorFormat
from collage_fx.passes.base import Pass

aten = torch.ops.aten

#: Operators whose result is large or undefined for an operand near zero.
_ROOTS = {aten.sqrt, aten.rsqrt, aten.reciprocal, aten.log}


class PackState(Pass):
    """Pass that gives packed formats to state that it may pack; other state stays as ``analyze`` chose."""

    name = "pack-state"
    after = ("analyze",)

    def applies_to(self, program: StepProgram) -> bool:
        return program.packed is not None and program.strategy != "none"

    def run(self, program: StepProgram) -> str:
        assert program.packed is not None
        signed, positive = program.packed
        states = [state for state in program.states if state.info.role is Role.STATE]
        positive_states = [state for state in states if graph.stays_positive(state)]
        values = [value for state in positive_states for value in (state.placeholder, graph.new_value(state))]
        divided_by = _divided_by(program, values)
        chosen = 0
        for state in states:
            is_positive = state in positive_states
            fmt = positive if is_positive else signed
            why_not = state.why_not_stored(fmt) or _why_not(program, state, fmt, divided_by)
            chosen += state.pack(fmt, why_not, "never negative" if is_positive else "of either sign")
        return f"{chosen} of {len(states)} state tensors"


def _why_not(program: StepProgram, state: StateTensor, fmt: ErrorFormat, divided_by: dict[Node, str]) -> str:
    """Return why the step's operations on a state forbid packing; empty if they allow it."""
    if (what := divided_by.get(state.placeholder)) is not None:
        return what
    slopes = state.recurrence.slopes
    is_linear = bool(slopes) or not state.depends_on_old_value
    if not is_linear or not all(slope.is_number and 0 <= slope <= 1 for slope in slopes):
        return "its old value is multiplied by a tensor, or by a number above 1"
    if why_not := graph.splits_blocks(state, fmt):
        return why_not
    overwritten = (each for each in program.parameters if each.recurrence.kind is Kind.OVERWRITE)
    if any(state.placeholder in graph.made_of(each.stored) for each in overwritten):
        return "a parameter is overwritten with it"
    if graph.moves_as_a_parameter(program, state):
        return "it accumulates numbers of either sign"
    sources = graph.made_of(graph.new_value(state))
    if any(graph.new_value(parameter) in sources for parameter in program.parameters):
        return "it is computed from a parameter's new value"
    if state.is_unbounded:
        return "no bound is known for what its rounding does"
    if state.is_weight_sized or state.amplification > 1:
        return "it is as large as weights, so that its rounding errors are large relative to their updates"
    return ""


def _divided_by(program: StepProgram, positive: Sequence[Node]) -> dict[Node, str]:
    """Map each input that a possibly negative divisor or radicand is computed from to the reason.

    ``positive`` are values that are never negative.
    """
    known = Signs(positive, numbers_are_positive=True)
    inputs = {state.placeholder for state in program.states}
    found: dict[Node, str] = {}
    for node in program.gm.graph.nodes:
        for what, operand in _critical(node):
            if not known.never_negative(operand):
                for each in inputs & graph.made_of(operand):
                    found.setdefault(each, f"{what} {operand.name}, computed from it, may be negative")
    return found


def _critical(node: Node) -> Iterator[tuple[str, Node]]:
    """Yield a node's divisor or radicand, if any, as ``(name of the role, operand)``."""
    if node.op != "call_function" or graph.is_copy_to_input(node):
        return
    packet = getattr(node.target, "overloadpacket", node.target)
    divides = graph.facts_of(node.target).sign == "/"
    exponent = node.args[1] if packet is aten.pow else 1
    is_natural = isinstance(exponent, (int, float)) and exponent >= 0 and exponent % 1 == 0
    is_root = packet in _ROOTS or not is_natural
    operand = node.args[1] if divides else node.args[0] if is_root else None
    if isinstance(operand, Node):
        yield ("the divisor" if divides else "the radicand"), operand
