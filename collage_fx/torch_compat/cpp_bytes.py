"""The C++ of 24-bit floats, a 16-bit number and a byte: rests on ``at::vec``.

What they are says ``numerics/float24.py``. As in ``cpp_halves.py`` a kernel handles two vectors of float32 at
a time, and numbers one by one where the processor has vectors of another kind, or (in the parts of bfloat16)
a number in one is infinite, NaN or could become so.
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


def dithered_upper(value: Any, phases: Any, *, dtype: torch.dtype) -> Any:
    """Write the code for the storage-format number of a float32 number rounded by its phase, as float32."""
    stored = new_variable(f"{_parts(value, phases, dtype)}.first", dtype, value, phases)
    near = converted(stored, torch.float32, dtype)
    announce(near, dtype, stored)
    return near


def dithered_byte(value: Any, phases: Any, *, dtype: torch.dtype) -> Any:
    """Write the code for the byte that :func:`dithered_upper` leaves."""
    return new_variable(f"{_parts(value, phases, dtype)}.second", torch.int8, value, phases)


def with_byte(hi: Any, rest: Any, *, dtype: torch.dtype) -> Any:
    """Write the code for the number of which these are the parts."""
    of_scalars, by_instruction = _WHOLE[dtype]
    if not hi.is_vec:
        return new_variable(of_scalars.format(hi=hi, rest=rest), torch.float32, hi, rest)
    text = _WHOLE_ONE_BY_ONE.format(
        hi=hi, rest=rest, n=V.kernel.tiling_factor, of_each=of_scalars.format(hi="upper[i]", rest="lower[i]")
    )
    filled = by_instruction.format(hi=hi, rest=rest) if fills_two_vectors(hi) else ""
    return new_variable(text.replace("BY_INSTRUCTION", filled), torch.float32, hi, rest)


def _parts(value: Any, phases: Any, dtype: torch.dtype) -> Any:
    """The variable with both parts of a number, or of vectors of them."""
    of_scalar, by_instruction = _PARTS[dtype]
    if not value.is_vec:
        return new_variable(of_scalar.format(x=value, phase=phases), torch.int8, value, phases)
    text = _PARTS_ONE_BY_ONE.format(
        x=value,
        phases=phases,
        n=V.kernel.tiling_factor,
        type=_TYPES[dtype],
        upper=f"decltype({inductors_text(value, dtype, torch.float32)})",
        lower=f"decltype({inductors_text(value, torch.int8, torch.float32)})",
        of_each=of_scalar.format(x="x[i]", phase="phases[i]"),
    )
    filled = by_instruction.format(x=value, phases=phases) if fills_two_vectors(value) else ""
    return new_variable(text.replace("BY_INSTRUCTION", filled), torch.int8, value, phases)


_TYPES = {torch.bfloat16: "at::BFloat16", torch.float16: "at::Half"}

#: Rounded up, a magnitude from 0x7f7f8000 on becomes infinite in bfloat16, unless it is infinite or NaN.
_BFLOAT16_PARTS_OF_SCALAR = (
    "[](float x, uint32_t phase) -> std::pair<at::BFloat16, int8_t> {{ "
    "uint32_t bits = c10::bit_cast<uint32_t>(x); "
    "if (x != x) return {{at::BFloat16(bits >> 16 | 0x40, at::BFloat16::from_bits()), 0}}; "
    "bits += phase >> 24; "
    "int8_t rest = (bits & 0x7fffffff) < 0x7f7f8000 ? bits >> 8 : 0; "
    "return {{at::BFloat16((bits + 0x8000) >> 16, at::BFloat16::from_bits()), rest}}; "
    "}}({x}, static_cast<uint32_t>({phase}))"
)

_BFLOAT16_WHOLE_OF_SCALARS = (
    "[](float hi, int8_t rest) {{ "
    "float value = c10::bit_cast<float>(c10::bit_cast<uint32_t>(hi) + static_cast<uint32_t>(rest * 256)); "
    "return std::abs(value - hi) < std::numeric_limits<float>::infinity() ? value : hi; }}({hi}, {rest})"
)

#: In the bits of float32 numbers 0x38800000 are those of float16's smallest normal number, and 18 << 23 takes
#: a number's exponent to the last of its 18 bits of fraction.
_FLOAT16_PARTS_OF_SCALAR = (
    "[](float x, uint32_t phase) -> std::pair<at::Half, int8_t> {{ "
    "uint32_t magnitude = c10::bit_cast<uint32_t>(x) & 0x7fffffff; "
    "uint32_t unit = (std::max(magnitude, 0x38800000u) & 0x7f800000) - (18u << 23); "
    "float units = x * c10::bit_cast<float>((254u << 23) - unit), below = std::floor(units); "
    "float least = 1.0f - static_cast<float>(phase >> 8) * 0x1p-24f; "
    "units = units - below >= least ? below + 1.0f : below; "
    "float ulps = std::floor(units * 0x1p-8f + 0.5f); "
    "float hi = std::abs(ulps * 256.0f * c10::bit_cast<float>(unit)); "
    "int8_t rest = hi <= 65504.0f ? units - ulps * 256.0f : 0.0f; "
    "return {{at::Half(std::copysign(hi, x)), rest}}; "
    "}}({x}, static_cast<uint32_t>({phase}))"
)

_FLOAT16_WHOLE_OF_SCALARS = (
    "[](float hi, int8_t rest) {{ "
    "int32_t bits = c10::bit_cast<int32_t>(hi), magnitude = (bits & 0x7fffffff) + ((rest ^ bits) >> 31); "
    "int32_t unit = (std::max(magnitude, 0x38800000) & 0x7f800000) - (18 << 23); "
    "return hi + rest * c10::bit_cast<float>(unit); }}({hi}, {rest})"
)

_BFLOAT16_PARTS_BY_INSTRUCTION = """
#if defined(CPU_CAPABILITY_AVX512)
    __m512i first = _mm512_castps_si512({x}[0]), second = _mm512_castps_si512({x}[1]);
    __m512i magnitude = _mm512_set1_epi32(0x7fffffff), half = _mm512_set1_epi32(0x8000);
    __m512i largest = _mm512_max_epi32(
        _mm512_and_si512(first, magnitude), _mm512_and_si512(second, magnitude));
    if (C10_LIKELY(!_mm512_cmpgt_epi32_mask(largest, _mm512_set1_epi32(0x7f7f7eff)))) {{
        first = _mm512_add_epi32(first, _mm512_srli_epi32({phases}[0], 24));
        second = _mm512_add_epi32(second, _mm512_srli_epi32({phases}[1], 24));
        __m512i upper = _mm512_permutex2var_epi16(
            _mm512_add_epi32(first, half), _mm512_set_epi32(UPPERS), _mm512_add_epi32(second, half));
        __m512i lower = _mm512_permutex2var_epi16(first, _mm512_set_epi32(LOWERS), second);
        return {{upper, _mm512_castsi256_si512(_mm512_cvtepi16_epi8(_mm512_srli_epi16(lower, 8)))}};
    }}
