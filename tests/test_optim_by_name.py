"""``collage_fx.optim``: subclasses of optimizers that are installed when they are made, found by paths."""

from __future__ import annotations

import copy
import importlib
import inspect
import multiprocessing
import pickle
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import collage_fx
from collage_fx import CollageBackend, CollageError, full_value, install, optim
from collage_fx.errors import InvalidOptionError, UnsupportedOptimizerError
from tests import optim_stub
from tests.support.training import Lion

NAMES = sorted(set(optim.__all__) - {"of"})
SHAPES = ((48, 32), (48, 32), (32,), (7, 5))


def parameters(seed: int = 0, shapes: Any = SHAPES) -> list[torch.nn.Parameter]:
    torch.manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape).bfloat16()) for shape in shapes]


def take_steps(of: list[torch.nn.Parameter], optimizer: Optimizer, steps: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for p in of:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()
    return [full_value(p) for p in of]


def test_all_classes_of_torch_optim() -> None:
    classes = [each for each in vars(torch.optim).values() if isinstance(each, type)]
    assert sorted(c.__name__ for c in classes if issubclass(c, Optimizer) and c is not Optimizer) == NAMES
    for name in NAMES:
        cls, original = getattr(optim, name), getattr(torch.optim, name)
        assert issubclass(cls, original)
        assert cls is optim.of(original) is optim.of(cls) is optim.of(f"torch.optim.{name}")
        assert (cls.__name__, cls.__module__) == (name, "collage_fx.optim")
        expected = inspect.signature(original).parameters
        found = inspect.signature(cls).parameters
        assert [*expected, "collage"] == list(found)
        assert all(found[key] == expected[key] for key in expected)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adafactor", "Muon", "NAdam"])
def test_bits_of_install(name: str) -> None:
    ways: list[list[Any]] = []
    for is_by_name in (True, False):
        of = [p for p in parameters() if name != "Muon" or p.dim() == 2]
        if is_by_name:
            optimizer = getattr(optim, name)(of, lr=1e-3, collage={"strategy": "light"})
        else:
            optimizer = install(getattr(torch.optim, name)(of, lr=1e-3), strategy="light")
        ways.append(take_steps(of, optimizer))
        report = collage_fx.backend_of(optimizer).report()
        ways.append([report.graphs[-1].route.unit, len(report.graphs)])
    assert all(map(torch.equal, ways[0], ways[2]))
    assert ways[1] == ways[3]  # compiled by family, as torch's own class


def test_options() -> None:
    backend = CollageBackend(strategy="light")
    assert collage_fx.backend_of(optim.SGD(parameters(), lr=0.1, collage=backend)) is backend
    assert collage_fx.backend_of(optim.SGD(parameters(), lr=0.1)).options == CollageBackend().options
    options: Any = MappingProxyType({"strategy": "light"})  # no dict, as the containers of OmegaConf
    optimizer = pickle.loads(pickle.dumps(optim.SGD(parameters(), lr=0.1, collage=options)))
    assert collage_fx.backend_of(optimizer).options.strategy == "light"
    wrong: Any
    for wrong in ({"strategi": "light"}, "light", 8):
        with pytest.raises(InvalidOptionError):
            optim.SGD(parameters(), lr=0.1, collage=wrong)


def test_what_torch_refuses() -> None:
    with pytest.raises(ValueError, match="Invalid learning rate"):
        optim.AdamW(parameters(), lr=-1.0)
    with pytest.raises(TypeError, match="momentum"):
        optim.AdamW(parameters(), momentum=0.9)  # type: ignore[call-arg]


def test_groups_names_and_subclasses() -> None:
    of = parameters()
    groups: Any = [{"params": [("a", of[0])], "lr": 0.5}, {"params": [("b", of[1])]}]
    optimizer = optim.AdamW(groups, lr=0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
    assert optimizer.param_groups[1]["param_names"] == ["b"]

    class Mine(optim.AdamW):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.125, collage={"strategy": "full"})

    mine = Mine(parameters())
    assert mine.param_groups[0]["lr"] == 0.125
    assert collage_fx.backend_of(mine).options.strategy == "full"
    assert optim.of(Mine) is not Mine


def test_other_packages() -> None:
    cls = optim.of("tests.support.training.Lion")
    assert issubclass(cls, Lion)
    assert cls is optim.of(Lion)
    module = importlib.import_module("collage_fx.optim.tests.support.training")
    assert module.Lion is cls
    assert pickle.loads(pickle.dumps(cls)) is cls
    of, plain = parameters(), parameters()
    found = take_steps(of, cls(of, lr=1e-3))
    assert all(map(torch.equal, found, take_steps(plain, install(Lion(plain, lr=1e-3)))))


def test_paths_that_lead_nowhere() -> None:
    for path in ("torch.optim.AdamV", "no_such_package.AdamW", "AdamW", "torch.nn.Linear"):
        with pytest.raises(UnsupportedOptimizerError, match=path):
            optim.of(path)
    with pytest.raises(CollageError, match="is not a class of optimizers"):
        optim.of(torch.nn.Linear)  # type: ignore[type-var]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("collage_fx.optim.no_such_package")
    with pytest.raises(AttributeError, match="not a class of optimizers"):
        importlib.import_module("collage_fx.optim.torch.nn").Linear  # noqa: B018
    assert optim.AdamW is optim.of("torch.optim.AdamW"), "though optim.torch is a module of ours now"
    with pytest.raises(AttributeError):
        optim.AdamV  # type: ignore[attr-defined]  # noqa: B018


def test_copies_and_checkpoints(tmp_path: Path) -> None:
    """A copy has the same class and bits; state dicts fit the original class, and the other way around."""
    of = parameters()
    optimizer = optim.AdamW(of, lr=1e-3, collage={"bytes_per_parameter": 8})
    take_steps(of, optimizer)
    torch.save((of, optimizer), tmp_path / "all.pt")
    loaded = torch.load(tmp_path / "all.pt", weights_only=False)
    copied = copy.deepcopy((of, optimizer))
    expected = take_steps(of, optimizer)
    for others, other in (loaded, copied):
        assert type(other) is optim.AdamW
        assert collage_fx.backend_of(other).options.bytes_per_parameter == 8
        assert all(map(torch.equal, expected, take_steps(others, other)))
    plain = parameters()
    original = torch.optim.AdamW(plain, lr=1e-3)
    original.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(original.state_dict())


def _name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def test_another_process_finds_the_classes() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        classes: list[type] = [optim.AdamW, optim.of(Lion)]
        assert pool.map(_name_of, classes) == [
            "collage_fx.optim.AdamW",
            "collage_fx.optim.tests.support.training.Lion",
        ]


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the file has torch 2.13's signatures")
def test_types_are_current() -> None:
    assert optim_stub.STUB.read_text() == optim_stub.stub(), "python -m tests.optim_stub writes it"
