"""Optimizers that compensate by hand: nodes by which a stored value goes into a later update.

Note [Kahan's own term]
-----------------------
Optimizers with Kahan summation keep a term c beside a parameter p::

    c += update;  old = p;  p = RN(p + c);  c += old - p        # what of c p has not taken in

This is a loop of two states: p' reads c, c' reads p'. What c' has to read is the p that is *stored*. With an
error term for p that is ``hi + lo``, after it has been rounded to a pair:

* Were it the float32 sum that is about to be split, ``old - p`` would be -c, nothing would be left in c, and
  p would round off a little in each step. With steps of one size, as a sign has, always the same little.
* Were it hi alone, c would keep what lo has taken in already, and add it again.

So c' reads ``hi + lo``, and c holds what two numbers of the storage format cannot: the sum of all updates is
in ``hi + lo + c`` to c's precision, and ``hi + lo`` is off by one rounding, not by one for each step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch.fx import Node

from collage_fx.graph.nodes import is_copy_to_input, operands_of, reached, unconverted
from collage_fx.graph.operator_facts import is_movement
from collage_fx.graph.program import StateTensor


def new_value(state: StateTensor) -> Node:
    """The node of a tensor's new value, before the cast that rounds it to the storage format, if any."""
    return unconverted(state.stored)


def fed_back(state: StateTensor, others: Sequence[StateTensor]) -> set[Node]:
    """The nodes between a state's new value and other new values of which its next one is made.

    Empty unless some other state reads this one's new value, which in turn reads that one's old value: Note
    [Kahan's own term].
    """
    value = new_value(state)
    made_of_it = reached([value], lambda node: [user for user in node.users if not is_copy_to_input(user)])
    if not made_of_it:
        return set()
    made_from = reached([value], operands_of)
    found = set[Node]()
    for other in others:
        if other.placeholder in made_from and (last := new_value(other)) in made_of_it:
            found |= made_of_it & {last, *reached([last], operands_of)}
    return found


def copies_read_by(readers: Collection[Node], placeholder: Node) -> set[Node]:
    """The nodes that only move an input, as ``old = p.clone()`` does, and are read by ``readers``."""
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
