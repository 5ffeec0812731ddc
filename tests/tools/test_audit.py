"""``audit()``: the errors of an optimizer, measured, and a verdict; what it says of good and of bad ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer

from collage_fx import audit
from collage_fx.errors import InvalidOptionError
from collage_tools.audit import (
    COMPENSATED,
    FAILED,
    INACCURATE,
    NOTHING_TO_COMPARE,
    REFUSED,
    Audit,
    Measurement,
    Trial,
    falls_short,
    take_steps,
    values_of,
    weights_of,
)
from collage_tools.cli import main
from tests.support.training import Descent


def test_a_good_optimizer_under_both_schedules() -> None:
    found = audit(lambda params: AdamW(params, lr=5e-5))
    assert found.is_good
    assert list(found.measured) == ["constant", "0, up, down to 0"]
    for each in found.measured.values():
        assert each.plain is not None
        assert each.single is not None
        assert each.error is not None
        assert each.plain > 0.5
        assert each.single < 1e-3
        assert each.error < 0.01
        assert sorted(set(each.compensated)) == ["exp_avg_sq", "parameter"]
        assert each.compilations > 0
        assert each.seconds > 0
    text = str(found)
    assert text.startswith("torch.optim.adamw.AdamW, lr 5e-05: 40 steps of bfloat16 parameters 24×16, 16\n")
    assert "with error terms: parameter\n" in text
    assert "captured, compiled" in text
    assert "Verdict: precise: the error of plain low precision is " in text


def test_numbers_are_shown_to_few_digits() -> None:
    measured = Measurement(COMPENSATED, plain=0.5, single=0.03, error=1e-5, compilations=2, seconds=12.0)
    text = str(Audit("SGD", {"constant": measured}))
    row = next(line for line in text.splitlines() if line.startswith("constant"))
    assert row.split()[1:] == ["0.5", "0.03", "<", "0.001", "2", "12.0", "compensated"]
    assert text.endswith("Verdict: precise: the error of plain low precision is 5e+04 times as large")


def test_a_closure_gives_new_gradients_each_time() -> None:
    """As a backward pass does: an optimizer may free those of the first."""

    class Twice(SGD):
        @torch.no_grad()
        def step(self, closure: Any) -> Any:  # type: ignore[override]
            closure()
            self.zero_grad()
            loss = closure()
            super().step()
            return loss

    trial = Trial(lambda params: Twice(params, lr=1.0), steps=1)
    parameters = weights_of(trial, torch.float32)
    before = values_of(parameters)
    take_steps(trial, trial.make(parameters), parameters)
    assert torch.all(values_of(parameters) != before)


@pytest.mark.parametrize(("named", "share"), [({}, 0), ({"error_format": "exact"}, 1)])
def test_the_decay_of_float32_parameters_is_measured(named: Any, share: float) -> None:
    [measured] = audit(
        lambda params: AdamW(params, lr=1e-6, weight_decay=0.01),
        shapes=[(64, 64)],
        schedules={"constant": None},
        dtype=torch.float32,
        bytes_per_parameter=8,
        **named,
    ).measured.values()
    assert measured.decay == pytest.approx(share, abs=0.02)


def test_the_share_of_weight_decay_that_is_applied() -> None:
    """Float32 has no number between 1 - 1e-8 and 1."""
    found = audit(lambda params: AdamW(params, lr=1e-6, weight_decay=0.01), schedules={"constant": None})
    measured = found.measured["constant"]
    assert measured.decay_single == 0
    assert measured.decay == pytest.approx(1, abs=0.05)  # 384 numbers moved 60 times by a unit
    assert "fp32 masters" in str(found)
    assert "\npredicted:        Predicted error of the weights over 600 steps: 0.00" in str(found)
    assert (
        audit(lambda params: SGD(params, lr=1e-4), schedules={"constant": None}).measured["constant"].decay
        is None
    )


def test_options_shapes_and_schedules_are_the_callers() -> None:
    seen = []

    class Seen(SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            if not torch.compiler.is_compiling():
                seen.append((self.param_groups[0]["params"][0].dtype, self.param_groups[0]["lr"]))
            super().step()

    found = audit(
        lambda params: Seen(params, lr=1.0, momentum=0.9),
        shapes=[(5,)],
        dtype=torch.float16,
        steps=3,
        schedules={"halved": lambda step, steps: 2.0**-step / 1024},
        strategy="light",
    )
    assert set(found.measured["halved"].compensated) == {"parameter"}
    assert [dtype for dtype, _ in seen[:9:3]] == [torch.float16, torch.float32, torch.float64]
    assert [lr for _, lr in seen[:3]] == [2.0**-10, 2.0**-11, 2.0**-12]
    assert "float16 parameters 5" in str(found)


class LeavesTorch(Descent):
    """Computes in numbers of Python's, which have no error terms."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            values, moves = p.flatten().tolist(), p.grad.flatten().tolist()
            new = [x - self.defaults["lr"] * g for x, g in zip(values, moves, strict=True)]
            p.copy_(torch.tensor(new).view_as(p))


