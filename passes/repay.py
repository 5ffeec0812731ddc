"""The pass that repays the rounding errors of moments: it subtracts them from the update at once.

    m' = beta m + ...,   s = stored(m'),   p' = p - c m'      ->      p' = p - c (m' - k (s - m'))

Why. The next step reads s, not m'. So a rounding error e = s - m' moves the parameter by c beta e in the next
step, by c beta**2 e in the one after it, and so on: by k c e in all, with k = beta / (1 - beta). The errors
of all steps add up, and in bfloat16 they are most of the error of Adam's parameters. Here each is subtracted
in the step that makes it, and the moment is rounded to nearest.

Theorem. Let c be the same in all steps. Then a parameter is off by ``c k d``, with d the present error of the
moment, d = sum of ``beta**(n - i) e_i`` over the steps i up to n. Proof: of e_i, the parameter has got
``c (-k + beta + ... + beta**(n - i)) e_i``, which is ``-c k beta**(n - i) e_i``. So nothing adds up.

Note [Repaying in the first steps]
----------------------------------
In Adam, c is proportional to 1 / B with B = 1 - beta**t, and falls from step to step. Then k is the sum of
``beta**j B / (1 - beta**(t + j))`` over j >= 1. As an integral from j = 1/2 on it is
``-sqrt(beta) / log(beta) B (-log(1 - q) / q)`` with q = sqrt(beta) (1 - B). Here beta / (1 - beta) stands for
the first factor, which differs by 1e-3, and the Pade approximant (6 - q) / (6 - 4 q) for the last.

And 1 - beta**(t - 1) stands for B, so that the first step repays nothing. There c is divided by the root of
a single square, which may be much smaller than the mean of two. (In blocks, whose elements have a scale in
common, an element with a small first gradient was moved by a third of the learning rate.)

A number that comes from outside of the graph, as in a recorded step, does not show how it is made. If
elements have divisors of their own, as in Adam, one is taken for a correction, and the moment counts its
steps for t. If there was none, the first steps are repaid in part. Without this, k is far too large in them:
five times the error after three steps, twice after three hundred.

A condition may switch from updates of another size, as in RAdam's sixth step, where divisors of elements take
the place of 1. Nothing is repaid before: it would be at the wrong size.

A moment is a state without error terms whose old value is multiplied by a constant. Parameters have to be
linear in its new value, and must not read its old one. Lion (a sign) and Muon (products of matrices) are not.
Numbers that are made of whole tensors, such as LAMB's norms, count as constants.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from fractions import Fraction
from typing import Any

from torch import Tensor, float32, float64, ops
from torch.fx import Node

from collage_fx import graph
from collage_fx.graph import GraphEditor, Role, StateTensor, StepProgram
from collage_fx.passes.base import Pass

aten = ops.aten

#: Largest product of k and the error of a rounding, relative to the moment, or to the largest of its block.
#: Beyond it, the present error of the moment weighs more in some ten steps than what adds up in them.
MOST = 0.05

#: Largest such product if no element has a divisor or a factor of its own.
MOST_UNSCALED = 0.12

#: Powers that are functions of one operand.
_POWERS = {aten.sqrt.default: Fraction(1, 2), aten.reciprocal.default: Fraction(-1)}


class Repay(Pass):
    """Pass that rounds moments to nearest, and subtracts the sum of later effects of each error."""

    name = "repay"
    after = ("allocate", "refine-numbers")

    def applies_to(self, program: StepProgram) -> bool:
        return program.rounding == "repay" and any(_is_moment(program, state) for state in program.expanded)

    def run(self, program: StepProgram) -> str:
        editor = GraphEditor(program.gm, self.name)
        moments = [state for state in program.expanded if _is_moment(program, state)]
        return f"{sum(_repay(editor, program, state) for state in moments)} moments"


def _is_moment(program: StepProgram, state: StateTensor) -> bool:
    """Return whether a rounded state keeps a constant share of its old value, and its errors for a while."""
    fmt, slopes = state.error_format, state.recurrence.slopes
    if state.info.role is not Role.STATE or not fmt.is_repayable:
        return False
    if len(slopes) != 1 or not slopes[0].is_number or not 0 < slopes[0] < 1:
        return False
    return _most_repaid(program, state) <= MOST_UNSCALED


def _most_repaid(program: StepProgram, state: StateTensor) -> float:
    """Return the product that :data:`MOST` is the limit of.

    It is the same for all tensors of a plan, whatever their sizes: so one launch computes their numbers.
    """
    bounds = [fmt.error_bound(state.value.dtype) for fmt in program.formats_of_signed(state)]
    beta = float(state.recurrence.slopes[0])
    return _all_later(beta) * max(float(max(bound.relative, bound.of_largest)) for bound in bounds)


def _all_later(beta: float) -> float:
    """Return k for an update that does not change: the sum of ``beta**j`` over all j from 1 on."""
    return beta / (1 - beta)


def _repay(editor: GraphEditor, program: StepProgram, state: StateTensor) -> bool:
    """Rewrite the update of a moment that parameters are linear in; return whether they are."""
    moment = graph.unless_skipped(state.placeholder, graph.new_value(state))
    beta = float(state.recurrence.slopes[0])
    way = _Way(program, state, moment)
    nodes = (node for node in editor.graph.nodes if node in way.sources)
    corrections = {node: found for node in nodes if (found := _correction(node, beta)) is not None}
    powers = _Powers(editor.graph.nodes, moment, corrections, way.others)
    if not way.readers or not way.moved <= powers.linear:
        return False
    if _most_repaid(program, state) > MOST and powers.is_scaled:
        return False
    order = {node: i for i, node in enumerate(editor.graph.nodes)}
    first = min(way.readers, key=order.__getitem__)
    fmt = state.error_format
    # A value that others read, too, has to be right on average: nothing is repaid to them.
    store = fmt.store_nearest if way.is_alone else fmt.store
    with editor.graph.inserting_before(first):
        k: Any = _all_later(beta)
        is_counted = powers.is_scaled and not corrections
        steps = {power.args[1] for _, power in corrections.values()}
        if len(steps) == 1 and all(powers.of[value] == -1 for value in way.moved):
            correction, (sign, _) = next(iter(corrections.items()))
            _move_above(first, correction, order)
            k = _in_this_step(editor, beta, lambda b: b if sign > 0 else -b, correction)
        elif is_counted:
            k = _in_this_step(editor, beta, lambda steps: 1 - beta ** (steps + 1), state.auxiliaries[-1])
        inputs = (moment, state.placeholder, *state.added_inputs)
        parts = editor.inline(store, *inputs, elementwise=fmt.is_elementwise)
        (value,) = editor.inline(fmt.join, *parts, elementwise=fmt.is_elementwise)
        for condition, is_elementwise_if in powers.switches.items():
            _move_above(first, condition, order)
            is_true = editor.convert(condition, float32)
            is_on = is_true if is_elementwise_if else editor.call(aten.sub.Tensor, 1.0, is_true)
            k = editor.call(aten.mul.Tensor, is_on, k)
        later = editor.call(aten.mul.Tensor, editor.call(aten.sub.Tensor, value, moment), k)
        repaid = editor.call(aten.sub.Tensor, moment, later)
    for reader in way.readers:
        reader.replace_input_with(moment, repaid)
    why, _, _ = state.selection.partition("; rounded ")
    rounding = "to nearest" if way.is_alone else "up or down"
    state.selection = f"{why}; rounded {rounding}, which each update repays"
    if way.is_alone:
        state.rounded, state.counts_steps = parts, is_counted
    return True


def _move_above(first: Node, value: Node, order: dict[Node, int]) -> None:
    """Move a value, and all nodes that it is computed from, above a node."""
    for node in sorted(graph.made_of(value), key=order.__getitem__):
        if order[node] > order[first]:
            first.prepend(node)


def _in_this_step(
    editor: GraphEditor, beta: float, correction: Callable[[Tensor], Tensor], number: Node
) -> Node:
    """Add the k of a step with ``B = correction(number)``: Note [Repaying in the first steps]."""

    def later(number: Tensor) -> Tensor:
        b = correction(number)
        q = (1 - b) * beta**0.5
        return (b - (1 - beta)) * (_all_later(beta) / beta) * ((6 - q) / (6 - 4 * q))

    (k,) = editor.inline(later, editor.convert(number, float64))
    return editor.convert(k, float32)


class _Way:
    """Way from a moment's new value to the parameters that are made of it.

    Attributes:
        moved: the new values of those parameters.
        sources: the values that they are made of, up to the new values of other state.
        others: the new values of other state. What the moment does by way of them is not repaid.
        readers: readers of the moment that lead to ``moved`` alone; none if another value is made on the way,
            or if those parameters read the moment's old value, too.
        is_alone: whether nothing reads the moment but ``readers`` and its store.
    """

    def __init__(self, program: StepProgram, state: StateTensor, moment: Node) -> None:
        step = program.gm.graph
        inputs = zip(graph.placeholders(step), program.inputs, strict=False)  # the others are auxiliaries
        parameters = {node for node, info in inputs if info.role is Role.PARAMETER}
        stores = graph.copies_to_inputs(step)
        stored = {node: graph.unconverted(graph.stored(store)) for node, store in stores.items()}
        new = {node: graph.unless_skipped(node, value) for node, value in stored.items()}
        made = graph.reached([moment], lambda node: node.users)
        own = graph.stored(stores[state.placeholder])
        self.moved = {value for node, value in new.items() if node in parameters and value in made}
        self.others = {value for node, value in new.items() if node not in parameters} - {moment}
        written = {store: graph.stored(store) for store in stores.values()}  # some graphs return stores, too
        returned = (written.get(node, node) for node in step.output_node().all_input_nodes)
        results = {*written.values(), *returned} - self.moved - {own}
        self.sources = graph.made_of(*self.moved, up_to={moment, *self.others})
        elsewhere = graph.made_of(*results, up_to=self.moved) - self.moved
        on_the_way = (self.sources - self.others) & made
        is_shared = not on_the_way.isdisjoint(elsewhere | graph.made_of(own, up_to={moment}))
        is_read = not is_shared and state.placeholder not in self.sources
        self.readers = [user for user in moment.users if user in on_the_way] if is_read else []
        self.is_alone = moment not in elsewhere


class _Powers:
    """Powers of a correction that the values of a graph, or their slopes in a moment, are proportional to.

    Attributes:
        of: power of each value that is made of a correction or of the moment; None if it has none.
        linear: values that are linear in the moment; ``of`` has the powers of their slopes.
        is_scaled: whether elements of one of these are multiplied, or divided, by different numbers.
        switches: conditions, numbers, by which a slope has one number or one for each element, and the value
            of the condition for the latter.
    """

    def __init__(
        self, nodes: Iterable[Node], moment: Node, corrections: Collection[Node], others: Collection[Node]
    ) -> None:
        self.of: dict[Node, Fraction | None] = dict.fromkeys(corrections, Fraction(1))
        self.of[moment] = Fraction(0)
        self.linear, self.is_scaled, self._others = {moment}, False, others
        self.switches: dict[Node, bool] = {}
        self._made_of_moment = {moment}
        for node in nodes:
            if node in self.of or self.of.keys().isdisjoint(node.all_input_nodes):
                continue
            is_made = not self._made_of_moment.isdisjoint(node.all_input_nodes)
            if is_made and not (graph.is_number(node) or node in others):
                self._made_of_moment.add(node)
            self.of[node] = self._power(node)

    def _power(self, node: Node) -> Fraction | None:
        """Return the power of a value; add the value to ``linear`` if it is linear in the moment."""
        operands = [each for each in node.args if isinstance(each, Node)]
        made = [each for each in operands if each in self._made_of_moment]
        sign = "" if node.kwargs else graph.facts_of(node.target).sign
        is_linear, power = False, None
        if (
            graph.is_conversion(node)
            or graph.passed_operand(node) is not None
            or node.target is aten.neg.default
        ):
            is_linear, power = True, self._of(operands[0])
        elif sign in ("+", "-") or node.target is aten.where.self:
            is_linear = sign != "" or (node.args[0] not in made and len(made) == 1)
            powers = {*map(self._of, made or node.args)}
            power = powers.pop() if len(powers) == 1 else None
        elif sign in ("*", "/"):
            is_linear = len(made) == 1 and (sign == "*" or node.args[0] in made)
            is_linear = is_linear and all(map(self._is_linear_if_switched, operands))
            others = (each for each in operands if each not in made)
            self.is_scaled |= bool(made) and any(map(graph.has_elements, others))
            first, second = map(self._of, node.args)
            if first is not None and second is not None:
                power = first + second if sign == "*" else first - second
        elif node.target in _POWERS and (power := self._of(operands[0])) is not None:
            power *= _POWERS[node.target]
        if node in self._made_of_moment and is_linear and self.linear.issuperset(made):
            self.linear.add(node)
        return power

    def _is_linear_if_switched(self, factor: Node) -> bool:
        """Note the conditions that switch a factor; return whether each switches to numbers for elements."""
        for node in graph.made_of(factor, up_to=self._others) - self._made_of_moment:
            if node.target is aten.where.self and graph.is_number(condition := node.all_input_nodes[0]):
                has = [isinstance(each, Node) and graph.has_elements(each) for each in node.args[1:]]
                if has not in ([True, False], [False, True]):
                    return False
                self.switches[condition] = has[0]
        return True

    def _of(self, value: Any) -> Fraction | None:
        return self.of.get(value, Fraction(0)) if isinstance(value, Node) else Fraction(0)


def _correction(node: Node, beta: float) -> tuple[int, Node] | None:
    """Return 1 and ``beta**t`` if a value is the number ``1 - beta**t``, -1 for ``beta**t - 1``; or None."""
    one, minus, power = (graph.is_number(node) and _in_power(node, beta)) or (0.0, 0.0, None)
    return (int(one), power) if power is not None and (one, minus) in ((1, -1), (-1, 1)) else None


def _in_power(value: Any, beta: float) -> tuple[float, float, Node | None] | None:
    """Return ``a``, ``c`` and ``beta**t`` of a number ``a + c * beta**t``; None for other numbers."""
    if (number := graph.known_number(value)) is not None:
        return number, 0.0, None
    if not isinstance(value, Node) or (node := graph.unconverted(value)).op != "call_function" or node.kwargs:
        return None
    if getattr(node.target, "overloadpacket", None) is aten.pow:
        return (0.0, 1.0, node) if graph.known_number(node.args[0]) == beta else None
    sign, parts = graph.facts_of(node.target).sign, [_in_power(each, beta) for each in node.args]
    if node.target is aten.neg.default:
        sign, parts = "-", [(0.0, 0.0, None), *parts]
    if sign not in ("+", "-", "*") or None in parts:
        return None
    (a, c, power), (b, d, other) = (part for part in parts if part is not None)
    if sign == "*":
        return None if power is not None and other is not None else (a * b, a * d + b * c, power or other)
    if power is not None and other is not None and power is not other:
        return None
    return (a + b, c + d, power or other) if sign == "+" else (a - b, c - d, power or other)
