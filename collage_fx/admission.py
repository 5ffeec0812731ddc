"""What is refused, before anything is rewritten or run.

Note [Two doors]
----------------
Most of what compensated arithmetic isn't defined for shows in the captured graph, and is refused there
(:func:`refuse_aliases`, :func:`refuse_unsupported`). Some never gets that far: at a sparse gradient Dynamo
breaks the graph and runs the step eagerly, without compensation and without asking any backend, and AdamW's
own refusal of it arrives wrapped as an internal error of Dynamo. So an optimizer is looked at as soon as
Dynamo begins to trace through it (:func:`refuse_optimizer`), which is also early enough for a refused step to
leave ``optimizer.state`` as it was.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.optim import Optimizer

from collage_fx.errors import AliasedStateError, UnsupportedOptimizerError, UnsupportedTensorError
from collage_fx.formats import is_low_precision
from collage_fx.graph import assignments, copies_to_inputs, is_dense, placeholders
from collage_fx.names import KnownTensor, parameter_names
from collage_fx.program import InputInfo, Role
from collage_fx.torch_compat import aot_input_of, has_internal_overlap

__all__ = [
    "forget_new_state",
    "refuse_aliases",
    "refuse_fused_operators",
    "refuse_layout",
    "refuse_optimizer",
    "refuse_overlaps",
    "refuse_unsupported",
    "remember_state",
]

#: Devices whose generated code's roundings are tested.
DEVICES = ("cpu", "cuda")

#: torch's operators that are a whole update.
FUSED = frozenset({"_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_"})


def refuse_optimizer(optimizer: Optimizer) -> None:
    """Raise for the first parameter that is about to be stepped (has a gradient) and can't be compensated.

    Raises:
        AliasedStateError: the same tensor is a parameter twice, or elements of one share memory.
        UnsupportedOptimizerError: its step is opaque or its control flow depends on values.
        UnsupportedTensorError: sparse, complex or integer, or on an untested device.
    """
    _refuse_class(optimizer)
    seen: dict[int, str] = {}
    for name, parameter in parameter_names(optimizer):
        if parameter.grad is None:
            continue
        refuse_layout(parameter.grad, f"{name}.grad")
        refuse_layout(parameter, name)
        _refuse_dtype(parameter, name)
        if is_low_precision(parameter.dtype):
            _refuse_device(parameter, name)
            if id(parameter) in seen:
                raise _aliased(f"{seen[id(parameter)]} and {name} (the same tensor)")
            if has_internal_overlap(parameter):
                raise _aliased(f"{name} (an expanded tensor: strides {parameter.stride()})")
        seen[id(parameter)] = name


def _refuse_class(optimizer: Optimizer) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedOptimizerError(
            "LBFGS decides from step to step what to compute, by the values of losses and gradients, so that "
            "no graph of its update can be captured",
            where="LBFGS.step",
            remedy="step it eagerly on float32 parameters",
        )


def refuse_overlaps(known: Iterable[KnownTensor]) -> None:
    """Raise if two low-precision tensors among an optimizer's parameters and state lie in the same memory.

    Ahead of AOTAutograd, which stops at some of these with an AssertionError of its own. Tensors with gaps
    between their elements are left to it: it knows which of them overlap.

    Raises:
        AliasedStateError: they do.
    """
    regions: dict[int, list[tuple[int, int, str]]] = {}
    for entry in known:
        tensor = entry.tensor
        if entry.role in (Role.PARAMETER, Role.STATE) and is_low_precision(tensor.dtype) and is_dense(tensor):
            start = int(tensor.storage_offset())
            region = (start, start + tensor.numel(), entry.name)
            regions.setdefault(tensor.untyped_storage()._cdata, []).append(region)
    for in_one_storage in regions.values():
        in_one_storage.sort()
        for (_, end, name), (start, _, other) in itertools.pairwise(in_one_storage):
            if start < end:
                raise _aliased(f"{name} and {other}")


def refuse_aliases(gm: GraphModule, inputs: Sequence[InputInfo], known: Iterable[KnownTensor]) -> None:
    """Raise if a low-precision input that a captured graph mutates shares memory with another.

    Args:
        gm: AOTAutograd's graph, in which such inputs have been replaced by their common base.
        inputs: one per placeholder.
        known: the tensors that the step can reach, for the message.

    Raises:
        AliasedStateError: it does.
    """
    names = {node: info.name for node, info in zip(placeholders(gm.graph), inputs, strict=True)}
    for node in assignments(gm.graph):
        if all(operand in names for operand in node.args):
            raise _aliased(" and ".join(names[operand] for operand in node.all_input_nodes))
    stores = copies_to_inputs(gm.graph)
    for node, info in zip(placeholders(gm.graph), inputs, strict=True):
        origin = aot_input_of(node)
        if (
            node in stores
            and origin is not None
            and origin[0] == "alias"
            and is_low_precision(node.meta["val"].dtype)
        ):
            raise _aliased(" and ".join(_sharing_memory(known)) or info.name)


def refuse_unsupported(gm: GraphModule, inputs: Sequence[InputInfo]) -> None:
    """Raise for the first mutated input of a kind that compensated arithmetic is not defined for.

    Raises:
        UnsupportedTensorError: a complex or integer parameter, or low-precision state on an untested device.
    """
    stores = copies_to_inputs(gm.graph)
    for node, info in zip(placeholders(gm.graph), inputs, strict=True):
        if node not in stores:
            continue
        value: Tensor = node.meta["val"]
        if info.role is Role.PARAMETER:
            _refuse_dtype(value, info.name)
        if is_low_precision(value.dtype):
            _refuse_device(value, info.name)


def refuse_fused_operators(gm: GraphModule) -> None:
    """Raise if what Dynamo captured calls one of torch's fused updates itself, on low-precision tensors.

    AOTAutograd fails at them. Steps of torch.optim don't: Note [A wish for speed] in ``fused.py``.

    Raises:
        UnsupportedOptimizerError: it does.
    """
    for node in gm.graph.nodes:
        name = getattr(node.target, "__name__", "").partition(".")[0]
        if name in FUSED and any(map(_is_low_precision, node.all_input_nodes)):
            raise UnsupportedOptimizerError(
                f"torch.{name} makes the whole update one opaque operator, which leaves nothing to "
                "compensate",
                where=node.name,
                remedy="write the update as ordinary operations, or call torch.optim's function for it, such "
                "as torch.optim.adamw.adamw, with fused=False: this backend makes fused kernels itself",
            )


def _is_low_precision(node: Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, Tensor) and is_low_precision(value.dtype)


def refuse_layout(tensor: Tensor, name: str) -> None:
    """Raise :class:`~collage_fx.errors.UnsupportedTensorError` for a sparse tensor."""
    if tensor.layout is not torch.strided:
        raise UnsupportedTensorError(
            f"a tensor of layout {tensor.layout} takes part in the step; compensated updates are defined for "
            "dense tensors",
            where=name,
            remedy="make the gradient dense (nn.Embedding(sparse=False), grad.to_dense()), or step that "
            "parameter with an optimizer of its own that is not compiled with this backend",
        )


def _refuse_dtype(parameter: Tensor, name: str) -> None:
    if not parameter.dtype.is_floating_point:
        raise UnsupportedTensorError(
            f"a parameter of dtype {parameter.dtype}; error terms are defined for real floating-point "
            "tensors",
            where=name,
            remedy="keep it out of the compiled optimizer (a complex parameter can be one of its real parts: "
            "torch.view_as_real)",
        )


def _refuse_device(tensor: Tensor, name: str) -> None:
    if tensor.device.type not in DEVICES:
        raise UnsupportedTensorError(
            f"low-precision state on device {tensor.device}; supported: {', '.join(DEVICES)}",
            where=name,
            remedy="move the model to a supported device, or compile this step with backend='inductor'",
        )


def _aliased(where: str) -> AliasedStateError:
    return AliasedStateError(
        "several tensors of this step share memory and at least one of them is updated, so that an error "
        "term would belong to two tensors at once",
        where=where,
        remedy="give each parameter and state its own memory (tensor.clone()), or pass their common base to "
        "the optimizer once",
    )


def _sharing_memory(known: Iterable[KnownTensor]) -> list[str]:
    """The names of the first group of low-precision tensors that lie in one storage."""
    groups: dict[int, list[str]] = {}
    for entry in known:
        if entry.tensor.layout is torch.strided and is_low_precision(entry.tensor.dtype):
            groups.setdefault(entry.tensor.untyped_storage()._cdata, []).append(entry.name)
    return next((names for names in groups.values() if len(names) > 1), [])


# What a refused step has already initialised. ---------------------------------------------------------------

_with_state: WeakKeyDictionary[Optimizer, tuple[Any, frozenset[int]]] = WeakKeyDictionary()


def remember_state(optimizer: Optimizer, trace: Any) -> None:
    """Note which parameters have state as a trace begins; later calls of the same trace change nothing.

    Dynamo lets the optimizers of torch.optim initialise their state (zeros) while it traces them.
    """
    if optimizer not in _with_state or _with_state[optimizer][0] != trace:
        _with_state[optimizer] = trace, frozenset(map(id, _keys_with_state(optimizer)))


def forget_new_state(optimizer: Optimizer) -> None:
    """Take away the state that has been initialised since :func:`remember_state`.

    The step has been refused.
    """
    if optimizer in _with_state:
        _, known = _with_state[optimizer]
        for key in [key for key in _keys_with_state(optimizer) if id(key) not in known]:
            del optimizer.state[key]


def _keys_with_state(optimizer: Optimizer) -> Iterator[Any]:
    return (key for key, state in optimizer.state.items() if state)
