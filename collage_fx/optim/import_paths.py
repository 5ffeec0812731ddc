"""Paths that can be imported for classes of other packages: ``collage_fx.optim.pytorch_optimizer.Prodigy``.

A pickle, a process that is spawned and a configuration all find a class by a module's name and a name in it.
So for each module that is imported below ``collage_fx.optim`` there is a module whose attributes are
subclasses of the other's optimizers.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def add_finder(package: ModuleType, attribute: Callable[[str, str], Any]) -> None:
    """Make modules within a package for modules that can be imported without it.

    Args:
        package: the package.
        attribute: ``(name of the other module, name in it) -> the attribute`` of the module in the package.
    """
    sys.meta_path.append(_Finder(f"{package.__name__}.", attribute))


class _Finder(MetaPathFinder):
    """Finder of modules that no other finder finds; so modules that exist in the package come first."""

    def __init__(self, prefix: str, attribute: Callable[[str, str], Any]) -> None:
        self._prefix = prefix
        self._attribute = attribute

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        other = fullname.removeprefix(self._prefix)
        if other == fullname:
            return None
        if other not in sys.modules and importlib.util.find_spec(other) is None:
            return None
        return ModuleSpec(fullname, _Loader(other, self._attribute), is_package=True)


class _Loader(Loader):
    """Loader of a module with the attributes of another."""

    def __init__(self, other: str, attribute: Callable[[str, str], Any]) -> None:
        self._other = other
        self._attribute = attribute

    def exec_module(self, module: ModuleType) -> None:
        def __getattr__(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            return self._attribute(self._other, name)

        importlib.import_module(self._other)
        vars(module)["__getattr__"] = __getattr__
