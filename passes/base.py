"""Base class of all graph passes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from collage_fx.graph import StepProgram


@dataclass(frozen=True, eq=False)
class Pass(ABC):
    """Rewrite or analysis of a captured step: a frozen dataclass whose fields are its options, if any.

    A pass edits ``program.gm`` in place and leaves it valid: FX's lint passes, every ``meta["val"]`` is
    correct, and only the ``copy_`` epilogue mutates. The pipeline clones the graph before the first pass, and
    erases unused nodes and verifies the graph after each pass.
    """

    #: Name of the class and of its file, in kebab-case.
    name: ClassVar[str]
    #: Names of the passes that must have run before this pass.
    after: ClassVar[tuple[str, ...]] = ()
    #: Whether a pass of your own treats a tensor by its role, layout and update alone, never by its name. If
    #: True, the pass gets the graph of one member of each family of equal updates, and its result is repeated
    #: for all members. If False, the pass gets the whole graph: compiling takes longer, the bits are equal.
    by_family: ClassVar[bool] = False
    #: Whether the pass only saves time or memory, and changes nothing but the graph and the records of its
    #: tensors. If it raises, the backend warns once, and goes on with the graph before it.
    optional: ClassVar[bool] = False

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def applies_to(self, program: StepProgram) -> bool:
        """Return whether the pass has work to do for the program's strategy and arithmetic."""
        return True

    @abstractmethod
    def run(self, program: StepProgram) -> str:
        """Run on ``program``; return a summary in a few words, such as ``"148 tensors"``."""
