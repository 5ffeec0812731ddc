"""Nothing runs eagerly unnoticed: each way past the compiled graphs is refused, or reported once."""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
import logging
import threading
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.convert_frame import CatchErrorsWrapper, convert_frame
from torch._dynamo.guards import CheckFunctionManager
from torch._dynamo.hooks import Hooks
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from collage_fx import CollageBackend, error_terms, full_value, reset_error_terms
from collage_fx.capture import watch
from collage_fx.capture.recording import is_recorded
from collage_fx.errors import (
    CollageError,
    EagerStepError,
    GraphBreakError,
    RecompileLimitError,
    UnsupportedOptimizerError,
)
from tests.support.refusals import refused
from tests.support.substitutes import functions_compiled_as_often_as_steps
from tests.support.training import Descent, compiled, parameters, run_steps, set_gradients
from tests.support.warned import warned

#: An update far below half an ulp of any parameter here, so that all of it is in the error terms.
TINY = 2.0**-20


def test_no_tensor_is_printed_while_a_step_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.11 does for its guards: on a GPU, a copy and a wait for each element that is shown."""
    printed = []
    original = torch._tensor_str._tensor_str

    def noting(tensor: Tensor, *args: Any, **kwargs: Any) -> str:
        printed.append(tensor)
        return original(tensor, *args, **kwargs)

    monkeypatch.setattr(torch._tensor_str, "_tensor_str", noting)
    params = parameters()
    run_steps(compiled(torch.optim.AdamW(params)), params, range(2))
    assert not printed
    assert repr(params[0])
    assert printed


class Unusual(Descent):
    """One parameter, moved by a tiny amount, after something that Dynamo can't capture."""

    def __init__(self, params: Any, lr: float = TINY) -> None:
        super().__init__(params, lr)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (p,) = self.param_groups[0]["params"]
        if self.before(p):
            p.add_(p.grad, alpha=-self.param_groups[0]["lr"])

    def before(self, p: Tensor) -> Any:
        return True


class BranchesInALoop(Unusual):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.norm() < 1e9:
                p.add_(p.grad, alpha=-self.param_groups[0]["lr"])


class Prints(Unusual):
    def before(self, p: Tensor) -> Any:
        print("stepping")
        return True


class CallsAnOpaqueFunction(Unusual):
    def before(self, p: Tensor) -> Any:
        _opaque(p)
        return True


@torch.compiler.disable
def _opaque(p: Tensor) -> None:
    p.data.mul_(1.0)


class CallsForAGraphBreak(Unusual):
    def before(self, p: Tensor) -> Any:
        torch._dynamo.graph_break()
        return True


class HasADisabledStep(Unusual):
    @torch.compiler.disable
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (p,) = self.param_groups[0]["params"]
        p.add_(p.grad, alpha=-self.param_groups[0]["lr"])


class Branches(Unusual):
    def before(self, p: Tensor) -> Any:
        return p.norm() < 1e9


class ReadsAValue(Unusual):
    def before(self, p: Tensor) -> Any:
        self.norm = p.norm().item()
        return True


class BranchesOnAValueItRead(Unusual):
    def before(self, p: Tensor) -> Any:
        return p.norm().item() < 1e9


def optimizer_of(kind: type[Optimizer], **options: Any) -> tuple[Tensor, Optimizer]:
    params = parameters(shapes=[(3,)])
    set_gradients(params)
    return params[0], kind(params, **options)


# Graph breaks. ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (BranchesInALoop, "branching"),
        (Prints, "print"),
        (CallsAnOpaqueFunction, "_opaque"),
        (CallsForAGraphBreak, "graph_break()"),
        (HasADisabledStep, "step"),
    ],
)
def test_a_step_that_breaks_the_graph_is_recorded(
    kind: type[Unusual], reason: str, strict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "collage_fx")
    p, optimizer = optimizer_of(kind)
    before = p.detach().clone()
    compiled(optimizer, strict=strict)()
    assert is_recorded(optimizer)
    assert torch.equal(p, before)
    assert bool(error_terms(p)[0].any())
    told = [record.getMessage() for record in caplog.records if record.name == "collage_fx"]
    assert (
        sum(
            message.startswith(f"{kind.__name__}: its steps are run") and reason in message
            for message in told
        )
        == 1
    )
    assert not any("None" in message for message in told)  # Dynamo says "Message: None", "(reason: None)"


