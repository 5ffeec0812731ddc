"""The Triton kernels of a step, each launched once for all its tensors.

Note [One launch for all tensors]
---------------------------------
A launch takes some microseconds of the host, and of the device, whatever it computes; a model has a hundred
small tensors, of which each takes less. So a kernel finds its tensors in a table in the device's memory, as
the C++ functions of ``batches.py`` find theirs in the host's. Here the table is one vector of 64-bit words
for all the launches of a step:

* the rows of each launch: a row for each of its tensors, with their addresses and the length;
* *numbers* of the host that kernels read, such as a learning rate: so they are those of this step, also where
  the launches are replayed, and no kernel is compiled anew for another;
* behind what is uploaded, *cells*, for numbers that one launch computes and another reads.

What programs leave of sums over all elements, and counters, are in memory of their own, at the same addresses
in all steps. The last launch of a step adds them.

Most of it is the same at every step: gradients move, if anything does. So the words are made anew on the host
by one C++ function, and uploaded, without waiting, from pinned memory if any of them has changed.

A program may capture a step into a CUDA graph of its own. What is recorded is the launches alone: they read
the table as it is when they are replayed, which is that of the last step outside.

A tensor of more elements than 32-bit indices reach is in several rows, a piece in each.
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

#: Elements of a piece at most.
LONGEST_PIECE = 1 << 30

WORD = 8

#: Pinned buffers: the uploads that can be waiting at once.
UPLOADS = 4


class Column(NamedTuple):
    """Column of the rows of a launch.

    Attributes:
        unit: bytes of a unit of length of a tensor; 0 if it is a number.
        host: bytes of a number that is in the host's memory; 0 if it is not.
        is_place: whether it is the place of the first element of a piece, 32 bits.
    """

    unit: int = 0
    host: int = 0
    is_place: bool = False


class Summed(NamedTuple):
    """Sum, or counters, of which each program of a launch leaves a part: Note [Sums of a launch].

    Attributes:
        argument: the kernel's, which is the row that is to have it.
        place: in the row.
        part: which of the sums of a program it is the sum of, or of the counters of a tensor.
        counters: how many counters; 0 if it is a sum.
    """

    argument: int
    place: int
    part: int
    counters: int = 0


class Member(NamedTuple):
    """Call of a kernel for one tensor, in a launch.

    Attributes:
        values: its arguments, as indices into the list of the step's values.
        length: of its tensors; 0 if they are numbers.
        turn: as of a :class:`~collage_fx.runtime.Call`.
    """

    values: Sequence[int]
    length: int
    turn: int = -1


class Launch:
    """Launch of one kernel for all its tensors.

    Args:
        launches: to which it belongs, with the table.
        kernel: what is launched.
        columns: of its rows, but for the length and what is behind it.
        width: words of a row.
        start: where its rows begin in the table.
        lengths: of the rows.
        turns: of the rows; negative where a row is always launched.
        elements_of_unit: of length.

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
        #: Of each load and store of the kernel's, the bytes of a unit of length; of numbers none.
        self.accesses = [units[number] for number in kernel.accesses if units[number]]

    def prepare(self, words: Tensor, device: torch.device, present: array[int] | None) -> None:
        """Find the kernel of each row, by its addresses, and the programs of each kernel.

        Args:
            words: of the table.
            device: where it is.
            present: bytes, not zero for the turns whose rows are launched; None for all.
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
        device: where they run.
        results: indices of the values that are numbers which one launch makes for another.
        place_of: where the host has the address of a value: as ``Batch`` takes it.
    """

    def __init__(self, device: torch.device, results: Iterable[int], place_of: Callable[[int], int]) -> None:
        self.device = device
        self._cells = {index: i for i, index in enumerate(results)}
        self._place_of = place_of
        #: Of each word: where the address that it is made of is, or that of a number; how many bytes that
        #: number has; and what is added.
        self._sources, self._sizes, self._offsets = array("q"), array("q"), array("q")
        #: Words that are addresses of cells, and which.
        self._of_cells: list[tuple[int, int]] = []
        #: Words that are addresses of numbers in the table, and those numbers, as above.
        self._waiting: list[tuple[int, tuple[int, int, int]]] = []
        #: Words that are addresses in the memory for sums, and where; how many words that has.
        self._of_sums: list[tuple[int, int]] = []
        self._words_of_sums = 0
        #: What the last launch adds: the value that is to have it, which word of it, where in the memory for
        #: sums the parts are, and how many; or counters, if that is negative.
        self._added: list[tuple[int, int, int, int]] = []
        #: Made at the first step.
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
        """Return the words of a row for its partial sums, one for each program, and for its counters."""
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
        #: Zeros, and each step leaves the counters so.
        self._sums = torch.zeros(self._words_of_sums, dtype=torch.float64, device=self.device)
        for word, other in self._of_sums:
            self._offsets[word] = self._sums.data_ptr() + WORD * other
        self._words = torch.zeros(count, dtype=torch.int64)
        self._upload = Upload(count, self.device)

    def update(self, addresses: array[int], scratch: Tensor, present: array[int] | None = None) -> None:
        """Update the table for a step: before its launches, after the computations of the host.

        Args:
            addresses: of the step's values.
            scratch: memory of the host.
            present: bytes, not zero for the turns that are launched; None for all.

        Raises:
            ChangedTensorError: a CUDA graph is being captured, which would write the words of this step into
                the table each time that it is replayed.
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

    Each of some pinned buffers is written to when the device has read what was in it.
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
