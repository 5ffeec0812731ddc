"""``install(optimizer)``: make the compiled step the optimizer's own ``step``, for every caller.

``torch.compile(optimizer.step, backend=...)`` returns a callable, for training loops that you write yourself.
A trainer calls ``optimizer.step(closure)``, a scheduler wraps that method, a checkpoint makes state by it. So
:func:`install` sets a method on the one optimizer. Class, hooks, state dict and torch stay unchanged.

If the step calls its closure first, the closure is called before the compiled step, eagerly, as the trainer
means it: Dynamo does not trace a forward and a backward pass. The compiled step is given a closure that
returns the same result, or None if it would only return it. The optimizer's own hooks run around the step.

``optimizer.step`` may be an attribute that the program has set. A program that sets it afterwards is told so:
Note [Replaced steps] in ``torch_compat/own_steps.py``.
"""

from __future__ import annotations

import dis
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from types import CellType, MappingProxyType, MethodType
from typing import Any, TypeVar, cast, get_args

import torch
from torch.optim import Optimizer
from typing_extensions import Unpack

from collage_fx import capture, errors, state, torch_compat
from collage_fx.backend import CollageBackend
from collage_fx.choices import Strategy, takes_options
from collage_fx.graph import Role
from collage_fx.numerics import is_low_precision
from collage_fx.options import GivenOptions, Options, refuse_unknown
from collage_fx.report import Updates, try_updates
from collage_fx.torch_compat import version_of

log = logging.getLogger("collage_fx")

#: Class that passes steps on -> attribute with the optimizer, or optimizers, that it passes them to. Classes
#: are named, not imported: their packages may not be installed.
WRAPPERS = {
    "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer": "optim",
    "torch.distributed.optim.post_localSGD_optimizer.PostLocalSGDOptimizer": "optim",
    "accelerate.optimizer.AcceleratedOptimizer": "optimizer",
    "lightning.fabric.wrappers._FabricOptimizer": "optimizer",
    "lightning.pytorch.core.optimizer.LightningOptimizer": "optimizer",
    "pytorch_lightning.core.optimizer.LightningOptimizer": "optimizer",
    "torchtitan.components.optimizer.OptimizersContainer": "optimizers",
    "torchtitan.components.optimizer.optimizer.OptimizersContainer": "optimizers",
    "transformers.trainer_pt_utils.LayerWiseDummyOptimizer": "optimizer_dict",
    "deepspeed.runtime.base_optimizer.DeepSpeedOptimizer": "optimizer",
    "deepspeed.runtime.DeepSpeedOptimizer": "optimizer",
}

#: Attribute of the ``__init__`` of an installed class: the replaced ``__init__``; None if it was inherited.
MARK = "__collage_fx_installs__"

Installed = TypeVar("Installed")


class InstallOptions(GivenOptions, total=False):
    """Options of :func:`install` as keywords, for functions that pass them on."""

    backend: CollageBackend | None


@takes_options
def install(
    optimizer: Installed, *, backend: CollageBackend | None = None, **options: Unpack[GivenOptions]
) -> Installed:
    """Make ``optimizer.step`` a compiled, compensated step, for every caller from now on.

    One line of a program: ``collage_fx.install(opt)``. The first step compiles. The bits are those of
    ``torch.compile(opt.step, backend=...)``.

    Args:
        optimizer: any optimizer, with schedulers or without, before its first step or after; its step is
            ``optimizer.step``, also if the program has set that attribute. Or an optimizer
            of accelerate, Lightning, torchtitan or ``ZeroRedundancyOptimizer`` that passes its steps on to
            others, which are installed then. Or a class of your own, as by a decorator: each of its
            optimizers is installed when it is made.
        backend: a backend for several optimizers, with one report. By default each optimizer has its own,
            which :func:`backend_of` returns; installed again, it has another, with the same options.
        options: options of :class:`CollageBackend`, such as ``strategy="light"``, for a backend of its own.

    Returns:
        ``optimizer``, installed anew if it was before. If the step calls its closure once and first, the
        closure is called before the compiled step, which is given the result. A step that calls it later or
        several times is given the closure itself, as SAM's is.

    Raises:
        CollageError: the optimizer's step can only raise, or the object does not call
            ``Optimizer.__init__``; or both a backend and options are given, or an option that does not exist;
            or a bfloat16 or float16 parameter is on MPS or XPU. Nothing has changed.
    """
    if isinstance(optimizer, type):
        _refuse_options(backend, options)
        return cast(Installed, _install_class(optimizer, backend, options))
    stepped, chosen = accepted(optimizer, backend, options)
    is_asked = backend is not None or bool(options)
    for each in stepped:
        before = each.step
        kept = None if is_asked else kept_backend(each)
        _install(each, chosen if kept is None else CollageBackend(**kept.options.given))
        if each is not optimizer:
            _rebind(vars(optimizer), before, each.step)
    return optimizer


