"""Transposed values in the best order in memory, and products called as torch's operators."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch import make_fx
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from collage_fx.lowering.kernels import called_products, has_products_alone
from collage_fx.lowering.transposes import TRANSPOSES, in_order_of_memory
from collage_fx.numerics import PHASES, ROUND_TO_STORAGE
from collage_fx.torch_compat import functional_decompositions
from tests.support.programs import rule_for

aten = torch.ops.aten


def graph_of(function: Callable[..., object], *inputs: Tensor) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def targets(gm: GraphModule) -> list[object]:
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


#: A copy of a result in the order in memory that the given graph promises.
BACK = (aten.permute.default, aten.clone.default, aten.permute.default)

#: Functions of a matrix of 3 rows, one of 4, and a number; and the operations that are left of them.
CASES: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], list[object]]] = {
    "twice": (lambda x, y, n: x.t().t() * 1.0, [aten.mul.Tensor]),
    "twice, in other orders": (
        lambda x, y, n: x[None].permute(2, 0, 1).permute(2, 0, 1),
        [aten.unsqueeze.default, aten.permute.default, aten.permute.default],
    ),
    "of a chain": (
        lambda x, y, n: (x.t() * n).neg() @ x,
        [aten.mul.Tensor, aten.neg.default, aten.t.default, aten.mm.default],
    ),
    "of a number": (lambda x, y, n: n.t() * 2.0 + 1.0, [aten.t.default, aten.mul.Tensor, aten.add.Tensor]),
    "of both operands": (
        lambda x, y, n: torch.maximum(x.t() * 2.0, x.t()),
        [aten.mul.Tensor, aten.maximum.default, aten.t.default],
    ),
    "of one of two operands": (
        lambda x, y, n: x.transpose(0, 1) * 2.0 + y,
        [aten.mul.Tensor, aten.transpose.int, aten.clone.default, aten.add.Tensor, *BACK],
    ),
    "of one of two, twice": (
        lambda x, y, n: (x.t() + y) * (x.t() - y),
        [aten.t.default, aten.clone.default, aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, *BACK],
    ),
    "of another shape": (
        lambda x, y, n: x.t() + y[:, :1],
        [aten.t.default, aten.slice.Tensor, aten.add.Tensor],
    ),
    "of the same shape": (
        lambda x, y, n: x.t().view(4, 3) * 2.0,
        [aten.t.default, aten.view.default, aten.mul.Tensor],
    ),
    "of a total": (lambda x, y, n: x.t().sum(), [aten.sum.default]),
    "of a sum of rows": (lambda x, y, n: x.t().sum(1), [aten.t.default, aten.sum.dim_IntList]),
    "of a product of both": (
        lambda x, y, n: (
            ROUND_TO_STORAGE(x.t() * 1.0, torch.bfloat16).t() @ ROUND_TO_STORAGE(x.t() * 1.0, torch.bfloat16)
        ),
        [aten.mul.Tensor, None, aten.t.default, aten.mm.default],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_given_graph(name: str) -> None:
    """And what is left is what was expected: nothing is computed twice, or copied but where orders meet."""
    function, expected = CASES[name]
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randint(-8, 9, size, generator=draw).float() for size in ((3, 4), (4, 3), ())]
    given = graph_of(function, *inputs)
    before = given.code
    made = in_order_of_memory(given)
    assert given.code == before
    result, wanted = made(*inputs), given(*inputs)
    assert torch.equal(result, wanted)
    (output,) = made.graph.find_nodes(op="output")
    assert output.args[0].meta["val"].stride() == result.stride()
    views = {aten.detach.default}
    assert [
        target if want is not None else None
        for target, want in zip([t for t in targets(made) if t not in views], expected, strict=True)
    ] == expected


#: Operations of a tensor, another of its shape, and a matrix that it can be multiplied with. They are of
#: integers modulo 2**64, which have the same sum in every order.
OPERATIONS: list[Callable[[Tensor, Tensor, Tensor | None, float], Tensor]] = [
    lambda x, y, right, share: x.transpose(-1, -2) if x.dim() > 1 else -x,
    lambda x, y, right, share: x.permute(2, 0, 1) if x.dim() == 3 else x[..., None],
    lambda x, y, right, share: x.reshape(reshaped(x, share), -1),
    lambda x, y, right, share: x.flatten(),
    lambda x, y, right, share: x + y,
    lambda x, y, right, share: x * y,
    lambda x, y, right, share: x * 5,
    lambda x, y, right, share: x.abs() if right is None else x @ right,
    lambda x, y, right, share: x @ x.t() if x.dim() == 2 else x.abs(),
    lambda x, y, right, share: x * (x.abs().sum(-1, keepdim=True) + 1) if x.dim() > 1 else x.abs(),
    lambda x, y, right, share: x.clone(),
]


def reshaped(x: Tensor, share: float) -> int:
    """Return one of the numbers of rows that a tensor can be viewed with."""
    sizes = [size for size in range(1, x.numel() + 1) if x.numel() % size == 0]
    return sizes[int(share * len(sizes))]


def drawn_function(draw: random.Random) -> Callable[..., list[Tensor]]:
    """Return a function of tensors that views, moves, multiplies and adds them, in a drawn order."""
    weights = [4, 1, 3, *[1] * (len(OPERATIONS) - 3)]
    operations = draw.choices(OPERATIONS, weights, k=draw.randint(3, 10))
    plan = [(operation, draw.random(), draw.random()) for operation in operations]

    def function(*inputs: Tensor) -> list[Tensor]:
        values = list(inputs)
        for operation, first, share in plan:
            x = values[int(first * len(values))]
            of_shape = [each for each in values if each.shape == x.shape]
            right = [each for each in values if each.dim() == 2 == x.dim() and len(each) == x.shape[1]]
            values.append(
                operation(
                    x,
                    of_shape[int(share * len(of_shape))],
                    right[int(share * len(right))] if right else None,
                    share,
                )
            )
        return [values[-1] * 3, values[-2].clone()]

    return function


class Checked(Interpreter):
    """Interpreter that compares the strides of each result with those that the graph promises."""

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            assert strides(result) == strides(n.meta["val"]), n.format_node()
        return result


def strides(tensor: Tensor) -> list[int]:
    """Return the strides that count: those of dimensions of more than one element."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def test_drawn_functions_keep_their_values_and_the_promised_order_of_results() -> None:
    for seed in (*range(60), 190):  # 190: a view that leaves the shape of a transposed matrix as it is
        numbers = torch.Generator().manual_seed(seed)
        shapes = ((6, 4), (4, 6), (3, 2, 4), (4, 4), (5,))
        inputs = [torch.randint(-3, 4, shape, generator=numbers) for shape in shapes]
        traced = make_fx(
            drawn_function(random.Random(seed)),
            tracing_mode="fake",
            decomposition_table=functional_decompositions(),
        )
        given = traced(*inputs)
        found = Checked(in_order_of_memory(given)).run(*inputs)
        for result, expected in zip(found, given(*inputs), strict=True):
            assert torch.equal(result, expected), seed
            assert strides(result) == strides(expected), seed


