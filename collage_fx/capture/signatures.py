"""Facts about an operator that a recorder needs: its arguments, and its effects on them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from collage_fx.graph import (
    depends_on_values,
    drawn_range,
    facts_of,
    foreach_name,
    foreach_rule,
    ignores_values,
)
from collage_fx.torch_compat import schema_of


@dataclass(frozen=True, eq=False, repr=False)
class Signature:
    """Facts about an operator's schema. There is one object for each operator."""

    operator: Any
    names: tuple[str, ...]  # of its arguments
    quantities: tuple[str, ...]  # meaning of a number in each argument: see :func:`_quantity`
    writes: tuple[str, ...]  # names of the arguments that it overwrites
    results: tuple[tuple[str, str], ...]  # each ("new", ""), ("same", argument) or ("view", argument)
    returns_several: bool  # a tuple or a list
    reads_no_values: bool  # whether its result is independent of the elements of its arguments
    is_immediate: bool  # executed rather than recorded: see :func:`~collage_fx.graph.depends_on_values`
    element_rule: Callable[..., Any] | None  # of a ``_foreach_`` operator, for one element

    def __repr__(self) -> str:
        return str(self.operator)


@functools.cache
def signature_of(operator: Any) -> Signature:
    """Return the signature of an ATen operator."""
    schema = schema_of(operator)
    arguments, returns = schema.arguments, schema.returns
    aliases = {each.name: each.alias_info for each in arguments if each.alias_info is not None}
    aliased = {frozenset(alias.before_set): name for name, alias in aliases.items()}
    first = arguments[0].name if arguments else ""
    # A view of a whole real tensor is executed at once: most steps make one at every access of ``.data``.
    is_whole_view = operator.is_view and facts_of(operator).passes == 0 and len(arguments) == 1
    results = []
    for alias in (result.alias_info for result in returns):
        if alias is not None and alias.is_write:
            results.append(("same", aliased[frozenset(alias.before_set)]))
        else:
            results.append(("view", first) if operator.is_view else ("new", ""))
    return Signature(
        operator,
        names=tuple(argument.name for argument in arguments),
        quantities=tuple(_quantity(argument.real_type) for argument in arguments),
        writes=tuple(name for name, alias in aliases.items() if alias.is_write),
        results=tuple(results),
        returns_several=len(returns) > 1 or any("List" in str(result.type) for result in returns),
        reads_no_values=is_whole_view or ignores_values(operator),
        is_immediate=depends_on_values(operator),
        element_rule=foreach_rule(foreach_name(operator).removesuffix("_")),
    )


def _quantity(kind: Any) -> str:
    """Return the meaning of a number in an argument: "number" to calculate with, "size", "" for others."""
    if kind.kind() in ("ListType", "OptionalType"):
        return _quantity(kind.getElementType())
    kinds = {"NumberType": "number", "FloatType": "number", "TensorType": "number", "SymIntType": "size"}
    return kinds.get(kind.kind(), "")


def draws_16_bits(operator: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a call draws random numbers for stochastic rounding of float32 to bfloat16."""
    return drawn_range(operator, args, kwargs) == (0, 1 << 16) and kwargs.get("generator") is None


def is_index_of_integers(operator: Any, args: Any) -> bool:
    """Return whether a call selects elements by index, so that its result's shape is known; not by a mask."""
    return operator is torch.ops.aten.index.Tensor and not any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    )
