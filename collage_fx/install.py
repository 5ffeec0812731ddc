"""``install(optimizer)``: make the compiled step the optimizer's own ``step``, for every caller.

``torch.compile(optimizer.step, backend=...)`` returns a callable, for training loops that you write yourself.
A trainer calls ``optimizer.step(closure)``, a scheduler wraps that method, a checkpoint makes state by it. So
:func:`install` sets a method on the one optimizer. Its class, its hooks, its state dict and torch stay
unchanged.

If the step calls its closure first, the closure is called before the compiled step, eagerly, as the trainer
means it: Dynamo does not trace a forward and a backward pass. The optimizer's own hooks run around the step,
too.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, Protocol, TypeVar, cast, get_args

import torch
from torch.optim import Optimizer
from typing_extensions import Unpack

from collage_fx.backend import CollageBackend
from collage_fx.capture import (
    calls_closure_first,
    forget_compiled_step,
    note_installed,
    refuse_devices,
    refuse_unknown_torch,
)
from collage_fx.choices import Strategy
from collage_fx.errors import InvalidOptionError, UnsupportedOptimizerError
from collage_fx.graph import Role
from collage_fx.numerics import is_low_precision
from collage_fx.options import GivenOptions, Options, refuse_unknown
from collage_fx.state import (
    carry_along,
    forget_compiled,
    has_error_terms,
    known_tensors,
    optimizers_among,
    parameter_names,
    reset_error_terms,
)
from collage_fx.torch_compat import WeakBackend, has_foreign_step, own_step, remove_own_step, set_own_step

log = logging.getLogger("collage_fx")

#: Class that passes steps on -> attribute with the optimizer, or optimizers, that it passes them to. Classes
#: are named, not imported: their packages may not be installed.
WRAPPERS = {
    "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer": "optim",
    "torch.distributed.optim.post_localSGD_optimizer.PostLocalSGDOptimizer": "optim",
    "accelerate.optimizer.AcceleratedOptimizer": "optimizer",
    "lightning.pytorch.core.optimizer.LightningOptimizer": "optimizer",
    "pytorch_lightning.core.optimizer.LightningOptimizer": "optimizer",
    "torchtitan.components.optimizer.OptimizersContainer": "optimizers",
    "torchtitan.components.optimizer.optimizer.OptimizersContainer": "optimizers",
    "transformers.trainer_pt_utils.LayerWiseDummyOptimizer": "optimizer_dict",
    "deepspeed.runtime.base_optimizer.DeepSpeedOptimizer": "optimizer",
    "deepspeed.runtime.DeepSpeedOptimizer": "optimizer",
}

#: Strategies, from no error terms to error terms of all state.
STRATEGIES = get_args(Strategy)

#: Attribute of the ``__init__`` of an installed class.
MARK = "__collage_fx_installs__"

Installed = TypeVar("Installed")


class InstallOptions(GivenOptions, total=False):
    """Options of :func:`install` as keywords, for functions that pass them on."""

    backend: CollageBackend | None


def install(
    optimizer: Installed, *, backend: CollageBackend | None = None, **options: Unpack[GivenOptions]
) -> Installed:
    """Make ``optimizer.step`` a compiled, compensated step, for every caller from now on.

    One line of a program: ``collage_fx.install(opt)``. The first step compiles. The bits are those of
    ``torch.compile(opt.step, backend=...)``.

    Args:
        optimizer: any optimizer, with schedulers or without, before its first step or after; or an optimizer
            of accelerate, Lightning, torchtitan or ``ZeroRedundancyOptimizer`` that passes its steps on to
            others, which are installed then. Or a class of your own, as by a decorator: each of its
            optimizers is installed when it is made.
        backend: a backend for several optimizers, with one report. By default each optimizer has its own,
            which :func:`backend_of` returns.
        options: options of :class:`CollageBackend`, such as ``strategy="light"``, for a backend of its own.

    Returns:
        ``optimizer``, installed anew if it was before. A closure is called once, before the compiled step, if
        the class's own step does so; a step that calls it later or several times is given it, as SAM's is.

    Raises:
        CollageError: somebody else has given the optimizer a step of its own, which would no longer be
            called; or both a backend and options are given, or an option that does not exist; or a bfloat16
            or float16 parameter is on MPS or XPU. Nothing has changed.
    """
    if backend is not None and options:
        raise InvalidOptionError(
            "install() was given a backend, and options of a backend",
            where=next(iter(options)),
            remedy="give the options to the backend: install(optimizer, backend=CollageBackend(...))",
        )
    refuse_unknown(options)
    if isinstance(optimizer, type):
        return cast(Installed, _install_class(optimizer, backend, options))
    chosen = backend or CollageBackend(**options)
    refuse_unknown_torch()
    stepped = list(inner_optimizers(optimizer))
    for each in stepped:
        _refuse_foreign_step(each)
        _refuse_without_step(each)
        refuse_devices(each)
    for each in stepped:
        _install(each, chosen)
    return optimizer


def uninstall(optimizer: Installed) -> Installed:
    """Give an optimizer its eager step back. It continues from ``hi``, without error terms.

    Args:
        optimizer: argument of :func:`install`; anything that is not installed stays unchanged.

    Returns:
        ``optimizer``.
    """
    if isinstance(optimizer, type):
        _uninstall_class(optimizer)
        return optimizer
    for each in inner_optimizers(optimizer):
        if isinstance(step := own_step(each), CompiledStep):
            if step.release is not None:
                step.release.remove()
            remove_own_step(each)
            forget_compiled_step(each)
            forget_compiled(each)
            for known in known_tensors({"self": each, **optimizers_among(vars(each))}).values():
                reset_error_terms(known.tensor)
    return optimizer


def backend_of(optimizer: Any) -> CollageBackend:
    """Return the backend of an installed optimizer, for ``backend_of(optimizer).report()``.

    Raises:
        CollageError: the optimizer is not installed.
    """
    for each in inner_optimizers(optimizer):
        if isinstance(step := own_step(each), CompiledStep):
            return step.backend
    raise UnsupportedOptimizerError(
        f"this {type(optimizer).__name__} is not installed",
        where="backend_of",
        remedy="call collage_fx.install(optimizer) before",
    )


class Release(Protocol):
    """Handle that steps some parameters in the backward pass: see ``gradient_release.py``."""

    def finish(self, step: Callable[[], Any]) -> Any:
        """Step the other parameters by a compiled step, and return its result."""

    def remove(self) -> None:
        """Make the optimizer step after the backward pass again."""


class CompiledStep:
    """The ``step`` of an installed optimizer: its closure, then the compiled step of its class.

    Attributes:
        backend: the backend.
        release: handle that steps some parameters in the backward pass; None if all are stepped here.
    """

    def __init__(self, optimizer: Optimizer, backend: CollageBackend) -> None:
        self.backend = backend
        self.release: Release | None = None
        #: Compiled step of the parameters that have a gradient.
        self.run = torch.compile(MethodType(type(optimizer).step, optimizer), backend=WeakBackend(backend))
        self._calls_closure_first = calls_closure_first(type(optimizer))

    def __call__(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Take a step; return the closure's result, or without a closure the result of ``step``."""
        if closure is None:
            return self._step_of_the_rest(*args, **kwargs)
        if not self._calls_closure_first:
            return self.run(closure, *args, **kwargs)
        with torch.enable_grad():
            loss = closure()
        self._step_of_the_rest(*args, **kwargs)
        return loss

    def _step_of_the_rest(self, *args: Any, **kwargs: Any) -> Any:
        """Step the parameters that have not been stepped in the backward pass."""
        if self.release is None:
            return self.run(*args, **kwargs)
        return self.release.finish(functools.partial(self.run, *args, **kwargs))