@pytest.mark.parametrize("kind", [Branches, ReadsAValue, BranchesOnAValueItRead])
def test_breaks_that_leave_the_update_whole_are_let_through(kind: type[Unusual]) -> None:
    """Also where the rest of the step, resumed, has no tensor among its variables for Dynamo to see."""
    p, optimizer = optimizer_of(kind)
    before = p.detach().clone()
    compiled(optimizer)()
    assert torch.equal(p, before)
    assert bool(error_terms(p)[0].any())


class Wrapped:
    """An object that is called as the function it holds is."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function

    def __call__(self) -> Any:
        return self.function()


#: Ways to hand a step its closure.
WRAPPINGS: dict[str, Callable[[Callable[[], Any]], Callable[[], Any]]] = {
    "a function": lambda closure: closure,
    "a partial function": functools.partial,
    "an object": Wrapped,
    "a method": lambda closure: Wrapped(closure).__call__,
    "disabled": torch.compiler.disable,
    "a partial disabled one": lambda closure: functools.partial(torch.compiler.disable(closure)),
}


class CallsItsClosure(Unusual):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        super().step()
        return loss


@pytest.mark.parametrize(
    ("kind", "wrapping"),
    [(CallsItsClosure, "a function"), *((torch.optim.SGD, wrapping) for wrapping in WRAPPINGS)],
)
def test_the_closure_of_a_step_may_break_the_graph(kind: type[Optimizer], wrapping: str) -> None:
    """It runs backward(), which no graph contains."""
    torch._dynamo.reset()
    p, optimizer = optimizer_of(kind, lr=TINY)

    def closure() -> Tensor:
        p.grad = None
        loss = (p.float() ** 2).sum()
        loss.backward()
        return loss

    step: Callable[..., Any] = torch.compile(optimizer.step, backend=CollageBackend())
    loss = step(WRAPPINGS[wrapping](closure))
    assert float(loss.detach()) == float((p.detach().float() ** 2).sum())
    assert bool(error_terms(p)[0].any())


def test_a_users_function_may_break_the_graph_outside_of_the_step() -> None:
    def train(p: Tensor, optimizer: Optimizer) -> None:
        optimizer.zero_grad()
        (p.float() ** 2).sum().backward()
        print("loss computed")
        optimizer.step()

    torch._dynamo.reset()
    p, optimizer = optimizer_of(torch.optim.AdamW, lr=TINY)
    torch.compile(train, backend=CollageBackend())(p, optimizer)
    assert bool(error_terms(p)[0].any())
    p, optimizer = optimizer_of(Prints)
    torch.compile(train, backend=CollageBackend())(p, optimizer)
    assert is_recorded(optimizer)
    assert bool(error_terms(p)[0].any())


class Remembers(Unusual):
    """Keeps a counter and a tensor in attributes, which Dynamo forgets."""

    steps = 0

    def before(self, p: Tensor) -> Any:
        self.steps += 1
        self.norm = p.norm()
        return True


def test_what_a_step_assigns_to_the_optimizer_is_kept() -> None:
    p, optimizer = optimizer_of(Remembers)
    step = compiled(optimizer)
    for _ in range(4):
        step()
    assert isinstance(optimizer, Remembers)
    assert optimizer.steps == 4
    assert float(optimizer.norm) == float(p.norm())


class FillsNamedLists(Descent):
    """``_init_group`` fills lists that it is given by name, which Dynamo takes to stay empty."""

    def _init_group(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        for p in group["params"]:
            params.append(p)
            grads.append(p.grad)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params: list[Tensor] = []
            grads: list[Tensor] = []
            self._init_group(group=group, params=params, grads=grads)
            for p, g in zip(params, grads, strict=True):
                p.add_(g, alpha=-group["lr"])


def test_lists_that_are_filled_by_name_are_seen_filled() -> None:
    p, optimizer = optimizer_of(FillsNamedLists, lr=TINY)
    compiled(optimizer)()
    assert bool(error_terms(p)[0].any())


class BornAsASum(Descent):
    """Momentum that is born in the step as zeros, decayed, plus the gradient: to Inductor, the gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (p,) = self.param_groups[0]["params"]
        state = self.state[p]
        if not state:
            state["slow"], state["fast"] = torch.zeros_like(p), torch.zeros_like(p)
        assert p.grad is not None
        for name, decay in (("slow", 0.9), ("fast", 0.5)):
            state[name].mul_(decay).add_(p.grad)
        p.add_(state["slow"] + state["fast"], alpha=-self.param_groups[0]["lr"])


