"""The bitmap of changed elements is made of hi before and after the step."""

from __future__ import annotations

from dataclasses import replace

import torch
from expecttest import assert_expected_inline

from collage_fx.graph import StepProgram, mark_changed
from collage_fx.graph.text import graph_text
from tests.support.programs import after, captured, sgd
from tests.support.twin import ExactInterpreter


def tracking(
    shape: tuple[int, ...] = (4,), last: str = "track-changes", *, bound: bool = True
) -> StepProgram:
    program = captured(sgd, "p g", shape=shape, error_format="mcf", strategy="light")
    program.infos = [replace(info, bound=bound) for info in program.infos]
    program.tracks_changes = True
    return after(program, last)


def test_what_the_pass_adds() -> None:
    lines = graph_text(tracking().gm.graph).splitlines()
    assert_expected_inline(
        "\n".join(line for line in lines if "track-changes" in line or "changed" in line),
        """\
p_changed: int32[1] = input()  # allocate
to_float32_5: float32[4] = convert_element_type(p, float32)  # track-changes
to_float32_6: float32[4] = convert_element_type(to_bfloat16_1, float32)  # track-changes
differs: int32[4] = differs(to_float32_5, to_float32_6)  # track-changes
mark_changed: int32[1] = mark_changed(p_changed, differs)  # track-changes
store_1: int32[1] = copy_(p_changed, mark_changed)  # track-changes""",
    )


def test_a_parameter_that_is_not_the_same_in_every_step_has_none() -> None:
    assert not tracking(bound=False).gm.graph.find_nodes(op="call_function", target=mark_changed)


def test_bits_of_elements_that_differ() -> None:
    program = tracking((40,), "pin-roundings")
    p = torch.ones(40).bfloat16()
    before = p.clone()
    g = torch.zeros(40).bfloat16()
    g[[0, 31, 32, 39]] = 1.0
    lo, words = torch.zeros(40).bfloat16(), torch.tensor([2, 0], dtype=torch.int32)
    ExactInterpreter(program.gm).run(p, g, lo, words)
    assert (p != before).nonzero()[:, 0].tolist() == [0, 31, 32, 39]
    assert words.tolist() == [1 - (1 << 31) + 2, 1 + (1 << 7)]
