"""Every way a step is taken: schedules, gradients that come and go, groups, layouts, wrappers, threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, product
from typing import Any

import pytest
import torch
from torch import Tensor

from collage_fx import CollageBackend, error_terms
from collage_fx.runtime import Member, Present, WholeStep
from collage_fx.runtime.step import MOST_PATTERNS
from tests.support.memory import peak
from tests.support.race import Parameters, Race
from tests.support.substitutes import temporaries_of_bytes
from tests.support.training import (
    Descent,
    compiled,
    differences,
    everything,
    live_error_terms,
    parameters,
    run_steps,
    set_gradients,
)
from tests.support.whole import pipeline

Optimizer = torch.optim.Optimizer


def sgd(params: Parameters) -> Optimizer:
    return torch.optim.SGD(params, lr=2.0**-14, momentum=0.9)


def descent(params: Parameters) -> Optimizer:
    return Descent(params, lr=2.0**-14)


# Schedules. -----------------------------------------------------------------------------------------------


def test_a_tensor_learning_rate_under_a_scheduler() -> None:
    race = Race(
        parameters(shapes=[(4, 6)]),
        lambda params: torch.optim.AdamW(params, lr=torch.tensor(1e-4), betas=(0.9, 0.95)),
    )
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-4, total_steps=32, cycle_momentum=False)
        for optimizer in race.optimizers
    ]
    for _ in range(30):
        race.run(1)
        for scheduler in schedulers:
            scheduler.step()
    race.assert_compensated()
    assert race.compilations == 1


# Gradients that come and go. ------------------------------------------------------------------------------


def test_patterns_of_gradients_are_remembered_up_to_a_number() -> None:
    """Nine parameters have 512 patterns. In each, only members with a gradient are stepped and written to."""
    params = [torch.nn.Parameter(torch.ones(1)) for _ in range(9)]
    members = [Member(9 + i, i, frozenset((i, 9 + i)), torch.float32) for i in range(9)]
    called, remembered = list[Present | None](), set[int]()

    def code(values: list[Any], present: Present | None = None) -> None:
        assert all(value is not None for value in values)
        called.append(present)

    step = WholeStep(code, params, 0, range(9), {9 + i: i for i in range(9)}, members, {})
    for pattern in 2 * [*product((False, True), repeat=9)]:
        for param, has_gradient in zip(params, pattern, strict=True):
            param.grad = torch.ones(1) if has_gradient else None
        before, calls = [param._version for param in params], len(called)
        step()
        written = [param._version > version for param, version in zip(params, before, strict=True)]
        assert written == [*pattern]
        assert len(called) - calls == any(pattern)
        if any(pattern):
            present = called[-1]
            assert pattern == (((True,) * 9) if present is None else tuple(map(bool, present.members)))
        remembered.add(len(step._known))
    assert max(remembered) == MOST_PATTERNS + 1 < 512


def test_gradients_that_are_none_on_some_steps() -> None:
    race = Race(parameters(shapes=[(7,)] * 3), sgd)
    sets = [(0, 1), (1, 2), (0, 2)]
    for only in sets:
        race.run(1, only)
    race.run(1)  # all of them: momentum exists everywhere
    compilations = race.compilations
    buffers = [live_error_terms(p)[0] for p in race.parameters[0]]
    for turn in range(30):
        only = sets[turn % 3]
        (left,) = {0, 1, 2} - set(only)
        before = buffers[left].clone()
        race.run(1, only)
        assert torch.equal(buffers[left], before)
    assert all(live_error_terms(p)[0] is b for p, b in zip(race.parameters[0], buffers, strict=True))
    race.assert_compensated()
    assert compilations == 2  # of the two that were there first, and of all, who come and go from then on
    assert race.compilations == compilations


def test_a_group_that_is_added_in_the_middle_of_a_run() -> None:
    race = Race(parameters(shapes=[(7,)]), sgd)
    race.run(15)
    buffer, _ = live_error_terms(race.parameters[0][0])
    race.add(parameters(shapes=[(5,)], seed=3)[0], lr=2.0**-13)
    race.run(20)
    race.assert_compensated()
    assert live_error_terms(race.parameters[0][0])[0] is buffer
    assert race.compilations == 4  # with and without momentum, for each set of groups


def test_groups_of_several_dtypes_and_hyperparameters() -> None:
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    params = [parameters(dtype, shapes=[(7,)], seed=i)[0] for i, dtype in enumerate(dtypes)]

    def make(params: Parameters) -> Optimizer:
        rates = (2.0**-13, 2.0**-15, 2.0**-15)
        groups = [
            {"params": [p], "lr": lr, "momentum": momentum}
            for p, lr, momentum in zip(params, rates, (0.9, 0.5, 0.9), strict=True)
        ]
        return torch.optim.SGD(groups, lr=1.0)

    race = Race(params, make)
    race.run(20)
    race.assert_compensated(0, 1)
    assert [len(error_terms(p)) for p in race.parameters[0]] == [1, 1, 0]
    ours, plain = race.errors(2)
    assert ours <= 1.05 * plain + 2.0**-20  # float32 is left alone: fused otherwise, rounded alike
    assert race.compilations == 2


# Layouts. -------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, Any] = {
    "channels last": lambda: torch.randn(2, 3, 2, 2).bfloat16().to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(4, 6).bfloat16().t(),
    "every other row": lambda: torch.randn(8, 3).bfloat16()[::2],
    "every other column": lambda: torch.randn(4, 6).bfloat16()[:, ::2],
    "0-d": lambda: torch.tensor(1.5).bfloat16(),
    "one element": lambda: torch.tensor([1.5]).bfloat16(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    torch.manual_seed(0)
    value = LAYOUTS[layout]()
    race = Race([value], sgd)
    race.run(20)
    (p,) = race.parameters[0]
    assert p.data_ptr() == value.data_ptr()
    assert live_error_terms(p)[0].stride() == p.stride()
    race.assert_compensated()
    assert race.compilations == 2


@pytest.mark.parametrize("by_family", [True, False])
def test_gradients_that_change_their_strides(by_family: bool) -> None:
    """Dynamo does not look at the strides of an optimizer's gradients."""
    results = []
    for order in (lambda g: g, lambda g: g.t().contiguous().t()):
        params = parameters(shapes=[(4, 6)] * 4)
        backend = CollageBackend(passes=pipeline(by_family=by_family))
        optimizer = torch.optim.Adam(params)
        step = torch.compile(optimizer.step, backend=backend)
        run_steps(step, params, [0, 1])
        for p in params[1:]:
            assert p.grad is not None
            p.grad = order(p.grad)
        run_steps(step, params, [2])
        results.append(everything(optimizer))
    assert not differences(*results)


