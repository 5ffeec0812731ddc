"""Optimizers by name: each class of torch.optim, and :func:`of` any other, installed when it is made.

``collage_fx.optim.AdamW(params, lr=1e-4, collage={"bytes_per_parameter": 8})`` is
``collage_fx.install(torch.optim.AdamW(params, lr=1e-4), bytes_per_parameter=8)``, for programs whose
configuration names an optimizer by a path that can be imported:

    collage_fx.optim.AdamW                           torch.optim.AdamW
    collage_fx.optim.pytorch_optimizer.Prodigy       pytorch_optimizer.Prodigy

The classes are subclasses of the originals, so ``isinstance`` holds, and an optimizer can be pickled, copied
and sent to another process. State dicts are those of the originals.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

import torch
from torch.optim import Optimizer

from collage_fx.backend import CollageBackend
from collage_fx.errors import InvalidOptionError, UnsupportedOptimizerError
from collage_fx.installation import install
from collage_fx.torch_compat import ORIGINAL

#: An import of ``collage_fx.optim.torch`` makes the name torch in this module another module.
_torch_optim = torch.optim


def of(optimizer: str | type[Optimizer]) -> type[Optimizer]:
    """Return a subclass of an optimizer class whose optimizers are installed when they are made.

    It takes the arguments of the original, and ``collage``: options of :func:`collage_fx.install` as a
    mapping, or a :class:`~collage_fx.CollageBackend` for several optimizers. The same class is returned each
    time, and can be imported: ``collage_fx.optim.pytorch_optimizer.Prodigy``.

    Args:
        optimizer: the class, or its path: ``"pytorch_optimizer.Prodigy"``.

    Raises:
        CollageError: the object is not a class of optimizers, or there is no such path.
    """
    cls = _named(optimizer) if isinstance(optimizer, str) else optimizer
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
        met = f"{optimizer!r} is not a class of optimizers"
        remedy = "give a subclass of torch.optim.Optimizer, or its path: 'pytorch_optimizer.Prodigy'"
        raise UnsupportedOptimizerError(met, where="collage_fx.optim.of", remedy=remedy)
    return cls if ORIGINAL in vars(cls) else _subclass(cls)


@functools.cache
def _subclass(cls: type[Optimizer]) -> type[Optimizer]:
    original = cast(Any, cls).__init__

    def __init__(self: Optimizer, *args: Any, collage: Any = None, **kwargs: Any) -> None:
        is_backend = isinstance(collage, CollageBackend)
        if not (collage is None or isinstance(collage, Mapping) or is_backend):
            raise InvalidOptionError(
                f"collage={collage!r} is not allowed",
                where="collage",
                remedy="give options of collage_fx.install by name, collage={'bytes_per_parameter': 8}, or a "
                "CollageBackend",
            )
        original(self, *args, **kwargs)
        install(self, **({"backend": collage} if is_backend else collage or {}))

    # Tools that read configurations look here for what the class takes.
    kind, annotation = inspect.Parameter.KEYWORD_ONLY, Mapping[str, Any] | None
    option = inspect.Parameter("collage", kind, default=None, annotation=annotation)
    signature = inspect.signature(original)
    parameters = sorted((*signature.parameters.values(), option), key=lambda each: each.kind)
    __init__.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    is_torchs = getattr(_torch_optim, cls.__name__, None) is cls
    attributes = {
        "__init__": __init__,
        "__doc__": f"``{cls.__module__}.{cls.__qualname__}``, installed when it is made: see :func:`of`.",
        "__module__": __name__ if is_torchs else f"{__name__}.{cls.__module__}",
        "__qualname__": cls.__qualname__,
        ORIGINAL: cls,
    }
    return cast("type[Optimizer]", type(cls)(cls.__name__, (cls,), attributes))


def _named(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        met = f"there is no {path!r}: {error}"
        remedy = "give the path of a class that can be imported, as 'pytorch_optimizer.Prodigy'"
        raise UnsupportedOptimizerError(met, where="collage_fx.optim.of", remedy=remedy) from error


def _in_module(module: str, name: str) -> type[Optimizer]:
    value = getattr(importlib.import_module(module), name)
    if not (isinstance(value, type) and issubclass(value, Optimizer)):
        raise AttributeError(f"{module}.{name} is not a class of optimizers")
    return of(value)


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        if hasattr(_torch_optim, name):
            return _in_module("torch.optim", name)
        if importlib.util.find_spec(name) is not None:
            return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}: torch.optim has no such class, and no module of "
        "this name can be imported"
    )


_classes = ((name, value) for name, value in vars(torch.optim).items() if isinstance(value, type))
#: ``of``, and the classes of torch.optim.
__all__ = ["of", *(name for name, kind in _classes if issubclass(kind, Optimizer) and kind is not Optimizer)]


def __dir__() -> list[str]:
    return sorted(__all__)


class _ModuleFinder(MetaPathFinder, Loader):
    """Finder of a module in this package for each module outside, with subclasses of its optimizers.

    A pickle, a process that is spawned and a configuration all find a class by a module's name and a name in
    it. The finder is asked last, so modules that exist in the package come first.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        other = fullname.removeprefix(f"{__name__}.")
        if other == fullname or (other not in sys.modules and importlib.util.find_spec(other) is None):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        other = module.__name__.removeprefix(f"{__name__}.")

        def __getattr__(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            return _in_module(other, name)

        importlib.import_module(other)
        vars(module)["__getattr__"] = __getattr__


sys.meta_path.append(_ModuleFinder())
