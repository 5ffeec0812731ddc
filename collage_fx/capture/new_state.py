"""Removal of state that an optimizer got while a step was traced, for a step that is then refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from collage_fx.state import has_state

_with_state: WeakKeyDictionary[Optimizer, tuple[Any, frozenset[int]]] = WeakKeyDictionary()


def remember_state(optimizer: Optimizer, trace: Any) -> None:
    """Remember which parameters have state when a trace begins; later calls in the same trace change nothing.

    Dynamo lets the optimizers of torch.optim initialise their state (zeros) while it traces them.
    """
    if optimizer not in _with_state or _with_state[optimizer][0] != trace:
        _with_state[optimizer] = trace, frozenset(map(id, _keys_with_state(optimizer)))


def forget_new_state(optimizer: Optimizer) -> None:
    """Remove the state of a refused step: state that was initialised since :func:`remember_state`."""
    if optimizer in _with_state:
        _, known = _with_state[optimizer]
        for key in [key for key in _keys_with_state(optimizer) if id(key) not in known]:
            del optimizer.state[key]


def _keys_with_state(optimizer: Optimizer) -> Iterator[Any]:
    """Yield the parameters, and other keys, that have state."""
    return (key for key in optimizer.state if has_state(optimizer, key))
