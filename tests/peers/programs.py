"""Programs of packages without a suite that could tell: each as its README has it, against float64.

Each is run four times on the same gradients: plainly in bf16 and in float32, installed in bf16, and in
float64. Installed, it loses a tenth at most of what is lost plainly, or no more than in float32, as in
docs/compatibility.md; or it is refused by name, and nothing has changed. A program that loses in bf16 less
than ten times as much as in float32 could not tell, and is none.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import collage_fx
from collage_fx import full_value
from tests.support.race import relative_error

Parameters = list[torch.nn.Parameter]

#: (parameters) -> (optimizer, or what has its step; a function that is called with the step).
Program = Callable[[Parameters], tuple[Any, Callable[[Callable[[], Tensor]], Any]]]

PROGRAMS: dict[str, Program] = {}

SHAPES = ((32, 24), (24, 32), (16, 16), (33,))
STEPS = 12
LR = 1e-4


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def with_gradients(optimizer: Any) -> Callable[[Callable[[], Tensor]], Any]:
    """The usual loop: a backward pass, then a step."""

    def step(closure: Callable[[], Tensor]) -> None:
        closure()
        optimizer.step()

    return step


def package(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is not installed: pip install -e '.[peers]'")


@program
def ivon_with_squared_gradients(params: Parameters) -> tuple[Any, Any]:
    optimizer = package("ivon").IVON(
        params, lr=LR, ess=1e16, hess_init=1.0, hess_approx="gradsq", beta2=1.0, debias=False
    )

    def step(closure: Callable[[], Tensor]) -> None:
        with optimizer.sampled_params(train=True):
            closure()
        optimizer.step()

    return optimizer, step


@program
def badam(params: Parameters) -> tuple[Any, Any]:
    names = [f"layers.{i}.weight" for i in range(len(params))]
    optimizer = package("badam").BlockOptimizer(
        base_optimizer=torch.optim.AdamW(params, lr=LR),
        named_parameters_list=list(zip(names, params, strict=True)),
        block_prefix_list=[["layers.0", "layers.1"], ["layers.2", "layers.3"]],
        switch_block_every=4,
        switch_mode="ascending",
        start_block=0,
        verbose=0,
    )
    return optimizer, with_gradients(optimizer)


@program
def cpr(params: Parameters) -> tuple[Any, Any]:
    optimizer = package("pytorch_cpr").AdamCPR(
        params, lr=LR, kappa_init_method="warm_start", kappa_init_param=4, reg_function="l2"
    )
    return optimizer, with_gradients(optimizer)


@program
def mechanic(params: Parameters) -> tuple[Any, Any]:
    mechanized = package("mechanic_pytorch").mechanize(torch.optim.AdamW, s_init=1e-3, log_every=0)
    optimizer = mechanized(params, lr=1.0)
    return optimizer, with_gradients(optimizer)


@program
def kron(params: Parameters) -> tuple[Any, Any]:
    optimizer = package("kron_torch").Kron(params, lr=LR, preconditioner_update_probability=1.0)
    return optimizer, with_gradients(optimizer)


@program
def muown(params: Parameters) -> tuple[Any, Any]:
    if sys.version_info < (3, 12):
        pytest.skip("emerging_optimizers is written in Python 3.12's syntax")
    module = package("emerging_optimizers.contrib.muown")
    optimizer = module.Muown([p for p in params if p.dim() == 2], lr=LR)
    return optimizer, with_gradients(optimizer)


def geometry() -> Any:
    """Return geoopt; its line search, which we do not use, imports names that scipy has moved."""
    moved, public = package("scipy.optimize._linesearch"), package("scipy.optimize.linesearch")
    for name in ("scalar_search_wolfe2", "scalar_search_armijo"):
        setattr(public, name, getattr(moved, name))
    return package("geoopt")


def on_a_manifold(params: Parameters, manifold: Any, optimizer: str) -> tuple[Any, Any]:
    geoopt = geometry()
    # All runs start where bf16 starts, or the first projection moves the others less.
    # Rows of length 1/2 are well inside the ball; projx makes them unit vectors on the sphere.
    inside = [p.detach().double() / p.detach().double().norm(dim=-1, keepdim=True) / 2 for p in params]
    points = [manifold.projx(each).bfloat16().to(params[0].dtype) for each in inside if each.dim() == 2]
    matrices = [geoopt.ManifoldParameter(point, manifold=manifold) for point in points]
    made = getattr(geoopt.optim, optimizer)(matrices, lr=LR)
    return made, with_gradients(made)


# Stiefel manifolds have factorizations, which torch does not have in bf16 on CPUs.
for name in ("Sphere", "PoincareBall"):
    for optimizer in ("RiemannianAdam", "RiemannianSGD"):

        def on_that(params: Parameters, name: str = name, optimizer: str = optimizer) -> tuple[Any, Any]:
            return on_a_manifold(params, getattr(geometry(), name)(), optimizer)

        PROGRAMS[f"geoopt_{optimizer}_{name}"] = on_that


@program
def magma(params: Parameters) -> tuple[Any, Any]:
    optimizer = package("pytorch_optimizer").Magma(torch.optim.AdamW(params, lr=LR), mask_prob=0.5)
    return optimizer, with_gradients(optimizer)


@program
def lookahead(params: Parameters) -> tuple[Any, Any]:
    optimizer = package("pytorch_optimizer").Lookahead(torch.optim.AdamW(params, lr=LR), k=3, alpha=0.5)
    return optimizer, with_gradients(optimizer)


@program
def sam(params: Parameters) -> tuple[Any, Any]:
    optimizer = package("pytorch_optimizer").SAM(params, torch.optim.AdamW, lr=LR, rho=0.05)

    def step(closure: Callable[[], Tensor]) -> None:
        closure()
        optimizer.step(closure)

    return optimizer, step


def parameters_of(optimizer: Any) -> Parameters:
    return [p for group in optimizer.param_groups for p in group["params"]]


class Run:
    """One program on its own parameters; gradients are drawn for each step, and repeated by its closure."""

    def __init__(self, make: Program, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(shape, generator=generator).bfloat16() for shape in SHAPES]
        given = [torch.nn.Parameter(value.to(dtype)) for value in values]
        torch.manual_seed(0)
        self.optimizer, self.step = make(given)
        found = parameters_of(self.optimizer)
        self.params = given if {id(p) for p in given} >= {id(p) for p in found} else found
        self.starts = [p.detach().double().clone() for p in self.params]

    def take(self, steps: range) -> None:
        for i in steps:
            torch.manual_seed(i)
            self.step(lambda i=i: self.closure(i))  # type: ignore[misc]

    def closure(self, i: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 + i)
        for p in self.params:
            gradient = torch.randn(p.shape, generator=generator).bfloat16() + 0.5
            p.grad = gradient.to(p.dtype) if p.requires_grad else None
        return torch.tensor(1.0)

    def error(self, exact: Run) -> float:
        """The distance of all parameters from those in float64, as a part of the way of these."""
        ways = [
            (full_value(p).detach().double() - start).flatten()
            for p, start in zip(self.params, self.starts, strict=True)
        ]
        meant = [(p.detach() - start).flatten() for p, start in zip(exact.params, exact.starts, strict=True)]
        return relative_error(torch.cat(ways), torch.cat(meant))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_right_or_refused(name: str) -> None:
    make = PROGRAMS[name]
    dtypes = torch.float64, torch.float32, torch.bfloat16, torch.bfloat16
    exact, single, plain, installed = (Run(make, dtype) for dtype in dtypes)
    for run in (exact, single, plain):
        run.take(range(STEPS))
    before = [p.detach().clone() for p in installed.params]
    refused = None
    # Compiled code draws other random numbers than eager code otherwise: Magma's masks.
    with torch._inductor.config.patch(fallback_random=True), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            collage_fx.install(installed.optimizer)
            installed.take(range(STEPS))
        except collage_fx.CollageError as refusal:
            refused = refusal
    if refused is not None:
        print(f"{name}: refused: {refused}")
        assert "what to do" in str(refused)
        assert all(map(torch.equal, installed.params, before)), refused
        return
    ours, theirs, in_float32 = (run.error(exact) for run in (installed, plain, single))
    told = sorted({str(each.message)[:200] for each in warned if "collage" in each.filename})
    met = f"plain {theirs:.2g}, float32 {in_float32:.2g}, installed {ours:.2g}"
    print(f"{name}: {met} {told or ''}")
    assert theirs > 10 * in_float32, f"{met} is no test"
    assert ours <= max(theirs / 10, in_float32), met
