"""A training run that stops and goes on, in a process of its own for the second half.

``python -m tests.support.resume DIRECTORY`` loads every checkpoint in the directory before any step has been
taken in the process, takes the remaining steps and writes what came out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.support.training import compiled, everything, parameters, run_steps

RUNS = [
    (dtype, error_format)
    for dtype in (torch.bfloat16, torch.float16)
    for error_format in ("mcf", "exact", "fp32", "byte")
]
FIRST, REST = range(3), range(3, 23)


def name_of(dtype: torch.dtype, error_format: str) -> str:
    return f"{str(dtype).removeprefix('torch.')}-{error_format}"


def start(dtype: torch.dtype, error_format: str) -> tuple[torch.optim.Optimizer, Callable[[], Any]]:
    optimizer = torch.optim.AdamW(parameters(dtype), lr=1e-3, weight_decay=0.1)
    return optimizer, compiled(optimizer, error_format=error_format)


def save(optimizer: torch.optim.Optimizer, path: Path) -> None:
    parameters = [p.detach() for group in optimizer.param_groups for p in group["params"]]
    torch.save({"parameters": parameters, "optimizer": optimizer.state_dict()}, path)


def load(optimizer: torch.optim.Optimizer, path: Path) -> None:
    checkpoint = torch.load(path, weights_only=True)
    for group in optimizer.param_groups:
        for p, saved in zip(group["params"], checkpoint["parameters"], strict=True):
            p.data.copy_(saved)
    optimizer.load_state_dict(checkpoint["optimizer"])


def main(directory: Path) -> None:
    for dtype, error_format in RUNS:
        name = name_of(dtype, error_format)
        optimizer, step = start(dtype, error_format)
        load(optimizer, directory / f"{name}.checkpoint")
        run_steps(step, optimizer.param_groups[0]["params"], REST)
        torch.save(everything(optimizer), directory / f"{name}.result")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
