"""The C++ that adds up what a step is measured by.

Note [Sums in blocks]
---------------------
An Inductor loop of eleven sums, six of them of float64 products, takes four times as long as the AdamW step
that it measures: it handles half as many elements at a time as without sums, and converts and adds each
product in float64. So the sums of one tensor are one C++ object here, which gets a vector of each value at a
time. It adds their products in float32, lane by lane, by fused multiplications and additions that stay in
registers, and carries the lanes over into float64 after :data:`BLOCK` of them.

Each of those rounds once, by at most 2**-24 of the lane's sum so far, or by 2**-150 if that is subnormal. For
squares, which only grow, a block is off by at most ``BLOCK * 2**-24`` of itself, and by 2**-150 for each
element. The latter matters to tensors whose values are below 2**-63 throughout, as second moments of small
gradients are. A block is therefore added in float32 only if every sum of squares has come to 2**-126 for each
element, those of the block included: then all that has been lost so is at most 2**-24 of the sum. Otherwise,
and so in the first block of all, products are added in float64, where they are exact. A cross product is off
by at most as much of the root of the two squares' product.

Blocks are added in float64 as well after sums have come near the other end of float32's range. A block that
leaves it all at once, by a value above 2**61 where none was above 2**50 before, makes its sums infinite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["BLOCK", "Sums"]

#: Vectors that are added in float32 before the lanes are carried over.
BLOCK = 32


@dataclass(frozen=True)
class Sums:
    """Sums over float32 values of which each element has several.

    Attributes:
        values: how many.
        products: by name, the two values that are multiplied; all squares of values are among them.
        counts: by name, which values have to be zero (True) and which must not be (False).
    """

    name: str
    values: int
    products: Mapping[str, tuple[int, int]]
    counts: Mapping[str, Mapping[int, bool]]

    def number(self, sum_name: str) -> int:
        return [*self.products, *self.counts].index(sum_name)

    def definition(self) -> str:
        """Of the class: it can stand within a function."""
        p, c, v = range(len(self.products)), range(len(self.counts)), range(self.values)
        squares = [k for k, (i, j) in enumerate(self.products.values()) if i == j]
        vectors = ", ".join(f"Vector v{i}" for i in v)
        names = ", ".join(f"v{i}" for i in v)
        lines = [
            f"struct {self.name} {{",
            f"    double products[{len(p)}] = {{}}, counts[{len(c)}] = {{}};",
            f"    void one({', '.join(f'double v{i}' for i in v)}) {{",
            *(f"        products[{k}] += v{i} * v{j};" for k, (i, j) in enumerate(self.products.values())),
            *(f"        counts[{k}] += {_truth(which)};" for k, which in enumerate(self.counts.values())),
            "    }",
            f"    {self.name}& join(const {self.name}& other) {{",
            f"        for (int k = 0; k < {len(p)}; k++) products[k] += other.products[k];",
            f"        for (int k = 0; k < {len(c)}; k++) counts[k] += other.counts[k];",
            "        return *this;",
            "    }",
            "    double sum(int k) const {",
            f"        return k < {len(p)} ? products[k] : counts[k - {len(p)}];",
            "    }",
            "#if INDUCTOR_USE_VECTOR_TYPES()",
            "    using Vector = at::vec::Vectorized<float>;",
            "    using Wide = at::vec::VectorizedN<double, 2>;",
            "    static Wide wide(const Vector& x) { return at::vec::convert<double, 2, float, 1>(x); }",
            "    static double total(const Wide& x) {",
            "#if defined(CPU_CAPABILITY_AVX512)",
            "        return _mm512_reduce_add_pd(_mm512_add_pd(x[0], x[1]));",
            "#else",
            "        using Double = at::vec::Vectorized<double>;",
            "        return at::vec::vec_reduce_all<double, 2>([](Double& x, Double& y) { return x + y; }, x);",
            "#endif",
            "    }",
            f"    Wide {', '.join(f'p{k}{{0.0}}' for k in p)}{''.join(f', c{k}{{0.0}}' for k in c)};",
            "    int64_t vectors = 0;",
            "    struct Block {",
            "        Vector " + ", ".join(f"p{k} = Vector(0.0f)" for k in p) + ";",
            "#if defined(CPU_CAPABILITY_AVX512)",
            "        __m512i " + ", ".join(f"c{k} = _mm512_setzero_si512()" for k in c) + ";",
            "#else",
            "        Vector " + ", ".join(f"c{k} = Vector(0.0f)" for k in c) + ";",
            "#endif",
            f"        int left = {BLOCK};",
            "        bool in_double = true;",
            "    };",
            f"    C10_ALWAYS_INLINE void add(Block& block, {vectors}) {{",
            f"        if (C10_UNLIKELY(block.in_double)) add_in_double({names});",
            *(
                f"        block.p{k} = at::vec::fmadd(v{i}, v{j}, block.p{k});"
                for k, (i, j) in enumerate(self.products.values())
            ),
            "#if defined(CPU_CAPABILITY_AVX512)",
            "        const __m512i one = _mm512_set1_epi32(-1);",
            *_masks(self),
            *(
                f"        block.c{k} = _mm512_mask_sub_epi32(block.c{k}, {_mask(which)}, block.c{k}, one);"
                for k, which in enumerate(self.counts.values())
            ),
            "#else",
            *(
                f"        block.c{k} = block.c{k} + ({_vector_truth(which)} & Vector(1.0f));"
                for k, which in enumerate(self.counts.values())
            ),
            "#endif",
            "        if (C10_UNLIKELY(--block.left == 0)) carry(block);",
            "    }",
            f"    C10_NOINLINE void add_in_double({vectors}) {{",
            f"        const Wide {', '.join(f'w{i} = wide(v{i})' for i in v)};",
            *(f"        p{k} = p{k} + w{i} * w{j};" for k, (i, j) in enumerate(self.products.values())),
            "    }",
            f"    void some(int64_t count, {vectors}) {{",
            f"        __at_align__ float x[{self.values}][Vector::size()];",
            *(f"        v{i}.store(x[{i}]);" for i in v),
            "        for (int64_t i = 0; i < count && i < Vector::size(); i++) "
            f"one({', '.join(f'x[{i}][i]' for i in v)});",
            "    }",
            "    C10_ALWAYS_INLINE void carry(Block& block) {",
            "        if (!block.in_double) {",
            *(f"            p{k} = p{k} + wide(block.p{k});" for k in p),
            "        }",
            "#if !defined(CPU_CAPABILITY_AVX512)",
            *(f"        c{k} = c{k} + wide(block.c{k});\n        block.c{k} = Vector(0.0f);" for k in c),
            "#endif",
            f"        vectors += {BLOCK} - block.left;",
            f"        const double least = (vectors + {BLOCK}) * (Vector::size() * 0x1p-126);",
            "        block.in_double = false;",
            "        for (double square : {" + ", ".join(f"total(p{k})" for k in squares) + "})",
            "            block.in_double |= !(square >= least && square < 0x1p100);",
            *(f"        block.p{k} = Vector(0.0f);" for k in p),
            f"        block.left = {BLOCK};",
            "    }",
            "    void close(Block& block) {",
            "        carry(block);",
            *(f"        products[{k}] += total(p{k});" for k in p),
            "#if defined(CPU_CAPABILITY_AVX512)",
            *(f"        counts[{k}] += _mm512_reduce_add_epi32(block.c{k});" for k in c),
            "#else",
            *(f"        counts[{k}] += total(c{k});" for k in c),
            "#endif",
            "    }",
            "#else",
            "    struct Block {};",
            "    void close(Block&) {}",
            "#endif",
            "};",
        ]
        return "\n".join(lines)


def _truth(which: Mapping[int, bool]) -> str:
    return " && ".join(f"v{i} {'==' if is_zero else '!='} 0" for i, is_zero in which.items())


def _vector_truth(which: Mapping[int, bool]) -> str:
    return " & ".join(f"(v{i} {'==' if is_zero else '!='} Vector(0.0f))" for i, is_zero in which.items())


def _masks(sums: Sums) -> list[str]:
    tested = dict.fromkeys((i, is_zero) for which in sums.counts.values() for i, is_zero in which.items())
    return [
        f"        const __mmask16 {_test(i, is_zero)} = "
        f"_mm512_cmp_ps_mask(v{i}, _mm512_setzero_ps(), {'_CMP_EQ_OQ' if is_zero else '_CMP_NEQ_UQ'});"
        for i, is_zero in tested
    ]


def _test(i: int, is_zero: bool) -> str:
    return f"{'is_zero' if is_zero else 'is_not_zero'}_{i}"


def _mask(which: Mapping[int, bool]) -> str:
    return " & ".join(_test(i, is_zero) for i, is_zero in which.items())
