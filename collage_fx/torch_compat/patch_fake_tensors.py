"""Patch of fake parameters whose gradients have a dtype of their own: rests on torch's fake tensor mode."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from collage_fx.torch_compat.patching import Patch

GRADIENT_DTYPES = Patch(
    name="gradient-dtypes",
    target="torch._subclasses.fake_tensor:FakeTensorMode.from_tensor(self, tensor)",
    why="a step may have gradients of another dtype than its parameters: Tensor.grad_dtype",
    waits_for="a fix in torch: fake tensors get grad_dtype before they get their gradient",
    during="conversions",
)


@contextlib.contextmanager
def faking_gradients_of_any_dtype() -> Iterator[None]:
    """Context manager: a fake parameter has no gradient if its dtype differs from the parameter's.

    Torch would assign the fake gradient to the fake parameter, which does not allow its dtype yet. Dynamo
    reads gradients from the real parameters, so that none is missing in a graph.
    """
    with GRADIENT_DTYPES.entered(_without_other_gradients):
        yield


def _without_other_gradients(from_tensor: Callable[..., Any]) -> Callable[..., Any]:
    def faked(self: Any, tensor: Tensor, *args: Any, **keywords: Any) -> Any:
        gradient = tensor.grad if tensor.is_leaf else None
        if gradient is None or gradient.dtype is tensor.dtype:
            return from_tensor(self, tensor, *args, **keywords)
        tensor.grad = None
        try:
            return from_tensor(self, tensor, *args, **keywords)
        finally:
            tensor.grad = gradient

    return faked
