"""Signs: values of a graph that are never negative."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

import sympy
import torch
from torch.fx import Node

from collage_fx.graph.feedback import new_value
from collage_fx.graph.nodes import is_number, operands_of, reached
from collage_fx.graph.operator_facts import facts_of, named_arguments, number_filling, passed_operand
from collage_fx.graph.program import Kind, Role, StateTensor, StepProgram

aten = torch.ops.aten

#: Operators whose results are never negative, whatever their operands are.
_NEVER_NEGATIVE = {aten.abs, aten.exp, aten.sqrt, aten.rsqrt, aten.relu, aten.sigmoid, aten.softplus}
_NEVER_NEGATIVE |= {aten.linalg_vector_norm, aten.norm}
#: Operators whose results are never negative where no operand is.
_KEEPS_SIGN = {aten.sum, aten.mean, aten.amax, aten.amin, aten.reciprocal, aten.expand, aten.index}
#: Operators whose results have their operand's elements at the same indices, in another dtype or memory.
_IN_PLACE = {torch.ops.prims.convert_element_type, aten.clone, aten.alias}


class Signs:
    """Signs known of a graph's values, for given signs of inputs; a NaN does not count as negative.

    ``numbers_are_positive``: whether numbers (rates, bias corrections) are taken to be positive.
    """

    def __init__(
        self, positive: Collection[Node], zero: Collection[Node] = (), *, numbers_are_positive: bool = False
    ) -> None:
        self._numbers_are_positive = numbers_are_positive
        self._known: dict[Node, int | None] = {**dict.fromkeys(positive, 1), **dict.fromkeys(zero, 0)}

    def never_negative(self, value: Any) -> bool:
        return self._sign(value) is not None

    def _sign(self, value: Any) -> int | None:
        """Return 1 for a value that is never negative, 0 for zero, None if the sign is unknown."""
        if isinstance(value, (int, float)):
            return None if not value >= 0 else int(value > 0)
        if not isinstance(value, Node):
            return None
        if value not in self._known:
            self._known[value] = None  # a value computed from itself has an unknown sign
            self._known[value] = self._sign_of(value)
        return self._known[value]

    def _sign_of(self, node: Node) -> int | None:
        if self._numbers_are_positive and is_number(node):
            return 1
        if node.op != "call_function":
            return None
        if (operand := passed_operand(node)) is not None:
            return self._sign(operand)
        if (number := number_filling(node)) is not None:
            return self._sign(number)
        packet, args = getattr(node.target, "overloadpacket", node.target), node.args
        function, infix = facts_of(node.target).function, facts_of(node.target).sign
        if packet in _NEVER_NEGATIVE:
            return 1
        if packet in _KEEPS_SIGN:
            return self._sign(args[0])
        if packet is aten.pow:
            is_even = isinstance(args[1], (int, float)) and args[1] % 2 == 0
            is_root = isinstance(args[1], float) and args[1] % 1 != 0  # NaN of negative numbers
            return 1 if is_even or is_root else self._sign(args[0]) and 1
        if infix == "*":  # x * x is never negative, in whatever order it is computed
            times = Counter(_factors_of(node))
            odd = (factor for factor in times if times[factor] % 2 or not isinstance(factor, Node))
            signs = [self._sign(factor) for factor in odd]
            return 0 if 0 in signs else None if None in signs else 1
        if packet in (aten.clamp, aten.clamp_min, aten.clamp_max):
            sign, bounds = self._sign(args[0]), named_arguments(node.target, args, node.kwargs)
            if bounds.get("min") is not None:
                sign = _of_maximum(sign, self._sign(bounds["min"]))
            return sign if bounds.get("max") is None else _of_minimum(sign, self._sign(bounds["max"]))
        operands = args[1:3] if packet is aten.where else args
        first, second = map(self._sign, (*operands, None)[:2])
        if function is sympy.Max:
            return _of_maximum(first, second)
        if function is sympy.Min:
            return _of_minimum(first, second)
        if infix == "-":
            return first if second == 0 else None
        if infix == "/" and first == 0:
            return 0
        adds_up = infix in ("+", "/") or packet is aten.where
        return max(first, second) if adds_up and first is not None and second is not None else None


def stays_positive(state: StateTensor) -> bool:
    """Return whether a state that is not negative before a step is not negative after the step."""
    slopes = state.recurrence.slopes
    if len(slopes) == 1 and slopes[0].is_number and slopes[0] >= 0:
        return Signs((), [state.placeholder]).never_negative(new_value(state))
    return Signs([state.placeholder]).never_negative(new_value(state))


def _stay_positive(program: StepProgram) -> set[Node]:
    """Return the states that are never negative if all of them start nonnegative, as counts of masks."""
    states = [state for state in program.states if state.info.role is Role.STATE]
    while True:
        positive = {state.placeholder for state in states}
        signs = Signs(positive)
        states = [state for state in states if signs.never_negative(new_value(state))]
        if len(states) == len(positive):
            return positive


def moves_as_a_parameter(program: StepProgram, state: StateTensor) -> bool:
    """Return whether a state sums numbers of either sign, as the z of schedule-free optimizers does.

    Such a sum may be large compared with its addends, and what rounding loses is lost for good. A sum of
    squares starts from zero and is about as large as its addends; the term of a Kahan sum stays small because
    the parameter takes up most of it. Always False for a recorded step, whose parts do not show this.
    """
    is_sum = state.info.role is Role.STATE and state.recurrence.kind is Kind.ACCUMULATION
    if not is_sum or program.is_recorded or state.placeholder in _stay_positive(program):
        return False
    made_of = reached([new_value(state)], operands_of)
    return not any(new_value(parameter) in made_of for parameter in program.parameters)


def _factors_of(value: Any) -> Iterator[Any]:
    """Yield the factors of a product, looking through casts and copies, which keep elements in place."""
    while isinstance(value, Node) and getattr(value.target, "overloadpacket", None) in _IN_PLACE:
        value = value.args[0]
    if isinstance(value, Node) and facts_of(value.target).sign == "*":
        for each in value.args[:2]:
            yield from _factors_of(each)
    else:
        yield value


def _of_maximum(first: int | None, second: int | None) -> int | None:
    if first is None or second is None:
        return None if first is second else 1
    return max(first, second)


def _of_minimum(first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else min(first, second)
