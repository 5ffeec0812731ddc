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

Note [Pretending to have an sm_90 card]

Inductor asks for the device at four places: ``torch.cuda`` (is there a card, which), Dynamo's
``CudaInterface`` (whose static methods were bound when the class was made, so they are patched again),
``torch.utils._triton.triton_backend`` (which would load libcuda) and ``fake_tensor.init_gpu_context`` (which
would allocate on the card). Nearly every answer is cached by ``functools.cache``, so the caches are emptied
on the way in and on the way out: an answer from one world must not be seen in the other. Inside
:func:`pretend_sm90` nothing can run on "cuda"; fake tensors are all there is.

Differences between torch versions that this module bridges:

* 2.11's ``init_gpu_context`` asks ``torch.cuda.is_available``, 2.13's and 2.15's ask ``torch.accelerator``;
* 2.11 starts a pool of compile workers during code generation, and shutting it down took until its timeout of
  300 s on a machine without a driver: compilation is kept in this process;
* Triton 3.6 (torch 2.11) converts an array of one element with ``int()``, which NumPy 2.5 refuses (the worker
  mends it);
* a CPU build has no ``torch._C._cuda_getCurrentRawStream``, which every generated wrapper imports.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from types import ModuleType
from typing import Any, cast
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from collage_fx.torch_compat import TableKernel

__all__ = [
    "HAVE_TRITON",
    "compile_kernel",
    "compile_to_ptx",
    "copy_graph",
    "fake_cuda",
    "functional_graph",
    "kernels",
    "pretend_sm90",
    "resources",
    "run_in_interpreter",
    "to_cuda",
    "triton_source",
]

