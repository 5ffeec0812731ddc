"""State tensors, their recurrences and the strategies' choices, found from the graph alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from collage_fx.choices import Strategy
from collage_fx.graph.program import Kind, StateTensor
from tests.support.programs import after, captured


def _state(step: Callable[..., Any], symbols: str, name: str, **options: Any) -> StateTensor:
    program = after(captured(step, symbols, **options), "analyze")
    (state,) = [state for state in program.states if state.info.symbol == name]
    return state


def _adam(beta1: float, beta2: float) -> Callable[..., None]:
    def step(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
        p.mul_(1 - 1e-3 * 0.1)
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        p.addcdiv_(m, v.sqrt().add_(1e-8), value=-1e-3)

    return step


def test_recurrences_read_as_one_writes_them() -> None:
    program = after(captured(_adam(0.9, 0.999), "p g m v"), "analyze")
    text = {s.info.symbol: str(s.recurrence.expression) for s in program.states if s.recurrence}
    assert text["v"] == "0.001*g**2 + 0.999*v"
    assert text["m"] == "0.1*g + 0.9*m"
    assert text["p"] == "-0.001*m'/(sqrt(v') + 1.0e-8) + 0.9999*p"


@pytest.mark.parametrize(
    ("beta2", "lossy"), [(0.9, False), (0.95, True), (0.98, True), (0.99, True), (0.999, True)]
)
def test_bfloat16_moving_averages_are_lossy_from_095(beta2: float, lossy: bool) -> None:
    state = _state(_adam(0.9, beta2), "p g m v", "v")
    assert state.recurrence.kind is Kind.MOVING_AVERAGE
    assert state.verdict.lossy is lossy
    assert float(state.recurrence.slopes[0]) == beta2


@pytest.mark.parametrize(("beta2", "lossy"), [(0.95, False), (0.99, False), (0.995, True), (0.999, True)])
def test_float16_has_three_more_bits(beta2: float, lossy: bool) -> None:
    state = _state(_adam(0.9, beta2), "p g m v", "v", dtypes=torch.float16)
    assert state.verdict.lossy is lossy


@pytest.mark.parametrize(
    ("strategy", "chosen"), [("none", ""), ("light", "p"), ("plus", "p v"), ("full", "p m v")]
)
def test_strategies(strategy: Strategy, chosen: str) -> None:
    program = after(captured(_adam(0.9, 0.999), "p g m v", strategy=strategy), "analyze")
    assert [state.info.symbol for state in program.compensated] == chosen.split()
    assert all(state.selection for state in program.states)


def _max_of_decayed(v: Tensor, g: Tensor) -> None:
    v.copy_(torch.maximum(v * 0.999, g.abs()))


def _square(v: Tensor, g: Tensor) -> None:
    v.copy_(v * v + g)


def _tensor_decay(v: Tensor, g: Tensor, lr: Tensor) -> None:
    v.mul_(1 - lr).add_(g)


def _copy(v: Tensor, g: Tensor) -> None:
    v.copy_(g)


@pytest.mark.parametrize(
    ("step", "symbols", "kind", "lossy"),
    [
        (lambda v, g: v.addcmul_(g, g), "v g", Kind.ACCUMULATION, True),
        (_max_of_decayed, "v g", Kind.MOVING_AVERAGE, True),
        (lambda v, g: v.copy_(torch.maximum(v * 0.5, g)), "v g", Kind.MOVING_AVERAGE, False),
        (_square, "v g", Kind.OTHER, True),
        (_tensor_decay, "v g lr", Kind.MOVING_AVERAGE, True),
        (_copy, "v g", Kind.OVERWRITE, False),
        (lambda v, g: v.mul_(-0.5).add_(g), "v g", Kind.OTHER, False),
        (lambda v, g: v.mul_(1.5).add_(g), "v g", Kind.OTHER, True),
        (lambda v, g: v.div_(2).sub_(g), "v g", Kind.MOVING_AVERAGE, False),
        (lambda v, g: v.copy_(g - v), "v g", Kind.OTHER, True),
        (lambda v, g: v.copy_(torch.where(g > 0, v * 0.5, v + g)), "v g", Kind.OTHER, True),
        (lambda v, g: v.copy_(torch.where(g > 0, v * 0.5, v)), "v g", Kind.MOVING_AVERAGE, False),
        (lambda v, g: v.add_(g).clamp_(-1, 1), "v g", Kind.ACCUMULATION, True),
        (lambda v, g: v.mul_(0.5).add_(g).add_(v, alpha=0.25), "v g", Kind.MOVING_AVERAGE, False),
    ],
)
def test_kinds(step: Callable[..., Any], symbols: str, kind: Kind, lossy: bool) -> None:
    state = _state(step, symbols, "v")
    assert (state.recurrence.kind, state.verdict.lossy) == (kind, lossy), state.verdict.reason


def _trade_places(p: Tensor, g: Tensor, a: Tensor, b: Tensor) -> None:
    a.add_(g)
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept)
    p.sub_(a)


def test_a_value_that_returns_after_two_steps_is_carried() -> None:
    program = after(captured(_trade_places, "p g a b"), "analyze")
    assert [state.info.symbol for state in program.compensated] == ["p", "a", "b"]


def _through_another(p: Tensor, g: Tensor, a: Tensor) -> None:
    new = p - g
    p.copy_(new + (new - a))
    a.copy_(new)


def test_a_value_that_returns_through_another_tensor_is_carried() -> None:
    state = _state(_through_another, "p g a", "p", strategy="light")
    assert state.recurrence.slopes == (2,)
    assert state.compensated


def _within_bounds(v: Tensor, g: Tensor) -> None:
    v.copy_(g.clamp(min=v - 1, max=v + 1))


def test_bounds_are_read_too() -> None:
    state = _state(_within_bounds, "v g", "v")
    assert state.recurrence.kind is Kind.ACCUMULATION


def _weights_elsewhere(p: Tensor, g: Tensor, z: Tensor) -> None:
    z.sub_(g)
    p.copy_(z)


@pytest.mark.parametrize("strategy", ["light", "plus", "full"])
def test_an_overwritten_parameter_is_compensated_with_what_it_is_computed_from(strategy: Strategy) -> None:
    program = after(captured(_weights_elsewhere, "p g z", strategy=strategy), "analyze")
    assert [state.info.symbol for state in program.compensated] == ["p", "z"]


@pytest.mark.parametrize("strategy", ["light", "plus", "full"])
def test_state_that_becomes_the_parameter_is_compensated_like_one(strategy: Strategy) -> None:
    """Lookahead: slow weights move half of the way to the fast ones, which is not lossy for an average."""

    def lookahead(p: Tensor, s: Tensor) -> None:
        s.add_(p - s, alpha=0.5)
        p.copy_(s)

    program = after(captured(lookahead, "p s", strategy=strategy), "analyze")
    assert [state.info.symbol for state in program.compensated] == ["p", "s"]


@pytest.mark.parametrize("strategy", ["light", "plus", "full"])
@pytest.mark.parametrize(
    ("step", "compensated"),
    [
        (lambda p, g, v: g.add_(v), True),
        (lambda p, g, v: g.mul_(0.5), False),
        (lambda p, g, v: g.clamp_(-1, 1), False),
        (lambda p, g, v: g.add_(p, alpha=0.1), False),
        (lambda p, g, v: g.add_(v).mul_(0.5), False),
    ],
    ids=["accumulation", "scaling", "clipping", "weight decay", "accumulation, scaled"],
)
def test_a_gradient_is_state_where_it_accumulates(
    step: Callable[..., Any], compensated: bool, strategy: Strategy
) -> None:
    def whole(p: Tensor, g: Tensor, v: Tensor) -> None:
        step(p, g, v)
        p.sub_(g)

    assert _state(whole, "p g v", "g", strategy=strategy).compensated is compensated


def test_float32_state_is_none_of_our_business() -> None:
    def step(p: Tensor, g: Tensor, v: Tensor) -> None:
        v.mul_(0.999).add_(g.float() ** 2)
        p.sub_(g / v.sqrt())

    program = captured(step, "p g v", dtypes=[torch.bfloat16, torch.bfloat16, torch.float32])
    assert [state.info.symbol for state in after(program, "analyze").states] == ["p"]


def test_existing_error_terms_are_kept_up() -> None:
    program = captured(_adam(0.9, 0.999), "p g m v", strategy="light")
    program.already_compensated = frozenset({2})
    assert [state.info.symbol for state in after(program, "analyze").compensated] == ["p", "m"]


def _dithered(step: Callable[..., Any], symbols: str, name: str, **options: Any) -> StateTensor:
    program = captured(step, symbols, **options)
    program.rounding = "dither"
    (state,) = [state for state in after(program, "analyze").states if state.info.symbol == name]
    return state


@pytest.mark.parametrize(
    ("strategy", "name", "selection"),
    [
        ("light", "v", "light: parameters only; rounded by dither: noise of at most 7.1 %"),
        ("plus", "m", "not lossy; rounded by dither: noise of at most 0.73 %"),
        ("plus", "v", "plus: lossy state; dither would leave noise of at most 7.1 %"),
        ("full", "m", "full: every state tensor; dither would leave noise of at most 0.73 %"),
        ("plus", "p", "plus: every parameter"),
        ("none", "v", "none: plain low precision"),
    ],
)
def test_what_dither_leaves_is_said(strategy: Strategy, name: str, selection: str) -> None:
    state = _dithered(_adam(0.9, 0.999), "p g m v", name, strategy=strategy)
    assert state.selection == selection
    assert (state.chosen_format is not None and state.chosen_format.is_dithered) is ("rounded" in selection)


@pytest.mark.parametrize(
    ("step", "symbols", "noise"),
    [
        (lambda v, g: v.addcmul_(g, g), "v g", "noise that adds up"),
        (_max_of_decayed, "v g", "noise of at most 7.1 %"),
        (lambda v, g: v.copy_(torch.where(g > 0, v * 0.5, v * 0.9)), "v g", "noise of at most 0.73 %"),
        (lambda v, g: v.copy_(torch.where(g > 0, v * 0.5, v + g)), "v g", "noise that adds up"),
        (lambda v, g: v.copy_(g - v), "v g", "noise that adds up"),
        (_tensor_decay, "v g lr", "noise without a known bound"),
    ],
)
def test_noise_is_that_of_the_branch_that_keeps_most(
    step: Callable[..., Any], symbols: str, noise: str
) -> None:
    state = _dithered(step, symbols, "v", strategy="light")
    assert state.selection == f"light: parameters only; rounded by dither: {noise}"


def test_what_is_not_linear_in_the_old_value_is_rounded_to_nearest() -> None:
    """Rprop's error with dithered step sizes is ten times that with plain ones."""
    state = _dithered(_square, "v g", "v", strategy="light")
    assert state.chosen_format is None
    assert state.selection == "light: parameters only"


