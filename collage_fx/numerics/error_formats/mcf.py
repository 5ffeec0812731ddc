"""Error format ``mcf``: an error term of the tensor's own dtype, as in the Collage paper."""

from __future__ import annotations

import torch

from collage_fx.numerics.error_formats.base import OneErrorTerm


class Mcf(OneErrorTerm):
    """Multi-component float [Yu24]: one error term of hi's own dtype.

    The relative error is at most u**2: 2**-16 for bfloat16, 2**-22 for float16. Error terms in float16
    underflow below 2**-24, so that the absolute error may be 2**-25 there.
    """

    name = "mcf"
    precision = "one error term of the tensor's dtype: about 16 bits in bfloat16, 22 in float16"
    is_double_word = True

    def lo_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype
