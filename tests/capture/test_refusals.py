from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.testing._internal.two_tensor import TwoTensor

from collage_fx import CollageBackend, error_terms, full_value, install
from collage_fx.capture import first_overlap
from collage_fx.choices import Strategy
from collage_fx.errors import (
    AliasedStateError,
    UnsupportedOptimizerError,
    UnsupportedTensorError,
    UnsupportedTorchError,
)
from tests.support.refusals import refused
from tests.support.substitutes import torch_without
from tests.support.training import (
    Descent,
    compiled,
    parameters,
    run_steps,
    set_gradients,
)
from tests.support.warned import warned

BF16 = torch.bfloat16


def test_an_unknown_torch() -> None:
    optimizer = Descent(parameters())
    set_gradients(optimizer.param_groups[0]["params"])
    with torch_without("torch.somewhere:something: no such attribute"):
        text = refused(optimizer, UnsupportedTorchError)
    assert "torch.somewhere:something: no such attribute" in text


def sparse_gradient(rows: int = 8, columns: int = 4) -> Tensor:
    values = torch.ones(2, columns, dtype=BF16)
    return torch.sparse_coo_tensor(torch.tensor([[0, 2]]), values, (rows, columns), check_invariants=True)


@pytest.mark.parametrize(
    "make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SparseAdam, Descent]
)
def test_sparse_gradients(make: Callable[..., torch.optim.Optimizer]) -> None:
    """Dynamo would break the graph at them and run the step eagerly, AdamW fail in an error of Dynamo's."""
    embedding, other = parameters(shapes=[(8, 4), (3,)])
    embedding.grad = sparse_gradient()
    set_gradients([other])
    text = refused(make([embedding, other], lr=0.1), UnsupportedTensorError)
    assert "torch.sparse_coo" in text
    assert "where: param_groups[0].params[0].grad" in text
    assert "to_dense()" in text


def test_gradients_that_become_sparse_in_a_run() -> None:
    params = parameters(shapes=[(8, 4), (3,)])
    optimizer = torch.optim.SGD(params, lr=0.1)
    step = compiled(optimizer)
    run_steps(step, params, [0])
    params[0].grad = sparse_gradient()
    refused(optimizer, UnsupportedTensorError, step)
    params[0].grad = torch.ones_like(params[0])
    before = full_value(params[0])
    step()  # and on it goes
    assert torch.all(
        (full_value(params[0]) - (before - 0.1)).abs() <= before.abs() * 2.0**-15 + 0.1 * 2.0**-20
    )


def test_a_step_inside_a_users_function_is_refused_too() -> None:
    (embedding,) = parameters(shapes=[(8, 4)])
    embedding.grad = sparse_gradient()
    optimizer = torch.optim.SGD([embedding], lr=0.1)

    def train() -> None:
        optimizer.step()

    refused(optimizer, UnsupportedTensorError, torch.compile(train, backend=CollageBackend()))


def test_complex_parameters() -> None:
    p, q = Parameter(torch.randn(3, dtype=torch.complex64)), parameters(shapes=[(3,)])[0]
    p.grad = torch.ones_like(p)
    set_gradients([q])
    text = refused(torch.optim.AdamW([q, p]), UnsupportedTensorError)
    assert "torch.complex64" in text
    assert "where: param_groups[0].params[1]" in text
    assert "view_as_complex" in text


def test_integer_parameters() -> None:
    p = Parameter(torch.arange(3), requires_grad=False)
    p.grad = torch.ones_like(p)
    assert "torch.int64" in refused(Descent([p], lr=1), UnsupportedTensorError)


def test_an_unsupported_device() -> None:
    p = Parameter(torch.empty(4, dtype=BF16, device="meta"))
    p.grad = torch.empty_like(p)
    optimizer = torch.optim.AdamW([p])
    with pytest.raises(
        UnsupportedTensorError,
        match=r"device meta; supported: cpu, cuda\. nobody[\s\S]*param_groups\[0\].params\[0\]",
    ):
        compiled(optimizer)()
    assert not optimizer.state


def twins(dtype: torch.dtype = BF16) -> Parameter:
    """A parameter of a class of its own, which stands for two tensors."""
    (p,) = parameters(dtype, shapes=[(4, 2)])
    set_gradients([p])
    assert p.grad is not None
    made = Parameter(TwoTensor(p.detach(), p.detach().clone()))
    made.grad = TwoTensor(p.grad, p.grad.clone())
    return made


def first(tensor: Tensor) -> Tensor:
    """A copy of the first of the two."""
    held = tensor.detach()
    assert isinstance(held, TwoTensor)
    return held.a.clone()


