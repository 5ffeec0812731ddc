"""Address tables of tensors, and the C++ functions that read them (``address_tables.cpp``)."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from collage_fx.numerics import FIRST_SCALE
from collage_fx.torch_compat import ADDRESS_OF_TENSOR, load_cpp_library

#: Number of elements of a tensor that are compared with their values after the last step.
PEEKED = 4

#: Bytes of a cell of scratch memory: a number of any dtype.
CELL = 16
#: Arguments that ``run`` can pass.
MOST_ARGUMENTS = 96

#: Operand code of a word that has no address: n = index in the address table, -2-k = scratch cell k.
NO_PLACE = -1

#: Kinds of arguments that are not addresses of tensors. LENGTH = length of the piece; FIRST_OF_PIECE =
#: address of the index of its first element, a 32-bit integer; TOTAL, MEAN = address of a float64 sum over
#: its elements, which becomes a float32 sum or mean.
LENGTH, FIRST_OF_PIECE, TOTAL, MEAN = -1, -2, -3, -4

#: Odd factors of a fingerprint's hash: 2**32 over the golden ratio, and two of the hash "lowbias32",
#: https://nullprogram.com/blog/2018/07/31/.
PAIR, FIRST, SECOND = 0x9E3779B1, 0x7FEB352D, 0x846CA68B


def _source() -> str:
    """Return the C++ source, with the constants above in front."""
    signed = "PEEKED", "CELL", "MOST_ARGUMENTS", "NO_PLACE", "TOTAL", "MEAN"
    lines = [f"#define {name} {globals()[name]}\n" for name in signed]
    lines += [f"#define {name} {globals()[name]}u\n" for name in ("PAIR", "FIRST", "SECOND")]
    lines += [f"#define FIRST_SCALE {FIRST_SCALE}u\n"]
    files = map(Path(__file__).with_name, ("prelude.h", "address_tables.cpp", "whole_values.cpp"))
    return "".join([*lines, *(file.read_text(encoding="utf-8") for file in files)])


@functools.cache
def load_library() -> Any:
    """Compile the library of C++ functions, or take it from Inductor's cache; return it as their namespace.

    The functions are called with numbers; ``gather`` and ``peek`` hold the GIL.
    """
    library = load_cpp_library(_source(), ["-ftree-loop-vectorize"])
    pointer, word = ctypes.c_void_p, ctypes.c_int64
    types: dict[str, Any] = {
        "run": ctypes.CFUNCTYPE(None, pointer, word, pointer, word, *[pointer] * 6, word, word, pointer),
        "gather": ctypes.PYFUNCTYPE(word, ctypes.py_object, word, *[pointer] * 3),
        "fill": ctypes.CFUNCTYPE(word, word, *[pointer] * 5, word),
        "classify": ctypes.CFUNCTYPE(word, word, word, word, pointer, word, *[pointer] * 4),
        "peek": ctypes.PYFUNCTYPE(None, word, *[pointer] * 3),
        "hash_sum": ctypes.CFUNCTYPE(word, pointer, pointer, word, word, word),
        "join_halves": ctypes.CFUNCTYPE(None, pointer, pointer, word, pointer, word, word),
        "decode_blocks": ctypes.CFUNCTYPE(None, pointer, pointer, word, pointer, word),
    }
    return SimpleNamespace(**{name: kind((name, library)) for name, kind in types.items()})


def is_library_loaded() -> bool:
    """Return whether the library has been compiled and loaded in this process."""
    return load_library.cache_info().currsize > 0


class Fill:
    """Function that writes the words of a device's table, and returns whether any of them has changed.

    Args:
        words: the table, on the host.
        places: operand code of each word: n = index in the addresses, ``NO_PLACE``, -2-k = scratch cell k.
        sizes: bytes of the scalar at that address whose value is the word; 0 if the word is an address.
        offsets: offset to add to each address.
    """

    def __init__(self, words: Tensor, places: array[int], sizes: array[int], offsets: array[int]) -> None:
        self._kept = words, places, sizes, offsets
        tables = (table.buffer_info()[0] for table in (places, sizes, offsets))
        self._fill = functools.partial(load_library().fill, len(places), *tables, words.data_ptr())

    def __call__(self, addresses: array[int], scratch: Tensor) -> bool:
        """Write the words, given the address table of a step and its scratch memory."""
        return bool(self._fill(addresses.buffer_info()[0], scratch.data_ptr()))


class Classify:
    """Function that writes by which kernel each row of a device's table is launched.

    Args:
        words: words of the rows, on the host.
        columns: columns of addresses of elements.
        alignment: bytes of which these addresses are multiples, for the kernel for aligned addresses.
        members: member of each row; negative = launched in every step.
        kinds: byte of each row, which is written: 0 = not launched, 1 = aligned, 2 = not aligned.
    """

    def __init__(
        self, words: Tensor, columns: array[int], alignment: int, members: array[int], kinds: array[int]
    ) -> None:
        self._kept = words, columns, members, kinds
        rows, at = len(members), (table.buffer_info()[0] for table in (members, kinds))
        given = len(columns), columns.buffer_info()[0], alignment, words.data_ptr(), *at
        self._classify = functools.partial(load_library().classify, rows, len(words) // rows, *given)

    def __call__(self, present: array[int] | None) -> bool:
        """Write the kinds of members whose byte is not 0 (None = of all); return whether any has changed."""
        return bool(self._classify(None if present is None else present.buffer_info()[0]))


class Gather:
    """Function that returns the addresses of the tensors at some indices of a list."""

    def __init__(self, places: Sequence[int]) -> None:
        self._places = array("q", places)
        self._gather = load_library().gather

    def __call__(self, values: list[Any]) -> array[int]:
        """Return the address table of a list whose values at these indices are tensors."""
        addresses, place = array("q", self._places), self._places.buffer_info()
        found = self._gather(values, place[1], place[0], ADDRESS_OF_TENSOR, addresses.buffer_info()[0])
        if found < len(addresses):
            kind = type(values[self._places[found]]).__name__
            raise RuntimeError(f"a {kind} without memory of its own among the tensors of a compiled step")
        return addresses


class Peek:
    """Function that reads a few elements of each of some 16-bit tensors in host memory.

    Sizes and devices are looked at only if a tensor is at another address than in the call before, as freed
    memory is, and memory on another device. A tensor that becomes a view of fewer elements keeps its memory.

    Args:
        tensors: contiguous; it is given them again at each call, and their memory may be another then.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._gather = Gather(range(len(tensors)))
        self.lengths = array("q", [each.numel() for each in tensors])
        self._known: array[int] | None = None

    def __call__(self, tensors: list[Any]) -> array[int] | None:
        """Return ``PEEKED`` elements of each tensor; None if they have other sizes or are not on the host."""
        addresses = self._gather(tensors)
        if addresses != self._known:
            lengths = [each.numel() if each.is_cpu else None for each in tensors]
            if lengths != [*self.lengths]:
                return None
            self._known = addresses
        found = array("h", bytes(2 * PEEKED * len(tensors)))
        tables = addresses, self.lengths, found
        load_library().peek(len(tensors), *(table.buffer_info()[0] for table in tables))
        return found
