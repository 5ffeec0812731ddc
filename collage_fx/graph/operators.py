"""Operators of ours: elementwise arithmetic that is one node in a graph and integer code in a kernel.

Note [One node, one definition]
-------------------------------
A pinned rounding is a dozen elementary operations. Put into the graph one by one they would bury the step
that a person wants to read, and Inductor, which inlines a value into each of its readers, would trace them
again and again. So each is an operator of its own, whose eager implementation is the function in
``numerics/arithmetic.py`` and whose lowering *interprets a trace of that same function*, element by element,
in the kernel that reads it: the arithmetic is written once.

Note [A rounding in C++ is a conversion]
----------------------------------------
C++ kernels have vector instructions for the bits of a float, but Inductor's C++ has no vector form of looking
at them: it goes through memory, number by number, and a rounding of integer operations costs more than all
the rest of a step. There, and only there, the operator is the C++ conversion to the storage format and back,
under a name that no simplification of Inductor's knows (:func:`torch_compat.rounded_in_cpp`). The conversion
rounds to nearest even, as the eager one does, in vectors and in single numbers, and what a kernel stores of
the result is what was converted, so that hi as stored and hi as subtracted from the value can't differ. Where
the processor has an instruction for two vectors' worth of it, that is used, in stores as well. (Compiled by
another backend, which writes no code of ours, the operators are integer operations there, too.)

The rest that a rounding leaves, zero where what was stored is infinite, is an operator in kernels too: a C++
kernel asks once for each vector whether a number in it needs another way than the instruction, be it for its
size or for the zero. The pipeline's graphs have the elementary operations.

Inductor's cache of compiled graphs knows an operator by name only. :data:`REVISION` goes into the modules
that are compiled, so that code from an older definition is never found again.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from functorch import make_fx
from torch import Tensor
from torch.fx import GraphModule, Node

from collage_fx import numerics, torch_compat
from collage_fx.graph.operator_facts import facts_of
from collage_fx.numerics import (
    BLOCK,
    BLOCK_CODES,
    BLOCK_SCALES,
    BLOCK_VALUES,
    CODES,
    DITHERED,
    DITHERED_BYTE,
    DITHERED_UPPER,
    LOWER_HALF,
    PHASES,
    SPACING,
    ULP_PARTS,
    UPPER_HALF,
    WITH_BYTE,
    WITH_LOWER_HALF,
    WITH_ULP_PARTS,
    arithmetic,
    block_code,
    block_scale,
    block_value,
    define_operator,
    dithered,
    dithered_byte,
    dithered_upper,
    in_map,
    phase_at,
    with_byte,
)
from collage_fx.numerics import update_sums as measures
from collage_fx.torch_compat import (
    FakeTensorMode,
    Sums,
    block_code_in_cpp,
    block_value_in_cpp,
    dithered_byte_in_cpp,
    dithered_in_cpp,
    dithered_upper_in_cpp,
    functional_decompositions,
    lower_half_in_cpp,
    phases_in_cpp,
    pointwise_of,
    pytree,
    register_block_lowerings,
    register_placed_lowering,
    register_pointwise_lowering,
    register_realizing_lowering,
    register_sampling_lowering,
    register_summing_lowering,
    rest_in_cpp,
    rounded_in_cpp,
    takes_our_cpp,
    ulp_parts_in_cpp,
    upper_half_in_cpp,
    with_byte_in_cpp,
    with_lower_half_in_cpp,
    with_ulp_parts_in_cpp,
)


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

#: ``update_value(old, old_lo, intended, hi, lo, number)``: one of what ``update_sums.values`` returns.
update_value = define_operator(
    "update_value(Tensor old, Tensor? old_lo, Tensor intended, Tensor hi, Tensor? lo, int number) -> Tensor",
    lambda *operands: measures.values(*operands[:5])[operands[5]],
    None,
    torch.Tag.pointwise,
)

#: ``update_size(old, old_lo, intended, dtype)``: which of the sizes each element is of, int32.
update_size = define_operator(
    "update_size(Tensor old, Tensor? old_lo, Tensor intended, ScalarType dtype) -> Tensor",
    lambda *operands: _size(*(each for each in operands if each is not None)),
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


def _interpret(trace: GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """Run a trace on Inductor's element values, one ``ops`` call for each node."""
    values: dict[Node, Any] = dict(zip(trace.graph.find_nodes(op="placeholder"), inputs, strict=True))
    for node in trace.graph.nodes:
        if node.op == "call_function":
            values[node] = pointwise_of(node, values)
    return [values[result] for result in pytree.tree_leaves(trace.graph.output_node().args)]


