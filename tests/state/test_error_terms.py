from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import collage_fx
from collage_fx import CollageBackend, CollageError, assign, error_terms, full_value, reset_error_terms
from collage_fx.errors import ConflictingErrorFormatError, InvalidOptionError, LostErrorTermsError
from collage_fx.numerics.error_formats import ERROR_FORMATS
from collage_fx.state.error_terms import _rows_of, ensure_record, note_new, record_of, records_version
from tests.support.substitutes import parts_of_elements
from tests.support.training import Descent, compiled, live_error_terms, parameters, run_steps, set_gradients
from tests.support.warned import warned

MCF, FP32 = ERROR_FORMATS["mcf"], ERROR_FORMATS["fp32"]

# The table. -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", [full_value, error_terms, lambda each: assign(each, 0.0)])
def test_a_model_given_as_a_tensor_is_named(ask: Any) -> None:
    for wrong, name in ((torch.nn.Linear(2, 2), "Linear"), ("weight", "str")):
        with pytest.raises(InvalidOptionError, match=f"a tensor was expected, got {name}"):
            ask(wrong)


def test_a_tensor_without_error_terms() -> None:
    for tensor in (torch.randn(3), torch.randn(3).bfloat16(), torch.arange(3), torch.tensor(1.5).half()):
        assert error_terms(tensor) == ()
        value = full_value(tensor)
        assert value.dtype is torch.float64
        assert torch.equal(value, tensor.double())
        reset_error_terms(tensor)
    parameter = torch.nn.Parameter(torch.ones(2))
    assert not full_value(parameter).requires_grad
    full_value(parameter, torch.float32).zero_()  # a copy, even where the dtype is its own
    assert parameter.sum() == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("error_format", [MCF, FP32], ids=lambda f: f.name)
def test_new_error_terms_are_zero_and_made_once(dtype: torch.dtype, error_format: Any) -> None:
    hi = torch.randn(6, 4).to(dtype).t()[::2]  # neither contiguous nor dense
    made = ensure_record(hi, error_format, name="hi")
    (lo,) = error_terms(hi)
    assert (lo.shape, lo.stride(), lo.device) == (hi.shape, hi.stride(), hi.device)
    assert lo.dtype is (dtype if error_format is MCF else torch.float32)
    assert not lo.any()
    assert not lo.requires_grad
    assert ensure_record(hi, error_format, name="hi") is made
    lo.fill_(2.0**-20)
    assert torch.equal(full_value(hi), hi.double() + 2.0**-20)


def test_a_tensor_that_stays_as_it_is_costs_a_step_no_new_look_at_its_buffers() -> None:
    hi = torch.ones(6, 4).bfloat16().t()
    record = ensure_record(hi, MCF, name="hi")
    first = record.use("hi")
    with mock.patch.object(type(MCF), "auxiliaries", side_effect=AssertionError("described anew")):
        assert ensure_record(hi, MCF, name="hi") is record
        again = record.use("hi")
    assert all(one is other for one, other in zip(first, again, strict=True))


def test_what_remembers_records_looks_again_when_one_is_new() -> None:
    hi = torch.ones(3).bfloat16()
    ensure_record(hi, MCF, name="hi")
    for change in (lambda: note_new(hi), lambda: reset_error_terms(hi)):
        before = records_version()
        assert records_version() is before
        change()
        gc.collect()
        assert records_version() is not before


def test_a_row_that_is_longer_than_a_part_is_a_part() -> None:
    whole, count = torch.arange(12.0).view(3, 4), torch.tensor(7)
    with parts_of_elements(2):
        rows = list(_rows_of(whole, whole, count))
    assert [tuple(map(tuple, (row.shape, other.shape, number.shape))) for row, other, number in rows] == [
        ((1, 4), (1, 4), ())
    ] * 3


def test_tensors_are_told_apart_by_identity() -> None:
    one, other = torch.ones(3).bfloat16(), torch.ones(3).bfloat16()
    ensure_record(one, MCF, name="one")
    assert error_terms(other) == ()


def test_aliases_are_one_tensor() -> None:
    parameter = torch.nn.Parameter(torch.ones(3, 2).bfloat16())
    alias = parameter.detach()
    record = ensure_record(alias, MCF, name="alias")
    del alias
    gc.collect()
    assert ensure_record(parameter, MCF, name="p") is record
    assert error_terms(parameter.data)[0] is error_terms(parameter)[0] is record.auxiliaries[0]
    reset_error_terms(parameter.data)
    assert error_terms(parameter) == ()


