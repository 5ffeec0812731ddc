"""Blocks: 32 neighbours in memory, stored as integers of 8 or 16 bits with a common scale.

Note [Blocks]
-------------
The scale of a block is 1 or 1.5 times a power of two, at or above the block's largest magnitude. It is stored
in a byte: 0 = block of zeros, 255 = block with a number that is not finite (all of the block is NaN then). It
is coarse on purpose: with a finer scale, the numbers of a block would lie on another grid after nearly every
step, and be rounded each time.

An integer c stands for a number in units of the scale, by one of four maps:

* 8 bits, either sign: ``+-(c / 127) ** 2``. Squares, because the moments of a block differ in size.
* 8 bits, non-negative: ``(c / 255) ** 4``. The root of a mean of squares differs in size as much.
* 16 bits, either sign: ``c / 32767``.
* 16 bits, non-negative: ``(c / 65535) ** 2``.

For non-negative numbers the scale is that of their roots, and no number but zero becomes zero: a step divides
by such numbers. Rounding is by dither (Note [Dither]). It is right on average for the number, or for the root
of a non-negative number. If it were to nearest, a mean would stand still when its changes are below half a
distance of the grid, which is coarse here.

Blocks consist of elements that are neighbours in memory. They lie within the rows of a tensor, so that a
shard, which has some of the rows, has the blocks of the whole tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from collage_fx.numerics.arithmetic import scalar_like
from collage_fx.numerics.operators import define_operator

#: Number of elements in a block.
BLOCK = 32

#: Dtype of the integers, by bits and whether numbers may be negative. 16-bit integers of non-negative numbers
#: are stored as int16 with the same bits: few backends have uint16.
CODES = {(8, True): torch.int8, (8, False): torch.uint8, (16, True): torch.int16, (16, False): torch.int16}

#: Largest integer, by bits and whether numbers may be negative.
LARGEST = {(8, True): 127, (8, False): 255, (16, True): 32767, (16, False): 65535}

#: The byte of a scale plus this, times 2**22, is the bit pattern of the scale in float32: 1 = 2**-80, 254 =
#: 1.5 * 2**46. Roots of non-zero float32 numbers are at least 2**-75.
FIRST_SCALE = 93
SMALLEST_SCALE = 2.0**-80
_LARGEST_SCALE = 1.5 * 2.0**46
_NOT_FINITE = 255


def block_scale(largest: Tensor) -> Tensor:
    """Return the byte of the scale for a block's largest magnitude (or root), non-negative float32.

    Magnitudes below 2**-80 have that scale; magnitudes above 1.5 * 2**46 count as not finite.
    """
    bits = largest.view(torch.int32)
    byte = torch.maximum(((bits - 1) >> 22) - (FIRST_SCALE - 1), scalar_like(1, bits))
    byte = torch.where(largest <= _LARGEST_SCALE, byte, scalar_like(_NOT_FINITE, bits))  # also for a NaN
    return torch.where(largest == 0, scalar_like(0, bits), byte).to(torch.uint8)


def _scale(byte: Tensor) -> Tensor:
    """Return the scale of a byte in float32: NaN for 255, any number for 0, a block of zeros."""
    bits = byte.to(torch.int32)
    scale = ((bits + FIRST_SCALE) << 22).view(torch.float32)
    return torch.where(bits == _NOT_FINITE, scalar_like(float("nan"), scale), scale)


def _inverse(byte: Tensor) -> Tensor:
    """Return the inverse of the scale of a byte, with 2/3 rounded; any number for 0 and 255."""
    doubled = byte.to(torch.int32) + FIRST_SCALE
    power = ((254 - (doubled >> 1)) << 23).view(torch.float32)
    return torch.where((doubled & 1) == 1, power * (2 / 3), power)


def _units(bits: int, signed: bool) -> int:
    """Return the largest integer of a map; its square for 8 bits, whose maps have squares."""
    largest = LARGEST[bits, signed]
    return largest * largest if bits == 8 else largest


def block_unit(byte: Tensor, bits: int, signed: bool) -> Tensor:
    """Return the float32 factor that takes a block's integers, or their squares, to numbers of its map."""
    return _scale(byte) * (1 / _units(bits, signed))


