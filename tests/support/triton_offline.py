"""Inspect and run the Triton code that Inductor makes for an H100/H200, on a machine without a GPU.

    graph = to_cuda(functional_graph(step, *tensors))  # or any functional ATen graph with a copy_ epilogue
    source = triton_source(graph)                      # the wrapper and its Triton kernels, as text
    run_in_interpreter(source, tensors)                # the kernels, executed: mutates the tensors in place
    ptx = compile_to_ptx(source)                       # kernel name -> PTX for sm_90, by LLVM, without a card

The four steps answer different questions. The source shows what Inductor kept of the graph (is the rounding
still there?), the interpreter shows what that source computes, bit for bit as IEEE 754 defines its
operations, and the PTX shows what LLVM kept of the source. What only the card decides (contraction by ptxas,
approximate functions) is named in the notes of ``_triton_worker.py``.

It works with a CPU build of torch and with a CUDA build on a machine without a driver; checked with torch
2.11, 2.13 and 2.15 and the Triton versions that these pin (3.6.0, 3.7.1, 3.9.0). Triton has to be installed
(Linux only): importing this module needs only torch, the functions need Triton. ``HAVE_TRITON`` says whether
it is there.

The imaginary card is that of ``collage_tools/gpu_code/imaginary_cuda.py``. What differs between Triton's
versions, besides:

* Triton 3.6 (torch 2.11) converts an array of one element with ``int()``, which NumPy 2.5 refuses (the worker
  mends it).
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, cast
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from collage_fx.torch_compat import TableKernel
from collage_tools.gpu_code.imaginary_cuda import CUDA, have_triton, imaginary_cuda, machine_code, to_cuda

__all__ = [
    "HAVE_TRITON",
    "compile_to_ptx",
    "copy_graph",
    "fake_cuda",
    "functional_graph",
    "imaginary_cuda",
    "kernels",
    "run_in_interpreter",
    "run_table_kernel",
    "to_cuda",
    "triton_source",
]

HAVE_TRITON = have_triton()

# ------------------------------------------------------------ graphs and fakes


def fake_cuda(
    shape: Sequence[int], dtype: torch.dtype = torch.bfloat16, *, mode: FakeTensorMode | None = None
) -> FakeTensor:
    """Make a contiguous fake tensor on cuda:0. All inputs of one graph must come from one ``mode``."""
    with mode if mode is not None else FakeTensorMode():
        tensor = torch.empty(tuple(shape), dtype=dtype, device=CUDA)
    assert isinstance(tensor, FakeTensor)
    return tensor


def copy_graph(gm: GraphModule) -> GraphModule:
    """Copy the graph, sharing its constants and fake values; ``meta`` dictionaries are copied one deep."""
    graph = Graph()
    new: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        new[node] = graph.node_copy(node, new.__getitem__)
    return GraphModule(gm, graph)


def placeholders(gm: GraphModule) -> list[Node]:
    return [n for n in gm.graph.nodes if n.op == "placeholder"]


def functional_graph(fn: Callable[..., Any], *inputs: torch.Tensor) -> GraphModule:
    """Capture the functional ATen graph that Inductor is given for ``fn(*inputs)``; changes no input.

    The placeholders are the inputs, in their order (Dynamo, which sorts them by first use, is not involved).
    AOTAutograd, with the library's decompositions, and Inductor's pre-grad and joint-graph passes have run;
    mutated inputs are written by a ``copy_`` epilogue. The inputs are CPU tensors; use :func:`to_cuda` on
    the result.
    """
    from torch._inductor.compile_fx import compile_fx
    from torch.fx.experimental.proxy_tensor import make_fx

    from collage_fx.capture import decompositions

    captured: list[GraphModule] = []

    def keep(gm: GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        captured.append(copy_graph(gm))

        def never_called(arguments: list[Any]) -> Any:
            raise AssertionError("the captured graph is not for running")

        never_called._boxed_call = True  # type: ignore[attr-defined]
        return never_called

    with torch.no_grad(), torch._functorch.config.patch(enable_autograd_cache=False):
        traced = make_fx(fn, tracing_mode="fake")(*inputs)
        compile_fx(traced, list(inputs), inner_compile=cast(Any, keep), decompositions=decompositions())
    (gm,) = captured
    return gm


# ------------------------------------------------------------- code generation


class _Captured(Exception):
    """Leaves Inductor at the point where it would load the generated module."""

    def __init__(self, source: str) -> None:
        super().__init__("the generated source was captured")
        self.source = source


def triton_source(gm: GraphModule, example_inputs: Sequence[Any] | None = None) -> str:
    """Return the wrapper and Triton kernels that Inductor generates for a functional ATen graph on an H200.

    ``gm`` is what ``compile_fx`` hands to its ``inner_compile``: ATen operations after decomposition, no
    mutation but a ``copy_`` epilogue onto placeholders. ``example_inputs`` are its fake inputs on cuda (by
    default the placeholders' ``meta["val"]``). The graph goes through ``compile_fx_inner`` itself, so every
    post-grad pass, lowering and the scheduler run as they do for a real card, under whatever
    ``torch._inductor.config`` is set; ``gm`` is left unchanged. Inductor gets what our operators
    compute.
    """
    _need_triton()
    import torch._inductor.config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.exc import InductorError
    from torch._inductor.graph import GraphLowering

    from collage_fx.lowering.elementary import in_elementary_operations

    if example_inputs is None:
        example_inputs = [n.meta["val"] for n in placeholders(gm)]
    devices = {t.device.type for t in example_inputs if isinstance(t, torch.Tensor)}
    if "cuda" not in devices:
        raise ValueError(f"the example inputs are on {sorted(devices)}: move the graph with to_cuda() first")

    def capture(lowering: GraphLowering) -> None:
        code = lowering.codegen()[0]
        raise _Captured(code.value)

    with (
        imaginary_cuda(),
        mock.patch.object(GraphLowering, "compile_to_module", capture),
        torch._inductor.config.patch(fx_graph_cache=False, fx_graph_remote_cache=False, cpp_wrapper=False),
    ):
        try:
            compile_fx_inner(in_elementary_operations(copy_graph(gm)), example_inputs)
        except _Captured as captured:
            return captured.source
        except InductorError as error:
            if isinstance(error.inner_exception, _Captured):
                return error.inner_exception.source
            raise
    raise AssertionError("Inductor returned without generating code: is the graph empty?")


def kernels(source: str) -> dict[str, str]:
    """Return the Triton source of each kernel in a generated module, by name, in the module's order."""
    found = {}
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "async_compile.triton":
            name, text = (ast.literal_eval(a) for a in call.args[:2])
            found[name] = text
    return found


def _need_triton() -> None:
    if not HAVE_TRITON:
        raise ModuleNotFoundError("this needs triton (Linux only) and numpy: pip install triton numpy")


# ------------------------------------------------------------------- execution


class _Interpreter:
    """A child process with ``TRITON_INTERPRET=1``, kept for the next call: its imports take seconds."""

    def __init__(self) -> None:
        _need_triton()
        worker = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_triton_worker.py")
        settings = {"TRITON_INTERPRET": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.process = subprocess.Popen(
            [sys.executable, worker],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **settings},
        )
        self._answer()

    def _answer(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"the interpreter process ended with code {self.process.wait()}; see its stderr above"
            )
        answer = json.loads(line)
        if not answer["ok"]:
            raise RuntimeError(f"the generated code failed in Triton's interpreter:\n{answer['error']}")

    def run(self, request: dict[str, str]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        self._answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()


_current: _Interpreter | None = None


def _interpreter() -> _Interpreter:
    global _current
    if _current is None or _current.process.poll() is not None:
        _current = _Interpreter()
        atexit.register(_current.close)
    return _current


def run_in_interpreter(source: str, inputs: Sequence[Any]) -> list[Any]:
    """Run a generated module's ``call`` on CPU tensors, its Triton kernels under Triton's interpreter.

    The tensors in ``inputs`` (in the placeholders' order; aliasing among them is kept) are mutated in place
    exactly where the kernels store to them. Returns the graph's outputs. Shapes, strides and dtypes must be
    those of the example inputs: the wrapper's own assertions check sizes and strides, this function does not
    check dtypes.

    Every kernel runs in the wrapper's order, over the grid that Inductor computes for it. Conversions to bf16
    are the hardware's, not those of Triton's interpreter; see Note [Triton's interpreter rounds bf16 wrongly]
    and Note [What the interpreter cannot say about the card] in ``_triton_worker.py``.
    """
    with tempfile.TemporaryDirectory(prefix="triton_offline_") as folder:
        paths = {name: os.path.join(folder, name) for name in ("source", "inputs", "results")}
        with open(paths["source"], "w") as file:
            file.write(source)
        torch.save(list(inputs), paths["inputs"])
        _interpreter().run(paths)
        results, outputs = torch.load(paths["results"], weights_only=True)
    for tensor, result in zip(inputs, results, strict=True):
        if (
            isinstance(tensor, torch.Tensor) and 0 not in tensor.stride()
        ):  # one element is not written as many
            tensor.copy_(result)
    return list(outputs)


_LAUNCH = """

def call(inputs):
    import torch
    table = torch.tensor([x if isinstance(x, int) else x.data_ptr() for x in inputs])
    {name}.run(table, torch.arange({blocks}), {blocks}, 1, 1, stream=0)
    return ()
"""


def run_table_kernel(kernel: TableKernel, inputs: Sequence[Any], length: int) -> None:
    """Launch a printed kernel for one tensor in the interpreter; ``inputs`` are those of the rule's graph."""
    blocks = -(-length // kernel.size)
    source = kernel.source[False] + _LAUNCH.format(name=kernel.name, blocks=blocks)
    run_in_interpreter(source, [inputs[argument] for argument in kernel.arguments])


# ----------------------------------------------------------------- compilation


def compile_to_ptx(source: str, stage: str = "ptx") -> dict[str, str]:
    """Compile each kernel of a generated module for sm_90 and return its PTX by kernel name.

    The options (fp fusion, warps, constants, alignment) are those that Inductor would compile the kernel
    with, for the first of its configurations. ``stage`` may also be ``"ttir"``, ``"ttgir"``, ``"llir"`` or
    ``"sass"``: the machine code, which shows what ptxas contracted to FFMA (it needs the ``cuobjdump`` or
    ``nvdisasm`` that Triton ships).
    """
    return {name: str(machine_code(name, text).stages[stage]) for name, text in kernels(source).items()}
