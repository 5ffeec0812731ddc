"""A graph pass of one's own: every gradient is clipped inside the optimizer's kernel.

``torch.nn.utils.clip_grad_value_`` reads and writes every gradient once more before the step. The pass below
puts the clipping into the captured step instead, where Inductor fuses it with the update: the gradient is
read once and not written at all. The weights come out the same, bit for bit.

    python examples/own_pass.py [--device cpu]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor

from collage_fx import CollageBackend
from collage_fx.graph.editor import GraphEditor
from collage_fx.graph.nodes import placeholders
from collage_fx.graph.program import Role, StepProgram
from collage_fx.pipeline import Pass, inserted


@dataclass(frozen=True)
class ClipGradients(Pass):
    """Whoever reads a gradient reads it clipped to [-limit, limit]."""

    limit: float = 1.0

    name = "clip-gradients"
    after = ("normalize",)

    def clip(self, gradient: Tensor) -> Tensor:
        return gradient.clamp(-self.limit, self.limit)

    def run(self, program: StepProgram) -> str:
        editor = GraphEditor(program.gm, self.name)
        inputs = placeholders(editor.graph)
        roles = [info.role for info in program.inputs]
        gradients = [node for node, role in zip(inputs, roles, strict=True) if role is Role.GRADIENT]
        for gradient in gradients:
            readers = list(gradient.users)
            with editor.graph.inserting_before(inputs[-1].next):
                (clipped,) = editor.inline(self.clip, gradient)
            for reader in readers:
                reader.replace_input_with(gradient, clipped)
        return f"{len(gradients)} gradients"


def train(backend: CollageBackend, device: str, *, clip_before: bool) -> Tensor:
    """Ten steps of AdamW with gradients of which many are above 1."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.ones(1000, dtype=torch.bfloat16, device=device))
    step = torch.compile(torch.optim.AdamW([weight], lr=1e-3).step, backend=backend)
    for _ in range(10):
        weight.grad = (3 * torch.randn(1000, generator=generator)).to(weight)
        if clip_before:
            torch.nn.utils.clip_grad_value_(weight, 1.0)
        step()
    return weight.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description="Gradient clipping as a pass of one's own.")
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device

    own = CollageBackend(passes=inserted(ClipGradients(), before="analyze"))
    by_pass = train(own, device, clip_before=False)
    by_hand = train(CollageBackend(), device, clip_before=True)
    unclipped = train(CollageBackend(), device, clip_before=False)
    for name, summary in own.report().graphs[-1].passes:
        print(f"{name:18} {summary}")
    print(f"\nWeights that differ from those clipped by hand: {int((by_pass != by_hand).sum())} of 1000")
    print(f"Weights that differ from those not clipped: {int((by_pass != unclipped).sum())} of 1000")


if __name__ == "__main__":
    main()
