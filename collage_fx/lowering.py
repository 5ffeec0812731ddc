"""From a rewritten graph to the callable that AOTAutograd runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.weak import TensorWeakRef

from collage_fx.admission import refuse_layout
from collage_fx.error_formats import ErrorFormat
from collage_fx.error_terms import Expansion, allocate
from collage_fx.errors import LostErrorTermsError
from collage_fx.graph import placeholders
from collage_fx.operators import REVISION
from collage_fx.program import Arithmetic, ReadExpansion, StateTensor, StepProgram
from collage_fx.sharing import lower_in_parts
from collage_fx.torch_compat import inductor_compile_inner, inductor_config

__all__ = ["JOINT_GRAPH_SETTINGS", "CompensatedStep", "inductor_settings", "lower"]

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
    settings = inductor_settings(program.arithmetic) if program.strategy != "none" else {}
    with inductor_config.patch(settings):
        compiled = lower_in_parts(program.gm) or _whole(program, example_inputs, inductor_options)
    bindings = [_bind(state, program.error_format) for state in program.expansions]
    per_call = [
        (i, info.name) for i, info in enumerate(program.inputs) if info.tensor is not None and not info.bound
    ]
    return CompensatedStep(compiled, bindings, per_call, program.rows)


def inductor_settings(arithmetic: Arithmetic) -> dict[str, Any]:
    """What Inductor's configuration has to be while a graph of this arithmetic is lowered."""
    return NATIVE_SETTINGS if arithmetic == "native" else IEEE_SETTINGS


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
        per_call: ``(position, name)`` of the tensors that each call brings along, gradients above all.
            Dynamo's guards of an optimizer let a gradient pass that has become sparse since.
        rows: further arguments behind these, the same in every call.
    """

    _boxed_call = True  # AOTAutograd's calling convention: one list, which the callee may empty

    def __init__(
        self,
        compiled: Any,
        bindings: Sequence[_Bound | _PerCall],
        per_call: Sequence[tuple[int, str]] = (),
        rows: Sequence[Tensor] = (),
    ) -> None:
        self.compiled = compiled
        self.bindings = bindings
        self.per_call = per_call
        self.rows = rows

    def __call__(self, arguments: list[Any]) -> Any:
        for position, name in self.per_call:
            refuse_layout(arguments[position], name)
        auxiliaries = [auxiliary for binding in self.bindings for auxiliary in binding.auxiliaries(arguments)]
        arguments.extend(auxiliaries)
        arguments.extend(self.rows)
        return self.compiled(arguments)


def _bind(state: StateTensor | ReadExpansion, error_format: ErrorFormat) -> _Bound | _PerCall:
    tensor = state.info.tensor
    if not state.info.bound or tensor is None:
        return _PerCall(state.position, error_format, state.info.name)
    expansion = allocate(tensor, error_format, name=state.info.name)
    return _Bound(TensorWeakRef(tensor), weakref.ref(expansion), error_format, state.info.name)


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
