"""``python -m benchmarks.weight_changes runs`` (or ``costs``): changed weights, for docs/changes.md.

Runs of 10,000 steps are resumed, written to by others, and read by two readers at different times. A copy of
the model that gets the patches has to be the model, bit for bit. Times are medians of rounds in which two
ways to find changed weights, and the step, take turns.
"""

from __future__ import annotations

import argparse
import io
import random
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter, ParameterList
from torch.optim import Optimizer

import collage_fx
from benchmarks.table import markdown, place, put_between

#: Page and marks of each part.
PLACES = {
    part: (*place("changes.md", f"weight_changes {part}")[:2], f"<!-- end of {part} -->")
    for part in ("runs", "costs")
}

OPTIONS: dict[str, dict[str, Any]] = {
    "default, 10 bytes": {},
    "8 bytes": {"bytes_per_parameter": 8.1},
    "5.1 bytes": {"bytes_per_parameter": 5.1},
}
#: Bytes that Muon's parameters take at least, which have one moment: it has other budgets.
MUON: dict[str, dict[str, Any]] = {
    "default": {},
    "light": {"strategy": "light"},
    "byte": {"strategy": "light", "error_format": "byte"},
}
READERS = ("engine", "checkpoint")
#: Learning rates.
RATES = (1e-6, 3e-6)
TENSORS, SHAPE, ROUNDS = 16, (1024, 1024), 30


