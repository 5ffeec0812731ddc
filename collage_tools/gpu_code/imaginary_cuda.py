"""Imaginary GPU: Triton kernels for a GPU on a machine without a GPU, which torch is made to believe in.

    with imaginary_cuda("sm_90"):           # Inductor writes code as for this GPU; nothing can run
        step = ...                          # from a graph that to_cuda() has moved there
    machine_code(name, source, "sm_90")     # registers, spilled bytes, accesses: from the real compilers

For commands and tests: importing the module changes nothing, and no training program enters it. Inside the
context, ``torch.cuda`` reports the imaginary GPU in the whole process.

It works with a CPU build of torch and with a CUDA build on a machine without a driver; checked with torch
2.11, 2.13 and 2.15 and the Triton versions that these pin (3.6.0, 3.7.1, 3.9.0).

Note [An imaginary card]
------------------------
Inductor asks for the device in four ways: ``torch.cuda`` (is there a GPU, which), Dynamo's ``CudaInterface``
(whose static methods were bound when the class was created, so they are patched, too),
``torch.utils._triton.triton_backend`` (which would load libcuda) and ``fake_tensor.init_gpu_context`` (which
would allocate on the GPU). Nearly every answer is cached by ``functools.cache``, so the caches are cleared on
entry and on exit: answers about the imaginary GPU must not be used outside, nor real answers inside. Inside
:func:`imaginary_cuda` nothing can run on "cuda"; there are only fake tensors.

What differs between torch versions:

* 2.11's ``init_gpu_context`` asks ``torch.cuda.is_available``, 2.13's and 2.15's ask ``torch.accelerator``;
* 2.11 starts a pool of compile workers during code generation, and shutting it down took until its timeout of
  300 s on a machine without a driver: compilation is kept in this process;
* a CPU build has no ``torch._C._cuda_getCurrentRawStream``, which every generated wrapper imports.

The code is written as for an NVIDIA GPU, also if ``gfx942`` (MI300) is requested: only a ROCm build of torch
writes code for ROCm. Triton's compiler for AMD accepts the code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import os
import re
import runpy
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch._subclasses import fake_tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from collage_fx.tools import no_kernels_ahead

CUDA = torch.device("cuda", 0)


@dataclasses.dataclass(frozen=True)
class DeviceProps:
    """Answers of ``torch.cuda.get_device_properties``, the attributes that Inductor reads."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    shared_memory_per_block_optin: int
    shared_memory_per_multiprocessor: int
    L2_cache_size: int
    total_memory: int
    warp_size: int = 32
    regs_per_multiprocessor: int = 65536
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    shared_memory_per_block: int = 49152
    is_integrated: bool = False
    gcnArchName: str = ""


_H200 = DeviceProps("NVIDIA H200", 9, 0, 132, 232448, 233472, 62914560, 150_000_000_000)

#: GPUs by the compilers' names of their architectures.
ARCHITECTURES: Mapping[str, DeviceProps] = {
    "sm_80": DeviceProps("NVIDIA A100", 8, 0, 108, 166912, 167936, 41943040, 80_000_000_000),
    "sm_90": _H200,
    "sm_100": DeviceProps("NVIDIA B200", 10, 0, 148, 232448, 233472, 132644864, 180_000_000_000),
    "gfx942": _H200,  # see the Note
}


