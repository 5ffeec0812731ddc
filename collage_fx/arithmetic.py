"""Compensated arithmetic, once, as ordinary eager functions; the passes trace these very functions into the graph.

Notation. RN is rounding to nearest even in the storage format (bfloat16 or float16), u its unit roundoff (2**-8, 2**-11).
A *double word* is an unevaluated sum ``hi + lo`` of two storage-format tensors with ``hi = RN(hi + lo)``, so that
``|lo| <= ulp(hi)/2``. Every function takes tensors of any shape that broadcast, and returns tensors of the same dtype
unless it says otherwise. Bounds hold barring overflow and underflow; behaviour outside is stated where it matters.

References:
    [Yu24]    Yu et al., *Collage: Light-Weight Low-Precision Strategy for LLM Training*, ICML 2024, arXiv 2405.03637.
    [JMP17]   Joldes, Muller, Popescu, *Tight and rigorous error bounds for basic building blocks of double-word
              arithmetic*, ACM TOMS 44(2), 2017, doi 10.1145/3121432.
    [Knuth]   Knuth, *The Art of Computer Programming 2*, section 4.2.2, theorem B.
    [Fig95]   Figueroa, *When is double rounding innocuous?*, SIGNUM Newsletter 30(3), 1995: one +, -, *, / or sqrt in
              a format of at least 2p + 2 bits and then rounded to p bits equals the operation rounded once. float32
              (24 bits) qualifies for both storage formats (2*8 + 2 = 18, 2*11 + 2 = 24).
"""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

from collage_fx.formats import BFLOAT16, FLOAT16, storage_format

__all__ = [
    "add_double_words",
    "grow",
    "join",
    "multiply_double_words",
    "negate_double_word",
    "round_to_storage",
    "scale_double_word",
    "split",
    "two_prod",
    "two_sum",
]

DoubleWord = tuple[Tensor, Tensor]


def two_sum(a: Tensor, b: Tensor) -> DoubleWord:
    """``s + e == a + b`` exactly, with ``s = RN(a + b)``. No condition on the magnitudes.

    TwoSum of [Knuth], 6 operations; exact for every finite pair unless ``s`` overflows. The published Collage code uses
    Fast2Sum, which is exact only for ``|a| >= |b|``: an update larger than the weight breaks it.
    """
    s = a + b
    b_virtual = s - a
    a_virtual = s - b_virtual
    return s, (a - a_virtual) + (b - b_virtual)


def two_prod(a: Tensor, b: Tensor) -> DoubleWord:
    """``p + e == a * b`` exactly, with ``p = RN(a * b)``.

    The product of two p-bit significands has 2p <= 22 bits, so float32 holds it exactly, and the remainder has at most p.
    Exact unless ``e`` falls below the format's smallest subnormal, where it is rounded to it.
    """
    exact = a.to(torch.float32) * b.to(torch.float32)
    p = exact.to(a.dtype)
    return p, (exact - p.to(torch.float32)).to(a.dtype)


def grow(hi: Tensor, lo: Tensor, y: Tensor) -> DoubleWord:
    """The double word ``hi + lo`` plus the storage-format tensor ``y``: Collage's *Grow* [Yu24, algorithm 1].

    DWPlusFP of [JMP17, algorithm 4] with TwoSum in place of both Fast2Sums: relative error at most 2 u**2, for every
    ordering of the magnitudes.
    """
    s, e = two_sum(hi, y)
    return two_sum(s, lo + e)


def add_double_words(xh: Tensor, xl: Tensor, yh: Tensor, yl: Tensor) -> DoubleWord:
    """Sum of two double words, AccurateDWPlusDW [JMP17, algorithm 6]: relative error at most 3 u**2 + 13 u**3."""
    sh, sl = two_sum(xh, yh)
    th, tl = two_sum(xl, yl)
    vh, vl = two_sum(sh, sl + th)
    return two_sum(vh, tl + vl)


def multiply_double_words(xh: Tensor, xl: Tensor, yh: Tensor, yl: Tensor) -> DoubleWord:
    """Product of two double words, DWTimesDW1 [JMP17, algorithm 10]: relative error at most 7 u**2.

    This is Collage's *Mul* [Yu24, algorithm 3], made right: the published code updates one factor in place while still
    reading it and takes the residual of the scalar against torch's default dtype.
    """
    ch, cl = two_prod(xh, yh)
    return two_sum(ch, cl + (xh * yl + xl * yh))


def scale_double_word(xh: Tensor, xl: Tensor, y: Tensor) -> DoubleWord:
    """Product of a double word and a storage-format tensor, DWTimesFP1 [JMP17, algorithm 7]: error at most 2 u**2."""
    ch, cl = two_prod(xh, y)
    th, tl = two_sum(ch, xl * y)
    return two_sum(th, tl + cl)


