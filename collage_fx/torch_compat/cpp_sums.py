"""The C++ that adds up what a step is measured by.

Note [Sums in blocks]
---------------------
As eleven reductions of Inductor's, six of them of float64 products, the sums of a tensor take four times as
long as the AdamW step that they measure: such a loop handles half as many elements at a time as one without
sums, and converts and adds each product in float64. So the sums of one tensor are one C++ object here. The
loop only leaves a vector of each value with it; when it has :data:`BLOCK` of them, it adds them up in a loop
of its own, which needs none of the step's registers and waits for none of its divisions.

Products are added there in float32, lane by lane, by fused multiplications and additions, and the lanes of a
block in float64. Each addition rounds once, by at most u = 2**-24 of the lane's sum so far, or by 2**-126 if
that is subnormal (which is zero to some processes). A block's sum of squares, which only grows, is so
off by at most ``BLOCK * u`` of itself, and by 2**-126 for each element. Where the latter might be more than u
of it (as in second moments of small gradients), or the sum leaves float32's range, the block is added once
more in float64, in which the products are exact, unless all of it is zero. A cross product is off by at most
as much of the root of the product of its two squares.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from string import Template
from typing import Any

#: How many vectors of each value are added in float32, one after the other.
BLOCK = 32


@dataclass(frozen=True)
class Vectors:
    """What a loop has of one input at a time.

    Attributes:
        type: of the C++ vector, or vectors.
        element: what they are made of.
        number: of its elements.
        floats: the text of them as float32, where ``@`` is their name.
    """

    type: str
    element: str
    number: str
    floats: str


@dataclass(frozen=True)
class Sums:
    """Sums over what is computed from float32 inputs, element by element.

    Attributes:
        inputs: how many.
        values: C++ expressions of the inputs ``x0``, ``x1``, ...
        products: by name, the two values that are multiplied.
        counts: by name, which values have to be zero (True) and which must not be (False).
    """

    inputs: int
    values: tuple[str, ...]
    products: Mapping[str, tuple[int, int]]
    counts: Mapping[str, Mapping[int, bool]]

    def number(self, sum_name: str) -> int:
        """Where ``sum`` of the class has it."""
        return [*self.products, *self.counts].index(sum_name)

    def definition(self, name: str, vectors: Sequence[Vectors], width: int) -> str:
        """Of the C++ class: it can stand within a function.

        Args:
            name: of the class.
            vectors: of each input, what a loop has at a time; empty if that is one number.
            width: as how many vectors of float32.
        """
        of_numbers = _OF_NUMBERS.substitute(
            name=name,
            products=len(self.products),
            counts=len(self.counts),
            numbers=", ".join(f"float x{i}" for i in range(self.inputs)),
            values=self._values("float"),
            add_products=_lines("products[{k}] += (double)v{i} * (double)v{j};", self._products()),
            add_counts=_lines("counts[{k}] += {truth};", self._counts()),
        )
        return f"struct {name} {{{of_numbers}{self._of_vectors(vectors, width) if vectors else ''}}};"

    def _of_vectors(self, vectors: Sequence[Vectors], width: int) -> str:
        inputs = [
            {
                "i": i,
                "type": each.type,
                "element": each.element,
                "number": each.number,
                "floats": each.floats.replace("@", f"a{i}"),
            }
            for i, each in enumerate(vectors)
        ]

        def of_each_vector(lines: str) -> str:
            """With inputs and values as vectors of float32."""
            values = self._values("Vector")
            texts = []
            for n in range(width):
                part = "x{i}s" if width == 1 else f"x{{i}}s[{n}]"
                texts.append(f"{{ {_lines(f'const Vector x{{i}} = {part};', inputs)} {values} {lines} }}")
            return "\n            ".join(texts)

        to_wide = "const Wide w{i} = at::vec::convert<double, 2, float, 1>(v{i});"
        wide = _lines(to_wide, [{"i": i} for i in range(len(self.values))])
        add = _lines("p{k} = at::vec::fmadd(v{i}, v{j}, p{k});", self._products())
        masks = _lines("const __mmask16 {test} = _mm512_cmp_ps_mask(v{i}, zero, {how});", self._tests())
        count = _lines("c{k} = _mm512_mask_sub_epi32(c{k}, {mask}, c{k}, minus_one);", self._counts())
        count_floats = _lines("c{k} = c{k} + ({lanes} & Vector(1.0f));", self._counts())
        return _OF_VECTORS.substitute(
            block=BLOCK,
            slots=BLOCK // width,
            parameters=", ".join("const {type}& a{i}".format(**each) for each in inputs),
            slot=_lines("__at_align__ {element} x{i}[{number}];", inputs),
            put=_lines("a{i}.store(slot.x{i});", inputs),
            open=_lines("const auto a{i} = {type}::loadu(slot.x{i}); const auto x{i}s = {floats};", inputs),
            numbers_of_slot=", ".join(f"slot.x{i}[i]" for i in range(self.inputs)),
            lanes=", ".join(f"p{k}(0.0f)" for k in range(len(self.products))),
            int_lanes=", ".join(f"c{k} = _mm512_setzero_si512()" for k in range(len(self.counts))),
            float_lanes=", ".join(f"c{k}(0.0f)" for k in range(len(self.counts))),
            add_with_avx512=of_each_vector(f"{add} {masks} {count}"),
            add=of_each_vector(f"{add} {count_floats}"),
            totals=_lines("const double s{k} = total(p{k});", self._products()),
            is_good=" && ".join(
                f"is_good(s{p['k']}, {p['i']})" for p in self._products() if p["i"] == p["j"]
            ),
            add_totals=_lines("products[{k}] += s{k};", self._products()),
            add_count_totals=_lines("counts[{k}] += total(c{k});", self._counts()),
            wide_lanes=", ".join(f"d{k}(0.0)" for k in range(len(self.products))),
            add_wide=of_each_vector(f"{wide} {_lines('d{k} = d{k} + w{i} * w{j};', self._products())}"),
            add_wide_totals=_lines("products[{k}] += total(d{k});", self._products()),
            any=of_each_vector(
                _lines("if (value == {i}) any = any | v{i};", [{"i": i} for i in range(len(self.values))])
            ),
        )

    def _values(self, type_name: str) -> str:
        return _lines(
            f"const {type_name} v{{i}} = {{value}};",
            [{"i": i, "value": value} for i, value in enumerate(self.values)],
        )

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


_OF_NUMBERS = Template("""
    double products[$products] = {};
    int64_t counts[$counts] = {};
    void one($numbers) {
        $values
        $add_products
        $add_counts
    }
    $name& join(const $name& other) {
        for (int k = 0; k < $products; k++) products[k] += other.products[k];
        for (int k = 0; k < $counts; k++) counts[k] += other.counts[k];
        return *this;
    }
    double sum(int k) const { return k < $products ? products[k] : counts[k - $products]; }
