"""The route of a step through the compiler, and why a faster route was not taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch.fx import Node

#: The unit of compilation. "by family": the graph of one member of each family of equal updates. "in parts":
#: the whole graph, part by part. "whole": the whole graph at once. "as captured": the graph without changes,
#: because nothing in it is compensated. "operation by operation": not compiled, torch runs each operation.
Unit = Literal["by family", "in parts", "whole", "as captured", "operation by operation"]

#: Ways of compiling that make a step faster, from the largest gain to the smallest.
Way = Literal["by family", "in parts", "in one call for all tensors", "by the usual code", "with every pass"]
WAYS: tuple[Way, ...] = get_args(Way)


@dataclass(frozen=True)
class Reason:
    """Reason why a step was not compiled in a faster way; returned by the function that finds it.

    Attributes:
        what: the reason, in words that continue "not by family: ".
        node: text of the node at which it was found; empty if it concerns no single node.
    """

    what: str
    node: str = ""

    @classmethod
    def at(cls, node: Node, what: str) -> Reason:
        """Return a reason that was found at a node."""
        return cls(what, str(node.format_node() or node.name))

    def __str__(self) -> str:
        return f"{self.what} ({self.node})" if self.node else self.what


#: Ways that were not taken, with the reason of each.
Reasons = tuple[tuple[Way, Reason], ...]


def not_taken(*ways: tuple[Way, Reason | None]) -> Reasons:
    """Drop the ways whose reason is None."""
    return tuple((way, reason) for way, reason in ways if reason is not None)


@dataclass(frozen=True)
class Route:
    """The route of one compilation.

    Attributes:
        recorded: why the step was recorded; empty if Dynamo captured it.
        is_measured: whether the step computes metrics.
        reasons: the faster ways that were not taken, with reasons, in the order of :data:`WAYS`.
    """

    unit: Unit
    recorded: str = ""
    is_measured: bool = False
    reasons: Reasons = ()

    def __str__(self) -> str:
        """Return the route in one line, without the reasons."""
        words = ["recorded" if self.recorded else "captured", f"{self._treated} {self.unit}"]
        return ", ".join([*words, *(["measured"] if self.is_measured else [])])

    def with_cause(self) -> str:
        """Return the route in one line, with the reason why Dynamo did not capture the step."""
        return f"{self} ({self.recorded})" if self.recorded else str(self)

    @property
    def _treated(self) -> str:
        return "run" if self.unit == "operation by operation" else "compiled"

    def sentence(self) -> str:
        """Return the route as a sentence for the end of a report, with the first reason."""
        words = f"{self._treated.capitalize()} {self.unit}"
        first = next(iter(self.explained()), "")
        return f"{words} ({first})." if first else f"{words}."

    def explained(self) -> list[str]:
        """Return the reasons as text: one line per faster way that was not taken."""
        lines = [f"not captured: {self.recorded}"] if self.recorded else []
        return lines + [f"not {way}: {reason}" for way, reason in self.reasons]
