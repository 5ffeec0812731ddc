"""Several doors into the library for one optimizer: what was asked at one of them stays."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from collage_fx import CollageBackend, backend_of, install, offload, step_in_backward
from collage_fx.errors import InvalidOptionError

Door = Callable[..., Any]


def model_and_optimizer() -> tuple[torch.nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).bfloat16()
    return model, torch.optim.AdamW(model.parameters())


def by_install(model: torch.nn.Module, optimizer: Optimizer, **options: Any) -> None:
    install(optimizer, **options)


def by_release(model: torch.nn.Module, optimizer: Optimizer, **options: Any) -> None:
    step_in_backward(model, optimizer, **options)


def by_offload(model: torch.nn.Module, optimizer: Optimizer, **options: Any) -> None:
    offload(optimizer, **options)


def by_accelerate(model: torch.nn.Module, optimizer: Optimizer, **options: Any) -> None:
    pytest.importorskip("accelerate", reason="pip install accelerate (the extra 'dev')")
    from accelerate import Accelerator

    from collage_fx.integrations.accelerate import prepare

    prepare(Accelerator(cpu=True), optimizer, **options)


def by_transformers(model: torch.nn.Module, optimizer: Optimizer, **options: Any) -> None:
    pytest.importorskip("transformers", reason="pip install transformers (the extra 'dev')")
    from collage_fx.integrations.transformers import CollageCallback

    callback = CollageCallback(**options)
    arguments = SimpleNamespace(max_grad_norm=None)
    callback.on_train_begin(arguments, None, None, model=model, optimizer=optimizer)
    assert callback.backend is backend_of(optimizer)


def by_lightning(model: torch.nn.Module, optimizer: Optimizer, **options: Any) -> None:
    pytest.importorskip("lightning", reason="pip install lightning (the extra 'dev')")
    from collage_fx.integrations.lightning import CollageCallback

    callback = CollageCallback(**options)
    clipping = {"gradient_clip_val": None, "gradient_clip_algorithm": None, "accumulate_grad_batches": 1}
    strategy = SimpleNamespace(model=model)
    callback.on_fit_start(SimpleNamespace(optimizers=[optimizer], strategy=strategy, **clipping), model)
    assert callback.backend is backend_of(optimizer)


DOORS: tuple[Door, ...] = (by_install, by_release, by_offload, by_accelerate, by_transformers, by_lightning)


@pytest.mark.parametrize("second", DOORS)
@pytest.mark.parametrize("first", DOORS)
def test_a_door_that_asks_for_nothing_changes_nothing(first: Door, second: Door) -> None:
    model, optimizer = model_and_optimizer()
    first(model, optimizer, bytes_per_parameter=8, metrics_every=3)
    before = backend_of(optimizer)
    second(model, optimizer)
    assert backend_of(optimizer).options == before.options
    assert backend_of(optimizer) is before or second is by_install, "which compiles anew"
    second(model, optimizer, bytes_per_parameter=8)
    assert backend_of(optimizer).options.bytes_per_parameter == 8


@pytest.mark.parametrize(
    ("door", "how"),
    [(door, "options") for door in DOORS[1:]] + [(door, "backend") for door in DOORS[1:4]],
)
def test_a_door_that_asks_for_something_else_is_refused(door: Door, how: str) -> None:
    """And changes nothing; the remedy works."""
    model, optimizer = model_and_optimizer()
    install(optimizer, bytes_per_parameter=8)
    step, state = vars(optimizer)["step"], list(optimizer.param_groups[0]["params"])
    asked: dict[str, Any] = {"bytes_per_parameter": 6}
    if how == "backend":
        asked = {"backend": CollageBackend(**asked)}
    with pytest.raises(
        InvalidOptionError, match=r"bytes_per_parameter=6 .* installed with bytes_per_parameter=8"
    ):
        door(model, optimizer, **asked)
    assert vars(optimizer)["step"] is step
    assert all(one is other for one, other in zip(optimizer.param_groups[0]["params"], state, strict=True))
    install(optimizer, bytes_per_parameter=6)
    door(model, optimizer, **asked)
    assert backend_of(optimizer).options.bytes_per_parameter == 6


@pytest.mark.parametrize("door", DOORS[1:4])
def test_no_backend_is_a_backend_that_is_not_given(door: Door) -> None:
    model, optimizer = model_and_optimizer()
    door(model, optimizer, backend=None, strategy="light")
    before = backend_of(optimizer)
    assert before.options.strategy == "light"
    model, optimizer = model_and_optimizer()
    install(optimizer, strategy="light")
    door(model, optimizer, backend=None)
    assert backend_of(optimizer).options == before.options


@pytest.mark.parametrize("door", [by_offload, by_transformers])
def test_the_bytes_that_were_asked_for_are_held(door: Door) -> None:
    torch.manual_seed(0)
    p = Parameter(torch.randn(256, 256).bfloat16())
    model = torch.nn.ParameterList([p])
    optimizer = install(torch.optim.AdamW([p]), bytes_per_parameter=8)
    door(model, optimizer)
    for _ in range(2):
        (p.float() * torch.randn(256, 256)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    report = backend_of(optimizer).report()
    assert report.bytes_per_parameter()["total"] <= 8.1
