"""The listing of a printed kernel in docs/how-it-works.md: ``python -m tests.printed_kernel`` writes it."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from collage_fx import CollageBackend

PAGE = Path(__file__).parents[1] / "docs" / "how-it-works.md"

#: The listing on the page, between the lines around it.
LISTING = re.compile(r"(<!-- kernel: .*? -->\n```cpp\n)(.*?)(```)", re.DOTALL)


#: Arguments of the kernel, and what the page calls them.
NAMES = {
    "in0": "p",
    "in2": "rest",
    "in4": "exp_avg",
    "in6": "grad",
    "in13_0": "k",
    "in16": "exp_avg_sq",
    "in24_0": "eps",
    "in27_0": "step_size",
    "in31_0": "phase_of_p",
    "in36_0": "phase_of_exp_avg_sq",
    "first_0": "first",
}


def listing() -> str:
    """Print the loops over a chunk of AdamW's kernel, up to the loop for numbers that are not finite."""
    p = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    backend = CollageBackend(strategy="light")
    step = torch.compile(torch.optim.AdamW([p], lr=1e-3).step, backend=backend)
    for _ in range(2):  # the first step makes state
        p.grad = torch.ones_like(p)
        step()
    (text,) = (code for code in backend.report().graphs[-1].code if "const auto chunk" in code)
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if "const auto chunk" in line)
    last = next(i for i, line in enumerate(lines) if line == "    } else {")
    shown = "".join(
        f"{line.removeprefix('  ')}\n" for line in [*lines[first:last], "    } else { ... }", "  };"]
    )
    return re.sub(r"\b(?:in\d+|first)(?:_0)?\b", lambda found: NAMES[found[0]], shown)


def page() -> str:
    """The page with the listing as it is now."""
    text = PAGE.read_text(encoding="utf-8")
    return LISTING.sub(lambda found: f"{found[1]}{listing()}{found[3]}", text)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
