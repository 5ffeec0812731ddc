"""Numbers that carry a bound of what rounding may do to them: running error analysis.

A rule written for tensors runs on :class:`Bounded` numbers as it is. Their values are those of a float64 run;
beside each stands how far a run of the same operations in low precision, in any of the forms a compiler may
give them, can be away. Reference: Higham, *Accuracy and Stability of Numerical Algorithms*, 2nd edition,
section 3.3.

In wide arithmetic that is a run in float32. In native arithmetic it is one in the storage format, except for
what is computed from a compensated tensor's old value on the way to its new one: those are double words. So a
number has a bound for everybody, and another, smaller one for each compensated tensor it is computed from,
which holds where it is used for that tensor's new value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from collage_fx.numerics import ErrorFormat
from collage_fx.passes.repay import MOST_UNSCALED
from tests.support.float_bits import SIGNIFICAND_BITS, unit_roundoff

__all__ = ["BOUNDED_TORCH", "SMALLEST", "WIDE", "Bounded", "Rounding"]

#: One operation of a rule is at most four roundings: of its constants, of a product with one (``alpha``), of
#: a reciprocal in a division's place, and its own.
ROUNDINGS = 4

#: Bounds of the algorithms for double words, in ``u**2``, and one more for a number as such: those of a sum
#: (3) and of a product (7). The roundings of one that may be to a subnormal number are no more.
DOUBLE_SUM = 4
DOUBLE_PRODUCT = 8

#: Exponent of the smallest subnormal.
SMALLEST = {torch.bfloat16: -133, torch.float16: -24, torch.float32: -149}


@dataclass(frozen=True)
class Rounding:
    """The error bound of an operation.

    Attributes:
        plain: for everybody, relative to the largest of its terms.
        double: for a tensor itself: ``u**2``.
        quantum: the smallest subnormal number.
    """

    plain: float
    double: float = 0.0
    quantum: float = 0.0

    @staticmethod
    def native(dtype: torch.dtype) -> Rounding:
        u = unit_roundoff(dtype)
        return Rounding(ROUNDINGS * u, u**2, 2.0 ** SMALLEST[dtype])

    def of(self, magnitude: Tensor | float) -> Tensor | float:
        return self.plain * magnitude + ROUNDINGS * self.quantum / 2

    def of_own(self, magnitude: Tensor | float) -> Tensor | float:
        """The magnitude is in units of ``u**2``."""
        return self.double * magnitude + ROUNDINGS * DOUBLE_PRODUCT * self.quantum / 2


#: In float32 there is no double word: a sum is rounded as for everybody, a product twice as much.
WIDE = Rounding(
    ROUNDINGS * unit_roundoff(torch.float32), ROUNDINGS * unit_roundoff(torch.float32) / DOUBLE_SUM
)


@dataclass(frozen=True)
class Decision:
    """The outcome of a comparison, and where it is certain whatever the roundings."""

    outcome: Tensor
    sure: Tensor


class Bounded:
    """A tensor of float64 values and, elementwise, bounds of their error. Has the methods that rules use.

    Attributes:
        value, error: see above.
        own: the smaller bounds, by what the tensor is called.
        rounding: of an operation on it.
        name: of the tensor that it is the memory of, if any.
        read_as: the dtype and the error format in which others may read what is stored here.
        repaid: how many times the rounding error of what is stored here the parameter may subtract, and the
            dtype and the error format of that.
    """

    name: str = ""
    read_as: tuple[torch.dtype, ErrorFormat] | None = None
    repaid: tuple[float, torch.dtype, ErrorFormat] | None = None

    def __init__(
        self,
        value: Any,
        error: Any = 0.0,
        own: Mapping[str, Tensor] | None = None,
        rounding: Rounding = WIDE,
    ) -> None:
        self.value = torch.as_tensor(value, dtype=torch.float64)
        self.error = torch.as_tensor(error, dtype=torch.float64).expand(self.value.shape)
        self.own = dict(own or {})
        self.rounding = rounding

    def _made(
        self,
        value: Tensor,
        magnitude: Tensor | float,
        operands: Sequence[Bounded],
        inherited: Callable[..., Tensor],
        own_magnitude: Tensor | float | None = None,
    ) -> Bounded:
        """The result of an operation.

        Args:
            value: of the result.
            magnitude: what its rounding is relative to.
            operands: what it is computed from.
            inherited: their errors -> what that does to the result.
            own_magnitude: the same for double words, times the factor of their algorithm.
        """
        if own_magnitude is None:
            own_magnitude = DOUBLE_PRODUCT * magnitude
        owners = {name for operand in operands for name in operand.own}
        own = {
            name: inherited(*(operand.own.get(name, operand.error) for operand in operands))
            + self.rounding.of_own(own_magnitude)
            for name in owners
        }
        error = inherited(*(operand.error for operand in operands)) + self.rounding.of(magnitude)
        return Bounded(value, error, own, self.rounding)

    def _as_operand(self, other: Any) -> Bounded:
        """A number, in native arithmetic, is rounded to the storage format, or to a double word."""
        return other if isinstance(other, Bounded) else Bounded(other, rounding=self.rounding)

    # -- elementary operations

    def __add__(self, other: Any) -> Bounded:
        other = self._as_operand(other)
        magnitude = self.value.abs() + other.value.abs()
        return self._made(
            self.value + other.value, magnitude, (self, other), lambda x, y: x + y, DOUBLE_SUM * magnitude
        )

    def __mul__(self, other: Any) -> Bounded:
        """Multiply; by a number near 1, native arithmetic makes a sum: Note [Decay is an increment]."""
        is_decay = not isinstance(other, Bounded) and abs(other - 1) <= abs(other) / 2
        other = self._as_operand(other)
        value = self.value * other.value
        own_magnitude = DOUBLE_PRODUCT * value.abs()
        if is_decay:
            increment = (other.value - 1) * self.value
            own_magnitude = DOUBLE_SUM * value.abs() + DOUBLE_PRODUCT * increment.abs()

        def inherited(x: Tensor, y: Tensor) -> Tensor:
            return self.value.abs() * y + (other.value.abs() + y) * x

        return self._made(value, value.abs(), (self, other), inherited, own_magnitude)

    def __truediv__(self, other: Any) -> Bounded:
        other = self._as_operand(other)
        value = self.value / other.value

        def inherited(x: Tensor, y: Tensor) -> Tensor:
            return (x + value.abs() * y) / (other.value.abs() - y).clamp(min=0)

        return self._made(value, value.abs(), (self, other), inherited)

    def __neg__(self) -> Bounded:
        return self._made(-self.value, 0.0, (self,), lambda x: x)

    def __pow__(self, exponent: float) -> Bounded:
        if exponent == 2:
            return self * self
        assert exponent == 0.5, f"no bound for the power of {exponent}"
        return self.sqrt()

    def __rpow__(self, base: float) -> Bounded:
        """Raise a base to an exact t: an error of the base is multiplied by t.

        Of numbers alone, which are computed in float32.
        """
        value = base**self.value
        return Bounded(value, WIDE.plain * (1 + self.value.abs()) * value, rounding=self.rounding)

    def __gt__(self, other: Any) -> Decision:
        other = self._as_operand(other)
        margin = self.error + other.error
        outcome, distance = self.value > other.value, (self.value - other.value).abs()
        return Decision(outcome, (distance > margin) | (margin == 0))

    def sqrt(self) -> Bounded:
        root = self.value.sqrt()
        return self._made(root, root, (self,), lambda x: root - (self.value - x).clamp(min=0).sqrt())

    def abs(self) -> Bounded:
        return self._made(self.value.abs(), 0.0, (self,), lambda x: x)

    def sign(self) -> Bounded:
        return self._made(
            self.value.sign(), 0.0, (self,), lambda x: 2.0 * ((self.value.abs() <= x) & (x > 0))
        )

    def norm(self) -> Bounded:
        """2-norm; each of n squares and n - 1 additions rounds. In native arithmetic it is one of hi."""
        value = self.value.norm()
        made = WIDE.plain * (self.value.numel() + 2) * value
        return Bounded(value, self.error.norm() + made + self.rounding.of(value), rounding=self.rounding)

    def maximum(self, other: Any) -> Bounded:
        """Nothing is rounded but a number."""
        magnitude = 0.0 if isinstance(other, Bounded) else abs(other)
        other = self._as_operand(other)
        value = torch.maximum(self.value, other.value)
        return self._made(value, magnitude, (self, other), torch.maximum)

    # -- what those give

    def __sub__(self, other: Any) -> Bounded:
        return self + -self._as_operand(other)

    def __rsub__(self, other: Any) -> Bounded:
        return self._as_operand(other) - self

    def __rtruediv__(self, other: Any) -> Bounded:
        return self._as_operand(other) / self

    __radd__ = __add__
    __rmul__ = __mul__

    def minimum(self, other: Any) -> Bounded:
        return -(-self).maximum(-other)

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
        return self + alpha * self._as_operand(other)

    def sub(self, other: Any, alpha: float = 1.0) -> Bounded:
        return self - alpha * self._as_operand(other)

    def mul(self, other: Any) -> Bounded:
        return self * other

    def div(self, other: Any) -> Bounded:
        return self / other

    def neg(self) -> Bounded:
        return -self

    def addcmul(self, a: Any, b: Any, value: float = 1.0) -> Bounded:
        return self + value * (self._as_operand(a) * b)

    def addcdiv(self, a: Any, b: Any, value: float = 1.0) -> Bounded:
        return self + value * (self._as_operand(a) / b)

    def lerp(self, end: Any, weight: float) -> Bounded:
        """Interpolate: ``x + w (end - x)``, or ``end - (1 - w)(end - x)``, whose terms are no larger."""
        return self + weight * (self._as_operand(end) - self)

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
        return Bounded(self.value, self.error, self.own, self.rounding)

    def copy_(self, source: Bounded) -> Bounded:
        self.value = source.value.expand(self.value.shape)
        self.error = source.error.expand(self.value.shape)
        # Other tensors' paths end where this one's new value is made.
        kept = (name for name in source.own if self.name in ("", name))
        self.own = {name: source.own[name].expand(self.value.shape) for name in kept}
        if self.read_as is not None:
            self.own.setdefault(self.name, self.error)
            largest = torch.maximum(self.error, self.own[self.name])
            self.error = largest + _storage_error(self.value.abs() + largest, *self.read_as)
        if self.repaid is not None:
            k, dtype, fmt = self.repaid
            self.own["p"] = self.error + k * _storage_error(self.value.abs() + self.error, dtype, fmt)
        return self

    # -- memory

    def loaded(self, name: str, dtype: torch.dtype, fmt: ErrorFormat | None, k: Any = 0) -> Bounded:
        """The value that a step computes with: hi + lo, in native arithmetic for the tensor itself alone.

        Others may read a parameter's new value as stored: Note [Kahan's own term]. The parameter may
        read a state's new value less ``k`` times its rounding error: ``passes/repay.py``.
        """
        result = Bounded(self.value, self.error, rounding=self.rounding)
        result.name = name
        if fmt is None or not fmt.keeps_error:
            if fmt is not None and fmt.is_repayable:
                bound = fmt.error_bound(dtype)
                is_repaid = 0 < k * max(bound.relative, bound.of_largest) <= MOST_UNSCALED
                result.repaid = (k, dtype, fmt) if is_repaid else None
            return result
        if self.rounding is not WIDE:
            result.own = {name: self.error}
            result.error = self.error + unit_roundoff(dtype) * (self.value.abs() + self.error)
        elif name == "p":
            result.own, result.read_as = {name: self.error}, (dtype, fmt)
        return result

    def stored(self, name: str, dtype: torch.dtype, fmt: ErrorFormat | None) -> Bounded:
        """The value that memory keeps, off by what the format says, or by half an ulp where there is none."""
        compensated = fmt is not None and fmt.keeps_error
        error = self.own.get(name, self.error) if compensated else self.error
        return Bounded(
            self.value, error + _storage_error(self.value.abs() + error, dtype, fmt), rounding=self.rounding
        )

    def encoded(self, dtype: torch.dtype, fmt: ErrorFormat) -> Bounded:
        """The value that memory keeps once it is first encoded, to nearest."""
        error = _storage_error(self.value.abs(), dtype, fmt)
        return Bounded(self.value, self.error + error, rounding=self.rounding)


def _storage_error(magnitude: Tensor, dtype: torch.dtype, fmt: ErrorFormat | None) -> Tensor:
    """How far off numbers up to such magnitudes are in memory.

    Without a format by ``max(u |x|, q/2)``, q the smallest subnormal. In one by its bound (which
    ``tests/numerics`` holds it to), where the elements that share a scale are taken to be those of a row.
    Dither may choose the neighbour that is farther away, up to twice the bound; in a root that is off by e,
    of whose number the bound is ``b = 2 e + e**2``, twice e are ``4 e + 4 e**2``, ``(2 + b) b`` at most.
    """
    if fmt is None:
        return (unit_roundoff(dtype) * magnitude).clamp(min=2.0 ** (SMALLEST[dtype] - 1))
    relative, absolute, of_largest = map(float, fmt.error_bound(dtype))
    largest = magnitude.flatten(1).amax(1) if magnitude.dim() > 1 else magnitude.amax()
    of_row = of_largest * largest.reshape(-1, *[1] * (magnitude.dim() - 1)) if magnitude.dim() else largest
    error = torch.maximum((relative * magnitude).clamp(min=absolute), of_row)
    return (2 + of_largest) * error if fmt.is_dithered else error


def _where(condition: Decision, a: Bounded, b: Bounded) -> Bounded:
    def inherited(x: Tensor, y: Tensor) -> Tensor:
        either = torch.maximum(x, y) + (a.value - b.value).abs()
        return torch.where(condition.sure, torch.where(condition.outcome, x, y), either)

    return a._made(torch.where(condition.outcome, a.value, b.value), 0.0, (a, b), inherited)


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