def test_newborn_state_has_memory_of_its_own() -> None:
    p, optimizer = optimizer_of(BornAsASum)
    compiled(optimizer)()
    assert p.grad is not None
    tensors = [p.grad, *optimizer.state[p].values()]
    assert len({tensor.data_ptr() for tensor in tensors}) == 3


# Steps that no graph can be made of. -----------------------------------------------------------------------


def test_lbfgs_is_refused() -> None:
    p, optimizer = optimizer_of(torch.optim.LBFGS)
    step: Callable[..., Any] = torch.compile(optimizer.step, backend=CollageBackend())
    text = refused(optimizer, UnsupportedOptimizerError, lambda: step(lambda: (p**2).sum()))
    assert "float32" in text


# Steps without the compiled callable. -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Descent])
def test_an_eager_step_of_an_optimizer_with_error_terms_is_refused(kind: type[Optimizer]) -> None:
    p, optimizer = optimizer_of(kind)
    optimizer.step()  # before anything is compiled: as ever
    step = compiled(optimizer)
    step()
    text = refused(optimizer, EagerStepError, optimizer.step)
    assert kind.__name__ in text
    assert "where: param_groups[0].params[0]" in text
    step()
    for tensor in (p, *optimizer.state[p].values()):
        reset_error_terms(tensor)
    before = p.detach().clone()
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.step()  # the user has said so
    assert not torch.equal(p, before)


def compiled_in_its_class(base: type[Optimizer]) -> type[Optimizer]:
    class Compiled(base):  # type: ignore[valid-type, misc]
        step = torch.compile(base.step, backend=CollageBackend())

    return Compiled


def compiled_by_a_decorator(base: type[Optimizer]) -> type[Optimizer]:
    class Compiled(base):  # type: ignore[valid-type, misc]
        @torch.compile(backend=CollageBackend())
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    return Compiled


@pytest.mark.parametrize("base", [torch.optim.AdamW, Descent])
@pytest.mark.parametrize("derived", [compiled_in_its_class, compiled_by_a_decorator])
def test_a_class_may_have_a_compiled_step(
    base: type[Optimizer], derived: Callable[[type[Optimizer]], type[Optimizer]]
) -> None:
    """Its instances call it by torch's wrapper around ``step``, which runs eagerly."""
    p, optimizer = optimizer_of(derived(base), lr=TINY)
    values = [full_value(p)]
    for _ in range(3):
        optimizer.step()
        values.append(full_value(p))
    assert all(bool((new != old).all()) for old, new in itertools.pairwise(values))


def test_without_strict_an_eager_step_is_reported_once() -> None:
    params = parameters(shapes=[(3,), (2,)])
    set_gradients(params)
    optimizer = Descent(params)
    compiled(optimizer, strict=False)()
    (told,) = warned(optimizer.step)  # not once a parameter
    assert "eagerly" in told
    assert warned(optimizer.step) == []


def test_optimizers_without_error_terms_are_stepped_eagerly_as_ever() -> None:
    _, optimizer = optimizer_of(Descent)
    compiled(optimizer, strategy="none")()
    optimizer.step()
    params = parameters(torch.float32, shapes=[(3,)])
    set_gradients(params)
    other = Descent(params)
    compiled(other)()
    other.step()


# A compiled model. ------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3, dtype=dtype))

    def forward(self) -> Tensor:
        return (self.weight.float() ** 2).sum()


def test_a_compiled_model_whose_steps_are_eager_is_reported_once() -> None:
    """The forward pass is all that a trainer compiles with ``module.compile(backend=...)``."""
    model = Model()
    optimizer = Descent(model.parameters(), TINY)
    model.compile(backend=CollageBackend())

    def train() -> None:
        optimizer.zero_grad()
        model().backward()
        optimizer.step()

    assert warned(train) == []  # the step may still be compiled
    (told,) = warned(train)
    assert "Descent.step() is not" in told
    assert "where: param_groups[0].params[0]" in told
    assert "step = torch.compile(optimizer.step, backend=...)" in told
    assert warned(train, train) == []
    assert not error_terms(model.weight)


