"""Composite updates become elementary operations, with the same value in exact arithmetic."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.torch_version import TorchVersion

from collage_fx import error_terms
from collage_fx.choices import Arithmetic
from collage_fx.graph import OPERATORS, placeholders
from collage_fx.graph.nodes import graph_text
from collage_fx.graph.program import InputInfo, Role, StepProgram
from collage_fx.numerics.error_formats import ERROR_FORMATS
from collage_fx.passes.normalize import Normalize
from tests.support.programs import after, captured, captured_of, only
from tests.support.training import compiled, parameters, run_steps


def _operations(step: Callable[..., Any], symbols: str) -> str:
    graph = only(captured(step, symbols, dtypes=torch.float32), Normalize()).gm.graph
    return "\n".join(line for line in graph_text(graph).splitlines() if "# normalize" in line)


def _program(step: Callable[[Tensor, Tensor], None], m: Tensor, g: Tensor) -> StepProgram:
    """``step`` after this pass alone, with all that it says kept: no other compiler has seen it."""
    gm = make_fx(step, tracing_mode="fake")(m, g)
    infos = [InputInfo(name, name, Role.STATE) for name in "mg"]
    return only(StepProgram(gm, infos, "plus", "wide", ERROR_FORMATS["mcf"]), Normalize())


composite = pytest.mark.skipif(
    torch.__version__ < TorchVersion("2.12"),
    reason="torch 2.11's AOTAutograd decomposes addcdiv before any pass sees it",
)


@composite
def test_addcdiv() -> None:
    assert_expected_inline(
        _operations(lambda p, m, v: p.addcdiv_(m, v, value=-0.5), "p m v"),
        """\
div: float32[4] = div(m, v)  # normalize
mul: float32[4] = mul(div, -0.5)  # normalize
add: float32[4] = add(p, mul)  # normalize""",
    )


def test_the_summary_counts_what_has_been_opened() -> None:
    def step(p: Tensor, m: Tensor, g: Tensor) -> None:
        p.copy_(torch.addcdiv(p, m, g))
        m.copy_(torch.addmm(m, g, g[:, :1] @ g[:1]))

    gm = make_fx(step, tracing_mode="fake")(*(torch.ones(4, 4).bfloat16() for _ in range(3)))
    infos = [InputInfo(name, name, Role.STATE) for name in "pmg"]
    program = StepProgram(gm, infos, "plus", "wide", ERROR_FORMATS["mcf"])
    assert Normalize().run(program) == "3 composite and 0 foreach operations opened"


def test_a_product_of_a_column_and_a_row_is_elementwise() -> None:
    def step(p: Tensor, x: Tensor, y: Tensor) -> None:
        p.copy_(p - x @ y)

    gm = make_fx(step, tracing_mode="fake")(torch.ones(4, 6), torch.ones(4, 1), torch.ones(1, 6))
    infos = [InputInfo(name, name, Role.STATE) for name in "pxy"]
    program = only(StepProgram(gm, infos, "plus", "wide", ERROR_FORMATS["mcf"]), Normalize())
    assert "mm" not in graph_text(program.gm.graph)
    assert "mul: float32[4, 6] = mul(x_1, y_1)" in graph_text(program.gm.graph)


def test_a_matrix_product_is_added_to_a_tensor_outside_of_its_operator() -> None:
    program = captured(lambda m, g: m.addmm_(g, g.t(), beta=0.5, alpha=2.0), "m g", shape=(4, 4))
    graph = only(program, Normalize()).gm.graph
    made_here = [line for line in graph_text(graph).splitlines() if "# normalize" in line]
    assert_expected_inline(
        "\n".join(made_here),
        """\
mm: bfloat16[4, 4] = mm(g, permute)  # normalize
mul: bfloat16[4, 4] = mul(m, 0.5)  # normalize
mul_1: bfloat16[4, 4] = mul(mm, 2.0)  # normalize
add: bfloat16[4, 4] = add(mul, mul_1)  # normalize""",
    )


def test_a_bias_stays_in_the_operator_of_its_product() -> None:
    bias, g = torch.zeros(3).bfloat16(), torch.zeros(3, 3).bfloat16()
    program = captured_of(lambda bias, g: g.copy_(torch.addmm(bias, g, g)), bias, g)
    assert "addmm" in graph_text(only(program, Normalize()).gm.graph)


