"""Sums over all elements in a Triton kernel over an address table: Note [Sums of a launch].

Note [Sums of a launch]
-----------------------
A measured update has values whose products are summed over all elements of a tensor and whose zeros are
counted; and the sizes of a sample of its elements are counted (Note [Metrics]). Inductor gets an elementwise
rule that stores these values, and the index of the counter for each element. In the kernel over a table, a
program does not store them:

* It stores *partial sums* of the values over its own block: products are exact in float64, in which they are
  added. The partial sums of a tensor are neighbours in memory, and an additional launch adds them. The order
  of additions is fixed, so the sum is the same in each run.
* Each element of the sample adds one to its counter. Counters are whole numbers in float64, so any order
  gives the same result. The additional launch moves the counters to the destination row and resets them to
  zero.

The index of an element in memory decides whether it is in the sample. A block without elements of the sample,
like most blocks of a large tensor, skips the counting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: Bits of a count of a block's 1024 elements: all counts of a tensor are packed into a 64-bit number.
BITS = 12


@dataclass(frozen=True)
class SummedValues:
    """Sums of a measured tensor.

    Attributes:
        arguments: the arguments of Inductor's code that the values would be stored into.
        products: for each sum of products, the indices of its two values.
        counts: for each count, a mapping from the index of a value to True (must be zero) or False (must not
            be zero).
    """

    arguments: tuple[int, ...]
    products: tuple[tuple[int, int], ...]
    counts: tuple[Mapping[int, bool], ...]

    @property
    def number(self) -> int:
        """Number of sums."""
        return len(self.products) + len(self.counts)

    def definition(self, name: str) -> str:
        """Write the Triton function that stores the partial sums of a block."""
        values = [f"v{i}" for i in range(len(self.arguments))]
        lines = [f"{value} = tl.where(mask, {value}, 0.0)" for value in values]
        sums = [f"tl.sum({values[i]}.to(tl.float64) * {values[j]}.to(tl.float64))" for i, j in self.products]
        lines.append("counts = tl.full(mask.shape, 0, tl.int64)")
        for k, conditions in enumerate(self.counts):
            tests = [f"({values[i]} {'==' if zero else '!='} 0.0)" for i, zero in conditions.items()]
            test = " & ".join(["mask", *tests])
            lines.append(f"counts += tl.where({test}, {1 << BITS * k}, 0).to(tl.int64)")
            sums.append(f"(counts >> {BITS * k} & {(1 << BITS) - 1}).to(tl.float64)")
        lines.append("counts = tl.sum(counts)")
        # Counts first: the values are then live in fewer registers, and none spills.
        stores = [f"tl.store(partials + {k} * blocks, {each})" for k, each in enumerate(sums)]
        lines += stores[len(self.products) :] + stores[: len(self.products)]
        body = "".join(f"    {line}\n" for line in lines)
        return f"@triton.jit\ndef {name}(partials, blocks, {', '.join(values)}, mask):\n{body}"


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
        summing = (tensor.definition(f"_store_sums_{i}") for i, tensor in enumerate(self.tensors))
        return "\n\n".join([*summing, self.sampling.definition])

    def call(self, stored: Mapping[int, tuple[str, str, str]], last: int) -> str:
        """Return the call to make once all arguments have been stored into; empty before that.

        Args:
            stored: index, value and mask of each argument so far.
            last: the last of these arguments.
        """
        place, value, mask = stored[last]
        if last in self.sizes:
            counters = f"counters + {self.sizes.index(last) * self.sampling.counters}"
            block = f"block * XBLOCK * {self.width}, XBLOCK * {self.width}"
            return f"_count({counters}, {value}, {place}, {mask}, xnumel * {self.width}, {block})"
        first = 0
        for i, tensor in enumerate(self.tensors):
            blocks = "(xnumel + XBLOCK - 1) // XBLOCK"
            if last in tensor.arguments and stored.keys() >= {*tensor.arguments}:
                values = ", ".join(stored[argument][1] for argument in tensor.arguments)
                return f"_store_sums_{i}(partials + {first} * ({blocks}), {blocks}, {values}, {mask})"
            first += tensor.number
        return "None"


_COUNTING = """@triton.jit
def _number(place, elements):
    return {number}


@triton.jit
def _place(number, elements):
    return {place}


@triton.jit
def _count(counters, size, place, mask, elements, first, LENGTH: tl.constexpr):
    last = first + LENGTH - 1
    earliest = _number(first, elements)
    latest = _number(last, elements)
    one = _place(earliest, elements)
    other = _place(latest, elements)
    is_within = ((first <= one) & (one <= last)) | ((first <= other) & (other <= last))
    if is_within | (latest - earliest > {apart}):  # then there are others between these
        is_sampled = _place(_number(place, elements), elements) == place
        tl.atomic_add(counters + size, 1.0, mask=mask & is_sampled)
"""

#: Kernel whose rows are ``(destination, source, count)``: count > 0 partial sums, or -count counters.
ADDING = """
@decorator
@triton.jit
def {name}(table, programs, XBLOCK: tl.constexpr):
    row = table + (tl.load(programs + tl.program_id(0)) >> 32) * 3
    into = tl.load(row).to(tl.pointer_type(tl.float64))
    given = tl.load(row + 1).to(tl.pointer_type(tl.float64))
    count = tl.load(row + 2).to(tl.int32)
    index = tl.arange(0, XBLOCK)
    if count >= 0:
        total = tl.full([XBLOCK], 0.0, tl.float64)
        for start in range(0, count, XBLOCK):
            total += tl.load(given + start + index, mask=start + index < count, other=0.0)
        tl.store(into, tl.sum(total))
    else:
        counted = tl.load(given + index, mask=index < -count)
        tl.store(into + index, counted, mask=index < -count)
        tl.store(given + index, 0.0, mask=index < -count)
"""
