"""The compilation of rules to kernels.

The kernels of flat rules, and those of numbers, are printed (``codegen``): C++ on the host, Triton on a GPU.
Inductor compiles what has no spelling there, and what is neither (Note [Islands] in ``islands.py``).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from collage_fx import codegen, torch_compat
from collage_fx.codegen import NoSpelling
from collage_fx.errors import FailedLoweringError
from collage_fx.graph import Reason, Reasons, device_facts, placeholders
from collage_fx.lowering.attempts import compile_somehow, inductors_faults
from collage_fx.lowering.rule_graphs import graph_of
from collage_fx.lowering.rules import LONGEST, Line, Rule
from collage_fx.lowering.stacks import stacked_graph
from collage_fx.lowering.transposes import TRANSPOSES
from collage_fx.runtime import HOST, Column, Kernel, Stackable
from collage_fx.torch_compat import CFunction, InductorFault, SymbolicScope

aten = torch.ops.aten

#: Length that Inductor assumes for a symbolic length when it decides about threads: many elements.
HINT = 1 << 24

#: Settings for rules with blocks, whose largest magnitudes need a loop of their own: the next loop recomputes
#: all values from the inputs of the first, which costs less than storing them.
INLINED = {"realize_opcount_threshold": 1 << 16, "realize_reads_threshold": 1 << 16}

#: Products of matrices, and the operators that write them into given memory. Inductor's code on a CPU calls
#: these, too, but copies their results, and takes seconds to compile.
PRODUCTS: dict[Any, Any] = {aten.mm.default: aten.mm.out, aten.bmm.default: aten.bmm.out}

#: Operators that move elements and compute nothing.
MOVES = (*TRANSPOSES, aten.clone.default)


def kernel_of(rule: Rule) -> Kernel | Reason:
    """Return the kernel for a rule's part, compiled unless it is known, or why it cannot be compiled."""
    return _known(rule, rule.key, lambda: compile_rule(rule))


def _known(rule: Rule, key: Hashable, compiled: Callable[[], Kernel | Reason]) -> Kernel | Reason:
    """Return the kernel of a rule that is known under a key, or compile it and remember it."""
    by_inductor = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    of_printed = key, torch_compat.inductor_config.get_hash()
    of_compiled = *of_printed, *by_inductor
    for full in (of_printed, of_compiled):
        if full in _made:
            kernel, code, _ = _made[full]
            torch_compat.note_generated_code(code)
            return kernel
    with torch_compat.generated_code() as code:
        found = compiled()
    if isinstance(found, Kernel):
        _made[of_printed if found.call is None else of_compiled] = found, code, rule.lines
    return found


def forget_kernels() -> None:
    """Forget all kernels: equal rules of later steps are compiled again."""
    _made.clear()


#: Kernels of all steps so far, each with its code, and the lines of its rule, which keep functions alive that
#: the key contains by address. Steps of different optimizers often have equal rules.
_made: dict[Hashable, tuple[Kernel, Sequence[str], tuple[Line, ...]]] = {}


def compile_rule(rule: Rule) -> Kernel | Reason:
    """Compile the kernel of a rule, or return why its code would not be valid for every length or number."""
    found = printed(rule)
    if rule.columns or isinstance(found, Kernel):
        return found
    if not rule.is_tabled and has_products_alone(rule):
        with SymbolicScope() as scope:
            call = called_products(graph_of(rule, scope, HINT))
        return Kernel(call, device=rule.device, reasons=(("in one call for all tensors", found),))
    return _compiled(rule, found)


def has_products_alone(rule: Rule) -> bool:
    """Return whether a rule computes nothing but products."""
    return all(line.target in (None, *PRODUCTS, *MOVES) for line in rule.lines)


