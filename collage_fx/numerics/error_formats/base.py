"""The base class of error formats. Each format has a file of its own beside this one."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from fractions import Fraction
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from collage_fx.numerics import arithmetic
from collage_fx.numerics.formats import storage_format


class AuxiliarySpec(NamedTuple):
    """One auxiliary tensor of an expansion.

    Attributes:
        name: unique within the format; part of the name in checkpoints, so without a dot.
        dtype: its dtype.
        shape: its sizes.
        stride: its strides; None if it is contiguous.
        is_error_term: whether its numbers are what is added to hi.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None
    is_error_term: bool = False

    @classmethod
    def like(cls, hi: Tensor, name: str, dtype: torch.dtype) -> AuxiliarySpec:
        """The specification of an auxiliary with the sizes and strides of hi."""
        return cls(name, dtype, hi.shape, hi.stride())

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor's elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def saved_shape(self) -> tuple[int, ...]:
        """The sizes of :meth:`saved`."""
        return (*self.shape, self.dtype.itemsize) if self._is_saved_as_bytes else self.shape

    @property
    def saved_dtype(self) -> torch.dtype:
        """The dtype of :meth:`saved`."""
        return torch.uint8 if self._is_saved_as_bytes else self.dtype

    @property
    def loadable(self) -> dict[tuple[int, ...], torch.dtype]:
        """The sizes and the dtype of what :meth:`loaded` takes.

        Besides what :meth:`saved` gives, an error term as earlier versions have saved it, which is itself.
        """
        earlier = {tuple(self.shape): self.dtype} if self.is_error_term else {}
        return {**earlier, tuple(self.saved_shape): self.saved_dtype}

    def saved(self, buffer: Tensor) -> Tensor:
        """The buffer as a checkpoint holds it, in the same memory: maybe as bytes, a dimension more.

        Plain PyTorch casts what it loads to the parameter's dtype. A floating-point format holds every byte,
        but neither every integer of 16 bits nor the numbers of every other format. An error term of 16 bits
        has the parameter's dtype, and is saved as it is, for whoever reads the file.
        """
        return buffer.unsqueeze(-1).view(torch.uint8) if self._is_saved_as_bytes else buffer

    def loaded(self, saved: Tensor) -> Tensor:
        """The inverse of :meth:`saved`, of an ordinary tensor: maybe the same memory.

        Numbers that an earlier version has saved as they are become this kind of number, too.
        """
        if not self._is_saved_as_bytes or saved.shape == self.shape:
            return saved.to(self.dtype)
        numbers = saved.to(torch.uint8)
        if numbers.stride(-1) != 1:
            numbers = numbers.contiguous()
        return numbers.view(self.dtype).squeeze(-1)

    @property
    def _is_saved_as_bytes(self) -> bool:
        is_cast_to_itself = self.is_error_term and self.dtype.itemsize == 2
        return not is_cast_to_itself and self.dtype not in (torch.int8, torch.uint8)

    def fitted(self, tensor: Tensor, device: torch.device) -> Tensor:
        """A tensor with these contents that is of this kind: itself, if it is."""
        strides = tensor.is_contiguous() if self.stride is None else tensor.stride() == self.stride
        is_of_kind = (tensor.shape, tensor.dtype, tensor.device) == (self.shape, self.dtype, device)
        return tensor if strides and is_of_kind else self.zeros(device).copy_(tensor)

    def zeros(self, device: torch.device) -> Tensor:
        """A new tensor of this kind, filled with zeros."""
        if self.stride is None:
            return torch.zeros(self.shape, dtype=self.dtype, device=device)
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device).zero_()


class ErrorBound(NamedTuple):
    """How far ``join(split(x))`` may be from a float32 x of which hi is finite.

    ``max(relative * |x|, absolute, of_largest * |y|)``, with y the largest in magnitude of the elements that
    have a scale in common with x.
    """

    relative: Fraction = Fraction(0)
    absolute: Fraction = Fraction(0)
    of_largest: Fraction = Fraction(0)