def units_of_block(byte: Tensor, bits: int, signed: bool) -> Tensor:
    """Return the float32 factor that takes numbers of a block's map to integers, or to their squares."""
    return _inverse(byte) * float(_units(bits, signed))


def most_of_block(byte: Tensor, bits: int, signed: bool) -> Tensor:
    """Return the largest integer of a block, as float32: zero where one of its numbers is not finite."""
    largest = torch.full_like(byte, LARGEST[bits, signed], dtype=torch.float32)
    return torch.where(byte.to(torch.int32) == _NOT_FINITE, scalar_like(0.0, largest), largest)


def number_of_code(code: Tensor, unit: Tensor, bits: int, signed: bool) -> Tensor:
    """Return the float32 number of an integer of a block with this :func:`block_unit`."""
    if (bits, signed) == (16, False):
        code = code.to(torch.int32) & 0xFFFF
    number = code.to(torch.float32)
    if bits == 8:
        number = number * number.abs()
    size = number * unit
    return size if signed else size * size


def block_value(code: Tensor, byte: Tensor, bits: int, signed: bool) -> Tensor:
    """Return the float32 number of an integer and its scale's byte."""
    return number_of_code(code, block_unit(byte, bits, signed), bits, signed)


def in_map(value: Tensor, signed: bool) -> Tensor:
    """Return the value that the block scale applies to: x if signed, else sqrt(x)."""
    return value if signed else torch.sqrt(value)


def _in_map_rounded_once(value: Tensor, signed: bool) -> Tensor:
    """Compute :func:`in_map` with a root that is rounded once; torch's float32 root is not on some CPUs."""
    return in_map(value.to(torch.float64), signed).to(torch.float32)


def block_code(root: Tensor, byte: Tensor, phases: Tensor | None, bits: int, signed: bool) -> Tensor:
    """Return the integer of a float32 number in a block whose scale has this byte: :func:`code_of_number`."""
    units, most = units_of_block(byte, bits, signed), most_of_block(byte, bits, signed)
    return code_of_number(root, units, most, phases, bits, signed)


def code_of_number(
    root: Tensor, units: Tensor, most: Tensor, phases: Tensor | None, bits: int, signed: bool
) -> Tensor:
    """Return the integer of a float32 number: one of two neighbours, chosen by dither.

    The result is the larger neighbour where the discarded fraction and the phase add up to 1. Written for few
    instructions of a GPU:

    * ``torch.addcmul`` may be a fused multiply-add or not. Its results are exact in float32: the phase has 24
      bits; the integer is below 256; and the square of the integer, a multiple of an ulp of ``size``, is
      between ``size / 4`` and ``size``, or zero.
    * The square root may be approximate, and code for a GPU makes it so. It is rounded to an integer, whose
      square is compared with ``size`` exactly: an error of the root below a half changes nothing.
    * Minima and maxima are those of bit patterns: for numbers that are not negative the order is the same,
      and a NaN is larger than any number.

    Args:
        root: float32, :func:`in_map` of the number; no larger than the scale, or not finite.
        units: float32, :func:`units_of_block` of the scale.
        most: float32, :func:`most_of_block` of the scale.
        phases: int32; None rounds to nearest, as a phase of half a turn.
        bits: number of bits of the integer.
        signed: whether numbers may be negative.
    """
    size = root.abs() * units
    one, without = scalar_like(1.0, size), scalar_like(0.5, size)
    if phases is not None:
        phase = ((phases >> 8) & 0xFFFFFF).to(torch.float32)
        without = torch.addcmul(one, phase, scalar_like(-(2.0**-24), phase))
    if bits == 8:
        near = torch.round(torch.sqrt(size))
        below = torch.where(near * near > size, near - 1.0, near)
        above = torch.addcmul(size, -below, below)
        up = above >= without * torch.addcmul(one, below, scalar_like(2.0, below))
    else:
        below = torch.floor(size)
        up = size - below >= without
    given, limit = root.view(torch.int32), most.view(torch.int32)
    pattern = torch.minimum(torch.where(up, below + 1.0, below).view(torch.int32), limit)
    if signed:
        pattern = pattern | (given & -(2**31))
    integer = pattern.view(torch.float32).to(torch.int32)
    if not signed:
        least = torch.minimum(limit, scalar_like(1, limit))
        integer = torch.maximum(integer, torch.minimum(given, least))
    return integer.to(CODES[bits, signed])


