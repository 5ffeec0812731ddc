"""The function ``explain``: the report of an optimizer's step, without stepping."""

from __future__ import annotations

import contextlib
import copy
import types
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node
from torch.optim import Optimizer

from collage_fx.backend import CollageBackend
from collage_fx.capture import hide_progress
from collage_fx.graph import (
    Reason,
    Role,
    StepProgram,
    Unit,
    copies_to_inputs,
    copy_of,
    not_taken,
    placeholders,
    repeated_graph,
)
from collage_fx.lowering import Lowered, interpreted, rules_of, why_not_compiled
from collage_fx.numerics import is_low_precision
from collage_fx.options import refuse_unknown
from collage_fx.report import CollageReport
from collage_fx.state import known_tensors
from collage_fx.torch_compat import is_dynamos


def explain(optimizer: Optimizer, **options: Any) -> CollageReport:
    """Report what compiling ``optimizer.step`` would do, as ``backend.report()`` does, without taking a step.

    The step is captured, and run operation by operation instead of compiled, on a deep copy of the optimizer
    (parameters included, so this takes their memory once more) with zero gradients. The optimizer itself
    isn't touched: nothing is in its state that wasn't there before, none of its hooks is called.

    Args:
        optimizer: any ``torch.optim.Optimizer``, before its first step or later.
        options: those of :class:`~collage_fx.CollageBackend`.

    Returns:
        the report; its graphs have been rewritten but not compiled to kernels.

    Raises:
        CollageError: what compiling the step would raise.
    """
    refuse_unknown(options)
    backend = CaptureOnly(**options)
    captured(optimizer, backend)
    return backend.report()


def captured(optimizer: Optimizer, backend: CaptureOnly) -> None:
    """Have a backend capture the step of a copy of an optimizer."""
    clone = _clone_of(optimizer)
    # The class's own step: an instance's may be wrapped by a scheduler and bound to the original.
    method = _with_code_of_its_own(type(clone).step)
    step = torch.compile(_with_code_of_its_own(_step), backend=backend)
    with hide_progress():
        step(method, clone)
        if _has_state_not_met(clone, backend.report()):
            step(method, clone)  # now with the state among the graph's inputs


class CaptureOnly(CollageBackend):
    """A backend that does everything but compile kernels: it runs the rewritten graph."""

    verb = "explained"

    def lower(
        self,
        program: StepProgram,
        example_inputs: Sequence[Any],
        inductor_options: dict[str, Any],
    ) -> Lowered | Reason:
        added = [node for state in program.expansions for node in state.added]
        small = _results_alone(program.gm, [*added, *(node for s in program.measured for node in s.row)])
        not_compiled = why_not_compiled(program.gm.graph, is_recorded=program.is_recorded)
        rules = not_compiled or rules_of(program.gm, always=not program.repetition.is_of_one)
        if isinstance(rules, Reason) and not program.repetition.is_of_one:
            return rules
        reasons = not_taken(("in parts", rules if isinstance(rules, Reason) else None))
        unit: Unit = "whole" if reasons else "in parts" if program.repetition.is_of_one else "by family"
        if not_compiled is not None:
            unit = "operation by operation"
        return Lowered(interpreted(repeated_graph(small, program.repetition)), unit, reasons)

    def lower_as_captured(
        self, gm: GraphModule, example_inputs: Sequence[Any], inductor_options: dict[str, Any]
    ) -> Callable[[list[Any]], Any]:
        return interpreted(_results_alone(gm, []))


def _results_alone(gm: GraphModule, added: Sequence[Node]) -> GraphModule:
    """A copy of a graph that stores nothing, as state that is born in a step is among what it returns.

    Args:
        gm: the graph.
        added: those of its inputs that it has from the passes; they become zeros.
    """
    gm = copy_of(gm)
    for store in copies_to_inputs(gm.graph).values():
        gm.graph.erase_node(store)
    gm.graph.eliminate_dead_code()
    names = {node.name for node in added}
    for node in placeholders(gm.graph):
        if node.name in names:
            with gm.graph.inserting_before(next(n for n in gm.graph.nodes if n.op != "placeholder")):
                value = node.meta["val"]
                zeros = gm.graph.call_function(
                    torch.zeros, (tuple(value.shape),), {"dtype": value.dtype, "device": value.device}
                )
                zeros.meta["val"] = value
            node.replace_all_uses_with(zeros)
            gm.graph.erase_node(node)
    gm.recompile()
    return gm


def _clone_of(optimizer: Optimizer) -> Optimizer:
    """A deep copy with zero gradients and no hooks.

    Not ``copy.deepcopy(optimizer)``: what ``Optimizer`` pickles lacks the attributes that a subclass's step
    may rely on. An attribute that can't be copied is shared.
    """
    memo: dict[int, Any] = {}
    clone = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name.startswith("_optimizer_") and isinstance(value, dict):
            vars(clone)[name] = OrderedDict()
        elif name != "step":
            vars(clone)[name] = _copied(value, memo)
    for group, copied in zip(optimizer.param_groups, clone.param_groups, strict=True):
        for original, parameter in zip(group["params"], copied["params"], strict=True):
            if original.grad is not None or original.requires_grad:
                parameter.grad = torch.zeros_like(original if original.grad is None else original.grad)
    return clone


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except (TypeError, RuntimeError, NotImplementedError):  # locks, handles, tensors with a history
        return value


def _has_state_not_met(optimizer: Optimizer, report: CollageReport) -> bool:
    """Whether low-precision state was born in the step, so that its graph doesn't have it as inputs.

    Most classes outside torch.optim make theirs inside ``step``; torch.optim.SGD its momentum.
    """
    held = known_tensors({"": optimizer}).values()
    state = {each.name for each in held if each.role is Role.STATE and is_low_precision(each.tensor.dtype)}
    return not state <= {row.name for row in report.tensors}


def _step(step: Callable[[Optimizer], Any], optimizer: Optimizer) -> None:
    step(optimizer)


def _with_code_of_its_own(
    function: Callable[..., Any], copies: dict[int, Any] | None = None
) -> Callable[..., Any]:
    """A copy of a function, and of those it wraps, that shares no Dynamo cache with the original.

    Dynamo counts compilations per code object, those for optimizers long gone included, and gives up after a
    few: explaining must not use up what the real step may need.
    """
    copies = {} if copies is None else copies
    if not isinstance(function, types.FunctionType) or is_dynamos(function):
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
    return cast(Callable[..., Any], copies[id(function)])
