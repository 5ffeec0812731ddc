"""Fused optimizers, computed by elementary operations equivalent to their kernels.

Note [A wish for speed]
-----------------------
With ``fused=True``, torch.optim calls a single operator for the whole update (``torch._fused_adamw_``), which
hides all operations that could be compensated. But the wish is for speed, not for another update, and
Inductor generates fused kernels itself. So a step for this backend computes the update of ``fused=False``:

* For each function that chooses between both (``torch.optim.adamw.adamw``), Dynamo traces a substitute,
  registered by ``torch.compiler.substitute_in_graph`` (:func:`trace_unfused`). In steps that are compiled for
  another backend, the substitute breaks the graph like the original; eager steps call the original.
* Python runs a recorded step and calls the operator; the recorder replaces the call (:func:`run_unfused`).

A :class:`torch.amp.GradScaler` leaves two things to a fused optimizer: to divide the gradients by
``grad_scale``, and to change nothing if ``found_inf`` is not zero. Both are done around the update, as part
of the step, in float32 arithmetic, so that no float16 gradient underflows in the division. A momentum that is
created in a skipped step is zero (``torch._fused_sgd_`` leaves it uninitialized).

The kernels for GPUs also take moments of another dtype than their parameter, which ``fused=False`` refuses.
They compute such an update in float32 and round each result once, and so does :func:`_run_in_one_dtype`.
"""

from __future__ import annotations

import functools
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

#: Function of torch.optim that calls a fused operator if its argument ``fused`` is true, by the operator's
#: name. Both take lists of tensors, gradients second, and the same keyword arguments.
OPERATORS: dict[str, Any] = {f"_fused_{each.__name__}_": each for each in (adam, adamw, sgd, adagrad)}


def trace_unfused(is_ours: Callable[[], bool]) -> None:
    """Make Dynamo trace ``fused=True`` as ``fused=False``; call once per process.

    A function keeps other code's substitute: then a fused step of its class is refused because of its graph
    break. ``is_ours`` tells whether the step being traced is compensated.
    """
    is_constant = torch.compiler.assume_constant_result(is_ours)
    for update in OPERATORS.values():
        substitute = torch.compiler.substitute_in_graph(update, skip_signature_check=True)
        try:
            substitute(_unfused(_twin(update), is_constant))
        except ValueError as taken:
            log.warning("steps with fused=True that call %s cannot be compiled: %s", update.__name__, taken)


def _twin(function: FunctionType) -> FunctionType:
    """Copy a function, so that substitutes registered for the original do not apply to the copy."""
    given = function.__globals__, function.__name__, function.__defaults__, function.__closure__
    twin = FunctionType(function.__code__, *given)
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
    """Return the name of the fused operator that is called, also by an overload; None for others."""
    name = str(getattr(called, "__name__", "")).partition(".")[0]
    return name if name in OPERATORS else None


def run_unfused(name: str, lists: Iterable[list[Any]], options: dict[str, Any]) -> None:
    """Compute the update of a fused operator with elementary operations, given the operator's arguments."""
    update, options = OPERATORS[name], dict(options)
    params, grads, *state = lists
    if update is not sgd:  # both the caller and the function increment the step counts
        *state, counts = state
        _run_scaled(update, [params, grads, *state, [count - 1 for count in counts]], options)
        return
    momenta, is_first = state[0], options.pop("is_first_step")
    made: list[Any] = [None] * len(params) if is_first else momenta
    _run_scaled(update, [params, grads, made], options)
    if is_first:
        for momentum, first in zip(momenta, made, strict=True):
            momentum.copy_(first)


def _run_scaled(update: Callable[..., None], lists: Sequence[list[Any]], options: dict[str, Any]) -> None:
    """Run an update with ``fused=False``, and the work that a loss scaler leaves to fused optimizers."""
    grad_scale, found_inf = options.get("grad_scale"), options.get("found_inf")
    options = {**options, "fused": False, "grad_scale": None, "found_inf": None}
    restored = () if found_inf is None else lists
    kept = [[None if each is None else each.clone() for each in values] for values in restored]
    if grad_scale is not None:
        for grad in lists[1]:
            grad.div_(grad_scale.to(grad.device))
    _run_in_one_dtype(update, lists, options)
    if found_inf is not None:
        for values, old_values in zip(lists, kept, strict=True):
            for i, (value, old) in enumerate(zip(values, old_values, strict=True)):
                if value is not None:
                    is_skipped = found_inf.to(value.device) != 0
                    unchanged = torch.zeros_like(value) if old is None else old
                    values[i] = value.copy_(torch.where(is_skipped, unchanged, value))


def _run_in_one_dtype(
    update: Callable[..., None], lists: Sequence[list[Any]], options: dict[str, Any]
) -> None:
    """Run an update; each row of parameter, gradient and state is computed in the widest of its dtypes."""
    tensors, counts = (lists, ()) if update is sgd else (lists[:-1], lists[-1:])
    params, grads, *states = tensors
    rows = [[values[i] for values in tensors if values] for i in range(len(params))]
    given = [[each.dtype for each in row if each is not None] for row in rows]
    dtypes = [functools.reduce(torch.promote_types, row) for row in given]
    wide = [list(map(_converted, values, dtypes)) for values in tensors]
    update(*wide, *counts, **options)
    for values, results in zip((params, *states), (wide[0], *wide[2:]), strict=True):
        for i, (value, result) in enumerate(zip(values, results, strict=True)):
            if value is None:  # SGD makes the momentum from the gradient
                values[i] = _converted(result, grads[i].dtype)
            elif value is not result:
                value.copy_(result)


def _converted(value: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a tensor in a dtype: itself, if it has the dtype."""
    return value if value is None or value.dtype is dtype else value.to(dtype)
