"""Lowerings of our operators: rests on Inductor's intermediate representation (``torch._inductor.ir``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor.lowering import lowerings, register_lowering
from torch._inductor.virtualized import V, ops
from torch.utils._sympy.functions import FloorDiv

aten = torch.ops.aten


def _pointwise(like: Any, dtype: torch.dtype, element: Callable[..., Any]) -> Any:
    """Make a tensor of the size and device of ``like``, computed element by element: ``element(index)``."""
    device, ranges = like.get_device(), list(like.get_size())
    return ir.Pointwise.create(device=device, dtype=dtype, inner_fn=element, ranges=ranges)


def register_pointwise_lowering(
    operator: Any, element_function: Callable[..., Callable[[Sequence[Any]], Any]], *, dtype: torch.dtype
) -> None:
    """Lower ``operator(*tensors, *constants)`` to an elementwise computation in the kernel that reads it.

    ``element_function``: ``(*constants) -> function of [values of the tensors]``, which returns the value of
    the result, of this dtype, for an element. The tensors have the same shape.
    """

    @register_lowering(operator, type_promotion_kind=None)
    def lowering(*arguments: Any) -> Any:
        tensors = [argument for argument in arguments if isinstance(argument, ir.TensorBox)]
        loads = [tensor.make_loader() for tensor in tensors]
        compute = element_function(*arguments[len(tensors) :])
        return _pointwise(tensors[0], dtype, lambda index: compute([load(index) for load in loads]))


def register_placed_lowering(operator: Any, element_function: Callable[..., Any]) -> None:
    """Lower ``operator(like, *numbers)`` to a computation of int32 from each element's index in memory.

    Only the layout of ``like`` is used; numbers are 0-d tensors. ``element_function``: ``(dtype of the index,
    index, *values of the numbers)`` -> value of the result for an element, in the dtype of the index.
    """

    @register_lowering(operator, type_promotion_kind=None)
    def lowering(like: Any, *numbers: Any) -> Any:
        loads = [number.make_loader() for number in numbers if number is not None]
        like.realize()  # without memory it has no strides
        strides, is_on_cpu = like.get_stride(), like.get_device().type == "cpu"

        def element(index: Sequence[Any]) -> Any:
            place = sum((i * step for i, step in zip(index, strides, strict=True)), start=sympy.S.Zero)
            if is_on_cpu:
                # A product that overflows int32 is undefined in C++: compilers may end the loop before.
                position, kind = ops.index_expr(place, torch.int64), torch.int64
            else:
                # As bits. Otherwise Inductor would continue with the expression, and multiply its factors to
                # numbers beyond Triton's int32.
                position, kind = ops.index_expr(place, torch.int32), torch.int32
                position = ops.to_dtype_bitcast(position, torch.int32, torch.int32)
            result = element_function(kind, position, *(load([]) for load in loads))
            return result if kind is torch.int32 else ops.to_dtype(result, torch.int32, src_dtype=kind)

        return _pointwise(like, torch.int32, element)


def register_block_lowerings(
    operators: tuple[Any, Any, Any],
    element_functions: tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]],
    *,
    block: int,
    dtype_of_codes: Mapping[tuple[int, bool], torch.dtype],
) -> None:
    """Lower operators on blocks of elements that share a scale: Note [Blocks].

    Args:
        operators: ``(value, like, signed)`` -> the scales of a tensor's blocks; ``(value, scales, phases,
            like, bits, signed)`` -> integers; ``(codes, scales, bits, signed)`` -> float32 numbers.
        element_functions: ``(largest magnitude, signed)`` -> value of a scale; ``(value, scale, phase or
            None, bits, signed)`` -> value of an integer; ``(integer, scale, bits, signed)`` -> a number.
        block: elements of a block.
        dtype_of_codes: by bits and whether numbers may be negative.
    """
    scales_operator, codes_operator, values_operator = operators
    scale, code, value = element_functions

    @register_lowering(scales_operator, type_promotion_kind=None)
    def scales_of(values: Any, like: Any, signed: bool) -> Any:
        like.realize()
        steps = [V.graph.sizevars.optimization_hint(step, fallback=1) for step in like.get_stride()]
        order = sorted(range(len(steps)), key=lambda dim: (-steps[dim], dim))  # in memory, outermost first
        rows, blocks = like.get_size()[0], FloorDiv(_product(like.get_size()), block)
        in_memory = lowerings[aten.permute.default](values, order)
        by_block = lowerings[aten.view.default](in_memory, [blocks, block])
        sizes = lowerings[aten.abs.default](by_block)
        largest = lowerings[aten.amax.default](sizes, [1])
        load = largest.make_loader()
        scales = _pointwise(largest, torch.uint8, lambda index: scale(load(index), signed))
        return lowerings[aten.view.default](scales, [rows, FloorDiv(blocks, rows)])

    def load_of_scale(scales: Any, like: Any) -> Callable[[Any], Any]:
        """Return a function that loads the scale of an element."""
        like.realize()
        size, strides = like.get_size(), like.get_stride()
        if len(size) == 2 and size[1] == block:
            load_row = scales.make_loader()
            return lambda index: load_row([index[0], sympy.S.Zero])
        number = FloorDiv(_product(size), block)
        load = lowerings[aten.view.default](scales, [number]).make_loader()

        def of_element(index: Any) -> Any:
            place = sum((i * step for i, step in zip(index, strides, strict=True)), start=sympy.S.Zero)
            return load([FloorDiv(place, block)])

        return of_element

    @register_lowering(codes_operator, type_promotion_kind=None)
    def codes_of(values: Any, scales: Any, thresholds: Any, like: Any, bits: int, signed: bool) -> Any:
        loads = values.make_loader(), load_of_scale(scales, like)
        load_threshold = (lambda index: None) if thresholds is None else thresholds.make_loader()

        def element(index: Any) -> Any:
            return code(*(load(index) for load in loads), load_threshold(index), bits, signed)

        return _pointwise(values, dtype_of_codes[bits, signed], element)

    @register_lowering(values_operator, type_promotion_kind=None)
    def values_of(codes: Any, scales: Any, bits: int, signed: bool) -> Any:
        loads = codes.make_loader(), load_of_scale(scales, codes)
        return _pointwise(
            codes, torch.float32, lambda index: value(*(load(index) for load in loads), bits, signed)
        )


#: Whether Inductor has a fused multiply-add.
HAS_FMA = hasattr(torch.ops.prims, "fma")

#: ATen operators whose name in Inductor's elementwise language differs.
_ELEMENT_NAMES = {"__rshift__": "bitwise_right_shift", "__lshift__": "bitwise_left_shift"}


def pointwise_of(node: torch.fx.Node, values: Mapping[torch.fx.Node, Any]) -> Any:
    """Write a node of a traced elementwise function in Inductor's language, its operands from ``values``."""
    name = node.target.overloadpacket.__name__  # type: ignore[union-attr]
    args: tuple[Any, ...] = node.args
    tensors = [arg for arg in args if isinstance(arg, torch.fx.Node)]
    dtype = (tensors[0] if tensors else node).meta["val"].dtype
    if name == "alias":
        return values[tensors[0]]
    if name in ("full", "scalar_tensor"):
        return ops.constant(args[-1], node.meta["val"].dtype)
    if name == "convert_element_type":
        return ops.to_dtype(values[tensors[0]], args[1], src_dtype=dtype)
    if node.target is aten.view.dtype:
        return ops.to_dtype_bitcast(values[tensors[0]], args[1], dtype)
    operands = [values[arg] if isinstance(arg, torch.fx.Node) else ops.constant(arg, dtype) for arg in args]
    if name == "addcmul":
        addend, factor, other = operands
        return ops.fma(factor, other, addend) if HAS_FMA else ops.add(ops.mul(factor, other), addend)
    return getattr(ops, _ELEMENT_NAMES.get(name, name))(*operands)


def register_realizing_lowering(operator: Any) -> None:
    """Lower ``operator(x)`` to ``x`` stored in memory: its readers load it, not recompute it."""

    @register_lowering(operator, type_promotion_kind=None)
    def lowering(x: Any) -> Any:
        x.realize()
        return x


def _product(size: Sequence[Any]) -> Any:
    return math.prod(size, start=sympy.S.One)
