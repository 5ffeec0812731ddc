"""What the study compares: whole optimizer states, weights alone, moments alone. A new row is a line here."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.formats.encodings import (
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
    Remainder,
    StochasticBFloat16,
)
from collage_fx.examples import peer_formats  # noqa: F401 (registers "coat" and "fp8_lm")

#: Whose a row is, if it is not one of the SOURCES of other projects.
OURS = "ours"
TORCH = "torch"
CANDIDATE = "candidate, simulated"


@dataclass(frozen=True)
class Row:
    """One way to store AdamW's state: the weight and both moments."""

    name: str
    whose: str
    weight: Encoding
    first: Encoding
    second: Encoding

    def bytes(self, kind: str) -> float:
        """Bytes a parameter, scales included: of the "weights", of the "moments", or of both, "states"."""
        moments = self.first.bytes + self.second.bytes
        return {"weights": self.weight.bytes, "moments": moments, "states": self.weight.bytes + moments}[kind]


FLOAT32 = Plain(torch.float32)
BFLOAT16 = Plain(torch.bfloat16)
MCF, EXACT, BYTE, DITHER, INT16 = map(Registered, ("mcf", "exact", "byte", "dither", "int16x32"))
BLOCK8 = Registered("block8"), Registered("block8_positive")
BLOCK16 = Registered("block16"), Registered("block16_positive")
HEAVYBALL = ErrorInUlps(8, stochastic=True)
FLASHOPTIM = Companded(signed=True), Companded(signed=False)
BITSANDBYTES = DynamicMap(signed=True), DynamicMap(signed=False)
TORCHAO = DynamicMap(signed=True, least=1e-12), DynamicMap(signed=False, least=1e-12)
COAT = Registered("coat"), Registered("coat")
FP8_LM = Registered("fp8_lm"), Registered("fp8_lm_positive")
FP8_LM_WEIGHT = Registered("fp8_lm_positive")  # float16, too, and a scale for the tensor

#: States. The library's are a format and a strategy: ``light`` is for weights, ``plus`` for second moments
#: as well, ``full`` for all.
STATES = (
    Row("float32", TORCH, FLOAT32, FLOAT32, FLOAT32),
    Row("none", OURS, BFLOAT16, BFLOAT16, BFLOAT16),
    Row("light, mcf", OURS, MCF, BFLOAT16, BFLOAT16),
    Row("plus, mcf", OURS, MCF, BFLOAT16, MCF),
    Row("full, mcf", OURS, MCF, MCF, MCF),
    Row("none, dithered", OURS, DITHER, DITHER, DITHER),
    Row("light, exact", OURS, EXACT, BFLOAT16, BFLOAT16),
    Row("light, exact, dithered", OURS, EXACT, DITHER, DITHER),
    Row("light, byte", OURS, BYTE, BFLOAT16, BFLOAT16),
    Row("light, byte, dithered", OURS, BYTE, DITHER, DITHER),
    Row("plus, exact", OURS, EXACT, BFLOAT16, EXACT),
    Row("plus, exact, dithered", OURS, EXACT, DITHER, EXACT),
    Row("full, exact", OURS, EXACT, EXACT, EXACT),
    Row("block16, exact", OURS, EXACT, *BLOCK16),
    Row("block8, exact", OURS, EXACT, *BLOCK8),
    Row("block8, byte", OURS, BYTE, *BLOCK8),
    Row("block8, int16x32", OURS, INT16, *BLOCK8),
    Row("FlashOptim, 24-bit weights", "FlashOptim", ErrorInUlps(8), *FLASHOPTIM),
    Row("FlashOptim, 32-bit weights", "FlashOptim", ErrorInUlps(16), *FLASHOPTIM),
    Row("bitsandbytes 8-bit", "bitsandbytes", BFLOAT16, *BITSANDBYTES),
    Row("torchao 8-bit, stochastic weights", "torchao", StochasticBFloat16(), *TORCHAO),
    Row("torchao fp8", "torchao", BFLOAT16, BlockFloat8(), BlockFloat8()),
    Row("torchao fp8, stochastic weights", "torchao", StochasticBFloat16(), BlockFloat8(), BlockFloat8()),
    Row("COAT, float32 weights", "COAT", FLOAT32, *COAT),
    Row("FP8-LM", "FP8-LM", FP8_LM_WEIGHT, *FP8_LM),
    Row("HeavyBall bf16+8", "HeavyBall", HEAVYBALL, HEAVYBALL, HEAVYBALL),
    Row("stochastic rounding", "Zamirai", StochasticBFloat16(), BFLOAT16, BFLOAT16),
    Row("Kahan sum", "Zamirai", Kahan(), BFLOAT16, BFLOAT16),
    Row("Transformer Engine, remainders", "TE", Remainder(), FLOAT32, FLOAT32),
)


def weight(encoding: Encoding, whose: str) -> Row:
    return Row(encoding.name, whose, encoding, FLOAT32, FLOAT32)


#: Weights, beside moments in float32.
WEIGHTS = (
    weight(FLOAT32, TORCH),
    weight(BFLOAT16, TORCH),
    weight(MCF, OURS),
    weight(EXACT, OURS),
    weight(BYTE, OURS),
    weight(INT16, OURS),
    weight(DITHER, OURS),
    weight(ErrorInUlps(8), "FlashOptim"),
    weight(ErrorInUlps(16), "FlashOptim"),
    weight(HEAVYBALL, "HeavyBall"),
    weight(StochasticBFloat16(), "Zamirai"),
    weight(Kahan(), "Zamirai"),
    weight(Remainder(), "TE"),
    Row("float16, tensor scale", "FP8-LM", FP8_LM_WEIGHT, FLOAT32, FLOAT32),
    *(weight(Float8Components(count, block), CANDIDATE) for block in (None, 32) for count in (2, 3, 4)),
    *(weight(StaticScale(Float8WithPlanes(planes)), CANDIDATE) for planes in (1, 2)),
)


def moments(name: str, whose: str, first: Encoding, second: Encoding) -> Row:
    return Row(name, whose, FLOAT32, first, second)


#: Moments, beside weights in float32.
MOMENTS = (
    moments("float32", TORCH, FLOAT32, FLOAT32),
    moments("bfloat16", TORCH, BFLOAT16, BFLOAT16),
    moments("bfloat16, dithered", OURS, DITHER, DITHER),
    moments("bfloat16, second moment in mcf", OURS, BFLOAT16, MCF),
    moments("bfloat16, second moment in exact", OURS, BFLOAT16, EXACT),
    moments("block16", OURS, *BLOCK16),
    moments("block8", OURS, *BLOCK8),
    moments("FlashOptim", "FlashOptim", *FLASHOPTIM),
    moments("bitsandbytes 8-bit", "bitsandbytes", *BITSANDBYTES),
    moments("torchao 8-bit", "torchao", *TORCHAO),
    moments("torchao fp8", "torchao", BlockFloat8(), BlockFloat8()),
    moments("COAT", "COAT", *COAT),
    moments("FP8-LM", "FP8-LM", *FP8_LM),
    moments("HeavyBall bf16+8", "HeavyBall", HEAVYBALL, HEAVYBALL),
)

#: Weights over runs of different length.
LENGTHS = (FLOAT32, EXACT, MCF, BYTE, DITHER, ErrorInUlps(8), HEAVYBALL, StochasticBFloat16())
