"""The C++ of sums: rests on how Inductor's C++ kernels keep and join what they reduce to."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._inductor.codegen.cpp import CppVecKernel
from torch._inductor.codegen.cpp_utils import DTYPE_TO_CPP, cexpr_index
from torch._inductor.virtualized import V, ops

from collage_fx.torch_compat.cpp_sums import Sums, Vectors
from collage_fx.torch_compat.patch_cpp_conversions import conversion_text
from collage_fx.torch_compat.patching import Patch

REDUCTIONS = Patch(
    name="reductions",
    target="torch._inductor.codegen.cpp:CppKernel.reduction(self, dtype, src_dtype, reduction_type, value)",
    why="C++ kernels add up what a step is measured by in blocks",
    during="lowerings",
    relies_on=(
        "torch._inductor.codegen.cpp:CppKernel._gen_parallel_reduction_buffers has reduction_init_fn",
        "torch._inductor.codegen.cpp:CppKernel has is_reduction, local_reduction_stores",
        "torch._inductor.codegen.cpp:CppKernel has non_parallel_reduction_suffix, reduction_cse",
        "torch._inductor.codegen.cpp:CppKernel has reduction_prefix_generators, reduction_var_names",
        "torch._inductor.codegen.common:CSE has reduction_cache",
    ),
)

VECTOR_REDUCTIONS = Patch(
    name="vector-reductions",
    target="torch._inductor.codegen.cpp:CppVecKernel.reduction(self, dtype, src_dtype, reduction_type)",
    why="the same, in vectors",
    during="lowerings",
    relies_on=(
        "torch._inductor.codegen.cpp:CppVecKernel has _get_num_vectors, _get_vec_type, broadcast, tail_size",
        "torch._inductor.codegen.cpp:CppVecKernel has tiling_factor",
    ),
)

#: What stands for an element's part in a sum of a C++ kernel.
SUM = "collage_fx: sum"

#: The sums of C++ kernels, by how many inputs they have.
_sums: dict[int, Sums] = {}


def part_of_sum(sums: Sums, number: int, inputs: Sequence[Any]) -> Any:
    """What an element adds to one of the sums: a number to be given to a reduction in a C++ kernel."""
    _sums[len(inputs)] = sums
    return ops.inline_asm_elementwise(*inputs, asm=f"{SUM} {number}", dtype=torch.float64)


def summand(inputs: Sequence[Any], text: str) -> Any:
    """A variable that is not computed: :func:`_sum_in_cpp` finds it in the place of a number to be added."""
    variable = V.kernel.cse.generate(V.kernel.compute, f"{text} {inputs}", write=False, dtype=torch.float64)
    variable.update_on_args("to_dtype", inputs, {})
    variable.collage_fx_summand = int(text.removeprefix(SUM)), inputs
    return variable


@contextlib.contextmanager
def summing() -> Iterator[None]:
    """Within, C++ kernels know :func:`summand`."""
    with REDUCTIONS.entered(_summing), VECTOR_REDUCTIONS.entered(_summing):
        yield


def _summing(original: Callable[..., Any]) -> Callable[..., Any]:
    """``reduction`` of a C++ kernel that knows :func:`summand`."""

    def reduction(
        kernel: Any, dtype: torch.dtype, src_dtype: torch.dtype, reduction_type: str, value: Any
    ) -> Any:
        found = getattr(value, "collage_fx_summand", None)
        if found is None:
            return original(kernel, dtype, src_dtype, reduction_type, value)
        return _sum_in_cpp(kernel, *found)

    return reduction


def _sum_in_cpp(kernel: Any, number: int, inputs: tuple[Any, ...]) -> str:
    """One of the sums of an object that is made, and given the inputs, for the first of them."""
    known = kernel.reduction_cse.reduction_cache
    if (SUM, inputs) not in known:
        known[SUM, inputs] = _object_of_sums(kernel, inputs)
    return f"{known[SUM, inputs]}.sum({number})"


def _object_of_sums(kernel: Any, inputs: tuple[Any, ...]) -> Any:
    """The variable of a :class:`Sums` object that adds up the inputs; it is closed when all are in."""
    acc = kernel.reduction_cse.generate(kernel.loads, f"{SUM} {inputs}", write=False)
    is_vec, width, name = isinstance(kernel, CppVecKernel), 1, f"SumsOf{len(inputs)}"
    vectors: list[Vectors] = []
    if is_vec:
        width = kernel._get_num_vectors(torch.float32)
        inputs = tuple(_as_stored(x if x.is_vec else kernel.broadcast(x)) for x in inputs)
        vectors = [_vectors(kernel, x) for x in inputs]
        name += "".join(f"_{str(x.dtype).removeprefix('torch.')}" for x in inputs)
    kernel.is_reduction = True
    kernel.reduction_var_names.append(f"{acc}")
    defined = kernel.__dict__.setdefault("collage_fx_sums", set())
    definition = "" if name in defined else f"{_sums[len(inputs)].definition(name, vectors, width)}\n"
    defined.add(name)
    kernel.reduction_prefix_generators.append(lambda size: f"{definition}{name} {acc};")
    if is_vec:
        kernel.non_parallel_reduction_suffix.writeline(f"{acc}.close();")
        kernel.local_reduction_stores.writeline(f"{acc}_local.close();")
    kernel._gen_parallel_reduction_buffers(
        acc,
        name,
        "sum",
        torch.float64,
        reduction_combine_fn=lambda kind, total, part, **_: f"{total}.join({part})",
        reduction_init_fn=lambda *_: f"{name}()",
    )
    given = ", ".join(map(str, inputs))
    if not is_vec:
        kernel.stores.writeline(f"{acc}.one({given});")
    elif kernel.tail_size:
        kernel.stores.writeline(f"{acc}.some({cexpr_index(kernel.tail_size)}, {given});")
    else:
        kernel.stores.writeline(f"{acc}.put({given});")
    return acc


def _as_stored(x: Any) -> Any:
    """A variable of fewer bits that was converted to a float32 one, if that is how it came about."""
    return getattr(x, "collage_fx_stored", x)


def _vectors(kernel: Any, x: Any) -> Vectors:
    is_float = x.dtype is torch.float32
    floats = str(x) if is_float else conversion_text(x, torch.float32, x.dtype)
    floats = re.sub(rf"\b{x}\b", "@", floats)
    return Vectors(kernel._get_vec_type(x.dtype), DTYPE_TO_CPP[x.dtype], str(kernel.tiling_factor), floats)