def _refuse_options(backend: CollageBackend | None, options: Mapping[str, Any]) -> None:
    """Raise for options that do not exist, or that are given beside a backend."""
    if backend is not None and options:
        met = "install() was given a backend, and options of a backend"
        remedy = "give the options to the backend: install(optimizer, backend=CollageBackend(...))"
        raise errors.InvalidOptionError(met, where=next(iter(options)), remedy=remedy)
    refuse_unknown(options, install)


def accepted(
    optimizer: Any, backend: CollageBackend | None, options: GivenOptions
) -> tuple[list[Optimizer], CollageBackend]:
    """Return the optimizers that :func:`install` would compile, and their backend; raise as it does."""
    _refuse_options(backend, options)
    chosen = backend or CollageBackend(**options)
    capture.refuse_unknown_torch()
    stepped = list(inner_optimizers(optimizer))
    for each in stepped:
        capture.refuse_uninitialized(each)
        torch_compat.note_true_step(each)
        _refuse_without_step(each)
        capture.refuse_devices(each)
    return stepped, chosen


def _rebind(attributes: dict[str, Any], before: Any, now: Any) -> None:
    """Replace a step that a wrapper has kept, as an attribute or in a function of its own."""
    for name, value in attributes.items():
        if callable(value) and value == before:  # of an array, == is no single answer
            attributes[name] = now
        cells = getattr(value, "__closure__", None) or ()
        for cell in (each for each in cells if each != CellType()):  # an empty cell has no contents
            if callable(cell.cell_contents) and cell.cell_contents == before:
                cell.cell_contents = now


def join(optimizer: Any, given: Mapping[str, Any], default: CollageBackend | None = None) -> CollageBackend:
    """Install an optimizer, unless another part of the program has, and return the backend that it has now.

    Options that were given there stay: see :func:`kept_backend`. ``default`` is the backend to install it
    with, of the options that are ``given`` here; None to make one.
    """
    stepped = list(inner_optimizers(optimizer))
    kept = [kept_backend(each, given) for each in stepped]
    backend = next(filter(None, kept), default)
    for each, has in zip(stepped, kept, strict=True):
        if has is None:
            options = {"backend": backend} if backend else given
            backend = backend_of(install(each, **cast(InstallOptions, options)))
        elif has is not backend_of(each):
            install(each, backend=has)
    assert backend is not None
    return backend


def kept_backend(optimizer: Optimizer, given: Mapping[str, object] = MappingProxyType({})) -> Any:
    """Return the backend of an installed optimizer, or the given one of the same options; None for others.

    Raises:
        InvalidOptionError: the optimizer has been installed with another value of an option.
    """
    if not isinstance(step := torch_compat.own_step(optimizer), CompiledStep):
        return None
    has = step.backend.options
    named = {name: value for name, value in given.items() if name != "backend" or value is not None}
    if isinstance(backend := named.get("backend"), CollageBackend):
        named, options = backend.options.given, backend.options
    else:
        options = CollageBackend(**cast(GivenOptions, named)).options
    asked = {name: getattr(options, name) for name in named}
    for name, value in asked.items():
        if value != getattr(has, name):
            raise errors.InvalidOptionError(
                f"{name}={value!r} is asked of an optimizer that has been installed with "
                f"{name}={getattr(has, name)!r}",
                where=name,
                remedy="ask for it in one place; or change it before by "
                f"collage_fx.install(optimizer, {name}={value!r})",
            )
    return backend or step.backend


def uninstall(optimizer: Installed) -> Installed:
    """Give an optimizer its eager step back, and return the optimizer.

    It continues from ``hi``, without error terms. Anything that is not installed stays unchanged.
    """
    if isinstance(optimizer, type):
        _uninstall_class(optimizer)
        return optimizer
    for each in inner_optimizers(optimizer):
        if isinstance(torch_compat.own_step(each), CompiledStep):
            remove_release(each)
            torch_compat.remove_own_step(each)
            capture.forget_compiled_step(each)
            state.files_of(each).is_compiled = False
            for known in state.known_tensors({"self": each, **state.optimizers_among(vars(each))}).values():
                state.reset_error_terms(known.tensor)
    return optimizer


def backend_of(optimizer: Any) -> CollageBackend:
    """Return the backend of an installed optimizer, for ``backend_of(optimizer).report()``.

    Raises:
        CollageError: the optimizer is not installed.
    """
    for each in inner_optimizers(optimizer):
        if isinstance(step := torch_compat.own_step(each), CompiledStep):
            return step.backend
    met = f"this {type(optimizer).__name__} is not installed"
    remedy = "call collage_fx.install(optimizer) before"
    raise errors.UnsupportedOptimizerError(met, where="backend_of", remedy=remedy)


