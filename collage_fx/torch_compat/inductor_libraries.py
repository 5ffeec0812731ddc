"""Inductor's C++ as libraries: what generated code calls, and code of our own compiled in the same way."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, cast

from torch._C._dynamo.guards import _torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
from torch._inductor.codecache import CppCodeCache

__all__ = ["ADDRESS_OF_TENSOR", "CFunction", "c_function", "load_cpp_library"]

#: Address of the C function with which generated code gets at the memory of a Python tensor.
ADDRESS_OF_TENSOR: int = _torchinductor_pyobject_tensor_data_ptr


@dataclass(frozen=True)
class CFunction:
    """A compiled function of C++ and what to call it with.

    Attributes:
        address: of the function.
        arguments: for each of its arguments, which argument of the Python code around it is passed, as an
            address if it is a tensor.
        library: what has to stay loaded.
    """

    address: int
    arguments: tuple[int, ...]
    library: ctypes.CDLL


class _StandIn(int):
    """Stands for an argument, tensor or length, of generated code, known again by its identity."""


def c_function(code: Callable[[list[Any]], Any], arguments: int) -> CFunction | None:
    """The function that Inductor's Python code for the CPU does nothing but call once, if that is so.

    Args:
        code: takes one list.
        arguments: its length.

    The code is run with objects that stand for its arguments, and a function that notes which of them it is
    called with instead of the generated one. This is safe because nothing else has a name in that code.
    """
    function = getattr(code, "__func__", code)
    if not isinstance(function, FunctionType) or function.__closure__:
        return None
    names = set(function.__code__.co_names) - {"clear"}
    if len(names) != 1 or not (kernel := names.pop()).startswith("cpp_fused"):
        return None
    calls: list[tuple[Any, ...]] = []
    noting = FunctionType(
        function.__code__, {**function.__globals__, kernel: lambda *passed: calls.append(passed)}
    )
    given = [_StandIn(2) for _ in range(arguments)]
    noting(*([None] if code is not function else []), list(given))
    places = {id(each): i for i, each in enumerate(given)}
    if len(calls) != 1 or not all(id(argument) in places for argument in calls[0]):
        return None
    library = ctypes.CDLL(function.__globals__[kernel].__self__.__file__)
    address = ctypes.cast(library.kernel, ctypes.c_void_p).value
    assert address is not None
    return CFunction(address, tuple(places[id(argument)] for argument in calls[0]), library)


def load_cpp_library(source: str) -> ctypes.CDLL:
    """A library of ``extern "C"`` functions, compiled as Inductor's kernels are, or found in its cache."""
    return cast("ctypes.CDLL", CppCodeCache.load(source))
