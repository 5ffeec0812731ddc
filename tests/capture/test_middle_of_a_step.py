"""Graph breaks in the middle of a step: the function with the break, and the rest, are recorded."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import _use_grad_for_differentiable

from collage_fx import CollageBackend, backend_of, error_terms, full_value, install
from collage_fx.capture.recording import Request, record
from collage_fx.errors import UnsupportedOptimizerError
from tests.support.training import Descent, compiled, errors_beside_float64, parameters, set_gradients

#: So small that plain bf16 loses nearly all of an update.
LR = 1e-4
#: Largest error |p - p64| / |p64 - p0| of compensated steps; plain bf16 has about 1.
COMPENSATED = 0.02
SHAPES = [(8, 6), (5,), (6, 4)]

Way = Callable[[Optimizer], Callable[[], Any]]


def installed(optimizer: Optimizer) -> Callable[[], Any]:
    return install(optimizer).step


WAYS: tuple[Way, ...] = (installed, compiled)


def decay(optimizer: Optimizer) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.mul_(1 - 1e-4)


def first_of(optimizer: Optimizer) -> Tensor:
    p: Tensor = optimizer.param_groups[0]["params"][0]
    return p


#: Operations at which Dynamo breaks a graph.
BREAKS: dict[str, Callable[[Optimizer], object]] = {
    "print": lambda _: print(end=""),
    "branch": lambda optimizer: None if first_of(optimizer).norm() < 1e9 else 1 / 0,
    "graph_break": lambda _: torch._dynamo.graph_break(),
    "opaque": lambda optimizer: _opaque(first_of(optimizer)),
}


@torch.compiler.disable
def _opaque(p: Tensor) -> None:
    p.detach().norm()


class Breaking:
    """A break of one kind, at one place of a step (``at`` = 0: in every step)."""

    def __init__(self, kind: str, place: str, at: int) -> None:
        self.kind, self.place, self.at = kind, place, at

    def here(self, place: str, optimizer: Any) -> None:
        if place == "before":
            optimizer.taken = getattr(optimizer, "taken", 0) + 1
        if place == self.place and self.at in (0, optimizer.taken):
            BREAKS[self.kind](optimizer)


class Wrapper(Optimizer):
    """Optimizer of optimizers, which weakens all parameters after their steps."""

    def __init__(self, params: Any, makers: Any, breaking: Breaking) -> None:
        given = list(params)
        super().__init__(given, {"lr": LR, "differentiable": False})
        parts = (given[i :: len(makers)] for i in range(len(makers)))
        self.inner = [make(part) for make, part in zip(makers, parts, strict=True)]
        self.breaking = breaking

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.breaking.here("before", self)
        self.steps_of_all()
        self.breaking.here("after", self)
        decay(self)

    def steps_of_all(self) -> None:
        raise NotImplementedError


class InAList(Wrapper):
    def steps_of_all(self) -> None:
        for each in self.inner:
            each.step()
            self.breaking.here("between", self)


class InADictionary(Wrapper):
    def steps_of_all(self) -> None:
        for each in dict(enumerate(self.inner)).values():
            each.step()
            self.breaking.here("between", self)


class Unrolled(Wrapper):
    def steps_of_all(self) -> None:
        self.inner[0].step()
        self.breaking.here("between", self)
        if len(self.inner) > 1:
            self.inner[1].step()


class InATry(Wrapper):
    def steps_of_all(self) -> None:
        try:
            self.inner[0].step()
            self.breaking.here("between", self)
        finally:
            self.is_done = True
        for each in self.inner[1:]:
            each.step()


class Decorated(Unrolled):
    step = _use_grad_for_differentiable(Wrapper.step)  # type: ignore[assignment]


class Profiled(InAList):
    step = Optimizer.profile_hook_step(Wrapper.step)  # type: ignore[assignment]


def by_super(base: type[Optimizer], breaking: Breaking) -> Callable[[Any], Optimizer]:
    class Derived(base):  # type: ignore[misc, valid-type]
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=LR)

        def step(self, closure: Any = None) -> Any:
            breaking.here("before", self)
            loss = super().step()
            breaking.here("after", self)
            decay(self)
            return loss

    return Derived


class Leaf(Descent):
    """With state of its own."""

    def __init__(self, params: Any, lr: float = LR) -> None:
        super().__init__(params, lr)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["m"] = torch.zeros_like(p)
            state["m"].lerp_(p.grad, 0.1)
            p.add_(state["m"], alpha=-self.param_groups[0]["lr"])


class Branching(Leaf):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad.norm() > 0:
                p.add_(p.grad.sign(), alpha=-self.param_groups[0]["lr"])


BASES = (AdamW, SGD, Leaf, Branching)
HOLDERS = (InAList, InADictionary, Unrolled, InATry, Decorated, Profiled)


def drawn(draw: random.Random, depth: int) -> Callable[[Any], Optimizer]:
    """Draw an optimizer whose step calls other steps, ``depth`` deep, with breaks of which none is alike."""
    kind, place = draw.choice([*BREAKS]), draw.choice(("before", "between", "after"))
    at, base = draw.choice((0, 1, 2, 4)), draw.choice(BASES)
    if depth == 0:
        return lambda params: base(params, lr=LR)
    if draw.random() < 0.3:
        return lambda params: by_super(base, Breaking(kind, place, at))(params)
    holder = draw.choice(HOLDERS)
    makers = [drawn(draw, depth - 1) for _ in range(draw.choice((1, 2)) if depth == 1 else 1)]
    return lambda params: holder(params, makers, Breaking(kind, place, at))


@pytest.mark.parametrize("seed", range(10))
def test_drawn_nestings_are_compensated(seed: int) -> None:
    draw = random.Random(seed)
    make, way = drawn(draw, draw.choice((1, 2, 3))), draw.choice(WAYS)
    params = parameters(draw.choice((torch.bfloat16, torch.float16)), SHAPES)
    _, errors = errors_beside_float64(make, way, params, steps=6)
    assert max(errors) < COMPENSATED


EXAMPLES: dict[str, Callable[[Any], Optimizer]] = {
    "a list of optimizers": lambda params: InAList(params, [AdamW, SGD], Breaking("print", "", 0)),
    "super().step(), then a branch": lambda params: by_super(AdamW, Breaking("branch", "after", 0))(params),
    "super().step(), then print": lambda params: by_super(AdamW, Breaking("print", "after", 0))(params),
    "print at the fourth step": lambda params: by_super(SGD, Breaking("print", "after", 4))(params),
    "torch's decorator": lambda params: Decorated(params, [Branching], Breaking("branch", "between", 0)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_break_in_the_middle_is_recorded_from_there(
    name: str, way: Way, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "collage_fx")
    _, errors = errors_beside_float64(EXAMPLES[name], way, parameters(shapes=SHAPES), steps=6)
    assert max(errors) < COMPENSATED
    told = [each.getMessage() for each in caplog.records if "run by Python" in each.getMessage()]
    assert len(told) <= 1, "not anew in each step"


def test_later_steps_compile_nothing() -> None:
    params = parameters(shapes=SHAPES)
    optimizer = install(EXAMPLES["super().step(), then a branch"](params))
    graphs = []
    for seed in range(5):
        set_gradients(params, seed)
        optimizer.step()
        graphs.append(len(backend_of(optimizer).report().graphs))
    assert graphs[2:] == graphs[2:3] * 3


def test_the_closure_of_such_a_step_runs_as_outside() -> None:
    """Its operations are no part of the step, and it differentiates."""

    class CallsLate(SGD):
        def step(self, closure: Any = None) -> Any:
            super().step()
            if first_of(self).norm() < 1e9:
                with torch.enable_grad():
                    self.loss = closure()
            decay(self)
            return self.loss

    params = parameters(shapes=SHAPES)
    set_gradients(params)
    optimizer = install(CallsLate(params, lr=LR))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.stack([(p.float() ** 2).sum() for p in params]).sum()
        loss.backward()
        return loss

    for _ in range(3):
        loss = optimizer.step(closure)
        assert type(loss) is Tensor
        for p in params:
            assert p.grad is not None
            assert type(p.grad) is Tensor
        assert torch.is_grad_enabled()
    assert all(bool(error_terms(p)[0].any()) for p in params)


class HandsOn(Optimizer):
    """Hands its closure to another optimizer, in a way that cannot be read from its source."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        handed = [lambda: closure()]
        return self.inner.step(handed[0])


