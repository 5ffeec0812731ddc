"""From a rewritten graph to the callable that AOTAutograd runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from collage_fx.admission import refuse_layout
from collage_fx.error_formats import ErrorFormat
from collage_fx.error_terms import Expansion, allocate
from collage_fx.errors import LostErrorTermsError
from collage_fx.graph import copies_to_inputs, placeholders
from collage_fx.operators import REVISION
from collage_fx.program import Arithmetic, InputInfo, Role, StepProgram
from collage_fx.repetition import Repetition, repeated_step
from collage_fx.sharing import lower_in_parts
from collage_fx.torch_compat import COMBINED_LAUNCHES, inductor_compile_inner, inductor_config

__all__ = [
    "JOINT_GRAPH_SETTINGS",
    "CompensatedStep",
    "WholeStep",
    "inductor_settings",
    "lower",
    "lower_repeatedly",
]

#: Note [Double-word graphs reuse every value]
#: Inductor inlines a value into each of its readers until it holds 30 operations. In a TwoSum every value has
#: two or three readers, so that a chain of them is traced exponentially often (minutes for one tensor). With
#: values kept as nodes of their own from the eighth operation on, and kernels allowed to fuse that many
#: nodes, the code is one kernel again.
DENSE_REUSE = {"realize_opcount_threshold": 8, "max_fusion_size": 1024}

#: Error-free transformations are made of what ``(a + b) - a`` is, which a compiler that is allowed to
#: simplifies to ``b``.
IEEE_SETTINGS: dict[str, Any] = {"cpp.enable_unsafe_math_opt_flag": False}

#: Inductor's constant folding makes ``zeros * beta + g`` into ``g`` itself: momentum that is born so shares
#: its memory with the gradient, or with other momentum, and is overwritten with it. Plain Inductor does that.
JOINT_GRAPH_SETTINGS: dict[str, Any] = {"joint_graph_constant_folding": False}

#: ``native`` rounds every operation, which Triton's division (``div.full.f32``, within 2 ulps) otherwise does
#: not.
NATIVE_SETTINGS: dict[str, Any] = {**IEEE_SETTINGS, **DENSE_REUSE, "eager_numerics.division_rounding": True}


#: The sums of several tensors that one loop updates are to be in that loop: eleven nodes for each.
MEASURING_SETTINGS: dict[str, Any] = {"cpp.max_horizontal_fusion_size": 128}


def lower(
    program: StepProgram, example_inputs: Sequence[Any], inductor_options: dict[str, Any]
) -> CompensatedStep:
    """Compile the program's graph with Inductor and bind its error terms.

    Args:
        program: after the pipeline. With strategy "none" Inductor's settings are left as they are.
        example_inputs: fake inputs for the graph as captured; those of the error terms are appended here.
        inductor_options: what ``compile_fx`` passed for its own inner compiler (static inputs, CUDA graphs,
            ...).
    """
    inputs = (node.meta["val"] for node in placeholders(program.gm.graph))
    on_gpu = any(isinstance(value, Tensor) and value.device.type != "cpu" for value in inputs)
    settings = inductor_settings(program.arithmetic, on_gpu=on_gpu) if program.strategy != "none" else {}
    measuring = MEASURING_SETTINGS if program.rows else {}
    with inductor_config.patch({**settings, **measuring}):
        compiled = lower_in_parts(program.gm) or _whole(program, example_inputs, inductor_options)
    bindings = [_bind(state.position, state.info, program.error_format) for state in program.expansions]
    given = _per_call(program.inputs, frozenset(_stored_to(program)))
    return CompensatedStep(compiled, bindings, given, program.rows)


def lower_repeatedly(
    program: StepProgram, inputs: Sequence[InputInfo], repetition: Repetition
) -> CompensatedStep | None:
    """The step of all members of the families of which the program's graph has one each.

    Args:
        program: after the pipeline.
        inputs: those of the whole graph.
        repetition: how those of the program recur in it.

    Returns:
        a callable of the whole graph's inputs; None where the graph can't be lowered in parts.
    """
    with inductor_config.patch(inductor_settings(program.arithmetic)):
        small = lower_in_parts(program.gm, always=True)
    if small is None:
        return None
    owned_by = [state.position for state in program.expansions for _ in state.auxiliaries]
    step = repeated_step(small, repetition.extended(owned_by))
    if step is None:
        return None
    places = sorted(place for state in program.expansions for place in repetition.copies[state.position])
    bindings = [_bind(place, inputs[place], program.error_format) for place in places]
    own = [i for i in _stored_to(program) if i < len(repetition.copies)]  # error terms come behind
    stored_to = frozenset(place for i in own for place in repetition.copies[i])
    return CompensatedStep(step, bindings, _per_call(inputs, stored_to))


@dataclass(frozen=True)
class _Given:
    """A tensor that each call brings along, a gradient above all.

    Dynamo's guards of an optimizer let a gradient pass that has become sparse since, or has other strides.

    Attributes:
        position: among the arguments.
        name: as the user knows it.
        layout: size and stride that the code was made for; None if another stride is not to be made good.
    """

    position: int
    name: str
    layout: tuple[torch.Size, tuple[int, ...]] | None

    def fit(self, arguments: list[Any]) -> None:
        """Refuse a sparse tensor, lay one of other strides out anew."""
        tensor = arguments[self.position]
        refuse_layout(tensor, self.name)
        if self.layout is None:
            return
        size, stride = self.layout
        if tensor.stride() != stride and tensor.shape == size:
            fitting = torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device)
            arguments[self.position] = fitting.copy_(tensor)


def _per_call(inputs: Sequence[InputInfo], stored_to: frozenset[int]) -> list[_Given]:
    given = []
    for i, info in enumerate(inputs):
        if info.tensor is not None and not info.bound:
            is_read_only = info.role is Role.GRADIENT and i not in stored_to
            layout = (info.tensor.shape, info.tensor.stride()) if is_read_only else None
            given.append(_Given(i, info.name, layout))
    return given


def _stored_to(program: StepProgram) -> list[int]:
    """Positions of the inputs that the program's graph writes to."""
    stores = copies_to_inputs(program.gm.graph)
    return [i for i, node in enumerate(placeholders(program.gm.graph)) if node in stores]


