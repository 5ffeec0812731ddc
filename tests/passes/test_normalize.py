"""Composite updates become elementary operations, with the same value in exact arithmetic."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch.torch_version import TorchVersion

from collage_fx.composites import COMPOSITES
from collage_fx.graph import graph_text
from collage_fx.passes.normalize import Normalize
from tests.support.programs import captured, only


def _operations(step: Callable[..., Any], symbols: str) -> str:
    graph = only(captured(step, symbols, dtypes=torch.float32), Normalize()).gm.graph
    return "\n".join(line for line in graph_text(graph).splitlines() if "# normalize" in line)


composite = pytest.mark.skipif(
    torch.__version__ < TorchVersion("2.12"),
    reason="torch 2.11's AOTAutograd decomposes addcdiv and lerp before any pass sees them",
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


@composite
def test_lerp_keeps_the_slope_of_the_old_value_visible() -> None:
    assert_expected_inline(
        _operations(lambda m, g: m.lerp_(g, 0.25), "m g"),
        """\
mul: float32[4] = mul(sub, 0.25)  # normalize
add_1: float32[4] = add(m, mul)  # normalize""",
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


def test_what_is_elementary_already_is_left_alone() -> None:
    assert _operations(lambda p, g: p.mul_(0.5).add_(g), "p g") == ""
    assert torch.ops.aten.add in COMPOSITES
