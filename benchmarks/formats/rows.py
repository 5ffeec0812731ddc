"""What the study compares: whole optimizer states, weights alone, moments alone. A new row is a line here."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.formats.encodings import (
    E4M3,
    Encoding,
    Float8Components,
    Float8WithPlanes,
    Plain,
    Registered,
    StaticScale,
)
from benchmarks.formats.peers import (
    BlockFloat8,
    Companded,
    DynamicMap,
    ErrorInUlps,
    Kahan,
    RangeExpansion,
    Remainder,
    StochasticBFloat16,
    TensorScaled,
)

#: Whose a row is.
OURS = "ours"
TORCH = "torch"
PEER = "peer, simulated"
CANDIDATE = "candidate, simulated"


@dataclass(frozen=True)
class Row:
    """One way to store AdamW's state: the weight and both moments."""

    name: str
    whose: str
    weight: Encoding
    first: Encoding
    second: Encoding

    @property
    def bytes(self) -> float:
        """Bytes a parameter, all state and scales, without the gradient."""
        return self.weight.bytes + self.first.bytes + self.second.bytes


FLOAT32 = Plain(torch.float32)
BFLOAT16 = Plain(torch.bfloat16)
MCF, EXACT = Registered("mcf"), Registered("exact")
HEAVYBALL = ErrorInUlps(8, stochastic=True)
FLASHOPTIM = Companded(signed=True), Companded(signed=False)
BITSANDBYTES = DynamicMap(signed=True), DynamicMap(signed=False)
TORCHAO = DynamicMap(signed=True, least=1e-12), DynamicMap(signed=False, least=1e-12)
FP8_LM = TensorScaled(E4M3), TensorScaled(torch.float16)

#: The row that others are held against: whatever is stored is a float32 number.
MASTER = Row("float32", TORCH, FLOAT32, FLOAT32, FLOAT32)

#: States. The library's are a format and a strategy: ``light`` is for weights, ``plus`` for second moments
#: as well, ``full`` for all.
STATES = (
    MASTER,
    Row("none", OURS, BFLOAT16, BFLOAT16, BFLOAT16),
    Row("light, mcf", OURS, MCF, BFLOAT16, BFLOAT16),
    Row("plus, mcf", OURS, MCF, BFLOAT16, MCF),
    Row("full, mcf", OURS, MCF, MCF, MCF),
    Row("light, exact", OURS, EXACT, BFLOAT16, BFLOAT16),
    Row("plus, exact", OURS, EXACT, BFLOAT16, EXACT),
    Row("full, exact", OURS, EXACT, EXACT, EXACT),
    Row("FlashOptim, 24-bit weights", PEER, ErrorInUlps(8), *FLASHOPTIM),
    Row("FlashOptim, 32-bit weights", PEER, ErrorInUlps(16), *FLASHOPTIM),
    Row("bitsandbytes 8-bit", PEER, BFLOAT16, *BITSANDBYTES),
    Row("torchao 8-bit, stochastic weights", PEER, StochasticBFloat16(), *TORCHAO),
    Row("torchao fp8", PEER, BFLOAT16, BlockFloat8(), BlockFloat8()),
    Row("torchao fp8, stochastic weights", PEER, StochasticBFloat16(), BlockFloat8(), BlockFloat8()),
    Row("COAT", PEER, FLOAT32, RangeExpansion(), RangeExpansion()),
    Row("FP8-LM", PEER, TensorScaled(torch.float16), *FP8_LM),
    Row("HeavyBall bf16+8", PEER, HEAVYBALL, HEAVYBALL, HEAVYBALL),
    Row("stochastic rounding", PEER, StochasticBFloat16(), BFLOAT16, BFLOAT16),
    Row("Kahan sum", PEER, Kahan(), BFLOAT16, BFLOAT16),
    Row("Transformer Engine, remainders", PEER, Remainder(), FLOAT32, FLOAT32),
)


def weight(encoding: Encoding, whose: str) -> Row:
    return Row(encoding.name, whose, encoding, FLOAT32, FLOAT32)


#: Weights, beside moments in float32.
WEIGHTS = (
    weight(FLOAT32, TORCH),
    weight(BFLOAT16, TORCH),
    weight(MCF, OURS),
    weight(EXACT, OURS),
    weight(ErrorInUlps(8), PEER),
    weight(ErrorInUlps(16), PEER),
    weight(HEAVYBALL, PEER),
    weight(StochasticBFloat16(), PEER),
    weight(Kahan(), PEER),
    weight(Remainder(), PEER),
    weight(TensorScaled(torch.float16), PEER),
    *(weight(Float8Components(count, block), CANDIDATE) for block in (None, 32) for count in (2, 3, 4)),
    *(weight(StaticScale(Float8WithPlanes(planes)), CANDIDATE) for planes in (1, 2)),
)


def moments(name: str, whose: str, first: Encoding, second: Encoding) -> Row:
    return Row(name, whose, FLOAT32, first, second)


#: Moments, beside weights in float32.
MOMENTS = (
    moments("float32", TORCH, FLOAT32, FLOAT32),
    moments("bfloat16", TORCH, BFLOAT16, BFLOAT16),
    moments("bfloat16, second moment in mcf", OURS, BFLOAT16, MCF),
    moments("bfloat16, second moment in exact", OURS, BFLOAT16, EXACT),
    moments("FlashOptim", PEER, *FLASHOPTIM),
    moments("bitsandbytes 8-bit", PEER, *BITSANDBYTES),
    moments("torchao 8-bit", PEER, *TORCHAO),
    moments("torchao fp8", PEER, BlockFloat8(), BlockFloat8()),
    moments("COAT", PEER, RangeExpansion(), RangeExpansion()),
    moments("FP8-LM", PEER, *FP8_LM),
    moments("HeavyBall bf16+8", PEER, HEAVYBALL, HEAVYBALL),
)

#: Weights over runs of different length.
LENGTHS = (FLOAT32, EXACT, MCF, ErrorInUlps(8), HEAVYBALL, StochasticBFloat16())
