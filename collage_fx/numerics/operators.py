"""Custom operators of the library: functions of tensors that are one node in a graph.

Note [One node, one definition]
-------------------------------
A pinned rounding is a dozen elementary operations. Put into the graph one by one they would bury the step
that a person wants to read, and Inductor, which inlines a value into each of its readers, would trace them
again and again. So each is an operator of its own, whose eager implementation is the function of the same
name, and ``codegen`` compiles a trace of that function: the arithmetic is written once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from collage_fx.numerics import arithmetic, dither, float24

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


def _like(dtype: torch.dtype | None) -> Callable[..., Tensor]:
    return lambda x, *others: torch.empty_like(x, dtype=dtype)


def _elementwise(function: Callable[..., Tensor], result: torch.dtype) -> Any:
    """Define an operator with a function's name and parameters, which are tensors and dtypes of torch's."""
    kinds = {"Tensor": "Tensor", "torch.dtype": "ScalarType"}
    parameters = inspect.signature(function).parameters.values()
    arguments = ", ".join(f"{kinds[each.annotation]} {each.name}" for each in parameters)
    schema = f"{function.__name__}({arguments}) -> Tensor"
    return define_operator(schema, function, _like(result), torch.Tag.pointwise)


#: Elementwise operators of ours, and their eager functions.
ELEMENTWISE: dict[Any, Callable[..., Tensor]] = {
    _elementwise(function, result): function
    for function, result in (
        (arithmetic.round_to_storage, torch.float32),
        (arithmetic.rest, torch.float32),
        (arithmetic.upper_half, torch.float32),
        (arithmetic.lower_half, torch.int16),
        (arithmetic.with_lower_half, torch.float32),
        (arithmetic.ulp_parts, torch.int16),
        (arithmetic.with_ulp_parts, torch.float32),
        (dither.phase, torch.int32),
        (dither.dithered, torch.float32),
        (dither.dithered_sum, torch.float32),
        (float24.dithered_upper, torch.float32),
        (float24.dithered_byte, torch.int8),
        (float24.with_byte, torch.float32),
    )
}

#: Operators of the functions of the same names.
_ours = torch.ops.collage_fx
ROUND_TO_STORAGE, REST = _ours.round_to_storage.default, _ours.rest.default
UPPER_HALF, LOWER_HALF = _ours.upper_half.default, _ours.lower_half.default
WITH_LOWER_HALF = _ours.with_lower_half.default
ULP_PARTS, WITH_ULP_PARTS = _ours.ulp_parts.default, _ours.with_ulp_parts.default
PHASE, DITHERED, DITHERED_SUM = _ours.phase.default, _ours.dithered.default, _ours.dithered_sum.default
DITHERED_UPPER, DITHERED_BYTE = _ours.dithered_upper.default, _ours.dithered_byte.default
WITH_BYTE = _ours.with_byte.default
PHASES = define_operator(
    "phases(Tensor like, Tensor phase, Tensor? first=None) -> Tensor",
    dither.phases,
    _like(torch.int32),
    torch.Tag.pointwise,
)
#: Operators ``(like, *numbers)`` of int32 -> functions of an element's place in memory, and the numbers.
PLACED: dict[Any, Callable[..., Tensor]] = {PHASES: dither.phase_at}


def split(value: Tensor, dtype: torch.dtype, lo_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split a value into ``hi = RN(value)`` in ``dtype`` and ``lo = value - hi``, rounded to ``lo_dtype``.

    ``value - hi`` is exact in float32. With ``lo_dtype == dtype`` the sum ``hi + lo`` differs from ``value``
    by at most ``max(u**2 |value|, q/2)``, where q is the format's smallest subnormal. With ``lo_dtype ==
    float32`` the sum is exact. ``|lo| <= ulp(hi)/2``, and ``hi = RN(hi + lo)`` unless rounding took ``lo`` up
    to exactly ``ulp(hi)/2`` beside an odd hi: there hi is the nearest to ``value``, but ``hi + lo`` is a tie
    (which rounds to infinity beside the largest number). Where ``hi`` is not finite, also from a large finite
    ``value``, ``lo`` is zero, so that one infinite or NaN update leaves no garbage in ``lo``.

    Args:
        value: float32, any shape.
        dtype: dtype of ``hi``, bfloat16 or float16.
        lo_dtype: dtype of ``lo``, ``dtype`` or float32.
    """
    hi = value.to(dtype)
    return hi, REST(value, hi.to(torch.float32)).to(lo_dtype)
