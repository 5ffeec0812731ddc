"""The packed format ``coat``: e4m3 numbers of which groups of 128 have a power and a scale of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from collage_fx.numerics.blocks import blocks_of, from_blocks, why_no_blocks
from collage_fx.numerics.error_formats.base import AuxiliarySpec, ErrorBound, ErrorFormat
from collage_fx.numerics.operators import define_operator

#: Elements that have a power and a scale in common.
GROUP = 128

#: What a smaller magnitude counts as where a group's range is measured.
LEAST = 1e-20

#: e4m3's largest number, and the range into which a group is brought: as COAT has it.
LARGEST = 448
RANGE = LARGEST**2 / 2

#: Powers are multiples of 1/16, up to this: with more, float32's own roundings would show.
LARGEST_POWER = 1024

#: ``base ** exponents``, which compiled code calls as it is. Inductor would write the C library's function
#: into one loop and that of vectors into another, an ulp apart.
POWER = define_operator("power(Tensor base, Tensor exponents) -> Tensor", torch.pow)


class Coat(ErrorFormat):
    """e4m3 with dynamic range expansion, as the moments of COAT [Xi25]: for comparison.

    Of the magnitudes of a group, in units of the largest, a power is stored that makes its range that of
    e4m3: an exponent of ``log(448**2 / 2) / log(largest / smallest)``, rounded down to a multiple of 1/16.
    A group of which a number is not finite is NaN. Groups are of elements that are neighbours in memory, in
    rows, as blocks are (Note [Blocks] in ``numerics/blocks.py``).

    COAT's code has three numbers a group, of which one, the middle of its range, cancels.

    [Xi25] Xi et al., *COAT: Compressing Optimizer States and Activation for Memory-Efficient FP8 Training*,
    ICLR 2025, arXiv 2410.19313, and its kernel in github.com/NVlabs/VILA.
    """

    name = "coat"
    precision = f"floats of 8 bits, a power and a scale for {GROUP} of them: for comparison"
    keeps_hi = False
    keeps_error = False
    by_rows = True

    def why_not(self, hi: Tensor) -> str:
        return why_no_blocks(hi, GROUP)

    def auxiliaries(self, hi: Tensor) -> Sequence[AuxiliarySpec]:
        groups = hi.shape[0], hi.numel() // (hi.shape[0] * GROUP)
        return (
            AuxiliarySpec.like(hi, "codes", torch.float8_e4m3fn),
            AuxiliarySpec("scales", torch.float32, groups),
            AuxiliarySpec("powers", torch.float32, groups),
        )

    def error_bound(self, dtype: torch.dtype) -> ErrorBound:
        """That of e4m3's last step, from 416 to 448, under the inverse of the smallest power.

        That is 1/8, as a group's range, 2**127 at most, is that of 448**2 / 2 = 2**16.6. Steps farther down
        are no larger. What is below 1e-20, and only that, may be below e4m3's range. Some roundings of
        float32 come to it.
        """
        of_largest = 1 - Fraction(432, 448) ** 8
        return ErrorBound(absolute=Fraction(LEAST), of_largest=of_largest + Fraction(1, 2**20))

    def join(self, hi: Tensor, *auxiliaries: Tensor) -> Tensor:
        codes, scales, powers = auxiliaries
        units = blocks_of(codes, codes, GROUP).to(torch.float32) * (1 / LARGEST)  # as Triton divides
        sizes = POWER(units.abs(), 1 / powers.reshape(-1, 1)) * scales.reshape(-1, 1)
        return from_blocks(units.sign() * sizes, codes)

    def split(self, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        groups = blocks_of(value, value, GROUP)
        sizes = groups.abs()
        largest, least = (each.clamp(min=LEAST) for each in (sizes.amax(1, True), sizes.amin(1, True)))
        sixteenths = math.log2(RANGE) * 16 / (largest / least).clamp(max=2.0**127).log2()
        powers = sixteenths.floor().clamp(max=16.0 * LARGEST_POWER) / 16
        codes = groups.sign() * POWER(sizes / largest, powers) * LARGEST
        scales = torch.where(largest < math.inf, largest, math.nan)
        of_rows = value.shape[0], -1
        stored = from_blocks(codes.to(torch.float8_e4m3fn), value)
        return value.to(dtype), stored, scales.reshape(of_rows), powers.reshape(of_rows)