def test_a_transposed_value_is_viewed_in_another_shape() -> None:
    """A convolution's weight, orthogonalized as a tall matrix."""
    function: Callable[[Tensor], Tensor] = lambda w: (w.view(6, 4).t() * 2.0).reshape(3, 2, 2, 2).flatten(1)  # noqa: E731
    w = torch.arange(24.0).view(6, 2, 2)
    made = in_order_of_memory(graph_of(function, w))
    assert torch.equal(made(w), function(w))


def test_a_value_in_another_order_than_promised_is_copied_before_a_view() -> None:
    """Eager torch's sum is in the order of ``x.t()``, so that its transpose is a flat vector in memory."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        return (x.t() + y).t().view(-1) * 2.0

    x, y = torch.arange(12.0).view(3, 4), torch.arange(12.0).view(4, 3)
    made = in_order_of_memory(graph_of(function, x, y))
    assert torch.equal(made(x, y), function(x, y))


def test_what_depends_on_the_place_in_memory_is_not_moved() -> None:
    gm = graph_of(lambda x, turns: PHASES(x.t(), turns), torch.ones(3, 4), torch.tensor(7).int())
    assert in_order_of_memory(gm).graph.find_nodes(op="call_function", target=aten.t.default)


def test_symbolic_numbers_have_no_order_in_memory() -> None:
    """The optional pass failed at operations on them, and was left out (SCION counts its steps)."""
    function: Callable[[Tensor], Tensor] = lambda x: x.t() * (x.shape[0] + 1)  # noqa: E731
    x = torch.arange(24.0).view(6, 4)
    given = make_fx(function, tracing_mode="symbolic")(x)
    assert torch.equal(in_order_of_memory(given)(x), function(x))


def test_a_graph_without_transposes_is_left_alone() -> None:
    gm = graph_of(lambda x: x * 2.0, torch.ones(3))
    assert in_order_of_memory(gm) is gm


def test_products_are_written_where_they_are_stored() -> None:
    def function(x: Tensor, square: Tensor, cube: Tensor, copied: Tensor) -> None:
        product = x @ x.t()
        square.copy_(product)
        cube.copy_(product @ product)
        copied.copy_(x.t())

    x = torch.randint(-8, 9, (3, 4)).float()
    outputs = [torch.full(size, torch.nan) for size in ((3, 3), (3, 3), (4, 3))]
    gm = graph_of(function, x, *outputs)
    call = called_products(gm)
    call([x, *outputs])
    product = x @ x.t()
    for found, expected in zip(outputs, (product, product @ product, x.t()), strict=True):
        assert torch.equal(found, expected)
    assert [target for target in targets(gm) if target not in TRANSPOSES] == [
        aten.mm.out,
        aten.mm.out,
        aten.copy_.default,
    ]


def test_a_product_that_is_stored_into_its_operand_is_not_written_there_before() -> None:
    gm = graph_of(lambda x: x.copy_(x @ x), torch.ones(3, 3))
    gm.graph.find_nodes(op="output")[0].args = ((),)
    call = called_products(gm)
    x = torch.randint(-8, 9, (3, 3)).float()
    expected = x @ x
    call([x])
    assert torch.equal(x, expected)


def test_other_arithmetic_is_left_to_inductor() -> None:
    x = [torch.ones(3, 3)]
    assert has_products_alone(rule_for(lambda x: x @ x.t(), x))
    assert not has_products_alone(rule_for(lambda x: x @ x + 1.0, x))
