// What kernels that note changed elements begin with, too: a bitmap of the elements that a step has changed.
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

// A word whose bits tell which of 32 numbers differ.
inline uint32_t differing(const uint16_t* before, const uint16_t* after) {
#if defined(__AVX512BW__)
  return _mm512_cmpneq_epi16_mask(_mm512_loadu_si512(before), _mm512_loadu_si512(after));
#elif defined(__AVX2__)
  const auto* x = reinterpret_cast<const __m256i*>(before);
  const auto* y = reinterpret_cast<const __m256i*>(after);
  const __m256i low = _mm256_cmpeq_epi16(_mm256_loadu_si256(x), _mm256_loadu_si256(y));
  const __m256i high = _mm256_cmpeq_epi16(_mm256_loadu_si256(x + 1), _mm256_loadu_si256(y + 1));
  // Packing works within halves of a vector: 0xD8 puts the quarters into their order.
  const __m256i equal = _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xD8);
  return ~uint32_t(_mm256_movemask_epi8(equal));
#else
  uint32_t word = 0;
#pragma omp simd reduction(| : word)
  for (int j = 0; j < 32; ++j) word |= uint32_t(before[j] != after[j]) << j;
  return word;
#endif
}

// Set the bits of the elements that differ, of which the first has the index ``at``.
inline void set_bits(int32_t* words, int64_t at, const uint16_t* before, const uint16_t* after, int count) {
  int j = 0;
  if (at % 32 == 0) {
    for (; j + 32 <= count; j += 32) words[(at + j) / 32] |= int32_t(differing(before + j, after + j));
  }
  for (; j < count; ++j) {
    words[(at + j) / 32] |= int32_t(uint32_t(before[j] != after[j]) << (at + j) % 32);
  }
}

}  // namespace