@pytest.mark.parametrize("is_recorded", [False, True])
def test_state_that_is_overwritten_carries_nothing_but_in_a_recorded_step(is_recorded: bool) -> None:
    """There the new value may be made, in another part, of the old one."""
    program = captured(lambda v, g: v.copy_(g), "v g")
    program.rounding, program.is_recorded = "dither", is_recorded
    (state,) = after(program, "analyze").states
    assert (state.chosen_format is not None) is is_recorded
    assert not state.compensated


def _normalized(p: Tensor, g: Tensor, s: Tensor) -> None:
    p.sub_(g / s)
    s.copy_(g.abs() + 0.1)


def _multiplied(p: Tensor, g: Tensor, s: Tensor) -> None:
    s.copy_(g @ g.t() + 0.1)
    p.sub_(s @ g)


def _kept_for_a_later_step(p: Tensor, g: Tensor, s: Tensor) -> None:
    s.copy_(g / g.norm())
    p.sub_(g)


def _difference_of_moves(p: Tensor, g: Tensor, s: Tensor) -> None:
    move = g / g.norm()
    p.sub_(move - s, alpha=0.1)
    s.copy_(move)


def _statistics(p: Tensor, g: Tensor, s: Tensor) -> None:
    s.lerp_(g @ g.t(), 0.1)
    p.sub_(s @ g)


