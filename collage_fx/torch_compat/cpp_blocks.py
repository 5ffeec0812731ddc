"""The C++ of integers that have a scale in common with their neighbours: rests on ``at::vec``.

What they are says ``numerics/blocks.py``. As in ``cpp_halves.py`` a kernel handles two vectors of float32 at
a time, if they are of one block, and numbers one by one elsewhere.
"""

from __future__ import annotations

from string import Template
from typing import Any

import torch
from torch._inductor.virtualized import V

from collage_fx.torch_compat.patch_cpp_conversions import inductors_text, new_variable

__all__: list[str] = []


def value_in_block(code: Any, byte: Any, *, bits: int, signed: bool) -> Any:
    """Write the code for the float32 number of an integer and its scale's byte."""
    names = _names(bits, signed) | {"by_instruction": _VALUES_BY_INSTRUCTION, "codes": code, "byte": byte}
    if not code.is_vec:
        return new_variable(_filled(f"{_VALUE}($codes, $byte)", names), torch.float32, code, byte)
    conversion = inductors_text(code, torch.float32, code.dtype)
    return new_variable(_of_vectors(_VALUES, names, conversion), torch.float32, code, byte)


def code_in_block(root: Any, byte: Any, phases: Any, *, bits: int, signed: bool) -> Any:
    """Write the code for the integer of a number, or of its root if it isn't signed, given its phase."""
    names = _names(bits, signed) | {"by_instruction": _CODES_BY_INSTRUCTION, "roots": root, "byte": byte}
    names, dtype = names | {"phases": phases}, _DTYPES[bits, signed]
    if not root.is_vec:
        return new_variable(_filled(f"{_CODE}($roots, $byte, $phases)", names), dtype, root, byte, phases)
    conversion = inductors_text(root, dtype, torch.float32)
    return new_variable(_of_vectors(_CODES, names, conversion), dtype, root, byte, phases)


def _of_vectors(template: str, names: dict[str, Any], conversion: str) -> str:
    """The text for vectors of the kinds of Inductor's text for a conversion."""
    byte, n = names["byte"], V.kernel.tiling_factor
    function, _, _ = conversion.partition("(")
    names |= {"n": n, "result": f"decltype({conversion})", "bytes": "", "byte_of_each": byte}
    if byte.is_vec:
        names |= {"bytes": f"__at_align__ uint8_t bytes[{n}];\n    {byte}.store(bytes, {n});"}
        names |= {"byte_of_each": "bytes[i]"}
    by_instruction = not byte.is_vec and "float,2" in function
    names |= {"end_of_instructions": "#endif"} if by_instruction else {"by_instruction": ""}
    return _filled(template, names)


def _filled(template: str, names: dict[str, Any]) -> str:
    """A text with all that it has names for, which may have names themselves."""
    while "$" in template:
        template = Template(template).substitute(names)
    return template


def _names(bits: int, signed: bool) -> dict[str, Any]:
    """What the texts below have names for, apart from variables of a kernel."""
    largest = _LARGEST[bits, signed]
    at_largest = largest**2 if bits == 8 else largest
    return {
        "largest": f"{largest}.0f",
        "at_largest": f"{at_largest}.0f",
        "of_at_largest": float(torch.tensor(1 / at_largest)).hex() + "f",
        "unit": _UNIT,
        "factor": _FACTOR,
        "of_codes": _VALUE,
        "of_roots": _CODE,
        "end_of_instructions": "",
        **_OF_BITS[bits],
        **_OF_SIGN[signed],
        **_OF_KIND[bits, signed],
    }


_LARGEST = {(8, True): 127, (8, False): 255, (16, True): 32767, (16, False): 65535}

_DTYPES = {
    (8, True): torch.int8,
    (8, False): torch.uint8,
    (16, True): torch.int16,
    (16, False): torch.int16,
}

