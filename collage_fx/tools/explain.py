"""Tool ``explain``: the report of an optimizer's step, without taking the step."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.optim import Optimizer
from typing_extensions import Unpack

from collage_fx import graph
from collage_fx.backend import CollageBackend
from collage_fx.choices import takes_options
from collage_fx.clock import no_clock
from collage_fx.lowering import Lowered, interpreted, rules_of, why_not_compiled
from collage_fx.numerics import is_low_precision
from collage_fx.options import GivenOptions
from collage_fx.report import CollageReport, try_updates, updates_of
from collage_fx.state import clone_of, known_tensors
from collage_fx.torch_compat import is_in_dynamo, records


@takes_options
def explain(optimizer: Optimizer, **options: Unpack[GivenOptions]) -> CollageReport:
    """Report what compiling ``optimizer.step`` would do, like ``backend.report()``, without taking a step.

    A deep copy of the optimizer, with zero gradients, takes the step: captured, and run operation by
    operation instead of compiled. The copy includes the parameters, so it needs their memory a second time.
    The optimizer itself is not changed: its state stays the same, and none of its hooks is called.

    Args:
        optimizer: any ``torch.optim.Optimizer``, before its first step or later.
        options: options of :class:`~collage_fx.CollageBackend`.

    Returns:
        the report; its graphs are rewritten but not compiled to kernels.

    Raises:
        CollageError: compiling the step would raise this error.
    """
    backend = CaptureOnly(**options)
    try_updates(optimizer)
    captured(optimizer, backend)
    return backend.report()


def captured(optimizer: Optimizer, backend: CaptureOnly) -> None:
    """Capture the step of a copy of an optimizer with a backend."""
    clone = clone_of(optimizer)
    records.put(clone, updates_of([optimizer]))
    for group, copied in zip(optimizer.param_groups, clone.param_groups, strict=True):
        for original, parameter in zip(group["params"], copied["params"], strict=True):
            if original.grad is not None or original.requires_grad:
                parameter.grad = torch.zeros_like(original if original.grad is None else original.grad)
    # The class's own step: an instance's may be wrapped by a scheduler and bound to the original.
    method = _with_code_of_its_own(type(clone).step)
    step = torch.compile(_with_code_of_its_own(_step), backend=backend)
    with no_clock():
        step(method, clone)
        if _has_state_not_met(clone, backend):
            step(method, clone)  # now with the state among the graph's inputs


class CaptureOnly(CollageBackend):
    """Backend that compiles no kernels: it runs the rewritten graph operation by operation."""

    verb = "explained"

    def lower(
        self, program: graph.StepProgram, example_inputs: Sequence[Any], inductor_options: dict[str, Any]
    ) -> Lowered | graph.Reason:
        added = [node for state in program.expansions for node in state.added_inputs]
        small = _results_alone(program.gm, added)
        not_compiled = why_not_compiled(program.gm.graph, program)
        rules = not_compiled or rules_of(program.gm, always=not program.repetition.is_whole)
        if isinstance(rules, graph.Reason) and not program.repetition.is_whole:
            return rules
        reasons = graph.not_taken(("in parts", rules if isinstance(rules, graph.Reason) else None))
        unit: graph.Unit = "whole" if reasons else "in parts" if program.repetition.is_whole else "by family"
        if not_compiled is not None:
            unit = "operation by operation"
        return Lowered(interpreted(graph.repeated_graph(small, program.repetition)), unit, reasons)

    def lower_as_captured(
        self, gm: GraphModule, example_inputs: Sequence[Any], inductor_options: dict[str, Any]
    ) -> Callable[[list[Any]], Any]:
        return interpreted(_results_alone(gm, []))


def _results_alone(gm: GraphModule, added: Sequence[Node]) -> GraphModule:
    """Return a copy of a graph without stores; ``added`` inputs of the passes become zeros in it."""
    gm = graph.copy_of(gm)
    for store in graph.copies_to_inputs(gm.graph).values():
        gm.graph.erase_node(store)
    gm.graph.eliminate_dead_code()
    names = {node.name for node in added}
    for node in graph.placeholders(gm.graph):
        if node.name in names:
            value = node.meta["val"]
            like = {"dtype": value.dtype, "device": value.device}
            with gm.graph.inserting_before(next(n for n in gm.graph.nodes if n.op != "placeholder")):
                zeros = gm.graph.call_function(torch.zeros, (tuple(value.shape),), like)
                zeros.meta["val"] = value
            node.replace_all_uses_with(zeros)
            gm.graph.erase_node(node)
    gm.recompile()
    return gm


def _has_state_not_met(optimizer: Optimizer, backend: CollageBackend) -> bool:
    """Return whether state that has a row was created in the step, as by most classes, so is no input."""
    with_float32 = backend.options.takes_float32
    state = {
        each.name
        for each in known_tensors({"": optimizer}).values()
        if each.role is graph.Role.STATE
        if is_low_precision(each.tensor.dtype)
        or (with_float32 and each.tensor.dtype is torch.float32 and each.tensor.dim())
    }
    return not state <= {row.name for row in backend.report().tensors}


def _step(step: Callable[[Optimizer], Any], optimizer: Optimizer) -> None:
    step(optimizer)


def _with_code_of_its_own(
    function: Callable[..., Any], copies: dict[int, Any] | None = None
) -> Callable[..., Any]:
    """Copy a function, and the functions that it wraps, so that they share no Dynamo cache.

    Dynamo counts compilations per code object, including compilations for deleted optimizers, and gives up
    after a few: explaining a step must not use up compilations that the real step may need.
    """
    copies = {} if copies is None else copies
    if not isinstance(function, types.FunctionType) or is_in_dynamo(function):
        return function
    if id(function) not in copies:
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        copied = types.FunctionType(
            function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__, cells
        )
        copied.__kwdefaults__ = function.__kwdefaults__
        copied.__dict__.update(function.__dict__)
        copies[id(function)] = copied
        for cell, original in zip(cells, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                cell.cell_contents = _with_code_of_its_own(original.cell_contents, copies)
    return copies[id(function)]
