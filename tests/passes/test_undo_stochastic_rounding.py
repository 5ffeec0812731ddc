"""Stochastic rounding is recognised in every spelling, and nothing else is taken for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from collage_fx import CollageBackend, full_value
from collage_fx.graph.nodes import graph_text
from collage_fx.passes.normalize import Normalize
from collage_fx.passes.undo_stochastic_rounding import UndoStochasticRounding
from tests.support.programs import after, captured, only
from tests.support.twin import ExactInterpreter

Rounding = Callable[[Tensor], Tensor]

MASK = -65536


def draw(x: Tensor, **options: Any) -> Tensor:
    return torch.randint_like(x, **{"low": 0, "high": 1 << 16, "dtype": torch.int32, **options})


def in_place(x: Tensor) -> Tensor:
    """Stochastic rounding as in pytorch#120376, from where most projects have it."""
    result = draw(x)
    result.add_(x.view(torch.int32))
    result.bitwise_and_(MASK)
    return result.view(torch.float32)


def dithered(x: Tensor) -> Tensor:
    """Stochastic rounding as in heavyball, with its ``dither_steps`` of 2."""
    bits = x.to(torch.float32).view(dtype=torch.int32)
    noise = sum(torch.randint_like(bits, low=0, high=1 << 16) for _ in range(2))
    return (noise + bits - (1 << 15)).bitwise_and(MASK).view(torch.float32).bfloat16()


def chosen(x: Tensor) -> Tensor:
    """Stochastic rounding as in torchao."""
    noise = torch.randint(0, 1 << 16, x.shape, device=x.device, dtype=torch.int32)
    bits = x.view(torch.int32)
    down = bits & 0xFFFF0000
    return torch.where(noise < (bits & 0xFFFF), down + 0x10000, down).view(torch.float32).bfloat16()


def chosen_the_other_way_round(x: Tensor) -> Tensor:
    bits = x.view(torch.int32)
    down = bits & MASK
    return torch.where((bits & 0xFFFF) > draw(x), down + 0x10000, down).view(torch.float32)


def shifted(x: Tensor) -> Tensor:
    noise = torch.randint(1 << 16, x.shape)
    return (((x.view(torch.int32) + noise.int()) >> 16) << 16).view(torch.float32)


def in_int64(x: Tensor) -> Tensor:
    total = x.view(torch.int32).long() + draw(x, dtype=torch.int64)
    return (total & 0xFFFF0000).int().view(torch.float32)


ROUNDINGS: list[Rounding] = [in_place, dithered, chosen, chosen_the_other_way_round, shifted, in_int64]


def step_of(rounding: Rounding) -> Callable[[Tensor, Tensor], None]:
    def step(p: Tensor, g: Tensor) -> None:
        p.copy_(rounding(p.float() - g.float()))

    return step


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=lambda each: each.__name__)
def test_every_spelling_is_undone(rounding: Rounding) -> None:
    """The random numbers go with it: they are a side effect, which nothing else would take away."""
    program = only(captured(step_of(rounding), "p g"), Normalize(), UndoStochasticRounding())
    assert {node.name for node in program.rounded_at_random} == {"p"}
    assert not any("rand" in str(n.target) or "seed" in str(n.target) for n in program.gm.graph.nodes)


def test_what_is_left() -> None:
    program = only(captured(step_of(dithered), "p g"), Normalize(), UndoStochasticRounding())
    assert_expected_inline(
        graph_text(program.gm.graph),
        """\
p: bfloat16[4] = input()
g: bfloat16[4] = input()
convert_element_type: float32[4] = convert_element_type(p, float32)
convert_element_type_1: float32[4] = convert_element_type(g, float32)
sub: float32[4] = sub(convert_element_type, convert_element_type_1)
convert_element_type_2: bfloat16[4] = convert_element_type(sub, bfloat16)
copy_: bfloat16[4] = copy_(p, convert_element_type_2)
return None""",
    )


