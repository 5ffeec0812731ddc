"""Sets of parameters to step: the shapes of models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

Shapes = Sequence[tuple[int, ...]]

#: Bytes of device memory per parameter while a peer is measured: gradients in two dtypes (6), `light` and
#: `plus` (18), the peer with the largest state (22) and temporaries (8), and the copies (28).
BYTES_WHILE_MEASURED = 82


def elements(shapes: Shapes) -> int:
    return sum(prod(shape) for shape in shapes)


@dataclass(frozen=True)
class Size:
    """Shapes under a letter.

    Attributes:
        about: what they are, for the table's heading.
        shapes: from the bytes of memory that the device has; only models cut to fit read it.
        devices: where the size is measured unless it is asked for by name.
    """

    about: str
    shapes: Callable[[int], Shapes]
    devices: tuple[str, ...] = ("cpu", "cuda")


def gpt(layers: int, width: int, vocabulary: int = 50257, context: int = 1024) -> Shapes:
    """GPT-2's parameters: 12 tensors a layer and 4 more."""
    layer = [
        *((width,), (width,)),  # layer norm
        *((width, 3 * width), (3 * width,), (width, width), (width,)),  # attention
        *((width,), (width,)),  # layer norm
        *((width, 4 * width), (4 * width,), (4 * width, width), (width,)),  # feed-forward
    ]
    return [(vocabulary, width), (context, width), *(layer * layers), (width,), (width,)]


LLAMA_LAYER: Shapes = [
    *((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)),  # attention
    *((14336, 4096), (14336, 4096), (4096, 14336)),  # feed-forward
    *((4096,), (4096,)),  # norms
]


def llama_layers(memory: int) -> Shapes:
    """As many of Llama-3-8B's 32 layers as fit."""
    fitting = memory // (BYTES_WHILE_MEASURED * elements(LLAMA_LAYER))
    return list(LLAMA_LAYER) * max(1, min(32, fitting))


SIZES = {
    "toy": Size("two small tensors, for tests", lambda memory: [(33, 17), (16,)], devices=()),
    "launch": Size(
        "148 tensors of 64 elements: nothing but the cost of calling",
        lambda memory: [(64,)] * 148,
        devices=(),
    ),
    "d": Size("4 × 2048×2048", lambda memory: [(2048, 2048)] * 4),
    "c": Size("16 × 1024×1024, 8 × 1024", lambda memory: [(1024, 1024)] * 16 + [(1024,)] * 8),
    "a": Size("GPT-2 124M", lambda memory: gpt(12, 768)),
    "b": Size("GPT-2's 148 tensors at width 256", lambda memory: gpt(12, 256)),
    "e": Size("Llama-3-8B, the layers that fit", llama_layers, devices=("cuda",)),
    "f": Size("GPT 1.3B", lambda memory: gpt(24, 2048, context=2048), devices=("cuda",)),
}
