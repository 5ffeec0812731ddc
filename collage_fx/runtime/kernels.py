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
    """Argument of a kernel, as a column of the rows of an address table."""

    #: Bytes of a unit of length of its tensor, 0 = scalar, negative = a constant of
    #: ``codegen/address_tables.py`` such as ``LENGTH``.
    kind: int
    of_host: int = 0  # bytes of a number in the host's memory that a device reads; 0 otherwise


class Stackable(NamedTuple):
    """Rule whose calls may be made for stacks: Note [Stacks of tensors]."""

    #: Function of whether each operand is a stack: compiles a kernel for stacks, or returns why it cannot.
    compiled: Callable[[tuple[bool, ...]], Kernel | Reason]
    operands: tuple[tuple[Any, ...], ...]  # size, stride, dtype and device of each operand of a single call


@dataclass(frozen=True)
class Kernel:
    """Compiled code of a rule."""

    #: Function of a list: the length if the rule is flat, inputs, memory for results. None = not called.
    call: Callable[[list[Any]], Any] | None
    #: C++ function, or GPU kernel over a table; None if the rule is not independent, or has neither.
    function: CFunction | TableKernel | None = None
    columns: tuple[Column, ...] = ()
    device: torch.device = HOST
    #: Totals of which a launch leaves partial sums: argument of the destination, a float32 number, and kind,
    #: ``TOTAL`` or ``MEAN``: Note [Sums of a launch].
    sums: tuple[tuple[int, int], ...] = ()
    divisible: bool = False  # whether the function may be called for a piece of the tensors
    width: int = 1  # elements per unit of length of its tensors
    stackable: Stackable | None = None  # None if each tensor has a call of its own
    reasons: Reasons = ()  # why it is not compiled, or not called, in a faster way
    launches: int = 1  # number of kernels that a GPU runs for a call of ``call``
    most_members: int = 0  # of the stacks that it is called for; 0 if it takes no stacks


@dataclass(frozen=True)
class Call:
    """Call of a kernel in a step.

    Calls of a wave need only results of earlier waves, and write to no memory that others of the wave read.
    """

    kernel: Kernel
    values: tuple[int, ...]  # arguments of the kernel, as indices into the list of the step's values
    wave: int
    length: int  # of its tensors, if the kernel's rule is flat
    writes: tuple[int, ...]  # the values that the kernel writes to
    member: int = NO_MEMBER  # index of its member in ``Repetition.members``
