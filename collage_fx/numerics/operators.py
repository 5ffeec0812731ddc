"""Custom operators of the library: functions of tensors that are one node in a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("collage_fx", "DEF")


def define_operator(
    schema: str,
    eager: Callable[..., Tensor],
    result: Callable[..., Tensor] | None = None,
    *tags: torch.Tag,
    gradient: Callable[..., Any] | None = None,
) -> Any:
    """Define a custom operator in torch's namespace ``collage_fx`` and return its overload.

    Args:
        schema: ``name(arguments) -> result``, in torch's notation.
        eager: function that computes the result.
        result: function of fake tensors that makes a tensor with the dtype and shape of the result; by
            default those of the first argument.
        tags: tags of torch's.
        gradient: function of autograd's context and of the gradient of the result, which returns the
            gradients of the arguments; None if the operator is not differentiated.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=tags)
    LIBRARY.impl(name, eager, "CompositeExplicitAutograd")
    torch.library.register_fake(f"collage_fx::{name}", result or _like(None), lib=LIBRARY)
    if gradient is not None:
        torch.library.register_autograd(f"collage_fx::{name}", gradient, lib=LIBRARY)
    return getattr(torch.ops.collage_fx, name).default


def define_elementwise(schema: str, eager: Callable[..., Tensor], dtype: torch.dtype | None = None) -> Any:
    """Define an operator whose result has the layout of the first argument, and by default its dtype."""
    return define_operator(schema, eager, _like(dtype), torch.Tag.pointwise)


def _like(dtype: torch.dtype | None) -> Callable[..., Tensor]:
    return lambda x, *others: torch.empty_like(x, dtype=dtype)
