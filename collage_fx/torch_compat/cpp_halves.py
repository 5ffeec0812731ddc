"""The C++ of a float32 number's halves, a 16-bit number and a 16-bit integer: rests on ``at::vec``.

What they are says ``numerics/error_formats/exact.py``. A kernel handles as many numbers at a time as a vector
holds of either half: two vectors of float32. Where the processor has vectors of another kind, or (in the
halves of bfloat16) a number in one is infinite, NaN or would become so, they are handled one by one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.virtualized import V

from collage_fx.torch_compat.patch_cpp_conversions import (
    announce,
    converted,
    fills_two_vectors,
    inductors_text,
    new_variable,
)

__all__: list[str] = []


def upper_half(value: Any) -> Any:
    """Write the code for a float32 number rounded to bfloat16, ties away from zero."""
    if value.is_vec:
        stored = new_variable(f"{_halves(value)}.first", torch.bfloat16, value)
    else:
        stored = new_variable(_UPPER_OF_SCALAR.format(x=value), torch.bfloat16, value)
    near = converted(stored, torch.float32, torch.bfloat16)
    announce(near, torch.bfloat16, stored)
    return near


def lower_half(value: Any) -> Any:
    """Write the code for the integer that :func:`upper_half` leaves."""
    if value.is_vec:
        return new_variable(f"{_halves(value)}.second", torch.int16, value)
    return new_variable(_LOWER_OF_SCALAR.format(x=value), torch.int16, value)


def with_lower_half(hi: Any, rest: Any) -> Any:
    """Write the code for the number of which these are the halves."""
    return _joined(hi, rest, _WHOLE_OF_SCALARS, _WHOLE_BY_INSTRUCTION)


def ulp_parts(value: Any, hi: Any) -> Any:
    """Write the code for what a number exceeds the nearest float16 number by, in parts of its ulp."""
    if not value.is_vec:
        return new_variable(_PARTS_OF_SCALARS.format(x=value, hi=hi), torch.int16, value, hi)
    by_instruction = _PARTS_BY_INSTRUCTION.format(x=value, hi=hi) if fills_two_vectors(value) else ""
    one_by_one = _PARTS_ONE_BY_ONE.format(
        x=value,
        hi=hi,
        n=V.kernel.tiling_factor,
        parts=f"decltype({inductors_text(value, torch.int16, torch.float32)})",
        of_each=_PARTS_OF_SCALARS.format(x="x[i]", hi="near[i]"),
    )
    return new_variable(one_by_one.replace("BY_INSTRUCTION", by_instruction), torch.int16, value, hi)


def with_ulp_parts(hi: Any, parts: Any) -> Any:
    """Write the code for the number that exceeds a float16 number by so many parts of its ulp."""
    return _joined(hi, parts, _WITH_PARTS_OF_SCALARS, _WITH_PARTS_BY_INSTRUCTION)


def _joined(hi: Any, rest: Any, of_scalars: str, by_instruction: str) -> Any:
    """Write the code for a number that is made of a float32 number and a 16-bit integer."""
    if not hi.is_vec:
        return new_variable(of_scalars.format(hi=hi, rest=rest), torch.float32, hi, rest)
    one_by_one = _JOINED_ONE_BY_ONE.format(
        hi=hi, rest=rest, n=V.kernel.tiling_factor, of_each=of_scalars.format(hi="upper[i]", rest="lower[i]")
    )
    filled = by_instruction.format(hi=hi, rest=rest) if fills_two_vectors(hi) else ""
    return new_variable(one_by_one.replace("BY_INSTRUCTION", filled), torch.float32, hi, rest)


def _halves(value: Any) -> Any:
    """The variable with both halves of a vector."""
    by_instruction = _HALVES_BY_INSTRUCTION.format(x=value) if fills_two_vectors(value) else ""
    one_by_one = _HALVES_ONE_BY_ONE.format(
        x=value,
        n=V.kernel.tiling_factor,
        upper=f"decltype({inductors_text(value, torch.bfloat16, torch.float32)})",
        lower=f"decltype({inductors_text(value, torch.int16, torch.float32)})",
        of_upper=_UPPER_OF_SCALAR.format(x="x[i]"),
        of_lower=_LOWER_OF_SCALAR.format(x="x[i]"),
    )
    return new_variable(one_by_one.replace("BY_INSTRUCTION", by_instruction), torch.int16, value)


#: The bits of a float32 number are those of its magnitude and a sign. From 0x7f7f8000 on a magnitude becomes
#: infinite when it is rounded, unless it is infinite or NaN already.
_UPPER_OF_SCALAR = (
    "at::BFloat16(static_cast<uint16_t>({x} != {x} ? c10::bit_cast<uint32_t>({x}) >> 16 | 0x40 : "
    "(c10::bit_cast<uint32_t>({x}) + 0x8000) >> 16), at::BFloat16::from_bits())"
)

_LOWER_OF_SCALAR = (
    "static_cast<int16_t>((c10::bit_cast<uint32_t>({x}) & 0x7fffffff) < 0x7f7f8000 ? "
    "c10::bit_cast<uint32_t>({x}) & 0xffff : 0)"
)

_WHOLE_OF_SCALARS = (
    "[](float hi, int16_t rest) {{ "
    "float value = c10::bit_cast<float>(c10::bit_cast<uint32_t>(hi) + static_cast<uint32_t>(int32_t(rest))); "
    "return std::abs(value - hi) < std::numeric_limits<float>::infinity() ? value : hi; }}({hi}, {rest})"
)


def every_second_half(first: int) -> str:
    """The indices of 16-bit numbers of two AVX-512 vectors, every second one, as 32-bit integers."""
    return ",".join(f"{place}|{place + 2}<<16" for place in reversed(range(first, first + 64, 4)))


_HALVES_BY_INSTRUCTION = """
#if defined(CPU_CAPABILITY_AVX512)
    __m512i first = _mm512_castps_si512({x}[0]), second = _mm512_castps_si512({x}[1]);
    __m512i magnitude = _mm512_set1_epi32(0x7fffffff), half = _mm512_set1_epi32(0x8000);
    __m512i largest = _mm512_max_epi32(
        _mm512_and_si512(first, magnitude), _mm512_and_si512(second, magnitude));
    if (C10_LIKELY(!_mm512_cmpgt_epi32_mask(largest, _mm512_set1_epi32(0x7f7f7fff)))) {{
        __m512i uppers = _mm512_set_epi32(UPPERS), lowers = _mm512_set_epi32(LOWERS);
        __m512i upper = _mm512_permutex2var_epi16(
            _mm512_add_epi32(first, half), uppers, _mm512_add_epi32(second, half));
        return {{upper, _mm512_permutex2var_epi16(first, lowers, second)}};
    }}