def inductor_settings(arithmetic: Arithmetic, *, on_gpu: bool = False) -> dict[str, Any]:
    """What Inductor's configuration has to be while a graph of this arithmetic is lowered."""
    settings = NATIVE_SETTINGS if arithmetic == "native" else IEEE_SETTINGS
    return {**settings, **COMBINED_LAUNCHES} if on_gpu else settings


def _whole(
    program: StepProgram, example_inputs: Sequence[Any], inductor_options: dict[str, Any]
) -> Callable[[list[Any]], Any]:
    """The graph compiled as one."""
    auxiliaries = [node for state in program.expansions for node in state.auxiliaries]
    static = list(inductor_options.get("static_input_idxs", ()))
    owners = [state for state in program.expansions for _ in state.auxiliaries]
    # As static as the tensor it corrects: CUDA graphs need not copy it.
    static += [
        i
        for i, state in enumerate(owners, len(example_inputs))
        if state.info.bound and state.position in static
    ]
    first_row = len(example_inputs) + len(auxiliaries)
    static += range(first_row, first_row + len(program.rows))
    added = placeholders(program.gm.graph)[len(example_inputs) :]
    program.gm.collage_fx_revision = REVISION  # type: ignore[assignment]  # an attribute is part of the compile cache's key
    return inductor_compile_inner(
        program.gm,
        [*example_inputs, *(node.meta["val"] for node in added)],
        **{**inductor_options, "static_input_idxs": static},
    )


