"""The way that a step took through the compiler, and why not a faster one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch.fx import Node

#: The graph that is compiled at once: of one of each family of equal updates, or the whole graph; the latter
#: part by part, as one, or as it was captured, because nothing in it is compensated. Or nothing is compiled:
#: torch runs the graph.
Unit = Literal["by family", "in parts", "whole", "as captured", "operation by operation"]

#: The faster ways that may not be taken, the costliest to miss first.
Way = Literal["by family", "in parts", "in one call for all tensors", "by the usual code"]
WAYS: tuple[Way, ...] = get_args(Way)


@dataclass(frozen=True)
class Reason:
    """The reason why a way was not taken: returned by a function that finds that it cannot do something.

    Attributes:
        what: in words that go on from "not by family: ".
        node: the node at which that showed, in the words of its graph; empty where it is about no single one.
    """

    what: str
    node: str = ""

    @classmethod
    def at(cls, node: Node, what: str) -> Reason:
        """A reason that showed at a node."""
        return cls(what, str(node.format_node() or node.name))

    def __str__(self) -> str:
        return f"{self.what} ({self.node})" if self.node else self.what


#: The ways that were not taken, and why.
Reasons = tuple[tuple[Way, Reason], ...]


def not_taken(*ways: tuple[Way, Reason | None]) -> Reasons:
    """Those of some ways against which there is a reason."""
    return tuple((way, reason) for way, reason in ways if reason is not None)


@dataclass(frozen=True)
class Route:
    """The way of one compilation.

    Attributes:
        unit: what was compiled at once.
        recorded: why the step was recorded; empty where Dynamo captured it.
        is_measured: whether the step computes metrics.
        reasons: the faster ways that were not taken, and why, in the order of :data:`WAYS`.
    """

    unit: Unit
    recorded: str = ""
    is_measured: bool = False
    reasons: Reasons = ()

    def __str__(self) -> str:
        """The way in one line, without the reasons."""
        words = ["recorded" if self.recorded else "captured", f"{self._treated} {self.unit}"]
        return ", ".join([*words, *(["measured"] if self.is_measured else [])])

    @property
    def _treated(self) -> str:
        return "run" if self.unit == "operation by operation" else "compiled"

    def sentence(self) -> str:
        """Return the way as a sentence for the end of a report, with the first reason."""
        words = f"{self._treated.capitalize()} {self.unit}"
        first = next(iter(self.explained()), "")
        return f"{words} ({first})." if first else f"{words}."

    def explained(self) -> list[str]:
        """The reasons as text: a line for each faster way, why it was not taken."""
        lines = [f"not captured: {self.recorded}"] if self.recorded else []
        return lines + [f"not {way}: {reason}" for way, reason in self.reasons]
