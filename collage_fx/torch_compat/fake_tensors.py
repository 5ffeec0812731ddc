"""Tensors without elements, numbers without values: rests on fake tensors and symbolic shapes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

RELIED_ON = (
    "torch.fx.experimental.symbolic_shapes:ShapeEnv has create_symfloatnode, create_symintnode",
    "torch.fx.experimental.symbolic_shapes:ShapeEnv has create_unspecified_symbol",
    "torch.fx.experimental.symbolic_shapes:ShapeEnv has evaluate_guards_expression",
    "torch.fx.experimental.symbolic_shapes:ShapeEnv has produce_guards_expression",
    "torch.fx.experimental.symbolic_shapes:ShapeEnv.create_symbol has var_to_sources",
    "torch.fx.experimental.symbolic_shapes:ShapeEnv.produce_guards_verbose has guards",
    "torch.fx.experimental.sym_node:SymNode has expr, shape_env",
)


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Allocate real tensors although a fake tensor mode is active (as it is while a backend runs)."""
    with unset_fake_temporarily():
        yield


def another_fake(value: torch.Tensor) -> torch.Tensor:
    """Make a fake tensor like another, which is faster than running an operation that makes one."""
    assert isinstance(value, FakeTensor)
    with unset_fake_temporarily():
        meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return FakeTensor(value.fake_mode, meta, value.device)


def current_size(size: int | torch.SymInt) -> int:
    """The size that a tensor has in the call that is compiled, read without specializing on it."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else size


def symbol_source(value: torch.SymInt | torch.SymFloat) -> str:
    """The expression a symbolic number was read from, as ``self.param_groups[0]['lr']``, else its symbol."""
    expression = value.node.expr
    sources = value.node.shape_env.var_to_sources.get(expression, ())
    return str(sources[0].name) if sources and isinstance(sources[0].name, str) else str(expression)


def detect_fake_mode(tensors: Iterable[torch.Tensor]) -> FakeTensorMode | None:
    """The mode of the first fake tensor among some tensors; None where none of them is fake."""
    return next((tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor)), None)


class SymbolicScope:
    """Fake tensors and symbolic numbers that belong to no capture, for a graph that is made from scratch.

    A context manager: within it, graphs of its values can be made and compiled, whatever is being compiled
    around it.

    Attributes:
        floats: the symbols of those inputs that are floats.
    """

    def __init__(self) -> None:
        self.shape_env = ShapeEnv()
        self.fake_mode = FakeTensorMode(shape_env=self.shape_env)
        self.floats: list[str] = []
        self._inputs: list[Any] = []
        self._fakes: list[torch.Tensor] = []
        self._has_symbols = False
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(unset_fake_temporarily())
        self._stack.enter_context(tracing(TracingContext(self.fake_mode)))

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def length(self, name: str, hint: int) -> Any:
        """Make a symbolic integer that is 2 at least."""
        source = ConstantSource(name)
        symbol = self.shape_env.create_symbol(hint, source, DimDynamic.DYNAMIC)
        return self.shape_env.create_symintnode(symbol, hint=hint, source=source)

    def number(self, name: str, kind: type) -> Any:
        """Make a symbolic number of any value: ``kind`` is ``torch.SymInt`` or ``torch.SymFloat``."""
        source = ConstantSource(name)
        hint: Any = 3 if kind is torch.SymInt else 0.3
        symbol = self.shape_env.create_unspecified_symbol(hint, source, DimDynamic.DYNAMIC)
        create = (
            self.shape_env.create_symintnode if kind is torch.SymInt else self.shape_env.create_symfloatnode
        )
        return create(symbol, hint=hint, source=source)

    def input(self, value: Any, *, has_symbols: bool = False) -> Any:
        """What a graph is compiled with for an input that takes values like this one.

        Args:
            value: a real tensor, which stays itself; a float, which becomes a 0-d tensor; or an integer.
            has_symbols: whether the sizes of a tensor are symbols while the graph is traced.
        """
        source = ConstantSource(f"input{len(self._inputs)}")
        if isinstance(value, int):
            symbol = self.shape_env.create_unspecified_symbol(value, source, DimDynamic.DYNAMIC)
            self._inputs.append(self.shape_env.create_symintnode(symbol, hint=value, source=source))
            return self._inputs[-1]
        if is_float := isinstance(value, float):
            value = torch.tensor(value, dtype=torch.float64)
        self._has_symbols |= has_symbols
        fake = self.fake_mode.from_tensor(value, static_shapes=not (is_float or has_symbols), source=source)
        self._fakes.append(fake)  # the mode forgets those that nobody refers to
        if is_float:
            number: Any = fake.item_memo
            self.floats.append(str(number.node.expr))
        self._inputs.append(number if is_float else fake)
        return value

    def guard(self) -> Callable[[Sequence[Any]], bool] | None:
        """Whether what was decided by values of the inputs is so for others; None where nothing was."""
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
        """Compute the fake value of a node from those of its operands, in their ``meta["val"]``."""
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with self.fake_mode:
            return node.target(*args, **kwargs)  # type: ignore[operator]

    def has_guards(self, *, below: int) -> bool:
        """Whether an operation had to look at the value of a symbol, so that the graph is for that alone.

        That a value is at most so large that ``below`` is not reached does not count.
        """
        return not all(
            isinstance(guard.expr, sympy.Le) and guard.expr.rhs.is_number and guard.expr.rhs >= below - 1
            for guard in self.shape_env.guards
        )
