"""Calls of one C++ function: every element once, whatever the sizes, by any number of threads."""

from __future__ import annotations

import ctypes
import itertools
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collage_fx import CollageBackend
from collage_fx.codegen.address_tables import (
    CELL,
    FIRST_OF_PIECE,
    LENGTH,
    MEAN,
    MOST_ARGUMENTS,
    TOTAL,
    Gather,
)
from collage_fx.runtime import Call, Column, Kernel
from collage_fx.runtime.batches import CLUMP, WHOLE_CALLS, Batch, job_size, jobs_of
from collage_fx.runtime.tables import pieces_of
from collage_fx.torch_compat import CFunction, load_cpp_library
from tests.support.training import parameters, run_steps

FUNCTIONS = """
#include <cstdint>
extern "C" void add(int32_t* x, const int16_t* y, const double* factor, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] += *factor * y[i];
}
extern "C" void twice(const double* x, double* result) { *result = 2 * *x; }
extern "C" void indices(int32_t* x, const int32_t* first, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] += *first + i;
}
extern "C" void total(const int32_t* x, double* sum, int64_t n) {
  *sum = 1;
  for (int64_t i = 0; i < n; ++i) *sum += x[i];
}
"""
MANY_ARGUMENTS = ", ".join(f"int64_t* x{i}" for i in range(MOST_ARGUMENTS))
FUNCTIONS += f'extern "C" void last({MANY_ARGUMENTS}) {{ *x{MOST_ARGUMENTS - 1} = *x0; }}'


def function(name: str, arguments: int) -> CFunction:
    library = load_cpp_library(FUNCTIONS)
    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert address is not None
    return CFunction(address, tuple(range(arguments)), library)


def batch(
    name: str,
    calls: Sequence[Sequence[int]],
    lengths: Sequence[int],
    kinds: Sequence[int],
    *,
    divisible: bool,
) -> Batch:
    """Calls of a function whose values are operand codes, such as -2-k for scratch cell k."""
    columns = tuple(map(Column, kinds))
    kernel = Kernel(None, function(name, len(kinds)), columns, divisible=divisible)
    made = [Call(kernel, tuple(values), 0, n, ()) for values, n in zip(calls, lengths, strict=True)]
    return Batch(made, lambda value: value)


@given(
    st.lists(st.integers(0, 9 * CLUMP), max_size=20),
    st.integers(1, 6).map(lambda n: n * CLUMP),
    st.sampled_from([1, CLUMP]),
)
def test_pieces_cover_each_call_once(lengths: list[int], longest: int, clump: int) -> None:
    calls = [Call(Kernel(None), (i,), 0, n, ()) for i, n in enumerate(lengths)]
    pieces = pieces_of(calls, longest, clump)
    assert list(dict.fromkeys(piece.call for piece in pieces)) == calls
    for call, length in zip(calls, lengths, strict=True):
        of_call = [piece for piece in pieces if piece.call is call]
        ends = [piece.offset + piece.length for piece in of_call]
        assert [piece.offset for piece in of_call] == [0, *ends[:-1]]
        assert ends[-1] == length
        assert all(piece.offset % CLUMP == 0 for piece in of_call)
        assert all(min(length, clump) <= piece.length < longest + clump for piece in of_call)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.integers(1, 30))
def test_jobs_are_of_neighbours_that_fit(costs: list[int], most: int) -> None:
    starts = jobs_of(costs, most)
    assert (starts[0], starts[-1]) == (0, len(costs))
    jobs = [costs[a:b] for a, b in itertools.pairwise(starts)]
    assert all(job and (sum(job) <= most or len(job) == 1) for job in jobs)
    assert all(sum(a) + b[0] > most for a, b in itertools.pairwise(jobs)), "no job would have taken one more"


