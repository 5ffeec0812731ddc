// Start of printed kernels and of the library: conversions between dtypes, and questions about magnitudes.
//
// Conversions to a low-precision float are exact: their argument is a number of that dtype, or NaN, which it is
// not where Finite is true.
//
// No header of the C++ library is included: <cmath> alone takes as long to compile as a kernel.
#include <stdint.h>

namespace {

constexpr float Infinity = __builtin_inff();
constexpr float NotANumber = __builtin_nanf("");

inline float absolute(float x) { return __builtin_fabsf(x); }
inline double absolute(double x) { return __builtin_fabs(x); }
inline float square_root(float x) { return __builtin_sqrtf(x); }
inline double square_root(double x) { return __builtin_sqrt(x); }

template <class To, class From>
inline To bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  __builtin_memcpy(&y, &x, sizeof(To));
  return y;
}

inline float bf16_to_float(uint16_t x) { return bits<float>(uint32_t(x) << 16); }

template <bool Finite>
inline uint16_t float_to_bf16(float x) {
  const uint32_t b = bits<uint32_t>(x);
  return uint16_t((b | (Finite || x == x ? 0u : 0x400000u)) >> 16);
}

// The bits of |x|: larger for larger numbers, and largest for a NaN.
inline uint32_t magnitude(float x) { return bits<uint32_t>(absolute(x)); }

inline uint32_t larger(uint32_t x, uint32_t y) { return x > y ? x : y; }

// The largest of each Width numbers in turn: halves are compared, then pairs, in vectors over all blocks.
template <int Width, int Blocks>
inline void largest_of_blocks(const uint32_t* x, uint32_t* largest, int blocks) {
  constexpr int Half = Width / 2;
  alignas(64) uint32_t left[Blocks * Half];
  if constexpr (Half >= 16) {
    for (int block = 0; block < blocks; ++block) {
#pragma omp simd
      for (int i = 0; i < Half; ++i) {
        left[Half * block + i] = larger(x[Width * block + i], x[Width * block + Half + i]);
      }
    }
  } else {
#pragma omp simd
    for (int i = 0; i < Half * blocks; ++i) left[i] = larger(x[2 * i], x[2 * i + 1]);
  }
  if constexpr (Half > 1) {
    largest_of_blocks<Half, Blocks>(left, largest, blocks);
  } else {
    for (int i = 0; i < blocks; ++i) largest[i] = left[i];
  }
}

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
  return __builtin_fmaf(x, y, sum);
#else
  return x * y + sum;
#endif
}

// The sum of the products of every 16th number.
template <int Count>
inline float products_of(const float* x, const float* y) {
  if constexpr (Count == 1) {
    return *x * *y;
  } else {
    return multiply_add(*x, *y, products_of<Count - 1>(x + 16, y + 16));
  }
}

// Add every 16th number of a chunk to a sum of its own.
inline void add_up(double* lanes, const float* x, int count) {
  int begin = 0;
  for (; begin + 16 <= count; begin += 16) {
#pragma omp simd
    for (int lane = 0; lane < 16; ++lane) lanes[lane] += x[begin + lane];
  }
  for (; begin < count; ++begin) lanes[begin % 16] += x[begin];
}

inline double sum_of_lanes(const double* lanes) {
  double sum = 0;
  for (int lane = 0; lane < 16; ++lane) sum += lanes[lane];
  return sum;
}

template <class T> inline T maximum(T x, T y) { return x > y || x != x ? x : y; }
template <class T> inline T minimum(T x, T y) { return x < y || x != x ? x : y; }
template <class T> inline T clamp_min(T x, T least) { return x < least ? least : x; }
template <class T> inline T clamp_max(T x, T most) { return x > most ? most : x; }
template <class T> inline T sign(T x) { return T((x > 0) - (x < 0)); }

}  // namespace