def inner_optimizers(optimizer: Any) -> Iterator[Optimizer]:
    """Yield the optimizers that ``optimizer.step`` ends in: itself, unless it passes its steps on."""
    names = (f"{cls.__module__}.{cls.__qualname__}" for cls in type(optimizer).__mro__)
    attribute = next((WRAPPERS[name] for name in names if name in WRAPPERS), None)
    if attribute is not None:
        inner = getattr(optimizer, attribute)
        inner = list(inner.values()) if isinstance(inner, dict) else inner
        for each in inner if isinstance(inner, (list, tuple)) else [inner]:
            yield from inner_optimizers(each)
    elif isinstance(optimizer, Optimizer):
        yield optimizer
    else:
        is_step = isinstance(getattr(optimizer, "__self__", None), Optimizer)
        raise UnsupportedOptimizerError(
            f"{type(optimizer).__name__} is not a torch.optim.Optimizer",
            where="install",
            remedy="pass the optimizer itself, not its step: install(optimizer)"
            if is_step
            else "pass the optimizer: install(optimizer); of a wrapper, the optimizer that it holds",
        )


def _refuse_foreign_step(optimizer: Optimizer) -> None:
    """Raise if somebody else has given the optimizer a step of its own."""
    if has_foreign_step(optimizer):
        raise UnsupportedOptimizerError(
            f"this {type(optimizer).__name__} has a step of its own already, which would no longer be called",
            where="optimizer.step",
            remedy="install the optimizer first, so that the other step is put around the compiled one",
        )