@pytest.mark.parametrize("arithmetic", ["wide", "native"])
@pytest.mark.parametrize("rounding", ROUNDINGS, ids=lambda each: each.__name__)
def test_the_error_term_keeps_what_the_rounding_dropped(rounding: Rounding, arithmetic: str) -> None:
    """1 + 2^-8 - 2^-13 has 14 bits, which is more than bfloat16's 8 and less than a pair's 16."""
    program = after(captured(step_of(rounding), "p g", arithmetic=arithmetic), "pin-roundings")  # type: ignore[arg-type]
    (state,) = program.states
    assert state.selection == "an error term replaces stochastic rounding"
    assert not state.refusal
    hi, lo = torch.ones(4).bfloat16(), torch.full((4,), 2.0**-8).bfloat16()
    ExactInterpreter(program.gm).run(hi, torch.full((4,), 2.0**-13).bfloat16(), lo)
    assert (hi.double() + lo.double()).tolist() == [1 + 2.0**-8 - 2.0**-13] * 4


@pytest.mark.parametrize("strategy", ["light", "plus", "full"])
def test_state_that_is_rounded_so_gets_an_error_term_under_every_strategy(strategy: Any) -> None:
    """Random rounding kept its average right; without an error term, plain rounding would not."""

    def step(m: Tensor, g: Tensor) -> None:
        m.copy_(in_place(m.float() * 0.5 + g.float()))

    (state,) = after(captured(step, "m g", strategy=strategy), "analyze").states
    assert state.compensated
    (state,) = after(captured(step, "m g", strategy="none"), "analyze").states
    assert not state.compensated


def test_whoever_else_reads_the_rounded_value_reads_the_value() -> None:
    """A residual, say: what the optimizer itself would carry of it is in the error term now."""

    def step(p: Tensor, c: Tensor, g: Tensor) -> None:
        exact = p.float() - g.float() + c.float()
        rounded = in_place(exact)
        p.copy_(rounded)
        c.copy_(exact - rounded)

    program = after(captured(step, "p c g"), "pin-roundings")
    hi, lo, residual = torch.ones(4).bfloat16(), torch.zeros(4).bfloat16(), torch.zeros(4).bfloat16()
    ExactInterpreter(program.gm).run(hi, residual, torch.full((4,), 2.0**-13).bfloat16(), lo)
    assert residual.tolist() == [0] * 4
    assert (hi.double() + lo.double()).tolist() == [1 - 2.0**-13] * 4


# Lookalikes. ------------------------------------------------------------------------------------------------


def another_mask(x: Tensor) -> Tensor:
    return ((x.view(torch.int32) + draw(x)) & -32768).view(torch.float32)


def too_little_noise(x: Tensor) -> Tensor:
    return ((x.view(torch.int32) + draw(x, high=1 << 15)) & MASK).view(torch.float32)


def off_centre(x: Tensor) -> Tensor:
    return ((x.view(torch.int32) + draw(x) - 1) & MASK).view(torch.float32)


def noise_subtracted(x: Tensor) -> Tensor:
    return ((x.view(torch.int32) - draw(x)) & MASK).view(torch.float32)


def the_same_noise_twice(x: Tensor) -> Tensor:
    noise = draw(x)
    return ((x.view(torch.int32) + noise + noise - (1 << 15)) & MASK).view(torch.float32)


def no_noise(x: Tensor) -> Tensor:
    return (x.view(torch.int32) & MASK).view(torch.float32)


def to_nearest(x: Tensor) -> Tensor:
    return ((x.view(torch.int32) + 0x7FFF) & MASK).view(torch.float32)


def two_values(x: Tensor) -> Tensor:
    return ((x.view(torch.int32) + (2 * x).view(torch.int32) + draw(x)) & MASK).view(torch.float32)


def up_by_two(x: Tensor) -> Tensor:
    bits = x.view(torch.int32)
    down = bits & MASK
    return torch.where(draw(x) < (bits & 0xFFFF), down + 0x20000, down).view(torch.float32)


def the_wrong_way(x: Tensor) -> Tensor:
    bits = x.view(torch.int32)
    down = bits & MASK
    return torch.where(draw(x) > (bits & 0xFFFF), down + 0x10000, down).view(torch.float32)


