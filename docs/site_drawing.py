"""Draw docs/bits.svg: a weight and small updates as bits, in plain bfloat16 and in two parts.

    python docs/site_drawing.py

The home page shows it. The bits are those of torch and of the default format of error terms.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from collage_fx.numerics.error_formats import format_named

PATH = Path(__file__).parent / "bits.svg"
UPDATES, UPDATE = 4, 0.001
CELL, HEIGHT, LEFT, GAP = 12, 20, 6, 8
WIDTH = 2 * LEFT + 32 * CELL + GAP
KINDS = {"sign": 1, "exponent": 8, "mantissa": 7, "16 more bits": 16}
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.bit { font: 10px ui-monospace, monospace; text-anchor: middle; fill: #1f2328 }
.value { font-size: 11.5px }
.head { font-weight: 700 }
rect { stroke: #ffffff }
.kind0 { fill: #d0d7de } .kind1 { fill: #c6e6c9 } .kind2 { fill: #b6d7fb } .kind3 { fill: #fdd3a3 }
.changed { font-weight: 700; fill: #b3261e }
@media (prefers-color-scheme: dark) { .value, .head { fill: #e6edf3 } rect { stroke: #1e2129 } }
"""


def bits(number: Tensor) -> str:
    """Return the 16 bits of a number, the sign first."""
    whole = number.view(torch.int16) if number.is_floating_point() else number
    return f"{int(whole) & 0xFFFF:016b}"


def row(y: int, shown: str, before: str) -> list[str]:
    """Return cells of bits, from the sign to the last; bits that have changed are marked."""
    kinds = [kind for kind, count in enumerate(KINDS.values()) for _ in range(count)]
    drawn = []
    for i, (bit, old, kind) in enumerate(zip(shown, before, kinds, strict=False)):
        x = LEFT + i * CELL + (GAP if i >= 16 else 0)
        changed = " changed" if bit != old else ""
        drawn.append(f'<rect class="kind{kind}" x="{x}" y="{y}" width="{CELL}" height="{HEIGHT}"/>')
        drawn.append(f'<text class="bit{changed}" x="{x + CELL / 2:g}" y="{y + 14}">{bit}</text>')
    return drawn


def text(x: float, y: int, words: str, kind: str = "value") -> str:
    """Return words at a place."""
    return f'<text class="{kind}" x="{x:g}" y="{y}">{words}</text>'


def draw() -> str:
    """Return the drawing as SVG."""
    exact = format_named("exact")
    assert exact is not None
    plain = torch.tensor(1.0, dtype=torch.bfloat16)
    values = [torch.tensor(1.0)]
    for _ in range(UPDATES):
        plain = plain + UPDATE
        values.append(values[-1] + UPDATE)
    parts = [exact.split(value, torch.bfloat16)[:2] for value in values]
    first = bits(torch.tensor(1.0, dtype=torch.bfloat16))

    y = 18
    drawn = [text(LEFT, y, f"plain bf16: 1.0 + {UPDATE}, {UPDATES} times, is {plain.item()}", "head")]
    drawn += row(y + 10, bits(plain), first)
    drawn.append(text(LEFT + 16 * CELL + GAP, y + 24, "each update is rounded away"))
    y += 62
    shown = ["".join(map(bits, each)) for each in parts]
    for old, count in pairwise((0, 1, UPDATES)):
        (hi, _), value = parts[count], values[count]
        times = "once" if count == 1 else f"{count} times"
        drawn.append(text(LEFT, y, f"collage_fx: 1.0 + {UPDATE}, {times}, is {value.item():.4g}", "head"))
        drawn += row(y + 10, shown[count], shown[old])
        lo = f"{value.item() - hi.item():+.4f}".replace("-", "−")
        drawn.append(text(LEFT, y + 46, f"hi = {round(hi.item(), 4)}, in bf16"))
        drawn.append(text(LEFT + 16 * CELL + GAP, y + 46, f"lo = {lo}, in two more bytes"))
        y += 78
    x = LEFT
    for kind, name in enumerate(KINDS):
        drawn.append(f'<rect class="kind{kind}" x="{x}" y="{y - 10}" width="{CELL}" height="{CELL}"/>')
        drawn.append(text(x + CELL + 4, y, name))
        x += CELL + 20 + 7 * len(name)
    body = "\n".join(drawn)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 8}" width="{WIDTH}" '
        f'height="{y + 8}" role="img">\n<style>{STYLE}</style>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    PATH.write_text(draw(), encoding="utf-8")
