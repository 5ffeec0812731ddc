"""Sums over all elements in a Triton kernel over an address table: Note [Sums of a launch].

Note [Sums of a launch]
-----------------------
A measured update has values whose products are summed over all elements of a tensor and whose zeros are
counted; and the sizes of a sample of its elements are counted (Note [Metrics]). Inductor gets an elementwise
rule that stores these values, and the index of the counter for each element. In the kernel over a table, a
program does not store them:

* It stores *partial sums* of the values over its own block: products are exact in float64, in which they are
  added, by fused multiply-adds. The partial sums of a tensor are neighbours in memory, and an additional
  launch adds them. The order of additions is fixed, so the sum is the same in each run.
* Its block consists of *tiles*, which it takes one after the other. A thread adds up its own elements of all
  tiles in registers; only then are the sums of threads added, once for each program. This takes 30
  instructions for each sum and thread, as many as adding up a thread's own 16 elements.
* Each element of the sample adds one to its counter. Counters are whole numbers in float64, so any order
  gives the same result. The additional launch moves the counters to the destination row and resets them to
  zero.

The index of an element in memory decides whether it is in the sample. A program without elements of the
sample, like most programs of a large tensor, skips the counting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: Tiles of a program, and elements of a tile.
TILES, TILE = 4, 512

#: Neighbouring elements of a thread in a tile: it loads them together, and adds their products.
TOGETHER = 4

#: Bits of a count of the elements of a program: all counts of a tensor are packed into a 64-bit number. Until
#: then each thread has its counts in fewer bits of a 32-bit number.
BITS, BITS_OF_A_THREAD = 12, 6
assert TILES * TILE < 1 << BITS
assert TILES * TOGETHER < 1 << BITS_OF_A_THREAD


@dataclass(frozen=True)
class SummedValues:
    """Sums of a measured tensor.

    Attributes:
        arguments: the arguments of Inductor's code that the values would be stored into.
        products: for each sum of products, the indices of its two values; None = a factor of 1.
        counts: for each count, a mapping from the index of a value to True (must be zero) or False (must not
            be zero).
    """

    arguments: tuple[int, ...]
    products: tuple[tuple[int, int | None], ...]
    counts: tuple[Mapping[int, bool], ...]

    @property
    def number(self) -> int:
        """Number of sums."""
        return len(self.products) + len(self.counts)

    def adding(self, name: str) -> str:
        """Write the Triton function that adds the terms of a tile's elements to the sums of each thread."""
        values = [f"v{i}" for i in range(len(self.arguments))]
        sums = [f"s{k}" for k in range(len(self.products))]
        lines = [f"{v} = tl.broadcast_to(tl.where(mask, {v}, 0.0), SHAPE)" for v in values]
        assert BITS * len(self.counts) < 64
        assert BITS_OF_A_THREAD * len(self.counts) < 32
        conditions = {1 << BITS_OF_A_THREAD * k: dict(each) for k, each in enumerate(self.counts)}
        lines.append(f"counted = tl.where(mask, {_counted(conditions)}, 0)")
        lines.append(f"counts += tl.sum(tl.reshape(counted, [counts.shape[0], {TOGETHER}]), 1)")
        for v in values:
            parts = ", ".join(f"{v}_{i}" for i in range(TOGETHER))
            lines.append(f"{parts} = _each_of_four({v}, counts.shape[0])")
        for total, (i, j) in zip(sums, self.products, strict=True):
            for part in range(TOGETHER):
                term = f"{values[i]}_{part}"
                added = f"{term} + {total}" if j is None else f"tl.fma({term}, {values[j]}_{part}, {total})"
                lines.append(f"{total} = {added}")
        lines.append(f"return {', '.join([*sums, 'counts'])}")
        parameters = ", ".join([*values, "mask", *sums, "counts", "SHAPE: tl.constexpr"])
        return f"@triton.jit\ndef {name}({parameters}):\n{_indented(lines)}"

    def storing(self, name: str) -> str:
        """Write the Triton function that adds the sums of all threads, and stores them."""
        sums = [f"s{k}" for k in range(len(self.products))]
        names = [*sums, "counts"]
        lines = [f"packed = counts.to(tl.int64) & {(1 << BITS_OF_A_THREAD) - 1}"]
        for k in range(1, len(self.counts)):
            field = f"(counts >> {BITS_OF_A_THREAD * k} & {(1 << BITS_OF_A_THREAD) - 1})"
            lines.append(f"packed |= {field}.to(tl.int64) << {BITS * k}")
        lines.append(f"{', '.join(names)} = tl.reduce(({', '.join([*sums, 'packed'])}), 0, {name}_combined)")
        stored = sums + [
            f"(counts >> {BITS * k} & {(1 << BITS) - 1}).to(tl.float64)" for k in range(len(self.counts))
        ]
        lines += [f"tl.store(partials + {k} * blocks, {each})" for k, each in enumerate(stored)]
        left, right = ([f"{side}{k}" for k in range(len(names))] for side in "ab")
        added = ", ".join(f"{a} + {b}" for a, b in zip(left, right, strict=True))
        return (
            f"@triton.jit\ndef {name}_combined({', '.join(left + right)}):\n    return {added}\n\n\n"
            f"@triton.jit\ndef {name}(partials, blocks, {', '.join([*sums, 'counts'])}):\n{_indented(lines)}"
        )


