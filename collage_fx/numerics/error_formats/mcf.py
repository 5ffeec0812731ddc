"""The error format ``mcf``: an error term of the tensor's own dtype, as in the Collage paper."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from collage_fx.numerics import arithmetic
from collage_fx.numerics.error_formats.base import AuxiliarySpec, ErrorFormat

__all__ = ["Mcf"]


class Mcf(ErrorFormat):
    """Multi-component float [Yu24]: one error term of hi's own dtype.

    Relative precision u**2: 2**-16 for bfloat16, 2**-22 for float16. float16's error terms underflow below
    2**-24, so the value's precision is never better than 2**-25 absolute there.
    """

    name = "mcf"
    is_double_word = True

    def auxiliaries(self, dtype: torch.dtype) -> Sequence[AuxiliarySpec]:
        return (AuxiliarySpec("lo", dtype),)

    def join(self, hi: Tensor, *auxiliaries: Tensor) -> Tensor:
        return arithmetic.join(hi, *auxiliaries)

    def split(self, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return arithmetic.split(value, dtype, dtype)

    def error_terms(self, *auxiliaries: Tensor) -> tuple[Tensor, ...]:
        return auxiliaries
