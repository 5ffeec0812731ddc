"""The pass for ``native`` compensation: the paper's algorithms in the storage format, each operation rounded.

A selected tensor's old value enters as a double word (hi, lo) and stays one along the tensor's own path, from
its load to its store. Sums, products with a number (itself a double word: [Yu24], section 4.2), products with
a tensor and negation have double-word algorithms; a decay such as 0.999 or 1 - lr*wd is a sum, too. Any
other operation that means the same on float32 is computed on the joined float32 value and split again, so
that no operation on the path drops the error term. Whatever leaves the path reads hi, which is the value
rounded to nearest, since ``|lo| <= ulp(hi)/2``. Where an optimizer compensates by hand, what it computes from
the new value is path too: Note [Kahan's own term] in ``graph/feedback.py``.

Note [Operands that are not added]
----------------------------------
In ``p + y`` the roundings of y are relative to y, which is what p moves by. Elsewhere they are not: of
``p * (1 - lr g)`` the factor is 1 in the storage format, and of ``p' = x0 - lr z`` nothing but ``x0`` may be
left. So the other operand of a product, and of any operation but a sum, is computed in float32 from the
inputs of the step and from whole double words. So are the terms of a sum where the old value is not kept as
it is: its coefficient is no number within u of 1, or the new value is not made of the old one; and where
there are several, which may cancel.

Note [Decay is an increment]
----------------------------
A weight decay of 1e-6 is a fifteenth of the last bit of a bfloat16 pair of about 1: ``p * (1 - 1e-6)``,
rounded to a pair before the update is added, is p again, step after step. So ``c x`` with c near 1 is
computed as ``x + (c-1) x``, and where y is added to it, as ``x + ((c-1) x + y)``: decay and update make one
increment, and their sum is what is rounded. c - 1 is exact in the arithmetic that c comes in (Sterbenz, for
1/2 <= c <= 2), so that it is off by u**2 of itself as a double word, not of c. With c - 1 = d, DWTimesDW1
(7 u**2) and AccurateDWPlusDW or Grow (3 u**2), to first order in u**2,

    |error| <= 3 |c x + y| + 3 |d x + y| + 8 |d x|, or 3 |c x| + 8 |d x| where nothing is added.

Near 1 means ``|c - 1| <= |c|/2``, that is 2/3 <= c <= 2: where the latter is at most the 7 |c x| of the
product itself. A number that the graph is given (a learning rate that changes), and each element of a
tensor, is compared when it is known: far from 1, d is c, beside no x, and the bound is the same. Its
conversion to float32 adds 2**-24 |d x|.

Read in float32, as by an ``addcdiv`` that torch 2.11 has decomposed, ``c x`` is the float32 sum of x
and (c-1) x, not the pair: off by 2**-24 |c x| instead of 3 u**2 |c x|.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from collage_fx.graph import (
    PASS_MARK,
    GraphEditor,
    Kind,
    StateTensor,
    StepProgram,
    copies_read_by,
    facts_of,
    fed_back,
    intend,
    is_conversion,
    is_movement,
    is_transparent,
    keeps_grid,
    operands_of,
    reached,
    restore,
    set_aside,
    tensor_value,
    unconverted,
)
from collage_fx.numerics import DoubleWord, arithmetic
from collage_fx.passes.base import Pass

aten = torch.ops.aten

#: The nodes of hi and lo.
Word = tuple[Node, Node]


@dataclass(frozen=True)
class CompensateNative(Pass):
    """Double-word arithmetic from the load to the store of each selected tensor."""

    name = "compensate-native"
    after = ("allocate",)

    def applies_to(self, program: StepProgram) -> bool:
        return program.arithmetic == "native"

    def run(self, program: StepProgram) -> str:
        editor = GraphEditor(program.gm, self.name)
        order = {node: i for i, node in enumerate(editor.graph.nodes)}
        skips = [set_aside(state) for state in program.compensated]
        for states, path in _shared_paths(program):
            _PathRewriter(editor, states, sorted(path, key=order.__getitem__)).run()
        for state, skip in zip(program.compensated, skips, strict=True):
            restore(editor, state, skip)
        editor.finish()
        for state, skip in zip(program.compensated, skips, strict=True):
            intend(editor, state, skip)
        return program.compensation


def _shared_paths(program: StepProgram) -> list[tuple[list[StateTensor], set[Node]]]:
    """The states whose paths have nodes in common, as slow and fast weights of one average have.

    Or of which one is made of another's path: Note [Operands that are not added].
    """
    found: list[tuple[list[StateTensor], set[Node], set[Node]]] = []
    for state in program.compensated:
        own_term = fed_back(state, program.states)
        path = own_term.union(state.recurrence.path, copies_read_by(own_term, state.placeholder))
        made_of = set(path)
        if not _keeps_old_value(state):
            made_of |= {state.stored, *reached([state.stored], operands_of)}
        states = [state]
        apart = []
        for others, other_path, others_made_of in found:
            if made_of.isdisjoint(others_made_of) or others[0].value.dtype != state.value.dtype:
                apart.append((others, other_path, others_made_of))
            else:
                states, path, made_of = [*others, *states], path | other_path, made_of | others_made_of
        found = [*apart, (states, path, made_of)]
    return [(states, path) for states, path, _ in found]


def _keeps_old_value(state: StateTensor) -> bool:
    """Whether the new value is the old one, or a decayed average, and a single term that is added to it."""
    recurrence = state.recurrence
    if recurrence.kind is Kind.MOVING_AVERAGE:
        return True
    u, path = state.format.unit_roundoff, {state.placeholder, *recurrence.path}
    terms = [
        operand
        for node in recurrence.path
        if facts_of(node.target).sign in ("+", "-")
        for operand in node.all_input_nodes
        if operand not in path
    ]
    is_added_to = recurrence.kind is Kind.ACCUMULATION and (
        len(terms) <= 1 or not any(map(_is_rounded, terms))
    )
    return is_added_to and all(slope.is_number and abs(slope - 1) <= u for slope in recurrence.slopes)


class _PathRewriter:
    """Rewrites the path of state tensors of one dtype.

    ``words`` maps the hi node of every double word on it to the pair. Decay: Note [Decay is an increment].
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
        #: Nodes of the path to which some way leads that no operator of the storage format is on.
        self.whole = set(self.words)
        #: The hi node of ``c x``, where that is ``x + (c-1) x``, to the words of ``x`` and of ``(c-1) x``.
        self.increments: dict[Node, tuple[Word, Word]] = {}
        #: Whether what is added to old values may have been rounded.
        self.adds_rounded = all(map(_keeps_old_value, states))
        self._unrounded: dict[Node, Node] = {}

    def run(self) -> None:
        for node in self.path:
            if self.whole.isdisjoint(node.all_input_nodes):
                continue
            with self.editor.graph.inserting_before(node):
                result = self._rewritten(node)
            if result is not None or node in self.words or is_transparent(node.target):
                self.whole.add(result or node)
            if result is not None:
                node.replace_all_uses_with(result)
        for state in self.states:
            with self.editor.graph.inserting_before(state.store):
                self._store(state)

    def _store(self, state: StateTensor) -> None:
        stored = state.stored
        if stored not in self.whole and state.carries_its_old_value:
            state.refusal = (
                f"{stored.name} ({stored.target}) has no double-word algorithm; its error term stays zero"
            )
        hi, lo = (
            self.words[stored] if stored in self.words else self.words[self._split(self.unrounded(stored))]
        )
        state.store.args = (state.placeholder, hi, *state.store.args[2:])
        self.editor.store(state.auxiliaries[0], *self.editor.inline(arithmetic.finite_or_zero, lo, hi))

    def _rewritten(self, node: Node) -> Node | None:
        """The node that replaces ``node``; None to leave ``node`` as it is, reading hi."""
        value = tensor_value(node)
        operands = node.all_input_nodes
        if value is None:
            if is_movement(node) and operands[0] in self.words:  # into several tensors
                self.words[node] = node, self._moved(node, self._low_part)
            return None
        if node.target is operator.getitem and operands[0] in self.words:
            self.words[node] = node, self._moved(node, self._low_part)
            return None
        if is_conversion(node):
            return self._converted(node, operands[0], value.dtype)
        if not is_transparent(node.target):
            return None
        if value.dtype != self.dtype:
            is_rounded = any(self.unrounded(operand) is not operand for operand in operands)
            return self._on_whole_values(node) if is_rounded else None
        if any(operand in self.words for operand in operands):
            packet = getattr(node.target, "overloadpacket", None)
            if packet in RULES and (word := RULES[packet](self, *node.args)) is not None:
                return self._defined(word)
            if is_movement(node):
                return self._defined((self._moved(node, lambda n: n), self._moved(node, self._low_part)))
        return self._split(self._on_whole_values(node))

    def _moved(self, node: Node, part: Callable[[Node], Node]) -> Node:
        args, kwargs = map_arg((node.args, dict(node.kwargs)), part)
        return self.editor.call(node.target, *args, **kwargs)

    def _low_part(self, operand: Node) -> Node:
        """An operand for moving the error terms alike: its lo, zeros if it has none, an index as it is."""
        if operand in self.words:
            return self.words[operand][1]
        value = tensor_value(operand)
        if value is None or value.dtype != self.dtype:
            return operand
        return self.editor.inline(torch.zeros_like, operand)[0]

    def _converted(self, node: Node, source: Node, dtype: torch.dtype) -> Node | None:
        """The result of a cast: of the whole value to a wider dtype; to the storage format a double word."""
        if source in self.words:
            return source if dtype == self.dtype else self.editor.convert(self._whole(source), dtype)
        return self._split(source) if dtype == self.dtype else None

    def _on_whole_values(self, node: Node) -> Node:
        """The operation on float32 operands, as torch promotes those of several dtypes itself."""
        args, kwargs = map_arg((node.args, dict(node.kwargs)), self.unrounded)
        if kwargs.get("dtype") == self.dtype:
            kwargs = {**kwargs, "dtype": torch.float32}
        return self.editor.call(node.target, *args, **kwargs)

    def unrounded(self, node: Node) -> Node:
        """An operand computed from inputs and whole double words in float32, nothing rounded on the way.

        Of an operator that needs the storage format, the result as it is.
        """
        if node in self.words:
            return self._whole(node)
        if node not in self._unrounded:
            self._unrounded[node] = self._without_roundings(node)
        return self._unrounded[node]

    def _without_roundings(self, node: Node) -> Node:
        value = tensor_value(node)
        if value is None:
            return node
        wanted = torch.float32 if value.dtype == self.dtype else value.dtype
        is_captured = node.op == "call_function" and node.meta.get(PASS_MARK) != self.editor.made_by
        if not is_captured or not is_transparent(node.target):
            return self.editor.convert(node, wanted)
        operands = node.all_input_nodes
        if wanted == value.dtype and all(self.unrounded(operand) is operand for operand in operands):
            return node
        if is_conversion(node):
            return self.editor.convert(self.unrounded(operands[0]), wanted)
        return self.editor.convert(self._on_whole_values(node), wanted)

    def _whole(self, node: Node) -> Node:
        """The float32 value of a double word."""
        if node not in self.increments:
            return self.editor.inline(arithmetic.join, *self.words[node])[0]
        base, increment = self.increments[node]
        return self.editor.inline(_sum_of_joined, *base, *increment)[0]

    def _split(self, wide: Node) -> Node:
        return self._defined(
            self.inline(arithmetic.split, self.editor.convert(wide, torch.float32), self.dtype, self.dtype)
        )

    def _defined(self, word: Word) -> Node:
        self.words[word[0]] = word
        return word[0]

    # -- what the rules are made of

    def inline(self, function: Callable[..., DoubleWord], *args: Any) -> Word:
        hi, lo = self.editor.inline(function, *args)
        return hi, lo

    def operand(self, value: Any) -> Word | Node | None:
        """An operand as exactly as the algorithms can take it: a double word, or a storage-format tensor.

        Numbers become double words of 0-d tensors, and tensors of a wider dtype double words.
        """
        if not isinstance(value, Node):
            hi, lo = arithmetic.double_word_constant(float(value), self.dtype)
            return self.inline(_constants_like, self.reference, hi, lo)
        if value in self.words:
            return self.words[value]
        tensor = tensor_value(value)
        if tensor is None or tensor.dtype == self.dtype:
            return None if tensor is None else value
        return self.inline(
            arithmetic.split, self.editor.convert(value, torch.float32), self.dtype, self.dtype
        )

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
        """A term of a sum: Note [Operands that are not added]."""
        return x if self.adds_rounded else self._factor(x)

    def _factor(self, x: Any) -> Any:
        """An operand without the roundings that it has been computed with, if any."""
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
        """The two double words whose sum is ``word`` times a factor: see Note [Decay is an increment].

        None where it is a number that isn't near 1, or a tensor of the storage format.
        """
        if not isinstance(factor, Node):
            if not abs(factor - 1) <= abs(factor) / 2:
                return None
            increment = self.operand(factor - 1)
            assert isinstance(increment, tuple)
            return word, self.inline(arithmetic.multiply_double_words, *word, *increment)
        value = tensor_value(factor)
        if value is None or value.dtype == self.dtype:
            return None
        # The number as it came, in float64.
        kept, *scaled = self.editor.inline(_decay, unconverted(factor), self.dtype)
        base = self.inline(_both_times, *word, kept)
        return base, self.inline(arithmetic.multiply_double_words, *word, *scaled)

    def negation(self, x: Any) -> Word | None:
        word = self.operand(x)
        return self.inline(arithmetic.negate_double_word, *word) if isinstance(word, tuple) else None


