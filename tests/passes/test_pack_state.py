"""Which state is packed, and in which of its pair of formats: read off the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from collage_fx.graph import InputInfo, Role, StepProgram
from collage_fx.graph.nodes import graph_text
from collage_fx.numerics import PACKED_FORMATS
from tests.support.programs import after, captured

SHAPE = (64, 64)


def packed(
    step: Callable[..., Any], symbols: str, last: str = "pack-state", state: str = "block8", **options: Any
) -> StepProgram:
    program = captured(
        step, symbols, **{"shape": SHAPE, "error_format": "exact", "strategy": "light", **options}
    )
    program.packed, program.takes_float32 = PACKED_FORMATS[state], True
    return after(program, last)


def formats(program: StepProgram) -> dict[str, str]:
    return {
        state.info.symbol: state.error_format.name if state.packed else ""
        for state in program.states
        if state.info.symbol != "p"
    }


def why_not(program: StepProgram, symbol: str) -> str:
    (selection,) = (state.selection for state in program.states if state.info.symbol == symbol)
    return selection.partition("not packed: ")[2]


def adam(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    m.lerp_(g, 0.1)
    v.mul_(0.95).addcmul_(g, g, value=0.05)
    p.addcdiv_(m, v.sqrt().add_(1e-8), value=-1e-3)


def lerped(p: Tensor, g: Tensor, v: Tensor) -> None:
    v.lerp_(g.square(), 0.05)
    p.addcdiv_(g, v.sqrt() + 1e-8, value=-1e-3)


def centered(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    m.lerp_(g, 0.1)
    v.mul_(0.9).addcmul_(g, g, value=0.1)
    p.addcdiv_(g, v.addcmul(m, m, value=-1).sqrt_().add_(1e-8), value=-1e-3)


def amsgrad(p: Tensor, g: Tensor, v: Tensor, largest: Tensor) -> None:
    v.mul_(0.95).addcmul_(g, g, value=0.05)
    torch.maximum(largest, v, out=largest)
    p.addcdiv_(g, largest.sqrt().add_(1e-8), value=-1e-3)


def adamax(p: Tensor, g: Tensor, u: Tensor) -> None:
    u.copy_(torch.maximum(u * 0.999, g.abs() + 1e-8))
    p.addcdiv_(g, u, value=-1e-3)


def with_previous(p: Tensor, g: Tensor, d: Tensor, before: Tensor) -> None:
    d.lerp_(g - before, 0.1)
    before.copy_(g)
    p.sub_(d, alpha=1e-3)


def signed(p: Tensor, g: Tensor, m: Tensor) -> None:
    p.add_(torch.sign(m * 0.9 + g * 0.1), alpha=-1e-3)
    m.lerp_(g, 0.01)


@pytest.mark.parametrize(
    ("step", "symbols", "expected"),
    [
        (adam, "p g m v", {"m": "block8", "v": "block8_positive"}),
        (lerped, "p g v", {"v": "block8_positive"}),
        (centered, "p g m v", {"m": "", "v": ""}),
        (amsgrad, "p g v largest", {"v": "block8_positive", "largest": "block8_positive"}),
        (adamax, "p g u", {"u": "block8_positive"}),
        (with_previous, "p g d before", {"d": "block8", "before": "block8"}),
        (signed, "p g m", {"m": "block8"}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_formats_follow_from_the_recurrence(
    step: Callable[..., Any], symbols: str, expected: dict[str, str], dtype: torch.dtype
) -> None:
    assert formats(packed(step, symbols, dtypes=dtype)) == expected


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        (lambda g: torch.where(g.abs() > 0.1, 1.0, 0.0) * g, "block8"),
        (lambda g: torch.where(g.abs() > 0.1, 0.0, 1.0) * g, "block8"),
        (lambda g: (g.abs() - 0.1).clamp(min=0) * g, "block8"),
        (lambda g: torch.maximum(torch.zeros_like(g), g.abs() - 0.1) * g, "block8"),
        (lambda g: g.abs().clamp(max=-1), "block8"),
        (lambda g: g.abs().clamp(-2, -1), "block8"),
        (lambda g: torch.minimum(g.abs(), g), "block8"),
        (lambda g: g.abs() - g.square(), "block8"),
        (lambda g: torch.where(g.abs() > 0.1, g * g, 0.0), "block8_positive"),
        (lambda g: g.clamp(min=0), "block8_positive"),
        (lambda g: g.abs().clamp(max=2) / (g.abs() + 1), "block8_positive"),
        (lambda g: torch.maximum(g, torch.zeros_like(g)), "block8_positive"),
        (lambda g: torch.minimum(g.abs(), g.square()), "block8_positive"),
    ],
)
def test_a_factor_that_is_zero_for_some_elements_is_not_zero_for_all(
    added: Callable[[Tensor], Tensor], expected: str
) -> None:
    """A threshold or a mask: the gradient of either sign is added where the factor is above zero."""

    def step(p: Tensor, g: Tensor, m: Tensor) -> None:
        m.mul_(0.9).add_(added(g))
        p.sub_(m, alpha=1e-3)

    assert formats(packed(step, "p g m")) == {"m": expected}


def test_a_radicand_that_may_become_negative_is_left_alone() -> None:
    program = packed(centered, "p g m v")
    assert why_not(program, "v") == why_not(program, "m")
    assert "the radicand" in why_not(program, "v")


def test_only_what_a_divisor_is_computed_from_is_left_alone() -> None:
    def step(p: Tensor, g: Tensor, m: Tensor, n: Tensor) -> None:
        m.lerp_(g, 0.1)
        n.lerp_(g, 0.05)
        p.addcdiv_(m, n + 1e-8, value=-1e-3)

    assert formats(packed(step, "p g m n")) == {"m": "block8", "n": ""}


def test_state_without_a_bound_is_left_alone() -> None:
    def step(p: Tensor, g: Tensor, s: Tensor) -> None:
        s.copy_(g @ g.t())
        p.sub_(s @ g, alpha=1e-3)

    program = packed(step, "p g s")
    assert formats(program) == {"s": ""}
    assert why_not(program, "s") == "no bound is known for what its rounding does"


def divided(p: Tensor, g: Tensor, m: Tensor) -> None:
    m.lerp_(g, 0.1)
    p.addcdiv_(g, m + 1e-8, value=-1e-3)


def scaled_by_a_tensor(p: Tensor, g: Tensor, s: Tensor) -> None:
    s.mul_(torch.where(g > 0, 1.2, 0.5))
    p.sub_(torch.sign(g) * s)


def growing(p: Tensor, g: Tensor, m: Tensor) -> None:
    m.mul_(1.01).add_(g)
    p.sub_(m, alpha=1e-3)


def kahan(p: Tensor, g: Tensor, c: Tensor) -> None:
    c.sub_(g, alpha=1e-3)
    old = p.clone()
    p.add_(c)
    c.add_(old - p)


def slow_weights(p: Tensor, g: Tensor, z: Tensor) -> None:
    z.sub_(g, alpha=1e-3)
    p.copy_(z)


def schedule_free(p: Tensor, g: Tensor, z: Tensor) -> None:
    z.sub_(g, alpha=1e-3)
    p.lerp_(z, 0.1)


def average_of_weights(p: Tensor, g: Tensor, a: Tensor) -> None:
    p.sub_(g, alpha=1e-3)
    a.lerp_(p, 0.1)


def average_before_the_last_change(p: Tensor, g: Tensor, a: Tensor) -> None:
    p.sub_(g, alpha=1e-3)
    a.lerp_(p, 0.1)
    p.mul_(0.999)


def pulled_to_an_average(p: Tensor, g: Tensor, a: Tensor) -> None:
    a.lerp_(p, 0.1)
    p.sub_(g + 0.1 * (p - a), alpha=1e-3)


def kept_elements(p: Tensor, g: Tensor, m: Tensor) -> None:
    m.copy_(torch.where(g > 0, m * 0.9 + g * 0.1, m))
    p.sub_(m, alpha=1e-3)


def kept_columns_of_rows(p: Tensor, g: Tensor, m: Tensor) -> None:
    columns = torch.where(g[:1] > 0, m, m * 0.9 + g * 0.1)
    m.copy_(torch.where(g[:, :1] > 0, columns, m))
    p.sub_(m, alpha=1e-3)


def last_weights(p: Tensor, g: Tensor, a: Tensor) -> None:
    move = p - a
    a.copy_(p)
    p.add_(move, alpha=0.9).sub_(g, alpha=1e-3)


@pytest.mark.parametrize(
    ("step", "symbol", "reason"),
    [
        (average_before_the_last_change, "a", "as large as weights"),
        (pulled_to_an_average, "a", "as large as weights"),
        (last_weights, "a", "as large as weights"),
        (divided, "m", "the divisor"),
        (kept_elements, "m", "the step keeps single elements"),
        (kept_columns_of_rows, "m", "the step keeps single elements"),
        (scaled_by_a_tensor, "s", "multiplied by a tensor, or by a number above 1"),
        (growing, "m", "multiplied by a tensor, or by a number above 1"),
        (kahan, "c", "computed from a parameter's new value"),
        (slow_weights, "z", "a parameter is overwritten with it"),
        (schedule_free, "z", "accumulates numbers of either sign"),
        (average_of_weights, "a", "computed from a parameter's new value"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_what_is_left_alone(step: Callable[..., Any], symbol: str, reason: str, dtype: torch.dtype) -> None:
    program = packed(step, f"p g {symbol}", dtypes=dtype)
    assert formats(program) == {symbol: ""}
    assert reason in why_not(program, symbol)


def test_light_compensates_what_moves_as_a_parameter() -> None:
    program = captured(schedule_free, "p g z", strategy="light")
    assert [state.compensated for state in after(program, "analyze").states] == [True, True]
    program = captured(kahan, "p g c", strategy="light")
    assert [state.compensated for state in after(program, "analyze").states] == [True, False]


def test_weight_decay_in_the_gradient_does_not_make_momentum_a_parameter() -> None:
    def step(p: Tensor, g: Tensor, m: Tensor) -> None:
        m.mul_(0.9).add_(g + 0.1 * p)
        p.sub_(m, alpha=1e-3)

    assert formats(packed(step, "p g m")) == {"m": "block8"}


def test_a_divisor_that_may_be_negative_concerns_the_state_in_it_alone() -> None:
    def step(p: Tensor, g: Tensor, m: Tensor, d: Tensor) -> None:
        m.lerp_(g, 0.1)
        d.lerp_(g, 0.1)
        p.addcdiv_(m, d + 1e-8, value=-1e-3)

    program = packed(step, "p g m d")
    assert formats(program) == {"m": "block8", "d": ""}
    assert "the divisor" in why_not(program, "d")


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((32, 64), "fewer than 4096"),
        ((4096,), "no rows"),
        ((64, 65), "multiples of 32"),
        ((2, 0), "fewer than"),
    ],
)
def test_shapes_that_are_left_alone(shape: tuple[int, ...], reason: str) -> None:
    program = packed(adam, "p g m v", shape=shape)
    assert formats(program) == {"m": "", "v": ""}
    assert reason in why_not(program, "m")


def test_packed_state_has_no_error_terms_whatever_the_strategy() -> None:
    for strategy in ("plus", "full"):
        program = packed(adam, "p g m v", strategy=strategy)
        assert formats(program) == {"m": "block8", "v": "block8_positive"}
        assert [state.info.symbol for state in program.compensated] == ["p"]


def test_the_step_neither_reads_nor_writes_a_packed_tensor_itself() -> None:
    program = packed(adam, "p g m v", last="hoist-scalars")
    nodes = {node.name: node for node in program.gm.graph.find_nodes(op="placeholder")}
    assert not nodes["m"].users
    assert not nodes["v"].users
    assert nodes["m"].meta["val"].stride() == (0, 0)
    counts = {name: str(program.gm.graph).count(f"block_{name}") for name in ("values", "codes", "scales")}
    assert counts["values"] >= 2
    assert {state.info.symbol: len(state.auxiliaries) for state in program.states} == {"p": 2, "m": 3, "v": 3}
    assert all(state.start is not None for state in program.states if state.packed)


def test_a_step_that_is_skipped_leaves_all_parts_alone() -> None:
    def step(p: Tensor, g: Tensor, m: Tensor, t: Tensor) -> None:
        m.copy_(torch.where(t > 0, m, m * 0.9 + g * 0.1))
        p.sub_(m, alpha=1e-3)

    program = packed(step, "p g m t", last="hoist-scalars")
    choices = program.gm.graph.find_nodes(op="call_function", target=torch.ops.aten.where.self)
    kept = {choice.args[1] for choice in choices}
    (state,) = (state for state in program.states if state.packed)
    assert set(state.auxiliaries) <= kept


def test_rows_that_are_skipped_keep_all_parts() -> None:
    """Scales have one dimension less than the tensor here."""

    def step(p: Tensor, g: Tensor, m: Tensor) -> None:
        m.copy_(torch.where(g[:, :1, :1] > 0, m, m * 0.9 + g * 0.1))
        p.sub_(m, alpha=1e-3)

    program = packed(step, "p g m", last="hoist-scalars", shape=(64, 4, 32))
    (state,) = (state for state in program.states if state.packed)
    choices = program.gm.graph.find_nodes(op="call_function", target=torch.ops.aten.where.self)
    codes, scales, *_ = state.auxiliaries
    dims = {choice.args[1]: choice.args[0].meta["val"].dim() for choice in choices}
    assert (dims[codes], dims[scales]) == (3, 2)


def test_a_reader_in_the_storage_format_reads_the_decoded_value() -> None:
    def step(p: Tensor, g: Tensor, m: Tensor) -> None:
        m.lerp_(g, 0.1)
        p.sub_(torch.cumsum(m, 0), alpha=1e-3)

    program = packed(step, "p g m", last="hoist-scalars")
    (placeholder,) = (node for node in program.gm.graph.find_nodes(op="placeholder") if node.name == "m")
    assert not placeholder.users


def momentum(p: Tensor, g: Tensor, m: Tensor) -> None:
    m.mul_(0.9).add_(g)
    p.add_(m, alpha=-0.5)


def test_float32_weights_are_stored_as_they_are_beside_packed_state() -> None:
    program = packed(momentum, "p g m", "hoist-scalars", "bf16", dtypes=torch.float32)
    assert_expected_inline(
        graph_text(program.gm.graph),
        """\
