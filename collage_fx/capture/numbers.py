"""Support for Python numbers that change from step to step: they become inputs of the captured graph.

Note [Numbers that change]
--------------------------
A learning rate that a scheduler sets and a step counter in ``optimizer.state`` are Python numbers. Dynamo
makes such a number a constant of the graph at first, and a symbol when it sees the number change. A number
that is known to be scheduled is a symbol from the first graph on, which is then the only graph
(:func:`scheduled_numbers`). So is a number that has changed according to a checkpoint: from a constant, other
state might get error terms than in the interrupted run, and other last bits.

AOTAutograd then makes a symbolic float a 0-d float64 tensor, an input of the code, for operators such as
``mul(tensor, number)``. Where it is an ``alpha=`` or ``value=``, a bound of ``clamp`` or an element of a
``_foreach_`` list, the number would become a constant after all, and the step be compiled again each time it
changes. So the operator is decomposed, while AOTAutograd traces it, into the multiplications and additions
that it stands for (:func:`decompositions`). Graphs without symbolic floats are not touched, except for
``lerp``: torch has another formula for weights from 1/2 on, so that a changing weight would choose between
two, and a sum behind a choice is not known to be one. Here all have the first.

Dynamo makes the arguments of ``math`` functions constants, such as ``math.pow(beta, step)``, the usual bias
correction. It is told to trace ``float(beta) ** float(step)`` (``torch_compat/patch_numbers.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral, Real
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.optim import Optimizer

from collage_fx.graph import (
    OPERATORS,
    composite_of,
    copy_of,
    facts_of,
    foreach_calls,
    foreach_name,
    foreach_rule,
)
from collage_fx.state import carry_along
from collage_fx.torch_compat import Place, functional_decompositions, pytree, records, schema_of

Decomposition = Callable[..., Any]

#: The attributes of an optimizer in which places begin.
GROUPS, STATE = "param_groups", "state"


@dataclass(eq=False)
class _Numbers:
    """Facts about the numbers in an optimizer's groups and state: a part of its record."""

    first: dict[Place, Real] = field(default_factory=dict)  # when the step was first traced with the number
    changed: Sequence[Place] = ()  # according to its checkpoint; places in state are without the parameter


def without_numbers(gm: GraphModule) -> tuple[GraphModule, Callable[..., Any] | None]:
    """Return a captured graph without the numbers that it returns, and a function of its arguments for these.

    ``group["step"] += 1`` makes Dynamo return the sum. The function returns the numbers, and None for each
    other result. Numbers that follow from tensors which the graph may write to stay where they are.
    """
    numbers: set[Node] = set()
    for node in gm.graph.nodes:
        given = [each for each in node.all_input_nodes if each not in numbers]
        are_read = all(each.op == "placeholder" and all(map(is_number, each.users)) for each in given)
        if is_number(node) and are_read and node.op in ("placeholder", "call_function", "call_method"):
            numbers.add(node)
    results = pytree.tree_leaves(gm.graph.output_node().args)
    if numbers.isdisjoint(results):
        return gm, None
    body = Graph()
    copied: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder" or node in numbers:
            copied[node] = body.node_copy(node, copied.__getitem__)
    body.output(tuple(copied[each] if each in numbers else None for each in results))
    body.eliminate_dead_code()
    others = copy_of(gm)
    left = pytree.tree_leaves(others.graph.output_node().args)
    kept = tuple(each for each, result in zip(left, results, strict=True) if result not in numbers)
    others.graph.output_node().args = (kept,)
    others.recompile()
    return others, GraphModule({}, body).forward


def is_number(node: Node) -> bool:
    """Return whether a node of a graph that Dynamo has captured is a number, symbolic or not."""
    value = node.meta.get("example_value")
    return isinstance(value, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool))