def _counted(conditions: Mapping[int, Mapping[int, bool]]) -> str:
    """Write the sum of the numbers whose conditions an element fulfills; a first condition is tested once."""
    if not conditions:
        return "0"
    terms = [str(number) for number, tests in conditions.items() if not tests]
    firsts = dict.fromkeys(next(iter(tests.items())) for tests in conditions.values() if tests)
    for value, zero in firsts:
        others = {
            number: {i: is_zero for i, is_zero in tests.items() if i != value}
            for number, tests in conditions.items()
            if (value, zero) == next(iter(tests.items()), None)
        }
        terms.append(f"tl.where(v{value} {'==' if zero else '!='} 0.0, {_counted(others)}, 0)")
    return " + ".join(terms)


def _indented(lines: Sequence[str]) -> str:
    return "".join(f"    {line}\n" for line in lines)


@dataclass(frozen=True)
class Sampling:
    """Sample of a tensor's elements, as text of integer expressions.

    Attributes:
        number: expression of ``place`` and ``elements``: the sample's number of its element nearest to index
            ``place``.
        place: expression of ``number`` and ``elements``: the index of the sample's element with this number.
        together: number of neighbouring elements in the sample; a block is a multiple of it.
        counters: number of counters.
    """

    number: str
    place: str
    together: int
    counters: int

    @property
    def definition(self) -> str:
        """Write the Triton function that counts the elements of a block, and the functions that it calls."""
        return _COUNTING.format(number=self.number, place=self.place, apart=2 * self.together)


