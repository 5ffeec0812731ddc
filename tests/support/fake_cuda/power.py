"""Powers of float32 numbers with the bits of Triton's kernels: torch's own kernels call the same function.

The CPU's differ in the last bit of every third or fifth of them.
"""

from __future__ import annotations

import ctypes
import functools
import struct

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language.extra import libdevice

from tests.support.fake_cuda.emulator import Kernel

#: Elements and threads of a program.
LANES = 128


@triton.jit
def _power(base, exponents, results, LANES: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    lanes = tl.program_id(0) * LANES + tl.arange(0, LANES)
    tl.store(results + lanes, libdevice.pow(base, tl.load(exponents + lanes)))


@functools.cache
def _kernel() -> Kernel:
    types = {"base": "fp32", "exponents": "*fp32", "results": "*fp32", "LANES": "constexpr"}
    source = ASTSource(_power, types, {"LANES": LANES})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": LANES // 32})
    return Kernel(compiled.asm["ptx"], "_power")


def power(base: float, exponents: Tensor) -> Tensor:
    """Return ``base ** exponents``, of exponents of the host."""
    if exponents.dtype != torch.float32 or not exponents.numel():
        return torch.pow(base, exponents)
    programs = -(-exponents.numel() // LANES)
    memory = torch.empty(2, programs * LANES, device="cuda")  # which the emulator may access
    given, results = (_on_host(each) for each in memory)
    given[: exponents.numel()] = exponents.flatten()
    (bits,) = struct.unpack("I", struct.pack("f", base))
    addresses = [each.data_ptr() for each in memory]
    kernel = _kernel()
    unused = len(kernel.sizes) - 3
    kernel.run([bits, *addresses, *[0] * unused], (programs, 1, 1), 0)
    return results[: exponents.numel()].reshape(exponents.shape).clone()


def _on_host(tensor: Tensor) -> Tensor:
    memory = (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=torch.float32)