def scheduled_numbers(optimizer: Optimizer) -> Iterator[Place]:
    """Yield where an optimizer has numbers that a schedule is going to change, as far as can be known.

    A scheduler of torch.optim leaves ``initial_lr`` in the groups, and ``base_momentum`` if it cycles the
    momentum too. A program with a schedule of its own has set a learning rate that is not the default: if
    one group has, the learning rates of all groups are going to change.
    """
    numbers = records.of(optimizer, _Numbers)
    numbers.first = _numbers_of(optimizer) | numbers.first
    for attribute, *keys in numbers.changed:
        if attribute == STATE:
            yield from ((STATE, i, *keys) for i in range(len(optimizer.state)))
        else:
            yield attribute, *keys
    groups, rates = optimizer.param_groups, dict[int, Real]()
    for i, group in enumerate(groups):
        lr = group.get("lr")
        if isinstance(lr, Real) and not isinstance(lr, Integral):
            rates[i] = lr
        if "base_momentum" in group:
            yield from ((GROUPS, i, "momentum"), (GROUPS, i, "betas", 0))
    default = optimizer.defaults.get("lr")
    if any("initial_lr" in groups[i] or lr != default for i, lr in rates.items()):
        yield from ((GROUPS, i, "lr") for i in rates)


def _numbers_of(optimizer: Optimizer) -> dict[Place, Real]:
    """Return the numbers of an optimizer but learning rates, for which a schedule can be told."""
    groups = [{k: v for k, v in g.items() if k not in ("params", "lr")} for g in optimizer.param_groups]
    return dict((*_within(groups, GROUPS), *_within(list(optimizer.state.values()), STATE)))


def _within(value: Any, *place: int | str) -> Iterator[tuple[Place, Real]]:
    if isinstance(value, Real) and not isinstance(value, bool):
        yield place, value
    elif isinstance(value, (Mapping, list, tuple)):
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _within(each, *place, key)


def _changed_numbers(optimizer: Optimizer) -> list[Place] | None:
    """Return where numbers have changed since an optimizer's step was first traced; None for nowhere."""
    numbers, now = records.of(optimizer, _Numbers), _numbers_of(optimizer)
    changed = [place for place, number in numbers.first.items() if now.get(place) != number]
    of_any = {(STATE, *place[2:]) if place[0] == STATE else place for place in changed}
    return sorted({*of_any, *numbers.changed}, key=str) or None


def _note_changed(optimizer: Optimizer, places: Sequence[Place]) -> None:
    records.of(optimizer, _Numbers).changed = places


carry_along("collage_fx.changed", _changed_numbers, _note_changed)


def decompositions() -> dict[Any, Decomposition]:
    """Return Inductor's decompositions, extended by ours for operators that are given a symbolic float."""
    table = functional_decompositions()
    for overload in _functional_overloads():
        facts, of_element = facts_of(overload), foreach_rule(foreach_name(overload))
        rule = facts.with_number or (of_element and partial(each_element, of_element))
        if rule is not None or facts.composite is not None:
            is_lerp = overload.overloadpacket is torch.ops.aten.lerp
            otherwise = facts.composite if is_lerp else table.get(overload)
            table[overload] = _where_symbolic(overload, rule, otherwise)
    return table


def _functional_overloads() -> Iterator[Any]:
    lists = (f"aten.{name}" for name in dir(torch.ops.aten) if name.startswith("_foreach_"))
    ruled = (name for name, row in OPERATORS.items() if row.composite or row.with_number or row.each)
    for name in dict.fromkeys((*ruled, *lists)):
        namespace, operator, *_ = name.split(".")
        packet = getattr(getattr(torch.ops, namespace), operator, None)
        for overload in () if packet is None else map(partial(getattr, packet), packet.overloads()):
            if "Tensor" in str(schema_of(overload)) and not schema_of(overload).is_mutable:
                yield overload


def each_element(rule: Decomposition, *args: Any, **kwargs: Any) -> list[Any]:
    """Apply a rule to each element of the lists that a ``_foreach_`` operator is given."""
    return [rule(*element, **keywords) for element, keywords in foreach_calls(args, kwargs)]


def _where_symbolic(
    overload: Any, rule: Decomposition | None, otherwise: Decomposition | None
) -> Decomposition:
    """Make a decomposition: ``rule`` or the composite for symbolic floats, else ``otherwise``."""

    def decomposition(*args: Any, **kwargs: Any) -> Any:
        chosen = None
        if any(isinstance(leaf, torch.SymFloat) for leaf in pytree.tree_leaves((args, kwargs))):
            chosen = rule or composite_of(overload, kwargs)
        chosen = chosen or otherwise
        return NotImplemented if chosen is None else chosen(*args, **kwargs)

    return decomposition
