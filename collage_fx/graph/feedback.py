"""Optimizers that compensate by hand (Kahan summation): nodes that feed a stored value into its next update.

Note [Kahan's own term]
-----------------------
Optimizers with Kahan summation keep a term c beside a parameter p::

    c += update;  old = p;  p = RN(p + c);  c += old - p        # c keeps the part that p could not take

This is a loop of two states: p' reads c, and c' reads p'. c' must read the p that is *stored*. If p has an
error term, the stored value is ``hi + lo``, after rounding to the pair (hi, lo):

* If c' read the float32 sum before it is split, ``old - p`` would be -c, c would become 0, and p would lose
  a little in each step. If all steps have the same size, as with sign updates, always the same amount.
* If c' read hi alone, c would keep the part that lo already holds, and add it a second time.

So c' reads ``hi + lo``, and c holds the rest that two numbers of the storage format cannot: the sum of all
updates is ``hi + lo + c`` to c's precision, and ``hi + lo`` is off by one rounding in all, not one per step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch.fx import Node

from collage_fx.graph.nodes import made_of, operands_of, reached, readers_of, unconverted
from collage_fx.graph.operator_facts import is_movement
from collage_fx.graph.program import StateTensor


def new_value(state: StateTensor) -> Node:
    """Return the node of a tensor's new value, before the cast to the storage format, if any."""
    return unconverted(state.stored)


def fed_back(state: StateTensor, others: Sequence[StateTensor]) -> set[Node]:
    """Return the nodes from a state's new value to other states' new values that its next value depends on.

    Empty unless another state's new value is computed from this state's new value, and this state's new value
    from the other state's old value: Note [Kahan's own term].
    """
    value = new_value(state)
    made_of_it = reached([value], readers_of)
    if not made_of_it:
        return set()
    made_from = reached([value], operands_of)
    found = set[Node]()
    for other in others:
        if other.placeholder in made_from and (last := new_value(other)) in made_of_it:
            found |= made_of_it & made_of(last)
    return found


def copies_read_by(readers: Collection[Node], placeholder: Node) -> set[Node]:
    """Return the nodes read by ``readers`` that only copy an input, as ``old = p.clone()`` does."""
    found = set[Node]()
    for reader in readers:
        for operand in reader.all_input_nodes:
            copies = []
            while operand.op == "call_function" and is_movement(operand):
                copies.append(operand)
                operand = operand.all_input_nodes[0]
            if operand is placeholder:
                found.update(copies)
    return found
