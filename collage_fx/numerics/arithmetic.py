"""Compensated arithmetic as eager functions, which the passes trace into the graph.

Notation. RN is rounding to nearest even in the storage format (bfloat16 or float16), u its unit roundoff
(2**-8, 2**-11). A *double word* is an unevaluated sum ``hi + lo`` of two storage-format tensors with
``hi = RN(hi + lo)``, so that ``|lo| <= ulp(hi)/2``. Every function takes tensors of any shape that broadcast,
and returns tensors of the same dtype unless it says otherwise.

Bounds hold without overflow. With it, hi is infinite or NaN and lo is meaningless (:func:`finite_or_zero`).
Sums do not underflow, because every sum of two finite numbers below the normal range is exact, so their
bounds hold down to zero. A product that is not a multiple of the quantum, the smallest subnormal q, is off by
up to q/2 more, or ``q/2 + 2**-150`` in bfloat16, whose products may be subnormal in float32 as well and are
then rounded twice: the bounds of products are relative while no partial product falls below the normal range
or, for the remainder, below q. The sign of a zero result is not kept.

References:
    [Yu24]    Yu et al., *Collage: Light-Weight Low-Precision Strategy for LLM Training*, ICML 2024, arXiv
              2405.03637.
    [JMP17]   Joldes, Muller, Popescu, *Tight and rigorous error bounds for basic building blocks of
              double-word arithmetic*, ACM TOMS 44(2), 2017, doi 10.1145/3121432.
    [MR22]    Muller, Rideau, *Formalization of double-word arithmetic, and comments on "Tight and rigorous
              error bounds [...]"*, ACM TOMS 48(1), 2022, doi 10.1145/3484514: machine-checked proofs, some of
              [JMP17] corrected.
    [BGM17]   Boldo, Graillat, Muller, *On the robustness of the 2Sum and Fast2Sum algorithms*, ACM TOMS
              44(1), 2017.
    [Knuth]   Knuth, *The Art of Computer Programming 2*, section 4.2.2, theorem B.
    [Fig95]   Figueroa, *When is double rounding innocuous?*, SIGNUM Newsletter 30(3), 1995: one +, -, *, / or
              sqrt in a format of at least 2p + 2 bits and then rounded to p bits equals the operation rounded
              once. float32 (24 bits) qualifies for both storage formats (2*8 + 2 = 18, 2*11 + 2 = 24).
"""

from __future__ import annotations

from fractions import Fraction
from math import inf, isfinite

import torch
from torch import Tensor

from collage_fx.numerics.formats import BFLOAT16, FLOAT16, storage_format

DoubleWord = tuple[Tensor, Tensor]


def two_sum(a: Tensor, b: Tensor) -> DoubleWord:
    """Compute s and e with ``s + e == a + b`` exactly and ``s = RN(a + b)``, for any magnitudes.

    TwoSum of [Knuth], 6 operations; exact for every finite pair unless ``s`` overflows or ``|b|`` is the
    largest finite number, where ``s - a`` may [BGM17]. The published Collage code uses Fast2Sum, which is
    exact only for ``|a| >= |b|``: an update larger than the weight breaks it.
    """
    s = a + b
    b_virtual = s - a
    a_virtual = s - b_virtual
    return s, (a - a_virtual) + (b - b_virtual)


def two_prod(a: Tensor, b: Tensor) -> DoubleWord:
    """Compute p and e with ``p + e == a * b`` exactly and ``p = RN(a * b)``.

    The product of two p-bit significands has 2p <= 22 bits, so float32 holds it exactly, and the remainder
    has at most p bits. Exact if and only if the remainder ``a*b - RN(a*b)`` is a multiple of the quantum q
    (so whenever ``ulp(a) ulp(b) >= q``); otherwise ``e`` is the remainder rounded to one, and the error at
    most q/2. In bfloat16 a product below 2**-126 is rounded to float32's own quantum first: there ``p`` may
    be the other neighbour of a near tie, and the error is at most ``q/2 + 2**-150``.
    """
    exact = a.to(torch.float32) * b.to(torch.float32)
    p = exact.to(a.dtype)
    return p, (exact - p.to(torch.float32)).to(a.dtype)


def grow(hi: Tensor, lo: Tensor, y: Tensor) -> DoubleWord:
    """Add a storage-format tensor to a double word: Collage's *Grow* [Yu24, algorithm 1].

    DWPlusFP of [JMP17, algorithm 4] with TwoSum in place of the closing Fast2Sum: relative error at most 2
    u**2, for every ordering of the magnitudes, and no underflow.
    """
    s, e = two_sum(hi, y)
    return two_sum(s, lo + e)


