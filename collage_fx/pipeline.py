"""The whole compiler, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.fx import Graph

from collage_fx.graph import mark_new_nodes
from collage_fx.passes.allocate import Allocate
from collage_fx.passes.analyze import Analyze
from collage_fx.passes.base import Pass
from collage_fx.passes.compensate_native import CompensateNative
from collage_fx.passes.compensate_wide import CompensateWide
from collage_fx.passes.drop_stale import DropStale
from collage_fx.passes.normalize import Normalize
from collage_fx.passes.pin_roundings import PinRoundings
from collage_fx.passes.widen import Widen
from collage_fx.program import StepProgram
from collage_fx.verify import verify

__all__ = ["ANALYSIS", "PIPELINE", "Pass", "Stage", "run_pipeline"]

PIPELINE: tuple[Pass, ...] = (
    Normalize(),  # first: everything below reads elementary operations
    Analyze(),  # on the graph as captured, in whose dtypes the question "is this lossy?" makes sense
    Allocate(),  # before any rewrite, so that rewrites find their inputs in place
    Widen(),  # wide: before the loads and stores are rewritten, so that the split is the only rounding left
    CompensateWide(),  # wide: loads and stores become join and split
    CompensateNative(),  # native: the operations themselves become double-word algorithms
    DropStale(),  # on the loads that the two above have made
    PinRoundings(),  # last: whatever rounding is still in the graph has to survive lowering
)

#: The part that only looks: what strategy "none" runs for its report, before plain Inductor gets the graph as
#: captured.
ANALYSIS: tuple[Pass, ...] = PIPELINE[:2]


@dataclass(frozen=True)
class Stage:
    """The graph after one pass.

    Attributes:
        name: the pass.
        summary: what it says it did.
        graph: the graph it left, which the next pass edits: copy what is to be kept.
    """

    name: str
    summary: str
    graph: Graph


def run_pipeline(
    program: StepProgram, passes: Sequence[Pass] = PIPELINE, *, observe: Callable[[Stage], None] | None = None
) -> None:
    """Run every pass that applies, in order, verifying the graph after each.

    Args:
        program: its ``gm`` is edited in place; the caller clones it once before.
        passes: the pipeline, or a part of it.
        observe: called after each pass.
    """
    compensated = False
    for each in passes:
        if not each.applies_to(program):
            continue
        earlier = set(program.gm.graph.nodes)
        summary = each.run(program)
        mark_new_nodes(program.gm.graph, earlier, made_by=each.name)
        compensated = compensated or isinstance(each, (CompensateWide, CompensateNative))
        verify(program, after=each.name, compensated=compensated)
        if observe is not None:
            observe(Stage(each.name, summary, program.gm.graph))