@pytest.mark.parametrize("whole", ["the step too", "one function", "in a class", "float32", "strategy none"])
def test_a_compiled_model_is_not_reported_where_nothing_is_lost(whole: str) -> None:
    model = Model(torch.float32 if whole == "float32" else torch.bfloat16)
    kind: Any = compiled_in_its_class(Descent) if whole == "in a class" else Descent
    optimizer = kind(model.parameters(), lr=TINY)
    backend = CollageBackend(strategy="none" if whole == "strategy none" else "plus")
    step: Callable[[], Any] = optimizer.step
    if whole == "the step too":
        step = torch.compile(step, backend=backend)

    def train() -> None:
        optimizer.zero_grad()
        forward().backward()
        step()

    forward: Callable[[], Tensor] = model
    if whole == "one function":
        train = torch.compile(train, backend=backend)
    else:
        forward = torch.compile(model, backend=backend)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="collage_fx")
        for _ in range(2):
            train()
    assert bool(error_terms(model.weight)) == (whole not in ("float32", "strategy none"))


# Compiling again and again. ---------------------------------------------------------------------------------


class Counts(Descent):
    """Its graph depends on how often it has been called, in a way that no symbolic number covers."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (p,) = self.param_groups[0]["params"]
        self.count = f"{getattr(self, 'count', '')}x"
        p.add_(p.grad, alpha=-TINY * len(self.count))


def test_a_step_that_is_compiled_again_and_again_is_recorded() -> None:
    params = parameters(shapes=[(3,)])
    optimizer, backend = Counts(params), CollageBackend()
    step: Callable[[], Any] = torch.compile(optimizer.step, backend=backend)
    with torch._dynamo.config.patch(recompile_limit=3):
        run_steps(step, params, range(3))
        assert not is_recorded(optimizer)
        assert len(backend.report().graphs) == 3
        run_steps(step, params, [3])
        assert is_recorded(optimizer)
        run_steps(step, params, range(4, 6))
        compilations = len(backend.report().graphs)
        run_steps(step, params, range(6, 9))
    assert len(backend.report().graphs) == compilations
    assert len(optimizer.count) == 9


@pytest.mark.parametrize("place", [(CheckFunctionManager, "__init__"), (CollageBackend, "__call__")])
def test_a_step_whose_capture_fails_is_recorded_and_the_user_told(
    place: tuple[type, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A recorded step is slower: whoever has one for no reason of the optimizer's wants to know."""
    as_it_was = getattr(*place)

    def fail_once(*args: Any, **kwargs: Any) -> None:
        monkeypatch.setattr(*place, as_it_was)
        raise RuntimeError("no such guard")

    monkeypatch.setattr(*place, fail_once)
    params = parameters(shapes=[(3,)])
    optimizer = Descent(params, TINY)
    run_steps(compiled(optimizer), params, [0])
    assert is_recorded(optimizer)
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any("Descent" in message and "no such guard" in message for message in warned)
    assert bool(error_terms(params[0])[0].any())


class Cycles(Unusual):
    """Its learning rate goes by the remainder of its step counter, a symbol that AOTAutograd fails at."""

    count = 0

    def before(self, p: Tensor) -> Any:
        self.count += 1
        self.param_groups[0]["lr"] = TINY * (1 + self.count % 4)
        return True


def test_steps_that_go_by_remainders_are_compensated() -> None:
    (p,) = params = parameters(shapes=[(3,)])
    q = p.detach().double()
    step = compiled(Cycles(params))
    for seed in range(6):
        set_gradients(params, seed)
        assert p.grad is not None
        q -= TINY * (1 + (seed + 1) % 4) * p.grad.double()
        step()
    moved = float((q - p.detach().double()).abs().max())
    # In each of the six steps float32 rounds a value below 4 to 2^-23, and bfloat16 the error term to 2^-9.
    assert torch.allclose(full_value(p), q, rtol=0, atol=6 * (2.0**-23 + 2.0**-9 * moved))