def _last_gradient(p: Tensor, g: Tensor, s: Tensor) -> None:
    p.sub_(g - s, alpha=0.1)
    s.copy_(g)


def _projected_moment(p: Tensor, g: Tensor, s: Tensor) -> None:
    s.lerp_(g @ g.t(), 0.1)
    p.sub_(g @ (s / (s.abs() + 1e-8)))


@pytest.mark.parametrize("strategy", ["light", "plus", "full"])
@pytest.mark.parametrize(
    ("step", "is_unbounded"),
    [
        (_multiplied, True),
        (_kept_for_a_later_step, True),
        (_difference_of_moves, True),
        (_statistics, True),
        (_normalized, False),
        (_last_gradient, False),
        (_projected_moment, False),
    ],
)
def test_no_known_bound_is_a_reason_for_error_terms(
    step: Callable[..., Any], is_unbounded: bool, strategy: Strategy
) -> None:
    state = _state(step, "p g s", "s", strategy=strategy, shape=(4, 4))
    assert state.compensated is (is_unbounded or strategy == "full")
    assert ("no bound is known" in state.selection) is is_unbounded


def _computed_from(p: Tensor, p0: Tensor, v: Tensor, g: Tensor) -> None:
    v.mul_(0.999).add_(g, alpha=0.001)
    p.copy_(p0 - 4 * v)


