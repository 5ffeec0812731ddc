"""What composite operators are made of: eager functions of elementary operations.

``normalize`` opens composites in captured graphs with these; ``scalars`` opens them earlier, while a graph is
captured, where a number among their arguments changes from step to step. Each rule equals its operator in
exact arithmetic.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from collage_fx.torch_compat import (
    OpOverload,
    prims_fma,
    schema_of,
)

__all__ = [
    "COMPOSITES",
    "FOREACH_OPERATORS",
    "foreach_calls",
    "foreach_name",
    "foreach_rule",
    "is_one",
    "weighted_sum",
]

aten = torch.ops.aten


def is_one(number: Any) -> bool:
    """Whether it is the number 1, and no symbol that happens to be 1."""
    return isinstance(number, (int, float)) and number == 1


def _is_zero(number: Any) -> bool:
    return isinstance(number, (int, float)) and number == 0


def _scaled(x: Any, factor: Any) -> Any:
    return x if is_one(factor) else x * factor


def _add(x: Any, y: Any, *, alpha: Any = 1) -> Any:
    return x + _scaled(y, alpha)


def _sub(x: Any, y: Any, *, alpha: Any = 1) -> Any:
    return x - _scaled(y, alpha)


def _rsub(x: Any, y: Any, alpha: Any = 1) -> Any:
    return y - _scaled(x, alpha)


def _addcmul(x: Any, a: Any, b: Any, *, value: Any = 1) -> Any:
    return x + _scaled(a * b, value)


def _addcdiv(x: Any, a: Any, b: Any, *, value: Any = 1) -> Any:
    return x + _scaled(a / b, value)


def _lerp(x: Any, end: Any, weight: Any) -> Any:
    return x + _scaled(end - x, weight)


def _fma(a: Any, b: Any, c: Any) -> Any:
    return a * b + c


def weighted_sum(x: Any, y: Any, beta: Any, alpha: Any) -> Any:
    """``beta x + alpha y``; a ``beta`` of 0 ignores x, as in torch: NaN and infinities in it are not read."""
    return _scaled(y, alpha) if _is_zero(beta) else _scaled(x, beta) + _scaled(y, alpha)


#: Operator -> the elementary operations it stands for.
COMPOSITES: dict[Any, Callable[..., Any]] = {
    aten.add: _add,
    aten.sub: _sub,
    aten.rsub: _rsub,
    aten.addcmul: _addcmul,
    aten.addcdiv: _addcdiv,
    aten.lerp: _lerp,
    prims_fma: _fma,
}


def _pow(base: Any, exponent: Any) -> Any:
    return base**exponent


#: ``_foreach_NAME`` -> what it does to each element of its lists, where that isn't ``torch.NAME``.
FOREACH: dict[str, Callable[..., Any]] = {
    "add": _add,
    "sub": _sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "pow": _pow,
    "addcmul": lambda x, a, b, value=1: _addcmul(x, a, b, value=value),
    "addcdiv": lambda x, a, b, value=1: _addcdiv(x, a, b, value=value),
    "lerp": _lerp,
    "clamp_min": lambda x, bound: torch.clamp(x, min=bound),
    "clamp_max": lambda x, bound: torch.clamp(x, max=bound),
    "maximum": lambda x, y: torch.maximum(x, y) if isinstance(y, torch.Tensor) else torch.clamp(x, min=y),
    "minimum": lambda x, y: torch.minimum(x, y) if isinstance(y, torch.Tensor) else torch.clamp(x, max=y),
    "norm": lambda x, ord=2, dtype=None: torch.linalg.vector_norm(x, ord, dtype=dtype),
    "powsum": lambda x, ord=2, dtype=None: torch.sum(x.abs() ** ord, dtype=dtype),
    "max": torch.amax,
}


#: ``_foreach_NAME`` -> the operator that does it to each element, and its last arguments, where that depends
#: on the element's shape, so that it can't be traced once for all.
FOREACH_OPERATORS: dict[str, tuple[OpOverload, tuple[Any, ...]]] = {
    "copy": (aten.copy.default, ()),
    "mm": (aten.mm.default, ()),
    "zero": (aten.full_like.default, (0,)),
}


def foreach_name(target: Any) -> str:
    """NAME of an operator ``aten::_foreach_NAME``; empty for others."""
    if not isinstance(target, OpOverload):
        return ""
    namespace, _, name = schema_of(target).name.partition("::_foreach_")
    return name if namespace == "aten" else ""


def foreach_rule(name: str) -> Callable[..., Any] | None:
    """What ``_foreach_NAME`` does to each element of its lists, if that is a function of any shape."""
    return None if name in FOREACH_OPERATORS else FOREACH.get(name) or getattr(torch, name, None)


def foreach_calls(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments of a ``_foreach_`` operator, element by element, as its rule takes them."""
    arguments = [*args, *kwargs.values()]
    length = next(len(argument) for argument in arguments if isinstance(argument, (list, tuple)))
    for i in range(length):
        positional, keyword = (
            [argument[i] if isinstance(argument, (list, tuple)) else argument for argument in group]
            for group in (args, kwargs.values())
        )
        names = ("value" if name == "scalars" else name for name in kwargs)
        yield tuple(positional), dict(zip(names, keyword, strict=True))