#: Sums with a matrix product: the shapes of the sum and of the product's operands.
MATRIX_SUMS = {
    "addmm": ((3, 3), (3, 3), (3, 3)),
    "addmv": ((3,), (3, 3), (3,)),
    "addr": ((3, 3), (3,), (3,)),
    "addbmm": ((3, 3), (2, 3, 3), (2, 3, 3)),
    "baddbmm": ((2, 3, 3), (2, 3, 3), (2, 3, 3)),
}


@pytest.mark.parametrize("alpha", [1, 0.5])
@pytest.mark.parametrize("name", MATRIX_SUMS)
def test_a_beta_of_0_ignores_what_it_multiplies(name: str, alpha: float) -> None:
    """Work buffers come uninitialised. Products of small integers are exact in bfloat16."""
    shape, *operands = MATRIX_SUMS[name]
    a, b = (torch.arange(math.prod(size)).reshape(size).remainder(5).bfloat16() for size in operands)
    add_to = getattr(torch.Tensor, f"{name}_")

    def step(m: Tensor, a: Tensor, b: Tensor) -> None:
        add_to(m, a, b, beta=0, alpha=alpha)

    program = after(captured_of(step, torch.zeros(shape).bfloat16(), a, b, strategy="light"), "hoist-scalars")
    added = placeholders(program.gm.graph)[3:]
    terms = [torch.zeros_like(node.meta["val"], device="cpu") for node in added]
    for content in (1.0, math.nan, math.inf):
        m, wanted = (torch.full(shape, content).bfloat16() for _ in range(2))
        program.gm(m, a, b, *terms)
        step(wanted, a, b)
        assert torch.equal(m, wanted)


@pytest.mark.parametrize("arithmetic", ["wide", "native"])
def test_statistics_that_a_matrix_product_is_added_to_are_kept_in_full(arithmetic: Arithmetic) -> None:
    """Plain bfloat16 stops at 256 times the increment; a pair holds every one of these sums, 4 ... 4000."""
    steps = 1000
    g = torch.ones(4, 4).bfloat16()
    m, lo = torch.zeros(4, 4).bfloat16(), torch.zeros(4, 4).bfloat16()
    program = after(
        captured(lambda m, g: m.addmm_(g, g.t()), "m g", shape=(4, 4), arithmetic=arithmetic), "pin-roundings"
    )
    assert program.states[0].refusal == ""
    for _ in range(steps):
        program.gm(m, g, lo)
    assert (m.double() + lo.double() == 4 * steps).all()


def test_a_branch_on_a_constant_is_taken_while_compiling() -> None:
    """As torch 2.11 decomposes ``lerp``, before Inductor folds any constants."""

    def step(m: Tensor, g: Tensor) -> None:
        weight = torch.full((), 0.25)
        is_near_the_end = weight.abs() >= 0.5
        factor = torch.where(is_near_the_end, weight - 1, weight)
        m.copy_(torch.where(is_near_the_end, g, m) + factor * (g - m))

    program = _program(step, torch.ones(4), torch.ones(4))
    assert_expected_inline(
        graph_text(program.gm.graph),
        """\
m_1: float32[4] = input()
g_1: float32[4] = input()
full_4: float32[] = full([], 0.25, dtype=float32, device=cpu)  # normalize
sub_1: float32[4] = sub(g_1, m_1)
mul: float32[4] = mul(full_4, sub_1)
add: float32[4] = add(m_1, mul)
copy_: float32[4] = copy_(m_1, add)
return None""",
    )


@pytest.mark.parametrize("condition", [False, True])
def test_the_branch_that_is_taken_is_that_of_the_constant(condition: bool) -> None:
    def step(m: Tensor, g: Tensor) -> None:
        m.copy_(torch.where(torch.full((), condition), g, m * 0.5))

    text = graph_text(_program(step, torch.ones(4), torch.ones(4)).gm.graph)
    assert ("copy_(m_1, g_1)" in text) == condition
    assert ("copy_(m_1, mul)" in text) != condition


