"""Facts that are read from the source of a step, or of a function that updates weights.

If a step calls its closure once and before anything else, a trainer's closure (forward and backward) can be
called before the compiled step, which is given the result. Sharpness-aware, extragradient and line-search
steps move parameters between two calls: they get the closure itself, as do steps that cannot be judged.
"""

from __future__ import annotations

import ast
import dis
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx.state import held_optimizers, record_of
from collage_fx.torch_compat import is_of_torch_optim, pytree, true_step

#: Functions that may be called before the closure, since no closure could tell.
HARMLESS = frozenset({"callable", "isinstance", "len", "float", "int", "bool", "dict", "list", "set"})

#: Kinds of syntax that compute a value of which no closure could tell when it was computed.
PLAIN = (
    *(ast.Constant, ast.Name, ast.expr_context, ast.Attribute, ast.Subscript, ast.Tuple, ast.List, ast.Dict),
    *(ast.Compare, ast.cmpop, ast.UnaryOp, ast.unaryop, ast.BoolOp, ast.boolop, ast.IfExp),
)

#: Kinds of syntax around the call of a closure that do nothing before the call.
AROUND = (ast.Expr, ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.Return, ast.keyword)

#: Methods with such a name that change no value.
_NO_UPDATES = frozenset(("requires_grad_", "retain_grad_", "share_memory_", "detach_"))


class FirstCall(NamedTuple):
    """Call of a closure that a step makes once, before anything else.

    If the result ``is_only_returned``, the step does the same without a closure.
    """

    name: str  # of the step's parameter for the closure
    is_only_returned: bool
    condition: CodeType | None = None  # under which the step calls its closure; None if it always does
    names: Mapping[str, Any] = {}  # global variables that the condition may use
    #: Step that makes the call: of the "base" class, of "others" (other optimizers), or "" for this step.
    inside: str = ""

    def holds(self, arguments: Mapping[str, Any]) -> bool:
        """Return whether the step calls its closure, given all of its arguments by name."""
        given = arguments.get(self.name) is not None
        return given and (self.condition is None or bool(eval(self.condition, {**self.names}, {**arguments})))


def first_call(optimizer: Optimizer, steps: Sequence[Callable[..., Any]] | None = None) -> FirstCall | None:
    """Return the call that an optimizer's step makes of its closure; None if the step needs the closure.

    The first of ``steps``, by default its own and its base classes', may pass its closure on to the next.
    """
    if steps is None:
        steps = [vars(each)["step"] for each in type(optimizer).__mro__ if "step" in vars(each)]
        steps = steps if true_step(optimizer) is type(optimizer).step else [true_step(optimizer)]
    call = _read(steps[0]) if steps else None
    if call is None or not steps:
        return None
    passed: list[FirstCall | None] = []
    if call.inside == "base":
        passed.append(first_call(optimizer, steps[1:]))
    if call.inside == "others":
        passed += [first_call(each) for each in held_optimizers(optimizer)] or [None]
    if None in passed:
        return None
    return call._replace(is_only_returned=all(each.is_only_returned for each in [call, *passed] if each))


def _read(step: Callable[..., Any]) -> FirstCall | None:
    if is_of_torch_optim(step):
        closure = inspect.signature(step).parameters.get("closure")
        is_optional = closure is not None and closure.default is None
        return FirstCall("closure", is_only_returned=True) if is_optional else None
    try:
        undecorated = _undecorated(step)
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(undecorated))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    return (
        _Reader(function, undecorated.__globals__).call() if isinstance(function, ast.FunctionDef) else None
    )


def _undecorated(step: Any) -> Any:
    """Return the function inside torch's decorators; raise if there are others: they may call the closure."""
    while (inner := getattr(step, "__wrapped__", None)) is not None:
        code = getattr(step, "__code__", None)
        if code is None or Path(torch.__file__).parent not in Path(code.co_filename).parents:
            raise TypeError(f"a decorator of unknown effect: {step}")
        step = inner
    return step


