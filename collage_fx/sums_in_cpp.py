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

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from string import Template
from typing import Any

__all__ = ["BLOCK", "Sums"]

#: How many vectors of each value are added in float32, one after the other.
BLOCK = 32


@dataclass(frozen=True)
class Sums:
    """Sums over what is computed from float32 inputs, element by element.

    Attributes:
        name: of the C++ class.
        inputs: how many.
        values: C++ expressions of the inputs ``x0``, ``x1``, ... and of values before them, ``v0``, ``v1``, ...
        products: by name, the two values that are multiplied.
        counts: by name, which values have to be zero (True) and which must not be (False).
    """

    name: str
    inputs: int
    values: tuple[str, ...]
    products: Mapping[str, tuple[int, int]]
    counts: Mapping[str, Mapping[int, bool]]

    def number(self, sum_name: str) -> int:
        """Where ``sum`` of the class has it."""
        return [*self.products, *self.counts].index(sum_name)

    def definition(self) -> str:
        """Of the class: it can stand within a function."""
        return _CLASS.substitute(
            name=self.name,
            inputs=self.inputs,
            products=len(self.products),
            counts=len(self.counts),
            block=BLOCK,
            numbers=", ".join(f"float x{i}" for i in range(self.inputs)),
            vectors=", ".join(f"const Vector& x{i}" for i in range(self.inputs)),
            values_of_numbers=self._values("float"),
            values_of_vectors=self._values("Vector"),
            add_products=_lines("products[{k}] += (double)v{i} * (double)v{j};", self._products()),
            add_counts=_lines("counts[{k}] += {truth};", self._counts()),
            put=_lines("x{i}.store(next + (n * {n} + {i}) * Vector::size());", self._inputs()),
            store=_lines("x{i}.store(x[{i}]);", self._inputs()),
            given=", ".join(f"x[{i}][i]" for i in range(self.inputs)),
            load=_lines("const Vector x{i} = Vector::loadu(block[n][{i}]);", self._inputs()),
            of_block=", ".join(f"block[n][{i}][i]" for i in range(self.inputs)),
            lanes=", ".join(f"p{k}(0.0f)" for k in range(len(self.products))),
            add_lanes=_lines("p{k} = at::vec::fmadd(v{i}, v{j}, p{k});", self._products()),
            masks=_lines("const __mmask16 {test} = _mm512_cmp_ps_mask(v{i}, zero, {how});", self._tests()),
            int_lanes=", ".join(f"c{k} = _mm512_setzero_si512()" for k in range(len(self.counts))),
            add_int_lanes=_lines("c{k} = _mm512_mask_sub_epi32(c{k}, {mask}, c{k}, minus_one);", self._counts()),
            float_lanes=", ".join(f"c{k}(0.0f)" for k in range(len(self.counts))),
            add_float_lanes=_lines("c{k} = c{k} + ({lanes} & Vector(1.0f));", self._counts()),
            totals=_lines("const double s{k} = total(p{k});", self._products()),
            is_good=" && ".join(f"is_good(s{p['k']}, {p['i']})" for p in self._products() if p["i"] == p["j"]),
            add_totals=_lines("products[{k}] += s{k};", self._products()),
            add_count_totals=_lines("counts[{k}] += total(c{k});", self._counts()),
            any=_lines("if (value == {i}) any = any | v{i};", [{"i": i} for i in range(len(self.values))]),
        )

    def _values(self, type_name: str) -> str:
        return _lines(
            f"const {type_name} v{{i}} = {{value}};",
            [{"i": i, "value": value} for i, value in enumerate(self.values)],
        )

    def _inputs(self) -> list[dict[str, Any]]:
        return [{"i": i, "n": self.inputs} for i in range(self.inputs)]

    def _products(self) -> list[dict[str, Any]]:
        return [{"k": k, "i": i, "j": j} for k, (i, j) in enumerate(self.products.values())]

    def _counts(self) -> list[dict[str, Any]]:
        def each(conditions: Mapping[int, bool], form: str, between: str) -> str:
            return between.join(
                form.format(i=i, compared="==" if is_zero else "!=", test=_test(i, is_zero))
                for i, is_zero in conditions.items()
            )

        return [
            {
                "k": k,
                "truth": each(conditions, "v{i} {compared} 0", " && "),
                "lanes": each(conditions, "(v{i} {compared} Vector(0.0f))", " & "),
                "mask": each(conditions, "{test}", " & "),
            }
            for k, conditions in enumerate(self.counts.values())
        ]

    def _tests(self) -> list[dict[str, Any]]:
        tests = dict.fromkeys(test for conditions in self.counts.values() for test in conditions.items())
        return [
            {"i": i, "test": _test(i, is_zero), "how": "_CMP_EQ_OQ" if is_zero else "_CMP_NEQ_UQ"}
            for i, is_zero in tests
        ]


