"""The C++ function of a rule: loops over its tensors, or a few statements on numbers, printed from its graph.

Note [Loops of a printed kernel]
--------------------------------
A kernel goes through its tensors in chunks of 128 elements, which stay in the processor's first cache:

1. The first loop computes early values (Note [Early and late] in ``elements.py``), keeps what later loops
   read in buffers of a chunk, and notes the largest magnitude of what is to be rounded.
2. If it is below a power of two from which on nothing can become infinite (:data:`LIMITS`), the second loop
   rounds and stores, and asks no number whether it is finite: ``Finite`` is true.
3. Otherwise the chunk is computed anew, all questions asked. Nothing has been stored until then.

Where values of rows or columns are read, a chunk ends with its row, for which the row's are computed once.

The loops are of scalar C++; the compiler makes vectors of them, as long as the smallest elements in a loop
allow. So bytes are read and written in loops of their own. A rule with blocks has 16 blocks of 32 elements in
a chunk, and a loop over a block's elements in one over blocks. What there is once for each block, its scale
and its largest magnitude, is computed for all blocks of a chunk at a time, by vectors, too.

Every operation is IEEE 754's or an integer's, and nothing is contracted (``FLAGS``): bits are the eager ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch.fx import Graph, Node

from collage_fx.codegen.elements import JOINS, ON_GRID, Elements, Kind, Store, is_read, operand_of, reads_half
from collage_fx.codegen.spellings import bare, in_memory, in_register
from collage_fx.codegen.statements import Statements
from collage_fx.graph import made_of
from collage_fx.numerics import number_of_code

#: Flags of the compiler after Inductor's: loops are vectorized, and integers wrap around.
FLAGS = ("-ftree-loop-vectorize", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fwrapv")

#: Magnitudes, as bits of a float32 number, below which rounding to a dtype meets no infinity and no NaN, nor
#: does joining hi and an error term: 2**127 and 2**15.
LIMITS = {torch.bfloat16: 0x7F000000, torch.float16: 0x47000000}

PRELUDE, PRELUDE_F16 = (
    Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("prelude.h", "prelude_f16.h")
)

#: Vectors of 512 bits where there are: g++ by itself uses half of them on Intel's processors.
WIDE = """#if defined(__AVX512F__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif
"""


def number_kernel(graph: Graph) -> str:
    """Print the kernel of a rule of scalars: a function of the addresses of its inputs, in their order.

    Raises:
        NoSpelling: C++ has no expression for an operation of the rule.
    """
    elements = Elements(graph, 0)
    computed = Statements(elements, [store.value for store in elements.stores], {})
    texts = [bare(computed.texts[store.value]) for store in elements.stores]
    results = [f"const auto result{i} = {text};" for i, text in enumerate(texts)]
    stores = [f"{store.into.name}[0] = result{i};" for i, store in enumerate(elements.stores)]
    return _source(elements, [*computed.lines, *results, *stores], [])


def flat_kernel(graph: Graph, width: int) -> str:
    """Print the kernel of a flat rule: a function of the addresses of its inputs, and of a length.

    The graph is edited. ``width``: elements per unit of length: 1, or the elements of a block.

    Raises:
        NoSpelling: C++ has no expression for an operation of the rule.
    """
    return _Flat(Elements(graph, width)).source()


def _source(elements: Elements, body: Sequence[str], more: Sequence[str]) -> str:

    def parameter(node: Node) -> str:
        is_sum = elements.kinds[node] is Kind.TOTAL
        kind = "double" if is_sum else in_memory(node.meta["val"].dtype)
        return f"{'' if node in elements.written else 'const '}{kind}* __restrict {node.name}"

    signature = ", ".join([*map(parameter, elements.inputs), *more])
    dtypes = {node.meta["val"].dtype for node in elements.nodes if isinstance(node.meta["val"], torch.Tensor)}
    prelude = f"{PRELUDE}\n{PRELUDE_F16}" if torch.float16 in dtypes else PRELUDE
    # Codes of 16 bits have been measured to take three times as long there with wide vectors.
    if not any(node.target is number_of_code and 16 in node.args for node in elements.nodes):
        prelude = WIDE + prelude
    functions = "\n".join(elements.functions.values())
    lines = "\n".join(_indented(body))
    return f"""{prelude}
namespace {{

{functions}
}}  // namespace

