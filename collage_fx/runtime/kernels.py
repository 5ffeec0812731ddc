"""Kernels of a step and the calls of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from collage_fx.graph import Reasons
from collage_fx.runtime.launches import Column, Summed
from collage_fx.torch_compat import CFunction, TableKernel

#: The turn of a call that is made whichever members are there.
EVERY_TURN = -1


HOST = torch.device("cpu")


@dataclass(frozen=True)
class Kernel:
    """Compiled code of a rule.

    Attributes:
        call: takes, as one list, the length if the rule is flat, the inputs, and memory for the results. None
            where nothing but the function is called.
        function: the C++ function that this comes down to, or the kernel over a table of a GPU's, where the
            rule is independent and that is so.
        kinds: of a C++ function's arguments, as in :class:`~collage_fx.runtime.batches.Batch`.
        columns: of the rows of a kernel's table.
        device: where it runs.
        sums: what a kernel over a table leaves parts of.
        divisible: whether the function may be called for a piece of the tensors.
        width: elements of a unit of length of its tensors.
        reasons: why it is not made, or not called, in a faster way.
    """

    call: Callable[[list[Any]], Any] | None
    function: CFunction | TableKernel | None = None
    kinds: tuple[int, ...] = ()
    columns: tuple[Column, ...] = ()
    device: torch.device = HOST
    sums: tuple[Summed, ...] = ()
    divisible: bool = False
    width: int = 1
    reasons: Reasons = ()


@dataclass(frozen=True)
class Call:
    """Call of a kernel in a step.

    Attributes:
        kernel: what is called.
        values: its arguments, as indices into the list of the step's values.
        wave: calls of one wave need no results of each other, only of earlier ones, and write to nothing that
            another one reads.
        length: of its tensors, if the kernel's rule is flat.
        writes: the values that the kernel writes to.
        turn: the number of the member for which it is made, in the order of a repetition's turns.
    """

    kernel: Kernel
    values: tuple[int, ...]
    wave: int
    length: int
    writes: tuple[int, ...]
    turn: int = EVERY_TURN
