"""Optimizers that a user would otherwise write: eager Collage, Kahan summation to be compiled, and Lion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx.numerics.arithmetic import double_word_constant, grow, multiply_double_words

#: Of every AdamW here.
LR, BETAS, EPS, WEIGHT_DECAY = 1e-4, (0.9, 0.999), 1e-8, 0.1


class EagerCollage:
    """AdamW by the algorithms of the paper (arXiv 2405.03637), one eager operation after the other.

    As the published code runs, but for its faults: sums are TwoSum, so that updates may be larger than
    weights, and the product of the second moment with β2 reads both of its factors before it writes.

    Args:
        parameters: bfloat16.
        plus: keep an error term of the second moment too.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], *, plus: bool) -> None:
        self.parameters, self.plus, self.steps = parameters, plus, 0
        self.state = [[torch.zeros_like(p.data) for _ in range(4 if plus else 3)] for p in parameters]
        high, low = double_word_constant(BETAS[1], torch.bfloat16)
        self.beta2 = [torch.tensor(word, dtype=torch.bfloat16) for word in (high, low)]

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        for parameter, state in zip(self.parameters, self.state, strict=True):
            assert parameter.grad is not None
            self._update(parameter.data, parameter.grad, *state)

    def _update(self, p: Tensor, g: Tensor, p_lo: Tensor, m: Tensor, v: Tensor, *v_lo: Tensor) -> None:
        beta1, beta2 = BETAS
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        squared = (1 - beta2) * g * g
        if self.plus:
            _store(grow(*multiply_double_words(v, v_lo[0], *self.beta2), squared), v, v_lo[0])
        else:
            v.mul_(beta2).add_(squared)
        mean = m / (1 - beta1**self.steps)
        denominator = (v / (1 - beta2**self.steps)).sqrt_().add_(EPS)
        _store(grow(p, p_lo, -LR * (mean / denominator + WEIGHT_DECAY * p)), p, p_lo)


def _store(pair: tuple[Tensor, Tensor], hi: Tensor, lo: Tensor) -> None:
    hi.copy_(pair[0])
    lo.copy_(pair[1])


class KahanAdamW:
    """The textbook's AdamW with Kahan summation, compiled.

    Inductor drops the roundings that the compensation is made of, but with ``emulate_precision_casts``. Bias
    corrections are computed outside, so that the step is compiled once and its kernels hold no powers.

    Args:
        parameters: bfloat16.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.parameters, self.steps = parameters, 0
        values = [p.data for p in parameters]
        self.state = [[torch.zeros_like(p) for p in values] for _ in range(3)]
        self.kernel = torch.compile(_kahan_adamw, options={"emulate_precision_casts": True})

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        corrections = [torch.tensor(1 - beta**self.steps) for beta in BETAS]
        values = [p.data for p in self.parameters]
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        compensations, means, squares = self.state
        self.kernel(values, gradients, compensations, means, squares, *corrections)


def _kahan_adamw(
    parameters: list[Tensor],
    gradients: list[Tensor],
    compensations: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    correction1: Tensor,
    correction2: Tensor,
) -> None:
    beta1, beta2 = BETAS
    for p, g, c, m, v in zip(parameters, gradients, compensations, means, squares, strict=True):
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        denominator = (v / correction2).sqrt() + EPS
        c.add_(-LR * (m / correction1 / denominator + WEIGHT_DECAY * p))
        old = p.clone()
        p.add_(c)
        c.add_(old - p)


class Lion(Optimizer):
    """Sign of the interpolated momentum (arXiv 2302.06675)."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                update = (0.9 * state["exp_avg"] + 0.1 * p.grad).sign()
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"])
                state["exp_avg"].lerp_(p.grad, 0.01)
