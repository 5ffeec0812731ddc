"""What of torch is replaced, and how: each replacement is a value, a :class:`Patch`.

Note [Patches]
--------------
Torch has no hook where one of its functions is replaced here. The rules that keep that from being anybody
else's business:

* What only this backend's compilations need is *entered* around them (:meth:`Patch.entered`) and gone after
  them. While it is there, it is in force in the thread that entered it, and nowhere else: all others get
  what was replaced.
* What has to be there before any of that, or has nothing to do with compilations, is *installed* by the
  import (:meth:`Patch.install`), and asks first whether it is concerned.
* Each says what it relies on. So it is when this package is imported, rather than in the middle of a training
  run, that it is seen not to fit another version of torch (:meth:`Patch.check`).
* Somebody else's replacement of the same function is left alone, whether it came before or after.

All of them are in ``patches.py``; ``collage-fx doctor`` lists them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import CodeType, MappingProxyType
from typing import Any, Literal

from collage_fx.torch_compat.version import version

__all__ = ["Patch", "Shape", "Wrapper"]

#: From what stands in a place of torch's to what is to be called instead.
Wrapper = Callable[[Any], Callable[..., Any]]


@dataclass(frozen=True, eq=False, kw_only=True)
class Shape:
    """What something of torch's has to look like for this package to work with it.

    Attributes:
        target: ``module:name`` or ``module:Class.name``.
        parameters: of a function, the first ones, by name.
        mentions: names in the code of a function; attributes of a class, of its objects, or of a module.
        text: a piece of a string in the code of a function.
    """

    target: str
    parameters: tuple[str, ...] = ()
    mentions: tuple[str, ...] = ()
    text: str = ""

    def owner(self) -> tuple[Any, str]:
        """The module or class that the target is an attribute of, and its name there.

        Raises ImportError or AttributeError where there is none.
        """
        module_name, _, path = self.target.partition(":")
        *classes, name = path.split(".")
        owner: Any = importlib.import_module(module_name)
        for each in classes:
            owner = getattr(owner, each)
        return owner, name

    def misfit(self) -> str | None:
        """Why it is not like that in this version of torch; None if it is."""
        try:
            owner, name = self.owner()
            found = inspect.unwrap(getattr(owner, name))
        except (ImportError, AttributeError) as error:
            return f"{self.target}: {error}"
        if self.parameters:
            found_parameters = tuple(inspect.signature(found).parameters)
            if found_parameters[: len(self.parameters)] != self.parameters:
                return f"{self.target} takes {', '.join(found_parameters)}, not {', '.join(self.parameters)}"
        missing = [name for name in self.mentions if not _mentions(found, name)]
        if self.text and not any(self.text in string for string in _strings(found.__code__)):
            missing.append(repr(self.text))
        return f"{self.target} no longer has {', '.join(missing)}" if missing else None


def _mentions(found: Any, name: str) -> bool:
    """Whether a name occurs in a function's code, or is an attribute."""
    if hasattr(found, "__code__"):
        return name in _names(found.__code__)
    classes = inspect.getmro(found) if inspect.isclass(found) else ()
    return hasattr(found, name) or any(name in names for each in classes for names in _made_by(each))


def _made_by(cls: type) -> Iterator[Iterable[str]]:
    """The names of the attributes that objects of a class have."""
    yield vars(cls).get("__annotations__", {})
    for maker in ("__init__", "__post_init__"):
        if hasattr(vars(cls).get(maker), "__code__"):
            yield _names(vars(cls)[maker].__code__)


