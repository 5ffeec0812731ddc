"""C++ libraries, compiled and cached like Inductor's kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from torch._C._dynamo.guards import _torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
from torch._inductor.codecache import CppCodeCache

#: Address of the C function that takes a Python tensor and returns the address of its memory.
ADDRESS_OF_TENSOR: int = _torchinductor_pyobject_tensor_data_ptr


@dataclass(frozen=True)
class CFunction:
    """Compiled C++ function whose arguments are addresses and 64-bit integers.

    Attributes:
        address: address of the function.
        arguments: for each argument, the index of the value to pass; for a tensor its address is passed.
        library: the library, which must stay loaded.
    """

    address: int
    arguments: tuple[int, ...]
    library: ctypes.CDLL


def load_cpp_library(source: str, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """Compile ``extern "C"`` functions like Inductor's kernels, or load the library from its cache.

    Args:
        source: C++ source.
        flags: additional flags of the compiler, after Inductor's.
    """
    return cast("ctypes.CDLL", CppCodeCache.load(source, extra_flags=tuple(flags)))
