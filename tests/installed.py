"""``python tests/installed.py``: try an installed collage_fx in a clean environment, of any Python and torch.

It needs nothing of the repository and no pytest: an optimizer is installed and takes three steps, is saved
and goes on in other objects to the same bits, and the command explains it. A line says what has run.
"""

from __future__ import annotations

import io
import platform
import subprocess
import sys
from typing import Any

import torch

import collage_fx


def made(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    layers = torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4)
    model = torch.nn.Sequential(*layers).to(torch.bfloat16)
    return model, collage_fx.install(torch.optim.AdamW(model.parameters(), lr=1e-4), bytes_per_parameter=8)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).bfloat16()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def whole(model: torch.nn.Module) -> list[torch.Tensor]:
    return [collage_fx.full_value(p) for p in model.parameters()]


def main() -> int:
    model, optimizer = made(0)
    start = [p.detach().double() for p in model.parameters()]
    train(model, optimizer, range(3))
    moved = zip(start, whole(model), model.parameters(), strict=True)
    assert all(bool((value != before).any()) and p.dtype is torch.bfloat16 for before, value, p in moved)
    assert any(bool(each.any()) for p in model.parameters() for each in collage_fx.error_terms(p))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    saved: dict[str, Any] = torch.load(io.BytesIO(file.getvalue()))
    resumed, other = made(1)
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    for each in ((model, optimizer), (resumed, other)):
        train(*each, range(3, 5))
    assert all(map(torch.equal, whole(model), whole(resumed)))
    command = [sys.executable, "-m", "collage_fx", "explain", "--optimizer", "torch.optim.AdamW"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "4 of 6 tensors have error terms" in done.stdout, done.stdout
    print(f"Python {platform.python_version()}, torch {torch.__version__}: {collage_fx.__version__} works")
    return 0


if __name__ == "__main__":
    sys.exit(main())
