"""Recurrences read out of a graph: how a state tensor's new value depends on its old one.

Two readings of the same nodes. The *expression* is for people: SymPy, other state tensors' new values cut off
as primed
symbols, tensor operations without an elementwise meaning as opaque functions. The *slopes* are for decisions:
the coefficients of the old value, exact where the graph's constants are, one per branch where the update is
piecewise linear.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

import sympy
import torch
from torch.fx import Node

from collage_fx.graph.nodes import operator_name, tensor_value
from collage_fx.graph.operator_facts import facts_of, ignores_values, number_filling, passed_operand
from collage_fx.graph.program import Kind, Recurrence, Verdict
from collage_fx.graph.skipping import unless_skipped
from collage_fx.numerics import FloatFormat

aten = torch.ops.aten

#: A moving average may stall within this relative distance of its target before it counts as lossy: see
#: :func:`judge`.
TOLERATED_STALL = Fraction(1, 16)

#: Operations from which on an expression for people is cut off. An iterated matrix polynomial reads each
#: value several times: written out, five iterations of Muon's have a hundred thousand operations.
LONGEST_EXPRESSION = 400


class _Nonlinear:
    """The class of a marker: a value depends on the old one, but not piecewise linearly."""


_NONLINEAR = _Nonlinear()

#: Slopes of a value with respect to the old one: empty for a value that does not depend on it.
Slopes = frozenset[sympy.Expr] | _Nonlinear


def read_recurrence(
    placeholder: Node,
    new_value: Node,
    symbols: Mapping[Node, str],
    peers: Mapping[Node, str],
    *,
    is_parameter: bool,
) -> Recurrence:
    """The recurrence of one state tensor.

    Args:
        placeholder: its input node.
        new_value: what the epilogue stores into it. Where a condition may skip the step, the recurrence is
            that of a step that is taken: a value that stays as it is loses nothing.
        symbols: names of the graph's inputs.
        peers: new values of *other* state tensors and their primed names; they are leaves.
        is_parameter: a parameter that decays a little each step (weight decay) is still an accumulation of
            updates.
    """
    taken = unless_skipped(placeholder, new_value)
    others = {node: symbol for node, symbol in peers.items() if node not in (new_value, taken)}
    reader = _Reader(placeholder, taken, symbols, others)
    slopes = reader.slopes(taken)
    numbers = () if isinstance(slopes, _Nonlinear) else tuple(sorted(slopes, key=sympy.default_sort_key))
    kind = Kind.OTHER if reader.depends(taken) and not numbers else _kind(slopes)
    if is_parameter and kind is Kind.MOVING_AVERAGE:
        kind = Kind.ACCUMULATION
    return Recurrence(reader.expression(taken), kind, numbers, reader.path())


def _kind(slopes: Slopes) -> Kind:
    if isinstance(slopes, _Nonlinear) or len(slopes) > 1:
        return Kind.OTHER
    if not slopes:
        return Kind.OVERWRITE
    (slope,) = slopes
    if slope == 1:
        return Kind.ACCUMULATION
    return Kind.MOVING_AVERAGE if not slope.is_number or 0 < slope < 1 else Kind.OTHER


class _Reader:
    """Walks a state tensor's update backwards from its store, each node once."""

    def __init__(
        self, placeholder: Node, new_value: Node, symbols: Mapping[Node, str], peers: Mapping[Node, str]
    ) -> None:
        self.placeholder = placeholder
        self.new_value = new_value
        self.symbols = symbols
        self.peers = peers
        self._depends: dict[Node, bool] = {}
        self._expressions: dict[Node, sympy.Expr] = {}
        self._lengths: dict[Node, int] = {}
        self._cuts: list[str] = []
        self._slopes: dict[Node, Slopes] = {}

    def path(self) -> tuple[Node, ...]:
        """The nodes between the tensor's load and its store, in graph order."""
        self.depends(self.new_value)
        order = {node: i for i, node in enumerate(self.placeholder.graph.nodes)}
        return tuple(
            sorted(
                (n for n, d in self._depends.items() if d and n is not self.placeholder),
                key=order.__getitem__,
            )
        )

    def depends(self, node: Any) -> bool:
        """Whether ``node`` is computed from the old value (not through another state tensor's new value)."""
        if not isinstance(node, Node):
            return False
        if node not in self._depends:
            if node is self.placeholder:
                self._depends[node] = True
            elif node in self.peers or ignores_values(node.target):
                self._depends[node] = False
            else:
                # A list: every operand is visited, not only up to the first that depends.
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
                expression, length = self._cut_off(value), 1
            self._expressions[value], self._lengths[value] = expression, length
        return self._expressions[value]

    def _cut_off(self, node: Node) -> sympy.Expr:
        """A symbol for a value: its last operation, numbered where there are several."""
        operation = operator_name(node.target)
        self._cuts.append(operation)
        times = self._cuts.count(operation)
        return sympy.Symbol(f"{operation}(…)" + (f"#{times}" if times > 1 else ""))

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

    def slopes(self, value: Any) -> Slopes:
        if not self.depends(value):
            return frozenset()
        if value not in self._slopes:
            self._slopes[value] = self._slopes_of(value)
        return self._slopes[value]

    def _slopes_of(self, node: Node) -> Slopes:
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
        if function in (sympy.Max, sympy.Min):
            return _branches(self.slopes(args[0]), self.slopes(args[1]))
        if packet is aten.where and not self.depends(args[0]):
            return _branches(self.slopes(args[1]), self.slopes(args[2]))
        if packet in (aten.clamp, aten.clamp_min, aten.clamp_max):
            slopes: Slopes = frozenset()
            for value in (*args, *node.kwargs.values()):
                slopes = _branches(slopes, self.slopes(value))
            return slopes
        return _NONLINEAR

    def _scaled(self, value: Any, factor: Any, *, inverse: bool = False) -> Slopes:
        """``value * factor`` (or ``value / factor``), where ``value`` depends on the old value."""
        if self.depends(factor):
            return _NONLINEAR
        coefficient = _exact(factor) if not isinstance(factor, Node) else self._coefficient(factor)
        return _map(self.slopes(value), lambda slope: slope / coefficient if inverse else slope * coefficient)

    def _coefficient(self, factor: Node) -> sympy.Expr:
        """A factor that is a graph value: its expression if it is one number, else an unknown."""
        if (constant := number_filling(factor)) is not None:
            return self._coefficient(constant) if isinstance(constant, Node) else _exact(constant)
        value = tensor_value(factor)
        if value is None or value.dim() == 0:
            return self.expression(factor)
        return sympy.Symbol(factor.name)