def _test(i: int, is_zero: bool) -> str:
    return f"is_zero_{i}" if is_zero else f"is_not_zero_{i}"


def _lines(form: str, each: Iterable[Mapping[str, Any]]) -> str:
    return " ".join(form.format(**fields) for fields in each)


_CLASS = Template("""
struct $name {
    double products[$products] = {};
    int64_t counts[$counts] = {};
    void one($numbers) {
        $values_of_numbers
        $add_products
        $add_counts
    }
    $name& join(const $name& other) {
        for (int k = 0; k < $products; k++) products[k] += other.products[k];
        for (int k = 0; k < $counts; k++) counts[k] += other.counts[k];
        return *this;
    }
    double sum(int k) const { return k < $products ? products[k] : counts[k - $products]; }
#if INDUCTOR_USE_VECTOR_TYPES()
    using Vector = at::vec::Vectorized<float>;
    __at_align__ float block[$block][$inputs][Vector::size()];
    int64_t filled = 0;
    C10_ALWAYS_INLINE void put(int n, $vectors) {
        float* next = block[0][0] + filled * $inputs * Vector::size();
        $put
    }
    C10_ALWAYS_INLINE void go_on(int vectors) {
        filled += vectors;
        if (C10_UNLIKELY(filled == $block)) close();
    }
    void some(int64_t count, $vectors) {
        __at_align__ float x[$inputs][Vector::size()];
        $store
        for (int64_t i = 0; i < count && i < Vector::size(); i++) one($given);
    }
    C10_NOINLINE void close() {
        Vector $lanes;
#if defined(CPU_CAPABILITY_AVX512)
        const __m512 zero = _mm512_setzero_ps();
        const __m512i minus_one = _mm512_set1_epi32(-1);
        __m512i $int_lanes;
#else
        Vector $float_lanes;
#endif
        for (int n = 0; n < filled; n++) {
            $load
            $values_of_vectors
            $add_lanes
#if defined(CPU_CAPABILITY_AVX512)
            $masks
            $add_int_lanes
#else
            $add_float_lanes
#endif
        }
        $totals
        if (C10_LIKELY($is_good)) {
            $add_totals
            $add_count_totals
        } else {
            for (int n = 0; n < filled; n++)
                for (int i = 0; i < Vector::size(); i++) one($of_block);
        }
        filled = 0;
    }
    bool is_good(double square, int value) const {
        if (square >= $block * Vector::size() * 0x1p-126 && square < 0x1p127) return true;
        Vector any(0.0f);
        for (int n = 0; n < filled; n++) {
            $load
            $values_of_vectors
            $any
        }
        __at_align__ float lanes[Vector::size()];
        any.store(lanes);
        for (float lane : lanes)
            if (lane != 0) return false;
        return true;
    }
    static double total(const Vector& x) {
#if defined(CPU_CAPABILITY_AVX512)
        return _mm512_reduce_add_pd(_mm512_add_pd(
            _mm512_cvtps_pd(_mm512_castps512_ps256(x)), _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1))));
#else
        __at_align__ float lanes[Vector::size()];
        x.store(lanes);
        double sum = 0;
        for (float lane : lanes) sum += lane;
        return sum;
#endif
    }
#if defined(CPU_CAPABILITY_AVX512)
    static int64_t total(__m512i x) { return _mm512_reduce_add_epi32(x); }
#endif
#else
    void close() {}
#endif
};
""")
