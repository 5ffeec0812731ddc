"""C++ libraries, compiled and cached like Inductor's kernels."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
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

    The compiler may use every instruction of this processor. Other machines that share the cache compile a
    library of their own if their processors have other instructions.

    Args:
        source: C++ source.
        flags: additional flags of the compiler, after Inductor's.
    """
    head = f"// For a processor with {processor_features()}\n"
    return cast("ctypes.CDLL", CppCodeCache.load(head + source, extra_flags=tuple(flags)))


@functools.cache
def processor_features() -> str:
    """Return the names of this processor's instruction sets, as far as torch tells them."""
    if not hasattr(torch.cpu, "get_capabilities"):
        return str(torch.backends.cpu.get_cpu_capability())
    features = torch.cpu.get_capabilities()
    return " ".join(sorted(name for name, present in features.items() if present is True))
