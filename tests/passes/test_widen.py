"""Low-precision arithmetic carried in float32, and what has to keep its dtype."""

from collections.abc import Callable

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from collage_fx.graph.nodes import graph_text
from tests.support.programs import after, captured, moving_average


def test_moving_average() -> None:
    program = after(captured(moving_average, "m g", strategy="light"), "widen")
    assert_expected_inline(
        graph_text(program.gm.graph),
        """\
m: bfloat16[4] = input()
g: bfloat16[4] = input()
to_float32: float32[4] = convert_element_type(m, float32)  # widen
mul_1: float32[4] = mul(to_float32, 0.5)  # widen
to_float32_1: float32[4] = convert_element_type(g, float32)  # widen
add_1: float32[4] = add(mul_1, to_float32_1)  # widen
to_bfloat16: bfloat16[4] = convert_element_type(add_1, bfloat16)  # widen
copy_: bfloat16[4] = copy_(m, to_bfloat16)
return None""",
    )


def test_explicit_casts_and_constants_follow() -> None:
    def step(m: Tensor, g: Tensor) -> None:
        m.mul_(0.5).add_((g.float() * 0.3).to(torch.bfloat16) + torch.full_like(m, 0.1))

    program = after(captured(step, "m g", strategy="light"), "widen")
    dtypes = [node.meta["val"].dtype for node in program.gm.graph.nodes if node.op == "call_function"]
    assert set(dtypes[:-2]) == {torch.float32}, graph_text(program.gm.graph)
    m, g = torch.zeros(4, dtype=torch.bfloat16), torch.ones(4, dtype=torch.bfloat16)
    program.gm(m, g)
    assert m[0] == torch.tensor(0.4, dtype=torch.bfloat16)  # bf16(0.3) + bf16(0.1) would round three times


def test_matrix_products_keep_the_storage_dtype() -> None:
    def step(p: Tensor, g: Tensor) -> None:
        p.add_((g * 0.5) @ g)

    assert dtypes_of_products(step, "p g") == [torch.bfloat16]


def dtypes_of_products(step: Callable[..., None], symbols: str) -> list[torch.dtype]:
    program = after(captured(step, symbols, shape=(4, 4)), "widen")
    products = [node for node in program.gm.graph.nodes if node.target is torch.ops.aten.mm.default]
    dtypes = [product.meta["val"].dtype for product in products]
    assert dtypes == [arg.meta["val"].dtype for product in products for arg in product.args[:1]]
    return dtypes


def test_products_of_state_without_a_bound_are_computed_in_float32() -> None:
    def preconditioned(p: Tensor, g: Tensor, c: Tensor, inverse: Tensor) -> None:
        c.add_(g @ g.t())
        root = c / c.norm()
        inverse.copy_(root @ (2 * root - root @ root))
        p.sub_(g @ inverse)

    assert dtypes_of_products(preconditioned, "p g c inverse") == [torch.float32] * 4


def test_products_inside_an_overwritten_state_are_computed_in_float32() -> None:
    """A sum of products is only as exact as its last addend; an inverse root enlarges each rounding."""

    def overwritten(p: Tensor, g: Tensor, inverse: Tensor) -> None:
        inverse.copy_((g @ g.t()) @ g)
        p.sub_(g)

    def added(p: Tensor, g: Tensor, c: Tensor) -> None:
        c.add_((g @ g.t()) @ g)
        p.sub_(g)

    assert dtypes_of_products(overwritten, "p g inverse") == [torch.float32] * 2
    assert dtypes_of_products(added, "p g c") == [torch.bfloat16, torch.float32]


def test_products_of_a_moment_keep_the_storage_dtype() -> None:
    """Muon: its iterations start from the momentum."""

    def orthogonalized(p: Tensor, g: Tensor, m: Tensor) -> None:
        m.mul_(0.95).add_(g)
        x = m / m.norm()
        for _ in range(2):
            x = 1.5 * x - 0.5 * (x @ x.t()) @ x
        p.sub_(x)

    assert dtypes_of_products(orthogonalized, "p g m") == [torch.bfloat16] * 4


def test_comparisons_and_wider_tensors() -> None:
    def step(m: Tensor, x: Tensor, g: Tensor) -> None:
        m.copy_(torch.where(m > g, m, g))
        x.add_(m)

    program = after(
        captured(step, "m x g", dtypes=[torch.bfloat16, torch.float32, torch.bfloat16], strategy="light"),
        "widen",
    )
    m, x = torch.tensor([1.0, 2, 3, 4], dtype=torch.bfloat16), torch.zeros(4)
    program.gm(m, x, torch.full((4,), 2.5, dtype=torch.bfloat16))
    assert m.tolist() == x.tolist() == [2.5, 2.5, 3, 4]


def test_what_is_chosen_is_compared_with_unrounded_values() -> None:
    """A threshold that were rounded, up in this case, would choose nothing of what it was found in."""

    def step(m: Tensor, g: Tensor) -> None:
        v = g * 0.3
        m.copy_(torch.where(v >= v.topk(2).values.min(), 1.0, 0.0))

    program = after(captured(step, "m g", strategy="light"), "widen")
    m, g = torch.zeros(4, dtype=torch.bfloat16), torch.tensor([1, 2, 0.25, 0.5], dtype=torch.bfloat16)
    assert (g * 0.3)[0].item() > 0.3
    program.gm(m, g)
    assert m.tolist() == [1, 1, 0, 0]


def test_the_next_number_is_one_of_the_storage_format() -> None:
    def step(m: Tensor, g: Tensor) -> None:
        m.mul_(0.5).add_(torch.nextafter(g, 2 * g) - g)

    program = after(captured(step, "m g", strategy="light"), "widen")
    m, g = torch.zeros(4, dtype=torch.bfloat16), torch.ones(4, dtype=torch.bfloat16)
    program.gm(m, g)
    assert m.tolist() == [torch.finfo(torch.bfloat16).eps] * 4