#elif defined(CPU_CAPABILITY_AVX2)
    __m256i first = _mm256_castps_si256({x}[0]), second = _mm256_castps_si256({x}[1]);
    __m256i magnitude = _mm256_set1_epi32(0x7fffffff), half = _mm256_set1_epi32(0x8000);
    __m256i largest = _mm256_max_epi32(
        _mm256_and_si256(first, magnitude), _mm256_and_si256(second, magnitude));
    __m256i over = _mm256_cmpgt_epi32(largest, _mm256_set1_epi32(0x7f7f7eff));
    if (C10_LIKELY(_mm256_testz_si256(over, over))) {{
        first = _mm256_add_epi32(first, _mm256_srli_epi32({phases}[0], 24));
        second = _mm256_add_epi32(second, _mm256_srli_epi32({phases}[1], 24));
        __m256i upper = _mm256_packus_epi32(
            _mm256_srli_epi32(_mm256_add_epi32(first, half), 16),
            _mm256_srli_epi32(_mm256_add_epi32(second, half), 16));
        __m256i lower = _mm256_packs_epi32(
            _mm256_srai_epi32(_mm256_slli_epi32(first, 16), 24),
            _mm256_srai_epi32(_mm256_slli_epi32(second, 16), 24));
        lower = _mm256_permutevar8x32_epi32(
            _mm256_packs_epi16(lower, lower), _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5));
        return {{_mm256_permute4x64_epi64(upper, 0xd8), lower}};
    }}
