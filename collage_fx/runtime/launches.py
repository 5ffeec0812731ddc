"""The Triton kernels of a step, each launched once for all its tensors.

Note [One launch for all tensors]
---------------------------------
A launch takes some microseconds, more than most tensors of a model need. So a kernel finds its tensors in an
address table in the device's memory, a vector of 64-bit words for all launches of a step:

* the rows of each launch: a row for each of its tensors, with addresses and the length;
* *numbers* of the host that kernels read, such as a learning rate: replayed launches read the current values,
  and no kernel is compiled again for another value;
* after the uploaded words, *cells* for numbers that a launch computes and another launch reads.

Partial sums over all elements are in separate memory, at the same addresses in all steps. A launch adds them.

Most words are the same at every step, but for addresses of gradients. So a C++ function computes all words on
the host, and they are uploaded from pinned memory, asynchronously, if any has changed. The words of programs
depend on which rows are launched alone, such as those of a part of a backward pass, and are remembered.

A program may capture a step into a CUDA graph of its own. Only the launches are recorded: when replayed, they
read the table that the last step outside the graph has uploaded.

A tensor with more elements than 32-bit indices reach has several rows, with a piece in each.
"""

from __future__ import annotations

import functools
from array import array
from collections import deque
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from collage_fx.codegen import MEAN, Classify, Fill
from collage_fx.errors import ChangedTensorError
from collage_fx.runtime.kernels import NO_MEMBER, Call, Kernel
from collage_fx.runtime.tables import CELLS, NUMBERS, SUMS, WORD, Piece, Table, Word, arrays, pieces_of
from collage_fx.torch_compat import ALIGNED_BYTES, TableKernel, launch, on_device

#: Largest number of elements of a piece.
LONGEST_PIECE = 1 << 30

#: Uploads of a set of rows that can be pending at a time.
UPLOADS = 4
#: Sets of rows whose programs are remembered.
MOST_SETS = 64


class Launch:
    """Launch of one kernel for all its tensors, whose rows are added to the table of ``launches``.

    ``rows`` has length and member of each row; rows of a negative member are launched in every step.
    """

    def __init__(
        self, launches: Launches, kernel: Kernel, words: Sequence[Word], rows: Sequence[tuple[int, int]]
    ) -> None:
        assert isinstance(kernel.function, TableKernel)
        self._launches = launches
        self.kernel, self.function = kernel, kernel.function
        # Rows start at a multiple of 16 bytes, which kernels rely on.
        launches.words += [Word()] * (len(launches.words) % 2)
        self._rows = slice(len(launches.words), len(launches.words) + len(words))
        launches.words += words
        self.lengths = [length for length, _ in rows]
        columns = [i for i, column in enumerate(kernel.columns) if column.kind > 0]
        self._members, self._of_elements = array("q", [member for _, member in rows]), array("q", columns)
        #: Byte of each row: 0 = not launched, 1 = aligned, 2 = not aligned, -1 = not known yet.
        self._kinds = array("b", [-1] * len(rows))
        self._classify: Classify | None = None
        #: Words of the programs, by whether the addresses of elements are aligned.
        self.programs: dict[bool, Tensor] = {}
        self._programs: dict[bytes, dict[bool, Tensor]] = {}  # by the kinds of all rows

    def prepare(self, words: Tensor, present: array[int] | None) -> None:
        """Find the kernel of each row, by its addresses in the table, and the programs of each kernel."""
        device = self._launches.device
        if self._classify is None:
            given = words[self._rows], self._of_elements, ALIGNED_BYTES, self._members, self._kinds
            self._classify = Classify(*given)
        if not self._classify(present):
            return
        if (known := self._programs.get(self._kinds.tobytes())) is not None:
            self.programs = known
            return
        if len(self._programs) >= MOST_SETS:
            for dropped in self._programs.pop(next(iter(self._programs))).values():
                if device.type == "cuda":  # a launch on another stream than the memory's may still read it
                    dropped.record_stream(torch.cuda.current_stream(device))
        self.programs = self._programs[self._kinds.tobytes()] = {}
        self._launches.most_pending = max(self._launches.most_pending, UPLOADS * len(self._programs))
        kinds = torch.tensor(self._kinds)
        blocks = (torch.tensor(self.lengths) + self.function.size - 1) // self.function.size
        for kind, aligned in ((1, True), (2, False)):
            (chosen,) = torch.where(kinds == kind)
            if len(chosen):
                self.programs[aligned] = programs(chosen, blocks[chosen].clamp(min=1), device)

    def __call__(self) -> None:
        for aligned, of_kernel in self.programs.items():
            kernel = self.function.loaded(aligned=aligned)
            launch(kernel, self._table, of_kernel, self._launches.device)

    @functools.cached_property
    def _table(self) -> Tensor:
        """Table, from the rows of this launch on."""
        return self._launches.table[self._rows.start :]


def programs(rows: Tensor, blocks: Tensor, device: torch.device) -> Tensor:
    """Return a word for each program of a launch: ``row << 32 | block``."""
    count = int(blocks.sum())
    if device.type == "cuda":  # from pinned memory, nothing waits for the device
        rows, blocks = rows.pin_memory(), blocks.pin_memory()
    rows, blocks = (each.to(device, non_blocking=True) for each in (rows, blocks))
    starts = blocks.cumsum(0) - blocks
    row, start = (each.repeat_interleave(blocks, output_size=count) for each in (rows, starts))
    return row << 32 | torch.arange(count, device=device) - start


