"""Cancellation: parameter updates that are small differences of numbers as large as weights.

Note [State of the size of weights]
-----------------------------------
Some state is as large as the parameter p itself: an average of weights, their previous values, an anchor.
``p -= 0.1 (p - average)`` subtracts two nearly equal numbers, so rounding the average (by up to 1/256 of it
in bfloat16) changes the update, about 1e-5 of p, by many times its size. No recurrence shows this.

So the derivatives of all new values with respect to all old values are read off the graph where it is
linear: ``p' = sum of c_s s``, and ``s' = a s + ...`` for each state. With p held at 1, a state converges to
its *size*, ``size_s = (sum over others of a_x size_x) / (1 - a)``: 1 for an average of weights; for a moment
of gradients, the share of weight decay. A state is of the size of weights if its size exceeds the
contribution of the gradients. The update is ``p' - p``; *net* is the sum of its terms ``c_s size_s``, most of
which cancel. A state's noise relative to the update is its noise relative to the state itself times

    amplification = |c_s size_s| / max(|net|, MOVE)

``c_s`` includes paths through other states, such as a moment of ``p - average``. A nonlinear operation (a
sign, a quotient, a norm) passes on the amplification of its operands. For a state whose recurrence does not
tell its size (an iterate that decays and started as a copy of p), the size of the weights is assumed if it is
subtracted from p with an equal coefficient.

Numbers unknown at compile time, and tensors that values are multiplied by, are replaced by numbers between
0.2 and 0.8 that depend on their names: a sum that cancels for these cancels for all.

Note [Averages of weights]
--------------------------
A moment follows gradients, which are as large as their changes from step to step. Weights hardly change: an
average that follows them fast (``average.lerp_(p, 0.5)``) is rounded by more than it moves, so the bound for
moments does not hold for it. What counts is the input, not the decay. Weights are parameters, sums of numbers
of either sign (the z of schedule-free optimizers; p itself, in a function of plain tensors), and
tensors that the step only reads and about which nothing is known. Not a weight is a tensor that moves
a weight by less than half of its own size: a gradient, in a function that gets it as a plain tensor.
"""

from __future__ import annotations

import functools
import operator
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Node

from collage_fx.graph import nodes, operator_facts
from collage_fx.graph.program import Role, StateTensor, StepProgram
from collage_fx.graph.recurrence import TOLERATED_STALL
from collage_fx.graph.signs import moves_as_a_parameter
from collage_fx.graph.skipping import unless_skipped

aten = torch.ops.aten

#: Relative change of a weight in one step: a learning rate of 1e-5 and weights near 1.
MOVE = 1e-5

#: Coefficients by input node; under the key None the sum for gradients and everything nonlinear.
Terms = dict[Node | None, float]

#: Largest number of branches of a piecewise linear value; with more it counts as nonlinear.
MOST_BRANCHES = 8

#: Iterations of the fixed-point computations: sizes of states, and paths through other states.
ROUNDS = 8


def find_cancellation(program: StepProgram) -> None:
    """Set ``is_weight_sized`` and ``amplification`` of each state: Note [State of the size of weights]."""
    updates = _Updates(program)
    amplification = updates.amplification()
    for state in program.states:
        state.is_weight_sized = state.placeholder in (updates.weight_sized | updates.weights)
        state.amplification = amplification.get(state.placeholder, 0.0)


def spoils_an_update(state: StateTensor) -> bool:
    """Return whether a state's rounding noise, stored without error terms, disturbs an update too much."""
    noise = 1.0 if state.verdict.noise is None else min(1.0, state.verdict.noise)
    return state.amplification * noise > TOLERATED_STALL