#elif defined(CPU_CAPABILITY_AVX2)
    __m256i first = _mm256_castps_si256({x}[0]), second = _mm256_castps_si256({x}[1]);
    __m256i magnitude = _mm256_set1_epi32(0x7fffffff), half = _mm256_set1_epi32(0x8000);
    __m256i largest = _mm256_max_epi32(
        _mm256_and_si256(first, magnitude), _mm256_and_si256(second, magnitude));
    __m256i over = _mm256_cmpgt_epi32(largest, _mm256_set1_epi32(0x7f7f7fff));
    if (C10_LIKELY(_mm256_testz_si256(over, over))) {{
        __m256i mask = _mm256_set1_epi32(0xffff);
        __m256i upper = _mm256_packus_epi32(
            _mm256_srli_epi32(_mm256_add_epi32(first, half), 16),
            _mm256_srli_epi32(_mm256_add_epi32(second, half), 16));
        __m256i lower = _mm256_packus_epi32(_mm256_and_si256(first, mask), _mm256_and_si256(second, mask));
        return {{_mm256_permute4x64_epi64(upper, 0xd8), _mm256_permute4x64_epi64(lower, 0xd8)}};
    }}
#endif""".replace("UPPERS", every_second_half(1)).replace("LOWERS", every_second_half(0))

