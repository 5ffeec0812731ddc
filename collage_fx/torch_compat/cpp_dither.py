"""The C++ of dither: rests on ``at::vec``.

What it is says ``numerics/dither.py``. As in ``cpp_halves.py`` a kernel handles two vectors of float32 at a
time, and numbers one by one where the processor has vectors of another kind.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.virtualized import V

from collage_fx.torch_compat.cpp_halves import every_second_half
from collage_fx.torch_compat.patch_cpp_conversions import (
    announce,
    converted,
    fills_two_vectors,
    inductors_text,
    new_variable,
)

__all__: list[str] = []


def phases(place: Any, phase: Any, first: Any = None, *, spacing: int) -> Any:
    """Write the code for the phases of elements, given their places and the first element's phase."""
    begin = f"static_cast<uint32_t>({phase})"
    if first is not None:
        begin += f" + static_cast<uint32_t>({first}) * {spacing}u"
    if place.is_vec:
        of_all = [f"decltype({place})(static_cast<int32_t>({x}))" for x in (f"{spacing}u", begin)]
        text = f"({place} * {of_all[0]} + {of_all[1]})"
    else:
        text = f"static_cast<int32_t>(static_cast<uint32_t>({place}) * {spacing}u + {begin})"
    numbers = [phase] if first is None else [phase, first]
    return new_variable(text, torch.int32, place, *numbers)


def dithered(value: Any, phases: Any, *, dtype: torch.dtype) -> Any:
    """Write the code for a float32 number rounded by its phase to a storage dtype, as float32."""
    of_scalar, by_instruction = _DITHERED[dtype]
    if not value.is_vec:
        stored = new_variable(of_scalar.format(x=value, phase=phases), dtype, value, phases)
    else:
        filled = by_instruction.format(x=value, phases=phases) if fills_two_vectors(value) else ""
        one_by_one = _ONE_BY_ONE.format(
            x=value,
            phases=phases,
            n=V.kernel.tiling_factor,
            type={torch.bfloat16: "at::BFloat16", torch.float16: "at::Half"}[dtype],
            result=f"decltype({inductors_text(value, dtype, torch.float32)})",
            of_each=of_scalar.format(x="x[i]", phase="phases[i]"),
        )
        stored = new_variable(one_by_one.replace("BY_INSTRUCTION", filled), dtype, value, phases)
    near = converted(stored, torch.float32, dtype)
    announce(near, dtype, stored)
    return near


_BFLOAT16_OF_SCALAR = (
    "at::BFloat16(static_cast<uint16_t>({x} != {x} ? c10::bit_cast<uint32_t>({x}) >> 16 | 0x40 : "
    "(c10::bit_cast<uint32_t>({x}) + (static_cast<uint32_t>({phase}) >> 16)) >> 16), "
    "at::BFloat16::from_bits())"
)

#: In the bits of float32 numbers 0x38800000 are those of float16's smallest normal number, and 10 << 23 takes
#: a number's exponent to its ulp.
_FLOAT16_OF_SCALAR = (
    "[](float x, uint32_t phase) {{ "
    "uint32_t unit = std::max(c10::bit_cast<uint32_t>(x) & 0x7f800000, 0x38800000u) - (10u << 23); "
    "float share = static_cast<float>(phase >> 19) * 0x1p-13f; "
    "float magnitude = std::floor(std::abs(x) * c10::bit_cast<float>((254u << 23) - unit) + share) * "
    "c10::bit_cast<float>(unit); "
    "return at::Half(std::copysign(magnitude, x)); }}({x}, static_cast<uint32_t>({phase}))"
)

