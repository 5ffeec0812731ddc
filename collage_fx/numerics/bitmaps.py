"""Bitmaps: one bit for each element of a tensor, in 32-bit words.

Bit j of word i belongs to element ``32 * i + j`` in row-major order. Bits behind the last element are zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from collage_fx.numerics.error_formats import AuxiliarySpec

#: Number of bits in a word.
BITS = 32

#: Elements that are packed at a time.
_CHUNK = 1 << 20


def words_for(elements: int) -> AuxiliarySpec:
    """Return the layout of a bitmap for so many elements: an int32 vector."""
    return AuxiliarySpec("changed", torch.int32, (max(1, -(-elements // BITS)),))


def dtype_of_indices(elements: int) -> torch.dtype:
    """Return the dtype of indices of so many elements: int32, or int64 from 2**31 elements on."""
    return torch.int64 if elements >= 1 << 31 else torch.int32


def with_bits(words: Tensor, changed: Tensor) -> Tensor:
    """Return a bitmap's words with more bits set.

    Args:
        words: int32 vector, as :func:`words_for` says.
        changed: int32 tensor of 0 and 1; the bits of elements that are 1 are set.
    """
    result = words.clone()
    places = torch.arange(BITS, dtype=torch.int32, device=words.device)
    for start, part in enumerate(changed.reshape(-1).split(_CHUNK)):
        first = start * (_CHUNK // BITS)
        padded = torch.nn.functional.pad(part, (0, -part.numel() % BITS)).view(-1, BITS)
        # Different bits add up to their union, the sign bit included: int32 wraps around.
        result[first : first + len(padded)] |= (padded << places).sum(1, dtype=torch.int32)
    return result


def elements_of(words: Tensor) -> Tensor:
    """Return the indices of the elements whose bits are set, sorted: an int64 vector."""
    places = torch.arange(BITS, dtype=torch.int32, device=words.device)
    found = []
    for start, part in enumerate(words.split(_CHUNK)):
        nonzero = part.nonzero()[:, 0]
        word, place = ((part[nonzero, None] >> places) & 1).nonzero(as_tuple=True)
        found.append((nonzero[word] + start * _CHUNK) * BITS + place)
    return torch.cat(found)
