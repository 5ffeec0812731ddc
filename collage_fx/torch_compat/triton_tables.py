"""Inductor's Triton kernels, for many tensors in one launch: rests on the text of the code that it generates.

Note [A kernel over a table]
----------------------------
Inductor's kernel of a flat rule takes the addresses of one tensor's arguments and its length. Launched for
each tensor of a model that is hundreds of launches, each of which takes longer than most tensors. So its body
is put into another frame, in which the arguments are not those of the launch, but a row of a table of 64-bit
words: an address for each pointer, and the length. A program finds its row and its block in a word of its
own, ``row << 32 | block``. The arithmetic is Inductor's to the letter:

* ``tl.program_id(0)`` becomes the number of the block in its tensor;
* where a block is full, its mask is one of ones, which Triton leaves out: then it loads and stores 16 bytes
  at a time, whatever the length of the tensor. The last block of a tensor keeps the mask.

A kernel with other arguments, or more than one, is not taken: what calls Inductor's code tensor by tensor
does the same.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch._inductor.async_compile import AsyncCompile

__all__ = ["TableKernel", "launch", "table_kernel"]

RELIED_ON = (
    "torch._inductor.async_compile:AsyncCompile.triton(self, kernel_name, source_code, device_str)",
    "torch._inductor.runtime.triton_heuristics:fixed_config(config, filename, triton_meta, inductor_meta)",
    "torch._inductor.runtime.triton_heuristics:FixedGrid has generate",
)

#: Elements of a block, and the threads of a program that computes one, in warps.
BLOCK, WARPS = 1024, 4
#: Bytes that addresses are multiples of in the kernel that accesses so many at once.
ALIGNMENT = 16


@dataclass(frozen=True)
class TableKernel:
    """A Triton kernel over a table.

    Attributes:
        name: the kernel's.
        arguments: which argument of Inductor's code the address in each column of a row is; the length is in
            the column behind them.
        size: units of length of a block.
        source: of a module with the kernel, by whether all the addresses of elements are aligned.
    """

    name: str
    arguments: tuple[int, ...]
    size: int
    source: Mapping[bool, str]

    def begin(self) -> None:
        """Have Inductor compile the kernel for aligned addresses, which may go on in another process."""
        _begun(self.name, self.source[True])

    def loaded(self, *, aligned: bool) -> Any:
        """The compiled kernel: ``run(table, programs, *grid, stream=...)``."""
        kernel = _begun(self.name, self.source[aligned])
        return kernel.result() if hasattr(kernel, "result") else kernel


@functools.cache
def _begun(name: str, source: str) -> Any:
    return AsyncCompile().triton(name, source, device_str="cuda")


def launch(kernel: Any, table: torch.Tensor, programs: torch.Tensor, device: torch.device) -> None:
    """Launch a loaded kernel with as many programs as there are words for them, on the current stream."""
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        kernel.run(table, programs, programs.numel(), 1, 1, stream=stream)


# -- From Inductor's code to a kernel over a table


class _Unlike(Exception):
    """Code that is not of the kind that can be put into another frame; the message says why."""


def table_kernel(
    code: str, arguments: int, length: int | None, elements: Collection[int]
) -> TableKernel | str:
    """The kernel over a table that does what Inductor's code does for one tensor, or why there is none.

    Args:
        code: a module that launches one Triton kernel, whatever its arguments.
        arguments: how many ``call`` takes.
        length: which of them is the length; None if it takes numbers alone.
        elements: which of them are tensors with elements.
    """
    try:
        module = ast.parse(code)
        ((name, text),) = _kernels(module)
        passed = _passed(module, name, arguments)
        return _framed(name, ast.parse(text), passed, length, frozenset(elements))
    except _Unlike as difference:
        return str(difference)


def _kernels(module: ast.Module) -> list[tuple[str, str]]:
    found = [
        (ast.literal_eval(call.args[0]), ast.literal_eval(call.args[1]))
        for call in ast.walk(module)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "async_compile.triton"
    ]
    if len(found) != 1:
        raise _Unlike(f"Inductor has written {len(found)} Triton kernels for it")
    return found


class _StandIn(int):
    """Stands for an argument of generated code, known again by its identity."""


def _passed(module: ast.Module, name: str, arguments: int) -> list[Any]:
    """What the one kernel is run with: stand-ins for arguments of the code, and constants."""
    functions = [
        node for node in ast.walk(module) if isinstance(node, ast.FunctionDef) and node.name == "call"
    ]
    runs: list[tuple[Any, ...]] = []
    guard = SimpleNamespace(_DeviceGuard=lambda index: nullcontext(), set_device=lambda index: None)
    names: dict[str, Any] = {
        name: SimpleNamespace(run=lambda *passed, stream: runs.append(passed)),
        "torch": SimpleNamespace(cuda=guard),
        "get_raw_stream": lambda index: None,
        "copy_if_misaligned": lambda tensor: tensor,
        "assert_size_stride": lambda *layout: None,
        "assert_size_stride_grouped": lambda *layout: None,
    }
    (function,) = functions
    own = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    own -= {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and _is_set(node)}
    unknown = own - {*names, "args"}
    if unknown:
        raise _Unlike(f"Inductor's code uses {', '.join(sorted(unknown))}")
    exec(compile(ast.Module([function], []), "<Inductor's code>", "exec"), names)
    given = [_StandIn(2 + i) for i in range(arguments)]
    names["call"](*[None] * (len(function.args.args) - 1), list(given))
    if len(runs) != 1:
        raise _Unlike(f"Inductor's code launches its kernel {len(runs)} times")
    index = {id(each): i for i, each in enumerate(given)}
    return [_Argument(index[id(each)]) if id(each) in index else each for each in runs[0]]


def _is_set(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)


@dataclass(frozen=True)
class _Argument:
    """An argument of the code around the kernel, by its number."""

    number: int


_TYPES = {
    "*bf16": "bfloat16",
    "*fp16": "float16",
    "*fp32": "float32",
    "*fp64": "float64",
    "*fp8e4nv": "float8e4nv",
    "*fp8e5": "float8e5",
    "*i1": "int1",
    "*i8": "int8",
    "*i16": "int16",
    "*i32": "int32",
    "*i64": "int64",
    "*u8": "uint8",
    "*u16": "uint16",
    "*u32": "uint32",
    "*u64": "uint64",
}


def _framed(
    name: str, module: ast.Module, passed: Sequence[Any], length: int | None, elements: frozenset[int]
) -> TableKernel:
    *imports, function = module.body
    assert isinstance(function, ast.FunctionDef)
    (heuristic, _) = function.decorator_list
    assert isinstance(heuristic, ast.Call)
    meta = {each.arg: each.value for each in heuristic.keywords}
    triton_meta, inductor_meta = meta["triton_meta"], meta["inductor_meta"]
    assert isinstance(triton_meta, ast.Dict)
    assert isinstance(inductor_meta, ast.Dict)
    if ast.literal_eval(_item(inductor_meta, "grid_type")) != "Grid1D":
        raise _Unlike("Inductor's kernel has more than one dimension of blocks")
    signature = ast.literal_eval(_item(triton_meta, "signature"))
    parameters = [each for each in signature if each != "XBLOCK"]
    columns: list[int] = []
    loads: list[str] = []
    at_row: dict[int, str] = {}
    for parameter, value in zip(parameters, passed, strict=True):
        kind = signature[parameter]
        if not isinstance(value, _Argument):
            loads.append(f"{parameter} = {value!r}")
        elif value.number == length:
            loads.append(f"{parameter} = left")
        elif kind not in _TYPES:
            raise _Unlike(f"Inductor's kernel takes an argument of type {kind}")
        elif value.number in at_row:  # Inductor has two names for what is read and written in place
            loads.append(f"{parameter} = {at_row[value.number]}")
        else:
            address = f"tl.load(row + {len(columns)}).to(tl.pointer_type(tl.{_TYPES[kind]}))"
            if value.number in elements:
                address = f"tl.multiple_of({address}, ALIGNMENT)"
            loads.append(f"{parameter} = {address}")
            at_row[value.number] = parameter
            columns.append(value.number)
    size = 1 if length is None else max(1, BLOCK // _elements_of_a_unit(function))
    body = _Body(masked=length is not None)
    statements = "\n".join(ast.unparse(ast.fix_missing_locations(body.visit(each))) for each in function.body)
    if not body.has_block or (length is not None and not body.has_mask):
        raise _Unlike("Inductor's kernel has another frame than those that are known")
    arguments = ", ".join(parameters)
    calls = f"_{name}({arguments}, block, XBLOCK, True)"
    if length is not None:
        masked = f"_{name}({arguments}, block, XBLOCK, False)"
        calls = f"if left >= (block + 1) * XBLOCK:\n    {calls}\nelse:\n    {masked}"
    width = len(columns) + 1
    frame = f"""