def test_a_strided_view_leaves_its_neighbours_alone() -> None:
    base = torch.ones(8, 3).bfloat16()
    race = Race([base[::2]], descent)
    race.run(20)
    race.assert_compensated()
    assert torch.all(base[1::2] == 1)


def test_an_empty_parameter_beside_another() -> None:
    race = Race([torch.zeros(0, 3).bfloat16(), *parameters(shapes=[(7,)])], descent)
    race.run(20)
    race.assert_compensated(1)
    assert race.parameters[0][0].shape == (0, 3)
    assert race.compilations == 1


def test_nothing_but_an_empty_parameter() -> None:
    race = Race([torch.zeros(0).bfloat16()], descent)
    race.run(2)
    assert race.compilations == 1


class Normed(Optimizer):
    """Step along an average of gradients, divided by the root of one of their squares over all elements."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state, g = self.state[p], p.grad
            if not state:
                state["v"], state["w"] = torch.zeros_like(torch.sum(p)), torch.zeros_like(torch.mean(p))
            state["v"].mul_(0.9).add_(torch.sum(g * g), alpha=0.1)
            state["w"].mul_(0.9).add_(torch.mean(g * g), alpha=0.1)
            p.sub_(g / (state["v"] + state["w"]).sqrt().add_(1e-8), alpha=2.0**-14)


def test_sums_over_a_parameter_of_one_number() -> None:
    race = Race(parameters(shapes=[(), (7,)]), lambda params: Normed(params, {}))
    race.run(20)
    race.assert_compensated()


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Linear(5, 5, bias=False, dtype=torch.bfloat16)
        self.head = torch.nn.Linear(5, 5, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x))


def test_tied_parameters_are_one() -> None:
    model = Tied()
    race = Race(list(model.parameters()), sgd)
    for _ in range(20):
        race.draw_gradients()
        race.step()
        race.step_twins()
    race.assert_compensated()
    assert live_error_terms(model.head.weight)[0] is live_error_terms(model.embedding.weight)[0]
    assert len(race.backend.report().tensors) == 2  # the weight and its momentum


# Closures. ------------------------------------------------------------------------------------------------


def loss_of(p: Tensor, target: Tensor) -> Tensor:
    return (p.to(target.dtype) - target).square().sum()


def test_a_closure_that_is_passed_to_step() -> None:
    """Dynamo leaves the graph for the closure's backward and comes back for the update."""
    race = Race(parameters(shapes=[(7,)]), sgd)
    targets = [torch.full((7,), 3.0, dtype=p.dtype) for (p,) in race.parameters]

    def closure_of(i: int) -> Any:
        def closure() -> Tensor:
            race.optimizers[i].zero_grad()
            loss = loss_of(race.parameters[i][0], targets[i])
            loss.backward()
            return loss

        return closure

    closures = [closure_of(i) for i in range(3)]
    for _ in range(20):
        loss: Any = race.step(closures[0])
        for optimizer, closure in zip(race.optimizers[1:], closures[1:], strict=True):
            optimizer.step(closure)
    assert loss > 0
    race.assert_compensated()
    # the loss, the first update, in which the momentum is born, and the others
    assert [len(graph.tensors) for graph in race.backend.report().graphs] == [0, 1, 2]


