"""What is kept of one compilation."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule

from collage_fx.treatments import TensorReport

__all__ = ["GraphReport"]


@dataclass(frozen=True)
class GraphReport:
    """One compilation.

    Attributes:
        before: the graph as captured.
        after: the graph that was lowered.
        subject: whose step it is: the optimizer's class, numbered where a backend serves several, or the
            function's name.
        tensors: its low-precision state tensors.
        wider_bytes: bytes of its float32 and float64 state, which is left alone.
        passes: ``(name, what it did)`` of every pass that ran.
        note: why the graph was lowered as it was, where nothing was rewritten.
    """

    before: GraphModule
    after: GraphModule
    subject: str
    tensors: tuple[TensorReport, ...]
    wider_bytes: int = 0
    passes: tuple[tuple[str, str], ...] = ()
    note: str = ""
