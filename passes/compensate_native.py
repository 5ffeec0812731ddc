"""The pass for ``native`` compensation: the paper's algorithms in the storage format, each node rounded.

A selected tensor's old value is a double word (hi, lo), and all values on the tensor's own path, from its
load to its store, are double words. Sums, products with a number (itself a double word: [Yu24], section 4.2),
products with a tensor and negation have double-word algorithms; a decay such as 0.999 or 1 - lr*wd is
computed as a sum. Any other operation that means the same on float32 is computed on the joined float32 value
and split again, so that no operation on the path drops the error term. Nodes off the path read hi, which is
the value rounded to nearest, since ``|lo| <= ulp(hi)/2``. If an optimizer compensates by hand, the values
that it computes from the new value belong to the path, too: Note [Kahan's own term] in ``graph/feedback.py``.

Note [Operands that are not added]
----------------------------------
In ``p + y`` the rounding errors of y are relative to y, the amount by which p moves. In other operations they
are larger relative to the move: in ``p * (1 - lr g)`` the factor rounds to 1 in the storage format, and
``p' = x0 - lr z`` may round to ``x0``. So the other operand of a product, and of any operation but a sum, is
computed in float32 from the inputs of the step and from whole double words. The same holds for the terms of a
sum in three cases: the old value's coefficient is not within u of 1; the new value does not depend on the old
value; or there are several terms, which may cancel.

Note [Decay is an increment]
----------------------------
A weight decay of 1e-6 is a fifteenth of the last bit of a bfloat16 pair of about 1: ``p * (1 - 1e-6)``,
rounded to a pair before the update is added, is p again, step after step. So ``c x`` with c near 1 is
computed as ``x + (c-1) x``, and if y is added to it, as ``x + ((c-1) x + y)``: decay and update form a single
increment, which is rounded only after they are added. c - 1 is exact in the arithmetic that c comes in
(Sterbenz, for 1/2 <= c <= 2), so its relative error as a double word is u**2 of c - 1, not of c. With
c - 1 = d, DWTimesDW1 (7 u**2) and AccurateDWPlusDW or Grow (3 u**2), to first order in u**2,

    |error| <= 3 |c x + y| + 3 |d x + y| + 8 |d x|, or 3 |c x| + 8 |d x| if nothing is added.

Near 1 means ``|c - 1| <= |c|/2``, that is 2/3 <= c <= 2; there 3 |c x| + 8 |d x| is at most 7 |c x|, the
bound of the product itself. A number that is an input of the graph, and each element of a tensor, is compared
with 1 at run time: if far from 1, d is c and x is not added, with the same bound. Its conversion to float32
adds 2**-24 |d x|. An operation in float32 reads ``c x`` as the float32 sum of x and (c-1) x, not as the pair:
the error is 2**-24 |c x| instead of 3 u**2 |c x|.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from collage_fx import graph
from collage_fx.graph import GraphEditor, Kind, StateTensor, StepProgram
from collage_fx.numerics import DoubleWord, arithmetic, operators
from collage_fx.passes.base import Pass

aten = torch.ops.aten

#: The nodes of hi and lo.
Word = tuple[Node, Node]


class CompensateNative(Pass):
    """Pass that computes in double words from the load to the store of each selected tensor."""

    name = "compensate-native"
    after = ("allocate",)

    def applies_to(self, program: StepProgram) -> bool:
        return program.arithmetic == "native"

    def run(self, program: StepProgram) -> str:
        editor = GraphEditor(program.gm, self.name)
        order = {node: i for i, node in enumerate(editor.graph.nodes)}
        skips = [graph.set_aside(state) for state in program.compensated]
        for states, path in _shared_paths(program):
            _PathRewriter(editor, states, sorted(path, key=order.__getitem__)).run()
        for state, skip in zip(program.compensated, skips, strict=True):
            graph.restore(editor, state, skip)
        return program.compensation


def _shared_paths(program: StepProgram) -> list[tuple[list[StateTensor], set[Node]]]:
    """Group the states of a dtype whose paths share nodes, as the slow and fast weights of an average do.

    Also states whose new value is computed from another's path: Note [Operands that are not added].
    """
    paths: dict[Node, set[Node]] = {}
    for state in program.compensated:
        own_term = graph.fed_back(state, program.states)
        copies = graph.copies_read_by(own_term, state.placeholder)
        paths[state.placeholder] = own_term.union(state.recurrence.path, copies)

    def nodes_of(state: StateTensor) -> Iterator[tuple[torch.dtype, Node]]:
        sources = set[Node]() if _keeps_old_value(state) else graph.made_of(state.stored)
        return ((state.value.dtype, node) for node in paths[state.placeholder] | sources)

    groups = graph.components(program.compensated, nodes_of)
    return [(states, set().union(*(paths[state.placeholder] for state in states))) for states in groups]


def _keeps_old_value(state: StateTensor) -> bool:
    """Return whether a new value is the old value plus a single term, or a decayed average."""
    recurrence = state.recurrence
    if recurrence.kind is Kind.MOVING_AVERAGE:
        return True
    u, path = state.format.unit_roundoff, {state.placeholder, *recurrence.path}
    sums = [node for node in recurrence.path if graph.facts_of(node.target).sign in ("+", "-")]
    terms = [operand for node in sums for operand in node.all_input_nodes if operand not in path]
    if recurrence.kind is not Kind.ACCUMULATION or (len(terms) > 1 and any(map(_is_rounded, terms))):
        return False
    return all(slope.is_number and abs(slope - 1) <= u for slope in recurrence.slopes)


class _PathRewriter:
    """Rewriter of the path of state tensors of the same dtype.

    ``words`` maps the hi node of every double word on the path to the pair.
    """

    def __init__(self, editor: GraphEditor, states: Sequence[StateTensor], path: Sequence[Node]) -> None:
        self.editor = editor
        self.states = states
        self.path = path
        self.reference = states[0].placeholder
        self.dtype = states[0].value.dtype
        self.words: dict[Node, Word] = {}
        for state in states:
            (lo,) = state.auxiliaries
            self.words[state.placeholder] = state.placeholder, lo
        #: Nodes of the path that are reached from a load without passing an operator of the storage format.
        self.whole = set(self.words)
        #: Mapping from the hi node of ``c x``, computed as ``x + (c-1) x``, to the words of both terms.
        self.increments: dict[Node, tuple[Word, Word]] = {}
        #: Whether terms that are added to old values may be rounded before.
        self.adds_rounded = all(map(_keeps_old_value, states))
        self._unrounded: dict[Node, Node] = {}

    def run(self) -> None:
        for node in self.path:
            if self.whole.isdisjoint(node.all_input_nodes):
                continue
            with self.editor.graph.inserting_before(node):
                result = self._rewritten(node)
            if result is not None or node in self.words or graph.is_transparent(node.target):
                self.whole.add(result or node)
            if result is not None:
                node.replace_all_uses_with(result)
        for state in self.states:
            with self.editor.graph.inserting_before(state.store):
                self._store(state)

    def _store(self, state: StateTensor) -> None:
        stored = state.stored
        if stored not in self.whole and state.depends_on_old_value:
            state.refusal = (
                f"{stored.name} ({stored.target}) has no double-word algorithm; its error term stays zero"
            )
        hi, lo = self.words[stored] if stored in self.words else self._parts(self.unrounded(stored))
        state.store.update_arg(1, hi)
        self.editor.store(state.auxiliaries[0], *self.editor.inline(arithmetic.finite_or_zero, lo, hi))

    def _rewritten(self, node: Node) -> Node | None:
        """Return the node that replaces ``node``; None to leave ``node`` unchanged, reading hi."""
        value = graph.tensor_value(node)
        operands = node.all_input_nodes
        is_element = node.target is operator.getitem
        if value is None or is_element:  # several tensors, or one of them
            if operands[0] in self.words and (is_element or graph.is_movement(node)):
                self.words[node] = node, self._moved(node, self._low_part)
            return None
        if graph.is_conversion(node):
            return self._converted(node, operands[0], value.dtype)
        if not graph.is_transparent(node.target):
            return None
        if value.dtype != self.dtype:
            is_rounded = any(self.unrounded(operand) is not operand for operand in operands)
            return self._on_whole_values(node) if is_rounded else None
        if any(operand in self.words for operand in operands):
            packet = getattr(node.target, "overloadpacket", None)
            if packet in RULES and (word := RULES[packet](self, *node.args)) is not None:
                return self._defined(word)
            if graph.is_movement(node):
                return self._defined((self._moved(node, lambda n: n), self._moved(node, self._low_part)))
        return self._split(self._on_whole_values(node))

    def _moved(self, node: Node, part: Callable[[Node], Node]) -> Node:
        args, kwargs = map_arg((node.args, dict(node.kwargs)), part)
        return self.editor.call(node.target, *args, **kwargs)

    def _low_part(self, operand: Node) -> Node:
        """Return an operand for moving error terms: its lo, zeros without a lo, an index unchanged."""
        if operand in self.words:
            return self.words[operand][1]
        value = graph.tensor_value(operand)
        if value is None or value.dtype != self.dtype:
            return operand
        return self.editor.inline(torch.zeros_like, operand)[0]

    def _converted(self, node: Node, source: Node, dtype: torch.dtype) -> Node | None:
        """Return a cast's result: the whole value in a wider dtype; a double word in the storage format."""
        if source in self.words:
            return source if dtype == self.dtype else self.editor.convert(self._whole(source), dtype)
        return self._split(source) if dtype == self.dtype else None

    def _on_whole_values(self, node: Node) -> Node:
        """Repeat the operation on float32 operands; torch promotes operands of several dtypes."""
        args, kwargs = map_arg((node.args, dict(node.kwargs)), self.unrounded)
        if kwargs.get("dtype") == self.dtype:
            kwargs = {**kwargs, "dtype": torch.float32}
        return self.editor.call(node.target, *args, **kwargs)

    def unrounded(self, node: Node) -> Node:
        """Return an operand computed in float32 from inputs and double words, without roundings.

        The result of an operator that needs the storage format is only converted.
        """
        if node in self.words:
            return self._whole(node)
        if node not in self._unrounded:
            self._unrounded[node] = self._without_roundings(node)
        return self._unrounded[node]

    def _without_roundings(self, node: Node) -> Node:
        value = graph.tensor_value(node)
        if value is None:
            return node
        wanted = torch.float32 if value.dtype == self.dtype else value.dtype
        is_captured = node.op == "call_function" and node.meta.get(graph.PASS_MARK) != self.editor.made_by
        if not is_captured or not graph.is_transparent(node.target):
            return self.editor.convert(node, wanted)
        operands = node.all_input_nodes
        if wanted == value.dtype and all(self.unrounded(operand) is operand for operand in operands):
            return node
        if graph.is_conversion(node):
            return self.editor.convert(self.unrounded(operands[0]), wanted)
        return self.editor.convert(self._on_whole_values(node), wanted)

    def _whole(self, node: Node) -> Node:
        """Return the float32 value of a double word."""
        if node not in self.increments:
            return self.editor.inline(arithmetic.join, *self.words[node])[0]
        base, increment = self.increments[node]
        return self.editor.inline(_sum_of_joined, *base, *increment)[0]

    def _parts(self, wide: Node) -> Word:
        value = self.editor.convert(wide, torch.float32)
        return self.inline(operators.split, value, self.dtype, self.dtype)

    def _split(self, wide: Node) -> Node:
        return self._defined(self._parts(wide))

    def _defined(self, word: Word) -> Node:
        self.words[word[0]] = word
        return word[0]

    # -- building blocks of the rules

    def inline(self, function: Callable[..., DoubleWord], *args: Any) -> Word:
        hi, lo = self.editor.inline(function, *args)
        return hi, lo

    def operand(self, value: Any) -> Word | Node | None:
        """Return an operand as exactly as the algorithms accept it: a double word or a storage tensor.

        Numbers become double words of 0-d tensors, and tensors of a wider dtype double words.
        """
        if not isinstance(value, Node):
            hi, lo = arithmetic.double_word_constant(float(value), self.dtype)
            return self.inline(_constants_like, self.reference, hi, lo)
        if value in self.words:
            return self.words[value]
        tensor = graph.tensor_value(value)
        if tensor is None or tensor.dtype == self.dtype:
            return None if tensor is None else value
        return self._parts(value)

    def sum(self, x: Any, y: Any) -> Word | None:
        first, second = self.operand(self._term(x)), self.operand(self._term(y))
        if first is None or second is None:
            return None
        if isinstance(first, Node):
            first, second = second, first
        assert isinstance(first, tuple)
        if isinstance(second, tuple) and second[0] in self.increments:
            first, second = second, first
        if first[0] not in self.increments:
            return self._added(first, second)
        base, increment = self.increments[first[0]]
        return self._added(base, self._added(increment, second))

    def _term(self, x: Any) -> Any:
        """Return a term of a sum: Note [Operands that are not added]."""
        return x if self.adds_rounded else self._factor(x)

    def _factor(self, x: Any) -> Any:
        """Return an operand without the roundings of its own computation, if any."""
        return self.unrounded(x) if isinstance(x, Node) and x not in self.words and _is_rounded(x) else x

    def _added(self, word: Word, other: Word | Node) -> Word:
        if isinstance(other, tuple):
            return self.inline(arithmetic.add_double_words, *word, *other)
        return self.inline(arithmetic.grow, *word, other)

    def difference(self, x: Any, y: Any) -> Word | None:
        subtrahend = self.operand(self._term(y))
        if subtrahend is None:
            return None
        if isinstance(subtrahend, tuple):
            negated = self._defined(self.inline(arithmetic.negate_double_word, *subtrahend))
        else:
            (negated,) = self.editor.inline(torch.neg, subtrahend)
        return self.sum(x, negated)

    def product(self, x: Any, y: Any) -> Word | None:
        x, y = (y, x) if y in self.words else (x, y)
        y = self._factor(y)
        if y not in self.words and (parts := self._parts_of_decay(self.words[x], y)) is not None:
            result = self._added(*parts)
            self.increments[result[0]] = parts
            return result
        first, second = self.operand(x), self.operand(y)
        if first is None or second is None:
            return None
        assert isinstance(first, tuple)
        if isinstance(second, tuple):
            return self.inline(arithmetic.multiply_double_words, *first, *second)
        return self.inline(arithmetic.scale_double_word, *first, second)

    def _parts_of_decay(self, word: Word, factor: Any) -> tuple[Word, Word] | None:
        """Return two double words whose sum is ``word`` times a factor: Note [Decay is an increment].

        None if the factor is a number far from 1, or a tensor of the storage format.
        """
        if not isinstance(factor, Node):
            if not abs(factor - 1) <= abs(factor) / 2:
                return None
            increment = self.operand(factor - 1)
            assert isinstance(increment, tuple)
            return word, self.inline(arithmetic.multiply_double_words, *word, *increment)
        value = graph.tensor_value(factor)
        if value is None or value.dtype == self.dtype:
            return None
        # The number before its cast: in float64.
        kept, *scaled = self.editor.inline(_decay, graph.unconverted(factor), self.dtype)
        base = self.inline(_both_times, *word, kept)
        return base, self.inline(arithmetic.multiply_double_words, *word, *scaled)

    def negation(self, x: Any) -> Word | None:
        word = self.operand(x)
        return self.inline(arithmetic.negate_double_word, *word) if isinstance(word, tuple) else None


