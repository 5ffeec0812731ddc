"""Sums over all elements in a kernel over a table: Note [Sums of a launch].

Note [Sums of a launch]
-----------------------
A measured update has values of which products are summed over all elements of a tensor, and zeros counted,
and sizes that are counted over a sample of them (Note [Metrics]). Inductor is given an elementwise rule that
stores these values, and the number of the counter that each element is counted by. In the frame of a table, a
program has no such stores:

* of the values it stores *partial sums* over its own block: products are exact in float64, in which they are
  added. Those of a tensor are beside each other, and one more launch adds them. Each sum is taken in one
  order, whatever the card does first: it is the same in each run.
* what is in the sample adds one to its counter. These are float64 as well, and whole numbers, so that any
  order is the same. The launch that adds moves them to where they are wanted and leaves zeros.

Which elements are in the sample goes by their place in memory. A block in which there are none, as most
blocks of a large tensor, only finds that out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: Of a count of a block's elements, of which there are 1024: all counts of a tensor are one 64-bit number.
BITS = 12


@dataclass(frozen=True)
class SummedValues:
    """Sums of one measured tensor.

    Attributes:
        arguments: of Inductor's code, that the values are stored into.
        products: the two values of each.
        counts: for each, which values have to be zero (True) and which must not be (False).
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
        # Counts first: then what they are of is in fewer registers at a time, and none spills.
        stores = [f"tl.store(partials + {k} * blocks, {each})" for k, each in enumerate(sums)]
        lines += stores[len(self.products) :] + stores[: len(self.products)]
        body = "".join(f"    {line}\n" for line in lines)
        return f"@triton.jit\ndef {name}(partials, blocks, {', '.join(values)}, mask):\n{body}"


@dataclass(frozen=True)
class Sampling:
    """Sample of a tensor's elements, as text of integer expressions.

    Attributes:
        number: of the element of the sample that is nearest to the element at ``place``, of ``elements``.
        place: of the element of the sample with a ``number``.
        together: elements of the sample that are neighbours; a block is a multiple of it.
        counters: how many there are to count its elements.
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
        tensors: what is summed of each.
        sizes: the arguments that the numbers of counters are stored into.
        sampling: of the sizes.
        width: elements of a unit of length.
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
            stored: place, value and mask of each argument so far.
            last: the last of these.
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

#: ``(into, from, how many)`` in each row: partial sums, or, if that is negative, counters.
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