extern "C" void kernel({signature}) {{
{lines}
}}
"""


def _indented(lines: Iterable[str]) -> list[str]:
    return [line if line.startswith("#") else f"  {line}" for line in lines]


def _buffer(name: str, kind: str, length: int) -> str:
    return f"alignas(64) {kind} {name}[{length}];"


class _Flat:
    """Writer of the loops over the elements of a flat rule."""

    def __init__(self, elements: Elements) -> None:
        self.elements = elements
        self.length = elements.chunk
        self.blocks = self.length // elements.width if elements.width > 1 else 0
        inputs = elements.of_kind(Kind.OF_ELEMENT, elements.inputs)
        #: Expressions of the inputs of the next chunk, until the statements that fetch it are written.
        self.ahead = [f"{node.name} + at + {self.length}" for node in inputs]
        self.of_block: dict[Node, str] = {}  # expressions of values of a block that have been computed
        kinds, of_elements = elements.kinds, elements.of_kind(Kind.OF_ELEMENT, elements.nodes)
        self.stores = [store for store in elements.stores if kinds[store.into] is Kind.OF_ELEMENT]
        self.block_stores = [store for store in elements.stores if kinds[store.into] is Kind.OF_BLOCK]
        read = [node for node in elements.inputs if node in of_elements and is_read(node)]
        bytes_read = [node for node in read if node.meta["val"].dtype.itemsize == 1]
        halves_read = filter(reads_half, of_elements)
        #: Values that are read into buffers first: node, name of the input, type of the buffer.
        self.buffered = [(node, node.name, "int32_t") for node in bytes_read]
        self.buffered += [(node, str(operand_of(node).name), "float") for node in halves_read]
        self.read = {node: f"{name}_in[j]" for node, name, _ in self.buffered}
        self.apart = {store: f"{store.into.name}_out" for store in self.stores if store.is_apart}
        self.totals = [(store.into.name, store.value.all_input_nodes[0]) for store in elements.totals]
        added = (value for _, value in self.totals)
        late = [*(store.value for store in self.stores), *added]
        self.kept, before, behind = self._divided(late)
        self.quotients, self.first, second = elements.cut(before)
        codes = [node for node in behind if not node.meta["val"].dtype.is_floating_point]
        self.later = [second, codes, [node for node in behind if node not in codes]]

    def _divided(self, late: Sequence[Node]) -> tuple[list[Node], list[Node], list[Node]]:
        """Divide early values at the scales of blocks.

        Returns:
            the values that are kept for later loops, the last of which computes ``late``; the early values
            that are made of no scale, and those that are made of scales.
        """
        elements = self.elements
        kept = elements.kept(late, elements.early)
        early = dict.fromkeys([*kept, *elements.tested, *elements.in_blocks])
        of_scales = elements.made_of(elements.largest, elements.nodes)
        behind = [node for node in early if node in of_scales]
        handed_on = elements.kept(behind, elements.early - of_scales)
        known = {*kept, *handed_on}
        handed_on = [node for node in handed_on if not elements.is_at_hand(node, known)]
        kept = list(dict.fromkeys([*kept, *handed_on]))
        before = [node for node in dict.fromkeys([*early, *handed_on]) if node not in of_scales]
        if behind:  # joined there, where they are read
            joined = [node for node in before if node.target in JOINS and node not in kept]
            before = [node for node in before if node not in joined]
            behind += joined
        return kept, before, behind

    def source(self) -> str:
        elements = self.elements
        numbers = elements.of_kind(Kind.NUMBER, elements.nodes)
        of_numbers = [node for node in numbers if isinstance(node.meta["val"], torch.Tensor)]
        before = Statements(elements, of_numbers, {})
        self.known = before.texts
        body = [*self._loaded(of_numbers), *before.lines, *self._buffers()]
        of_rows = Statements(elements, elements.of_kind(Kind.OF_ROW, elements.nodes), self.known)
        self.known = of_rows.texts
        chunk = [*of_rows.lines, *self._reads(), *self._loops(), *self._writes()]
        if elements.is_matrix:
            body += ["int64_t row = first[0] / columns[0], column = first[0] % columns[0];"]
        body += ["const auto chunk = [&](int64_t at, int count) __attribute__((always_inline)) {"]
        body += [*_indented(chunk), "};", *self._run()]
        return _source(elements, body, ["int64_t n"])

    def _loaded(self, numbers: Sequence[Node]) -> list[str]:
        """Load each scalar once: the compiler does not know that no store changes it."""
        lines = []
        for node in numbers:
            if node.op == "placeholder":
                name = self.elements.name_of(node)
                lines.append(f"const {in_register(node.meta['val'].dtype)} {name} = {node.name}[0];")
                self.known[node] = name
        return lines

    def _buffers(self) -> list[str]:
        buffers = [(f"{name}_in", kind) for _, name, kind in self.buffered]
        kept = dict.fromkeys([*self.kept, *self.quotients])
        buffers += [(f"{self.elements.name_of(n)}_kept", in_register(n.meta["val"].dtype)) for n in kept]
        buffers += [(f"magnitudes{i}", "uint32_t") for i, _ in enumerate(self.elements.largest)]
        buffers += [(x, "float" if store.is_of_halves else "int32_t") for store, x in self.apart.items()]
        buffers += [(f"{total}_of", "float") for total, _ in self.totals]
        lines = [_buffer(name, kind, self.length) for name, kind in buffers]
        return [*lines, *(f"double {total}_lanes[16] = {{}};" for total, _ in self.totals)]

    def _reads(self) -> list[str]:
        lines = []
        for _, name, kind in self.buffered:
            if kind == "float":
                lines.append(f"read_f16({name} + at, {name}_in, count);")
            else:
                lines += _loop([f"{name}_in[j] = {name}[at + j];"])
        return lines

    def _writes(self) -> list[str]:
        lines = []
        for store, name in self.apart.items():
            if store.is_of_halves:
                lines.append(f"write_f16({store.into.name} + at, {name}, count);")
            else:
                kind = in_memory(store.into.meta["val"].dtype)
                lines += _loop([f"{store.into.name}[at + j] = {kind}({name}[j]);"])
        lines += [f"add_up({total}_lanes, {total}_of, count);" for total, _ in self.totals]
        return lines

    def _in_buffers(self, kept: Iterable[Node]) -> dict[Node, str]:
        """Return the elements of the buffers of values."""
        return {node: f"{self.elements.name_of(node)}_kept[j]" for node in kept}

    def _loops(self) -> list[str]:
        first = self._block_loop()
        if not (early := self._early_loops()):
            return [*first, *self._late_loop(self.read, finite=False)]
        first += early
        kept = self._in_buffers(self.kept)
        if not self.elements.tested:
            return [*first, *self._late_loop({**self.read, **kept}, finite=False)]
        quick = _indented(self._late_loop({**self.read, **kept}, finite=True))
        careful = _indented(self._late_loop(self.read, finite=False))
        of_inputs = {node.meta["val"].dtype for node in self.elements.inputs}
        dtypes = of_inputs.union(*(node.args for node in self.elements.nodes if node.target in ON_GRID))
        limit = hex(min([LIMITS[dtype] for dtype in LIMITS if dtype in dtypes] or LIMITS.values()))
        return [*first, f"if (__builtin_expect(largest < {limit}u, 1)) {{", *quick, "} else {", *careful, "}"]

    def _early_loops(self) -> list[str]:
        """Write the loops that compute early values, keep some, and note the largest magnitudes.

        There are two, if enough is computed from quotients: Note [Two early loops] in ``elements.py``.
        """
        elements = self.elements
        if not (elements.early or elements.largest):
            return []
        width, loops = elements.width, list[str]()
        known = {**self.known, **self.read}
        before = ["uint32_t largest = 0;"] if elements.tested else []
        if elements.tested and self.blocks:
            before.append(f"alignas(64) uint32_t largest_at[{width}] = {{}};")  # of each place in a block
        before += [_buffer(f"largest{i}", "uint32_t", self.blocks) for i, _ in enumerate(elements.largest)]
        kept = self._in_buffers((*self.kept, *self.quotients))
        later = [node for each in self.later for node in each]
        for wanted in ([*self.first, *self.quotients], *filter(None, self.later)):
            done = {node: text for node, text in kept.items() if node not in (*wanted, *later)}
            loops += self._early_loop(wanted, {**known, **done})
            for i, (value, node) in enumerate(zip(elements.in_blocks, elements.largest, strict=True)):
                if value in wanted:
                    shape, given = f"{width}, {self.blocks}", f"magnitudes{i}, largest{i}, count / {width}"
                    loops.append(f"largest_of_blocks<{shape}>({given});")
                    self.of_block[node] = f"bits<float>(largest{i}[block])"
            loops += self._block_loop()
            later = [node for node in later if node not in wanted]
        if elements.tested and self.blocks:
            head = f"for (int i = 0; i < {width}; ++i) {{"
            loops += _loop(["largest = larger(largest, largest_at[i]);"], ["largest"], head)
        return [*before, *loops]

    def _block_loop(self) -> list[str]:
        """Write the loop that computes and keeps values of a block that elements and stores read.

        It computes those that are made of no largest magnitude that is not known yet.
        """
        elements, kinds = self.elements, self.elements.kinds
        unknown = {node for node in elements.largest if node not in self.of_block}
        stored = {store.value for store in self.block_stores}
        wanted = [
            node
            for node in elements.of_kind(Kind.OF_BLOCK, elements.nodes)
            if node not in self.of_block
            and (node in stored or any(kinds[user] is not Kind.OF_BLOCK for user in node.users))
            and unknown.isdisjoint(made_of(node))
        ]
        if not wanted:
            return []
        computed = Statements(elements, wanted, {**self.known, **self.of_block})
        lines, buffers = computed.lines, []
        for node in wanted:
            name = f"{elements.name_of(node)}_of"
            buffers.append(_buffer(name, in_register(node.meta["val"].dtype), self.blocks))
            lines.append(f"{name}[block] = {computed.texts[node]};")
            self.of_block[node] = f"{name}[block]"
        head = f"for (int block = 0; block < count / {elements.width}; ++block) {{"
        return [*buffers, *_loop(lines, (), head)]

    def _early_loop(self, wanted: Sequence[Node], known: Mapping[Node, str]) -> list[str]:
        """Write a loop that computes some of the early values."""
        elements = self.elements
        kept = self._in_buffers(node for node in (*self.kept, *self.quotients) if node in wanted)
        tested = [node for node in elements.tested if node in wanted]
        of_blocks = [node for node in elements.in_blocks if node in wanted]
        computed = Statements(elements, [*kept, *tested, *of_blocks], {**known, **self.of_block}, finite=True)
        lines = [*computed.lines, *(f"{at} = {computed.texts[node]};" for node, at in kept.items())]
        noted = ["largest"] if tested and not self.blocks else []
        if tested:
            into = largest = "largest_at[i]" if self.blocks else "largest"
            for node in tested:
                largest = f"larger({largest}, magnitude({bare(computed.texts[node])}))"
            lines.append(f"{into} = {largest};")
        for i, value in enumerate(elements.in_blocks):
            if value in of_blocks:
                lines.append(f"magnitudes{i}[j] = magnitude({bare(computed.texts[value])});")
        return self._loop(lines, noted)

    def _late_loop(self, known: Mapping[Node, str], *, finite: bool) -> list[str]:
        """Write the loop that rounds and stores."""
        wanted = [_stored(store) for store in self.stores]
        wanted += [value for _, value in self.totals]
        given = {**self.known, **known, **self.of_block}
        done = Statements(self.elements, wanted, given, finite=finite, before_stores=True)
        lines = list(done.lines)
        for store in self.stores:
            value = bare(done.texts[_stored(store)])
            into = f"{self.apart[store]}[j]" if store in self.apart else f"{store.into.name}[at + j]"
            lines.append(f"{into} = {value};")
        lines += [f"{total}_of[j] = {bare(done.texts[value])};" for total, value in self.totals]
        at = f"at / {self.elements.width} + block"
        end = [f"{store.into.name}[{at}] = {self.of_block[store.value]};" for store in self.block_stores]
        return self._loop(lines, end=end)

    def _loop(self, lines: Sequence[str], noted: Sequence[str] = (), end: Sequence[str] = ()) -> list[str]:
        width = self.elements.width
        if width == 1:
            return _loop(lines, noted)
        of_element = [f"const int j = {width} * block + i;", *lines]
        inner = _loop(of_element, noted, f"for (int i = 0; i < {width}; ++i) {{")
        head = f"for (int block = 0; block < count / {width}; ++block) {{"
        begin = [f"fetch({ahead} + {width} * block, {width});" for ahead in self.ahead]
        self.ahead = []
        return [head, *_indented([*begin, *inner, *end]), "}"]

    def _run(self) -> list[str]:
        """Write the loop over chunks, which fetches the next one ahead if no loop over blocks has."""
        width = self.elements.width
        length = self.length
        fetched = [f"  fetch({ahead}, {length});" for ahead in self.ahead]
        whole = [*fetched, f"  chunk(at, {length});"]
        if self.elements.is_matrix:
            loop = [
                "for (int64_t at = 0, count; at < elements; at += count) {",
                "  count = columns[0] - column;",
                "  if (count > elements - at) count = elements - at;",
                f"  if (count > {length}) count = {length};",
                f"  if (count == {length}) {{",
                *_indented(whole),
                "  } else {",
                "    chunk(at, int(count));",
                "  }",
                "  column += count;",
                "  if (column == columns[0]) ++row, column = 0;",
                "}",
            ]
        else:
            loop = [
                "int64_t at = 0;",
                f"for (; at + {length} <= elements; at += {length}) {{",
                *whole,
                "}",
                "if (at < elements) chunk(at, int(elements - at));",
            ]
        return [
            f"const int64_t elements = {f'{width} * n' if width > 1 else 'n'};",
            *loop,
            *(f"{total}[0] = sum_of_lanes({total}_lanes);" for total, _ in self.totals),
        ]


def _stored(store: Store) -> Node:
    """Return the value that a loop leaves for a store: for float16, the float32 number."""
    return operand_of(store.value) if store.is_of_halves else store.value


def _loop(
    lines: Iterable[str], noted: Sequence[str] = (), head: str = "for (int j = 0; j < count; ++j) {"
) -> list[str]:
    reductions = f" reduction(max : {', '.join(noted)})" if noted else ""
    return [f"#pragma omp simd{reductions}", head, *_indented(lines), "}"]
