"""Encodings: what is stored of one tensor between two steps, and the float32 value that comes back of it.

Here are the library's, plain dtypes, and candidates that the library may come to have; those of other
projects are in ``peers.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from collage_fx.numerics import ErrorFormat, format_named

#: What is kept between two steps.
State = tuple[Tensor, ...]


class Encoding(ABC):
    """A way to store a tensor.

    Values are float32 tensors [..., n]; where elements share a scale, those of a block do, along the last
    dimension. Other dimensions are a batch. Rounding at random draws from torch's generator.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """A phrase for tables."""

    @property
    @abstractmethod
    def bytes(self) -> float:
        """Bytes of an element, its share of the scales included."""

    @abstractmethod
    def store(self, value: Tensor, before: State | None) -> State:
        """What is kept of a value.

        Args:
            value: to store.
            before: what was kept until now, of a value of the same shape; None at the start.
        """

    @abstractmethod
    def load(self, state: State) -> Tensor:
        """The value of what was kept."""

    def update(self, before: State, decay: Tensor, change: Tensor) -> State:
        """What is kept of ``value + (change - decay * value)``, of shapes that broadcast.

        Not ``value * (1 - decay) + change``: in float32 1 - decay has an error that is no format's.
        """
        value = self.load(before)
        return self.store(value + (change - decay * value), before)


@dataclass(frozen=True)
class Plain(Encoding):
    """A dtype, rounded to nearest."""

    dtype: torch.dtype

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def bytes(self) -> float:
        return self.dtype.itemsize

    def store(self, value: Tensor, before: State | None) -> State:
        return (value.to(self.dtype),)

    def load(self, state: State) -> Tensor:
        (stored,) = state
        return stored if stored.dtype == torch.float64 else stored.float()


@dataclass(frozen=True)
class Registered(Encoding):
    """A registered format, beside bfloat16 or in its place.

    For a format with a scale for the whole tensor, each row of the last dimension is a tensor.
    """

    format: str

    @property
    def name(self) -> str:
        return self.format

    @property
    def bytes(self) -> float:
        # Beside so many elements a counter is nothing.
        hi = torch.empty(1 << 10, 1 << 10, dtype=torch.bfloat16, device="meta")
        return (hi.nbytes * self._format.keeps_hi + self._format.nbytes(hi)) / hi.numel()

    @property
    def _format(self) -> ErrorFormat:
        found = format_named(self.format)
        assert found is not None
        return found

    def store(self, value: Tensor, before: State | None) -> State:
        fmt = self._format
        if not fmt.by_rows and not fmt.is_elementwise:
            each = [fmt.split(tensor, torch.bfloat16) for tensor in value.flatten(0, -2)]
            return tuple(
                torch.stack(parts).unflatten(0, value.shape[:-1]) for parts in zip(*each, strict=True)
            )
        if before is None:
            return fmt.split(value, torch.bfloat16)
        start = [torch.zeros((), dtype=torch.int32)] if fmt.is_dithered else []
        return fmt.store(value, *before, *start)

    def load(self, state: State) -> Tensor:
        return self._format.join(*state)


# 8-bit floats with more behind them: candidates for weights. ------------------------------------------------

E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Float8Components(Encoding):
    """A sum of e4m3 numbers, each the rounding to nearest of what those before it leave of the value.

    With a block, values are divided by the power of two at or below the largest magnitude of a block, times
    2**-7, so that components lie as high in the range as they can: one byte a block.
    """

    count: int
    block: int | None = None

    @property
    def name(self) -> str:
        scale = "no scale" if self.block is None else f"scale per {self.block}"
        return f"{self.count} × e4m3, {scale}"

    @property
    def bytes(self) -> float:
        return self.count + (0 if self.block is None else 1 / self.block)

    def store(self, value: Tensor, before: State | None) -> State:
        scale = torch.ones((), dtype=value.dtype)
        if self.block is not None:
            scale = power_of_two_below(largest(value, self.block)) * 2.0**-7
        rest, components = by_block(value, self.block) / scale, []
        for _ in range(self.count):
            components.append(rest.to(E4M3))
            rest = rest - components[-1].to(value.dtype)
        return (scale, *components)

    def load(self, state: State) -> Tensor:
        scale, *components = state
        total = sum((each.float() for each in components), torch.zeros(()))
        value = total * scale
        return value if self.block is None else value.flatten(-2)


