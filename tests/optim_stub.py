"""``python -m tests.optim_stub``: write collage_fx/optim/__init__.pyi, the types of torch.optim's classes.

``collage_fx/optim`` makes its classes when it is imported, which type checkers and editors do not do.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from pathlib import Path

import torch
from torch.optim import Optimizer

from collage_fx import optim

STUB = Path(optim.__file__).with_suffix(".pyi")

HEAD = """\
# Written by `python -m tests.optim_stub`; not to be edited.

from typing import TypeAlias, TypeVar, overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from collage_fx.backend import CollageBackend
from collage_fx.options import GivenOptions

__all__: list[str]

_Optimizer = TypeVar("_Optimizer", bound=torch.optim.Optimizer)
_Collage: TypeAlias = GivenOptions | CollageBackend | None

@overload
def of(optimizer: type[_Optimizer]) -> type[_Optimizer]: ...
@overload
def of(optimizer: str) -> type[torch.optim.Optimizer]: ...
"""


def stub() -> str:
    """Return the text of the file."""
    classes = [getattr(torch.optim, name) for name in sorted(set(optim.__all__) - {"of"})]
    return "\n".join([HEAD, *map(_of_class, classes)])


def _of_class(cls: type[Optimizer]) -> str:
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(vars(cls)["__init__"]))).body
    assert isinstance(function, ast.FunctionDef)
    arguments = function.args
    arguments.kwonlyargs.append(ast.arg("collage", ast.Name("_Collage")))
    arguments.kw_defaults.append(ast.Constant(None))
    for each in (arguments.defaults, arguments.kw_defaults):
        each[:] = [None if default is None else ast.Constant(...) for default in each]  # type: ignore[misc]
    one_line = ast.unparse(arguments).replace("=...", " = ...")
    parameters = re.sub(r", (?=\w+: |\*)", ",\n        ", one_line)
    return (
        f"class {cls.__name__}(torch.optim.{cls.__name__}):\n    def __init__(\n        {parameters},\n"
        "    ) -> None: ...\n"
    )


if __name__ == "__main__":
    STUB.write_text(stub())
