"""Parameters whose gradients come and go: what a step does to them is known when it runs, not compiled."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

import collage_fx
from collage_fx import CollageBackend, error_terms, full_value
from collage_fx.capture import Rows, stand_in_for
from collage_fx.capture.recording import is_recorded
from collage_fx.graph import StepProgram
from collage_fx.pipeline import Pass, inserted
from tests.support.training import Descent, differences, everything, parameters, set_gradients

#: Three layouts, of which two are in several tensors.
SHAPES = [(8, 4), (4,), (8, 4), (3, 5), (4,), (8, 4)]

#: Compilations that patterns of gradients cost at most: the first, one that finds them to be others, and one
#: for all parameters.
COMPILATIONS = 3

Make = Callable[[Sequence[Tensor]], Optimizer]


def in_two_groups(params: Sequence[Tensor]) -> list[dict[str, Any]]:
    return [{"params": params[:2]}, {"params": params[2:], "lr": 3e-4}]


MAKERS: dict[str, Make] = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-4),
    "Adam foreach amsgrad": lambda ps: torch.optim.Adam(ps, lr=1e-4, amsgrad=True, foreach=True),
    "SGD momentum": lambda ps: torch.optim.SGD(ps, lr=1e-3, momentum=0.9, weight_decay=0.1),
    "RMSprop in two groups": lambda ps: torch.optim.RMSprop(in_two_groups(ps), lr=1e-4),
    "Adadelta foreach": lambda ps: torch.optim.Adadelta(ps, lr=1e-2, foreach=True),
}


def set_some(params: Iterable[Tensor], pattern: int, seed: int) -> None:
    """Gradients for the parameters whose bit is set, None for others."""
    set_gradients(params, seed)
    for i, p in enumerate(params):
        if not pattern >> i & 1:
            p.grad = None


def run_patterns(
    make: Make, patterns: Sequence[int], *, by_rows: bool = True, **options: Any
) -> tuple[list[Parameter], Optimizer, Any]:
    """Take steps with gradients for some parameters, and check that each leaves the others alone."""
    params, backend = parameters(shapes=SHAPES), CollageBackend(**options)
    optimizer = make(params)
    step = torch.compile(optimizer.step, backend=backend)
    for seed, pattern in enumerate(patterns):
        set_some(params, pattern, seed)
        before, versions = everything(optimizer), [p._version for p in params]
        step()
        if not by_rows:
            Rows.of(optimizer).are_understood = False
        names = [
            f"{g}.{i}."
            for g, group in enumerate(optimizer.param_groups)
            for i, _ in enumerate(group["params"])
        ]
        absent = tuple(name for i, name in enumerate(names) if not pattern >> i & 1)
        after = everything(optimizer)
        # State that a step has made has an error term until the next compilation decides whether it keeps it.
        compared = [
            name
            for name in before
            if name.startswith(absent) and (name in after or "momentum_buffer.error" not in name)
        ]
        assert not differences(
            {name: before[name] for name in compared}, {name: after[name] for name in compared}
        )
        for i, (p, version) in enumerate(zip(params, versions, strict=True)):
            assert (p._version > version) == bool(pattern >> i & 1)
            assert (p.grad is None) == (not pattern >> i & 1)
    return params, optimizer, backend


def exact(make: Make, patterns: Sequence[int]) -> tuple[list[Tensor], Optimizer]:
    """The same steps in float64, by torch."""
    params = [p.detach().double().requires_grad_() for p in parameters(shapes=SHAPES)]
    optimizer = make(params)
    low = parameters(shapes=SHAPES)
    for seed, pattern in enumerate(patterns):
        set_some(low, pattern, seed)
        for p, q in zip(low, params, strict=True):
            q.grad = None if p.grad is None else p.grad.double()
        optimizer.step()
    return params, optimizer


def worst_error(params: Sequence[Tensor], ends: Sequence[Tensor]) -> float:
    """The largest distance from where float64 ends, in units of the way that it goes."""
    starts = parameters(shapes=SHAPES)
    return max(
        float((full_value(p).double() - q).norm() / (q - start.double()).norm())
        for p, q, start in zip(params, (q.detach() for q in ends), (s.detach() for s in starts), strict=True)
    )


#: The bound of an error here: an ulp of state at bfloat16, which moments without error terms may be off by.
TOLERABLE = 2.0**-7


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_no_pattern_of_gradients_is_compiled(make: Make) -> None:
    """63 patterns over six parameters, each of which is new once: Dynamo compiled each, and gave up."""
    patterns = range(1, 1 << len(SHAPES))
    params, optimizer, backend = run_patterns(make, patterns)
    assert len(backend.report().graphs) <= COMPILATIONS
    assert not is_recorded(optimizer)
    ends, oracle = exact(make, patterns)
    assert worst_error(params, ends) <= TOLERABLE
    for p, q in zip(params, ends, strict=True):
        assert optimizer.state[p].get("step") == oracle.state[q].get("step")


@pytest.mark.parametrize("momentum", [0, 0.9])
def test_whoever_has_had_a_gradient_is_a_member_at_the_first_change(momentum: float) -> None:
    """With state or without: the second compilation serves all patterns."""
    _, _, backend = run_patterns(lambda ps: torch.optim.SGD(ps, lr=1e-3, momentum=momentum), [63, 62, 31, 42])
    assert len(backend.report().graphs) == 2


@pytest.mark.parametrize("seed", range(3))
def test_steps_have_the_bits_of_those_compiled_for_their_pattern(seed: int) -> None:
    draw = random.Random(seed)
    make = draw.choice(list(MAKERS.values()))
    patterns = [(1 << len(SHAPES)) - 1, *(draw.randrange(1 << len(SHAPES)) for _ in range(5))]
    _, optimizer, _ = run_patterns(make, patterns)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=16):
        _, other, _ = run_patterns(make, patterns, by_rows=False)
    assert not is_recorded(other)
    assert not differences(everything(optimizer), everything(other))


def test_a_tensor_without_gradient_is_not_in_the_metrics_of_a_step() -> None:
    patterns = [63, 21, 42, 5]
    _, _, backend = run_patterns(MAKERS["AdamW"], patterns, metrics=True)
    for pattern, measured in zip(patterns, backend.metrics().values(), strict=True):
        there = {i for i in range(len(SHAPES)) if f"param_groups[0].params[{i}]" in measured}
        assert there == {i for i in range(len(SHAPES)) if pattern >> i & 1}


def test_a_step_without_any_gradient_changes_nothing() -> None:
    run_patterns(MAKERS["AdamW"], [63, 1, 0, 2, 0, 63])


def test_layers_may_be_frozen_and_thawed_and_added() -> None:
    params, backend = parameters(shapes=SHAPES), CollageBackend()
    optimizer = torch.optim.AdamW(params[:4], lr=1e-4)
    step = torch.compile(optimizer.step, backend=backend)
    for seed in range(12):
        for i, p in enumerate(params[:4]):
            p.requires_grad_(seed % 4 != i)
        set_some(params[:4], 15 & ~(1 << seed % 4), seed)
        step()
    assert len(backend.report().graphs) <= COMPILATIONS
    optimizer.add_param_group({"params": params[4:]})
    for p in params:
        p.requires_grad_()
    for seed in range(12):
        set_some(params, 1 << seed % 6 | 16, seed)
        step()
    assert len(backend.report().graphs) <= COMPILATIONS + 2
    assert all(bool(error_terms(p)[0].any()) for p in params)


@pytest.mark.parametrize(
    "make",
    [
        lambda ps: torch.optim.SGD(ps, lr=1e-3, momentum=0.9, dampening=0.1),
        lambda ps: torch.optim.Adafactor(ps, lr=1e-3),
        lambda ps: Descent(ps, lr=1e-3),
    ],
    ids=["born in the step", "without torch's decorator", "of one's own"],
)
def test_where_rows_are_not_known_the_step_is_recorded_at_the_limit(make: Make) -> None:
    patterns = range(1, 64, 3)
    with torch._dynamo.config.patch(recompile_limit=3):
        params, optimizer, _ = run_patterns(make, patterns)
    assert is_recorded(optimizer)
    ends, _ = exact(make, patterns)
    assert worst_error(params, ends) <= TOLERABLE


class Looking(Pass):
    """A pass that sees the whole graph, so that the step does not consist of rows."""

    name: ClassVar[str] = "looking"

    def run(self, program: StepProgram) -> str:
        return "seen"


@pytest.mark.parametrize("name", ["AdamW", "Adam foreach amsgrad"])
def test_where_a_pass_sees_the_whole_step_each_pattern_is_compiled_without_placeholders(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Placeholders have no memory: a trace that has met them is thrown away, and traced without them once."""
    patterns = [63, 1, 2, 4, 5, 3]
    passes = inserted(Looking(), before="allocate")
    # By dither: after six steps, an error of a moment that is repaid later would count for much.
    kind: Any = type(MAKERS[name](parameters()))  # of which Dynamo wraps the method, also if it is inherited
    traced, init_group = [], kind._init_group

    def noting(self: torch.optim.Adam, *args: Any) -> Any:
        traced.append(self)
        return init_group(self, *args)

    monkeypatch.setattr(kind, "_init_group", noting)
    params, optimizer, backend = run_patterns(MAKERS[name], patterns, passes=passes, rounding="dither")
    assert len(traced) == len(patterns) + 1
    assert len(backend.report().graphs) == len(patterns)
    assert not is_recorded(optimizer)
    ends, _ = exact(MAKERS[name], patterns)
    assert worst_error(params, ends) <= TOLERABLE


def test_an_installed_optimizer_has_members_that_come_and_go() -> None:
    """The trainers' door, with a closure as they give it."""
    params = parameters(shapes=SHAPES)
    optimizer = collage_fx.install(torch.optim.AdamW(params, lr=1e-4))
    for seed in range(1, 40):
        set_some(params, seed, seed)
        optimizer.step(lambda: torch.zeros(()))
    assert len(collage_fx.backend_of(optimizer).report().graphs) <= COMPILATIONS


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_a_placeholder_has_the_layout_of_a_gradient_and_no_memory(dtype: torch.dtype | None) -> None:
    parameter = Parameter(torch.zeros(3, 5, dtype=torch.bfloat16).t())
    gradient = stand_in_for(parameter, dtype)
    assert (gradient.shape, gradient.stride()) == (parameter.shape, parameter.stride())
    assert gradient.dtype is (dtype or torch.bfloat16)
    assert gradient.untyped_storage().nbytes() == 0