class _Updates:
    """Derivatives of a step's new values with respect to its old values, and the noise that they pass on.

    Attributes:
        weight_sized: the placeholders of states of the size of weights.
        weights: the placeholders of states made of weights: Note [Averages of weights].
    """

    def __init__(self, program: StepProgram) -> None:
        graph = program.gm.graph
        self._is_recorded = program.is_recorded
        self._graph = graph
        roles = [info.role for info in program.inputs]
        self._roles = dict(zip(nodes.placeholders(graph), roles, strict=True))
        self._parameters = {node for node, role in self._roles.items() if role is Role.PARAMETER}
        stores = nodes.copies_to_inputs(graph).items()
        self._new = {node: unless_skipped(node, nodes.stored(store)) for node, store in stores}
        #: Placeholders of the states that the step updates.
        self._states = [node for node in self._new if self._roles[node] is Role.STATE]
        self._number: Callable[[Any], sympy.Expr] = functools.cache(self._number_of)
        self._branches: dict[Node, tuple[Terms, ...]] = {}
        for node in graph.nodes:
            self._branches[node] = self._shortened(self._read(node))
        self._sizes = dict.fromkeys(self._parameters, 1.0)
        self.weight_sized = self._settle(self._sizes, set())
        sums = [state.placeholder for state in program.states if moves_as_a_parameter(program, state)]
        moved = [self._new[weight] for weight in (*sums, *self._parameters) if weight in self._new]
        unknown = {node for node, role in self._roles.items() if role is Role.STATE and node not in self._new}
        updates = {node for node in unknown if any(self._is_update(node, value) for value in moved)}
        known = dict.fromkeys((*self._parameters, *sums, *(unknown - updates)), 1.0)
        self.weights = self._settle(known, updates) - set(sums)
        self._ways = {state: self._ways_from(state) for state in self.weight_sized}

    def amplification(self) -> dict[Node, float]:
        """Return each state's amplification: its noise relative to the update that it disturbs most."""
        passed_on = self._passed_on()
        found: dict[Node, float] = {}
        for parameter in self._parameters & self._new.keys():
            value = self._new[parameter]
            updates = [_sum(terms, {parameter: -1.0}) for terms in self._branches[value]]
            _raise(found, self._amplified(updates))
            _raise(found, passed_on[value])
        if self._is_recorded:
            # Another part of the step may subtract the state from the parameter.
            _raise(found, dict.fromkeys(self.weight_sized, 1 / MOVE))
        return found

    # -- what values are made of

    def _read(self, node: Node) -> tuple[Terms, ...]:
        """Return a node's terms, one mapping per branch, from the terms of its operands."""
        if node.op == "placeholder":
            if self._roles[node] is Role.PARAMETER:
                return ({node: 1.0},)
            if nodes.is_number(node) and not nodes.is_low_precision_tensor(node):
                return ({},)
            return ({node if self._roles[node] is Role.STATE else None: 1.0},)
        if node.op != "call_function" or operator_facts.ignores_values(node.target):
            return ({},)
        args, function = node.args, operator_facts.facts_of(node.target).function
        packet = getattr(node.target, "overloadpacket", node.target)
        operand = args[0] if node.target is operator.getitem else operator_facts.passed_operand(node)
        if operand is not None:
            return self._of(operand)
        if function is operator.neg:
            return _scaled(self._of(args[0]), -1.0)
        if function is operator.add:
            return _sums(self._of(args[0]), self._of(args[1]))
        if function is operator.sub:
            return _sums(self._of(args[0]), _scaled(self._of(args[1]), -1.0))
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
        if (
            packet in (aten.sum, aten.mean)
            or operator_facts.is_movement(node)
            or operator_facts.is_matrix_product(node.target)
        ):
            dependent = [each for each in node.all_input_nodes if self._has_inputs(each)]
            if len(dependent) == 1 or operator_facts.is_movement(node):
                return self._moved(node, dependent)
        is_dependent = any(any(self._of(each)) for each in node.all_input_nodes)
        return ({None: 1.0} if is_dependent else {},)

    def _moved(self, node: Node, dependent: Sequence[Node]) -> tuple[Terms, ...]:
        """Return the terms of a linear operation; equal other operands give equal coefficients."""
        others = [None if arg in dependent else arg for arg in node.args]
        total: tuple[Terms, ...] = ({},)
        for i, each in enumerate(dependent):
            total = _sums(total, _scaled(self._of(each), _any_number((node.target, others, i))))
        return total

    def _of(self, value: Any) -> tuple[Terms, ...]:
        return self._branches[value] if isinstance(value, Node) else ({},)

    def _has_inputs(self, value: Any) -> bool:
        """Return whether a value depends on parameters or state."""
        return any(key is not None for terms in self._of(value) for key in terms)

    def _shortened(self, branches: tuple[Terms, ...]) -> tuple[Terms, ...]:
        """Return the distinct branches; in a branch that is mostly a parameter drop the gradient's term."""
        found: list[Terms] = []
        for terms in branches:
            least = max(0.5, terms.get(None, 0.0))
            if any(abs(terms.get(parameter, 0.0)) >= least for parameter in self._parameters):
                terms = {key: number for key, number in terms.items() if key is not None}
            if terms not in found:
                found.append(terms)
        return tuple(found) if len(found) <= MOST_BRANCHES else ({None: 1.0},)

    def _factor(self, value: Any) -> float:
        """Return a factor as a float: its value if known, otherwise a number that depends on its name."""
        number = self._number(value)
        return float(number) if number.is_real and number.is_finite else _any_number(value)

    def _number_of(self, node: Any) -> sympy.Expr:
        if not isinstance(node, Node):
            return sympy.Float(node)
        if (operand := operator_facts.passed_operand(node)) is not None:
            return self._number(operand)
        if (number := operator_facts.number_filling(node)) is not None:
            return self._number(number)
        target: Any = node.target
        is_of_symbols = getattr(target, "__module__", "") == "_operator" and target is not operator.getitem
        function = target if is_of_symbols else operator_facts.facts_of(target).function
        if function is None or not nodes.is_number(node):
            return sympy.Float(_any_number(node))
        return sympy.sympify(function(*map(self._number, node.args)))

    # -- how large it is

    def _is_update(self, node: Node, new_weight: Node) -> bool:
        """Return whether a tensor moves a weight by less than half of its own size, as a gradient does."""
        shares = [abs(terms[node]) for terms in self._branches[new_weight] if node in terms]
        return max(shares, default=0.0) < 0.5 and node in nodes.reached([new_weight], nodes.operands_of)

    def _settle(self, sizes: dict[Node, float], updates: set[Node]) -> set[Node]:
        """Add the sizes of states to the sizes of weights; return the states of the size of weights.

        ``updates``: further inputs that are as large as gradients.
        """
        unsized, found = [state for state in self._states if state not in sizes], set[Node]()
        for _ in range(ROUNDS):
            for state in unsized:
                sizes.pop(state, None)
                found.discard(state)
                for terms in self._branches[self._new[state]]:
                    kept = terms.get(state, 0.0)
                    of_weights = _total(terms, sizes, without=state)
                    of_gradients = sum(abs(terms.get(key, 0.0)) for key in (None, *updates))
                    if abs(kept) <= 1 and abs(of_weights) > of_gradients:
                        size = of_weights / (1 - kept if kept < 1 else 1)  # a sum of weights has no bound
                        if abs(size) > abs(sizes.get(state, 0.0)):
                            found.add(state)
                            sizes[state] = size
        return found

    def _ways_from(self, state: Node) -> dict[Node, float]:
        """Return the noise in each state that a unit of noise in one state causes over a long run."""
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
        """Return each state's noise relative to a value, divided by its noise relative to the state."""
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
        """Return sizes assumed for states without a known size: 1 where subtracted from an equal weight."""
        weights = sum(number for key, number in terms.items() if key in self._parameters)
        if abs(weights) <= MOVE:
            return {}
        unsized = (key for key in terms if key in self._states and key not in self._sizes)
        return {key: 1.0 for key in unsized if abs(weights + terms[key]) <= abs(weights) / 16}

    def _passed_on(self) -> dict[Node, dict[Node, float]]:
        """Return the amplification that each value inherits through nonlinear operations."""
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
    """Return a number between 0.2 and 0.8 for an unknown value, always the same for the same key."""
    return 0.2 + 0.6 * zlib.crc32(str(key).encode()) / 2**32


def _raise(found: dict[Node, float], others: Mapping[Node, float]) -> bool:
    """Raise each number of ``found`` to that of ``others`` if larger; return whether any changed."""
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
