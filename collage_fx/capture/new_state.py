"""The removal of state that an optimizer has got while its step was traced, where the step is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

_with_state: WeakKeyDictionary[Optimizer, tuple[Any, frozenset[int]]] = WeakKeyDictionary()


def remember_state(optimizer: Optimizer, trace: Any) -> None:
    """Note which parameters have state as a trace begins; later calls of the same trace change nothing.

    Dynamo lets the optimizers of torch.optim initialise their state (zeros) while it traces them.
    """
    if optimizer not in _with_state or _with_state[optimizer][0] != trace:
        _with_state[optimizer] = trace, frozenset(map(id, _keys_with_state(optimizer)))


def forget_new_state(optimizer: Optimizer) -> None:
    """Take away the state that has been initialised since :func:`remember_state`.

    The step has been refused.
    """
    if optimizer in _with_state:
        _, known = _with_state[optimizer]
        for key in [key for key in _keys_with_state(optimizer) if id(key) not in known]:
            del optimizer.state[key]


def _keys_with_state(optimizer: Optimizer) -> Iterator[Any]:
    return (key for key, state in optimizer.state.items() if state)
