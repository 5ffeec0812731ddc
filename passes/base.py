"""The base class of all graph passes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from collage_fx.graph import StepProgram


class Pass(ABC):
    """One rewrite or analysis of a captured step: a frozen dataclass whose options are its fields.

    A pass edits ``program.gm`` in place and leaves it in valid form: linted, every ``meta["val"]`` true, no
    mutation but the ``copy_`` epilogue. The pipeline clones the graph before the first pass and verifies it
    after each.
    """

    #: The file's and the class's name, in kebab-case.
    name: ClassVar[str]
    #: Names of the passes this one relies on having run before it.
    after: ClassVar[tuple[str, ...]] = ()
    #: Whether a pass of your own treats a tensor by its role, its layout and its update alone, never by its
    #: name. Of equal updates it is then shown one; what it does to that is done to all. If not, it gets
    #: the whole graph: that takes longer to compile, and the bits are the same.
    by_family: ClassVar[bool] = False

    def applies_to(self, program: StepProgram) -> bool:
        """Whether the pass has anything to do for the program's strategy and arithmetic."""
        return True

    @abstractmethod
    def run(self, program: StepProgram) -> str:
        """Run on ``program`` and say in a few words what was done, such as ``"148 tensors"``."""
