"""The lowering of a rewritten graph to the callable that AOTAutograd runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.fx import Graph

from collage_fx import graph
from collage_fx.choices import Arithmetic
from collage_fx.errors import CollageError, FailedLoweringError, FailedPassError, InvalidOptionError, warn
from collage_fx.graph import InputInfo, Reason, Reasons, Role, StateTensor, StepProgram, Unit
from collage_fx.lowering.attempts import Attempt, compile_somehow, interpreted
from collage_fx.lowering.schedule import lower_in_parts, repeated
from collage_fx.lowering.stacks import in_stacks
from collage_fx.lowering.transposes import in_order_of_memory
from collage_fx.runtime import CompensatedStep, Expected, Plan, StepInParts, bind
from collage_fx.torch_compat import FREEZES_NUMBERS, inductor_config, local_tensor

_T = TypeVar("_T")

#: Largest number of matrix products in a compiled graph of a recorded step; more of them are an iteration.
MOST_MATRIX_PRODUCTS = 16

#: Settings for error-free transformations, whose ``(a + b) - a`` unsafe optimizations make ``b``, and for
#: integers modulo 2**32: without ``-fwrapv`` GCC takes away the end of a loop in which an int always
#: overflows. Inductor puts the text of a flag into its command as it is.
#:
#: Note [Roundings reuse every value]
#: Inductor inlines a value of less than 30 operations into each of its readers. In a rounding or a TwoSum
#: every value has two or three, so that a chain of them is traced exponentially often (minutes for one
#: tensor). So values of more than eight operations are nodes, and a kernel may fuse more of them than 64.
IEEE_SETTINGS: dict[str, Any] = {
    "cpp.enable_unsafe_math_opt_flag": False,
    "cpp.enable_floating_point_contract_flag": "off -fwrapv",
    "realize_opcount_threshold": 8,
    "max_fusion_size": sys.maxsize,
}

#: Inductor's constant folding makes ``zeros * beta + g`` into ``g`` itself: momentum that is born so shares
#: its memory with the gradient, or with other momentum, and is overwritten with it. Plain Inductor does that.
JOINT_GRAPH_SETTINGS: dict[str, Any] = {"joint_graph_constant_folding": False}

#: Description of an argument that a step adds to its arguments.
ERROR_TERM = InputInfo("an error term", "lo", Role.OTHER)


class Lowered(NamedTuple):
    """Compiled step, a function of the list of the whole graph's inputs, and reasons against faster ways."""

    step: Callable[[list[Any]], Any]
    unit: Unit
    reasons: Reasons = ()


def lower(
    program: StepProgram, example_inputs: Sequence[Any], inductor_options: dict[str, Any]
) -> Lowered | Reason:
    """Compile the program's graph with Inductor, for all members of its families, and bind the error terms.

    Args:
        program: after the pipeline. With strategy "none" Inductor's settings are left as they are.
        example_inputs: fake inputs for the graph as captured; those of the error terms are appended here.
        inductor_options: options that ``compile_fx`` passed for its own inner compiler.

    Returns:
        the compiled step; only for a graph of one member per family perhaps a reason, if it is not repeated.
    """
    repetition = program.repetition
    not_compiled = why_not_compiled(program.gm.graph, program)
    in_parts = not_compiled or step_in_parts(program)
    not_in_parts = in_parts if isinstance(in_parts, Reason) else None
    if isinstance(in_parts, StepInParts):
        made = Attempt(in_parts, tuple(reason for each in in_parts.kernels for reason in each.reasons))
    elif not repetition.is_whole:
        return in_parts
    elif not_compiled is None:
        made = _whole(program, example_inputs, inductor_options)
    else:
        made = Attempt(interpreted(graph.copy_of(program.gm)), is_compiled=False)
    why = [*graph.not_taken(("in parts", not_in_parts)), *made.reasons]
    why.sort(key=lambda reason: graph.WAYS.index(reason[0]))
    if (fault := next((fault for way, fault in why if way == "by the usual code"), None)) is not None:
        slower = "slower" if made.is_compiled else "10 to 50 times slower"
        failed = FailedLoweringError(
            f"{fault.what}. Results are the same; each step is {slower}",
            where=next((info.name for info in program.infos if info.role is Role.PARAMETER), "step"),
            remedy="if collage-fx doctor finds no C++ compiler that works, install g++ or set CXX to one; "
            "otherwise please report this message",
        )
        warn(failed)
    bindings = [
        bind(index, program.infos[index], state.error_format, reads=not isinstance(state, StateTensor))
        for state in program.expansions
        for index in repetition.copies[state.position]
    ]
    expected = _expected(program, all_layouts=not_in_parts is None)
    unit: Unit = "whole" if not_in_parts is not None else "in parts" if repetition.is_whole else "by family"
    if not made.is_compiled:
        unit = "operation by operation"
    step = CompensatedStep(made.call, bindings, expected)
    return Lowered(step, unit, tuple(dict.fromkeys(why)))


def step_in_parts(program: StepProgram) -> StepInParts | Reason:
    """Compile a program's graph part by part, for all members of its families, or return why not."""
    with inductor_config.patch(_settings(program)):
        if (node := graph.first_of_one_size(program.gm.graph, program.extended)) is not None:
            return Reason.at(node, "it depends on the sizes of tensors")
        gm = _unless_it_fails(program, "in-order-of-memory", in_order_of_memory, program.gm)
        plan = lower_in_parts(gm, always=not program.repetition.is_whole)
        if isinstance(plan, Plan):
            plan = repeated(plan, program.extended)
        if isinstance(plan, Reason):
            return plan
        return StepInParts(_unless_it_fails(program, "in-stacks", in_stacks, plan))


