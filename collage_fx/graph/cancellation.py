"""Cancellation: updates that are small differences of numbers of the size of weights.

Note [State of the size of weights]
-----------------------------------
An average of weights, their last values, an anchor: such state is as large as the parameter p, and a step
moves p by a part in 1e5 of that. ``p -= 0.1 (p - average)`` subtracts two numbers that are nearly alike, and
a rounding of the average, by up to a 256th of it in bfloat16, is many times the update. Relative to the state
the rounding is as small as that of a moment, so that the state's own recurrence does not show it.

So the derivatives of all new values with respect to all old ones are read off the graph where it is linear:
``p' = sum of c_s s``, and ``s' = a s + ...`` for each state. With p held at 1 a state settles at its *size*,
``size_s = (sum over others of a_x size_x) / (1 - a)``: 1 for an average of weights, and for a moment of
gradients what weight decay adds to these. The state is of the size of weights if gradients make up less of
it. The update is ``p' - p``; *net* is the sum of its terms ``c_s size_s``, of which most cancel. Noise of
a state, relative to the state, is

    amplification = |c_s size_s| / max(|net|, MOVE)

times as large relative to the update. ``c_s`` includes the way through other states, as through a moment of
``p - average``. A value that is used in another way (a sign, a quotient, a norm) passes on the amplification
that it has by then. State of which no recurrence tells the size (an iterate that decays, and started as p
did) has that of the weights if it is subtracted from p in equal measure.

Numbers that are not known while compiling, and tensors that values are multiplied by, are taken to be numbers
between 0.2 and 0.8 that depend on their names: a sum that cancels for these cancels for all.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Node

from collage_fx.graph.nodes import (
    copies_to_inputs,
    is_low_precision_tensor,
    is_number,
    placeholders,
    stored,
)
from collage_fx.graph.operator_facts import (
    facts_of,
    ignores_values,
    is_matrix_product,
    is_movement,
    number_filling,
    passed_operand,
)
from collage_fx.graph.program import Role, StateTensor, StepProgram
from collage_fx.graph.recurrence import TOLERATED_STALL
from collage_fx.graph.skipping import unless_skipped

aten = torch.ops.aten

#: The part of its size by which a step moves a weight, as learning rates of 1e-5 move weights of 1.
MOVE = 1e-5

#: Coefficients of inputs; of all that is not linear in them, of gradients for one, under the key None.
Terms = dict[Node | None, float]

#: Branches of a piecewise linear value from which on it counts as not linear.
MOST_BRANCHES = 8

#: Rounds in which sizes, and ways through other states, are made of one another.
ROUNDS = 8


def find_cancellation(program: StepProgram) -> None:
    """Set ``is_weight_sized`` and ``amplification`` of each state: Note [State of the size of weights]."""
    updates = _Updates(program)
    amplification = updates.amplification()
    for state in program.states:
        state.is_weight_sized = state.placeholder in updates.weight_sized
        state.amplification = amplification.get(state.placeholder, 0.0)


def spoils_an_update(state: StateTensor) -> bool:
    """Whether the noise of a state without error terms is more of an update than a moment's may be."""
    noise = 1.0 if state.verdict.noise is None else min(1.0, state.verdict.noise)
    return state.amplification * noise > TOLERATED_STALL


