"""Pipeline of all graph passes, in order.

The result is lowered by ``lowering/lower.py``; equal updates share kernels (``lowering/schedule.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch.fx import Graph

from collage_fx.choices import did_you_mean
from collage_fx.errors import CollageError, FailedPassError, InvalidOptionError
from collage_fx.graph import PASS_MARK, StepProgram, copy_of, verify
from collage_fx.passes.allocate import Allocate
from collage_fx.passes.analyze import Analyze
from collage_fx.passes.base import Pass as Pass
from collage_fx.passes.clear_denominators import ClearDenominators
from collage_fx.passes.compensate_native import CompensateNative
from collage_fx.passes.compensate_wide import CompensateWide
from collage_fx.passes.drop_stale import DropStale
from collage_fx.passes.hoist_scalars import HoistScalars
from collage_fx.passes.normalize import Normalize
from collage_fx.passes.pack_state import PackState
from collage_fx.passes.pack_weights import PackWeights
from collage_fx.passes.pin_roundings import PinRoundings
from collage_fx.passes.refine_numbers import RefineNumbers
from collage_fx.passes.repay import Repay
from collage_fx.passes.sum_changes import SumChanges
from collage_fx.passes.undo_stochastic_rounding import UndoStochasticRounding
from collage_fx.passes.widen import Widen

PIPELINE: tuple[Pass, ...] = (
    Normalize(),  # first: all later passes read elementary operations
    ClearDenominators(),  # before Analyze, so that recurrences show the rewritten denominators
    UndoStochasticRounding(),  # before Analyze, because no recurrence passes through operations on bits
    Analyze(),  # before any rewrite: a recurrence is lossy or not in the dtypes of the captured graph
    PackState(),  # after Analyze, whose choice of formats it changes
    PackWeights(),  # after PackState, whose error terms are those of the rest
    Allocate(),  # before the rewrites, which need the inputs for error terms
    Widen(),  # wide: before loads and stores are rewritten, so that the split is the only rounding left
    RefineNumbers(),  # wide: before SumChanges, which computes decays from the numbers of factors
    Repay(),  # wide: before SumChanges, which leaves no products to read an update's factors from
    SumChanges(),  # wide: before loads become joins, and after Analyze, whose recurrences are as captured
    CompensateWide(),  # wide: loads and stores become join and split
    CompensateNative(),  # native: the operations themselves become double-word algorithms
    DropStale(),  # changes the loads made by the two compensating passes
    PinRoundings(),  # after all passes that round: their roundings must survive lowering
    HoistScalars(),  # last: once(...) goes between the final numbers and the final elementwise operations
)

#: Passes that do not compensate: strategy "none" runs them for its report, and lowers the captured graph.
ANALYSIS: tuple[Pass, ...] = PIPELINE[: PIPELINE.index(Allocate())]

#: Passes that choose the format of each state tensor, the last of :data:`ANALYSIS`.
CHOOSING: tuple[Pass, ...] = (Analyze(), PackState(), PackWeights())

#: Passes that tell whether changes of a float32 tensor are summed.
SUMMING: tuple[Pass, ...] = (Normalize(), RefineNumbers(), SumChanges())


def inserted(own: Pass, *, before: str, passes: Sequence[Pass] = PIPELINE) -> tuple[Pass, ...]:
    """Return the pipeline with a pass of your own, for ``CollageBackend(passes=...)``.

    Args:
        own: the pass; its ``after`` is checked.
        before: name of the pass to put it in front of.
        passes: the pipeline to insert it into.
    """
    names = [each.name for each in passes]
    if before not in names:
        raise InvalidOptionError(
            f"no pass {before!r} in the pipeline", where="before", remedy=did_you_mean(before, names)
        )
    index = names.index(before)
    return (*passes[:index], own, *passes[index:])


def refuse_incomplete(passes: Sequence[Pass]) -> None:
    """Raise if a pass is missing, duplicated, or stands before a pass that it must follow."""
    names = [each.name for each in passes]
    missing = [each.name for each in PIPELINE if each not in passes]
    double = [name for name in names if names.count(name) > 1]
    orders = ((i, each.name, earlier) for i, each in enumerate(passes) for earlier in each.after)
    misplaced = [f"{name} before {earlier}" for i, name, earlier in orders if earlier not in names[:i]]
    for what, which in (("missing", missing), ("duplicated", double), ("misplaced", misplaced)):
        if which:
            raise InvalidOptionError(
                f"{what} in the pipeline: {which[0]}",
                where="passes",
                remedy="put passes of your own into the whole pipeline: "
                "passes=collage_fx.pipeline.inserted(MyPass(), before='analyze')",
            )


def up_to_choosing(passes: Sequence[Pass]) -> tuple[Sequence[Pass], Sequence[Pass]]:
    """Split a pipeline into the passes before :data:`CHOOSING` and the passes from its first to its last."""
    names = [each.name for each in passes]
    first, last = (names.index(each.name) for each in (CHOOSING[0], CHOOSING[-1]))
    return passes[:first], passes[first : last + 1]


def in_float32(program: StepProgram) -> StepProgram:
    """Return the captured step in float32, as it would be without any rounding, and without error terms."""
    assert program.captured is not None
    captured = copy_of(program.captured)
    carried = replace(program, gm=captured, strategy="none", arithmetic="wide", states=[], reads=[])
    run_pipeline(carried, (*PIPELINE[: PIPELINE.index(Analyze())], Widen(), RefineNumbers()))
    return carried


@dataclass(frozen=True)
class Stage:
    """Outcome of a pass: its name, the text that it returned, and the graph after it.

    The next pass edits the graph, so copy it to keep it.
    """

    name: str
    summary: str
    graph: Graph


def run_pipeline(
    program: StepProgram, passes: Sequence[Pass] = PIPELINE, *, observe: Callable[[Stage], None] | None = None
) -> None:
    """Run every pass that applies, in order, and verify the graph after each.

    Args:
        program: the program; its ``gm`` is edited in place, so the caller clones it once before.
        passes: the pipeline, or a part of it.
        observe: function called after each pass.

    Raises:
        FailedPassError: a pass raised an exception that is not a :class:`~collage_fx.errors.CollageError`. An
            optional pass is left out instead, and ``program.left_out`` says so.
        GraphInvariantError: a pass left a graph that breaks an invariant.
    """
    compensated = False
    for each in passes:
        if not each.applies_to(program):
            continue
        earlier = set(program.gm.graph.nodes)
        go_back = program.spare() if each.optional else None
        try:
            summary = each.run(program)
        except CollageError:
            raise
        except Exception as error:
            failed = FailedPassError(each.name, error, optional=each.optional)
            if go_back is None:
                raise failed from error
            go_back()
            program.left_out.append(failed)
            summary = f"left out: {failed.met}"
        program.gm.graph.eliminate_dead_code()
        for node in program.gm.graph.nodes:  # an editor may have marked it
            if node not in earlier and node.op != "output":
                node.meta.setdefault(PASS_MARK, each.name)
        compensated = compensated or isinstance(each, (CompensateWide, CompensateNative))
        verify(program, after=each.name, compensated=compensated)
        if observe is not None:
            observe(Stage(each.name, summary, program.gm.graph))
    program.gm.recompile()
