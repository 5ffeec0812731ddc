"""What is measured: every way to take an AdamW step that a user could choose, behind one interface."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.by_hand import BETAS, EPS, LR, WEIGHT_DECAY, EagerCollage, KahanAdamW
from collage_fx import CollageBackend
from collage_fx.choices import Strategy

Parameters = list[torch.nn.Parameter]
Step = Callable[[], Any]

#: Of every AdamW of torch.optim's signature.
OPTIONS: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}


@dataclass(frozen=True)
class Peer:
    """One row.

    Attributes:
        name: in tables and on the command line.
        make: parameters, which have gradients -> a function that takes one step.
        bytes: that a step must read and write per parameter: its state, and the gradient once.
        dtype: of the parameters and gradients.
        package: to be installed, beside torch; imported by that name without "torch-".
        devices: where it runs.
        compiles: whether its first step compiles, so that it is tried in a process of its own first.
    """

    name: str
    make: Callable[[Parameters], Step]
    bytes: float
    dtype: torch.dtype = torch.bfloat16
    package: str = ""
    devices: tuple[str, ...] = ("cpu", "cuda")
    compiles: bool = False

    @property
    def base(self) -> str:
        """The peer that compiles the same kernels, itself or the one without CUDA graphs."""
        return self.name.removesuffix(", CUDA graphs")

    def unavailable(self, device: str) -> str:
        """Why it is not measured on this device; empty if it is."""
        if device not in self.devices:
            return f"needs {' or '.join(self.devices)}"
        if self.package and importlib.util.find_spec(self.package.removeprefix("torch-")) is None:
            return f"{self.package} is not installed"
        return ""


def ours(strategy: Strategy, **options: Any) -> Any:
    def make(parameters: Parameters) -> Step:
        backend = CollageBackend(strategy=strategy, **options)
        return torch.compile(torch.optim.AdamW(parameters, **OPTIONS).step, backend=backend)

    return make


def torch_adamw(**how: Any) -> Any:
    return lambda parameters: torch.optim.AdamW(parameters, **OPTIONS, **how).step


def compiled_adamw(parameters: Parameters) -> Step:
    return torch.compile(torch.optim.AdamW(parameters, **OPTIONS).step)


def master_weights(parameters: Parameters) -> Step:
    """Float32 copies of the parameters, stepped by torch's fused AdamW, and the casts to and fro.

    Nothing is allocated in a step: the float32 gradients stay.
    """
    values = [p.data for p in parameters]
    gradients = [p.grad for p in parameters if p.grad is not None]
    masters = [torch.nn.Parameter(p.float()) for p in values]
    for master in masters:
        master.grad = torch.empty_like(master)
    optimizer = torch.optim.AdamW(masters, **OPTIONS, fused=True)
    wide_values = [m.data for m in masters]
    wide_gradients = [m.grad for m in masters if m.grad is not None]

    def step() -> None:
        torch._foreach_copy_(wide_gradients, gradients)
        optimizer.step()
        torch._foreach_copy_(values, wide_values)

    return step


def eager_collage(*, plus: bool) -> Any:
    return lambda parameters: EagerCollage(parameters, plus=plus).step


def packaged(module: str, name: str, **how: Any) -> Any:
    """An optimizer of another package, imported where it is made."""

    def make(parameters: Parameters) -> Step:
        optimizer = getattr(importlib.import_module(module), name)
        return optimizer(parameters, **OPTIONS, **how).step

    return make


#: Its AdamW for parameters that are offloaded to the host; both moments are float32.
deepspeed = packaged("deepspeed.ops.adam", "DeepSpeedCPUAdam", adamw_mode=True)


def heavyball(parameters: Parameters) -> Step:
    """Its step takes the gradients away; here they come back."""
    step = packaged("heavyball", "AdamW", ecc="bf16+8", param_ecc="bf16+8")(parameters)
    gradients = [parameter.grad for parameter in parameters]

    def keeping_gradients() -> None:
        step()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient

    return keeping_gradients


#: Ours first, as every other is measured beside them; then what costs no compilation; packages last, as some
#: of them patch torch.
_PEERS: Sequence[Peer] = (
    Peer("light", ours("light"), 18, compiles=True),
    Peer("plus", ours("plus"), 22, compiles=True),
    Peer("light, mcf", ours("light", error_format="mcf"), 18, compiles=True),
    Peer("plus, mcf", ours("plus", error_format="mcf"), 22, compiles=True),
    Peer("light, to nearest", ours("light", rounding="nearest"), 18, compiles=True),
    Peer("plus, to nearest", ours("plus", rounding="nearest"), 22, compiles=True),
    Peer("light, byte", ours("light", error_format="byte"), 16, compiles=True),
    # a byte for a scale of 32 elements beside both moments, in and out
    Peer("light, block16", ours("light", state="block16"), 18.125, compiles=True),
    Peer("light, block8", ours("light", state="block8"), 14.125, compiles=True),
    Peer("light, byte, block8", ours("light", error_format="byte", state="block8"), 12.125, compiles=True),
    Peer("torch fp32 fused", torch_adamw(fused=True), 28, torch.float32),
    Peer("torch bf16 foreach", torch_adamw(foreach=True), 14),
    Peer("torch bf16 fused", torch_adamw(fused=True), 14),
    Peer("bf16 + fp32 master, fused", master_weights, 28),
    Peer("eager Collage light", eager_collage(plus=False), 18),
    Peer("eager Collage plus", eager_collage(plus=True), 22),
    Peer("light, CUDA graphs", ours("light", mode="reduce-overhead"), 18, devices=("cuda",), compiles=True),
    Peer("plus, CUDA graphs", ours("plus", mode="reduce-overhead"), 22, devices=("cuda",), compiles=True),
    Peer("full", ours("full"), 26, compiles=True),
    Peer("full, native", ours("full", arithmetic="native"), 26, compiles=True),
    Peer("torch.compile bf16", compiled_adamw, 14, compiles=True),
    Peer("torch.compile fp32", compiled_adamw, 28, torch.float32, compiles=True),
    Peer("compiled Kahan by hand", lambda parameters: KahanAdamW(parameters).step, 18, compiles=True),
    Peer("optimi kahan_sum", packaged("optimi", "AdamW", kahan_sum=True), 18, package="torch-optimi"),
    Peer(
        "torchao stochastic",
        packaged("torchao.optim", "_AdamW", bf16_stochastic_round=True),
        14,
        package="torchao",
        compiles=True,
    ),
    Peer("DeepSpeed CPUAdam fp32", deepspeed, 28, torch.float32, package="deepspeed", devices=("cpu",)),
    # bf16 parameter without a master, float32 moments, in and out, and the gradient
    Peer("DeepSpeed CPUAdam bf16", deepspeed, 22, package="deepspeed", devices=("cpu",)),
    # the parameter, moments of 8 bits and a 32-bit scale for 256 of them, in and out, and the gradient
    Peer("bitsandbytes 8 bit", packaged("bitsandbytes.optim", "AdamW8bit"), 10.0625, package="bitsandbytes"),
    # hi and its 8-bit rest of parameter and both moments, in and out, and the gradient
    Peer("heavyball bf16+8", heavyball, 20, package="heavyball", compiles=True),
    # 24-bit parameter, moments of 8 bits and a 16-bit scale for 32 of them, in and out, and the gradient
    Peer(
        "flashoptim 24 bit",
        packaged("flashoptim", "FlashAdamW", master_weight_bits=24),
        12.25,
        package="flashoptim",
        devices=("cuda",),
    ),
)

PEERS = {peer.name: peer for peer in _PEERS}


def make_parameters(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: str, gradients: Sequence[Tensor]
) -> Parameters:
    """Parameters like a model's, N(0, 0.02²), with these gradients."""
    generator = torch.Generator(device).manual_seed(0)
    parameters = []
    for shape, gradient in zip(shapes, gradients, strict=True):
        values = torch.randn(shape, generator=generator, device=device, dtype=dtype).mul_(0.02)
        parameter = torch.nn.Parameter(values)
        parameter.grad = gradient
        parameters.append(parameter)
    return parameters


def make_gradients(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: str) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(1)
    return [torch.randn(s, generator=generator, device=device, dtype=dtype).mul_(1e-3) for s in shapes]