def _map(slopes: Slopes, function: Callable[[sympy.Expr], sympy.Expr]) -> Slopes:
    return slopes if isinstance(slopes, _Nonlinear) else frozenset(function(slope) for slope in slopes)


def _sum(first: Slopes, second: Slopes) -> Slopes:
    if isinstance(first, _Nonlinear) or isinstance(second, _Nonlinear):
        return _NONLINEAR
    if not first or not second:
        return first or second
    return frozenset(a + b for a in first for b in second)


def _branches(first: Slopes, second: Slopes) -> Slopes:
    """The slopes of either of two values; one that does not depend on the old value contributes none."""
    if isinstance(first, _Nonlinear) or isinstance(second, _Nonlinear):
        return _NONLINEAR
    return first | second


def _number(value: Any) -> sympy.Expr:
    """A constant as an expression for display: six digits, whole numbers as integers."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return sympy.Symbol(str(value))
    if math.isfinite(value) and value == int(value):
        return sympy.Integer(int(value))
    return sympy.Float(f"{value:.6g}") if math.isfinite(value) else sympy.Float(value)


def _exact(value: Any) -> sympy.Expr:
    """A constant as an expression for arithmetic: the exact value of the double."""
    if isinstance(value, (int, float)) and math.isfinite(value):
        fraction = Fraction(value)
        return sympy.Rational(fraction.numerator, fraction.denominator)
    return sympy.Symbol(str(value))


def representation_error(decay: Fraction, fmt: FloatFormat) -> Fraction:
    """|RN(a) - a| / |1 - a|: how wrong the *rate* 1 - a becomes when a itself is stored in ``fmt``."""
    return abs(fmt.nearest(decay) - decay) / abs(1 - decay)


def stall_band(decay: Fraction, fmt: FloatFormat) -> Fraction:
    """U / (1 - a): the amplification of the roundoff u of each step by a recurrence of decay a.

    ``v' = a v + (1 - a) x`` moves v by ``(1 - a)(x - v)``; rounded to ``fmt`` the move is lost once it is
    below ``u v``, that is as soon as v is within ``u/(1 - a)`` of its target, relatively. Independent errors
    of each step add up likewise.
    """
    return fmt.unit_roundoff / abs(1 - decay)


def dithered_noise(decay: Fraction, fmt: FloatFormat) -> float:
    """The rms noise of a value of decay a that dither rounds at every step, relatively, after a long run.

    ``sqrt(2/3) u / sqrt(1 - a**2)``. To one of two neighbours an ulp apart, up with a probability p of the
    rest, a rounding is right on average and has the variance ``p (1 - p) ulp**2``: ``ulp**2 / 6`` over all
    rests. An ulp is ``2 u v`` at most, just above a power of two. Of each step's error the next keep ``a``:
    ``(2 u)**2 / 6 * (1 + a**2 + a**4 + ...)`` is the square of the noise. That is of choices at random. Those
    of dither make up for one another, of values between two powers of two an ulp is smaller, and a value that
    hardly moves is rounded to what it was, so that this is a bound: averages of squares have from a quarter
    to three quarters of it (in bfloat16, ``a = 0.999``: 0.028 of 0.071). Infinite where nothing decays.
    Underflow is not in it.
    """
    return math.sqrt(2 / 3 / (1 - decay**2)) * float(fmt.unit_roundoff) if decay < 1 else math.inf


def judge(recurrence: Recurrence, fmt: FloatFormat) -> Verdict:
    """Whether storing the tensor in ``fmt``, rounded to nearest, loses its update; and dither's noise.

    An accumulation is lossy: any move below half an ulp is lost, every time. A moving average is lossy if it
    stalls further than :data:`TOLERATED_STALL` (1/16, 6 %) from its target, ``u/(1 - a)``, or if its rate is
    off by more than that because ``a`` has no close neighbour in the format. In bfloat16 that puts the line
    between a = 0.9 (0.039) and 0.95 (0.078); in float16 between 0.99 (0.049) and 0.995 (0.098). A decay that
    is no compile-time constant may come
    arbitrarily near 1, so it is taken to be lossy. An overwrite is not lossy: nothing of the old value is
    left to lose.
    """
    if recurrence.kind is Kind.OVERWRITE:
        noise = dithered_noise(Fraction(0), fmt)
        return Verdict(False, "the new value does not depend on the old one", noise)
    if recurrence.kind is Kind.ACCUMULATION:
        return _judge_accumulation(recurrence.slopes[0], fmt)
    if not recurrence.slopes:
        return Verdict(
            True,
            "depends on its old value in a way that is not linear, or by way of other state; "
            "no bound is known",
        )
    verdicts = [_judge_slope(slope, fmt) for slope in recurrence.slopes]
    found = next((verdict for verdict in verdicts if verdict.lossy), verdicts[0])
    noises = [verdict.noise for verdict in verdicts if verdict.noise is not None]
    return replace(found, noise=max(noises) if len(noises) == len(verdicts) else None)


def _judge_accumulation(slope: sympy.Expr, fmt: FloatFormat) -> Verdict:
    reason = f"accumulates: moves below ulp/2 (up to 2**-{fmt.precision} of the value) are lost"
    if slope.is_Rational and slope != 1 and fmt.nearest(Fraction(slope.p, slope.q)) == 1:
        reason += f", and its decay of {float(1 - slope):.2g} a step rounds to none"
    return Verdict(True, reason, None if (decay := _decay(slope)) is None else dithered_noise(decay, fmt))


def _judge_slope(slope: sympy.Expr, fmt: FloatFormat) -> Verdict:
    if slope == 1:
        return _judge_accumulation(slope, fmt)
    decay = _decay(slope)
    if decay is None:
        return Verdict(True, "its decay is not a compile-time constant, so it may come arbitrarily near 1")
    noise = dithered_noise(decay, fmt)
    if decay > 1:
        return Verdict(
            True, f"grows by {float(decay):.6g} a step, and the roundoff of each step with it", noise
        )
    if decay == 1:
        return Verdict(True, "alternates in sign without decaying: roundoff accumulates", noise)
    stall, rate = stall_band(decay, fmt), representation_error(decay, fmt)
    numbers = f"u/(1-a) = {float(stall):.2g}, rate off by {float(rate):.2g}, for a = {float(decay):.6g}"
    lossy = max(stall, rate) > TOLERATED_STALL
    return Verdict(lossy, f"{'stalls' if lossy else 'tolerable'}: {numbers}", noise)


def _decay(slope: sympy.Expr) -> Fraction | None:
    """The share of its old size that a value keeps in a step; None where that is no compile-time constant."""
    if not slope.is_number:
        return None
    return abs(Fraction(slope.p, slope.q) if slope.is_Rational else Fraction(float(slope)))
