"""What an error format is. Each format has a file of its own beside this one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

__all__ = ["AuxiliarySpec", "ErrorFormat"]


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
