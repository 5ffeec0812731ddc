"""Where an optimizer compensates by hand: what it stored goes into what it will add.

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

from collections.abc import Callable, Collection, Iterable, Sequence

from torch.fx import Node

from collage_fx.graph.nodes import is_copy_to_input, unconverted
from collage_fx.graph.operator_facts import is_movement
from collage_fx.graph.program import StateTensor

__all__ = ["copies_read_by", "fed_back", "new_value", "reached"]


def new_value(state: StateTensor) -> Node:
    """What is stored, before it is rounded to the storage format if that is a step of its own."""
    stored = state.store.args[1]
    assert isinstance(stored, Node)
    return unconverted(stored)


def fed_back(state: StateTensor, others: Sequence[StateTensor]) -> set[Node]:
    """The nodes between a new value and those other new values of which the next one is made.

    Empty unless some other state reads this one's new value, which in turn reads that one's old value: Note
    [Kahan's own term].
    """
    value = new_value(state)
    made_of_it = reached([value], lambda node: [user for user in node.users if not is_copy_to_input(user)])
    if not made_of_it:
        return set()
    made_from = reached([value], lambda node: node.all_input_nodes)
    found = set[Node]()
    for other in others:
        if other.placeholder in made_from and (last := new_value(other)) in made_of_it:
            found |= made_of_it & {last, *reached([last], lambda node: node.all_input_nodes)}
    return found


def copies_read_by(readers: Collection[Node], placeholder: Node) -> set[Node]:
    """What of an input has only been moved, as ``old = p.clone()`` is, and is read by ``readers``."""
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


def reached(starts: Iterable[Node], following: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """All nodes that ``following`` (which gives a node's users, say) leads to from ``starts``."""
    found, waiting = set[Node](), list(starts)
    while waiting:
        fresh = set(following(waiting.pop())) - found
        found |= fresh
        waiting += fresh
    return found
