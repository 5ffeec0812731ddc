"""C++ that adds up the measurements of a step: Note [Metrics] in ``numerics/update_sums.py``.

Note [Sums in lanes]
--------------------
The loop of a chunk leaves each value that measures an element in a buffer; then the buffers are added up in
16 lanes. A lane adds its 8 products in float32: each addition rounds once, by at most u = 2**-24 of the sum
so far, or by 2**-126 if that is subnormal (which is zero to some processes), and so does each product where
the processor does not multiply and add at once. From chunk to chunk lanes are float64. So a chunk's sum of
squares, which only grows, is off by at most 9 u of itself, and by 2**-126 for each element. Where the
latter might be more than u of it (second moments of small gradients), or the sum leaves float32's range,
the chunk is added in float64, in which the products are exact. A cross product is off by at most as much of
the root of the product of its two squares.
"""

from __future__ import annotations

from collections.abc import Iterable
from string import Template

from collage_fx.graph import Sums
from collage_fx.numerics import SUMS
from collage_fx.numerics import update_sums as measures

LANES = 16

_CLASS = Template("""struct SumsOf$values {
  double products[$products][$lanes] = {};
  int32_t counts[$counts][$lanes] = {};

  void add($parameters, int count) {
    if (count < $chunk || !add_whole($arguments)) add_exactly($arguments, count);
  }

  // Add a whole chunk, if float32 holds the sums of its squares.
  bool add_whole($parameters) {
    alignas(64) float sums[$products][$lanes];
    uint32_t is_doubtful = 0;
#pragma omp simd reduction(| : is_doubtful)
    for (int lane = 0; lane < $lanes; ++lane) {
      $sum_products
      $test_squares
    }
    if (__builtin_expect(is_doubtful, 0) && !($are_good)) return false;
#pragma omp simd
    for (int lane = 0; lane < $lanes; ++lane) {
      $add_products
    }
    for (int begin = 0; begin < $chunk; begin += $lanes) {
#pragma omp simd
      for (int lane = 0; lane < $lanes; ++lane) {
        const int i = begin + lane;
        $add_counts
      }
    }
    return true;
  }

  // Whether a chunk's sum of squares is as exact as float32 can be.
  static bool is_good(const float* lanes, const float* values) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int lane = 0; lane < $lanes; ++lane) sum += lanes[lane];
    if (sum >= $chunk * 0x1p-102f && sum < 0x1p127f) return true;
    uint32_t any = 0;
#pragma omp simd reduction(| : any)
    for (int i = 0; i < $chunk; ++i) any |= magnitude(values[i]);
    return any == 0;
  }

  void add_exactly($parameters, int count) {
    for (int i = 0; i < count; ++i) {
      $add_exact
    }
  }

  void write(double* row) const {
    for (int lane = 0; lane < $lanes; ++lane) {
      $write
    }
  }
};
""")


def sums_class(sums: Sums, chunk: int) -> str:
    """Write the C++ class that adds up the values that measure elements: ``add``, ``write`` into a row.

    Args:
        sums: the sums.
        chunk: elements of a full chunk.
    """
    values, products, counts = sums
    truths = {
        name: " & ".join(f"(v{i}[i] {'==' if is_zero else '!='} 0)" for i, is_zero in zero.items())
        for name, zero in counts.items()
    }
    squares = {i: k for k, (i, j) in enumerate(products.values()) if i == j}
    order = [*products, *counts]
    least = f"{chunk // LANES} * 0x1p-102f"
    written = []
    for column, name in enumerate(SUMS):
        same = name if name in order else measures.WITHOUT_LO[name]
        if same is None:
            continue
        if same in products:
            written.append(f"row[{column}] += products[{order.index(same)}][lane];")
        else:
            written.append(f"row[{column}] += counts[{order.index(same) - len(products)}][lane];")
    return _CLASS.substitute(
        values=values,
        products=len(products),
        counts=len(counts),
        lanes=LANES,
        chunk=chunk,
        parameters=", ".join(f"const float* v{i}" for i in range(values)),
        arguments=", ".join(f"v{i}" for i in range(values)),
        sum_products=_lines(
            (
                f"sums[{k}][lane] = products_of<{chunk // LANES}>(v{i} + lane, v{j} + lane);"
                for k, (i, j) in enumerate(products.values())
            ),
            6,
        ),
        test_squares=_lines(
            (
                f"is_doubtful |= !(sums[{k}][lane] >= {least} && sums[{k}][lane] < 0x1p123f);"
                for k in squares.values()
            ),
            6,
        ),
        are_good=" && ".join(f"is_good(sums[{k}], v{i})" for i, k in squares.items()),
        add_counts=_lines((f"counts[{k}][lane] += {truth};" for k, truth in enumerate(truths.values())), 8),
        add_products=_lines((f"products[{k}][lane] += sums[{k}][lane];" for k, _ in enumerate(products)), 6),
        add_exact=_lines(
            (
                *(
                    f"products[{k}][i % {LANES}] += double(v{i}[i]) * v{j}[i];"
                    for k, (i, j) in enumerate(products.values())
                ),
                *(f"counts[{k}][i % {LANES}] += {truth};" for k, truth in enumerate(truths.values())),
            ),
            6,
        ),
        write=_lines(written, 6),
    )


def _lines(lines: Iterable[str], indent: int) -> str:
    return f"\n{' ' * indent}".join(lines)
