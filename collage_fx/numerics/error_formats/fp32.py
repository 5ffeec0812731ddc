"""The error format ``fp32``: a hidden float32 master copy, for comparison."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from collage_fx.numerics import arithmetic
from collage_fx.numerics.error_formats.base import AuxiliarySpec, ErrorFormat


class Fp32(ErrorFormat):
    """fp32 master copy, the paper's baseline D, for comparison and debugging.

    The float32 auxiliary holds ``master - hi``, which is exact: hi + lo *is* the float32 master copy, bit for
    bit, at the same four bytes. Kept this way round, zeros mean "no error", and a user who overwrites hi (by
    loading a model's weights, say) isn't overruled by a stale master at the next step.
    """

    name = "fp32"
    precision = "a float32 master copy, 24 bits: for comparison"
    is_elementwise = True

    def auxiliaries(self, hi: Tensor) -> Sequence[AuxiliarySpec]:
        return (AuxiliarySpec.like(hi, "lo", torch.float32),)

    def join(self, hi: Tensor, *auxiliaries: Tensor) -> Tensor:
        return arithmetic.join(hi, *auxiliaries)

    def split(self, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return arithmetic.split(value, dtype, torch.float32)

    def error_terms(self, hi: Tensor, *auxiliaries: Tensor) -> tuple[Tensor, ...]:
        return auxiliaries
