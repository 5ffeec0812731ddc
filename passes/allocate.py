"""Error terms become graph inputs.

Only the graph's side of the allocation is done here: placeholders behind the existing ones, so that no
position that AOTAutograd and Dynamo know of moves. The real buffers belong to ``collage_fx/error_terms.py``,
which knows how long they live.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from collage_fx.graph import PASS_MARK, GraphEditor, placeholders
from collage_fx.passes.base import Pass
from collage_fx.program import StateTensor, StepProgram

__all__ = ["Allocate"]


@dataclass(frozen=True)
class Allocate(Pass):
    """One placeholder per auxiliary tensor of each selected state tensor, in their order."""

    name = "allocate"
    after = ("analyze",)

    def run(self, program: StepProgram) -> str:
        editor = GraphEditor(program.gm, self.name)
        last = placeholders(editor.graph)[-1]
        for state in program.compensated:
            auxiliaries = []
            for spec in program.error_format.auxiliaries(state.value.dtype):
                with editor.graph.inserting_after(last):
                    last = editor.graph.placeholder(f"{state.placeholder.name}_{spec.name}")
                with editor.fake_mode:
                    last.meta["val"] = _like(state, spec.shape, spec.dtype)
                last.meta[PASS_MARK] = self.name
                auxiliaries.append(last)
            state.auxiliaries = tuple(auxiliaries)
        editor.finish()
        return f"{sum(len(state.auxiliaries) for state in program.compensated)} inputs added"


def _like(state: StateTensor, shape: tuple[int, ...] | None, dtype: torch.dtype) -> torch.Tensor:
    hi = state.value
    if shape is not None:
        return torch.empty(shape, dtype=dtype, device=hi.device)
    return torch.empty_strided(hi.size(), hi.stride(), dtype=dtype, device=hi.device)
