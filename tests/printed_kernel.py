"""The listing of a printed kernel in docs/how-it-works.md: ``python -m tests.printed_kernel`` writes it."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from collage_fx import CollageBackend

PAGE = Path(__file__).parents[1] / "docs" / "how-it-works.md"

#: The listing on the page, between the lines around it.
LISTING = re.compile(r"(<!-- kernel: .*? -->\n```cpp\n)(.*?)(```)", re.DOTALL)


def listing() -> str:
    """Print the loops over a chunk of SGD's kernel."""
    p = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    backend = CollageBackend(strategy="light")
    torch.compile(torch.optim.SGD([p], lr=1e-3).step, backend=backend)()
    lines = backend.report().graphs[0].code[0].splitlines()
    first = next(i for i, line in enumerate(lines) if "const auto chunk" in line)
    last = next(i for i, line in enumerate(lines) if line == "  };")
    return "".join(f"{line.removeprefix('  ')}\n" for line in lines[first : last + 1])


def page() -> str:
    """The page with the listing as it is now."""
    text = PAGE.read_text(encoding="utf-8")
    return LISTING.sub(lambda found: f"{found[1]}{listing()}{found[3]}", text)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