def memory_order(tensor: Tensor) -> list[int]:
    """Return the dimensions of a tensor in the order of memory, outermost first."""
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's elements fill a region of memory without gaps or overlaps, in any order."""
    if tensor.layout is not torch.strided:
        return False
    expected = 1
    dimensions = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in dimensions if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def why_no_blocks(tensor: Tensor, size: int) -> str:
    """Return why the rows of a tensor do not consist of blocks of ``size`` neighbours; empty if they do."""
    if not is_dense(tensor):
        return "its elements are not neighbours in memory"
    if tensor.dim() < 2 or tensor.stride(0) * tensor.shape[0] != tensor.numel():
        return "it has no rows"
    return "" if tensor.stride(0) % size == 0 else f"its rows are no multiples of {size} elements"


def blocks_of(tensor: Tensor, like: Tensor, size: int = BLOCK) -> Tensor:
    """Return the elements as [blocks, size], in the order of memory of a dense tensor ``like``."""
    return tensor.permute(memory_order(like)).reshape(-1, size)


def from_blocks(blocks: Tensor, like: Tensor) -> Tensor:
    """Return the elements of blocks in the shape of ``like``: the inverse of :func:`blocks_of`."""
    order = memory_order(like)
    back = sorted(range(len(order)), key=order.__getitem__)
    return blocks.reshape([like.shape[dim] for dim in order]).permute(back)


def _scales(value: Tensor, like: Tensor, signed: bool) -> Tensor:
    largest = blocks_of(value, like).abs().amax(1)
    return block_scale(_in_map_rounded_once(largest, signed)).reshape(like.shape[0], -1)


def _codes(
    value: Tensor, scales: Tensor, phases: Tensor | None, like: Tensor, bits: int, signed: bool
) -> Tensor:
    of_blocks = None if phases is None else blocks_of(phases, like)
    root = _in_map_rounded_once(blocks_of(value, like), signed)
    codes = block_code(root, scales.reshape(-1, 1), of_blocks, bits, signed)
    return from_blocks(codes, like)


def _values(codes: Tensor, scales: Tensor, bits: int, signed: bool) -> Tensor:
    values = block_value(blocks_of(codes, codes), scales.reshape(-1, 1), bits, signed)
    return from_blocks(values, codes)


def _fake_scales(value: Tensor, like: Tensor, signed: bool) -> Tensor:
    rows = like.shape[0]
    return like.new_empty((rows, like.numel() // (rows * BLOCK)), dtype=torch.uint8)


#: Operator that computes the scales of a float32 tensor's blocks as bytes, a row for each row. The blocks are
#: those of a dense tensor ``like`` with the same sizes.
BLOCK_SCALES = define_operator(
    "block_scales(Tensor value, Tensor like, bool signed) -> Tensor", _scales, _fake_scales
)

#: Operator that computes :func:`block_code` of a tensor's elements. Without phases it rounds to nearest.
BLOCK_CODES = define_operator(
    "block_codes(Tensor value, Tensor scales, Tensor? phases, Tensor like, int bits, bool signed) -> Tensor",
    _codes,
    lambda value, scales, phases, like, bits, signed: torch.empty_like(like, dtype=CODES[bits, signed]),
)

#: Operator that computes :func:`block_value` of a tensor's elements.
BLOCK_VALUES = define_operator(
    "block_values(Tensor codes, Tensor scales, int bits, bool signed) -> Tensor",
    _values,
    lambda codes, scales, bits, signed: torch.empty_like(codes, dtype=torch.float32),
)

#: Operators on blocks, and their eager functions.
BLOCK_OPERATORS = {BLOCK_SCALES: _scales, BLOCK_CODES: _codes, BLOCK_VALUES: _values}
