"""AdamW as others store it: fp32 masters, Kahan, stochastic rounding, and the paper's algorithms.

Everything here is eager and stands on its own: none of it goes through this project's passes, so that what
they are compared with is not made by them. All arithmetic is float32 but where a class says otherwise; the
strategies differ in how a tensor is kept from one step to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from collage_fx.numerics.arithmetic import double_word_constant, grow, multiply_double_words

EPS = 1e-8


class Kept:
    """A tensor that is kept in its own format, each value rounded to nearest.

    Args:
        hi: the tensor, which is written to in place.
        generator: of random numbers, for those who need some.
    """

    def __init__(self, hi: Tensor, generator: torch.Generator) -> None:
        self.hi, self.generator = hi, generator

    def value(self) -> Tensor:
        """What is kept, in float32."""
        return self.hi.float()

    def store(self, value: Tensor) -> None:
        """Keep a float32 value."""
        self.hi.copy_(value)

    def add(self, update: Tensor) -> None:
        """Keep the value plus a float32 update."""
        self.store(self.value() + update)

    def average(self, new: Tensor, beta: float) -> None:
        """Keep β times the value plus 1 − β times a new one."""
        self.store(beta * self.value() + (1 - beta) * new)

    def tensors(self) -> list[Tensor]:
        """All that is kept."""
        return [self.hi]


class Stochastic(Kept):
    """Rounded up or down at random, in proportion to the distance: right on average."""

    def store(self, value: Tensor) -> None:
        noise = torch.randint(
            0, 1 << 16, value.shape, generator=self.generator, dtype=torch.int32, device=value.device
        )
        bits = value.view(torch.int32) + noise
        self.hi.copy_((bits & -(1 << 16)).view(torch.float32))


class Master(Kept):
    """A hidden float32 copy, of which the tensor is the rounded one."""

    def __init__(self, hi: Tensor, generator: torch.Generator) -> None:
        super().__init__(hi, generator)
        self.copy = hi.float()

    def value(self) -> Tensor:
        return self.copy.clone()

    def store(self, value: Tensor) -> None:
        self.copy.copy_(value)
        self.hi.copy_(value)

    def tensors(self) -> list[Tensor]:
        return [self.hi, self.copy]


class WithErrorTerm(Kept):
    """An error term of the tensor's own dtype beside it."""

    def __init__(self, hi: Tensor, generator: torch.Generator) -> None:
        super().__init__(hi, generator)
        self.lo = torch.zeros_like(hi)

    def value(self) -> Tensor:
        return self.hi.float() + self.lo.float()

    def store(self, value: Tensor) -> None:
        self.hi.copy_(value)
        self.lo.copy_(value - self.hi.float())

    def tensors(self) -> list[Tensor]:
        return [self.hi, self.lo]


class Kahan(WithErrorTerm):
    """Kahan's sum, each of its operations in the tensor's format."""

    def add(self, update: Tensor) -> None:
        lo = self.lo + update.to(self.lo.dtype)
        new = self.hi + lo
        self.lo.copy_(lo + (self.hi - new))
        self.hi.copy_(new)


class Pair(WithErrorTerm):
    """The paper's Grow and Mul (arXiv 2405.03637, algorithms 1 and 3), exact residuals by TwoSum."""

    def add(self, update: Tensor) -> None:
        self._keep(grow(self.hi, self.lo, update.to(self.hi.dtype)))

    def average(self, new: Tensor, beta: float) -> None:
        words = [self.hi.new_tensor(word) for word in double_word_constant(beta, self.hi.dtype)]
        self._keep(multiply_double_words(self.hi, self.lo, *words))
        self.add((1 - beta) * new)

    def _keep(self, pair: tuple[Tensor, Tensor]) -> None:
        self.hi.copy_(pair[0])
        self.lo.copy_(pair[1])


class ReleasedProduct(Pair):
    """A product with β2 as the code released with the paper computes it.

    It differs from the paper's algorithm in three ways. Let b = RN(β2) be the factor's first word.

    - The first product is written over the factor that it is made of, so that its "rounding error" comes
      out as RN(v b) b − RN(v b), about −(1 − β2) v: the second moment decays once more.
    - The last step writes over its input as well: what was added to hi is not taken from lo and counts twice.
    - The second word of β2 is what it lacks in torch's default dtype, not in the tensor's own. With float32
      it is 0 for a bfloat16 tensor, whose b is 1 for β2 = 0.999: nothing decays at all.

    Args:
        default_dtype: torch's default dtype while the optimizer runs.
    """

    default_dtype: torch.dtype

    def average(self, new: Tensor, beta: float) -> None:
        b = self.hi.new_tensor(beta)
        missing = self.hi.new_tensor(beta - torch.tensor(beta, dtype=self.default_dtype).item())
        product = self.hi * b
        wrong_error = torch.addcmul(-product, product, b)
        lo = self.lo * b + product * missing + wrong_error
        self._keep((product + lo, lo))
        self.add((1 - beta) * new)