def test_other_views_have_copies_of_what_is_in_their_memory() -> None:
    parameter = torch.nn.Parameter(torch.ones(3, 2).bfloat16())
    record = ensure_record(parameter, MCF, name="p")
    (lo,) = record.auxiliaries
    lo.copy_(torch.arange(6).view(3, 2) * 2.0**-12)
    for view in (
        lambda each: each.t(),
        lambda each: each.view(6),
        lambda each: each[1:],
        lambda each: each[:, 1],
    ):
        (term,) = error_terms(view(parameter))
        assert torch.equal(term, view(lo).float())
        term.zero_()
    assert lo.any()


def test_a_reset_through_an_alias_reaches_the_tensor_itself() -> None:
    parameter = torch.nn.Parameter(torch.ones(3).bfloat16())
    record = weakref.ref(ensure_record(parameter, MCF, name="p"))
    reset_error_terms(parameter.detach())
    gc.collect()
    assert error_terms(parameter) == ()
    assert record() is None  # so that compiled steps notice


def test_aliases_follow_a_tensor_to_other_memory() -> None:
    parameter = torch.nn.Parameter(torch.ones(3, 2).bfloat16())
    record = ensure_record(parameter, MCF, name="p")
    parameter.data = parameter.data.clone()
    assert ensure_record(parameter, MCF, name="p") is record
    assert ensure_record(parameter.detach(), MCF, name="alias") is record


def test_memory_that_a_tensor_has_left_is_another_tensors() -> None:
    """Though somebody keeps it, as ``model.state_dict()`` does."""
    parameter = torch.nn.Parameter(torch.ones(3).bfloat16())
    record = ensure_record(parameter, MCF, name="p")
    old = parameter.data
    parameter.data = old.clone()
    assert error_terms(old) == error_terms(torch.nn.Parameter(old)) == ()
    assert ensure_record(old, MCF, name="old") is not record
    assert record_of(parameter) is record


def test_a_reset_reaches_memory_that_a_tensor_has_left() -> None:
    parameter = torch.nn.Parameter(torch.ones(3).bfloat16())
    record = weakref.ref(ensure_record(parameter, MCF, name="p"))
    old = []
    for _ in range(2):
        old.append(parameter.data)
        parameter.data = parameter.data.clone()
        ensure_record(parameter, MCF, name="p")
    parameter.data = parameter.data.clone()
    reset_error_terms(parameter)
    assert error_terms(parameter) == ()
    assert record() is None  # so that compiled steps notice


def test_memory_that_is_gone_is_not_remembered() -> None:
    parameter = torch.nn.Parameter(torch.ones(3).bfloat16())
    for _ in range(3):
        parameter.data = parameter.data.clone()
        record = ensure_record(parameter, MCF, name="p")
        gc.collect()
    assert len(record.memory) <= 2  # the one before, as long as it is not known to be gone


def test_a_tensor_without_memory_of_its_own() -> None:
    sparse = torch.eye(2).bfloat16().to_sparse()
    assert error_terms(sparse) == ()
    reset_error_terms(sparse)


def test_two_formats_for_one_tensor_are_refused() -> None:
    hi = torch.ones(3).bfloat16()
    ensure_record(hi, MCF, name="hi").use("tensor")
    with pytest.raises(
        ConflictingErrorFormatError, match=r"'fp32'[\s\S]*'mcf'[\s\S]*hi[\s\S]*reset_error_terms"
    ):
        ensure_record(hi, FP32, name="hi")
    reset_error_terms(hi)
    assert error_terms(hi) == ()
    ensure_record(hi, FP32, name="hi")


@pytest.mark.parametrize("changed", [torch.zeros(3).half(), torch.zeros(4).bfloat16(), torch.zeros(3)])
def test_a_tensor_with_another_dtype_or_shape_starts_again(changed: Tensor) -> None:
    hi = torch.ones(3).bfloat16()
    ensure_record(hi, MCF, name="hi").auxiliaries[0].fill_(2.0**-12)
    hi.data = changed
    assert error_terms(hi) == ()  # they were about another value
    assert torch.equal(full_value(hi), changed.double())
    (told,) = warned(lambda: ensure_record(hi, MCF, name="hi"))
    assert "hi has changed its dtype or shape" in told
    made = ensure_record(hi, MCF, name="hi")
    assert not made.auxiliaries[0].any()
    assert error_terms(hi) == made.auxiliaries