@pytest.mark.parametrize("moved", [False, True])
def test_a_tensor_of_one_number_is_that_number(moved: bool) -> None:
    """As torch 2.15 decomposes ``_foreach_lerp``, on a GPU behind a copy to it."""

    def step(m: Tensor, g: Tensor) -> None:
        number = torch.tensor(0.25)
        m.copy_(m + (torch.ops.prims.device_put(number, m.device) if moved else number) * (g - m))

    program = _program(step, torch.ones(4), torch.ones(4))
    assert_expected_inline(
        graph_text(program.gm.graph).replace("full_1", "full"),
        """\
m_1: float32[4] = input()
g_1: float32[4] = input()
full: float32[] = full([], 0.25, dtype=float32, device=cpu)  # normalize
sub: float32[4] = sub(g_1, m_1)
mul: float32[4] = mul(full, sub)
add: float32[4] = add(m_1, mul)
copy_: float32[4] = copy_(m_1, add)
return None""",
    )


@pytest.mark.parametrize("foreach", [False, True])
def test_the_decay_of_a_moving_average_is_read_however_it_is_written(foreach: bool) -> None:
    """At 0.9 it is not slow: ``plus`` needs no error terms for it."""
    (p,) = params = parameters(shapes=[(3,)])
    optimizer = torch.optim.Adam(params, foreach=foreach)
    run_steps(compiled(optimizer), params, range(1))
    assert [name for name, state in optimizer.state[p].items() if error_terms(state)] == ["exp_avg_sq"]


def test_a_layout_is_no_part_of_an_update() -> None:
    """What is left of torch 2.11's ``lerp`` of a transposed tensor and a contiguous one."""

    def step(m: Tensor, g: Tensor) -> None:
        m.copy_(torch.ops.prims.copy_strided(m + g, [1, 2]))

    program = _program(step, torch.ones(3, 2).t(), torch.ones(2, 3))
    assert_expected_inline(
        graph_text(program.gm.graph),
        """\
m_1: float32[2, 3] = input()
g_1: float32[2, 3] = input()
add: float32[2, 3] = add(m_1, g_1)
copy_: float32[2, 3] = copy_(m_1, add)
return None""",
    )


def test_foreach_is_unpacked_per_tensor() -> None:
    def step(p: Tensor, m: Tensor, g: Tensor) -> None:
        torch._foreach_mul_([p, m], 0.5)
        torch._foreach_add_([p, m], [g, g], alpha=2)

    assert_expected_inline(
        _operations(step, "p m g"),
        """\
mul: float32[4] = mul(p, 0.5)  # normalize
mul_1: float32[4] = mul(m, 0.5)  # normalize
mul_2: float32[4] = mul(g, 2)  # normalize
add: float32[4] = add(mul, mul_2)  # normalize
mul_3: float32[4] = mul(g, 2)  # normalize
add_1: float32[4] = add(mul_1, mul_3)  # normalize""",
    )


FOREACH_STEPS: dict[str, Callable[[list[Tensor], list[Tensor]], Any]] = {
    "add": lambda x, y: torch._foreach_add(x, y, alpha=3),
    "add scalar": lambda x, y: torch._foreach_add(x, 2.0),
    "add scalars": lambda x, y: torch._foreach_add(x, [2.0, 3.0]),
    "sub": lambda x, y: torch._foreach_sub(x, y),
    "mul": lambda x, y: torch._foreach_mul(x, y),
    "div": lambda x, y: torch._foreach_div(x, y),
    "pow": lambda x, y: torch._foreach_pow(x, 3),
    "pow of a number": lambda x, y: torch._foreach_pow(0.5, x),
    "sqrt": lambda x, y: torch._foreach_sqrt(x),
    "reciprocal": lambda x, y: torch._foreach_reciprocal(x),
    "neg": lambda x, y: torch._foreach_neg(x),
    "sign": lambda x, y: torch._foreach_sign(x),
    "abs": lambda x, y: torch._foreach_abs(x),
    "maximum": lambda x, y: torch._foreach_maximum(x, y),
    "minimum": lambda x, y: torch._foreach_minimum(x, y),
    "clamp_min": lambda x, y: torch._foreach_clamp_min(x, 2.5),
    "clamp_max": lambda x, y: torch._foreach_clamp_max(x, 2.5),
    "lerp": lambda x, y: torch._foreach_lerp(x, y, 0.25),
    "lerp lists": lambda x, y: torch._foreach_lerp(x, y, y),
    "addcmul": lambda x, y: torch._foreach_addcmul(x, y, y, value=0.5),
    "addcmul scalars": lambda x, y: torch._foreach_addcmul(x, y, y, [0.5, 0.25]),
    "addcdiv": lambda x, y: torch._foreach_addcdiv(x, y, y, value=0.5),
    "norm": lambda x, y: torch._foreach_norm(x),
    "zero": lambda x, y: torch._foreach_zero(x) if hasattr(torch, "_foreach_zero") else [0 * t for t in x],
}


