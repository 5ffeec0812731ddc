"""``python -m benchmarks.in_backward``: measure steps in the backward pass, for docs/memory.md.

Each way trains the same model, a GPT, in a process of its own that has compiled nothing before. Times are
those of the backward pass and the step together.
"""

from __future__ import annotations

import subprocess
import sys
import time

import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward

from benchmarks.table import markdown, place, put_between
from collage_fx import install, step_in_backward

PLACE = place("memory.md", "in_backward")

LAYERS, WIDTH, HEADS, TOKENS, LENGTH = 24, 128, 4, 256, 32
ROUNDS = 8
WAYS = {
    "eager": "eager, after the backward pass",
    "installed": "`install`, after the backward pass",
    "torch": "torch's `_apply_optimizer_in_backward`, eager",
    "released": "`step_in_backward`",
}


class Gpt(nn.Module):
    """A GPT with its output tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(TOKENS, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        logits: Tensor = x @ self.embed.weight.T
        return nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


def measured(way: str) -> tuple[int, int, float, float, float]:
    """Return counts of tensors and of bytes, layers of gradients alive, first and later times."""
    model = Gpt().bfloat16()
    parameters = list(model.parameters())
    optimizer: torch.optim.Optimizer | None = None
    if way == "torch":
        _apply_optimizer_in_backward(torch.optim.AdamW, parameters, {"lr": 1e-4})
    else:
        optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    if optimizer is not None and way != "eager":
        install(optimizer)
    if optimizer is not None and way == "released":
        step_in_backward(model, optimizer)
    alive = [0]

    def watch(_: Tensor) -> None:
        alive[0] = max(alive[0], sum(p.grad.nbytes for p in parameters if p.grad is not None))

    batches = torch.Generator().manual_seed(1)
    times = []
    for step in range(ROUNDS + 1):
        hooks = [p.register_post_accumulate_grad_hook(watch) for p in parameters] if step == ROUNDS else []
        loss = model(torch.randint(0, TOKENS, (2, LENGTH), generator=batches))
        start = time.perf_counter()
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        times.append(time.perf_counter() - start)
        model.zero_grad()
        for hook in hooks:
            hook.remove()
    layer = sum(p.nbytes for p in model.layers[0].parameters())
    return (
        len(parameters),
        sum(p.nbytes for p in parameters),
        alive[0] / layer,
        times[0],
        min(times[1:ROUNDS]),
    )


def table() -> str:
    rows = []
    count, total = 0, 0
    for way, title in WAYS.items():
        command = [sys.executable, "-m", "benchmarks.in_backward", way]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        count, total = int(told[0]), int(told[1])
        alive, first, later = map(float, told[2:])
        rows.append([title, f"{alive:.2f}", f"{first:.1f} s", f"{later * 1e3:.0f} ms"])
    headers = ["", "gradients alive, in layers", "first step", "later steps"]
    return (
        f"AdamW on a GPT of {LAYERS} layers, {count} tensors with {total / 1e6:.1f} MB of gradients, on one "
        f"core of a CPU, torch {torch.__version__.partition('+')[0]}. *Gradients alive* is the most at any "
        f"time of a backward pass; a step is the backward pass and the step.\n\n{markdown(headers, rows)}"
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        torch.set_num_threads(1)
        print(*measured(sys.argv[1]))
    else:
        put_between(*PLACE, table())
