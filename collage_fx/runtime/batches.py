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

import ctypes
import functools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from collage_fx.numerics import SUMS
from collage_fx.torch_compat import ADDRESS_OF_TENSOR, CFunction, load_cpp_library, prepare_cpp_compiler

__all__ = [
    "FIRST_OF_PIECE",
    "LENGTH",
    "MOST_ARGUMENTS",
    "SUMS_OF_PIECE",
    "load_library",
    "prepare_compiler",
]

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

#: Elements of a tensor that are compared with those that the last step has left.
PEEKED = 4

#: Bytes of a cell of scratch memory: a number of any dtype.
CELL = 16
#: Arguments that ``run`` can pass.
MOST_ARGUMENTS = 96

#: Values for an argument that is no address of a tensor: the length of the piece; the address of sums over
#: its elements, as many as in ``SUMS``; the address of the index of its first element, a 32-bit integer.
LENGTH, SUMS_OF_PIECE, FIRST_OF_PIECE = -1, -2, -3


_SOURCE = f"""
#include <Python.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace {{

using Word = int64_t;
using Caller = void (*)(void*, const Word*);

template <size_t>
using WordAt = Word;

template <size_t... I>
void call(void* function, const Word* a, std::index_sequence<I...>) {{
  reinterpret_cast<void (*)(WordAt<I>...)>(function)(a[I]...);
}}

template <size_t N>
void call_with(void* function, const Word* a) {{
  call(function, a, std::make_index_sequence<N>());
}}

template <size_t... N>
Caller caller(size_t arguments, std::index_sequence<N...>) {{
  static const Caller callers[] = {{call_with<N>...}};
  return callers[arguments];
}}

constexpr size_t most = {MOST_ARGUMENTS};

// Of a piece: no two threads write to neighbouring ones.
struct alignas(128) Sums {{
  double each[{len(SUMS)}];
}};

}}  // namespace

// The addresses of the tensors at these places of a list.
extern "C" void gather(
    PyObject* values, Word count, const Word* places, void* (*address_of)(PyObject*), void** addresses) {{
  for (Word i = 0; i < count; ++i) addresses[i] = address_of(PyList_GET_ITEM(values, places[i]));
}}

// Some elements of each of the tensors at these addresses, of 16 bits each and with so many elements.
extern "C" void peek(Word count, const Word* addresses, const Word* lengths, int16_t* elements) {{
  for (Word i = 0; i < count; ++i) {{
    for (Word k = 0; k < {PEEKED}; ++k) {{
      elements[{PEEKED} * i + k] = reinterpret_cast<const int16_t*>(addresses[i])[lengths[i] * k / {PEEKED}];
    }}
  }}
}}

// Words of a device's table, each made of the address at a place, of the number there, or of neither (-1);
// below are cells of scratch memory. Returns whether any of them has changed.
extern "C" Word fill(
    Word count, const Word* places, const Word* sizes, const Word* offsets,
    const Word* addresses, Word scratch, Word* words) {{
  Word changed = 0;
  for (Word i = 0; i < count; ++i) {{
    Word word = offsets[i];
    if (places[i] != -1) {{
      const Word address = places[i] < 0 ? scratch + {CELL} * (-2 - places[i]) : addresses[places[i]];
      if (sizes[i]) {{
        word = 0;
        std::memcpy(&word, reinterpret_cast<const void*>(address), sizes[i]);
      }} else {{
        word += address;
      }}
    }}
    changed |= words[i] ^ word;
    words[i] = word;
  }}
  return changed != 0;
}}

// Call i is made if its turn is negative, if present is null, or if the byte of its turn in it is not zero.
// Where kinds[j] is not negative, argument j is an address, and so many bytes for each element before the
// piece. which[i * arguments + j] says which address that is for call i: a number in the table, or, negative,
// ~ the number of a cell of scratch memory.
extern "C" void run(
    void* function, Word width, Word arguments, const Word* kinds, const Word* which, Word jobs,
    const Word* first_piece, const Word* calls, const Word* offsets, const Word* lengths, const Word* turns,
    const Word* addresses, Word scratch, Word threads, const char* present) {{
  const Caller invoke = caller(arguments, std::make_index_sequence<most + 1>());
  const size_t vectors = std::count(kinds, kinds + arguments, {SUMS_OF_PIECE});
  std::vector<Sums> sums(vectors * first_piece[jobs]);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (Word job = 0; job < jobs; ++job) {{
    for (Word piece = first_piece[job]; piece < first_piece[job + 1]; ++piece) {{
      const Word turn = turns[calls[piece]];
      if (turn >= 0 && present && !present[turn]) continue;
      Word a[most + 1];
      const int32_t first = static_cast<int32_t>(width * offsets[piece]);
      Sums* sums_of_piece = sums.data() + vectors * piece;
      const Word* of_call = which + calls[piece] * arguments;
      for (Word j = 0; j < arguments; ++j) {{
        if (kinds[j] == {LENGTH}) {{
          a[j] = lengths[piece];
        }} else if (kinds[j] == {SUMS_OF_PIECE}) {{
          a[j] = reinterpret_cast<Word>((sums_of_piece++)->each);
        }} else if (kinds[j] == {FIRST_OF_PIECE}) {{
          a[j] = reinterpret_cast<Word>(&first);
        }} else {{
          const Word start = of_call[j] < 0 ? scratch + {CELL} * ~of_call[j] : addresses[of_call[j]];
          a[j] = start + kinds[j] * offsets[piece];
        }}
      }}
      invoke(function, a);
    }}
  }}
  const Sums* next = sums.data();
  for (Word piece = 0; vectors && piece < first_piece[jobs]; ++piece) {{
    for (Word j = 0; j < arguments; ++j) {{
      if (kinds[j] != {SUMS_OF_PIECE}) continue;
      double* total = reinterpret_cast<double*>(addresses[which[calls[piece] * arguments + j]]);
      for (size_t k = 0; k < {len(SUMS)}; ++k) total[k] = (offsets[piece] ? total[k] : 0) + next->each[k];
      ++next;
    }}
  }}
}}
"""