@dataclass(frozen=True)
class TableSums:
    """Sums and counts of a kernel, instead of stores.

    Attributes:
        tensors: the sums of each tensor.
        sizes: the arguments that the indices of counters would be stored into.
        sampling: the sample whose sizes are counted.
        width: number of elements per unit of length.
    """

    tensors: Sequence[SummedValues]
    sizes: Sequence[int]
    sampling: Sampling
    width: int

    @property
    def arguments(self) -> list[int]:
        """Arguments that are not stored into."""
        return [*(each for tensor in self.tensors for each in tensor.arguments), *self.sizes]

    @property
    def definitions(self) -> str:
        """Write the functions that a kernel calls."""
        written = [_EACH_OF_FOUR]
        for i, tensor in enumerate(self.tensors):
            written += [tensor.adding(f"_add_terms_{i}"), tensor.storing(f"_store_sums_{i}")]
        return "\n\n".join([*written, self.sampling.definition])

    @property
    def names(self) -> list[str]:
        """Names of the sums of a thread, for all tensors: float64, and packed counts."""
        return [name for i in range(len(self.tensors)) for name in self._of_tensor(i)]

    def _of_tensor(self, i: int) -> list[str]:
        return [*(f"sum_{i}_{k}" for k in range(len(self.tensors[i].products))), f"counts_{i}"]

    def zeros(self, threads: str) -> list[str]:
        """Write the sums of a thread before its first element; ``threads`` is the text of their number."""
        kinds = {name: "tl.int32" if name.startswith("counts") else "tl.float64" for name in self.names}
        return [f"{name} = tl.full([{threads}], 0, {kind})" for name, kind in kinds.items()]

    def stores(self, blocks: str) -> list[str]:
        """Write the calls that store the sums of a program; ``blocks`` is the text of the tensor's number."""
        first, calls = 0, []
        for i, tensor in enumerate(self.tensors):
            sums = ", ".join(self._of_tensor(i))
            calls.append(f"_store_sums_{i}(partials + {first} * {blocks}, {blocks}, {sums})")
            first += tensor.number
        return calls

    def statement(self, stored: Mapping[int, tuple[str, str, str]], last: int) -> str:
        """Return the statement to make once all arguments have been stored into; ``pass`` before that.

        Args:
            stored: index, value and mask of each argument so far.
            last: the last of these arguments.
        """
        place, value, mask = stored[last]
        if last in self.sizes:
            counters = f"counters + {self.sizes.index(last) * self.sampling.counters}"
            call = f"_count({counters}, {value}, {place}, {mask}, xnumel * {self.width})"
            return f"if sampled:\n    {call}"
        shape = "[XBLOCK]" if self.width == 1 else f"[XBLOCK, {self.width}]"
        for i, tensor in enumerate(self.tensors):
            if last in tensor.arguments and stored.keys() >= {*tensor.arguments}:
                values = ", ".join(stored[argument][1] for argument in tensor.arguments)
                sums = ", ".join(self._of_tensor(i))
                return f"{sums} = _add_terms_{i}({values}, {mask}, {sums}, {shape})"
        return "pass"


_EACH_OF_FOUR = """@triton.jit
def _each_of_four(v, NUMBER: tl.constexpr):
    even, odd = tl.split(tl.reshape(v, [NUMBER, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a.to(tl.float64), b.to(tl.float64), c.to(tl.float64), d.to(tl.float64)
"""

_COUNTING = """@triton.jit
def _number(place, elements):
    return {number}


@triton.jit
def _place(number, elements):
    return {place}


@triton.jit
def _has_sampled(elements, first, LENGTH: tl.constexpr):
    last = first + LENGTH - 1
    earliest = _number(first, elements)
    latest = _number(last, elements)
    one = _place(earliest, elements)
    other = _place(latest, elements)
    is_within = ((first <= one) & (one <= last)) | ((first <= other) & (other <= last))
    return is_within | (latest - earliest > {apart})  # then there are others between these


@triton.jit
def _count(counters, size, place, mask, elements):
    is_sampled = _place(_number(place, elements), elements) == place
    tl.atomic_add(counters + size, 1.0, mask=mask & is_sampled)
"""

#: Kernel whose rows are ``(destination, source, count, divisor)``: count > 0 partial sums or -count counters.
#: The sum is stored in float64; if the divisor is not 0, in float32 and divided by it.
ADDING = """
@decorator
@triton.jit
def {name}(table, programs, XBLOCK: tl.constexpr):
    row = table + (tl.load(programs + tl.program_id(0)) >> 32) * 4
    address = tl.load(row)
    into = address.to(tl.pointer_type(tl.float64))
    given = tl.load(row + 1).to(tl.pointer_type(tl.float64))
    count = tl.load(row + 2).to(tl.int32)
    divisor = tl.load(row + 3)
    index = tl.arange(0, XBLOCK)
    if count >= 0:
        total = tl.full([XBLOCK], 0.0, tl.float64)
        for start in range(0, count, XBLOCK):
            total += tl.load(given + start + index, mask=start + index < count, other=0.0)
        if divisor == 0:
            tl.store(into, tl.sum(total))
        else:
            mean = tl.sum(total) / divisor.to(tl.float64)
            tl.store(address.to(tl.pointer_type(tl.float32)), mean.to(tl.float32))
    else:
        counted = tl.load(given + index, mask=index < -count)
        tl.store(into + index, counted, mask=index < -count)
        tl.store(given + index, 0.0, mask=index < -count)
"""