def have_triton() -> bool:
    """Return whether Triton, and NumPy, which it imports, are installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("triton", "numpy"))


def to_cuda(gm: GraphModule, *, keep_on_cpu: Collection[str] = ()) -> GraphModule:
    """Copy a graph that was captured on CPU as the graph it would be on cuda:0.

    Fake values of placeholders move to cuda, except those named in ``keep_on_cpu``, such as a 0-d learning
    rate on the host. ``device`` arguments of nodes (``full``, ``empty``, ``device_put``) become cuda:0, and
    every other node's ``meta["val"]`` is recomputed. 0-d constants (``get_attr``) stay on the CPU, as
    AOTAutograd leaves them; larger constants are refused, because there is no GPU to hold them.
    """
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    graph = Graph()
    new: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        new[node] = graph.node_copy(node, new.__getitem__)
    gm = GraphModule(gm, graph)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    values = {node: node.meta.get("val") for node in inputs}
    modes = {value.fake_mode for value in values.values() if isinstance(value, fake_tensor.FakeTensor)}
    if len(modes) != 1:
        raise ValueError(
            f"the placeholders' meta['val'] must be fake tensors of one mode, not of {len(modes)}"
        )
    (mode,) = modes
    unknown = set(keep_on_cpu) - {n.name for n in inputs}
    if unknown:
        raise ValueError(f"keep_on_cpu names no placeholders: {sorted(unknown)}")

    for node, value in values.items():
        if isinstance(value, fake_tensor.FakeTensor) and node.name not in keep_on_cpu:
            with mode:
                node.meta["val"] = torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=CUDA
                )
    for node in gm.graph.nodes:
        node.args, node.kwargs = map_aggregate((node.args, node.kwargs), _moved)
        constant = getattr(gm, node.target, None) if node.op == "get_attr" else None
        if isinstance(constant, torch.Tensor) and constant.dim() > 0 and constant.device.type == "cpu":
            raise ValueError(
                f"{node.name} is a constant of shape {tuple(constant.shape)}: it cannot move to cuda"
            )
    gm.recompile()
    with _fake_cuda():
        FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*(n.meta.get("val") for n in inputs))
    return gm


def _moved(argument: Any) -> Any:
    return CUDA if isinstance(argument, torch.device) else argument


def _forget_cached_answers() -> None:
    """Clear the ``functools`` caches of the modules that remember device properties."""
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


def _fake_cuda() -> Any:
    """Return a context manager: fake tensors on "cuda" can be created without a GPU (see the Note)."""
    return mock.patch.object(fake_tensor, "init_gpu_context")


def _target(arch: str) -> Any:
    from triton.backends.compiler import GPUTarget

    if arch.startswith("gfx"):
        return GPUTarget("hip", arch, 64)
    return GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)


@contextlib.contextmanager
def imaginary_cuda(arch: str = "sm_90") -> Iterator[None]:
    """Context manager: torch, Inductor and Triton generate code as if cuda:0 existed.

    Args:
        arch: one of :data:`ARCHITECTURES`.
    """
    import torch._inductor.compile_fx
    import torch.utils._triton
    from torch._dynamo import device_interface
    from torch._inductor.runtime import triton_helpers

    props = ARCHITECTURES[arch]
    interface = device_interface.CudaInterface
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

    def backend() -> Any:
        from triton.compiler.compiler import make_backend

        return make_backend(_target(f"sm_{props.major}{props.minor}"))

    with contextlib.ExitStack() as stack:
        _forget_cached_answers()
        stack.callback(_forget_cached_answers)
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
            if hasattr(interface, bound := name.removeprefix("_")):
                stack.enter_context(mock.patch.object(interface, bound, staticmethod(answer)))
        stack.enter_context(mock.patch.object(interface, "get_raw_stream", staticmethod(lambda index: 0)))
        # The workers' view of the devices is a module-level cache; clear it, and restore it on exit.
        for cache in ("caching_worker_device_properties", "caching_worker_current_devices"):
            stack.enter_context(mock.patch.dict(getattr(device_interface, cache), clear=True))
        stack.enter_context(mock.patch.object(torch.utils._triton, "triton_backend", backend))
        stack.enter_context(mock.patch.object(triton_helpers, "set_driver_to_gpu"))
        stack.enter_context(_fake_cuda())
        stack.enter_context(torch._inductor.config.patch(compile_threads=1))
        # Generated modules import it, and kernels over tables are compiled ahead of their first launch.
        stack.enter_context(
            mock.patch.object(torch._C, "_cuda_getCurrentRawStream", return_value=0, create=True)
        )
        stack.enter_context(no_kernels_ahead())
        yield


@dataclasses.dataclass(frozen=True)
class MachineCode:
    """Result of compiling a kernel.

    Attributes:
        registers: registers per thread.
        spilled: bytes of spilled registers and of stack, per thread.
        accesses: number of loads and stores of global memory, by bytes per access of a thread.
        stages: all texts and binaries that Triton keeps, by name: ``"ptx"``, ``"cubin"``, ``"amdgcn"``, ...;
            and ``"sass"``, NVIDIA's machine code as text.
    """

    registers: int
    spilled: int
    accesses: Mapping[int, int]
    stages: Mapping[str, Any]


@contextlib.contextmanager
def imported_kernel(name: str, source: str, arch: str = "sm_90") -> Iterator[Any]:
    """Context manager: a kernel as Inductor's autotuner, with its file and the imaginary GPU in place."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    with imaginary_cuda(arch), tempfile.TemporaryDirectory(prefix="collage_fx_") as folder:
        path = os.path.join(folder, f"{name}.py")
        with open(path, "w") as file:
            file.write(source)
        tuner = runpy.run_path(path, run_name=name)[name]
        assert isinstance(tuner, CachingAutotuner)
        yield tuner


def machine_code(name: str, source: str, arch: str = "sm_90") -> MachineCode:
    """Compile a kernel's module as Inductor would, for an architecture of :data:`ARCHITECTURES`.

    Args:
        name: name of the kernel.
        source: source of a module with the kernel, in a decorator with a single configuration.
        arch: architecture, a key of :data:`ARCHITECTURES`.
    """
    import triton
    from triton.compiler.compiler import ASTSource

    target = _target(arch)
    with imported_kernel(name, source, arch) as tuner:
        config = tuner.configs[0]
        meta = tuner._create_compile_meta(config)
        options = tuner._create_compile_options(config, meta)
        options["num_warps"] = max(1, options["num_warps"] * 32 // target.warp_size)
        stages = triton.compile(
            ASTSource(tuner.fn, meta["signature"], meta["constants"], meta["configs"][0]),
            target=target,
            options=options,
        ).asm
    return _of_amd(stages) if arch.startswith("gfx") else _of_nvidia(stages)


def _of_nvidia(stages: Mapping[str, Any]) -> MachineCode:
    import triton

    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(stages["cubin"])
        file.flush()
        told, sass = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    used = {what: int(number) for what, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}
    accesses = Counter[int]()
    for vector, bits in re.findall(r"(?:ld|st)\.global(?:\.\w+)*?(?:\.v(\d))?\.[bu](\d+)", stages["ptx"]):
        accesses[int(vector or 1) * int(bits) // 8] += 1
    return MachineCode(used["REG"], used["STACK"] + used["LOCAL"], accesses, {**stages, "sass": sass})


_AMDS_BYTES = {"dword": 4, "short": 2, "ushort": 2, "sshort": 2, "byte": 1, "ubyte": 1, "sbyte": 1}


def _of_amd(stages: Mapping[str, Any]) -> MachineCode:
    text = stages["amdgcn"]

    def told(what: str) -> int:
        (number,) = re.findall(rf"^[ -]+\.{what}: +(\d+)$", text, re.MULTILINE)
        return int(number)

    accesses = Counter[int]()
    for kind, vector in re.findall(r"global_(?:load|store)_([us]?(?:byte|short)|dword)(?:x(\d))?", text):
        accesses[_AMDS_BYTES[kind] * int(vector or 1)] += 1
    return MachineCode(
        told("vgpr_count") + told("agpr_count"), told("private_segment_fixed_size"), accesses, stages
    )
