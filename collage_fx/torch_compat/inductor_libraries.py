"""C++ libraries, compiled and cached as Inductor's kernels are."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from torch._C._dynamo.guards import _torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
from torch._inductor.codecache import CppCodeCache

#: The address of the C function that takes a Python tensor and returns the address of its memory.
ADDRESS_OF_TENSOR: int = _torchinductor_pyobject_tensor_data_ptr


@dataclass(frozen=True)
class CFunction:
    """Compiled C++ function whose arguments are addresses and 64-bit integers.

    Attributes:
        address: of the function.
        arguments: for each of its arguments, the index of the value that is passed; of a tensor, its address.
        library: what has to stay loaded.
    """

    address: int
    arguments: tuple[int, ...]
    library: ctypes.CDLL


def load_cpp_library(source: str, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """Compile ``extern "C"`` functions as Inductor's kernels are, or find the library in its cache.

    Args:
        source: C++.
        flags: for the compiler, behind Inductor's.
    """
    return cast("ctypes.CDLL", CppCodeCache.load(source, extra_flags=tuple(flags)))
