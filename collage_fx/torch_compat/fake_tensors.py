"""Fake tensors and symbolic numbers: rests on torch's fake tensor mode and symbolic shapes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import sympy
import torch
from torch._dispatch.python import enable_python_dispatcher as enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from collage_fx.torch_compat.tensors import is_wrapper

RELIED_ON = (
    "torch.fx.experimental.symbolic_shapes:ShapeEnv has create_symfloatnode, create_symintnode",
    "torch.fx.experimental.symbolic_shapes:ShapeEnv has create_unspecified_symbol",
    "torch.fx.experimental.symbolic_shapes:ShapeEnv has evaluate_guards_expression",
    "torch.fx.experimental.symbolic_shapes:ShapeEnv has produce_guards_expression",
    "torch.fx.experimental.symbolic_shapes:ShapeEnv.create_symbol has var_to_sources",
    "torch.fx.experimental.symbolic_shapes:ShapeEnv.produce_guards_verbose has guards",
    "torch.fx.experimental.symbolic_shapes:ShapeGuard has expr",
    "torch.fx.experimental.sym_node:SymNode has expr, shape_env",
    "torch._subclasses.fake_tensor:FakeTensor.__new__ has item_memo",
)

#: Context manager: operations on real tensors although a fake tensor mode is active, as in a backend.
real_tensors: Callable[[], contextlib.AbstractContextManager[Any]] = unset_fake_temporarily


def fake_like(value: torch.Tensor, shape: Sequence[int] | None = None) -> torch.Tensor:
    """Make a fake tensor like another, or a contiguous one of another shape, faster than by an operation."""
    assert isinstance(value, FakeTensor)
    with unset_fake_temporarily():
        if shape is not None:
            meta = torch.empty(shape, dtype=value.dtype, device="meta")
        else:
            meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return FakeTensor(value.fake_mode, meta, value.device)


def current_size(size: int | torch.SymInt) -> int:
    """Return a size's value in the call that is being compiled, without specializing on it."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else size


def symbol_source(value: torch.SymInt | torch.SymFloat) -> str:
    """Return the expression that a symbolic number was read from, or its symbol."""
    expression = value.node.expr
    sources = value.node.shape_env.var_to_sources.get(expression, ())
    return str(sources[0].name) if sources and isinstance(sources[0].name, str) else str(expression)


def decides_by_number(value: torch.Tensor) -> bool:
    """Return whether a trace has made a decision by the number in a 0-d input, read with ``item()``."""
    number = value.item_memo if isinstance(value, FakeTensor) else None
    return number is not None and bool(decisions_by([number]))


def decisions_by(numbers: Sequence[Any]) -> int:
    """Return how many decisions a trace has made by symbols of some symbolic numbers."""
    symbols = {symbol for number in numbers for symbol in number.node.expr.free_symbols}
    guards = numbers[0].node.shape_env.guards if numbers else ()
    return sum(not symbols.isdisjoint(guard.expr.free_symbols) for guard in guards)


def symbols_of(numbers: Iterable[Any]) -> frozenset[str]:
    """Return the names of the symbols in symbolic numbers."""
    return frozenset(str(symbol) for number in numbers for symbol in number.node.expr.free_symbols)


def is_in_host_memory(tensor: torch.Tensor) -> bool:
    """Return whether C++ functions can read a tensor's elements on the CPU: it is no fake, and no wrapper."""
    return tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor) and not is_wrapper(tensor)


def detect_fake_mode(tensors: Iterable[torch.Tensor]) -> FakeTensorMode | None:
    """Return the mode of the first fake tensor; None if no tensor is fake."""
    return next((tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor)), None)


class SymbolicScope:
    """Scope for a graph that is built from scratch, with fake tensors and symbols that belong to no capture.

    As a context manager: inside, graphs of its values can be compiled, even during another compilation.

    Attributes:
        numbers: the inputs that are floats.
        symbols: names of their symbols, for which a trace may put constants.
    """

    def __init__(self) -> None:
        self.shape_env = ShapeEnv()
        self.fake_mode = FakeTensorMode(shape_env=self.shape_env)
        self.numbers: list[Any] = []
        self.symbols: list[str] = []
        self._inputs: list[Any] = []
        self._fakes: list[torch.Tensor] = []
        self._has_symbols = False
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> SymbolicScope:
        self._stack.enter_context(unset_fake_temporarily())
        self._stack.enter_context(tracing(TracingContext(self.fake_mode)))
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def length(self, name: str, hint: int, most: int | None = None) -> Any:
        """Make a symbolic integer that is at least 2, and at most ``most``."""
        source = ConstantSource(name)
        symbol = self.shape_env.create_symbol(hint, source, DimDynamic.DYNAMIC)
        if most is not None:
            self.shape_env.constrain_symbol_range(symbol, 2, most)
        return self.shape_env.create_symintnode(symbol, hint=hint, source=source)

    def number(self, name: str, hint: Any) -> Any:
        """Make a symbolic number of the kind of ``hint``, which is its value while a graph is traced."""
        source, env = ConstantSource(name), self.shape_env
        symbol = env.create_unspecified_symbol(hint, source, DimDynamic.DYNAMIC)
        create = env.create_symintnode if isinstance(hint, int) else env.create_symfloatnode
        return create(symbol, hint=hint, source=source)

    def input(self, value: Any, *, has_symbols: bool = False) -> Any:
        """Return an example input for compiling a graph whose input takes values like this value.

        Args:
            value: a real tensor, returned unchanged; a float, which becomes a 0-d tensor; or an integer.
            has_symbols: whether the sizes of a tensor are symbols while the graph is traced.
        """
        name = f"input{len(self._inputs)}"
        if isinstance(value, int):
            self._inputs.append(self.number(name, value))
            return self._inputs[-1]
        if is_float := isinstance(value, float):
            value = torch.tensor(value, dtype=torch.float64)
        self._has_symbols |= has_symbols
        is_static, source = not (is_float or has_symbols), ConstantSource(name)
        fake = self.fake_mode.from_tensor(value, static_shapes=is_static, source=source)
        self._fakes.append(fake)  # the mode forgets fake tensors without references
        if is_float:
            number: Any = fake.item_memo
            self.numbers.append(number)
            self.symbols.append(str(number.node.expr))
        self._inputs.append(number if is_float else fake)
        return value

    def guard(self) -> Callable[[Sequence[Any]], bool] | None:
        """Return a function that tests whether a list of inputs satisfies all guards; None without guards."""
        code = self.shape_env.produce_guards_expression(self._inputs, ignore_static=not self._has_symbols)
        if code is None:
            return None
        compiled: Any = compile(code, "guards", "eval")
        return partial(self.shape_env.evaluate_guards_expression, compiled)

    def tensor(
        self, size: Sequence[Any], stride: Sequence[Any], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Make a fake tensor whose sizes and strides may be symbols of this scope."""
        with self.fake_mode:
            return torch.empty_strided(size, stride, dtype=dtype, device=device)

    def run(self, node: torch.fx.Node) -> Any:
        """Compute the fake value of a node from the ``meta["val"]`` of its operands."""
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with self.fake_mode:
            return node.target(*args, **kwargs)  # type: ignore[operator]

    def has_guards(self, *, below: int) -> bool:
        """Return whether an operation specialized on the value of a symbol.

        The graph is then valid for this value only. Upper limits of ``below - 1`` or more do not count.
        """
        found = (guard.expr for guard in self.shape_env.guards)
        return not all(isinstance(x, sympy.Le) and x.rhs.is_number and x.rhs >= below - 1 for x in found)
