"""Error format ``dither``: no error term, and roundings that lose nothing on average."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from collage_fx.numerics.dither import DITHERED, PHASES, phase
from collage_fx.numerics.error_formats.base import AuxiliarySpec, ErrorBound, ErrorFormat
from collage_fx.numerics.formats import storage_format


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
        return (AuxiliarySpec("count", torch.int32, ()),)

    def error_bound(self, dtype: torch.dtype) -> ErrorBound:
        """Return the error of rounding to nearest, as :meth:`split` does; a step's may be twice as large."""
        fmt = storage_format(dtype)
        return ErrorBound(fmt.unit_roundoff, fmt.quantum / 2)

    def join(self, hi: Tensor, *auxiliaries: Tensor) -> Tensor:
        return hi.to(torch.float32)

    def split(self, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return value.to(dtype), torch.zeros((), dtype=torch.int32, device=value.device)

    def store(self, value: Tensor, hi: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        count, start = inputs
        rounded = DITHERED(value, PHASES(hi, phase(count, start)), hi.dtype)
        return rounded.to(hi.dtype), count + 1

    def error_terms(self, hi: Tensor, *auxiliaries: Tensor) -> tuple[Tensor, ...]:
        return ()