HAVE_TRITON = all(importlib.util.find_spec(name) is not None for name in ("triton", "numpy"))
CUDA = torch.device("cuda", 0)

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
    AOTAutograd and Inductor's pre-grad and joint-graph passes have run; mutated inputs are written by a
    ``copy_`` epilogue. The inputs are CPU tensors; use :func:`to_cuda` on the result.
    """
    from torch._inductor.compile_fx import compile_fx
    from torch.fx.experimental.proxy_tensor import make_fx

    captured: list[GraphModule] = []

    def keep(gm: GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        captured.append(copy_graph(gm))

        def never_called(arguments: list[Any]) -> Any:
            raise AssertionError("the captured graph is not for running")

        never_called._boxed_call = True  # type: ignore[attr-defined]
        return never_called

    with torch.no_grad(), torch._functorch.config.patch(enable_autograd_cache=False):
        traced = make_fx(fn, tracing_mode="fake")(*inputs)
        compile_fx(traced, list(inputs), inner_compile=cast(Any, keep))
    (gm,) = captured
    return gm


def to_cuda(gm: GraphModule, *, keep_on_cpu: Collection[str] = ()) -> GraphModule:
    """Copy a graph that was captured on CPU as the graph it would be on cuda:0.

    Placeholders' fake values move to cuda (but for the ones named in ``keep_on_cpu``, such as a 0-d learning
    rate that lives on the host), so do ``device`` arguments of nodes (``full``, ``empty``, ``device_put``),
    and every other node's ``meta["val"]`` is computed anew. Constants (``get_attr``) of no dimension stay on
    the CPU, as AOTAutograd leaves them; larger ones are refused, as there is no card to put them on.
    """
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    gm = copy_graph(gm)
    inputs = placeholders(gm)
    modes = {
        id(n.meta["val"].fake_mode): n.meta["val"].fake_mode for n in inputs if _is_fake(n.meta.get("val"))
    }
    if len(modes) != 1:
        raise ValueError(
            f"the placeholders' meta['val'] must be fake tensors of one mode, not of {len(modes)}"
        )
    (mode,) = modes.values()
    unknown = set(keep_on_cpu) - {n.name for n in inputs}
    if unknown:
        raise ValueError(f"keep_on_cpu names no placeholders: {sorted(unknown)}")

    for node in inputs:
        value: Any = node.meta.get("val")
        if _is_fake(value) and node.name not in keep_on_cpu:
            with mode:
                node.meta["val"] = torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=CUDA
                )
    for node in gm.graph.nodes:
        node.args = _moved(node.args)
        node.kwargs = _moved(node.kwargs)
        if node.op == "get_attr" and isinstance(getattr(gm, node.target, None), torch.Tensor):
            constant = getattr(gm, node.target)
            if constant.dim() > 0 and constant.device.type == "cpu":
                raise ValueError(
                    f"{node.name} is a constant of shape {tuple(constant.shape)}: it cannot move to cuda"
                )
    gm.recompile()
    with _without_card_errors():
        FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*(n.meta.get("val") for n in inputs))
    return gm


def _is_fake(value: object) -> bool:
    return isinstance(value, FakeTensor)


def _moved(arguments: Any) -> Any:
    def move(item: Any) -> Any:
        if isinstance(item, torch.device):
            return CUDA
        if isinstance(item, (list, tuple)):
            return type(item)(move(i) for i in item)
        if isinstance(item, dict):
            return {k: move(v) for k, v in item.items()}
        return item

    return move(arguments)


# ----------------------------------------------------------- an imaginary card


@dataclasses.dataclass(frozen=True)
class DeviceProps:
    """The answers of ``torch.cuda.get_device_properties`` for an H200, as far as Inductor asks."""

    name: str = "NVIDIA H200"
    major: int = 9
    minor: int = 0
    multi_processor_count: int = 132
    warp_size: int = 32
    regs_per_multiprocessor: int = 65536
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    shared_memory_per_block: int = 49152
    shared_memory_per_block_optin: int = 232448
    shared_memory_per_multiprocessor: int = 233472
    L2_cache_size: int = 62914560
    total_memory: int = 150_000_000_000
    is_integrated: bool = False
    gcnArchName: str = ""


def _forget_cached_answers() -> None:
    """Empty the ``functools`` caches of the modules that remember what the device is."""
    import torch._inductor.codecache
    import torch._inductor.codegen.triton
    import torch._inductor.codegen.triton_utils
    import torch._inductor.compile_fx
    import torch._inductor.runtime.hints
    import torch._inductor.runtime.runtime_utils
    import torch._inductor.scheduler
    import torch._inductor.utils
    import torch.utils._triton

    owners: list[Any] = [
        torch.utils._triton,
        torch._inductor.utils,
        torch._inductor.codecache,
        torch._inductor.codecache.CacheBase,
        torch._inductor.codegen.triton,
        torch._inductor.codegen.triton_utils,
        torch._inductor.compile_fx,
        torch._inductor.scheduler,
        torch._inductor.runtime.hints,
        torch._inductor.runtime.hints.DeviceProperties,
        torch._inductor.runtime.runtime_utils,
    ]
    for owner in owners:
        for value in list(vars(owner).values()):
            function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
            if isinstance(function, functools._lru_cache_wrapper):
                function.cache_clear()


@contextlib.contextmanager
def _without_card_errors() -> Iterator[None]:
    """Let fake tensors be made on "cuda" although something says there is a card (see the Note above)."""
    from torch._subclasses import fake_tensor

    with mock.patch.object(fake_tensor, "init_gpu_context"):
        yield


def _pretend_backend() -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    return make_backend(GPUTarget("cuda", 90, 32))


@contextlib.contextmanager
def pretend_sm90() -> Iterator[None]:
    """Make torch, Inductor and Triton believe that cuda:0 is an H200, for code generation; undone on exit.

    See Note [Pretending to have an sm_90 card].
    """
    import torch._inductor.compile_fx
    import torch.utils._triton
    from torch._dynamo import device_interface
    from torch._inductor.runtime import triton_helpers

    props = DeviceProps()
    cuda, interface = torch.cuda, device_interface.CudaInterface
    rng_state = torch.zeros(16, dtype=torch.uint8)
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: props,
        "get_device_capability": lambda device=None: (props.major, props.minor),
        "get_device_name": lambda device=None: props.name,
        "is_bf16_supported": lambda including_emulation=True: True,
        "get_rng_state": lambda device="cuda": rng_state,
        "set_rng_state": lambda new_state, device="cuda": None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
    }
    bound = {
        "current_device": "current_device",
        "set_device": "set_device",
        "device_count": "device_count",
        "synchronize": "synchronize",
        "get_device_properties": "get_device_properties",
        "exchange_device": "_exchange_device",
        "maybe_exchange_device": "_maybe_exchange_device",
        "is_bf16_supported": "is_bf16_supported",
    }
    with contextlib.ExitStack() as stack:
        _forget_cached_answers()
        stack.callback(_forget_cached_answers)
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(cuda, name, answer))
        for name, source in bound.items():
            stack.enter_context(mock.patch.object(interface, name, staticmethod(answers[source])))
        stack.enter_context(mock.patch.object(interface, "get_raw_stream", staticmethod(lambda index: 0)))
        # The workers' view of the devices is a module-level cache; start from nothing and put back what was
        # there.
        for cache in ("caching_worker_device_properties", "caching_worker_current_devices"):
            stack.enter_context(mock.patch.dict(getattr(device_interface, cache), clear=True))
        stack.enter_context(mock.patch.object(torch.utils._triton, "triton_backend", _pretend_backend))
        stack.enter_context(mock.patch.object(triton_helpers, "set_driver_to_gpu"))
        stack.enter_context(_without_card_errors())
        stack.enter_context(torch._inductor.config.patch(compile_threads=1))
        # Generated modules import it, and kernels over tables are compiled ahead of their first launch.
        stack.enter_context(
            mock.patch.object(torch._C, "_cuda_getCurrentRawStream", return_value=0, create=True)
        )
        stack.enter_context(mock.patch.object(TableKernel, "begin"))
        yield


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
    ``torch._inductor.config`` is set; ``gm`` is left unchanged.
    """
    _need_triton()
    import torch._inductor.config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.exc import InductorError
    from torch._inductor.graph import GraphLowering

    gm = copy_graph(gm)
    if example_inputs is None:
        example_inputs = [n.meta["val"] for n in placeholders(gm)]
    devices = {t.device.type for t in example_inputs if isinstance(t, torch.Tensor)}
    if "cuda" not in devices:
        raise ValueError(f"the example inputs are on {sorted(devices)}: move the graph with to_cuda() first")

    def capture(lowering: GraphLowering) -> None:
        code = lowering.codegen()[0]
        raise _Captured(code.value)

    with (
        pretend_sm90(),
        mock.patch.object(GraphLowering, "compile_to_module", capture),
        torch._inductor.config.patch(fx_graph_cache=False, fx_graph_remote_cache=False, cpp_wrapper=False),
    ):
        try:
            compile_fx_inner(gm, example_inputs)
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