def _elementwise(
    function: Callable[..., Tensor], dtypes: tuple[torch.dtype, ...], in_cpp: Callable[..., Any]
) -> Callable[..., Callable[[Sequence[Any]], Any]]:
    """How an elementwise operator is lowered: for a device and its constants, the code for an element.

    Args:
        function: of tensors of the dtypes, and of the constants: what it computes.
        dtypes: of its tensors.
        in_cpp: of values of the tensors, and of the constants: the same in C++ that may contain code of ours.
    """

    def lowered(device: torch.device, *constants: Any) -> Callable[[Sequence[Any]], Any]:
        if takes_our_cpp(device):
            return lambda inputs: in_cpp(*inputs, *constants)
        return lambda inputs: _interpret(trace_of(function, dtypes, constants), inputs)[0]

    return lowered


def _operands(tensors: Sequence[Any]) -> Sequence[Any]:
    """The five operands of ``update_sums``, None for error terms that there are not."""
    if len(tensors) == 5:
        return tensors
    old, intended, hi = tensors
    return old, None, intended, hi, None


def values_of_update(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return ``update_sums.values`` of 5 tensors, or of 3 without error terms."""
    return measures.values(*_operands(tensors))


def _terms(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(measures.terms(*_operands(tensors)).values())


def _size(*operands: Any) -> Tensor:
    """``update_sums.size_bin`` of an update, with or without an error term."""
    old, *old_lo, intended, dtype = operands
    return measures.size_bin(old, old_lo[0] if old_lo else torch.zeros_like(old), intended, dtype)


@functools.cache
def sums_of_update(tensors: int) -> Sums:
    """The description of what ``update_sums`` sums of so many tensors, those that are None left out."""
    trace = trace_of(values_of_update, FLOATS[:tensors])
    inputs = trace.graph.find_nodes(op="placeholder")
    text = {node: f"x{i}" for i, node in enumerate(inputs)}
    for node in trace.graph.nodes:
        if node.op == "call_function":
            first, second = node.args
            text[node] = f"({text[first]} {facts_of(node.target).sign} {text[second]})"
    values = tuple(text[node] for node in pytree.tree_leaves(trace.graph.output_node().args))
    products = {name: pair for name, pair in measures.PRODUCTS.items() if max(pair) < len(values)}
    counts = {name: which for name, which in measures.COUNTS.items() if max(which) < len(values)}
    return Sums(tensors, values, products, counts)


def _size_bin(inputs: Sequence[Any], dtype: torch.dtype) -> Any:
    return _interpret(trace_of(measures.size_bin, FLOATS[:3], (dtype,)), inputs)[0]


def _phase_of_element(device: torch.device, *values: Any) -> Any:
    """The phase of an element, given its place and the phase of the first element: Note [Dither]."""
    if takes_our_cpp(device):
        return phases_in_cpp(*values, spacing=SPACING)
    (phase,) = _interpret(trace_of(phase_at, (torch.int32,) * len(values)), values)
    return phase


def _scale_of_block(device: torch.device, largest: Any, signed: bool) -> Any:
    (root,) = _interpret(trace_of(in_map, FLOATS[:1], (signed,)), [largest])
    (scale,) = _interpret(trace_of(block_scale, FLOATS[:1]), [root])
    return scale


def _code_of_element(device: torch.device, value: Any, scale: Any, phase: Any, *kind: Any) -> Any:
    (root,) = _interpret(trace_of(in_map, FLOATS[:1], kind[1:]), [value])
    if takes_our_cpp(device):
        return block_code_in_cpp(root, scale, phase, *kind)
    dtypes = (torch.float32, torch.uint8, torch.int32)
    (code,) = _interpret(trace_of(block_code, dtypes, kind), [root, scale, phase])
    return code


def _value_of_element(device: torch.device, code: Any, scale: Any, *kind: Any) -> Any:
    if takes_our_cpp(device):
        return block_value_in_cpp(code, scale, *kind)
    (value,) = _interpret(trace_of(block_value, (CODES[kind], torch.uint8), kind), [code, scale])
    return value


#: Operators of which an element of the result is made of the same element of the operands.
ELEMENTWISE = (
    # See Note [A rounding in C++ is a conversion].
    (round_to_storage, arithmetic.round_to_storage, FLOATS[:1], rounded_in_cpp, torch.float32),
    (rest, arithmetic.rest, FLOATS[:2], rest_in_cpp, torch.float32),
    (UPPER_HALF, arithmetic.upper_half, FLOATS[:1], upper_half_in_cpp, torch.float32),
    (LOWER_HALF, arithmetic.lower_half, FLOATS[:1], lower_half_in_cpp, torch.int16),
    (
        WITH_LOWER_HALF,
        arithmetic.with_lower_half,
        (torch.float32, torch.int16),
        with_lower_half_in_cpp,
        torch.float32,
    ),
    (DITHERED, dithered, (torch.float32, torch.int32), dithered_in_cpp, torch.float32),
    (DITHERED_UPPER, dithered_upper, (torch.float32, torch.int32), dithered_upper_in_cpp, torch.float32),
    (DITHERED_BYTE, dithered_byte, (torch.float32, torch.int32), dithered_byte_in_cpp, torch.int8),
    (WITH_BYTE, with_byte, (torch.float32, torch.int8), with_byte_in_cpp, torch.float32),
    (ULP_PARTS, arithmetic.ulp_parts, FLOATS[:2], ulp_parts_in_cpp, torch.int16),
    (
        WITH_ULP_PARTS,
        arithmetic.with_ulp_parts,
        (torch.float32, torch.int16),
        with_ulp_parts_in_cpp,
        torch.float32,
    ),
)

for _operator, _function, _dtypes, _in_cpp, _result in ELEMENTWISE:
    register_pointwise_lowering(_operator, _elementwise(_function, _dtypes, _in_cpp), dtype=_result)
register_pointwise_lowering(
    update_value,
    lambda device, number: (
        lambda inputs: _interpret(trace_of(values_of_update, FLOATS[: len(inputs)]), inputs)[number]
    ),
    dtype=torch.float32,
)
register_pointwise_lowering(
    update_size,
    lambda device, dtype: (
        lambda inputs: _interpret(trace_of(_size, FLOATS[: len(inputs)], (dtype,)), inputs)[0]
    ),
    dtype=torch.int32,
)
register_placed_lowering(PHASES, _phase_of_element, dtype=torch.int32)
register_block_lowerings(
    BLOCK_SCALES,
    BLOCK_CODES,
    BLOCK_VALUES,
    _scale_of_block,
    _code_of_element,
    _value_of_element,
    block=BLOCK,
    dtype_of_codes=CODES,
)
register_realizing_lowering(once)
register_summing_lowering(
    update_sums,
    lambda inputs: _interpret(trace_of(_terms, FLOATS[: len(inputs)]), inputs),
    sums_of_update,
    names=measures.SUMS,
    otherwise=measures.WITHOUT_LO,
)
register_sampling_lowering(
    update_sizes, _size_bin, measures.sampled, sample=measures.SAMPLE, places=len(measures.SIZES)
)


def _sources() -> Iterator[str]:
    """The source text of all that decides what an operator is compiled to."""
    yield Path(__file__).read_text(encoding="utf-8")
    for room in (numerics, torch_compat):
        for path in sorted(Path(str(room.__file__)).parent.rglob("*.py")):
            yield path.read_text(encoding="utf-8")


#: Identifies the definitions above and the lowering; part of the compile cache's key.
REVISION = hashlib.sha256("".join(_sources()).encode()).hexdigest()
