"""Rows of a step: a parameter, its gradient and its state. Which are traced, and which lack a gradient.

Note [Members that come and go]
-------------------------------
A parameter without a gradient (an expert without tokens, a layer that is dropped) is left alone, and so are
its state and step counter. Dynamo makes that part of a graph, and would compile each set of gradients.

The step of torch.optim's classes consists of rows, a parameter with its gradient and its state: Note [One of
each family]. So once the set of gradients differs from the compilation before, the step is compiled for all
*members*, and no guard asks for their gradients. The compiled step looks at them, and calls the kernels of
the rows that have one (:class:`~collage_fx.runtime.WholeStep`).

* While the step is compiled, members without a gradient get a placeholder (:func:`note_gradients`), so that
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

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx import torch_compat
from collage_fx.graph import device_facts
from collage_fx.numerics import is_low_precision
from collage_fx.state import has_state, parameter_names, stored_as
from collage_fx.torch_compat import ThinnedLists, local_tensor, records, sharding_of


@dataclass
class Rows:
    """Facts about the rows of an optimizer's step: a part of its record."""

    #: ``id`` of each parameter -> whether it had a gradient in the last compilation.
    present: dict[int, bool] = field(default_factory=dict)
    #: ``id`` of a parameter that had a gradient in any compilation -> dtype of the gradient.
    known: dict[int, torch.dtype] = field(default_factory=dict)
    turns: int = 0  # number of compilations whose set of gradients differed from the one before
    are_understood: bool = True  # whether the step consists of rows, as far as has been tried
    depend_on_sizes: bool = False  # whether code for a row does not hold for rows of other sizes
    standing_in: list[Tensor] = field(default_factory=list)  # parameters that have a placeholder gradient now

    @staticmethod
    def of(optimizer: Optimizer) -> Rows:
        return records.of(optimizer, Rows)

    @property
    def come_and_go(self) -> bool:
        """Whether the step is compiled for all members."""
        return self.are_understood and self.turns > 0


def note_gradients(optimizer: Optimizer, *, with_stand_ins: bool) -> None:
    """Note which parameters have a gradient, when a compilation of the optimizer's step begins.

    ``with_stand_ins``: members without a gradient get a placeholder, until :func:`remove_stand_ins`.
    """
    rows = Rows.of(optimizer)
    present = {id(p): p.grad is not None for _, p in parameter_names(optimizer)}
    rows.turns += any(rows.present.get(p, is_there) != is_there for p, is_there in present.items())
    rows.present = present
    rows.known |= {id(p): p.grad.dtype for _, p in parameter_names(optimizer) if p.grad is not None}
    if not (with_stand_ins and rows.come_and_go):
        return
    for _, p in parameter_names(optimizer):
        is_known = id(p) in rows.known or has_state(optimizer, p)
        if p.grad is None and (is_known or (p.requires_grad and rows.turns > 1)):
            p.grad = stand_in_for(p, rows.known.get(id(p)))
            rows.standing_in.append(p)
    if torch_compat.original_class(type(optimizer)) is torch.optim.SGD:
        _begin_momentum(optimizer)


