"""What programs do to parameters and state between two steps: moved, replaced, written."""

from __future__ import annotations

import copy
import gc
import itertools
import random
import sys
import warnings
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

import collage_fx
from collage_fx import CollageBackend, assign, error_terms, full_value, install, move_state
from collage_fx.numerics import ERROR_FORMATS
from collage_fx.state.written import WriteDetector
from tests.support.substitutes import lookups_of_error_terms
from tests.support.training import (
    Descent,
    LateMomentum,
    compiled,
    differences,
    everything,
    parameters,
    run_steps,
    set_gradients,
)
from tests.support.warned import tensors_in, warned

#: Rows of blocks for packed formats, and shapes of which one is there twice.
SHAPES = ((64, 64), (5,), (64, 64))


class Normed(Optimizer):
    """State of two kinds; a step that branches on a value, so that it is recorded."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is None or float(p.grad.abs().max()) > 1e9:
                continue
            state = self.state[p]
            if not state:
                state["slow"], state["list"] = torch.zeros_like(p), [torch.zeros_like(p)]
            state["slow"].mul_(0.999).add_(p.grad, alpha=0.001)
            state["list"][0].lerp_(state["slow"], 0.01)
            p.add_(state["slow"] + state["list"][0], alpha=-1e-2)


def adamw(params: Any) -> Optimizer:
    return torch.optim.AdamW(params, lr=1e-4)


def tensors_of(optimizer: Optimizer) -> list[tuple[Any, Any]]:
    """The ``(container, key)`` of each tensor in an optimizer's state."""
    found: list[tuple[Any, Any]] = []
    waiting: list[Any] = list(optimizer.state.values())
    while waiting:
        container = waiting.pop()
        for key, value in container.items() if isinstance(container, dict) else enumerate(container):
            if isinstance(value, Tensor):
                found.append((container, key))
            elif isinstance(value, (dict, list)):
                waiting.append(value)
    return found


def move_away_and_back(optimizer: Optimizer) -> None:
    for container, key in tensors_of(optimizer):
        container[key] = container[key].clone()
    for p in optimizer.param_groups[0]["params"]:
        p.data = p.data.clone()


def move_by_data(optimizer: Optimizer) -> None:
    for container, key in tensors_of(optimizer):
        container[key].data = container[key].data.clone()


def replace_dictionaries(optimizer: Optimizer) -> None:
    for p in optimizer.param_groups[0]["params"]:
        optimizer.state[p] = copy.copy(optimizer.state[p])
    move_away_and_back(optimizer)


def take_offload(optimizer: Optimizer) -> None:
    move_state(optimizer)
    for _, _, tensor in named(optimizer):
        assert tensor.device.type == "cpu"


def named(optimizer: Optimizer) -> list[tuple[Any, Any, Tensor]]:
    return [(container, key, container[key]) for container, key in tensors_of(optimizer)]


MOVES = [move_away_and_back, move_by_data, replace_dictionaries, take_offload]


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (adamw, {}),
        (adamw, {"error_format": "mcf"}),
        (adamw, {"bytes_per_parameter": 5.1}),
        (LateMomentum, {"arithmetic": "native", "error_format": "mcf"}),
        (Normed, {}),
    ],
    ids=["adamw", "mcf", "5.1", "native", "recorded"],
)
def test_what_is_moved_between_steps_is_as_if_it_had_stayed(
    make: Callable[[Any], Optimizer], options: dict[str, Any], move: Callable[[Optimizer], None]
) -> None:
    """Bit for bit, error terms too, and without a compilation."""
    runs = []
    for moves in (False, True):
        torch._dynamo.reset()
        params = parameters(shapes=SHAPES)
        optimizer = make(params)
        backend = CollageBackend(**options)
        step = torch.compile(optimizer.step, backend=backend)
        run_steps(step, params, range(2))
        compilations = len(backend.reports)
        for seed in range(2, 7):
            if moves:
                move(optimizer)
            run_steps(step, params, [seed])
        assert len(backend.reports) == compilations
        runs.append(everything(optimizer))
    assert runs[0].keys() == runs[1].keys()
    for name, value in runs[0].items():
        assert torch.equal(value, runs[1][name]), name


