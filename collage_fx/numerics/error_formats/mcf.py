"""The error format ``mcf``: an error term of the tensor's own dtype, as in the Collage paper."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from collage_fx.numerics import arithmetic
from collage_fx.numerics.error_formats.base import AuxiliarySpec, ErrorFormat


class Mcf(ErrorFormat):
    """Multi-component float [Yu24]: one error term of hi's own dtype.

    Relative precision u**2: 2**-16 for bfloat16, 2**-22 for float16. float16's error terms underflow below
    2**-24, so the value's precision is never better than 2**-25 absolute there.
    """

    name = "mcf"
    precision = "one error term of the tensor's dtype: about 16 bits in bfloat16, 22 in float16"
    is_double_word = True
    is_elementwise = True

    def auxiliaries(self, hi: Tensor) -> Sequence[AuxiliarySpec]:
        return (AuxiliarySpec.like(hi, "lo", hi.dtype),)

    def join(self, hi: Tensor, *auxiliaries: Tensor) -> Tensor:
        return arithmetic.join(hi, *auxiliaries)

    def split(self, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return arithmetic.split(value, dtype, dtype)

    def error_terms(self, hi: Tensor, *auxiliaries: Tensor) -> tuple[Tensor, ...]:
        return auxiliaries
