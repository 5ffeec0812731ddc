"""Facts about a graph from AOTAutograd: rests on ``torch._functorch._aot_autograd``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    ParamAOTInput,
    PlainAOTInput,
    SubclassGetAttrAOTInput,
    SyntheticBaseAOTInput,
    ViewBaseAOTInput,
)
from torch._guards import TracingContext

from collage_fx.torch_compat.tensors import SET_GRAD_ENABLED

_SCHEMAS = "torch._functorch._aot_autograd.schemas"

RELIED_ON = (
    "torch._guards:TracingContext has fw_metadata, try_get",
    f"{_SCHEMAS}:ViewAndMutationMeta has input_info, output_info, num_intermediate_bases",
    f"{_SCHEMAS}:ViewAndMutationMeta has num_mutated_inp_runtime_indices",
    f"{_SCHEMAS}:ViewAndMutationMeta has mutated_graph_handled_indices_seen_by_autograd",
    f"{_SCHEMAS}:InputAliasInfo has mutates_metadata, mutation_inductor_storage_resize",
    f"{_SCHEMAS}:OutputAliasInfo has output_type",
)

#: Operators that ``p.data = value`` is captured as; torch 2.15 and newer have a special operator.
DATA_ASSIGNMENTS: list[Any] = [torch.ops.aten.set_.source_Tensor]
if hasattr(torch.ops.aten, "shallow_copy_data_"):
    DATA_ASSIGNMENTS.append(torch.ops.aten.shallow_copy_data_.default)

Called = TypeVar("Called", bound=Callable[..., Any])


def boxed_call(called: Called) -> Called:
    """Mark a function, or a class of callables, as following AOTAutograd's calling convention.

    It takes its arguments in a single list, which it may empty.
    """
    called._boxed_call = True  # type: ignore[attr-defined]
    return called


def needs_autograd(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Return whether a Dynamo graph computes a result that needs a gradient.

    AOTAutograd's own test returns True with gradients enabled for every in-place update through ``.data``.
    """
    results = [n for n in gm.graph.output_node().all_input_nodes if n.op not in ("placeholder", "get_attr")]
    values = (*gm.parameters(), *gm.buffers(), *example_inputs)
    inputs = [value for value in values if isinstance(value, torch.Tensor)]
    return torch.is_grad_enabled() and (
        any(getattr(node.meta.get("example_value"), "requires_grad", False) for node in results)
        or any(value.requires_grad and not value.is_leaf for value in inputs)
    )


def remove_gradient_modes(gm: torch.fx.GraphModule) -> None:
    """Remove the switches of gradients from a Dynamo graph that computes nothing that needs a gradient.

    ``torch.nn.init`` leaves them in a step. AOTAutograd, which runs it, would go on with gradients enabled.
    """
    for node in gm.graph.find_nodes(op="call_function", target=SET_GRAD_ENABLED):
        gm.graph.erase_node(node)
    gm.recompile()


def aot_input_of(
    placeholder: torch.fx.Node,
) -> tuple[Literal["attribute", "argument", "alias"], str | int] | None:
    """Return the origin of an input of an AOTAutograd graph.

    Returns:
        ``("attribute", name)`` for a parameter or buffer of the Dynamo module, ``("argument", position)`` for
        an input of the module, ``("alias", description)`` for the common memory of several aliasing inputs,
        None for others (tokens, inner tensors of subclasses). A DTensor's local shard has its origin.
    """
    descriptor = placeholder.meta.get("desc")
    if isinstance(descriptor, SubclassGetAttrAOTInput) and descriptor.attr == "_local_tensor":
        descriptor = descriptor.base
    if isinstance(descriptor, (ParamAOTInput, BufferAOTInput)):
        return "attribute", descriptor.target
    if isinstance(descriptor, PlainAOTInput):
        return "argument", descriptor.idx
    if isinstance(descriptor, (SyntheticBaseAOTInput, ViewBaseAOTInput)):
        return "alias", descriptor.expr()
    return None


def inputs_written() -> list[int]:
    """Return the indices of the inputs whose values a graph changes, while AOTAutograd compiles it."""
    found = getattr(TracingContext.try_get(), "fw_metadata", None)
    return [] if found is None else [i for i, info in enumerate(found.input_info) if info.mutates_data]


def versions_to_increment() -> list[int] | None:
    """Return the inputs whose version counters AOTAutograd's wrapper will increment, if it does nothing else.

    Call it while AOTAutograd compiles the graph. None if the wrapper does more: if a result aliases an input,
    the graph changes an input's metadata, or it leaves a mutation to the wrapper.
    """
    found = getattr(TracingContext.try_get(), "fw_metadata", None)
    if found is None or found.num_intermediate_bases or found.num_mutated_inp_runtime_indices:
        return None
    changed = (info.mutates_metadata or info.mutation_inductor_storage_resize for info in found.input_info)
    if any(changed) or any(info.output_type.name != "non_alias" for info in found.output_info):
        return None
    return list(found.mutated_graph_handled_indices_seen_by_autograd)