class _Reader:
    def __init__(self, function: ast.FunctionDef, names: Mapping[str, Any]) -> None:
        self._function = function
        self._globals = names
        arguments = function.args
        parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs][1:]
        self._parameters = {each.arg for each in parameters}
        self._parents = {child: each for each in ast.walk(function) for child in ast.iter_child_nodes(each)}
        self._names = [each for each in ast.walk(function) if isinstance(each, ast.Name)]

    def call(self) -> FirstCall | None:
        """Return the step's call of its closure; None unless the call comes first."""
        calls = [
            (each, use)
            for each in self._names
            if each.id in self._parameters and (use := self._call_of(each)) is not None
        ]
        if len(calls) != 1:
            return None
        ((name, call),) = calls
        used = [each for each in self._names if each.id == name.id and each is not name]
        conditions = [each for each in self._around(call) if isinstance(each, (ast.If, ast.IfExp))]
        if len(conditions) > 1 or not self._comes_first(call):
            return None
        asked = conditions.pop() if conditions else None
        if not all(self._is_asked_for(each, asked) for each in used):
            return None
        body = [] if asked is None else asked.body if isinstance(asked, ast.If) else [asked.body]
        is_negated = asked is not None and all(call not in ast.walk(each) for each in body)
        condition = None
        if asked is not None:
            test = ast.UnaryOp(ast.Not(), asked.test) if is_negated else asked.test
            condition = compile(ast.fix_missing_locations(ast.Expression(test)), "closure", "eval")
        is_only_returned = self._is_only_returned(call, asked, used, is_negated=is_negated)
        callee = getattr(getattr(call.func, "value", None), "func", None)
        by_base = isinstance(callee, ast.Name) and callee.id == "super"
        inside = "" if call.func is name else "base" if by_base else "others"
        return FirstCall(name.id, is_only_returned, condition, self._globals, inside)

    def _call_of(self, name: ast.Name) -> ast.Call | None:
        """Return the call of a parameter, or of the step of another object that is given the parameter."""
        use = self._parents[name]
        if isinstance(use, ast.keyword):
            use = self._parents[use]
        if not isinstance(use, ast.Call):
            return None
        if use.func is name:
            return use if not (use.args or use.keywords) else None
        is_step = isinstance(use.func, ast.Attribute) and use.func.attr == "step"
        return use if is_step and len(use.args) + len(use.keywords) == 1 else None

    def _is_asked_for(self, name: ast.Name, asked: ast.If | ast.IfExp | None) -> bool:
        """Return whether a use of the closure is in the condition of its call, or a test of its presence."""
        use = self._parents[name]
        if asked is not None and name in ast.walk(asked.test):
            return True
        if isinstance(use, ast.Compare):
            return all(isinstance(each, (ast.Is, ast.IsNot)) for each in use.ops)
        is_condition = isinstance(use, (ast.If, ast.IfExp, ast.Assert)) and use.test is name
        return is_condition or isinstance(use, ast.UnaryOp) or (isinstance(use, ast.Call) and self._asks(use))

    def _asks(self, call: ast.Call) -> bool:
        """Return whether a call can only ask about its arguments: of ``callable``, or of a helper like it."""
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        helper = self._globals.get(name)
        if not isinstance(helper, FunctionType):
            return name in HARMLESS and name not in self._globals
        return not any("CALL" in each.opname for each in dis.get_instructions(helper))

    def _is_condition(self, test: ast.expr) -> bool:
        """Return whether a condition can be evaluated before the step, from the step's arguments."""
        calls = [each for each in ast.walk(test) if isinstance(each, ast.Call)]
        helpers = [each.func for each in calls if self._asks(each)]
        names = {each.id for each in ast.walk(test) if isinstance(each, ast.Name) and each not in helpers}
        return (
            len(helpers) == len(calls)
            and names <= self._parameters
            and all(isinstance(each, (*PLAIN, ast.Call)) for each in ast.walk(test))
        )

    def _around(self, node: ast.AST) -> Iterator[ast.AST]:
        while node is not self._function:
            node = self._parents[node]
            yield node

    def _comes_first(self, call: ast.Call) -> bool:
        """Return whether a call is made once or, by a condition, never, and nothing else happens before."""
        below: ast.AST = call
        for each in self._around(call):
            if isinstance(each, (ast.If, ast.IfExp)):
                is_harmless = below is not each.test and self._is_condition(each.test)
            elif isinstance(each, ast.With):
                callees = (ast.unparse(item.context_expr).partition("(")[0] for item in each.items)
                is_harmless = all(re.search(r"\b(set_grad_enabled|enable_grad)$", name) for name in callees)
            elif isinstance(each, ast.Call):
                is_harmless = _is_plain(each.func)
            else:
                is_harmless = each is self._function or isinstance(each, AROUND)
            blocks = [getattr(each, name, None) for name in ("body", "orelse")]
            block = next((block for block in blocks if isinstance(block, list) and below in block), [below])
            if not (is_harmless and all(map(_is_harmless, block[: block.index(below)]))):
                return False
            below = each
        return True

    def _is_only_returned(
        self, call: ast.Call, asked: ast.If | ast.IfExp | None, used: Sequence[ast.Name], *, is_negated: bool
    ) -> bool:
        """Return whether the step does the same without a closure, but for the result that it returns."""
        around = list(self._around(call))
        statement = next(each for each in around if isinstance(each, ast.stmt))
        if asked is not None and not all(each in ast.walk(asked.test) for each in used):
            return False  # something else depends on whether there is a closure
        if call.func in self._names and (asked is None or not _needs(asked.test, used, fails=is_negated)):
            return False  # a step that calls None
        returned = [each.value for each in ast.walk(self._function) if isinstance(each, ast.Return)]
        if isinstance(statement, ast.Return):
            return statement.value in (call, asked) and len(returned) == 1
        target = _assigned(statement)
        if target is None or getattr(statement, "value", None) not in (call, asked):
            return False
        if isinstance(asked, ast.IfExp) and not all(
            isinstance(each, ast.Constant) for each in (asked.body, asked.orelse) if each is not call
        ):
            return False
        if isinstance(asked, ast.If):
            withs = [each for each in around[: around.index(asked)] if isinstance(each, ast.With)]
            block, other = (asked.orelse, asked.body) if is_negated else (asked.body, asked.orelse)
            if any(len(each.body) > 1 for each in withs) or len(block) > 1:
                return False
            values = (getattr(each, "value", None) for each in other if _assigned(each) == target)
            if [type(value) for value in values] != [ast.Constant] * len(other):
                return False
        loads = [each for each in self._names if each.id == target and isinstance(each.ctx, ast.Load)]
        return bool(returned) and {*map(id, returned)} == {*map(id, loads)}


