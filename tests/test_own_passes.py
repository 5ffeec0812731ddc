"""A user's own pass in the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from collage_fx import CollageBackend, backend_for, error_terms
from collage_fx.capture.recording import is_recorded
from collage_fx.errors import FailedPassError, InvalidOptionError
from collage_fx.graph.nodes import PASS_MARK, copies_to_inputs
from collage_fx.graph.program import StepProgram
from collage_fx.pipeline import PIPELINE, Pass, inserted, run_pipeline
from tests.support.programs import captured, moving_average
from tests.support.substitutes import failing_steps_of_the_lowering
from tests.support.training import Descent, parameters, run_steps, set_gradients


@dataclass(frozen=True)
class Halve(Pass):
    """Every new value is halved, without a GraphEditor."""

    name = "halve"

    def run(self, program: StepProgram) -> str:
        graph = program.gm.graph
        for store in copies_to_inputs(graph).values():
            value = store.args[1]
            assert isinstance(value, torch.fx.Node)
            with graph.inserting_before(store):
                half = graph.call_function(torch.ops.aten.mul.Tensor, (value, 0.5))
            half.meta["val"] = value.meta["val"]
            store.args = (store.args[0], half)
        program.gm.recompile()
        return "done"


def test_it_stands_where_it_was_put() -> None:
    passes = inserted(Halve(), before="analyze")
    names = [each.name for each in passes]
    assert names.index("halve") + 1 == names.index("analyze")
    assert tuple(each for each in passes if each.name != "halve") == PIPELINE


def test_what_it_made_is_marked_although_it_uses_no_editor() -> None:
    program = captured(moving_average, "m g")
    run_pipeline(program, [Halve()])
    made = [node for node in program.gm.graph.nodes if PASS_MARK in node.meta]
    assert [(node.target, node.meta[PASS_MARK]) for node in made] == [(torch.ops.aten.mul.Tensor, "halve")]


def test_it_is_part_of_the_compiled_step_and_of_the_report() -> None:
    backend = CollageBackend(passes=inserted(Halve(), before="analyze"))
    params = parameters()
    before = [p.detach().clone() for p in params]
    run_steps(torch.compile(Descent(params, lr=0.0).step, backend=backend), params, [0])
    for p, old in zip(params, before, strict=True):
        assert torch.equal(p, old / 2)
    (graph,) = backend.report().graphs
    assert ("halve", "done") in graph.passes
    assert [stage.name for stage in graph.stages()] == [name for name, _ in graph.passes]
    assert "<math" in backend.report().to_html()
    assert "halve" in repr(backend).lower()
    assert "passes" not in repr(CollageBackend())


def test_it_runs_where_nothing_is_compensated() -> None:
    backend = CollageBackend(passes=inserted(Halve(), before="analyze"))

    def step(m: Tensor, wide: Tensor) -> None:
        wide.copy_(m)
        m.fill_(4.0)

    m = torch.ones(3, dtype=torch.bfloat16)
    torch.compile(step, backend=backend)(m, torch.zeros(3))
    assert not any(row.compensated for row in backend.report().tensors)
    assert m.tolist() == [2.0] * 3
    (graph,) = backend.report().graphs
    assert graph.after.code != graph.before.code


def test_torch_compile_takes_it_as_an_option() -> None:
    passes = inserted(Halve(), before="analyze")
    assert backend_for(passes=passes) is backend_for(passes=passes) is not backend_for()


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        (PIPELINE[:-1], "missing in the pipeline: hoist-scalars"),
        ((*PIPELINE, PIPELINE[-1]), "duplicated in the pipeline: hoist-scalars"),
        (PIPELINE[::-1], "misplaced in the pipeline: hoist-scalars before pin-roundings"),
    ],
)
def test_an_incomplete_pipeline_is_refused(passes: Sequence[Pass], message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        CollageBackend(passes=passes)


def test_a_place_that_is_not_there_and_a_strategy_that_runs_no_pass() -> None:
    with pytest.raises(InvalidOptionError, match="did you mean analyze"):
        inserted(Halve(), before="analyse")
    with pytest.raises(InvalidOptionError, match="strategy='none'"):
        CollageBackend(strategy="none", passes=inserted(Halve(), before="analyze"))


@dataclass(frozen=True)
class Fails(Pass):
    name = "fails"
    by_family = True

    def run(self, program: StepProgram) -> str:
        return str(1 // len(program.captured_nodes()))  # type: ignore[attr-defined]


def test_one_that_fails_is_named_with_the_line_and_nothing_is_changed() -> None:
    torch._dynamo.reset()
    params = parameters()
    before = [p.detach().clone() for p in params]
    optimizer = Descent(params)
    backend = CollageBackend(passes=inserted(Fails(), before="analyze"))
    met = r"the pass 'fails' has raised AttributeError[\s\S]*where: .*test_own_passes.py:\d+ in run"
    with pytest.raises(FailedPassError, match=met):
        run_steps(torch.compile(optimizer.step, backend=backend), params, [0])
    assert all(map(torch.equal, params, before))
    assert not is_recorded(optimizer)


@dataclass(frozen=True)
class Spoils(Halve):
    """Pass that has changed graph and records when it fails."""

    name = "spoils"
    by_family = True
    optional = True

    def run(self, program: StepProgram) -> str:
        super().run(program)
        for state in program.states:
            state.placeholder, state.auxiliaries, state.selection = state.store, (), "spoiled"
        program.rounded_at_random.clear()
        raise ZeroDivisionError("in the middle")


def adamw_steps(backend: CollageBackend) -> list[Tensor]:
    """Return the parameters and error terms after four steps of AdamW."""
    torch._dynamo.reset()
    params = parameters()
    step = torch.compile(torch.optim.AdamW(params, lr=1e-3).step, backend=backend)
    for seed in range(4):
        set_gradients(params, seed)
        step()
    return [each.detach() for p in params for each in (p, *error_terms(p))]


@pytest.mark.parametrize("before", ["analyze", "compensate-wide", "hoist-scalars"])
def test_an_optional_pass_that_fails_is_left_out_with_a_warning(before: str) -> None:
    passes = inserted(Spoils(), before=before)
    backend = CollageBackend(passes=passes)
    with pytest.warns(UserWarning, match=MET) as warned:
        results = adamw_steps(backend)
    assert len(warned) == 1
    assert all(map(torch.equal, results, adamw_steps(CollageBackend())))
    (graph,) = backend.report().graphs
    assert "not with every pass: the pass 'spoils' has raised" in "".join(graph.route.explained())
    assert next(text for name, text in graph.passes if name == "spoils").startswith("left out: ")


def test_state_that_was_rounded_at_random_has_an_error_term_although_a_pass_is_left_out() -> None:
    """Without either, plain rounding would lose its small updates, under strategy "light" too."""

    def step(m: Tensor, g: Tensor) -> None:
        exact = (m.float() * 0.5 + g.float()).view(torch.int32)
        noise = torch.randint_like(exact, low=0, high=1 << 16)
        m.copy_(((exact + noise) & -65536).view(torch.float32))

    program = captured(step, "m g", strategy="light")
    run_pipeline(program, inserted(Spoils(), before="analyze"))
    assert len(program.left_out) == 1
    assert [state.compensated for state in program.states] == [True]


#: Text of the warning.
MET = (
    r"the pass '(spoils|in-order-of-memory|in-stacks)' has raised ZeroDivisionError: in the middle. "
    "The step is compiled without it"
)


def test_a_step_of_the_lowering_that_fails_is_left_out_with_a_warning() -> None:
    expected = adamw_steps(CollageBackend())
    backend = CollageBackend()
    with (
        failing_steps_of_the_lowering(ZeroDivisionError("in the middle")),
        pytest.warns(UserWarning, match=MET) as warned,
    ):
        results = adamw_steps(backend)
    assert {str(each.message).partition(" has raised")[0] for each in warned} == {
        "collage_fx: the pass 'in-order-of-memory'",
        "collage_fx: the pass 'in-stacks'",
    }
    assert all(map(torch.equal, results, expected))
    assert [way for way, _ in backend.report().graphs[0].route.reasons][-2:] == ["with every pass"] * 2


def test_only_passes_that_save_time_are_optional() -> None:
    assert [each.name for each in PIPELINE if each.optional] == ["hoist-scalars"]
