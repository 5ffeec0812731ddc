"""The way that a step took through the compiler, and why not a faster one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch.fx import Node

__all__ = ["Reason", "Route", "Unit"]

#: What is compiled at once: one of each family of equal updates, or the whole graph; the latter part by part,
#: as one, or as it was captured, because nothing in it is compensated.
Unit = Literal["by family", "in parts", "whole", "as captured"]


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


@dataclass(frozen=True)
class Route:
    """The way of one compilation.

    Attributes:
        unit: what was compiled at once.
        recorded: why the step was recorded; empty where Dynamo captured it.
        is_measured: whether the step computes metrics.
        reasons: the faster ways that were not taken, by name, and why; the fastest first.
    """

    unit: Unit
    recorded: str = ""
    is_measured: bool = False
    reasons: tuple[tuple[str, Reason], ...] = ()

    def __str__(self) -> str:
        """The way in one line, without the reasons."""
        words = ["recorded" if self.recorded else "captured", f"compiled {self.unit}"]
        return ", ".join([*words, *(["measured"] if self.is_measured else [])])

    def sentence(self) -> str:
        """The way as a sentence for the end of a report, with the reason against the fastest one."""
        first = next(iter(self.explained()), "")
        return f"Compiled {self.unit}" + (f" ({first})." if first else ".")

    def explained(self) -> list[str]:
        """The reasons as text: a line for each faster way, why it was not taken."""
        lines = [f"not captured: {self.recorded}"] if self.recorded else []
        return lines + [f"not {way}: {reason}" for way, reason in self.reasons]