# Several optimizers. --------------------------------------------------------------------------------------


def test_two_optimizers_over_the_same_parameter() -> None:
    (p,) = params = parameters(shapes=[(7,)])
    races = [Race(params, make) for make in (sgd, descent)]
    assert races[1].parameters[0][0] is p
    for side in (1, 2):  # the plain and the exact twins are shared as well
        races[1].parameters[side][0] = races[0].parameters[side][0]
        races[1].optimizers[side] = descent(races[1].parameters[side])
    races[1].generator = races[0].generator
    buffers = set()
    for turn in range(24):
        races[turn % 2].run(1)
        buffers.add(id(live_error_terms(p)[0]))
    assert len(buffers) == 1
    races[0].assert_compensated()


# Inside other code. ---------------------------------------------------------------------------------------


def test_a_training_step_around_which_dynamo_breaks_the_graph() -> None:
    race = Race(parameters(shapes=[(7,)]), descent)
    optimizer, ((p,), *_) = race.optimizers[0], race.parameters
    target = torch.full((7,), 3.0).bfloat16()

    @torch.compile(backend=race.backend)
    def train() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(p, target)
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(20):
        assert train() > 0
        for optimizer_, (q,) in zip(race.optimizers[1:], race.parameters[1:], strict=True):
            q.grad = None if p.grad is None else p.grad.to(q.dtype)
            optimizer_.step()
    race.assert_compensated()
    assert [len(graph.tensors) for graph in race.backend.report().graphs] == [0, 1]  # the loss, the update


class Accelerated:
    """What trainers wrap around an optimizer: delegation, closures passed through, skipped steps.

    The loss scaler decides whether the step is taken, as that of a float16 run does.
    """

    def __init__(self, optimizer: Optimizer, scaler: Scaler | None = None) -> None:
        self.optimizer = optimizer
        self.scaler = scaler

    def step(self, closure: Any = None) -> Any:
        if self.scaler is not None:
            return self.scaler.step(self.optimizer, closure)
        return self.optimizer.step(closure)


