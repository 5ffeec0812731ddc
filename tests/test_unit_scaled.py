"""Unit-scaled layers and their AdamW in 16 bits, by the example that trains them."""

from __future__ import annotations

import math
import re
import statistics
from dataclasses import replace

import pytest
import torch

unit_scaling = pytest.importorskip("unit_scaling", reason="pip install 'collage-fx[examples]'")

from collage_fx import error_terms, full_value, install  # noqa: E402
from examples import train_unit_scaled  # noqa: E402
from examples.train_gpt import QUICK, Text  # noqa: E402
from examples.train_unit_scaled import PLAIN, UNIT_SCALED, Fate, norm, train  # noqa: E402


def rounding_of_first_moments(dtype: torch.dtype) -> float:
    """The relative error of a displacement whose first moments alone are rounded, at beta1 = 0.9.

    A rounding is off by u / sqrt(3) at most, in the mean, and is forgotten at the rate beta1.
    """
    unit_roundoff = torch.finfo(dtype).eps / 2
    return unit_roundoff / math.sqrt(3 * (1 - QUICK.betas[0] ** 2))


def below(bound: float, deviation: float = 1.0) -> float:
    """Share of normally distributed numbers of mean 0 that are smaller than ``bound``."""
    return math.erf(bound / deviation / math.sqrt(2))


@pytest.fixture(scope="module")
def text() -> Text:
    return Text.of_standard_library()


def test_the_models_are_one() -> None:
    plain, scaled = (
        sorted(tuple(p.shape) for p in family.layers(QUICK).parameters()) for family in (PLAIN, UNIT_SCALED)
    )
    assert plain == scaled


@pytest.mark.parametrize("deviation", [1.0, 0.02])
def test_fates_of_normal_numbers(deviation: float) -> None:
    """In e4m3, whose normal numbers begin at 2**-6; those below half of 2**-9 become 0."""
    count = 100_000
    torch.manual_seed(0)
    exact = torch.randn(count) * deviation
    fate = Fate.of([(exact, exact.to(torch.float8_e4m3fn))], torch.float8_e4m3fn)
    lost = below(2**-10, deviation)
    # What is less than half a step below the first normal number is rounded up to it.
    subnormal = below(2**-6 - 2**-10, deviation) - lost
    for share, expected in ((fate.lost, lost), (fate.subnormal, subnormal)):
        assert abs(share - expected) < 5 * math.sqrt(expected * (1 - expected) / count)
    assert fate.overflows == 0
    assert Fate.of([(exact, exact / 0)], torch.float16).overflows == count


@pytest.mark.usefixtures(
    "two_threads"
)  # which gives back the number of threads, of which the example takes 1
def test_train_unit_scaled(
    text: Text, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--quick", "--dtypes", "float16", "--strategies", "exact"]
    monkeypatch.setattr("sys.argv", ["train_unit_scaled.py", *arguments])
    train_unit_scaled.main()
    training, _, numbers = capsys.readouterr().out.partition("\n\n")
    runs = {
        (model, dtype): (float(loss), float(error))
        for model, dtype, loss, error in re.findall(
            r"^(plain|unit-scaled) +(\w+) +(?:exact)? +([\d.]+) +([\d.e+-]+) ", training, re.MULTILINE
        )
    }
    assert len(runs) == 4
    losses = [
        train(UNIT_SCALED, torch.float32, None, replace(QUICK, seed=seed), text).loss for seed in range(4)
    ]
    single, _ = runs["unit-scaled", "float32"]
    assert single == pytest.approx(losses[0], abs=5e-5)  # printed with four digits
    loss, error = runs["unit-scaled", "float16"]
    assert abs(loss - single) < statistics.stdev(losses)
    assert error < rounding_of_first_moments(torch.float16)
    # Second moments below float16's numbers: eps alone divides what is left of the first ones.
    assert runs["plain", "float16"][1] > 100 * rounding_of_first_moments(torch.float16)

    fates = {
        (kind, model): [float(each) for each in (lost, subnormal, overflows, error)]
        for kind, model, lost, subnormal, overflows, error in re.findall(
            r"^(\w.*?) in \w+ +(plain|unit-scaled) +([\d.]+)% +([\d.]+)% +(\d+) +([\d.]+)%$",
            numbers,
            re.MULTILINE,
        )
    }
    assert len(fates) == 10
    for kind in ("their gradients", "gradients of weights", "second moments", "weights"):
        plain, scaled = fates[kind, "plain"], fates[kind, "unit-scaled"]
        assert 10 * (scaled[0] + scaled[1]) < plain[0] + plain[1]
        assert plain[2] == scaled[2] == 0
    # Scaled weights begin as N(0, 1), and spread. A rounding to 4 bits is off by 2**-4 / sqrt(3) at most, in
    # the mean.
    lost, subnormal, _, error = fates["weights", "unit-scaled"]
    assert lost + subnormal < 100 * below(2**-6)
    assert error < 100 * 2**-4 / math.sqrt(3)
    assert error < fates["weights", "plain"][3]


def test_bfloat16_loses_updates_of_unit_scaled_weights_without_error_terms(text: Text) -> None:
    plain, ours = (train(UNIT_SCALED, torch.bfloat16, each, QUICK, text) for each in ("none", "exact"))
    assert not any(error_terms(p) for p in plain.model.parameters())
    for parameter in ours.model.parameters():
        assert error_terms(parameter)
        assert error_terms(ours.optimizer.state[parameter]["exp_avg_sq"])
    bound = rounding_of_first_moments(torch.bfloat16)
    assert ours.displacement_error < bound < plain.displacement_error


@pytest.mark.parametrize(("name", "options"), [("Adam", {}), ("SGD", {"momentum": 0.9})])
def test_the_packages_optimizers_are_compensated(name: str, options: dict[str, float]) -> None:
    """Beside AdamW. Each parameter is a group with a learning rate of its own, by its shape and depth."""
    torch.manual_seed(0)
    parameters = [
        unit_scaling.Parameter(torch.randn(64, 32).half(), "weight", mup_scaling_depth=4),
        unit_scaling.Parameter(torch.ones(32).half(), "norm"),
    ]
    optimizer = getattr(unit_scaling.optim, name)(parameters, lr=1e-3, **options)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates == pytest.approx([1e-3 / math.sqrt(32 * 4), 1e-3])
    start = [p.detach().double() for p in parameters]
    exact = [p.clone() for p in start]
    groups = [{**group, "params": [p]} for group, p in zip(optimizer.param_groups, exact, strict=True)]
    exact_optimizer = getattr(torch.optim, name)(groups)
    install(optimizer, error_format="exact")
    directions = [torch.randn_like(p) for p in parameters]
    for _ in range(30):
        for parameter, copy, direction in zip(parameters, exact, directions, strict=True):
            parameter.grad = direction + torch.randn_like(parameter)
            copy.grad = parameter.grad.double()
        optimizer.step()
        exact_optimizer.step()
    off = norm(full_value(p).double() - e for p, e in zip(parameters, exact, strict=True))
    moved = norm(e - s for e, s in zip(exact, start, strict=True))
    assert off / moved < rounding_of_first_moments(torch.float16)
