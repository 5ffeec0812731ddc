"""Encodings of other projects, simulated from what they have published (:data:`SOURCES`), not copied.

Those of COAT and FP8-LM are the packed formats of ``examples/peer_formats.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from benchmarks.formats.encodings import E4M3, Encoding, State, by_block, largest, power_of_two_below

#: Where encodings are defined.
SOURCES = {
    "FlashOptim": "github.com/databricks/flashoptim, 0.1.4: weights with their error in ulps as an integer,"
    " 8-bit companded moments with float16 scales of 32 elements",
    "HeavyBall": "github.com/HomebrewML/HeavyBall, 3.2: error correction bf16+8, rounded stochastically, of"
    " weights and moments",
    "bitsandbytes": "Dettmers, Lewis, Shleifer, Zettlemoyer, *8-bit Optimizers via Block-wise "
    "Quantization*, ICLR 2022, arXiv 2110.02861: the dynamic map",
    "torchao": "github.com/pytorch/ao, 0.18: AdamW8bit, AdamWFp8, and their bf16_stochastic_round",
    "COAT": "Xi et al., *COAT: Compressing Optimizer States and Activation for Memory-Efficient FP8 "
    "Training*, ICLR 2025, arXiv 2410.19313, and its kernel in github.com/NVlabs/VILA: expanded ranges "
    "of 128 elements",
    "FP8-LM": "Peng et al., *FP8-LM: Training FP8 Large Language Models*, 2023, arXiv 2310.18313, and "
    "github.com/Azure/MS-AMP: scales of a tensor, powers of two",
    "Zamirai": "Zamirai et al., *Revisiting BFloat16 Training*, 2020, arXiv 2010.06192: stochastic rounding"
    " and Kahan summation, the latter as torch-optimi 0.3 has it",
    "TE": "github.com/NVIDIA/TransformerEngine, FusedAdam(store_param_remainders=True), and NVIDIA apex: "
    "the lower 16 bits of a float32 master",
}

# Weights. ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ErrorInUlps(Encoding):
    """bfloat16, and its error in units of half an ulp, as an integer of ±127 or ±32767.

    The integer is rounded to nearest by [FlashOptim], stochastically by [HeavyBall].
    """

    bits: int
    stochastic: bool = False

    @property
    def name(self) -> str:
        return f"bfloat16 + int{self.bits} of its ulp" + (", stochastic" if self.stochastic else "")

    @property
    def bytes(self) -> float:
        return 2 + self.bits / 8

    @property
    def most(self) -> float:
        return 2.0 ** (self.bits - 1) - 1

    def store(self, value: Tensor, before: State | None) -> State:
        hi = value.bfloat16()
        scaled = ((value - hi.float()) / self._half_ulp(hi)).clamp(-1, 1) * self.most
        random = torch.rand_like(scaled) if self.stochastic else torch.full_like(scaled, 0.5)
        return hi, (scaled + random).floor()

    def load(self, state: State) -> Tensor:
        hi, error = state
        return hi.float() + error / self.most * self._half_ulp(hi)

    def _half_ulp(self, hi: Tensor) -> Tensor:
        """2**-8 of hi's binade. Below 2**-118 it is that of 2**-118, for it to be a normal float32 number."""
        return power_of_two_below(hi.float().abs()).clamp(min=2.0**-118) * 2.0**-8


@dataclass(frozen=True)
class StochasticBFloat16(Encoding):
    """bfloat16, rounded up with a probability of the fraction that is cut off [Zamirai, torchao]."""

    name = "bfloat16, stochastic"
    bytes = 2

    def store(self, value: Tensor, before: State | None) -> State:
        random = torch.randint(0, 1 << 16, value.shape, dtype=torch.int32)
        return (((value.view(torch.int32) + random) & -0x10000).view(torch.float32).bfloat16(),)

    def load(self, state: State) -> Tensor:
        return state[0].float()


@dataclass(frozen=True)
class Kahan(Encoding):
    """bfloat16 and a compensation in bfloat16 to which changes are added first [Zamirai].

    Every operation rounds to bfloat16, and weight decay multiplies the weight alone, as in torch-optimi.
    """

    name = "bfloat16, Kahan sum"
    bytes = 4

    def store(self, value: Tensor, before: State | None) -> State:
        return value.bfloat16(), torch.zeros_like(value, dtype=torch.bfloat16)

    def load(self, state: State) -> Tensor:
        hi, compensation = state
        return hi.float() + compensation.float()

    def update(self, before: State, decay: Tensor, change: Tensor) -> State:
        old, compensation = before
        old = (old.float() - decay * old.float()).bfloat16()
        compensation = (compensation.float() + change).bfloat16()
        new = old + compensation
        return new, compensation + (old - new)


