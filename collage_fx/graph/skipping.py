"""Steps that a condition may skip: ``where(found_inf, old, new)`` in front of a store.

Note [Skipped steps]
--------------------
A loss scaler skips a step whose gradients have overflowed, and some optimizers do so themselves. The step is
computed all the same, and every tensor is set to either its old or its new value. With an error term each of
the two is ``hi + lo``. A tensor whose step is skipped must keep both parts, bit for bit: if the old value
were joined, chosen and split again, it could become another pair (hi, lo) of the same value, where lo is half
an ulp of an odd hi.

So a compensating pass removes the choice (:func:`set_aside`), rewrites the step as if it were always taken,
and puts the choice in front of the stores of all parts (:func:`restore`). The effect of a step on a tensor's
precision is also read from the new value (:func:`unless_skipped`): a value that is kept is not rounded, so an
average's roundoff comes from the steps that are taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from collage_fx.graph.editor import GraphEditor
from collage_fx.graph.nodes import copies_to_inputs, has_elements, is_number, operands_of, reached, stored, unconverted
from collage_fx.graph.operator_facts import passed_operand
from collage_fx.graph.program import StateTensor

aten = torch.ops.aten


@dataclass(frozen=True)
class Skip:
    """Choice between a tensor's old value and its new value.

    Attributes:
        condition: first operand of ``where``.
        changed: the new value.
        kept: position of the old value among the operands of ``where``, 1 or 2.
    """

    condition: Node
    changed: Node
    kept: int

    def between(self, editor: GraphEditor, old: Node, new: Node) -> Node:
        """Add the same choice between two other values."""
        first, second = (old, new) if self.kept == 1 else (new, old)
        return editor.call(aten.where.self, self.condition, first, second)


def unless_skipped(placeholder: Node, new_value: Node) -> Node:
    """Return the new value of ``placeholder`` in a step that is not skipped."""
    skip = _skip(placeholder, new_value)
    return new_value if skip is None else skip.changed


def set_aside(state: StateTensor) -> Skip | None:
    """Replace ``store(where(skip, old, new))`` by ``store(new)``; return the skip, None if there is none."""
    skip = _skip(state.placeholder, unconverted(state.stored))
    if skip is not None and not (is_number(skip.condition) or state.error_format.is_elementwise):
        return None  # kept and changed elements of a block share a scale
    if skip is not None:
        state.store.args = (state.placeholder, skip.changed, *state.store.args[2:])
    return skip


def intend(editor: GraphEditor, state: StateTensor, skip: Skip | None) -> None:
    """Set the intended value of a tensor that is measured: its old value in a skipped step.

    Call it when the graph is finished: nothing reads the intended value unless the step is measured.
    """
    if skip is not None and state.intended is not None:
        with editor.graph.inserting_before(state.store):
            (old,) = editor.inline(state.error_format.join, state.placeholder, *state.auxiliaries)
            state.intended = skip.between(editor, old, state.intended)


def restore(editor: GraphEditor, state: StateTensor, skip: Skip | None) -> None:
    """Put the choice between old and new value in front of the stores of all parts of a tensor."""
    if skip is None:
        return
    stores = copies_to_inputs(editor.graph)
    parts = state.written if state.packed else (state.placeholder, *state.written)
    for part in parts:
        if not (is_number(skip.condition) or has_elements(part)):
            continue  # a count, which some elements' step advances
        store = stores[part]
        with editor.graph.inserting_before(store):
            store.args = (part, skip.between(editor, part, stored(store)), *store.args[2:])


def _skip(placeholder: Node, new_value: Node) -> Skip | None:
    """Return the choice that computes a new value; None if there is none or it depends on the old value."""
    condition = new_value.args[0] if new_value.target is aten.where.self else None
    if not isinstance(condition, Node) or placeholder in {condition, *reached([condition], operands_of)}:
        return None
    for kept in (1, 2):
        branch = new_value.args[kept]
        while isinstance(branch, Node) and (operand := passed_operand(branch)) is not None:
            branch = operand
        if branch is placeholder:
            changed = new_value.args[3 - kept]
            assert isinstance(changed, Node)
            return Skip(condition, changed, kept)
    return None
