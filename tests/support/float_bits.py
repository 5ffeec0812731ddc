"""Ulps and agreement of tensors, from their encodings; the library is held to it, not used."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["SIGNIFICAND_BITS", "same_bits", "ulp", "unit_roundoff"]

#: Stored bits of the significand.
SIGNIFICAND_BITS = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}
_EXPONENT_BITS = {torch.bfloat16: 8, torch.float16: 5, torch.float32: 8}
_ENCODING = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def unit_roundoff(dtype: torch.dtype) -> float:
    """u, half the distance from 1 to the next larger value."""
    return 2.0 ** -(SIGNIFICAND_BITS[dtype] + 1)


def ulp(x: Tensor) -> Tensor:
    """Distance of neighbours in the binade of x (finite), in float64; that of the subnormals for zero."""
    significand, exponent = SIGNIFICAND_BITS[x.dtype], _EXPONENT_BITS[x.dtype]
    bits = x.view(_ENCODING[x.dtype.itemsize]).to(torch.int64)
    biased = ((bits >> significand) & ((1 << exponent) - 1)).clamp(min=1)
    bias = (1 << (exponent - 1)) - 1
    one = torch.ones(x.shape, dtype=torch.float64, device=x.device)
    return torch.ldexp(one, biased - bias - significand)


def same_bits(a: Tensor, b: Tensor) -> Tensor:
    """Elementwise: equal encodings, except that one NaN is as good as another."""
    kind = _ENCODING[a.dtype.itemsize]
    equal = a.contiguous().view(kind) == b.contiguous().view(kind)
    return equal | (a.isnan() & b.isnan()) if a.dtype.is_floating_point else equal