class CompensatedStep:
    """Calls the compiled graph with the error terms, and the rows of sums, behind its arguments.

    Args:
        compiled: the graph, in AOTAutograd's calling convention.
        bindings: where to find the error terms.
        per_call: the tensors that each call brings along.
        rows: further arguments behind these, the same in every call.
    """

    _boxed_call = True  # AOTAutograd's calling convention: one list, which the callee may empty

    def __init__(
        self,
        compiled: Any,
        bindings: Sequence[_Bound | _PerCall],
        per_call: Sequence[_Given] = (),
        rows: Sequence[Tensor] = (),
    ) -> None:
        self.compiled = compiled
        self.bindings = bindings
        self.per_call = per_call
        self.rows = rows

    def __call__(self, arguments: list[Any]) -> Any:
        for given in self.per_call:
            given.fit(arguments)
        auxiliaries = [auxiliary for binding in self.bindings for auxiliary in binding.auxiliaries(arguments)]
        arguments.extend(auxiliaries)
        arguments.extend(self.rows)
        return self.compiled(arguments)


class WholeStep:
    """Calls a step as Dynamo calls what a backend returns: what AOTAutograd's wrapper would do for it.

    Args:
        step: takes the inputs of the whole graph as one list.
        bound: the first of them, which are the same in every call.
        updated: places of those whose version counters have to say so.
        gradients: places of those that Dynamo does not pass, in their order, and of the parameters that have
            them.
    """

    def __init__(
        self,
        step: Callable[[list[Any]], Any],
        bound: Sequence[Tensor],
        updated: Sequence[int],
        gradients: Mapping[int, int],
    ) -> None:
        self.step = step
        self.bound = bound
        self.updated = updated
        self.gradients = gradients

    def __call__(self, *arguments: Any) -> Any:
        values = [*self.bound, *arguments]
        for place, parameter in self.gradients.items():
            values.insert(place, self.bound[parameter].grad)
        torch.autograd.graph.increment_version([values[place] for place in self.updated])
        with torch.no_grad():
            return self.step(values)


def _bind(position: int, info: InputInfo, error_format: ErrorFormat) -> _Bound | _PerCall:
    if not info.bound or info.tensor is None:
        return _PerCall(position, error_format, info.name)
    expansion = allocate(info.tensor, error_format, name=info.name)
    return _Bound(TensorWeakRef(info.tensor), weakref.ref(expansion), error_format, info.name)


@dataclass
class _Bound:
    """Error terms of a tensor that is an attribute of the captured module: the same one in every call.

    Neither the tensor nor its error terms are kept alive. The record is remembered, so that a step costs no
    lookup; where it has been dropped (``reset_error_terms``) while the tensor lives, the tensor gets a new
    one.
    """

    tensor: TensorWeakRef
    expansion: weakref.ref[Expansion]
    error_format: ErrorFormat
    name: str

    def auxiliaries(self, arguments: Sequence[Any]) -> tuple[Tensor, ...]:
        expansion = self.expansion()
        if expansion is None:
            expansion = self._replacement()
        return expansion.auxiliaries

    def _replacement(self) -> Expansion:
        tensor = self.tensor()
        if tensor is None:
            raise LostErrorTermsError(
                "the tensor that this compiled step updates is gone, and its error terms with it",
                where=self.name,
                remedy="compile the step of the optimizer in use: torch.compile(opt.step, backend=...)",
            )
        expansion = allocate(tensor, self.error_format, name=self.name)
        self.expansion = weakref.ref(expansion)
        return expansion


@dataclass
class _PerCall:
    """Error terms of a tensor that is an argument of each call.

    Looked up by identity, made at its first step.
    """

    position: int
    error_format: ErrorFormat
    name: str

    def auxiliaries(self, arguments: Sequence[Any]) -> tuple[Tensor, ...]:
        return allocate(arguments[self.position], self.error_format, name=self.name).auxiliaries
