"""The catalogue of the compatibility table: optimizers, their options, and what to feed them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import torch

from collage_tools.audit import STEPS, Parameters

__all__ = [
    "BEFORE_SAVED",
    "BUDGETS",
    "DTYPES",
    "ON_OTHER_SHAPES",
    "OTHER_SHAPES",
    "RESUMED",
    "RESUMED_STEPS",
    "STEPS",
    "TENSOR",
    "Row",
    "Subject",
    "Variant",
    "rows_of",
]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

#: Values of ``bytes_per_parameter`` that are tried beside the backend's defaults.
BUDGETS = (8, 5.1)

#: The smallest matrix whose state can be packed, and a vector, whose state cannot.
SHAPES = ((128, 32), (32,))

#: Shapes beside those: tall, wide, square, an odd vector, a convolution's weight and a scalar. Of each there
#: are several tensors, as code that is compiled for a tensor runs on others.
OTHER_SHAPES = 3 * ((37, 5), (5, 37), (16, 16), (7,), (4, 3, 3, 3), ())

#: What is measured of a row beside the errors on its usual shapes.
ON_OTHER_SHAPES, RESUMED = "other shapes", "resumed"

#: Steps before a resumed run is saved, and all that it takes.
BEFORE_SAVED, RESUMED_STEPS = 10, 16

#: As the value of the option ``lr``: the subject's learning rate in a 0-d tensor.
TENSOR = "tensor"


def _construct(cls: Any, parameters: Parameters, **options: Any) -> torch.optim.Optimizer:
    return cls(parameters, **options)


@dataclass(frozen=True)
class Subject:
    """One optimizer class.

    Attributes:
        package: the distribution's name on PyPI.
        path: of the class, such as ``torch.optim.Adam``.
        lr: gives N(0, 1) weights steps of 1e-5 to 1e-4, which plain bfloat16 loses; None leaves the default.
        options: keyword arguments to try, each a row of its own.
        under_budget: those of the options, beside the first, that are tried under budgets too; None: not even
            that.
        dtypes: of parameters and gradients.
        foreach: settings to try within each row; empty where the class does not take it.
        always: keyword arguments that all rows share.
        shapes: of the parameters.
        steps: to take; in the second half of them, nothing is to be compiled any more.
        sparse: give sparse gradients.
        closure: ``step`` must be given a closure.
        construct: ``(class, parameters, **options) -> optimizer``.
        prepare: called with the optimizer before its first step.
        why_inaccurate: what makes its low-precision rule another one than its float64 rule.
    """

    package: str
    path: str
    lr: float | None
    options: Sequence[Mapping[str, Any]] = ({},)
    under_budget: Sequence[Mapping[str, Any]] | None = ()
    dtypes: Sequence[str] = ("bf16",)
    foreach: Sequence[bool | None] = ()
    always: Mapping[str, Any] = field(default_factory=dict)
    shapes: Sequence[tuple[int, ...]] = SHAPES
    steps: int = STEPS
    sparse: bool = False
    closure: bool = False
    construct: Callable[..., torch.optim.Optimizer] = _construct
    prepare: Callable[[Any], object] = bool
    why_inaccurate: str = ""

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def version(self) -> str:
        return version(self.package)

    def cls(self) -> Any:
        module, _, name = self.path.rpartition(".")
        return getattr(importlib.import_module(module), name)


@dataclass(frozen=True)
class Row:
    """A line of the table: an optimizer with some options on parameters of some dtype."""

    subject: Subject
    options: Mapping[str, Any]
    dtype: str

    @property
    def name(self) -> str:
        return f"{self.subject.path}({self.options_text}) {self.dtype}"

    @property
    def options_text(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.options.items())

    def variants(self) -> Iterator[Variant]:
        """Each setting of ``foreach``, then the first of them under each budget, and the checks."""
        settings: list[dict[str, bool | None]] = [{"foreach": foreach} for foreach in self.subject.foreach]
        if "fused" in self.options or not settings:
            settings = [{}]
        for setting in settings:
            yield Variant(self, setting)
        others = self.subject.under_budget
        if others is not None and self.options in (self.subject.options[0], *others):
            for budget in BUDGETS:
                yield Variant(self, settings[0], budget)
        for check in (ON_OTHER_SHAPES, RESUMED):
            yield Variant(self, settings[0], check=check)


@dataclass(frozen=True)
class Variant:
    """Unit of measurement: a row with one setting of ``foreach``, by default, under a budget or checked."""

    row: Row
    foreach: Mapping[str, bool | None]
    budget: float | None = None
    check: str = ""

    @property
    def name(self) -> str:
        budget = "" if self.budget is None else f" {self.budget:g} B"
        foreach = "".join(f" foreach={value}" for value in self.foreach.values())
        return f"{self.row.name}{foreach}{budget} {self.check}".rstrip()

    def optimizer(self, parameters: Parameters, *, without: Sequence[str] = ()) -> torch.optim.Optimizer:
        """The optimizer under test.

        Args:
            parameters: its parameters.
            without: options to leave out.
        """
        subject = self.row.subject
        lr = {} if subject.lr is None else {"lr": subject.lr}
        options = {**lr, **subject.always, **self.row.options, **self.foreach}
        options = {name: value for name, value in options.items() if name not in without}
        if options.get("lr") == TENSOR:
            options["lr"] = torch.tensor(subject.lr)
        optimizer = subject.construct(subject.cls(), parameters, **options)
        subject.prepare(optimizer)
        return optimizer


def rows_of(subject: Subject) -> Iterator[Row]:
    for options in subject.options:
        for dtype in subject.dtypes:
            yield Row(subject, options, dtype)
