"""An optimizer with a compiled step, for tests: feed it, look at every tensor, go back in time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from collage_fx import CollageBackend
from collage_fx.choices import Arithmetic, Strategy
from collage_fx.state.error_terms import record_of

__all__ = ["Case", "CompiledOptimizer", "Tensors", "gradients"]

#: Name -> contents, such as ``"0.exp_avg_sq"`` and ``"0.exp_avg_sq.lo"``.
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One way to compile a step."""

    strategy: Strategy
    arithmetic: Arithmetic
    error_format: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return "-".join(
            (self.strategy, self.arithmetic, self.error_format, str(self.dtype).removeprefix("torch."))
        )

    def options(self) -> dict[str, Any]:
        return {"strategy": self.strategy, "arithmetic": self.arithmetic, "error_format": self.error_format}


class CompiledOptimizer:
    """Parameters with N(0, 1) entries, their optimizer and its compiled step.

    Args:
        shapes: of the parameters.
        make: parameters -> optimizer.
        backend: what ``torch.compile`` is given.
        seed: of the parameters' values, drawn on the CPU whatever the device.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
        backend: CollageBackend,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        torch._dynamo.reset()
        generator = torch.Generator().manual_seed(seed)
        self.parameters = [
            torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in shapes
        ]
        self.optimizer = make(self.parameters)
        self.backend = backend
        self.compiled = torch.compile(self.optimizer.step, backend=backend)

    def step(self, grads: Sequence[Tensor]) -> None:
        for parameter, grad in zip(self.parameters, grads, strict=True):
            parameter.grad = grad.to(parameter.device, parameter.dtype)
        self.compiled()

    def live(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters, states and auxiliaries themselves."""
        for i, parameter in enumerate(self.parameters):
            for name, tensor in {"p": parameter, **self.optimizer.state[parameter]}.items():
                if isinstance(tensor, Tensor):
                    yield f"{i}.{name}", tensor.detach()
                    if (expansion := record_of(tensor)) is not None:
                        specs = expansion.format.auxiliaries(tensor)
                        for spec, auxiliary in zip(specs, expansion.auxiliaries, strict=True):
                            yield f"{i}.{name}.{spec.name}", auxiliary

    def tensors(self) -> Tensors:
        """Copies of them."""
        return {name: tensor.clone() for name, tensor in self.live()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what :meth:`tensors` gave, in place."""
        for name, tensor in self.live():
            tensor.copy_(tensors[name])
        self._accept()

    def start(self) -> Tensors:
        """Take a first step, in which states are born and the step is compiled, and take it back."""
        before = [parameter.detach().clone() for parameter in self.parameters]
        self.step([torch.ones(parameter.shape) for parameter in self.parameters])
        for name, tensor in self.live():
            if not name.endswith(".p"):
                tensor.zero_()
        for parameter, value in zip(self.parameters, before, strict=True):
            parameter.data.copy_(value)
        self._accept()
        return self.tensors()

    def _accept(self) -> None:
        """Let error terms that have been written belong to the values beside them, which have been, too."""
        for parameter in self.parameters:
            for tensor in (parameter, *self.optimizer.state[parameter].values()):
                if isinstance(tensor, Tensor) and (expansion := record_of(tensor)) is not None:
                    expansion.drop_claim()


def gradients(
    shapes: Sequence[tuple[int, ...]], steps: int, *, seed: int = 1, scale: float = 1.0
) -> Iterator[list[Tensor]]:
    """N(0, scale²) gradients for every step, float32 on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield [torch.randn(shape, generator=generator) * scale for shape in shapes]
