"""Inductor's Triton kernels, for many tensors in one launch: rests on the text of the generated code.

Note [A kernel over a table]
----------------------------
Inductor's kernel of a flat rule takes the addresses of a tensor's arguments and its length. Launching it for
each tensor of a model needs hundreds of launches, and a launch takes longer than the work for most tensors.
So the kernel's body is put into another frame, which reads the arguments from a row of a table of 64-bit
words: an address for each pointer, and the length. A program finds its row and its block in its own word,
``row << 32 | block``. The arithmetic is Inductor's, unchanged:

* ``tl.program_id(0)`` becomes the index of the block in its tensor.
* The mask of a full block is all ones, which Triton omits: then the block loads and stores 16 bytes at a
  time, whatever the length of the tensor. The last block of a tensor keeps its mask.

Several kernels of numbers alone, or of the elements of one length, are called in sequence in a single
program, with a barrier in between: an element that a kernel reads has been written by the same program.
Kernels with other arguments are not framed; instead, Inductor's code is called for each tensor, with the same
result.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch._inductor.async_compile import AsyncCompile

from collage_fx.torch_compat.triton_sums import ADDING, FUNCTIONS, TILE, TILES, TableSums

RELIED_ON = (
    "torch._inductor.async_compile:AsyncCompile.triton(self, kernel_name, source_code, device_str)",
    "torch._inductor.runtime.triton_heuristics:fixed_config(config, filename, triton_meta, inductor_meta)",
    "torch._inductor.runtime.triton_heuristics:FixedGrid has generate",
)

#: Elements of a block, and threads of the program that computes it: a thread has 16 bytes of bfloat16. It is
#: the best choice on an H200 also where most loads and stores are of single bytes.
BLOCK, THREADS = 1024, 128
#: Threads of a warp if Inductor does not say.
WARP = 32
#: Alignment of addresses, in bytes, for the variant of a kernel with accesses of this size.
ALIGNED_BYTES = 16


@dataclass(frozen=True)
class TableKernel:
    """Triton kernel over a table.

    Attributes:
        name: name of the kernel in profilers: different for each rule, the same in each process.
        arguments: for each column of a row, the index of the argument of Inductor's code whose address it
            holds; the length, if it is an argument, is itself in the last column.
        size: units of length per block.
        source: source of a module with the kernel: by True for aligned addresses of elements, False for any.
        accesses: the argument of each load and store.
        adding: the kernel that adds this kernel's partial sums, if it has any: Note [Sums of a launch].
        threads: threads of a program.
        tiles: tiles of a program, one after the other.
        begins: whether kernels are compiled ahead of their first launch.
    """

    begins: ClassVar[bool] = True
    name: str
    arguments: tuple[int, ...]
    size: int
    source: Mapping[bool, str]
    accesses: tuple[int, ...] = ()
    adding: TableKernel | None = None
    threads: int = WARP
    tiles: int = 1

    def begin(self) -> None:
        """Start to compile the kernel for aligned addresses, maybe in another process."""
        if not TableKernel.begins:
            return
        _begun(self.name, self.source[True])
        if self.adding is not None:
            self.adding.begin()

    def loaded(self, *, aligned: bool) -> Any:
        """Return the compiled kernel: ``run(table, programs, *grid, stream=...)``."""
        return _loaded(self.name, self.source[aligned])


@contextlib.contextmanager
def no_kernels_ahead() -> Iterator[None]:
    """Context manager: no kernel is compiled ahead of its first launch, as for a device that is not there."""
    before, TableKernel.begins = TableKernel.begins, False
    try:
        yield
    finally:
        TableKernel.begins = before


@functools.cache
def _begun(name: str, source: str) -> Any:
    return AsyncCompile().triton(name, source, device_str="cuda")


@functools.cache
def _loaded(name: str, source: str) -> Any:
    """Wait for a kernel, once: a future of Inductor loads the kernel again at each call of ``result``."""
    kernel = _begun(name, source)
    return kernel.result() if hasattr(kernel, "result") else kernel


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Context manager: make a CUDA device the current one, unless it is already, which is faster."""
    return nullcontext() if torch.cuda.current_device() == device.index else torch.cuda.device(device)


def launch(kernel: Any, table: torch.Tensor, programs: torch.Tensor, device: torch.device) -> None:
    """Launch a loaded kernel on the current stream, with one program for each word."""
    with on_device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        kernel.run(table, programs, programs.numel(), 1, 1, stream=stream)


# -- From Inductor's code to a kernel over a table


class _Unlike(Exception):
    """Error for code that cannot be put into another frame; the message says why."""


