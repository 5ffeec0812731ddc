"""The C++ of roundings and of what they leave: rests on the text that Inductor writes for a conversion."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch._inductor.virtualized import V

from collage_fx.torch_compat.patching import Patch

VECTOR_CONVERSIONS = Patch(
    name="vector-conversions",
    target="torch._inductor.codegen.cpp:CppVecOverrides.to_dtype(x, dtype)",
    why="C++ kernels convert vectors to bfloat16 by the processor's instructions, and to 16-bit integers",
    during="lowerings",
    relies_on=(
        "torch._inductor.codegen.cpp:CppVecKernel.get_to_dtype_expr(self, src, dtype, src_dtype)",
        "torch._inductor.codegen.common:CSE has contains, generate, put, try_get",
    ),
)


def rounded(value: Any, storage_dtype: torch.dtype) -> Any:
    """Round a float32 variable of a kernel: convert it to the storage dtype, and back.

    Inductor's own text for a conversion would find Inductor's own variables: once a number has been stored in
    bfloat16, that text for "the stored number in float32" finds the number as it was *before* it was rounded.
    In parentheses it is another text. The way back to the storage dtype is announced, on the other hand, so
    that a store of the result stores what was rounded here and converts nothing.
    """
    known = V.kernel.cse.try_get(inductors_text(value, storage_dtype, torch.float32))
    stored = known or converted(value, storage_dtype, torch.float32)
    rounded = converted(stored, torch.float32, storage_dtype)
    announce(rounded, storage_dtype, stored)
    return rounded


def rest(value: Any, hi: Any) -> Any:
    """Compute what a rounding leaves, in float32 and in bfloat16; what is not read of the two costs nothing.

    Converted by instruction, the difference is looked at once for both: it is an infinity or NaN where ``hi``
    is.
    """
    text = (_REST_OF_VECTORS if value.is_vec else _REST_OF_SCALARS).format(x=value, hi=hi)
    rest = new_variable(text, torch.float32, value, hi)
    if fills_two_vectors(rest):
        text = _REST_BY_INSTRUCTION.format(x=value, hi=hi, rest=rest)
        announce(rest, torch.bfloat16, new_variable(text, torch.bfloat16, value, hi))
    return rest


def converted(source: Any, dtype: torch.dtype, source_dtype: torch.dtype) -> Any:
    """Make a variable for a conversion that no other text of Inductor's will find."""
    variable = new_variable(f"({conversion_text(source, dtype, source_dtype)})", dtype, source)
    if dtype is torch.float32:
        variable.collage_fx_stored = source
    return variable


def conversion_text(source: Any, dtype: torch.dtype, source_dtype: torch.dtype) -> str:
    """The text of a conversion, by instruction if there is one."""
    text = inductors_text(source, dtype, source_dtype)
    for conversion, by_instruction in _BY_INSTRUCTION.items():
        if text.startswith(conversion):
            return by_instruction.format(x=source)
    return text


def inductors_text(source: Any, dtype: torch.dtype, source_dtype: torch.dtype) -> str:
    """The text that Inductor writes for a conversion."""
    return str(V.kernel.get_to_dtype_expr(source, dtype, source_dtype))


def fills_two_vectors(value: Any) -> bool:
    """Whether a float32 variable is of two vectors: as many numbers as a vector has of 16 bits."""
    return inductors_text(value, torch.bfloat16, torch.float32).startswith(_CONVERT)


def announce(source: Any, dtype: torch.dtype, converted: Any) -> None:
    """Have Inductor find that a float32 number is there in another dtype already."""
    V.kernel.cse.put(inductors_text(source, dtype, torch.float32), converted)


def new_variable(text: str, dtype: torch.dtype, *sources: Any) -> Any:
    """Make a variable of a kernel that is computed by this text; that of an equal text, if there is one."""
    variable = V.kernel.cse.generate(V.kernel.compute, text, dtype=dtype)
    variable.update_on_args("to_dtype", sources, {})
    return variable


_REST_OF_SCALARS = "(std::abs({hi}) < std::numeric_limits<float>::infinity() ? {x} - {hi} : 0.0f)"

_REST_OF_VECTORS = (
    "decltype({x})::blendv(decltype({x})(0.0f), {x} - {hi}, "
    "{hi}.abs() < decltype({x})(std::numeric_limits<float>::infinity()))"
)

