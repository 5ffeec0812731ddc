"""Optimizers that a test makes: converted, installed, and compared by how far their parameters have moved."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import collage_fx

__all__ = ["Made", "inputs_follow_parameters", "moved", "watch"]

#: Elements of a parameter, and parameters of a test, whose values are written down.
ELEMENTS, PARAMETERS = 64, 8


@dataclass
class Made:
    """Optimizers made since the last ``clear``.

    Attributes:
        install: install each optimizer.
        dtype: of parameters that were float32; None leaves them.
        shaken: seed of changes by an ulp, of float32 parameters at the start and of gradients before steps,
            and of other random numbers in steps; None: no changes.
        is_on: whether optimizers are taken in: not those that a suite makes while pytest collects.
    """

    install: bool
    dtype: torch.dtype | None
    shaken: int | None = None
    is_on: bool = False
    optimizers: list[Optimizer] = field(default_factory=list)
    #: Parameters with their values at the start.
    starts: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def clear(self) -> None:
        self.optimizers.clear()
        self.starts.clear()

    def add(self, optimizer: Optimizer) -> None:
        """Take in an optimizer that has just been made."""
        if not self.is_on:
            return
        if self.shaken is not None:
            generator = torch.Generator().manual_seed(self.shaken)
            _shake(_parameters(optimizer), generator)
            optimizer.register_step_pre_hook(
                lambda each, *_: _shake([p.grad for p in _parameters(each) if p.grad is not None], generator)
            )
        _seed_steps(optimizer, 0 if self.shaken is None else 1000 * (1 + self.shaken))
        known = {id(parameter) for parameter, _ in self.starts}
        for parameter in _parameters(optimizer):
            if id(parameter) not in known:
                self.starts.append((parameter, parameter.detach().clone()))
        self.optimizers.append(optimizer)
        if self.install:
            for inner in _held(optimizer):  # the user steps the outer one
                collage_fx.uninstall(inner)
            collage_fx.install(optimizer)

    def convert(self, optimizer: Optimizer) -> None:
        """Give an optimizer's float32 parameters the low-precision dtype; in place, as ``module.to`` does."""
        if self.dtype is None or not self.is_on:
            return
        for parameter in _parameters(optimizer):
            if parameter.dtype != torch.float32 or type(parameter) not in (Tensor, torch.nn.Parameter):
                continue
            gradient, parameter.grad = parameter.grad, None
            parameter.data = parameter.data.to(self.dtype)
            if gradient is not None:
                parameter.grad = gradient.to(self.dtype)


def watch(made: Made) -> None:
    """Report all optimizers to ``made``, those of classes that do not exist yet, too."""
    base = Optimizer.__init__

    @functools.wraps(base)
    def __init__(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        base(self, *args, **kwargs)
        made.convert(self)  # before the subclass makes state

    def __init_subclass__(cls: type[Optimizer], /, **kwargs: Any) -> None:
        super(Optimizer, cls).__init_subclass__(**kwargs)
        _watch_class(cls, made)

    Optimizer.__init__ = __init__  # type: ignore[method-assign]
    Optimizer.__init_subclass__ = classmethod(__init_subclass__)  # type: ignore[assignment]
    for cls in set(_subclasses(Optimizer)):
        _watch_class(cls, made)


def _subclasses(cls: type[Optimizer]) -> Iterator[type[Optimizer]]:
    for each in cls.__subclasses__():
        yield each
        yield from _subclasses(each)


def _watch_class(cls: type[Optimizer], made: Made) -> None:
    """Report an optimizer once the outermost ``__init__`` of its class has returned."""
    if "__init__" not in vars(cls):
        return
    before: Callable[..., None] = vars(cls)["__init__"]

    @functools.wraps(before)
    def __init__(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs)
        if type(self).__init__ is __init__:
            made.add(self)

    cls.__init__ = __init__  # type: ignore[method-assign]


def _held(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield the optimizers that an optimizer holds."""
    for value in list(vars(optimizer).values()):
        for each in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(each, Optimizer):
                yield each
                yield from _held(each)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    groups = getattr(optimizer, "param_groups", [])
    return [p for group in groups for p in group["params"] if isinstance(p, Tensor)]


def _seed_steps(optimizer: Optimizer, seed: int) -> None:
    """Seed each step, so that what is drawn after it does not depend on how many numbers it draws."""
    seeds = itertools.count(seed)
    before: list[Tensor] = []

    def begin(*_: Any) -> None:
        before.append(torch.get_rng_state())
        torch.manual_seed(next(seeds))

    optimizer.register_step_pre_hook(begin)
    optimizer.register_step_post_hook(lambda *_: torch.set_rng_state(before.pop()))


@torch.no_grad()
def _shake(tensors: Iterable[Tensor], generator: torch.Generator) -> None:
    """Change the elements of dense float32 tensors by an ulp, up or down at random."""
    for tensor in tensors:
        if tensor.dtype == torch.float32 and tensor.layout == torch.strided:
            up = torch.rand(tensor.shape, generator=generator) < 0.5
            tensor.copy_(torch.nextafter(tensor, torch.where(up, torch.inf, -torch.inf)))


def moved(starts: Sequence[tuple[Tensor, Tensor]]) -> list[list[float]]:
    """Return, of some elements of each parameter, the whole value less the value at the start."""
    found: list[list[float]] = []
    for parameter, start in starts[:PARAMETERS]:
        if parameter.is_sparse or parameter.is_complex() or parameter.shape != start.shape:
            found.append([])
            continue
        value = collage_fx.full_value(parameter).detach().double() - start.double()
        found.append(value.flatten()[:ELEMENTS].tolist())
    return found


def inputs_follow_parameters() -> None:
    """Cast float inputs of every module to the dtype of its parameters, and those of losses to float32."""
    torch.nn.modules.module.register_module_forward_pre_hook(_cast_inputs)


def _cast_inputs(module: torch.nn.Module, args: tuple[Any, ...]) -> Any:
    dtype = next(iter(_float_dtypes(module.parameters(recurse=False))), None)
    if dtype is None:
        if not type(module).__name__.endswith("Loss"):
            return None
        dtype = torch.float32
    return tuple(
        arg.to(dtype) if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args
    )


def _float_dtypes(tensors: Iterable[Tensor]) -> Iterator[torch.dtype]:
    return (each.dtype for each in tensors if each.is_floating_point())
