"""A step that a program gives an optimizer instance, ``optimizer.step = ...``: compiled, or refused by name.

Set before ``install``, it is the step that is compiled. Set afterwards, it is refused unless it calls the
compiled step, as the wrappers of schedulers and trainers do.
"""

from __future__ import annotations

import functools
import random
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from collage_fx import error_terms, install, uninstall
from collage_fx.errors import EagerStepError
from tests.support.training import compiled, parameters
from tests.support.written_classes import gradients, relative_error

STEPS = 3
SHAPES = ((8, 16), (6,))

#: Bound of the error: a bfloat16 term under a bfloat16 value leaves 2**-17 of each weight of about 1 at each
#: step; a weight moves by 2**-10 at least. Plain bfloat16 (2**-9 of a weight) is off by about 1.
ALLOWED = STEPS * 2.0**-17 / 2.0**-10


@torch.no_grad()
def update(self: Optimizer, closure: Any = None, scale: float = 1.0) -> Any:
    """A rule that is not AdamW's."""
    loss = None if closure is None else closure()
    for p in params_of(self):
        if p.grad is not None:
            p.sub_(p.grad * scale * 2.0**-10)
    return loss


@torch.no_grad()
def branching(self: Optimizer, closure: Any = None) -> None:
    """A rule that Dynamo cannot capture."""
    for p in params_of(self):
        if p.grad is not None and p.grad.norm() > 0:
            p.sub_(p.grad * 2.0**-10)


