"""Python numbers that change from step to step, as inputs of the captured graph.

Note [Numbers that change]
--------------------------
A learning rate that a scheduler sets and a step counter in ``optimizer.state`` are Python numbers. Dynamo
burns such a number into the graph at first and makes it symbolic when it sees it change; AOTAutograd then
replaces the operations on a symbolic float by operations on a 0-d float64 tensor, so that the compiled code
takes the number as an input. It can do so for ``mul(tensor, number)`` and its like alone. Where a symbolic
float is an ``alpha=`` or ``value=``, a bound of ``clamp`` or an element of a ``_foreach_`` list, the number
is
burned in after all, and the step compiled again each time it changes: SGD with a scheduler on a float ``lr``
was compiled once a step, until Dynamo gave up on it.

So, wherever a symbolic float meets an operator, the operator is taken apart while AOTAutograd traces it, into
the multiplications and additions it stands for (:func:`decompositions`). Graphs without symbolic floats are
not touched.

``math.pow(beta, step)``, the usual bias correction, is one step earlier: Dynamo itself burns the arguments of
``math`` functions in. It has a Python spelling that Dynamo traces, ``float(beta) ** float(step)``, and is
told to trace that (``torch_compat/patch_numbers.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from collage_fx.graph import COMPOSITES, foreach_calls, foreach_name, foreach_rule, is_one
from collage_fx.torch_compat import (
    functional_decompositions,
    pytree,
    schema_of,
)

__all__ = ["decompositions"]

aten = torch.ops.aten

Decomposition = Callable[..., Any]


def _as_tensor(number: Any, like: Tensor) -> Tensor:
    """A number as a 0-d tensor, made by an operation that a symbolic float survives."""
    return torch.zeros((), dtype=torch.float64, device=like.device) + number


def _add(x: Any, y: Any, *, alpha: Any = 1) -> Any:
    return NotImplemented if is_one(alpha) else x + y * alpha


def _sub(x: Any, y: Any, *, alpha: Any = 1) -> Any:
    return NotImplemented if is_one(alpha) else x - y * alpha


def _rsub(x: Any, y: Any, alpha: Any = 1) -> Any:
    return y + -(x if is_one(alpha) else x * alpha)


def _clamp(x: Tensor, min: Any = None, max: Any = None) -> Tensor:
    if min is not None:
        x = torch.maximum(x, _as_tensor(min, x).to(x.dtype))
    return x if max is None else torch.minimum(x, _as_tensor(max, x).to(x.dtype))


def _pow(base: Any, exponent: Any) -> Tensor:
    if isinstance(base, Tensor):
        return torch.pow(base, _as_tensor(exponent, base))
    return torch.pow(_as_tensor(base, exponent), exponent)


def _fill(x: Tensor, value: Any) -> Tensor:
    return torch.zeros_like(x) + value


def _full_like(x: Tensor, value: Any, **kwargs: Any) -> Tensor:
    return torch.zeros_like(x, **kwargs) + value


def _full(size: Any, value: Any, **kwargs: Any) -> Tensor:
    return torch.zeros(size, **kwargs) + value


def _masked_fill(x: Tensor, mask: Tensor, value: Any) -> Tensor:
    return torch.where(mask, _as_tensor(value, x).to(x.dtype), x)


#: Operators in which a symbolic float would be burned in; NotImplemented where it would not be.
WITH_NUMBERS: dict[Any, Decomposition] = {
    **COMPOSITES,
    aten.add: _add,
    aten.sub: _sub,
    aten.rsub: _rsub,
    aten.clamp: _clamp,
    aten.clamp_min: lambda x, bound: _clamp(x, min=bound),
    aten.clamp_max: lambda x, bound: _clamp(x, max=bound),
    aten.fill: _fill,
    aten.full: _full,
    aten.full_like: _full_like,
    aten.masked_fill: _masked_fill,
    aten.pow: _pow,
    aten.scalar_tensor: lambda value, **kwargs: torch.zeros((), **kwargs) + value,
}


def decompositions() -> dict[Any, Decomposition]:
    """Inductor's decompositions, and ours of whatever a symbolic float is an argument of."""
    table = functional_decompositions()
    for packet, rule in WITH_NUMBERS.items():
        for overload in _overloads(packet):
            table[overload] = _where_symbolic(rule, table.get(overload))
    for name in dir(aten):
        if name.startswith("_foreach_") and not name.endswith("_"):
            for overload in _overloads(getattr(aten, name)):
                element_rule = foreach_rule(foreach_name(overload))
                if element_rule is not None:
                    table[overload] = _where_symbolic(_each(element_rule), table.get(overload))
    return table


def _overloads(packet: Any) -> list[Any]:
    """The functional overloads on tensors of an operator."""
    overloads = [getattr(packet, name) for name in packet.overloads()]
    return [each for each in overloads if "Tensor" in str(schema_of(each)) and not schema_of(each).is_mutable]


def _each(rule: Decomposition) -> Decomposition:
    def of_lists(*args: Any, **kwargs: Any) -> list[Any]:
        return [rule(*element, **keywords) for element, keywords in foreach_calls(args, kwargs)]

    return of_lists


def _where_symbolic(rule: Decomposition, otherwise: Decomposition | None) -> Decomposition:
    """``rule`` where a symbolic float is among the arguments, ``otherwise`` where not or it says nothing."""

    def decomposition(*args: Any, **kwargs: Any) -> Any:
        result = NotImplemented
        if any(isinstance(leaf, torch.SymFloat) for leaf in pytree.tree_leaves((args, kwargs))):
            result = rule(*args, **kwargs)
        if result is NotImplemented and otherwise is not None:
            result = otherwise(*args, **kwargs)
        return result

    return decomposition
