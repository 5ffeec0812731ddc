"""Rules: parts of a step in a form that is the same for equal parts, and their compilation.

Note [One kernel for equal parts]
---------------------------------
A part is written down as a :class:`Rule`: its operations in the order of a walk from its stores, operands as
numbers, constants literally. Two parts with one rule are the same function of different tensors, and one
compiled kernel serves both.

Where every operation is elementwise and every tensor has one shape and one dense layout, element *i* in
memory of each result depends on element *i* in memory of each operand, whatever the shape. Such a *flat*
rule leaves the shape out: it is compiled for vectors of a symbolic length *n* (2 at least), and its kernel is
called with the tensors as they are. The code that Inductor's C++ backend generates takes addresses and *n*,
so that no flat view has to be made. (Its own checks of sizes and strides are switched off for such kernels;
:mod:`collage_fx.runtime.layouts` checks the arguments of a step against the layouts it was compiled for.)
What one C++ function computes is not even called from Python (Note [One call for all tensors]). On a GPU
the kernel of a flat rule, or of numbers, is launched once for all its tensors, which it finds in a table
(Note [A kernel over a table], Note [One launch for all tensors]).

Dither goes by the places of elements in memory: its kernels are given that of the first of their piece.

So do blocks of elements that have a scale in common (Note [Blocks]): a flat rule with blocks is compiled for
tensors ``[n, 32]`` and scales ``[n, 1]``, with n the number of blocks, where others have elements.

Sums over all elements (``update_sums``, Note [Metrics]) leave a rule flat: the order in which they are taken
is of no account. So do counts over a sample (``update_sizes``), but only of a tensor as a whole: they become
a part of their own, before the one that overwrites what they are made of. A kernel over a table sums and
counts block by block (Note [Sums of a launch]).

A flat rule whose code is not one C++ function is compiled twice, if both are needed: for few elements, on
which threads would wait longer for each other than they work, and for many.

Other rules (reductions, matrix products, views) name sizes and strides, and serve the tensors that agree in
them.

Kernels are compiled from graphs made anew, in a shape environment of their own: names of symbols and nodes
come out the same in every process, which is what Inductor's cache goes by.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import sympy
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from collage_fx.graph import (
    REVISION,
    Reason,
    Reasons,
    device_facts,
    is_dense,
    is_elementwise,
    is_number,
    may_raise,
    placeholders,
    rest,
    size_argument,
    stored,
    sums_of_update,
    tensor_value,
    update_size,
    update_sizes,
    update_sums,
    update_value,
)
from collage_fx.lowering.attempts import Attempt, compile_somehow
from collage_fx.lowering.parts import Part
from collage_fx.numerics import BLOCK, BLOCK_OPERATORS, PHASES, SIZES, SUMS
from collage_fx.numerics import update_sums as measures
from collage_fx.runtime import (
    FIRST_OF_PIECE,
    HOST,
    LENGTH,
    LONGEST_PIECE,
    MOST_ARGUMENTS,
    MOST_BUFFERS,
    SUMS_OF_PIECE,
    Column,
    Kernel,
    Summed,
    buffer_at,
)
from collage_fx.torch_compat import (
    CFunction,
    Sampling,
    SummedValues,
    Sums,
    SymbolicScope,
    TableKernel,
    TableSums,
    add_to_cache_key,
    c_function,
    fusing_distant_nodes,
    generated_code,
    inductor_config,
    innermost_callable,
    note_generated_code,
    pytree,
    table_kernel,
    without_triton,
)

__all__ = ["forget_kernels"]

aten = torch.ops.aten

#: Elements from which on a kernel uses threads. An AdamW step takes about a nanosecond for each, threads that
#: sleep 5 to 20 microseconds to begin.
MANY = 1 << 14

#: A symbolic length is taken to be no less: of sizes 0 and 1 PyTorch has ideas of its own (broadcasting,
#: strides). A kernel over a table knows nothing of them: there one element is a row like others.
SHORTEST = 2

#: Elements that a sum in a flat rule can count, or 32-bit indices.
LONGEST = 1 << 31

#: Elements of a piece whose kernel has buffers for all of them: these stay in the processor's first cache.
LONGEST_WITH_BUFFERS = 1 << 11

#: Lengths that stand for few and many elements when Inductor decides about threads.
FEW_HINT, MANY_HINT = 1 << 8, 1 << 24


#: With blocks, whose largest numbers are known after a loop of its own: in the next one, all is computed anew
#: from what the first has read, which is less than to keep it.
INLINED = {"realize_opcount_threshold": 1 << 16, "realize_reads_threshold": 1 << 16}


class _Length:
    """Stands for the symbolic length in the arguments of an operation."""

    def __repr__(self) -> str:
        return "n"


_LENGTH = _Length()


class _First:
    """Stands for the index of a piece's first element, 0-d, in the arguments of an operation."""

    def __repr__(self) -> str:
        return "first"