class Fails(Descent):
    """Fails in a compiled step alone."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if "__collage_fx_step__" in vars(self):
            raise ZeroDivisionError("in a step")
        super().step()


@pytest.mark.parametrize(
    ("kind", "outcome"), [(torch.optim.LBFGS, REFUSED), (LeavesTorch, INACCURATE), (Fails, FAILED)]
)
def test_what_is_not_right_is_said(kind: type[Optimizer], outcome: str) -> None:
    found = audit(lambda params: kind(params, lr=1e-5), schedules={"constant": None})  # type: ignore[call-arg]
    assert not found.is_good
    assert found.measured["constant"].outcome == outcome
    assert "Verdict: not precise (constant: " in str(found)


class Overflows(Descent):
    """Precise in float64 alone: float16 overflows when a gradient is multiplied and divided."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad * 1e300 / 1e300, alpha=-self.defaults["lr"])


def test_what_is_not_finite_is_not_right() -> None:
    assert falls_short(1.0, float("inf"))
    assert falls_short(float("inf"), float("inf"))
    assert not falls_short(float("inf"), 0.01)
    found = audit(lambda params: Overflows(params, lr=1e-4), schedules={"constant": None}, steps=4)
    assert found.measured["constant"].outcome == INACCURATE


def test_steps_without_an_error_are_precise() -> None:
    found = audit(
        lambda params: SGD(params, lr=0.5),
        shapes=[(4,)],
        steps=3,
        error_format="exact",
        schedules={"constant": None},
    )
    assert found.measured["constant"].error == 0
    assert found.is_good
    assert found.verdict == "precise: the compensated steps have no error"


@pytest.mark.parametrize("lr", [0.0, float("nan"), float("inf")])
def test_where_there_is_nothing_to_compare_nothing_is_called_wrong(lr: float) -> None:
    found = audit(lambda params: SGD(params, lr=lr), steps=3)
    assert {each.outcome for each in found.measured.values()} == {NOTHING_TO_COMPARE}
    told = "no parameter moves" if lr == 0 else "infinite or NaN"
    assert found.verdict.startswith("none, because ")
    assert told in found.verdict
    assert not found.is_good


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"stratgy": "plus"}, "stratgy"),
        ({"strategy": "pluss"}, "strategy"),
        ({"dtype": torch.float32}, "dtype"),
        ({"shapes": []}, "shapes"),
        ({"shapes": [(0, 3)]}, "shapes"),
        ({"steps": 2}, "steps"),
        ({"steps": -1}, "steps"),
        ({"schedules": {}}, "schedules"),
    ],
)
def test_arguments_are_refused_before_anything_is_measured(options: dict[str, Any], where: str) -> None:
    made: list[Any] = []

    def make(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        made.append(params)
        return SGD(params)

    with pytest.raises(InvalidOptionError) as raised:
        audit(make, **options)
    assert raised.value.where == where
    assert not made


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["audit", "--optimizer", "torch.optim.SGD", "--lr", "1e-4", "--shape", "8,8", "--steps", "8"]
    assert main([*command, "--dtype", "float16", "--kw", "momentum=0.9"]) == 0
    assert "SGD, lr 0.0001: 8 steps of float16 parameters 8×8" in capsys.readouterr().out
    assert main(["audit", "--optimizer", "torch.optim.LBFGS"]) == 1
    assert "UnsupportedOptimizerError: LBFGS" in capsys.readouterr().out
    assert main(["audit", "--optimizer", "torch.optim.SGD", "--kw", "mometum=1"]) == 2
