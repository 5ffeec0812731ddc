"""Sums over all elements in a Triton kernel over an address table: Note [Sums of a launch].

Note [Sums of a launch]
-----------------------
A rule may compute totals: the sum, or the mean, of all elements of a tensor. Inductor gets an elementwise
rule that stores what is added up. In the kernel over a table, a program does not store it:

* It stores *partial sums* of the values over its own block, in float64. The partial sums of a tensor are
  neighbours in memory, and an additional launch adds them. The order of additions is fixed, so the sum is the
  same in each run.
* Its block consists of *tiles*, which it takes one after the other. A thread adds up its own elements of all
  tiles in registers; only then are the sums of threads added, once for each program.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Tiles of a program, and elements of a tile.
TILES, TILE = 4, 512

#: Neighbouring elements of a thread in a tile, which it loads together and adds.
TOGETHER = 4


@dataclass(frozen=True)
class TableSums:
    """Sums of a kernel, instead of stores.

    Attributes:
        arguments: for each sum, the argument of Inductor's code that its values would be stored into.
        width: number of elements per unit of length.
    """

    arguments: tuple[int, ...]
    width: int

    @property
    def names(self) -> list[str]:
        """Names of the sums of a thread, float64."""
        return [f"sum_{i}" for i, _ in enumerate(self.arguments)]

    def zeros(self, units: str) -> list[str]:
        """Write the sums of a thread before its first element; ``units`` is the text of a tile's length."""
        threads = f"{units} * {self.width} // {TOGETHER}"
        return [f"{name} = tl.full([{threads}], 0, tl.float64)" for name in self.names]

    def stores(self, blocks: str) -> list[str]:
        """Write the stores of the sums of a program; ``blocks`` is the text of the tensor's number."""
        return [
            f"tl.store(partials + {i} * {blocks}, tl.sum({name}, 0))" for i, name in enumerate(self.names)
        ]

    def statement(self, argument: int, value: str, mask: str) -> str:
        """Write the statement in the place of a store."""
        name = self.names[self.arguments.index(argument)]
        shape = "[XBLOCK]" if self.width == 1 else f"[XBLOCK, {self.width}]"
        return f"{name} = _add_terms({value}, {mask}, {name}, {shape})"


#: Functions that kernels with sums call.
FUNCTIONS = """@triton.jit
def _add_terms(v, mask, total, SHAPE: tl.constexpr):
    v = tl.broadcast_to(tl.where(mask, v, 0.0), SHAPE)
    even, odd = tl.split(tl.reshape(v, [total.shape[0], 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    total = a.to(tl.float64) + total
    total = b.to(tl.float64) + total
    total = c.to(tl.float64) + total
    return d.to(tl.float64) + total
"""

#: Kernel whose rows are ``(destination, partial sums, their number, divisor)``. The float32 destination
#: becomes the sum, divided by the divisor.
ADDING = """
@decorator
@triton.jit
def {name}(table, programs, XBLOCK: tl.constexpr):
    row = table + (tl.load(programs + tl.program_id(0)) >> 32) * 4
    into = tl.load(row).to(tl.pointer_type(tl.float32))
    given = tl.load(row + 1).to(tl.pointer_type(tl.float64))
    count = tl.load(row + 2).to(tl.int32)
    divisor = tl.load(row + 3).to(tl.float64)
    index = tl.arange(0, XBLOCK)
    total = tl.full([XBLOCK], 0.0, tl.float64)
    for start in range(0, count, XBLOCK):
        total += tl.load(given + start + index, mask=start + index < count, other=0.0)
    tl.store(into, (tl.sum(total) / divisor).to(tl.float32))
"""