class ReleasedInBfloat16(ReleasedProduct):
    default_dtype = torch.bfloat16


class ReleasedInFloat32(ReleasedProduct):
    default_dtype = torch.float32


Keeping = Callable[[Tensor, torch.Generator], Kept]


@dataclass(frozen=True)
class Making:
    """How a strategy keeps weights and moments.

    Attributes:
        weights: how weights are kept.
        first, second: how the moments are.
        moments: their dtype; that of the weights if None.
    """

    weights: Keeping = Kept
    first: Keeping = Kept
    second: Keeping = Kept
    moments: torch.dtype | None = None


@dataclass
class Measured:
    """Sums over the elements of one step's update, of D as intended and D̂ as it was kept."""

    intended: float = 0.0
    along: float = 0.0
    asked: int = 0
    lost: int = 0

    def count(self, intended: Tensor, moved: Tensor) -> None:
        self.intended += intended.double().square().sum().item()
        self.along += (intended.double() * moved.double()).sum().item()
        self.asked += int((intended != 0).sum())
        self.lost += int(((intended != 0) & (moved == 0)).sum())


class EagerAdamW:
    """AdamW with decoupled weight decay and bias correction, as torch.optim.AdamW defines it.

    Args:
        parameters: bfloat16.
        making: how their values and moments are kept.
        betas: coefficients of the moments.
        weight_decay: decoupled.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        making: Making,
        betas: tuple[float, float],
        weight_decay: float,
    ) -> None:
        self.parameters, self.betas, self.weight_decay = parameters, betas, weight_decay
        self.steps = 0
        values = [p.data for p in parameters]
        self.generator = torch.Generator(values[0].device)
        self.weights = [making.weights(p, self.generator) for p in values]
        moments = [torch.zeros_like(p, dtype=making.moments or p.dtype) for p in values]
        self.first = [making.first(m, self.generator) for m in moments]
        self.second = [making.second(m.clone(), self.generator) for m in moments]

    @torch.no_grad()
    def step(self, lr: float, measured: Measured | None = None) -> None:
        """One step with the parameters' gradients; what becomes of the update is added to `measured`."""
        self.generator.manual_seed(self.steps)
        self.steps += 1
        for parameter, weight, first, second in zip(
            self.parameters, self.weights, self.first, self.second, strict=True
        ):
            assert parameter.grad is not None
            gradient = parameter.grad.float()
            if measured is not None:
                before = weight.value()
                exact = [
                    beta * moment.value() + (1 - beta) * new
                    for beta, moment, new in zip(
                        self.betas, (first, second), (gradient, gradient * gradient), strict=True
                    )
                ]
                intended = self._update(lr, before, *exact)
            first.average(gradient, self.betas[0])
            second.average(gradient * gradient, self.betas[1])
            weight.add(self._update(lr, weight.value(), first.value(), second.value()))
            if measured is not None:
                measured.count(intended, weight.value().double() - before.double())

    def _update(self, lr: float, weight: Tensor, first: Tensor, second: Tensor) -> Tensor:
        corrected = [1 - beta**self.steps for beta in self.betas]
        denominator = (second / corrected[1]).sqrt() + EPS
        return -lr * (first / corrected[0] / denominator + self.weight_decay * weight)

    @torch.no_grad()
    def load_weights(self, weights: Sequence[Tensor]) -> None:
        """Start from float32 weights."""
        for kept, weight in zip(self.weights, weights, strict=True):
            kept.store(weight.to(kept.hi.device))

    def tensors(self) -> list[Tensor]:
        """All that is kept, the weights included."""
        return [tensor for kept in (*self.weights, *self.first, *self.second) for tensor in kept.tensors()]

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "tensors": self.tensors()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]
        for mine, loaded in zip(self.tensors(), state["tensors"], strict=True):
            mine.copy_(loaded)
