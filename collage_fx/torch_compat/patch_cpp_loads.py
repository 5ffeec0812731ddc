"""Loads of C++ kernels that fetch ahead: rests on the text that Inductor writes for a load.

Note [Fetching ahead]
---------------------
A processor notices that a loop goes through memory, and fetches what is next, but stops at the end of each
page of 4096 bytes, where it has to notice again. An AdamW step of ``light`` goes through five tensors at once
in 80 instructions for 64 bytes of each: too few bytes at a time for the processor to run far ahead by itself,
too many pages for it to lose time at the beginning of each. One more instruction a load asks for what will be
loaded eight iterations later.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._inductor.codegen.cpp_utils import cexpr_index

from collage_fx.torch_compat.patching import Patch

LOADS = Patch(
    name="loads",
    target="torch._inductor.codegen.cpp:CppVecKernel._get_vec_load_line(self, var, index, dtype, load_mask)",
    why="C++ kernels fetch ahead",
    needed_for="speed",
    during="lowerings",
    relies_on=("torch._inductor.codegen.cpp:CppVecKernel has tail_size, tiling_factor",),
)

#: How many bytes further on lies what a load asks for besides.
AHEAD = 512


#: By how many there are at a time: the load of 8-bit integers that fill half of a vector. ATen's has a mask,
#: or goes through memory.
_PARTS_OF_VECTORS = {
    32: """
#if defined(CPU_CAPABILITY_AVX512)
decltype({load})(_mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>({place}))))
#else
{load}
#endif
""",
    16: """
#if defined(CPU_CAPABILITY_AVX2) && !defined(CPU_CAPABILITY_AVX512)
decltype({load})(_mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>({place}))))
#else
{load}
#endif
""",
}


def fetching_ahead() -> contextlib.AbstractContextManager[None]:
    """Within, C++ code whose vectors come from memory one after another fetches ahead."""
    if sys.platform == "win32":  # whose compiler has another name for it
        return contextlib.nullcontext()
    return LOADS.entered(_with_prefetch)


def _with_prefetch(original: Callable[..., str]) -> Callable[..., str]:
    """``_get_vec_load_line`` with an instruction that fetches; that may name any address without harm."""

    def line(kernel: Any, var: Any, index: Any, dtype: torch.dtype, load_mask: Any = None) -> str:
        load = original(kernel, var, index, dtype, load_mask)
        if kernel.tail_size or index == 0:
            return load
        is_integer = dtype in (
            torch.int8,
            torch.uint8,
        )  # of floats of 8 bits ATen's vectors are of another kind
        if is_integer and not load_mask and kernel.tiling_factor in _PARTS_OF_VECTORS:
            load = _PARTS_OF_VECTORS[kernel.tiling_factor].format(
                load=load, place=f"{var} + {cexpr_index(index)}"
            )
        return f"(__builtin_prefetch((const char*)({var} + {cexpr_index(index)}) + {AHEAD}), {load})"

    return line