def negate_double_word(xh: Tensor, xl: Tensor) -> DoubleWord:
    """``-(xh + xl)``, exact."""
    return -xh, -xl


def join(hi: Tensor, lo: Tensor) -> Tensor:
    """The float32 value of an expansion, RN32(hi + lo): relative error at most 2**-24.

    Shapes: ``hi`` and ``lo`` alike. Exact for every float16 pair, and for bfloat16 pairs spanning at most 24 bits.
    """
    return hi.to(torch.float32) + lo.to(torch.float32)


def split(value: Tensor, dtype: torch.dtype, lo_dtype: torch.dtype) -> DoubleWord:
    """``hi = RN(value)`` in ``dtype`` and the rest, ``lo = value - hi``, rounded to ``lo_dtype``.

    ``value - hi`` is exact in float32. With ``lo_dtype == dtype`` the pair stands for ``value`` to a relative u**2 (never
    better than the format's smallest subnormal); with ``lo_dtype == float32`` it stands for it exactly. Where ``hi`` is not
    finite ``lo`` is zero, so that one infinite or NaN update does not leave garbage behind in ``lo``.

    Args:
        value: float32, any shape.
    """
    hi = value.to(dtype)
    stored = hi.to(torch.float32)
    return hi, finite_or_zero(value - stored, stored).to(lo_dtype)


def finite_or_zero(lo: Tensor, hi: Tensor) -> Tensor:
    """``lo`` where ``hi`` is finite, zero elsewhere."""
    zero = torch.zeros((), dtype=lo.dtype, device=lo.device)
    return torch.where(hi.abs() < float("inf"), lo, zero)


def round_to_storage(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float32 ``x`` to nearest even in ``dtype``, *returned as float32*.

    Note [Rounding must survive lowering]
    -------------------------------------
    ``x.to(bfloat16).to(float32)`` is not a rounding in compiled code. Inductor computes low-precision pointwise code in
    float32 registers and drops the pair of casts, so that ``lo = x - hi`` is exactly zero and the compensation is gone
    without an error; which casts are dropped differs by version, by device and by a debugging flag
    (``emulate_precision_casts``). The result of this function, by contrast, is an ordinary float32 number that *happens to lie
    on the storage format's grid*. Two things follow, and together they are the whole of the argument:

    * the rounding itself is made of integer operations (and, for float16's subnormals, of one float addition whose
      rounding is the point of it), which no compiler may simplify;
    * every later cast between float32 and the storage format is exact, so dropping it changes nothing.

    ``pin-roundings`` brings a graph into this form; tests check the graph, the eager bits and the compiled bits.

    bfloat16 is the upper half of a float32: add half an ulp minus one, plus the lowest kept bit (ties to even), and
    clear the lower half; the carry into the exponent is what makes overflow come out as infinity. float16 needs the same
    with 13 bits, and two more cases: below 2**-14 the grid is 2**-24, which is float32's own grid between 0.5 and 1, so
    adding and subtracting 0.5 rounds there; and at 65520 and above the result is infinity.
    """
    if dtype == BFLOAT16.dtype:
        rounded = _clear_low_bits(x, BFLOAT16.discarded_bits)
    else:
        rounded = _round_to_float16(x)
    return torch.where(x == x, rounded, x)


def _clear_low_bits(x: Tensor, discarded: int) -> Tensor:
    """Round float32 to nearest even in ``24 - discarded`` significand bits by integer arithmetic; NaN comes out undefined."""
    bits = x.view(torch.int32)
    lowest_kept = (bits >> discarded) & 1
    half = (1 << (discarded - 1)) - 1
    return ((bits + (lowest_kept + half)) & -(1 << discarded)).view(torch.float32)


def _round_to_float16(x: Tensor) -> Tensor:
    magnitude = x.abs()
    smallest_normal = 2.0**FLOAT16.min_exponent
    normal = _clear_low_bits(magnitude, FLOAT16.discarded_bits)
    subnormal = (magnitude + 0.5) - 0.5
    rounded = torch.where(magnitude < smallest_normal, subnormal, normal)
    infinity = torch.full((), float("inf"), dtype=x.dtype, device=x.device)
    rounded = torch.where(rounded > float(FLOAT16.largest), infinity, rounded)
    return torch.copysign(rounded, x)


def double_word_constant(value: float, dtype: torch.dtype) -> tuple[float, float]:
    """A Python number as a double word of ``dtype``: (RN(value), RN(value - RN(value))), relative error at most u**2."""
    fmt = storage_format(dtype)
    hi = fmt.nearest(value)
    lo = fmt.nearest(Fraction(value) - hi)
    return float(hi), float(lo)