#: In the bits of float32 numbers: a scale's byte and 93, times 2**22, are those of the scale.
_UNIT = """(byte == 255 ? std::numeric_limits<float>::quiet_NaN()
        : c10::bit_cast<float>((byte + 93) << 22)) * $of_at_largest"""

_FACTOR = """c10::bit_cast<float>((254 - ((byte + 93) >> 1)) << 23)
        * ((byte + 93) & 1 ? 0x1.555556p-1f : 1.0f) * $at_largest"""

_VALUE = """
[](int32_t code, uint32_t byte) {
    float number = static_cast<$type>(code);
    float size = $in_map * ($unit);
    return $of_size;
}"""

_CODE = """
[](float root, uint32_t byte, uint32_t phase) {
    if (byte == 255)
        return static_cast<$stored>(0);
    float size = std::abs(root) * ($factor), without = 1.0f - static_cast<float>(phase >> 8) * 0x1p-24f;
    $below_of_scalar
    float code = std::min(below + (rest >= without), $largest);
    return static_cast<$stored>(static_cast<int32_t>($with_sign));
}"""

_OF_BITS = {
    8: {
        "in_map": "number * std::abs(number)",
        "below_of_scalar": """float near = std::floor(std::sqrt(size) + 0.5f);
    float below = near * near > size ? near - 1.0f : near;
    float rest = size - below * below;
    without *= 2.0f * below + 1.0f;""",
        "below_of_avx512": """__m512 near = _mm512_mul_ps(
            size, _mm512_rsqrt14_ps(_mm512_max_ps(size, _mm512_set1_ps(std::numeric_limits<float>::min()))));
        near = _mm512_roundscale_ps(near, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        __mmask16 is_above = _mm512_cmp_ps_mask(_mm512_mul_ps(near, near), size, _CMP_GT_OQ);
        __m512 below = _mm512_mask_sub_ps(near, is_above, near, one);
        __m512 rest = _mm512_fnmadd_ps(below, below, size);
        without = _mm512_mul_ps(without, _mm512_fmadd_ps(below, _mm512_set1_ps(2.0f), one));""",
        "below_of_avx2": """__m256 near = _mm256_mul_ps(
            size, _mm256_rsqrt_ps(_mm256_max_ps(size, _mm256_set1_ps(std::numeric_limits<float>::min()))));
        near = _mm256_round_ps(near, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        __m256 is_above = _mm256_cmp_ps(_mm256_mul_ps(near, near), size, _CMP_GT_OQ);
        __m256 below = _mm256_sub_ps(near, _mm256_and_ps(is_above, one));
        __m256 rest = _mm256_sub_ps(size, _mm256_mul_ps(below, below));
        without = _mm256_mul_ps(without, _mm256_add_ps(_mm256_add_ps(below, below), one));""",
        "in_map_of_avx512": "number = _mm512_mul_ps(number, _mm512_abs_ps(number));",
        "in_map_of_avx2": "number = _mm256_mul_ps(number, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), number));",
        "halves_of_avx512": """auto first = _mm512_castsi512_si128(codes),
        second = _mm512_extracti32x4_epi32(codes, 1);""",
        "halves_of_avx2": "auto first = _mm256_castsi256_si128(codes), second = _mm_srli_si128(first, 8);",
        "half_of_avx512": "__m128i",
        "packed_of_avx512": """Codes{{_mm512_castsi256_si512(_mm256_set_m128i(
        _mm512_cvtepi32_epi8(second), _mm512_cvtepi32_epi8(first)))}}""",
        "codes_of_avx512": """struct Codes : $result {
        void store(void* to, int) const {
            _mm256_storeu_si256(static_cast<__m256i*>(to), _mm512_castsi512_si256(values));
        }
    };""",
    },
    16: {
        "in_map": "number",
        "below_of_scalar": "float below = std::floor(size), rest = size - below;",
        "below_of_avx512": """__m512 below = _mm512_floor_ps(size);
        __m512 rest = _mm512_sub_ps(size, below);""",
        "below_of_avx2": """__m256 below = _mm256_floor_ps(size);
        __m256 rest = _mm256_sub_ps(size, below);""",
        "in_map_of_avx512": "",
        "in_map_of_avx2": "",
        "halves_of_avx512": """auto first = _mm512_castsi512_si256(codes),
        second = _mm512_extracti64x4_epi64(codes, 1);""",
        "halves_of_avx2": """auto first = _mm256_castsi256_si128(codes),
        second = _mm256_extracti128_si256(codes, 1);""",
        "half_of_avx512": "__m256i",
        "packed_of_avx512": """$result(_mm512_inserti64x4(
        _mm512_castsi256_si512(_mm512_cvtepi32_epi16(first)), _mm512_cvtepi32_epi16(second), 1))""",
        "codes_of_avx512": "",
    },
}

