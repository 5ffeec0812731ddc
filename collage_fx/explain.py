"""``explain``: the report of an optimizer's step, without stepping."""

from __future__ import annotations

import contextlib
import copy
import types
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.fx import GraphModule
from torch.optim import Optimizer

from collage_fx.backend import CollageBackend
from collage_fx.capture import Families
from collage_fx.graph import Repetition, Role, StepProgram
from collage_fx.numerics import is_low_precision
from collage_fx.report import CollageReport
from collage_fx.runtime import known_tensors
from collage_fx.torch_compat import is_dynamos, takes_a_list

__all__ = ["explain"]


def explain(optimizer: Optimizer, **options: Any) -> CollageReport:
    """What compiling ``optimizer.step`` would do: the report of ``backend.report()``, without taking a step.

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
    backend = _CaptureOnly(**options)
    clone = _copy_of(optimizer)
    # The class's own step: an instance's may be wrapped by a scheduler and bound to the original.
    method = _with_code_of_its_own(type(clone).step)
    step = torch.compile(_with_code_of_its_own(_step), backend=backend)
    step(method, clone)
    if _has_state_not_met(clone, backend.report()):
        step(method, clone)  # now with the state among the graph's inputs
    return backend.report()


class _CaptureOnly(CollageBackend):
    """Everything but the kernels."""

    verb = "explained"

    def lower(
        self,
        graph: StepProgram | GraphModule,
        example_inputs: Sequence[Any],
        inductor_options: dict[str, Any],
    ) -> Any:
        if isinstance(graph, StepProgram):
            return _interpreted(graph.gm, [node for state in graph.compensated for node in state.auxiliaries])
        return _interpreted(graph, [])

    def lower_families(self, program: StepProgram, families: Families, repetition: Repetition) -> Any:
        """The step as it was captured: its results are looked at by nobody, but its state is born."""
        return lambda values: families.captured(*values[families.bound :])


def _interpreted(gm: GraphModule, auxiliaries: Sequence[torch.fx.Node]) -> Callable[[list[Any]], Any]:
    """A graph as a callable in AOTAutograd's convention, interpreted, with error terms of zero."""
    layouts = [_layout(node.meta["val"]) for node in auxiliaries]

    def run(arguments: list[Any]) -> Any:
        return gm(*arguments, *(torch.empty_strided(*layout[:2], **layout[2]).zero_() for layout in layouts))

    return takes_a_list(run)


def _layout(value: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]:
    return tuple(value.size()), value.stride(), {"dtype": value.dtype, "device": value.device}


def _copy_of(optimizer: Optimizer) -> Optimizer:
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
