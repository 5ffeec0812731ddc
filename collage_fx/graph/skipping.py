"""Steps that a condition may skip, as a whole or for some elements: ``where(skip, old, new)`` before a store.

Note [Skipped steps]
--------------------
A loss scaler skips a step whose gradients have overflowed; some optimizers skip it for elements, rows or
columns of a mask. The step is computed all the same, and every element is set to either its old or its new
value. With an error term, an element whose step is skipped must keep both parts, bit for bit: if the old
value were joined, chosen and split again, it could become another pair (hi, lo) of the same value, where lo
is half an ulp of an odd hi.

So a compensating pass removes the choice (:func:`set_aside`), rewrites the step as if it were always taken,
and puts the choice in front of the stores of all parts (:func:`restore`). The effect of a step on a tensor's
precision is also read from the new value (:func:`unless_skipped`): a value that is kept is not rounded, so an
average's roundoff comes from the steps that are taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from collage_fx.graph.editor import GraphEditor, memory_read
from collage_fx.graph.nodes import copies_to_inputs, has_elements, is_number, made_of, stored, unconverted
from collage_fx.graph.program import StateTensor
from collage_fx.numerics import ErrorFormat

aten = torch.ops.aten


class Skip(NamedTuple):
    """Choice between a tensor's old value, operand 1 or 2 of a ``where``, and its new value."""

    condition: Node
    changed: Node
    kept: int  # position of the old value among the operands


def unless_skipped(placeholder: Node, new_value: Node) -> Node:
    """Return the new value of ``placeholder`` in a step, or for an element, that is not skipped."""
    for skip in _skips(placeholder, new_value):
        new_value = skip.changed
    return new_value


def set_aside(state: StateTensor) -> Sequence[Skip]:
    """Replace ``store(where(skip, old, new))`` by ``store(new)``; return the skips, the outer one first.

    Elements of a block share a scale, so that there only a condition for whole rows is set aside.
    """
    skips = [*takewhile(lambda skip: _keeps_codes(skip, state, state.error_format), _skips_of(state))]
    if skips:
        state.store.update_arg(1, skips[-1].changed)
    return skips


def splits_blocks(state: StateTensor, fmt: ErrorFormat) -> str:
    """Return whether a step keeps elements whose codes in ``fmt`` depend on elements that it changes.

    It is a text that says so, or empty.
    """
    keeps_all = all(_keeps_codes(skip, state, fmt) for skip in _skips_of(state))
    return "" if keeps_all else "the step keeps single elements, which have a scale in common with others"


def restore(editor: GraphEditor, state: StateTensor, skips: Sequence[Skip]) -> None:
    """Put the choices between old and new value in front of the stores of all parts of a tensor.

    A condition for each element does not concern a count, which is 0-d: the step is taken for some elements.
    """
    stores = copies_to_inputs(editor.graph)
    for part in (*state.hi, *state.written):
        store = stores[part]
        with editor.graph.inserting_before(store):
            for skip in reversed(skips):
                if has_elements(part) or is_number(skip.condition):
                    store.update_arg(1, _chosen(editor, skip, state.value.dim(), part, stored(store)))


def _keeps_codes(skip: Skip, state: StateTensor, fmt: ErrorFormat) -> bool:
    """Return whether elements that a skip keeps may keep their codes in ``fmt``, whatever others become."""
    if fmt.is_elementwise or is_number(skip.condition):
        return True
    sizes = skip.condition.meta["val"].shape
    return fmt.by_rows and all(size == 1 for size in sizes[max(0, len(sizes) - state.value.dim() + 1) :])


def _chosen(editor: GraphEditor, skip: Skip, dims: int, part: Node, new: Node) -> Node:
    """Add the choice between a part's old and new value; the tensor has ``dims`` dimensions."""
    condition, part_dims = skip.condition, part.meta["val"].dim()
    if not is_number(condition) and part_dims != dims:  # a condition for whole rows
        sizes = condition.meta["val"].shape
        rows = sizes[0] if len(sizes) == dims else 1
        condition = editor.call(aten.view.default, condition, [rows, *[1] * (part_dims - 1)])
    return editor.call(aten.where.self, condition, *((part, new) if skip.kept == 1 else (new, part)))


def _skips_of(state: StateTensor) -> Iterator[Skip]:
    """Yield the skips of a tensor's step, the outer one first."""
    return _skips(state.placeholder, unconverted(state.stored))


def _skips(placeholder: Node, new_value: Node) -> Iterator[Skip]:
    """Yield the choices between old and new value that compute a new value, the outer one first.

    A choice whose condition depends on the old value is none of them.
    """
    while new_value.target is aten.where.self:
        operands: tuple[Any, ...] = new_value.args
        kept = next((i for i in (1, 2) if memory_read(operands[i]) is placeholder), None)
        if kept is None or placeholder in made_of(operands[0]):
            return
        new_value = operands[3 - kept]
        yield Skip(operands[0], new_value, kept)