class Library(NamedTuple):
    """The functions above, to be called with numbers; beside ``run``, other Python threads go on."""

    run: Callable[..., None]
    gather: Callable[..., None]
    fill: Callable[..., int]
    peek: Callable[..., None]


@functools.cache
def load_library() -> Library:
    """Compiled, unless Inductor has it in its cache."""
    library = load_cpp_library(_SOURCE)
    pointer, word = ctypes.c_void_p, ctypes.c_int64
    run, gather = library.run, ctypes.PyDLL(library._name).gather
    run.argtypes = [pointer, word, word, pointer, pointer, word, *[pointer] * 6, word, word, pointer]
    gather.argtypes = [ctypes.py_object, word, pointer, pointer, pointer]
    fill = library.fill
    fill.argtypes = [word, *[pointer] * 4, word, pointer]
    peek = ctypes.PyDLL(library._name).peek
    peek.argtypes = [word, pointer, pointer, pointer]
    run.restype = gather.restype = peek.restype = None
    fill.restype = word
    return Library(run, gather, fill, peek)


def is_library_loaded() -> bool:
    """Whether a step has needed the functions above, and the machine could compile them."""
    return load_library.cache_info().currsize > 0


@functools.cache
def prepare_compiler() -> None:
    """Have all that a first step compiles beside its own kernels compiled on another core, once a process.

    A fault of the compiler is raised where the library or a kernel is needed, and not here.
    """
    prepare_cpp_compiler().add_done_callback(lambda done: done.exception() or load_library())


def fill(
    words: Tensor,
    places: array[int],
    sizes: array[int],
    offsets: array[int],
    addresses: array[int],
    scratch: Tensor,
) -> bool:
    """Write the words of a device's table; returns whether any of them has changed.

    Args:
        words: the table, on the host.
        places: where in ``addresses`` the address is that a word is made of; -1: nowhere; ``-2 - cell``: it
            is that of a cell of scratch memory.
        sizes: bytes of the number at that address, if that is what the word is.
        offsets: what is added to addresses.
        addresses: of a step's values.
        scratch: memory.
    """
    tables = (table.buffer_info()[0] for table in (places, sizes, offsets, addresses))
    return bool(load_library().fill(len(places), *tables, scratch.data_ptr(), words.data_ptr()))


@dataclass(frozen=True)
class Piece:
    """Elements of a call's tensors that one call of the function takes."""

    call: int
    offset: int
    length: int


class Gather:
    """The addresses of some of the tensors in a list.

    Args:
        places: of these in any list.
    """

    def __init__(self, places: Sequence[int]) -> None:
        self._places = array("q", places)
        self._gather = load_library().gather

    def __call__(self, values: list[Any]) -> array[int]:
        """A table of addresses for batches, of a list whose values at the places are tensors."""
        addresses, place = array("q", self._places), self._places.buffer_info()
        self._gather(values, place[1], place[0], ADDRESS_OF_TENSOR, addresses.buffer_info()[0])
        return addresses


class Peek:
    """Some elements of each of some 16-bit tensors in the host's memory, to see whether they are the same.

    Args:
        tensors: contiguous; it is given them again at each call, and their memory may be another then.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._gather = Gather(range(len(tensors)))
        self._lengths = array("q", [each.numel() for each in tensors])

    def __call__(self, tensors: list[Any]) -> array[int]:
        """``PEEKED`` elements of each."""
        found = array("h", bytes(2 * PEEKED * len(tensors)))
        tables = self._gather(tensors), self._lengths, found
        load_library().peek(len(tensors), *(table.buffer_info()[0] for table in tables))
        return found


class Batch:
    """Calls of one function.

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
    """Jobs of calls that take about as long, whatever their lengths; of numbers, no time to speak of."""
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
    """The length of a job, of so much in all."""
    wanted = length * width // (threads * JOBS_PER_THREAD)
    return max(SMALLEST_JOB, min(LARGEST_JOB, wanted // CLUMP * CLUMP)) // width
