"""Base class of error formats, and the specifications and bounds that a format states."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from fractions import Fraction
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from collage_fx.numerics import arithmetic
from collage_fx.numerics.formats import FLOAT32

#: Root mean squares, relative to a number: of the power of two below it, and of float32's spacing there.
POWER_OF_TWO = math.sqrt(0.5)
_OF_FLOAT32 = float(2 * FLOAT32.unit_roundoff) * POWER_OF_TWO


class AuxiliarySpec(NamedTuple):
    """Specification of an auxiliary tensor.

    Attributes:
        name: unique within the format, without a dot, as it is part of the name in checkpoints.
        stride: strides; None if the tensor is contiguous.
        is_error_term: whether the value is hi plus this tensor.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None
    is_error_term: bool = False

    @classmethod
    def like(cls, hi: Tensor, name: str, dtype: torch.dtype) -> AuxiliarySpec:
        """Make the specification of an auxiliary with the sizes and strides of hi."""
        return cls(name, dtype, hi.shape, hi.stride())

    @property
    def nbytes(self) -> int:
        """Number of bytes of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def saved_shape(self) -> tuple[int, ...]:
        """Sizes of :meth:`saved`."""
        return (*self.shape, self.dtype.itemsize) if self._is_saved_as_bytes else self.shape

    @property
    def saved_dtype(self) -> torch.dtype:
        """Dtype of :meth:`saved`."""
        return torch.uint8 if self._is_saved_as_bytes else self.dtype

    def dtype_of(self, saved: Tensor) -> torch.dtype | None:
        """Return the dtype to expect of a saved tensor with these sizes; None if :meth:`loaded` takes none.

        It takes the result of :meth:`saved`, that of :meth:`as_state`, and an error term as earlier versions
        have saved it: as it is.
        """
        if saved.shape == self.saved_shape:
            return self.saved_dtype
        is_state = saved.is_floating_point() or not self.shape
        return self.dtype if saved.shape == self.shape and (self.is_error_term or is_state) else None

    def saved(self, buffer: Tensor) -> Tensor:
        """Return the buffer as a checkpoint holds it, in the same memory: as bytes, with one dimension more.

        Plain PyTorch casts loaded state to the parameter's dtype, which keeps each byte, but not each 16-bit
        integer. An error term of 16 bits has that dtype, and is saved as it is.
        """
        return buffer.unsqueeze(-1).view(torch.uint8) if self._is_saved_as_bytes else buffer

    def as_state(self, buffer: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the buffer as FSDP1 gathers it: with the sizes and the dtype of state, or a number.

        A byte is exact in each dtype; of 16-bit numbers the bits are kept.
        """
        if not buffer.dim() or buffer.dtype.itemsize > 2:
            return buffer
        return buffer.to(dtype) if buffer.dtype.itemsize == 1 else buffer.view(dtype)

    def loaded(self, saved: Tensor) -> Tensor:
        """Return the buffer of a saved tensor, perhaps in the same memory: the inverse of :meth:`saved`.

        Take also the result of :meth:`as_state`, and numbers that an earlier version has saved as they are.
        """
        if not self._is_saved_as_bytes or saved.shape == self.shape:
            are_bits = saved.is_floating_point() and not self.dtype.is_floating_point
            return saved.view(self.dtype) if are_bits and self.dtype.itemsize == 2 else saved.to(self.dtype)
        numbers = saved.to(torch.uint8)
        if numbers.stride(-1) != 1:
            numbers = numbers.contiguous()
        return numbers.view(self.dtype).squeeze(-1)

    @property
    def _is_saved_as_bytes(self) -> bool:
        is_cast_to_itself = self.is_error_term and self.dtype.itemsize == 2
        return not is_cast_to_itself and self.dtype not in (torch.int8, torch.uint8)

    def fitted(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return the tensor, or a copy of it with this shape, dtype and layout on ``device``."""
        strides = tensor.is_contiguous() if self.stride is None else tensor.stride() == self.stride
        is_of_kind = (tensor.shape, tensor.dtype, tensor.device) == (self.shape, self.dtype, device)
        return tensor if strides and is_of_kind else self.zeros(device).copy_(tensor)

    def zeros(self, device: torch.device) -> Tensor:
        """Make a tensor of zeros by this specification."""
        if self.stride is None or not self.shape:
            return torch.zeros(self.shape, dtype=self.dtype, device=device)
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device).zero_()


#: Count of the steps that dither has rounded, and index of a shard's first element in the whole tensor.
COUNT, START = (AuxiliarySpec(name, torch.int32, ()) for name in ("count", "start"))


class ErrorBound(NamedTuple):
    """Bound on the error of ``join(split(x))`` for a float32 x whose hi is finite.

    The bound is ``max(relative * |x|, absolute, of_largest * |y|)``. y is the element with the largest
    magnitude among those that share a scale with x.
    """

    relative: Fraction = Fraction(0)
    absolute: Fraction = Fraction(0)
    of_largest: Fraction = Fraction(0)


class ErrorFormat(ABC):
    """Encoding of a value by hi and auxiliary tensors.

    A format may have any number of auxiliary tensors, of any dtype and shape. Tests check this contract for
    every registered format, except for the sign of zeros:

    * With auxiliaries of zeros, which a tensor has before its first step, the value is hi.
    * hi of a split is the value rounded to nearest; a format may round ties either way. Where hi is not
      finite, the value is hi.
    * ``split(join(hi, *aux))`` returns hi and aux bit for bit if float32 holds the value exactly and the
      value rounds to hi. Splits make such pairs, except in a tie (see :func:`operators.split`), for which
      the value comes back, but not hi.

    ``join``, ``split`` and ``error_terms`` are called on real tensors, and are traced into graphs. So they
    consist of functional operations, and no view changes the dtype of a 16-bit tensor.
    """

    #: Name for ``CollageBackend(error_format=...)`` and in checkpoints, without a dot.
    name: ClassVar[str]
    #: Phrase for ``collage-fx explain --help`` and pages: the stored numbers and their precision.
    precision: ClassVar[str]
    #: Whether hi and the auxiliary are a double word of the storage format, as ``arithmetic="native"`` needs.
    is_double_word: ClassVar[bool] = False
    #: Whether each auxiliary is a scalar (0-d) or has the sizes and strides of hi, and each element of a
    #: result depends only on its index, scalars, and the same element of the operands. The functions are then
    #: traced once for all shapes.
    is_elementwise: ClassVar[bool] = False
    #: Whether anything of a value is kept besides hi.
    keeps_error: ClassVar[bool] = True
    #: Whether hi itself is kept. If not, the tensor is *packed*: the value is in the auxiliaries alone, only
    #: sizes, strides and dtype of hi count, and the memory of hi is freed.
    keeps_hi: ClassVar[bool] = True
    #: Whether rows are encoded independently of other rows, and each auxiliary that is not 0-d has a row for
    #: each row of hi. If not, shards of a tensor cannot be packed.
    by_rows: ClassVar[bool] = False
    #: Whether the last auxiliary counts steps, and :meth:`store` gets the index of hi's first element in the
    #: whole tensor.
    is_dithered: ClassVar[bool] = False
    #: Whether dither rounds the sum that a step stores, if it is next to the old value (Note [The last
    #: rounding] in ``numerics/dither.py``), and not the result of :meth:`store`. Then the step counts itself.
    dithers_sums: ClassVar[bool] = False

    @property
    def holds_more(self) -> bool:
        """Whether more of a value is kept than hi: error terms, or packed codes."""
        return self.keeps_error or not self.keeps_hi

    def why_not(self, hi: Tensor) -> str:
        """Return why a tensor of these sizes and strides cannot have this format; empty if it can.

        A format whose scales belong to several elements asks for rows of whole blocks here, so that shards,
        each of which has some rows, can be split, saved, and loaded into other shards.

        Raises:
            UnsupportedTensorError: no tensor on this device can have the format; the step is refused.
        """
        return ""

    def why_not_values(self, hi: Tensor) -> str:
        """Return why the numbers of a tensor cannot be encoded; empty if they can. NaNs are encoded."""
        return ""

    @abstractmethod
    def auxiliaries(self, hi: Tensor) -> Sequence[AuxiliarySpec]:
        """Return the specifications of the auxiliary tensors beside ``hi``.

        Args:
            hi: a bfloat16 or float16 tensor, perhaps fake or on the meta device. Only its dtype, sizes and
                strides count.
        """

    @abstractmethod
    def error_bound(self, dtype: torch.dtype) -> ErrorBound:
        """Return the bound on the error of a value that is split beside a hi of ``dtype``."""

    @abstractmethod
    def join(self, hi: Tensor, *auxiliaries: Tensor) -> Tensor:
        """Join hi and auxiliaries into the float32 value, of hi's shape."""

    @abstractmethod
    def split(self, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Split a float32 value into (hi in ``dtype``, *auxiliaries): the inverse of :meth:`join`."""

    def store(self, value: Tensor, hi: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return (hi, *auxiliaries) that a step stores for a float32 value; by default :meth:`split`.

        If the step rounds and counts sums by itself, :meth:`store_nearest`.

        Args:
            value: float32.
            hi: hi before the step.
            inputs: auxiliaries before the step. If ``is_dithered``, the last is the index of hi's first
                element in the whole tensor, of which this process may have a shard: int32, 0-d.
        """
        return self.store_nearest(value, hi, *inputs) if self.dithers_sums else self.split(value, hi.dtype)

    def store_nearest(self, value: Tensor, hi: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors of :meth:`store` of a dithered format, rounded to nearest and not counted."""
        *_, count, _ = inputs
        return (*self.split(value, hi.dtype)[:-1], count)

    def error_terms(self, hi: Tensor, *auxiliaries: Tensor) -> tuple[Tensor, ...]:
        """Return tensors of hi's shape with ``value = hi + sum(error terms)``; live buffers where possible.

        By default a float32 tensor: the value minus hi, and zero where hi is not finite. The difference is
        exact if hi is the value rounded to nearest.
        """
        return (arithmetic.rest(self.join(hi, *auxiliaries), hi.to(torch.float32)),)

    def beside(self, hi: Tensor, term: Tensor) -> tuple[Tensor, ...]:
        """Return the auxiliaries with which the value is nearest to hi plus a float32 error term.

        Args:
            hi: float tensor. The term is at most half an ulp of it. If the sum is a tie that :meth:`split`
                rounds to another hi, the last float32 number before the tie is used.
            term: float32, of hi's shape.
        """
        near = hi.to(torch.float32)
        value = near + term
        is_beyond = self.split(value, hi.dtype)[0] != hi
        return self.split(torch.where(is_beyond, torch.nextafter(value, near), value), hi.dtype)[1:]

    def decoded(self, hi: Tensor, *auxiliaries: Tensor) -> Tensor:
        """Return :meth:`join` in the dtype of hi; it is not traced."""
        return self.join(hi, *auxiliaries).to(hi.dtype)

    def noise(self, change: float, size: Tensor, rest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the share of a step's changes that a store loses, and the variance of its error.

        Dither loses nothing. If changes are a small part s of a spacing, its variance is that of a coin,
        s (1 - s), of which the phases leave a third; if they differ from step to step, it is 1/12 to 1/6. To
        nearest, changes with a normal distribution of deviation s lose ``2 exp(-2 (pi s)**2)`` of their mean:
        one less the slope of the mean of ``round(x)``, by Poisson's sum.

        Args:
            change: mean magnitude of a change.
            size: magnitude of values, above 0.
            rest: magnitude of the difference between values and hi, which broadcasts with ``size``.
            dtype: dtype of hi.
        """
        spacing = self._spacing(size, rest, dtype).maximum(size * _OF_FLOAT32)  # in which a step computes
        if self.is_dithered:
            return torch.zeros_like(spacing), spacing * (0.13 * spacing).clamp(max=0.32 * change)
        square = (change / spacing).square() * (math.pi / 2)  # of the deviation of a normal change
        lost = (2 * torch.exp(-2 * math.pi**2 * square)).clamp(max=1)
        return lost, spacing.square() * square.clamp(max=1 / 12)

    def _spacing(self, size: Tensor, rest: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the root mean square of the distance between neighbouring numbers of the format."""
        bound = self.error_bound(dtype)
        # A dithered error term states the whole spacing as its bound; numbers to nearest, half of it.
        spacings = 1 if self.is_dithered and self.keeps_error else 2
        return size * (float(spacings * bound.relative) * POWER_OF_TWO + float(2 * bound.of_largest))

    def inputs(self, hi: Tensor) -> list[AuxiliarySpec]:
        """Return the specifications of the inputs of :meth:`store` behind hi."""
        return [*self.auxiliaries(hi), *[START] * self.is_dithered]

    def operands(self, auxiliaries: Sequence[Tensor], start: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors of :meth:`inputs`, in their order."""
        return (*auxiliaries, *[start] * self.is_dithered)

    def writes_all(self, *, in_sum: bool, to_nearest: bool) -> bool:
        """Return whether a step writes all auxiliaries, dither rounds its last sum, or its result."""
        return in_sum if self.dithers_sums else not to_nearest

    @property
    def is_repayable(self) -> bool:
        """Whether :meth:`store_nearest` may round a moment whose errors are repaid; no error term does it."""
        return self.is_dithered and not self.keeps_error

    def zeros(self, hi: Tensor) -> list[Tensor]:
        """Return the inputs of ``store`` behind hi for a tensor that is exactly hi."""
        return [spec.zeros(hi.device) for spec in self.inputs(hi)]

    def nbytes(self, hi: Tensor) -> int:
        """Return the number of bytes of the auxiliary tensors beside ``hi``."""
        return sum(spec.nbytes for spec in self.auxiliaries(hi))
