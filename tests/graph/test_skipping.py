"""A step that a condition skips leaves every bit as it is, and is otherwise the step without condition.

The condition is one for the whole tensor, or one for each element, row or column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from collage_fx import error_terms, full_value, install
from collage_fx.graph.nodes import placeholders
from collage_fx.graph.program import Kind, StepProgram
from tests.support.float_bits import same_bits, ulp
from tests.support.programs import after, captured

Step = Callable[..., None]


def step(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    """A parameter, a first moment that the storage format holds, a second one that it does not; a loop."""
    g = g + 0.5 * p
    m.lerp_(g, 0.1)
    v.mul_(0.999).addcmul_(g, g, value=0.001)
    p.mul_(1 - 2.0**-10).addcdiv_(m, v.sqrt() + 1e-8, value=-(2.0**-10))


def skipped_if(t: Tensor, tensors: tuple[Tensor, ...], *, old_first: bool) -> None:
    kept = [tensor.clone() for tensor in tensors]
    p, m, v, g = tensors
    step(p, g, m, v)
    for tensor, old in zip((p, m, v), kept, strict=False):
        if old_first:
            tensor.copy_(torch.where(t != 0, old, tensor))
        else:
            tensor.copy_(torch.where(t == 0, tensor, old))


def old_or_new(p: Tensor, m: Tensor, v: Tensor, g: Tensor, t: Tensor) -> None:
    skipped_if(t, (p, m, v, g), old_first=True)


def new_or_old(p: Tensor, m: Tensor, v: Tensor, g: Tensor, t: Tensor) -> None:
    skipped_if(t, (p, m, v, g), old_first=False)


def always(p: Tensor, m: Tensor, v: Tensor, g: Tensor, t: Tensor) -> None:
    step(p, g, m, v)


WAYS = [
    (old_or_new, ("wide", "mcf")),
    (old_or_new, ("wide", "exact")),
    (old_or_new, ("wide", "fp32")),
    (old_or_new, ("native", "mcf")),
    (new_or_old, ("wide", "mcf")),
]


def rewritten(function: Step, arithmetic: tuple[Any, str], dtype: torch.dtype, **options: Any) -> StepProgram:
    wide_or_native, error_format = arithmetic
    program = captured(
        function, "p m v g t", dtypes=dtype, arithmetic=wide_or_native, error_format=error_format, **options
    )
    return after(program, "hoist-scalars")


def every_number(dtype: torch.dtype) -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def halves_of_an_ulp(x: Tensor) -> Tensor:
    """Beside an odd number they make ``hi + lo`` a tie, which would be rounded to its even neighbour."""
    return torch.where(x.isfinite(), ulp(x) / 2, 0)


def auxiliaries_of(lo: Tensor, error_format: str) -> list[Tensor]:
    """Return the auxiliaries of a tensor, the error term from ``lo``, and the start, which is 0."""
    if error_format == "exact":
        number = torch.zeros((), dtype=torch.int32)
        return [lo.to(torch.int16), number.clone(), number]
    return [lo.to(torch.float32 if error_format == "fp32" else lo.dtype)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("function", "arithmetic"), WAYS)
def test_every_pair_is_kept_bit_for_bit(
    function: Step, arithmetic: tuple[str, str], dtype: torch.dtype
) -> None:
    program = rewritten(function, arithmetic, dtype, shape=(2**16,))
    hi = every_number(dtype)
    lo = halves_of_an_ulp(hi)
    lo[::3] *= -1
    lo[1::3] *= 0.75
    overflowing = torch.full_like(hi, float("inf"))
    before = [hi, every_number(dtype).flip(0), hi, overflowing, torch.ones(())]
    before += [each for _ in program.expansions for each in auxiliaries_of(lo.to(dtype), arithmetic[1])]
    tensors = [tensor.clone() for tensor in before]
    program.gm(*tensors)
    assert len(program.expansions) == 2  # p and v; m has no error term
    assert all(same_bits(*pair).all() for pair in zip(before, tensors, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("function", "arithmetic"), WAYS)
def test_a_step_that_is_taken_is_the_step_without_condition(
    function: Step, arithmetic: tuple[str, str], dtype: torch.dtype
) -> None:
    programs = [rewritten(each, arithmetic, dtype, shape=(999,)) for each in (function, always)]
    for one, other in zip(*(program.states for program in programs), strict=True):
        assert str(one.recurrence.expression) == str(other.recurrence.expression)
        assert (one.recurrence.kind, one.recurrence.slopes) == (
            other.recurrence.kind,
            other.recurrence.slopes,
        )
        assert (one.verdict, one.selection, one.refusal) == (other.verdict, other.selection, other.refusal)
    generator = torch.Generator().manual_seed(0)
    results = []
    start = [torch.randn(999, generator=generator).to(dtype).abs() for _ in range(4)]
    for program in programs:
        tensors = [tensor.clone() for tensor in start]
        zeros = torch.zeros(999, dtype=dtype)
        error_terms = [each for _ in program.expansions for each in auxiliaries_of(zeros, arithmetic[1])]
        for _ in range(5):
            program.gm(*tensors, torch.zeros(()), *error_terms)
        results.append([*tensors, *error_terms])
    assert any(term.count_nonzero() > 900 for term in results[0][4:])
    assert all(map(torch.equal, *results))


def own_condition(v: Tensor, g: Tensor) -> None:
    v.copy_(torch.where(v > g, v, 0.9 * v + 0.1 * g))


def other_condition(v: Tensor, g: Tensor) -> None:
    v.copy_(torch.where(g > 0, v, 0.9 * v + 0.1 * g))


def test_a_choice_that_depends_on_the_value_itself_is_an_update_like_another() -> None:
    kinds = []
    for function in (own_condition, other_condition):
        (state,) = after(captured(function, "v g"), "analyze").states
        kinds.append(state.recurrence.kind)
    assert kinds == [Kind.OTHER, Kind.MOVING_AVERAGE]


NARROW = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int32, torch.int8, torch.bool]


@pytest.mark.parametrize("arithmetic", [("wide", "mcf"), ("wide", "exact"), ("native", "mcf")])
@pytest.mark.parametrize("kept", [1, 2])
@pytest.mark.parametrize("narrow", NARROW, ids=str)
def test_a_narrower_old_value_is_another_value(
    narrow: torch.dtype, kept: int, arithmetic: tuple[str, str]
) -> None:
    def step(v: Tensor, g: Tensor) -> None:
        old, new = v.to(narrow).to(v.dtype), v - 2.0**-12 * g
        v.copy_(torch.where(g > 0, old, new) if kept == 1 else torch.where(g > 0, new, old))

    program = rewritten_as(step, arithmetic)
    v = torch.randn(64).to(torch.bfloat16)
    g = torch.randn(64).to(torch.bfloat16)
    before = v.clone()
    lo, *numbers = auxiliaries_of(torch.zeros(64).bfloat16(), arithmetic[1])
    program.gm(v, g, lo, *numbers)
    is_narrow = (g > 0) == (kept == 1)
    assert torch.equal(v[is_narrow], before.to(narrow).to(torch.bfloat16)[is_narrow])
    assert not lo[is_narrow].any()
    assert lo[~is_narrow].any()


def rewritten_as(function: Step, arithmetic: tuple[Any, str]) -> StepProgram:
    return after(
        captured(
            function,
            "v g",
            shape=(64,),
            strategy="full",
            arithmetic=arithmetic[0],
            error_format=arithmetic[1],
        ),
        "hoist-scalars",
    )


SHAPE = (16, 8)

#: Conditions of an element of a shape, made of a tensor of that shape and a number.
CONDITIONS: dict[str, list[Callable[[Tensor, Tensor], Tensor]]] = {
    "a number": [lambda k, t: t > 0],
    "one element": [lambda k, t: k.flatten()[:1] > 0],
    "rows": [lambda k, t: k[:, :1] > 0],
    "columns": [lambda k, t: k[0] > 0],
    "columns in a row": [lambda k, t: k[:1] > 0],
    "elements": [lambda k, t: k > 0],
    "a number, then elements": [lambda k, t: t > 0, lambda k, t: k > 0],
    "rows, then elements, then columns": [
        lambda k, t: k[:, 1:2] > 0,
        lambda k, t: k < 1,
        lambda k, t: k[1] > -1,
    ],
}


def masked(names: str, conditions: Sequence[Callable[[Tensor, Tensor], Tensor]]) -> Step:
    """Return the step of which the tensors of these names are written where all conditions hold."""

    def function(p: Tensor, m: Tensor, v: Tensor, g: Tensor, k: Tensor, t: Tensor) -> None:
        tensors = {"p": p, "m": m, "v": v}
        kept = {name: tensor.clone() for name, tensor in tensors.items()}
        step(p, g, m, v)
        for name in names.split():
            value = tensors[name]
            for i, condition in enumerate(reversed(conditions)):
                holds = condition(k, t)
                value = torch.where(holds, value, kept[name]) if i else torch.where(~holds, kept[name], value)
            tensors[name].copy_(value)

    return function


def drawn_inputs(program: StepProgram, draw: torch.Generator, dtype: torch.dtype) -> list[Tensor]:
    """Return numbers for all inputs, and half an ulp or any bits for error terms beside them."""
    inputs = [torch.randn(SHAPE, generator=draw).to(dtype) for _ in range(5)]
    inputs[2] = inputs[2].abs()
    inputs.append(torch.ones(()))
    for state in program.expanded:
        hi = inputs[state.position]
        for node in state.added_inputs:
            value = node.meta["val"]
            term = halves_of_an_ulp(hi) * torch.randint(-2, 3, SHAPE, generator=draw) / 2
            if not value.dim():
                inputs.append(torch.tensor(5, dtype=value.dtype))
            elif value.is_floating_point():
                inputs.append(term.to(value.dtype))
            else:
                bits = torch.iinfo(value.dtype)
                inputs.append(
                    torch.randint(bits.min // 2, bits.max // 2, SHAPE, generator=draw).to(value.dtype)
                )
    assert len(inputs) == len(placeholders(program.gm.graph))
    return inputs


FORMATS = [
    *(("wide", name, "dither") for name in ("exact", "byte", "mcf", "fp32")),
    *(("wide", name, "nearest") for name in ("exact", "mcf")),
    ("native", "mcf", "nearest"),
]


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("way", FORMATS, ids="-".join)
def test_elements_without_a_step_keep_all_bits_and_others_take_it(
    way: tuple[str, str, str], condition: str
) -> None:
    """Whether a parameter, its state, or both have the condition, drawn for each case."""
    arithmetic, error_format, rounding = way
    case = list(CONDITIONS).index(condition) + len(CONDITIONS) * FORMATS.index(way)
    dtype = (torch.bfloat16, torch.float16)[case // 3 % 2]
    names = ("p", "m v", "p m v")[case % 3]
    programs = []
    for conditions in (CONDITIONS[condition], []):
        program = captured(
            masked(names, conditions),
            "p m v g k t",
            dtypes=dtype,
            shape=SHAPE,
            arithmetic=arithmetic,  # type: ignore[arg-type]
            error_format=error_format,
        )
        program.rounding = rounding  # type: ignore[assignment]
        programs.append(after(program, "hoist-scalars"))
    program, always = programs
    assert [state.selection for state in program.states] == [state.selection for state in always.states]
    start = drawn_inputs(program, torch.Generator().manual_seed(case), dtype)
    found, taken = ([each.clone() for each in start] for _ in programs)
    program.gm(*found)
    always.gm(*taken)
    holds = torch.ones(SHAPE, dtype=torch.bool)
    for each in CONDITIONS[condition]:
        holds &= each(start[4], start[5])
    assert 0 < holds.sum() < holds.numel() or condition in ("a number", "one element")
    masked_ones = {position for position, name in enumerate(("p", "m", "v")) if name in names.split()}
    owners = [*range(6), *(state.position for state in program.expanded for _ in state.added_inputs)]
    for owner, old, new, one in zip(owners, start, found, taken, strict=True):
        if owner in masked_ones and old.dim():
            assert same_bits(old, new)[~holds].all()
            assert same_bits(one, new)[holds].all()
        else:
            assert same_bits(one, new).all()


class Masked(torch.optim.Optimizer):
    """Descent by a power of two, of the elements that a mask for each parameter selects."""

    def __init__(self, params: Sequence[torch.nn.Parameter], masks: Sequence[Tensor]) -> None:
        super().__init__(params, {})
        self.masks = masks

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p, mask in zip(self.param_groups[0]["params"], self.masks, strict=True):
            p.copy_(torch.where(mask, p - 2.0**-10 * p.grad, p))


#: Error format -> rounding error of a step, relative to the value: float32's ulp, and 2**-8 of bfloat16's.
UNITS = {"exact": 2.0**-23, "byte": 2.0**-15}


@pytest.mark.parametrize("error_format", UNITS)
def test_an_installed_step_leaves_frozen_rows_columns_and_elements(error_format: str) -> None:
    """The masks are turned after eight steps, so that frozen elements have error terms."""
    draw = torch.Generator().manual_seed(0)
    masks = [torch.rand(size, generator=draw) > 0.4 for size in ((16, 1), (8,), SHAPE, (1, 1), ())]
    params = [torch.nn.Parameter(torch.randn(SHAPE, generator=draw).bfloat16()) for _ in masks]
    wide = [p.detach().double() for p in params]
    optimizer = install(Masked(params, masks), error_format=error_format)  # type: ignore[arg-type]
    for i in range(16):
        if i == 8:
            before = [[p.detach().clone(), *(term.clone() for term in error_terms(p))] for p in params]
            for mask in masks:
                mask.logical_not_()
        for p, exact, mask in zip(params, wide, masks, strict=True):
            p.grad = torch.randn(SHAPE, generator=draw).bfloat16()
            exact.copy_(torch.where(mask, exact - 2.0**-10 * p.grad.double(), exact))
        optimizer.step()
    for p, exact, mask, old in zip(params, wide, masks, before, strict=True):
        assert float((full_value(p) - exact).abs().max()) <= 16 * UNITS[error_format] * float(
            exact.abs().max()
        )
        frozen = ~mask.expand(SHAPE)
        for kept, now in zip(old, [p.detach(), *error_terms(p)], strict=True):
            assert same_bits(kept, now)[frozen].all()
        if frozen.any():
            assert old[1][frozen].any()