def _needs(test: ast.expr, asking: Sequence[ast.Name], *, fails: bool) -> bool:
    """Return whether a condition holds, or fails, only where one of the names that ask does so, too."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _needs(test.operand, asking, fails=not fails)
    if isinstance(test, ast.BoolOp):
        has_one_to = any if isinstance(test.op, ast.Or) is fails else all
        return has_one_to(_needs(each, asking, fails=fails) for each in test.values)
    return not isinstance(test, ast.IfExp) and any(each in asking for each in ast.walk(test))


def _assigned(statement: ast.stmt) -> str | None:
    """Return the variable that a statement gives a value, alone."""
    targets = getattr(statement, "targets", [getattr(statement, "target", None)])
    (target,) = targets if len(targets) == 1 else (None,)
    is_assignment = isinstance(statement, (ast.Assign, ast.AnnAssign))
    return target.id if is_assignment and isinstance(target, ast.Name) else None


def _is_harmless(statement: ast.stmt) -> bool:
    """Return whether a statement does no more than name values, or check that a step is possible."""
    if isinstance(statement, (ast.Pass, ast.Import, ast.ImportFrom, ast.Raise)):
        return True
    if isinstance(statement, (ast.Assert, ast.If)):
        blocks = [] if isinstance(statement, ast.Assert) else [*statement.body, *statement.orelse]
        return _is_plain(statement.test) and all(map(_is_harmless, blocks))
    if isinstance(statement, (ast.Assign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return all(isinstance(each, ast.Name) for each in targets) and _is_plain(statement.value)
    if not isinstance(statement, ast.Expr):
        return False
    method = getattr(getattr(statement.value, "func", None), "attr", "")
    return _is_plain(statement.value) or method.startswith("_cuda_graph")


def _is_plain(value: ast.expr | None) -> bool:
    """Return whether a value is the same before and after the closure is called, as far as can be told."""
    for each in ast.walk(value) if value is not None else ():
        if isinstance(each, ast.Call):
            if not (isinstance(each.func, ast.Name) and each.func.id in HARMLESS):
                return False
        elif not isinstance(each, PLAIN) or getattr(each, "attr", "") in ("grad", "data"):
            return False
    return True


def within_reach(variables: Mapping[str, Any]) -> tuple[list[Optimizer], list[Tensor]]:
    """Return the optimizers and the weights among variables, and among attributes of objects in them.

    A weight is a parameter, or a tensor with error terms. Modules are left out: a forward pass updates none.
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
