"""Error formats without error terms, whose roundings lose nothing on average."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from collage_fx.numerics.error_formats.base import COUNT, AuxiliarySpec, ErrorBound, ErrorFormat
from collage_fx.numerics.formats import BFLOAT16, is_low_precision, storage_format
from collage_fx.numerics.operators import DITHERED, PHASE, PHASES


class Dither(ErrorFormat):
    """hi alone, rounded up or down by dither at every step: Note [Dither] in ``numerics/dither.py``.

    No error is kept, but errors cancel on average. It is the format of state without error terms with
    ``rounding="dither"``. For a parameter it is better than plain rounding if updates are near an ulp, and
    noise if they are far below.
    """

    name = "dither"
    precision = "no error term: rounded up or down by dither, right on average"
    is_elementwise = True
    keeps_error = False
    is_dithered = True

    def auxiliaries(self, hi: Tensor) -> Sequence[AuxiliarySpec]:
        return (COUNT,)

    def error_bound(self, dtype: torch.dtype) -> ErrorBound:
        """Return the error of rounding to nearest, as :meth:`split` does; a step's may be twice as large."""
        fmt = storage_format(dtype)
        return ErrorBound(fmt.unit_roundoff, fmt.quantum / 2)

    def join(self, hi: Tensor, *auxiliaries: Tensor) -> Tensor:
        return hi.to(torch.float32)

    def split(self, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return value.to(dtype), COUNT.zeros(value.device)

    def store(self, value: Tensor, hi: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        count, start = inputs
        rounded = DITHERED(value, PHASES(hi, PHASE(count, start)), hi.dtype)
        return rounded.to(hi.dtype), count + 1

    def error_terms(self, hi: Tensor, *auxiliaries: Tensor) -> tuple[Tensor, ...]:
        return ()


class Sum(Dither):
    """Float32 parameters whose last sum is rounded by dither: Note [The last rounding]."""

    name = "sum"
    dithers_sums = True
    store = ErrorFormat.store


class Bf16(Dither):
    """Packed format of float32 state: bfloat16 numbers, rounded up or down by dither at every step.

    The value is in the auxiliary alone. Only numbers below 2**-133 may become zero.
    """

    name = "bf16"
    precision = "bfloat16 numbers in place of float32, rounded up or down by dither"
    keeps_hi = False
    by_rows = True

    def why_not(self, hi: Tensor) -> str:
        return "it has 16 bits as it is" if is_low_precision(hi.dtype) else ""

    def auxiliaries(self, hi: Tensor) -> Sequence[AuxiliarySpec]:
        rounded = AuxiliarySpec.like(hi, "rounded", BFLOAT16.dtype)
        return rounded, COUNT

    def error_bound(self, dtype: torch.dtype) -> ErrorBound:
        return super().error_bound(BFLOAT16.dtype)

    def join(self, hi: Tensor, *auxiliaries: Tensor) -> Tensor:
        return auxiliaries[0].to(torch.float32)

    def split(self, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        count = COUNT.zeros(value.device)
        return value.to(dtype), value.to(BFLOAT16.dtype), count

    def store(self, value: Tensor, hi: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        before, count, start = inputs
        rounded = DITHERED(value, PHASES(before, PHASE(count, start)), BFLOAT16.dtype)
        return hi, rounded.to(BFLOAT16.dtype), count + 1
