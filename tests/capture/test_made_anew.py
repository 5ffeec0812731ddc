"""Recorded steps that make state anew, take a trial step back, or change a tensor in place."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx import CollageBackend, install
from collage_fx.backend import backend_for
from collage_fx.capture import first_call
from collage_fx.capture.recording import is_recorded
from collage_fx.errors import UnsupportedTensorError
from tests.capture.test_recording import LR, Recorded, give_gradients, largest_error, params_of, twins
from tests.support.training import Descent, compiled, parameters, run_steps

#: Largest error of a displacement. A step is 1/40 of half an ulp of most elements.
ALLOWED = 0.005

RHO = 0.01

Way = Callable[[Tensor, Tensor], object]


def gradient_of(p: Tensor) -> Tensor:
    """Return the gradient that a closure has given a parameter."""
    assert p.grad is not None
    return p.grad


class TakesBack(Descent):
    """A step with its closure in the middle, at parameters that are moved for it."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            self.away()
            with torch.enable_grad():
                closure()
            self.finish()

    def finish(self) -> None:
        self.back()
        for p in params_of(self):
            p.add_(gradient_of(p), alpha=-LR)

    def away(self) -> None:
        for p in params_of(self):
            self.state[p]["at"] = p.data.clone()
            p.add_(gradient_of(p), alpha=RHO)

    def back(self) -> None:
        for p in params_of(self):
            p.data = self.state[p]["at"]


class CopiesBack(TakesBack):
    def back(self) -> None:
        for p in params_of(self):
            p.copy_(self.state[p]["at"])


class SubtractsAgain(TakesBack):
    def away(self) -> None:
        for p in params_of(self):
            self.state[p]["e"] = RHO * gradient_of(p)
            p.add_(self.state[p]["e"])

    def back(self) -> None:
        for p in params_of(self):
            p.sub_(self.state[p]["e"])


class SubtractsFromAKeptBuffer(SubtractsAgain):
    def away(self) -> None:
        for p in params_of(self):
            e = self.state[p].setdefault("e", torch.zeros_like(p))
            e.copy_(RHO * gradient_of(p))
            p.add_(e)


class ReadsItsLastTrialFirst(SubtractsAgain):
    """A step that reads its last trial, overwrites it, and reads it again behind the closure."""

    def __init__(self, params: Any, lr: float = LR) -> None:
        super().__init__(params, lr)
        for p in params_of(self):
            self.state[p]["e"] = torch.zeros_like(p)

    def away(self) -> None:
        for p in params_of(self):
            e = self.state[p]["e"]
            p.add_(e, alpha=LR)
            e.copy_(RHO * gradient_of(p))
            p.add_(e)


class Adaptive(TakesBack):
    def away(self) -> None:
        for p in params_of(self):
            self.state[p]["at"] = p.data.clone()
            p.add_(p.square() * gradient_of(p), alpha=RHO)


class Extragradient(TakesBack):
    def away(self) -> None:
        for p in params_of(self):
            self.state[p]["at"] = p.clone()
            self.state[p]["half"] = p - RHO * gradient_of(p)
            p.copy_(self.state[p]["half"])


class ThreeTrials(TakesBack):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for scale in (1, 0.5, 0.25):
                at = [p.clone() for p in params_of(self)]
                for p in params_of(self):
                    p.add_(gradient_of(p), alpha=-RHO * scale)
                with torch.enable_grad():
                    closure()
                for p, before in zip(params_of(self), at, strict=True):
                    p.copy_(before)
            for p in params_of(self):
                p.add_(gradient_of(p), alpha=-LR)


TRIALS = [
    TakesBack,
    CopiesBack,
    SubtractsAgain,
    SubtractsFromAKeptBuffer,
    ReadsItsLastTrialFirst,
    Adaptive,
    Extragradient,
    ThreeTrials,
]


