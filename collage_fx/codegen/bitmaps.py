"""Elements whose bits are set in a bitmap, found by a C++ function in host memory (``bitmaps.cpp``)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from collage_fx.codegen.address_tables import is_library_loaded
from collage_fx.numerics import dtype_of_indices, elements_of
from collage_fx.torch_compat import load_cpp_library

#: Number of words that a thread counts at a time.
CHUNK = 1 << 13


def taken_elements(words: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of the elements whose bits are set, and their values.

    Args:
        words: bitmap, as :func:`collage_fx.numerics.words_for` lays it out.
        values: contiguous tensor on the same device.

    Returns:
        a sorted vector of indices in row-major order, int32 (int64 for tensors of 2**31 elements or more),
        and a vector of the dtype of ``values``.
    """
    flat = values.view(-1)
    dtype = dtype_of_indices(flat.numel())
    is_printed = words.device.type == "cpu" and flat.dtype.itemsize == 2 and is_library_loaded()
    if not is_printed:  # a device, or a machine without a compiler
        found = elements_of(words)
        return found.to(dtype), flat[found]
    threads, n = torch.get_num_threads(), words.numel()
    counts = torch.empty(-(-n // CHUNK), dtype=torch.int64)
    library = _load_library()
    library.count_bits(words.data_ptr(), n, CHUNK, counts.data_ptr(), threads)
    ends = counts.cumsum(0)
    indices, taken = torch.empty(int(ends[-1]), dtype=dtype), flat.new_empty(int(ends[-1]))
    given = words.data_ptr(), n, CHUNK, ends.data_ptr(), flat.data_ptr()
    library.take_elements(*given, indices.data_ptr(), dtype.itemsize, taken.data_ptr(), threads)
    return indices, taken


class _Library(NamedTuple):
    """Functions of ``bitmaps.cpp``, called with numbers."""

    count_bits: Callable[..., None]
    take_elements: Callable[..., None]


@functools.cache
def _load_library() -> _Library:
    """Compile the library, or take it from Inductor's cache."""
    library = load_cpp_library(Path(__file__).with_suffix(".cpp").read_text(encoding="utf-8"))
    pointer, word = ctypes.c_void_p, ctypes.c_int64
    count = ctypes.CFUNCTYPE(None, pointer, word, word, pointer, ctypes.c_int)
    take = ctypes.CFUNCTYPE(None, pointer, word, word, *[pointer] * 3, word, pointer, ctypes.c_int)
    return _Library(count(("count_bits", library)), take(("take_elements", library)))
