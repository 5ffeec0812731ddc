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

template <size_t... I>
void call(void* function, const Word* a, std::index_sequence<I...>) {
  reinterpret_cast<void (*)(decltype(Word(I))...)>(function)(a[I]...);
}

template <size_t... N>
Caller caller(size_t arguments, std::index_sequence<N...>) {
  static const Caller callers[] = {
      [](void* function, const Word* a) { call(function, a, std::make_index_sequence<N>()); }...};
  return callers[arguments];
}

constexpr size_t most = MOST_ARGUMENTS;

bool is_added(Word kind) {
  return kind == TOTAL || kind == MEAN;
}

// The address at a place, or none: see ``fill``.
Word address_at(Word place, const Word* addresses, Word scratch) {
  if (place == NO_PLACE) return 0;
  return place < 0 ? scratch + CELL * (-2 - place) : addresses[place];
}

// Of a row: no two threads write to neighbouring ones.
struct alignas(128) Sum {
  double value;
};

}  // namespace

// The addresses of the tensors at these places of a list. Returns their number, up to a tensor without memory.
extern "C" Word gather(
    PyObject* values, Word count, const Word* places, void* (*address_of)(PyObject*), void** addresses) {
  Word i = 0;
  try {
    for (; i < count; ++i) addresses[i] = address_of(PyList_GET_ITEM(values, places[i]));
  } catch (...) {  // of torch: a sparse tensor has no memory of its own
  }
  return i;
}

// Some elements of each of the tensors at these addresses, of 16 bits each and with so many elements.
extern "C" void peek(Word count, const Word* addresses, const Word* lengths, int16_t* elements) {
  for (Word i = 0; i < count; ++i) {
    for (Word k = 0; k < PEEKED; ++k) {
      elements[PEEKED * i + k] = reinterpret_cast<const int16_t*>(addresses[i])[lengths[i] * k / PEEKED];
    }
  }
}

// Words of a device's table, each made of an offset and the address at a place, or of the number at that
// address. Returns whether any of them has changed.
extern "C" Word fill(
    Word count, const Word* places, const Word* sizes, const Word* offsets, Word* words,
    const Word* addresses, Word scratch) {
  Word changed = 0;
  for (Word i = 0; i < count; ++i) {
    const Word address = address_at(places[i], addresses, scratch);
    Word word = address + offsets[i];
    if (sizes[i]) {
      word = 0;
      std::memcpy(&word, reinterpret_cast<const void*>(address), sizes[i]);
    }
    changed |= words[i] ^ word;
    words[i] = word;
  }
  return changed != 0;
}

// Of each row of a device's table whether it is launched, 0 = no, and if so by which kernel: 1 = that for
// addresses of elements which are multiples of ``bytes``, 2 = that for others. The addresses of elements are in
// ``columns``. A row is launched if its member is negative, if present is null, or if the member's byte in it is
// not zero. Returns whether any kind has changed.
extern "C" Word classify(
    Word rows, Word width, Word count, const Word* columns, Word bytes, const Word* words, const Word* members,
    char* kinds, const char* present) {
  char changed = 0;
  for (Word row = 0; row < rows; ++row, words += width) {
    Word bits = 0;
    for (Word j = 0; j < count; ++j) bits |= words[columns[j]] % bytes;
    const char kind = members[row] >= 0 && present && !present[members[row]] ? 0 : bits ? 2 : 1;
    changed |= kinds[row] ^ kind;
    kinds[row] = kind;
  }
  return changed != 0;
}

// A call for each row, whose words are the arguments: offsets and the addresses at places, as in ``fill``. The
// row's call is made if its member is negative, if present is null, or if the member's byte in it is not zero.
// Where kinds[j] is that of a sum, the address is that of the sum over all rows of a call.
extern "C" void run(
    void* function, Word columns, const Word* kinds, Word jobs, const Word* first_row, const Word* places,
    const Word* offsets, const Word* elements, const Word* members,
    const Word* addresses, Word scratch, Word threads, const char* present) {
  const Caller invoke = caller(columns, std::make_index_sequence<most + 1>());
  const size_t added = std::count_if(kinds, kinds + columns, is_added);
  std::vector<Sum> sums(added * first_row[jobs]);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (Word job = 0; job < jobs; ++job) {
    for (Word row = first_row[job]; row < first_row[job + 1]; ++row) {
      if (members[row] >= 0 && present && !present[members[row]]) continue;
      Word a[most + 1];
      Sum* sum_of_row = sums.data() + added * row;
      for (Word j = 0, i = row * columns; j < columns; ++j, ++i) {
        a[j] = is_added(kinds[j]) ? reinterpret_cast<Word>(&(sum_of_row++)->value)
                                  : address_at(places[i], addresses, scratch) + offsets[i];
      }
      invoke(function, a);
    }
  }
  // Rows of a call stand one after the other: those whose sums have the same destination.
  for (Word j = 0, number = 0; j < columns; ++j) {
    if (!is_added(kinds[j])) continue;
    for (Word row = 0; row < first_row[jobs];) {
      const Word place = places[row * columns + j];
      double total = 0;
      Word length = 0;
      for (; row < first_row[jobs] && places[row * columns + j] == place; ++row) {
        total += sums[added * row + number].value;
        length += elements[row];
      }
      void* result = reinterpret_cast<void*>(address_at(place, addresses, scratch));
      const float sum = static_cast<float>(kinds[j] == MEAN ? total / length : total);
      std::memcpy(result, &sum, sizeof sum);
    }
    ++number;
  }
}