def _unless_it_fails(program: StepProgram, name: str, step: Callable[[_T], _T], given: _T) -> _T:
    """Return the result of a step that only saves time; its input, and a note, if the step fails."""
    try:
        return step(given)
    except CollageError:
        raise
    except Exception as error:
        program.left_out.append(FailedPassError(name, error, optional=True))
        return given


class Origin(Protocol):
    """Facts about the origin of a graph, as a program has them, and a compilation."""

    is_recorded: bool
    is_compiled: bool


def why_not_compiled(step: Graph, of: Origin) -> Reason | None:
    """Return why torch runs a step's graph operation by operation; None if the graph is compiled.

    An iteration that a recorded step writes out (roots of matrices, orthogonalizations) is hundreds of
    operations. Inductor calls the same products of matrices as torch does, and takes half a minute to write
    loops for what stands between them.
    """
    if not of.is_compiled:
        return Reason("torch has been told not to compile, by its stance or by TORCH_COMPILE_DISABLE")
    products = [node for node in step.nodes if graph.is_matrix_product(node.target)]
    if not of.is_recorded or len(products) <= MOST_MATRIX_PRODUCTS:
        return None
    what = f"torch runs what has more than {MOST_MATRIX_PRODUCTS} products of matrices"
    return Reason.at(products[MOST_MATRIX_PRODUCTS], what)


def _expected(program: StepProgram, *, all_layouts: bool) -> tuple[list[Expected], list[Expected]]:
    """Return the layouts that a step expects: of its arguments, and of the error terms that it adds.

    With ``all_layouts`` nothing else looks at sizes and strides, which are numbers then.
    """
    nodes, stores = graph.placeholders(program.gm.graph), graph.copies_to_inputs(program.gm.graph)
    freed = {each.position for each in program.expansions if not each.hi}
    copies_of = program.extended.copies_of
    values = {
        index: (node, value)
        for i, node in enumerate(nodes)
        if i not in freed
        for index, value in copies_of(i, node.meta["val"])
    }
    given: list[Expected] = []
    added: list[Expected] = []
    for index in sorted(values):
        node, value = values[index]
        info = program.infos[index] if index < len(program.infos) else ERROR_TERM
        piece = None if info.tensor is None else local_tensor(info.tensor)
        like = value if all_layouts else piece
        if isinstance(value, Tensor) and like is not None:
            layout = tuple(like.shape), like.stride()
            is_only_read = info.role is Role.GRADIENT and not info.bound and node not in stores
            (given if index < len(program.infos) else added).append(
                Expected(index, info.name, value.dtype, value.device, *layout, not all_layouts, is_only_read)
            )
    return given, added


def _settings(program: StepProgram) -> dict[str, Any]:
    """Return the Inductor settings for lowering a program's graph."""
    if program.strategy == "none":
        return {}
    values = map(graph.tensor_value, graph.placeholders(program.gm.graph))
    return inductor_settings(program.arithmetic, {value.device for value in values if value is not None})


def inductor_settings(arithmetic: Arithmetic, devices: Iterable[torch.device] = ()) -> dict[str, Any]:
    """Return the Inductor settings for a graph of this arithmetic on these devices."""
    settings = dict(IEEE_SETTINGS)
    if arithmetic == "native":  # rounds Triton's division, too, otherwise div.full.f32 within 2 ulps
        settings["eager_numerics.division_rounding"] = True
    for each in devices:
        settings |= graph.device_facts(each).settings
    return settings


def _whole(program: StepProgram, example_inputs: Sequence[Any], inductor_options: dict[str, Any]) -> Attempt:
    """Compile the program's graph as one graph."""
    if inductor_options.get("cudagraphs"):
        _refuse_frozen_numbers(program)
    static = list(inductor_options.get("static_input_idxs", ()))
    # An auxiliary is as static as the tensor it corrects: CUDA graphs need not copy it.
    are_static = [s.info.bound and s.position in static for s in program.expansions for _ in s.added_inputs]
    static += [i for i, is_static in enumerate(are_static, len(example_inputs)) if is_static]
    added = graph.placeholders(program.gm.graph)[len(example_inputs) :]
    inputs = [*example_inputs, *(node.meta["val"] for node in added)]
    for expansion in program.expansions:
        if not expansion.hi:  # it has no memory in a step, and so not the strides that it was captured with
            inputs[expansion.position] = expansion.placeholder.meta["val"]
    with inductor_config.patch(_settings(program)):
        return compile_somehow(program.gm, inputs, **{**inductor_options, "static_input_idxs": static})


def _refuse_frozen_numbers(program: StepProgram) -> None:
    """Raise if a CUDA graph would read a scalar of the host, which torch 2.13 and later read only once."""
    nodes = graph.placeholders(program.gm.graph)
    inputs = [(node, value) for node in nodes if (value := graph.tensor_value(node)) is not None]
    numbers = [node for node, value in inputs if not value.dim() and value.device.type == "cpu"]
    is_launched = any(graph.device_facts(value.device).is_launched for _, value in inputs)
    if numbers and FREEZES_NUMBERS and is_launched:
        raise InvalidOptionError(
            "mode='reduce-overhead', where a number in the host's memory varies from step to step, such as "
            "a learning rate under a scheduler: the CUDA graph would go on with that of its first step",
            where=str(numbers[0].name),
            remedy="leave mode out, or keep it on the device: lr=torch.tensor(1e-3, device='cuda')",
        )
