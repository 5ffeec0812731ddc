"""The C++ functions of a step's kernels, called for all their tensors at once.

Note [One call for all tensors]
-------------------------------
Called from Python, a kernel costs some 5 microseconds for each tensor, much of it to read code and objects
that the step before has driven out of the caches, and threads that begin and end with each tensor. So the
kernels of flat rules, and those of numbers, are not called from Python: a table says which address each
argument of each call is, and one C++ function, ``run``, makes all the calls.

A rule that is elementwise may be called for a piece of a tensor as well, with addresses that are further on.
Its calls are cut into jobs of about equal size, of one piece of a large tensor or of several small tensors,
which threads take as they become free: none waits for another before the end. So there is one kernel for many
elements and for few, without threads of its own; that its loop knows nothing of threads makes the compiler's
code for it better, too. Sums over all elements of a tensor are first those of its pieces, and are added up
when all is done, in the order of the pieces, so that they don't depend on which thread did which.

``run`` calls a function through a type that says that all its arguments are 64 bit integers, where its own
says that some are pointers. On 64 bit processors these are passed alike; functions with other arguments are
not called in this way.
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
#: Below, a job is not worth waking a thread for: some 10 microseconds.
SMALLEST_JOB = 1 << 15
#: Jobs for each thread, where there are elements enough.
JOBS_PER_THREAD = 8
#: Pieces begin at multiples of it: a whole number of cache lines and of vectors.
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
        function: what is called.
        calls: for each call, where the address of each argument is: a number in the table of addresses, or,
            negative, a cell of scratch memory: -1 for the first.
        lengths: of each call's tensors, if that is an argument.
        kinds: of each argument: bytes of a unit of length of its tensor, 0 if it is a number, or one of the
            above.
        turns: of each call, the number of the member for which it is made; negative if it is always made, as
            all are by default.
        width: elements of a unit of length.
        divisible: whether the function may be called for a piece of the tensors.

    Attributes:
        jobs: how many there are.
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
            addresses: of the step's values.
            scratch: memory.
            present: bytes, not zero for the turns whose calls are made; None for all.
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
