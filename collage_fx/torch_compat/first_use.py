"""Packages that import their names when one of them is first used: PEP 562, without torch.

Note [First use]
----------------
``import collage_fx`` imports neither Dynamo nor Inductor, so that a process that installs nothing, such as a
worker of a data loader, starts as fast as with torch alone. The ``__init__.py`` of ``collage_fx`` and of
``collage_fx.torch_compat`` import their names in a block that is skipped at first. The first use of a name
runs the file again, with the block; a module of the package is imported alone. The hooks that have to act
before a name is used are set by the import: ``_act_early`` in ``collage_fx/__init__.py``.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable
from typing import Any

_used: set[str] = set()


def is_used(package: str) -> bool:
    """Return whether a name of a package has been used, so that its ``__init__.py`` imports all names."""
    return package in _used


def at_first_use(package: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package, which runs its ``__init__.py`` again when a name is used."""
    module, lock = sys.modules[package], threading.RLock()

    def __getattr__(name: str) -> Any:
        if not name.startswith("__"):
            if importlib.util.find_spec(f"{package}.{name}"):  # modules import each other by it
                return importlib.import_module(f"{package}.{name}")
            with lock:  # one for each package: another thread may import a module of this one
                if not is_used(package):
                    _used.add(package)
                    try:
                        importlib.reload(module)
                    except BaseException:
                        _used.remove(package)
                        raise
        if name in vars(module):
            return vars(module)[name]
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return __getattr__
