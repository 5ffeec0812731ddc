"""Removal of state that an optimizer got while a step was traced, for a step that is then refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from collage_fx.state import has_state
from collage_fx.torch_compat import records


@dataclass
class _BeforeTrace:
    """State that an optimizer had before it was last traced: a part of its record.

    Attributes:
        trace: mark that tells this trace from others.
        known: ``id`` of each key that had an entry -> whether the entry was state, not empty.
    """

    trace: Any
    known: dict[int, bool]


def remember_state(optimizer: Optimizer, trace: Any) -> None:
    """Remember which parameters have state when a trace begins; later calls in the same trace change nothing.

    Dynamo lets the optimizers of torch.optim initialise their state (zeros) while it traces them.
    """
    before = records.find(optimizer, _BeforeTrace)
    if before is None or before.trace != trace:
        known = {id(key): has_state(optimizer, key) for key in optimizer.state}
        records.put(optimizer, _BeforeTrace(trace, known))


def forget_new_state(optimizer: Optimizer) -> None:
    """Remove the state of a refused step: state that was initialised since :func:`remember_state`."""
    if (before := records.find(optimizer, _BeforeTrace)) is not None:
        for key in list(optimizer.state):
            had_state = before.known.get(id(key))
            if had_state is None or (not had_state and has_state(optimizer, key)):
                del optimizer.state[key]
