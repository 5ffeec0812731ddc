"""The rows of torch.optim: every class that the installed torch has."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from tests.compatibility.catalog import DTYPES, TENSOR, Subject

__all__ = ["SUBJECTS", "classes"]

Options = tuple[Mapping[str, Any], ...]

#: Big enough that it shows in a displacement of some 1e-5 per step.
DECAY = {"weight_decay": 0.5}
COMMON: Options = ({}, DECAY, {"maximize": True}, {"lr": TENSOR})
CAPTURABLE = {"capturable": True}
FUSED = {"fused": True}


def _subject(name: str, lr: float, *options: Mapping[str, Any], **others: Any) -> Subject:
    return Subject(
        "torch",
        f"torch.optim.{name}",
        lr,
        options=COMMON + options,
        dtypes=tuple(DTYPES),
        foreach=(None, False, True),
        **others,
    )


#: Not square and square.
MATRICES = ((128, 32), (64, 64))

#: Compiled steps end 0.006 to 0.009 from this rule in float64.
MUON = (
    "with nesterov=False and bfloat16 state, torch's Muon divides the momentum buffer itself by its norm: "
    "`buf.bfloat16()` is no copy there; parameters of other dtypes take another path"
)

_KNOWN = (
    _subject("ASGD", 5e-5, {"lambd": 0.5}, {"t0": 10.0}, CAPTURABLE),
    _subject("Adadelta", 0.02, CAPTURABLE),
    # With lr=tensor it reads norms as Python numbers; the first to exceed 1 does so after some 20 steps.
    _subject("Adafactor", 1e-4, steps=80),
    _subject(
        "Adagrad",
        2e-4,
        {"initial_accumulator_value": 0.5},
        {"lr_decay": 0.01},
        FUSED,
    ),
    _subject(
        "Adam",
        5e-5,
        {"amsgrad": True},
        {"decoupled_weight_decay": True, **DECAY},
        {"amsgrad": True, "maximize": True, **DECAY},
        CAPTURABLE,
        FUSED,
        under_budget=({"amsgrad": True},),
    ),
    _subject("AdamW", 5e-5, {"amsgrad": True}, CAPTURABLE, FUSED),
    _subject("Adamax", 5e-5, CAPTURABLE),
    replace(_subject("LBFGS", 1e-4), options=({},), foreach=(), closure=True, under_budget=None),
    replace(
        _subject("Muon", 2e-4, {"nesterov": False}, {"momentum": 0.0}, {"adjust_lr_fn": "match_rms_adamw"}),
        options=({}, DECAY, {"nesterov": False}, {"adjust_lr_fn": "match_rms_adamw"}),
        foreach=(),
        shapes=MATRICES,
        why_inaccurate=MUON,
    ),
    _subject("NAdam", 5e-5, {"decoupled_weight_decay": True, **DECAY}, CAPTURABLE),
    _subject("RAdam", 5e-5, {"decoupled_weight_decay": True, **DECAY}, CAPTURABLE),
    _subject(
        "RMSprop",
        2e-5,
        {"centered": True},
        {"momentum": 0.9},
        {"centered": True, "momentum": 0.9},
        CAPTURABLE,
        under_budget=({"centered": True},),
    ),
    _subject("Rprop", 2e-5, CAPTURABLE, always={"step_sizes": (1e-6, 1e-4)}),
    _subject(
        "SGD",
        5e-5,
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "nesterov": True, "maximize": True, **DECAY},
        FUSED,
        under_budget=({"momentum": 0.9},),
    ),
    replace(_subject("SparseAdam", 5e-5), options=({},), foreach=(), sparse=True, under_budget=None),
)


def classes() -> list[str]:
    """The optimizer classes of torch.optim."""
    return [
        name
        for name, value in vars(torch.optim).items()
        if inspect.isclass(value)
        and issubclass(value, torch.optim.Optimizer)
        and value is not torch.optim.Optimizer
    ]


def _takes(subject: Subject, option: str) -> bool:
    return option in inspect.signature(subject.cls()).parameters


def _of_this_torch(subject: Subject) -> Subject:
    """The rows without the options that the installed torch's class does not take."""
    fitting = tuple(
        options for options in subject.options if all(_takes(subject, option) for option in options)
    )
    foreach = subject.foreach if _takes(subject, "foreach") else ()
    return replace(subject, options=fitting, foreach=foreach)


def _subjects() -> list[Subject]:
    known = {subject.name: subject for subject in _KNOWN}
    # A class that is new in torch is tried with Adam's learning rate and the options that most have.
    return [_of_this_torch(known.get(name) or _subject(name, 5e-5)) for name in sorted(classes())]


SUBJECTS = _subjects()