@pytest.mark.parametrize("kind", TRIALS, ids=lambda kind: kind.__name__)
def test_a_trial_step_is_taken_back_whole(kind: type[TakesBack]) -> None:
    torch._dynamo.reset()
    low, high = twins(kind, [(4, 3), (4, 3), (7,)])
    start = [q.detach().clone() for q in params_of(high)]
    step: Callable[[Any], Any] = torch.compile(low.step, backend=CollageBackend())
    seeds = iter(range(1000))

    def closure() -> None:
        give_gradients(low, high, next(seeds))

    for _ in range(12):
        first = next(seeds)
        for each in (step, high.step):
            seeds = iter(range(first, 1000))
            closure()
            each(closure)
    assert is_recorded(low)
    assert largest_error(low, high, start) < ALLOWED


@pytest.mark.parametrize("kind", [TakesBack, *TRIALS[1:-1]], ids=lambda kind: kind.__name__)
def test_a_trial_step_of_two_captured_methods_is_taken_back_whole(kind: type[TakesBack]) -> None:
    low, high = twins(kind, [(4, 3), (4, 3), (7,)])
    start = [q.detach().clone() for q in params_of(high)]
    away, finish = (torch.compile(each, backend=CollageBackend()) for each in (low.away, low.finish))
    with torch.no_grad():
        for seed in range(12):
            give_gradients(low, high, 2 * seed)
            away()
            high.away()
            give_gradients(low, high, 2 * seed + 1)
            finish()
            high.finish()
    assert largest_error(low, high, start) < ALLOWED


class MadeAnew(Recorded):
    make: Callable[[Tensor, Tensor, dict[str, Any]], Tensor]

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        made = type(self).make(p, g, state)
        if g.norm() > 0:
            p.add_(made, alpha=-lr)


