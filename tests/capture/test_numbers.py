"""Python numbers that change from step to step are inputs: they cost no compilation, and count in full."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, CyclicLR, LRScheduler, OneCycleLR

from collage_fx import CollageBackend, explain, full_value, install
from collage_fx.capture.numbers import scheduled_numbers
from tests.support.training import Descent, differences, everything, parameters, set_gradients

STEPS = 24

#: The first with the number as a constant, the second with it as a symbol; a third where state is born first.
COMPILATIONS = 3


class WithNumbers(Descent):
    """A learning rate and a step counter that are Python numbers, used by ``use(p, g, lr, step)``."""

    def __init__(self, params: Any, lr: float, use: Callable[[Tensor, Tensor, float, int], Any]) -> None:
        super().__init__(params, lr)
        self.use = use

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        group["step"] = group.get("step", 0) + 1
        for p in group["params"]:
            self.use(p, p.grad, group["lr"], group["step"])


def foreach(name: str, *lists: Any, **kwargs: Any) -> None:
    getattr(torch, f"_foreach_{name}_")(*([x] if isinstance(x, Tensor) else x for x in lists), **kwargs)


USES: dict[str, Callable[[Tensor, Tensor, float, int], Any]] = {
    "add alpha": lambda p, g, lr, step: p.add_(g, alpha=-lr),
    "sub alpha": lambda p, g, lr, step: p.sub_(g, alpha=lr),
    "rsub": lambda p, g, lr, step: p.add_(torch.rsub(g * lr, lr, alpha=0.5)),
    "mul": lambda p, g, lr, step: p.mul_(1 - lr),
    "addcmul value": lambda p, g, lr, step: p.addcmul_(g, g, value=-lr),
    "addcdiv value": lambda p, g, lr, step: p.addcdiv_(g, g.abs() + 1, value=-lr),
    "lerp weight": lambda p, g, lr, step: p.lerp_(g, lr),
    "clamp bounds": lambda p, g, lr, step: p.sub_(g.clamp(-lr, lr)),
    "clamp_min": lambda p, g, lr, step: p.sub_(g.clamp(min=lr) * lr),
    "pow of a tensor": lambda p, g, lr, step: p.sub_(lr * (g.abs() + 1) ** lr),
    "pow to a tensor": lambda p, g, lr, step: p.sub_(torch.pow(lr, g.abs() + 1)),
    "full_like": lambda p, g, lr, step: p.sub_(torch.full_like(g, lr)),
    "fill_": lambda p, g, lr, step: p.sub_(torch.empty_like(g).fill_(lr)),
    "full": lambda p, g, lr, step: p.sub_(torch.full((), lr)),
    "masked_fill": lambda p, g, lr, step: p.sub_(g.masked_fill(g > 0, lr) * lr),
    "foreach add": lambda p, g, lr, step: foreach("add", p, g, alpha=-lr),
    "foreach addcdiv list": lambda p, g, lr, step: foreach("addcdiv", p, g, g.abs() + 1, [-lr]),
    "foreach mul": lambda p, g, lr, step: foreach("mul", p, 1 - lr),
    "bias correction": lambda p, g, lr, step: p.sub_(g, alpha=lr / (1 - 0.9**step)),
    "math.pow": lambda p, g, lr, step: p.sub_(g, alpha=lr / (1 - math.pow(0.9, step))),
    "math.sqrt": lambda p, g, lr, step: p.sub_(g, alpha=lr / math.sqrt(step)),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_a_number_in_an_operator(use: Callable[[Tensor, Tensor, float, int], Any]) -> None:
    """Steps at 2**-9 of 2**-8 relative to the parameters: float32's share of the error is 2**-24 a step."""
    (p,) = parameters(shapes=[(5,)])
    (q,) = (p.detach().double().clone().requires_grad_(),)
    backend = CollageBackend()
    start, optimizer, oracle = q.detach().clone(), WithNumbers([p], 1.0, use), WithNumbers([q], 1.0, use)
    step = torch.compile(optimizer.step, backend=backend)
    for i in range(STEPS):
        set_gradients([p], seed=i)
        assert p.grad is not None
        q.grad = p.grad.double()
        for each in (optimizer, oracle):
            each.param_groups[0]["lr"] = 2.0**-9 * (1 + i / STEPS)
        step()
        oracle.step()
    assert len(backend.report().graphs) <= COMPILATIONS
    moved = (q - start).abs().max()
    # Each step rounds the pair once (2**-16 of p) and computes its update in float32.
    error = (full_value(p) - q).abs().max()
    assert error <= STEPS * q.abs().max() * 2.0**-16
    assert error <= moved / 16


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9, weight_decay=0.1, foreach=True),
        lambda params: torch.optim.RMSprop(params, lr=1e-3),
        lambda params: torch.optim.Adafactor(params, lr=1e-3),
    ],
    ids=["SGD foreach", "RMSprop", "Adafactor"],
)
@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: OneCycleLR(
            optimizer, 1e-3, total_steps=STEPS + 1, cycle_momentum="momentum" in optimizer.defaults
        ),
        lambda optimizer: CosineAnnealingWarmRestarts(optimizer, 5),
    ],
    ids=["OneCycle", "warm restarts"],
)
def test_schedulers_on_a_float_learning_rate(
    make: Callable[[list[Tensor]], Optimizer], schedule: Callable[[Optimizer], LRScheduler]
) -> None:
    params = parameters(shapes=[(3, 4)])
    backend = CollageBackend()
    optimizer = make(list(params))
    scheduler = schedule(optimizer)
    step = torch.compile(optimizer.step, backend=backend)
    for i in range(STEPS):
        set_gradients(params, seed=i)
        step()
        scheduler.step()
    born_in_the_first = "momentum" in optimizer.defaults and isinstance(optimizer, torch.optim.SGD)
    assert len(backend.report().graphs) == 1 + born_in_the_first


