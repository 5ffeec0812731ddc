"""Replacements of functions of torch: each is a value, a :class:`Patch`.

Note [Patches]
--------------
A function of torch is replaced only where torch has no hook. Rules keep replacements from other code:

* A replacement that only this backend's compilations need is *entered* around them (:meth:`Patch.entered`),
  in this thread alone: other threads call the original.
* Another is *installed* by the first use of a name (:meth:`Patch.install`), or by the import (Note [First
  use]); it first tests whether a call concerns this package.
* Each patch states its requirements (:attr:`Patch.misfit`). In a version of torch that does not meet them, it
  changes nothing. If results depend on the patch, each compilation is refused; if only time or memory do,
  everything works without it, and ``collage-fx doctor`` reports it.
* Other code's replacement of the same function is not removed, whether it came before or after.
* Each patch says with what it would go (:attr:`Patch.goes_with`).

``patches.py`` collects all patches; ``collage-fx doctor`` lists them.

A requirement is a line, read by :func:`misfit`: ``module:Class.method(self, x) has name, other``. The
parameters are the first ones. The names are attributes of a module, a class or its objects, or in its code.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import CodeType, MappingProxyType
from typing import Any, Literal

from collage_fx.torch_compat.version import version

#: Function in place of another, which it gets as its first argument.
Replacement = Callable[..., Any]

_SHAPE = re.compile(r"([\w.]+):([\w.]+)(?:\((.+)\))?(?: has (.+))?")


def _read(shape: str) -> tuple[str, str, list[str], list[str]]:
    """Split a line as in Note [Patches] into module, name within it, parameters and names."""
    match = _SHAPE.fullmatch(shape)
    assert match is not None, shape
    module, path, parameters, names = match.groups()
    return module, path, parameters.split(", ") if parameters else [], names.split(", ") if names else []


def _owner(shape: str) -> tuple[Any, str]:
    """Return the module or class that has a line's target as an attribute, and the attribute's name.

    Raises ImportError or AttributeError if there is none.
    """
    module, path, *_ = _read(shape)
    *classes, name = path.split(".")
    return functools.reduce(getattr, classes, importlib.import_module(module)), name


def misfit(shape: str) -> str | None:
    """Return why a target of torch does not fit its line (Note [Patches]); None if it fits."""
    module, path, parameters, names = _read(shape)
    try:
        found = inspect.unwrap(getattr(*_owner(shape)))
    except (ImportError, AttributeError) as error:
        return f"{module}:{path}: {error}"
    taken = list(inspect.signature(found).parameters) if parameters else []
    if taken[: len(parameters)] != parameters:
        return f"{module}:{path} takes {', '.join(taken)}, not {', '.join(parameters)}"
    missing = [name for name in names if not (hasattr(found, name) or name in _names_in(found))]
    return f"{module}:{path} no longer has {', '.join(missing)}" if missing else None


def _names_in(found: Any) -> Iterator[Any]:
    """Yield the names in a function's code, or the attributes of a class's objects, among other constants."""
    for cls in getattr(found, "__mro__", ()):
        yield from vars(cls).get("__annotations__", {})
        for maker in ("__init__", "__post_init__"):
            yield from _names_in(vars(cls).get(maker))
    if isinstance(code := getattr(found, "__code__", found), CodeType):
        yield from (code.co_name, *code.co_names, *code.co_varnames, *code.co_freevars)
        for constant in code.co_consts:  # inner functions, and the names of keyword arguments
            yield from constant if isinstance(constant, tuple) else _names_in(constant)


@dataclass(frozen=True, eq=False, kw_only=True)
class Patch:
    """Replacement of a function of torch: Note [Patches].

    Attributes:
        target: the replaced function, as a line with its requirements.
        why: its effect and purpose.
        during: the time when it is active: "conversions" = while Dynamo converts functions for this backend,
            "lowerings" = while AOTAutograd and Inductor compile a graph of this backend, "recorded steps" =
            during recorded steps, "the process" = from the first use of a name on.
        needed_for: "bits" = without it results differ or errors occur, "speed" = time or memory is lost.
        affects: whether it also runs for objects of other code.
        waits_for: the function or hook that torch would have to make public for the patch to go.
        until: the first version of torch that does not need it.
        is_there: whether torch was built with the module that it belongs to.
        relies_on: lines of further requirements.
    """

    name: str
    target: str
    why: str
    during: Literal["conversions", "lowerings", "recorded steps", "the process"] = "conversions"
    needed_for: Literal["bits", "speed"] = "bits"
    affects: Literal["nobody else", "everybody"] = "nobody else"
    waits_for: str = ""
    until: tuple[int, int] | None = None
    is_there: bool = True
    relies_on: tuple[str, ...] = ()

    @property
    def is_needed(self) -> bool:
        """Whether this version of torch needs the patch."""
        return self.is_there and (self.until is None or version() < self.until)

    @property
    def goes_with(self) -> str:
        """Version of torch without need for the patch, or the function that must become public for it."""
        return self.waits_for if self.until is None else f"torch {'.'.join(map(str, self.until))}"

    @functools.cached_property
    def misfit(self) -> str | None:
        """First misfit in this version of torch, as a sentence; None if everything fits."""
        shapes = (self.target, *self.relies_on) if self.is_needed else ()
        return next(filter(None, map(misfit, shapes)), None)

    @property
    def applies(self) -> bool:
        """Whether this version of torch needs the patch, and it fits."""
        return self.is_needed and self.misfit is None

    @property
    def is_in_place(self) -> bool:
        """Whether the target is replaced at the moment, as far as this can be seen."""
        return self in _layers and _layers[self].stands

    @property
    def replaced(self) -> Callable[..., Any]:
        """Original function, which an installed patch replaces."""
        return _layers[self].original

    def install(self, replacement: Replacement) -> None:
        """Replace calls of the target by calls of ``replacement(original, ...)`` from now on.

        A second call exchanges the replacement of the first call.
        """
        if not self.applies:
            return
        with _lock:
            if self in _layers:
                _layers[self].installed = replacement
                return
            layer = _layers[self] = _Layer(*_owner(self.target))
            layer.installed = replacement
            # Dynamo traces some of these, and knows no ContextVar.
            layer.put(lambda *args, **kwargs: layer.installed(layer.original, *args, **kwargs))

    @contextlib.contextmanager
    def entered(self, replacement: Replacement) -> Iterator[None]:
        """Context manager: in this thread, calls of the target go to ``replacement(original, ...)``.

        Inside another context of the same patch, ``original`` is the outer replacement.
        """
        if not self.applies:
            yield
            return
        with _lock:
            layer = _layers.get(self)
            if layer is None or not (layer.users or layer.stands):
                layer = _layers[self] = _Layer(*_owner(self.target))
                layer.put(lambda *args, **kwargs: _entered.get().get(layer, layer.original)(*args, **kwargs))
            layer.users += 1
        entered = _entered.get()
        replaced = entered.get(layer, layer.original)
        token = _entered.set({**entered, layer: functools.partial(replacement, replaced)})
        try:
            yield
        finally:
            _entered.reset(token)
            with _lock:
                layer.users -= 1
                if not layer.users and layer.stands:
                    layer.remove()


_NOTHING: Mapping[_Layer | None, Callable[..., Any]] = MappingProxyType({})

#: Replacements that this thread has entered, by layer.
_entered = ContextVar("_entered", default=_NOTHING)

_lock = threading.RLock()


class _Layer:
    """Function in a target's place, which calls the replacement that is active in a thread.

    Other code may have wrapped it meanwhile. Then it stays in place when its last user has left, and calls
    the original; for the next user, a new layer is put over the wrapper.

    Attributes:
        original: the replaced function.
        installed: the replacement, if the patch is installed.
        users: number of active contexts of the patch, in all threads.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name
        self._replaced = vars(owner).get(name)  # None if it is inherited
        self.original = getattr(owner, name)
        self.installed: Replacement = lambda original, *args, **kwargs: original(*args, **kwargs)
        self.users = 0

    def put(self, call: Callable[..., Any]) -> None:
        """Put a function in the target's place."""
        call = functools.wraps(self.original)(call)
        found = inspect.getattr_static(self._owner, self._name)
        self._placed: Any = staticmethod(call) if isinstance(found, (staticmethod, classmethod)) else call
        setattr(self._owner, self._name, self._placed)

    @property
    def stands(self) -> bool:
        """Whether the layer's function is in the target's place."""
        return vars(self._owner).get(self._name) is self._placed

    def remove(self) -> None:
        """Restore the original function."""
        if self._replaced is None:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._replaced)


_layers: dict[Patch, _Layer] = {}
