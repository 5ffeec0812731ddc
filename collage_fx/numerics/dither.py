"""Dither: rounding up or down by the phase of an element at a step, so that nothing is lost on average.

Note [Dither]
-------------
A number that is rounded to nearest at every step stands still if its changes are below half an ulp, and a
decay towards zero ends early. If it is rounded up with a probability equal to the discarded fraction of an
ulp, changes arrive on average, and the noise of successive steps adds up as a random walk. Here the choice is
not random. It is made by a phase, a 32-bit number read as a fraction of 2**32: the number is rounded up where
the discarded fraction and the phase add up to an ulp. Element i has at step t the phase

    i * SPACING + t * GOLDEN + hash(t // 32)     (mod 2**32)

* Multiples of the golden ratio in t: for a discarded fraction that hardly changes, the share of n steps that
  round up is off by less than about 2/n. For n random choices it is off by 1/sqrt(n).
* Other phases after every 32 steps, by a hash: a value whose grid moves every 8 or 13 steps would otherwise
  meet the same phases again and again.
* Multiples of the square root of 1/2 in i: equal elements do not move together.

A phase follows from an index and a count of steps. It is the same in C++, in Triton and in eager torch, on
every device, and after loading a checkpoint, which holds the count. torch's random numbers are not used. The
index of an element is its offset in memory from the first element. In a shard, which has some of a tensor's
rows, it is the index in the whole tensor.

Note [The last rounding]
------------------------
A float32 sum is rounded, too: a change below half an ulp of float32 is lost at every step, as that of a
learning rate of 1e-7, or of weight decay alone if lr * weight_decay is below 3e-8. Changes of many ulps are
rounded in the same direction at each step if they stay the same, as those of Lion are. So
:func:`dithered_sum` rounds sums with changes up to :data:`NEAR` of x by dither, and others to nearest, where
half a unit is below 0.03 % of the change.

The phase is a threshold for the part of a unit that a sum is above the next number below it, whatever its
sign and that of the change. So where changes differ, the error of a step is that of rounding to nearest, of
variance 1/12 in units, and half a unit less the phase; the phases of successive steps add up to their mean.
(A threshold for the distance from the nearest number, in either direction, has a variance of 1/6 at each
step: 1.4 times the error.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from collage_fx.numerics.arithmetic import scalar_like
from collage_fx.numerics.formats import BFLOAT16, FLOAT16

#: Odd numbers near 2**32 times the square root of 1/2, and near 2**32 times the golden ratio less 1.
SPACING, GOLDEN = 0xB504F333, 0x9E3779B9

#: Logarithm to base 2 of the number of steps with the same hash.
WINDOW = 5

#: Largest change, as a share of a number, for which their sum is rounded by dither: 2048 to 4096 units.
NEAR = 2.0**-12

_MASK = (1 << 32) - 1


def phase(count: Tensor, start: Tensor) -> Tensor:
    """Compute the phase of a tensor's first element: int32, 0-d.

    Args:
        count: number of earlier steps, int32, 0-d.
        start: index of the element in the whole tensor, modulo 2**32, int32, 0-d.
    """
    # in int64: overflow of signed integers is undefined in C++
    steps = count.to(torch.int64)
    window = steps >> WINDOW
    for _ in range(2):
        window = (((window >> 16) ^ window) * 0x45D9F3B) & _MASK
    begin = (start.to(torch.int64) * SPACING) & _MASK
    return (begin + ((steps * GOLDEN) & _MASK) + window).to(torch.int32)


def phases(like: Tensor, phase: Tensor, first: Tensor | None = None) -> Tensor:
    """Compute the phase of every element, int32: Note [Dither].

    Args:
        like: tensor with the sizes and strides of the result.
        phase: phase of the first element in memory, int32, 0-d.
        first: index of that element, int32, 0-d, if ``phase`` is the phase of index 0; None for index 0.
    """
    return torch.empty_like(like, dtype=torch.int32).copy_(phase_at(places(like), phase, first))


def places(like: Tensor) -> Tensor:
    """Compute the offset in memory of every element from the first, int32."""
    found = torch.zeros((), dtype=torch.int64, device=like.device)
    for dim, (size, step) in enumerate(zip(like.shape, like.stride(), strict=True)):
        along = torch.arange(size, device=like.device) * step
        found = found + along.reshape((size,) + (1,) * (like.dim() - dim - 1))
    return found.to(torch.int32)


def phase_at(place: Tensor, phase: Tensor, first: Tensor | None = None) -> Tensor:
    """Compute :func:`phases` of elements by their offsets in memory from the first; all int32."""
    if first is not None:
        place = place + first
    return place * (SPACING - (1 << 32)) + phase


def dithered(value: Tensor, phases: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float32 ``value`` to one of its two neighbours in ``dtype``, *returned as float32*.

    The result is the neighbour that is larger in magnitude where the discarded fraction of an ulp and the
    upper 16 bits of the phase (float16: 13 bits) add up to one ulp. Numbers of ``dtype`` stay as they are,
    NaN and infinity included. The upper neighbour of the largest number is infinity.

    Args:
        value: float32, any shape.
        phases: int32, of the same shape.
        dtype: bfloat16 or float16.
    """
    if dtype == BFLOAT16.dtype:
        share = (phases >> 16) & 0xFFFF
        rounded = ((value.view(torch.int32) + share) & -0x10000).view(torch.float32)
        return torch.where(value == value, rounded, value)
    bits = value.view(torch.int32)
    smallest = scalar_like((127 + FLOAT16.min_exponent) << 23, bits)
    exponent = torch.maximum(bits & 0x7F800000, smallest)
    fraction_bits = FLOAT16.precision - 1
    of_unit = exponent - (fraction_bits << 23)
    unit, to_units = of_unit.view(torch.float32), ((254 << 23) - of_unit).view(torch.float32)
    share = ((phases >> 19) & 0x1FFF).to(torch.float32) * 2.0**-13
    magnitude = torch.floor(value.abs() * to_units + share) * unit
    infinity = scalar_like(float("inf"), value)
    magnitude = torch.where(magnitude > float(FLOAT16.largest), infinity, magnitude)
    return (magnitude.view(torch.int32) | (bits & -(2**31))).view(torch.float32)


def dithered_sum(x: Tensor, change: Tensor, phases: Tensor) -> Tensor:
    """Add two float32 numbers; round a sum near ``x`` by dither, any other to nearest.

    Let s be the sum rounded to nearest, e the exact sum less s, n the neighbour of s on the side of the exact
    sum, and f the lower 23 bits of the phase as a fraction; of the inverted phase if e is negative. If the
    change is at most :data:`NEAR` of x, the result is n where ``|e|`` is above ``f |n - s|``; on average it
    is the exact sum. It is s in all other cases, and where n is infinite. Source: Note [The last rounding]; e
    is that of Fast2Sum (Dekker 1971), exact here, as x is larger than the change.

    Args:
        x: float32, any shape.
        change: float32, of the same shape.
        phases: int32, of the same shape.
    """
    total = x + change
    error = change - (total - x)
    bits, signs = total.view(torch.int32), error.view(torch.int32) >> 31
    outwards = (bits >> 31 ^ signs) | 1  # 1: the neighbour is larger in magnitude
    neighbour = (bits + outwards).view(torch.float32)
    share = (((phases ^ signs) & 0x7FFFFF) | 0x3F800000).view(torch.float32) - 1.0
    is_beyond = error.abs() > share * (neighbour - total).abs()
    is_near = change.abs() <= x.abs() * NEAR
    return torch.where(is_beyond & is_near, neighbour, total)
