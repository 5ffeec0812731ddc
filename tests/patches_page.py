"""``python -m tests.patches_page``: write ``docs/patches.md``, the list of what is replaced in torch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from collage_fx.torch_compat import PATCHES
from collage_fx.torch_compat.patching import Patch

PAGE = Path(__file__).resolve().parent.parent / "docs" / "patches.md"

HEAD = """# What is replaced in torch

collage_fx replaces {count} functions of torch where torch has no hook. {bits} of them keep results right,
{speed} save time or memory; without the latter all goes on with the same bits. Most are in force only while
this backend compiles, in the compiling thread. `collage-fx doctor --patches` tells whether each fits your
version of torch, and what torch would have to make public for it to go. Note [Patches] in
`collage_fx/torch_compat/patching.py` has the rules.

| in place of | in force | for | why |
|---|---|---|---|
"""


def row(patch: Patch) -> str:
    """The line of a patch."""
    target = patch.target.partition("(")[0].partition(" has ")[0].replace(":", ".")
    during = "always" if patch.during == "the process" else f"in {patch.during}"
    return "| " + " | ".join((f"`{target}`", during, patch.needed_for, patch.why)) + " |\n"


def page() -> str:
    """The page."""
    counts = Counter(patch.needed_for for patch in PATCHES)
    head = HEAD.format(count=len(PATCHES), bits=counts["bits"], speed=counts["speed"])
    return head + "".join(map(row, PATCHES))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
