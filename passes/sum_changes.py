"""The pass that computes an update as the old value plus one change.

    x (1 - a)          ->   x - a x
    x (1 - a) + t      ->   x + (t - a x)
    (x + s) (1 - a)    ->   x + (s (1 - a) - a x)
    (x + t) / (1 + a)  ->   x + (t - a x) / (1 + a)

Why. float32 has no numbers between 1 - 2**-24 and 1. So ``1 - lr * weight_decay`` is 1 if the decay of a step
is below 3e-8, and then there is no weight decay at all; at 9e-8 there are two thirds too much. The decay
itself is a number like any other: it is a, computed in float64, and rounded to 24 bits of its own. And a sum
that is added to x at once is rounded to an ulp of x once: ``x (1 - a)`` alone rounds a second time.

Theorem. Let u be the unit roundoff of float32, in which all is computed but numbers of the host, and D the
change. The result is ``(x + D')(1 + e)`` with ``|e| <= u``; D' differs from D by a few u of its terms.
Rounding the factor to float32 instead adds up to ``|x| u`` to the error, each step in the same direction.

The last sum is rounded by dither where the change is small beside x, if the error format of x has a count
of steps (Note [The last rounding] in ``numerics/dither.py``). An average that forgets a share a of its old
value in each step forgets its errors, too: they are at most 2**-24 / a of it, and are rounded to nearest.

A factor is taken apart if it is a constant within 1/32 of 1, or ``1 - a`` or ``1 + a`` in the graph. In
float16, where squares overflow from 256 on, an infinite x stays infinite: ``a x`` is that of the largest
finite number. In other formats an infinite x becomes NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from collage_fx import graph
from collage_fx.graph import GraphEditor, Role, StateTensor, StepProgram
from collage_fx.numerics import DITHERED_SUM, PHASE, PHASES
from collage_fx.passes.base import Pass

aten = torch.ops.aten

#: Largest distance from 1 of a constant factor that is taken apart. Others are known to 1e-6 in float32.
NEAR_ONE = 1 / 32

#: Least share that an average forgets in a step if its sum is rounded to nearest: errors are below 0.4 %.
FORGETFUL = 2.0**-16

#: Largest finite float32.
LARGEST = torch.finfo(torch.float32).max


class SumChanges(Pass):
    """Pass that rewrites a chain of sums and of factors near 1 as ``x + (all changes)``."""

    name = "sum-changes"
    after = ("widen",)

    def applies_to(self, program: StepProgram) -> bool:
        return program.sums

    def run(self, program: StepProgram) -> str:
        editor = GraphEditor(program.gm, self.name)
        expanded = program.expanded if program.rounding != "nearest" else []
        dithered = {each.placeholder: each for each in expanded if each.error_format.dithers_sums}
        program.summed = 0
        for placeholder, store in graph.copies_to_inputs(editor.graph).items():
            state = dithered.get(placeholder)
            program.summed += _rewrite(editor, program, placeholder, graph.stored(store), state)
        return f"{program.summed} updates"


class _Sum(NamedTuple):
    """Step of a chain that adds a term, or subtracts it."""

    term: Any
    is_subtracted: bool


class _Scale(NamedTuple):
    """Step of a chain that multiplies by ``number``, which is ``1 - decay``, or divides by ``1 + decay``."""

    operation: Any
    number: Any
    decay: Any


def _rewrite(
    editor: GraphEditor, program: StepProgram, placeholder: Node, value: Node, dithered: StateTensor | None
) -> bool:
    """Rewrite the new value of an input; return whether there was anything to rewrite.

    ``dithered`` is the input as a state whose last sum dither may round, or None to round to nearest; it is
    rounded to nearest, too, if it is an average, and a factor makes it forget its errors.
    """
    value = graph.unconverted(graph.unless_skipped(placeholder, graph.unconverted(value)))
    with editor.graph.inserting_before(value):
        chain = _Chain(editor, placeholder)
        steps = chain.steps(value)
        if steps and dithered is not None and any(map(_is_forgetful, steps)):
            lasts = dithered.info.role is Role.PARAMETER or graph.moves_as_a_parameter(program, dithered)
            dithered = dithered if lasts else None
        if not steps or (dithered is None and len(steps) == 1 and isinstance(steps[0], _Sum)):
            return False
        result = chain.result(steps, dithered)
    editor.replace(value, result)
    return True


def _is_forgetful(step: Any) -> bool:
    """Return whether a step of a chain takes away a share of the old value, unless it is known to be small.

    A share that changes is taken for a large one: so a number that is known has the bits of one that changes.
    """
    if isinstance(step, _Sum):
        return False
    decay = graph.known_number(step.decay)
    return decay is None or decay > FORGETFUL


class _Chain:
    """Chain of sums and products from an input to its new value."""

    def __init__(self, editor: GraphEditor, placeholder: Node) -> None:
        self._editor = editor
        self._placeholder = placeholder
        self._shape = placeholder.meta["val"].shape
        self._x = placeholder
        #: Function that returns the steps from x to a value; None if there is no such chain.
        self.steps: Callable[[Any], list[Any] | None] = functools.cache(self._steps)

    def _steps(self, node: Any) -> list[Any] | None:
        value = graph.tensor_value(node)
        if value is None or value.dtype is not torch.float32 or value.shape != self._shape or not value.dim():
            return None
        if graph.unconverted(node) is self._placeholder:
            self._x = node
            return []
        if graph.is_conversion(node) and graph.unconverted(node).meta["val"].dtype is torch.float32:
            # A conversion to the same dtype, which torch's pass over conversions has left.
            return self.steps(graph.unconverted(node))
        if node.kwargs:
            return None
        for earlier, step in self._last_steps(node):
            steps = self.steps(earlier)
            if steps is not None:
                return [*steps, step]
        return None

    def _last_steps(self, node: Node) -> list[tuple[Any, Any]]:
        """Return the ways to read an operation: an earlier value of the chain, and the step from there."""
        if node.target not in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor):
            return []
        left, right = node.args
        if node.target is aten.add.Tensor:
            return [(left, _Sum(right, False)), (right, _Sum(left, False))]
        if node.target is aten.sub.Tensor:
            return [(left, _Sum(right, True))]
        if node.target is aten.mul.Tensor:
            found = [(x, f, self._below_one(f)) for x, f in (node.args, node.args[::-1])]
            return [(x, _Scale(node.target, f, decay)) for x, f, decay in found if decay is not None]
        if (decay := self._below_one(right)) is None:
            return []
        return [(left, _Scale(node.target, right, self._call(aten.neg.default, decay)))]

    def _below_one(self, factor: Any) -> Any:
        """Return ``1 - factor`` of a factor before it is rounded to float32; None if it is not near 1."""
        number = graph.known_number(factor)
        if number is not None:
            return 1.0 - number if abs(1.0 - number) <= NEAR_ONE else None
        exact = graph.unconverted(factor)
        if exact.target is aten.sub.Tensor and not exact.kwargs and graph.known_number(exact.args[0]) == 1:
            return exact.args[1]
        if exact.target is aten.add.Tensor and not exact.kwargs:
            for one, other in (exact.args, exact.args[::-1]):
                if graph.known_number(one) == 1 and graph.known_number(other) is None:
                    return self._call(aten.neg.default, other)
        return None

    def result(self, steps: Sequence[Any], dithered: StateTensor | None) -> Node:
        """Add the operations that compute the new value at once, and return it."""
        terms: list[_Sum] = []
        decay: Any = None
        for step in steps:
            if isinstance(step, _Sum):
                terms.append(step)
                continue
            terms = [_Sum(self._call(step.operation, term, step.number), n) for term, n in terms]
            if step.operation is aten.mul.Tensor:
                kept = None if decay is None else self._call(aten.mul.Tensor, decay, step.number)
                decay = step.decay if kept is None else self._call(aten.add.Tensor, kept, step.decay)
            else:
                total = step.decay if decay is None else self._call(aten.add.Tensor, decay, step.decay)
                decay = self._call(aten.div.Tensor, total, step.number)
        if decay is not None:
            x = self._x
            if self._placeholder.meta["val"].dtype is torch.float16:  # infinite elements stay infinite
                x = self._editor.call(aten.clamp_min.default, x, -LARGEST)
                x = self._editor.call(aten.clamp_max.default, x, LARGEST)
            terms.append(_Sum(self._call(aten.mul.Tensor, x, decay), True))
        terms.sort(key=lambda each: each.is_subtracted)
        (change, is_subtracted), *others = terms
        for term, is_unlike in ((each, each_is != is_subtracted) for each, each_is in others):
            change = self._call(aten.sub.Tensor if is_unlike else aten.add.Tensor, change, term)
        if dithered is None:
            return self._call(aten.sub.Tensor if is_subtracted else aten.add.Tensor, self._x, change)
        if is_subtracted:
            change = self._call(aten.neg.default, change)
        dithered.keeps_small_updates = True
        numbers = dithered.auxiliaries[-1], dithered.start
        change = self._of_full_size(change)
        return self._editor.inline(_dithered, self._x, change, self._placeholder, *numbers)[0]

    def _of_full_size(self, change: Any) -> Any:
        """Return a change as a tensor with an element for each of x."""
        value = graph.tensor_value(change)
        if value is None:
            return self._call(aten.full_like.default, self._x, change)
        if value.shape == self._shape:
            return change
        change = self._editor.convert(change, torch.float32)  # a number has float64
        return self._editor.call(aten.expand.default, change, [*self._shape])

    def _call(self, target: Any, *args: Any) -> Any:
        """Apply an operation to numbers and tensors: of numbers alone in float64, where they have it."""
        if not any(isinstance(each, Node) for each in args):
            with self._editor.real_tensors():
                return target(*(torch.tensor(each, dtype=torch.float64) for each in args)).item()
        is_wide = any(map(graph.has_elements, args))
        read = functools.partial(self._editor.convert, dtype=torch.float32) if is_wide else graph.unconverted
        return self._editor.call(target, *map_arg(args, read))


def _dithered(x: Tensor, change: Tensor, hi: Tensor, count: Tensor, start: Tensor) -> Tensor:
    """Add a change to x by dither, with the phases of hi."""
    return DITHERED_SUM(x, change, PHASES(hi, PHASE(count, start)))