class Layers(Module):
    """Matrices and vectors of a small transformer, their rows multiples of 32 elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        shapes = ((96, 64), (64, 96), (64,), (192, 64))
        self.weights = ParameterList(Parameter((torch.randn(shape) * 0.02).bfloat16()) for shape in shapes)
        self.average: Tensor
        self.register_buffer("average", torch.zeros(64))

    def train_on(self, step: int) -> None:
        """Set gradients of a step; now and then a parameter has none."""
        torch.manual_seed(step)
        for i, weight in enumerate(self.weights):
            gradient = torch.randn(weight.shape).to(weight.dtype) * 1e-3
            weight.grad = None if (step + i) % 7 == 0 else gradient
        self.average.lerp_(torch.randn(64), 0.1)


def adamw(model: Layers) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-6, weight_decay=0.1)


def muon(model: Layers) -> Optimizer:
    return torch.optim.Muon([each for each in model.parameters() if each.dim() == 2], lr=1e-5)


def _write_elsewhere(model: Layers, draw: random.Random) -> None:
    """Write to a weight as programs do."""
    weight = draw.choice(list(model.weights))
    kind = draw.randrange(4)
    with torch.no_grad():
        if kind == 0:
            weight.clamp_(-0.05, 0.05).mul_(1.001)
        elif kind == 1:
            weight.data.mul_(1.01)
        elif kind == 2:
            weight.data = weight.data * 1.01
        else:
            model.load_state_dict({name: tensor * 1.001 for name, tensor in model.state_dict().items()})


def _resumed(
    make: Callable[[Layers], Optimizer], options: dict[str, Any], model: Layers, optimizer: Optimizer
) -> tuple[Layers, Optimizer]:
    """Save a run to memory and load it into new objects."""
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    of_model, of_optimizer = torch.load(file)
    model = Layers()
    optimizer = make(model)
    collage_fx.install(optimizer, **options)
    model.load_state_dict(of_model)
    optimizer.load_state_dict(of_optimizer)
    return model, optimizer


def soak(
    make: Callable[[Layers], Optimizer], options: dict[str, Any], steps: int
) -> tuple[int, int, float, int]:
    """Count the wrong elements of copies that get patches, and the patches, in a run with interruptions.

    Returns:
        wrong elements; patches taken; median share of changed weights of patches; resumes and foreign writes.
    """
    draw = random.Random(0)
    model = Layers()
    optimizer = make(model)
    collage_fx.install(optimizer, **options)
    copies = {
        reader: {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
        for reader in READERS
    }
    wrong, shares, events = 0, list[float](), 0
    for step in range(steps):
        model.train_on(step)
        optimizer.step()
        if draw.random() < 0.005:
            _write_elsewhere(model, draw)
            events += 1
        if draw.random() < 0.002:
            model, optimizer = _resumed(make, options, model, optimizer)
            events += 1
        for reader, often in zip(READERS, (0.8, 0.05), strict=True):
            if draw.random() < often:
                found = collage_fx.changes(model, reader)
                collage_fx.apply_changes(copies[reader], found)
                wrong += _wrong_elements(model, copies[reader])
                shares.append(found.changed / found.elements)
    return wrong, len(shares), statistics.median(shares), events


def _wrong_elements(model: Module, copy: dict[str, Tensor]) -> int:
    return sum(int((_bits(tensor) != _bits(copy[name])).sum()) for name, tensor in model.state_dict().items())


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16 if tensor.dtype.itemsize == 2 else torch.int32)


def _large(options: dict[str, Any], lr: float) -> tuple[Module, Optimizer]:
    torch.manual_seed(0)
    weights = ParameterList(Parameter((torch.randn(SHAPE) * 0.02).bfloat16()) for _ in range(TENSORS))
    optimizer = torch.optim.AdamW(weights, lr=lr)
    collage_fx.install(optimizer, **options)
    for weight in weights:
        weight.grad = torch.randn(SHAPE).bfloat16() * 1e-3
    for _ in range(3):
        optimizer.step()
    return weights, optimizer


def costs(options: dict[str, Any], lr: float) -> tuple[float, float, float]:
    """Measure how changed weights are found.

    Returns:
        time of :func:`collage_fx.changes` over that of a step; time of comparing by torch with a copy and
        collecting over that of :func:`collage_fx.changes`; share of weights that a step changes.
    """
    model, optimizer = _large(options, lr)
    snapshot = [weight.detach().clone() for weight in model.parameters()]
    collage_fx.forget_changes(model)
    ratios, gains, shares = list[float](), list[float](), list[float]()
    for _ in range(ROUNDS):
        step = _seconds(optimizer.step)
        start = time.perf_counter()
        found = collage_fx.changes(model)
        extracted = time.perf_counter() - start
        ratios.append(extracted / step)
        start = time.perf_counter()
        compared = _compared(model, snapshot)
        gains.append((time.perf_counter() - start) / extracted)
        assert compared <= found.changed  # a tensor may be given whole
        shares.append(compared / found.elements)
    return statistics.median(ratios), statistics.median(gains), statistics.median(shares)


def _compared(model: Module, snapshot: Sequence[Tensor]) -> int:
    """Find the changed elements as programs with a snapshot do; return their number."""
    count = 0
    for weight, old in zip(model.parameters(), snapshot, strict=True):
        flat = weight.detach().view(-1)
        indices = (_bits(flat) != _bits(old.view(-1))).nonzero()[:, 0]
        count += len(indices.to(torch.int32))
        flat[indices]
        old.copy_(weight.detach())
    return count


def _seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _write_runs(steps: int) -> None:
    runs = [("AdamW", name, adamw, options) for name, options in OPTIONS.items()]
    runs += [("Muon", name, muon, options) for name, options in MUON.items()]
    rows = []
    for optimizer, name, make, options in runs:
        torch._dynamo.reset()
        wrong, patches, share, events = soak(make, options, steps)
        rows.append([optimizer, name, f"{steps:,}", events, f"{patches:,}", f"{share:.1%}", wrong])
        print(rows[-1], flush=True)
    head = ["optimizer", "options", "steps", "resumes, foreign writes", "patches", "median share", "wrong"]
    put_between(*PLACES["runs"], markdown(head, rows))


def _write_costs() -> None:
    rows = []
    for name, options in OPTIONS.items():
        for lr in RATES:
            torch._dynamo.reset()
            ratio, gain, share = costs(options, lr)
            rows.append([name, f"{lr:g}", f"{share:.1%}", f"{ratio:.2f}", f"{gain:.1f}"])
            print(rows[-1], flush=True)
    head = ["options", "lr", "changed in a step", "changes / step", "compare / changes"]
    where = f"torch {torch.__version__}; threads: {torch.get_num_threads()}"
    put_between(*PLACES["costs"], f"{markdown(head, rows)}\n\n({where}.)")


def main() -> None:
    """Measure, and write a table into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("runs", "costs"))
    parser.add_argument("--steps", type=int, default=10_000, help="steps of each run")
    given = parser.parse_args()
    warnings.simplefilter("ignore")  # of weights that are written to between two steps
    if given.part == "runs":
        _write_runs(given.steps)
    else:
        _write_costs()


if __name__ == "__main__":
    main()
