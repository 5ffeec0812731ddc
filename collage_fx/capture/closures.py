"""Check, by reading a step's source, that it calls its closure once and before anything else.

A trainer's closure runs forward and backward. Most steps call the closure first and update parameters
afterwards: for them, the closure can be called before the compiled step. Sharpness-aware, extragradient and
line-search steps move parameters between two calls, and have to be given the closure itself. A step that
cannot be judged is treated like those: a step that is given its closure is right in any case, and is recorded
where Dynamo cannot capture the closure.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from torch.optim import Optimizer

from collage_fx.torch_compat import is_of_torch_optim


def calls_closure_first(kind: type[Optimizer]) -> bool:
    """Return whether the steps of an optimizer class call their closure once and first, or never."""
    steps = [vars(each)["step"] for each in kind.__mro__ if "step" in vars(each) and each is not Optimizer]
    return all(map(_calls_first, steps))


def _calls_first(step: Callable[..., Any]) -> bool:
    """Return whether one ``step`` function calls its closure first, or takes none."""
    closure = inspect.signature(step).parameters.get("closure")
    if closure is None:
        return True
    if closure.default is inspect.Parameter.empty:
        return False
    if is_of_torch_optim(step):
        return True
    try:
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(step)))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return False
    if not isinstance(function, ast.FunctionDef):
        return False
    uses = [i for i, each in enumerate(function.body) for use in _uses(each) if use]
    return len(uses) == sum(len(list(_uses(each))) for each in function.body) and (
        not uses or (len(uses) == 1 and not any(map(_acts, function.body[: uses[0]])))
    )


def _uses(statement: ast.stmt) -> Iterator[bool]:
    """Yield for each use of the closure, except in conditions, whether the use is a call that comes first."""
    parents = {child: each for each in ast.walk(statement) for child in ast.iter_child_nodes(each)}
    for name in ast.walk(statement):
        if not (isinstance(name, ast.Name) and name.id == "closure"):
            continue
        above, use = [parents[name]], parents[name]
        while above[-1] in parents:
            above.append(parents[above[-1]])
        below = [name, *above]
        tests = (each.test for each in above if isinstance(each, (ast.If, ast.IfExp, ast.Assert)))
        is_called = isinstance(use, ast.Call) and use.func is name
        if not is_called and any(test in below for test in tests):
            continue
        is_call = is_called or (isinstance(use, ast.Call) and _is_step(use.func))
        is_repeated = any(
            isinstance(each, (ast.For, ast.While, ast.FunctionDef, ast.Lambda)) for each in above
        )
        blocks = [each for each in above if isinstance(each, (ast.If, ast.With))]
        acts_before = any(
            _acts(other)
            for block in blocks
            for other in block.body
            if other not in below and other.lineno < name.lineno
        )
        yield is_call and not is_repeated and not acts_before


def _is_step(function: ast.expr) -> bool:
    """Return whether a function is the step of a base class or another optimizer, which gets the closure."""
    return isinstance(function, ast.Attribute) and function.attr == "step"


def _acts(statement: ast.stmt) -> bool:
    """Return whether a statement may do more than check that a step is possible."""
    if isinstance(statement, (ast.For, ast.While, ast.With)):
        return True
    calls = (each for each in ast.walk(statement) if isinstance(each, ast.Call))
    functions = [each.func for each in calls if not _is_raised(each, statement)]
    return any(
        isinstance(each, ast.Attribute) and not each.attr.startswith("_cuda_graph") for each in functions
    )


def _is_raised(call: ast.Call, statement: ast.stmt) -> bool:
    """Return whether a call makes an exception that the statement raises."""
    raised = (each.exc for each in ast.walk(statement) if isinstance(each, ast.Raise) and each.exc)
    return any(call in ast.walk(each) for each in raised)