class ErrorFormat(ABC):
    """A way for hi and auxiliary tensors to encode one value.

    A format may own any number of auxiliary tensors, of any dtype and shape. The contract, which the tests
    check for every registered format, the sign of zeros aside:

    * auxiliaries of zeros mean that the value is hi, to a step that has taken none before;
    * hi of a split is the value rounded to nearest (which neighbour of a tie is the format's choice); where
      it is not finite, the value is hi;
    * ``split(join(hi, *aux))`` gives hi and aux back bit for bit if the expansion is normalised: float32
      holds its value, which rounds to hi. A split gives such expansions but for a tie (see
      :func:`arithmetic.split`), of which only the value comes back, not hi.

    ``join``, ``split`` and ``error_terms`` are called on real tensors, and traced into graphs: they are made
    of functional operations, and views change no dtype of a 16-bit tensor.
    """

    #: The name for ``CollageBackend(error_format=...)``, and in checkpoints; without a dot.
    name: ClassVar[str]
    #: A phrase for ``collage-fx explain --help`` and pages: what it keeps, and how precise the value is.
    precision: ClassVar[str]
    #: Whether the expansion is a double word of the storage format, as ``arithmetic="native"`` needs it.
    is_double_word: ClassVar[bool] = False
    #: Whether all auxiliaries have hi's sizes and strides, or are numbers (0-d), and each element of a result
    #: depends on the same element of the operands alone, and on its place. What holds for one shape then
    #: holds for all: functions are traced once.
    is_elementwise: ClassVar[bool] = False
    #: Whether anything but hi is kept of a value.
    keeps_error: ClassVar[bool] = True
    #: Whether hi itself is kept. If not, the value is in the auxiliaries alone, of hi only sizes, strides and
    #: dtype count, and its memory is given back: a *packed* tensor.
    keeps_hi: ClassVar[bool] = True
    #: Whether some rows of a tensor are kept as they are in the whole, and each auxiliary that is no number
    #: has rows like hi. If not, a packed tensor can't be in pieces, of which each process has one.
    by_rows: ClassVar[bool] = False
    #: Whether :meth:`store` is given the index of hi's first element in the whole tensor.
    is_dithered: ClassVar[bool] = False

    def why_not(self, hi: Tensor) -> str:
        """The reason why a tensor of such sizes and strides can't be kept in this format; empty if it can.

        A format whose scales belong to several elements asks for rows of whole blocks here: tensors in
        pieces, of which each process has some rows, can then be split, saved and loaded in other pieces.
        """
        return ""

    def why_not_values(self, hi: Tensor) -> str:
        """The reason why what a tensor holds can't be encoded; empty if it can. NaNs are encoded."""
        return ""

    @abstractmethod
    def auxiliaries(self, hi: Tensor) -> Sequence[AuxiliarySpec]:
        """Specifications of the auxiliary tensors that go with ``hi``.

        Args:
            hi: a bfloat16 or float16 tensor, maybe a fake one or one on the meta device: only its dtype,
                sizes and strides count.
        """

    @abstractmethod
    def error_bound(self, dtype: torch.dtype) -> ErrorBound:
        """How near the value is to the number that was split, beside a hi of ``dtype``."""

    @abstractmethod
    def join(self, hi: Tensor, *auxiliaries: Tensor) -> Tensor:
        """The float32 value, of hi's shape."""

    @abstractmethod
    def split(self, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Float32 value -> (hi in ``dtype``, *auxiliaries), :meth:`join`'s inverse."""

    def store(self, value: Tensor, hi: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """What a step stores of a float32 value: (hi, *auxiliaries), from those that it has read.

        Here what :meth:`split` makes of it.

        Args:
            value: float32.
            hi: before the step.
            inputs: the auxiliaries before the step; behind them, where ``is_dithered``, the index of hi's
                first element in the whole tensor, of which this process may have a piece: int32, 0-d.
        """
        return self.split(value, hi.dtype)

    def error_terms(self, hi: Tensor, *auxiliaries: Tensor) -> tuple[Tensor, ...]:
        """Tensors of hi's shape with ``value = hi + sum(error terms)``: the live buffers if they are that.

        Here: one float32 tensor, the value less hi, zero where hi is not finite. (The difference of a
        normalised expansion is exact.)
        """
        return (arithmetic.rest(self.join(hi, *auxiliaries), hi.to(torch.float32)),)

    def beside(self, hi: Tensor, term: Tensor) -> tuple[Tensor, ...]:
        """Auxiliaries with which the value is hi and a float32 error term, as near as the format can.

        Args:
            hi: of which the term is half an ulp at most. Where that makes a tie of which :meth:`split` takes
                the other neighbour, the value is the last before it.
            term: float32, of hi's shape.
        """
        near = hi.to(torch.float32)
        value = near + term
        is_beyond = self.split(value, hi.dtype)[0] != hi
        return self.split(torch.where(is_beyond, torch.nextafter(value, near), value), hi.dtype)[1:]

    def nbytes(self, hi: Tensor) -> int:
        """Bytes of the auxiliary tensors that go with ``hi``."""
        return sum(spec.nbytes for spec in self.auxiliaries(hi))


class OneErrorTerm(ErrorFormat):
    """A format whose value is ``hi + lo``: its one auxiliary tensor is the error term, laid out like hi."""

    is_elementwise = True

    @abstractmethod
    def lo_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of lo beside a hi of ``dtype``."""

    def auxiliaries(self, hi: Tensor) -> Sequence[AuxiliarySpec]:
        return (AuxiliarySpec.like(hi, "lo", self.lo_dtype(hi.dtype))._replace(is_error_term=True),)

    def error_bound(self, dtype: torch.dtype) -> ErrorBound:
        """That of rounding lo, which is u of the value at most; in float32 it is not rounded."""
        if self.lo_dtype(dtype) == torch.float32:
            return ErrorBound()
        fmt = storage_format(dtype)
        return ErrorBound(fmt.unit_roundoff**2, fmt.quantum / 2)

    def join(self, hi: Tensor, *auxiliaries: Tensor) -> Tensor:
        return arithmetic.join(hi, *auxiliaries)

    def split(self, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return arithmetic.split(value, dtype, self.lo_dtype(dtype))

    def error_terms(self, hi: Tensor, *auxiliaries: Tensor) -> tuple[Tensor, ...]:
        return auxiliaries

    def beside(self, hi: Tensor, term: Tensor) -> tuple[Tensor, ...]:
        return (term.to(self.lo_dtype(hi.dtype)),)