_BFLOAT16_BY_INSTRUCTION = """
#if defined(CPU_CAPABILITY_AVX512)
    __m512 first = {x}[0], second = {x}[1];
    __m512i firsts = {phases}[0], seconds = {phases}[1];
    if (C10_LIKELY(!_mm512_cmp_ps_mask(first, second, _CMP_UNORD_Q))) {{
        return __m512i(_mm512_permutex2var_epi16(
            _mm512_add_epi32(_mm512_castps_si512(first), _mm512_srli_epi32(firsts, 16)),
            _mm512_set_epi32(UPPERS),
            _mm512_add_epi32(_mm512_castps_si512(second), _mm512_srli_epi32(seconds, 16))));
    }}
#elif defined(CPU_CAPABILITY_AVX2)
    __m256 first = {x}[0], second = {x}[1];
    __m256i firsts = {phases}[0], seconds = {phases}[1];
    if (C10_LIKELY(!_mm256_movemask_ps(_mm256_cmp_ps(first, second, _CMP_UNORD_Q)))) {{
        firsts = _mm256_add_epi32(_mm256_castps_si256(first), _mm256_srli_epi32(firsts, 16));
        seconds = _mm256_add_epi32(_mm256_castps_si256(second), _mm256_srli_epi32(seconds, 16));
        __m256i packed = _mm256_packus_epi32(_mm256_srli_epi32(firsts, 16), _mm256_srli_epi32(seconds, 16));
        return __m256i(_mm256_permute4x64_epi64(packed, 0xd8));
    }}
#endif""".replace("UPPERS", every_second_half(1))

_FLOAT16_BY_INSTRUCTION = """
#if defined(CPU_CAPABILITY_AVX512)
    auto of_vector = [](__m512 x, __m512i phases) {{
        __m512i exponent = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7f800000));
        __m512i unit = _mm512_sub_epi32(
            _mm512_max_epi32(exponent, _mm512_set1_epi32(0x38800000)), _mm512_set1_epi32(10 << 23));
        __m512 to_units = _mm512_castsi512_ps(_mm512_sub_epi32(_mm512_set1_epi32(254 << 23), unit));
        __m512 share = _mm512_mul_ps(
            _mm512_cvtepi32_ps(_mm512_srli_epi32(phases, 19)), _mm512_set1_ps(0x1p-13f));
        __m512 units = _mm512_floor_ps(_mm512_add_ps(_mm512_mul_ps(_mm512_abs_ps(x), to_units), share));
        __m512i sign = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(1 << 31));
        __m512i magnitude = _mm512_castps_si512(_mm512_mul_ps(units, _mm512_castsi512_ps(unit)));
        return at::vec::Vectorized<float>(_mm512_castsi512_ps(_mm512_or_si512(magnitude, sign)));
    }};
    return at::vec::convert<at::Half,1,float,2>(
        at::vec::VectorizedN<float,2>(of_vector({x}[0], {phases}[0]), of_vector({x}[1], {phases}[1])));
#elif defined(CPU_CAPABILITY_AVX2)
    auto of_vector = [](__m256 x, __m256i phases) {{
        __m256i exponent = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7f800000));
        __m256i unit = _mm256_sub_epi32(
            _mm256_max_epi32(exponent, _mm256_set1_epi32(0x38800000)), _mm256_set1_epi32(10 << 23));
        __m256 to_units = _mm256_castsi256_ps(_mm256_sub_epi32(_mm256_set1_epi32(254 << 23), unit));
        __m256 share = _mm256_mul_ps(
            _mm256_cvtepi32_ps(_mm256_srli_epi32(phases, 19)), _mm256_set1_ps(0x1p-13f));
        __m256 sign = _mm256_and_ps(x, _mm256_set1_ps(-0.0f));
        __m256 units = _mm256_floor_ps(_mm256_add_ps(_mm256_mul_ps(_mm256_xor_ps(x, sign), to_units), share));
        __m256 magnitude = _mm256_mul_ps(units, _mm256_castsi256_ps(unit));
        return at::vec::Vectorized<float>(_mm256_or_ps(magnitude, sign));
    }};
    return at::vec::convert<at::Half,1,float,2>(
        at::vec::VectorizedN<float,2>(of_vector({x}[0], {phases}[0]), of_vector({x}[1], {phases}[1])));
#endif"""

_DITHERED = {
    torch.bfloat16: (_BFLOAT16_OF_SCALAR, _BFLOAT16_BY_INSTRUCTION),
    torch.float16: (_FLOAT16_OF_SCALAR, _FLOAT16_BY_INSTRUCTION),
}

_ONE_BY_ONE = """
[&]() -> {result} {{BY_INSTRUCTION
    __at_align__ float x[{n}];
    __at_align__ int32_t phases[{n}];
    __at_align__ {type} stored[{n}];
    {x}.store(x, {n});
    {phases}.store(phases, {n});
    for (int i = 0; i < {n}; ++i)
        stored[i] = {of_each};
    return {result}::loadu(stored, {n});
}}()
"""
