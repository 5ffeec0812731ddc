"""Twins in host memory of parameters on a device, whose optimizer works with the twins."""

from __future__ import annotations

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_TWINS = WeakTensorKeyDictionary()


def set_host_twin(tensor: Tensor, twin: Tensor | None) -> None:
    """Note that another tensor, in host memory, has the error terms of a tensor; None: no longer."""
    if twin is None:
        _TWINS.pop(tensor, None)
    else:
        _TWINS[tensor] = twin


def host_twin(tensor: Tensor) -> Tensor:
    """Return the tensor that has a tensor's error terms: its twin in host memory, or itself."""
    found: Tensor = _TWINS.get(tensor, tensor)
    return found
