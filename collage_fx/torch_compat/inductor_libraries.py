"""Inductor's C++ as libraries: what generated code calls, and code of our own compiled in the same way."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from types import FunctionType
from typing import Any, cast

import torch
from torch._C._dynamo.guards import _torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
from torch._inductor.codecache import CppCodeCache

__all__ = ["ADDRESS_OF_TENSOR", "CFunction", "c_function", "load_cpp_library"]


#: Buffers begin at multiples of so many bytes: those of a cache line, or of a vector.
ALIGNMENT = 64

#: The address of the C function that takes a Python tensor and returns the address of its memory.
ADDRESS_OF_TENSOR: int = _torchinductor_pyobject_tensor_data_ptr


@dataclass(frozen=True)
class CFunction:
    """A compiled function of C++ and what to call it with.

    Attributes:
        address: of the function.
        arguments: for each of its arguments, which argument of the Python code around it is passed, as an
            address if it is a tensor; or, negative, ~ the offset of a buffer in memory that is its own while
            it runs.
        library: what has to stay loaded.
        buffers: bytes of that memory.
        longest: the length up to which that is enough; None if it is for any.
    """

    address: int
    arguments: tuple[int, ...]
    library: ctypes.CDLL
    buffers: int = 0
    longest: int | None = None


class _StandIn(int):
    """Stands for an argument, tensor or length, of generated code, known again by its identity."""


@dataclass(frozen=True)
class _Buffer:
    """Stands for memory that generated code allocates, known by how many it has allocated before."""

    number: int


def c_function(code: Callable[[list[Any]], Any], arguments: int, longest: int = 0) -> CFunction | None:
    """The C function that Inductor's Python code calls once, None if the code does anything else.

    Args:
        code: takes one list. It may allocate buffers whose sizes are constant, or grow with its length.
        arguments: how many there are in the list.
        longest: the length that it is to be called with at most, if buffers grow with it; 0: there are none.
    """
    function = getattr(code, "__func__", code)
    if not isinstance(function, FunctionType) or function.__closure__:
        return None
    names = {name for name in function.__code__.co_names if not _is_of_allocations(name)} - {"clear"}
    if len(names) != 1 or not (kernel := names.pop()).startswith("cpp_fused"):
        return None
    is_method = code is not function
    # A size that goes by an argument is another one where the arguments are: far larger, and odd.
    numbers = (2, longest or 2, (1 << 40) + 1)
    calls = [_noted_call(function, kernel, [number] * arguments, is_method) for number in numbers]
    noted = [each for each in calls if each is not None]
    if len(noted) < len(calls) or any(passed != noted[0][0] for passed, _ in noted):
        return None
    (passed, least), (_, sizes), (_, most) = noted
    grows = least != most
    if grows and not (
        longest and all(map(_is_linear, zip(least, sizes, most, strict=True), repeat(numbers)))
    ):
        return None
    starts = list(accumulate((math.ceil(size / ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))
    library = ctypes.CDLL(function.__globals__[kernel].__self__.__file__)
    address = ctypes.cast(library.kernel, ctypes.c_void_p).value
    assert address is not None
    arguments_of_c = tuple(~starts[each.number] if isinstance(each, _Buffer) else each for each in passed)
    return CFunction(address, arguments_of_c, library, starts[-1], longest if grows else None)


def _is_linear(values: Sequence[int], at: Sequence[int]) -> bool:
    """Whether three values, at these three places, lie on a line that does not fall."""
    (x, y, z), (i, j, k) = values, at
    return z >= x and (y - x) * (k - i) == (z - x) * (j - i)


def _is_of_allocations(name: str) -> bool:
    return name in ("empty_strided_cpu", "torch") or isinstance(getattr(torch, name, None), torch.dtype)


def _noted_call(
    function: FunctionType, kernel: str, numbers: Sequence[int], is_method: bool
) -> tuple[list[int | _Buffer], list[int]] | None:
    """The arguments, by number, of the one call that generated code makes, and the bytes of its buffers.

    The code is run with objects that stand for its arguments and buffers, and a function that notes which of
    them it is called with instead of the generated one. This is safe because nothing else has a name in it.
    """
    calls: list[tuple[Any, ...]] = []
    sizes: list[int] = []

    def allocate(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> _Buffer:
        last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        sizes.append((last + 1) * dtype.itemsize)
        return _Buffer(len(sizes) - 1)

    noting = {kernel: lambda *passed: calls.append(passed), "empty_strided_cpu": allocate}
    given = [_StandIn(number) for number in numbers]
    FunctionType(function.__code__, {**function.__globals__, **noting})(*[None] * is_method, list(given))
    if len(calls) != 1:
        return None
    places = {id(each): i for i, each in enumerate(given)}
    if not all(isinstance(argument, _Buffer) or id(argument) in places for argument in calls[0]):
        return None
    return [each if isinstance(each, _Buffer) else places[id(each)] for each in calls[0]], sizes


def load_cpp_library(source: str, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """Compile ``extern "C"`` functions as Inductor's kernels are, or find the library in its cache.

    Args:
        source: C++.
        flags: for the compiler, behind Inductor's.
    """
    return cast("ctypes.CDLL", CppCodeCache.load(source, extra_flags=tuple(flags)))
