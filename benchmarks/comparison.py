"""``python -m benchmarks.comparison``: write the table of measurements in docs/comparison.md.

Its numbers are those of ``./dev bench`` and ``./dev formats``, put beside each other.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.formats.asked import HIGH, row, whole
from benchmarks.table import markdown, place, put_between

ROOT = Path(__file__).resolve().parent.parent
PLACE = place("comparison.md", "comparison")
RESULTS = ROOT / "benchmarks" / "results"

#: A name for people, of a state in the study of formats, of a row of the benchmark.
ROWS = (
    ("float32 state (fp32 masters: 2 bytes more)", "float32", "bf16 + fp32 master, fused"),
    ("plain bf16", "none", "torch bf16 fused"),
    ("Kahan sum of weights (optimi)", "Kahan sum", "optimi kahan_sum"),
    ("stochastic rounding of weights and moments", "stochastic rounding", None),
    # Numbers of the row of ours: a float32 pattern in two halves, moments rounded to nearest.
    ("bf16-fused-adam, 16 + 16 bits", "light, exact", None),
    ("torchao, 16-bit moments, stochastic weights", None, "torchao stochastic"),
    ("torchao, 8-bit moments, stochastic weights", "torchao 8-bit, stochastic weights", None),
    ("bitsandbytes, 8-bit moments", "bitsandbytes 8-bit", "bitsandbytes 8 bit"),
    ("HeavyBall, 16 + 8 bits", "HeavyBall bf16+8", "heavyball bf16+8"),
    ("FlashOptim, 24-bit weights", "FlashOptim, 24-bit weights", None),
    ("TransformerEngine, remainders", "Transformer Engine, remainders", None),
    ("the paper's pairs, eager: plus", "plus, mcf", "eager Collage plus"),
    ("here, `light`", "light, exact, dithered", "light"),
    ("here, `plus`", "plus, exact, dithered", "plus"),
    ("here, 8 bytes", "block16, exact", "light, block16"),
    ("here, 5.1 bytes", "block8, byte", "light, byte, block8"),
)
CELLS = {0: "error, lr 1e-5", 1: "error, lr 1e-4", 4: "error, lr 1e-4, N(0, 0.02)"}


def table() -> str:
    """The rows, from the files of results."""
    formats = json.loads((RESULTS / "formats" / "results.json").read_text())
    times: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(RESULTS.glob("cpu-*.json")):
        for measured in json.loads(path.read_text())["rows"]:
            if measured["size"] == "d" and measured.get("over_copy"):
                times.setdefault(measured["peer"], []).append(measured)
    rows = []
    for name, state, peer in ROWS:
        errors = {j: e for e, i, j in whole(formats, state) if i == HIGH} if state else {}
        over = times.get(peer or "", [])
        rows.append(
            [
                name,
                f"{row(formats, 'states', state)['bytes']:g}" if state else "–",
                *(f"{errors[j]:.2g}" if errors else "–" for j in CELLS),
                " / ".join(f"{each['over_copy']:.2g}" for each in over) or "–",
            ]
        )
    return markdown(("stored as", "bytes", *CELLS.values(), "time ÷ copy"), rows, texts=1)


if __name__ == "__main__":
    put_between(*PLACE, table())
