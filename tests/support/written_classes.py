"""Optimizer classes that tests write as text: with source that can be read, as in a file, or without."""

from __future__ import annotations

import linecache
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx import full_value


def written_class(body: str, *, has_source: bool = True, label: str = "") -> Callable[[Any], Optimizer]:
    """Return the class ``Drawn`` with the given methods.

    Args:
        body: its methods.
        has_source: whether ``inspect.getsource`` finds the text.
        label: file name in tracebacks; each text needs a name of its own.
    """
    head = (
        "class Drawn(Optimizer):\n    def __init__(self, params):\n        super().__init__(params, {})\n\n"
    )
    source = head + textwrap.indent(body, "    ")
    file = f"<{label or body}>"
    if has_source:
        linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    names: dict[str, Any] = {"torch": torch, "Optimizer": Optimizer, "__name__": __name__}
    exec(compile(source, file, "exec"), names)
    made: Callable[[Any], Optimizer] = names["Drawn"]
    return made


def gradients(params: Sequence[Tensor], seed: int) -> Iterator[Tensor]:
    """Yield a gradient for each parameter that depends on ``seed`` alone: of bfloat16, in its dtype."""
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        yield torch.randn(p.shape, generator=generator).bfloat16().to(p.dtype)


def relative_error(ours: Sequence[Tensor], exact: Sequence[Tensor], start: Sequence[Tensor]) -> float:
    """Return the largest |p - p64| / |p64 - p0|; of tensors that should not move, the largest movement."""
    found = 0.0
    for p, p64, p0 in zip(ours, exact, start, strict=True):
        off = float((full_value(p) - p64.detach()).norm())
        moved = float((p64.detach() - p0.detach()).norm())
        found = max(found, off / moved if moved else off)
    return found
