// Functions of bitmaps in host memory; bitmaps.py calls them.
#include <cstdint>

// Number of bits that are set in each chunk of words.
extern "C" void count_bits(const uint32_t* words, int64_t n, int64_t chunk, int64_t* counts, int threads) {
  const int64_t chunks = (n + chunk - 1) / chunk;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t k = 0; k < chunks; ++k) {
    const int64_t end = (k + 1) * chunk < n ? (k + 1) * chunk : n;
    int64_t count = 0;
    for (int64_t i = k * chunk; i < end; ++i) count += __builtin_popcount(words[i]);
    counts[k] = count;
  }
}

namespace {

template <class Index>
void take(
    const uint32_t* words, int64_t n, int64_t chunk, const int64_t* ends, const uint16_t* values, Index* indices,
    uint16_t* taken, int threads) {
  const int64_t chunks = (n + chunk - 1) / chunk;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t k = 0; k < chunks; ++k) {
    const int64_t end = (k + 1) * chunk < n ? (k + 1) * chunk : n;
    int64_t next = k ? ends[k - 1] : 0;
    for (int64_t i = k * chunk; i < end; ++i) {
      for (uint32_t word = words[i]; word; word &= word - 1) {
        const int64_t element = 32 * i + __builtin_ctz(word);
        indices[next] = Index(element);
        taken[next++] = values[element];
      }
    }
  }
}

}  // namespace

// The indices of the set bits, of 4 or 8 bytes each, and the values of these elements, of 2 bytes each. Chunk k
// has the results before ends[k].
extern "C" void take_elements(
    const uint32_t* words, int64_t n, int64_t chunk, const int64_t* ends, const uint16_t* values, void* indices,
    int64_t bytes_of_an_index, uint16_t* taken, int threads) {
  if (bytes_of_an_index == 4) {
    take(words, n, chunk, ends, values, static_cast<int32_t*>(indices), taken, threads);
  } else {
    take(words, n, chunk, ends, values, static_cast<int64_t*>(indices), taken, threads);
  }
}
