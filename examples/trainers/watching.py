"""Draw the metrics that Hugging Face's ``Trainer`` logs, in a run with 8 bytes per parameter.

python -m examples.trainers.watching docs/watching.png
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from examples.trainers.transformers_trainer import train

PANELS = {
    "collage/edq_ratio": "EDQ ratio: how much of each update arrives",
    "collage/lost_share": "Lost: share of the updates that changed nothing",
    "loss": "Training loss",
}


def draw(path: Path, steps: int) -> None:
    figure: Any = Figure(figsize=(14, 4.2), layout="constrained")
    panels = figure.subplots(1, len(PANELS))
    with tempfile.TemporaryDirectory() as folder:
        log = train(Path(folder), steps).state.log_history
    for axes, (name, title) in zip(panels, PANELS.items(), strict=True):
        rows = [row for row in log if name in row]
        axes.plot([row["step"] for row in rows], [row[name] for row in rows], color="#0072B2", linewidth=2)
        axes.ticklabel_format(axis="y", useOffset=False)
        axes.set_title(title, fontsize=12)
        axes.set_xlabel("step", fontsize=11)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), 200)
