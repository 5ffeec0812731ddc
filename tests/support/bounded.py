"""Numbers that carry a bound of what float32 may do to them: running error analysis.

A rule written for tensors runs on :class:`Bounded` numbers as it is. Their values are those of a float64 run;
beside each stands how far a float32 run of the same operations, in any of the forms a compiler may give them,
can be away. Reference: Higham, *Accuracy and Stability of Numerical Algorithms*, 2nd edition, section 3.3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.support.float_bits import SIGNIFICAND_BITS, unit_roundoff

__all__ = ["BOUNDED_TORCH", "SMALLEST", "Bounded"]

#: One operation of a rule is at most four roundings of float32: of its constants, of a product with one
#: (``alpha``), of a reciprocal in a division's place, and its own.
ROUNDING = 4 * unit_roundoff(torch.float32)

#: Exponent of the smallest subnormal.
SMALLEST = {torch.bfloat16: -133, torch.float16: -24, torch.float32: -149}


@dataclass(frozen=True)
class Decision:
    """The outcome of a comparison, and where it is certain whatever the roundings."""

    outcome: Tensor
    sure: Tensor


class Bounded:
    """A tensor of float64 values and, elementwise, bounds of their error. Has the methods that rules use."""

    def __init__(self, value: Any, error: Any = 0.0) -> None:
        self.value = torch.as_tensor(value, dtype=torch.float64)
        self.error = torch.as_tensor(error, dtype=torch.float64).expand(self.value.shape)

    # -- elementary operations

    def __add__(self, other: Any) -> Bounded:
        other = _bounded(other)
        made = ROUNDING * (self.value.abs() + other.value.abs())
        return Bounded(self.value + other.value, self.error + other.error + made)

    def __mul__(self, other: Any) -> Bounded:
        other = _bounded(other)
        value = self.value * other.value
        inherited = self.value.abs() * other.error + (other.value.abs() + other.error) * self.error
        return Bounded(value, inherited + ROUNDING * value.abs())

    def __truediv__(self, other: Any) -> Bounded:
        other = _bounded(other)
        value = self.value / other.value
        inherited = (self.error + value.abs() * other.error) / (other.value.abs() - other.error).clamp(min=0)
        return Bounded(value, inherited + ROUNDING * value.abs())

    def __neg__(self) -> Bounded:
        return Bounded(-self.value, self.error)

    def __pow__(self, exponent: float) -> Bounded:
        if exponent == 2:
            return self * self
        assert exponent == 0.5, f"no bound for the power of {exponent}"
        return self.sqrt()

    def __rpow__(self, base: float) -> Bounded:
        """``base ** t`` for an exact t: an error of the base is multiplied by t."""
        value = base**self.value
        return Bounded(value, ROUNDING * (1 + self.value.abs()) * value)

    def __gt__(self, other: Any) -> Decision:
        other = _bounded(other)
        margin = self.error + other.error
        outcome, distance = self.value > other.value, (self.value - other.value).abs()
        return Decision(outcome, (distance > margin) | (margin == 0))

    def sqrt(self) -> Bounded:
        root = self.value.sqrt()
        return Bounded(root, root - (self.value - self.error).clamp(min=0).sqrt() + ROUNDING * root)

    def abs(self) -> Bounded:
        return Bounded(self.value.abs(), self.error)

    def sign(self) -> Bounded:
        unsure = (self.value.abs() <= self.error) & (self.error > 0)
        return Bounded(self.value.sign(), 2.0 * unsure)

    def norm(self) -> Bounded:
        """2-norm; each of n squares and n - 1 additions rounds."""
        value = self.value.norm()
        return Bounded(value, self.error.norm() + ROUNDING * (self.value.numel() + 2) * value)

    def maximum(self, other: Any) -> Bounded:
        other = _bounded(other)
        return Bounded(torch.maximum(self.value, other.value), torch.maximum(self.error, other.error))

    # -- what those give

    def __sub__(self, other: Any) -> Bounded:
        return self + -_bounded(other)

    def __rsub__(self, other: Any) -> Bounded:
        return _bounded(other) - self

    def __rtruediv__(self, other: Any) -> Bounded:
        return _bounded(other) / self

    __radd__ = __add__
    __rmul__ = __mul__

    def minimum(self, other: Any) -> Bounded:
        return -(-self).maximum(-_bounded(other))

    def clamp(self, min: Any = None, max: Any = None) -> Bounded:
        raised = self if min is None else self.maximum(min)
        return raised if max is None else raised.minimum(max)

    def square(self) -> Bounded:
        return self * self

    def reciprocal(self) -> Bounded:
        return 1.0 / self

    def rsqrt(self) -> Bounded:
        return self.sqrt().reciprocal()

    def add(self, other: Any, alpha: float = 1.0) -> Bounded:
        return self + alpha * _bounded(other)

    def sub(self, other: Any, alpha: float = 1.0) -> Bounded:
        return self - alpha * _bounded(other)

    def mul(self, other: Any) -> Bounded:
        return self * other

    def div(self, other: Any) -> Bounded:
        return self / other

    def neg(self) -> Bounded:
        return -self

    def addcmul(self, a: Any, b: Any, value: float = 1.0) -> Bounded:
        return self + value * (_bounded(a) * b)

    def addcdiv(self, a: Any, b: Any, value: float = 1.0) -> Bounded:
        return self + value * (_bounded(a) / b)

    def lerp(self, end: Any, weight: float) -> Bounded:
        """``x + w (end - x)``, or ``end - (1 - w)(end - x)``, whose terms are no larger."""
        return self + weight * (_bounded(end) - self)

    # -- tensors' housekeeping: no arithmetic

    @property
    def data(self) -> Bounded:
        return self

    @data.setter
    def data(self, value: Bounded) -> None:
        self.copy_(value)

    @property
    def dtype(self) -> None:
        return None

    def to(self, dtype: Any) -> Bounded:
        return self.clone()

    def float(self) -> Bounded:
        return self.clone()

    def clone(self) -> Bounded:
        return Bounded(self.value, self.error)

    def copy_(self, source: Bounded) -> Bounded:
        self.value = source.value.expand(self.value.shape)
        self.error = source.error.expand(self.value.shape)
        return self

    def stored(self, dtype: torch.dtype, *, compensated: bool) -> Bounded:
        """What memory keeps: a multiple of the format's precision, or of its square for a pair.

        A pair is off by ``max(u**2 |x|, q/2)``, a single number by ``max(u |x|, q/2)``, q the smallest
        subnormal.
        """
        u = unit_roundoff(dtype) ** (2 if compensated else 1)
        rounding = (u * (self.value.abs() + self.error)).clamp(min=2.0 ** (SMALLEST[dtype] - 1))
        return Bounded(self.value, self.error + rounding)


def _bounded(value: Any) -> Bounded:
    return value if isinstance(value, Bounded) else Bounded(value)


def _where(condition: Decision, a: Any, b: Any) -> Bounded:
    a, b = _bounded(a), _bounded(b)
    either = torch.maximum(a.error, b.error) + (a.value - b.value).abs()
    chosen = torch.where(condition.outcome, a.error, b.error)
    return Bounded(
        torch.where(condition.outcome, a.value, b.value), torch.where(condition.sure, chosen, either)
    )


#: Methods that exist as ``torch.NAME`` and ``torch._foreach_NAME`` too.
ELEMENTWISE = (
    "abs", "add", "addcdiv", "addcmul", "clamp", "div", "lerp", "maximum", "minimum", "mul", "neg",
    "reciprocal", "rsqrt", "sign", "sqrt", "square", "sub",
)  # fmt: skip


def _in_place(name: str) -> Callable[..., Bounded]:
    def method(self: Bounded, *args: Any, **kwargs: Any) -> Bounded:
        return self.copy_(getattr(self, name)(*args, **kwargs))

    return method


for _name in ELEMENTWISE:
    setattr(Bounded, f"{_name}_", _in_place(_name))
for _name, _operator in (("add", "__iadd__"), ("sub", "__isub__"), ("mul", "__imul__")):
    setattr(Bounded, _operator, _in_place(_name))


def _foreach(name: str, xs: Sequence[Bounded], *operands: Any, **kwargs: Any) -> list[Bounded]:
    rows = ([o[i] if isinstance(o, (list, tuple)) else o for o in operands] for i in range(len(xs)))
    return [getattr(x, name)(*row, **kwargs) for x, row in zip(xs, rows, strict=True)]


#: What a rule calls ``torch`` when it runs on bounded numbers.
BOUNDED_TORCH = SimpleNamespace(
    where=_where,
    linalg=SimpleNamespace(vector_norm=Bounded.norm),
    _foreach_norm=functools.partial(_foreach, "norm"),
    _foreach_copy_=functools.partial(_foreach, "copy_"),
    _foreach_clamp_min_=functools.partial(_foreach, "maximum_"),
    _foreach_clamp_max_=functools.partial(_foreach, "minimum_"),
    **{name: getattr(Bounded, name) for name in ELEMENTWISE},
    **{f"_foreach_{name}": functools.partial(_foreach, name) for name in ELEMENTWISE},
    **{f"_foreach_{name}_": functools.partial(_foreach, f"{name}_") for name in ELEMENTWISE},
)
assert set(SMALLEST) == set(SIGNIFICAND_BITS)