p: float32[64, 64] = input()
g: float32[64, 64] = input()
m: float32[64, 64] = input()
m_rounded: bfloat16[64, 64] = input()  # allocate
m_count: int32[] = input()  # allocate
m_start: int32[] = input()  # allocate
to_float32_1: float32[64, 64] = convert_element_type(m_rounded, float32)  # pin-roundings
mul: float32[64, 64] = mul(to_float32_1, 0.9)
add: float32[64, 64] = add(mul, g)
mul_1: float32[64, 64] = mul(add, -0.5)  # normalize
add_2: float32[64, 64] = add(p, mul_1)  # normalize
copy_: float32[64, 64] = copy_(p, add_2)
phase: int32[] = phase(m_count, m_start)  # compensate-wide
once: int32[] = once(phase)  # hoist-scalars
phases: int32[64, 64] = phases(m_rounded, once)  # compensate-wide
dithered: float32[64, 64] = dithered(add, phases, bfloat16)  # compensate-wide
add_3: int32[] = add(m_count, 1)  # compensate-wide
to_bfloat16_1: bfloat16[64, 64] = convert_element_type(dithered, bfloat16)  # pin-roundings
store: bfloat16[64, 64] = copy_(m_rounded, to_bfloat16_1)  # compensate-wide
store_1: int32[] = copy_(m_count, add_3)  # compensate-wide
return None""",
    )


def test_float32_parameters_and_their_state_have_no_error_terms() -> None:
    for strategy in ("light", "plus", "full"):
        program = packed(adam, "p g m v", strategy=strategy, dtypes=torch.float32)
        assert not program.compensated
        assert [state.info.symbol for state in program.states] == ["p", "m", "v"]


def test_float32_state_is_known_by_its_parameter() -> None:
    """float32 state of a bfloat16 parameter is the optimizer's choice; numbers and gradients are no state."""

    def two(p: Tensor, q: Tensor, g: Tensor, h: Tensor, m: Tensor, n: Tensor, t: Tensor) -> None:
        t.add_(1)
        m.mul_(0.9).add_(g.float())
        n.mul_(0.9).add_(h)
        p.sub_(m.to(p.dtype))
        q.sub_(n)

    low, single = torch.bfloat16, torch.float32
    program = captured(
        two, "p q g h m n t", dtypes=[low, single, low, single, single, single], shape=SHAPE, strategy="light"
    )
    roles = [Role.PARAMETER] * 2 + [Role.GRADIENT] * 2 + [Role.STATE] * 3
    names = ["w", "b", "w.grad", "b.grad", "w.m", "b.moments.n", "b.t"]
    program.infos = [InputInfo(name, name, role) for name, role in zip(names, roles, strict=True)]
    program.packed, program.takes_float32 = PACKED_FORMATS["block8"], True
    after(program, "pack-state")
    assert [state.info.name for state in program.states] == ["w", "b", "b.moments.n"]
    assert [state.packed for state in program.states] == [False, False, True]
    program.takes_float32 = False
    assert [state.info.name for state in after(program, "pack-state").states] == ["w"]


