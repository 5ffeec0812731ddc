"""Our own code in Inductor's C++ kernels: rests on ``torch._inductor.codegen.cpp``.

In Inductor's language for one element it stands as inline assembly, which C++ kernels have no other use for.
"""

from __future__ import annotations

import unittest.mock
from collections.abc import Callable
from typing import Any

import torch
from torch._inductor.codegen import cpp as cpp_module
from torch._inductor.codegen.cpp import CppOverrides, CppVecOverrides
from torch._inductor.virtualized import ops

from collage_fx.torch_compat.patch_cpp_conversions import rest, rounded
from collage_fx.torch_compat.patch_cpp_sums import SUM, summand

__all__ = ["inline_asm_elementwise", "rest_in_cpp", "rounded_in_cpp"]

#: What stands for the rounding to a storage dtype where Inductor has only names of its own operators.
_ROUNDINGS = {f"collage_fx: round to {dtype}": dtype for dtype in (torch.bfloat16, torch.float16)}


def rounded_in_cpp(value: Any, storage_dtype: torch.dtype) -> Any:
    """A float32 element rounded to a storage dtype and returned as float32, in a C++ kernel.

    Written as two conversions that Inductor does not know to be conversions: the text of the code is all that
    it gets, in the place of inline assembly, which C++ kernels have no other use for.
    """
    (name,) = (name for name, dtype in _ROUNDINGS.items() if dtype == storage_dtype)
    return ops.inline_asm_elementwise(value, asm=name, dtype=torch.float32)


#: What stands for :func:`rest_in_cpp`.
_REST = "collage_fx: rest"


def rest_in_cpp(value: Any, hi: Any) -> Any:
    """``value - hi`` where ``hi`` is finite, zero elsewhere, of float32 elements in a C++ kernel."""
    return ops.inline_asm_elementwise(value, hi, asm=_REST, dtype=torch.float32)


def inline_asm_elementwise(*inputs: Any, asm: str, **options: Any) -> Any:
    """The C++ for :func:`rounded_in_cpp`, :func:`rest_in_cpp` and sums, for scalars and for vectors."""
    if asm == _REST:
        return rest(*inputs)
    if asm.startswith(SUM):
        return summand(inputs, asm)
    if asm not in _ROUNDINGS:
        raise NotImplementedError(f"inline assembly in C++ kernels: {asm}")
    (value,) = inputs
    return rounded(value, _ROUNDINGS[asm])


def _as_wide_as_stores(original: Callable[..., Any]) -> Callable[..., Any]:
    """``select_tiling`` that gives a loop with code of ours a vector's worth of what it stores at a time.

    Inductor itself counts by float32 as soon as one node of the loop has nothing else: as those of sums, and
    the rounding of a value where Inductor keeps both apart, as torch 2.15 does.
    """

    def select_tiling(self: Any, functions: Any, *args: Any) -> Any:
        bodies = cpp_module._get_loop_body(functions)
        if not any(map(_has_our_code, bodies)):
            return original(self, functions, *args)
        found = {cpp_module.get_loop_body_lowp_fp(body)[0] for body in bodies} - {None}
        if len(found) != 1:
            return original(self, functions, *args)
        answer = found.pop(), True
        with unittest.mock.patch.object(cpp_module, "get_loop_body_lowp_fp", return_value=answer):
            return original(self, functions, *args)

    return select_tiling


def _has_our_code(body: Any) -> bool:
    return bool(body.root_block.graph.find_nodes(op="call_method", target="inline_asm_elementwise"))


for _overrides in (CppOverrides, CppVecOverrides):
    _overrides.inline_asm_elementwise = staticmethod(inline_asm_elementwise)  # type: ignore[method-assign]

cpp_module.TilingSelect.select_tiling = _as_wide_as_stores(cpp_module.TilingSelect.select_tiling)  # type: ignore[method-assign]
