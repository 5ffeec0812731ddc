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
* Each says what it relies on (:attr:`Patch.misfit`). In a version of torch that it does not fit, it changes
  nothing. If results depend on it, each compilation is refused; if only time and memory do, all goes on
  without it. The import succeeds, so that ``collage-fx doctor`` can say which it is.
* Somebody else's replacement of the same function is left alone, whether it came before or after.
* Each says what torch would have to make public for it to go (:attr:`Patch.waits_for`), or with which
  version it goes (:attr:`Patch.until`).

All of them are in ``patches.py``; ``collage-fx doctor`` lists them.

What something of torch's has to look like is written in a line, read by :func:`misfit`:
``module:Class.method(self, x) has name, other``. The parameters are the first ones. The names are attributes
of a module, of a class or of its objects; for a function, names in its code.
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

#: A function from what stands in a place of torch's to what is to be called instead.
Wrapper = Callable[[Any], Callable[..., Any]]

_SHAPE = re.compile(r"([\w.]+):([\w.]+)(?:\((.+)\))?(?: has (.+))?")


def _read(shape: str) -> tuple[str, str, list[str], list[str]]:
    """The module, the name within it, the parameters and the names of a line as in Note [Patches]."""
    match = _SHAPE.fullmatch(shape)
    assert match is not None, shape
    module, path, parameters, names = match.groups()
    return module, path, parameters.split(", ") if parameters else [], names.split(", ") if names else []


def _owner(shape: str) -> tuple[Any, str]:
    """The module or class that something is an attribute of, and its name there.

    Raises ImportError or AttributeError where there is none.
    """
    module, path, _, _ = _read(shape)
    *classes, name = path.split(".")
    return functools.reduce(getattr, classes, importlib.import_module(module)), name


def misfit(shape: str) -> str | None:
    """Why something of torch's is not like that (Note [Patches]) in this version; None if it is."""
    module, path, parameters, names = _read(shape)
    try:
        found = inspect.unwrap(getattr(*_owner(shape)))
    except (ImportError, AttributeError) as error:
        return f"{module}:{path}: {error}"
    taken = list(inspect.signature(found).parameters) if parameters else []
    if taken[: len(parameters)] != parameters:
        return f"{module}:{path} takes {', '.join(taken)}, not {', '.join(parameters)}"
    missing = [name for name in names if not (hasattr(found, name) or name in set(_names_in(found)))]
    return f"{module}:{path} no longer has {', '.join(missing)}" if missing else None


def _names_in(found: Any) -> Iterator[str]:
    """The names in a function's code; of a class, those that its objects have."""
    for cls in getattr(found, "__mro__", ()):
        yield from vars(cls).get("__annotations__", {})
        for maker in ("__init__", "__post_init__"):
            yield from _names_in(vars(cls).get(maker))
    if isinstance(code := getattr(found, "__code__", found), CodeType):
        yield from (code.co_name, *code.co_names, *code.co_varnames, *code.co_freevars)
        for constant in code.co_consts:  # functions within, and the names of keyword arguments
            yield from _names_in(constant) if isinstance(constant, CodeType) else ()
            yield from (
                (each for each in constant if isinstance(each, str)) if isinstance(constant, tuple) else ()
            )


@dataclass(frozen=True, eq=False, kw_only=True)
class Patch:
    """One thing of torch's that this package replaces: Note [Patches].

    Attributes:
        name: of the patch.
        target: what is replaced, and what it has to look like.
        why: what it changes, and so what it is good for.
        during: when it is in force: around Dynamo's conversions of functions for this backend, around what
            AOTAutograd and Inductor make of a graph of this backend, around the steps of an optimizer that is
            recorded, or from the import on.
        needed_for: "bits" if results would be other ones, or errors, without it; "speed" if all that is lost
            is time or memory.
        affects: who else's objects it touches.
        waits_for: what would have to be public in torch for this patch to go.
        until: the first version of torch that does without it.
        is_there: whether torch has been built with what it is a part of.
        relies_on: what else has to look how.
    """

    name: str
    target: str
    why: str
    during: Literal["conversions", "lowerings", "recorded steps", "the process"] = "the process"
    needed_for: Literal["bits", "speed"] = "bits"
    affects: Literal["nobody else", "everybody"] = "nobody else"
    waits_for: str = ""
    until: tuple[int, int] | None = None
    is_there: bool = True
    relies_on: tuple[str, ...] = ()

    @property
    def is_needed(self) -> bool:
        """Whether this torch needs it."""
        return self.is_there and (self.until is None or version() < self.until)

    @property
    def goes_with(self) -> str:
        """The version of torch that does without it, or what one would have to make public."""
        return self.waits_for if self.until is None else f"torch {'.'.join(map(str, self.until))}"

    @property
    def shapes(self) -> tuple[str, ...]:
        """All that has to look how, its target first."""
        return self.target, *self.relies_on

    @functools.cached_property
    def misfit(self) -> str | None:
        """A sentence on the first shape that this version of torch does not have; None if it has all."""
        return next(filter(None, map(misfit, self.shapes)), None) if self.is_needed else None

    @property
    def applies(self) -> bool:
        """Whether this torch needs it, and it fits."""
        return self.is_needed and self.misfit is None

    @property
    def is_in_place(self) -> bool:
        """Whether the target is replaced at the moment, as far as that can be seen."""
        return self in _layers and _layers[self].stands

    @property
    def replaced(self) -> Callable[..., Any]:
        """The function in whose place an installed patch is."""
        return _layers[self].original

    @property
    def is_entered(self) -> bool:
        """Whether it is in force in this thread, between entering and leaving."""
        return _layers.get(self) in _entered.get()

    def install(self, wrapper: Wrapper) -> None:
        """From now on, have ``wrapper(original)`` called in the target's place.

        A second call replaces what the first had called, and leaves it where it stands.
        """
        if not self.applies:
            return
        with _lock:
            if self not in _layers:
                layer = _layers[self] = _Layer(*_owner(self.target))
                # Dynamo traces some of these, and knows no ContextVar.
                layer.put(lambda *args, **kwargs: layer.installed(*args, **kwargs))
            _layers[self].installed = wrapper(_layers[self].original)

    @contextlib.contextmanager
    def entered(self, wrapper: Wrapper) -> Iterator[None]:
        """Within, in this thread, have ``wrapper(original)`` called in the target's place.

        ``original`` is what an outer one has put there, if there is one.
        """
        if not self.applies:
            yield
            return
        with _lock:
            layer = _layers.get(self)
            if layer is None or not (layer.users or layer.stands):
                layer = _layers[self] = _Layer(*_owner(self.target))
                layer.put(lambda *args, **kwargs: layer.called()(*args, **kwargs))
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


_NOTHING: Mapping[_Layer | None, Callable[..., Any]] = MappingProxyType({})

#: For each layer whose patch this thread has entered: what the thread calls in its place.
_entered = ContextVar("_entered", default=_NOTHING)

_lock = threading.RLock()

_INHERITED = object()


class _Layer:
    """The function that stands in a target's place, and calls what is in force in a thread.

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

    def called(self) -> Callable[..., Any]:
        """What it calls in this thread, if it is there while the patch is entered."""
        return _entered.get().get(self, self.original)

    def put(self, call: Callable[..., Any]) -> None:
        """Put a function in the target's place."""
        call = functools.wraps(self.original)(call)
        found = inspect.getattr_static(self._owner, self._name)
        self._placed: Any = staticmethod(call) if isinstance(found, (staticmethod, classmethod)) else call
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