def test_moves_in_every_step_of_a_long_run_need_one_compilation() -> None:
    """Two hundred phases, as of a program that trains by reinforcement, against float64."""
    params = parameters(shapes=SHAPES)
    start = [p.detach().double().clone() for p in params]
    exact = [Parameter(p.clone()) for p in start]
    optimizer, reference = adamw(params), adamw(exact)
    step = compiled(optimizer, strategy="full")
    for seed in range(200):
        set_gradients(params, seed)
        for p, q in zip(params, exact, strict=True):
            q.grad = None if p.grad is None else p.grad.double()
        with torch.compiler.set_stance("fail_on_recompile" if seed else "default"):
            step()
        reference.step()
        move_away_and_back(optimizer)
    assert distance(params, exact) / distance(start, exact) < 0.005


def distance(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """The distance of two models, whose error terms count."""
    return (
        sum(float((full_value(p) - full_value(q)).square().sum()) for p, q in zip(one, other, strict=True))
        ** 0.5
    )


def test_a_backup_that_is_kept_by_reference_does_not_change() -> None:
    params = parameters(shapes=SHAPES)
    optimizer = adamw(params)
    step = compiled(optimizer)
    run_steps(step, params, range(2))
    for seed in (2, 3):
        backup = {p: dict(optimizer.state[p]) for p in params}
        values = {p: optimizer.state[p]["exp_avg_sq"].clone() for p in params}
        terms = {p: error_terms(optimizer.state[p]["exp_avg_sq"])[0].clone() for p in params}
        for container, key in tensors_of(optimizer):
            container[key] = container[key].clone()
        run_steps(step, params, [seed])
        for p in params:
            moment = backup[p]["exp_avg_sq"]
            assert torch.equal(moment, values[p])
            assert torch.equal(error_terms(moment)[0], terms[p])
            assert error_terms(optimizer.state[p]["exp_avg_sq"])[0].any()


def test_of_modules_dynamos_alone_holds_state_after_a_compilation() -> None:
    """Another is freed at any time; by the number of references, the program would seem to keep no backup."""
    params = parameters(shapes=SHAPES)
    optimizer = adamw(params)
    run_steps(compiled(optimizer), params, range(3))
    for state in optimizer.state.values():
        holders = [each for each in gc.get_referrers(state["step"]) if isinstance(each, dict)]
        assert len([each for each in holders if each is not state]) == 1


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "step"])
def test_a_backup_of_one_tensor_does_not_change(name: str) -> None:
    params = parameters(shapes=SHAPES)
    optimizer = adamw(params)
    step = compiled(optimizer)
    run_steps(step, params, range(3))
    state = optimizer.state[params[0]]
    backup, value = state[name], state[name].clone()
    state[name] = backup.clone()
    run_steps(step, params, [3])
    assert state[name] is not backup
    assert torch.equal(backup, value)


def test_elements_that_a_replacement_leaves_alone_keep_their_error_terms() -> None:
    params = parameters(shapes=SHAPES)
    optimizer = adamw(params)
    step = compiled(optimizer)
    run_steps(step, params, range(5))
    state = optimizer.state[params[0]]
    before, terms = full_value(state["exp_avg_sq"]), error_terms(state["exp_avg_sq"])[0]
    assert terms.any()
    replaced = state["exp_avg_sq"].clone()
    replaced[3] = 0.5
    state["exp_avg_sq"] = replaced
    params[0].grad = torch.zeros_like(params[0])
    (told,) = warned(step)
    assert "has been replaced by another tensor of other values" in told
    assert tensors_in(told) == (["param_groups[0].params[0].exp_avg_sq"], 0)
    expected = before.clone()
    expected[3] = 0.5
    # A product by 0.999 in float32, which is split without an error.
    assert torch.all((full_value(state["exp_avg_sq"]) - 0.999 * expected).abs() <= expected.abs() * 2.0**-22)