def add_double_words(xh: Tensor, xl: Tensor, yh: Tensor, yl: Tensor) -> DoubleWord:
    """Add two double words, with a relative error of at most 3 u**2 + 13 u**3.

    AccurateDWPlusDW [JMP17, algorithm 6] with TwoSum in place of both Fast2Sums; no underflow.
    """
    sh, sl = two_sum(xh, yh)
    th, tl = two_sum(xl, yl)
    vh, vl = two_sum(sh, sl + th)
    return two_sum(vh, tl + vl)


def multiply_double_words(xh: Tensor, xl: Tensor, yh: Tensor, yl: Tensor) -> DoubleWord:
    """Multiply two double words, with a relative error of at most 7 u**2.

    DWTimesDW1 [JMP17, algorithm 10] with TwoSum in place of Fast2Sum; [MR22] corrects the bound's proof.

    This is Collage's *Mul* [Yu24, algorithm 3], made right: the published code updates one factor in place
    while still reading it and takes the residual of the scalar against torch's default dtype.
    """
    ch, cl = two_prod(xh, yh)
    return two_sum(ch, cl + (xh * yl + xl * yh))


def scale_double_word(xh: Tensor, xl: Tensor, y: Tensor) -> DoubleWord:
    """Multiply a double word by a storage-format tensor, with a relative error of at most 3/2 u**2 + 4 u**3.

    DWTimesFP1 [JMP17, algorithm 7] with TwoSum in place of both Fast2Sums.
    """
    ch, cl = two_prod(xh, y)
    th, tl = two_sum(ch, xl * y)
    return two_sum(th, tl + cl)


def negate_double_word(xh: Tensor, xl: Tensor) -> DoubleWord:
    """Negate a double word, exactly."""
    return -xh, -xl


def join(hi: Tensor, lo: Tensor) -> Tensor:
    """Add hi and lo in float32, with a relative error of at most 2**-24.

    ``hi`` and ``lo`` have the same shape. The sum is exact for pairs that span at most 24 bits, as every pair
    from ``operators.split`` does.
    """
    return hi.to(torch.float32) + lo.to(torch.float32)


def rest(value: Tensor, hi: Tensor) -> Tensor:
    """Compute ``value - hi`` where ``hi`` is finite, and zero elsewhere; all float32."""
    return finite_or_zero(value - hi, hi)


def finite_or_zero(lo: Tensor, hi: Tensor) -> Tensor:
    """Replace ``lo`` by zero where ``hi`` is not finite."""
    zero = torch.zeros((), dtype=lo.dtype, device=lo.device)
    return torch.where(hi.abs() < inf, lo, zero)


#: Smallest float32 number that :func:`upper_half` rounds to infinity.
FIRST_INFINITE = 2.0**128 - 2.0**119


def upper_half(value: Tensor) -> Tensor:
    """Round float32 ``value`` to bfloat16, ties away from zero, *returned as float32*.

    The result is the upper half of the bit pattern ``b + 0x8000``, where b is the pattern of the value.
    """
    near = ((value.view(torch.int32) + 0x8000) & -0x10000).view(torch.float32)
    return torch.where(value == value, near, value)


def lower_half(value: Tensor) -> Tensor:
    """Return the lower half of the bit pattern of float32 ``value`` as a signed int16.

    The pattern of the value is that of :func:`upper_half` plus this number: zero where that is not finite.
    """
    is_finite = value.abs() < FIRST_INFINITE
    return torch.where(is_finite, value.view(torch.int32), 0).to(torch.int16)


def with_lower_half(hi: Tensor, rest: Tensor) -> Tensor:
    """Return the float32 number with the halves ``hi``, float32 on the grid of bfloat16, and int16 ``rest``.

    Inverse of :func:`upper_half` and :func:`lower_half`. The result is ``hi`` where ``hi`` is not finite, and
    where ``hi`` is zero and ``rest`` negative, which is the pattern of a NaN. The library never stores such a
    pair, but a program that writes to hi may leave one.
    """
    value = (hi.view(torch.int32) + rest.to(torch.int32)).view(torch.float32)
    return torch.where((value - hi).abs() < inf, value, hi)


def ulp_parts(value: Tensor, hi: Tensor) -> Tensor:
    """Return ``value - hi`` in units of 2**-15 of hi's ulp, where ``hi`` is the nearest float16 number.

    ``value`` and ``hi`` are float32. The result is int16, rounded to nearest even, at most 2**14 in
    magnitude, and zero where ``hi`` is not finite.
    """
    scale = ((254 << 23) - _part_of_ulp(hi)).view(torch.float32)  # 1 / part
    parts = torch.round((value - hi) * scale)
    return torch.where(hi.abs() < inf, parts, 0.0).to(torch.int16)


