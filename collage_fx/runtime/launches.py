"""The Triton kernels of a step, each launched once for all its tensors.

Note [One launch for all tensors]
---------------------------------
A launch takes some microseconds of the host and of the device, whatever it computes; a model has a hundred
small tensors, each of which needs less time than this. So a kernel finds its tensors in an address table in
the device's memory, like the C++ functions of ``batches.py`` in the host's memory. The table is a vector of
64-bit words for all launches of a step:

* the rows of each launch: a row for each of its tensors, with addresses and the length;
* *numbers* of the host that kernels read, such as a learning rate: replayed launches read the current values,
  and no kernel is compiled again for another value;
* after the uploaded words, *cells* for numbers that a launch computes and another launch reads.

Partial sums over all elements, and counters, are in separate memory, at the same addresses in all steps. The
last launch of a step adds them.

Most words are the same at every step; if any change, they are addresses of gradients. So a C++ function
computes all words on the host, and they are uploaded from pinned memory, asynchronously, if any has changed.

A program may capture a step into a CUDA graph of its own. Only the launches are recorded: when replayed, they
read the current table, which the last step outside the graph has uploaded.

A tensor with more elements than 32-bit indices reach has several rows, with a piece in each.
"""

from __future__ import annotations

import functools
import itertools
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from collage_fx.codegen import fill
from collage_fx.errors import ChangedTensorError
from collage_fx.torch_compat import ALIGNED_BYTES, TableKernel, launch

#: Largest number of elements of a piece.
LONGEST_PIECE = 1 << 30

WORD = 8

#: Number of pinned buffers: uploads that can be pending at the same time.
UPLOADS = 4


class Column(NamedTuple):
    """Column of the rows of a launch.

    Attributes:
        unit: bytes of a unit of length of a tensor; 0 for a scalar.
        host: bytes of a scalar in the host's memory; 0 otherwise.
        is_place: whether it is the index of a piece's first element, 32 bits.
    """

    unit: int = 0
    host: int = 0
    is_place: bool = False


class Summed(NamedTuple):
    """Sum, or counters, of which each program of a launch leaves a part: Note [Sums of a launch].

    Attributes:
        argument: the kernel's argument that is the destination row.
        place: index of the destination in this row.
        part: index among the partial sums of a program, or among the counters of a tensor.
        counters: number of counters; 0 for a sum.
    """

    argument: int
    place: int
    part: int
    counters: int = 0


class Member(NamedTuple):
    """Call of a kernel for one tensor, in a launch.

    Attributes:
        values: its arguments, as indices into the list of the step's values.
        length: length of its tensors; 0 for scalars.
        turn: number of the member that it belongs to, as in :class:`~collage_fx.runtime.Call`.
    """

    values: Sequence[int]
    length: int
    turn: int = -1


class Launch:
    """Launch of one kernel for all its tensors.

    Args:
        launches: the launches that it belongs to, with their table.
        kernel: the kernel.
        columns: columns of its rows, before the length.
        width: words per row.
        start: index of its first row's first word in the table.
        lengths: length of each row.
        turns: turn of each row; negative = launched in every step.
        elements_of_unit: elements per unit of length.

    Attributes:
        programs: the words of its programs, by whether the addresses of elements are aligned.
    """

    def __init__(
        self,
        launches: Launches,
        kernel: TableKernel,
        columns: Sequence[Column],
        width: int,
        start: int,
        lengths: Sequence[int],
        turns: Sequence[int],
        elements_of_unit: int = 1,
    ) -> None:
        self._launches = launches
        self.kernel = kernel
        self.start = start
        self.lengths = lengths
        self.turns = torch.tensor(turns)
        self.elements_of_unit = elements_of_unit
        self.width = width
        self._of_elements = [i for i, column in enumerate(columns) if column.unit]
        self._prepared: tuple[Tensor, Tensor] | None = None
        self.programs: dict[bool, Tensor] = {}
        units = {number: column.unit for number, column in zip(kernel.arguments, columns, strict=True)}
        #: Bytes per unit of length of each load and store of the kernel; scalars are left out.
        self.accesses = [units[number] for number in kernel.accesses if units[number]]

    def prepare(self, words: Tensor, device: torch.device, present: array[int] | None) -> None:
        """Find the kernel of each row, by its addresses, and the programs of each kernel.

        Args:
            words: words of the table.
            device: device of the table.
            present: for each turn a byte, nonzero if its rows are launched; None for all.
        """
        rows = words[self.start : self.start + len(self.lengths) * self.width].view(-1, self.width)
        aligned = (rows[:, self._of_elements] % ALIGNED_BYTES == 0).all(1)
        launched = self.turns < 0 if present is not None else torch.ones_like(aligned)
        if present is not None:
            launched |= torch.tensor(present, dtype=torch.bool)[self.turns]
        if self._prepared is not None and all(map(torch.equal, (aligned, launched), self._prepared)):
            return
        self._prepared = aligned, launched
        self.programs = {}
        blocks = (torch.tensor(self.lengths) + self.kernel.size - 1) // self.kernel.size
        for which in (True, False):
            (chosen,) = torch.where((aligned == which) & launched)
            if len(chosen):
                self.programs[which] = programs(chosen, blocks[chosen].clamp(min=1), device)

    def __call__(self) -> None:
        for aligned, of_kernel in self.programs.items():
            kernel = self.kernel.loaded(aligned=aligned)
            launch(kernel, self._table, of_kernel, self._launches.device)

    @functools.cached_property
    def _table(self) -> Tensor:
        """Table, from the rows of this launch on."""
        return self._launches.table[self.start :]