@dataclass(frozen=True)
class Remainder(Encoding):
    """The two halves of a float32 pattern, the upper one rounded up where the lower one is negative [TE]."""

    name = "bfloat16 + int16 remainder"
    bytes = 4

    def store(self, value: Tensor, before: State | None) -> State:
        bits = value.view(torch.int32)
        lower = bits.to(torch.int16)
        return ((bits >> 16) + (lower < 0).int()).to(torch.int16).view(torch.bfloat16), lower

    def load(self, state: State) -> Tensor:
        hi, lower = state
        upper = hi.view(torch.int16).to(torch.int32) - (lower < 0).int()
        return ((upper << 16) | (lower.to(torch.int32) & 0xFFFF)).view(torch.float32)


# Moments. ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Companded(Encoding):
    """8-bit integers of a companding function, with a float16 scale of 32 elements [FlashOptim].

    First moments: ±127 · 2x / (1 + |x|) with x in units of the largest; second ones: 255 · sqrt(x).
    """

    signed: bool

    bytes = 1 + 2 / 32

    @property
    def name(self) -> str:
        return "int8 softsign per 32" if self.signed else "uint8 square root per 32"

    def store(self, value: Tensor, before: State | None) -> State:
        value = value if self.signed else value.sqrt()
        scale = largest(value, 32).clamp(min=1e-12)
        x = by_block(value, 32) / scale
        code = 2 * x / (1 + x.abs()) * 127 if self.signed else x * 255
        return code.round(), scale.half()

    def load(self, state: State) -> Tensor:
        code, scale = state
        if self.signed:
            y = code / 127
            return (y / (2 - y.abs()) * scale.float()).flatten(-2)
        return (code / 255 * scale.float()).square().flatten(-2)


@dataclass(frozen=True)
class DynamicMap(Encoding):
    """The nearest of 256 numbers in units of the largest of 256 elements [bitsandbytes, torchao].

    A decimal exponent takes as many leading bits as it needs, what is left is a linear fraction.

    Attributes:
        signed: whether numbers may be negative.
        least: what a block's largest magnitude counts as if it is less; torchao has such a bound.
    """

    signed: bool
    least: float = torch.finfo(torch.float32).tiny

    name = "dynamic 8-bit map per 256"  # signed or not follows from the moment
    bytes = 1 + 4 / 256

    def store(self, value: Tensor, before: State | None) -> State:
        numbers = dynamic_map(self.signed)
        scale = largest(value, 256).clamp(min=self.least)
        between = (numbers[1:] + numbers[:-1]) / 2
        return torch.bucketize(by_block(value, 256) / scale, between, right=True), scale

    def load(self, state: State) -> Tensor:
        code, scale = state
        return (dynamic_map(self.signed)[code] * scale).flatten(-2)


@cache
def dynamic_map(signed: bool) -> Tensor:
    """The 256 numbers in order: 0, 1, and the middles of equal parts of [10**(e-1), 10**e], e from -6 to 0.

    There are 1, 2, 4, ..., 64 parts from the lowest decade to the highest, and as many of negative numbers;
    twice as many of each, and none negative, if not ``signed``.
    """
    numbers = [0.0, 1.0]
    for i in range(7):
        ends = torch.linspace(0.1, 1, 2 ** (i + (0 if signed else 1)) + 1)
        middles = (10.0 ** (i - 6) * (ends[1:] + ends[:-1]) / 2).tolist()
        numbers += [*middles, *(-each for each in middles)] if signed else middles
    return torch.tensor(sorted(numbers))


@dataclass(frozen=True)
class BlockFloat8(Encoding):
    """e4m3 in units of 1/448 of the largest of 256 elements [torchao]."""

    name = "e4m3 per 256"
    bytes = 1 + 4 / 256

    def store(self, value: Tensor, before: State | None) -> State:
        scale = largest(value, 256).clamp(min=1e-12) / 448
        return (by_block(value, 256) / scale).to(E4M3), scale

    def load(self, state: State) -> Tensor:
        code, scale = state
        return (code.float() * scale).flatten(-2)
