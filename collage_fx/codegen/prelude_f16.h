// What kernels that read or write float16 begin with, behind prelude.h.
#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

inline float f16_to_float(uint16_t x) {
  const uint32_t size = x & 0x7fffu;
  const uint32_t normal = (size << 13) + (size < 0x7c00u ? 0x38000000u : 0x70000000u);
  const uint32_t b = size < 0x400u ? bits<uint32_t>(float(int32_t(size)) * 0x1p-24f) : normal;
  return bits<float>(b | uint32_t(x & 0x8000u) << 16);
}

inline uint16_t float_to_f16(float x) {
  const uint32_t b = bits<uint32_t>(x), size = b & 0x7fffffffu;
  const uint32_t subnormal = uint32_t(int32_t((size < 0x38800000u ? bits<float>(size) : 0.0f) * 0x1p24f));
  const uint32_t normal = size < 0x7f800000u ? (size - 0x38000000u) >> 13 : size > 0x7f800000u ? 0x7e00u : 0x7c00u;
  return uint16_t((size < 0x38800000u ? subnormal : normal) | (b >> 16 & 0x8000u));
}

// Compilers have no vectors of conversions from and to float16; processors do.
inline void read_f16(const uint16_t* from, float* to, int count) {
  int i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= count; i += 16) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
    _mm512_storeu_ps(to + i, _mm512_cvtph_ps(x));
  }
#elif defined(__F16C__)
  for (; i + 8 <= count; i += 8) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(x));
  }
#endif
  for (; i < count; ++i) to[i] = f16_to_float(from[i]);
}

inline void write_f16(uint16_t* to, const float* from, int count) {
  int i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= count; i += 16) {
    const __m256i x = _mm512_cvtps_ph(_mm512_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), x);
  }
#elif defined(__F16C__)
  for (; i + 8 <= count; i += 8) {
    const __m128i x = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), x);
  }
#endif
  for (; i < count; ++i) to[i] = float_to_f16(from[i]);
}

}  // namespace