def test_bf16_packs_float32_state_alone() -> None:
    program = packed(adam, "p g m v", state="bf16")
    assert formats(program) == {"m": "", "v": ""}
    assert "it has 16 bits" in why_not(program, "m")
    assert formats(packed(adam, "p g m v", state="bf16", dtypes=torch.float32)) == {"m": "bf16", "v": "bf16"}
    assert formats(packed(adam, "p g m v", state="bf16", dtypes=torch.float32, shape=(4096,)))["m"] == "bf16"


def test_float32_state_that_is_converted_is_read_as_it_is() -> None:
    """A reader in float64, as of numbers, gets the decoded value in float64."""

    def step(p: Tensor, g: Tensor, m: Tensor) -> None:
        p.sub_((m.double() * g.double()).float())
        m.mul_(0.5).add_(g)

    program = packed(step, "p g m", "hoist-scalars", dtypes=torch.float32)
    program.gm.graph.lint()
    (state,) = (state for state in program.states if state.packed)
    inputs = program.gm.graph.find_nodes(op="placeholder")
    values = [torch.ones(SHAPE), torch.ones(SHAPE)]
    added = [torch.zeros(node.meta["val"].shape, dtype=node.meta["val"].dtype) for node in inputs[3:]]
    program.gm(*values, torch.full(SHAPE, float("nan")), *added)
    assert torch.equal(values[0], torch.ones(SHAPE))
    assert added[0].any()
    assert len(added) == len(state.added_inputs)