#: Double-word algorithm of each operator.
RULES: dict[Any, Callable[..., Word | None]] = {
    aten.add: _PathRewriter.sum,
    aten.sub: _PathRewriter.difference,
    aten.mul: _PathRewriter.product,
    aten.neg: _PathRewriter.negation,
}


def _is_rounded(node: Node) -> bool:
    """Return whether an operand was computed, not just read, moved or filled with a number of its format."""
    while graph.is_movement(node) and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
    return node.op == "call_function" and not graph.keeps_grid(node)


def _sum_of_joined(hi: Tensor, lo: Tensor, other_hi: Tensor, other_lo: Tensor) -> Tensor:
    return arithmetic.join(hi, lo) + arithmetic.join(other_hi, other_lo)


def _decay(factor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Split a factor into ``kept + (hi + lo)``: kept = 1 if the factor is near 1, otherwise 0."""
    increment = factor - 1
    near = increment.abs() <= factor.abs() / 2
    scaled = torch.where(near, increment, factor).to(torch.float32)
    return near.to(dtype), *operators.split(scaled, dtype, dtype)


def _both_times(hi: Tensor, lo: Tensor, number: Tensor) -> DoubleWord:
    return hi * number, lo * number


def _constants_like(reference: Tensor, hi: float, lo: float) -> DoubleWord:
    return reference.new_full((), hi), reference.new_full((), lo)
