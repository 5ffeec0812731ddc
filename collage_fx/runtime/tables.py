"""Rows of address tables: the arguments of a kernel's calls for many tensors.

A kernel is called for all its tensors at once, by a C++ function on the host (``batches.py``) or by a launch
on a device (``launches.py``). It takes the arguments for a *piece* of a tensor from a row of 64-bit words:
the addresses of the piece's first elements and of numbers, and its length. At each step, the current
addresses of tensors are added. Numbers that a kernel reads by their addresses are words, too: the index of a
piece's first element, and on a device numbers of the host. Numbers of one launch for another are in *cells*.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from collage_fx.codegen import FIRST_OF_PIECE, LENGTH, NO_PLACE
from collage_fx.runtime.kernels import Call

#: Bytes of a word.
WORD = 8

#: Memory that a word's offset may be relative to: a table's numbers, its cells, and the memory for sums.
NUMBERS, CELLS, SUMS = "numbers", "cells", "sums"


class Piece(NamedTuple):
    """Elements of a call's tensors that a row is for, in units of length."""

    call: Call
    offset: int
    length: int


def pieces_of(calls: Iterable[Call], longest: int, clump: int = 1) -> list[Piece]:
    """Cut calls into pieces of length ``longest``; a call for scalars is not cut.

    A remainder that is shorter than ``clump`` belongs to the piece before.
    """
    pieces = []
    for call in calls:
        *starts, last = range(0, max(call.length - clump, 0) + 1, longest)
        pieces += [Piece(call, start, longest) for start in starts]
        pieces.append(Piece(call, last, call.length - last))
    return pieces


class Word(NamedTuple):
    """Origin of a word of a table: offset and addresses that are added, or the address of a number."""

    place: int = NO_PLACE  # operand code of an address, as :class:`~collage_fx.codegen.Fill` takes it
    size: int = 0  # bytes of the number at this address whose value is the word; 0 if the word is the sum
    offset: int = 0
    base: str = ""  # memory whose address is added, such as ``NUMBERS``; empty = none


class Table:
    """Table of words: rows of calls, and the numbers that they refer to.

    ``place_of`` maps a value's index to its operand code. The values ``cells`` are in cells of the table.
    """

    def __init__(self, place_of: Callable[[int], int], cells: Collection[int] = ()) -> None:
        self.place_of = place_of
        self.cells = {value: i for i, value in enumerate(cells)}
        self.numbers: list[Word] = []
        self._indices: dict[Word, int] = {}

    def row(self, piece: Piece) -> Iterator[Word]:
        """Yield the words of a piece's row, and add the numbers that they refer to."""
        kernel = piece.call.kernel
        assert kernel.function is not None
        for argument, column in zip(kernel.function.arguments, kernel.columns, strict=True):
            value = piece.call.values[argument]
            if column.kind == LENGTH:
                yield Word(offset=piece.length)
            elif column.kind == FIRST_OF_PIECE:
                yield self._address_of(Word(offset=piece.offset * kernel.width))
            elif column.of_host:
                yield self._address_of(Word(self.place_of(value), column.of_host))
            elif value in self.cells:
                yield Word(offset=WORD * self.cells[value], base=CELLS)
            else:
                yield Word(self.place_of(value), offset=piece.offset * max(column.kind, 0))

    def _address_of(self, number: Word) -> Word:
        index = self._indices.setdefault(number, len(self.numbers))
        if index == len(self.numbers):
            self.numbers.append(number)
        return Word(offset=WORD * index, base=NUMBERS)


def arrays(words: Sequence[Word], bases: Mapping[str, int]) -> tuple[array[int], array[int], array[int]]:
    """Return the places, sizes and offsets of words, given the addresses of their bases."""
    address = {"": 0, **bases}
    return (
        array("q", [word.place for word in words]),
        array("q", [word.size for word in words]),
        array("q", [word.offset + address[word.base] for word in words]),
    )