@dataclass(frozen=True)
class Float8WithPlanes(Encoding):
    """A float with e4m3's exponents and 8 or 16 fraction bits more, dithered.

    Its pattern is split as ``exact`` splits float32's: an e4m3 number, and planes of a byte, which hold what
    the pattern exceeds that number's by. Here it is kept whole, as a float32 number, and steps are counted.
    """

    planes: int

    @property
    def name(self) -> str:
        return f"e4m3 + {self.planes} × int8, dithered"

    @property
    def bytes(self) -> float:
        return 1 + self.planes

    def store(self, value: Tensor, before: State | None) -> State:
        magnitude = value.abs()
        unit = self.unit(magnitude)
        count = (magnitude / unit).floor()
        rest = magnitude / unit - count  # exact; not added to the dither, which would round the sum
        step = torch.zeros((), dtype=torch.int64) if before is None else before[1] + 1
        rounded = (count + (dither(value.shape[-1], int(step)) >= 1 - rest)) * unit
        return rounded.copysign(value), step

    def load(self, state: State) -> Tensor:
        return state[0]

    def unit(self, magnitude: Tensor) -> Tensor:
        """That of the last place: e4m3 has 3 fraction bits, and exponents from -6."""
        return power_of_two_below(magnitude).clamp(min=2.0**-6) * 2.0 ** (-3 - 8 * self.planes)


@dataclass(frozen=True)
class StaticScale(Encoding):
    """Another encoding of the value divided by its root mean square at the start, one number a tensor.

    What a model has whose weights are of size 1 by construction, as under unit scaling.
    """

    inner: Encoding

    @property
    def name(self) -> str:
        return f"{self.inner.name}, static scale"

    @property
    def bytes(self) -> float:
        return self.inner.bytes

    def store(self, value: Tensor, before: State | None) -> State:
        if before is None:
            scale = value.square().mean(-1, keepdim=True).sqrt()
            return scale, *self.inner.store(value / scale, None)
        scale, *inner = before
        return scale, *self.inner.store(value / scale, tuple(inner))

    def load(self, state: State) -> Tensor:
        scale, *inner = state
        return self.inner.load(tuple(inner)) * scale


# What they are made of. -------------------------------------------------------------------------------------


def by_block(value: Tensor, block: int | None) -> Tensor:
    """[..., n] -> [..., n / block, block]; as it is without a block."""
    return value if block is None else value.unflatten(-1, (-1, block))


def largest(value: Tensor, block: int) -> Tensor:
    """The largest magnitude of each block, [..., n / block, 1]."""
    return by_block(value, block).abs().amax(-1, keepdim=True)


def power_of_two_below(magnitude: Tensor) -> Tensor:
    """The power of two at or below a normal float32 number > 0; 2**-126 for smaller ones."""
    return (magnitude.view(torch.int32) & 0x7F800000).clamp(min=1 << 23).view(torch.float32)


#: Steps for which the dither's phases stay the same.
REHASHED = 32


def dither(count: int, step: int) -> Tensor:
    """Numbers in [0, 1), float32 [count]: for each element a Weyl sequence in time, of a phase hashed of it.

    ``u(i, t) = ((i ^ s) * 0xB504F333 + t * 0x9E3779B9) mod 2**32 / 2**32`` with s a hash of t div 32. Over
    successive steps the numbers of one element are as even as can be, so that roundings by them cancel.
    """
    window = step // REHASHED
    phase = ((window + 1) * 0x9E3779B97F4A7C15) % 2**64  # splitmix64's finalizer [Steele, Lea, Flood 2014]
    phase = ((phase ^ (phase >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    phase = ((phase ^ (phase >> 27)) * 0x94D049BB133111EB) % 2**64
    phase = (phase ^ (phase >> 31)) % 2**32
    index = torch.arange(count)
    u = ((index ^ phase) * 0xB504F333 + step * 0x9E3779B9) % 2**32
    return (u >> 8).float() * 2.0**-24  # 24 bits: float32 holds them, so that none rounds up to 1
