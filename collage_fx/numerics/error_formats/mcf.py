"""The error format ``mcf``: an error term of the tensor's own dtype, as in the Collage paper."""

from __future__ import annotations

import torch

from collage_fx.numerics.error_formats.base import OneErrorTerm


class Mcf(OneErrorTerm):
    """Multi-component float [Yu24]: one error term of hi's own dtype.

    Relative precision u**2: 2**-16 for bfloat16, 2**-22 for float16. float16's error terms underflow below
    2**-24, so the value's precision is never better than 2**-25 absolute there.
    """

    name = "mcf"
    precision = "one error term of the tensor's dtype: about 16 bits in bfloat16, 22 in float16"
    is_double_word = True

    def lo_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype
