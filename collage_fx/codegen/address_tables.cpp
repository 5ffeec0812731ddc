// Functions over tables of addresses; address_tables.py defines the names in capitals.
#include <Python.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace {

using Word = int64_t;
using Caller = void (*)(void*, const Word*);

template <size_t>
using WordAt = Word;

template <size_t... I>
void call(void* function, const Word* a, std::index_sequence<I...>) {
  reinterpret_cast<void (*)(WordAt<I>...)>(function)(a[I]...);
}

template <size_t N>
void call_with(void* function, const Word* a) {
  call(function, a, std::make_index_sequence<N>());
}

template <size_t... N>
Caller caller(size_t arguments, std::index_sequence<N...>) {
  static const Caller callers[] = {call_with<N>...};
  return callers[arguments];
}

constexpr size_t most = MOST_ARGUMENTS;

bool is_added(Word kind) {
  return kind == SUMS_OF_PIECE || kind == TOTAL || kind == MEAN;
}

// Of a piece: no two threads write to neighbouring ones.
struct alignas(128) Sums {
  double each[SUMS];
};

}  // namespace

// The addresses of the tensors at these places of a list.
extern "C" void gather(
    PyObject* values, Word count, const Word* places, void* (*address_of)(PyObject*), void** addresses) {
  for (Word i = 0; i < count; ++i) addresses[i] = address_of(PyList_GET_ITEM(values, places[i]));
}

// Some elements of each of the tensors at these addresses, of 16 bits each and with so many elements.
extern "C" void peek(Word count, const Word* addresses, const Word* lengths, int16_t* elements) {
  for (Word i = 0; i < count; ++i) {
    for (Word k = 0; k < PEEKED; ++k) {
      elements[PEEKED * i + k] = reinterpret_cast<const int16_t*>(addresses[i])[lengths[i] * k / PEEKED];
    }
  }
}

// Words of a device's table, each made of the address at a place, of the number there, or of neither (-1);
// below are cells of scratch memory. Returns whether any of them has changed.
extern "C" Word fill(
    Word count, const Word* places, const Word* sizes, const Word* offsets,
    const Word* addresses, Word scratch, Word* words) {
  Word changed = 0;
  for (Word i = 0; i < count; ++i) {
    Word word = offsets[i];
    if (places[i] != -1) {
      const Word address = places[i] < 0 ? scratch + CELL * (-2 - places[i]) : addresses[places[i]];
      if (sizes[i]) {
        word = 0;
        std::memcpy(&word, reinterpret_cast<const void*>(address), sizes[i]);
      } else {
        word += address;
      }
    }
    changed |= words[i] ^ word;
    words[i] = word;
  }
  return changed != 0;
}

// Call i is made if its turn is negative, if present is null, or if the byte of its turn in it is not zero.
// Where kinds[j] is not negative, argument j is an address, and so many bytes for each element before the
// piece. which[i * arguments + j] says which address that is for call i: a number in the table, or, negative,
// ~ the number of a cell of scratch memory.
extern "C" void run(
    void* function, Word width, Word arguments, const Word* kinds, const Word* which, Word jobs,
    const Word* first_piece, const Word* calls, const Word* offsets, const Word* lengths, const Word* turns,
    const Word* addresses, Word scratch, Word threads, const char* present) {
  const Caller invoke = caller(arguments, std::make_index_sequence<most + 1>());
  const size_t vectors = std::count_if(kinds, kinds + arguments, is_added);
  std::vector<Sums> sums(vectors * first_piece[jobs]);
  const auto address_of = [&](Word value) { return value < 0 ? scratch + CELL * ~value : addresses[value]; };
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (Word job = 0; job < jobs; ++job) {
    for (Word piece = first_piece[job]; piece < first_piece[job + 1]; ++piece) {
      const Word turn = turns[calls[piece]];
      if (turn >= 0 && present && !present[turn]) continue;
      Word a[most + 1];
      const int32_t first = static_cast<int32_t>(width * offsets[piece]);
      Sums* sums_of_piece = sums.data() + vectors * piece;
      const Word* of_call = which + calls[piece] * arguments;
      for (Word j = 0; j < arguments; ++j) {
        if (kinds[j] == LENGTH) {
          a[j] = lengths[piece];
        } else if (is_added(kinds[j])) {
          a[j] = reinterpret_cast<Word>((sums_of_piece++)->each);
        } else if (kinds[j] == FIRST_OF_PIECE) {
          a[j] = reinterpret_cast<Word>(&first);
        } else {
          a[j] = address_of(of_call[j]) + kinds[j] * offsets[piece];
        }
      }
      invoke(function, a);
    }
  }
  if (!vectors) return;
  // Pieces of a call stand one after the other.
  for (Word begin = 0, end = 0; begin < first_piece[jobs]; begin = end) {
    Word length = 0;
    for (; end < first_piece[jobs] && calls[end] == calls[begin]; ++end) length += width * lengths[end];
    const Sums* of_first = sums.data() + vectors * begin;
    for (Word j = 0; j < arguments; ++j) {
      if (!is_added(kinds[j])) continue;
      Sums total{};
      for (Word piece = 0; piece < end - begin; ++piece) {
        for (size_t k = 0; k < SUMS; ++k) total.each[k] += of_first[vectors * piece].each[k];
      }
      ++of_first;
      void* result = reinterpret_cast<void*>(address_of(which[calls[begin] * arguments + j]));
      if (kinds[j] == SUMS_OF_PIECE) {
        std::memcpy(result, total.each, sizeof total.each);
      } else {
        const float sum = static_cast<float>(kinds[j] == MEAN ? total.each[0] / length : total.each[0]);
        std::memcpy(result, &sum, sizeof sum);
      }
    }
  }
}