@pytest.mark.parametrize("is_warming_up", [True, False])
def test_a_schedule_of_the_programs_own(is_warming_up: bool) -> None:
    """One whose first learning rate is that of the constructor is seen when it changes."""
    params, rates = parameters(shapes=[(3, 4)]), [1e-3, 7e-4, 3e-4]
    backend = CollageBackend()
    optimizer = torch.optim.AdamW(params, lr=rates[0])
    step = torch.compile(optimizer.step, backend=backend)
    for seed, lr in enumerate([0.0, *rates] if is_warming_up else rates):
        optimizer.param_groups[0]["lr"] = lr
        set_gradients(params, seed)
        step()
    assert len(backend.report().graphs) == (1 if is_warming_up else 2)
    assert all(torch.isfinite(full_value(p)).all() for p in params)


def test_a_group_with_the_rate_of_the_constructor_is_scheduled_with_the_others() -> None:
    matrix, vector = parameters(shapes=[(3, 4), (4,)])
    backend = CollageBackend()
    groups: list[dict[str, Any]] = [{"params": [matrix]}, {"params": [vector], "lr": 5e-4}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    step = torch.compile(optimizer.step, backend=backend)
    for seed in range(3):
        set_gradients([matrix, vector], seed)
        step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
    assert len(backend.report().graphs) == 1


def test_a_learning_rate_in_a_tensor_may_change() -> None:
    params = parameters(shapes=[(3,)])
    optimizer = torch.optim.SGD(params, lr=torch.tensor(2.0**-4))
    backend = CollageBackend()
    step = torch.compile(optimizer.step, backend=backend)
    for seed in range(12):
        set_gradients(params, seed)
        step()
        optimizer.param_groups[0]["lr"] /= 2
    assert len(backend.report().graphs) == 1


@pytest.mark.parametrize("foreach", [False, True])
def test_a_number_that_changes_gives_the_bits_of_one_that_is_known(foreach: bool) -> None:
    """So that a run that is resumed, which compiles its first learning rate in, is the uninterrupted one."""
    rates = [1e-3, 3e-4, 7e-4, 2e-4]

    def make(params: Any, lr: float = rates[0]) -> Optimizer:
        return torch.optim.AdamW(params, lr=lr, weight_decay=0.1, foreach=foreach)

    def stepped(*, resumed: bool) -> dict[str, Tensor]:
        torch._dynamo.reset()
        params = parameters(shapes=[(64, 64), (64,)])
        optimizer = make(params)
        step: Any = torch.compile(optimizer.step, backend=CollageBackend())
        for seed, lr in enumerate(rates):
            if resumed:
                saved = optimizer.state_dict()
                optimizer = make(params, lr)
                optimizer.load_state_dict(saved)
                torch._dynamo.reset()
                step = torch.compile(optimizer.step, backend=CollageBackend())
            optimizer.param_groups[0]["lr"] = lr
            set_gradients(params, seed)
            step()
        return everything(optimizer)

    assert not differences(stepped(resumed=False), stepped(resumed=True))


# Numbers of an optimizer are its own. ---------------------------------------------------------------------

#: By class, the numbers that a drawn optimizer may have, the learning rate apart.
NUMBERS: dict[str, dict[str, list[Any]]] = {
    "AdamW": {
        "betas": [(0.9, 0.95), (0.9, 0.999), (0.8, 0.99), (0.95, 0.98)],
        "eps": [1e-8, 1e-6],
        "weight_decay": [0.0, 1e-2, 0.1],
    },
    "RMSprop": {"alpha": [0.9, 0.99, 0.999], "momentum": [0.0, 0.9], "eps": [1e-8, 1e-5]},
    "SGD": {"momentum": [0.0, 0.9, 0.999], "weight_decay": [0.0, 1e-4], "dampening": [0.0, 0.5]},
    "Adadelta": {"rho": [0.9, 0.95, 0.999]},
    "NAdam": {"betas": [(0.9, 0.99), (0.7, 0.999)], "momentum_decay": [4e-3, 1e-2]},
}


def drawn_optimizer(draw: random.Random) -> Callable[[], Optimizer]:
    """A function that makes an optimizer of drawn numbers, each time the same, perhaps with a schedule."""
    name = draw.choice(sorted(NUMBERS))
    options = {key: draw.choice(values) for key, values in NUMBERS[name].items()}
    options |= {"lr": draw.choice([1e-3, 3e-4, 2.0**-9]), "foreach": draw.choice([False, True])}
    schedule = draw.choice([None, "decays", "cycles"])

    def make() -> Optimizer:
        optimizer: Optimizer = getattr(torch.optim, name)(parameters(), **options)
        if schedule == "decays":
            CosineAnnealingWarmRestarts(optimizer, 5)
        elif schedule == "cycles":
            has_momentum = not {"momentum", "betas"}.isdisjoint(optimizer.defaults)
            OneCycleLR(optimizer, 1e-3, total_steps=9, cycle_momentum=has_momentum)
        return optimizer

    return make


@pytest.mark.parametrize("seed", range(4))
def test_an_optimizer_is_compiled_as_in_a_process_of_its_own(seed: int) -> None:
    """Whatever the numbers of those before it: same recurrences, verdicts and bytes.

    Only a learning rate is an input, as one with a schedule is, where one before it had another without a
    schedule: so optimizers that differ in it share their code.
    """
    draw = random.Random(seed)
    made = [drawn_optimizer(draw) for _ in range(5)]
    together = [explain(make()) for make in made]
    before: set[tuple[type[Optimizer], float]] = set()
    for make, found in zip(made, together, strict=True):
        torch._dynamo.reset()
        optimizer = make()
        kind, (group,) = type(optimizer), optimizer.param_groups
        if "initial_lr" not in group:
            if any(other is kind and lr != group["lr"] for other, lr in before):
                group["initial_lr"] = group["lr"]
            before.add((kind, group["lr"]))
        alone = explain(optimizer)
        assert found.tensors == alone.tensors
        assert str(found) == str(alone)


@pytest.mark.parametrize("shared", [False, True], ids=["a backend each", "one backend"])
def test_a_second_optimizer_takes_the_bytes_of_the_first(shared: bool) -> None:
    """Its decay rates are constants, which a packed format and a budget need to know."""
    one = CollageBackend(bytes_per_parameter=5.2)
    for betas in ((0.9, 0.95), (0.9, 0.999), (0.8, 0.99)):
        params = parameters(shapes=[(64, 64)])
        backend = one if shared else CollageBackend(bytes_per_parameter=5.2)
        optimizer = torch.optim.AdamW(params, betas=betas)
        set_gradients(params)
        torch.compile(optimizer.step, backend=backend)()
        rows = {row.symbol: row for row in backend.report().tensors}
        assert all(row.packed for symbol, row in rows.items() if symbol != "p")


def test_a_number_that_changes_in_its_own_optimizer_becomes_an_input() -> None:
    params = parameters(shapes=[(3,)])
    optimizer, backend = torch.optim.RMSprop(params, alpha=0.9), CollageBackend()
    step = torch.compile(optimizer.step, backend=backend)
    for i, alpha in enumerate((0.9, 0.99, 0.999, 0.95)):
        optimizer.param_groups[0]["alpha"] = alpha
        set_gradients(params, i)
        step()
    # A constant; any number, for which the average has error terms; and this again, when the code that writes
    # the average without them has been dropped.
    assert len(backend.report().graphs) == 3


@pytest.mark.parametrize("kind", [np.float64, np.float32])
@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.AdamW(params, lr=2.0**-10, weight_decay=0.125),
        lambda params: torch.optim.SGD(params, lr=2.0**-10, weight_decay=0.125, foreach=True),
        lambda params: WithNumbers(params, 2.0**-10, USES["add alpha"]),
    ],
    ids=["AdamW", "SGD foreach", "of one's own"],
)
def test_numbers_of_numpy_are_numbers(make: Callable[[list[Tensor]], Optimizer], kind: Any) -> None:
    """As a schedule that is computed with NumPy leaves them in the groups. All here are exact in float32."""

    def stepped(of: Callable[[float], Any]) -> tuple[dict[str, Tensor], int]:
        params, backend = parameters(shapes=[(3, 4)]), CollageBackend()
        optimizer = make(list(params))
        step = torch.compile(optimizer.step, backend=backend)
        for i in range(6):
            for key in ("lr", "weight_decay"):
                if key in optimizer.param_groups[0]:
                    optimizer.param_groups[0][key] = of(2.0**-10 * (8 - i))
            set_gradients(params, i)
            step()
        return everything(optimizer), len(backend.report().graphs)

    (found, compilations), (expected, of_python) = stepped(kind), stepped(float)
    assert not differences(found, expected)
    assert compilations == of_python


