"""Types and roundings of PTX, on arrays of NumPy's."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Values = npt.NDArray[Any]

UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
SIGNED = {size: np.dtype(f"i{size}") for size in (1, 2, 4, 8)}

#: Letters of NumPy for the first letters of types.
_LETTERS = {"f": "f", "s": "i", "u": "u", "b": "u"}

_FP8 = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}


def size_of(kind: str) -> int:
    """Return the bytes of a type: 4 of ``f32``, 4 of ``bf16x2``."""
    bits = int(re.sub(r"\D", "", kind.removesuffix("x2")))
    return bits // 8 * (2 if kind.endswith("x2") else 1)


def dtype_of(kind: str) -> np.dtype[Any]:
    return np.dtype(f"{_LETTERS[kind[0]]}{size_of(kind)}")


def constant(text: str, kind: str) -> Values:
    """Return a literal as an array of one element: ``0f3F800000``, ``0d...``, ``-1``, ``0x7U``."""
    size = size_of(kind)
    if text[:2].lower() in ("0f", "0d"):
        own = 4 if text[1] in "fF" else 8
        found = np.array([int(text[2:], 16)], UNSIGNED[own])
        return found.view(dtype_of(kind)) if own == size else found.astype(UNSIGNED[size])
    bits = int(text.rstrip("U"), 0) & ((1 << 8 * size) - 1)
    return np.array([bits], UNSIGNED[size]).view(dtype_of(kind))


# Fused multiply-add. ----------------------------------------------------------------------------------------


def two_sum(x: Values, y: Values) -> tuple[Values, Values]:
    """Return the rounded sum, and its error."""
    total = x + y
    back = total - x
    return total, (x - (total - back)) + (y - back)


def two_product(x: Values, y: Values) -> tuple[Values, Values]:
    """Return the rounded product of float64, and its error (Dekker); no overflow below 2**996."""

    def halves(value: Values) -> tuple[Values, Values]:
        scaled = value * 134217729.0  # 2**27 + 1
        high = scaled - (scaled - value)
        return high, value - high

    product, (a, b), (c, d) = x * y, halves(x), halves(y)
    return product, ((a * c - product) + a * d + b * c) + b * d


def to_odd(value: Values, error: Values) -> Values:
    """Return ``value + error`` rounded to odd, of a value rounded to nearest.

    To round the result once more, to fewer bits, does no harm.
    """
    bits = value.view(SIGNED[value.dtype.itemsize])
    is_nudged = np.isfinite(value) & np.isfinite(error) & (error != 0) & (bits & 1 == 0)
    away = (error > 0) == (value > 0)
    return np.where(is_nudged, bits + np.where(away, 1, -1).astype(bits.dtype), bits).view(value.dtype)


def _fma_to_odd(x: Values, y: Values, z: Values) -> Values:
    """Return ``x * y + z`` of float32 numbers as float64, rounded to odd: the product is exact there."""
    return to_odd(*two_sum(x.astype(np.float64) * y.astype(np.float64), z.astype(np.float64)))


def fma32(x: Values, y: Values, z: Values) -> Values:
    return _fma_to_odd(x, y, z).astype(np.float32)


def fma64(x: Values, y: Values, z: Values) -> Values:
    """Compute ``x * y + z`` with one rounding (Boldo and Melquiond, "Emulation of a FMA", 2008)."""
    product, error = two_product(x, y)
    low, lowest = two_sum(z, error)
    high, middle = two_sum(product, low)
    result = high + to_odd(*two_sum(lowest, middle))
    return np.where(np.isfinite(result), result, x * y + z)


# Conversions. -----------------------------------------------------------------------------------------------


def to_bf16(x: Values) -> Values:
    """Return the bits of float32 numbers rounded to nearest bfloat16 ones."""
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded).astype(np.uint16)


def from_bf16(bits: Values) -> Values:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_half(kind: str, x: Values) -> Values:
    """Return the bits of float32 numbers, rounded to ``bf16`` or ``f16``."""
    return to_bf16(x) if kind == "bf16" else x.astype(np.float16).view(np.uint16)


def from_half(kind: str, bits: Values) -> Values:
    return from_bf16(bits) if kind == "bf16" else bits.view(np.float16).astype(np.float32)


def fma_of_halves(kind: str) -> Callable[[Values, Values, Values], Values]:
    """Return a function that computes with one rounding, to ``bf16`` or ``f16``, given as float32."""

    def fma(x: Values, y: Values, z: Values) -> Values:
        exact = _fma_to_odd(x, y, z)
        if kind == "f16":
            return exact.astype(np.float16).astype(np.float32)
        near = exact.astype(np.float32)
        return to_odd(near, (exact - near).astype(np.float32))

    return fma


def to_fp8(kind: str, x: Values) -> Values:
    dtype, largest = _FP8[kind]
    values = torch.from_numpy(np.clip(np.ascontiguousarray(x, np.float32), -largest, largest))
    return values.to(dtype).view(torch.uint8).numpy()


def from_fp8(kind: str, bits: Values) -> Values:
    return torch.from_numpy(np.ascontiguousarray(bits, np.uint8)).view(_FP8[kind][0]).float().numpy()