_FIRST = _First()


@dataclass(frozen=True)
class _Reference:
    """An operand: the value of an earlier line."""

    line: int


@dataclass(frozen=True)
class _Line:
    """One value of a rule: an input (no target) or the result of an operation."""

    target: Any
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, eq=False)
class Rule:
    """A part's computation, without saying of which tensors.

    Attributes:
        key: equal for equal rules.
        flat: whether it is elementwise in one dense layout.
        lines: inputs and operations.
        stores: ``(destination, value)`` lines; a destination of None is a result, for which the caller brings
            memory as a further input.
        operands: of this part: what its inputs are, in their order.
        length: elements of this part's tensors, or blocks of them, if it is flat.
        width: elements of a unit of length: 1, or those of a block.
        independent: whether a flat rule stores into no numbers, or a rule of numbers is of nothing else, and
            nothing but memory goes in.
    """

    key: Hashable
    flat: bool
    lines: tuple[_Line, ...]
    stores: tuple[tuple[int | None, int], ...]
    operands: tuple[Node, ...]
    length: int
    width: int
    independent: bool

    @property
    def divisible(self) -> bool:
        """Whether a kernel may compute pieces of the tensors one by one; their sums add up to its sums."""
        return self.flat and self.independent and not any(line.target is update_sizes for line in self.lines)

    @property
    def device(self) -> torch.device:
        """Where its kernel runs: where its tensors are, but for numbers of the host that go there with it."""
        layouts = [line.args for line in self.lines if line.target is None and len(line.args) > 1]
        devices = [device for _, device, *_ in layouts]
        return next((device for device in devices if device != HOST), HOST)

    @property
    def is_tabled(self) -> bool:
        """Whether its kernel is one over a table, if its code allows that."""
        return self.independent and device_facts(self.device).is_launched

    @property
    def is_placed(self) -> bool:
        """Whether a flat rule goes by the places of its elements, too: it is given that of the first."""
        return self.flat and any(line.target is PHASES for line in self.lines)

    @property
    def operations(self) -> set[str]:
        """The names of the rule's operators."""
        return {str(line.target) for line in self.lines if line.target is not None}

    @property
    def is_measured(self) -> bool:
        """Whether it sums or counts."""
        return any(line.target in (update_sums, update_sizes) for line in self.lines)

    @property
    def sums(self) -> set[int]:
        """The input lines that sums over all elements are stored into."""
        return {into for into, value in self.stores if into is not None and self._is_sum(value)}

    def _is_sum(self, line: int) -> bool:
        return self.lines[line].target is update_sums


def rule_of(part: Part) -> Rule:
    """The rule of a part of a graph."""
    return _Writer(part).rule()