_HALVES_ONE_BY_ONE = """
[&]() -> std::pair<{upper}, {lower}> {{BY_INSTRUCTION
    __at_align__ float x[{n}];
    __at_align__ at::BFloat16 upper_halves[{n}];
    __at_align__ int16_t lower_halves[{n}];
    {x}.store(x, {n});
    for (int i = 0; i < {n}; ++i) {{
        upper_halves[i] = {of_upper};
        lower_halves[i] = {of_lower};
    }}
    return {{{upper}::loadu(upper_halves, {n}), {lower}::loadu(lower_halves, {n})}};
}}()
"""

_WHOLE_BY_INSTRUCTION = """
#if defined(CPU_CAPABILITY_AVX512)
    auto whole = [](__m512 hi, __m256i rest) {{
        __m512 value = _mm512_castsi512_ps(
            _mm512_add_epi32(_mm512_castps_si512(hi), _mm512_cvtepi16_epi32(rest)));
        __m512 off = _mm512_abs_ps(_mm512_sub_ps(value, hi));
        __m512 infinite = _mm512_set1_ps(std::numeric_limits<float>::infinity());
        return _mm512_mask_mov_ps(hi, _mm512_cmp_ps_mask(off, infinite, _CMP_LT_OQ), value);
    }};
    __m512i rests = {rest};
    return at::vec::VectorizedN<float,2>(
        at::vec::Vectorized<float>(whole({hi}[0], _mm512_castsi512_si256(rests))),
        at::vec::Vectorized<float>(whole({hi}[1], _mm512_extracti64x4_epi64(rests, 1))));
#elif defined(CPU_CAPABILITY_AVX2)
    auto whole = [](__m256 hi, __m128i rest) {{
        __m256 value = _mm256_castsi256_ps(
            _mm256_add_epi32(_mm256_castps_si256(hi), _mm256_cvtepi16_epi32(rest)));
        __m256 off = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), _mm256_sub_ps(value, hi));
        __m256 infinite = _mm256_set1_ps(std::numeric_limits<float>::infinity());
        return _mm256_blendv_ps(hi, value, _mm256_cmp_ps(off, infinite, _CMP_LT_OQ));
    }};
    __m256i rests = {rest};
    return at::vec::VectorizedN<float,2>(
        at::vec::Vectorized<float>(whole({hi}[0], _mm256_castsi256_si128(rests))),
        at::vec::Vectorized<float>(whole({hi}[1], _mm256_extracti128_si256(rests, 1))));
#endif"""

_JOINED_ONE_BY_ONE = """
[&]() -> decltype({hi}) {{BY_INSTRUCTION
    __at_align__ float upper[{n}];
    __at_align__ int16_t lower[{n}];
    {hi}.store(upper, {n});
    {rest}.store(lower, {n});
    for (int i = 0; i < {n}; ++i)
        upper[i] = {of_each};
    return decltype({hi})::loadu(upper, {n});
}}()
"""

#: In the bits of float32 numbers: (e + 127) << 23 are those of 2**e; 0x7f800000 masks that, 0x38800000 are
#: those of float16's smallest normal number, 25 << 23 takes a number's exponent to 2**-15 of its ulp.
_PARTS_OF_SCALARS = (
    "[](float x, float hi) {{ "
    "uint32_t exponent = std::max(c10::bit_cast<uint32_t>(hi) & 0x7f800000, 0x38800000u); "
    "float scale = c10::bit_cast<float>((254u << 23) - (exponent - (25u << 23))); "
    "return static_cast<int16_t>(exponent < 0x7f800000 ? std::nearbyint((x - hi) * scale) : 0.0f); "
    "}}({x}, {hi})"
)

_WITH_PARTS_OF_SCALARS = (
    "[](float hi, int16_t rest) {{ "
    "uint32_t exponent = std::max(c10::bit_cast<uint32_t>(hi) & 0x7f800000, 0x38800000u); "
    "return hi + rest * c10::bit_cast<float>(exponent - (25u << 23)); }}({hi}, {rest})"
)

