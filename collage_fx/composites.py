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

from collage_fx.torch_compat import prims_fma

__all__ = ["COMPOSITES", "foreach_calls", "foreach_rule"]

aten = torch.ops.aten


def _scaled(x: Any, factor: Any) -> Any:
    return x if isinstance(factor, (int, float)) and factor == 1 else x * factor


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
    "copy": lambda x, source: source.to(x.dtype),
    "zero": torch.zeros_like,
    "maximum": lambda x, y: torch.maximum(x, y) if isinstance(y, torch.Tensor) else torch.clamp(x, min=y),
    "minimum": lambda x, y: torch.minimum(x, y) if isinstance(y, torch.Tensor) else torch.clamp(x, max=y),
    "norm": lambda x, ord=2: torch.linalg.vector_norm(x, ord),
    "powsum": lambda x, ord=2: (torch.abs(x) ** ord).sum(),
    "max": torch.amax,
}


def foreach_rule(target: Any) -> Callable[..., Any] | None:
    """What ``aten::_foreach_NAME`` does to each element of its lists; None for others."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    namespace, _, name = target._schema.name.partition("::_foreach_")
    return FOREACH.get(name) or getattr(torch, name, None) if namespace == "aten" and name else None


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
