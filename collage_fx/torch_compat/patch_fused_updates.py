"""Fused optimizers, computed by the elementary operations that their kernels stand for.

Note [A wish for speed]
-----------------------
``fused=True`` has torch.optim call one operator for the whole update (``torch._fused_adamw_``), which leaves
nothing to compensate. Dynamo doesn't trace it either, it breaks the graph there. But it asks for no other
update, only for a fast one, and Inductor makes kernels itself. So importing collage_fx wraps the functions
that choose (``torch.optim.adamw.adamw``): in a step that is compiled, or recorded, for this backend the
update is that of ``fused=False``. In all others the functions are called as they are.

What the kernels do besides, for :class:`torch.amp.GradScaler`, is done around it: gradients are divided by
``grad_scale``, and where ``found_inf`` isn't zero everything is left as it was. (``torch._fused_sgd_`` leaves
a momentum that is born in such a step uninitialised. Here it is zero.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from collage_fx.torch_compat.patching import Patch

#: Why each of torch.optim's functions with an argument ``fused`` is wrapped.
WHY = "fused=True is a wish for speed: a compensated step makes the update of fused=False"

ADAM = Patch(name="fused-adam", target="torch.optim.adam:adam(params)", why=WHY, affects="everybody")
ADAMW = Patch(name="fused-adamw", target="torch.optim.adamw:adamw(params)", why=WHY, affects="everybody")
SGD = Patch(name="fused-sgd", target="torch.optim.sgd:sgd(params)", why=WHY, affects="everybody")
ADAGRAD = Patch(
    name="fused-adagrad",
    target="torch.optim.adagrad:adagrad(params)",
    why=WHY,
    affects="everybody",
)

#: All of them take lists of tensors, gradients second, and overwrite them.
FUSED_UPDATES = (ADAM, ADAMW, SGD, ADAGRAD)


def install_fused_updates(is_ours: Callable[[], bool]) -> None:
    """Wrap torch.optim's functions. A second call replaces the first.

    Args:
        is_ours: whether the update that is being traced or run belongs to a step that is compensated.
    """
    is_constant = torch.compiler.assume_constant_result(is_ours)
    for patch in FUSED_UPDATES:
        patch.install(lambda update: _unfused(update, is_constant))


def _unfused(update: Callable[..., None], is_ours: Callable[[], bool]) -> Callable[..., None]:
    def updating(*lists: Any, **options: Any) -> None:
        if not options.get("fused") or not is_ours():
            return update(*lists, **options)
        grad_scale, found_inf = options.get("grad_scale"), options.get("found_inf")
        options.update(fused=False, grad_scale=None, found_inf=None)
        kept = [] if found_inf is None else [[_copy(value) for value in values] for values in lists]
        if grad_scale is not None:
            for grad in lists[1]:
                grad.div_(grad_scale.to(grad.device))
        update(*lists, **options)
        if found_inf is not None:
            for values, old_values in zip(lists, kept, strict=True):
                for i, old in enumerate(old_values):
                    values[i] = _unless(found_inf, values[i], old)
        return None

    return updating


def _copy(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.clone()


def _unless(found_inf: Tensor, value: Tensor, old: Tensor | None) -> Tensor:
    """What a tensor holds after the update, in its own memory: zero if it was born in one that is skipped."""
    is_skipped = found_inf.to(value.device) != 0
    return value.copy_(torch.where(is_skipped, torch.zeros_like(value) if old is None else old, value))