def called_products(gm: GraphModule) -> Callable[[list[Any]], Any]:
    """Return a function of a list of inputs that calls the products of a graph, which is changed."""
    for store in gm.graph.find_nodes(op="call_function", target=aten.copy_.default):
        into, product = store.args
        if product.target in PRODUCTS and set(into.users) == {store}:
            with gm.graph.inserting_before(product):
                made = gm.graph.call_function(PRODUCTS[product.target], product.args, {"out": into})
            product.replace_all_uses_with(made)
            gm.graph.erase_node(store)
            gm.graph.erase_node(product)
    gm.recompile()
    call = gm.forward
    return lambda inputs: call(*inputs)


def printed(rule: Rule) -> Kernel | Reason:
    """Print the kernel of a rule, or return why Inductor has to write it."""
    if not rule.independent:
        why = "it is neither elementwise in one layout nor of numbers alone, or may raise"
        return Reason(why, rule.operations)
    with SymbolicScope() as scope:
        gm = graph_of(rule, scope, HINT)
        inputs = [node.meta["val"] for node in placeholders(gm.graph)]
        try:
            if rule.is_tabled:
                function = codegen.table_kernel(gm.graph, rule.width if rule.flat else 0, rule.device)
                function.begin()
                torch_compat.note_generated_code([function.source[True]])
                columns, sums = _columns(rule, inputs, function.arguments), tuple(rule.totals.items())
                return Kernel(None, function, columns, device=rule.device, width=rule.width, sums=sums)
            if rule.flat:
                source = codegen.flat_kernel(gm.graph, rule.width)
            else:
                source = codegen.number_kernel(gm.graph)
        except NoSpelling as error:
            language = "Triton" if rule.is_tabled else "C++"
            return Reason(f"printed {language} has no {error}", rule.operations)
    return _loaded(rule, source, inputs)


def _loaded(rule: Rule, source: str, inputs: Sequence[Any]) -> Kernel | Reason:
    """Compile the printed kernel of a rule on the host, or return why that is impossible."""
    if sys.platform == "win32":
        return Reason("the compiler takes other flags than those of printed kernels")
    arguments = (*range(rule.flat, len(inputs)), *range(rule.flat))  # the length is the last
    if len(arguments) > codegen.MOST_ARGUMENTS:
        return Reason(f"it has more than {codegen.MOST_ARGUMENTS} arguments", rule.operations)
    try:
        with inductors_faults():
            library = torch_compat.load_cpp_library(source, codegen.FLAGS)
    except InductorFault as fault:
        if fault.is_by_compiler and fault_of_library() is None:
            met = f"the C++ that collage_fx has printed is not compiled: {fault}"
            remedy = "this is a bug in collage_fx; please report it with the traceback"
            raise FailedLoweringError(met, where=rule.operations, remedy=remedy) from fault.__cause__
        return Reason(f"printed C++ is not compiled: {fault}")
    torch_compat.note_generated_code([source])
    address = ctypes.cast(library.kernel, ctypes.c_void_p).value
    assert address is not None
    function, columns = CFunction(address, arguments, library), _columns(rule, inputs, arguments)
    return Kernel(None, function, columns, divisible=rule.flat, width=rule.width)


def fault_of_library() -> InductorFault | None:
    """Return why the compiler does not take the C++ that writes tables of addresses; None if it does."""
    try:
        with inductors_faults():
            codegen.load_library()
    except InductorFault as fault:
        return fault
    return None


def _columns(rule: Rule, inputs: Sequence[Any], arguments: Sequence[int]) -> tuple[Column, ...]:
    """Return the columns of a function's arguments, of which ``inputs`` has the values in a trace.

    The address of a number, or of values of rows or columns, stays the same for each piece of a tensor.
    """
    kinds = rule.totals
    if rule.flat:
        kinds[0] = codegen.LENGTH
    if rule.is_placed:
        kinds[1] = codegen.FIRST_OF_PIECE
    layouts = (line.args for line in rule.lines if line.target is None)
    devices = {argument: layout[1] for argument, layout in enumerate(layouts, rule.first_operand)}

    def column(argument: int) -> Column:
        if argument in kinds:
            return Column(kinds[argument])
        value: Tensor = inputs[argument]
        itemsize, is_of_host = value.dtype.itemsize, devices.get(argument) == HOST != rule.device
        stays = value.dim() == 0 or (rule.columns and 1 in tuple(value.shape))
        of_unit = value.shape[1] if value.dim() == 2 and rule.width > 1 else 1
        return Column(0 if stays else itemsize * of_unit, itemsize if is_of_host else 0)

    return tuple(map(column, arguments))