class Buffered(Descent):
    """Learning rates kept beside the counts that they were computed for, as in RAdam of torch-optimizer."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.param_groups[0]["buffer"] = [[None, None] for _ in range(3)]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        for p in group["params"]:
            state = self.state[p]
            state["step"] = state.get("step", 0) + 1
            kept = group["buffer"][state["step"] % 3]
            if state["step"] != kept[0]:
                kept[0] = state["step"]
                kept[1] = 0.1 / state["step"]
            p.sub_(p.grad, alpha=kept[1])


def test_one_number_may_be_kept_in_two_places() -> None:
    params = parameters(shapes=[(4, 8), (4, 8)])
    expected = [p.detach().double() for p in params]
    optimizer = Buffered(params)
    step = torch.compile(optimizer.step, backend=CollageBackend())
    for i in range(1, 7):
        set_gradients(params, seed=i)
        step()
        for p, value in zip(params, expected, strict=True):
            assert p.grad is not None
            value -= 0.1 / i * p.grad.double()
    assert [kept[0] for kept in optimizer.param_groups[0]["buffer"]] == [6, 4, 5]
    for p, value in zip(params, expected, strict=True):
        assert float((full_value(p) - value).abs().max()) < 6 * 2.0**-23


COUNTER: Any = "counter"


@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.float64])
def test_a_counter_that_is_read_as_a_number_counts(dtype: torch.dtype, branches: bool) -> None:
    """A float64 counter stayed 0, silently: Dynamo took the number that it had before the step.

    ``n - 1`` of an integer was a symbol that Inductor could not look up.
    """

    class ReadsItsCounter(Descent):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            counter = self.state[COUNTER]
            counter.add_(1)
            n = counter.item()
            if branches and not n > 0:
                n = 1
            share = (0.9**n - 0.9) / (0.9**n - 1)
            for p in self.param_groups[0]["params"]:
                self.state[p]["m"].lerp_(p.grad, 1 - share)
                p.add_(self.state[p]["m"], alpha=-1e-4)

    ends, starts = {}, parameters(shapes=[(6,), (3, 5)])
    for wide in (True, False):
        params = [torch.nn.Parameter(p.detach().double() if wide else p.detach().clone()) for p in starts]
        optimizer, backend = ReadsItsCounter(params), CollageBackend()
        optimizer.state[COUNTER] = torch.zeros((), dtype=dtype)
        for p in params:
            optimizer.state[p]["m"] = torch.zeros_like(p)
        step = optimizer.step if wide else torch.compile(optimizer.step, backend=backend)
        for i in range(5):
            set_gradients(params, i)
            step()
        assert int(optimizer.state[COUNTER]) == 5
        ends[wide] = [full_value(p).double() for p in params]
    is_captured = all(not graph.route.recorded for graph in backend.report().graphs)
    assert is_captured == (not branches and dtype is not torch.float64)
    for end, exact, start in zip(ends[False], ends[True], starts, strict=True):
        # The average is rounded, by dither, to 8 bits in each step; it is all that moves the weights.
        assert float((end - exact).norm() / (exact - start).norm()) < 5 * 2**-9


def test_a_checkpoint_says_which_numbers_have_changed() -> None:
    """Numbers in containers count, too: a resumed run has them as inputs from its first step on."""
    params = parameters()
    optimizer = install(torch.optim.AdamW(params, weight_decay=0.5))
    for _ in range(2):
        set_gradients(params)
        optimizer.step()
        optimizer.param_groups[0].update(weight_decay=0.25, betas=(0.8, 0.999))
    changed = optimizer.state_dict()["collage_fx.changed"]
    assert changed == [("param_groups", 0, "betas", 0), ("param_groups", 0, "weight_decay")]
    resumed = install(torch.optim.AdamW(parameters(), weight_decay=0.5))
    assert {*scheduled_numbers(resumed)}.isdisjoint(changed)
    resumed.load_state_dict(optimizer.state_dict())
    assert {*scheduled_numbers(resumed)}.issuperset(changed)


def test_a_checkpoint_names_numbers_in_the_state_of_any_parameter() -> None:
    """The parameters of a resumed run have the numbers as inputs, too, those without state so far as well."""

    class Scaled(Descent):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                p.add_(p.grad, alpha=-1e-3 * self.state[p]["scale"])

    optimizer = install(Scaled(params := parameters()))
    for scale in (0.5, 0.25):
        for p in params:
            optimizer.state[p]["scale"] = scale
        set_gradients(params)
        optimizer.step()
    assert optimizer.state_dict()["collage_fx.changed"] == [("state", "scale")]


def test_numbers_that_a_schedule_changes_are_known_before_it_does() -> None:
    """A rate that is no default, or a scheduler's, with those of the other groups; cycled momentum."""
    params = parameters(shapes=[(2,), (3,), (4,)])

    def made(*rates: Any) -> Optimizer:
        return torch.optim.SGD(
            [{"params": [p], "lr": lr} for p, lr in zip(params, rates, strict=True)], momentum=0.9
        )

    rates = {("param_groups", i, "lr") for i in range(3)}
    assert not {*scheduled_numbers(made(1e-3, 1e-3, 1e-3))}
    assert {*scheduled_numbers(made(1e-3, 1e-2, 1e-3))} == rates
    assert {*scheduled_numbers(made(1e-2, torch.tensor(1e-3), 1))} == {("param_groups", 0, "lr")}
    scheduled = made(1e-3, 1e-3, 1e-3)
    CosineAnnealingWarmRestarts(scheduled, 3)
    assert {*scheduled_numbers(scheduled)} == rates
    cycled = made(1e-3, 1e-3, 1e-3)
    CyclicLR(cycled, 1e-3, 1e-2)
    momenta = {("param_groups", i, *keys) for i in range(3) for keys in (("momentum",), ("betas", 0))}
    assert {*scheduled_numbers(cycled)} == rates | momenta