def table_kernel(
    code: str,
    arguments: int,
    length: int | None,
    elements: Collection[int],
    sums: TableSums | None = None,
) -> TableKernel | str:
    """Make a kernel over a table of Inductor's code for one tensor, or return why that is impossible.

    Args:
        code: source of a module that launches a single Triton kernel, or several kernels of numbers alone.
        arguments: number of arguments of ``call``.
        length: index of the argument that is the length; None if all arguments are numbers.
        elements: indices of the arguments that are tensors with elements.
        sums: sums that replace stores. The address of their partial sums is in one more column.
    """
    try:
        module = ast.parse(code)
        kernels = {name: _Kernel.parsed(name, text) for name, text in _texts(module)}
        runs = _runs(module, kernels, arguments)
        if length is not None:
            _check_lengths(kernels, runs, length)
        return _framed(kernels, runs, length, frozenset(elements), sums)
    except _Unlike as difference:
        return str(difference)


def _check_lengths(kernels: Mapping[str, _Kernel], runs: Sequence[_Run], length: int) -> None:
    """Raise an error unless each kernel works on vectors of the given length, a block at a time."""
    sizes = {_elements_of_a_unit(kernels[name].function) for name, _ in runs}
    counts = {kernels[name].count(passed) for name, passed in runs}
    if len(sizes) > 1 or counts != {_Argument(length)}:
        raise _Unlike(f"Inductor's {len(runs)} Triton kernels for each tensor have different lengths")


def _texts(module: ast.Module) -> Iterator[tuple[str, str]]:
    """Return the Triton kernels of generated code: name and module of each."""
    for call in ast.walk(module):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "async_compile.triton":
            yield ast.literal_eval(call.args[0]), ast.literal_eval(call.args[1])


@dataclass(frozen=True)
class _Kernel:
    """Syntax tree of a Triton kernel of Inductor.

    Attributes:
        imports: statements before it in its module.
        function: the kernel.
        triton_meta, inductor_meta: Inductor's metadata.
        signature: the types of its parameters, except the size of a block.
    """

    imports: list[ast.stmt]
    function: ast.FunctionDef
    triton_meta: ast.Dict
    inductor_meta: ast.Dict
    signature: Mapping[str, str]

    @classmethod
    def parsed(cls, name: str, text: str) -> _Kernel:
        *imports, function = ast.parse(text).body
        assert isinstance(function, ast.FunctionDef)
        (heuristic, _) = function.decorator_list
        assert isinstance(heuristic, ast.Call)
        meta = {each.arg: each.value for each in heuristic.keywords}
        triton_meta, inductor_meta = meta["triton_meta"], meta["inductor_meta"]
        assert isinstance(triton_meta, ast.Dict)
        assert isinstance(inductor_meta, ast.Dict)
        if ast.literal_eval(_item(inductor_meta, "grid_type")) != "Grid1D":
            raise _Unlike(f"Inductor's kernel {name} has more than one dimension of blocks")
        signature = ast.literal_eval(_item(triton_meta, "signature"))
        signature.pop("XBLOCK", None)
        return cls(imports, function, triton_meta, inductor_meta, signature)

    def count(self, passed: Sequence[Any]) -> Any:
        """Return the argument or constant that is passed as the number of the kernel's elements."""
        return dict(zip(self.signature, passed, strict=True)).get("xnumel")


class _StandIn(int):
    """Stand-in for an argument of generated code, recognized by identity."""


def _runs(module: ast.Module, kernels: Collection[str], arguments: int) -> list[_Run]:
    """Return the kernels that generated code runs, with their arguments, by number, and constants.

    The code is executed with stand-ins for arguments and kernels; it may use no other names, so this is safe.
    It is executed twice with different stand-ins: a number computed from an argument differs between both.
    """
    (function,) = (
        node for node in ast.walk(module) if isinstance(node, ast.FunctionDef) and node.name == "call"
    )
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    own = {node.id for node in names if isinstance(node.ctx, ast.Store)} | {"args"}
    known = {*kernels, *_AROUND}
    if unknown := {node.id for node in names} - own - known:
        raise _Unlike(f"Inductor's code uses {', '.join(sorted(unknown))}")
    noted, others = (
        _noted(function, kernels, [_StandIn(number + i) for i in range(arguments)]) for number in (2, 1 << 40)
    )
    if noted != others:
        raise _Unlike("Inductor's code computes a number that it runs a kernel with")
    if not noted:
        raise _Unlike("Inductor's code runs no kernel")
    return noted


