# Written by `python -m tests.optim_stub`; not to be edited.

from typing import TypeAlias, TypeVar, overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from collage_fx.backend import CollageBackend
from collage_fx.options import GivenOptions

__all__: list[str]

_Optimizer = TypeVar("_Optimizer", bound=torch.optim.Optimizer)
_Collage: TypeAlias = GivenOptions | CollageBackend | None

@overload
def of(optimizer: type[_Optimizer]) -> type[_Optimizer]: ...
@overload
def of(optimizer: str) -> type[torch.optim.Optimizer]: ...

class ASGD(torch.optim.ASGD):
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = ...,
        lambd: float = ...,
        alpha: float = ...,
        t0: float = ...,
        weight_decay: float = ...,
        foreach: bool | None = ...,
        maximize: bool = ...,
        differentiable: bool = ...,
        capturable: bool = ...,
        *,
        collage: _Collage = ...,
    ) -> None: ...

class Adadelta(torch.optim.Adadelta):
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = ...,
        rho: float = ...,
        eps: float = ...,
        weight_decay: float = ...,
        foreach: bool | None = ...,
        *,
        capturable: bool = ...,
        maximize: bool = ...,
        differentiable: bool = ...,
        collage: _Collage = ...,
    ) -> None: ...

class Adafactor(torch.optim.Adafactor):
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = ...,
        beta2_decay: float = ...,
        eps: tuple[float | None, float] = ...,
        d: float = ...,
        weight_decay: float = ...,
        *,
        foreach: bool | None = ...,
        maximize: bool = ...,
        collage: _Collage = ...,
    ) -> None: ...

class Adagrad(torch.optim.Adagrad):
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = ...,
        lr_decay: float = ...,
        weight_decay: float = ...,
        initial_accumulator_value: float = ...,
        eps: float = ...,
        foreach: bool | None = ...,
        *,
        maximize: bool = ...,
        differentiable: bool = ...,
        fused: bool | None = ...,
        collage: _Collage = ...,
    ) -> None: ...

class Adam(torch.optim.Adam):
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = ...,
        betas: tuple[float | Tensor, float | Tensor] = ...,
        eps: float = ...,
        weight_decay: float = ...,
        amsgrad: bool = ...,
        *,
        foreach: bool | None = ...,
        maximize: bool = ...,
        capturable: bool = ...,
        differentiable: bool = ...,
        fused: bool | None = ...,
        decoupled_weight_decay: bool = ...,
        collage: _Collage = ...,
    ) -> None: ...

class AdamW(torch.optim.AdamW):
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = ...,
        betas: tuple[float | Tensor, float | Tensor] = ...,
        eps: float = ...,
        weight_decay: float = ...,
        amsgrad: bool = ...,
        *,
        maximize: bool = ...,
        foreach: bool | None = ...,
        capturable: bool = ...,
        differentiable: bool = ...,
        fused: bool | None = ...,
        collage: _Collage = ...,
    ) -> None: ...

class Adamax(torch.optim.Adamax):
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = ...,
        betas: tuple[float, float] = ...,
        eps: float = ...,
        weight_decay: float = ...,
        foreach: bool | None = ...,
        *,
        maximize: bool = ...,
        differentiable: bool = ...,
        capturable: bool = ...,
        collage: _Collage = ...,
    ) -> None: ...

class LBFGS(torch.optim.LBFGS):
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = ...,
        max_iter: int = ...,
        max_eval: int | None = ...,
        tolerance_grad: float = ...,
        tolerance_change: float = ...,
        history_size: int = ...,
        line_search_fn: str | None = ...,
        *,
        collage: _Collage = ...,
    ) -> None: ...

class Muon(torch.optim.Muon):
    def __init__(
        self,
        params: ParamsT,
        lr: float = ...,
        weight_decay: float = ...,
        momentum: float = ...,
        nesterov: bool = ...,
        ns_coefficients: tuple[float, float, float] = ...,
        eps: float = ...,
        ns_steps: int = ...,
        adjust_lr_fn: str | None = ...,
        *,
        collage: _Collage = ...,
    ) -> None: ...

class NAdam(torch.optim.NAdam):
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = ...,
        betas: tuple[float, float] = ...,
        eps: float = ...,
        weight_decay: float = ...,
        momentum_decay: float = ...,
        decoupled_weight_decay: bool = ...,
        *,
        foreach: bool | None = ...,
        maximize: bool = ...,
        capturable: bool = ...,
        differentiable: bool = ...,
        collage: _Collage = ...,
    ) -> None: ...

class RAdam(torch.optim.RAdam):
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = ...,
        betas: tuple[float, float] = ...,
        eps: float = ...,
        weight_decay: float = ...,
        decoupled_weight_decay: bool = ...,
        *,
        foreach: bool | None = ...,
        maximize: bool = ...,
        capturable: bool = ...,
        differentiable: bool = ...,
        collage: _Collage = ...,
    ) -> None: ...

class RMSprop(torch.optim.RMSprop):
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = ...,
        alpha: float = ...,
        eps: float = ...,
        weight_decay: float = ...,
        momentum: float = ...,
        centered: bool = ...,
        capturable: bool = ...,
        foreach: bool | None = ...,
        maximize: bool = ...,
        differentiable: bool = ...,
        *,
        collage: _Collage = ...,
    ) -> None: ...

class Rprop(torch.optim.Rprop):
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = ...,
        etas: tuple[float, float] = ...,
        step_sizes: tuple[float, float] = ...,
        *,
        capturable: bool = ...,
        foreach: bool | None = ...,
        maximize: bool = ...,
        differentiable: bool = ...,
        collage: _Collage = ...,
    ) -> None: ...

class SGD(torch.optim.SGD):
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = ...,
        momentum: float = ...,
        dampening: float = ...,
        weight_decay: float | Tensor = ...,
        nesterov: bool = ...,
        *,
        maximize: bool = ...,
        foreach: bool | None = ...,
        differentiable: bool = ...,
        fused: bool | None = ...,
        collage: _Collage = ...,
    ) -> None: ...

class SparseAdam(torch.optim.SparseAdam):
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = ...,
        betas: tuple[float, float] = ...,
        eps: float = ...,
        maximize: bool = ...,
        *,
        collage: _Collage = ...,
    ) -> None: ...