_PARTS_BY_INSTRUCTION = """
#if defined(CPU_CAPABILITY_AVX512)
    auto of_vector = [](__m512 x, __m512 hi) {{
        __m512i infinity = _mm512_set1_epi32(0x7f800000);
        __m512i exponent = _mm512_and_si512(_mm512_castps_si512(hi), infinity);
        __mmask16 finite = _mm512_cmplt_epi32_mask(exponent, infinity);
        exponent = _mm512_max_epi32(exponent, _mm512_set1_epi32(0x38800000));
        __m512 scale = _mm512_castsi512_ps(_mm512_sub_epi32(_mm512_set1_epi32((254u + 25) << 23), exponent));
        return _mm512_cvtepi32_epi16(
            _mm512_maskz_cvtps_epi32(finite, _mm512_mul_ps(_mm512_sub_ps(x, hi), scale)));
    }};
    return {{_mm512_inserti64x4(
        _mm512_castsi256_si512(of_vector({x}[0], {hi}[0])), of_vector({x}[1], {hi}[1]), 1)}};
#elif defined(CPU_CAPABILITY_AVX2)
    auto of_vector = [](__m256 x, __m256 hi) {{
        __m256i infinity = _mm256_set1_epi32(0x7f800000);
        __m256i exponent = _mm256_and_si256(_mm256_castps_si256(hi), infinity);
        __m256i finite = _mm256_cmpgt_epi32(infinity, exponent);
        exponent = _mm256_max_epi32(exponent, _mm256_set1_epi32(0x38800000));
        __m256 scale = _mm256_castsi256_ps(_mm256_sub_epi32(_mm256_set1_epi32((254u + 25) << 23), exponent));
        return _mm256_and_si256(
            finite, _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_sub_ps(x, hi), scale)));
    }};
    __m256i packed = _mm256_packs_epi32(of_vector({x}[0], {hi}[0]), of_vector({x}[1], {hi}[1]));
    return {{_mm256_permute4x64_epi64(packed, 0xd8)}};
#endif"""

_PARTS_ONE_BY_ONE = """
[&]() -> {parts} {{BY_INSTRUCTION
    __at_align__ float x[{n}];
    __at_align__ float near[{n}];
    __at_align__ int16_t parts[{n}];
    {x}.store(x, {n});
    {hi}.store(near, {n});
    for (int i = 0; i < {n}; ++i)
        parts[i] = {of_each};
    return {parts}::loadu(parts, {n});
}}()
"""

_WITH_PARTS_BY_INSTRUCTION = """
#if defined(CPU_CAPABILITY_AVX512)
    auto whole = [](__m512 hi, __m256i rest) {{
        __m512i exponent = _mm512_max_epi32(
            _mm512_and_si512(_mm512_castps_si512(hi), _mm512_set1_epi32(0x7f800000)),
            _mm512_set1_epi32(0x38800000));
        __m512 part = _mm512_castsi512_ps(_mm512_sub_epi32(exponent, _mm512_set1_epi32(25 << 23)));
        return _mm512_add_ps(hi, _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(rest)), part));
    }};
    __m512i rests = {rest};
    return at::vec::VectorizedN<float,2>(
        at::vec::Vectorized<float>(whole({hi}[0], _mm512_castsi512_si256(rests))),
        at::vec::Vectorized<float>(whole({hi}[1], _mm512_extracti64x4_epi64(rests, 1))));
#elif defined(CPU_CAPABILITY_AVX2)
    auto whole = [](__m256 hi, __m128i rest) {{
        __m256i exponent = _mm256_max_epi32(
            _mm256_and_si256(_mm256_castps_si256(hi), _mm256_set1_epi32(0x7f800000)),
            _mm256_set1_epi32(0x38800000));
        __m256 part = _mm256_castsi256_ps(_mm256_sub_epi32(exponent, _mm256_set1_epi32(25 << 23)));
        return _mm256_add_ps(hi, _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(rest)), part));
    }};
    __m256i rests = {rest};
    return at::vec::VectorizedN<float,2>(
        at::vec::Vectorized<float>(whole({hi}[0], _mm256_castsi256_si128(rests))),
        at::vec::Vectorized<float>(whole({hi}[1], _mm256_extracti128_si256(rests, 1))));
#endif"""