def _refuse_without_step(optimizer: Optimizer) -> None:
    """Raise if the optimizer's class has no ``step``."""
    if inspect.unwrap(type(optimizer).step) is inspect.unwrap(Optimizer.step):
        raise UnsupportedOptimizerError(
            f"{type(optimizer).__name__} has no step: it updates parameters elsewhere, as by hooks in the "
            "backward pass, where nothing can be compensated",
            where=f"{type(optimizer).__name__}.step",
            remedy="train with an optimizer that updates parameters in its step",
        )


def _install(optimizer: Optimizer, backend: CollageBackend) -> None:
    """Install one optimizer."""
    if isinstance(before := own_step(optimizer), CompiledStep):
        if before.release is not None:
            before.release.remove()
        forget_compiled_step(optimizer)
        _drop_terms_of_state(optimizer, before.backend.options, backend.options)
    note_installed(optimizer, backend)
    set_own_step(optimizer, CompiledStep(optimizer, backend))
    parameters = [parameter for _, parameter in parameter_names(optimizer)]
    log.info(
        "%s: its first step compiles it with %r; %d of %d parameters are bfloat16 or float16",
        type(optimizer).__name__,
        backend,
        sum(is_low_precision(parameter.dtype) for parameter in parameters),
        len(parameters),
    )


def _drop_terms_of_state(optimizer: Optimizer, before: Options, now: Options) -> None:
    """Drop the error terms of state if the new strategy keeps fewer of them than the old."""
    if not 0 < STRATEGIES.index(now.strategy) < STRATEGIES.index(before.strategy):
        return
    known = known_tensors({"self": optimizer}).values()
    state = [each for each in known if each.role is Role.STATE and has_error_terms(each.tensor)]
    for each in state:
        reset_error_terms(each.tensor)
    if state:
        log.info(
            "%s: strategy=%r in place of %r: the error terms of %d state tensors are dropped, %s first",
            type(optimizer).__name__,
            now.strategy,
            before.strategy,
            len(state),
            state[0].name,
        )


carry_along(
    "backend",
    lambda optimizer: getattr(own_step(optimizer), "backend", None),
    lambda copy, backend: install(copy, backend=backend),
)


def _install_class(cls: Any, backend: CollageBackend | None, options: GivenOptions) -> Any:
    """Install each optimizer of a class when it is made."""
    if not issubclass(cls, Optimizer) or cls.__module__.startswith("torch."):
        raise UnsupportedOptimizerError(
            f"{cls.__qualname__} is not an optimizer class of your own, of which every use may be changed",
            where="install",
            remedy="install the optimizers that are made of it, or a class that derives from it",
        )
    _uninstall_class(cls)
    original = cls.__init__

    @functools.wraps(original)
    def __init__(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        install(self, backend=backend, **options)

    setattr(__init__, MARK, True)
    cls.__init__ = __init__
    return cls


def _uninstall_class(cls: Any) -> None:
    """Undo :func:`_install_class`."""
    if MARK in vars(vars(cls).get("__init__", cls)):
        cls.__init__ = cls.__init__.__wrapped__
