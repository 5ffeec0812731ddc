"""The pipeline: all graph passes, in order.

The result is lowered by ``lowering/lower.py``; equal updates share kernels (``lowering/schedule.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.fx import Graph

from collage_fx.errors import CollageError, FailedPassError, InvalidOptionError, did_you_mean
from collage_fx.graph import StepProgram, mark_new_nodes, verify
from collage_fx.passes.allocate import Allocate
from collage_fx.passes.analyze import Analyze
from collage_fx.passes.base import Pass
from collage_fx.passes.clear_denominators import ClearDenominators
from collage_fx.passes.compensate_native import CompensateNative
from collage_fx.passes.compensate_wide import CompensateWide
from collage_fx.passes.drop_stale import DropStale
from collage_fx.passes.hoist_scalars import HoistScalars
from collage_fx.passes.measure import Measure
from collage_fx.passes.normalize import Normalize
from collage_fx.passes.pack_state import PackState
from collage_fx.passes.pin_roundings import PinRoundings
from collage_fx.passes.undo_stochastic_rounding import UndoStochasticRounding
from collage_fx.passes.widen import Widen

__all__ = [
    "ANALYSIS",
    "CHOOSING",
    "MEASUREMENT",
    "PIPELINE",
    "Pass",
    "Stage",
    "inserted",
    "refuse_incomplete",
    "run_pipeline",
    "up_to_choosing",
]

PIPELINE: tuple[Pass, ...] = (
    Normalize(),  # first: everything below reads elementary operations
    ClearDenominators(),  # before the recurrences are read, to be in them
    UndoStochasticRounding(),  # before the recurrences are read, which end at operations on bits
    Analyze(),  # on the graph as captured, in whose dtypes the question "is this lossy?" makes sense
    PackState(),  # on what analyze has chosen, which it overrules
    Allocate(),  # before any rewrite, so that rewrites find their inputs in place
    Widen(),  # wide: before the loads and stores are rewritten, so that the split is the only rounding left
    CompensateWide(),  # wide: loads and stores become join and split
    CompensateNative(),  # native: the operations themselves become double-word algorithms
    Measure(),  # with metrics alone: on the loads and stores that the two above have made
    DropStale(),  # on the loads that the two above have made
    PinRoundings(),  # whatever rounding is still in the graph has to survive lowering
    HoistScalars(),  # last: once(...) stands between the numbers and the elements as they are then
)

#: The part that only looks: what strategy "none" runs for its report, before plain Inductor gets the graph as
#: captured.
ANALYSIS: tuple[Pass, ...] = PIPELINE[: PIPELINE.index(Allocate())]

#: The passes that choose what is kept of each state tensor, the last of :data:`ANALYSIS`.
CHOOSING: tuple[Pass, ...] = (Analyze(), PackState())

#: The passes that strategy "none" runs besides, on that graph, to measure it.
MEASUREMENT: tuple[Pass, ...] = (Measure(),)


def inserted(own: Pass, *, before: str, passes: Sequence[Pass] = PIPELINE) -> tuple[Pass, ...]:
    """The pipeline with a pass of one's own, for ``CollageBackend(passes=...)``.

    Args:
        own: the pass; what it says it comes ``after`` is checked.
        before: name of the pass that it is put in front of.
        passes: the pipeline to put it into.
    """
    names = [each.name for each in passes]
    if before not in names:
        raise InvalidOptionError(
            f"no pass {before!r} in the pipeline", where="before", remedy=did_you_mean(before, names)
        )
    index = names.index(before)
    return (*passes[:index], own, *passes[index:])


def refuse_incomplete(passes: Sequence[Pass]) -> None:
    """Raise where a pass is missing, double, or stands before one that it comes after."""
    names = [each.name for each in passes]
    missing = [each.name for each in PIPELINE if each not in passes]
    double = [name for name in names if names.count(name) > 1]
    misplaced = [
        f"{each.name} before {relied_on}"
        for index, each in enumerate(passes)
        for relied_on in each.after
        if relied_on not in names[:index]
    ]
    for what, which in (("missing", missing), ("double", double), ("misplaced", misplaced)):
        if which:
            raise InvalidOptionError(
                f"{what} in the pipeline: {which[0]}",
                where="passes",
                remedy="put passes of your own into the whole pipeline: "
                "passes=collage_fx.pipeline.inserted(MyPass(), before='analyze')",
            )


def up_to_choosing(passes: Sequence[Pass]) -> tuple[Sequence[Pass], Sequence[Pass]]:
    """The passes before those of :data:`CHOOSING`, and these, with what is between them."""
    names = [each.name for each in passes]
    first, last = (names.index(each.name) for each in (CHOOSING[0], CHOOSING[-1]))
    return passes[:first], passes[first : last + 1]


@dataclass(frozen=True)
class Stage:
    """The outcome of one pass.

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

    Raises:
        FailedPassError: a pass raised something else than a refusal.
        GraphInvariantError: a pass left a graph that breaks an invariant.
    """
    compensated = False
    for each in passes:
        if not each.applies_to(program):
            continue
        earlier = set(program.gm.graph.nodes)
        try:
            summary = each.run(program)
        except CollageError:
            raise
        except Exception as error:
            raise FailedPassError(each.name, error) from error
        mark_new_nodes(program.gm.graph, earlier, made_by=each.name)
        compensated = compensated or isinstance(each, (CompensateWide, CompensateNative))
        verify(program, after=each.name, compensated=compensated)
        if observe is not None:
            observe(Stage(each.name, summary, program.gm.graph))
    program.gm.recompile()
