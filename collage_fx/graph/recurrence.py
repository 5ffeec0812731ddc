"""Recurrences read from a graph: how a state tensor's new value depends on its old value.

The same nodes are read in two ways. The *expression* is for people: SymPy, with primed symbols for other
state tensors' new values, and opaque functions for tensor operations that are not elementwise. The *slopes*
are for decisions: the coefficients of the old value, exact if the graph's constants are, one per branch of a
piecewise linear update.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import sympy
import torch
from torch.fx import Node

from collage_fx.graph.nodes import has_elements, operator_name
from collage_fx.graph.operator_facts import facts_of, ignores_values, number_filling, passed_operand
from collage_fx.graph.program import Kind, Recurrence, Verdict
from collage_fx.graph.skipping import unless_skipped
from collage_fx.numerics import FloatFormat

aten = torch.ops.aten

#: Relative distance from its target at which a moving average may stall without being lossy: :func:`judge`.
TOLERATED_STALL = Fraction(1, 16)

#: Largest number of operations in an expression for people; longer expressions are cut off. An iterated
#: matrix polynomial reads each value several times: five iterations of Muon have 100,000 operations.
LONGEST_EXPRESSION = 400

#: Slopes of a value in the old value: empty if it does not depend on it, None if not piecewise linearly.
Slopes = frozenset[sympy.Expr] | None


def read_recurrence(
    placeholder: Node,
    new_value: Node,
    symbols: Mapping[Node, str],
    peers: Mapping[Node, str],
    *,
    is_parameter: bool,
) -> Recurrence:
    """Read the recurrence of a state tensor from its input node and the stored node.

    ``symbols`` are names of the graph's inputs. ``peers`` are new values of *other* state tensors and their
    primed names; they are leaves. If a condition may skip the step, the recurrence is that of a step that is
    taken: a value that is kept loses nothing. A parameter that decays a little in each step (weight decay)
    still counts as an accumulation of updates.
    """
    taken = unless_skipped(placeholder, new_value)
    others = {node: symbol for node, symbol in peers.items() if node not in (new_value, taken)}
    reader = _Reader(placeholder, symbols, others)
    slopes = tuple(sorted(reader.slopes(taken) or (), key=sympy.default_sort_key))
    kind = _kind(slopes, is_parameter=is_parameter) if reader.depends(taken) else Kind.OVERWRITE
    return Recurrence(reader.expression(taken), kind, slopes, reader.path())


def _kind(slopes: Sequence[sympy.Expr], *, is_parameter: bool) -> Kind:
    """Return the kind of a recurrence whose new value depends on its old value."""
    if len(slopes) != 1 or (slopes[0] != 1 and slopes[0].is_number and not 0 < slopes[0] < 1):
        return Kind.OTHER
    return Kind.ACCUMULATION if is_parameter or slopes[0] == 1 else Kind.MOVING_AVERAGE


class _Reader:
    """Backward walk over a state tensor's update from its store, visiting each node once."""

    def __init__(self, placeholder: Node, symbols: Mapping[Node, str], peers: Mapping[Node, str]) -> None:
        self.placeholder = placeholder
        self.symbols = symbols
        self.peers = peers
        self._depends: dict[Node, bool] = {}
        self._expressions: dict[Node, sympy.Expr] = {}
        self._lengths: dict[Node, int] = {}
        self._cuts: list[str] = []
        self.slopes: Callable[[Any], Slopes] = functools.cache(self._slopes_of)

    def path(self) -> tuple[Node, ...]:
        """Return the nodes between the tensor's load and its store, in order; call ``depends`` first."""
        nodes = self.placeholder.graph.nodes
        return tuple(node for node in nodes if self._depends.get(node) and node is not self.placeholder)

    def depends(self, node: Any) -> bool:
        """Return whether ``node`` is computed from the old value, not by way of another state's new value."""
        if not isinstance(node, Node):
            return False
        if node not in self._depends:
            if node is self.placeholder:
                self._depends[node] = True
            elif node in self.peers or ignores_values(node.target):
                self._depends[node] = False
            else:
                # A list, not a generator: path() needs every operand visited.
                dependent = [self.depends(operand) for operand in node.all_input_nodes]
                self._depends[node] = any(dependent)
        return self._depends[node]

    # -- the expression, for people

    def expression(self, value: Any) -> sympy.Expr:
        if not isinstance(value, Node):
            return _number(value)
        if value not in self._expressions:
            operands = (arg for arg in value.args if isinstance(arg, Node))
            expression, length = self._expression(value), 1 + sum(self._lengths.get(n, 1) for n in operands)
            if length > LONGEST_EXPRESSION:
                self._cuts.append(operation := operator_name(value.target))
                times = self._cuts.count(operation)
                expression = sympy.Symbol(f"{operation}(…)" + (f"#{times}" if times > 1 else ""))
                length = 1
            self._expressions[value], self._lengths[value] = expression, length
        return self._expressions[value]

    def _expression(self, node: Node) -> sympy.Expr:
        if node in self.peers:
            return sympy.Symbol(self.peers[node])
        if node.op != "call_function":
            return sympy.Symbol(self.symbols.get(node, node.name))
        if (operand := passed_operand(node)) is not None:
            return self.expression(operand)
        if (number := number_filling(node)) is not None:
            return self.expression(number)
        if (function := facts_of(node.target).function) is not None:
            return function(*(self.expression(arg) for arg in node.args))
        operands = [self.expression(arg) for arg in node.args if isinstance(arg, (Node, int, float))]
        return sympy.Function(operator_name(node.target))(*operands)

    # -- the slopes, for decisions

    def _slopes_of(self, node: Any) -> Slopes:
        if not self.depends(node):
            return frozenset()
        if node is self.placeholder:
            return frozenset({sympy.Integer(1)})
        function = facts_of(node.target).function
        packet = getattr(node.target, "overloadpacket", node.target)
        args = node.args
        if (operand := passed_operand(node)) is not None:
            return self.slopes(operand)
        if function is operator.neg:
            return _map(self.slopes(args[0]), operator.neg)
        if function is operator.add:
            return _sum(self.slopes(args[0]), self.slopes(args[1]))
        if function is operator.sub:
            return _sum(self.slopes(args[0]), _map(self.slopes(args[1]), operator.neg))
        if function is operator.mul:
            return self._scaled(args[0], args[1]) if self.depends(args[0]) else self._scaled(args[1], args[0])
        if function is operator.truediv and not self.depends(args[1]):
            return self._scaled(args[0], args[1], inverse=True)
        if packet is aten.where and not self.depends(args[0]):
            return _branches(self.slopes(args[1]), self.slopes(args[2]))
        if function in (sympy.Max, sympy.Min) or packet in (aten.clamp, aten.clamp_min, aten.clamp_max):
            return functools.reduce(_branches, map(self.slopes, (*args, *node.kwargs.values())))
        return None

    def _scaled(self, value: Any, factor: Any, *, inverse: bool = False) -> Slopes:
        """Return the slopes of ``value * factor`` or ``value / factor``; ``value`` has slopes of its own."""
        if self.depends(factor):
            return None
        coefficient = self._coefficient(factor)
        return _map(self.slopes(value), lambda slope: slope / coefficient if inverse else slope * coefficient)

    def _coefficient(self, factor: Any) -> sympy.Expr:
        """Return the expression of a factor that is a single number, otherwise an unknown."""
        if not isinstance(factor, Node):
            return _exact(factor)
        if (constant := number_filling(factor)) is not None:
            return self._coefficient(constant)
        return sympy.Symbol(factor.name) if has_elements(factor) else self.expression(factor)