#endif""".replace("UPPERS", every_second_half(1)).replace("LOWERS", every_second_half(0))

_BFLOAT16_WHOLE_BY_INSTRUCTION = """
#if defined(CPU_CAPABILITY_AVX512)
    auto whole = [](__m512 hi, __m128i rest) {{
        __m512 value = _mm512_castsi512_ps(_mm512_add_epi32(
            _mm512_castps_si512(hi), _mm512_slli_epi32(_mm512_cvtepi8_epi32(rest), 8)));
        __m512 off = _mm512_abs_ps(_mm512_sub_ps(value, hi));
        __m512 infinite = _mm512_set1_ps(std::numeric_limits<float>::infinity());
        return _mm512_mask_mov_ps(hi, _mm512_cmp_ps_mask(off, infinite, _CMP_LT_OQ), value);
    }};
    __m512i rests = {rest};
    return at::vec::VectorizedN<float,2>(
        at::vec::Vectorized<float>(whole({hi}[0], _mm512_castsi512_si128(rests))),
        at::vec::Vectorized<float>(whole({hi}[1], _mm512_extracti32x4_epi32(rests, 1))));
#elif defined(CPU_CAPABILITY_AVX2)
    auto whole = [](__m256 hi, __m128i rest) {{
        __m256 value = _mm256_castsi256_ps(_mm256_add_epi32(
            _mm256_castps_si256(hi), _mm256_slli_epi32(_mm256_cvtepi8_epi32(rest), 8)));
        __m256 off = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), _mm256_sub_ps(value, hi));
        __m256 infinite = _mm256_set1_ps(std::numeric_limits<float>::infinity());
        return _mm256_blendv_ps(hi, value, _mm256_cmp_ps(off, infinite, _CMP_LT_OQ));
    }};
    __m128i rests = _mm256_castsi256_si128({rest});
    return at::vec::VectorizedN<float,2>(
        at::vec::Vectorized<float>(whole({hi}[0], rests)),
        at::vec::Vectorized<float>(whole({hi}[1], _mm_srli_si128(rests, 8))));
#endif"""

