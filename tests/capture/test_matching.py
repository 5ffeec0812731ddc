"""Recorded steps that make the calls of an earlier step: they are matched, with the bits of recorded ones."""

from __future__ import annotations

import copy
import ctypes
import gc
import random
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx import CollageBackend, full_value, install
from collage_fx.capture.matching import MOST_PATTERNS, Matcher
from collage_fx.capture.recording import RECORDING, Request, record
from collage_fx.torch_compat import storage_of
from tests.state.test_between_steps import calls_of
from tests.support.substitutes import components_compiled, steps_matched
from tests.support.training import Descent, set_gradients

SHAPES = [(4, 3), (4, 3), (7,), (5,), (7,), ()]
STEPS = 12

#: Update of one parameter: takes the parameter, its gradient, its state, the step's number, a rate.
Update = Callable[[Tensor, Tensor, dict[str, Any], int, float], Any]


class Steps(Descent):
    """Its update is drawn, or written in a test."""

    update: Update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["step"] = state.get("step", 0) + 1
                    type(self).update(p, p.grad, state, state["step"], group["lr"])


def recorded(update: Update, **options: Any) -> Steps:
    """Make an optimizer whose steps are recorded from the first on."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    optimizer = made(update)
    install(optimizer, **options)
    record(optimizer, Request(CollageBackend(**options), {}, strict=True), "of the test")
    return optimizer


def made(update: Update) -> Steps:
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator).bfloat16()) for s in SHAPES]
    kind = type("Drawn", (Steps,), {"update": staticmethod(update)})
    return kind([{"params": params[:3]}, {"params": params[3:], "lr": 3e-4}], lr=1e-3)


def params_of(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def train(
    optimizer: Steps,
    steps: Sequence[int],
    *,
    absent: bool = False,
    between: Callable[[int], Any] | None = None,
) -> None:
    for i in steps:
        set_gradients(params_of(optimizer), i)
        if absent and i % 5 in (2, 3):
            for p in params_of(optimizer)[i % 2 :: 3]:
                p.grad = None
        for group in optimizer.param_groups:
            group["lr"] *= 0.9 if i % 4 == 3 else 1.0
        if between is not None:
            between(i)
        optimizer.step()


def results(optimizer: Steps) -> list[Tensor]:
    """All that a run leaves: weights with their error terms, and state."""
    params = params_of(optimizer)
    state = [v for p in params for v in optimizer.state[p].values() if isinstance(v, Tensor)]
    return [*(p.detach().clone() for p in params), *map(full_value, params), *state]


def both_ways(update: Update, *, absent: bool = False, **options: Any) -> int:
    """Compare the bits of matched steps with those of recorded ones; return how many segments matched."""
    ends, matched = [], 0
    for allowed in (True, False):
        optimizer = recorded(update, **options)
        with steps_matched(allowed=allowed) as count:
            train(optimizer, range(STEPS), absent=absent)
        matched = max(matched, count[0])
        assert allowed or not count[0]
        ends.append(results(optimizer))
    for one, other in zip(*ends, strict=True):
        assert torch.equal(one, other)
    return matched


# Steps that are drawn. -------------------------------------------------------------------------------------


def draw(seed: int) -> Update:
    """Draw an update: statements, each of which is one that optimizers have."""
    chosen = random.Random(seed)
    average = chosen.choice(["in place", "new object", "lerp", "foreach", "of a view"])
    scale = chosen.choice(["none", "norm as a tensor", "norm as a number", "branch", "branch with a break"])
    counter = chosen.choice(["number", "tensor", "none"])
    apply = chosen.choice(["add", "data", "addcdiv", "sub_", "foreach", "copy", "through float32", "t"])
    extras = ["none", "print of a value", "scratch", "keeps its update", "noise", "every third", "constants"]
    extra = chosen.choice(extras)

    def moved(g: Tensor, state: dict[str, Any]) -> Tensor:
        if "m" not in state:
            state["m"] = torch.zeros_like(g)
        if average == "in place":
            state["m"].mul_(0.9).add_(g, alpha=0.1)
        elif average == "new object":
            state["m"] = state["m"] * 0.9 + g * 0.1
        elif average == "lerp":
            state["m"].lerp_(g, 0.1)
        elif average == "foreach":
            torch._foreach_mul_([state["m"]], 0.9)
            torch._foreach_add_([state["m"]], [g], alpha=0.1)
        else:
            state["m"].view(-1).mul_(0.9).add_(g.reshape(-1), alpha=0.1)
        return state["m"]

    def update(p: Tensor, g: Tensor, state: dict[str, Any], step: int, lr: float) -> None:
        u = moved(g, state)
        if counter == "number":
            u = u / (1 - 0.9**step)
        elif counter == "tensor":
            state["t"] = state.get("t", torch.zeros(()))
            state["t"] += 1
            u = u / (1 - 0.9 ** state["t"])
        if scale == "norm as a tensor":
            u = u / (u.norm() + 1)
        elif scale == "norm as a number":
            u = u * min(1.0, 2.0 / (float(u.norm()) + 1e-3))
        elif scale == "branch" and bool(g.sum() > 0):
            u = u * 0.5
        elif scale == "branch with a break" and float(g.abs().max()) > 1.5:
            return
        if extra == "print of a value":
            assert u.sum().item() < 1e9
        elif extra == "scratch":
            made_anew = torch.zeros_like(p)
            made_anew.copy_(u)
            u = made_anew
        elif extra == "keeps its update":
            state["last"] = u.clone()
        elif extra == "constants":  # of which one changes
            u = torch.nan_to_num(u, nan=0.1 * step if p.dim() == 1 else 0.1)
        elif extra == "noise":
            u = u + 1e-3 * torch.randn_like(g, dtype=torch.float32).to(g.dtype)
        elif extra == "every third" and step % 3:
            return
        if apply == "add":
            p.add_(u, alpha=-lr)
        elif apply == "data":
            p.data.add_(u, alpha=-lr)
        elif apply == "addcdiv":
            p.addcdiv_(u, u.abs().sqrt().add_(1e-3), value=-lr)
        elif apply == "sub_":
            p.sub_(lr * u)
        elif apply == "foreach":
            torch._foreach_add_([p], [u], alpha=-lr)
        elif apply == "copy":
            p.copy_(p - lr * u)
        elif apply == "through float32":
            p.copy_((p.float() - lr * u.float()).to(p.dtype))
        else:
            p.t().add_(u.t(), alpha=-lr)

    update.__doc__ = f"{average}, {scale}, {counter}, {apply}, {extra}"
    return update


@pytest.mark.rotating
@pytest.mark.parametrize("seed", range(24))
def test_a_matched_step_has_the_bits_of_a_recorded_one(seed: int) -> None:
    options: list[dict[str, Any]] = [
        {},
        {"strategy": "full"},
        {"rounding": "nearest"},
        {"error_format": "byte"},
    ]
    both_ways(draw(seed), absent=seed % 2 == 1, **options[seed % 4])


def test_a_number_that_nothing_needs_is_compiled_once() -> None:
    """A moment is corrected by a number that changes; two of three steps do not apply it."""

    def update(p: Tensor, g: Tensor, state: dict[str, Any], step: int, lr: float) -> None:
        state["m"] = state.get("m", torch.zeros_like(g)).lerp_(g, 0.1)
        u = state["m"] / (1 - 0.9**step)
        u.mul_(1 + 1 / step)
        if step % 3 == 0:
            p.add_(u, alpha=-lr)

    optimizer = recorded(update)
    compiling = []
    with components_compiled() as compiled:
        for i in range(STEPS):
            before = len(compiled)
            train(optimizer, [i])
            compiling += [i] if len(compiled) > before else []
    assert compiling == [0, 1, 2, 5]  # no state, state, the first update, and one with other numbers


def test_an_address_that_nothing_depends_on_ends_no_segment() -> None:
    """As that of a parameter in front of its update, by which heavyball finds its state."""

    def update(p: Tensor, g: Tensor, state: dict[str, Any], step: int, lr: float) -> None:
        state["seen"] = p.data_ptr()
        state["m"] = state.get("m", torch.zeros_like(g)).lerp_(g, 0.1)
        p.add_(state["m"], alpha=-lr)

    assert 0 < both_ways(update) <= STEPS


def test_what_lies_at_an_address_is_up_to_date() -> None:
    def update(p: Tensor, g: Tensor, state: dict[str, Any], step: int, lr: float) -> None:
        state["m"] = state.get("m", torch.zeros_like(g)).lerp_(g, 0.1)
        at = state["m"].data_ptr()
        state["seen"] = ctypes.string_at(at, 2 * g.numel())
        p.add_(state["m"], alpha=-lr)

    optimizer = recorded(update)
    with steps_matched() as count:
        train(optimizer, range(STEPS))
    assert count[0]
    for state in optimizer.state.values():
        assert state["seen"] == state["m"].view(torch.int16).numpy().tobytes()


def test_drawn_steps_are_matched() -> None:
    """The comparison above would hold as well if none of them were."""
    assert sum(both_ways(draw(seed)) > 0 for seed in range(100, 104)) >= 3


def test_a_segment_changes_behind_an_operator_that_is_executed_at_once_by_now() -> None:
    """A number of the operator changes, and cannot be an input of code."""

    def update(p: Tensor, g: Tensor, state: dict[str, Any], step: int, lr: float) -> None:
        p.add_(torch.nan_to_num(g, nan=0.1 * step if p.dim() == 1 else 0.1), alpha=-1e-3)

    both_ways(update)


def test_each_segment_of_a_step_is_matched() -> None:
    """Steps have more segments here than a segment has patterns: a list of values ends a segment."""

    def update(p: Tensor, g: Tensor, state: dict[str, Any], step: int, lr: float) -> None:
        for _ in range(3):
            state["seen"] = g.sum().tolist()
            p.add_(g, alpha=-1e-3)

    optimizer = recorded(update)
    train(optimizer, range(4))
    with steps_matched() as count:
        train(optimizer, [4])
    assert 3 * len(SHAPES) > MOST_PATTERNS
    assert count[0] == 3 * len(SHAPES) + 1


def test_calls_whose_numbers_change_are_matched() -> None:
    """Two of one call among them."""

    def update(p: Tensor, g: Tensor, state: dict[str, Any], step: int, lr: float) -> None:
        u = g.clamp(-1.0 / step, 0.5 + 1.0 / step)
        p.add_(u / (1 - 0.9**step), alpha=-1e-3)

    assert both_ways(update) >= STEPS - 4


def test_calls_of_lists_are_matched() -> None:
    """Also of tensors that earlier calls have had."""

    def update(p: Tensor, g: Tensor, state: dict[str, Any], step: int, lr: float) -> None:
        state["m"] = m = state.get("m", torch.zeros_like(p))
        torch._foreach_mul_([m], 0.9)
        torch._foreach_add_([m], [g], alpha=0.1)
        torch._foreach_add_([p], [m], alpha=-1e-3)

    assert both_ways(update) >= STEPS - 3


def test_components_of_a_matched_segment_are_compiled_as_one() -> None:
    """But for tensors of no dimension that it writes: they belong to no row of a table."""
    optimizer = recorded(momentum)
    train(optimizer, range(6))
    ((pattern,),) = vars(optimizer)[RECORDING]._matcher._patterns.values()
    assert len(pattern.parts) == 2


def test_a_segment_that_ends_within_the_calls_of_another() -> None:
    """Two steps read a value, and the next two make the same calls without it."""

    def update(p: Tensor, g: Tensor, state: dict[str, Any], step: int, lr: float) -> None:
        total = g.sum()
        if step % 4 < 2:
            state["seen"] = total.tolist()
        p.add_(g * total, alpha=-1e-3)

    assert both_ways(update) > STEPS
    assert both_ways(lambda p, g, state, step, lr: update(p, g, state, step + 2, lr)) > STEPS


@pytest.mark.parametrize(
    "scaled",
    [
        lambda u, step: u.clamp(-1.0 / step, 1.0 / step),
        lambda u, step: u.sign() * u.abs().pow(1 + 1 / step),
        lambda u, step: torch.nn.functional.softshrink(u, 0.1 / step),
        lambda u, step: torch.nn.functional.leaky_relu(u, 0.1 / (1 + step % 2)),
        lambda u, step: u * float(step % 3) + u.new_full((), 0.5 / step),
    ],
    ids=["clamp", "pow", "softshrink", "leaky_relu", "new_full"],
)
def test_numbers_that_change_in_operators_that_may_take_constants_alone(scaled: Any) -> None:
    def update(p: Tensor, g: Tensor, state: dict[str, Any], step: int, lr: float) -> None:
        p.add_(scaled(g, step), alpha=-lr)

    both_ways(update)


@pytest.mark.parametrize("kind", ["alpha", "cosine_similarity"])
def test_values_and_numbers_within_a_call_leave_each_segment_matched(kind: str) -> None:
    """Torch asks for the value of a tensor given as ``alpha``, and makes numbers of its own, as in AdamP."""

    def update(p: Tensor, g: Tensor, state: dict[str, Any], step: int, lr: float) -> None:
        if kind == "alpha":
            p.add_(g, alpha=-lr * g.norm())
        elif not torch.cosine_similarity(g.reshape(1, -1), p.reshape(1, -1)) > 2:
            p.add_(g, alpha=-lr)

    optimizer = recorded(update)
    train(optimizer, range(4))
    with steps_matched() as count:
        train(optimizer, [4])
    assert count[0] == 1, "the values that it asks for end no segment"
    both_ways(update)


@pytest.mark.parametrize(
    "scaled",
    [
        lambda g: torch.where(g > 0, g, 0.25),
        lambda g: g * torch.max(g.abs().reshape(1, -1), 1).values.reshape(()),
        lambda g: g * (g.float().reshape(-1) @ g.float().reshape(-1, 1)).reshape(()),
        lambda g: g * torch.matmul(g.float().reshape(-1), g.float().reshape(-1, 1)).reshape(()),
        lambda g: g + 1e-3 * torch.randn_like(g * 2),
        lambda g: g + torch.zeros_like(g * 2),
    ],
    ids=["where", "max", "operator @", "matmul", "randn_like", "zeros_like"],
)
def test_what_torch_does_within_a_call_ends_no_segment(scaled: Callable[[Tensor], Tensor]) -> None:
    """A number as a tensor, several results, a result of another layout, an operand for its layout alone."""

    def update(p: Tensor, g: Tensor, state: dict[str, Any], step: int, lr: float) -> None:
        p.add_(scaled(g).to(p.dtype), alpha=-lr)

    optimizer = recorded(update)
    train(optimizer, range(4))
    with steps_matched() as count:
        train(optimizer, [4])
    assert count[0] == 1
    both_ways(update)


# Changes that have to be seen. -----------------------------------------------------------------------------


def momentum(p: Tensor, g: Tensor, state: dict[str, Any], step: int, lr: float) -> None:
    state["m"] = m = state.get("m", torch.zeros_like(p))
    m.mul_(0.9).add_(g, alpha=0.1)
    p.add_(m, alpha=-lr)


def compared(update: Update, between: Callable[[Steps, int], Any], at_least: int = 1, **options: Any) -> None:
    """Compare runs, between whose steps something happens, matched and recorded."""
    ends = []
    for allowed in (True, False):
        optimizer = recorded(update, **options)
        with steps_matched(allowed=allowed) as count:
            train(optimizer, range(STEPS), between=partial(between, optimizer))
        assert count[0] >= at_least * allowed
        ends.append(results(optimizer))
    for one, other in zip(*ends, strict=True):
        assert torch.equal(one, other)


def set_constant(optimizer: Steps, i: int) -> None:
    if i == 6:
        optimizer.param_groups[0]["lr"] *= (
            0.25  # equal before in both groups' code, and different from here on
        )


def replace_data(optimizer: Steps, i: int) -> None:
    if i == 6:
        for p in params_of(optimizer):
            p.data = p.data.clone()


def replace_state(optimizer: Steps, i: int) -> None:
    if i == 6:
        for p in params_of(optimizer):
            optimizer.state[p]["m"] = optimizer.state[p]["m"].clone()


def load(optimizer: Steps, i: int) -> None:
    if i == 6:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def write(optimizer: Steps, i: int) -> None:
    if i == 6:
        with torch.no_grad():
            params_of(optimizer)[0].mul_(1.5)


def share_a_gradient(optimizer: Steps, i: int) -> None:
    """Two parameters get the same tensor as their gradients, from then on or once."""
    if i in (6, 9):
        params = params_of(optimizer)
        params[1].grad = params[0].grad


def gradients_in_one_buffer(optimizer: Steps, i: int) -> None:
    if i >= 6:
        params = params_of(optimizer)
        flat = torch.cat([p.grad.reshape(-1) for p in params if p.grad is not None])
        for p, piece in zip(params, flat.split([p.numel() for p in params]), strict=True):
            p.grad = piece.view_as(p)


def overlapping_gradients(optimizer: Steps, i: int) -> None:
    if i == 7:
        params = params_of(optimizer)
        params[1].grad = params[0].grad.view(4, 3)  # type: ignore[union-attr]


def transposed_gradients(optimizer: Steps, i: int) -> None:
    if i == 7:
        p = params_of(optimizer)[0]
        assert p.grad is not None
        p.grad = p.grad.t().contiguous().t()


def freeze(optimizer: Steps, i: int) -> None:
    params_of(optimizer)[2].grad = None if i >= 6 else params_of(optimizer)[2].grad


@pytest.mark.rotating
@pytest.mark.filterwarnings("ignore:collage_fx")
@pytest.mark.parametrize(
    "between",
    [
        set_constant, replace_data, replace_state, load, write, share_a_gradient, gradients_in_one_buffer,
        overlapping_gradients, transposed_gradients, freeze,
    ],
    ids=lambda between: between.__name__,
)  # fmt: skip
def test_what_changes_between_two_steps_is_seen(between: Any) -> None:
    """To nearest, as the dither of state that is replaced starts again."""
    compared(momentum, between, rounding="nearest")


def test_another_default_dtype_is_seen() -> None:
    def update(p: Tensor, g: Tensor, state: dict[str, Any], step: int, lr: float) -> None:
        p.add_(g, alpha=-lr)
        state["third"] = (g == g) / 3

    optimizer = recorded(update)
    with steps_matched() as count:
        train(optimizer, range(6))
        assert count[0]
        torch.set_default_dtype(torch.float64)
        try:
            train(optimizer, range(6, 8))
        finally:
            torch.set_default_dtype(torch.float32)
    for state in optimizer.state.values():
        assert state["third"].dtype is torch.float64


def test_sizes_that_change_between_two_steps_are_seen() -> None:
    """The parameter stays the same object; its error terms start again, with a warning."""

    def other_sizes(optimizer: Steps, i: int) -> None:
        if i in (4, 7):
            for p in params_of(optimizer)[2:5]:
                p.data = torch.linspace(1, 2, p.numel() + 3).bfloat16()
                p.grad = torch.linspace(-1, 1, p.numel()).bfloat16()

    def update(p: Tensor, g: Tensor, state: dict[str, Any], step: int, lr: float) -> None:
        p.add_(g, alpha=-lr)

    with pytest.warns(UserWarning, match="has changed its dtype or shape"):
        compared(update, other_sizes)


def test_a_value_that_a_step_keeps_once_is_computed() -> None:
    """A result outlives its segment at one step alone, as only its reference count tells."""
    kept: list[Tensor] = []

    def update(p: Tensor, g: Tensor, state: dict[str, Any], step: int, lr: float) -> None:
        u = g * 0.5
        p.add_(u, alpha=-lr)
        if step == 7:
            kept.append(u)

    optimizer = recorded(update)
    with steps_matched() as count:
        train(optimizer, range(STEPS))
    assert count[0] > 0
    assert [type(each) for each in kept] == [Tensor] * len(SHAPES)
    set_gradients(params_of(optimizer), 6)
    for each, p in zip(kept, params_of(optimizer), strict=True):
        assert p.grad is not None
        assert torch.equal(each, p.grad * 0.5)


def test_a_tensor_in_the_memory_of_a_freed_gradient_is_no_gradient() -> None:
    """A step may free gradients that it has read, and tensors that it makes then may have their addresses."""
    optimizer = recorded(momentum)
    train(optimizer, range(2))
    recording, params = vars(optimizer)[RECORDING], params_of(optimizer)
    set_gradients(params)
    recording._look_at()
    assert recording._kind_of(params[0].grad, False)[0] == "gradient"
    known = {*recording._gradients}
    for p in params:
        p.grad = None
    made = [torch.zeros(()) for _ in range(100)]
    again = [each for each in made if id(each) in known or storage_of(each) in known]
    assert again, "no address has been used again"
    assert {recording._kind_of(each, False)[0] for each in again} == {None}


def test_of_new_gradients_a_matched_step_asks_little() -> None:
    """To ask which facts code depends on takes a multiple of the time."""
    optimizer = recorded(momentum)
    with steps_matched(allowed=True) as count:
        train(optimizer, range(STEPS - 2))
        gc.collect()  # the end of a tensor with error terms is a change, after which the next step asks
        train(optimizer, [STEPS - 2])
        optimizer.zero_grad()
        set_gradients(params_of(optimizer), STEPS)
        before, asked = count[0], calls_of(optimizer.step, Matcher._kind.__code__)
    assert count[0] > before
    assert not asked


def test_gradients_in_one_buffer_leave_each_segment_matched() -> None:
    """A step that reads their ``data``, which has no base, looks for the tensor of the whole buffer."""

    def update(p: Tensor, g: Tensor, state: dict[str, Any], step: int, lr: float) -> None:
        state["seen"] = g.data.norm().item()
        p.add_(g.data, alpha=-lr)

    optimizer = recorded(update)
    between = partial(gradients_in_one_buffer, optimizer)
    train(optimizer, range(6, 12), between=between)
    with steps_matched() as count:
        train(optimizer, [12], between=between)
    assert count[0] == 1


def test_steps_that_branch_in_many_ways_keep_few_patterns() -> None:
    def update(p: Tensor, g: Tensor, state: dict[str, Any], step: int, lr: float) -> None:
        for _ in range(1 + int(g.flatten()[0].item() > 0) + int(g.flatten()[-1].item() > 0)):
            p.add_(g, alpha=-lr)

    optimizer = recorded(update)
    train(optimizer, range(40))
    matcher = vars(optimizer)[RECORDING]._matcher
    assert max(map(len, matcher._patterns.values())) <= 16
    assert len(matcher._patterns) < 100


def test_patterns_die_with_their_optimizer() -> None:
    optimizer = recorded(momentum)
    with steps_matched() as count:
        train(optimizer, range(6))
    assert count[0] > 0
    parameter, state = (weakref.ref(each) for each in (params_of(optimizer)[0], results(optimizer)[-1]))
    del optimizer
    gc.collect()
    assert parameter() is None
    assert state() is None


def test_an_exception_in_a_matched_step_leaves_everything_as_it_was() -> None:
    fails = [False]

    def update(p: Tensor, g: Tensor, state: dict[str, Any], step: int, lr: float) -> None:
        momentum(p, g, state, step, lr)
        if fails[0] and p.dim() == 1:
            raise ValueError("of the test")

    ends = []
    for allowed in (True, False):
        optimizer = recorded(update)
        with steps_matched(allowed=allowed):
            train(optimizer, range(6))
            fails[0] = True
            with pytest.raises(ValueError, match="of the test"):
                train(optimizer, [6])
            fails[0] = False
            train(optimizer, range(7, 10))
        ends.append(results(optimizer))
    for one, other in zip(*ends, strict=True):
        assert torch.equal(one, other)
