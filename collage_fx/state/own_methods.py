"""Methods of an optimizer instance, around the methods by which its class overrides torch's."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

from torch.optim import Optimizer


class OwnMethod:
    """Method of one optimizer: calls ``around(optimizer, method, ...)``, where ``method`` is its class's.

    The method does not keep the optimizer alive, and stays behind when the optimizer is copied or pickled.
    """

    def __init__(self, optimizer: Optimizer, name: str, around: Callable[..., Any]) -> None:
        self._optimizer, self._name, self._around = weakref.ref(optimizer), name, around
        self._before = vars(optimizer).get(name)  # what other code had given to the instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        optimizer = self._optimizer()
        if optimizer is None:
            raise ReferenceError(f"the optimizer of this {self._name} is gone")
        method = self._before or MethodType(getattr(type(optimizer), self._name), optimizer)
        return self._around(optimizer, method, *args, **kwargs)


def wrap_own_method(optimizer: Optimizer, name: str, around: Callable[..., Any]) -> None:
    """Put a function around a method of an optimizer, unless the method is torch's own."""
    is_torchs = getattr(type(optimizer), name) is getattr(Optimizer, name)
    if name in vars(optimizer) or not is_torchs:
        vars(optimizer)[name] = OwnMethod(optimizer, name, around)


def without_own_methods(attributes: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return attributes of an optimizer without the methods that belong to this one instance."""
    return {name: value for name, value in attributes if not isinstance(value, OwnMethod)}
