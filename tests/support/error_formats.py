"""Error formats that are not shipped, for what any format may do: several auxiliaries, of other shapes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from collage_fx.numerics import storage_format
from collage_fx.numerics.error_formats import AuxiliarySpec, ErrorBound, ErrorFormat
from examples.own_format import NearestByte

__all__ = ["OWN_FORMATS", "BytePlanes", "RowScales"]


class BytePlanes(ErrorFormat):
    """bfloat16 and the other 16 bits of a float32 number, in two tensors of bytes.

    With the float32 pattern b, hi is the upper half of ``b + 0x8000`` (nearest, ties away from zero) and the
    lower half of b, as a signed number, is what b exceeds hi's pattern by.
    """

    name = "planes"
    precision = "two bytes, which make bfloat16 a float32 number"
    is_elementwise = True

    def auxiliaries(self, hi: Tensor) -> Sequence[AuxiliarySpec]:
        return (
            AuxiliarySpec.like(hi, "upper", torch.int8),
            AuxiliarySpec.like(hi, "lower", torch.uint8),
        )

    def error_bound(self, dtype: torch.dtype) -> ErrorBound:
        return ErrorBound()

    def join(self, hi: Tensor, *auxiliaries: Tensor) -> Tensor:
        upper, lower = (auxiliary.to(torch.int32) for auxiliary in auxiliaries)
        near = hi.to(torch.float32).view(torch.int32)
        bits = near + upper * 256 + lower
        return torch.where((bits ^ near) < 0, near, bits).view(torch.float32)  # below zero: hi is zero

    def split(self, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        assert dtype == torch.bfloat16
        bits = value.view(torch.int32)
        near = ((bits + 0x8000) & -0x10000).view(torch.float32)
        near = torch.where(value.isnan(), value, near)
        kept = torch.where(near.abs() < torch.inf, bits, 0)
        return near.to(dtype), (kept << 16 >> 24).to(torch.int8), (kept & 0xFF).to(torch.uint8)


class RowScales(ErrorFormat):
    """An error term of seven bits and a sign, in units of a power of two that each row has of its own.

    Auxiliaries: int8 of hi's shape, and float32 of hi's shape but for a last dimension of 1.
    """

    name = "rows"
    precision = "one byte, and a scale for each row"

    def auxiliaries(self, hi: Tensor) -> Sequence[AuxiliarySpec]:
        return (
            AuxiliarySpec.like(hi, "lo", torch.int8),
            AuxiliarySpec("scale", torch.float32, (*hi.shape[:-1], 1)),
        )

    def error_bound(self, dtype: torch.dtype) -> ErrorBound:
        """That of hi alone: a row's largest rest may leave no unit for a small number's."""
        fmt = storage_format(dtype)
        return ErrorBound(fmt.unit_roundoff, fmt.quantum / 2)

    def join(self, hi: Tensor, *auxiliaries: Tensor) -> Tensor:
        lo, scale = auxiliaries
        return hi.to(torch.float32) + lo.to(torch.float32) * scale

    def split(self, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        hi = value.to(dtype)
        near = hi.to(torch.float32)
        rest = torch.where(near.abs() < torch.inf, value - near, 0.0)
        largest = rest.abs().amax(-1, keepdim=True)
        scale = (largest.view(torch.int32) & 0x7F800000).view(torch.float32) * 2.0**-6
        units = torch.where(scale > 0, rest / scale, 0.0).round().clamp(-127, 127)
        return hi, units.to(torch.int8), scale


#: The last is the one that docs/writing-a-format.md shows.
OWN_FORMATS: tuple[ErrorFormat, ...] = (BytePlanes(), RowScales(), NearestByte())