def _compiled(rule: Rule, no_table: Reason) -> Kernel | Reason:
    """Compile the kernel of a rule with Inductor, to be called for one tensor after the other.

    ``no_table`` says why there is no kernel over a table, from which it could read a number of the host.
    """
    if rule.is_tabled and any(line.args[1] == HOST for line in rule.lines if line.target is None):
        return replace(no_table, what=f"it reads a number of the host's, and {no_table.what}")
    settings: dict[str, Any] = {"size_asserts": not (rule.flat or rule.independent)}
    if rule.is_tabled:
        settings |= {"combo_kernels": False, **(INLINED if rule.width > 1 else {})}
    with SymbolicScope() as scope:
        made = _by_inductor(rule, graph_of(rule, scope, HINT), no_table, settings)
    if isinstance(made, Reason):
        return made
    if scope.has_guards(below=LONGEST):
        return Reason("a kernel would not hold for every length or number", rule.operations)
    return replace(made, stackable=_stackable(rule, no_table))


def _by_inductor(rule: Rule, gm: GraphModule, no_table: Reason, settings: dict[str, Any]) -> Kernel | Reason:
    """Compile a graph of a rule with Inductor, or return why that is impossible."""
    inputs = [node.meta["val"] for node in placeholders(gm.graph)]
    with (
        torch_compat.inductor_config.patch({"triton.cudagraphs": False, **settings}),
        torch_compat.generated_code() as code,
    ):
        attempt = compile_somehow(gm, inputs, is_inference=True)
    if not attempt.is_compiled:
        return attempt.reasons[0][1]
    launches = 1 if rule.device == HOST else sum(map(torch_compat.launches_of, code[-1:]))
    reasons: Reasons = (("in one call for all tensors", no_table), *attempt.reasons)
    call = torch_compat.innermost_callable(attempt.call)
    return Kernel(call, device=rule.device, launches=launches, reasons=reasons)


def _stackable(rule: Rule, no_table: Reason) -> Stackable | None:
    """Return how calls of a rule without a table are made for stacks of tensors, where there are launches."""
    layouts = [line.args for line in rule.lines if line.target is None]
    writes_results = all(into is None for into, _ in rule.stores)
    if rule.flat or not writes_results or not device_facts(rule.device).is_launched:
        return None
    if any(len(layout) == 1 for layout in layouts):  # a symbolic number
        return None
    operands = tuple((size, stride, dtype, device) for dtype, device, size, stride in layouts)
    why = replace(no_table, what=f"only for all of a shape: {no_table.what}")

    def compiled(stacked: tuple[bool, ...]) -> Kernel | Reason:
        return _known(rule, (rule.key, stacked), lambda: _compiled_for_stacks(rule, why, stacked))

    return Stackable(compiled, operands)


def _compiled_for_stacks(rule: Rule, why: Reason, stacked: tuple[bool, ...]) -> Kernel | Reason:
    """Compile the kernel of a rule for stacks of its tensors with Inductor."""
    with SymbolicScope() as scope:
        gm, most = stacked_graph(rule, scope, stacked)
        made = _by_inductor(rule, gm, why, {})
    if isinstance(made, Reason):
        return made
    if scope.has_guards(below=LONGEST):
        return Reason("a kernel would not hold for every number of tensors", why.node)
    return replace(made, most_members=most)