# ----------------------------------------------------------------- compilation


def compile_to_ptx(source: str, stage: str = "ptx") -> dict[str, str]:
    """Compile each kernel of a generated module for sm_90 and return its PTX by kernel name.

    The options (fp fusion, warps, constants, alignment) are those that Inductor would compile the kernel
    with, for the first of its configurations. ``stage`` may also be ``"ttir"``, ``"ttgir"``, ``"llir"`` or
    ``"sass"``: the machine code, which shows what ptxas contracted to FFMA (it needs the ``cuobjdump`` or
    ``nvdisasm`` that Triton ships).
    """
    return {name: str(compile_kernel(name, text).asm[stage]) for name, text in kernels(source).items()}


def compile_kernel(name: str, text: str, arch: int = 90) -> Any:
    """Compile a kernel's module for ``sm_{arch}``: Triton's compiled kernel, with ``asm`` by stage."""
    _need_triton()
    import triton
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource

    with pretend_sm90(), tempfile.TemporaryDirectory(prefix="triton_offline_") as folder:
        tuner = getattr(_import_text(text, os.path.join(folder, f"{name}.py")), name)
        assert isinstance(tuner, CachingAutotuner)
        config = tuner.configs[0]
        meta = tuner._create_compile_meta(config)
        return triton.compile(
            ASTSource(tuner.fn, meta["signature"], meta["constants"], meta["configs"][0]),
            target=GPUTarget("cuda", arch, 32),
            options=tuner._create_compile_options(config, meta),
        )


def resources(binary: Any) -> dict[str, int]:
    """Of a compiled kernel: registers (REG), bytes of stack (STACK) and of what has spilled (LOCAL)."""
    import triton

    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        told = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}


def _import_text(text: str, path: str) -> ModuleType:
    with open(path, "w") as file:
        file.write(text)
    spec = importlib.util.spec_from_file_location(os.path.basename(path).removesuffix(".py"), path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