def another_fraction(x: Tensor) -> Tensor:
    bits = x.view(torch.int32)
    down = bits & MASK
    fraction = (2 * x).view(torch.int32) & 0xFFFF
    return torch.where(draw(x) < fraction, down + 0x10000, down).view(torch.float32)


def noise_of_15_bits_and_a_sign(x: Tensor) -> Tensor:
    return ((x.view(torch.int32) + draw(x).to(torch.int16).int()) & MASK).view(torch.float32)


LOOKALIKES: list[Rounding] = [
    another_mask,
    too_little_noise,
    off_centre,
    noise_subtracted,
    the_same_noise_twice,
    no_noise,
    to_nearest,
    two_values,
    up_by_two,
    the_wrong_way,
    another_fraction,
    noise_of_15_bits_and_a_sign,
]


@pytest.mark.parametrize("rounding", LOOKALIKES, ids=lambda each: each.__name__)
def test_a_lookalike_is_left_alone_and_refused(rounding: Rounding) -> None:
    """Its result lies on bfloat16's grid: an error term would be zero for ever, unnoticed."""
    program = after(captured(step_of(rounding), "p g"), "analyze")
    assert not program.rounded_at_random
    (state,) = program.states
    assert state.refusal == "its new value has been rounded by operations on its bits"


def test_bits_that_the_step_looks_at_are_left_alone() -> None:
    """It could find there what has been cut off, and carry it itself."""

    def step(p: Tensor, rest: Tensor, g: Tensor) -> None:
        bits = (p.float() - g.float()).view(torch.int32)
        rounded = (bits + draw(bits)) & MASK
        p.copy_(rounded.view(torch.float32))
        rest.copy_(bits - rounded)

    program = after(
        captured(step, "p rest g", dtypes=(torch.bfloat16, torch.int32, torch.bfloat16)), "analyze"
    )
    assert not program.rounded_at_random
    assert [bool(state.refusal) for state in program.states] == [True]


def test_gradients_and_float16_are_left_alone() -> None:
    """A gradient is made anew for every step, so that it has no error term to keep anything in."""

    def step(p: Tensor, g: Tensor) -> None:
        rounded = in_place(g.float() * 0.5)
        g.copy_(rounded)
        p.sub_(g)

    assert not after(captured(step, "p g"), "analyze").rounded_at_random
    program = after(captured(step_of(in_place), "p g", dtypes=torch.float16), "analyze")
    assert not program.rounded_at_random
    assert [bool(state.refusal) for state in program.states] == [True]


def test_signs_and_other_bits_that_are_set_round_nothing() -> None:
    """What no bit is cut off of keeps its precision."""

    def step(p: Tensor, g: Tensor) -> None:
        p.copy_(((p.float() - g.float()).view(torch.int32) ^ (-1 << 31)).view(torch.float32))

    program = after(captured(step, "p g"), "analyze")
    assert [state.refusal for state in program.states] == [""]


@pytest.mark.parametrize("rounding", [in_place, dithered, chosen], ids=lambda each: each.__name__)
def test_sizes_may_be_symbols(rounding: Rounding) -> None:
    torch._dynamo.reset()
    parameter = torch.nn.Parameter(torch.ones(6, 4, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    m = optimizer.state[parameter]["m"] = torch.randn(6, 4).bfloat16()
    expected = m.double()

    def update(optimizer: torch.optim.Optimizer, m: Tensor, g: Tensor) -> None:
        m.copy_(rounding(m.float() - g.float()))

    compiled = torch.compile(update, backend=CollageBackend(strategy="full"), dynamic=True)
    for _ in range(3):
        g = (torch.randn(6, 4) * 2.0**-10).bfloat16()
        expected -= g.double()
        compiled(optimizer, m, g)
    # Each sum is rounded to float32, up or down: 2**-23 of at most 8.
    assert float((full_value(m).double() - expected).abs().max()) <= 3 * 2.0**-23 * 8
