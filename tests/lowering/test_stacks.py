"""Calls for stacks of tensors of one shape: the graph of a rule for stacks, and whole steps that use it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from collage_fx.graph import Reason
from collage_fx.lowering.kernels import _stackable
from collage_fx.lowering.rule_graphs import graph_of
from collage_fx.lowering.rules import Line
from collage_fx.lowering.stacks import in_stacks, stacked_graph
from collage_fx.numerics import ROUND_TO_STORAGE
from collage_fx.runtime import HOST, WORD, Call, Kernel, Plan, Stackable, StepInParts
from collage_fx.torch_compat import SymbolicScope
from tests.support import triton_offline as offline
from tests.support.launched import LaunchedSteps
from tests.support.programs import rule_for

aten = torch.ops.aten

#: Functions of a matrix, a number and a vector, with exact results for small whole numbers.
FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "a product": lambda x, n, v: x @ x.t(),
    "a product with a vector": lambda x, n, v: x @ v,
    "a sum of products": lambda x, n, v: torch.addmm(x @ x.t(), x, x.t(), beta=3.0, alpha=-2.0),
    "a number for each": lambda x, n, v: (x + n) * n + x.sum(),
    "rows and columns": lambda x, n, v: x.sum(0) * v + x.amax(1, keepdim=True) + v * n,
    "transposed": lambda x, n, v: (x.t() + v[:, None]).t().flip(0) * n,
    "a dtype of ours": lambda x, n, v: ROUND_TO_STORAGE(x.t() * 1.0, torch.bfloat16).t() @ v,
    "two results of one operation": lambda x, n, v: torch.sort(x, 1)[0] + torch.max(x, 0)[1],
    "a constant": lambda x, n, v: x @ torch.ones(5, 2) + torch.full((), 2.0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("members", [2, 5])
@pytest.mark.parametrize("shared", [0, 1, 2, None])
def test_a_stack_is_its_members(name: str, members: int, shared: int | None) -> None:
    """Whichever operand is the same tensor for all members."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*size: int) -> Tensor:
        return torch.randint(-4, 5, (members, *size), generator=generator).float()

    given = [drawn(4, 5), drawn(), drawn(5)]
    rule = rule_for(FUNCTIONS[name], [each[0] for each in given])
    # The rule has only those that the function reads, in the order in which it does.
    used = [
        int(str(node.name).rpartition("_")[0] in "xnv" and "xnv".index(node.name[0]))
        for node in rule.operands
    ]
    stacked = [i != shared for i in used]
    operands = [given[i] if is_stack else given[i][0] for i, is_stack in zip(used, stacked, strict=True)]
    scope = SymbolicScope()
    with scope:
        single, (of_stack, _) = graph_of(rule, scope, 8), stacked_graph(rule, scope, stacked)
        for node in of_stack.graph.find_nodes(op="placeholder"):  # as Inductor asks for a GPU
            value = node.meta["val"]
            assert value.numel() < 2**31
            assert math.prod(value.shape[:1]) * WORD < 2**31
        assert not scope.has_guards(below=1 << 31)
    out = of_stack.graph.find_nodes(op="placeholder")[-1].meta["val"]
    found = torch.full((members, *out.shape[1:]), torch.nan, dtype=out.dtype)
    of_stack(*operands, found)
    for i in range(members):
        expected = torch.full_like(found[0], torch.nan)
        single(
            *(each[i] if is_stack else each for each, is_stack in zip(operands, stacked, strict=True)),
            expected,
        )
        assert torch.equal(found[i], expected)
    assert not found.isnan().any()


def _plus_one(values: list[Tensor]) -> None:
    values[1].copy_(values[0] + 1)


def _sum_and_product(values: list[Tensor]) -> None:
    values[2].copy_(values[0] + values[1])
    values[3].copy_(values[0] * values[1])


