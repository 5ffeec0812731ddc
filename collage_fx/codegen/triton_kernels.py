"""Triton kernels of rules, printed from their graphs.

Note [A kernel over a table]
----------------------------
A kernel is launched once for all tensors, and reads its arguments from a row of a table of 64-bit words: an
address for each pointer, and the length. A program's own word is ``row << 32 | block``.

The body of a kernel is a function that is called for a full block at once, and for a tensor's last block in
pieces of an element for each thread. The mask of a full block is all ones, which Triton omits: then the block
loads and stores 16 bytes at a time. With masks, eight elements of a thread would take half as many registers
again, and a kernel has the registers of the larger body.

Fused multiply-adds are off, but where our functions write them: LLVM would choose for each copy of an
expression (full block, last block) which of two products to fuse, and bits would depend on the index.

Note [Sums of a launch]
-----------------------
A rule may compute totals: the sum, or the mean, of all elements of a tensor.

* A program stores *partial sums* of the values over its own block, in float64, which an additional launch
  adds. The order of additions is fixed, so the sum is the same in each run.
* Its block consists of *tiles*. A thread adds up its own elements of all tiles in registers; only then are
  the sums of threads added, once for each program.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from collage_fx import torch_compat
from collage_fx.codegen.elements import Elements, Kind, is_read, largest_magnitude, place
from collage_fx.codegen.functions import expression, function_of
from collage_fx.codegen.spellings import TRITON, NoSpelling, bare
from collage_fx.torch_compat import OpOverload, TableKernel

aten = torch.ops.aten

#: Elements of a block, and threads of the program that computes it: a thread has 16 bytes of bfloat16. It is
#: the best choice on an H200 also where most loads and stores are of single bytes.
BLOCK, THREADS = 1024, 128

#: Pieces of a tensor's last block.
PIECES = BLOCK // THREADS

#: Tiles of a program that adds up, and elements of a tile.
TILES, TILE = 4, 512

#: Neighbouring elements of a thread in a tile, which it loads together and adds.
TOGETHER = 4

#: Characters of an expression that are a statement of their own, although it is used once.
LONGEST_EXPRESSION = 120

#: Functions that kernels call.
_LARGER = """@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
"""
_ADD_TERMS = """@triton.jit
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