def test_the_step_in_a_function_that_is_compiled_again_and_again_is_recorded() -> None:
    """Python runs the function from then on: no limit ends a run of an optimizer."""
    params = parameters(shapes=[(3,)])
    optimizer, backend = Counts(params), CollageBackend()
    step: Callable[[], Any] = torch.compile(lambda: optimizer.step(), backend=backend)
    with torch._dynamo.config.patch(recompile_limit=3), functions_compiled_as_often_as_steps():
        run_steps(step, params, range(3))
        assert not is_recorded(optimizer)
        run_steps(step, params, range(3, 9))
    assert is_recorded(optimizer)
    assert len(optimizer.count) == 9
    assert bool(error_terms(params[0])[0].any())


def test_a_function_without_an_optimizer_is_refused_at_the_limit() -> None:
    average, weight = (p.detach() for p in parameters(shapes=[(3,), (3,)]))

    def follow(phase: str) -> None:
        if phase != "frozen":
            average.lerp_(weight, 0.01)

    strict: Callable[[str], Any] = torch.compile(follow, backend=CollageBackend())
    lenient: Callable[[str], Any] = torch.compile(follow, backend=CollageBackend(strict=False))
    with torch._dynamo.config.patch(recompile_limit=3), functions_compiled_as_often_as_steps():
        for phase in "abc":
            strict(phase)
        for _ in range(2):  # and again, not only once
            with pytest.raises(RecompileLimitError, match="has been compiled 3 times"):
                strict("d")
        for phase in "abc":  # the limit is each call's of torch.compile
            lenient(phase)
        (told,) = warned(lambda: lenient("e"))
        assert "has been compiled 3 times" in told


def test_the_limit_is_each_decorated_functions_own() -> None:
    """Functions that one decorator wraps have the code of its wrapper, whichever they are."""

    @torch.no_grad()
    def average(into: Tensor, weight: Tensor) -> None:
        into.lerp_(weight, 0.5)

    @torch.no_grad()
    def follow(into: Tensor, weight: Tensor) -> None:
        into.mul_(0.5).add_(weight, alpha=0.5)

    with torch._dynamo.config.patch(recompile_limit=3), functions_compiled_as_often_as_steps():
        for function in (average, follow):
            step: Callable[..., Any] = torch.compile(function, backend=CollageBackend(), dynamic=False)
            for length in (3, 4, 5):
                step(torch.zeros(length).bfloat16(), torch.ones(length).bfloat16())
        with pytest.raises(RecompileLimitError, match="has been compiled 3 times") as met:
            step(torch.zeros(6).bfloat16(), torch.ones(6).bfloat16())
    assert "where: follow" in str(met.value)
    assert __file__ in str(met.value)


def test_the_limit_is_each_optimizers_own() -> None:
    """Dynamo counts the compilations of a function, whichever optimizer they were for."""
    with torch._dynamo.config.patch(recompile_limit=2):
        for seed in range(2 * watch.COMPILATIONS + 1):
            params = parameters(shapes=[(3,)], seed=seed)
            run_steps(compiled(Descent(params, lr=TINY)), params, [seed])
            assert bool(error_terms(params[0])[0].any())


def test_the_limit_of_a_function_is_each_calls_of_torch_compile() -> None:
    """A sweep of trials compiles the same function for each: an average of weights, say."""

    def average(mean: Tensor, p: Tensor) -> None:
        mean.lerp_(p, 0.5)

    with torch._dynamo.config.patch(recompile_limit=2):
        for seed in range(2 * watch.COMPILATIONS + 1):
            mean, p = parameters(shapes=[(3, seed + 2)] * 2, seed=seed)
            expected = mean.detach().double().lerp(p.detach().double(), 0.5)
            with torch.no_grad():
                torch.compile(average, backend=CollageBackend(), dynamic=False)(mean, p)
            assert torch.equal(full_value(mean), expected)


def test_loading_again_and_again_leaves_a_step_captured() -> None:
    """State that is loaded is other tensors, for which a step is compiled once more: not one too many."""
    params = parameters(shapes=[(3, 5)])
    optimizer = torch.optim.Adafactor(params, lr=TINY)
    step = compiled(optimizer)
    run_steps(step, params, [0])
    values, saved = [p.detach().clone() for p in params], copy.deepcopy(optimizer.state_dict())
    run_steps(step, params, [1])
    ends = [p.detach().clone() for p in params], [full_value(p) for p in params]
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(5):
            with torch.no_grad():
                for p, value in zip(params, values, strict=True):
                    p.copy_(value)
            optimizer.load_state_dict(copy.deepcopy(saved))
            run_steps(step, params, [1])
            assert not is_recorded(optimizer)
            for found, expected in zip((params, map(full_value, params)), ends, strict=True):
                assert all(map(torch.equal, found, expected))


