"""Removal of state that an optimizer got while a step was traced, for a step that is then refused."""

from __future__ import annotations

from collections.abc import Iterator
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
        known: ``id`` of each key that had state.
        present: ``id`` of each key that had an entry, maybe an empty one.
    """

    trace: Any
    known: frozenset[int]
    present: frozenset[int]


def remember_state(optimizer: Optimizer, trace: Any) -> None:
    """Remember which parameters have state when a trace begins; later calls in the same trace change nothing.

    Dynamo lets the optimizers of torch.optim initialise their state (zeros) while it traces them.
    """
    before = records.find(optimizer, _BeforeTrace)
    if before is None or before.trace != trace:
        known = frozenset(map(id, _keys_with_state(optimizer)))
        records.put(optimizer, _BeforeTrace(trace, known, frozenset(map(id, optimizer.state))))


def forget_new_state(optimizer: Optimizer) -> None:
    """Remove the state of a refused step: state that was initialised since :func:`remember_state`."""
    if (before := records.find(optimizer, _BeforeTrace)) is not None:
        new = {key for key in optimizer.state if id(key) not in before.present}
        for key in new.union(key for key in _keys_with_state(optimizer) if id(key) not in before.known):
            del optimizer.state[key]


def _keys_with_state(optimizer: Optimizer) -> Iterator[Any]:
    """Yield the parameters, and other keys, that have state."""
    return (key for key in optimizer.state if has_state(optimizer, key))
