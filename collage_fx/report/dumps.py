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

from torch.fx import Graph, GraphModule

from collage_fx.graph import graph_text
from collage_fx.pipeline import Stage

VARIABLE = "COLLAGE_FX_DUMP"


def _new_folder(directory: Path, name: str) -> Path:
    """Make the folder with the first free number. Several processes may share the directory."""
    number = 1
    while True:
        folder = directory / f"{name}-{number}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1


class PassLog:
    """Files of the graphs of one compilation, if the variable is set."""

    def __init__(self, subject: str, captured: GraphModule) -> None:
        directory = os.environ.get(VARIABLE)
        self._folder = _new_folder(Path(directory), re.sub(r"[^\w.]+", "_", subject)) if directory else None
        self._numbers = itertools.count()
        self._dump("captured", f"{subject}, {len(captured.graph.nodes)} nodes", captured.graph)

    def __call__(self, stage: Stage) -> None:
        """Write the graph as a pass left it."""
        self._dump(stage.name, stage.summary, stage.graph)

    def _dump(self, name: str, summary: str, graph: Graph) -> None:
        if self._folder is None:
            return
        from collage_tools.pages import svg, whole_graph

        stem = f"{next(self._numbers):02}-{name}"
        says = f"{name}: {summary}"
        drawn = whole_graph(graph)
        self._write(f"{stem}.txt", f"{says}\n\n{graph_text(graph)}\n")
        self._write(f"{stem}.svg", svg([drawn], [says], drawn.passes))

    def lowered(self, sources: Sequence[str]) -> None:
        """Write the code that Inductor generated."""
        for source in sources if self._folder is not None else ():
            self._write(f"{next(self._numbers):02}-inductor.py", f"# inductor: generated code\n\n{source}\n")

    def _write(self, name: str, text: str) -> None:
        assert self._folder is not None
        (self._folder / name).write_text(text, encoding="utf-8")