_FLOAT16_PARTS_BY_INSTRUCTION = """
#if defined(CPU_CAPABILITY_AVX512)
    auto of_vector = [](__m512 x, __m512i phases) -> std::pair<__m512, __m512i> {{
        __m512i sign = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(1 << 31));
        __m512i magnitude = _mm512_castps_si512(_mm512_abs_ps(x));
        __m512i exponent = _mm512_and_si512(
            _mm512_max_epi32(magnitude, _mm512_set1_epi32(0x38800000)), _mm512_set1_epi32(0x7f800000));
        __m512i unit = _mm512_sub_epi32(exponent, _mm512_set1_epi32(18 << 23));
        __m512 one = _mm512_set1_ps(1.0f), per_ulp = _mm512_set1_ps(256.0f);
        __m512 units = _mm512_mul_ps(
            x, _mm512_castsi512_ps(_mm512_sub_epi32(_mm512_set1_epi32(254u << 23), unit)));
        __m512 share = _mm512_cvtepi32_ps(_mm512_srli_epi32(phases, 8));
        __m512 least = _mm512_sub_ps(one, _mm512_mul_ps(share, _mm512_set1_ps(0x1p-24f)));
        __m512 below = _mm512_floor_ps(units);
        __mmask16 up = _mm512_cmp_ps_mask(_mm512_sub_ps(units, below), least, _CMP_GE_OQ);
        units = _mm512_mask_add_ps(below, up, below, one);
        __m512 ulps = _mm512_mul_ps(per_ulp, _mm512_floor_ps(_mm512_add_ps(
            _mm512_mul_ps(units, _mm512_set1_ps(0x1p-8f)), _mm512_set1_ps(0.5f))));
        __m512 hi = _mm512_mul_ps(ulps, _mm512_castsi512_ps(unit));
        __mmask16 finite = _mm512_cmp_ps_mask(_mm512_abs_ps(hi), _mm512_set1_ps(65504.0f), _CMP_LE_OQ);
        return {{
            _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(hi), sign)),
            _mm512_maskz_cvtps_epi32(finite, _mm512_sub_ps(units, ulps))}};
    }};
    auto first = of_vector({x}[0], {phases}[0]), second = of_vector({x}[1], {phases}[1]);
    return {{
        at::vec::convert<at::Half,1,float,2>(at::vec::VectorizedN<float,2>(first.first, second.first)),
        _mm512_castsi256_si512(_mm256_inserti128_si256(
            _mm256_castsi128_si256(_mm512_cvtepi32_epi8(first.second)),
            _mm512_cvtepi32_epi8(second.second), 1))}};
#elif defined(CPU_CAPABILITY_AVX2)
    auto of_vector = [](__m256 x, __m256i phases) -> std::pair<__m256, __m256i> {{
        __m256 sign = _mm256_and_ps(x, _mm256_set1_ps(-0.0f));
        __m256i magnitude = _mm256_castps_si256(_mm256_xor_ps(x, sign));
        __m256i exponent = _mm256_and_si256(
            _mm256_max_epi32(magnitude, _mm256_set1_epi32(0x38800000)), _mm256_set1_epi32(0x7f800000));
        __m256i unit = _mm256_sub_epi32(exponent, _mm256_set1_epi32(18 << 23));
        __m256 one = _mm256_set1_ps(1.0f), per_ulp = _mm256_set1_ps(256.0f);
        __m256 units = _mm256_mul_ps(
            x, _mm256_castsi256_ps(_mm256_sub_epi32(_mm256_set1_epi32(254u << 23), unit)));
        __m256 share = _mm256_cvtepi32_ps(_mm256_srli_epi32(phases, 8));
        __m256 least = _mm256_sub_ps(one, _mm256_mul_ps(share, _mm256_set1_ps(0x1p-24f)));
        __m256 below = _mm256_floor_ps(units);
        __m256 up = _mm256_cmp_ps(_mm256_sub_ps(units, below), least, _CMP_GE_OQ);
        units = _mm256_add_ps(below, _mm256_and_ps(up, one));
        __m256 ulps = _mm256_mul_ps(per_ulp, _mm256_floor_ps(_mm256_add_ps(
            _mm256_mul_ps(units, _mm256_set1_ps(0x1p-8f)), _mm256_set1_ps(0.5f))));
        __m256 hi = _mm256_mul_ps(ulps, _mm256_castsi256_ps(unit));
        __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), hi);
        __m256 finite = _mm256_cmp_ps(size, _mm256_set1_ps(65504.0f), _CMP_LE_OQ);
        return {{
            _mm256_or_ps(hi, sign),
            _mm256_cvtps_epi32(_mm256_and_ps(finite, _mm256_sub_ps(units, ulps)))}};
    }};
    auto first = of_vector({x}[0], {phases}[0]), second = of_vector({x}[1], {phases}[1]);
    __m256i lower = _mm256_packs_epi32(first.second, second.second);
    return {{
        at::vec::convert<at::Half,1,float,2>(at::vec::VectorizedN<float,2>(first.first, second.first)),
        _mm256_permutevar8x32_epi32(
            _mm256_packs_epi16(lower, lower), _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5))}};
#endif"""