def test_a_tensor_with_other_strides_takes_its_error_terms_along() -> None:
    hi = torch.randn(3, 4).bfloat16()
    record = ensure_record(hi, MCF, name="hi")
    record.auxiliaries[0].copy_(torch.randn(3, 4) * 2.0**-12)
    before = full_value(hi)
    hi.data = hi.t().contiguous().t()
    assert ensure_record(hi, MCF, name="hi") is record
    assert error_terms(hi)[0].stride() == hi.stride()
    assert torch.equal(full_value(hi), before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_parameter_moved_to_the_gpu_takes_its_error_terms_along() -> None:
    (p,) = params = parameters(shapes=[(4,)])
    optimizer = Descent(params)
    step = compiled(optimizer)
    run_steps(step, params, [0])
    before = full_value(p)
    p.grad = None
    p.data = p.cuda()
    p.grad = torch.zeros_like(p)
    step()
    assert error_terms(p)[0].is_cuda
    assert torch.equal(full_value(p).cpu(), before)


def test_allocating_from_many_threads_makes_one_record() -> None:
    hi = torch.ones(1000).bfloat16()
    barrier = threading.Barrier(8)
    made: list[object] = []

    def work() -> None:
        barrier.wait()
        made.append(ensure_record(hi, MCF, name="hi"))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 8
    assert len(set(map(id, made))) == 1


# Lifetime. ------------------------------------------------------------------------------------------------


def test_a_record_dies_with_its_tensor() -> None:
    hi = torch.ones(3).bfloat16()
    ensure_record(hi, MCF, name="hi")
    record = weakref.ref(record_of(hi))
    buffer = weakref.ref(error_terms(hi)[0])
    del hi
    gc.collect()
    assert record() is None
    assert buffer() is None


def step_of(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def run_and_forget(
    backend: Any, make: Callable[[Any], torch.optim.Optimizer]
) -> tuple[Any, dict[str, weakref.ref[Any]]]:
    """Train with a compiled callable that doesn't hold the optimizer.

    Return it and weak references to the rest.
    """
    step = torch.compile(step_of, backend=backend)
    params = parameters()
    optimizer = make(params)
    run_steps(lambda: step(optimizer), params, range(2))
    refs: dict[str, weakref.ref[Any]] = {"optimizer": weakref.ref(optimizer)}
    for i, p in enumerate(params):
        refs[f"parameter {i}"] = weakref.ref(p)
        refs[f"gradient {i}"] = weakref.ref(p.grad)
        for slot, tensor in {"parameter": p, **optimizer.state[p]}.items():
            refs[f"{slot} {i}"] = weakref.ref(tensor)
            for term in error_terms(tensor):
                refs[f"error term of {slot} {i}"] = weakref.ref(term)
    return step, refs


@pytest.mark.parametrize("arithmetic", ["wide", "native"])
def test_nothing_outlives_the_optimizer_although_the_compiled_callable_does(arithmetic: Any) -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(params, alpha=0.999)

    plain, plain_refs = run_and_forget("inductor", make)
    backend = CollageBackend(arithmetic=arithmetic)
    step, refs = run_and_forget(backend, make)
    gc.collect()
    # If torch.compile itself kept the tensors, this test could say nothing of ours.
    assert [name for name, ref in plain_refs.items() if ref() is not None] == []
    assert sum(name.startswith("error term") for name in refs) == 4
    assert [name for name, ref in refs.items() if ref() is not None] == []
    assert len(backend.report().tensors) == 4  # the report is still there, and is what could have held them
    str(backend.report())
    del plain, step


def test_a_bound_step_holds_the_optimizer_as_any_bound_method_does() -> None:
    params = parameters()
    optimizer = Descent(params)
    backend = CollageBackend()
    step = torch.compile(optimizer.step, backend=backend)
    run_steps(step, params, [0])
    buffer, parameter = weakref.ref(error_terms(params[0])[0]), weakref.ref(params[0])
    del params, optimizer
    gc.collect()
    assert parameter() is not None
    del step
    gc.collect()
    assert parameter() is None
    assert buffer() is None
    assert len(backend.report().tensors) == 2


def test_a_refused_step_leaves_no_reference() -> None:
    params = parameters()
    optimizer = Descent(params)
    run_steps(compiled(optimizer), params, [0])
    with pytest.raises(CollageError):
        compiled(optimizer, error_format="fp32")()
    refs = [weakref.ref(p) for p in params] + [weakref.ref(error_terms(p)[0]) for p in params]
    del params, optimizer
    gc.collect()
    assert [ref() for ref in refs] == [None] * 4


def test_a_models_compiled_forward_keeps_no_more_than_inductor_does() -> None:
    alive = []
    for backend in ("inductor", CollageBackend()):
        torch._dynamo.reset()
        model = torch.nn.Linear(3, 3).bfloat16()
        forward = torch.compile(lambda model, x: model(x), backend=backend)
        forward(model, torch.randn(2, 3).bfloat16()).sum().backward()
        ref = weakref.ref(model.weight)
        del model
        gc.collect()
        alive.append(ref() is not None)
    assert alive == [False, False]


def test_error_terms_of_replaced_state_live_as_long_as_that_state() -> None:
    """Which may be as long as the optimizer, with plain Inductor too.

    Dynamo binds state to the code compiled for it.
    """
    alive = []
    for backend in ("inductor", CollageBackend()):
        params = parameters()
        optimizer = torch.optim.RMSprop(params, alpha=0.999)
        run_steps(torch.compile(optimizer.step, backend=backend), params, range(2))
        state = optimizer.state[params[0]]
        old, terms = (
            weakref.ref(state["square_avg"]),
            [weakref.ref(t) for t in live_error_terms(state["square_avg"])],
        )
        state["square_avg"] = state["square_avg"].clone()
        assert error_terms(state["square_avg"]) == ()
        gc.collect()
        alive.append(old() is not None)
        assert all((term() is not None) == alive[-1] for term in terms)
        del params, optimizer, state
        gc.collect()
        assert [ref() for ref in (old, *terms)] == [None] * (1 + len(terms))
    assert alive[0] == alive[1]


def test_a_step_whose_tensors_are_gone_says_so_before_it_runs() -> None:
    from collage_fx.runtime.step import Binding, CompensatedStep

    hi = torch.ones(3).bfloat16()
    record = ensure_record(hi, MCF, name="p")
    calls: list[Any] = []
    bound = Binding(
        0,
        MCF,
        "p",
        reads=False,
        is_made=False,
        bound=torch.utils.weak.TensorWeakRef(hi),
        record=weakref.ref(record),
    )
    step = CompensatedStep(calls.append, [bound])
    step([hi])
    assert calls[0][1] is error_terms(hi)[0]
    calls.clear()
    reset_error_terms(hi)
    del record
    step([hi])  # new ones, from zero
    assert calls[0][1] is error_terms(hi)[0]
    calls.clear()
    del hi
    gc.collect()
    with pytest.raises(LostErrorTermsError, match=r"gone[\s\S]*where: p\n"):
        step([])
    assert calls == []


def test_a_parameter_that_changes_its_dtype_in_a_run_is_compensated_anew() -> None:
    (p,) = params = parameters(shapes=[(4,)])
    optimizer = Descent(params)
    step = compiled(optimizer)
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        p.grad = None
        changes = p.dtype is not dtype
        p.data = p.data.to(dtype)
        set_gradients(params)
        before = p.detach().double()
        told = warned(step)
        assert len(told) == changes
        assert all("param_groups[0].params[0] has changed its dtype" in each for each in told)
        assert p.dtype is dtype
        assert p.grad is not None
        exact = before - optimizer.param_groups[0]["lr"] * p.grad.double()
        # float32's roundings, and what float16 loses of small numbers
        assert torch.all((full_value(p) - exact).abs() <= exact.abs() * 2.0**-22 + 2.0**-40)


def test_overwriting_a_parameter_and_resetting_makes_the_value_exact() -> None:
    (p,) = params = parameters(shapes=[(4,)])
    run_steps(compiled(Descent(params)), params, [0])
    with torch.no_grad():
        p.fill_(1.0)
    left = (full_value(p) - 1).abs()
    assert left.any()
    assert torch.all(left <= 2.0**-9 * 4)  # half an ulp of the old values, all of them below 4
    collage_fx.reset_error_terms(p)
    assert torch.equal(full_value(p), torch.ones(4, dtype=torch.float64))


@pytest.mark.parametrize("fmt", ERROR_FORMATS.values(), ids=lambda fmt: fmt.name)
def test_a_step_reads_zeros_like_the_buffers_of_a_record(fmt: Any) -> None:
    """As many, of the same dtypes, and worth nothing: a tensor that has no error terms is read with them."""
    hi = torch.randn(64).bfloat16()
    zeros, buffers = fmt.zeros(hi), ensure_record(hi.clone(), fmt, name="hi").use("hi")
    assert [(each.dtype, each.shape) for each in zeros] == [(each.dtype, each.shape) for each in buffers]
    assert torch.equal(fmt.join(hi, *zeros[: len(fmt.auxiliaries(hi))]), hi.float())
