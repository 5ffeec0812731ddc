// Passes over whole tensors in host memory, in the library of address_tables.cpp; whole_values.py calls them.

namespace {

// Elements whose words stay in the first cache.
constexpr Word BLOCK = 1024;

// Put the bits of n elements, with their sign, beside those in the words: words * PAIR + bits, modulo 2**32.
template <class Integer>
inline void pair(const void* tensor, Word first, Word n, bool is_first, uint32_t* words) {
  const Integer* bits = static_cast<const Integer*>(tensor) + first;
  if (is_first) {
#pragma omp simd
    for (Word j = 0; j < n; ++j) words[j] = uint32_t(int32_t(bits[j]));
  } else {
#pragma omp simd
    for (Word j = 0; j < n; ++j) words[j] = words[j] * PAIR + uint32_t(int32_t(bits[j]));
  }
}

template <class Number>
void join_as(const uint16_t* hi, const int16_t* rest, Word n, Number* values, Word threads) {
  constexpr uint32_t EXPONENT = 0x7F800000;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (Word first = 0; first < n; first += BLOCK) {
    const Word end = std::min(first + BLOCK, n);
#pragma omp simd
    for (Word j = first; j < end; ++j) {
      const uint32_t near = uint32_t(hi[j]) << 16, whole = near + uint32_t(int32_t(rest[j]));
      const bool is_finite = ((near & EXPONENT) != EXPONENT) & ((whole & EXPONENT) != EXPONENT);
      values[j] = bits<float>(is_finite ? whole : near);
    }
  }
}

}  // namespace

// Sum, modulo 2**64, of a hash of each element's bits in some tensors of n elements of 1, 2 or 4 bytes each.
extern "C" Word hash_sum(const void* const* tensors, const Word* bytes, Word count, Word n, Word threads) {
  Word total = 0;
#pragma omp parallel for reduction(+ : total) num_threads(threads) if (threads > 1)
  for (Word first = 0; first < n; first += BLOCK) {
    const Word length = std::min(BLOCK, n - first);
    uint32_t words[BLOCK];
    for (Word k = 0; k < count; ++k) {
      if (bytes[k] == 1) pair<int8_t>(tensors[k], first, length, k == 0, words);
      if (bytes[k] == 2) pair<int16_t>(tensors[k], first, length, k == 0, words);
      if (bytes[k] == 4) pair<int32_t>(tensors[k], first, length, k == 0, words);
    }
#pragma omp simd reduction(+ : total)
    for (Word j = 0; j < length; ++j) {
      const uint32_t word = words[j] * FIRST;
      total += int32_t((word ^ word >> 15) * SECOND);
    }
  }
  return total;
}

// The n numbers with the halves hi, bfloat16, and rest, as float32 or, of 8 bytes, as float64; hi alone where
// hi or the number is not finite.
extern "C" void join_halves(
    const uint16_t* hi, const int16_t* rest, Word n, void* values, Word bytes, Word threads) {
  if (bytes == 8) {
    join_as(hi, rest, n, static_cast<double*>(values), threads);
  } else {
    join_as(hi, rest, n, static_cast<float*>(values), threads);
  }
}

// Numbers of 16-bit codes, 32 in the order of memory with a scale's byte, as bfloat16: Note [Blocks].
extern "C" void decode_blocks(
    const int16_t* codes, const uint8_t* scales, Word blocks, uint16_t* values, Word threads) {
  constexpr Word LENGTH_OF_BLOCK = 32, MANY = BLOCK / LENGTH_OF_BLOCK;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (Word first = 0; first < blocks; first += MANY) {
    for (Word i = first; i < std::min(first + MANY, blocks); ++i) {
      const float scale = bits<float>((uint32_t(scales[i]) + FIRST_SCALE) << 22);
      const float unit = scale * (1.0f / 32767);
      const bool is_finite = scales[i] != 255;
      for (Word j = LENGTH_OF_BLOCK * i; j < LENGTH_OF_BLOCK * (i + 1); ++j) {
        const uint32_t number = bits<uint32_t>(float(codes[j]) * unit);
        values[j] = is_finite ? uint16_t((number + 0x7FFF + ((number >> 16) & 1)) >> 16) : uint16_t(0x7FC0);
      }
    }
  }
}