@triton.jit
def _{name}({arguments}, block, XBLOCK: tl.constexpr, IS_FULL: tl.constexpr):
{_indented(statements)}

@decorator
@triton.jit
def {name}(table, programs, XBLOCK: tl.constexpr, ALIGNMENT: tl.constexpr):
    program = tl.load(programs + tl.program_id(0))
    row = table + (program >> 32) * {width}
    block = (program & 0xffffffff).to(tl.int32)
    left = tl.load(row + {len(columns)}).to(tl.int32)
{_indented(chr(10).join(loads))}
{_indented(calls)}
"""
    head = "\n".join(map(ast.unparse, imports))
    sources = {}
    for aligned in (True, False):
        config = {
            "XBLOCK": size,
            "ALIGNMENT": ALIGNMENT if aligned else 1,
            "num_warps": WARPS if length is not None else 1,
            "num_stages": 1,
        }
        decorator = _decorator(config, triton_meta, inductor_meta, name)
        sources[aligned] = f"{head}\n{frame.replace('decorator', decorator, 1)}"
    return TableKernel(name, tuple(columns), size, sources)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _item(mapping: ast.Dict, name: str) -> ast.expr:
    return next(
        value
        for key, value in zip(mapping.keys, mapping.values, strict=True)
        if isinstance(key, ast.Constant) and key.value == name
    )


def _elements_of_a_unit(function: ast.FunctionDef) -> int:
    """The length of the loop within a block: that of a reduction that is done at once."""
    for each in function.body:
        if isinstance(each, ast.AnnAssign) and ast.unparse(each.target) == "R0_BLOCK":
            return int(ast.literal_eval(each.value)) if each.value is not None else 1
    return 1


_MASKS = """
if IS_FULL:
    xmask = tl.full(xindex.shape, True, tl.int1)