class BranchesBehindItsClosure(Descent):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        if first_of(self).norm() < 1e9:
            super().step()
        return loss


#: Functions that a closure calls before it differentiates.
BEFORE: dict[str, Callable[[HandsOn], Any]] = {
    "nothing": lambda optimizer: None,
    "its optimizer": lambda optimizer: optimizer.zero_grad(),
    "the optimizer within": lambda optimizer: optimizer.inner.zero_grad(),
    "print": lambda optimizer: print(end=""),
}


@pytest.mark.parametrize("inner", [AdamW, SGD, BranchesBehindItsClosure])
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("is_backward", [True, False], ids=["backward", "autograd.grad"])
def test_a_closure_that_another_step_calls_differentiates(inner: Any, before: str, is_backward: bool) -> None:
    """A recording began in the closure, without gradients, where it called zero_grad of its optimizer."""

    def made(params: list[torch.nn.Parameter]) -> tuple[HandsOn, Callable[[], Tensor]]:
        optimizer = HandsOn(inner(params, lr=LR))

        def closure() -> Tensor:
            BEFORE[before](optimizer)
            loss = torch.stack([((p - 0.5) ** 2).sum() for p in params]).sum()
            if is_backward:
                for p in params:
                    p.grad = None
                loss.backward()
            else:
                for p, g in zip(params, torch.autograd.grad(loss, params), strict=True):
                    p.grad = g
            return loss

        return optimizer, closure

    low = parameters(shapes=SHAPES)
    high = [torch.nn.Parameter(p.detach().double()) for p in low]
    (optimizer, closure), (exact, exact_closure) = made(low), made(high)
    install(optimizer)
    start = [p.detach().clone() for p in high]
    for _ in range(4):
        optimizer.step(closure)
        exact.step(exact_closure)
    for p, q, x in zip(low, high, start, strict=True):
        assert float((full_value(p).double() - q).norm() / (q - x).norm()) < COMPENSATED