def params_of(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def method(optimizer: Optimizer) -> Any:
    return types.MethodType(update, optimizer)


def branching_method(optimizer: Optimizer) -> Any:
    return types.MethodType(branching, optimizer)


def function(optimizer: Optimizer) -> Any:
    def step(closure: Any = None) -> Any:
        return update(optimizer, closure)

    return step


def partial(optimizer: Optimizer) -> Any:
    return functools.partial(update, optimizer, scale=2.0)


class Updating:
    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def __call__(self, closure: Any = None) -> Any:
        return update(self.optimizer, closure)


def the_class_step(optimizer: Optimizer) -> Any:
    return lambda closure=None: type(optimizer).step(optimizer, closure)


def around(optimizer: Optimizer) -> Any:
    own = optimizer.step
    return lambda closure=None: own(closure)


def around_by_name(optimizer: Optimizer) -> Any:
    own = optimizer.step

    @functools.wraps(own)
    def step(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    return step


def compiled_by_inductor(optimizer: Optimizer) -> Any:
    return torch.compile(method(optimizer))


def method_of_a_compiled_function(optimizer: Optimizer) -> Any:
    return types.MethodType(torch.compile(update), optimizer)


OWN = [
    compiled_by_inductor,
    method_of_a_compiled_function,
    method,
    branching_method,
    function,
    partial,
    Updating,
    the_class_step,
]
WRAPPERS = [around, around_by_name]


def adamw(dtype: torch.dtype = torch.bfloat16) -> Optimizer:
    return AdamW([torch.nn.Parameter(p.detach().to(dtype)) for p in start()], lr=2.0**-10)


def start() -> Sequence[Tensor]:
    return parameters(shapes=SHAPES)


def train(optimizer: Optimizer, steps: int = STEPS, *, clears: bool = False) -> Optimizer:
    for seed in range(steps):
        for p, gradient in zip(params_of(optimizer), gradients(params_of(optimizer), seed), strict=True):
            p.grad = gradient
        optimizer.step()
        if clears:
            optimizer.zero_grad()
    return optimizer


def give(optimizer: Optimizer, step: Callable[[Optimizer], Any]) -> Optimizer:
    optimizer.step = step(optimizer)  # type: ignore[method-assign]
    return optimizer


def error(optimizer: Optimizer, step: Callable[[Optimizer], Any]) -> float:
    """Return the error against float64 with the same step, run eagerly."""
    exact = train(give(adamw(torch.float64), step))
    return relative_error(params_of(optimizer), params_of(exact), start())


@pytest.mark.parametrize("step", [*OWN, *WRAPPERS])
def test_a_step_that_is_set_before_is_compiled(step: Callable[[Optimizer], Any]) -> None:
    optimizer = train(install(give(adamw(), step)))
    assert error(optimizer, step) <= ALLOWED


@pytest.mark.parametrize("step", OWN)
@pytest.mark.parametrize("is_held", [False, True], ids=["alone", "the compiled step is held"])
def test_a_step_that_is_set_afterwards_is_refused(step: Callable[[Optimizer], Any], is_held: bool) -> None:
    """And the remedy is right: install again, below the line that sets the step."""
    optimizer = install(adamw())
    held = optimizer.step if is_held else None
    give(optimizer, step)
    with pytest.raises(EagerStepError, match=r"replaced after install|called eagerly") as refused:
        train(optimizer, clears=True)
    assert "collage_fx.install(optimizer)" in refused.value.remedy
    if held is None:  # nobody could call the compiled step, so nothing has changed
        assert all(map(torch.equal, params_of(optimizer), start()))
    with torch.no_grad():
        for p, p0 in zip(params_of(optimizer), start(), strict=True):
            p.copy_(p0)
    optimizer.state.clear()
    assert error(train(install(optimizer)), step) <= ALLOWED


def test_the_class_step_may_be_set_again() -> None:
    optimizer = install(give(adamw(), method))
    optimizer.step = types.MethodType(AdamW.step, optimizer)  # type: ignore[method-assign]
    train(install(optimizer))
    exact = train(adamw(torch.float64))
    assert relative_error(params_of(optimizer), params_of(exact), start()) <= ALLOWED


def test_a_refused_step_is_named() -> None:
    optimizer = give(install(adamw()), partial)
    with pytest.raises(EagerStepError, match="by update, which") as refused:
        train(optimizer)
    code = update.__wrapped__.__code__  # type: ignore[attr-defined]
    assert refused.value.where == f"AdamW.step ({code.co_filename}:{code.co_firstlineno})"


def test_it_is_a_single_warning_if_not_strict() -> None:
    optimizer = give(install(adamw(), strict=False), method)
    with pytest.warns(UserWarning, match="has been replaced after install") as said:
        train(optimizer)
    assert len(said) == 1
    plain = train(give(adamw(), method))
    assert all(map(torch.equal, params_of(optimizer), params_of(plain)))


def scheduled(optimizer: Optimizer) -> Optimizer:
    LambdaLR(optimizer, lambda i: 1.0)
    return optimizer


def saved(optimizer: Optimizer) -> Optimizer:
    optimizer.state_dict()
    return optimizer


def cleared(optimizer: Optimizer) -> Optimizer:
    optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize("seed", range(6))
def test_steps_that_call_the_compiled_one_are_quiet(seed: int) -> None:
    """Wrappers, schedulers, and all that looks at the step, in any order."""
    draw = random.Random(seed)
    optimizer = install(adamw())
    wrappers = [functools.partial(give, step=each) for each in WRAPPERS]
    doings: list[Callable[[Optimizer], Any]] = [*wrappers, scheduled, saved, cleared]
    doings = draw.choices(doings, k=6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i, each in enumerate(doings):
            if not (each is scheduled and not hasattr(optimizer.step, "__func__")):
                each(optimizer)
            if i == 3:
                train(optimizer, clears=True)
    exact = train(train(adamw(torch.float64)))
    train(optimizer)
    assert relative_error(params_of(optimizer), params_of(exact), start()) <= 2 * ALLOWED


def test_a_step_that_has_called_the_compiled_one_may_restore_weights_later() -> None:
    """As at a spike of the loss: it is trusted, and the optimizer's step is the program's function again."""
    optimizer = install(adamw())
    own, is_spike = optimizer.step, False

    def step() -> None:
        if not is_spike:
            own()
            return
        with torch.no_grad():
            for p, p0 in zip(params_of(optimizer), start(), strict=True):
                p.copy_(p0)

    give(optimizer, lambda _: step)
    train(cleared(optimizer), 1)
    assert optimizer.step is step
    is_spike = True
    train(optimizer, 1)
    assert all(map(torch.equal, params_of(optimizer), start()))


@pytest.mark.parametrize("order", ["step, scheduler", "scheduler, step"])
def test_a_scheduler_and_a_step_of_the_instance(order: str) -> None:
    optimizer = adamw()
    for each in order.split(", "):
        if each == "step":
            give(optimizer, method)
        else:
            scheduled(optimizer)
    assert error(train(install(optimizer)), method) <= ALLOWED


def test_uninstall_gives_the_step_back() -> None:
    optimizer = give(adamw(), method)
    before = optimizer.step
    uninstall(train(install(optimizer)))
    assert optimizer.step is before
    train(optimizer, 1)
    assert not any(map(error_terms, params_of(optimizer)))
    assert {"step"} == {name for name in vars(optimizer) if name in ("step", "zero_grad")}


def test_a_step_of_the_instance_that_cannot_be_captured_is_recorded() -> None:
    """Also by ``torch.compile``."""
    optimizer = give(adamw(), branching_method)
    step = compiled(optimizer)
    for seed in range(STEPS):
        for p, gradient in zip(params_of(optimizer), gradients(params_of(optimizer), seed), strict=True):
            p.grad = gradient
        step()
    assert error(optimizer, branching_method) <= ALLOWED
