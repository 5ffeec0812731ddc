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
from collections.abc import Callable, Mapping, Sequence
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
from collage_fx.numerics import update_sums as measures
from collage_fx.torch_compat import FakeTensorMode, functional_decompositions


def _row(columns: Sequence[str]) -> Callable[..., Tensor]:
    return lambda x, *others: x.new_empty((len(columns),), dtype=torch.float64)


def _update_sizes(old: Tensor, old_lo: Tensor | None, intended: Tensor, dtype: torch.dtype) -> Tensor:
    return measures.sizes(old, torch.zeros_like(old) if old_lo is None else old_lo, intended, dtype)


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

#: ``update_sizes(old, old_lo, intended, dtype)``: ``update_sums.sizes`` as one operator; without an
#: error term it is None. Which elements are in the sample goes by their order in memory where all tensors
#: of an elementwise step have one layout, and by their indices elsewhere.
update_sizes = define_operator(
    "update_sizes(Tensor old, Tensor? old_lo, Tensor intended, ScalarType dtype) -> Tensor",
    _update_sizes,
    _row(measures.SIZES),
)

#: ``update_sums(old, old_lo, intended, hi, lo)``: ``update_sums.sums`` as one operator; without
#: error terms they are None. See Note [Metrics].
update_sums = define_operator(
    "update_sums(Tensor old, Tensor? old_lo, Tensor intended, Tensor hi, Tensor? lo) -> Tensor",
    measures.sums,
    _row(measures.SUMS),
)

#: ``update_value(old, old_lo, intended, hi, lo, number)``: a single result of ``update_sums.values``.
update_value = define_operator(
    "update_value(Tensor old, Tensor? old_lo, Tensor intended, Tensor hi, Tensor? lo, int number) -> Tensor",
    lambda *operands: measures.values(*operands[:5])[operands[5]],
    None,
    torch.Tag.pointwise,
)

#: ``update_size(old, old_lo, intended, dtype)``: index of each element's size bin, int32.
update_size = define_operator(
    "update_size(Tensor old, Tensor? old_lo, Tensor intended, ScalarType dtype) -> Tensor",
    lambda *operands: size_of_update(*(each for each in operands if each is not None)),
    lambda old, *_: torch.empty_like(old, dtype=torch.int32),
    torch.Tag.pointwise,
)


#: The dtypes of as many float32 tensors as an operator takes at most.
FLOATS = (torch.float32,) * 5


@functools.cache
def trace_of(
    function: Callable[..., Any], dtypes: tuple[torch.dtype, ...], constants: tuple[Any, ...] = ()
) -> GraphModule:
    """Trace a function of tensors of these dtypes, and of constants, into elementary operations."""
    tracer = make_fx(lambda *x: function(*x, *constants), decomposition_table=functional_decompositions())
    with FakeTensorMode(), torch.no_grad():
        return tracer(*(torch.empty(2, dtype=dtype) for dtype in dtypes))


def _operands(tensors: Sequence[Any]) -> Sequence[Any]:
    """Return the five operands of ``update_sums``, None in the place of error terms that are left out."""
    if len(tensors) == 5:
        return tensors
    old, intended, hi = tensors
    return old, None, intended, hi, None


def values_of_update(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return ``update_sums.values`` of 5 tensors, or of 3 without error terms."""
    return measures.values(*_operands(tensors))


def terms_of_update(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the terms that an element adds to each sum of ``update_sums``: products, then truth values."""
    return tuple(measures.terms(*_operands(tensors)).values())


def size_of_update(*operands: Any) -> Tensor:
    """Return ``update_sums.size_bin`` of an update, with or without an error term."""
    old, *old_lo, intended, dtype = operands
    return measures.size_bin(old, old_lo[0] if old_lo else torch.zeros_like(old), intended, dtype)


class Sums(NamedTuple):
    """Sums that ``update_sums`` computes.

    Attributes:
        values: number of values that measure an element: 4, or 2 without error terms.
        products: by name, the indices of the two values that are multiplied.
        counts: by name, a mapping from the index of a value to True (must be zero) or False (must not be).
    """

    values: int
    products: Mapping[str, tuple[int, int]]
    counts: Mapping[str, Mapping[int, bool]]


def sums_of_update(tensors: int) -> Sums:
    """Return the sums of ``update_sums`` of 5 tensors, or of 3 without error terms."""
    return sums_of_values(4 if tensors == 5 else 2)


def sums_of_values(values: int) -> Sums:
    """Return the sums of 4 values that measure each element, or of 2 without error terms."""
    products = {name: pair for name, pair in measures.PRODUCTS.items() if max(pair) < values}
    counts = {name: zero for name, zero in measures.COUNTS.items() if max(zero) < values}
    return Sums(values, products, counts)


class Elementwise(NamedTuple):
    """Elementwise operator of ours and its eager function.

    Attributes:
        operator: called with tensors, then constants.
        function: the eager function of the same.
        dtypes: dtypes of its tensors.
        result: dtype of its result.
    """

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
