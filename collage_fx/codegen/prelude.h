// What every printed kernel begins with: conversions between dtypes, and questions about magnitudes.
//
// Conversions to a low-precision float are exact: their argument is a number of that dtype, or NaN, which it is
// not where Finite is true.
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace {

template <class To, class From>
inline To bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof(To));
  return y;
}

inline float bf16_to_float(uint16_t x) { return bits<float>(uint32_t(x) << 16); }

template <bool Finite>
inline uint16_t float_to_bf16(float x) {
  const uint32_t b = bits<uint32_t>(x);
  return uint16_t((b | (Finite || x == x ? 0u : 0x400000u)) >> 16);
}

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

// The bits of |x|: larger for larger numbers, and largest for a NaN.
inline uint32_t magnitude(float x) { return bits<uint32_t>(x) & 0x7fffffffu; }

inline uint32_t larger(uint32_t x, uint32_t y) { return x > y ? x : y; }

// A processor by itself fetches ahead within a page of memory only.
template <class T>
inline void fetch(const T* from, int count) {
  for (int i = 0; i < count * int(sizeof(T)); i += 64) {
    __builtin_prefetch(reinterpret_cast<const char*>(from) + i);
  }
}

// x * y + sum, rounded once where the processor can.
inline float multiply_add(float x, float y, float sum) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return std::fma(x, y, sum);
#else
  return x * y + sum;
#endif
}

// The sum of the products of every 16th number.
template <int Count>
inline float products(const float* x, const float* y) {
  if constexpr (Count == 1) {
    return *x * *y;
  } else {
    return multiply_add(*x, *y, products<Count - 1>(x + 16, y + 16));
  }
}

template <class T> inline T maximum(T x, T y) { return x > y || x != x ? x : y; }
template <class T> inline T minimum(T x, T y) { return x < y || x != x ? x : y; }
template <class T> inline T clamp_min(T x, T least) { return x < least ? least : x; }
template <class T> inline T clamp_max(T x, T most) { return x > most ? most : x; }
template <class T> inline T sign(T x) { return T((x > 0) - (x < 0)); }
