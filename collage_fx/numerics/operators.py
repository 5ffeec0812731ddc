"""Operators of ours: functions of tensors that are one node in a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("collage_fx", "DEF")


def define_operator(
    schema: str, eager: Callable[..., Tensor], result: Callable[..., Tensor] | None = None, *tags: Any
) -> Any:
    """Define an operator of torch's.

    Args:
        schema: ``name(arguments) -> result``, as torch writes it.
        eager: what it computes.
        result: makes a tensor like what it returns, on fake tensors; by default one like the first argument.
        tags: torch's.

    Returns:
        its overload.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=tags)
    LIBRARY.impl(name, eager, "CompositeExplicitAutograd")
    torch.library.register_fake(f"collage_fx::{name}", result or _like, lib=LIBRARY)
    return getattr(torch.ops.collage_fx, name).default


def _like(x: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(x)
