"""The C++ that adds up what a step is measured by.

Note [Sums in blocks]
---------------------
As eleven reductions of Inductor's, six of them of float64 products, the sums of a tensor take four times as
long as the AdamW step that they measure: such a loop handles half as many elements at a time as one without
sums, and converts and adds each product in float64. So the sums of one tensor are one C++ object here. The
loop only leaves a vector of each value with it; when it has :data:`BLOCK` of them, it adds them up in a loop
of its own, which needs none of the step's registers and waits for none of its divisions.

Products are added there in float32, lane by lane, by fused multiplications and additions, and the lanes of a
block in float64. Each addition rounds once, by at most u = 2**-24 of the lane's sum so far, or by 2**-150 if
that is subnormal. A block's sum of squares, which only grows, is so off by at most ``BLOCK * u`` of itself,
and by 2**-150 for each element. Where the latter is more than u of it too (as in second moments of small
gradients), or the sum leaves float32's range, the block is added once more in float64, in which the products
are exact; a block of zeros is not. A cross product is off by at most as much of the root of the product of its
two squares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["BLOCK", "Sums"]

#: How many vectors of each value are added in float32, one after the other.
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
        """Where ``sum`` of the class has it."""
        return [*self.products, *self.counts].index(sum_name)

    def definition(self) -> str:
        """Of the class: it can stand within a function."""
        values, pairs, conditions = range(self.values), [*self.products.values()], [*self.counts.values()]
        p, c = range(len(pairs)), range(len(conditions))
        squares = {i: pairs.index((i, i)) for i in values}
        vectors = ", ".join(f"const Vector& v{i}" for i in values)
        lines = [
            f"struct {self.name} {{",
            f"    double products[{len(p)}] = {{}};",
            f"    int64_t counts[{len(c)}] = {{}};",
            f"    void one({', '.join(f'double v{i}' for i in values)}) {{",
            *(f"        products[{k}] += v{i} * v{j};" for k, (i, j) in enumerate(pairs)),
            *(f"        counts[{k}] += {_truth(which)};" for k, which in enumerate(conditions)),
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
            f"    __at_align__ float block[{BLOCK}][{len(values)}][Vector::size()];",
            "    int64_t filled = 0;",
            "    struct Lanes {",
            f"        Vector {', '.join(f'p{k} = Vector(0.0f)' for k in p)};",
            "#if defined(CPU_CAPABILITY_AVX512)",
            f"        __m512i {', '.join(f'c{k} = _mm512_setzero_si512()' for k in c)};",
            "#else",
            f"        Vector {', '.join(f'c{k} = Vector(0.0f)' for k in c)};",
            "#endif",
            "    };",
            "    C10_ALWAYS_INLINE void take(Lanes& lanes, int64_t n) const {",
            f"        const float* at = block[0][0] + n * {len(values)} * Vector::size();",
            *(f"        const Vector v{i} = Vector::loadu(at + {i} * Vector::size());" for i in values),
            *(f"        lanes.p{k} = at::vec::fmadd(v{i}, v{j}, lanes.p{k});" for k, (i, j) in enumerate(pairs)),
            "#if defined(CPU_CAPABILITY_AVX512)",
            *_masks(conditions),
            *(
                f"        lanes.c{k} = _mm512_mask_sub_epi32(lanes.c{k}, {_mask(which)}, lanes.c{k}, _mm512_set1_epi32(-1));"
                for k, which in enumerate(conditions)
            ),
            "#else",
            *(f"        lanes.c{k} = lanes.c{k} + ({_mask_of(which)} & Vector(1.0f));" for k, which in enumerate(conditions)),
            "#endif",
            "    }",
            "    C10_ALWAYS_INLINE void take_last(Lanes& lanes, int width) const {",
            "        if (C10_LIKELY(filled != 0))",
            "            for (int n = 0; n < width; n++) take(lanes, filled - width + n);",
            "    }",
            f"    C10_ALWAYS_INLINE void put(int n, {vectors}) {{",
            f"        float* next = block[0][0] + filled * {len(values)} * Vector::size();",
            *(f"        v{i}.store(next + (n * {len(values)} + {i}) * Vector::size());" for i in values),
            "    }",
            "    C10_ALWAYS_INLINE void go_on(Lanes& lanes, int width) {",
            "        filled += width;",
            f"        if (C10_UNLIKELY(filled == {BLOCK})) {{",
            "            close(lanes, width);",
            "            lanes = Lanes();",
            "        }",
            "    }",
            f"    void some(int64_t count, {vectors}) {{",
            f"        __at_align__ float x[{len(values)}][Vector::size()];",
            *(f"        v{i}.store(x[{i}]);" for i in values),
            "        for (int64_t i = 0; i < count && i < Vector::size(); i++)",
            f"            one({', '.join(f'x[{i}][i]' for i in values)});",
            "    }",
            "    C10_NOINLINE void close(Lanes lanes, int width) {",
            "        take_last(lanes, width);",
            *(f"        const double s{k} = total(lanes.p{k});" for k in p),
            *(f"        counts[{k}] += total(lanes.c{k});" for k in c),
            f"        if (C10_LIKELY({' && '.join(f'is_good(s{k}, {i})' for i, k in squares.items())})) {{",
            *(f"            products[{k}] += s{k};" for k in p),
            "        } else {",
            "            for (int n = 0; n < filled; n++)",
            "                for (int i = 0; i < Vector::size(); i++) {",
            *(
                f"                    products[{k}] += (double)block[n][{i}][i] * (double)block[n][{j}][i];"
                for k, (i, j) in enumerate(pairs)
            ),
            "                }",
            "        }",
            "        filled = 0;",
            "    }",
            "    bool is_good(double square, int value) const {",
            f"        if (square >= {BLOCK} * Vector::size() * 0x1p-126 && square < 0x1p127) return true;",
            "        Vector any(0.0f);",
            "        for (int n = 0; n < filled; n++) any = any | Vector::loadu(block[n][value]);",
            "        __at_align__ float lanes[Vector::size()];",
            "        any.store(lanes);",
            "        for (float lane : lanes)",
            "            if (lane != 0) return false;",
            "        return true;",
            "    }",
            "    static double total(const Vector& x) {",
            "#if defined(CPU_CAPABILITY_AVX512)",
            "        return _mm512_reduce_add_pd(_mm512_add_pd(",
            "            _mm512_cvtps_pd(_mm512_castps512_ps256(x)), _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1))));",
            "#else",
            "        __at_align__ float lanes[Vector::size()];",
            "        x.store(lanes);",
            "        double sum = 0;",
            "        for (float lane : lanes) sum += lane;",
            "        return sum;",
            "#endif",
            "    }",
            "#if defined(CPU_CAPABILITY_AVX512)",
            "    static int64_t total(__m512i x) { return _mm512_reduce_add_epi32(x); }",
            "#endif",
            "#else",
            "    struct Lanes {};",
            "    void close(const Lanes&, int) {}",
            "#endif",
            "};",
        ]
        return "\n".join(lines)


def _truth(which: Mapping[int, bool]) -> str:
    return " && ".join(f"v{i} {'==' if is_zero else '!='} 0" for i, is_zero in which.items())


def _mask_of(which: Mapping[int, bool]) -> str:
    return " & ".join(f"(v{i} {'==' if is_zero else '!='} Vector(0.0f))" for i, is_zero in which.items())


def _masks(conditions: Sequence[Mapping[int, bool]]) -> list[str]:
    tested = dict.fromkeys(test for which in conditions for test in which.items())
    return [
        f"            const __mmask16 {_test(i, is_zero)} = "
        f"_mm512_cmp_ps_mask(v{i}, _mm512_setzero_ps(), {'_CMP_EQ_OQ' if is_zero else '_CMP_NEQ_UQ'});"
        for i, is_zero in tested
    ]


def _test(i: int, is_zero: bool) -> str:
    return f"{'is_zero' if is_zero else 'is_not_zero'}_{i}"


def _mask(which: Mapping[int, bool]) -> str:
    return " & ".join(_test(i, is_zero) for i, is_zero in which.items())
