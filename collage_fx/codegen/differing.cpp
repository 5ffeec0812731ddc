// Elements of 2 bytes that differ between two vectors in host memory; whole_values.py calls these functions.
#include <cstdint>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

// A word whose bits tell which of 32 numbers differ.
inline uint32_t differing(const uint16_t* x, const uint16_t* y) {
#if defined(__AVX512BW__)
  return _mm512_cmpneq_epi16_mask(_mm512_loadu_si512(x), _mm512_loadu_si512(y));
#elif defined(__AVX2__)
  const auto* a = reinterpret_cast<const __m256i*>(x);
  const auto* b = reinterpret_cast<const __m256i*>(y);
  const __m256i low = _mm256_cmpeq_epi16(_mm256_loadu_si256(a), _mm256_loadu_si256(b));
  const __m256i high = _mm256_cmpeq_epi16(_mm256_loadu_si256(a + 1), _mm256_loadu_si256(b + 1));
  // Packing works within halves of a vector: 0xD8 puts the quarters into their order.
  return ~uint32_t(_mm256_movemask_epi8(_mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xD8)));
#else
  uint32_t word = 0;
#pragma omp simd reduction(| : word)
  for (int j = 0; j < 32; ++j) word |= uint32_t(x[j] != y[j]) << j;
  return word;
#endif
}

template <class Index>
void take(
    const uint32_t* words, int64_t n, int64_t chunk, const int64_t* ends, const uint16_t* values, Index* indices,
    uint16_t* taken, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t start = 0; start < n; start += chunk) {
    int64_t next = start ? ends[start / chunk - 1] : 0;
    for (int64_t at = start; at < start + chunk && at < n; at += 32) {
      for (uint32_t word = words[at / 32]; word; word &= word - 1) {
        const int64_t element = at + __builtin_ctz(word);
        indices[next] = Index(element);
        taken[next++] = values[element];
      }
    }
  }
}

}  // namespace

// Write a bit for each of n elements: whether x and y differ there; and the number of such in each chunk of
// elements, a multiple of 32.
extern "C" void compare(
    const uint16_t* x, const uint16_t* y, int64_t n, int64_t chunk, uint32_t* words, int64_t* counts, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t start = 0; start < n; start += chunk) {
    int64_t count = 0;
    for (int64_t at = start; at < start + chunk && at < n; at += 32) {
      uint32_t word = 0;
      if (at + 32 <= n) {
        word = differing(x + at, y + at);
      } else {
        for (int64_t j = at; j < n; ++j) word |= uint32_t(x[j] != y[j]) << (j - at);
      }
      words[at / 32] = word;
      count += __builtin_popcount(word);
    }
    counts[start / chunk] = count;
  }
}

// The indices of the set bits, of 4 or 8 bytes each, and the values of these elements. Chunk k has the results
// before ends[k].
extern "C" void take_elements(
    const uint32_t* words, int64_t n, int64_t chunk, const int64_t* ends, const uint16_t* values, void* indices,
    int64_t bytes_of_an_index, uint16_t* taken, int threads) {
  if (bytes_of_an_index == 4) {
    take(words, n, chunk, ends, values, static_cast<int32_t*>(indices), taken, threads);
  } else {
    take(words, n, chunk, ends, values, static_cast<int64_t*>(indices), taken, threads);
  }
}