class _Writer:
    """Walks a part from its stores back to its inputs.

    ``rows`` are the sums over all elements, or counts over some, and the inputs that they are stored into.
    """

    def __init__(self, part: Part) -> None:
        self.part = part
        self.nodes = self._walk()
        self.rows = {
            node
            for store in part.stores
            if stored(store).target in (update_sums, update_sizes)
            for node in store.all_input_nodes
        }
        self.has_blocks = any(node.target in BLOCK_OPERATORS for node in self.nodes)
        self.shape = max((v.shape for v in self._elements()), key=torch.Size.numel, default=torch.Size())
        self.flat = self._is_flat()

    def rule(self) -> Rule:
        numbers = {node: i for i, node in enumerate(self.nodes)}
        lines = tuple(self._line(node, numbers) for node in self.nodes)
        stores: list[tuple[int | None, int]] = []
        for store in self.part.stores:
            stores.append((numbers[store.all_input_nodes[0]], numbers[stored(store)]))
        stores += [(None, numbers[value]) for value in self.part.results]
        layouts = () if self.flat else tuple(self._layout(value) for value in self.part.results)
        key = (self.flat, tuple(map(repr, lines)), tuple(stores), layouts)
        operands = tuple(node for node in self.nodes if self._is_input(node))
        width = BLOCK if self.has_blocks else 1
        length = self.shape.numel() // width if self.flat else 0
        independent = self._is_independent(operands)
        return Rule(key, self.flat, lines, tuple(stores), operands, length, width, independent)

    def _walk(self) -> list[Node]:
        """Every node that the stores and results are computed from, operands first."""
        found: dict[Node, None] = {}
        roots = [*self.part.results]
        for store in reversed(self.part.stores):
            roots += reversed([n for n in store.args[:2] if isinstance(n, Node)])
        stack = [(node, False) for node in roots]
        while stack:
            node, done = stack.pop()
            if node in found:
                continue
            if done or self._is_input(node):
                found[node] = None
                continue
            stack.append((node, True))
            stack += [(operand, False) for operand in reversed(node.all_input_nodes)]
        return list(found)

    def _is_input(self, node: Node) -> bool:
        return node.op in ("placeholder", "get_attr") or node in self.part.given

    def _elements(self) -> list[Tensor]:
        values = [tensor_value(node) for node in self.nodes if node not in self.rows]
        return [value for value in values if value is not None and value.dim() > 0]

    def _is_flat(self) -> bool:
        tensors = [value for value in self._elements() if not self._is_of_blocks(value)]
        if self.has_blocks and self.shape.numel() < SHORTEST * BLOCK:
            return False
        is_launched = any(device_facts(value.device).is_launched for value in tensors)
        shortest, longest = (1, LONGEST_PIECE) if is_launched else (SHORTEST, LONGEST)
        if self.shape.numel() < shortest or any(value.shape != self.shape for value in tensors):
            return False
        if self.rows and self.shape.numel() >= longest:
            return False
        inputs = [node for node in self.nodes if self._is_input(node) and node not in self.rows]
        memory = [tensor_value(node) for node in (*self.part.results, *inputs)]
        placed = [v for v in memory if v is not None and v.dim() > 0 and not self._is_of_blocks(v)]
        layouts = {_order_in_memory(value) for value in placed}
        return (
            len(layouts) <= 1
            and all(map(is_dense, placed))
            and all(self._is_input(node) or self._is_elementwise(node) for node in self.nodes)
        )

    def _is_independent(self, inputs: Sequence[Node]) -> bool:
        if any(tensor_value(node) is None for node in inputs) or any(map(may_raise, self.nodes)):
            return False
        written = [*self.part.results, *(store.all_input_nodes[0] for store in self.part.stores)]
        if self.flat:
            return not any(map(is_number, written))
        return all(map(is_number, self.nodes))

    def _is_of_blocks(self, value: Tensor) -> bool:
        """Whether a tensor has one element for each block of the others."""
        rows = self.shape[0] if self.shape else 1
        return self.has_blocks and value.shape == (rows, self.shape.numel() // (rows * BLOCK))

    def _is_elementwise(self, node: Node) -> bool:
        return node in self.rows or node.target in BLOCK_OPERATORS or is_elementwise(node)

    def _line(self, node: Node, numbers: dict[Node, int]) -> _Line:
        if self._is_input(node):
            return _Line(None, self._layout(node))
        args: tuple[Any, ...] = node.args
        kwargs = dict(node.kwargs)
        if self.flat and not is_number(node):
            kwargs.pop("memory_format", None)
            if node.target is PHASES:
                args = (*args[:2], _FIRST)
            if (at := size_argument(node.target)) is not None:
                args = (*args[:at], self._flat_layout(node.meta["val"])[0], *args[at + 1 :])
        args, kwargs = pytree.tree_map_only(Node, lambda n: _Reference(numbers[n]), (args, kwargs))
        return _Line(node.target, args, tuple(sorted(kwargs.items())))

    def _layout(self, node: Node) -> tuple[Any, ...]:
        """The description of an input in a rule: all that a kernel's code may depend on."""
        value = tensor_value(node)
        if value is None:
            return (type(node.meta["val"]),)
        if self.flat and value.dim() > 0 and node not in self.rows:
            return value.dtype, value.device, *self._flat_layout(value)
        return value.dtype, value.device, tuple(value.shape), tuple(value.stride())

    def _flat_layout(self, value: Tensor) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        """The sizes and strides with which a flat rule sees a tensor."""
        if not self.has_blocks:
            return (_LENGTH,), (1,)
        return ((_LENGTH, 1), (1, 1)) if self._is_of_blocks(value) else ((_LENGTH, BLOCK), (BLOCK, 1))


def samples_first(part: Part) -> list[Part]:
    """A flat part cut into its samples and the rest, which runs after them; any other part as it is.

    So is one that is launched once for all tensors.
    """
    samples = tuple(store for store in part.stores if stored(store).target is update_sizes)
    rest_of_part = replace(part, stores=tuple(store for store in part.stores if store not in samples))
    if not samples or not (rest_of_part.stores or part.results):
        return [part]
    rule = rule_of(part)
    if not rule.flat or rule.is_tabled:
        return [part]
    return [replace(part, stores=samples, results=()), rest_of_part]


def _order_in_memory(value: Tensor) -> tuple[tuple[int, int], ...]:
    """The dimensions of more than one element with their strides: equal for equal orders in memory."""
    if value.numel() == 0:
        return ()
    return tuple(
        (i, stride)
        for i, (size, stride) in enumerate(zip(value.shape, value.stride(), strict=True))
        if size > 1
    )


def kernel_of(rule: Rule) -> Kernel | Reason:
    """The kernel for a rule's part, compiled unless it is known, or why it cannot be compiled."""
    is_launched = device_facts(rule.device).is_launched
    if is_launched or rule.length * rule.width < MANY or torch.get_num_threads() == 1:
        return _kernel(rule, many=is_launched)
    if rule.independent:
        few = _kernel(rule, many=False)
        if isinstance(few, Reason) or few.function is not None:
            return few
    return _kernel(rule, many=True)


def _kernel(rule: Rule, *, many: bool) -> Kernel | Reason:
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    key = rule.key, many, torch.get_num_threads(), is_deterministic, inductor_config.get_hash()
    if key in _made:
        note_generated_code(_made[key].code)
        return _made[key].kernel
    with generated_code() as code:
        kernel = compile_rule(rule, many=many)
    if isinstance(kernel, Kernel):
        _made[key] = _Made(kernel, code, rule.lines)
    return kernel


def forget_kernels() -> None:
    """Have equal rules of later steps compiled anew."""
    _made.clear()


class _Made(NamedTuple):
    """A kernel that has been compiled.

    Attributes:
        kernel: itself.
        code: that Inductor has written for it.
        lines: of its rule, whose functions the rule's key has by address.
    """

    kernel: Kernel
    code: Sequence[str]
    lines: tuple[_Line, ...]


#: The kernels of all steps so far: those of other optimizers are often of the same rules.
_made: dict[Hashable, _Made] = {}


def compile_rule(rule: Rule, *, many: bool) -> Kernel | Reason:
    """The kernel of a rule.

    Args:
        rule: of any of the parts that it will serve.
        many: whether a flat rule is compiled for many elements.

    Returns:
        the kernel, or a reason where the code would not hold for every length (or every value of a symbolic
        number).
    """
    if not (rule.is_tabled and rule.flat and rule.is_measured):
        return _compiled(rule, many=many)
    kernel = _compiled(rule, many=many, by_element=True)
    return kernel if isinstance(kernel, Kernel) else _compiled(rule, many=many, no_table=kernel)


def _compiled(
    rule: Rule, *, many: bool, by_element: bool = False, no_table: Reason | None = None
) -> Kernel | Reason:
    """The kernel of a rule.

    Args:
        rule: of any of the parts that it will serve.
        many: whether a flat rule is compiled for many elements.
        by_element: whether sums and counts are stored element by element, for a kernel over a table to take.
        no_table: why there is no such kernel, if that is known.
    """
    scope = SymbolicScope()
    with scope:
        gm = _graph_of(rule, scope, MANY_HINT if many else FEW_HINT, by_element=by_element)
        inputs = [node.meta["val"] for node in placeholders(gm.graph)]
        settings: dict[str, Any] = {
            "size_asserts": not (rule.flat or rule.independent),
            "triton.cudagraphs": False,
        }
        if rule.flat and not many:
            settings["cpp.threads"] = 1
        if rule.flat and rule.width > 1:
            settings.update(INLINED)
        if rule.is_tabled:
            settings["combo_kernels"] = False
        with (
            inductor_config.patch(settings),
            fusing_distant_nodes() if rule.flat else nullcontext(),
            without_triton() if rule.is_tabled else nullcontext(),
            generated_code() as code,
        ):
            attempt = compile_somehow(gm, inputs, is_inference=True)
    if not attempt.is_compiled:
        return attempt.reasons[0][1]
    if scope.has_guards(below=LONGEST):
        return Reason(
            "a kernel would not hold for every length or number", ", ".join(sorted(rule.operations))
        )
    call = innermost_callable(attempt.call)
    if rule.is_tabled:
        return _launched_kernel(rule, attempt, call, code, inputs, no_table, by_element=by_element)
    function = _batched_function(rule, call, len(inputs), many=many)
    if isinstance(function, Reason):
        reasons: Reasons = (("in one call for all tensors", function), *attempt.reasons)
        return Kernel(call, device=rule.device, reasons=reasons, vectors=attempt.vectors)
    lines = [i for i, line in enumerate(rule.lines) if line.target is None]
    before = rule.flat + rule.is_placed  # the length, and the first element's place
    sums = {index for index, line in enumerate(lines, start=before) if line in rule.sums}

    def kind(argument: int) -> int:
        if argument < 0:
            return buffer_at(~argument)
        if argument in sums:
            return SUMS_OF_PIECE
        if rule.is_placed and argument == 1:
            return FIRST_OF_PIECE
        value = inputs[argument]
        return bytes_of_a_unit(rule, value) if isinstance(value, Tensor) else LENGTH

    kinds = tuple(map(kind, function.arguments))
    return Kernel(
        call,
        function,
        kinds,
        divisible=rule.divisible,
        width=rule.width,
        reasons=attempt.reasons,
        vectors=attempt.vectors,
    )


def bytes_of_a_unit(rule: Rule, value: Tensor) -> int:
    """The bytes of a tensor for each unit of a rule's length; 0 if it is a number."""
    of_unit = value.shape[1] if value.dim() == 2 and rule.width > 1 else 1
    return value.dtype.itemsize * of_unit if value.dim() > 0 else 0


def _launched_kernel(
    rule: Rule,
    attempt: Attempt,
    call: Callable[[list[Any]], Any],
    code: Sequence[str],
    inputs: Sequence[Any],
    no_table: Reason | None,
    *,
    by_element: bool,
) -> Kernel | Reason:
    """The kernel of a rule over a table, or, where there is none, one that is called for each tensor.

    That one has no table from which to read a number of the host, and does not sum: then there is a
    reason.
    """
    what = ", ".join(sorted(rule.operations))
    units = {i: bytes_of_a_unit(rule, each) for i, each in enumerate(inputs) if isinstance(each, Tensor)}
    found: TableKernel | str
    if no_table is not None:
        found = no_table.what
    else:
        elements = [i for i, unit in units.items() if unit]
        sums = _table_sums(rule, len(inputs)) if by_element else None
        found = table_kernel(code[-1], len(inputs), 0 if rule.flat else None, elements, sums)
    if isinstance(found, str) and by_element:
        return Reason(found, what)
    layouts = [line.args for line in rule.lines if line.target is None]
    if isinstance(found, str):
        if any(layout[1] == HOST for layout in layouts):
            return Reason(f"it reads a number of the host's, and {found}", what)
        reasons: Reasons = (("in one call for all tensors", Reason(found, what)), *attempt.reasons)
        return Kernel(call, device=rule.device, reasons=reasons)
    before = rule.flat + rule.is_placed

    def column(argument: int) -> Column:
        if rule.is_placed and argument == 1:
            return Column(is_place=True)
        at = argument - before
        is_of_host = at < len(layouts) and layouts[at][1] == HOST
        return Column(units[argument], inputs[argument].dtype.itemsize if is_of_host else 0)

    columns = tuple(map(column, found.arguments))
    found.begin()
    return Kernel(
        call,
        found,
        columns=columns,
        device=rule.device,
        width=rule.width,
        sums=_summed(rule) if by_element else (),
        reasons=attempt.reasons,
    )


def _measures(rule: Rule) -> list[tuple[int, _Line]]:
    """The stores of sums and counts: the lines of the rows, and of what is stored into them."""
    stores = [
        (into, rule.lines[value])
        for into, value in rule.stores
        if rule.lines[value].target in (update_sums, update_sizes)
    ]
    assert all(into is not None for into, _ in stores)
    return stores  # type: ignore[return-value]


def _sums_of(line: _Line) -> Sums:
    """The description of what a line sums."""
    return sums_of_update(sum(each is not None for each in line.args))


def _values(line: _Line) -> list[tuple[Any, tuple[Any, ...]]]:
    """The operators, and their arguments, of what is stored for each element of a sum or a count."""
    if line.target is update_sizes:
        return [(update_size, line.args)]
    return [(update_value, (*line.args, i)) for i, _ in enumerate(_sums_of(line).values)]


def _table_sums(rule: Rule, inputs: int) -> TableSums:
    """What the kernel over a table sums: the arguments of values are the last of its inputs."""
    lines = [line for _, line in _measures(rule)]
    arguments = iter(range(inputs - sum(len(_values(line)) for line in lines), inputs))
    tensors, sizes = list[SummedValues](), list[int]()
    for line in lines:
        of_line = tuple(itertools.islice(arguments, len(_values(line))))
        if line.target is update_sizes:
            sizes += of_line
        else:
            sums = _sums_of(line)
            tensors.append(SummedValues(of_line, tuple(sums.products.values()), tuple(sums.counts.values())))
    number, place, elements = sympy.symbols("number place elements")
    sampling = Sampling(
        number=str(measures.nearest_sampled(place, elements, _quotient)),
        place=str(measures.sampled(number, elements, _quotient)),
        together=measures.TOGETHER,
        counters=len(SIZES),
    )
    return TableSums(tensors, sizes, sampling, rule.width)


def _quotient(dividend: Any, divisor: Any) -> sympy.Symbol:
    """The text of a quotient, rounded down, as a part of expressions."""
    return sympy.Symbol(f"(({dividend}) // ({divisor}))")


def _summed(rule: Rule) -> tuple[Summed, ...]:
    """Where the partial sums and the counters of a kernel over a table are wanted."""
    lines = [i for i, line in enumerate(rule.lines) if line.target is None]
    found = []
    parts = counters = 0
    for into, line in _measures(rule):
        argument = lines.index(into) + rule.flat + rule.is_placed
        if line.target is update_sizes:
            found.append(Summed(argument, 0, counters, len(SIZES)))
            counters += len(SIZES)
            continue
        sums = _sums_of(line)
        names = [*sums.products, *sums.counts]
        for place, name in enumerate(SUMS):
            same = name if name in names else measures.WITHOUT_LO[name]
            if same is not None:
                found.append(Summed(argument, place, parts + names.index(same)))
        parts += len(names)
    return tuple(found)


def _batched_function(
    rule: Rule, call: Callable[[list[Any]], Any], inputs: int, *, many: bool
) -> CFunction | Reason:
    """The C++ function of a kernel that is called for many tensors at once, or why Python has to call it."""
    what = ", ".join(sorted(rule.operations))
    if not rule.independent:
        return Reason(
            "a kernel is neither elementwise in one layout nor of numbers alone, or may raise", what
        )
    longest = LONGEST_WITH_BUFFERS // rule.width if rule.divisible else 0
    function = None if many else c_function(call, inputs, longest)
    if function is None:
        return Reason("a kernel's code is more than one C++ function", what)
    if len(function.arguments) > MOST_ARGUMENTS or function.buffers > MOST_BUFFERS:
        return Reason("a kernel has too many arguments or buffers", what)
    return function


def _graph_of(rule: Rule, scope: SymbolicScope, hint: int, *, by_element: bool = False) -> GraphModule:
    """The rule as a graph, in which sums and counts may be stored element by element."""
    taken_apart = _measures(rule) if by_element else []
    values = [value for _, line in taken_apart for value in _values(line)]
    graph = Graph()
    length = _input(graph, "n", scope.length("n", hint)) if rule.flat else None
    first = None
    if rule.is_placed:
        first = _input(graph, "first", scope.tensor((), (), torch.int32, rule.device))
    made: dict[int, Node] = {}
    for i, line in enumerate(rule.lines):
        if line.target is None:
            made[i] = _input(graph, f"in{i}", _value_of_input(rule, line.args, scope, f"s{i}", length))
    results = [_input(graph, f"out{i}", None) for i, store in enumerate(rule.stores) if store[0] is None]
    results += [_input(graph, f"value{i}", None) for i, _ in enumerate(values)]

    def called(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        arguments = pytree.tree_map_only(_Reference, lambda r: made[r.line], (args, kwargs))
        arguments = pytree.tree_map_only(_Length, lambda _: length, arguments)
        arguments = pytree.tree_map_only(_First, lambda _: first, arguments)
        node = graph.call_function(target, *arguments)
        node.meta["val"] = scope.run(node)
        return node

    taken = [line for _, line in taken_apart]
    for i, line in enumerate(rule.lines):
        if line.target is not None and line not in taken:
            made[i] = called(line.target, line.args, dict(line.kwargs))
    stores = [(into, made[value]) for into, value in rule.stores if rule.lines[value] not in taken]
    stores += [(None, called(target, args, {})) for target, args in values]
    for destination, value in stores:
        stored = value.meta["val"]
        into = results.pop(0) if destination is None else made[destination]
        if destination is None:
            into.meta["val"] = scope.tensor(stored.shape, stored.stride(), stored.dtype, stored.device)
        store = graph.call_function(aten.copy_.default, (into, value))
        store.meta["val"] = into.meta["val"]
    graph.output(())
    _use_rest(graph)
    gm = GraphModule({}, graph)
    add_to_cache_key(gm, revision=REVISION, hint=hint)
    return gm


def _use_rest(graph: Graph) -> None:
    """Replace traces of ``arithmetic.rest`` by the operator ``rest``, whose code is shorter."""
    for node in graph.find_nodes(op="call_function", target=aten.where.self):
        operands = _operands_of_rest(*node.args)
        if operands is not None:
            with graph.inserting_before(node):
                made = graph.call_function(rest, operands)
            made.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(made)
    graph.eliminate_dead_code()


def _operands_of_rest(finite: Any, difference: Any, zero: Any) -> tuple[Node, Node] | None:
    """``value`` and ``hi`` of ``where(abs(hi) < inf, value - hi, 0)``; None for any other ``where``."""
    if not all(isinstance(node, Node) for node in (finite, difference, zero)):
        return None
    if difference.target is not aten.sub.Tensor or difference.kwargs:
        return None
    value, hi = difference.args
    is_rest = (
        (finite.target, finite.args[1:]) == (aten.lt.Scalar, (math.inf,))
        and isinstance(magnitude := finite.args[0], Node)
        and (magnitude.target, magnitude.args) == (aten.abs.default, (hi,))
        and zero.target is aten.full.default
        and zero.args[1] == 0
        and all(isinstance(each, Node) and each.meta["val"].dtype == torch.float32 for each in (value, hi))
        and value.meta["val"].shape == hi.meta["val"].shape
    )
    return (value, hi) if is_rest else None


def _input(graph: Graph, name: str, value: Any) -> Node:
    node = graph.placeholder(name)
    node.meta["val"] = value
    return node


def _value_of_input(
    rule: Rule, layout: tuple[Any, ...], scope: SymbolicScope, name: str, length: Node | None
) -> Any:
    if len(layout) == 1:
        return scope.number(name, layout[0])
    dtype, device, size, stride = layout
    if rule.independent and not size:
        device = rule.device  # where a number of the host is by then
    sizes = pytree.tree_map_only(_Length, lambda _: length.meta["val"] if length is not None else None, size)
    return scope.tensor(sizes, stride, dtype, device)