""")

_OF_VECTORS = Template("""
    using Vector = at::vec::Vectorized<float>;
    using Wide = at::vec::VectorizedN<double, 2>;
    struct Slot { $slot };
    Slot block[$slots];
    int64_t filled = 0;
    C10_ALWAYS_INLINE void put($parameters) {
        Slot& slot = block[filled];
        $put
        if (C10_UNLIKELY(++filled == $slots)) close();
    }
    void some(int64_t count, $parameters) {
        Slot slot;
        $put
        for (int64_t i = 0; i < count; i++) one($numbers_of_slot);
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
            const Slot& slot = block[n];
            $open
#if defined(CPU_CAPABILITY_AVX512)
            $add_with_avx512
#else
            $add
#endif
        }
        $totals
        $add_count_totals
        if (C10_LIKELY($is_good)) {
            $add_totals
        } else {
            add_in_double();
        }
        filled = 0;
    }
    void add_in_double() {
        Wide $wide_lanes;
        for (int n = 0; n < filled; n++) {
            const Slot& slot = block[n];
            $open
            $add_wide
        }
        $add_wide_totals
    }
    bool is_good(double square, int value) const {
        if (square >= $block * Vector::size() * 0x1p-102 && square < 0x1p127) return true;
        Vector any(0.0f);
        for (int n = 0; n < filled; n++) {
            const Slot& slot = block[n];
            $open
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
    static double total(const Wide& x) {
        __at_align__ double lanes[Vector::size()];
        x.store(lanes);
        double sum = 0;
        for (double lane : lanes) sum += lane;
        return sum;
    }
#if defined(CPU_CAPABILITY_AVX512)
    static int64_t total(__m512i x) { return _mm512_reduce_add_epi32(x); }
#endif
""")
