"""State that holds matrices: statistics, their inverse roots, bases, norms; effects of rounding it.

Note [State without a bound]
----------------------------
A moment is divided by another one, element by element: its roundoff of 2**-9 stays one of 2**-9. Two other
kinds of state have no such bound, so each strategy gives them error terms:

* State that is *overwritten*, such as ``inverse.copy_(root(c))``, and then read by a product of matrices or
  in a difference, or read by another step or another part of this one, which may do anything with it.
* A *sum of products* of matrices (``c.addmm_(g, g.T)``) that is factorized or multiplied by itself, or
  that is read elsewhere: rounding errors become singular values of their own, which an inverse root enlarges.
"""

from __future__ import annotations

from collections.abc import Collection

import sympy
import torch
from torch.fx import Node

from collage_fx.graph import operator_facts
from collage_fx.graph.nodes import is_number, operands_of, operator_of, reached, readers_of, tensor_value
from collage_fx.graph.operator_facts import facts_of, is_matrix_product, is_movement, passed_operand
from collage_fx.graph.program import Kind, Role, StateTensor

aten = torch.ops.aten

#: Operators that pass on the relative error of their operand, up to a small factor.
_KEEP_RELATIVE_ERROR = {aten.abs, aten.sign, aten.sqrt, aten.rsqrt, aten.reciprocal, aten.pow}


def is_unbounded(state: StateTensor, exact: Collection[Node], moved: Collection[Node]) -> bool:
    """Return whether no bound is known for the effect of rounding a state: Note [State without a bound].

    ``exact`` are inputs that are numbers of the storage format. ``moved`` are nodes between the old and the
    new value of a parameter, which an update is added to.
    """
    if state.info.role is Role.NEW:
        addends = addends_of(state)
        return any(
            is_matrix_product(node.target) or operator_facts.factorizes(operator_of(node)) for node in addends
        )
    if state.info.role is not Role.STATE:
        return False
    if state.recurrence.kind is Kind.OVERWRITE:
        readers = reached([state.placeholder], readers_of)
        is_known = all(_keeps_relative_error(node) or node in moved for node in readers)
        return not (_needs_no_rounding(state.stored, exact) or (readers and is_known))
    if not any(map(_is_product, addends_of(state))):
        return False
    sources = {state.placeholder, state.stored}
    own = {state.stored, *state.recurrence.path}
    readers = reached(sources, readers_of) - own
    same = {node for node in (*sources, *readers) if _origin(node) in sources}
    leaves = {user for node in same for user in node.users} - readers - own - {state.store}
    return bool(leaves) or not readers or any(_mixes(node, {*readers, *sources}, sources) for node in readers)


def addends_of(state: StateTensor) -> set[Node]:
    """Return the values that a state's new value is a sum of, up to factors that are numbers."""
    return {state.stored, *reached([state.stored], _addends)}


def _addends(node: Node) -> list[Node]:
    if (operand := passed_operand(node)) is not None:
        return [operand]
    operands, sign = node.all_input_nodes, facts_of(node.target).sign
    is_scaled = sign in ("*", "/") and sum(not is_number(each) for each in operands) == 1
    return operands if is_scaled or sign in ("+", "-") or is_movement(node) else []


def _is_product(node: Node) -> bool:
    """Return whether a node is a product of matrices, or of a column and a row."""
    value = tensor_value(node)
    if is_matrix_product(node.target) or facts_of(node.target).sign != "*" or value is None:
        return is_matrix_product(node.target)
    factors = [tensor_value(operand) for operand in node.args[:2]]
    return all(each is not None and each.dim() and each.numel() < value.numel() for each in factors)


def _mixes(node: Node, dependent: Collection[Node], sources: Collection[Node]) -> bool:
    """Return whether an operation may enlarge an error of one element into errors of others."""
    if is_matrix_product(node.target):
        factors = [arg for arg in node.args if arg in dependent]
        return len(factors) > 1 or any(_origin(factor) in sources for factor in factors)
    is_moved = is_movement(node) or passed_operand(node) is not None
    keeps_elements = is_moved or operator_facts.is_pointwise(node.target)
    return not keeps_elements and torch.Tag.reduction not in getattr(node.target, "tags", ())


def _origin(node: object) -> object:
    """Return the value that a node only moves: a transpose, a view, a cast."""
    while isinstance(node, Node) and (is_movement(node) or passed_operand(node)):
        (node, *_) = node.all_input_nodes
    return node


def _needs_no_rounding(node: Node, exact: Collection[Node]) -> bool:
    """Return whether a value consists of numbers of the storage format, like a copy of a gradient."""
    if node in exact or isinstance(operator_facts.number_filling(node), (int, float)):
        return True
    is_choice = node.target is aten.where.self
    chooses = is_choice or facts_of(node.target).function in (sympy.Max, sympy.Min)
    values = operands_of(node)[1:] if is_choice else operands_of(node)
    is_kept = chooses or passed_operand(node) is not None or operator_facts.keeps_grid(node)
    return is_kept and bool(values) and all(_needs_no_rounding(value, exact) for value in values)


def _keeps_relative_error(node: Node) -> bool:
    packet = getattr(node.target, "overloadpacket", node.target)
    keeps_elements = is_movement(node) or passed_operand(node) is not None
    return keeps_elements or packet in _KEEP_RELATIVE_ERROR or facts_of(node.target).sign in ("*", "/")
