"""Functions and methods that Dynamo leaves to Python, which step optimizers and update weights themselves."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW

from collage_fx import CollageBackend, error_terms, full_value, install
from collage_fx.capture.recording import is_recorded
from collage_fx.capture.source import line_that_updates, within_reach
from collage_fx.errors import GraphBreakError
from tests.support.training import Descent, parameters, set_gradients
from tests.support.warned import warned

Parameters = list[torch.nn.Parameter]
Step = Callable[[], Any]

#: So small that plain bf16 loses nearly all of an update.
LR = 1e-4
STEPS = 6
#: Largest error |p - p64| / |p64 - p0| of compensated steps; plain bf16 has about 1.
COMPENSATED = 0.02
SHAPES = ((8, 6), (5,), (6, 4))


class Plain:
    """No Optimizer, and no method that names a tensor."""

    def __init__(self, params: Any, lr: float = LR) -> None:
        self.params, self.lr = list(params), lr

    @torch.no_grad()
    def step(self) -> None:
        for p in self.params:
            p.sub_(p.grad.sign(), alpha=self.lr)


class PlainBranching(Plain):
    @torch.no_grad()
    def step(self) -> None:
        for p in self.params:
            if p.grad.norm() > 0:
                p -= self.lr * p.grad.sign()


class Branching(Descent):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad.norm() > 0:
                p.add_(p.grad.sign(), alpha=-self.param_groups[0]["lr"])


class Printing(Descent):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        print(end="")
        super().step()


INNER: tuple[Any, ...] = (AdamW, SGD, Descent, Branching, Printing, Plain, PlainBranching)


def branching(params: Parameters) -> None:
    for p in params:
        if p.norm() < 1e9:
            p.mul_(1 - LR)


def printing(params: Parameters) -> None:
    for p in params:
        print(end="")
        p.data = p.data * (1 - LR)


def assigning(params: Parameters) -> None:
    for p in params:
        p *= 1 - LR  # type: ignore[misc]


def of_lists(params: Parameters) -> None:
    for part in (params[:1], params[1:]):
        torch._foreach_mul_(tuple(part), 1 - LR)


UPDATES: tuple[Callable[[Parameters], None], ...] = (branching, printing, assigning, of_lists)


def function(
    optimizers: Any, params: Parameters, update: Callable[[Parameters], None], *, first: bool
) -> Step:
    """The update is in the function itself: its code, with the loop over optimizers before or after."""

    @torch.no_grad()
    def step_then_branch() -> None:
        for each in optimizers:
            each.step()
        for p in params:
            if p.norm() < 1e9:
                p.mul_(1 - LR)

    @torch.no_grad()
    def step_then_assign() -> None:
        for each in optimizers:
            each.step()
        for p in params:
            p *= 1 - LR  # type: ignore[misc]

    @torch.no_grad()
    def update_then_step() -> None:
        for p in params:
            p.data = p.data * (1 - LR)
        for each in optimizers:
            print(end="")
            each.step()

    @torch.no_grad()
    def step_and_call() -> None:
        for each in optimizers:
            each.step()
            print(end="")
        update(params)

    if first:
        return update_then_step
    if update is branching:
        return step_then_branch
    return step_then_assign if update is assigning else step_and_call


class Holder:
    """Method of an object that is no optimizer."""

    def __init__(self, optimizers: Any, params: Parameters) -> None:
        self.optimizers, self.params = optimizers, params

    @torch.no_grad()
    def step(self) -> None:
        for each in self.optimizers:
            each.step()
        for p in self.params:
            p.mul_(1 - LR)


def drawn(seed: int) -> Callable[[Parameters], Step]:
    draw = random.Random(seed)
    kinds = [draw.choice(INNER) for _ in SHAPES]
    update, first, in_method = draw.choice(UPDATES), draw.random() < 0.3, draw.random() < 0.3

    def make(params: Parameters) -> Step:
        optimizers = [kind([p], lr=LR) for kind, p in zip(kinds, params, strict=True)]
        if in_method:
            return Holder(optimizers, params).step
        return function(optimizers, params, update, first=first)

    return make


def error(make: Callable[[Parameters], Step], compiled: Callable[[Step], Step], steps: int = STEPS) -> float:
    start = [p.detach().double() for p in parameters(shapes=SHAPES)]
    ends = []
    for dtype in (torch.bfloat16, torch.float64):
        params = parameters(shapes=SHAPES)
        for p in params if dtype is torch.float64 else ():
            p.data = p.data.double()
        step = make(params) if dtype is torch.float64 else compiled(make(params))
        for seed in range(steps):
            set_gradients(params, seed)
            step()
        ends.append([full_value(p).double() for p in params])
    return max(float((a - b).norm() / (b - c).norm()) for a, b, c in zip(*ends, start, strict=True))


def compiled(step: Step) -> Step:
    return torch.compile(step, backend=CollageBackend())


@pytest.mark.filterwarnings("error:collage_fx")
@pytest.mark.parametrize("seed", range(12))
def test_drawn_functions_are_compensated(seed: int) -> None:
    assert error(drawn(seed), compiled) < COMPENSATED


def stepping(kinds: Any) -> Callable[[Parameters], Step]:
    return lambda params: function(
        [k([p], lr=LR) for k, p in zip(kinds, params, strict=True)], params, branching, first=False
    )


@pytest.mark.filterwarnings("error:collage_fx")
@pytest.mark.parametrize("kind", INNER)
def test_steps_in_a_loop_and_then_an_update(kind: Any) -> None:
    assert error(stepping([kind] * 3), compiled) < COMPENSATED


def test_steps_alone_of_what_is_no_optimizer() -> None:
    """The function that Python runs updates nothing, and the method that it calls names no tensor."""

    def make(params: Parameters) -> Step:
        inner = [PlainBranching([p]) for p in params]

        def step() -> None:
            for each in inner:
                each.step()

        return step

    assert error(make, compiled) < COMPENSATED


def test_later_calls_compile_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """And the log tells once that calls are recorded."""
    caplog.set_level(logging.INFO, "collage_fx")
    params, backend, graphs = parameters(shapes=SHAPES), CollageBackend(), []
    step = torch.compile(stepping([AdamW, Branching, Plain])(params), backend=backend)
    for seed in range(5):
        set_gradients(params, seed)
        step()
        graphs.append(len(backend.report().graphs))
    assert graphs[2:] == graphs[2:3] * 3
    (told,) = (each for each in caplog.messages if "its calls are run by Python and recorded" in each)
    assert re.fullmatch(r"\S+step_then_branch: its calls are run by Python and recorded: .{10,}", told)


def test_an_exception_ends_the_recording() -> None:
    params, fails = parameters(shapes=SHAPES), [True]

    @torch.no_grad()
    def step() -> None:
        for p in params:
            if p.norm() < 1e9:
                p.mul_(1 - LR)
        if fails[0]:
            raise KeyError("on purpose")

    run, before = compiled(step), [full_value(p) for p in params]
    for _ in range(2):
        with pytest.raises(KeyError, match="on purpose"):
            run()
        assert torch.is_grad_enabled()
        assert bool((torch.ones(2) + 1 == 2).all()), "operations are executed"
    fails[0] = False
    try:
        raise ValueError
    except ValueError:
        run()  # the exception that is being handled is not the function's
    assert not any(torch.equal(full_value(p), value) for p, value in zip(params, before, strict=True))


# -- functions that may differentiate


def with_gradients(params: Parameters, *, by_function: bool) -> Step:
    optimizers = [AdamW([p], lr=LR) for p in params]

    @torch.no_grad()
    def decay() -> None:
        for p in params:
            p.mul_(1 - LR)

    def step_and_decay() -> None:
        for each in optimizers:
            each.step()
        with torch.no_grad():
            for p in params:
                p.mul_(1 - LR)

    def step_and_call() -> None:
        for each in optimizers:
            each.step()
        decay()

    return step_and_call if by_function else step_and_decay


def test_a_function_that_may_differentiate_is_refused_and_the_remedies_work() -> None:
    params = parameters(shapes=SHAPES)
    set_gradients(params)
    before = [full_value(p) for p in params]
    with pytest.raises(GraphBreakError, match=r"step_and_decay") as refusal:
        compiled(with_gradients(params, by_function=False))()
    text = str(refusal.value)
    assert f"{__file__}:{line_of('p.mul_(1 - LR)', after='def step_and_decay')} in step_and_decay" in text
    assert "move the lines that update weights to a function" in text
    assert "@torch.no_grad()" in text
    assert all(torch.equal(full_value(p), value) for p, value in zip(params, before, strict=True))
    assert error(lambda params: with_gradients(params, by_function=True), compiled) < COMPENSATED

    def decorated(params: Parameters) -> Step:
        return torch.no_grad()(with_gradients(params, by_function=False))

    assert error(decorated, compiled) < COMPENSATED


def line_of(statement: str, after: str) -> int:
    with open(__file__, encoding="utf-8") as file:
        lines = [line.strip() for line in file]
    start = next(i for i, line in enumerate(lines) if line.startswith(after))
    return lines.index(statement, start) + 1


def test_a_backend_that_is_not_strict_warns() -> None:
    params = parameters(shapes=SHAPES)
    set_gradients(params)
    step = torch.compile(with_gradients(params, by_function=False), backend=CollageBackend(strict=False))
    assert any("would run its updates of weights eagerly" in each for each in warned(step))


def test_a_function_that_trains_and_updates_nothing_itself_is_left_alone() -> None:
    """A function whose gradients and numbers change, and in which only the steps update weights."""

    def make(params: Parameters) -> Step:
        optimizer = SGD(params, lr=LR)

        def train() -> float:
            total = 0.0
            for i in range(2):
                for p in params:
                    if p.grad is not None:
                        p.grad.zero_()
                loss = torch.stack([((p + i) ** 2).sum() for p in params]).sum()
                loss.backward()
                total += loss.item()
                optimizer.step()
            return total

        return train

    assert error(make, compiled, steps=2) < COMPENSATED


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Inherits(torch.optim.SGD):
    """A step of its own around that of torch's class."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.SGD, Inherits])
