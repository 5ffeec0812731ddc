"""Smaller tensors beside the elements of a larger tensor: a number for each row, or for each column.

Note [Rows and columns]
-----------------------
Adafactor keeps a mean for each row and each column of a matrix, and Ranger subtracts the mean of each row. A
flat rule on the host that reads such values takes its elements as a matrix: the leading dimensions are the
rows, the trailing ones the columns. A tensor ``[rows, 1]`` has a number for each row, ``[1, columns]`` for
each column; ``[64, 32, 3, 3]`` and ``[64, 1, 1, 1]`` are 64 rows of 288 columns. All smaller tensors of a
rule, contiguous, must agree on the number of columns, which the kernel is given; ``[1, 1]`` goes with any.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Broadcast(NamedTuple):
    """Repetition of a smaller tensor beside the elements of a larger tensor.

    Attributes:
        of_rows: whether it has a number for each row.
        of_columns: whether it has a number for each column; if neither, it has a single number.
        columns: number of columns of the larger tensor; 0 for any number.
    """

    of_rows: bool
    of_columns: bool
    columns: int


def broadcast(shape: Sequence[int], into: Sequence[int]) -> Broadcast | None:
    """Return how a tensor of one shape is repeated in another shape; None if it is not by rows or columns."""
    padded = (*(1 for _ in range(len(into) - len(shape))), *shape)
    if len(shape) > len(into) or padded == tuple(into):
        return None
    if math.prod(padded) == 1:
        return Broadcast(of_rows=False, of_columns=False, columns=0)
    for k in range(len(into) + 1):
        columns = math.prod(into[k:])
        if padded[:k] == tuple(into[:k]) and math.prod(padded[k:]) == 1:
            return Broadcast(of_rows=True, of_columns=False, columns=columns)
        if math.prod(padded[:k]) == 1 and padded[k:] == tuple(into[k:]):
            return Broadcast(of_rows=False, of_columns=True, columns=columns)
    return None


def common_columns(shapes: Iterable[Sequence[int]], into: Sequence[int]) -> int | None:
    """Return the number of columns that smaller tensors agree on; 0 for any number.

    None if they differ, or one is not repeated by rows or columns.
    """
    kinds = {broadcast(shape, into) for shape in shapes}
    columns = {kind.columns for kind in kinds if kind is not None} - {0}
    return None if None in kinds or len(columns) > 1 else next(iter(columns), 0)
