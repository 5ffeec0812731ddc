"""Functions that update weights: their lines, found in the source, and their weights."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Mapping
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx.state import held_optimizers, record_of
from collage_fx.torch_compat import pytree

#: Methods with such a name that change no value.
_NO_UPDATES = frozenset(("requires_grad_", "retain_grad_", "share_memory_", "detach_"))


def within_reach(variables: Mapping[str, Any]) -> tuple[list[Optimizer], list[Tensor]]:
    """Return the optimizers and the weights among variables, and among attributes of objects in them.

    A weight is a parameter, or another tensor with error terms. Modules are not looked into: a forward pass
    updates no weights.
    """
    ignored = (Optimizer, torch.nn.Module, type, ModuleType, FunctionType)
    objects = [
        each for each in variables.values() if not isinstance(each, ignored) and hasattr(each, "__dict__")
    ]
    spaces = [dict(variables), *map(vars, objects)]
    optimizers = {id(each): each for space in spaces for each in held_optimizers(SimpleNamespace(**space))}
    leaves = pytree.tree_leaves([list(space.values()) for space in spaces])
    tensors = [each for each in leaves if isinstance(each, Tensor)]
    weights = [
        each for each in tensors if isinstance(each, torch.nn.Parameter) or record_of(each) is not None
    ]
    return list(optimizers.values()), weights


def line_that_updates(code: CodeType) -> int | None:
    """Return the first line of a function that may update tensors; None if there is none.

    Gradients do not count. All of a function whose source is not known may.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError):
        return code.co_firstlineno
    nodes = list(ast.walk(tree))
    loops = [each.target for each in nodes if isinstance(each, (ast.For, ast.comprehension))]
    elements = {each.id for loop in loops for each in ast.walk(loop) if isinstance(each, ast.Name)}
    lines = [
        each.lineno for each in nodes if isinstance(each, ast.stmt | ast.expr) and _updates(each, elements)
    ]
    return code.co_firstlineno + min(lines) - 1 if lines else None


def _updates(node: ast.AST, elements: set[str]) -> bool:
    """Return whether a call or an assignment may update a tensor; ``elements``: variables of loops."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name = node.func.attr
        is_in_place = re.fullmatch(r"_foreach_\w+_|[a-z]\w*[a-z0-9]_", name) is not None
        is_of_gradient = isinstance(node.func.value, ast.Attribute) and node.func.value.attr == "grad"
        is_known = hasattr(Tensor, name) or hasattr(torch, name)
        return is_in_place and is_known and name not in _NO_UPDATES and not is_of_gradient
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AugAssign):
        targets = [node.target]
        if isinstance(node.target, ast.Name):
            return node.target.id in elements
    return any(isinstance(each, ast.Attribute) and each.attr == "data" for each in targets)