@pytest.mark.parametrize(
    "operands",
    [
        [(0, 1), (2, 3), (4, 5)],  # inputs and values of the step, in columns
        [(4, 3), (4, 4), (5, 3)],  # a value that stands twice in a column, and in both columns
        [(3, 3), (4, 3), (5, 3)],  # a value that is the same in all calls
        [(3, 4), (4, 5), (5, 3)],  # the values of one column in another order in the other
    ],
    ids=str,
)
def test_values_reach_stacks_and_leave_them(operands: list[tuple[int, int]]) -> None:
    """Each value has one memory, whatever the places that it has in calls."""
    layout = (4,), (1,), torch.float32, HOST
    kernel = Kernel(
        _sum_and_product,
        stackable=Stackable(lambda stacked: Kernel(_sum_and_product, most_members=8), (layout, layout)),
    )
    first = Kernel(_plus_one)
    made = [Call(first, (i, 3 + i), 0, 0, (3 + i,)) for i in range(3)]
    results = [(6 + 2 * i, 7 + 2 * i) for i in range(3)]
    calls = [Call(kernel, (*each, *into), 1, 0, into) for each, into in zip(operands, results, strict=True)]
    read = [Call(first, (6 + i, 12 + i), 2, 0, (12 + i,)) for i in range(6)]
    plan = Plan(3, [], [layout] * 15, [*made, *calls, *read], range(12, 18))
    stacked = in_stacks(plan)
    assert sum(call.kernel.call is _sum_and_product for call in stacked.calls) == 1
    found, expected = (
        StepInParts(each)([torch.arange(4.0) + 10 * i for i in range(3)]) for each in (stacked, plan)
    )
    assert all(map(torch.equal, found, expected))
    assert len({value.data_ptr() for value in found}) == 6


def test_a_rule_that_is_given_a_number_has_no_stacks() -> None:
    """A step gives symbolic numbers to each call: there is no stack of them."""
    rule = rule_for(lambda x: x @ x.t(), [torch.ones(4, 5)])
    (given,) = (line for line in rule.lines if line.target is None)
    dtype, _, *layout = given.args
    on_a_gpu = replace(given, args=(dtype, torch.device("cuda"), *layout))
    rule = replace(rule, lines=tuple(on_a_gpu if line is given else line for line in rule.lines))
    assert _stackable(rule, Reason("it has a product")) is not None
    with_number = replace(rule, lines=(*rule.lines, Line(None, (torch.SymFloat,))))
    assert _stackable(with_number, Reason("it has a product")) is None


# ------------------------------------------------------------------------------------------- whole steps

needs_triton = pytest.mark.skipif(
    not offline.HAVE_TRITON, reason="needs triton (Linux only) and numpy: pip install triton numpy"
)

#: Three wide matrices, three tall ones, two square ones and a single one.
MATRICES = [(8, 24), (24, 8), (8, 24), (16, 16), (24, 8), (8, 24), (24, 8), (16, 16), (4, 40)]


@pytest.fixture(scope="module")
def steps() -> Iterator[LaunchedSteps]:
    with LaunchedSteps() as process:
        yield process


@needs_triton
@pytest.mark.parametrize(("optimizer", "launches", "calls"), [("Muon", 7, 4), ("Adafactor", 13, 4)])
@pytest.mark.parametrize("repeated", [1, 2])
def test_a_call_for_each_shape(
    steps: LaunchedSteps, optimizer: str, launches: int, calls: int, repeated: int
) -> None:
    """However many matrices there are.

    Sums are in another order than the twin's. Where that moves an element over a bound between two bfloat16
    numbers, Muon's products differ by 2**-8, and a parameter near 1 by lr * 2**-8: 1/50 of half its ulp.
    """
    shapes = [shape for shape in MATRICES for _ in range(repeated)]
    outcome = steps.run(optimizer, shapes=shapes, options={}, lr=1e-2)
    assert (outcome.launches, outcome.calls) == (launches, calls), outcome
    of_hi = sum(count for name, count in outcome.different.items() if not name.endswith(".rest"))
    assert of_hi < sum(rows * columns for rows, columns in shapes) / 50, outcome.different
    assert any("only for all of a shape" in reason for reason in outcome.reasons)
