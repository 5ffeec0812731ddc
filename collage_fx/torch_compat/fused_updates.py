"""Fused optimizers, computed by the elementary operations that their kernels stand for.

Note [A wish for speed]
-----------------------
``fused=True`` has torch.optim call one operator for the whole update (``torch._fused_adamw_``), which leaves
nothing to compensate, and Dynamo breaks the graph there. But ``fused=True`` asks for no other update, only
for a fast one, and Inductor makes kernels itself. So a step that is compiled or recorded for this backend
makes the update of ``fused=False``:

* For each function that chooses between the two (``torch.optim.adamw.adamw``), Dynamo is given another one to
  trace, by ``torch.compiler.substitute_in_graph`` (:func:`trace_unfused`). In steps that are compiled for
  another backend it breaks the graph as ever, and eager steps call the functions as they are.
* A recorded step is run by Python, which calls the operator. It is met there (:func:`run_unfused`).

A :class:`torch.amp.GradScaler` leaves two things to a fused optimizer: to divide the gradients by
``grad_scale``, and to change nothing where ``found_inf`` isn't zero. Both are done around the update, as part
of the step, whose arithmetic is float32's. So a float16 gradient, which a scaler itself refuses to unscale,
does not underflow in the division. (``torch._fused_sgd_`` leaves a momentum that is born in a skipped step
uninitialised. Here it is zero.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

log = logging.getLogger("collage_fx")

#: The name of each fused operator -> the function of torch.optim that calls it where its argument ``fused``
#: is true. Both take lists of tensors, gradients second, and the same keyword arguments.
OPERATORS: dict[str, Any] = {
    "_fused_adam_": adam,
    "_fused_adamw_": adamw,
    "_fused_sgd_": sgd,
    "_fused_adagrad_": adagrad,
}


def trace_unfused(is_ours: Callable[[], bool]) -> None:
    """Have Dynamo trace ``fused=True`` as ``fused=False``. Called once a process.

    A function for which somebody else has registered a substitute keeps that one: then a fused step of its
    class is refused for its graph break.

    Args:
        is_ours: whether the step that is being traced is compensated.
    """
    is_constant = torch.compiler.assume_constant_result(is_ours)
    for update in OPERATORS.values():
        substitute = torch.compiler.substitute_in_graph(update, skip_signature_check=True)
        try:
            substitute(_unfused(_twin(update), is_constant))
        except ValueError as taken:
            log.warning("steps with fused=True that call %s cannot be compiled: %s", update.__name__, taken)


def _twin(function: FunctionType) -> FunctionType:
    """Copy a function, so that what is registered for the original does not hold for the copy."""
    twin = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def _unfused(update: Callable[..., None], is_ours: Callable[[], bool]) -> Callable[..., None]:
    def updating(*lists: Any, **options: Any) -> None:
        if options.get("fused") and is_ours():
            _run_scaled(update, lists, options)
        else:
            update(*lists, **options)

    return updating


def fused_operator(called: Any) -> str | None:
    """The name of torch's operator for a whole update that a function is, or an overload; else None."""
    name = str(getattr(called, "__name__", "")).partition(".")[0]
    return name if name in OPERATORS else None


def run_unfused(name: str, lists: Iterable[list[Any]], options: dict[str, Any]) -> None:
    """Make the update of a fused operator out of elementary operations.

    Args:
        name: of the operator.
        lists: its positional arguments: parameters, gradients and their state.
        options: its keyword arguments.
    """
    update, options = OPERATORS[name], dict(options)
    params, grads, *state = lists
    if update is not sgd:  # whose caller has counted the step, as the function does
        *state, counts = state
        _run_scaled(update, [params, grads, *state, [count - 1 for count in counts]], options)
        return
    momenta, is_first = state[0], options.pop("is_first_step")
    made: list[Any] = [None] * len(params) if is_first or not momenta else momenta
    _run_scaled(update, [params, grads, made], options)
    if is_first:
        for momentum, first in zip(momenta, made, strict=True):
            momentum.copy_(first)


def _run_scaled(update: Callable[..., None], lists: Sequence[list[Any]], options: dict[str, Any]) -> None:
    """Run an update with ``fused=False``, and around it do what a loss scaler leaves to a fused one."""
    grad_scale, found_inf = options.get("grad_scale"), options.get("found_inf")
    options = {**options, "fused": False, "grad_scale": None, "found_inf": None}
    kept = [] if found_inf is None else [[_copy(value) for value in values] for values in lists]
    if grad_scale is not None:
        for grad in lists[1]:
            grad.div_(grad_scale.to(grad.device))
    update(*lists, **options)
    if found_inf is not None:
        for values, old_values in zip(lists, kept, strict=True):
            for i, old in enumerate(old_values):
                values[i] = _unless(found_inf, values[i], old)


def _copy(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.clone()


def _unless(found_inf: Tensor, value: Tensor, old: Tensor | None) -> Tensor:
    """What a tensor holds after the update, in its own memory: zero if it was born in one that is skipped."""
    is_skipped = found_inf.to(value.device) != 0
    return value.copy_(torch.where(is_skipped, torch.zeros_like(value) if old is None else old, value))
