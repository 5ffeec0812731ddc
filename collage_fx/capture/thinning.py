"""Choice of the rows of torch.optim's lists to trace: Note [One of each family] in ``families.py``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx.graph import device_facts
from collage_fx.numerics import is_low_precision
from collage_fx.state import has_error_terms, packed_format
from collage_fx.torch_compat import ThinnedLists, local_tensor, sharding_of


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


#: Position of a tensor in the lists that a step loops over: (set of lists, list in the set, row).
Cell = tuple[int, int, int]


class ListRows:
    """Rows of lists, both traced and left out."""

    def __init__(self, thinned: Sequence[ThinnedLists]) -> None:
        self.thinned = thinned
        self.come_and_go = any(lists.come_and_go for lists in thinned)
        self.cells: dict[int, Cell] = {}
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

    def parameter_beside(self, value: Any) -> Any:
        t, _, r = self.cells[id(value)]
        return self.value((t, 0, r))

    def value(self, cell: Cell) -> Any:
        t, c, r = cell
        return self.thinned[t].rows[r][c]

    def is_left_out(self, value: Any) -> bool:
        t, _, r = self.cells.get(id(value), (0, 0, -1))
        return r >= 0 and r not in self.thinned[t].kept

    def with_rows_left_out(self, inputs: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
        """Insert the tensors of rows left out into named inputs, where the whole graph would have them."""
        columns: dict[tuple[int, int], list[int]] = defaultdict(list)
        last: dict[tuple[int, int], int] = {}
        for i, (_, value) in enumerate(inputs):
            if (cell := self.cells.get(id(value))) is not None:
                t, c, r = cell
                columns[t, r].append(c)
                last[t, r] = i
        behind: dict[int, list[tuple[str, Any]]] = defaultdict(list)
        left_out = [(t, row, first) for (t, first), rows in self.stands_for.items() for row in rows]
        for t, row, first in sorted(each for each in left_out if each[::2] in columns):
            before = max(r for u, r in columns if u == t and r < row)
            for c in columns[t, first]:
                behind[last[t, before]].append((f"list_{t}_{c}_row_{row}", self.value((t, c, row))))
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
        *(has_error_terms(value), packed_format(value)),
    )