def test_a_lossy_average_that_a_parameter_is_computed_from_is_compensated() -> None:
    program = after(captured(_computed_from, "p p0 v g", strategy="light"), "analyze")
    assert [state.info.symbol for state in program.compensated] == ["p", "v"]
    (state,) = (state for state in program.states if state.info.symbol == "v")
    assert state.selection == "light: a parameter is overwritten with a value computed from it"


def _pulled_to_an_average(p: Tensor, g: Tensor, s: Tensor) -> None:
    p.sub_(g, alpha=1e-4)
    s.lerp_(p, 0.5)
    p.add_(p - s, alpha=-0.1)


def _by_the_last_move(p: Tensor, g: Tensor, s: Tensor) -> None:
    move = p - s
    s.copy_(p)
    p.add_(move, alpha=0.9).sub_(g, alpha=1e-4)


def _by_the_direction_of_the_last_move(p: Tensor, g: Tensor, s: Tensor) -> None:
    move = p - s
    s.copy_(p)
    p.sub_(g + move / (move.norm() + 1e-8), alpha=1e-4)


def _towards_slow_weights(p: Tensor, g: Tensor, s: Tensor) -> None:
    s.add_(p - s, alpha=0.5)
    p.copy_(0.5 * p + 0.5 * s - 1e-4 * g)


def _by_a_rate_of_a_list(p: Tensor, g: Tensor, s: Tensor, lr: Tensor) -> None:
    """The rates of all parameters are one tensor, as in LaProp of pytorch-optimizer."""
    rate, _ = torch.stack([lr, lr / 2]).unbind()
    s.mul_(1 - rate).add_(rate * p)
    p.sub_(rate * (p - s)).sub_(g, alpha=1e-4)


def _by_a_rate_that_changes(p: Tensor, g: Tensor, s: Tensor, lr: Tensor) -> None:
    s.mul_(1 - lr).add_(lr * p)
    p.sub_(lr * (p - s)).sub_(g, alpha=1e-4)


def _a_moment_of_the_distance(p: Tensor, g: Tensor, s: Tensor, m: Tensor) -> None:
    m.mul_(0.9).add_(g + 0.1 * (p - s))
    p.sub_(m, alpha=1e-2)
    s.lerp_(p, 0.5)


def _a_decaying_iterate(p: Tensor, g: Tensor, s: Tensor) -> None:
    s.mul_(0.9999).sub_(g, alpha=1e-4)
    p.lerp_(s, 0.1)


@pytest.mark.parametrize("arithmetic", ["wide", "native"])
@pytest.mark.parametrize("strategy", ["light", "plus"])
@pytest.mark.parametrize(
    ("step", "symbols"),
    [
        (_pulled_to_an_average, "p g s"),
        (_by_the_last_move, "p g s"),
        (_by_the_direction_of_the_last_move, "p g s"),
        (_towards_slow_weights, "p g s"),
        (_by_a_rate_of_a_list, "p g s lr"),
        (_by_a_rate_that_changes, "p g s lr"),
        (_a_moment_of_the_distance, "p g s m"),
        (_a_decaying_iterate, "p g s"),
    ],
)
def test_state_that_an_update_is_a_small_difference_of_is_compensated(
    step: Callable[..., Any], symbols: str, strategy: Strategy, arithmetic: Any
) -> None:
    """Though its recurrence loses little of it: decays of 0.5 are not lossy."""
    state = _state(step, symbols, "s", strategy=strategy, arithmetic=arithmetic)
    assert state.compensated
    assert state.amplification * 2.0**-8 > 1