def _names(code: CodeType) -> Iterator[str]:
    yield from (code.co_name, *code.co_names, *code.co_varnames, *code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif isinstance(constant, tuple):  # the names of keyword arguments are one
            yield from (each for each in constant if isinstance(each, str))


def _strings(code: CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _strings(constant)
        elif isinstance(constant, str):
            yield constant


@dataclass(frozen=True, eq=False, kw_only=True)
class Patch(Shape):
    """One thing of torch's that this package replaces: Note [Patches].

    Attributes:
        name: of the patch.
        why: what it changes, and so what it is good for.
        during: when it is in force: around Dynamo's conversions of functions for this backend, around what
            AOTAutograd and Inductor make of a graph of this backend, around the steps of an optimizer that is
            recorded, or from the import on.
        affects: who else's objects it touches.
        until: the first version of torch that does without it.
        relies_on: what else has to be so.
    """

    name: str
    why: str
    during: Literal["conversions", "lowerings", "recorded steps", "the process"] = "the process"
    affects: Literal["nobody else", "everybody"] = "nobody else"
    until: tuple[int, int] | None = None
    relies_on: tuple[Shape, ...] = ()

    @property
    def is_needed(self) -> bool:
        """Whether this version of torch needs it."""
        return self.until is None or version() < self.until

    def check(self) -> str | None:
        """What it relies on that is not so in this version of torch; None if all is."""
        told = (shape.misfit() for shape in (self, *self.relies_on)) if self.is_needed else ()
        return next((each for each in told if each is not None), None)

    @property
    def is_in_place(self) -> bool:
        """Whether the target is replaced at the moment, as far as that can be seen."""
        return self in _layers and _layers[self].stands

    @property
    def is_entered(self) -> bool:
        """Whether it is in force in this thread, between entering and leaving."""
        return _layers.get(self) in _entered.get()

    def install(self, wrapper: Wrapper) -> None:
        """From now on, have ``wrapper(original)`` called in the target's place.

        A second call replaces what the first had called, and leaves it where it stands.
        """
        if not self.is_needed:
            return
        with _lock:
            if self not in _layers:
                layer = _layers[self] = _Layer(*self.owner())
                layer.put(lambda *args, **kwargs: layer.installed(*args, **kwargs))
            _layers[self].installed = wrapper(_layers[self].original)

    @contextlib.contextmanager
    def entered(self, wrapper: Wrapper) -> Iterator[None]:
        """Within, in this thread, have ``wrapper(original)`` called in the target's place.

        ``original`` is what an outer one has put there, if there is one.
        """
        if not self.is_needed:
            yield
            return
        with _lock:
            layer = _layers.get(self)
            if layer is None or not (layer.users or layer.stands):
                layer = _layers[self] = self._new_layer()
            layer.users += 1
        entered = _entered.get()
        token = _entered.set({**entered, layer: wrapper(entered.get(layer, layer.original))})
        try:
            yield
        finally:
            _entered.reset(token)
            with _lock:
                layer.users -= 1
                if not layer.users and layer.stands:
                    layer.remove()

    def _new_layer(self) -> _Layer:
        layer = _Layer(*self.owner())

        def call(*args: Any, **kwargs: Any) -> Any:
            function = _entered.get().get(layer, layer.original)
            return None if function is None else function(*args, **kwargs)

        layer.put(call)
        return layer


_NOTHING: Mapping[_Layer | None, Callable[..., Any]] = MappingProxyType({})

#: What this thread has entered, and what it calls in the place of each target.
_entered = ContextVar("_entered", default=_NOTHING)

_lock = threading.RLock()

_INHERITED = object()


class _Layer:
    """What stands in a target's place.

    Somebody else may have put a replacement of theirs over it meanwhile. Then it stays where it is when its
    last user has left, and calls what it replaced; the next user's is put over theirs.

    Attributes:
        original: what it has replaced.
        installed: what it calls, if it is there for good.
        users: how many have entered the patch, in whatever thread.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name
        self._replaced = vars(owner).get(name, _INHERITED)
        self.original = self.installed = getattr(owner, name)
        self.users = 0
        self._placed: Any = None

    def put(self, call: Callable[..., Any]) -> None:
        """Put a function in the target's place."""
        function = functools.wraps(self.original)(call) if callable(self.original) else call
        is_called_alone = isinstance(
            inspect.getattr_static(self._owner, self._name), (staticmethod, classmethod, type(None))
        )
        self._placed = staticmethod(function) if is_called_alone else function
        setattr(self._owner, self._name, self._placed)

    @property
    def stands(self) -> bool:
        """Whether it is what is found in the target's place."""
        return vars(self._owner).get(self._name) is self._placed

    def remove(self) -> None:
        """Put back what was there."""
        if self._replaced is _INHERITED:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._replaced)


_layers: dict[Patch, _Layer] = {}