def a_moving_average(p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
    state["m"] = state["m"] * 0.9 + g * 0.1 if state else g.clone()
    return state["m"]


def a_slow_decay(p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
    state["v"] = state.get("v", torch.ones_like(p)) * 0.999 + g.square() * 0.001
    return state["v"]


def scratch(p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
    made = torch.zeros_like(p)
    made.copy_(g * 0.3)
    return made


def state_that_begins_at_zero(p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
    state["t"] = torch.zeros_like(p)
    state["t"].add_(g, alpha=0.3)
    return state["t"]


@pytest.mark.parametrize(
    "make",
    [a_moving_average, a_slow_decay, scratch, state_that_begins_at_zero],
    ids=lambda make: make.__name__,
)
def test_what_a_step_makes_anew_is_not_rounded_the_same_way_each_time(make: Any) -> None:
    """To nearest, a direction in bfloat16 is off by 2**-9 at random; an average holds ten of those."""
    torch._dynamo.reset()
    low, high = twins(type("Made", (MadeAnew,), {"make": staticmethod(make)}), [(4, 3), (7,)])
    start = [q.detach().clone() for q in params_of(high)]
    step = compiled(low)
    for seed in range(30):
        give_gradients(low, high, seed)
        step()
        high.step()
    assert largest_error(low, high, start) < 4 * 2**-9


class KeepsWhatAViewWasMadeOf(Recorded):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        if g.norm() > 0:
            state["new"] = new = p - lr * g
            p.copy_(new.t().t())


def test_nothing_is_left_uncomputed_after_a_step() -> None:
    torch._dynamo.reset()
    low, _ = twins(KeepsWhatAViewWasMadeOf, [(4, 3), (3, 5)])
    run_steps(compiled(low), params_of(low), [0])
    assert {type(low.state[p]["new"]) for p in params_of(low)} == {Tensor}


# Memory and layout, changed in place. -----------------------------------------------------------------------


def by_set(t: Tensor, d: Tensor) -> None:
    t.set_(t + d)  # type: ignore[call-overload]


def by_storage(t: Tensor, d: Tensor) -> None:
    t.set_((t + d).untyped_storage(), 0, t.shape, t.stride())


def by_typed_storage(t: Tensor, d: Tensor) -> None:
    with warnings.catch_warnings(action="ignore"):  # torch's, of TypedStorage
        t.set_((t + d).storage(), 0, t.shape, t.stride())


def by_offset(t: Tensor, d: Tensor) -> None:
    t.set_(t + d, 0, t.shape, t.stride())  # type: ignore[call-overload]


def turned(t: Tensor, d: Tensor) -> None:
    t.t_().add_(d.t())
    t.t_()


def another_name_turned(t: Tensor, d: Tensor) -> None:
    t.data.transpose_(0, 1).add_(d.t())


def squeezed(t: Tensor, d: Tensor) -> None:
    t.unsqueeze_(1).add_(d.unsqueeze(1))
    t.squeeze_()


def strided(t: Tensor, d: Tensor) -> None:
    t.as_strided_((t.numel(),), (1,)).add_(d.reshape(-1))
    t.as_strided_(d.shape, d.stride())


def detached(t: Tensor, d: Tensor) -> None:
    t.detach_().add_(d)


class Viewed(Recorded):
    way: Way

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        if not state:
            state["z"] = p.clone()
        if g.norm() > 0:
            type(self).way(state["z"], -lr * g)
        if g.norm() > 0:
            p.copy_(state["z"])


class ViewsTheParameter(Viewed):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        if g.norm() > 0:
            type(self).way(p, -lr * g)


WAYS = [
    by_set,
    by_storage,
    by_typed_storage,
    by_offset,
    turned,
    another_name_turned,
    squeezed,
    strided,
    detached,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("kind", [Viewed, ViewsTheParameter], ids=lambda kind: kind.__name__)
def test_a_tensor_that_is_changed_in_place_keeps_its_error_term_or_is_refused(
    kind: type[Viewed], way: Way
) -> None:
    torch._dynamo.reset()
    low, high = twins(type("Way", (kind,), {"way": staticmethod(way)}), [(4, 3), (5, 3)])
    start = [q.detach().clone() for q in params_of(high)]
    step = compiled(low)
    for seed in range(4):
        give_gradients(low, high, seed)
        if kind is ViewsTheParameter and way in (turned, squeezed, strided):
            with pytest.raises(UnsupportedTensorError, match=r"param_groups\[0\]\.params\[0\]"):
                step()
            return
        step()
        high.step()
    assert largest_error(low, high, start) < ALLOWED


def test_a_backend_by_its_name_records_as_the_object_does() -> None:
    torch._dynamo.reset()
    low, high = twins(KeepsWhatAViewWasMadeOf, [(4, 3)])
    start = [q.detach().clone() for q in params_of(high)]
    step: Callable[[], Any] = torch.compile(low.step, backend="collage", options={"strategy": "light"})
    for seed in range(3):
        give_gradients(low, high, seed)
        step()
        high.step()
    assert is_recorded(low)
    assert largest_error(low, high, start) < ALLOWED
    assert any(
        graph.subject.startswith("KeepsWhat") for graph in backend_for(strategy="light").report().graphs
    )


# Who calls the closure. -------------------------------------------------------------------------------------


class CallsFirst(Optimizer):
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.zero_grad()
        return loss


class PassesOn(Optimizer):
    inner: Any

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class CallsInTheMiddle(Optimizer):
    def step(self, closure: Any = None) -> Any:
        self.zero_grad()
        with torch.enable_grad():
            return closure()


class CallsTwice(Optimizer):
    def step(self, closure: Any = None) -> Any:
        closure()
        self.zero_grad()
        return closure()


class CallsInALoop(Optimizer):
    def step(self, closure: Any = None) -> Any:
        for _ in range(3):
            closure()


class ReadsAGradientFirst(Optimizer):
    def step(self, closure: Any = None) -> Any:
        before = self.param_groups[0]["params"][0].grad
        loss = None
        if closure is not None:
            loss = closure()
        return loss, before


class WrapsItsClosure(Optimizer):
    def step(self, closure: Any = None) -> Any:
        closure = torch.enable_grad()(closure)
        closure()


class Inherits(CallsInTheMiddle):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Ignores(Optimizer):
    def step(self, closure: Any = None) -> Any:
        self.zero_grad()


class CallsAHelper(Optimizer):
    def step(self, closure: Any = None, only: Any = None) -> Any:
        loss = None
        if _exists(closure) and only is None:
            loss = closure()
        self.zero_grad()
        return loss


class UsesTheLoss(Optimizer):
    def step(self, closure: Any = None) -> Any:
        loss: Any = None if closure is None else closure()
        self.size = float(loss)
        return loss


class CallsFirstElse(Optimizer):
    def step(self, other: Any = 1, *, evaluate: Any = None) -> Any:
        if evaluate is None:  # noqa: SIM108
            loss = None
        else:
            loss = evaluate()
        return loss


class NeedsIt(Optimizer):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        loss = closure()
        return loss


class ReturnsMore(Optimizer):
    def step(self, closure: Any = None) -> Any:
        loss = closure() if callable(closure) else None
        return loss, 1


class PassesByName(PassesOn):
    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure=closure)


class LooksFirst(Optimizer):
    def step(self, closure: Any = None, scale: Any = 1) -> Any:
        """Import, check and raise before the closure is called."""
        import math

        self._cuda_graph_capture_health_check()

        assert scale
        if not callable(scale):
            pass
        elif scale is math:
            raise ValueError
        loss = None
        if closure is not None:
            loss = closure()
        return loss


class AsksForTwo(Optimizer):
    def step(self, closure: Any = None, only: Any = None) -> Any:
        return closure() if closure and only else None


class AsksForOneOfTwo(Optimizer):
    def step(self, closure: Any = None, only: Any = None) -> Any:
        return closure() if closure or only else None


class AsksWhetherNot(Optimizer):
    def step(self, closure: Any = None, only: Any = None) -> Any:
        return None if not closure or not only else closure()


class Demands(Optimizer):
    def step(self, closure: Any = None) -> Any:
        assert closure is not None
        loss = closure()
        return loss


class DependsElsewhere(Optimizer):
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        if closure is not None:
            self.zero_grad()
        return loss


class KeepsTheLoss(Optimizer):
    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            self.loss = closure()
        return None


class HasAnotherLoss(Optimizer):
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else self.defaults["last"]
        return loss


class HasAnotherLossElse(Optimizer):
    def step(self, closure: Any = None) -> Any:
        if closure is not None:  # noqa: SIM108
            loss = closure()
        else:
            loss = self.defaults["last"]
        return loss


class DoesMore(Optimizer):
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            loss = closure()
            self.zero_grad()
        return loss


class DoesMoreInside(Optimizer):
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
                self.zero_grad()
        return loss


class InheritsFirst(CallsFirst):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class AssignsEither(Optimizer):
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        return loss


class AsksForNeither(Optimizer):
    def step(self, closure: Any = None, only: Any = None) -> Any:
        return closure() if not (closure is None or only) else None


class Checks(Optimizer):
    def step(self, closure: Any = None) -> Any:
        if not closure:
            raise ValueError
        assert closure
        assert callable(closure)
        loss = closure()
        return loss


class Converts(Optimizer):
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            loss = float(closure())
        return loss


class AsksItself(Optimizer):
    def step(self, closure: Any = None) -> Any:
        return closure() if closure is not None and self.defaults else None


class AsksTwice(Optimizer):
    def step(self, closure: Any = None, only: Any = None) -> Any:
        loss = None
        if closure is not None:  # noqa: SIM102
            if only:
                loss = closure()
        return loss


class ComparesIt(Optimizer):
    def step(self, closure: Any = None, other: Any = None) -> Any:
        same = closure == other
        loss = closure()
        return loss, same


class ChoosesOne(Optimizer):
    def step(self, closure: Any = None, other: Any = None) -> Any:
        chosen = closure if other is None else other
        return closure(), chosen


class HandsOnAfterwards(Optimizer):
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        self.register_step_post_hook(closure)
        return loss


class CallsWithAnArgument(Optimizer):
    def step(self, closure: Any = None) -> Any:
        loss = closure(1)
        return loss


class ReturnsEarly(Optimizer):
    def step(self, closure: Any = None, only: Any = None) -> Any:
        if only:
            return None
        return closure() if closure is not None else None


class ReturnsTwice(Optimizer):
    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            return closure()
        return self.defaults["last"]


class LoopsFirst(Optimizer):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = 1
        return closure() if closure is not None else None


class AsksByCalling(Optimizer):
    def step(self, closure: Any = None) -> Any:
        return closure() if _is_called(closure) else None


class IsALambda(Optimizer):
    step = lambda self, closure=None: closure()  # noqa: E731


def _call(self: Any, closure: Any) -> Any:
    return closure()


class IsNoFunction(Optimizer):
    step = partial(_call, None)


class IsDecorated(Optimizer):
    @cache  # noqa: B019
    def step(self, closure: Any = None) -> Any:
        return closure()


def _is_called(value: Any) -> bool:
    return value() is not None


def _exists(value: Any) -> bool:
    return value is not None


def made(kind: type[Optimizer]) -> Any:
    optimizer = object.__new__(kind)
    if issubclass(kind, PassesOn):
        optimizer.inner = torch.optim.SGD(parameters())  # type: ignore[attr-defined]
    return optimizer


@pytest.mark.parametrize(
    "kind",
    [
        *(torch.optim.AdamW, torch.optim.SGD, CallsFirst, PassesOn, CallsAHelper, CallsFirstElse),
        *(PassesByName, LooksFirst, AsksForTwo, AsksWhetherNot, InheritsFirst, AssignsEither),
        AsksForNeither,
    ],
)
def test_a_closure_that_is_called_first_for_its_result_need_not_be_handed_over(kind: type[Optimizer]) -> None:
    call = first_call(made(kind))
    assert call is not None
    assert call.is_only_returned


@pytest.mark.parametrize(
    "kind",
    [
        *(UsesTheLoss, NeedsIt, ReturnsMore, AsksForOneOfTwo, Demands, DependsElsewhere, KeepsTheLoss),
        *(HasAnotherLoss, HasAnotherLossElse, DoesMore, DoesMoreInside, ReturnsTwice, Checks, Converts),
    ],
)
def test_the_result_of_a_closure_is_handed_over_to_a_step_that_uses_it(kind: type[Optimizer]) -> None:
    call = first_call(made(kind))
    assert call is not None
    assert not call.is_only_returned


@pytest.mark.parametrize(
    "kind",
    [
        *(
            torch.optim.LBFGS,
            CallsInTheMiddle,
            CallsTwice,
            CallsInALoop,
            ReadsAGradientFirst,
            WrapsItsClosure,
            Inherits,
            TakesBack,
        ),
        *(Ignores, Descent, LoopsFirst, AsksByCalling, IsALambda, IsNoFunction, IsDecorated, ReturnsEarly),
        *(AsksItself, AsksTwice, ComparesIt, ChoosesOne, HandsOnAfterwards, CallsWithAnArgument),
    ],
)
def test_any_other_closure_is_handed_over(kind: type[Optimizer]) -> None:
    assert first_call(made(kind)) is None


@pytest.mark.parametrize(
    ("kind", "arguments", "is_called"),
    [
        (CallsFirst, {"closure": print}, True),
        (CallsFirst, {"closure": None}, False),
        (CallsFirst, {}, False),
        (CallsAHelper, {"closure": print, "only": None}, True),
        (CallsAHelper, {"closure": print, "only": 1}, False),
        (AsksWhetherNot, {"closure": print, "only": 1}, True),
        (AsksWhetherNot, {"closure": print, "only": 0}, False),
        (CallsFirstElse, {"other": 1, "evaluate": print}, True),
        (torch.optim.SGD, {"closure": print}, True),
    ],
)
def test_a_closure_is_called_if_the_step_would_call_it(
    kind: type[Optimizer], arguments: dict[str, Any], is_called: bool
) -> None:
    call = first_call(made(kind))
    assert call is not None
    assert call.holds(arguments) is is_called


def test_an_installed_step_calls_its_closure_itself() -> None:
    torch._dynamo.reset()
    optimizer = install(TakesBack(parameters(shapes=[(4, 3)])))
    (p,) = params_of(optimizer)
    seen: list[Tensor] = []

    def closure() -> Tensor:
        seen.append(p.detach().clone())
        p.grad = None
        loss = p.float().square().sum()
        loss.backward()
        return loss

    closure()
    for _ in range(2):
        optimizer.step(closure)
    before, *perturbed = seen
    assert len(perturbed) == 2
    assert not torch.equal(before, perturbed[0])