else:
    xmask = xindex < xnumel
"""


class _Body(ast.NodeTransformer):
    """Rewrites the body of a kernel: which block it computes, and where it needs no mask."""

    def __init__(self, *, masked: bool) -> None:
        self.masked = masked
        self.has_block = self.has_mask = False

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if ast.unparse(node) == "tl.program_id(0)":
            self.has_block = True
            return ast.Name("block", ast.Load())
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> Any:
        if self.masked and ast.unparse(node) == "xmask = xindex < xnumel":
            self.has_mask = True
            return ast.parse(_MASKS).body[0]
        return self.generic_visit(node)


def _decorator(config: Mapping[str, int], triton_meta: ast.Dict, inductor_meta: ast.Dict, name: str) -> str:
    """Inductor's decorator for a kernel of a known configuration, with what it knows of this one."""
    constants = [each for each in config if not each.startswith("num_")]
    signature = {"table": "*i64", "programs": "*i64", **dict.fromkeys(constants, "constexpr")}
    aligned = [{(i,): [["tt.divisibility", 16]] for i in range(2)}]
    triton = _with(triton_meta, signature=signature, constants={}, configs=aligned)
    grid = ["_grid_0", "_grid_1", "_grid_2"]
    inductor = _with(
        inductor_meta,
        grid_type="FixedGrid",
        fixed_grid=grid,
        extra_launcher_args=grid,
        kernel_name=name,
        mutated_arg_names=[],
    )
    return (
        f"triton_heuristics.fixed_config({dict(config)!r}, filename=__file__, "
        f"triton_meta={triton}, inductor_meta={inductor})"
    )


def _with(mapping: ast.Dict, **changes: Any) -> str:
    kept = {
        ast.unparse(key): ast.unparse(value)
        for key, value in zip(mapping.keys, mapping.values, strict=True)
        if key
    }
    kept |= {repr(name): repr(value) for name, value in changes.items()}
    return "{" + ", ".join(f"{name}: {value}" for name, value in kept.items()) + "}"