def _map(slopes: Slopes, function: Callable[[sympy.Expr], sympy.Expr]) -> Slopes:
    return None if slopes is None else frozenset(map(function, slopes))


def _sum(first: Slopes, second: Slopes) -> Slopes:
    if first is None or second is None:
        return None
    if not first or not second:
        return first or second
    return frozenset(a + b for a in first for b in second)


def _branches(first: Slopes, second: Slopes) -> Slopes:
    """Return the slopes of either of two values; a value independent of the old value adds none."""
    return None if first is None or second is None else first | second


def _number(value: Any) -> sympy.Expr:
    """Return a constant as an expression for display: six digits, whole numbers as integers."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return sympy.Symbol(str(value))
    if math.isfinite(value) and value == int(value):
        return sympy.Integer(int(value))
    return sympy.Float(f"{value:.6g}") if math.isfinite(value) else sympy.Float(value)


def _exact(value: Any) -> sympy.Expr:
    """Return a constant as an expression for arithmetic: the exact value of the double."""
    if isinstance(value, (int, float)) and math.isfinite(value):
        fraction = Fraction(value)
        return sympy.Rational(fraction.numerator, fraction.denominator)
    return sympy.Symbol(str(value))


def representation_error(decay: Fraction, fmt: FloatFormat) -> Fraction:
    """Return ``|RN(a) - a| / |1 - a|``: relative error of the *rate* 1 - a if a is stored in ``fmt``."""
    return abs(fmt.nearest(decay) - decay) / abs(1 - decay)


def stall_band(decay: Fraction, fmt: FloatFormat) -> Fraction:
    """Return ``u / |1 - a|``: the amplification of each step's roundoff u by a recurrence of decay a.

    ``v' = a v + (1 - a) x`` moves v by ``(1 - a)(x - v)``. Rounding to ``fmt`` loses a move smaller than
    ``u v``, that is once the relative distance of v to its target is below ``u/(1 - a)``. Independent errors
    of the steps add up to the same bound.
    """
    return fmt.unit_roundoff / abs(1 - decay)


def rms_noise(decay: Fraction, fmt: FloatFormat) -> float:
    """Return the relative rms noise, over a long run, of a value of decay a that dither rounds every step.

    The noise is ``sqrt(2/3) u / sqrt(1 - a**2)``; infinite if a is 1 or more. Underflow is not included.

    Derivation: a number between two neighbours, rounded up with a probability of its fraction p of an ulp, is
    right on average, with variance ``p (1 - p) ulp**2``; the mean over all p is ``ulp**2 / 6``. An ulp is at
    most ``2 u v``. Each later step keeps the share ``a`` of an error, so the square of the noise is
    ``(2 u)**2 / 6 * (1 + a**2 + a**4 + ...)``. Dither has less: its errors cancel each other. Averages of
    squares were measured at a quarter to three quarters of it (bfloat16, ``a = 0.999``: 0.028 of 0.071).
    """
    return math.sqrt(2 / 3 / (1 - decay**2)) * float(fmt.unit_roundoff) if decay < 1 else math.inf


def judge(recurrence: Recurrence, fmt: FloatFormat) -> Verdict:
    """Judge whether storing a tensor in ``fmt``, rounded to nearest, loses its update; add dither's noise.

    An accumulation is lossy: every move below half an ulp is lost. A moving average is lossy if its stall
    band ``u/(1 - a)`` exceeds :data:`TOLERATED_STALL` (1/16, 6 %), or if the format represents ``a`` so badly
    that the rate 1 - a has a larger relative error than that. In bfloat16 the limit lies between a = 0.9
    (0.039) and 0.95 (0.078); in float16 between 0.99 (0.049) and 0.995 (0.098). A decay that is unknown at
    compile time may be arbitrarily near 1, so it counts as lossy. An overwrite is not lossy.
    """
    if recurrence.kind is Kind.OVERWRITE:
        noise = rms_noise(Fraction(0), fmt)
        return Verdict(False, "the new value does not depend on the old one", noise)
    if recurrence.kind is Kind.ACCUMULATION:
        return _judge_accumulation(recurrence.slopes[0], fmt)
    if not recurrence.slopes:
        why = "depends on its old value nonlinearly, or by way of other state; no bound is known"
        return Verdict(True, why)
    verdicts = [_judge_slope(slope, fmt) for slope in recurrence.slopes]
    found = next((verdict for verdict in verdicts if verdict.lossy), verdicts[0])
    noises = [verdict.noise for verdict in verdicts if verdict.noise is not None]
    return replace(found, noise=max(noises) if len(noises) == len(verdicts) else None)


def _judge_accumulation(slope: sympy.Expr, fmt: FloatFormat) -> Verdict:
    reason = f"accumulates: moves below ulp/2 (up to 2**-{fmt.precision} of the value) are lost"
    if slope.is_Rational and slope != 1 and fmt.nearest(Fraction(slope.p, slope.q)) == 1:
        reason += f", and its decay of {float(1 - slope):.2g} a step rounds to none"
    return Verdict(True, reason, None if (decay := _decay(slope)) is None else rms_noise(decay, fmt))


def _judge_slope(slope: sympy.Expr, fmt: FloatFormat) -> Verdict:
    if slope == 1:
        return _judge_accumulation(slope, fmt)
    decay = _decay(slope)
    if decay is None:
        return Verdict(True, "its decay is not a compile-time constant, so it may come arbitrarily near 1")
    noise = rms_noise(decay, fmt)
    if decay > 1:
        why = f"grows by {float(decay):.6g} a step, and the roundoff of each step with it"
        return Verdict(True, why, noise)
    if decay == 1:
        return Verdict(True, "alternates in sign without decaying: roundoff accumulates", noise)
    stall, rate = stall_band(decay, fmt), representation_error(decay, fmt)
    numbers = f"u/(1-a) = {float(stall):.2g}, rate off by {float(rate):.2g}, for a = {float(decay):.6g}"
    lossy = max(stall, rate) > TOLERATED_STALL
    return Verdict(lossy, f"{'stalls' if lossy else 'tolerable'}: {numbers}", noise)


def _decay(slope: sympy.Expr) -> Fraction | None:
    """Return the share of its old value that a value keeps in a step; None if unknown at compile time."""
    if not slope.is_number:
        return None
    return abs(Fraction(slope.p, slope.q) if slope.is_Rational else Fraction(float(slope)))
