"""Passes over whole tensors in host memory at its speed: hashes, values and differences."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from collage_fx.codegen.address_tables import is_library_loaded, load_library
from collage_fx.numerics import is_dense
from collage_fx.torch_compat import is_in_host_memory, load_cpp_library

#: Elements that a thread compares at a time in host memory, and that are sent to a device at a time.
CHUNK, CHUNK_OF_A_DEVICE = 1 << 18, 1 << 24

#: Integers whose equality is that of the bits of elements of so many bytes.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def has_fast_passes(*tensors: Tensor) -> bool:
    """Return whether the functions below can read tensors: in host memory, once the library is loaded."""
    return is_library_loaded() and all(map(is_in_host_memory, tensors))


def hash_sum(tensors: Sequence[Tensor]) -> int:
    """Return the sum, modulo 2**64 and signed, of a hash of each element's bits: Note [Fingerprints].

    The tensors are contiguous vectors of the same length, of dtypes of 1, 2 or 4 bytes.
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

    hi is dense and bfloat16, rest int16, and values float32 or float64, all of the same strides.
    """
    given = hi.data_ptr(), rest.data_ptr(), hi.numel(), values.data_ptr(), values.element_size()
    load_library().join_halves(*given, torch.get_num_threads())


def decode_blocks(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the bfloat16 numbers of codes, as ``BLOCK_VALUES`` has them for 16 bits and either sign.

    The codes are dense and int16, in rows of blocks of 32; scales are bytes, in the order of memory.
    """
    values = torch.empty_like(codes, dtype=torch.bfloat16)
    given = codes.data_ptr(), scales.data_ptr(), scales.numel(), values.data_ptr()
    load_library().decode_blocks(*given, torch.get_num_threads())
    return values


def dtype_of_indices(elements: int) -> torch.dtype:
    """Return the dtype of indices of so many elements: int32, or int64 from 2**31 elements on."""
    return torch.int64 if elements >= 1 << 31 else torch.int32


def differing_elements(values: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices and values of the elements of a vector whose bits differ from a copy's.

    Both are contiguous, of the same size and dtype; the copy is in host memory. The results are on the device
    of ``values``: sorted indices, int32 (int64 for 2**31 elements or more), and elements of ``values``.
    """
    dtype, n = dtype_of_indices(values.numel()), values.numel()
    if values.device.type != "cpu" or values.dtype.itemsize != 2 or not is_library_loaded():
        parts = zip(values.split(CHUNK_OF_A_DEVICE), before.split(CHUNK_OF_A_DEVICE), strict=True)
        found = [_differing(*part) + i * CHUNK_OF_A_DEVICE for i, part in enumerate(parts)]
        indices = torch.cat(found)
        return indices.to(dtype), values[indices]
    threads, (compare, take_elements) = torch.get_num_threads(), _load_library()
    counts = torch.empty(-(-n // CHUNK), dtype=torch.int64)
    words = torch.empty(-(-n // 32), dtype=torch.int32)
    given = values.data_ptr(), before.data_ptr(), n, CHUNK, words.data_ptr()
    compare(*given, counts.data_ptr(), threads)
    ends = counts.cumsum(0)
    indices, taken = torch.empty(int(counts.sum()), dtype=dtype), values.new_empty(int(counts.sum()))
    taking = words.data_ptr(), n, CHUNK, ends.data_ptr(), values.data_ptr()
    take_elements(*taking, indices.data_ptr(), dtype.itemsize, taken.data_ptr(), threads)
    return indices, taken


def _differing(values: Tensor, before: Tensor) -> Tensor:
    """Return the indices of elements that differ, compared by torch on the device of ``values``."""
    integers = _INTEGERS[values.dtype.itemsize]
    others = before.to(values.device, non_blocking=True).view(integers)
    return (values.view(integers) != others).view(len(values), -1).any(1).nonzero()[:, 0]


@functools.cache
def _load_library() -> tuple[Callable[..., None], Callable[..., None]]:
    """Return ``compare`` and ``take_elements`` of ``differing.cpp``, compiled or from Inductor's cache."""
    library = load_cpp_library(Path(__file__).with_name("differing.cpp").read_text(encoding="utf-8"))
    pointer, word = ctypes.c_void_p, ctypes.c_int64
    compare = ctypes.CFUNCTYPE(None, pointer, pointer, word, word, pointer, pointer, ctypes.c_int)
    take = ctypes.CFUNCTYPE(None, pointer, word, word, *[pointer] * 3, word, pointer, ctypes.c_int)
    return compare(("compare", library)), take(("take_elements", library))
