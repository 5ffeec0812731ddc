"""Error format ``fp32``: a hidden float32 master copy, for comparison."""

from __future__ import annotations

import torch

from collage_fx.numerics.error_formats.base import OneErrorTerm


class Fp32(OneErrorTerm):
    """fp32 master copy, the paper's baseline D, for comparison and debugging.

    The float32 auxiliary holds ``master - hi``, which is exact: hi + lo *is* the float32 master copy, bit for
    bit, in the same four bytes. Zeros mean "no error", and a program that overwrites hi, as by loading a
    model's weights, is not overruled by a stale master copy at the next step.
    """

    name = "fp32"
    precision = "a float32 master copy, 24 bits: for comparison"

    def lo_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32