class CompiledStep:
    """The ``step`` of an installed optimizer: its closure, then the compiled step."""

    def __init__(self, optimizer: Optimizer, backend: CollageBackend) -> None:
        self.backend = backend
        #: :class:`~collage_fx.GradientRelease` of parameters that are stepped in the backward pass, or None.
        self.release: Any = None
        step = MethodType(torch_compat.true_step(optimizer), optimizer)
        #: Compiled step of the parameters that have a gradient.
        self.run = torch.compile(step, backend=torch_compat.WeakBackend(backend))
        self._signature = inspect.signature(step)
        self._defaults = {each.name: each.default for each in self._signature.parameters.values()}
        self._first_call = capture.first_call(optimizer)
        self._optimizer = optimizer
        self._calls = 0
        self._reports = len(backend.reports)
        self._updates = torch_compat.records.put(optimizer, Updates())
        self._is_compensated = not backend.compensates

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Take a step; return the result of the optimizer's own step."""
        if not self._calls and self.backend.options.bytes_per_parameter == "auto":
            try_updates(self._optimizer)
        returned = self._step(args, kwargs)
        self._updates.after_step(self._optimizer, self.backend)
        return returned

    def _step(self, args: Any, kwargs: Any) -> Any:
        self._calls += 1
        if not (args or kwargs or self.release):
            return self._run(args, kwargs)
        try:
            given = self._signature.bind(*args, **kwargs)
        except TypeError:  # the arguments do not fit, which Python then tells
            given = None
        first = self._first_call
        if self.release is not None and given is not None:
            returned = first.name if first and first.is_only_returned else None
            told = (name for name, value in given.arguments.items() if value is not None and name != returned)
            self.release.refuse_arguments(told)
        if first is None or given is None or not first.holds({**self._defaults, **given.arguments}):
            return self._run(args, kwargs)
        with torch.enable_grad():
            loss = given.arguments[first.name]()
        given.arguments[first.name] = None if first.is_only_returned else lambda: loss
        returned = self._run(given.args, given.kwargs)
        return loss if first.is_only_returned else returned

    def _run(self, args: Any, kwargs: Any) -> Any:
        """Run the compiled step, for the parameters that have not been stepped in the backward pass.

        Raise if the first step that moves parameters leaves none of them a record.
        """
        if self.release is not None:
            return self.release.finish(functools.partial(self.run, *args, **kwargs))
        if self._is_compensated or not self.backend.options.strict:
            return self.run(*args, **kwargs)
        low = [p for _, p in state.parameter_names(self._optimizer) if is_low_precision(p.dtype)]
        before = [(version_of(p), p.grad) for p in low]
        returned = self.run(*args, **kwargs)
        moved = [
            p
            for p, (version, gradient) in zip(low, before, strict=True)
            if version_of(p) != version and (gradient is not None or p.grad is not None)
        ]  # without a gradient, a closure has moved it
        # A parameter that is overwritten may have no error term, and has a row in a report.
        rows = (row for graph in self.backend.reports[self._reports :] for row in graph.tensors)
        has_row = any(row.role is Role.PARAMETER for row in rows)
        self._is_compensated = has_row or any(state.record_of(p) is not None for p in moved)
        if moved and not self._is_compensated:
            label = type(self._optimizer).__name__
            raise errors.EagerStepError(
                f"the step of {label} has updated parameters by code that this backend has not compiled, "
                "without error terms",
                where=f"{label}.step{_definition(torch_compat.true_step(self._optimizer))}",
                remedy="do not compile the step, or a part of it, by another backend: install(optimizer) "
                "compiles it",
            )
        return returned

    def watch_replacement(self, step: Callable[[], Any], *, may_call_this: bool) -> tuple[Any, bool]:
        """Take a step that has replaced this step; return its result, and whether it called this step.

        Raises:
            EagerStepError: the step cannot call this step, or updates without it; a warning if not strict.
        """
        parameters = [p for _, p in state.parameter_names(self._optimizer)]
        calls, versions = self._calls, list(map(version_of, parameters))
        if not may_call_this:
            self._refuse_replacement(step)
        returned = step()
        has_called_this = self._calls > calls
        if may_call_this and not has_called_this and versions != list(map(version_of, parameters)):
            self._refuse_replacement(step)
        return returned, has_called_this

    def _refuse_replacement(self, step: Any) -> None:
        """Raise, or warn, about a step that has replaced this step."""
        name = codes[-1].co_name if (codes := torch_compat.codes_of(step)) else "another callable"
        label = type(self._optimizer).__name__
        errors.EagerStepError(
            f"the step of this {label} has been replaced after install(), by {name}, which does not call the "
            "compiled step: parameters are updated eagerly, without error terms",
            where=f"{label}.step{_definition(step)}",
            remedy="call collage_fx.install(optimizer) again, below the line that sets optimizer.step: then "
            "that step is compiled",
        ).raise_or_warn(self._optimizer, strict=self.backend.options.strict)


