"""The order of the passes, and what holds between them."""

import copy
import dataclasses
import inspect
from typing import Any

import pytest
import torch

from collage_fx.errors import GraphInvariantError
from collage_fx.graph.invariants import verify
from collage_fx.graph.program import StepProgram
from collage_fx.passes.base import Pass
from collage_fx.pipeline import ANALYSIS, PIPELINE, Stage, run_pipeline
from tests.support.programs import after, captured, sgd


def test_every_pass_comes_after_what_it_relies_on() -> None:
    names = [each.name for each in PIPELINE]
    assert len(set(names)) == len(names)
    for position, each in enumerate(PIPELINE):
        assert set(each.after) <= set(names[:position]), f"{each.name} has to come after {each.after}"
    assert PIPELINE[: len(ANALYSIS)] == ANALYSIS


@pytest.mark.parametrize("each", PIPELINE, ids=lambda each: each.name)
def test_one_pass_one_file_one_name(each: Pass) -> None:
    stem = each.name.replace("-", "_")
    assert type(each).__name__ == "".join(word.capitalize() for word in each.name.split("-"))
    assert type(each).__module__ == f"collage_fx.passes.{stem}"
    assert dataclasses.is_dataclass(each)
    kind: Any = type(each)
    assert kind.__dataclass_params__.frozen
    assert inspect.getdoc(type(each))


def test_stages_are_observed_and_arithmetic_decides() -> None:
    ran = {}
    for arithmetic in ("wide", "native"):
        stages: list[Stage] = []
        run_pipeline(captured(sgd, "p g", arithmetic=arithmetic), observe=stages.append)
        ran[arithmetic] = [stage.name for stage in stages]
    first, last = ["normalize", "analyze", "allocate"], ["pin-roundings", "hoist-scalars"]
    assert ran["wide"] == [*first, "widen", "refine-numbers", "sum-changes", "compensate-wide", *last]
    assert ran["native"] == [*first, "compensate-native", *last]


def _broken(mutate: str) -> StepProgram:
    program = after(captured(sgd, "p g"), "pin-roundings")
    graph = program.gm.graph
    p, g, lo = graph.find_nodes(op="placeholder")
    output = next(iter(graph.find_nodes(op="output")))
    (store,) = [
        node for node in graph.nodes if node.target is torch.ops.aten.copy_.default and node.args[0] is p
    ]
    with graph.inserting_before(output):
        if mutate == "in place":
            made = graph.call_function(torch.ops.aten.add_.Tensor, (g, g))
        elif mutate == "twice":
            made = graph.call_function(torch.ops.aten.copy_.default, (p, g))
        elif mutate == "dtype":
            store.args = (p, next(n for n in graph.nodes if n.meta["val"].dtype == torch.float32))
            return program
        elif mutate == "unwritten":
            graph.erase_node(next(n for n in graph.nodes if n.target is store.target and n.args[0] is lo))
            return program
        elif mutate == "number":
            store.args = (p, 0.0)
            return program
        elif mutate == "shape":
            with graph.inserting_before(store):
                made = graph.call_function(torch.ops.aten.neg.default, (g,))
            made.meta["val"] = g.meta["val"][:2]
            store.args = (p, made)
            return program
        elif mutate == "input":
            with graph.inserting_after(lo):
                graph.placeholder("another")
            return program
        elif mutate == "moved":
            program.states[0].placeholder = g
            return program
        else:
            made = graph.call_function(torch.ops.aten.neg.default, (g,))
            return program
    made.meta["val"] = copy.copy(g.meta["val"])
    return program


@pytest.mark.parametrize(
    ("mutate", "message"),
    [
        ("in place", "mutation outside the epilogue"),
        ("twice", "two stores into one input"),
        (
            "dtype",
            r"of torch.float32 stored into a tensor of torch.bfloat16\n  where: %copy_ .*after a test",
        ),
        (
            "shape",
            r"a value of shape torch.Size\(\[2\]\) stored into shape torch.Size\(\[4\]\)\n  where: %copy_ ",
        ),
        ("number", "a stored value that is not a node"),
        ("input", r"additional inputs \[p_lo, another\], expected \[p_lo\]\n  where: after a test"),
        ("moved", r"an input has moved\n  where: p after a test"),
        ("unwritten", "an auxiliary tensor that no store writes"),
        ("no value", "a node without meta"),
    ],
)
def test_the_verifier_names_the_first_offender(mutate: str, message: str) -> None:
    with pytest.raises(GraphInvariantError, match=message):
        verify(_broken(mutate), after="a test", compensated=True)
