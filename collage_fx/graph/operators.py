"""Traces of eager functions into elementary operations, and the operator ``once``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from functorch import make_fx
from torch.fx import GraphModule

from collage_fx.numerics import define_operator
from collage_fx.torch_compat import FakeTensorMode, functional_decompositions

#: ``once(x)``: ``x``, computed once and kept in memory, rather than in every place that reads it.
once = define_operator("once(Tensor x) -> Tensor", torch.clone)


@functools.cache
def trace_of(
    function: Callable[..., Any], dtypes: tuple[torch.dtype, ...], constants: tuple[Any, ...] = ()
) -> GraphModule:
    """Trace a function of tensors of these dtypes, and of constants, into elementary operations."""
    tracer = make_fx(lambda *x: function(*x, *constants), decomposition_table=functional_decompositions())
    with FakeTensorMode(), torch.no_grad():
        return tracer(*(torch.empty(2, dtype=dtype) for dtype in dtypes))
