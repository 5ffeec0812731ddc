"""Passes over whole tensors in host memory at its speed: hashes and values (``whole_values.cpp``)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from collage_fx.codegen.address_tables import is_library_loaded, load_library
from collage_fx.numerics import is_dense
from collage_fx.torch_compat import is_in_host_memory


def has_fast_passes(*tensors: Tensor) -> bool:
    """Return whether the functions below can read tensors: in host memory, once the library is loaded."""
    return is_library_loaded() and all(map(is_in_host_memory, tensors))


def hash_sum(tensors: Sequence[Tensor]) -> int:
    """Return the sum, modulo 2**64, of a hash of each element's bits: Note [Fingerprints].

    Args:
        tensors: contiguous vectors of the same length, of dtypes of 1, 2 or 4 bytes.

    Returns:
        a signed number of 64 bits.
    """
    addresses = (ctypes.c_void_p * len(tensors))(*(each.data_ptr() for each in tensors))
    sizes = (ctypes.c_int64 * len(tensors))(*(each.element_size() for each in tensors))
    threads = torch.get_num_threads()
    return int(load_library().hash_sum(addresses, sizes, len(tensors), tensors[0].numel(), threads))


def are_halves(hi: Tensor, rest: Tensor, values: Tensor) -> bool:
    """Return whether :func:`join_halves` takes tensors."""
    dtypes, strides = (hi.dtype, rest.dtype), {hi.stride(), rest.stride(), values.stride()}
    are_taken = dtypes == (torch.bfloat16, torch.int16) and values.dtype in (torch.float32, torch.float64)
    return are_taken and len(strides) == 1 and is_dense(hi) and has_fast_passes(hi, rest, values)


def join_halves(hi: Tensor, rest: Tensor, values: Tensor) -> None:
    """Write the numbers with the halves hi and rest, as ``numerics.arithmetic.with_lower_half`` has them.

    Args:
        hi: dense bfloat16 tensor.
        rest: int16 tensor of hi's strides.
        values: float32 or float64 tensor of hi's strides, which is overwritten.
    """
    given = hi.data_ptr(), rest.data_ptr(), hi.numel(), values.data_ptr(), values.element_size()
    load_library().join_halves(*given, torch.get_num_threads())


def decode_blocks(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the bfloat16 numbers of codes, as ``BLOCK_VALUES`` has them for 16 bits and either sign.

    Args:
        codes: dense int16 tensor, whose rows consist of blocks of 32.
        scales: a byte for each block, in the order of memory.
    """
    values = torch.empty_like(codes, dtype=torch.bfloat16)
    given = codes.data_ptr(), scales.data_ptr(), scales.numel(), values.data_ptr()
    load_library().decode_blocks(*given, torch.get_num_threads())
    return values