_AROUND = {
    "torch": SimpleNamespace(
        cuda=SimpleNamespace(_DeviceGuard=lambda index: nullcontext(), set_device=lambda index: None)
    ),
    "get_raw_stream": lambda index: None,
    "copy_if_misaligned": lambda tensor: tensor,
    "assert_size_stride": lambda *layout: None,
    "assert_size_stride_grouped": lambda *layout: None,
}


def _noted(function: ast.FunctionDef, kernels: Collection[str], given: Sequence[_StandIn]) -> list[_Run]:
    runs: list[_Run] = []
    index = {id(each): i for i, each in enumerate(given)}

    def noting(name: str) -> Any:
        def run(*passed: Any, stream: Any) -> None:
            runs.append((name, [_Argument(index[id(p)]) if id(p) in index else p for p in passed]))

        return SimpleNamespace(run=run)

    scope = {**_AROUND, **{name: noting(name) for name in kernels}}
    exec(compile(ast.Module([function], []), "<Inductor's code>", "exec"), scope)
    scope["call"](*[None] * (len(function.args.args) - 1), list(given))
    return runs


@dataclass(frozen=True)
class _Argument:
    """Argument of the code around the kernel, by its number."""

    number: int


#: Name of a kernel, and the arguments and constants that it is run with.
_Run = tuple[str, list[Any]]

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


def launches_of(code: str) -> int:
    """Return the number of launches of Inductor's code: its Triton kernels, and calls of torch's kernels."""
    calls = (ast.unparse(each.func) for each in ast.walk(ast.parse(code)) if isinstance(each, ast.Call))
    return sum(each.startswith(("extern_kernels.", "torch.ops.")) or each.endswith(".run") for each in calls)