class Holds(torch.optim.Optimizer):
    """Takes the steps of another, and has no ``defaults``, as ``PostLocalSGDOptimizer``."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step(closure)


def test_a_wrapper_that_torch_cannot_compile_is_refused_by_name() -> None:
    params = parameters()
    optimizer = Holds(torch.optim.SGD(params, lr=0.1))
    before = [p.detach().clone() for p in params]
    set_gradients(params)
    with pytest.raises(
        UnsupportedOptimizerError, match=r"Holds does not call[^$]*install\(optimizer.inner\)"
    ):
        install(optimizer).step()
    assert all(map(torch.equal, params, before))


@pytest.mark.parametrize("strategy", ["light", "plus", "full"])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_tensors_that_are_made_of_others(
    make: Callable[..., torch.optim.Optimizer], strategy: Strategy
) -> None:
    p = twins()
    optimizer = make([("weight", p)], lr=0.1)
    before = first(p)
    with pytest.raises(UnsupportedTensorError, match=r"class TwoTensor[\s\S]*where: weight"):
        compiled(optimizer, strategy=strategy)()
    assert torch.equal(first(p), before)
    assert not optimizer.state


def test_tensors_that_are_made_of_others_without_strict_and_plain() -> None:
    p = twins()
    assert p.grad is not None
    expected = first(p) - first(p.grad)
    (told,) = warned(compiled(Descent([p], lr=1.0), strict=False, strategy="light"))
    assert re.search(r"class TwoTensor[\s\S]*where: param_groups\[0\].params\[0\]", told)
    assert torch.equal(first(p), expected)
    compiled(Descent([twins()]), strategy="none")()
    compiled(Descent([twins(torch.float32)]))()


def shared(kind: str) -> list[Parameter]:
    base = torch.randn(8).to(BF16)
    if kind == "overlapping views":
        return [Parameter(base[:6]), Parameter(base[2:])]
    if kind == "one memory":
        return [Parameter(base), Parameter(base)]
    if kind == "one tensor":
        return [parameter := Parameter(base), parameter]
    return [Parameter(base[:1].expand(4))]


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize("kind", ["overlapping views", "one memory", "one tensor", "expanded"])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_parameters_that_share_memory(make: Callable[..., torch.optim.Optimizer], kind: str) -> None:
    params = shared(kind)
    for p in params:
        p.grad = torch.randn(p.shape).to(BF16)
    text = refused(make(params, lr=0.1), AliasedStateError)
    assert "param_groups[0].params[0]" in text
    assert kind == "expanded" or "param_groups[0].params[1]" in text
    assert "clone()" in text


class KeepsTheGradient(Descent):
    """State that is a view of the parameter itself."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if "view" not in self.state[p]:
                self.state[p]["view"] = p.detach()[1:]
            self.state[p]["view"].mul_(0.5)
            p.add_(p.grad)


def test_state_that_shares_memory_with_its_parameter() -> None:
    params = parameters(shapes=[(4,)])
    set_gradients(params)
    optimizer = KeepsTheGradient(params)
    optimizer.state[params[0]]["view"] = params[0].detach()[1:]
    text = refused(optimizer, AliasedStateError)
    assert "param_groups[0].params[0] and param_groups[0].params[0].view" in text


def test_views_side_by_side_are_fine() -> None:
    base = torch.randn(8).to(BF16)
    params = [Parameter(base[:5]), Parameter(base[5:])]
    before = base.double()
    optimizer = Descent(params)
    run_steps(compiled(optimizer), params, [0])
    gradient = torch.cat([p.grad for p in params if p.grad is not None]).double()
    moved = torch.cat([full_value(p) for p in params])
    expected = before - optimizer.param_groups[0]["lr"] * gradient
    assert torch.all((moved - expected).abs() <= expected.abs() * (2.0**-16 + 2.0**-22))


def test_what_takes_no_part_in_the_step_is_not_looked_at() -> None:
    (p,) = parameters(shapes=[(3,)])
    frozen = [
        Parameter(torch.arange(3), requires_grad=False),
        Parameter(torch.zeros(3, dtype=torch.complex64)),
    ]
    optimizer = Descent([*frozen, p])
    run_steps(compiled(optimizer), [p], [0])
    assert error_terms(p)


def test_without_strict_a_warning_says_what_is_left_alone() -> None:
    p, q = Parameter(torch.randn(3, dtype=torch.complex64)), parameters(shapes=[(3,)])[0]
    p.grad = torch.ones_like(p)
    set_gradients([q])
    optimizer = Descent([q, p])
    before = p.detach().clone()
    (told,) = warned(compiled(optimizer, strict=False))
    assert re.search(r"complex64[\s\S]*where: param_groups\[0\].params\[1\]", told)
    assert error_terms(q)
    assert torch.equal(p.detach(), before - optimizer.param_groups[0]["lr"])


def test_without_strict_shared_memory_makes_it_a_plain_step() -> None:
    results: list[Sequence[Tensor]] = []
    for backend in (CollageBackend(strict=False), "inductor"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        params = shared("overlapping views")
        for p in params:
            p.grad = torch.ones_like(p)
        step = torch.compile(Descent(params).step, backend=backend)
        if backend == "inductor":
            step()
        else:
            (told,) = warned(step)
            assert "share memory" in told
            assert isinstance(backend, CollageBackend)
            assert "share memory" in str(backend.report())
        results.append([p.detach() for p in params])
        assert all(error_terms(p) == () for p in params)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_none_strategy_refuses_nothing() -> None:
    p = Parameter(torch.randn(3, dtype=torch.complex64))
    p.grad = torch.ones_like(p)
    compiled(Descent([p]), strategy="none")()


def test_memory_in_common_is_found_by_first_and_last_elements() -> None:
    whole = torch.zeros(4, 6)
    columns = [("left", whole[:, :3]), ("right", whole[:, 3:])]  # between each other's rows
    rows = [("c", whole[2:]), ("b", whole[1:2]), ("a", whole[0])]
    assert first_overlap(rows) is None
    assert first_overlap([*rows, ("none", whole[1:1]), ("other", torch.zeros(4, 6))]) is None
    assert first_overlap(columns) == ("left", "right")
    assert first_overlap([("last", whole[3, 5:]), *rows]) == ("c", "last")
    assert first_overlap([("last", whole[3, 5:]), *rows[1:], ("d", whole[2:].view(-1)[:-1])]) is None
