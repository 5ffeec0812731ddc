"""The packed format ``fp8_lm``: floats of 8 or 16 bits that have one scale a tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from collage_fx.numerics.error_formats.base import AuxiliarySpec, ErrorBound, ErrorFormat


class TensorScaled(ErrorFormat):
    """Floats with a scale a tensor, as the moments of FP8-LM [Peng23]: for comparison.

    The largest magnitude is divided by a power of two that brings it as near to the dtype's largest number
    as it can from below. What is smaller by more than the dtype's range becomes zero, whether a step divides
    by it or not. A tensor of which a number is not finite is NaN as a whole.

    Args:
        name: of the format.
        dtype: of the floats. FP8-LM has first moments in e4m3 and second ones in float16.

    [Peng23] Peng et al., *FP8-LM: Training FP8 Large Language Models*, arXiv 2310.18313, 2023, and
    github.com/Azure/MS-AMP.
    """

    keeps_hi = False
    keeps_error = False

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name  # type: ignore[misc]
        self.dtype = dtype
        bits = 8 * dtype.itemsize
        self.precision = f"floats of {bits} bits, a scale for the tensor: for comparison"  # type: ignore[misc]

    def auxiliaries(self, hi: Tensor) -> Sequence[AuxiliarySpec]:
        return AuxiliarySpec.like(hi, "codes", self.dtype), AuxiliarySpec("scale", torch.float32, (1,))

    def error_bound(self, dtype: torch.dtype) -> ErrorBound:
        """That of rounding to the dtype, whose largest number is at most twice the largest in its units.

        Unless that is so small that its scale is the smallest, 2**-126.
        """
        info = torch.finfo(self.dtype)
        relative = Fraction(info.eps) / 2
        absolute = relative * Fraction(info.tiny)
        return ErrorBound(relative, absolute / 2**126, absolute / (Fraction(info.max) / 2))

    def join(self, hi: Tensor, *auxiliaries: Tensor) -> Tensor:
        codes, scale = auxiliaries
        return codes.to(torch.float32) * scale

    def split(self, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        largest = value.abs().amax()
        fits = (torch.finfo(self.dtype).max / largest).clamp(max=2.0**126)
        unit = (fits.view(torch.int32) & 0x7F800000).view(torch.float32)  # the power of two at or below
        scale = torch.where(largest < math.inf, 1 / unit, math.nan)
        return value.to(dtype), (value * unit).to(self.dtype), scale.reshape(1)
