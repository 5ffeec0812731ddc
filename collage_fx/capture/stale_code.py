"""Code that is compiled anew because other code has given error terms to a tensor that it writes without.

A step that branches, on its count for instance, is several graphs. Where one of them stores a moving average
that rounding does not hurt, the average gets no error terms; where another adds to it what rounding would
lose, it gets them. From then on each graph has to keep them up to date, so the code of the first is dropped
before its next call, and compiled for a tensor with error terms.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import CodeType
from weakref import WeakSet

from torch import Tensor

from collage_fx.torch_compat import records


@dataclass(eq=False)
class CompiledCode:
    """Code that has been compiled for a call of ``torch.compile``, or for a part of a recorded step.

    Attributes:
        codes: the code objects of the functions that Dynamo has converted for it, by ``id``.
        is_stale: whether a tensor that it writes without error terms has got some, or one of the numbers that
            it has as constants has been seen to change.
        within: code that is made of it, and is stale when it is.
    """

    codes: dict[int, CodeType] = field(default_factory=dict)
    is_stale: bool = False
    within: list[CompiledCode] = field(default_factory=list)

    def end(self) -> None:
        """Note that neither it nor code that is made of it may be called again."""
        self.is_stale = True
        for each in self.within:
            each.end()


class _WrittenBy(WeakSet[CompiledCode]):
    """Part of a tensor's record: the code that writes it without error terms."""


#: Owner of the code that this thread is compiling.
_owner: ContextVar[CompiledCode | None] = ContextVar("_owner", default=None)


@contextmanager
def compiling_for(owner: CompiledCode) -> Iterator[None]:
    """Context manager: what is compiled belongs to ``owner``."""
    token = _owner.set(owner)
    try:
        yield
    finally:
        _owner.reset(token)


def note_write(tensor: Tensor, *, compensated: bool) -> None:
    """Note that the graph that is being compiled writes a tensor, with or without error terms."""
    if compensated:
        for owner in records.drop(tensor, _WrittenBy) or ():
            owner.end()
    elif (compiled_for := _owner.get()) is not None:
        records.of(tensor, _WrittenBy).add(compiled_for)