#: Kernel of rows ``(destination, partial sums, their number, divisor)``: the sum, divided, in float32.
_ADDING = """{decorator}
@triton.jit
def collage_add_sums(table, programs, XBLOCK: tl.constexpr):
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


def table_kernel(graph: Graph, width: int, device: torch.device) -> TableKernel:
    """Print the kernel of a rule over a table: Note [A kernel over a table].

    The graph, which is edited, has the length as its first input if the rule is flat. ``width`` is the number
    of elements per unit of length: 1, or the elements of a block; 0 for a rule of numbers alone.

    Raises:
        NoSpelling: Triton has no expression for an operation of the rule.
    """
    return _Printer(Elements(graph, width, writes_roundings=False), device).kernel()


class _Printer:
    """Writer of the kernel of a rule."""

    def __init__(self, elements: Elements, device: torch.device) -> None:
        if elements.is_matrix:
            raise NoSpelling("numbers of rows and columns")
        self.elements, self.device, self.width = elements, device, elements.width
        self.is_flat = self.width > 0
        self.sums = [f"sum_{i}" for i, _ in enumerate(elements.totals)]
        self.functions: dict[str, None] = {}
        self.lines: list[str] = []
        self.texts: dict[Node, str] = {}
        inputs = elements.graph.find_nodes(op="placeholder")
        self.numbers = {node: i for i, node in enumerate(inputs)}
        loaded = [n for n in elements.inputs if elements.kinds[n] is not Kind.TOTAL and is_read(n)]
        stored = [store.into for store in elements.stores]
        #: The argument of each load and store, and of each pointer.
        self.accesses = [self.numbers[node] for node in (*loaded, *stored)]
        self.pointers = [node for node in elements.inputs if self.numbers[node] in self.accesses]

    def kernel(self) -> TableKernel:
        body = self._body()
        columns = [self.numbers[node] for node in self.pointers]
        held = (*columns, 0) if self.is_flat else tuple(columns)
        tiles = TILES if self.sums else 1
        size = (TILE if self.sums else BLOCK) // self.width if self.is_flat else 1
        warp = torch_compat.warp_size(self.device)
        threads = THREADS if self.is_flat else warp
        parts = [*self.functions, body, "\n".join(self._frame(columns, len(held) + bool(self.sums)))]
        kind = "update" if self.is_flat else "numbers"
        name = f"collage_{kind}_{hashlib.sha256(''.join(parts).encode()).hexdigest()[:8]}"
        text = "\n\n".join(parts)
        sources = {}
        for aligned in (True, False):
            config = {
                "XBLOCK": size,
                "ALIGNMENT": torch_compat.ALIGNED_BYTES if aligned else 1,
                "num_warps": threads // warp,
                "num_stages": 1,
            }
            decorator = torch_compat.triton_decorator(config, name, self.device)
            decorated = text.format(name=name, decorator=decorator)
            sources[aligned] = f"{torch_compat.TRITON_HEAD}\n\n{decorated}"
        adding = _adding(self.device) if self.sums else None
        return TableKernel(name, held, size * tiles, sources, tuple(self.accesses), adding, threads, tiles)

    def _frame(self, columns: Sequence[int], words: int) -> Iterator[str]:
        """Write the kernel, which finds its row and calls the body."""
        yield "{decorator}\n@triton.jit"
        yield "def {name}(table, programs, XBLOCK: tl.constexpr, ALIGNMENT: tl.constexpr):"
        yield "    program = tl.load(programs + tl.program_id(0))"
        yield f"    row = table + (program >> 32) * {words}"
        yield "    block = (program & 0xffffffff).to(tl.int32)"
        for i, node in enumerate(self.pointers):
            name, dtype = self._pointer(node), node.meta["val"].dtype
            if dtype not in TRITON.types:
                raise NoSpelling(f"type for {dtype}")
            address = f"tl.load(row + {i}).to(tl.pointer_type(tl.{TRITON.types[dtype]}))"
            is_array = self.elements.kinds[node] is not Kind.NUMBER
            yield f"    {name} = {f'tl.multiple_of({address}, ALIGNMENT)' if is_array else address}"
        given = ", ".join(map(self._pointer, self.pointers))
        if not self.is_flat:
            yield f"    _body({given})"
            return
        yield f"    left = tl.load(row + {len(columns)}).to(tl.int32)"
        if not self.sums:
            yield "    if left >= (block + 1) * XBLOCK:"
            yield f"        _body({given}, left, block, XBLOCK, True)"
            yield "    else:"
            yield f"        for piece in range(tl.cdiv(left - block * XBLOCK, XBLOCK // {PIECES})):"
            yield f"            _body({given}, left, block * {PIECES} + piece, XBLOCK // {PIECES}, False)"
            return
        yield f"    partials = tl.load(row + {words - 1}).to(tl.pointer_type(tl.float64)) + block"
        of_thread = ", ".join(self.sums)
        for name in self.sums:
            yield f"    {name} = tl.full([XBLOCK * {self.width} // {TOGETHER}], 0, tl.float64)"
        for condition, is_full in ((f"if left >= (block + 1) * (XBLOCK * {TILES})", True), ("else", False)):
            tile = f"block * {TILES} + tile"
            yield f"    {condition}:"
            yield f"        for tile in range({TILES}):"
            yield f"            {of_thread} = _body({given}, left, {tile}, XBLOCK, {is_full}, {of_thread})"
        for i, name in enumerate(self.sums):
            yield f"    tl.store(partials + {i} * tl.cdiv(left, XBLOCK * {TILES}), tl.sum({name}, 0))"

    def _pointer(self, node: Node) -> str:
        return f"p{self.numbers[node]}"

    def _body(self) -> str:
        """Write the function that computes and stores a block, and returns the sums of a thread."""
        for node in self.elements.nodes:
            self._write(node)
        statements = [*self._places(), *self.lines]
        for store in self.elements.stores:
            statements.append(f"tl.store({self._access(store.into, bare(self.texts[store.value]))})")
        for name, total in zip(self.sums, self.elements.totals, strict=True):
            shape = "[XBLOCK]" if self.width == 1 else f"[XBLOCK, {self.width}]"
            (terms,) = total.value.all_input_nodes
            statements.append(f"{name} = _add_terms({self.texts[terms]}, mask, {name}, {shape})")
            self.functions[_ADD_TERMS] = None
        if self.sums:
            statements.append(f"return {', '.join(self.sums)}")
        parameters = [self._pointer(node) for node in self.pointers]
        if self.is_flat:
            parameters += ["left", "block", "XBLOCK: tl.constexpr", "IS_FULL: tl.constexpr", *self.sums]
        lines = "\n".join(f"    {line}" for line in statements)
        return f"@triton.jit\ndef _body({', '.join(parameters)}):\n{lines}\n"

    def _places(self) -> Iterator[str]:
        """Write the indices of a block's elements, and which of them there are."""
        if not self.is_flat:
            return
        index, there = "block * XBLOCK + tl.arange(0, XBLOCK)", "tl.full({}.shape, True, tl.int1)"
        if self.width > 1:
            yield f"unit = tl.expand_dims({index}, 1)"
            yield f"x = unit * {self.width} + tl.arange(0, {self.width})[None, :]"
            yield f"mask = {there.format('unit')} if IS_FULL else unit < left"
        else:
            yield f"x = {index}"
            yield f"mask = {there.format('x')} if IS_FULL else x < left"

    def _access(self, node: Node, *value: str) -> str:
        """Write the arguments of a load or store."""
        places = {Kind.OF_ELEMENT: (" + x", ["mask"]), Kind.OF_BLOCK: (" + unit", ["mask"])}
        at, mask = places.get(self.elements.kinds[node], ("", []))
        return ", ".join([self._pointer(node) + at, *value, *mask])

    def _write(self, node: Node) -> None:
        """Write a value: as a statement, or as an expression for its user."""
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor) or node.target is aten.copy_.default:
            return
        if node.op == "placeholder" and self.numbers[node] not in self.accesses:
            return
        if self.elements.kinds[node] is Kind.TOTAL:
            return
        text = self._expression(node)
        is_constant = node.op == "call_function" and not node.all_input_nodes
        is_long = len(text) > LONGEST_EXPRESSION or self.elements.kinds[node] is Kind.OF_BLOCK
        if not is_constant and (node.op == "placeholder" or len(node.users) > 1 or is_long):
            self.lines.append(f"v{len(self.lines)} = {bare(text)}")
            text = f"v{len(self.lines) - 1}"
        self.texts[node] = text

    def _expression(self, node: Node) -> str:
        target: Any = node.target
        if node.op == "placeholder":
            return f"tl.load({self._access(node)})"
        if target is place:
            return "x" if self.is_flat else TRITON.constant(0, torch.int32)
        operands = [self.texts[each] for each in node.args if isinstance(each, Node)]
        if target is largest_magnitude:
            self.functions[_LARGER] = None
            return f"tl.expand_dims(tl.reduce(tl.abs({operands[0]}), 1, _larger), 1)"
        if isinstance(target, OpOverload):
            return expression(node, self.texts, TRITON, is_number=self.elements.kinds[node] is Kind.NUMBER)
        dtypes = tuple(each.meta["val"].dtype for each in node.args if isinstance(each, Node))
        function = function_of(TRITON, target, dtypes, tuple(node.args[len(dtypes) :]))
        self.functions[function.definition] = None
        return f"{function.name}({', '.join(map(bare, operands))})"


def _adding(device: torch.device) -> TableKernel:
    config = {"XBLOCK": BLOCK, "num_warps": THREADS // torch_compat.warp_size(device), "num_stages": 1}
    name = "collage_add_sums"
    adding = _ADDING.format(decorator=torch_compat.triton_decorator(config, name, device))
    source = f"{torch_compat.TRITON_HEAD}\n\n{adding}"
    return TableKernel(name, (), 1, dict.fromkeys((True, False), source), threads=THREADS)