#: ATen's text for converting two vectors of float32 to one of bfloat16, and the one for the way back.
_CONVERT = "at::vec::convert<at::BFloat16,1,float,2>("

_CONVERT_BACK = "at::vec::convert<float,2,at::BFloat16,1>("

#: The same by instruction where there is one, unless a number is subnormal, which it would take for zero.
_CONVERT_BY_INSTRUCTION = """
#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
[&]() -> decltype(at::vec::convert<at::BFloat16,1,float,2>({x})) {{
    __m512 first = {x}[0], second = {x}[1];
    if (C10_LIKELY(!(_mm512_fpclass_ps_mask(first, 0x20) | _mm512_fpclass_ps_mask(second, 0x20))))
        return at::vec::Vectorized<at::BFloat16>((__m512i)_mm512_cvtne2ps_pbh(second, first));
    return at::vec::convert<at::BFloat16,1,float,2>({x});
}}()
#else
at::vec::convert<at::BFloat16,1,float,2>({x})
#endif
"""

#: What a rounding leaves, converted by instruction unless a number is subnormal, infinite or NaN.
_REST_BY_INSTRUCTION = """
#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
[&]() -> decltype(at::vec::convert<at::BFloat16,1,float,2>({rest})) {{
    __m512 first = _mm512_sub_ps({x}[0], {hi}[0]), second = _mm512_sub_ps({x}[1], {hi}[1]);
    if (C10_LIKELY(!(_mm512_fpclass_ps_mask(first, 0xb9) | _mm512_fpclass_ps_mask(second, 0xb9))))
        return at::vec::Vectorized<at::BFloat16>((__m512i)_mm512_cvtne2ps_pbh(second, first));
    return at::vec::convert<at::BFloat16,1,float,2>({rest});
}}()
#else
at::vec::convert<at::BFloat16,1,float,2>({rest})
#endif
"""


def _upper_halves(first: int) -> str:
    """The text that widens 16 numbers of a vector of bfloat16 to float32: each is the upper half of one.

    The lower halves, which the mask makes zero, have no index.
    """
    places = ",".join(f"{place}<<16" for place in reversed(range(first, first + 16)))
    permuted = f"_mm512_maskz_permutexvar_epi16(0xAAAAAAAA, _mm512_set_epi32({places}), {{x}})"
    return f"at::vec::Vectorized<float>(_mm512_castsi512_ps({permuted}))"


#: The way back by one permutation a vector, where ATen's has three instructions.
_CONVERT_BACK_BY_INSTRUCTION = f"""
#if defined(CPU_CAPABILITY_AVX512)
at::vec::VectorizedN<float,2>({_upper_halves(0)}, {_upper_halves(16)})
#else
at::vec::convert<float,2,at::BFloat16,1>({{x}})
#endif
"""

_BY_INSTRUCTION = {_CONVERT: _CONVERT_BY_INSTRUCTION, _CONVERT_BACK: _CONVERT_BACK_BY_INSTRUCTION}


def bfloat16_by_instruction() -> contextlib.AbstractContextManager[None]:
    """Within, C++ code converts vectors to bfloat16 and back by the processor's instructions, if it has any.

    The bits are those of ATen's conversion, which takes sixteen instructions (and six back), NaN's payload
    aside. An AdamW step has a dozen such conversions and little else to do.
    """
    return VECTOR_CONVERSIONS.entered(_announcing)


def _announcing(original: Callable[..., Any]) -> Callable[..., Any]:
    """``to_dtype`` of vector code that finds its conversion made, and one for 16-bit integers."""

    def to_dtype(x: Any, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
        if x.is_vec and torch.int16 in (x.dtype, dtype):
            return new_variable(inductors_text(x, dtype, x.dtype), dtype, x)
        if x.is_vec and {x.dtype, dtype} == {torch.float32, torch.bfloat16}:
            text, cse = inductors_text(x, dtype, x.dtype), V.kernel.cse
            if text.startswith(tuple(_BY_INSTRUCTION)) and not cse.contains(text):
                cse.put(text, converted(x, dtype, x.dtype))
        return original(x, dtype, *args, **kwargs)

    return to_dtype
