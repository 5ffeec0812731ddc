"""The C++ functions of a step's kernels, called for all their tensors at once.

Note [One call for all tensors]
-------------------------------
A call of a kernel from Python takes about 5 microseconds per tensor, mostly for caches and threads. So the
kernels of flat rules and of scalars are not called from Python: a table has a row of arguments for each call,
and a single C++ function, ``run``, makes all the calls.

An elementwise rule may also be called for a piece of a tensor, with addresses inside the tensor. Its calls
are cut into jobs of about equal size: a piece of a large tensor, or several small tensors. Threads take jobs
as they become free, and wait for each other only at the end; kernels need no threads of their own. Sums over
all elements of a tensor are added in the order of its pieces, so that they do not depend on the threads.

``run`` calls a function through a type with 64-bit integers for all arguments, although some are pointers: on
64-bit processors both are passed in the same way.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from collage_fx.codegen import load_library
from collage_fx.runtime.kernels import Call
from collage_fx.runtime.tables import NUMBERS, Table, arrays, pieces_of
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


class Batch:
    """Calls of a kernel on the host, a C++ function, for many tensors.

    ``place_of`` is a function from the index of a value to its operand code.
    """

    def __init__(self, calls: Sequence[Call], place_of: Callable[[int], int]) -> None:
        kernel = calls[0].kernel
        assert isinstance(kernel.function, CFunction)
        length = sum(call.length for call in calls)
        if kernel.divisible:
            job = job_size(length, torch.get_num_threads(), kernel.width)
            self.pieces = pieces_of(calls, job, CLUMP // kernel.width)
            jobs = jobs_of([piece.length for piece in self.pieces], job)
        else:
            self.pieces = pieces_of(calls, longest=length + 1)
            # Calls on scalars take no time: one job.
            jobs = jobs_of([min(length, 1)] * len(calls), WHOLE_CALLS)
        self.jobs = len(jobs) - 1
        table = Table(place_of)
        words = [word for piece in self.pieces for word in table.row(piece)]
        numbers = array("q", [word.offset for word in table.numbers])
        places, _, offsets = arrays(words, {NUMBERS: numbers.buffer_info()[0]})
        read = [
            array("q", [column.kind for column in kernel.columns]),
            array("q", jobs),
            places,
            offsets,
            array("q", [piece.length * kernel.width for piece in self.pieces]),
            array("q", [piece.call.member for piece in self.pieces]),
        ]
        self._kept = kernel, numbers, read  # the library stays loaded
        kinds, *others = (each.buffer_info()[0] for each in read)
        head = kernel.function.address, len(kernel.columns), kinds, self.jobs, *others
        self._run = functools.partial(load_library().run, *head)

    def __call__(self, addresses: array[int], scratch: Tensor, present: array[int] | None = None) -> None:
        """Make the calls of the ``present`` members, None = all, with as many threads as PyTorch uses."""
        threads = min(self.jobs, torch.get_num_threads())
        members = None if present is None else present.buffer_info()[0]
        self._run(addresses.buffer_info()[0], scratch.data_ptr(), threads, members)


def jobs_of(costs: Sequence[int], most: int) -> list[int]:
    """Return the first piece of each job, which costs ``most`` at most or is one piece; and their number."""
    starts, held = [0], 0
    for i, cost in enumerate(costs):
        if i and held + cost > most:
            starts.append(i)
            held = 0
        held += cost
    return [*starts, len(costs)]


def job_size(length: int, threads: int, width: int = 1) -> int:
    """Return the length of a job for a total length."""
    wanted = length * width // (threads * JOBS_PER_THREAD)
    return max(SMALLEST_JOB, min(LARGEST_JOB, wanted // CLUMP * CLUMP)) // width