def stand_in_for(parameter: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor with the layout of a parameter's gradient, but without memory.

    ``dtype`` is that of the gradient; by default the dtype that torch gives it.
    """
    gradient = torch.empty_like(parameter, dtype=dtype or torch_compat.gradient_dtype(parameter))
    local_tensor(gradient).untyped_storage().resize_(0)
    return gradient


def remove_stand_ins(optimizers: Iterable[Optimizer]) -> None:
    """Remove all placeholder gradients of some optimizers."""
    for standing_in in (Rows.of(optimizer).standing_in for optimizer in optimizers):
        for p in standing_in:
            p.grad = None
        standing_in.clear()


def _begin_momentum(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        if group["momentum"] and not group["dampening"]:
            for p in group["params"]:
                if p.grad is not None and optimizer.state[p].get("momentum_buffer") is None:
                    optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p.grad)


def is_of_concern(parameter: Tensor, packs: bool) -> bool:
    """Return whether a step of a parameter is rewritten: of low precision, or float32 if state is packed."""
    return is_low_precision(parameter.dtype) or (packs and parameter.dtype is torch.float32)


def rows_to_trace(
    optimizer: Optimizer, rows: tuple[tuple[Any, ...], ...], *, come_and_go: bool, packs: bool, any_size: bool
) -> ThinnedLists | None:
    """Choose two rows of each layout, among the lists that a step loops over.

    If ``come_and_go``, a row may lack a gradient in some steps; if ``packs``, state of float32 parameters may
    be packed; if ``any_size``, layouts leave out the sizes where they can, and the two rows differ in them.

    Returns:
        the rows; None if they are all rows and gradients do not come and go, if nothing is compensated, if
        there are no families, or if the step may have to make state for each row.
    """
    values = [value for row in rows for value in row if not (value is None and come_and_go)]
    if not all(isinstance(value, Tensor) and is_plain(value) for value in values):
        return None
    if not any(is_of_concern(value, packs) for value in values):
        return None
    first: dict[Hashable, int] = {}
    second: dict[int, int] = {}
    like = [first.setdefault(layouts_of(row, any_size=any_size), i) for i, row in enumerate(rows)]
    for i, of in enumerate(like):
        is_better = of not in second or rows[second[of]][0].shape == rows[of][0].shape != rows[i][0].shape
        if i != of and is_better:
            second[of] = i
    kept = sorted({*like, *second.values()})
    if not come_and_go and len(kept) == len(rows):
        return None
    return ThinnedLists(optimizer, rows, kept, like, come_and_go)


def have_other_sizes(thinned: Iterable[ThinnedLists]) -> bool:
    """Return whether a row stands for rows of other sizes."""
    first = ((row, lists.rows[lists.like[r]]) for lists in thinned for r, row in enumerate(lists.rows))
    return any(row[0].shape != of[0].shape for row, of in first)


class ListRows:
    """Rows of lists, both traced and left out.

    A cell is a tensor's position in the lists that a step loops over: (set of lists, list in the set, row).
    """

    def __init__(self, thinned: Sequence[ThinnedLists]) -> None:
        self.thinned = thinned
        self.come_and_go = any(lists.come_and_go for lists in thinned)
        self.cells: dict[int, tuple[int, int, int]] = {}
        #: (set, traced row) -> rows left out that it stands for.
        self.stands_for: dict[tuple[int, int], list[int]] = {}
        #: (set, first row of a layout) -> the second row of the layout.
        self.second: dict[tuple[int, int], int] = {}
        for t, lists in enumerate(thinned):
            for r, (row, of) in enumerate(zip(lists.rows, lists.like, strict=True)):
                self.cells |= {id(value): (t, c, r) for c, value in enumerate(row) if value is not None}
                if r not in lists.kept:
                    self.stands_for.setdefault((t, of), []).append(r)
                elif of != r:
                    self.second[t, of] = r

    def value(self, t: int, c: int, r: int) -> Any:
        return self.thinned[t].rows[r][c]

    def is_left_out(self, value: Any) -> bool:
        t, _, r = self.cells.get(id(value), (0, 0, -1))
        return r >= 0 and r not in self.thinned[t].kept

    def with_rows_left_out(self, inputs: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
        """Insert the tensors of rows left out into named inputs, where the whole graph would have them."""
        columns: dict[tuple[int, int], list[int]] = defaultdict(list)
        last: dict[tuple[int, int], int] = {}
        for i, (_, value) in enumerate(inputs):
            t, c, r = self.cells.get(id(value), (-1, -1, -1))
            columns[t, r].append(c)
            last[t, r] = i
        behind: dict[int, list[tuple[str, Any]]] = defaultdict(list)
        left_out = [(t, row, first) for (t, first), rows in self.stands_for.items() for row in rows]
        for t, row, first in sorted(each for each in left_out if each[::2] in columns):
            before = max(r for u, r in columns if u == t and r < row)
            for c in columns[t, first]:
                behind[last[t, before]].append((f"list_{t}_{c}_row_{row}", self.value(t, c, row)))
        return [each for i, given in enumerate(inputs) for each in (given, *behind[i])]


def is_plain(value: Tensor) -> bool:
    """Return whether a tensor is ordinary, of known sizes and strides, where steps are compiled in parts.

    A DTensor counts as plain if its local shard is.
    """
    value = local_tensor(value)
    return (
        type(value) in (Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and device_facts(value.device).in_parts
        and all(isinstance(number, int) for number in (*value.shape, *value.stride()))
    )


def layouts_of(values: Sequence[Tensor | None], *, any_size: bool) -> tuple[Hashable, ...]:
    """Return the layouts of tensors that are updated together.

    With ``any_size`` their sizes are left out if code for them may hold for other sizes.
    """
    shape = common_shape(values) if any_size else None
    return tuple(layout_of(value, shape) for value in values)


def common_shape(values: Iterable[Tensor | None]) -> torch.Size | None:
    """Return the shape of all tensors but scalars if code for it may hold for other sizes; else None.

    They are contiguous, and no size is 0 or 1, nor their product beyond int32, for which code may differ.
    """
    tensors = [value for value in values if value is not None and value.dim()]
    shapes = {value.shape for value in tensors}
    if len(shapes) != 1 or not all(each.is_contiguous() and sharding_of(each) is None for each in tensors):
        return None
    (shape,) = shapes
    return shape if min(shape) > 1 and shape.numel() < 2**31 else None


def layout_of(value: Tensor | None, left_out: torch.Size | None = None) -> tuple[Any, ...]:
    """Return the metadata that Dynamo may guard on: dtype, shape, strides, flags; empty for None.

    Of a shape that is to be left out only the number of dimensions counts.
    """
    if value is None:
        return ()
    pieces = sharding_of(value)
    sizes = (value.dim(),) if value.shape == left_out else (tuple(value.shape), value.stride())
    return (
        *((pieces, *layout_of(local_tensor(value))) if pieces is not None else ()),
        *(type(value), value.dtype, *sizes),
        *(value.requires_grad, value.is_leaf, value.is_inference(), value.is_conj(), value.is_neg()),
        stored_as(value),
    )
