"""Error formats ``mcf``, an error term of the tensor's own dtype as in the Collage paper, and ``fp32``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from collage_fx.numerics import arithmetic, operators
from collage_fx.numerics.error_formats.base import POWER_OF_TWO, AuxiliarySpec, ErrorBound, ErrorFormat
from collage_fx.numerics.formats import storage_format


class OneErrorTerm(ErrorFormat):
    """Base class of formats with the value ``hi + lo``: one auxiliary, the error term, laid out like hi."""

    is_elementwise = True

    #: Dtype of lo; None: that of hi.
    own_dtype: ClassVar[torch.dtype | None] = None

    def lo_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of lo beside a hi of ``dtype``."""
        return self.own_dtype or dtype

    def auxiliaries(self, hi: Tensor) -> Sequence[AuxiliarySpec]:
        return (AuxiliarySpec.like(hi, "lo", self.lo_dtype(hi.dtype))._replace(is_error_term=True),)

    def error_bound(self, dtype: torch.dtype) -> ErrorBound:
        """Return the error of rounding lo, which is at most u of the value; none if lo is float32."""
        if self.lo_dtype(dtype) == torch.float32:
            return ErrorBound()
        fmt = storage_format(dtype)
        return ErrorBound(fmt.unit_roundoff**2, fmt.quantum / 2)

    def _spacing(self, size: Tensor, rest: Tensor, dtype: torch.dtype) -> Tensor:
        return rest * (torch.finfo(self.lo_dtype(dtype)).eps * POWER_OF_TWO)

    def join(self, hi: Tensor, *auxiliaries: Tensor) -> Tensor:
        return arithmetic.join(hi, *auxiliaries)

    def split(self, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return operators.split(value, dtype, self.lo_dtype(dtype))

    def error_terms(self, hi: Tensor, *auxiliaries: Tensor) -> tuple[Tensor, ...]:
        return auxiliaries

    def beside(self, hi: Tensor, term: Tensor) -> tuple[Tensor, ...]:
        return (term.to(self.lo_dtype(hi.dtype)),)


class Mcf(OneErrorTerm):
    """Multi-component float [Yu24]: one error term of hi's own dtype.

    The relative error is at most u**2: 2**-16 for bfloat16, 2**-22 for float16. Error terms in float16
    underflow below 2**-24, so that the absolute error may be 2**-25 there.
    """

    name = "mcf"
    precision = "one error term of the tensor's dtype: about 16 bits in bfloat16, 22 in float16"
    is_double_word = True


class Fp32(OneErrorTerm):
    """fp32 master copy, the paper's baseline D, for comparison and debugging.

    The float32 auxiliary holds ``master - hi``, which is exact: hi + lo *is* the float32 master copy, bit for
    bit, in the same four bytes. Zeros mean "no error", and a program that overwrites hi, as by loading a
    model's weights, is not overruled by a stale master copy at the next step.
    """

    name = "fp32"
    precision = "a float32 master copy, 24 bits: for comparison"
    own_dtype = torch.float32
