"""Tensors that are not what a step was compiled for, and what looking for them costs."""

from __future__ import annotations

import itertools
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from collage_fx import CollageBackend, error_terms, full_value
from collage_fx.errors import ChangedTensorError, UnsupportedTensorError
from collage_fx.numerics.error_formats import ERROR_FORMATS
from collage_fx.runtime.layouts import Expected, Layouts
from collage_fx.state.error_terms import ensure_record
from tests.support.training import differences, everything, parameters, run_steps, set_gradients
from tests.support.whole import pipeline

SHAPES = [(4, 6)] * 4


class Run:
    """AdamW, whose parameters and state Dynamo knows by identity alone, after two steps."""

    def __init__(self, *, by_family: bool, shapes: Any = SHAPES) -> None:
        torch._dynamo.reset()
        self.params = parameters(shapes=shapes)
        self.optimizer = torch.optim.AdamW(self.params, lr=1e-2)
        self.backend = CollageBackend(passes=pipeline(by_family=by_family))
        self.step = torch.compile(self.optimizer.step, backend=self.backend)
        run_steps(self.step, self.params, [0, 1])


def transposed(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous().t()


def change_dtype(run: Run) -> str:
    for p in run.params:
        p.data, p.grad = p.data.half(), None
        p.grad = torch.ones_like(p)
    return r"torch.float16 on cpu, where .* torch.bfloat16 on cpu\s+where: param_groups\[0\].params\[0\]\n"


def change_strides(run: Run) -> str:
    run.params[2].data = transposed(run.params[2].data)
    return r"strides \(1, 4\), where .* strides \(6, 1\)\s+where: param_groups\[0\].params\[2\]\n"


def change_strides_of_state(run: Run) -> str:
    state = run.optimizer.state[run.params[3]]["exp_avg"]
    state.data = transposed(state.data)
    return r"strides \(1, 4\), where .* strides \(6, 1\)\s+where: param_groups\[0\].params\[3\].exp_avg\n"


def change_size_of_gradient(run: Run) -> str:
    grad = run.params[1].grad
    assert grad is not None
    grad.data = torch.ones(6, 4).bfloat16()
    return r"size \(6, 4\) .*, where .* size \(4, 6\) .*\s+where: param_groups\[0\].params\[1\].grad\n"


def lay_error_terms_out_anew(run: Run) -> None:
    """As another compiled step does whose parameter had other strides."""
    p = run.params[0]
    data = p.data
    p.data = transposed(data)
    ensure_record(p, ERROR_FORMATS["exact"], name="p")
    p.data = data


CHANGES: list[Callable[[Run], str]] = [
    change_dtype,
    change_strides,
    change_strides_of_state,
    change_size_of_gradient,
]


@pytest.mark.parametrize("by_family", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_that_compiled_code_would_misread_is_refused(
    change: Callable[[Run], str], by_family: bool
) -> None:
    run = Run(by_family=by_family)
    set_gradients(run.params, 2)
    named = change(run)
    before = everything(run.optimizer)
    for _ in range(2):
        with pytest.raises(ChangedTensorError, match=named):
            run.step()
    assert not differences(before, everything(run.optimizer))


@pytest.mark.parametrize("by_family", [True, False])
def test_error_terms_of_another_layout_are_laid_out_again(by_family: bool) -> None:
    runs = [Run(by_family=by_family), Run(by_family=by_family)]
    lay_error_terms_out_anew(runs[0])
    for run in runs:
        set_gradients(run.params, 2)
        run.step()
    assert not differences(*(everything(run.optimizer) for run in runs))


@pytest.mark.parametrize("by_family", [True, False])
def test_memory_to_be_read_with_the_other_sign_is_refused(by_family: bool) -> None:
    """Also by a step compiled for it, which Inductor itself gets wrong."""
    run = Run(by_family=by_family)
    p = run.params[2]
    p.data = torch._neg_view(p.data)
    before = everything(run.optimizer)
    for _ in range(2):
        with pytest.raises(UnsupportedTensorError, match=r"its negative[\s\S]*params\[2\]"):
            run.step()
        torch._dynamo.reset()
    assert not differences(before, everything(run.optimizer))
    p.data = p.data.resolve_neg()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other elements in memory than the last step has left
        run.step()


def test_compiled_anew_the_step_goes_on() -> None:
    run = Run(by_family=True)
    before = full_value(run.params[2])
    change_strides(run)
    torch._dynamo.reset()
    run_steps(run.step, run.params, [2])
    assert error_terms(run.params[2])[0].stride() == (1, 4)
    moved = (full_value(run.params[2]) - before).abs()
    assert torch.all((moved > 0) & (moved < 0.02))  # Adam's steps: no longer than the learning rate, about


@pytest.mark.parametrize("by_family", [True, False])
def test_gradients_may_be_laid_out_anew_in_each_step(by_family: bool) -> None:
    """Strides that stay, that go again, and a gradient that is to be read with the other sign."""
    orders: list[Callable[[Tensor], Tensor]] = [
        *(transposed, transposed, Tensor.clone, lambda g: torch._neg_view(-g), Tensor.clone)
    ]
    runs = [Run(by_family=by_family), Run(by_family=by_family)]
    for i, order in enumerate(orders, 2):
        for run, laid_out in zip(runs, (order, Tensor.clone), strict=True):
            set_gradients(run.params, i)
            for p in run.params[1:]:
                assert p.grad is not None
                p.grad = laid_out(p.grad)
            run.step()
        assert not differences(*(everything(run.optimizer) for run in runs))


#: Whether every number of the first dtype is one of the second, in which code has been compiled.
HOLDS = {
    (torch.bfloat16, torch.float32): True,
    (torch.float16, torch.float32): True,
    (torch.float32, torch.float64): True,
    (torch.float32, torch.bfloat16): False,
    (torch.float16, torch.bfloat16): False,
    (torch.bfloat16, torch.float16): False,
    (torch.float8_e4m3fn, torch.bfloat16): True,  # has no common dtype with others
    (torch.float8_e5m2, torch.float16): True,
    (torch.bfloat16, torch.float8_e5m2): False,
    (torch.int8, torch.float32): False,  # no dtype of gradients
}


@pytest.mark.parametrize(("given", "compiled"), HOLDS, ids=str)
def test_gradients_of_another_dtype_are_taken_if_they_stay_exact(
    given: torch.dtype, compiled: torch.dtype
) -> None:
    cpu = torch.device("cpu")
    layouts = Layouts([Expected(0, "g", compiled, cpu, (3,), (1,), is_checked=False, is_only_read=True)])
    arguments = [torch.tensor([1.0, -3.0, 7.0]).to(given)]
    if HOLDS[given, compiled]:
        layouts.fit(arguments)
        assert arguments[0].dtype is compiled
        assert arguments[0].tolist() == [1.0, -3.0, 7.0]
        return
    with pytest.raises(ChangedTensorError, match=f"of {given} on cpu, where .* for {compiled} on cpu"):
        layouts.fit(arguments)


def calls_of_a_step(tensors: int) -> int:
    run = Run(by_family=True, shapes=[(3,)] * tensors)
    set_gradients(run.params, 2)
    calls = itertools.count()

    def watch(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            next(calls)

    sys.setprofile(watch)
    try:
        run.step()
    finally:
        sys.setprofile(None)
    return next(calls)


def test_a_step_makes_no_call_for_each_tensor() -> None:
    """By Python's count, which is the same on every machine: each takes 0.1 to 1 us."""
    few, many = map(calls_of_a_step, (4, 12))
    assert few == many


def test_the_tensors_of_a_call_are_not_kept() -> None:
    bf16, cpu = torch.bfloat16, torch.device("cpu")
    layouts = Layouts([Expected(0, "g", bf16, cpu, (2, 3), (3, 1), is_checked=False, is_only_read=True)])
    for make in (torch.ones, lambda *size: torch.ones(*reversed(size)).t()):
        tensor = make(2, 3).bfloat16()
        arguments = [tensor]
        layouts.fit(arguments)
        assert arguments[0].stride() == (3, 1)
        kept = weakref.ref(tensor)
        del tensor, arguments
        assert kept() is None
