"""What ``install`` refuses: the remedy that the message names is executed, and then the step is right."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

import collage_fx
from collage_fx import backend_of, install, step_in_backward
from collage_fx.errors import (
    EagerStepError,
    GradientReleaseError,
    InvalidOptionError,
    UnsupportedOptimizerError,
)
from collage_fx.torch_compat.version import version
from tests.support.training import Descent, parameters, run_steps
from tests.support.written_classes import gradients, relative_error, written_class

STEPS = 3
SHAPES = ((8, 16), (6,))

#: Bound of the error: a bfloat16 term under a bfloat16 value leaves 2**-17 of each weight of about 1 at each
#: step; a weight moves by 2**-10 at least. Plain bfloat16 (2**-9 of a weight) is off by about 1.
ALLOWED = STEPS * 2.0**-17 / 2.0**-10


def start(dtype: torch.dtype = torch.bfloat16) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(p.detach().to(dtype)) for p in parameters(shapes=SHAPES)]


def train(params: Sequence[Tensor], step: Callable[[], Any]) -> Sequence[Tensor]:
    for seed in range(STEPS):
        for p, gradient in zip(params, gradients(params, seed), strict=True):
            p.grad = gradient
        step()
    return params


def error(params: Sequence[Tensor], made: Callable[[Any], Optimizer]) -> float:
    exact = start(torch.float64)
    return relative_error(params, train(exact, made(exact).step), start())


# Wrappers without what Optimizer.__init__ makes. ------------------------------------------------------------


class Holding(Optimizer):
    """A wrapper with an optimizer, as pytorch_optimizer's SafeFP16Optimizer."""

    def __init__(self, inner: Optimizer) -> None:
        self.optimizer = inner

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class HoldingMany(Optimizer):
    """A wrapper with an optimizer for each parameter, as torchao's CPUOffloadOptimizer."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.one = None
        self.by_parameter = {p: SGD([p], lr=2.0**-10) for p in params}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for each in self.by_parameter.values() for group in each.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.by_parameter.values():
            each.step()


def test_the_optimizer_that_a_wrapper_holds_is_installed() -> None:
    params = start()
    optimizer = Holding(SGD(params, lr=2.0**-10))
    with pytest.raises(UnsupportedOptimizerError) as refused:
        install(optimizer)
    assert refused.value.remedy.endswith(": collage_fx.install(optimizer.optimizer)")
    collage_fx.install(optimizer.optimizer)
    assert error(train(params, optimizer.step), lambda p: SGD(p, lr=2.0**-10)) <= ALLOWED


def test_the_optimizers_that_a_wrapper_holds_are_installed() -> None:
    params = start()
    optimizer = HoldingMany(params)
    with pytest.raises(UnsupportedOptimizerError) as refused:
        install(optimizer)
    assert refused.value.remedy.endswith(": collage_fx.install(optimizer.by_parameter[...])")
    for each in params:
        collage_fx.install(optimizer.by_parameter[each])
    assert error(train(params, optimizer.step), lambda p: SGD(p, lr=2.0**-10)) <= ALLOWED


def test_a_class_that_forgets_its_base_is_told_so() -> None:
    with pytest.raises(UnsupportedOptimizerError, match=r"have it call super\(\)\.__init__"):
        install(object.__new__(Descent))


# Steps that cannot update anything. ------------------------------------------------------------------------

RAISING = [
    "def step(self, closure=None): raise NotImplementedError",
    "def step(self):\n    'Documented.'\n    raise RuntimeError('call fused_backward')",
    "@torch.no_grad()\ndef step(self, closure=None):\n    if closure:\n        raise ValueError\n"
    "    else:\n        raise TypeError",
    "def step(self, *args):\n    message = 'no'\n    self.told = True\n    raise IOError(message)",
    "step = Optimizer.step",
]

#: Steps that may raise, and may not.
NOT_ONLY_RAISING = [
    "def step(self, closure=None):\n    if closure is not None:\n        raise ValueError",
    "def step(self, closure=None):\n    try:\n        raise ValueError\n    except ValueError:\n        pass",
]


@pytest.mark.parametrize("has_source", [True, False])
@pytest.mark.parametrize("body", RAISING)
def test_a_step_that_only_raises_is_no_step(body: str, has_source: bool) -> None:
    optimizer = written_class(body, has_source=has_source)(start())
    with pytest.raises(UnsupportedOptimizerError, match="no step, or one that only raises"):
        install(optimizer)
    assert "step" not in vars(optimizer)


@pytest.mark.parametrize("body", NOT_ONLY_RAISING)
def test_a_step_that_may_return_is_a_step(body: str) -> None:
    optimizer = written_class(body)(start())
    assert install(optimizer) is optimizer


# Options. ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_an_update_that_is_to_be_differentiated(kind: Any) -> None:
    params: list[Any] = [p.clone() for p in start()]
    optimizer = install(kind(params, lr=2.0**-10, differentiable=True))
    with pytest.raises(UnsupportedOptimizerError) as refused:
        train(params, optimizer.step)
    assert refused.value.where == f"{kind.__name__}(differentiable=True)"
    assert refused.value.remedy.startswith("make the optimizer with differentiable=False")
    assert all(map(torch.equal, params, start()))
    params = start()
    trained = train(params, install(kind(params, lr=2.0**-10, differentiable=False)).step)
    assert error(trained, lambda p: kind(p, lr=2.0**-10)) <= ALLOWED


# Steps that are compiled already. ---------------------------------------------------------------------------


class CompiledAdamW(AdamW):
    step = torch.compile(AdamW.step, backend="eager")


class CompiledDescent(Optimizer):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.compile(backend="eager")
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad * self.param_groups[0]["lr"])


@pytest.mark.parametrize("kind", [CompiledAdamW, CompiledDescent])
def test_a_class_that_has_compiled_its_step_is_compiled_anew(kind: Any) -> None:
    params = start()
    assert (
        error(train(params, install(kind(params, lr=2.0**-10)).step), lambda p: kind(p, 2.0**-10)) <= ALLOWED
    )


class AroundACompiledStep(Optimizer):
    """An optimizer around a step that another backend has compiled; it may give gradients back, too."""

    def __init__(self, inner: Optimizer, *, clears: bool) -> None:
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults
        self.inner_step: Any = torch.compile(inner.step, backend="eager")
        self.clears = clears

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner_step()
        for p in self.param_groups[0]["params"]:
            p.grad = None if self.clears else p.grad


@pytest.mark.parametrize("clears", [False, True])
def test_an_update_by_code_of_another_backend_is_refused(*, clears: bool) -> None:
    params = start()
    optimizer = install(AroundACompiledStep(AdamW(params, lr=2.0**-10), clears=clears))
    if version() < (2, 12):  # it is recorded
        assert error(train(params, optimizer.step), lambda p: AdamW(p, lr=2.0**-10)) <= ALLOWED
        return
    with pytest.raises(EagerStepError, match="by code that this backend has not compiled") as refused:
        train(params, optimizer.step)
    assert f"AroundACompiledStep.step ({__file__}:" in str(refused.value)
    assert "install(optimizer) compiles it" in refused.value.remedy
    train(params, install(optimizer, strict=False).step)


def test_arguments_that_come_after_the_backward_pass() -> None:
    """The step's parts in the backward pass have not seen them; the remedy is executed."""
    body = (
        "@torch.no_grad()\ndef step(self, closure=None, scale=1.0):\n"
        "    for p in self.param_groups[0]['params']:\n        if p.grad is not None:\n"
        "            p.sub_(p.grad * scale * 2.0**-10)"
    )
    model = torch.nn.Linear(16, 8, bias=False).bfloat16()
    (weight,) = model.parameters()
    optimizer: Any = written_class(body)([weight])
    release = step_in_backward(model, optimizer)
    model(torch.ones(1, 16, dtype=torch.bfloat16)).sum().backward()
    with pytest.raises(GradientReleaseError, match="given 'scale'") as refused:
        optimizer.step(scale=4.0)
    assert refused.value.remedy.startswith("call remove() of the handle")
    optimizer.step()
    release.remove()
    before = collage_fx.full_value(weight)
    model(torch.ones(1, 16, dtype=torch.bfloat16)).sum().backward()
    optimizer.step(scale=4.0)
    moved = before - collage_fx.full_value(weight)
    assert float((moved / 2.0**-8 - 1).abs().max()) <= ALLOWED