_FLOAT16_WHOLE_BY_INSTRUCTION = """
#if defined(CPU_CAPABILITY_AVX512)
    auto whole = [](__m512 hi, __m128i byte) {{
        __m512i rest = _mm512_cvtepi8_epi32(byte), bits = _mm512_castps_si512(hi);
        __m512i magnitude = _mm512_add_epi32(
            _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)),
            _mm512_srai_epi32(_mm512_xor_si512(rest, bits), 31));
        __m512i exponent = _mm512_and_si512(
            _mm512_max_epi32(magnitude, _mm512_set1_epi32(0x38800000)), _mm512_set1_epi32(0x7f800000));
        __m512 unit = _mm512_castsi512_ps(_mm512_sub_epi32(exponent, _mm512_set1_epi32(18 << 23)));
        return _mm512_add_ps(hi, _mm512_mul_ps(_mm512_cvtepi32_ps(rest), unit));
    }};
    __m512i rests = {rest};
    return at::vec::VectorizedN<float,2>(
        at::vec::Vectorized<float>(whole({hi}[0], _mm512_castsi512_si128(rests))),
        at::vec::Vectorized<float>(whole({hi}[1], _mm512_extracti32x4_epi32(rests, 1))));
#elif defined(CPU_CAPABILITY_AVX2)
    auto whole = [](__m256 hi, __m128i byte) {{
        __m256i rest = _mm256_cvtepi8_epi32(byte), bits = _mm256_castps_si256(hi);
        __m256i magnitude = _mm256_add_epi32(
            _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)),
            _mm256_srai_epi32(_mm256_xor_si256(rest, bits), 31));
        __m256i exponent = _mm256_and_si256(
            _mm256_max_epi32(magnitude, _mm256_set1_epi32(0x38800000)), _mm256_set1_epi32(0x7f800000));
        __m256 unit = _mm256_castsi256_ps(_mm256_sub_epi32(exponent, _mm256_set1_epi32(18 << 23)));
        return _mm256_add_ps(hi, _mm256_mul_ps(_mm256_cvtepi32_ps(rest), unit));
    }};
    __m128i rests = _mm256_castsi256_si128({rest});
    return at::vec::VectorizedN<float,2>(
        at::vec::Vectorized<float>(whole({hi}[0], rests)),
        at::vec::Vectorized<float>(whole({hi}[1], _mm_srli_si128(rests, 8))));
#endif"""

_PARTS = {
    torch.bfloat16: (_BFLOAT16_PARTS_OF_SCALAR, _BFLOAT16_PARTS_BY_INSTRUCTION),
    torch.float16: (_FLOAT16_PARTS_OF_SCALAR, _FLOAT16_PARTS_BY_INSTRUCTION),
}

_WHOLE = {
    torch.bfloat16: (_BFLOAT16_WHOLE_OF_SCALARS, _BFLOAT16_WHOLE_BY_INSTRUCTION),
    torch.float16: (_FLOAT16_WHOLE_OF_SCALARS, _FLOAT16_WHOLE_BY_INSTRUCTION),
}

_PARTS_ONE_BY_ONE = """
[&]() -> std::pair<{upper}, {lower}> {{BY_INSTRUCTION
    __at_align__ float x[{n}];
    __at_align__ int32_t phases[{n}];
    __at_align__ {type} uppers[{n}];
    __at_align__ int8_t bytes[{n}];
    {x}.store(x, {n});
    {phases}.store(phases, {n});
    for (int i = 0; i < {n}; ++i)
        std::tie(uppers[i], bytes[i]) = {of_each};
    return {{{upper}::loadu(uppers, {n}), {lower}::loadu(bytes, {n})}};
}}()
"""

_WHOLE_ONE_BY_ONE = """
[&]() -> decltype({hi}) {{BY_INSTRUCTION
    __at_align__ float upper[{n}];
    __at_align__ int8_t lower[{n}];
    {hi}.store(upper, {n});
    {rest}.store(lower, {n});
    for (int i = 0; i < {n}; ++i)
        upper[i] = {of_each};
    return decltype({hi})::loadu(upper, {n});
}}()
"""