def programs(rows: Tensor, blocks: Tensor, device: torch.device) -> Tensor:
    """Return a word for each program of a launch: ``row << 32 | block``."""
    count = int(blocks.sum())
    rows, blocks = rows.to(device), blocks.to(device)
    starts = blocks.cumsum(0) - blocks
    row, start = (each.repeat_interleave(blocks, output_size=count) for each in (rows, starts))
    return row << 32 | torch.arange(count, device=device) - start


class Launches:
    """Launches of a step on one device, and their table.

    Args:
        device: device of the launches.
        results: indices of the scalars that a launch computes for another launch.
        place_of: function from the index of a value to its operand code on the host, as in ``Batch``.
    """

    def __init__(self, device: torch.device, results: Iterable[int], place_of: Callable[[int], int]) -> None:
        self.device = device
        self._cells = {index: i for i, index in enumerate(results)}
        self._place_of = place_of
        #: Origin of each word: operand code of an address, or of a scalar's address; bytes of the scalar, or
        #: 0; and the offset to add.
        self._sources, self._sizes, self._offsets = array("q"), array("q"), array("q")
        #: Pairs ``(word, cell)``: the word is the address of a cell.
        self._of_cells: list[tuple[int, int]] = []
        #: Pairs ``(word, scalar)``: the word is the address of a scalar in the table, described as above.
        self._waiting: list[tuple[int, tuple[int, int, int]]] = []
        #: Pairs ``(word, index)``: the word is an address in the memory for sums.
        self._of_sums: list[tuple[int, int]] = []
        self._words_of_sums = 0
        #: Sums of the last launch: ``(destination value, index in it, first partial sum, count)``; the count
        #: is negative for counters.
        self._added: list[tuple[int, int, int, int]] = []
        #: Table, allocated at the first step.
        self.table = torch.empty(0, dtype=torch.int64)
        self._is_current = False
        self._present: array[int] | None = None
        self.launches: list[Launch] = []

    def add(
        self,
        kernel: TableKernel,
        columns: Sequence[Column],
        members: Sequence[Member],
        width: int,
        sums: Sequence[Summed] = (),
    ) -> Launch:
        """Add the launch of a kernel; ``width`` is the number of elements in a unit of length."""
        start, lengths, turns = self._start(), list[int](), list[int]()
        longest = LONGEST_PIECE // width
        for member in members:
            for offset in range(0, max(member.length, 1), longest):
                for argument, column in zip(kernel.arguments, columns, strict=True):
                    self._entry(member, argument, column, offset, width)
                lengths.append(min(longest, member.length - offset))
                turns.append(member.turn)
                self._word(offset=lengths[-1])
                if sums:
                    self._sum(member, sums, blocks=-(-lengths[-1] // kernel.size))
        words = len(columns) + (3 if sums else 1)
        self.launches.append(Launch(self, kernel, columns, words, start, lengths, turns, width))
        return self.launches[-1]

    def add_sums(self, kernel: TableKernel) -> Launch:
        """Add the launch that adds up the partial sums of the launches so far."""
        start = self._start()
        for index, place, at, count in self._added:
            self._word(self._place(index), offset=WORD * place)
            self._of_sums.append((self._word(), at))
            self._word(offset=count)
        rows = len(self._added)
        self.launches.append(Launch(self, kernel, (), 3, start, [1] * rows, [-1] * rows))
        return self.launches[-1]

    def _start(self) -> int:
        """Return the start of the next row: a multiple of 16 bytes, which kernels rely on."""
        if len(self._sources) % 2:
            self._word()
        return len(self._sources)

    def _sum(self, member: Member, sums: Sequence[Summed], blocks: int) -> None:
        """Add the words of a row for its partial sums, one per program, and for its counters."""
        first_part = self._words_of_sums
        first_counter = first_part + blocks * (1 + max((s.part for s in sums if not s.counters), default=-1))
        self._words_of_sums = first_counter + max(
            (s.part + s.counters for s in sums if s.counters), default=0
        )
        for start in (first_part, first_counter):
            self._of_sums.append((self._word(), start))
        for each in sums:
            at, count = first_part + each.part * blocks, blocks
            if each.counters:
                at, count = first_counter + each.part, -each.counters
            self._added.append((member.values[each.argument], each.place, at, count))

    def _word(self, source: int = -1, size: int = 0, offset: int = 0) -> int:
        self._sources.append(source)
        self._sizes.append(size)
        self._offsets.append(offset)
        return len(self._sources) - 1

    def _entry(self, member: Member, argument: int, column: Column, offset: int, width: int) -> None:
        if column.is_place:
            self._waiting.append((self._word(), (-1, 0, offset * width)))
            return
        index = member.values[argument]
        if column.host:
            self._waiting.append((self._word(), (self._place(index), column.host, 0)))
        elif index in self._cells:
            self._of_cells.append((self._word(), self._cells[index]))
        else:
            self._word(self._place(index), offset=offset * column.unit)

    def _place(self, index: int) -> int:
        """Return an operand code for ``fill``: n = address-table index, -1 = none, -2-k = scratch cell k."""
        place = self._place_of(index)
        return place if place >= 0 else place - 1

    def _allocate(self) -> None:
        """Allocate words for scalars and scratch cells, and the memory for all words."""
        numbers: dict[tuple[int, int, int], int] = {}
        of_words = []
        for word, number in self._waiting:
            if number not in numbers:
                numbers[number] = self._word(*number)
            of_words.append((word, numbers[number]))
        count = len(self._sources)
        first_cell = count + count % 2
        self.table = torch.zeros(first_cell + 2 * len(self._cells), dtype=torch.int64, device=self.device)
        base = self.table.data_ptr()
        for word, other in of_words:
            self._offsets[word] = base + WORD * other
        for word, cell in self._of_cells:
            self._offsets[word] = base + WORD * (first_cell + 2 * cell)
        #: Memory for sums and counters; the last launch of each step resets the counters to zero.
        self._sums = torch.zeros(self._words_of_sums, dtype=torch.float64, device=self.device)
        for word, other in self._of_sums:
            self._offsets[word] = self._sums.data_ptr() + WORD * other
        self._words = torch.zeros(count, dtype=torch.int64)
        self._upload = Upload(count, self.device)

    def update(self, addresses: array[int], scratch: Tensor, present: array[int] | None = None) -> None:
        """Update the table for a step: before its launches, after the computations of the host.

        Args:
            addresses: address table of the step on the host.
            scratch: scratch memory on the host.
            present: for each turn a byte, nonzero if it is launched; None for all.

        Raises:
            ChangedTensorError: a CUDA graph is being captured; each replay would write the words of this step
                into the table.
        """
        if not self.table.numel():
            self._allocate()
        if fill(self._words, self._sources, self._sizes, self._offsets, addresses, scratch):
            self._is_current = False
        if self._is_current and present == self._present:
            return
        if is_captured(self.device):
            raise ChangedTensorError(
                "while a CUDA graph is captured, a tensor is at another address than in the step before, "
                "or a number is another one",
                where=f"the table of what is launched on {self.device}",
                remedy="take a step with these tensors before the capture, and have each backward pass write "
                "gradients to the same memory",
            )
        for each in self.launches:
            each.prepare(self._words, self.device, present)
        self._present = present
        self._upload(self._words, self.table)
        self._is_current = True


def is_captured(device: torch.device) -> bool:
    """Return whether the current stream of a device is being captured into a CUDA graph."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return bool(torch.cuda.is_current_stream_capturing())


class Upload:
    """Copy of words to a device, without waiting for the device.

    A pinned buffer is written again only after the device has read it.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._is_pinned = device.type == "cuda"
        self._buffers = itertools.cycle(
            [
                (torch.empty(count, dtype=torch.int64, pin_memory=True), torch.cuda.Event())
                for _ in range(UPLOADS * self._is_pinned)
            ]
        )

    def __call__(self, words: Tensor, table: Tensor) -> None:
        into = table[: len(words)]
        if not self._is_pinned:
            into.copy_(words)
            return
        with torch.cuda.device(table.device):
            buffer, read = next(self._buffers)
            read.synchronize()
            buffer.copy_(words)
            into.copy_(buffer, non_blocking=True)
            read.record()