# Keywords. --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "misspelt", "meant"),
    [
        ("audit", "shape", "shapes"),
        ("install", "backnd", "backend"),
        ("convert", "dryrun", "dry_run"),
        ("step_in_backward", "maxnorm", "max_norm"),
        ("offload", "bucketbytes", "bucket_bytes"),
    ],
)
def test_keywords_of_a_function_are_proposed_beside_options(name: str, misspelt: str, meant: str) -> None:
    optimizer = SGD(start(), lr=0.1)
    model = torch.nn.ParameterList(optimizer.param_groups[0]["params"])
    given = {"audit": (SGD,), "install": (optimizer,), "offload": (optimizer,)}.get(name, (model, optimizer))
    with pytest.raises(InvalidOptionError, match=f"'{misspelt}'; did you mean {meant}( or|\\?)") as raised:
        getattr(collage_fx, name)(*given, **{misspelt: 1})
    assert meant in str(raised.value).partition("others here: ")[2]
    assert type(optimizer).step is SGD.step
    assert "step" not in vars(optimizer)


# Reports and names. -----------------------------------------------------------------------------------------


def test_a_recorded_optimizer_does_not_wait_for_a_step() -> None:
    body = (
        "@torch.no_grad()\ndef step(self, closure=None):\n"
        "    for p in self.param_groups[0]['params']:\n        if p.grad.norm() > 0:\n"
        "            p.sub_(p.grad * 2.0**-10)"
    )
    params = start()
    optimizer = install(written_class(body)(params))
    assert "not compiled yet: call optimizer.step() if it is installed" in str(backend_of(optimizer).report())
    run_steps(optimizer.step, params, range(1))
    assert "not compiled yet" not in str(backend_of(optimizer).report())


@pytest.mark.skipif(importlib.util.find_spec("pytorch_optimizer") is None, reason="needs pytorch_optimizer")
def test_a_module_of_optimizers_is_an_attribute() -> None:
    found: Any = collage_fx.optim
    assert issubclass(found.pytorch_optimizer.Lion, Optimizer)


def test_a_name_that_is_neither_a_class_nor_a_module() -> None:
    with pytest.raises(AttributeError, match=r"torch\.optim has no such class, and no module of this name"):
        getattr(collage_fx.optim, "nowhere")  # noqa: B009