#: Operator -> its double-word algorithm.
RULES: dict[Any, Callable[..., Word | None]] = {
    aten.add: _PathRewriter.sum,
    aten.sub: _PathRewriter.difference,
    aten.mul: _PathRewriter.product,
    aten.neg: _PathRewriter.negation,
}


def _is_rounded(node: Node) -> bool:
    """Whether an operand has been computed, rather than read, moved or filled with a number of its format."""
    while is_movement(node) and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
    return node.op == "call_function" and not keeps_grid(node)


def _sum_of_joined(hi: Tensor, lo: Tensor, other_hi: Tensor, other_lo: Tensor) -> Tensor:
    return arithmetic.join(hi, lo) + arithmetic.join(other_hi, other_lo)


def _decay(factor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """A factor as ``kept + (hi + lo)``: near 1 that is 1 and the increment, elsewhere 0 and the number."""
    increment = factor - 1
    near = increment.abs() <= factor.abs() / 2
    return near.to(dtype), *arithmetic.split(
        torch.where(near, increment, factor).to(torch.float32), dtype, dtype
    )


def _both_times(hi: Tensor, lo: Tensor, number: Tensor) -> DoubleWord:
    return hi * number, lo * number


def _constants_like(reference: Tensor, hi: float, lo: float) -> DoubleWord:
    return reference.new_full((), hi), reference.new_full((), lo)