class Launches(Table):
    """Launches of a step on one device, and their table.

    ``cells`` are the indices of the scalars that a launch computes for another launch.
    """

    def __init__(self, device: torch.device, cells: Collection[int], place_of: Callable[[int], int]) -> None:
        super().__init__(place_of, cells)
        self.device = device
        #: Words of all rows.
        self.words: list[Word] = []
        self._words_of_sums = 0
        #: Rows of the launch that adds the totals of a wave, which the next wave reads: destination, first
        #: partial sum, number of partial sums, and divisor.
        self._totals: list[Word] = []
        self._adding: TableKernel | None = None
        #: Table, allocated at the first step.
        self.table = torch.empty(0, dtype=torch.int64)
        #: Number of pinned buffers: uploads of all sets of rows that can be pending at a time.
        self.most_pending = UPLOADS
        #: Pinned buffers, in the order of their uploads.
        self._buffers: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._is_current = False
        self._present: array[int] | None = None
        self.launches: list[Launch] = []

    def add(self, calls: Sequence[Call]) -> Launch:
        """Add the launch of one kernel for these calls."""
        kernel = calls[0].kernel
        assert isinstance(kernel.function, TableKernel)
        self._adding = self._adding or kernel.function.adding
        pieces = pieces_of(calls, LONGEST_PIECE // kernel.width)
        words = [word for piece in pieces for word in (*self.row(piece), *self._sums_of(piece))]
        rows = [(piece.length, piece.call.member) for piece in pieces]
        self.launches.append(Launch(self, kernel, words, rows))
        return self.launches[-1]

    def add_numbers(self, values: Sequence[int], dtype: torch.dtype) -> Callable[[], Tensor]:
        """Add numbers of the host as words; return a function of their vector, after the first update."""
        first = len(self.numbers)
        self.numbers += [Word(self.place_of(value), dtype.itemsize) for value in values]

        @functools.cache
        def vector() -> Tensor:
            words = self.table[len(self.words) + first :][: len(values)]
            return words.view(dtype)[:: WORD // dtype.itemsize]

        return vector

    def add_totals(self) -> list[Launch]:
        """Add the launch that adds up the totals of the last wave, if there are any."""
        words, self._totals = self._totals, []
        if not words:
            return []
        assert self._adding is not None
        rows = [(1, NO_MEMBER)] * (len(words) // 4)
        self.launches.append(Launch(self, Kernel(None, self._adding), words, rows))
        return self.launches[-1:]

    def _sums_of(self, piece: Piece) -> list[Word]:
        """Return the word of a row for its partial sums, of each total and program."""
        kernel = piece.call.kernel
        if not kernel.sums:
            return []
        assert isinstance(kernel.function, TableKernel)
        blocks = -(-piece.length // kernel.function.size)
        first = self._words_of_sums
        self._words_of_sums += blocks * len(kernel.sums)
        for part, (argument, kind) in enumerate(kernel.sums):
            value = piece.call.values[argument]
            is_cell = value in self.cells
            self._totals += [
                Word(offset=WORD * self.cells[value], base=CELLS) if is_cell else Word(self.place_of(value)),
                Word(offset=WORD * (first + part * blocks), base=SUMS),
                Word(offset=blocks),
                Word(offset=piece.call.length * kernel.width if kind == MEAN else 1),
            ]
        return [Word(offset=WORD * first, base=SUMS)]

    def _allocate(self) -> None:
        words = [*self.words, *self.numbers]
        self.table = torch.zeros(len(words) + len(self.cells), dtype=torch.int64, device=self.device)
        self._sums = torch.zeros(self._words_of_sums, dtype=torch.float64, device=self.device)
        numbers, cells = (self.table[n:].data_ptr() for n in (len(self.words), len(words)))
        origins = arrays(words, {NUMBERS: numbers, CELLS: cells, SUMS: self._sums.data_ptr()})
        self._words = torch.zeros(len(words), dtype=torch.int64)
        self._fill = Fill(self._words, *origins)
        self._uploaded = self.table[: len(words)]

    def update(self, addresses: array[int], scratch: Tensor, present: array[int] | None = None) -> None:
        """Update the table for a step: before its launches, after the computations of the host.

        ``present`` has a byte for each member, nonzero if it is launched; None for all.

        Raises:
            ChangedTensorError: a CUDA graph is being captured, whose replays would write this step's words.
        """
        if not self.table.numel():
            self._allocate()
        if self._fill(addresses, scratch):
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
            each.prepare(self._words, present)
        self._present = present
        self._upload()
        self._is_current = True

    def _upload(self) -> None:
        """Copy the words to the device without waiting for it, from a pinned buffer that it has read."""
        if self.device.type != "cuda":
            self._uploaded.copy_(self._words)
            return
        with on_device(self.device):
            if len(self._buffers) < self.most_pending:
                buffer, read = torch.empty_like(self._words, pin_memory=True), torch.cuda.Event()
            else:
                buffer, read = self._buffers.popleft()
                read.synchronize()
            buffer.copy_(self._words)
            self._uploaded.copy_(buffer, non_blocking=True)
            read.record()
            self._buffers.append((buffer, read))


def is_captured(device: torch.device) -> bool:
    """Return whether the current stream of a device is being captured into a CUDA graph."""
    if device.type != "cuda":
        return False
    with on_device(device):
        return bool(torch.cuda.is_current_stream_capturing())
