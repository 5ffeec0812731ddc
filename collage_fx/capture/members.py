"""Parameters whose gradients come and go: a step finds out when it runs which of them it has.

Note [Members that come and go]
-------------------------------
A parameter without a gradient (an expert without tokens, a layer that is dropped) is left alone, and so are
its state and step counter. Dynamo makes that part of a graph, and would compile each set of gradients.

The step of torch.optim's classes consists of rows, a parameter with its gradient and its state: Note [One of
each family]. So once the set of gradients differs from the compilation before, the step is compiled for all
*members*, and no guard asks for their gradients. The compiled step looks at them, and calls the kernels of
the rows that have one (:class:`~collage_fx.runtime.WholeStep`).

* While the step is compiled, members without a gradient get a placeholder (:func:`add_stand_ins`), so that
  the step loops over their rows, too. The placeholder is never read.
* Members are parameters that have had a gradient or state. The second time that gradients differ, members are
  all parameters that require a gradient: their state is made then, as for a first step, with a step counter
  of zero. All sets of gradients cost three compilations.
* The dtype of a gradient that no compilation has met is the parameter's ``grad_dtype``. If that allows any
  dtype, the step is compiled for float32, and converts a gradient that turns out to be narrower.
* A parameter that is no member is guarded to have no gradient.

Where the rows are not understood, each set is compiled, and at Dynamo's limit the step is recorded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx.state import has_state, parameter_names
from collage_fx.torch_compat import gradient_dtype, local_tensor, original_class, records


@dataclass
class _Members:
    """Gradients that the compilations of an optimizer's step have met: a part of its record."""

    #: ``id`` of each parameter -> whether it had a gradient in the last compilation.
    present: dict[int, bool] = field(default_factory=dict)
    #: ``id`` of a parameter that had a gradient in any compilation -> dtype of the gradient.
    known: dict[int, torch.dtype] = field(default_factory=dict)
    changes: int = 0  # number of compilations whose set of gradients differed from the one before
    is_understood: bool = True  # whether the step consists of rows, as far as has been tried
    depends_on_sizes: bool = False  # whether code for a row does not hold for rows of other sizes
    standing_in: list[Tensor] = field(default_factory=list)  # parameters that have a placeholder gradient now


def note_gradients(optimizer: Optimizer) -> None:
    """Note which parameters have a gradient, when a compilation of the optimizer's step begins."""
    members = records.of(optimizer, _Members)
    present = {id(p): p.grad is not None for _, p in parameter_names(optimizer)}
    members.changes += any(members.present.get(p, is_there) != is_there for p, is_there in present.items())
    members.present = present
    members.known |= {id(p): p.grad.dtype for _, p in parameter_names(optimizer) if p.grad is not None}


def all_come_and_go(optimizer: Optimizer) -> None:
    """Note that some parameters have a gradient, at any time others: all are members from the start."""
    records.of(optimizer, _Members).changes = 2


def members_come_and_go(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's step is compiled for all members."""
    members = records.of(optimizer, _Members)
    return members.is_understood and members.changes > 0


def has_stand_ins(optimizer: Optimizer) -> bool:
    """Return whether parameters of the optimizer have placeholder gradients now."""
    return bool(records.of(optimizer, _Members).standing_in)


def add_stand_ins(optimizer: Optimizer) -> None:
    """Give each member without a gradient a placeholder, until :func:`remove_stand_ins`."""
    if not members_come_and_go(optimizer):
        return
    members = records.of(optimizer, _Members)
    for _, p in parameter_names(optimizer):
        is_known = id(p) in members.known or has_state(optimizer, p)
        if p.grad is None and (is_known or (p.requires_grad and members.changes > 1)):
            p.grad = stand_in_for(p, members.known.get(id(p)))
            members.standing_in.append(p)
    if original_class(type(optimizer)) is torch.optim.SGD:
        _begin_momentum(optimizer)


def stand_in_for(parameter: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor with the layout of a parameter's gradient, but without memory.

    ``dtype`` is that of the gradient; by default the dtype that torch gives it.
    """
    gradient = torch.empty_like(parameter, dtype=dtype or gradient_dtype(parameter))
    local_tensor(gradient).untyped_storage().resize_(0)
    return gradient


def remove_stand_ins(optimizers: Iterable[Optimizer]) -> None:
    """Remove all placeholder gradients of some optimizers."""
    for optimizer in optimizers:
        standing_in = records.of(optimizer, _Members).standing_in
        for p in standing_in:
            p.grad = None
        standing_in.clear()


def give_up_rows(optimizer: Optimizer) -> None:
    """Note that the optimizer's step does not consist of rows: each pattern of gradients is compiled."""
    records.of(optimizer, _Members).is_understood = False


def note_dependence_on_sizes(optimizer: Optimizer) -> None:
    """Note that code for a row of the optimizer's step does not hold for rows of other sizes."""
    records.of(optimizer, _Members).depends_on_sizes = True


def depends_on_sizes(optimizer: Optimizer) -> bool:
    """Return whether code for a row of the optimizer's step is known not to hold for other sizes."""
    return records.of(optimizer, _Members).depends_on_sizes


def _begin_momentum(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        if group["momentum"] and not group["dampening"]:
            for p in group["params"]:
                if p.grad is not None and optimizer.state[p].get("momentum_buffer") is None:
                    optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p.grad)
