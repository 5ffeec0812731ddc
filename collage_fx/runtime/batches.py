"""The C++ functions of a step's kernels, called for all their tensors at once.

Note [One call for all tensors] ------------------------------- A call of a kernel from Python takes about 5
microseconds per tensor, mostly to read code and objects that the previous step has evicted from the caches,
and to start and end threads for each tensor. So the kernels of flat rules and of scalars are not called from
Python: a table has the address of each argument of each call, and a single C++ function, ``run``, makes all
the calls.

An elementwise rule may also be called for a piece of a tensor, with addresses inside the tensor. Its calls
are cut into jobs of about equal size, with a piece of a large tensor or with several small tensors. Threads
take jobs as they become free, and wait for each other only at the end. So the same kernel serves for many and
for few elements, and needs no threads of its own; the compiler also optimizes a loop without threads better.
Sums over all elements of a tensor are first computed for its pieces, and added at the end in the order of the
pieces, so that they do not depend on the threads.

``run`` calls a function through a type with 64-bit integers for all arguments, although some arguments are
pointers. On 64-bit processors both are passed in the same way; functions with other arguments are not called
like this.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from collage_fx.codegen import load_library
from collage_fx.torch_compat import CFunction

#: Elements of a job: enough for a processor to fetch ahead, few enough for all threads to end together.
LARGEST_JOB = 1 << 17
#: Smallest job that is worth waking a thread for, about 10 microseconds.
SMALLEST_JOB = 1 << 15
#: Jobs per thread, if there are enough elements.
JOBS_PER_THREAD = 8
#: Alignment of pieces, in elements: a whole number of cache lines and of vectors.
CLUMP = 1 << 10

#: Calls of a job of whole calls, which take some microseconds each.
WHOLE_CALLS = 4


@dataclass(frozen=True)
class Piece:
    """Elements of a call's tensors that one call of the function takes."""

    call: int
    offset: int
    length: int


class Batch:
    """Calls of one C++ function for many tensors.

    Args:
        function: the C++ function.
        calls: operand code of each argument of each call: n = address-table index, ~k = scratch cell k.
        lengths: length of each call's tensors, if the length is an argument.
        kinds: kind of each argument: bytes of a unit of length of its tensor, 0 = scalar, negative = a
            constant of ``codegen/address_tables.py`` such as ``LENGTH``.
        turns: for each call, the number of the member that it belongs to; negative = called for every step,
            the default.
        width: elements per unit of length.
        divisible: whether the function may be called for a piece of the tensors.

    Attributes:
        jobs: number of jobs.
    """

    def __init__(
        self,
        function: CFunction,
        calls: Sequence[Sequence[int]],
        lengths: Sequence[int],
        kinds: Sequence[int],
        turns: Sequence[int] | None = None,
        *,
        width: int = 1,
        divisible: bool,
    ) -> None:
        self._function = function  # stays loaded
        if divisible:
            job = job_size(sum(lengths), torch.get_num_threads(), width)
            jobs = pieces_of(lengths, job, CLUMP // width)
        else:
            jobs = whole_calls(lengths)
        self.jobs = len(jobs)
        pieces = list(chain.from_iterable(jobs))
        self._tables = [
            array("q", numbers)
            for numbers in (
                kinds,
                chain.from_iterable(calls),
                accumulate(map(len, jobs), initial=0),
                (piece.call for piece in pieces),
                (piece.offset for piece in pieces),
                (piece.length for piece in pieces),
                [-1] * len(calls) if turns is None else turns,
            )
        ]
        kinds_, which, *cuts = (table.buffer_info()[0] for table in self._tables)
        head = function.address, width, len(kinds), kinds_, which, self.jobs, *cuts
        self._run = functools.partial(load_library().run, *head)

    def __call__(self, addresses: array[int], scratch: Tensor, present: array[int] | None = None) -> None:
        """Make the calls, with as many threads as PyTorch uses.

        Args:
            addresses: address table of the step.
            scratch: scratch memory.
            present: for each turn a byte, nonzero if its calls are made; None for all.
        """
        threads = min(self.jobs, torch.get_num_threads())
        turns = None if present is None else present.buffer_info()[0]
        self._run(addresses.buffer_info()[0], scratch.data_ptr(), threads, turns)


def whole_calls(lengths: Sequence[int]) -> list[list[Piece]]:
    """Return jobs of whole calls: a few calls each; one job for calls on scalars, which take no time."""
    pieces = [Piece(call, 0, length) for call, length in enumerate(lengths)]
    size = WHOLE_CALLS if any(lengths) else len(pieces)
    return [pieces[i : i + size] for i in range(0, len(pieces), size)]


def pieces_of(lengths: Sequence[int], job: int, clump: int = CLUMP) -> list[list[Piece]]:
    """Cut calls of these lengths into jobs of about a length of ``job`` each."""
    jobs: list[list[Piece]] = []
    size = 0
    for call, length in enumerate(lengths):
        offset = 0
        while offset < length:
            # The last piece is no remainder of few elements: they go to the one before.
            take = length - offset if length - offset < job + clump else job
            if not jobs or size + take > job:
                jobs.append([])
                size = 0
            jobs[-1].append(Piece(call, offset, take))
            size += take
            offset += take
    return jobs


def job_size(length: int, threads: int, width: int = 1) -> int:
    """Return the length of a job for a total length."""
    wanted = length * width // (threads * JOBS_PER_THREAD)
    return max(SMALLEST_JOB, min(LARGEST_JOB, wanted // CLUMP * CLUMP)) // width