_OF_SIGN = {
    True: {
        "of_size": "size",
        "of_size_of_avx512": "size",
        "of_size_of_avx2": "size",
        "with_sign": "root < 0 ? -code : code",
        "with_sign_of_avx512": "_mm512_or_ps(code, _mm512_and_ps(root, sign))",
        "with_sign_of_avx2": "_mm256_or_ps(code, _mm256_and_ps(root, sign))",
    },
    False: {
        "of_size": "size * size",
        "of_size_of_avx512": "_mm512_mul_ps(size, size)",
        "of_size_of_avx2": "_mm256_mul_ps(size, size)",
        "with_sign": "root > 0 ? std::max(code, 1.0f) : code",
        "with_sign_of_avx512": """_mm512_mask_max_ps(
            code, _mm512_cmp_ps_mask(root, _mm512_setzero_ps(), _CMP_GT_OQ), code, one)""",
        "with_sign_of_avx2": """_mm256_max_ps(
            code, _mm256_and_ps(one, _mm256_cmp_ps(root, _mm256_setzero_ps(), _CMP_GT_OQ)))""",
    },
}

_IN_TURN = "_mm256_permute4x64_epi64({}, 0xd8)"
_WORDS = _IN_TURN.format("_mm256_packs_epi32(first, second)")

_OF_KIND = {
    (8, True): {
        "type": "int8_t",
        "stored": "int8_t",
        "name": "epi8",
        "packed_of_avx2": _IN_TURN.format(f"_mm256_packs_epi16({_WORDS}, {_WORDS})"),
    },
    (8, False): {
        "type": "uint8_t",
        "stored": "uint8_t",
        "name": "epu8",
        "packed_of_avx2": _IN_TURN.format(f"_mm256_packus_epi16({_WORDS}, {_WORDS})"),
    },
    (16, True): {"type": "int16_t", "stored": "int16_t", "name": "epi16", "packed_of_avx2": _WORDS},
    (16, False): {
        "type": "uint16_t",
        "stored": "int16_t",
        "name": "epu16",
        "packed_of_avx2": _IN_TURN.format("_mm256_packus_epi32(first, second)"),
    },
}

_VALUES_BY_INSTRUCTION = """
#if defined(CPU_CAPABILITY_AVX512)
    uint32_t byte = $byte;
    __m512i codes = $codes;
    __m512 unit = _mm512_set1_ps($unit);
    auto of_half = [&]($half_of_avx512 codes) {
        __m512 number = _mm512_cvtepi32_ps(_mm512_cvt${name}_epi32(codes));
        $in_map_of_avx512
        __m512 size = _mm512_mul_ps(number, unit);
        return at::vec::Vectorized<float>($of_size_of_avx512);
    };
    $halves_of_avx512
    return at::vec::VectorizedN<float,2>(of_half(first), of_half(second));
#elif defined(CPU_CAPABILITY_AVX2)
    uint32_t byte = $byte;
    __m256i codes = $codes;
    __m256 unit = _mm256_set1_ps($unit);
    auto of_half = [&](__m128i codes) {
        __m256 number = _mm256_cvtepi32_ps(_mm256_cvt${name}_epi32(codes));
        $in_map_of_avx2
        __m256 size = _mm256_mul_ps(number, unit);
        return at::vec::Vectorized<float>($of_size_of_avx2);
    };
    $halves_of_avx2
    return at::vec::VectorizedN<float,2>(of_half(first), of_half(second));
#else"""