class FailingBackend(CollageBackend):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("this backend fails")


def test_a_failure_in_the_closure_of_a_recorded_step_is_told_as_it_is() -> None:
    optimizer = BranchesBehindItsClosure(parameters(shapes=SHAPES[:1]), lr=LR)
    record(optimizer, Request(CollageBackend(), {}, True), "for a test")
    fails = torch.compile(lambda x: x * 2, backend=FailingBackend())
    with pytest.raises(Exception, match="this backend fails"):
        optimizer.step(lambda: fails(torch.ones(3)))


def test_an_exception_in_the_rest_of_a_step_ends_the_recording() -> None:
    class Fails(SGD):
        fails = True

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            print(end="")
            if self.fails:
                raise KeyError("on purpose")

    params = parameters(shapes=SHAPES)
    set_gradients(params)
    optimizer = install(Fails(params, lr=LR))
    for _ in range(2):
        with pytest.raises(KeyError, match="on purpose"):
            optimizer.step()
        assert torch.is_grad_enabled()
        assert bool((torch.ones(2) + 1 == 2).all()), "operations are executed"
    optimizer.fails = False
    before = [full_value(p) for p in params]
    optimizer.step()
    assert not any(torch.equal(full_value(p), value) for p, value in zip(params, before, strict=True))


# -- steps that torch has not wrapped


class Around(Optimizer):
    """Made without ``Optimizer.__init__``, which would wrap its step."""

    def __init__(self, params: Any, make: Any = SGD) -> None:
        self.inner = make(params, lr=LR)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self.defaults = self.inner.defaults

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        for p in self.param_groups[0]["params"]:
            if p.norm() < 1e9:
                p.mul_(1 - 1e-4)


class AroundSeveral(Around):
    """An optimizer for each parameter."""

    def __init__(self, params: Any, make: Any = SGD) -> None:
        given = list(params)
        self.inner = [make([p], lr=LR) for p in given]
        self.param_groups, self.defaults = [{"params": given}], {}
        self.state = defaultdict(dict)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for inner in self.inner:
            inner.step()
        for p in self.param_groups[0]["params"]:
            print(end="")
            p.mul_(1 - 1e-4)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [SGD, AdamW, Descent])
@pytest.mark.parametrize("outer", [Around, AroundSeveral])
def test_a_step_that_torch_has_not_wrapped_is_recorded(outer: Any, make: Any, way: Way) -> None:
    def made(params: Any) -> Optimizer:
        return outer(params, make)

    _, errors = errors_beside_float64(made, way, parameters(shapes=SHAPES), steps=4)
    assert max(errors) < COMPENSATED


# -- refusals: each remedy is taken, and then the step is right


class WithoutState(Around):
    def __init__(self, params: Any) -> None:
        self.inner = SGD(params, lr=LR)
        self.param_groups = self.inner.param_groups