def _definition(step: Any) -> str:
    """Return the file and line where a callable is defined, in brackets; empty if they are not known."""
    codes = torch_compat.codes_of(step)
    return f" ({codes[-1].co_filename}:{codes[-1].co_firstlineno})" if codes else ""


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
        raise errors.UnsupportedOptimizerError(
            f"{type(optimizer).__name__} is not a torch.optim.Optimizer",
            where="install",
            remedy="pass the optimizer itself, not its step: install(optimizer)"
            if is_step
            else "pass the optimizer: install(optimizer); of a wrapper, the optimizer that it holds",
        )


def _refuse_without_step(optimizer: Optimizer) -> None:
    """Raise if the optimizer's step can only raise."""
    code = getattr(inspect.unwrap(torch_compat.true_step(optimizer)), "__code__", None)
    if code is not None and not any(each.opname.startswith("RETURN") for each in dis.get_instructions(code)):
        raise errors.UnsupportedOptimizerError(
            f"{type(optimizer).__name__} has no step, or one that only raises: it updates parameters "
            "elsewhere, as by hooks in the backward pass, where nothing can be compensated",
            where=f"{type(optimizer).__name__}.step",
            remedy="train with an optimizer that updates parameters in its step",
        )


def _install(optimizer: Optimizer, backend: CollageBackend) -> None:
    if isinstance(before := torch_compat.own_step(optimizer), CompiledStep):
        remove_release(optimizer)
        capture.forget_compiled_step(optimizer)
        _drop_terms_of_state(optimizer, before.backend.options, backend.options)
    capture.note_installed(optimizer, backend)
    torch_compat.set_own_step(optimizer, CompiledStep(optimizer, backend))
    are_low = [is_low_precision(parameter.dtype) for _, parameter in state.parameter_names(optimizer)]
    told = "%s: its first step compiles it with %r; %d of %d parameters are bfloat16 or float16"
    log.info(told, type(optimizer).__name__, backend, sum(are_low), len(are_low))


def _drop_terms_of_state(optimizer: Optimizer, before: Options, now: Options) -> None:
    """Drop the error terms of state if the new strategy keeps fewer of them than the old."""
    rank = get_args(Strategy).index  # from no error terms to error terms of all state
    if not 0 < rank(now.strategy) < rank(before.strategy):
        return
    known = state.known_tensors({"self": optimizer}).values()
    dropped = [each for each in known if each.role is Role.STATE and state.has_error_terms(each.tensor)]
    for each in dropped:
        state.reset_error_terms(each.tensor)
    if dropped:
        told = "%s: strategy=%r in place of %r: the error terms of %d state tensors are dropped, %s first"
        name = type(optimizer).__name__
        log.info(told, name, now.strategy, before.strategy, len(dropped), dropped[0].name)


def remove_release(optimizer: Optimizer) -> None:
    """Make an optimizer step after the backward pass, if it does not."""
    if isinstance(step := torch_compat.own_step(optimizer), CompiledStep) and step.release is not None:
        step.release.remove()


def _backend_of_copies(optimizer: Optimizer) -> CollageBackend | None:
    """Return the backend that copies and pickles of an optimizer are installed with; None for no backend."""
    if not isinstance(step := torch_compat.own_step(optimizer), CompiledStep):
        return None
    if step.release is not None:
        step.release.refuse_copy()
    return step.backend


state.carry_along("backend", _backend_of_copies, lambda copy, backend: install(copy, backend=backend))


def _install_class(cls: Any, backend: CollageBackend | None, options: GivenOptions) -> Any:
    if not issubclass(cls, Optimizer) or cls.__module__.startswith("torch."):
        met = f"{cls.__qualname__} is not an optimizer class of your own, of which every use may be changed"
        remedy = "install the optimizers that are made of it, or a class that derives from it"
        raise errors.UnsupportedOptimizerError(met, where="install", remedy=remedy)
    _uninstall_class(cls)
    original = cls.__init__

    @functools.wraps(original)
    def __init__(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        install(self, backend=backend, **options)

    setattr(__init__, MARK, vars(cls).get("__init__"))
    cls.__init__ = __init__
    return cls


def _uninstall_class(cls: Any) -> None:
    if MARK in vars(vars(cls).get("__init__", cls)):
        own = getattr(cls.__init__, MARK)
        del cls.__init__
        if own is not None:
            cls.__init__ = own
