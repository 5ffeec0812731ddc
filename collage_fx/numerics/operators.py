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
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

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


class Elementwise(NamedTuple):
    """Elementwise operator of ours, called with tensors, then constants, and its eager function.

    Attributes:
        dtypes: dtypes of the tensors.
        result: dtype of the result.
    """

    operator: Any
    function: Callable[..., Tensor]
    dtypes: tuple[torch.dtype, ...]
    result: torch.dtype


def _elementwise(
    function: Callable[..., Tensor], *dtypes: torch.dtype, result: torch.dtype = torch.float32
) -> Elementwise:
    """Define an operator with a function's name and arguments: tensors, then dtypes of torch's."""
    kinds = itertools.chain(["Tensor"] * len(dtypes), itertools.repeat("ScalarType"))
    arguments = ", ".join(map("{} {}".format, kinds, inspect.signature(function).parameters))
    schema = f"{function.__name__}({arguments}) -> Tensor"
    operator = define_operator(schema, function, _like(result), torch.Tag.pointwise)
    return Elementwise(operator, function, dtypes, result)


ELEMENTWISE = (
    _elementwise(arithmetic.round_to_storage, torch.float32),
    _elementwise(arithmetic.rest, torch.float32, torch.float32),
    _elementwise(arithmetic.upper_half, torch.float32),
    _elementwise(arithmetic.lower_half, torch.float32, result=torch.int16),
    _elementwise(arithmetic.with_lower_half, torch.float32, torch.int16),
    _elementwise(arithmetic.ulp_parts, torch.float32, torch.float32, result=torch.int16),
    _elementwise(arithmetic.with_ulp_parts, torch.float32, torch.int16),
    _elementwise(dither.phase, torch.int32, torch.int32, result=torch.int32),
    _elementwise(dither.dithered, torch.float32, torch.int32),
    _elementwise(dither.dithered_sum, torch.float32, torch.float32, torch.int32),
    _elementwise(float24.dithered_upper, torch.float32, torch.int32),
    _elementwise(float24.dithered_byte, torch.float32, torch.int32, result=torch.int8),
    _elementwise(float24.with_byte, torch.float32, torch.int8),
)

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
