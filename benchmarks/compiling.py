"""How long it takes to the first steps, compiled from nothing and from caches, and to a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import collage_fx
from benchmarks.by_hand import LR

Make = Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]


def _with(name: str, **how: Any) -> Make:
    return lambda parameters: getattr(torch.optim, name)(parameters, lr=LR, **how)


#: torch.optim's classes whose step needs neither a closure (LBFGS) nor sparse gradients (SparseAdam).
OPTIMIZERS: dict[str, Make] = {
    "AdamW": _with("AdamW"),
    "Adam": _with("Adam"),
    "Adam, amsgrad": _with("Adam", amsgrad=True),
    "NAdam": _with("NAdam"),
    "RAdam": _with("RAdam"),
    "Adamax": _with("Adamax"),
    "Adagrad": _with("Adagrad"),
    "Adadelta": _with("Adadelta"),
    "RMSprop, momentum": _with("RMSprop", momentum=0.9),
    "Rprop": _with("Rprop"),
    "ASGD": _with("ASGD"),
    "SGD, momentum": _with("SGD", momentum=0.9),
    "Adafactor": _with("Adafactor"),
    "Muon": _with("Muon"),
}

#: What is timed: AdamW at both of the sizes that have as many tensors, the others at the one that is small.
TIMED = [("a", "AdamW"), *(("b", name) for name in OPTIMIZERS)]


def make_optimizer(name: str, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Of the parameters that the class takes: Muon takes no vectors."""
    return OPTIMIZERS[name]([p for p in parameters if name != "Muon" or p.dim() == 2])


def compiled_step(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    return torch.compile(optimizer.step, backend=collage_fx.CollageBackend(strategy="plus"))
