"""Fingerprints: numbers that tell whether an error term still belongs to the value it was saved beside.

Note [Fingerprints]
-------------------
An error term is right beside the one hi that it was split from, and noise beside any other. A checkpoint can
separate the two: plain PyTorch continues with hi and carries our entries along, a model is loaded from one
file and its optimizer from another. So each error term is saved with a fingerprint of the pair: the sum,
modulo 2**64, of a hash of each element's bits in hi and in the auxiliaries. A sum has no order: however a
tensor is sharded, the fingerprints of the shards add up to that of the whole, and no process need ask another
one while it saves. Scales, of which a block has one, are hashed by themselves and added. Exchanged elements
are not detected; changed elements are.

A checkpoint holds the fingerprint as a table of :data:`ROWS` rows of eight bytes, sharded like hi. Each
process writes its part into its first row, so that ``torch.distributed.checkpoint`` can save the table from
some processes and load it into others. The bytes are numbers up to 255, which every floating-point format can
hold: plain PyTorch casts what it loads to the parameter's dtype. A table of zeros says nothing; more
processes than rows have such a table.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from collage_fx.codegen import FIRST, PAIR, SECOND, has_fast_passes, hash_sum
from collage_fx.torch_compat import local_tensor, real_tensors, sharding_of

#: Number of rows of the table that a fingerprint is saved as.
ROWS = 256
#: Number of bytes in a row: a number of 64 bits.
BYTES = 8

#: Results of :func:`chunk_on`. On a CPU temporaries stay in the caches, and torch starts no threads for so
#: few elements; elsewhere temporaries take some 50 MB.
_CHUNK_ON_CPU, _CHUNK = 1 << 15, 1 << 22

#: The hash's factors as int32.
_PAIR, _FIRST, _SECOND = ((factor + (1 << 31)) % (1 << 32) - (1 << 31) for factor in (PAIR, FIRST, SECOND))


def fingerprint(hi: Tensor, auxiliaries: Sequence[Tensor], *, earlier: bool = False) -> Tensor:
    """Compute the fingerprint of a tensor and its auxiliaries, or of this process's shards: int64, 0-d.

    Args:
        hi: an ordinary tensor of any dtype of at most 4 bytes.
        auxiliaries: tensors, maybe on another device; counts (0-d) beside other tensors are left out.
        earlier: leave out scales, all of another shape than hi, as earlier versions have.
    """
    with real_tensors(), torch.no_grad():
        here = [each.to(hi.device) for each in auxiliaries]
        order = sorted(range(hi.dim()), key=hi.stride, reverse=True)
        total = _hash_of([each.permute(order) for each in (hi.detach(), *here) if each.shape == hi.shape])
        for each in here:
            if each.dim() and each.shape != hi.shape and not earlier:
                total = total + _hash_of([each])
        return total


def differences(number: Tensor, hi: Tensor, auxiliaries: Sequence[Tensor]) -> Tensor:
    """Return how far a saved fingerprint is from that of a tensor, and from that of earlier versions.

    Those of all shards add up. The fingerprint is that of the tensor if one of the sums is zero.
    """
    parts = [fingerprint(hi, auxiliaries, earlier=each) for each in (False, True)]
    return number.to(hi.device) - torch.stack(parts)


def _hash_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of a hash of each element's bits in tensors of one shape."""
    flat = [bits_of(each.detach().reshape(-1)).contiguous() for each in tensors]
    device = flat[0].device
    if has_fast_passes(flat[0]):
        return torch.tensor(hash_sum(flat))
    total = torch.zeros((), dtype=torch.int64, device=device)
    for chunks in zip(*(each.split(chunk_on(device)) for each in flat), strict=True):
        words = torch.zeros_like(chunks[0], dtype=torch.int32)
        for chunk in chunks:
            words.mul_(_PAIR).add_(chunk)
        words.mul_(_FIRST)
        words ^= (words >> 15).bitwise_and_(0x1FFFF)
        total += words.mul_(_SECOND).sum(dtype=torch.int64)
    return total


def chunk_on(device: torch.device) -> int:
    """Return the number of elements that are hashed at a time on a device."""
    return _CHUNK_ON_CPU if device.type == "cpu" else _CHUNK


def bits_of(tensor: Tensor) -> Tensor:
    """Return a view of a tensor as integers of the same size."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integers[tensor.dtype.itemsize])


def table_of(number: Tensor, hi: Tensor) -> Tensor:
    """Make the table, sharded like hi, that a fingerprint or this process's part of it is saved as."""
    pieces = sharding_of(hi)
    with real_tensors(), torch.no_grad():
        if pieces is None:
            table = torch.zeros(ROWS, BYTES, dtype=torch.uint8, device=number.device)
        else:
            table = pieces.zeros(ROWS, BYTES, dtype=torch.uint8)
        if pieces is None or pieces.gives_rows_to_all(ROWS):
            local_tensor(table)[0] = number.reshape(1).view(torch.uint8)
    return table


def number_in(table: Tensor, hi: Tensor) -> Tensor:
    """Read this process's part of the fingerprint from a table: the inverse of :func:`table_of`."""
    pieces = sharding_of(hi)
    with real_tensors(), torch.no_grad():
        rows = local_tensor(table, None if pieces is None else pieces.row_sharding)
        return rows.contiguous().view(torch.int64).sum().to(local_tensor(hi).device)
