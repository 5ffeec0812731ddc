"""Operators of ours: elementwise arithmetic that is one node in a graph and integer code in a kernel.

Note [One node, one definition]
-------------------------------
A pinned rounding is a dozen elementary operations. Put into the graph one by one they would bury the step
that a person wants to read, and Inductor, which inlines a value into each of its readers, would trace them
again and again. So each is an operator of its own, whose eager implementation is the function in
``numerics/arithmetic.py``. What it is compiled to is made of a trace of that same function: the arithmetic is
written once (``codegen``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from functorch import make_fx
from torch import Tensor
from torch.fx import GraphModule

from collage_fx.numerics import (
    DITHERED,
    DITHERED_BYTE,
    DITHERED_SUM,
    DITHERED_UPPER,
    LOWER_HALF,
    PHASE,
    ULP_PARTS,
    UPPER_HALF,
    WITH_BYTE,
    WITH_LOWER_HALF,
    WITH_ULP_PARTS,
    arithmetic,
    define_operator,
    dithered,
    dithered_byte,
    dithered_sum,
    dithered_upper,
    phase,
    with_byte,
)
from collage_fx.torch_compat import FakeTensorMode, functional_decompositions

#: ``round_to_storage(x, dtype)``: :func:`collage_fx.numerics.arithmetic.round_to_storage` as one operator.
round_to_storage = define_operator(
    "round_to_storage(Tensor x, ScalarType dtype) -> Tensor",
    arithmetic.round_to_storage,
    None,
    torch.Tag.pointwise,
)

#: ``rest(x, hi)``: :func:`collage_fx.numerics.arithmetic.rest` as one operator.
rest = define_operator("rest(Tensor x, Tensor hi) -> Tensor", arithmetic.rest, None, torch.Tag.pointwise)

#: ``once(x)``: ``x``, computed once and kept in memory, rather than in every place that reads it.
once = define_operator("once(Tensor x) -> Tensor", torch.clone)

#: The dtypes of as many float32 tensors as an operator takes at most.
FLOATS = (torch.float32,) * 2


@functools.cache
def trace_of(
    function: Callable[..., Any], dtypes: tuple[torch.dtype, ...], constants: tuple[Any, ...] = ()
) -> GraphModule:
    """Trace a function of tensors of these dtypes, and of constants, into elementary operations."""
    tracer = make_fx(lambda *x: function(*x, *constants), decomposition_table=functional_decompositions())
    with FakeTensorMode(), torch.no_grad():
        return tracer(*(torch.empty(2, dtype=dtype) for dtype in dtypes))


class Elementwise(NamedTuple):
    """Elementwise operator of ours, called with tensors, then constants, and its eager function."""

    operator: Any
    function: Callable[..., Tensor]
    dtypes: tuple[torch.dtype, ...]
    result: torch.dtype


ELEMENTWISE = (
    Elementwise(round_to_storage, arithmetic.round_to_storage, FLOATS[:1], torch.float32),
    Elementwise(rest, arithmetic.rest, FLOATS[:2], torch.float32),
    Elementwise(UPPER_HALF, arithmetic.upper_half, FLOATS[:1], torch.float32),
    Elementwise(LOWER_HALF, arithmetic.lower_half, FLOATS[:1], torch.int16),
    Elementwise(WITH_LOWER_HALF, arithmetic.with_lower_half, (torch.float32, torch.int16), torch.float32),
    Elementwise(DITHERED, dithered, (torch.float32, torch.int32), torch.float32),
    Elementwise(DITHERED_SUM, dithered_sum, (*FLOATS[:2], torch.int32), torch.float32),
    Elementwise(PHASE, phase, (torch.int32, torch.int32), torch.int32),
    Elementwise(DITHERED_UPPER, dithered_upper, (torch.float32, torch.int32), torch.float32),
    Elementwise(DITHERED_BYTE, dithered_byte, (torch.float32, torch.int32), torch.int8),
    Elementwise(WITH_BYTE, with_byte, (torch.float32, torch.int8), torch.float32),
    Elementwise(ULP_PARTS, arithmetic.ulp_parts, FLOATS[:2], torch.int16),
    Elementwise(WITH_ULP_PARTS, arithmetic.with_ulp_parts, (torch.float32, torch.int16), torch.float32),
)
