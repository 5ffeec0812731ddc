"""Dither: rounding up or down by a phase that each element has at each step, where nearest would lose.

Note [Dither]
-------------
A number that is rounded to nearest at every step stands still where a step is below half an ulp, and a decay
towards zero ends early. Rounded up with a probability of what was left of it, in ulps, it arrives on average,
and the noise of steps that follow one another adds up as a random walk. Here that choice is not random. It is
made by a phase, a number of 32 bits, read as a fraction of 2**32: up where rest and phase make an ulp.
Element i has at step t the phase

    i * SPACING + t * GOLDEN + hash(t // 32)     (mod 2**32)

* In t, multiples of the golden ratio: of a rest that hardly changes, the choices of n steps are up in a share
  that is off by less than about 2/n, where n random ones are off by 1/sqrt(n).
* Other phases after every 32 steps (the hash of any one number): a value whose grid moves at every 8 or 13
  steps would otherwise meet the same phases again and again.
* In i, multiples of the square root of 1/2: equal elements do not move together.

A phase is made of indices and a count of steps: the same in C++, in Triton and in eager torch, on every
device, and again after a checkpoint that holds the count. torch's random numbers are not used. An index is
the element's place in memory, counted from the first; where a tensor is in pieces, of which each is some of
its rows, it is that of the whole tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from collage_fx.numerics.formats import BFLOAT16, FLOAT16
from collage_fx.numerics.operators import define_operator

#: Odd, and near 2**32 times the square root of 1/2, and the golden ratio less 1.
SPACING, GOLDEN = 0xB504F333, 0x9E3779B9

#: The logarithm of how many steps there are between two sets of phases.
WINDOW = 5

_MASK = (1 << 32) - 1


def phase(count: Tensor, start: Tensor) -> Tensor:
    """The phase of a tensor's first element: int32, 0-d.

    Args:
        count: of the steps before, int32, 0-d.
        start: the element's index in the whole tensor, modulo 2**32, int32, 0-d.
    """
    # int64, of which nothing overflows: what C++ does then is undefined.
    steps = count.to(torch.int64)
    window = steps >> WINDOW
    for _ in range(2):
        window = (((window >> 16) ^ window) * 0x45D9F3B) & _MASK
    begin = (start.to(torch.int64) * SPACING) & _MASK
    return (begin + ((steps * GOLDEN) & _MASK) + window).to(torch.int32)


def phases(like: Tensor, phase: Tensor, first: Tensor | None = None) -> Tensor:
    """The phase of every element, int32: Note [Dither].

    Args:
        like: a tensor whose sizes and strides count.
        phase: of its first element in memory, int32, 0-d.
        first: int32, 0-d: the index of that element, where ``phase`` is that of an element before it.
    """
    places = torch.zeros((), dtype=torch.int64, device=like.device)
    for dim, (size, step) in enumerate(zip(like.shape, like.stride(), strict=True)):
        along = torch.arange(size, device=like.device) * step
        places = places + along.reshape((size,) + (1,) * (like.dim() - dim - 1))
    found = phase_at(places.to(torch.int32), phase, first)
    return torch.empty_like(like, dtype=torch.int32).copy_(found)


def phase_at(place: Tensor, phase: Tensor, first: Tensor | None = None) -> Tensor:
    """:func:`phases` of elements at these places in memory, counted from the first; all int32."""
    if first is not None:
        place = place + first
    return place * (SPACING - (1 << 32)) + phase


def dithered(value: Tensor, phases: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float32 ``value`` to one of its two neighbours in ``dtype``, *returned as float32*.

    To the one that is larger in magnitude where the rest, in ulps of 2**-16 (in float16 2**-13) that are cut
    off, and the phase's upper bits make one ulp. What is in ``dtype`` stays as it is, NaN and infinity too.
    Above the largest number there is infinity.

    Args:
        value: float32, any shape.
        phases: int32, of that shape.
        dtype: bfloat16 or float16.
    """
    if dtype == BFLOAT16.dtype:
        share = (phases >> 16) & 0xFFFF
        rounded = ((value.view(torch.int32) + share) & -0x10000).view(torch.float32)
        return torch.where(value == value, rounded, value)
    bits = value.view(torch.int32)
    smallest = torch.full((), (127 + FLOAT16.min_exponent) << 23, dtype=torch.int32, device=value.device)
    exponent = torch.maximum(bits & 0x7F800000, smallest)
    fraction_bits = FLOAT16.precision - 1
    of_unit = exponent - (fraction_bits << 23)
    unit, to_units = of_unit.view(torch.float32), ((254 << 23) - of_unit).view(torch.float32)
    share = ((phases >> 19) & 0x1FFF).to(torch.float32) * 2.0**-13
    magnitude = torch.floor(value.abs() * to_units + share) * unit
    infinity = torch.full((), float("inf"), dtype=torch.float32, device=value.device)
    magnitude = torch.where(magnitude > float(FLOAT16.largest), infinity, magnitude)
    return (magnitude.view(torch.int32) | (bits & -(2**31))).view(torch.float32)


#: :func:`phases` as one operator.
PHASES = define_operator(
    "phases(Tensor like, Tensor phase, Tensor? first=None) -> Tensor",
    phases,
    lambda like, phase, first=None: torch.empty_like(like, dtype=torch.int32),
    torch.Tag.pointwise,
)

#: :func:`dithered` as one operator.
DITHERED = define_operator(
    "dithered(Tensor value, Tensor phases, ScalarType dtype) -> Tensor", dithered, None, torch.Tag.pointwise
)