class SharedAverage(Descent):
    """An average that belongs to no parameter, under a name of its own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch overloads it
        (p,) = self.param_groups[0]["params"]
        shared = cast("dict[Any, Any]", self.state)["shared"]  # torch's annotation has tensors as keys
        if not shared:
            shared["average"] = torch.zeros_like(p)
        shared["average"].mul_(0.999).add_(p.grad, alpha=0.001)
        p.add_(shared["average"], alpha=-self.param_groups[0]["lr"])


def test_a_parameter_that_is_replaced_before_loaded_error_terms_are_used_does_not_pass_them_on() -> None:
    """They were loaded without the weights that they belong to."""
    (p,) = params = parameters(shapes=SHAPES[:1])
    optimizer = install(torch.optim.AdamW(params, lr=1e-3))
    run_steps(optimizer.step, params, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    run_steps(optimizer.step, params, range(3, 6))
    optimizer.load_state_dict(saved)
    new = Parameter(p.detach().clone())
    optimizer.state[new] = optimizer.state.pop(p)
    optimizer.param_groups[0].update(params=[new], lr=0.0)
    set_gradients([new])
    (told,) = warned(optimizer.step)
    assert "holds error terms of other values than param_groups[0].params[0].parameter" in told
    assert torch.equal(full_value(new, torch.float64), new.detach().double())


def test_state_of_no_parameter_that_is_replaced_keeps_its_error_terms() -> None:
    runs = []
    for is_replaced in (False, True):
        params = parameters(shapes=[(64, 64)])
        optimizer = SharedAverage(params)
        step = compiled(optimizer, strategy="full")
        shared = cast("dict[Any, Any]", optimizer.state)["shared"]
        for seed in range(4):
            run_steps(step, params, [seed])
            assert error_terms(shared["average"])[0].any()
            if is_replaced and seed:
                shared["average"] = shared["average"].clone()
        runs.append(full_value(params[0]))
    assert torch.equal(*runs)


def replaced_parameter(old: Tensor, rows: int) -> Parameter:
    return Parameter(torch.cat([old.detach(), torch.zeros(rows, *old.shape[1:], dtype=old.dtype)]))


@pytest.mark.parametrize("rows", [0, 1])
def test_parameters_that_are_replaced_and_grow_keep_their_error_terms(rows: int) -> None:
    """At each fifth of forty steps, against float64."""
    start = parameters(shapes=[(4, 6)])
    runs = []
    for dtype in (torch.float64, torch.bfloat16):
        params = [Parameter(p.detach().to(dtype)) for p in start]
        optimizer = adamw(params)
        if dtype is torch.bfloat16:
            collage_fx.install(optimizer)
        for seed in range(40):
            gradient = torch.randn(64, 6, generator=torch.Generator().manual_seed(seed)).bfloat16()
            params[0].grad = gradient[: len(params[0])].to(dtype)
            optimizer.step()
            if seed % 5 == 4 and seed < 16:
                old = params[0]
                new = params[0] = replaced_parameter(old, rows)
                optimizer.state[new] = state = optimizer.state.pop(old)
                if rows:
                    for key in ("exp_avg", "exp_avg_sq"):
                        state[key] = replaced_parameter(state[key], rows).data
                optimizer.param_groups[0]["params"][0] = new
        runs.append(full_value(params[0]))
    exact, got = runs
    moved = exact[:4] - start[0].double()
    assert (got - exact)[:4].norm() / moved.norm() < 0.005


# Values that are written. ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options", [{}, {"error_format": "mcf"}, {"error_format": "fp32"}, {"error_format": "byte"}]
)
def test_assign_writes_all_bits(dtype: torch.dtype, options: dict[str, Any]) -> None:
    params = parameters(dtype, shapes=SHAPES)
    optimizer = Descent(params)
    step = compiled(optimizer, **options)
    run_steps(step, params, range(2))
    for p in params:
        value = full_value(p) * (1 + 2.0**-12)
        assign(p, value)
        bound = ERROR_FORMATS[options.get("error_format", "exact")].error_bound(dtype)
        relative = float(bound.relative) + 2.0**-24  # and of float32
        assert torch.all((full_value(p) - value).abs() <= value.abs() * relative + float(bound.absolute))
    other = parameters(dtype, shapes=SHAPES, seed=1)
    for q, p in zip(other, params, strict=True):
        assign(q, p)
        assert torch.equal(q, p)
        assert torch.equal(full_value(q), full_value(p))
    assign(params[1], 0.3)
    assert torch.equal(params[1], torch.full((5,), 0.3, dtype=dtype))


def test_assign_rounds_what_has_no_error_terms() -> None:
    moment, wide = torch.zeros(3).bfloat16(), torch.zeros(3)
    assign(moment, torch.full((3,), 1 + 2.0**-9))
    assert torch.equal(moment, torch.ones(3).bfloat16())
    assert error_terms(moment) == ()
    assign(wide, torch.full((3,), 0.1, dtype=torch.float64))
    assert torch.equal(wide, torch.full((3,), 0.1))


def test_values_are_settled_where_something_is_loaded() -> None:
    """Error terms of other weights are not added to the ones that have been loaded."""
    model = torch.nn.Linear(6, 4).bfloat16()
    params = list(model.parameters())
    optimizer = adamw(params)
    run_steps(compiled(optimizer), params, range(3))
    saved = optimizer.state_dict()
    assert error_terms(params[0])[0].any()
    model.load_state_dict({name: torch.ones_like(each) for name, each in model.state_dict().items()})
    assert torch.equal(full_value(params[0]), torch.ones(4, 6, dtype=torch.float64))
    assert not error_terms(params[0])[0].any()
    optimizer.load_state_dict(saved)
    values: list[Tensor] = []
    (told,) = warned(lambda: values.append(full_value(params[0])))
    assert "holds error terms of other values than" in told
    assert tensors_in(told) == ([f"param_groups[0].params[{i}].parameter" for i in range(2)], 0)
    assert torch.equal(values[0], torch.ones(4, 6, dtype=torch.float64))


WRITES: dict[str, Callable[[Tensor], object]] = {
    "zero_": lambda moment: moment.zero_(),
    "data.zero_": lambda moment: moment.data.zero_(),
    "mul_": lambda moment: moment.mul_(1e-3),
    "copy_": lambda moment: moment.copy_(torch.full_like(moment, 1e-8)),
}


@pytest.mark.parametrize("write", list(WRITES))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"error_format": "mcf"},
        {"error_format": "fp32"},
        {"arithmetic": "native"},
        {"error_format": "byte"},
    ],
    ids=["exact", "mcf", "fp32", "native", "byte"],
)
def test_second_moments_that_are_written_stay_so(options: dict[str, Any], write: str) -> None:
    """A stale error term is at most an ulp of what has been written: no second moment is negative."""
    params = parameters(shapes=SHAPES)
    optimizer = adamw(params)
    step = compiled(optimizer, **options)
    run_steps(step, params, range(5))
    written = []
    for p in params:
        moment = optimizer.state[p]["exp_avg_sq"]
        WRITES[write](moment)
        written.append(moment.double())
        p.grad = torch.zeros_like(p)
    told = warned(step)
    assert len(told) == (write in ("mul_", "copy_"))
    assert all("written to between two steps, without compensation" in each for each in told)
    for p, before in zip(params, written, strict=True):
        value = full_value(optimizer.state[p]["exp_avg_sq"])
        assert torch.all((value - 0.999 * before).abs() <= before * 2.0**-8 + 2.0**-133)
        assert p.isfinite().all()


# Parameters that somebody else writes to. -----------------------------------------------------------------

PARAMETER_WRITES: dict[str, Callable[[Tensor], object]] = {
    "copy_": lambda p: p.copy_(p * 1.5),
    "data.copy_": lambda p: p.data.copy_(p.data * 1.5),
    "mul_": lambda p: p.mul_(0.5),
    "data.zero_": lambda p: p.data.zero_(),
    "data": lambda p: setattr(p, "data", p.data * 1.5),
}


@pytest.mark.parametrize("write", list(PARAMETER_WRITES))
@pytest.mark.parametrize("make", [adamw, Normed], ids=["captured", "recorded"])
def test_parameters_that_are_written_to_lose_stale_error_terms(
    make: Callable[[Any], Optimizer], write: str
) -> None:
    params = parameters(shapes=SHAPES)
    optimizer = make(params)
    step = compiled(optimizer)
    run_steps(step, params, range(4))
    with torch.no_grad():
        PARAMETER_WRITES[write](params[0])
    kept, written = full_value(params[1]), params[0].detach().double()
    for p in params:
        p.grad = None
    params[1].grad = torch.zeros_like(params[1])
    with pytest.warns(UserWarning, match="written to between two steps") as recorded:
        step()
    (warning,) = recorded
    told = str(warning.message)
    assert warning.filename == __file__, "the line of the user's program, not of the library"
    assert "written to between two steps, outside of a step. Their error terms" in told
    assert tensors_in(told) == (["param_groups[0].params[0]"], 0)
    assert torch.equal(full_value(params[0]), written)
    assert (full_value(params[1]) - kept).norm() < 0.1 * (
        full_value(params[1]) - params[1].double()
    ).norm() + 1e-2


def read_whole(params: Sequence[Tensor], optimizer: Optimizer) -> Tensor:
    return full_value(params[0])


def read_float32(params: Sequence[Tensor], optimizer: Optimizer) -> Tensor:
    model = torch.nn.ParameterList(params)
    return next(iter(collage_fx.full_state_dict(model).values())).double()


def read_copied(params: Sequence[Tensor], optimizer: Optimizer) -> Tensor:
    copied = Parameter(torch.zeros_like(params[0]))
    assign(copied, params[0])
    return full_value(copied)


def read_resumed(params: Sequence[Tensor], optimizer: Optimizer) -> Tensor:
    others = [Parameter(p.detach().clone()) for p in params]
    resumed = collage_fx.install(torch.optim.AdamW(others))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return full_value(others[0])


#: Ways to read a whole value, with an error format each.
READS: tuple[tuple[Any, Any], ...] = (
    (read_whole, "exact"),
    (read_float32, "mcf"),
    (read_copied, "fp32"),
    (read_resumed, "byte"),
)


@pytest.mark.parametrize("write", list(PARAMETER_WRITES))
@pytest.mark.parametrize(("read", "error_format"), READS)
def test_reads_after_a_write_see_what_was_written(read: Any, error_format: Any, write: str) -> None:
    """Before the next step has looked at the tensors."""
    params = parameters(shapes=[(6, 7), (5,)])
    optimizer = collage_fx.install(torch.optim.AdamW(params), error_format=error_format)
    run_steps(optimizer.step, params, range(3))
    assert bool(error_terms(params[0])[0].any())
    with torch.no_grad():
        PARAMETER_WRITES[write](params[0])
    written, found = params[0].detach().double(), list[Tensor]()
    (told,) = warned(lambda: found.append(read(params, optimizer)))
    assert tensors_in(told) == (["param_groups[0].params[0]"], 0)
    assert torch.equal(found[0], written)
    kept = full_value(params[1])
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.param_groups[0].update(lr=0.0)
    assert warned(optimizer.step) == []
    assert torch.equal(full_value(params[0]), written)
    assert torch.equal(full_value(params[1]), kept)


@pytest.mark.parametrize("event", ["nothing", "compiled again", "state replaced"])
def test_what_is_known_of_writes_outlives_a_compilation_and_replaced_state(event: str) -> None:
    """A second write to a parameter is not told of again; elements that it leaves keep their error terms."""
    params = parameters(shapes=SHAPES)
    optimizer = torch.optim.SGD(params, lr=torch.tensor(2.0**-12), momentum=0.9, weight_decay=0.0)
    backend = CollageBackend()
    step = torch.compile(optimizer.step, backend=backend)
    run_steps(step, params, range(3))
    set_gradients(params, 3)
    with torch.no_grad():
        params[0][0] = 1.0
    (told,) = warned(step)
    assert tensors_in(told) == (["param_groups[0].params[0]"], 0)
    compilations = len(backend.report().graphs)
    if event == "compiled again":
        params[2].grad = None
    elif event == "state replaced":
        state = optimizer.state[params[1]]
        state["momentum_buffer"] = state["momentum_buffer"].clone()
    assert warned(step) == []
    assert len(backend.report().graphs) == compilations + (event == "compiled again")
    optimizer.param_groups[0]["lr"].zero_()
    with torch.no_grad():
        params[0][1] = 1.0
    before = full_value(params[0])
    assert error_terms(params[0])[0][2:].any()
    assert warned(step) == []
    assert torch.equal(full_value(params[0])[2:], before[2:])
    assert torch.equal(full_value(params[0])[1], torch.ones(64, dtype=torch.float64))


def test_other_strides_of_the_same_values_are_no_write() -> None:
    params = parameters(shapes=[(6, 4)])
    optimizer = torch.optim.SGD(params, lr=2.0**-10)
    step = compiled(optimizer)
    run_steps(step, params, [0])
    run_steps(step, params, [1])
    before = full_value(params[0])
    assert not torch.equal(before, params[0].double())
    params[0].data = params[0].data.t().contiguous().t()
    assert warned(lambda: error_terms(params[0])) == []
    assert torch.equal(full_value(params[0]), before)


def test_a_clamp_in_each_step_costs_one_warning_and_no_updates() -> None:
    start = parameters(shapes=[(16, 16)])
    runs = []
    for dtype in (torch.float64, torch.bfloat16):
        params = [Parameter(p.detach().to(dtype)) for p in start]
        optimizer: Optimizer = torch.optim.SGD(params, lr=2.0**-14)
        step = compiled(optimizer) if dtype is torch.bfloat16 else optimizer.step
        told: list[str] = []
        for seed in range(60):
            gradient = torch.randn(16, 16, generator=torch.Generator().manual_seed(seed)).bfloat16() + 1
            params[0].grad = gradient.to(dtype)
            told += warned(step)
            params[0].data.clamp_(-2, 2)
            with torch.no_grad():
                params[0].clamp_(-2, 2)
        assert len(told) == (dtype is torch.bfloat16)
        assert all("written to between two steps" in each for each in told)
        runs.append(full_value(params[0]))
    exact, got = runs
    inside = exact.abs() < 1.98
    first = 2.0**-14 * (torch.randn(16, 16, generator=torch.Generator().manual_seed(0)).bfloat16() + 1)
    # The first time everything is dropped: the update of one step.
    assert (got - exact)[inside].norm() <= 1.01 * first[inside].double().norm()


def test_whole_values_and_loads_are_no_writes_of_somebody_else() -> None:
    model = torch.nn.Linear(6, 4).bfloat16()
    params = list(model.parameters())
    optimizer = adamw(params)
    step = compiled(optimizer)
    run_steps(step, params, range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for p in params:
            assign(p, full_value(p) * 1.5)
        run_steps(step, params, [2])
        model.load_state_dict({name: each * 1.5 for name, each in model.state_dict().items()})
        run_steps(step, params, [3])
        model.load_state_dict({name: each * 1.5 for name, each in model.state_dict().items()})
        full_value(params[0])
        run_steps(step, params, [4])
        collage_fx.load_full_state_dict(model, optimizer, dict(collage_fx.full_state_dict(model)))
        run_steps(step, params, [5])


# State that another method of the optimizer updates. -------------------------------------------------------


class WithCurvature(Descent):
    """A second moment that is updated now and then, by a method of its own, as Sophia's Hessian is."""

    @torch.no_grad()
    def update_curvature(self) -> None:
        for p in self.param_groups[0]["params"]:
            if "curvature" not in self.state[p]:
                self.state[p]["curvature"] = torch.zeros_like(p)
            self.state[p]["curvature"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.addcdiv_(p.grad, self.state[p]["curvature"].sqrt() + 1e-2, value=-self.param_groups[0]["lr"])


@pytest.mark.parametrize("is_installed", [True, False])
@pytest.mark.parametrize("is_compiled", [True, False])
def test_other_methods_are_compensated_if_they_are_compiled_and_else_told_of(
    is_compiled: bool, is_installed: bool
) -> None:
    params = parameters(shapes=[(16, 8)])
    reference = [Parameter(p.detach().double()) for p in params]
    optimizer, exact = WithCurvature(params), WithCurvature(reference)
    backend = CollageBackend()
    if is_installed:
        step: Callable[[], Any] = collage_fx.install(optimizer, backend=backend).step
    else:
        step = torch.compile(optimizer.step, backend=backend)
    update: Callable[[], Any] = optimizer.update_curvature
    if is_compiled:
        update = torch.compile(update, backend=backend)
    told = []
    for seed in range(40):
        set_gradients(params, seed)
        assert params[0].grad is not None
        reference[0].grad = params[0].grad.double()
        updates = (update, exact.update_curvature) if seed % 4 == 0 else ()
        told += warned(*updates, step, exact.step)
    met = full_value(optimizer.state[params[0]]["curvature"])
    meant = exact.state[reference[0]]["curvature"]
    error = float((met - meant).norm() / meant.norm())
    if is_compiled:
        assert not told
        assert error < 1e-3
    else:
        assert len(told) == 1
        assert "WithCurvature: written to between two steps, without compensation" in told[0]
        assert tensors_in(told[0]) == (["param_groups[0].params[0].curvature"], 0)
        assert "torch.compile(optimizer.method" in told[0]
        assert error > 1e-3


# Error terms that a step remembers. ------------------------------------------------------------------------


class SlowAverage(Descent):
    """A step whose parameters and state are arguments of the compiled code."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                average.mul_(0.999).add_(p.grad, alpha=0.001)
                p.add_(average, alpha=-1e-2)


def swap_memory(optimizer: Optimizer) -> None:
    """Parameters of one shape swap their memory, in which no error terms lie."""
    first, _, third = params_of(optimizer)
    first.data, third.data = third.data, first.data


def replaced_and_kept(optimizer: Optimizer) -> Tensor:
    """Replace state, and return what was there."""
    container, key = tensors_of(optimizer)[0]
    old: Tensor = container[key]
    container[key] = old.clone()
    return old


#: Tensors that stay alive although they are replaced.
KEPT: list[Tensor] = []


def leave_a_gradient_out(optimizer: Optimizer) -> None:
    params_of(optimizer)[1].grad = None


#: Changes that a program makes in front of a step.
EVENTS: tuple[Callable[[Optimizer], Any], ...] = (
    lambda optimizer: None,
    move_away_and_back,
    lambda optimizer: KEPT.extend((params_of(optimizer)[0].data, replaced_and_kept(optimizer))),
    move_by_data,
    swap_memory,
    leave_a_gradient_out,
    lambda optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    lambda optimizer: collage_fx.reset_error_terms(params_of(optimizer)[0]),
    lambda optimizer: assign(params_of(optimizer)[2], full_value(params_of(optimizer)[2]) * 1.001),
    lambda optimizer: params_of(optimizer)[0].data.mul_(1.001),
    lambda optimizer: gc.collect(),
)


def params_of(optimizer: Optimizer) -> list[Tensor]:
    return optimizer.param_groups[0]["params"]


@pytest.mark.rotating
@pytest.mark.parametrize("seed", range(9))
def test_error_terms_that_are_remembered_are_those_that_are_found(seed: int) -> None:
    """Steps whose tensors are arguments of the code, of one optimizer or two."""
    ends, looked_up = [], []
    for always in (False, True):
        torch._dynamo.reset()
        chosen = random.Random(seed)
        optimizers = [install(SlowAverage(parameters(shapes=SHAPES))) for _ in range(1 + seed % 2)]
        with lookups_of_error_terms(always=always) as count, warnings.catch_warnings(action="ignore"):
            for step in range(14):
                for optimizer in optimizers:
                    set_gradients(params_of(optimizer), step)
                    chosen.choice(EVENTS if step % 3 == 2 else EVENTS[:1])(optimizer)
                    optimizer.step()
        looked_up.append(count[0])
        ends.append([everything(optimizer) for optimizer in optimizers])
    for one, other in zip(*ends, strict=True):
        assert not differences(one, other)
    assert len(optimizers) > 1 or looked_up[0] < looked_up[1]


def test_a_function_of_parameters_finds_the_error_terms_of_each() -> None:
    """Code that is called with the same tensors again, and with others in between."""

    def update(p: Tensor, g: Tensor) -> None:
        p.add_(g, alpha=-(2.0**-12))

    ends, looked_up = [], []
    for always in (False, True):
        torch._dynamo.reset()
        function = torch.compile(update, backend=CollageBackend())
        params = parameters(shapes=[(6, 4)] * 3)
        optimizer = Descent(params)
        with lookups_of_error_terms(always=always) as count, torch.no_grad():
            for step, i in enumerate((0, 0, 1, 2, 2, 2, 1, 0, 1, 1)):
                set_gradients(params, step)
                gradient = params[i].grad
                assert gradient is not None
                function(params[i], gradient)
        looked_up.append(count[0])
        ends.append(everything(optimizer))
    assert not differences(*ends)
    assert looked_up[0] < looked_up[1]


# The time of a step, by Python's count of calls, which is the same on every machine. ----------------------


def calls_of(step: Callable[[], Any], code: CodeType | None = None) -> int:
    """Count the calls in a step; if code is given, the calls of the function that has it."""
    calls = itertools.count()

    def watch(frame: Any, event: str, argument: Any) -> None:
        if (event == "call" and code in (None, frame.f_code)) or (event == "c_call" and code is None):
            next(calls)

    gc.collect()
    gc.disable()  # a callback of a weak reference would count
    sys.setprofile(watch)
    try:
        step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return next(calls)


def test_a_step_asks_no_other_optimizer() -> None:
    """With an optimizer for each parameter, to ask all of them would take n * n questions."""

    def made() -> tuple[list[Parameter], Any]:
        params = parameters(shapes=[(3,)])
        run_steps(step := compiled(Descent(params)), params, range(3))
        return params, step

    others = [made()]
    params, step = made()
    set_gradients(params, 3)
    few = min(calls_of(step) for _ in range(4))  # not every step looks at as many state tensors
    others += [made() for _ in range(6)]
    run_steps(step, params, [4])  # finds out which optimizers have its parameters
    assert min(calls_of(step) for _ in range(4)) == few


def test_a_recorded_step_looks_at_all_parameters_once() -> None:
    """Not in each of its parts, which are as many as its parameters."""
    params = parameters(shapes=[(3,)] * 4)
    optimizer = collage_fx.install(Normed(params))
    run_steps(optimizer.step, params, range(3))
    assert calls_of(optimizer.step, WriteDetector.note.__code__) == 1


class Wrapper(Tensor):
    """A bfloat16 tensor of a codes' tensor, without memory of its own, as of quantized layers."""

    codes: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor) -> Wrapper:
        made: Wrapper = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.bfloat16)
        made.codes = codes
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *unused: Any) -> Wrapper:
        return Wrapper(inner["codes"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return Wrapper(args[0].codes)
        raise NotImplementedError(f"{func} of a wrapper")


@pytest.mark.parametrize("kind", ["wrapper", "sparse"])
def test_parameters_without_memory_are_not_looked_at(kind: str) -> None:
    """They are frozen beside others: a step reads none of their elements, and still looks at the others'."""
    codes = torch.ones(4, 4, dtype=torch.int8)
    made = Wrapper(codes) if kind == "wrapper" else torch.eye(4).bfloat16().to_sparse()
    frozen = torch.nn.Parameter(made, requires_grad=False)
    (trained,) = parameters(shapes=[(4, 4)])
    step = install(torch.optim.SGD([{"params": [frozen]}, {"params": [trained]}], lr=2.0**-12)).step
    before = full_value(trained)
    for i in range(3):
        set_gradients([trained], seed=i)
        step()
    assert error_terms(trained)
    assert not torch.equal(full_value(trained), before)
    assert frozen.grad is None
    assert torch.equal(codes, torch.ones_like(codes))
    trained.data.fill_(3.0)
    with pytest.warns(UserWarning, match="written to between two steps"):
        step()


def test_what_the_program_writes_before_a_compiled_function_has_no_error_terms() -> None:
    """The optimizer that holds its tensor alone knows what its last step has left, and is asked."""

    @torch.no_grad()
    def shrink(p: Tensor) -> None:
        p.mul_(0.9995)

    (p,) = params = parameters(shapes=[(64, 64)])
    optimizer = install(torch.optim.AdamW(params, lr=1e-3), strategy="light")
    function: Any = torch.compile(shrink, backend=CollageBackend(strategy="light"))
    run_steps(optimizer.step, params, range(2))
    function(p)
    run_steps(optimizer.step, params, range(2, 4))
    with torch.no_grad():
        p.fill_(0.3)
    expected = p.detach().double() * 0.9995
    with pytest.warns(UserWarning, match="written to between two steps"):
        function(p)
    assert torch.allclose(full_value(p).double(), expected, rtol=2.0**-16, atol=0)


def test_an_optimizer_that_is_made_after_a_compiled_function_is_told_of_its_writes() -> None:
    """The function asks anew who holds its tensors: nothing is warned of, and every bit is kept."""

    @torch.no_grad()
    def subtract(params: list[torch.nn.Parameter]) -> None:
        for p in params:
            assert p.grad is not None
            p.sub_(p.grad, alpha=2.0**-12)

    (p,) = params = parameters(shapes=[(64,)])
    lr, exact = 2.0**-12, p.detach().double()
    step = torch.compile(subtract, backend=CollageBackend())
    step_of_optimizer = None
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="collage_fx")
        for i in range(8):
            set_gradients(params, i)
            assert p.grad is not None
            exact -= lr * p.grad.double()
            if i in (0, 1, 4, 6):
                step(params)
            else:
                step_of_optimizer = step_of_optimizer or install(Descent(params, lr)).step
                step_of_optimizer()
    # Pairs of bfloat16 and 16 bits: each of eight sums is rounded to 2**-16 of a weight.
    assert float((full_value(p) - exact).abs().max()) <= 8 * 2.0**-16 * float(exact.abs().max())
