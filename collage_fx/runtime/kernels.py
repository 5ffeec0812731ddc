"""Kernels of a step and the calls of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from collage_fx.graph import Reason, Reasons
from collage_fx.torch_compat import CFunction, TableKernel

#: Member of a call that belongs to no single member: it is made in every step.
NO_MEMBER = -1

HOST = torch.device("cpu")


class Column(NamedTuple):
    """Argument of a kernel, as a column of the rows of an address table.

    Attributes:
        kind: bytes of a unit of length of its tensor, 0 = scalar, negative = a constant of
            ``codegen/address_tables.py`` such as ``LENGTH``.
        of_host: bytes of a number in the host's memory that a device reads; 0 otherwise.
    """

    kind: int
    of_host: int = 0


class Stackable(NamedTuple):
    """Rule whose calls may be made for stacks: Note [Stacks of tensors].

    Attributes:
        compiled: function that compiles a kernel for stacks, given for each operand whether it is a stack, or
            returns why that is impossible.
        operands: size, stride, dtype and device of each operand of a single call.
    """

    compiled: Callable[[tuple[bool, ...]], Kernel | Reason]
    operands: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Kernel:
    """Compiled code of a rule.

    Attributes:
        call: function of a single list: the length if the rule is flat, the inputs, and memory for the
            results. None if only ``function`` is called.
        function: the C++ function, or the GPU kernel over a table, if the rule is independent and has one.
        sums: argument of the destination, a float32 number, and kind, ``TOTAL`` or ``MEAN``, of each total of
            which a launch leaves partial sums: Note [Sums of a launch].
        divisible: whether the function may be called for a piece of the tensors.
        width: elements per unit of length of its tensors.
        stackable: how calls are made for stacks of tensors; None if each tensor has a call of its own.
        reasons: why it is not compiled, or not called, in a faster way.
        launches: number of kernels that a GPU runs for a call of ``call``.
        most_members: largest number of members of the stacks that it is called for; 0 if it takes no stacks.
    """

    call: Callable[[list[Any]], Any] | None
    function: CFunction | TableKernel | None = None
    columns: tuple[Column, ...] = ()
    device: torch.device = HOST
    sums: tuple[tuple[int, int], ...] = ()
    divisible: bool = False
    width: int = 1
    stackable: Stackable | None = None
    reasons: Reasons = ()
    launches: int = 1
    most_members: int = 0


@dataclass(frozen=True)
class Call:
    """Call of a kernel in a step.

    Attributes:
        values: arguments of the kernel, as indices into the list of the step's values.
        wave: number of its wave. Calls of a wave need only results of earlier waves, and write to no memory
            that another call of the wave reads.
        length: length of its tensors, if the kernel's rule is flat.
        writes: the values that the kernel writes to.
        member: index of its member in ``Repetition.members``, or ``NO_MEMBER``.
    """

    kernel: Kernel
    values: tuple[int, ...]
    wave: int
    length: int
    writes: tuple[int, ...]
    member: int = NO_MEMBER