@given(st.integers(1, 1 << 40), st.integers(1, 256))
def test_a_job_is_worth_a_thread_and_begins_at_a_whole_clump(elements: int, threads: int) -> None:
    assert job_size(elements, threads) % CLUMP == 0
    assert job_size(elements, threads) >= 8 * CLUMP


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("lengths", [[1], [5, 1, 3], [100_003, 1, 8191, 70_000], [300_000] * 3])
def test_calls_in_pieces_are_whole_calls(lengths: list[int]) -> None:
    factors = torch.arange(1, len(lengths) + 1, dtype=torch.float64)
    outputs = [torch.arange(n, dtype=torch.int32) for n in lengths]
    inputs = [torch.arange(n).to(torch.int16) for n in lengths]
    wanted = [x + i * y.to(torch.int32) for i, (x, y) in enumerate(zip(outputs, inputs, strict=True), 1)]
    table = array("q", [t.data_ptr() for pair in zip(outputs, inputs, strict=True) for t in pair])
    # The factors are in scratch memory.
    scratch = torch.zeros(len(lengths), CELL // 8, dtype=torch.float64)
    scratch[:, 0] = factors
    calls = [[2 * i, 2 * i + 1, -2 - i, 0] for i in range(len(lengths))]
    batch("add", calls, lengths, [4, 2, 0, LENGTH], divisible=True)(table, scratch)
    assert all(torch.equal(x, y) for x, y in zip(outputs, wanted, strict=True))


def test_a_function_of_numbers_is_called_once_for_each_call() -> None:
    numbers = torch.tensor([1.5, 2.5], dtype=torch.float64)
    scratch = torch.zeros(2, CELL // 8, dtype=torch.float64)
    table = array("q", [numbers[0].data_ptr(), numbers[1].data_ptr()])
    calls = batch("twice", [[0, -2], [1, -3]], [0, 0], [0, 0], divisible=False)
    calls(table, scratch)
    assert scratch[:, 0].tolist() == [3.0, 5.0]
    assert calls.jobs == 1


@pytest.mark.usefixtures("two_threads")
def test_a_piece_is_given_the_index_of_its_first_element() -> None:
    lengths = [5, 300_000, 0]
    outputs = [torch.zeros(n, dtype=torch.int32) for n in lengths]
    table = array("q", [t.data_ptr() for t in outputs])
    kinds = [4, FIRST_OF_PIECE, LENGTH]
    batch("indices", [[i, 0, 0] for i in range(3)], lengths, kinds, divisible=True)(table, torch.empty(0))
    for x in outputs:
        assert torch.equal(x, torch.arange(len(x), dtype=torch.int32))


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("kind", [TOTAL, MEAN])
@pytest.mark.parametrize("divisible", [True, False])
def test_totals_are_those_of_the_pieces(divisible: bool, kind: int) -> None:
    lengths = [300_000, 3, 70_000, *[5] * WHOLE_CALLS]
    inputs = [torch.arange(n, dtype=torch.int32) % 7 for n in lengths]
    totals = torch.full((len(lengths), 2), torch.nan)
    table = array("q", [t.data_ptr() for pair in zip(inputs, totals, strict=True) for t in pair])
    calls = [[2 * i, 2 * i + 1, 0] for i in range(len(lengths))]
    calling = batch("total", calls, lengths, [4, kind, LENGTH], divisible=divisible)
    assert calling.jobs > 1
    assert (len(calling.pieces) > len(lengths)) == divisible
    for _ in range(2):  # the second step's totals are not added to the first's
        calling(table, torch.empty(0))
    for call, (x, total) in enumerate(zip(inputs, totals, strict=True)):
        pieces = sum(piece.call.values[0] == 2 * call for piece in calling.pieces)
        wanted = x.sum().item() + pieces
        assert total[0] == torch.tensor(wanted / len(x) if kind == MEAN else float(wanted))
        assert total[1].isnan()


def test_as_many_arguments_as_are_promised() -> None:
    numbers = torch.arange(1, MOST_ARGUMENTS + 1)
    table = array("q", [number.data_ptr() for number in numbers])
    calls = [list(range(MOST_ARGUMENTS))]
    kinds = [0] * MOST_ARGUMENTS
    batch("last", calls, [0], kinds, divisible=False)(table, numbers)
    assert numbers.tolist() == [*range(1, MOST_ARGUMENTS), 1]


def test_addresses_are_those_of_first_elements() -> None:
    tensors = [torch.ones(3), torch.nn.Parameter(torch.ones(2, 3)), torch.ones(4, 4).t()[1:], torch.ones(0)]
    values = [None, *tensors, 7]
    assert list(Gather([4, 1, 3, 2])(values)) == [values[i].data_ptr() for i in (4, 1, 3, 2)]  # type: ignore[union-attr]
    assert not Gather([])(values)


def test_a_tensor_without_memory_is_an_error() -> None:
    """Torch throws in C++, where nothing would catch it but the end of the process."""
    sparse = torch.ones(3).to_sparse()
    with pytest.raises(RuntimeError, match="a Tensor without memory of its own"):
        Gather([1, 0])([sparse, torch.ones(3)])


ELEMENTWISE: list[Any] = [
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
]


@pytest.mark.parametrize(
    ("optimizer", "arithmetic"), [*((each, "wide") for each in ELEMENTWISE), (torch.optim.AdamW, "native")]
)
def test_elementwise_optimizers_are_batches(optimizer: Any, arithmetic: Any) -> None:
    """No kernel of theirs is called from Python: the code that this torch generates is understood."""
    params = parameters(shapes=[(8, 6), (9,)])
    backend = CollageBackend(arithmetic=arithmetic)
    run_steps(torch.compile(optimizer(params).step, backend=backend), params, [0, 1])
    for graph in backend.report().graphs:
        assert graph.route.unit in ("by family", "in parts")
        assert dict(graph.route.reasons).keys() <= {"by family"}