COEFFICIENTS_IN_A_TENSOR = {("Tensor", "addcdiv"), ("Tensor", "addcmul")}
MATRIX_PRODUCT = "aten::_foreach_mm"


@pytest.mark.parametrize("name", FOREACH_STEPS)
def test_foreach_rules_compute_what_torch_computes(name: str) -> None:
    def step(a: Tensor, b: Tensor, x: Tensor, y: Tensor) -> None:
        first, second = FOREACH_STEPS[name]([x, y], [y, x])
        a.copy_(first.expand(a.shape))
        b.copy_(second.expand(b.shape))

    program = only(captured(step, "a b x y", dtypes=torch.float64), Normalize())
    targets = [str(node.target) for node in program.gm.graph.nodes]
    assert not any("_foreach_" in target for target in targets)
    x, y = (
        torch.tensor([1.0, 2, 3, 4], dtype=torch.float64),
        torch.tensor([5.0, 6, 7, 8], dtype=torch.float64),
    )
    got = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    program.gm(*got, x, y)
    expected = FOREACH_STEPS[name]([x, y], [y, x])
    for mine, torchs in zip(got, expected, strict=True):
        # Each rule has at most four operations, each with a relative error of 2**-53; so has torch's kernel.
        torch.testing.assert_close(mine, torchs.expand(4), rtol=8 * 2**-53, atol=0)


FOREACH_OVERLOADS = [
    getattr(getattr(torch.ops.aten, name), overload)
    for name in sorted(dir(torch))
    if name.startswith("_foreach_")
    for overload in getattr(torch.ops.aten, name).overloads()
    # torch's own fake tensors refuse coefficients in a tensor, so that no graph has them.
    if not overload.endswith("out") and (overload, name.strip("_")[8:]) not in COEFFICIENTS_IN_A_TENSOR
]


@pytest.mark.parametrize("operator", FOREACH_OVERLOADS, ids=str)
def test_every_foreach_operator_is_unpacked(operator: Any) -> None:
    """All there are, in place or not, on tensors of different shapes."""
    shapes = ((3, 3), (3, 3)) if operator._schema.name == MATRIX_PRODUCT else ((3, 4), (5,))

    def step(a: Tensor, b: Tensor, *operands: Tensor) -> None:
        xs = [x.clone() for x in operands[:2]]
        results = operator(*_operands(operator, xs, operands[2:4], operands[4]))
        for destination, result in zip((a, b), xs if results is None else results, strict=True):
            destination.copy_(result.expand(destination.shape))

    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.rand(shape, dtype=torch.float64, generator=generator) / 2 + 0.25 for shape in (*shapes, *shapes)
    ]
    half = torch.tensor(0.5, dtype=torch.float64)
    got, wanted = ([torch.zeros(shape, dtype=torch.float64) for shape in shapes] for _ in range(2))
    step(*wanted, *tensors, half)
    program = only(captured_of(step, *got, *tensors, half), Normalize())
    assert not any("_foreach_" in str(node.target) for node in program.gm.graph.nodes)
    program.gm(*got, *tensors, half)
    for mine, torchs in zip(got, wanted, strict=True):
        # Each rule has at most four operations, each with a relative error of 2**-53 (sums of up to 12:
        # 2**-50); so has torch's kernel.
        torch.testing.assert_close(mine, torchs, rtol=8 * 2**-50, atol=0)


def _operands(operator: Any, xs: Sequence[Tensor], ys: Sequence[Tensor], number: Tensor) -> list[Any]:
    """One for each argument without default: the first list, then the second, numbers near one half."""
    values: list[Any] = []
    for argument in operator._schema.arguments:
        kind = str(argument.type)
        if kind == "List[Tensor]":
            values.append(list(ys) if any(value is xs for value in values) else xs)
        elif kind.startswith("List"):
            values.append([0.5, 0.25])
        elif kind == "Tensor":
            values.append(number)
        elif not argument.has_default_value():
            values.append(0.5)
    return values


def test_what_is_elementary_already_is_left_alone() -> None:
    assert _operations(lambda p, g: p.mul_(0.5).add_(g), "p g") == ""
    assert OPERATORS["aten.add"].composite