@pytest.mark.parametrize("way", WAYS)
def test_a_class_without_state_is_refused_by_name(way: Way) -> None:
    with pytest.raises(UnsupportedOptimizerError, match=r"WithoutState does not call Optimizer.__init__"):
        way(WithoutState(parameters(shapes=SHAPES)))()


@torch.compile(backend=CollageBackend())
def compiled_update(p: Tensor) -> None:
    assert p.grad is not None
    if p.grad.norm() > 0:
        p.data.sub_(p.grad, alpha=LR)


class CallsACompiledFunction(Descent):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            compiled_update(p)


def eager(optimizer: Optimizer) -> Callable[[], Any]:
    return optimizer.step


@pytest.mark.parametrize("way", [eager, installed])
def test_a_compiled_part_of_a_step_is_recorded(way: Way) -> None:
    _, errors = errors_beside_float64(CallsACompiledFunction, way, parameters(shapes=SHAPES), steps=4)
    assert max(errors) < COMPENSATED


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Classes of one test are no other test's."""
    yield
    torch._dynamo.reset()


class Unhashed(Descent):
    """A step with a graph break, whose code has a constant without hash, as code that Dynamo writes may."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch overloads it
        for p in self.param_groups[0]["params"]:
            p.mul_(1 - 1e-4)
            print(end="")
            p.add_(p.grad, alpha=-LR)


@pytest.mark.parametrize("way", WAYS)
def test_code_with_constants_that_have_no_hash(way: Way) -> None:
    """Python's stack, and the functions that are converted, consist of such code."""
    step: Any = Unhashed.step
    code = step.__code__.replace(co_consts=(*step.__code__.co_consts, {}))
    unhashed = type(step)(code, step.__globals__, step.__name__, None, step.__closure__)
    kind = type("Unhashed", (Unhashed,), {"step": unhashed})
    _, errors = errors_beside_float64(kind, way, parameters(shapes=SHAPES[:1]), steps=4)
    assert max(errors) < COMPENSATED


# A state that is looked up, and made, in front of a break. --------------------------------------------------


class SharesState(Optimizer):
    """Notes the parameters, and has an optimizer step whose state is its own: SAM of pytorch_optimizer.

    Dynamo has no guard on a key that is not in the state yet, and makes the entry of each step anew.
    """

    def __init__(
        self, params: Any, lr: float = LR, break_graph: Callable[[Optimizer], object] = print
    ) -> None:
        super().__init__(params, {"lr": lr})
        self.inner = AdamW(self.param_groups)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self.break_graph = break_graph

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for p in parameters:
            self.state[p]["old"] = p.clone()
        self.break_graph(self)
        for p in parameters:
            p.copy_(self.state[p].pop("old"))
        self.inner.step()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BREAKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_that_is_made_in_front_of_a_break_stays(dtype: torch.dtype, name: str, way: Way) -> None:
    def make(params: Any) -> Optimizer:
        return SharesState(params, break_graph=BREAKS[name])

    params = parameters(dtype, SHAPES)
    optimizer, errors = errors_beside_float64(make, way, params, steps=4)
    assert [int(optimizer.state[p]["step"]) for p in params] == [4, 4, 4]
    assert max(errors) <= COMPENSATED


class ByViews(Optimizer):
    """A step that updates parameters by views of their memory, after a closure and a look at a value."""

    def __init__(self, params: Any, replaces: bool) -> None:
        super().__init__(params, {})
        self.replaces = replaces

    def closure(self) -> None:
        for p in self.param_groups[0]["params"] if self.replaces else ():
            p.data = p.data.clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.mul_(1 - LR)
        (closure or self.closure)()
        for p in self.param_groups[0]["params"]:
            assert p.grad is not None
            if p.grad.norm() < 1e9:
                p.data.view(-1).add_(p.grad.view(-1), alpha=-LR)


@pytest.mark.parametrize("replaces", [False, True])
def test_a_closure_may_give_parameters_other_memory(replaces: bool) -> None:
    def step_of(optimizer: Any) -> Callable[[], Any]:
        step = install(optimizer).step
        return lambda: step(optimizer.closure)

    def make(params: Any) -> Optimizer:
        return ByViews(params, replaces)

    _, errors = errors_beside_float64(make, step_of, parameters(shapes=SHAPES), steps=6)
    assert max(errors) <= COMPENSATED
