"""C++ that adds up what a step is measured by: Note [Metrics] in ``numerics/update_sums.py``.

Note [Sums of a chunk]
----------------------
The loop of a chunk leaves each value that measures an element in a buffer; then the buffers are added up.
Products are added in float32, in 16 lanes of 16, then the lanes; sums of chunks are added in float64. A product
goes through at most 32 additions, each of which rounds once, by at most u = 2**-24 of the sum so far, or by
2**-126 if that is subnormal (which is zero to some processes); it is rounded itself where the processor does not
multiply and add at once. So a chunk's sum of squares, which only grows, is off by at most 33 u of itself, and by
2**-126 for each element. Where the latter might be more than u of it (second moments of small gradients), or the
sum leaves float32's range, the chunk is added once more in float64, in which the products are exact. A cross
product is off by at most as much of the root of the product of its two squares.
"""

from __future__ import annotations

from collage_fx.numerics import SUMS
from collage_fx.numerics import update_sums as measures

__all__ = ["sums_function"]


def sums_function(values: int, chunk: int) -> str:
    """Write the C++ function that adds to a row of sums what a chunk's values contribute.

    Args:
        values: how many measure an element: 4, or 2 without error terms.
        chunk: elements of a full chunk.
    """
    products = {name: pair for name, pair in measures.PRODUCTS.items() if max(pair) < values}
    counts = {name: zero for name, zero in measures.COUNTS.items() if max(zero) < values}
    truths = {
        name: " & ".join(f"(v{i}[i] {'==' if is_zero else '!='} 0)" for i, is_zero in zero.items())
        for name, zero in counts.items()
    }
    squares = [name for name, (i, j) in products.items() if i == j]
    parameters = ", ".join(f"const float* v{i}" for i in range(values))
    lines = [f"inline void add_sums{values}(double* sums, {parameters}, int count) {{"]
    names = ", ".join(products)
    lines += [f"  double {', '.join(f'{name} = 0' for name in products)};"]
    lines += [f"  int32_t {', '.join(f'{name} = 0' for name in counts)};"]
    lines += [f"  bool is_good = count == {chunk};", "  if (is_good) {"]
    lines += [f"    float {', '.join(f'{name}_in = 0' for name in products)};"]
    lines += [f"#pragma omp simd reduction(+ : {', '.join(f'{name}_in' for name in products)})"]
    lines += ["    for (int lane = 0; lane < 16; ++lane) {"]
    lines += [
        f"      {name}_in += products<{chunk // 16}>(v{i} + lane, v{j} + lane);"
        for name, (i, j) in products.items()
    ]
    lines += ["    }", *(f"    {name} = {name}_in;" for name in products)]
    good = " && ".join(f"{name} >= {chunk} * 0x1p-102 && {name} < 0x1p127" for name in squares)
    lines += [f"    is_good = {good};", "  }"]
    reduced = "#pragma omp simd reduction(+ : {})"
    lines += ["  if (!is_good) {", *(f"    {name} = 0;" for name in products)]
    lines += [reduced.format(names), "    for (int i = 0; i < count; ++i) {"]
    lines += [f"      {name} += double(v{i}[i]) * v{j}[i];" for name, (i, j) in products.items()]
    lines += ["    }", "  }", reduced.format(", ".join(counts)), "  for (int i = 0; i < count; ++i) {"]
    lines += [f"    {name} += {truth};" for name, truth in truths.items()]
    lines += ["  }"]
    for k, name in enumerate(SUMS):
        same = name if name in (*products, *counts) else measures.WITHOUT_LO[name]
        if same is not None:
            lines.append(f"  sums[{k}] += {same};")
    return "\n".join([*lines, "}\n"])
