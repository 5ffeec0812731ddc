"""Twins in host memory of parameters on a device, whose optimizer works with the twins.

A twin has the error terms. Where the program has written other bits to the parameter since both were equal,
the twin is made equal before anybody reads it, or steps it: the change is found as other writes are.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from collage_fx.errors import InvalidOptionError
from collage_fx.state.fingerprints import bits_of
from collage_fx.torch_compat import records, version_of


@dataclass(eq=False)
class _Twin:
    """Part of a parameter: its twin, and version and address of the parameter when both were equal."""

    tensor: Tensor
    equal_at: tuple[int, int]


class _TwinOf(TensorWeakRef):
    """Part of a twin: its parameter."""


#: A thread uploads values while the program may read them.
_LOCK = threading.RLock()


def set_host_twin(tensor: Tensor, twin: Tensor | None) -> None:
    """Note that another tensor, in host memory, has the error terms of a tensor; None: no longer."""
    if (before := records.drop(tensor, _Twin)) is not None:
        records.drop(before.tensor, _TwinOf)
    if twin is not None:
        records.put(tensor, _Twin(twin, _state_of(tensor)))
        records.put(twin, _TwinOf(tensor))


def host_twin(tensor: Tensor) -> Tensor:
    """Return the tensor that has a tensor's error terms, up to date: its twin in host memory, or itself."""
    if not isinstance(tensor, Tensor):
        met = f"a tensor was expected, got {type(tensor).__name__}"
        remedy = "give a tensor, such as each of model.parameters()"
        raise InvalidOptionError(met, where="tensor", remedy=remedy)
    found = records.find(tensor, _Twin)
    if found is None:
        return tensor
    with _LOCK:
        if (now := _state_of(tensor)) != found.equal_at:
            value, twin = tensor.detach().to(found.tensor), found.tensor.detach()
            if not torch.equal(bits_of(value), bits_of(twin)):
                twin.copy_(value)
            found.equal_at = now
    return found.tensor


def update_twin(twin: Tensor) -> None:
    """Make a twin equal to its parameter, if the program has written to that; other tensors are no twins."""
    found = records.find(twin, _TwinOf)
    if found is not None and (parameter := found()) is not None:
        host_twin(parameter)


@contextmanager
def uploading(tensor: Tensor) -> Iterator[None]:
    """Context manager: inside, the value of a twin is copied to its parameter, after which both are equal."""
    with _LOCK:
        yield
        if (found := records.find(tensor, _Twin)) is not None:
            found.equal_at = _state_of(tensor)


def _state_of(tensor: Tensor) -> tuple[int, int]:
    """Return two numbers of which one changes when the program writes to a tensor, or moves it."""
    return version_of(tensor), tensor.data_ptr()