_CODES_BY_INSTRUCTION = """
#if defined(CPU_CAPABILITY_AVX512)
    uint32_t byte = $byte;
    __m512 factor = _mm512_set1_ps($factor), one = _mm512_set1_ps(1.0f), sign = _mm512_set1_ps(-0.0f);
    __mmask16 is_finite = byte == 255 ? 0 : 0xffff;
    auto of_half = [&](__m512 root, __m512i phases) {
        __m512 size = _mm512_mul_ps(_mm512_abs_ps(root), factor);
        __m512 share = _mm512_cvtepi32_ps(_mm512_srli_epi32(phases, 8));
        __m512 without = _mm512_fnmadd_ps(share, _mm512_set1_ps(0x1p-24f), one);
        $below_of_avx512
        __m512 code = _mm512_mask_add_ps(below, _mm512_cmp_ps_mask(rest, without, _CMP_GE_OQ), below, one);
        code = _mm512_min_ps(code, _mm512_set1_ps($largest));
        return _mm512_maskz_cvtps_epi32(is_finite, $with_sign_of_avx512);
    };
    __m512i first = of_half($roots[0], $phases[0]), second = of_half($roots[1], $phases[1]);
    $codes_of_avx512
    return $packed_of_avx512;
#elif defined(CPU_CAPABILITY_AVX2)
    uint32_t byte = $byte;
    __m256 factor = _mm256_set1_ps($factor), one = _mm256_set1_ps(1.0f), sign = _mm256_set1_ps(-0.0f);
    __m256i is_finite = _mm256_set1_epi32(byte == 255 ? 0 : -1);
    auto of_half = [&](__m256 root, __m256i phases) {
        __m256 size = _mm256_mul_ps(_mm256_andnot_ps(sign, root), factor);
        __m256 share = _mm256_cvtepi32_ps(_mm256_srli_epi32(phases, 8));
        __m256 without = _mm256_sub_ps(one, _mm256_mul_ps(share, _mm256_set1_ps(0x1p-24f)));
        $below_of_avx2
        __m256 code = _mm256_add_ps(below, _mm256_and_ps(_mm256_cmp_ps(rest, without, _CMP_GE_OQ), one));
        code = _mm256_min_ps(code, _mm256_set1_ps($largest));
        return _mm256_and_si256(is_finite, _mm256_cvtps_epi32($with_sign_of_avx2));
    };
    __m256i first = of_half($roots[0], $phases[0]), second = of_half($roots[1], $phases[1]);
    return $result($packed_of_avx2);
#else"""

_VALUES = """
[&] {
$by_instruction
    __at_align__ $stored stored[$n];
    __at_align__ float numbers[$n];
    $bytes
    $codes.store(stored, $n);
    for (int i = 0; i < $n; ++i)
        numbers[i] = $of_codes(stored[i], $byte_of_each);
    return $result::loadu(numbers, $n);
$end_of_instructions
}()
"""

#: What is stored of 8 bits is half of an AVX-512 vector. A masked store, which is ATen's, would hold up the
#: load of the next half.
_CODES = """
[&] {
$by_instruction
    __at_align__ float roots[$n];
    __at_align__ int32_t phases[$n];
    __at_align__ $stored codes[$n];
    $bytes
    $roots.store(roots, $n);
    $phases.store(phases, $n);
    for (int i = 0; i < $n; ++i)
        codes[i] = $of_roots(roots[i], $byte_of_each, phases[i]);
    return $result::loadu(codes, $n);
$end_of_instructions
}()
"""
