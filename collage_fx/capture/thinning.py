"""Which rows of the lists that a step of torch.optim loops over are traced, and which are left out.

Dynamo takes longer than all that follows, and needs to see only two rows of each layout: Note [One of each
family] in ``families.py``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from collage_fx.graph import device_facts
from collage_fx.numerics import is_low_precision
from collage_fx.state import has_error_terms, packed_format
from collage_fx.torch_compat import ThinnedLists, TracedRows, local_tensor, sharding_of


def rows_to_trace(rows: Sequence[tuple[Any, ...]], *, come_and_go: bool = False) -> TracedRows | None:
    """Two of the rows of each layout, of the lists that a step loops over.

    None if that would be all of them, unless their gradients come and go; where nothing is compensated, where
    there are no families, and where there may be state that is still to be made, in the step, for each.
    """
    values = [value for row in rows for value in row if not (value is None and come_and_go)]
    if not all(isinstance(value, Tensor) and is_plain(value) for value in values):
        return None
    if not any(is_low_precision(value.dtype) for value in values):
        return None
    alike: dict[Hashable, list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        alike[tuple(map(layout_of, row))].append(i)
    kept = sorted(i for same in alike.values() for i in same[:2])
    return TracedRows(kept, come_and_go) if come_and_go or len(kept) < len(rows) else None


#: Where a tensor is in the lists that a step loops over: which lists, which of them, which row.
Cell = tuple[int, int, int]


class ListRows:
    """The rows of lists, those that were traced and those that were left out."""

    def __init__(self, thinned: Sequence[ThinnedLists]) -> None:
        self.thinned = thinned
        self.come_and_go = any(lists.come_and_go for lists in thinned)
        self.cells: dict[int, Cell] = {
            id(value): (t, c, r)
            for t, lists in enumerate(thinned)
            for r, row in enumerate(lists.rows)
            for c, value in enumerate(row)
            if value is not None
        }
        self._values = sum(value is not None for lists in thinned for row in lists.rows for value in row)
        #: Rows that were traced -> those that they stand for.
        self.stands_for: dict[tuple[int, int], list[int]] = {}
        #: The first row of each layout -> the second.
        self.second: dict[tuple[int, int], int] = {}
        for t, lists in enumerate(thinned):
            first: dict[Hashable, int] = {}
            for r, row in enumerate(lists.rows):
                of = first.setdefault(tuple(map(layout_of, row)), r)
                if r not in lists.kept:
                    self.stands_for.setdefault((t, of), []).append(r)
                elif of != r:
                    self.second[t, of] = r

    def parameter_beside(self, value: Any) -> Any:
        """The parameter in the row of a tensor."""
        t, _, r = self.cells[id(value)]
        return self.thinned[t].rows[r][0]

    def are_understood(self) -> bool:
        """Whether no tensor is in two places."""
        return len(self.cells) == self._values

    def value(self, cell: Cell) -> Any:
        t, c, r = cell
        return self.thinned[t].rows[r][c]

    def is_left_out(self, value: Any) -> bool:
        t, _, r = self.cells.get(id(value), (0, 0, -1))
        return r >= 0 and r not in self.thinned[t].kept

    def with_those_left_out(self, inputs: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
        """Inputs, by name, and where they would come in the whole graph those of rows left out."""
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
            behind[last[t, before]] += [self._named((t, c, row)) for c in columns[t, first]]
        return [each for i, given in enumerate(inputs) for each in (given, *behind[i])]

    def _named(self, cell: Cell) -> tuple[str, Any]:
        return "list_{}_{}_row_{}".format(*cell), self.value(cell)


def is_plain(value: Tensor) -> bool:
    """Whether a tensor is an ordinary one, of known sizes and strides, where steps are compiled in parts.

    Or a DTensor of which this process has such a piece.
    """
    value = local_tensor(value)
    return (
        type(value) in (Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and device_facts(value.device).in_parts
        and all(isinstance(number, int) for number in (*value.shape, *value.stride()))
    )


def layout_of(value: Tensor | None) -> tuple[Any, ...]:
    """All that a compilation may ask of a tensor, but where it lies; empty for None in the place of one."""
    if value is None:
        return ()
    pieces = sharding_of(value)
    return (
        *((pieces, *layout_of(local_tensor(value))) if pieces is not None else ()),
        *(type(value), value.dtype, tuple(value.shape), value.stride()),
        *(value.requires_grad, value.is_leaf, value.is_inference(), value.is_conj(), value.is_neg()),
        *(has_error_terms(value), packed_format(value)),
    )