def with_ulp_parts(hi: Tensor, parts: Tensor) -> Tensor:
    """Add int16 ``parts``, in units of 2**-15 of hi's ulp, to ``hi``, float32 on the grid of float16.

    Inverse of :func:`ulp_parts`; exact. The result is ``hi`` where ``hi`` is not finite.
    """
    return hi + parts.to(torch.float32) * _part_of_ulp(hi).view(torch.float32)


def _part_of_ulp(hi: Tensor) -> Tensor:
    """Return 2**-15 of the float16 ulp of ``hi``, as the bit pattern of a float32 number."""
    exponent = hi.view(torch.int32) & _FLOAT32_INFINITY
    exponent = torch.maximum(exponent, scalar_like(_float32_exponent(FLOAT16.min_exponent), exponent))
    return exponent - ((FLOAT16.precision - 1 + 15) << 23)


def round_to_storage(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float32 ``x`` to nearest even in ``dtype``, *returned as float32*.

    Note [Rounding must survive lowering]
    -------------------------------------
    ``x.to(bfloat16).to(float32)`` is not a rounding in compiled code. Inductor computes low-precision
    pointwise code in float32 registers and drops the pair of casts, so that ``lo = x - hi`` is exactly zero
    and the compensation is gone without an error. Which casts are dropped depends on the version, the device
    and a debugging flag (``emulate_precision_casts``). The result of this function, by contrast, is an
    ordinary float32 number that *happens to lie on the storage format's grid*. It survives for two reasons:

    * the rounding consists of integer operations on the bits, and for float16 of a float addition that
      rounds: a compiler that respects IEEE arithmetic may simplify neither;
    * every later cast between float32 and the storage format is exact, so dropping it changes nothing.

    ``pin-roundings`` brings a graph into this form; tests check the graph and the bits, eager and compiled.

    Exact for every float32: ties to even, subnormals, overflow to infinity; ±0 and ±infinity stay, and a NaN
    is some NaN. All operations are ones that Inductor vectorizes in C++: 32-bit integers, no variable shifts.
    """
    return _round_to_bfloat16(x) if dtype == BFLOAT16.dtype else _round_to_float16(x)


def _round_to_bfloat16(x: Tensor) -> Tensor:
    """Round the bits to a multiple of 2**16: bfloat16 is the upper half of float32, subnormals and all.

    Add half an ulp minus one, plus the lowest kept bit (ties to even), and clear the lower half. A carry into
    the exponent makes overflow infinity. A NaN might carry, too, so NaNs are left alone.
    """
    bits = x.view(torch.int32)
    lowest_kept = (bits >> BFLOAT16.discarded_bits) & 1
    half = (1 << (BFLOAT16.discarded_bits - 1)) - 1
    rounded = (bits + (lowest_kept + half)) & -(1 << BFLOAT16.discarded_bits)
    return torch.where(x == x, rounded.view(torch.float32), x)


def _round_to_float16(x: Tensor) -> Tensor:
    """Round by adding and subtracting a power of two whose float32 ulp is float16's ulp at x.

    For x in the binade of 2**e the power is 2**(e + 13), with e at least -14, below which the grid is
    constant, and at most 16, where everything is infinite. The sum stays in the power's binade, and the power
    is an even multiple of the ulp, so ties go to the even result. The subtraction is exact. NaNs stay NaNs.
    """
    bits = x.view(torch.int32)
    exponent = bits & _FLOAT32_INFINITY
    exponent = torch.maximum(exponent, scalar_like(_float32_exponent(FLOAT16.min_exponent), bits))
    exponent = torch.minimum(exponent, scalar_like(_float32_exponent(FLOAT16.max_exponent + 1), bits))
    power = (exponent + (FLOAT16.discarded_bits << 23)).view(torch.float32)
    magnitude = (x.abs() + power) - power
    infinity = scalar_like(inf, x)
    magnitude = torch.where(magnitude > float(FLOAT16.largest), infinity, magnitude)
    return (magnitude.view(torch.int32) | (bits & _FLOAT32_SIGN)).view(torch.float32)


_FLOAT32_SIGN = -(2**31)
_FLOAT32_INFINITY = 0xFF << 23


def _float32_exponent(exponent: int) -> int:
    """Return the bit pattern of the float32 number 2**exponent."""
    return (exponent + 127) << 23


def scalar_like(value: float, like: Tensor) -> Tensor:
    """Make a 0-d tensor with the dtype and the device of another."""
    return torch.full((), value, dtype=like.dtype, device=like.device)


def double_word_constant(value: float, dtype: torch.dtype) -> tuple[float, float]:
    """Split a Python number into a double word of ``dtype``: (RN(value), RN(value - RN(value))).

    The error is at most ``max(u**2 |value|, q/2)``. lo is zero if hi is not finite.
    """
    fmt = storage_format(dtype)
    hi = fmt.round(value)
    return hi, fmt.round(float(Fraction(value) - Fraction(hi))) if isfinite(hi) else 0.0