class Scaler:
    """Unscales gradients and skips the step where one of them is not finite."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.skipped = 0

    def step(self, optimizer: Optimizer, closure: Any = None) -> Any:
        found_inf = False
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.mul_(1 / self.scale)
                found_inf = found_inf or not bool(p.grad.isfinite().all())
        if found_inf:
            self.skipped += 1
            return None
        return optimizer.step(closure)


def test_a_wrapper_with_a_step_of_its_own() -> None:
    race = Race(parameters(shapes=[(7,)]), sgd)
    wrapper = Accelerated(race.optimizers[0])
    step = torch.compile(wrapper.step, backend=race.backend)

    def forty_two() -> float:
        return 42.0

    for turn in range(20):
        race.draw_gradients()
        result = step(forty_two) if turn % 2 else step()
        assert result == (42.0 if turn % 2 else None)
        race.step_twins()
    race.assert_compensated()
    assert {row.name for row in race.backend.report().tensors} == {
        "param_groups[0].params[0]",
        "param_groups[0].params[0].momentum_buffer",
    }


@pytest.mark.parametrize("compiled", ["the optimizer's step", "the wrapper's step"])
def test_a_loss_scaler_that_skips_steps(compiled: str) -> None:
    race = Race(parameters(torch.float16, shapes=[(7,)]), sgd)
    ((p,), *_) = race.parameters
    scaler = Scaler(8.0)
    wrapper = Accelerated(race.optimizers[0], scaler)
    if compiled == "the optimizer's step":
        wrapper.optimizer.step = race.step  # type: ignore[assignment]
        step = wrapper.step
    else:
        step = torch.compile(wrapper.step, backend=race.backend)
    for turn in range(24):
        race.draw_gradients()
        assert p.grad is not None
        p.grad.mul_(8.0)
        if turn % 4 == 3:
            p.grad[0] = torch.inf
            before = [p.detach().clone(), error_terms(p)[0].clone()]
            step()
            assert torch.equal(p, before[0])
            assert torch.equal(error_terms(p)[0], before[1])
        else:
            step()
            race.step_twins()
    assert scaler.skipped == 6
    race.assert_compensated()


# Threads. -------------------------------------------------------------------------------------------------


def trained(seed: int, barrier: threading.Barrier | None = None) -> dict[str, Tensor]:
    params = parameters(shapes=[(16, 8)], seed=seed)
    optimizer = torch.optim.RMSprop(params, lr=1e-4, alpha=0.999)
    step = compiled(optimizer)
    for i in range(200):
        set_gradients(params, 1000 * seed + i)
        if barrier is not None and i < 2:
            barrier.wait()  # the first steps, in which they compile, at once
        step()
    return everything(optimizer)


def test_two_threads_with_an_optimizer_each() -> None:
    barrier = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        together = [future.result() for future in [pool.submit(trained, seed, barrier) for seed in (1, 2)]]
    torch._dynamo.reset()
    for seed, met in zip((1, 2), together, strict=True):
        assert differences(met, trained(seed)) == []
        assert sum("error" in name for name in met) == 2


class LastGradient(Descent):
    """Adan's change of the gradient: state that is born in the first step, as a copy of a gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["last"], state["twice"] = torch.zeros_like(p), torch.zeros_like(p)
            change = p.grad - state["last"]
            state["last"].copy_(p.grad)
            state["twice"].copy_(p.grad)
            p.sub_(change, alpha=2.0**-10)


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("strategy", ["light", "full"])
def test_a_copy_of_a_gradient_has_memory_of_its_own(strategy: str, is_whole: bool) -> None:
    params = parameters(shapes=((4, 6), (4, 6), (5,)))
    set_gradients(params)
    options: dict[str, Any] = {"passes": pipeline(by_family=False)} if is_whole else {}
    optimizer = LastGradient(params)
    compiled(optimizer, strategy=strategy, **options)()
    grads = [p.grad for p in params if p.grad is not None]
    kept = [[*optimizer.state[p].values()] for p in params]
    assert len({tensor.data_ptr() for tensor in chain(*kept, grads)}) == 3 * len(params)
    for grad, tensors in zip(grads, kept, strict=True):
        assert all(torch.equal(tensor, grad) for tensor in tensors)


# Memory. ----------------------------------------------------------------------------------------------------


def adamw(params: Parameters) -> Optimizer:
    return torch.optim.AdamW(params)


def adamw_foreach(params: Parameters) -> Optimizer:
    return torch.optim.AdamW(params, foreach=True)


@pytest.mark.parametrize("strategy", ["light", "plus", "full"])
@pytest.mark.parametrize("make", [sgd, adamw, adamw_foreach])
def test_a_step_takes_no_memory_beyond_state_and_error_terms(make: Any, strategy: str) -> None:
    """What it makes, at its first time, stays; later ones make nothing of a tensor's size."""
    params = parameters(shapes=((64, 1024), (32, 1024)))
    set_gradients(params)
    optimizer = make(params)
    step = compiled(optimizer, strategy=strategy)
    first = peak(step)
    kept = [tensor for state in optimizer.state.values() for tensor in state.values()]
    made = sum(each.nbytes for each in kept)
    made += sum(each.nbytes for tensor in (*params, *kept) for each in live_error_terms(tensor))
    small = 16384  # numbers, and what finds out at the first step which tensors there are
    assert made <= first <= made + small
    step()  # SGD has no momentum in its first, so its second is another
    assert peak(step) <= 1024


def test_a_step_with_reductions_takes_the_memory_of_one_update() -> None:
    """Two float32 values of a parameter's size cross between kernels; members take turns to hold theirs."""
    params = parameters(shapes=((64, 1024), (32, 1024), (64, 1024)))
    set_gradients(params)
    with temporaries_of_bytes(1):
        step = compiled(torch.optim.Adafactor(params))
        step()
        crossing, sums = 2 * 64 * 1024 * 4, 32768
        assert peak(step) <= crossing + sums
