"""Packed formats ``block8`` and ``block16``: integers of 8 or 16 bits, with a scale for each 32."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from collage_fx.numerics import blocks
from collage_fx.numerics.error_formats.base import COUNT, AuxiliarySpec, ErrorBound, ErrorFormat
from collage_fx.numerics.operators import PHASE, PHASES


class Blocks(ErrorFormat):
    """Integers with scales for blocks, dithered at every step: Note [Blocks] in ``numerics/blocks.py``.

    The value is in the auxiliaries alone. Only sizes, strides and dtype of hi count.

    Args:
        bits: number of bits of an integer, 8 or 16.
        signed: whether numbers may be negative. If not, no number but zero is stored as zero.
    """

    keeps_hi = False
    keeps_error = False
    by_rows = True
    is_dithered = True

    def __init__(self, bits: int, *, signed: bool) -> None:
        self.bits, self.signed = bits, signed
        self.name = f"block{bits}" if signed else f"block{bits}_positive"  # type: ignore[misc]
        what = "numbers" if signed else "numbers that are not negative"
        self.precision = f"{what} in {bits} bits, {blocks.BLOCK} of them with a scale"  # type: ignore[misc]

    def why_not(self, hi: Tensor) -> str:
        return blocks.why_no_blocks(hi, blocks.BLOCK)

    def why_not_values(self, hi: Tensor) -> str:
        return "" if self.signed or not bool((hi < 0).any()) else "negative numbers"

    def auxiliaries(self, hi: Tensor) -> Sequence[AuxiliarySpec]:
        rows = hi.shape[0]
        return (
            AuxiliarySpec("codes", blocks.CODES[self.bits, self.signed], hi.shape, hi.stride()),
            AuxiliarySpec("scales", torch.uint8, (rows, hi.numel() // (rows * blocks.BLOCK))),
            COUNT,
        )

    def error_bound(self, dtype: torch.dtype) -> ErrorBound:
        """Return half the widest spacing of the grid; the scale is at most 1.5 times the largest number.

        For non-negative numbers that is the error of the root; an error of e in a root is 2 e + e**2 in the
        number. 2**-20 is for the roundings of float32. No root has the smallest scale.
        """
        largest = blocks.LARGEST[self.bits, self.signed]
        distance = Fraction(2 * largest - 1, largest**2) if self.bits == 8 else Fraction(1, largest)
        half = Fraction(3, 2) * distance / 2
        of_largest = half if self.signed else 2 * half + half**2
        absolute = distance / 2 * Fraction(blocks.SMALLEST_SCALE) if self.signed else Fraction(0)
        return ErrorBound(absolute=absolute, of_largest=of_largest + Fraction(1, 2**20))

    def join(self, hi: Tensor, *auxiliaries: Tensor) -> Tensor:
        codes, scales, _ = auxiliaries
        return blocks.BLOCK_VALUES(codes, scales, self.bits, self.signed)

    def split(self, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        count = COUNT.zeros(value.device)
        return value.to(dtype), *self._encoded(value, value, None), count

    def store(self, value: Tensor, hi: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        codes, _, count, start = inputs
        return hi, *self._encoded(value, codes, PHASES(codes, PHASE(count, start))), count + 1

    def store_nearest(self, value: Tensor, hi: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        codes, _, count, _ = inputs
        return hi, *self._encoded(value, codes, None), count

    def _encoded(self, value: Tensor, like: Tensor, phases: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the codes and the scales of a value, in the layout of ``like``."""
        scales = blocks.BLOCK_SCALES(value, like, self.signed)
        return blocks.BLOCK_CODES(value, scales, phases, like, self.bits, self.signed), scales
