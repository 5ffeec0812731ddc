"""Checks that refuse a step before anything is rewritten or run.

Note [Two doors]
----------------
Most cases for which compensated arithmetic is not defined are refused in the captured graph
(:func:`refuse_aliases`, :func:`refuse_unsupported`). Some never get that far: at a sparse gradient Dynamo
runs the step eagerly, without asking any backend. So an optimizer is checked as soon as Dynamo begins to
trace its step (:func:`refuse_optimizer`), early enough for a refused step to leave its state unchanged.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.optim import Optimizer

from collage_fx import errors, graph, torch_compat
from collage_fx.numerics import is_low_precision
from collage_fx.runtime import refuse_layout
from collage_fx.state import KnownTensor, has_state, held_optimizers, is_packed, parameter_names

#: Remedy for an optimizer class whose steps torch does not wrap.
CALL_INIT = "have it call super().__init__(parameters, defaults)"


def refuse_unknown_torch() -> None:
    """Raise if this torch lacks something without which results would differ."""
    for told in torch_compat.misfits():
        raise errors.UnsupportedTorchError(
            f"collage_fx does not know torch {torch.__version__}: {told}",
            where="torch",
            remedy=torch_compat.OTHER_VERSIONS,
        )


def refuse_optimizer(optimizer: Optimizer) -> None:
    """Raise for the first parameter with a gradient that cannot be compensated.

    Raises:
        AliasedStateError: the same tensor is a parameter twice, or elements of a parameter share memory.
        UnsupportedOptimizerError: the step is opaque or its control flow depends on values.
        UnsupportedTensorError: a parameter is sparse, complex, integer, of a tensor subclass other than
            DTensor, or on an untested device.
    """
    label = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise errors.UnsupportedOptimizerError(
            "LBFGS decides from step to step what to compute, by the values of losses and gradients, so that "
            "no graph of its update can be captured",
            where="LBFGS.step",
            remedy="step it eagerly on float32 parameters",
        )
    refuse_uninitialized(optimizer)
    differentiable = (bool(group.get("differentiable")) for group in optimizer.param_groups)
    if any(differentiable) and any(is_low_precision(p.dtype) for _, p in parameter_names(optimizer)):
        raise errors.UnsupportedOptimizerError(
            f"{label}(differentiable=True): its update is to be differentiated, which an update with error "
            "terms is not",
            where=f"{label}(differentiable=True)",
            remedy="make the optimizer with differentiable=False, or step it eagerly on float32 parameters",
        )
    seen: dict[int, str] = {}
    for name, parameter in parameter_names(optimizer):
        if parameter.grad is None:
            continue
        refuse_layout(parameter.grad, f"{name}.grad")
        refuse_layout(parameter, name)
        _refuse_dtype(parameter, name)
        if is_low_precision(parameter.dtype):
            if torch_compat.is_wrapper(torch_compat.local_tensor(parameter)):
                raise errors.UnsupportedTensorError(
                    f"a low-precision parameter of class {type(parameter).__name__}: the step updates the "
                    "tensors that it is made of, whose error terms would be found under no name and saved in "
                    "no checkpoint",
                    where=name,
                    remedy="train with ordinary tensors or DTensors, or compile this step with "
                    "backend='inductor'",
                )
            _refuse_device(parameter, name)
            if id(parameter) in seen:
                raise _aliased(f"{seen[id(parameter)]} and {name} (the same tensor)")
            if torch_compat.has_internal_overlap(torch_compat.local_tensor(parameter)):
                raise _aliased(f"{name} (an expanded tensor: strides {parameter.stride()})")
        seen[id(parameter)] = name


def refuse_uninitialized(optimizer: Optimizer) -> None:
    """Raise for an object that does not call ``Optimizer.__init__``, such as a wrapper of optimizers."""
    if isinstance(getattr(optimizer, "defaults", None), dict):
        return
    label = type(optimizer).__name__
    held = [
        f"optimizer.{name}{'' if isinstance(value, Optimizer) else '[...]'}"
        for name, value in vars(optimizer).items()
        if held_optimizers(SimpleNamespace(value=value))
    ]
    raise errors.UnsupportedOptimizerError(
        f"{label} does not call Optimizer.__init__: torch cannot compile its step",
        where=f"{label}.__init__",
        remedy="install the optimizers that it holds, in place of it: "
        + " and ".join(f"collage_fx.install({each})" for each in held)
        if held
        else CALL_INIT,
    )


def refuse_overlaps(known: Iterable[KnownTensor]) -> None:
    """Raise if two low-precision tensors among an optimizer's parameters and state lie in the same memory.

    Called ahead of AOTAutograd, which stops at some of these with an AssertionError. Tensors with gaps
    between their elements are left to AOTAutograd, which knows which of them overlap.
    """
    dense = (
        (entry.name, tensor)
        for entry, tensor in ((each, torch_compat.local_tensor(each.tensor)) for each in known)
        if entry.role in (graph.Role.PARAMETER, graph.Role.STATE) and is_low_precision(tensor.dtype)
        if not is_packed(tensor) and graph.is_dense(tensor)  # a packed tensor has no memory
    )
    if (overlap := first_overlap(dense)) is not None:
        raise _aliased(" and ".join(overlap))


def first_overlap(tensors: Iterable[tuple[str, Tensor]]) -> tuple[str, str] | None:
    """Return the names of two tensors of the same memory, from the first to the last element; None if none.

    The tensors, or local shards, have known sizes.
    """
    memory: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
    for name, tensor in tensors:
        if tensor.numel():
            extent = ((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
            start = int(tensor.storage_offset())
            memory[torch_compat.storage_of(tensor)].append((start, start + sum(extent), name))
    for regions in memory.values():
        for (_, end, first), (start, _, second) in itertools.pairwise(sorted(regions)):
            if start <= end:
                return first, second
    return None


def refuse_aliases(gm: GraphModule, inputs: Sequence[graph.InputInfo], known: Iterable[KnownTensor]) -> None:
    """Raise if a low-precision input that a captured graph mutates shares memory with another.

    In AOTAutograd's graph ``gm``, such inputs have been replaced by their common base. ``known`` are tensors
    that the step can reach, for the message.
    """
    names = {node: info.name for node, info in zip(graph.placeholders(gm.graph), inputs, strict=True)}
    for node in graph.assignments(gm.graph):
        if all(operand in names for operand in node.args):
            raise _aliased(" and ".join(names[operand] for operand in node.all_input_nodes))
    stores = graph.copies_to_inputs(gm.graph)
    for node, info in zip(graph.placeholders(gm.graph), inputs, strict=True):
        origin = torch_compat.aot_input_of(node)
        is_alias = origin is not None and origin[0] == "alias"
        if node in stores and is_alias and is_low_precision(node.meta["val"].dtype):
            tensors = ((each.name, torch_compat.local_tensor(each.tensor)) for each in known)
            strided = ((name, t) for name, t in tensors if t.layout is torch.strided)
            low = ((name, t) for name, t in strided if is_low_precision(t.dtype))
            raise _aliased(" and ".join(first_overlap(low) or [info.name]))


def refuse_unsupported(gm: GraphModule, inputs: Sequence[graph.InputInfo], *, packs: bool) -> None:
    """Raise for the first mutated input of a kind for which compensated arithmetic is not defined.

    Raises:
        UnsupportedTensorError: a complex or integer parameter, or low-precision state on an untested device,
            or float32 state that may be packed (``packs``).
    """
    stores = graph.copies_to_inputs(gm.graph)
    for node, info in zip(graph.placeholders(gm.graph), inputs, strict=True):
        if node not in stores:
            continue
        value: Tensor = node.meta["val"]
        if info.role is graph.Role.PARAMETER:
            _refuse_dtype(value, info.name)
        may_be_packed = packs and value.dtype is torch.float32 and info.role is graph.Role.STATE
        if is_low_precision(value.dtype) or may_be_packed:
            _refuse_device(value, info.name)


def refuse_fused_operators(gm: GraphModule) -> None:
    """Raise if a captured graph calls a fused update of torch itself, on low-precision tensors.

    AOTAutograd fails at them. Not torch.optim: Note [A wish for speed] in ``torch_compat/fused_updates.py``.
    """
    for node in gm.graph.nodes:
        name = torch_compat.fused_operator(node.target)
        read = [each.meta.get("example_value") for each in node.all_input_nodes]
        if name is not None and any(isinstance(v, Tensor) and is_low_precision(v.dtype) for v in read):
            raise errors.UnsupportedOptimizerError(
                f"torch.{name} makes the whole update one opaque operator, which leaves nothing to "
                "compensate",
                where=node.name,
                remedy="write the update as ordinary operations, or call torch.optim's function for it, such "
                "as torch.optim.adamw.adamw, with fused=False: this backend makes fused kernels itself",
            )


def number_of_the_past(gm: GraphModule) -> Node | None:
    """Return a 0-d float64 tensor that a captured graph writes and reads as a number; None if there is none.

    Dynamo takes the number that the tensor has before the step, and AOTAutograd drops what writes it.
    """
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        is_number = isinstance(value, Tensor) and value.dtype is torch.float64 and not value.dim()
        if not is_number or not torch_compat.version_of(value):
            continue
        if any(user.target == "item" for user in node.users) or torch_compat.decides_by_number(value):
            return node
    return None


def _refuse_dtype(parameter: Tensor, name: str) -> None:
    if not parameter.dtype.is_floating_point:
        raise errors.UnsupportedTensorError(
            f"a parameter of dtype {parameter.dtype}; error terms are defined for real floating-point "
            "tensors",
            where=name,
            remedy="keep it out of the compiled optimizer; or hold complex numbers in a real parameter, and "
            "use torch.view_as_complex(parameter) in the model",
        )


def refuse_devices(optimizer: Optimizer) -> None:
    """Raise for low-precision parameters on a device that is known not to work, before the first step."""
    for name, parameter in parameter_names(optimizer):
        if is_low_precision(parameter.dtype) and parameter.device.type in graph.DEVICES:
            _refuse_device(parameter, name)


def _refuse_device(tensor: Tensor, name: str) -> None:
    if refused := graph.device_facts(tensor.device).refused:
        kind = "low-precision" if is_low_precision(tensor.dtype) else "packed"
        raise errors.UnsupportedTensorError(
            f"{kind} state on device {tensor.device}; supported: {', '.join(graph.SUPPORTED)}. {refused}",
            where=name,
            remedy="move the model to a supported device, or compile this step with backend='inductor'",
        )


def _aliased(where: str) -> errors.AliasedStateError:
    return errors.AliasedStateError(
        "several tensors of this step share memory and at least one of them is updated, so that an error "
        "term would belong to two tensors at once",
        where=where,
        remedy="give the optimizer a tied weight once, as model.parameters() does; give tensors that overlap "
        "their own memory (tensor.clone()), or the optimizer the tensor that contains them",
    )


@dataclass
class _BeforeTrace:
    """State that an optimizer had before it was last traced: a part of its record."""

    trace: Any  # mark that tells this trace from others
    known: dict[int, bool]  # ``id`` of each key that had an entry -> whether the entry was state, not empty


def remember_state(optimizer: Optimizer, trace: Any) -> None:
    """Remember which parameters have state when a trace begins; later calls in the same trace change nothing.

    Dynamo lets the optimizers of torch.optim initialise their state (zeros) while it traces them.
    """
    before = torch_compat.records.find(optimizer, _BeforeTrace)
    if before is None or before.trace != trace:
        known = {id(key): has_state(optimizer, key) for key in optimizer.state}
        torch_compat.records.put(optimizer, _BeforeTrace(trace, known))


def forget_new_state(optimizer: Optimizer) -> None:
    """Remove the state of a refused step: state that was initialised since :func:`remember_state`."""
    if (before := torch_compat.records.find(optimizer, _BeforeTrace)) is not None:
        for key in list(optimizer.state):
            had_state = before.known.get(id(key))
            if had_state is None or (not had_state and has_state(optimizer, key)):
                del optimizer.state[key]
