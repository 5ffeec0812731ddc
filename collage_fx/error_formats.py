"""Error formats: how a value is split between what the user sees (hi) and what is kept beside it.

A format is the only place that knows what its auxiliary tensors are. The passes ask it for their
specifications, for the function that joins hi and auxiliaries into one float32 value and for its inverse, and
trace both into the graph. A format may own any number of auxiliary tensors, of any dtype and shape.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from collage_fx import arithmetic

__all__ = ["ERROR_FORMATS", "AuxiliarySpec", "ErrorFormat", "Fp32", "Mcf"]


@dataclass(frozen=True)
class AuxiliarySpec:
    """One auxiliary tensor of an expansion.

    Attributes:
        name: unique within the format; part of the name in checkpoints.
        dtype: its dtype.
        shape: its sizes; None for those of hi, laid out with hi's strides.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...] | None = None


class ErrorFormat(ABC):
    """How hi and auxiliary tensors encode one value.

    The contract, which the tests check for every registered format, the sign of zeros aside:

    * auxiliaries of zeros mean that the value is hi;
    * hi of a split is the value rounded to nearest even; where it is not finite, all auxiliaries are zero;
    * ``split(join(hi, *aux))`` gives hi and aux back bit for bit if the expansion is normalised: float32
      holds its value, which rounds to hi. A split gives such expansions but for a tie (see
      :func:`arithmetic.split`), of which only the value comes back, not hi.
    """

    #: As in ``CollageBackend(error_format=...)`` and in checkpoints.
    name: ClassVar[str]
    #: Whether the expansion is a double word of the storage format, as ``arithmetic="native"`` needs it.
    is_double_word: ClassVar[bool] = False

    @abstractmethod
    def auxiliaries(self, dtype: torch.dtype) -> Sequence[AuxiliarySpec]:
        """Specifications of the auxiliary tensors that go with a hi of ``dtype``."""

    @abstractmethod
    def join(self, hi: Tensor, *auxiliaries: Tensor) -> Tensor:
        """The float32 value. Traced into the graph."""

    @abstractmethod
    def split(self, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Float32 value -> (hi in ``dtype``, *auxiliaries), :meth:`join`'s inverse. Traced into the graph."""

    @abstractmethod
    def error_terms(self, *auxiliaries: Tensor) -> tuple[Tensor, ...]:
        """Tensors of hi's shape with ``value = hi + sum(error terms)``: the live buffers if they are that."""

    def bytes_per_element(self, dtype: torch.dtype) -> float:
        """Extra bytes per element of hi, for auxiliaries of hi's shape."""
        return sum(spec.dtype.itemsize for spec in self.auxiliaries(dtype) if spec.shape is None)


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


class Fp32(ErrorFormat):
    """fp32 master copy, the paper's baseline D, for comparison and debugging.

    The float32 auxiliary holds ``master - hi``, which is exact: hi + lo *is* the float32 master copy, bit for
    bit, at the same four bytes. Kept this way round, zeros mean "no error", and a user who overwrites hi (by
    loading a model's weights, say) isn't overruled by a stale master at the next step.
    """

    name = "fp32"

    def auxiliaries(self, dtype: torch.dtype) -> Sequence[AuxiliarySpec]:
        return (AuxiliarySpec("lo", torch.float32),)

    def join(self, hi: Tensor, *auxiliaries: Tensor) -> Tensor:
        return arithmetic.join(hi, *auxiliaries)

    def split(self, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return arithmetic.split(value, dtype, torch.float32)

    def error_terms(self, *auxiliaries: Tensor) -> tuple[Tensor, ...]:
        return auxiliaries


#: The registered formats by name.
ERROR_FORMATS: dict[str, ErrorFormat] = {fmt.name: fmt for fmt in (Mcf(), Fp32())}