def _weight_decay_in_a_moment(p: Tensor, g: Tensor, s: Tensor) -> None:
    s.mul_(0.9).add_(g + 0.1 * p)
    p.sub_(s, alpha=1e-3)


def _nesterov_with_weight_decay(p: Tensor, g: Tensor, s: Tensor) -> None:
    g = g + 0.1 * p
    s.mul_(0.9).add_(g)
    p.sub_(g + 0.9 * s, alpha=1e-3)


def _differences_of_gradients(p: Tensor, g: Tensor, s: Tensor) -> None:
    g = g + 0.01 * p
    p.sub_((g + 0.5 * (g - s)).sign(), alpha=1e-4)
    s.copy_(g)


@pytest.mark.parametrize(
    "step",
    [
        _weight_decay_in_a_moment,
        _nesterov_with_weight_decay,
        _differences_of_gradients,
    ],
)
def test_state_that_no_update_is_a_small_difference_of_is_not(step: Callable[..., Any]) -> None:
    state = _state(step, "p g s", "s", strategy="light")
    assert not state.compensated
    assert state.amplification <= 1


def test_the_last_parameter_is_a_copy_of_what_has_error_terms() -> None:
    """``normalize`` writes the old value, which the store of the new one would overwrite, negated twice."""

    def step(p: Tensor, g: Tensor, s: Tensor) -> None:
        s.copy_(p)
        p.sub_(g, alpha=1e-4)

    state = _state(step, "p g s", "s", strategy="light")
    assert state.selection == "light: made of weights, which move by less than its last bit"


def _average_that_is_not_read(p: Tensor, g: Tensor, s: Tensor) -> None:
    p.sub_(g, alpha=1e-4)
    s.lerp_(p, 0.5)


def _average_of_an_average(p: Tensor, g: Tensor, a: Tensor, s: Tensor) -> None:
    p.sub_(g, alpha=1e-4)
    a.lerp_(p, 0.5)
    s.copy_(0.5 * s + 0.5 * a)


def _sum_of_weights(p: Tensor, g: Tensor, s: Tensor) -> None:
    p.sub_(g, alpha=1e-4)
    s.add_(p)


def _mean_of_three(p: Tensor, x: Tensor, y: Tensor, s: Tensor) -> None:
    s.copy_((p + x + y) / 3)


def _of_a_plain_tensor(s: Tensor, x: Tensor) -> None:
    s.lerp_(x.detach().clone() * 0.999, 0.9)


def _of_a_sum(x: Tensor, y: Tensor, s: Tensor) -> None:
    """A step on plain tensors: x sums what y moves it by."""
    x.sub_(y, alpha=1e-4)
    s.lerp_(x, 0.5)


@pytest.mark.parametrize("strategy", ["light", "plus", "full"])
@pytest.mark.parametrize(
    ("step", "symbols"),
    [
        (_average_that_is_not_read, "p g s"),
        (_average_of_an_average, "p g a s"),
        (_sum_of_weights, "p g s"),
        (_mean_of_three, "p x y s"),
        (_of_a_plain_tensor, "s x"),
        (_of_a_sum, "x y s"),
    ],
)
def test_state_made_of_weights_is_compensated_whatever_its_decay(
    step: Callable[..., Any], symbols: str, strategy: Strategy
) -> None:
    assert _state(step, symbols, "s", strategy=strategy).compensated


def _momentum_of_plain_tensors(x: Tensor, y: Tensor, s: Tensor) -> None:
    s.lerp_(y, 0.1)
    x.sub_(s, alpha=1e-4)


def _momentum_with_much_weight_decay(p: Tensor, g: Tensor, s: Tensor) -> None:
    s.lerp_(g + 0.5 * p, 0.1)
    p.sub_(s, alpha=1e-4)


@pytest.mark.parametrize(
    ("step", "symbols"),
    [(_momentum_of_plain_tensors, "x y s"), (_momentum_with_much_weight_decay, "p g s")],
)
def test_a_moment_is_told_from_an_average_of_weights(step: Callable[..., Any], symbols: str) -> None:
    assert not _state(step, symbols, "s").compensated