def test_a_thread_waits_for_another_that_compiles() -> None:
    """Dynamo asks if a tensor mode is active, in whatever thread, and is told so while one compiles."""
    p, optimizer = optimizer_of(Descent, lr=TINY)
    compiling, stepped = threading.Event(), threading.Event()

    def slow(gm: Any, example_inputs: Any) -> Any:
        with TorchDispatchMode():
            compiling.set()
            assert not stepped.wait(1), "it ran eagerly meanwhile"
        return gm

    def step() -> None:
        compiling.wait()
        compiled(optimizer)()
        stepped.set()

    thread = threading.Thread(target=step)
    thread.start()
    torch.compile(lambda x: x + 1, backend=slow)(torch.zeros(2))
    thread.join()
    assert bool(error_terms(p)[0].any())


def test_what_dynamo_never_compiles_waits_for_no_compilation() -> None:
    """Python's import machinery is among it, and may hold the lock that the compiling thread needs next."""
    finished = threading.Event()
    # The code that holds it; torch 2.11 compiles the rest of importlib.
    code = importlib._bootstrap._find_and_load.__code__  # type: ignore[attr-defined]
    frame: Any = SimpleNamespace(f_code=code, f_lasti=-1, f_globals={}, f_locals={})
    callback = CatchErrorsWrapper(convert_frame(lambda gm, example_inputs: gm, Hooks()), Hooks())

    def ask_dynamo() -> None:
        callback(frame, None, {})
        finished.set()

    def slow(gm: Any, example_inputs: Any) -> Any:
        threading.Thread(target=ask_dynamo, daemon=True).start()
        assert finished.wait(30)
        return gm

    torch.compile(lambda x: x + 1, backend=slow)(torch.zeros(2))


def test_other_backends_keep_dynamos_behaviour() -> None:
    (p,) = params = parameters(torch.float32, shapes=[(3,)])
    optimizer = torch.optim.SGD(params, lr=2.0**-4)
    step = torch.compile(optimizer.step, backend="eager")
    with torch._dynamo.config.patch(recompile_limit=1):
        for seed in range(3):
            run_steps(step, params, [seed])
            optimizer.param_groups[0]["lr"] /= 2
        p.grad = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (3,), check_invariants=True)
        step()
    optimizer.step()
    _, printing = optimizer_of(Prints)
    torch.compile(printing.step, backend="eager")()


def test_every_refusal_here_is_a_collage_error() -> None:
    assert all(
        issubclass(error, CollageError)
        for error in (EagerStepError, GraphBreakError, RecompileLimitError, UnsupportedOptimizerError)
    )


# -- optimizers that torch knows nothing of


class Around(Optimizer):
    """Made without ``Optimizer.__init__``, which would wrap its ``step``, as torch_optimizer's Lookahead."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        self.param_groups, self.state = inner.param_groups, inner.state
        self.defaults = inner.defaults

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(1 + TINY)


class AroundByAMethod(Around):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        for group in self.param_groups:
            self.update(group)

    def update(self, group: dict[str, Any]) -> None:
        for p in group["params"]:
            p.data.mul_(1 + TINY)


class Trainer:
    """No optimizer, and no tensor that Dynamo sees at once."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner

    def step(self) -> None:
        self.inner.step()
        for p in self.inner.param_groups[0]["params"]:
            p.data.mul_(1 + TINY)


@pytest.mark.parametrize("outer", [Around, AroundByAMethod, Trainer])
def test_what_follows_a_step_of_torchs_is_compiled_too(outer: Callable[[Optimizer], Any]) -> None:
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    step = torch.compile(outer(torch.optim.SGD([p], lr=TINY)).step, backend=CollageBackend())
    for _ in range(2):
        p.grad = -torch.ones_like(p)
        step()
    # The products of the small numbers, of some 2**-40, are below float32's last bit.
    assert (full_value(p) == 1 + 4 * TINY).all()
