"""Dumps of every stage of each compilation as text and SVG, into the folder ``COLLAGE_FX_DUMP=folder``.

A compilation gets a folder in it, named by whose step it is and a number (``AdamW-1``), and a stage two files
there, numbered in order: ``05-compensate-wide.txt``, whose first line says what the pass did, and
``05-compensate-wide.svg``. Without the variable nothing is written or copied.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path

from torch.fx import Graph

from collage_fx.graph import graph_text
from collage_fx.report.pictures import whole_graph
from collage_fx.report.svg import svg

VARIABLE = "COLLAGE_FX_DUMP"


def open_dump(subject: str) -> Dump | None:
    """Make the dump of a compilation that begins; return None if the variable is not set."""
    directory = os.environ.get(VARIABLE)
    return Dump(_new_folder(Path(directory), re.sub(r"[^\w.]+", "_", subject))) if directory else None


def _new_folder(directory: Path, name: str) -> Path:
    """Make the folder with the first free number. Several processes may share the directory."""
    for number in itertools.count(1):
        folder = directory / f"{name}-{number}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("there is always a next number")


class Dump:
    """Writer of the stages of one compilation into ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._numbers = itertools.count()

    def stage(self, name: str, summary: str, graph: Graph) -> None:
        """Write the graph as the pass ``name`` left it."""
        stem = f"{next(self._numbers):02}-{name}"
        says = f"{name}: {summary}"
        drawn = whole_graph(graph)
        self._write(f"{stem}.txt", f"{says}\n\n{graph_text(graph)}\n")
        self._write(f"{stem}.svg", svg([drawn], [says], drawn.passes))

    def code(self, sources: Sequence[str]) -> None:
        """Write the code that Inductor generated."""
        for source in sources:
            self._write(f"{next(self._numbers):02}-inductor.py", f"# inductor: generated code\n\n{source}\n")

    def _write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text, encoding="utf-8")
