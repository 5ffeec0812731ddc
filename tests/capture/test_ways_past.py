"""Whatever way a program takes past a compensated step: the step is compensated all the same, or it is said.

Within two steps a warning, or with ``strict`` an error, names the optimizer and what to do.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Adagrad, AdamW, Optimizer

from collage_fx import CollageBackend, full_value, install
from collage_fx.errors import EagerStepError
from collage_fx.numerics import short_name
from tests.support.training import Descent, parameters

#: So small that plain bf16 loses most of each update: its error is .1 or more.
LR = 1e-5
#: Largest error of compensated steps: |p - p64| / |p64 - p0|.
COMPENSATED = 0.02
STEPS = 6

Way = Callable[[Optimizer, Callable[[], Any]], Any]


def disabled(optimizer: Optimizer, step: Callable[[], Any]) -> None:
    with torch._dynamo.config.patch(disable=True):
        step()


def under_stance(stance: str) -> Way:
    def way(optimizer: Optimizer, step: Callable[[], Any]) -> None:
        with torch.compiler.set_stance(stance):
            step()

    way.__name__ = stance
    return way


def disabled_for_dynamo(optimizer: Optimizer, step: Callable[[], Any]) -> None:
    torch.compiler.disable(step)()


def in_another_thread(optimizer: Optimizer, step: Callable[[], Any]) -> None:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            step()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for error in raised:
        raise error


def by_the_method(optimizer: Optimizer, step: Callable[[], Any]) -> None:
    optimizer.step()


def by_the_class(optimizer: Optimizer, step: Callable[[], Any]) -> None:
    type(optimizer).step(optimizer)


def by_a_new_one(optimizer: Optimizer, step: Callable[[], Any]) -> None:
    kind: Any = type(optimizer)
    new = kind(optimizer.param_groups[0]["params"], lr=LR)
    new.load_state_dict(optimizer.state_dict())
    new.step()


def by_a_copy(optimizer: Optimizer, step: Callable[[], Any]) -> None:
    copy.copy(optimizer).step()


def by_another_class(optimizer: Optimizer, step: Callable[[], Any]) -> None:
    Adagrad(optimizer.param_groups[0]["params"], lr=LR).step()


def by_one_for_each_parameter(optimizer: Optimizer, step: Callable[[], Any]) -> None:
    """As the layerwise optimizers of trainers do, in hooks of the gradients."""
    for p in optimizer.param_groups[0]["params"]:
        Descent([p], lr=LR).step()


#: Ways on which the step of the optimizer itself runs, so that it can be compensated.
SAME_STEP = [
    disabled,
    in_another_thread,
    *map(
        under_stance,
        ("force_eager", "eager_on_recompile", "fail_on_recompile", "eager_then_compile"),
    ),
]
#: Ways on which something else updates the parameters, or Dynamo is kept away.
ANOTHER_STEP = [
    disabled_for_dynamo,
    by_the_method,
    by_the_class,
    by_a_new_one,
    by_a_copy,
    by_another_class,
    by_one_for_each_parameter,
]


def installed(optimizer: Optimizer, strict: bool) -> Callable[[], Any]:
    install(optimizer, strict=strict)
    return optimizer.step


def compiled(optimizer: Optimizer, strict: bool) -> Callable[[], Any]:
    step: Callable[[], Any] = torch.compile(optimizer.step, backend=CollageBackend(strict=strict))
    return step


def compiled_within(optimizer: Optimizer, strict: bool) -> Callable[[], Any]:
    @torch.compile(backend=CollageBackend(strict=strict))
    def step() -> None:
        optimizer.step()

    return step


class Ran(NamedTuple):
    """Result of steps on a way.

    Attributes:
        error: of all steps against float64; of another class's, none.
        said: the warning, or the error that was raised.
        at: the step at which it was said, counted from the first on the way.
    """

    error: float
    said: str
    at: int


def ran(asked: Callable[..., Any], way: Way, kind: Any, *, before: int, strict: bool) -> Ran:
    """Take ``before`` steps as asked for, then others on a way."""
    params = parameters(shapes=[(16, 8), (24,)])
    reference = [torch.nn.Parameter(p.detach().double()) for p in params]
    optimizer, exact = kind(params, lr=LR), kind(reference, lr=LR)
    generator = torch.Generator().manual_seed(1)
    step = asked(optimizer, strict)
    said, at = "", 0
    for i in range(STEPS):
        for p, q in zip(params, reference, strict=True):
            p.grad = torch.randn(p.shape, generator=generator).bfloat16()
            q.grad = p.grad.double()
        exact.step()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                step() if i < before else way(optimizer, step)
            except EagerStepError as error:
                return Ran(0.0, str(error), i - before + 1)
        texts = [str(each.message) for each in caught if "eager" in str(each.message)]
        if texts and not said:
            said, at = texts[0], i - before + 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a loaded state's error terms, which an eager step has passed by
        return Ran(relative(params, reference, parameters(shapes=[(16, 8), (24,)])), said, at)


def relative(params: list[Any], exact: list[Any], starts: list[Any]) -> float:
    def flat(tensors: list[Any]) -> Tensor:
        return torch.cat([each.detach().double().flatten() for each in tensors])

    now, meant, start = flat([full_value(p) for p in params]), flat(exact), flat(starts)
    return float((now - meant).norm() / (meant - start).norm())


@pytest.mark.parametrize("way", SAME_STEP, ids=lambda way: way.__name__)
@pytest.mark.parametrize(
    ("asked", "kind", "before"),
    [
        (installed, AdamW, 0),
        (installed, Descent, 2),
        (compiled, AdamW, 2),
        (compiled, Descent, 0),
        (compiled_within, AdamW, 0),
        (compiled_within, Descent, 2),
    ],
)
def test_steps_that_torch_is_told_not_to_compile_are_compensated(
    asked: Callable[..., Any], kind: type[Optimizer], before: int, way: Way
) -> None:
    if way.__name__ == "fail_on_recompile":
        before = 2  # the first compilation is one too many for it
    found = ran(asked, way, kind, before=before, strict=True)
    assert not found.said
    assert found.error <= COMPENSATED


@pytest.mark.parametrize("way", ANOTHER_STEP, ids=lambda way: way.__name__)
@pytest.mark.parametrize("asked", [installed, compiled, compiled_within], ids=lambda asked: asked.__name__)
@pytest.mark.parametrize(
    ("kind", "before", "strict"),
    [(AdamW, 0, True), (AdamW, 2, False), (Descent, 0, False), (Descent, 2, True)],
)
def test_other_steps_are_compensated_or_it_is_said(
    way: Way, asked: Callable[..., Any], kind: type[Optimizer], before: int, strict: bool
) -> None:
    found = ran(asked, way, kind, before=before, strict=strict)
    if found.said:
        assert found.at <= 2
        assert "collage_fx" in found.said
        assert any(name in found.said for name in (kind.__name__, "Adagrad", "Descent"))
    else:
        assert way in (disabled_for_dynamo, by_the_method, by_the_class, by_a_copy)
        assert found.error <= COMPENSATED


def stepped_with_a_loss(step: Callable[..., Any], parameter: Parameter) -> None:
    for _ in range(20):
        parameter.grad = torch.ones_like(parameter)
        step(lambda: (parameter * 2).sum())


@pytest.mark.parametrize("asked", [installed, compiled], ids=lambda asked: asked.__name__)
def test_a_closure_that_calls_no_backward_pass(asked: Callable[..., Any]) -> None:
    """Its loss is to be differentiated, and is computed beside the update."""
    parameter = Parameter(torch.ones(64).bfloat16())
    optimizer = torch.optim.SGD([parameter], lr=1e-3)
    stepped_with_a_loss(asked(optimizer, strict=True), parameter)
    assert abs(full_value(parameter)[0].item() - 0.98) <= 20 * 2.0**-24


class ReadsItsGradients(torch.optim.Optimizer):
    """A step with gradients on, as of pytorch_optimizer's TRAC, around another step."""

    def __init__(self, parameters: list[Parameter]) -> None:
        self.inner = torch.optim.AdamW(parameters, lr=1e-4)
        super().__init__(self.inner.param_groups, {})
        self.seen: list[Tensor] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen = [p.grad.clone() for group in self.param_groups for p in group["params"]]
        self.inner.step()


@pytest.mark.parametrize("asked", [installed, compiled], ids=lambda asked: asked.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=short_name)
def test_gradients_that_have_a_graph_are_read_in_a_step(
    asked: Callable[..., Any], dtype: torch.dtype
) -> None:
    """``create_graph=True`` makes such gradients. Float32 was refused, too, and the remedy was no remedy."""
    start = torch.linspace(0.5, 1.5, 12).bfloat16()
    ends = []
    for kind, ask in ((dtype, asked), (torch.float64, lambda optimizer, strict: optimizer.step)):
        parameter = Parameter(start.to(kind))
        optimizer = ReadsItsGradients([parameter])
        step = ask(optimizer, strict=True)
        for _ in range(5):
            loss = (parameter**3).sum()
            (parameter.grad,) = torch.autograd.grad(loss, [parameter], create_graph=True)
            step()
            assert optimizer.seen[0].requires_grad
        ends.append(full_value(parameter).detach().double() - start.double())
        parameter.grad = None
    assert float((ends[0] - ends[1]).norm() / ends[1].norm()) < 0.02