def _framed(
    kernels: Mapping[str, _Kernel],
    runs: Sequence[_Run],
    length: int | None,
    elements: frozenset[int],
    sums: TableSums | None,
) -> TableKernel:
    """Write the runs of kernels for one tensor as one kernel, in which a tensor is a row of a table."""
    columns: dict[int, str] = {}  # Inductor has two names for what is read and written in place: one address
    calls = []
    accesses: list[int] = []
    # Parameters of each of Inductor's kernels whose stores become sums.
    summed: dict[str, dict[str, int]] = {name: {} for name in kernels}
    for name, passed in runs:
        given = []
        for (parameter, kind), value in zip(kernels[name].signature.items(), passed, strict=True):
            if not isinstance(value, _Argument):
                given.append(repr(value))
            elif value.number == length:
                given.append("left")
            elif sums is not None and value.number in sums.arguments:
                summed[name][parameter] = value.number
                given.append("0")
            elif kind in _TYPES:
                columns.setdefault(value.number, kind)
                given.append(f"p{value.number}")
            else:
                raise _Unlike(f"Inductor's kernel takes an argument of type {kind}")
        named = dict(zip(kernels[name].signature, passed, strict=True))
        accessed = (named.get(parameter) for parameter in _accessed(kernels[name].function))
        numbers = [each.number for each in accessed if isinstance(each, _Argument)]
        accesses += [number for number in numbers if sums is None or number not in sums.arguments]
        calls.append(_called(name, given, length, sums))
    loads = []
    for i, (number, kind) in enumerate(columns.items()):
        address = f"tl.load(row + {i}).to(tl.pointer_type(tl.{_TYPES[kind]}))"
        loads.append(
            f"p{number} = tl.multiple_of({address}, ALIGNMENT)"
            if number in elements
            else f"p{number} = {address}"
        )
    first = kernels[runs[0][0]]
    held = [*columns] if length is None else [*columns, length]
    if length is not None:
        loads.append(f"left = tl.load(row + {len(columns)}).to(tl.int32)")
    tile = BLOCK if sums is None else TILE
    size = 1 if length is None else max(1, tile // _elements_of_a_unit(first.function))
    if sums is not None and {n for of in summed.values() for n in of.values()} != {*sums.arguments}:
        raise _Unlike("Inductor's kernel does not store every value of a sum")
    if sums is not None and len(kernels) < len(runs):
        raise _Unlike("Inductor's code launches one Triton kernel twice for each tensor")
    if sums is not None and size * sums.width != TILE:
        raise _Unlike(f"the kernel's units of {sums.width} elements do not fill a tile of {TILE}")
    rewriting = functools.partial(_Rewriting, sums, masked=length is not None)
    bodies = "\n\n".join(_body(each, kernels[each], rewriting(summed=summed[each])) for each in kernels)
    if sums is not None:
        if any(bodies.count(f"{name} = _add_terms(") != 1 for name in sums.names):
            raise _Unlike("several of Inductor's Triton kernels store the values of one sum")
        bodies = f"{FUNCTIONS}\n\n{bodies}"
        partials = f"partials = tl.load(row + {len(held)}).to(tl.pointer_type(tl.float64)) + block"
        loads += [*sums.zeros("XBLOCK"), partials]
    stores = [] if sums is None else sums.stores(f"tl.cdiv(left, XBLOCK * {TILES})")
    kind = "numbers" if length is None else "update" if sums is None else "summing_update"
    name = f"collage_{kind}_{hashlib.sha256((bodies + str(calls)).encode()).hexdigest()[:8]}"
    words = len(held) + (sums is not None)
    threads = _warp(first) if length is None else THREADS
    frame = f"""
@decorator
@triton.jit
def {name}(table, programs, XBLOCK: tl.constexpr, ALIGNMENT: tl.constexpr):
    program = tl.load(programs + tl.program_id(0))
    row = table + (program >> 32) * {words}
    block = (program & 0xffffffff).to(tl.int32)
{_indented(chr(10).join(loads))}
{_indented((chr(10) + "tl.debug_barrier()" + chr(10)).join(calls))}
{_indented(chr(10).join(stores))}
"""
    head = "\n".join(map(ast.unparse, first.imports))
    sources = {}
    for aligned in (True, False):
        config = {
            "XBLOCK": size,
            "ALIGNMENT": ALIGNED_BYTES if aligned else 1,
            "num_warps": threads // _warp(first),
            "num_stages": 1,
        }
        decorator = _decorator(config, first, name)
        sources[aligned] = f"{head}\n\n{bodies}\n{frame.replace('decorator', decorator, 1)}"
    adding = None if sums is None else _adding(first, head)
    tiles = 1 if sums is None else TILES
    return TableKernel(name, tuple(held), size * tiles, sources, tuple(accesses), adding, threads, tiles)


def _called(name: str, given: Sequence[str], length: int | None, sums: TableSums | None) -> str:
    """Write the call of a kernel's body for a block: without masks where the block is full."""
    arguments = ", ".join(given)
    if length is None:
        return f"_{name}({arguments}, block, XBLOCK, True)"
    if sums is None:
        full, masked = (f"_{name}({arguments}, block, XBLOCK, {is_full})" for is_full in (True, False))
        return f"if left >= (block + 1) * XBLOCK:\n    {full}\nelse:\n    {masked}"
    of_thread = ", ".join(sums.names)
    full, masked = (
        f"    for tile in range({TILES}):\n        {of_thread} = "
        f"_{name}({arguments}, {of_thread}, block * {TILES} + tile, XBLOCK, {is_full})"
        for is_full in (True, False)
    )
    return f"if left >= (block + 1) * (XBLOCK * {TILES}):\n{full}\nelse:\n{masked}"


def _accessed(function: ast.FunctionDef) -> Iterator[str]:
    """Return the parameters that a kernel loads from and stores into, for each load and store."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("tl.load", "tl.store"):
            yield ast.unparse(node.args[0]).partition(" + ")[0]


def _adding(like: _Kernel, head: str) -> TableKernel:
    """Return the kernel that adds partial sums, on the device of another kernel."""
    name = "collage_add_sums"
    config = {"XBLOCK": BLOCK, "num_warps": THREADS // _warp(like), "num_stages": 1}
    text = ADDING.format(name=name).replace("decorator", _decorator(config, like, name), 1)
    return TableKernel(name, (), 1, dict.fromkeys((True, False), f"{head}\n{text}"), threads=THREADS)


def _body(name: str, kernel: _Kernel, rewriting: _Rewriting) -> str:
    """Write the body of a kernel as a function of its block's number, and of whether the block is full."""
    rewriting.rounded_roots = _rounded_roots(kernel.function)
    statements = [
        ast.unparse(ast.fix_missing_locations(rewriting.visit(each))) for each in kernel.function.body
    ]
    if not rewriting.has_block or (rewriting.masked and not rewriting.has_mask):
        raise _Unlike("Inductor's kernel has an unknown frame")
    names = [] if rewriting.sums is None else rewriting.sums.names
    statements += [f"return {', '.join(names)}"] if names else []
    parameters = ", ".join([*kernel.signature, *names])
    return f"""{_LARGEST if rewriting.has_largest else ""}@triton.jit
def _{name}({parameters}, block, XBLOCK: tl.constexpr, IS_FULL: tl.constexpr):
{_indented(chr(10).join(statements))}
"""


def _rounded_roots(function: ast.FunctionDef) -> set[str]:
    """Return the variables with a square root that is only rounded, and that integer squared and compared.

    Such a root may be approximate: ``code_of_number_by_fma`` in ``numerics/blocks.py``.
    """
    texts = {
        ast.unparse(each.targets[0]): ast.unparse(each.value)
        for each in function.body
        if isinstance(each, ast.Assign)
    }
    names = [each for each in ast.walk(function) if isinstance(each, ast.Name)]
    loads = Counter(each.id for each in names if isinstance(each.ctx, ast.Load))
    variable = {text: name for name, text in texts.items()}
    found = set()
    for root, text in texts.items():
        near = variable.get(f"libdevice.nearbyint({root})")
        square = variable.get(f"{near} * {near}")
        is_root = re.fullmatch(r"(?:tl\.sqrt_rn|libdevice\.sqrt)\((\w+)\)", text)
        if is_root and loads[root] == 1 and f"{square} > {is_root[1]}" in variable:
            found.add(root)
    return found


#: Maximum of floats, NaN if one of them is: an instruction of a GPU, where Inductor's takes three.
_LARGEST = """@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _largest(values, dim: tl.constexpr):
    return tl.reduce(values, dim, _larger)


"""


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _item(mapping: ast.Dict, name: str) -> ast.expr:
    return next(
        value
        for key, value in zip(mapping.keys, mapping.values, strict=True)
        if isinstance(key, ast.Constant) and key.value == name
    )


def _warp(kernel: _Kernel) -> int:
    """Return the threads of a warp on the device of a kernel: 32, or 64 on some AMD devices."""
    device = _item(kernel.triton_meta, "device")
    told = [each.value for each in getattr(device, "keywords", []) if each.arg == "warp_size"]
    return next((size for size in map(ast.literal_eval, told) if size), WARP)


def _elements_of_a_unit(function: ast.FunctionDef) -> int:
    """Return the length of the loop within a block: that of a persistent reduction."""
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


class _Rewriting(ast.NodeTransformer):
    """Rewriting of a kernel's body: its block, masks that are not needed, and sums.

    Args:
        sums: the sums of the kernel, if any.
        summed: mapping from parameters whose stores become sums to the numbers of their arguments.
        masked: whether the kernel has tensors.
    """

    def __init__(self, sums: TableSums | None, summed: Mapping[str, int], *, masked: bool) -> None:
        self.sums = sums
        self.summed = summed
        self.masked = masked
        self.rounded_roots: set[str] = set()
        self.has_block = self.has_mask = self.has_largest = False

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if ast.unparse(node) == "tl.program_id(0)":
            self.has_block = True
            return ast.Name("block", ast.Load())
        if ast.unparse(node.func) == "triton_helpers.max2":
            self.has_largest = True
            return self.generic_visit(ast.Call(ast.Name("_largest", ast.Load()), node.args, node.keywords))
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> Any:
        call = node.value
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "tl.store":
            address, value, mask = map(ast.unparse, call.args)
            pointer = address.partition(" + ")[0]
            if self.sums is not None and pointer in self.summed:
                return ast.parse(self.sums.statement(self.summed[pointer], value, mask)).body[0]
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> Any:
        if ast.unparse(node.targets[0]) in self.rounded_roots and isinstance(node.value, ast.Call):
            approximate = ast.parse("tl.sqrt", mode="eval").body
            return ast.Assign(node.targets, ast.Call(approximate, node.value.args, []))
        if self.masked and ast.unparse(node) == "xmask = xindex < xnumel":
            self.has_mask = True
            return ast.parse(_MASKS).body[0]
        return self.generic_visit(node)


def _decorator(config: Mapping[str, int], kernel: _Kernel, name: str) -> str:
    """Write Inductor's decorator for a kernel of one configuration, with the metadata of this kernel.

    Fused multiply-adds are off: LLVM would choose separately for each copy of an expression (full block, last
    block, each element of a thread) which of two products to fuse, and bits would depend on the index.
    """
    constants = [each for each in config if not each.startswith("num_")]
    signature = {"table": "*i64", "programs": "*i64", **dict.fromkeys(constants, "constexpr")}
    aligned = [{(i,): [["tt.divisibility", 16]] for i in range(2)}]
    changes = {"signature": signature, "constants": {}, "configs": aligned, "enable_fp_fusion": False}
    triton = _with(kernel.triton_meta, **changes)
    grid = ["_grid_0", "_grid_1", "_grid_2"]
    inductor = _with(
        kernel.inductor_meta,
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
    """Return the text of a dictionary with other values for these keys."""
    items = zip(mapping.keys, mapping.values, strict=True)
    kept = {ast.unparse(key): ast.unparse(value) for key, value in items if key is not None}
    kept |= {repr(name): repr(value) for name, value in changes.items()}
    return "{" + ", ".join(f"{name}: {value}" for name, value in kept.items()) + "}"
