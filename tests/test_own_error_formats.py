"""An error format is one class and one place in a registry, whatever its auxiliaries are."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from collage_fx import error_terms, explain, full_value
from collage_fx.errors import CheckpointMismatchError
from collage_fx.graph import Unit
from collage_fx.numerics.error_formats import ERROR_FORMATS, ErrorFormat
from collage_fx.state import adopt
from collage_fx.state.error_terms import change_layout, ensure_record
from collage_tools.cli import main
from tests.support.agreement import assert_same, trajectory
from tests.support.error_formats import OWN_FORMATS
from tests.support.float_bits import same_bits
from tests.support.optimizers import CompiledOptimizer, gradients
from tests.support.programs import after, captured
from tests.support.substitutes import lowered_as
from tests.support.training import compiled, parameters, run_steps
from tests.support.twin import ExactInterpreter, TwinBackend
from tests.support.whole import pipeline

SHAPES = ((33, 17), (33, 17), (37,))
#: Of the auxiliaries of one tensor of 33 x 17 elements.
BYTES = {"planes": 2 * 33 * 17, "rows": 33 * 17 + 4 * 33, "nearest-byte": 33 * 17}


@pytest.fixture(params=OWN_FORMATS, ids=lambda fmt: fmt.name)
def fmt(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ErrorFormat:
    own: ErrorFormat = request.param
    monkeypatch.setitem(ERROR_FORMATS, own.name, own)
    return own


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


def rig_of(fmt: ErrorFormat, **options: Any) -> CompiledOptimizer:
    backend = TwinBackend(strategy="full", error_format=fmt.name, **options)
    return CompiledOptimizer(SHAPES, adamw, backend)


def expanded(fmt: ErrorFormat, *shape: int) -> tuple[Tensor, Tensor]:
    """A tensor with error terms, and the float32 value that they were split from."""
    value = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    hi, *auxiliaries = fmt.split(value, torch.bfloat16)
    ensure_record(hi, fmt, name="hi").replace_contents(auxiliaries)
    return hi, value


@pytest.mark.parametrize("unit", ["by family", "in parts", "whole"])
def test_compiled_bits_are_eager_bits(fmt: ErrorFormat, unit: Unit) -> None:
    rig = rig_of(fmt, passes=pipeline(by_family=unit == "by family"))
    with lowered_as(unit):
        start = rig.start()
    assert rig.backend.report().graphs[-1].route.unit == unit
    grads = list(gradients(SHAPES, 5))
    states = trajectory(rig, start, grads)
    assert_same(states, trajectory(rig, start, grads, engine="eager"))
    names = {spec.name for spec in fmt.auxiliaries(rig.parameters[0])}
    assert all(states[-1][f"0.exp_avg.{name}"].any() for name in names)


def test_metrics_change_no_bit_and_see_the_error_term(fmt: ErrorFormat) -> None:
    grads = list(gradients(SHAPES, 2))
    ends = []
    for metrics in (False, True):
        rig = rig_of(fmt, metrics=metrics)
        ends.append(trajectory(rig, rig.start(), grads))
    assert_same(*ends)
    *_, last = rig.backend.metrics().values()
    quality = next(quality for name, quality in last.items() if name.endswith("params[0]"))
    (term,) = error_terms(rig.parameters[0])
    assert quality.error_norm == pytest.approx(float(term.double().norm()), rel=2.0**-20)


def test_a_checkpoint_goes_on_where_it_was(fmt: ErrorFormat) -> None:
    ends = []
    for interrupted in (False, True):
        torch._dynamo.reset()
        params = parameters(shapes=SHAPES)
        optimizer = adamw(params)
        run_steps(compiled(optimizer, error_format=fmt.name), params, [0, 1])
        if interrupted:
            saved = copy.deepcopy(optimizer.state_dict())
            params = [torch.nn.Parameter(p.detach().clone()) for p in params]
            optimizer = adamw(params)
            optimizer.load_state_dict(saved)
        run_steps(compiled(optimizer, error_format=fmt.name), params, [2])
        ends.append((params, copy.deepcopy(optimizer.state_dict()["state"])))
    (one, kept), (other, loaded) = ends
    assert all(same_bits(a, b).all() for a, b in zip(one, other, strict=True))
    for i, entries in kept.items():
        own = [name for name in entries if name.startswith("collage_fx.") and f".{fmt.name}." in name]
        slots = {name.split(".")[1] for name in own}
        assert slots == {"parameter", "exp_avg_sq"}
        assert len(own) == len(slots) * (len(fmt.auxiliaries(one[i])) + 1)  # and a fingerprint
        assert entries.keys() == loaded[i].keys()
        assert all(same_bits(entries[name], loaded[i][name]).all() for name in entries)


def test_a_checkpoint_of_another_shape_is_refused(fmt: ErrorFormat) -> None:
    hi, _ = expanded(fmt, 6, 8)
    optimizer = torch.optim.SGD([torch.nn.Parameter(hi)])
    adopt(optimizer)
    saved = optimizer.state_dict()
    kept = ("fingerprint", *(spec.name for spec in fmt.auxiliaries(hi)))
    assert saved["state"][0].keys() == {f"collage_fx.parameter.{fmt.name}.{name}" for name in kept}
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3, 16).bfloat16())])
    adopt(other)
    with pytest.raises(CheckpointMismatchError, match=r"of shape \(6, 8\); this one is \(3, 16\)"):
        other.load_state_dict(saved)


def test_copies_take_the_error_terms_along(fmt: ErrorFormat) -> None:
    hi, _ = expanded(fmt, 6, 8)
    optimizer = torch.optim.SGD([torch.nn.Parameter(hi)])
    adopt(optimizer)
    (copied,) = copy.deepcopy(optimizer).param_groups[0]["params"]
    assert torch.equal(full_value(copied), full_value(hi))


def test_error_terms_are_what_hi_lacks(fmt: ErrorFormat) -> None:
    hi, value = expanded(fmt, 33, 17)
    (term,) = error_terms(hi)
    assert term.shape == hi.shape
    assert term.any()
    # A unit of rows is 2**-7 of the largest rest in its row at least, which is half an ulp below 4 at most;
    # one of the nearest byte is 2**-8 of that ulp.
    bound = {"planes": 0.0, "rows": 2.0**-7 * 2.0**-7, "nearest-byte": 2.0**-6 * 2.0**-8}[fmt.name]
    assert float((full_value(hi) - value.double()).abs().max()) <= bound


def test_a_changed_layout_keeps_the_value(fmt: ErrorFormat) -> None:
    # Rests of one size, which both formats hold wherever they are.
    sign = torch.randn(33, 17, generator=torch.Generator().manual_seed(0)).sign()
    hi, *auxiliaries = fmt.split(1 + 2.0**-12 * sign, torch.bfloat16)
    ensure_record(hi, fmt, name="hi").replace_contents(auxiliaries)
    value = full_value(hi)
    change_layout(hi, lambda tensor: tensor.t_())
    assert torch.equal(full_value(hi), value.t())


def accumulate(s: Tensor, g: Tensor) -> None:
    s.add_(g)


def test_a_zeroed_sum_starts_from_zero(fmt: ErrorFormat) -> None:
    program = after(captured(accumulate, "s g", shape=(2, 4), error_format=fmt.name), "pin-roundings")
    value = 1 + torch.full((2, 4), 2.0**-11)
    total, *auxiliaries = fmt.split(value, torch.bfloat16)
    total[0, :2] = 0
    gradient = torch.full((2, 4), 0.5).bfloat16()
    ExactInterpreter(program.gm).run(total, gradient, *auxiliaries)
    expected = value + 0.5
    expected[0, :2] = 0.5
    assert torch.equal(fmt.join(total, *auxiliaries), expected)


def test_reports_and_commands_know_it(fmt: ErrorFormat, tmp_path: Path) -> None:
    report = explain(adamw(parameters(shapes=SHAPES)), error_format=fmt.name)  # type: ignore[arg-type]
    first = report.tensors[0]
    assert (first.error_format, first.error_bytes) == (fmt.name, BYTES[fmt.name])
    assert f"<td>full, in {fmt.name}" in report.to_html()
    page = tmp_path / "page.html"
    command = f"explain --optimizer SGD --lr 0.1 --shape 4,8 --error-format {fmt.name} --html {page}"
    assert main(command.split()) == 0
    assert fmt.precision in page.read_text()
