"""Patches for steps with several dtypes: rests on torch's fake tensor mode and on Dynamo's calls.

Note [Several dtypes]
---------------------
A step may have a parameter, a gradient and state of three dtypes. Torch has three obstacles to tracing it:

* A fake parameter gets its fake gradient before it gets ``grad_dtype``, and refuses a gradient of another
  dtype. While Dynamo and AOTAutograd work for this backend, such a fake parameter has no gradient. Dynamo
  reads gradients from the real parameters, so that none is missing in a graph.
* ``lerp``, by which most optimizers update their first moment, is the only operation of their steps that
  takes tensors of one dtype alone, eagerly too. Here its operands are converted to one dtype first, in place
  to that of the average. Where arithmetic is ``wide``, no such conversion rounds.
* Dynamo traces ``torch._foreach_lerp_`` with a weight from 1/2 on as torch calculates it on a GPU: one minus
  the weight has the 16 bits of the tensors, 0.2266 for a weight of 0.775. Here each element has a ``lerp_``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.variables.base import VariableTracker

from collage_fx.torch_compat.patching import Patch

GRADIENT_DTYPES = Patch(
    name="gradient-dtypes",
    target="torch._subclasses.fake_tensor:FakeTensorMode.from_tensor(self, tensor)",
    why="a step may have gradients of another dtype than its parameters: Tensor.grad_dtype",
    waits_for="a fix in torch: fake tensors get grad_dtype before they get their gradient",
)

AVERAGES_OF_DTYPES = Patch(
    name="averages-of-dtypes",
    target="torch._dynamo.symbolic_convert:InstructionTranslatorBase.call_function(self, fn, args, kwargs)",
    why="moving averages may have another dtype than gradients, which lerp alone refuses",
    waits_for="Tensor.lerp with operands of several dtypes, as other operations have",
    relies_on=(
        "torch._dynamo.symbolic_convert:InstructionTranslatorBase.push(self, val)",
        "torch._dynamo.variables.misc:GetAttrVariable has obj, name",
        "torch._dynamo.variables.tensor:TensorVariable has dtype, is_tensor",
        "torch._dynamo.variables.tensor:TensorVariable.call_method(self, tx, name, args, kwargs)",
        "torch._dynamo.variables.base:VariableTracker.build(tx, value)",
        "torch._dynamo.variables.lists:ListVariable has items",
    ),
)


@contextlib.contextmanager
def tracing_several_dtypes() -> Iterator[None]:
    """Context manager: steps may have several dtypes; see Note [Several dtypes]."""
    with (
        GRADIENT_DTYPES.entered(_without_other_gradients),
        AVERAGES_OF_DTYPES.entered(_with_ends_of_one_dtype),
    ):
        yield


def _without_other_gradients(
    from_tensor: Callable[..., Any], self: Any, tensor: Tensor, *args: Any, **keywords: Any
) -> Any:
    gradient = tensor.grad if tensor.is_leaf else None
    if gradient is None or gradient.dtype is tensor.dtype:
        return from_tensor(self, tensor, *args, **keywords)
    tensor.grad = None
    try:
        return from_tensor(self, tensor, *args, **keywords)
    finally:
        tensor.grad = gradient


def _with_ends_of_one_dtype(
    call_function: Callable[..., None], self: Any, fn: Any, args: list[Any], kwargs: dict[str, Any]
) -> None:
    name = fn.name if type(fn).__name__ == "GetAttrVariable" else ""
    if name in ("lerp", "lerp_") and args:
        start, end = fn.obj.realize(), args[0].realize()
        if start.is_tensor() and end.is_tensor() and start.dtype is not end.dtype:
            dtype = start.dtype if name == "lerp_" else torch.promote_types(start.dtype, end.dtype)
            start, end = (_converted(self, each, dtype) for each in (start, end))
            self.push(start.call_method(self, name, [end, *args[1:]], kwargs))
            return
    if getattr(getattr(fn, "value", None), "__name__", "") == "_foreach_lerp_":
        named = (kwargs[each] for each in ("self", "tensors1", "weight", "weights") if each in kwargs)
        starts, ends, weight = (each.realize() for each in (*args, *named))
        is_number = not (weight.is_tensor() or isinstance(weight, type(ends)))
        # From 1/2 on, torch rounds one minus the weight to 16 bits.
        is_known = is_number and weight.is_python_constant()
        if is_number and not (is_known and abs(weight.as_python_constant()) < 0.5):
            for start, end in zip(starts.items, ends.items, strict=True):
                start.call_method(self, "lerp_", [end, weight], {})
            self.push(VariableTracker.build(self, None))
            return
    call_function(self, fn, args, kwargs)


def _converted(translator: Any, tensor: Any, dtype: torch.dtype) -> Any:
    """Trace the conversion of a tensor to a dtype, unless it has that dtype."""
    if tensor.dtype is dtype:
        return tensor
    return tensor.call_method(translator, "to", [VariableTracker.build(translator, dtype)], {})