class _Updates:
    """The derivatives of a step's new values with respect to its old ones, and what follows from them.

    Attributes:
        weight_sized: the state that is of the size of weights.
    """

    def __init__(self, program: StepProgram) -> None:
        graph = program.gm.graph
        self._is_recorded = program.is_recorded
        self._graph = graph
        self._roles = dict(zip(placeholders(graph), (info.role for info in program.inputs), strict=True))
        self._parameters = {node for node, role in self._roles.items() if role is Role.PARAMETER}
        self._new = {
            node: unless_skipped(node, stored(store)) for node, store in copies_to_inputs(graph).items()
        }
        #: The state that the step updates.
        self._states = [node for node in self._new if self._roles[node] is Role.STATE]
        self._numbers: dict[Node, sympy.Expr] = {}
        self._branches: dict[Node, tuple[Terms, ...]] = {}
        for node in graph.nodes:
            self._branches[node] = self._shortened(self._read(node))
        self.weight_sized: set[Node] = set()
        self._sizes: dict[Node, float] = dict.fromkeys(self._parameters, 1.0)
        for _ in range(ROUNDS):
            self._settle()
        self._ways = {state: self._ways_from(state) for state in self.weight_sized}

    def amplification(self) -> dict[Node, float]:
        """Of the state that has any: of its noise, relative to the update that it is the largest for."""
        passed_on = self._passed_on()
        found: dict[Node, float] = {}
        for parameter in self._parameters & self._new.keys():
            value = self._new[parameter]
            updates = [_sum(terms, {parameter: -1.0}) for terms in self._branches[value]]
            _raise(found, self._amplified(updates))
            _raise(found, passed_on[value])
        if self._is_recorded:
            # Another part may subtract it from the parameter.
            _raise(found, dict.fromkeys(self.weight_sized, 1 / MOVE))
        return found

    # -- what values are made of

    def _read(self, node: Node) -> tuple[Terms, ...]:
        """The terms of a node, those of its operands being known: one for each branch."""
        if node.op == "placeholder":
            if self._roles[node] is Role.PARAMETER:
                return ({node: 1.0},)
            if is_number(node) and not is_low_precision_tensor(node):
                return ({},)
            return ({node if self._roles[node] is Role.STATE else None: 1.0},)
        if node.op != "call_function" or ignores_values(node.target):
            return ({},)
        args, function = node.args, facts_of(node.target).function
        packet = getattr(node.target, "overloadpacket", node.target)
        operand = args[0] if node.target is operator.getitem else passed_operand(node)
        if operand is not None:
            return self._of(operand)
        if function is operator.neg:
            return _scaled(self._of(args[0]), -1.0)
        if function in (operator.add, operator.sub):
            return _sums(
                self._of(args[0]), _scaled(self._of(args[1]), 1.0 if function is operator.add else -1.0)
            )
        if function is operator.mul:
            for value, factor in (args[:2], args[1::-1]):
                if not self._has_inputs(factor):
                    return _scaled(self._of(value), self._factor(factor))
        if function is operator.truediv and not self._has_inputs(args[1]):
            divisor = self._factor(args[1])
            return _scaled(self._of(args[0]), 1 / divisor if divisor else _any_number(node))
        if packet is aten.where:
            return (*self._of(args[1]), *self._of(args[2]))
        if function in (sympy.Max, sympy.Min) or packet in (aten.clamp, aten.clamp_min, aten.clamp_max):
            return tuple(terms for each in node.all_input_nodes for terms in self._of(each))
        if packet in (aten.sum, aten.mean) or is_movement(node) or is_matrix_product(node.target):
            dependent = [each for each in node.all_input_nodes if self._has_inputs(each)]
            if len(dependent) == 1 or is_movement(node):
                return self._moved(node, dependent)
        return self._not_linear(node)

    def _moved(self, node: Node, dependent: Sequence[Node]) -> tuple[Terms, ...]:
        """Of a linear operation: coefficients that another operand in the same place has in common."""
        others = [None if arg in dependent else arg for arg in node.args]
        total: tuple[Terms, ...] = ({},)
        for i, each in enumerate(dependent):
            total = _sums(total, _scaled(self._of(each), _any_number((node.target, others, i))))
        return total

    def _not_linear(self, node: Node) -> tuple[Terms, ...]:
        return (
            {None: 1.0} if any(terms for each in node.all_input_nodes for terms in self._of(each)) else {},
        )

    def _of(self, value: Any) -> tuple[Terms, ...]:
        return self._branches[value] if isinstance(value, Node) else ({},)

    def _has_inputs(self, value: Any) -> bool:
        """Whether a value is made of parameters or state."""
        return any(key is not None for terms in self._of(value) for key in terms)

    def _shortened(self, branches: tuple[Terms, ...]) -> tuple[Terms, ...]:
        """Each branch once; a weight that gradients have moved is a weight."""
        found: list[Terms] = []
        for terms in branches:
            if any(abs(terms.get(parameter, 0.0)) >= 0.5 for parameter in self._parameters):
                terms = {key: number for key, number in terms.items() if key is not None}
            if terms not in found:
                found.append(terms)
        return tuple(found) if len(found) <= MOST_BRANCHES else ({None: 1.0},)

    def _factor(self, value: Any) -> float:
        """A number, or the value that stands for one that is not known."""
        number = self._number(value)
        return float(number) if number.is_real and number.is_finite else _any_number(value)

    def _number(self, value: Any) -> sympy.Expr:
        if not isinstance(value, Node):
            return sympy.Float(value)
        if value not in self._numbers:
            self._numbers[value] = self._number_of(value)
        return self._numbers[value]

    def _number_of(self, node: Node) -> sympy.Expr:
        if (operand := passed_operand(node)) is not None:
            return self._number(operand)
        if (number := number_filling(node)) is not None:
            return self._number(number)
        target: Any = node.target
        is_of_symbols = getattr(target, "__module__", "") == "_operator"
        function = target if is_of_symbols else facts_of(target).function
        if function is None or not is_number(node):
            return sympy.Float(_any_number(node))
        return sympy.sympify(function(*map(self._number, node.args)))

    # -- how large it is

    def _settle(self) -> None:
        """Make the size of each state of those of others, as they are so far."""
        for state in self._states:
            self._sizes.pop(state, None)
            self.weight_sized.discard(state)
            for terms in self._branches[self._new[state]]:
                if abs(kept := terms.get(state, 0.0)) < 1:
                    size, of_gradients = (
                        total / (1 - kept)
                        for total in (_total(terms, self._sizes, without=state), terms.get(None, 0.0))
                    )
                    if abs(size) > max(of_gradients, abs(self._sizes.get(state, 0.0))):
                        self.weight_sized.add(state)
                        self._sizes[state] = size

    def _ways_from(self, state: Node) -> dict[Node, float]:
        """What a unit of noise in one state leaves in each of the others after a long run."""
        left = {state: 1.0}
        for _ in range(ROUNDS):
            for other in self._states:
                for terms in self._branches[self._new[other]] if other is not state else ():
                    kept = terms.get(other, 0.0)
                    reaching = _total(terms, left, without=other)
                    if abs(kept) < 1 and reaching:
                        left[other] = reaching / (1 - kept)
        return left

    def _amplified(self, branches: Iterable[Terms]) -> dict[Node, float]:
        """How much larger the noise of a state is, relative to a value, than relative to the state."""
        found: dict[Node, float] = {}
        for terms in branches:
            supposed = self._supposed(terms)
            if self.weight_sized or supposed:
                sizes = {**self._sizes, **supposed}
                net = max(abs(_total(terms, sizes)), MOVE)
                ways = {**self._ways, **{state: {state: 1.0} for state in supposed}}
                _raise(found, {s: abs(_total(terms, way) * sizes[s]) / net for s, way in ways.items()})
        return found

    def _supposed(self, terms: Terms) -> dict[Node, float]:
        """Sizes of states that no recurrence tells: of the weights that they are subtracted from."""
        weights = sum(number for key, number in terms.items() if key in self._parameters)
        return {
            key: 1.0
            for key, number in terms.items()
            if key in self._states
            and key not in self._sizes
            and abs(weights) > MOVE
            and abs(weights + number) <= abs(weights) / 16
        }

    def _passed_on(self) -> dict[Node, dict[Node, float]]:
        """The amplification that each value has from values that it is no linear function of."""
        passed: dict[Node, dict[Node, float]] = {}
        operands: dict[Node, list[Node]] = {}
        for node in self._graph.nodes:
            passed[node] = {}
            operands[node] = [self._new[node]] if node in self._states else node.all_input_nodes
            if self._branches[node] == ({None: 1.0},):
                for operand in filter(self._has_inputs, operands[node]):
                    _raise(passed[node], self._amplified(self._branches[operand]))
        changed = any(passed.values())
        while changed:
            changed = False
            for node, each in operands.items():
                for operand in each:
                    changed |= _raise(passed[node], passed[operand])
        return passed


def _any_number(key: object) -> float:
    """A number between 0.2 and 0.8 for something that is not known, always the same."""
    return 0.2 + 0.6 * zlib.crc32(str(key).encode()) / 2**32


def _raise(found: dict[Node, float], others: Mapping[Node, float]) -> bool:
    """Raise numbers to those of another mapping where they are less; whether any was."""
    more = {key: number for key, number in others.items() if number > found.get(key, 0.0)}
    found.update(more)
    return bool(more)


def _scaled(branches: Iterable[Terms], factor: float) -> tuple[Terms, ...]:
    return tuple(
        {key: number * (abs(factor) if key is None else factor) for key, number in terms.items()}
        for terms in branches
    )


def _sum(first: Terms, second: Terms) -> Terms:
    return {key: first.get(key, 0.0) + second.get(key, 0.0) for key in {**first, **second}}


def _sums(first: Iterable[Terms], second: Sequence[Terms]) -> tuple[Terms, ...]:
    return tuple(_sum(a, b) for a in first for b in second)


def _total(terms: Terms, sizes: Mapping[Node, float], *, without: Node | None = None) -> float:
    sized = (key for key in terms if key is not None and key is not without and key in sizes)
    return sum(terms[key] * sizes[key] for key in sized)