def test_a_break_in_a_closure_leaves_the_step_captured(kind: type[torch.optim.SGD]) -> None:
    torch._dynamo.reset()
    params = parameters(shapes=[(4, 3)])
    set_gradients(params, 0)
    optimizer, backend = kind(params, lr=1e-2), CollageBackend()

    def closure() -> float:
        print(end="")
        return 1.0

    step = torch.compile(optimizer.step, backend=backend)
    for _ in range(3):
        step(closure)
    assert not is_recorded(optimizer)
    assert all(term.any() for p in params for term in error_terms(p))


class LooksUp(torch.optim.Optimizer):
    """A method finds tensors by parameters, and does nothing else from the second step on."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.indices: dict[Tensor, Tensor] = {}

    def places(self, p: Tensor) -> Tensor:
        found = self.indices.get(p)
        if found is None:
            found = self.indices[p] = (p > 0).flatten().nonzero().flatten()
        return found

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        for p, at in zip(params, [self.places(p) for p in params], strict=True):
            p.view(-1)[at] -= 1e-2 * p.grad.view(-1)[at]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_found_by_one_parameter_is_not_taken_for_another(dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    params = parameters(dtype, shapes=[(4, 3)] * 4)
    exact = [torch.nn.Parameter(p.detach().double()) for p in params]
    optimizer, reference = LooksUp(params), LooksUp(exact)
    install(optimizer)
    for seed in range(4):
        set_gradients(params, seed)
        for p, twin in zip(params, exact, strict=True):
            assert p.grad is not None
            twin.grad = p.grad.double()
        optimizer.step()
        reference.step()
    for p, twin in zip(params, exact, strict=True):
        off = (full_value(p) - twin.detach()).abs()
        # A step rounds once, to float32; bfloat16 and its error terms hold as much.
        assert (off <= 4 * 2.0**-24 * twin.detach().abs()).all()


class OfLines:
    """Functions of one or two lines behind their first."""

    def in_place(p: Any, ps: Any, m: Any) -> Any:
        m = p + 1
        p.add_(m)

    def of_a_list(p: Any, ps: Any, m: Any) -> Any:
        torch._foreach_add_(ps, 1)
        p.add_(m)

    def of_an_element(p: Any, ps: Any, m: Any) -> Any:
        for q in ps:
            q += 1

    def of_elements(p: Any, ps: Any, m: Any) -> Any:
        print(p, ps, m)
        return [q.__imul__(2) or q.mul_(2) for q in ps]

    def of_its_data(p: Any, ps: Any, m: Any) -> Any:
        p.data = m

    def to_its_data(p: Any, ps: Any, m: Any) -> Any:
        p.data += m

    def of_nothing(p: Any, ps: Any, m: Any) -> Any:
        m = p.add(1)
        m += 1
        m.x = m.frobnicate_()

    def of_gradients(p: Any, ps: Any, m: Any) -> Any:
        p.grad.zero_()
        p.grad = m

    def of_flags(p: Any, ps: Any, m: Any) -> Any:
        p.requires_grad_().detach_().retain_grad_()
        m.share_memory_()


@pytest.mark.parametrize(
    ("name", "line"),
    [
        *(("in_place", 2), ("of_a_list", 1), ("of_an_element", 2), ("of_elements", 2), ("of_its_data", 1)),
        *(("to_its_data", 1), ("of_nothing", None), ("of_gradients", None), ("of_flags", None)),
    ],
)
def test_a_line_that_updates_tensors_is_found(name: str, line: int | None) -> None:
    code = vars(OfLines)[name].__code__
    assert line_that_updates(code) == (None if line is None else code.co_firstlineno + line)


def test_a_function_without_source_may_update_tensors_everywhere() -> None:
    code = compile("\n\nlambda p: p", "nowhere", "eval").co_consts[0]
    assert line_that_updates(code) == code.co_firstlineno


def test_weights_are_found_among_variables_and_in_objects() -> None:
    p, q = parameters(shapes=[(2,), (3,)])
    optimizer = SGD([q])
    model = torch.nn.Linear(2, 2)
    trainer = Plain([p])
    trainer.inner = optimizer  # type: ignore[attr-defined]
    optimizers, weights = within_reach({"self": trainer, "model": model, "x": torch.ones(2), "n": 1})
    assert optimizers == [optimizer]
    assert [id(each) for each in weights] == [id(p)]
