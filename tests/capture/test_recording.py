"""Steps that Dynamo cannot capture are recorded: what they do to tensors is compiled all the same."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.testing._internal.two_tensor import TwoTensor
from torch.torch_version import TorchVersion

from collage_fx import CollageBackend, error_terms, full_value, install
from collage_fx.capture import recording
from collage_fx.capture.recording import RECORDING, Request, is_recorded, record
from collage_fx.capture.segment import Operation, draws_16_bits, is_index_of_integers, signature_of
from collage_fx.errors import UncompensatedParameterError, UnsupportedTensorError
from collage_fx.graph import factorizes
from collage_fx.state.packed import is_packed
from collage_fx.torch_compat import records
from tests.support.substitutes import recorded_steps_that_compile
from tests.support.training import Descent, compiled, parameters, run_steps, set_gradients
from tests.support.warned import warned

Kind = TypeVar("Kind", bound=Optimizer)

LR = 1e-4
#: Of equal shapes: what is meant for one of them can be done to another, and nothing else would tell.
SHAPES = [(4, 3)] * 5 + [(7,)]

Factor = Callable[[Tensor], Tensor]


class Recorded(Descent):
    """An update that branches on the value of a tensor for each parameter."""

    def __init__(self, params: Any, lr: float = LR) -> None:
        super().__init__(params, lr)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group["lr"])

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        raise NotImplementedError


class BranchesAfterItsState(Recorded):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        if not state:
            state["m"] = torch.zeros_like(p)
            state["step"] = 0
        state["step"] += 1
        state["m"].mul_(0.9).add_(g, alpha=0.1)
        if p.norm() > 1e9:
            return
        p.add_(state["m"] / (1 - 0.9 ** state["step"]), alpha=-lr)


class BranchesBeforeItsState(Recorded):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        if not bool(g.abs().max() < 1e9):
            return
        state["m"] = state["m"].mul(0.9).add(g) if state else g.clone()
        p.data.add_(state["m"], alpha=-lr)


class TrustRatio(Recorded):
    """As in Lamb: the direction is computed, then a branch, then it is applied."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        direction = g / (g.abs() + 0.5)
        weight, update = p.norm(), direction.norm()
        ratio = 1.0 if weight == 0 or update == 0 else float(weight / update)
        p.add_(direction, alpha=-lr * ratio)


class WaitsAtItsBranch(Recorded):
    at_the_branch: Callable[[], object]

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        p.add_(g, alpha=-lr)
        is_far = p.norm() > 1e9
        self.at_the_branch()
        if is_far:
            p.zero_()


class LeavesSparseGradients(Recorded):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        if not g.is_sparse and g.norm() > 0:
            p.add_(g, alpha=-lr)


class AppliesWhatItComputedBefore(Recorded):
    """The new parameter crosses the branch, in bfloat16 as far as Python can tell."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        new = p - lr * g
        if new.norm() < 1e9:
            p.copy_(new)


class AssignsData(Recorded):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        new = p.data - lr * g
        if new.norm() < 1e9:
            p.data = new


class ViewsAcross(Recorded):
    """Views of the parameter, and of an intermediate result, that outlive a branch."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        flat, direction = p.view(-1), (g * 2).reshape(-1)
        halves = direction.split([2, direction.numel() - 2])
        if direction.norm() < 1e9:
            flat[:2].add_(halves[0], alpha=-lr)
            flat[2:].add_(halves[1], alpha=-lr)


class UpdatesInFloat32(Recorded):
    """The new parameter crosses the branch in float32, and its bits as a view of another dtype."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        wide = p.to(torch.promote_types(p.dtype, torch.float32)) - lr * g
        bits = wide.view(torch.int32 if wide.dtype == torch.float32 else torch.int64)
        if bits.abs().max() > 0 and int((bits & 1).max()) <= 1:
            p.copy_(wide)


class FillsWhatItHasComputed(Recorded):
    """With numbers that are drawn at once, and known."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        ones, twos = g * 2, g * 3
        ones.random_(1, 2)
        twos.random_(2, 3)
        if torch.equal(ones * 2, twos) and g.norm() > 0:
            p.add_(ones, alpha=-lr)
            p.add_(twos * g, alpha=-lr)


class CallsTorchCompile(Recorded):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        if g.norm() > 0:
            torch.compile(_descend, backend="inductor", fullgraph=True)(p, g, lr)


def _descend(p: Tensor, g: Tensor, lr: float) -> None:
    p.add_(g, alpha=-lr)


class Foreach(Recorded):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        grads = [p.grad for p in params]
        if not self.state:
            for p in params:
                self.state[p]["m"] = torch.zeros_like(p)
                self.state[p]["step"] = torch.tensor(0.0)
        steps, moments = ([self.state[p][name] for p in params] for name in ("step", "m"))
        torch._foreach_add_(steps, 1)
        torch._foreach_lerp_(moments, grads, 0.1)
        norms = torch._foreach_norm(grads)
        if max(float(norm) for norm in norms) < 1e9:
            corrected = torch._foreach_div(moments, [1 - 0.9 ** float(step) for step in steps])
            torch._foreach_add_(params, corrected, alpha=-LR)


class Factorizes(Recorded):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        q, _ = torch.linalg.qr(g.float().reshape(-1, 1)) if g.dim() == 1 else torch.linalg.qr(g.float())
        if q.norm() > 0:
            p.add_(q.reshape(p.shape).to(p.dtype), alpha=-lr)


class Transposes(Recorded):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        turned = (g + g).view(-1, p.shape[-1]).clone()
        turned.transpose_(0, 1)
        if turned.norm() > 0:
            p.add_(turned.t().reshape(p.shape), alpha=-lr)


class AddsToItsStateLater(Recorded):
    """What has been a moving average, without error terms, is added to in a part that comes later."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        if not state:
            state["m"] = torch.zeros_like(p)
            state["step"] = 0
        state["step"] += 1
        state["m"].mul_(0.5).add_(g)
        if p.norm() > 1e9:
            return
        if state["step"] == 4:
            state["m"].sub_(p, alpha=1e-3)
        p.add_(state["m"], alpha=-lr)


class KeepsStateOfAnotherClass(Recorded):
    """As torchao's 8-bit optimizers, whose state is made of codes and scales."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        if not state:
            state["m"] = TwoTensor(torch.zeros_like(p), torch.zeros_like(p))
        state["m"].mul_(0.9).add_(g, alpha=0.1)
        if p.norm() > 1e9:
            return
        p.add_(state["m"].a + state["m"].b, alpha=-lr)


RULES = [
    BranchesAfterItsState,
    BranchesBeforeItsState,
    TrustRatio,
    AppliesWhatItComputedBefore,
    AssignsData,
    FillsWhatItHasComputed,
    UpdatesInFloat32,
    ViewsAcross,
    CallsTorchCompile,
    Foreach,
    Factorizes,
    Transposes,
    AddsToItsStateLater,
    KeepsStateOfAnotherClass,
]


def twins(
    kind: Callable[[list[torch.nn.Parameter]], Kind],
    shapes: Sequence[Sequence[int]] = SHAPES,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Kind, Kind]:
    """The optimizer on low-precision parameters, and on the same in float64."""
    low = parameters(dtype, shapes)
    high = [torch.nn.Parameter(p.detach().double()) for p in low]
    return kind(low), kind(high)


def params_of(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def give_gradients(low: Optimizer, high: Optimizer, seed: int) -> None:
    set_gradients(params_of(low), seed)
    for p, q in zip(params_of(low), params_of(high), strict=True):
        q.grad = p.grad.double() if p.grad is not None else None


def largest_error(low: Optimizer, high: Optimizer, start: Sequence[Tensor]) -> float:
    """Of any one parameter's displacement, relative to float64's."""
    triples = zip(params_of(low), params_of(high), start, strict=True)
    return max(float((full_value(p) - q).detach().norm() / (q - x).detach().norm()) for p, q, x in triples)


@pytest.mark.parametrize("kind", RULES, ids=lambda kind: kind.__name__)
def test_every_parameter_goes_where_it_goes_in_float64(kind: type[Recorded]) -> None:
    """Each one, and by its own state: of equal shapes, only the values tell one from another.

    The steps are some 1/100 of half an ulp of most elements; plain bfloat16 loses nearly all of them. What
    remains is the rounding of gradients' moments to bfloat16 (2^-9 = 0.002 each) and of the pair itself.
    """
    torch._dynamo.reset()
    low, high = twins(kind)
    start = [q.detach().clone() for q in params_of(high)]
    step = compiled(low)
    for seed in range(8):
        give_gradients(low, high, seed)
        step()
        high.step()
    assert is_recorded(low)
    assert not is_recorded(high)
    assert largest_error(low, high, start) < 0.02
    for p, q in zip(params_of(low), params_of(high), strict=True):
        assert all(bool(term.any()) for term in error_terms(p))
        assert low.state[p].get("step") == high.state[q].get("step")


# Operations that are executed at once. ----------------------------------------------------------------------


class DecaysUnderAMask(Recorded):
    """Cautious weight decay, as several optimizers write it."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        p.add_(g, alpha=-lr)
        mask = g * p > 0
        decayed = p[mask]
        decayed = decayed - decayed * lr
        p[mask] = decayed


class SelectsByItsValues(Recorded):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        large = p.abs() > 0.5
        p[large] -= lr * g[large]


class SelectsAndScattersByMasks(Recorded):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        mask = g > 0
        moved = torch.masked_select(p, mask) - lr * torch.masked_select(g, mask)
        p.masked_scatter_(mask, moved)


class CopiesToPlacesOfNonzeros(Recorded):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        places = torch.nonzero(g.view(-1) > 0).view(-1)
        moved = p.view(-1).index_select(0, places) - lr * g.view(-1).index_select(0, places)
        p.view(-1).index_copy_(0, places, moved)


class PutsAtNonzeros(Recorded):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        places = torch.nonzero(g > 0, as_tuple=True)
        p.index_put_(places, p[places] - lr * g[places])


class IndexesByIntegers(Recorded):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        backwards = torch.arange(p.numel()).flip(0)
        if g.norm() > 0:
            p.view(-1)[backwards] = p.view(-1)[backwards] - lr * g.view(-1)[backwards]


class FindsItsDistinctValues(Recorded):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        values, places = torch.unique(p - lr * g, return_inverse=True)
        p.copy_(values[places])


class DrawsAroundItself(Recorded):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        if g.norm() > 0:
            p.copy_(torch.normal(p - lr * g, 0.0))


class TransposesWhatItComputed(Recorded):
    """In place: one tensor that has memory of its own, and one that is a view of what crosses the branch."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        view = (p - lr * g).view(-1, p.shape[-1])
        turned = view.clone()
        if turned.norm() > 0:
            turned.t_()
            view.t_()
        if turned.norm() > 0:
            p.copy_(((turned + view) / 2).t().reshape(p.shape))


class SortsWhatItComputed(Recorded):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        moved = (p - lr * g).view(-1)
        if moved.norm() > 0:
            values, places = moved.topk(moved.numel())
            p.view(-1)[places] = values


AT_ONCE = [
    DecaysUnderAMask,
    SelectsByItsValues,
    SelectsAndScattersByMasks,
    CopiesToPlacesOfNonzeros,
    PutsAtNonzeros,
    IndexesByIntegers,
    FindsItsDistinctValues,
    DrawsAroundItself,
    TransposesWhatItComputed,
    SortsWhatItComputed,
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", AT_ONCE, ids=lambda kind: kind.__name__)
def test_what_depends_on_values_reads_and_gives_error_terms(kind: type[Recorded], dtype: torch.dtype) -> None:
    """Error terms are all that moves here, as above: an operation that reads hi alone loses everything.

    The gradients' moments of float16 are four times as precise.
    """
    torch._dynamo.reset()
    low, high = twins(kind, [(4, 3), (7,)], dtype)
    start = [q.detach().clone() for q in params_of(high)]
    step = compiled(low)
    for seed in range(3):
        give_gradients(low, high, seed)
        step()
        high.step()
    assert is_recorded(low)
    assert largest_error(low, high, start) < 0.02


class RotatesWhatItComputed(Recorded):
    """In its own dtype: what the matrix product reads is rounded."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        moved = p - lr * g
        if moved.norm().tolist() > 0:  # which ends a part
            p.copy_(moved @ torch.eye(p.shape[-1], dtype=p.dtype))


def test_an_error_term_that_is_lost_behind_a_branch_is_refused() -> None:
    torch._dynamo.reset()
    params = parameters(shapes=[(4, 3)])
    with pytest.raises(
        UncompensatedParameterError, match=r"mm.* reads it in bfloat16, without its error term"
    ):
        run_steps(compiled(RotatesWhatItComputed(params)), params, [0])


@pytest.mark.parametrize("kind", [BranchesAfterItsState, AppliesWhatItComputedBefore, UpdatesInFloat32])
def test_parameters_of_one_number_are_compensated(kind: type[Recorded]) -> None:
    """Step counters are 0-d tensors as well, and are calculated with at once."""
    torch._dynamo.reset()
    low, high = twins(kind, [(), ()])
    start = [q.detach().clone() for q in params_of(high)]
    step = compiled(low)
    for seed in range(4):
        give_gradients(low, high, seed)
        step()
        high.step()
    assert is_recorded(low)
    assert largest_error(low, high, start) < 0.02


@pytest.mark.parametrize("kind", [AppliesWhatItComputedBefore, UpdatesInFloat32, DecaysUnderAMask])
def test_recorded_steps_are_computed_in_wide_arithmetic(kind: type[Recorded]) -> None:
    """The paper's algorithms know a tensor's path to itself, but none from one graph to the next."""
    torch._dynamo.reset()
    low, high = twins(kind, [(4, 3)])
    start = [q.detach().clone() for q in params_of(high)]
    step = compiled(low, arithmetic="native")
    for seed in range(4):
        give_gradients(low, high, seed)
        step()
        high.step()
    assert is_recorded(low)
    assert largest_error(low, high, start) < 0.02


class AddsNoise(Recorded):
    """Of dtypes of its own, beside what it has to say."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        noise = torch.rand_like(p, dtype=torch.float64)
        coins = torch.bernoulli((p - p) + 0.5)
        counts = torch.bincount(coins.view(-1).long(), weights=p.view(-1))
        self.seen = noise, coins, counts
        if p.norm() > 0:
            p.add_(g, alpha=-lr)


def test_what_is_executed_at_once_has_the_dtypes_that_it_has_in_eager_torch() -> None:
    torch._dynamo.reset()
    (p,) = params = parameters(shapes=[(8,)])
    optimizer = AddsNoise(params)
    step = compiled(optimizer)
    for seed in range(2):
        torch.manual_seed(seed)
        run_steps(step, params, [seed])
        noise, coins, counts = optimizer.seen
        assert (noise.dtype, coins.dtype) == (torch.float64, p.dtype)
        # Fake tensors of torch 2.11 take sums of weights for integers.
        assert counts.dtype is (torch.float64 if TorchVersion(torch.__version__) >= "2.12" else torch.float32)
        torch.manual_seed(seed)
        assert torch.equal(noise, torch.rand_like(p, dtype=torch.float64))
        assert set(coins.tolist()) <= {0, 1}


class StartsAgain(Recorded):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        state["step"] = state.get("step", 0) + 1
        if p.norm() > 0:
            p.add_(g, alpha=-lr)
        if state["step"] == 3:
            p.uniform_(0, 2.0**-20)


def test_random_numbers_replace_error_terms_too() -> None:
    torch._dynamo.reset()
    (p,) = params = parameters(shapes=[(4, 3)])
    step = compiled(StartsAgain(params))
    run_steps(step, params, range(2))
    assert float(error_terms(p)[0].abs().max()) > 2.0**-20
    run_steps(step, params, [2])
    assert float(full_value(p).min()) >= 0
    assert float(full_value(p).max()) <= 2.0**-20


# What else a step's Python may do. --------------------------------------------------------------------------


class ReadsMemory(Recorded):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        if p.norm() > 0:
            p.add_(g, alpha=-1)
            self.seen = p.detach().view(torch.int16).numpy().copy()


def test_memory_is_up_to_date_when_it_is_read() -> None:
    torch._dynamo.reset()
    (p,) = params = parameters(shapes=[(3,)])
    optimizer = ReadsMemory(params)
    before = p.detach().clone()
    run_steps(compiled(optimizer), params, [0])
    assert not torch.equal(p, before)
    assert np.array_equal(optimizer.seen, p.detach().view(torch.int16).numpy())


class TriesLowPrecision(Recorded):
    """Factorizes in float64 what eager torch cannot in its own format, as SOAP of pytorch_optimizer."""

    def __init__(self, params: Any, factor: Factor) -> None:
        super().__init__(params)
        self.factor = factor

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        square = g @ g.mT + torch.eye(len(g), dtype=g.dtype)
        try:
            factor = self.factor(square)
        except Exception:
            factor = self.factor(square.double()).to(g.dtype)
        p.add_(factor @ g, alpha=-lr)


FACTORS: dict[str, Factor] = {
    "eigh": lambda matrix: torch.linalg.eigh(matrix)[0].diag(),
    "svd": lambda matrix: torch.linalg.svd(matrix)[1].diag(),
    "qr": lambda matrix: torch.linalg.qr(matrix)[1].abs(),
    "cholesky": torch.linalg.cholesky,
    "inverse": torch.linalg.inv,
}


def is_refused_while_traced(factor: Factor) -> bool:
    """Whether Dynamo goes on where eager torch does, as it does behind an inverse since torch 2.15."""

    def attempt(matrix: Tensor) -> Tensor:
        try:
            return factor(matrix)
        except Exception:
            return matrix

    try:
        torch.compile(attempt, backend="eager", fullgraph=True)(torch.eye(3, dtype=torch.bfloat16))
    except RuntimeError:  # of Dynamo, or of the operator when the graph is run
        return False
    return True


@pytest.mark.parametrize("factor", FACTORS.values(), ids=FACTORS)
@pytest.mark.parametrize("whose_step", ["its own", "a user's"])
def test_a_factorization_that_eager_torch_refuses_is_refused(factor: Factor, whose_step: str) -> None:
    """A captured graph would only find out when it is run, past the step's ``except``.

    What is rounded to bfloat16 on the way, to within 2**-8 each: the product, its sum with the identity, the
    factor and the direction. A factor may be as many times further off as its matrix's condition number (7)
    says, at worst; measured are 0.0016 (svd) to 0.0044 (inverse), and the plain sum of the four is allowed.
    """
    torch._dynamo.reset()
    low, high = twins(lambda params: TriesLowPrecision(params, factor), [(4, 3)])
    start = [q.detach().clone() for q in params_of(high)]
    counts = [torch.zeros(3, dtype=torch.bfloat16)]

    def other_work() -> None:
        low.step()
        counts[0].add_(1e-3)

    step = compiled(low) if whose_step == "its own" else torch.compile(other_work, backend=CollageBackend())
    for seed in range(4):
        give_gradients(low, high, seed)
        step()
        high.step()
    assert is_recorded(low) != is_refused_while_traced(factor)
    assert largest_error(low, high, start) < 4 * 2.0**-8
    assert all(bool(term.any()) for p in params_of(low) for term in error_terms(p))


def _factorizations() -> list[Any]:
    """Operators of ATen that are said to factorize and that a captured graph may have in it."""
    packets = (getattr(torch.ops.aten, name) for name in dir(torch.ops.aten))
    operators = [getattr(p, name) for p in packets if hasattr(p, "overloads") for name in p.overloads()]
    return [
        each
        for each in operators
        if factorizes(each)
        and not each._schema.is_mutable
        and not torch._C._dispatch_has_kernel_for_dispatch_key(each.name(), "CompositeImplicitAutograd")
        and each is not torch.ops.aten._linalg_check_errors.default  # of what the others returned
    ]


@pytest.mark.parametrize("operator", _factorizations(), ids=str)
def test_what_factorizes_is_there_for_32_bits_and_not_for_16(operator: Any) -> None:
    by_name = {"pivots": torch.arange(1, 4, dtype=torch.int32), "upper": True, "left": True}

    def run(dtype: torch.dtype) -> None:
        matrix = 2 * torch.eye(3, dtype=dtype)
        tau = torch.ones(3, dtype=dtype)
        of_dtype = {"tau": tau, "input2": tau} if operator is torch.ops.aten.ormqr.default else {"tau": tau}
        arguments = [a for a in operator._schema.arguments if not a.has_default_value()]
        values = {a.name: by_name.get(a.name, of_dtype.get(a.name, matrix)) for a in arguments}
        operator(**values)

    run(torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        with pytest.raises(RuntimeError):
            run(dtype)


class Fails(Recorded):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        is_good = bool(g.isfinite().all())
        p.add_(g.nan_to_num(), alpha=-1)
        if not is_good:
            state["bad"] = torch.zeros_like(p)
            self.kept = g * 2
            raise ArithmeticError("no such gradient")


class RoundsAtRandom(Recorded):
    """Stochastic rounding, as heavyball and many others do it, in a function that is compiled by itself."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        if g.norm() > 0:
            torch.compile(_copy_at_random, backend="inductor", fullgraph=True)(p, p.float() - lr * g.float())


def _copy_at_random(target: Tensor, source: Tensor) -> None:
    noise = torch.randint_like(source, dtype=torch.int32, low=0, high=1 << 16)
    target.copy_(noise.add_(source.view(torch.int32)).bitwise_and_(-65536).view(torch.float32))


def test_an_error_term_replaces_stochastic_rounding() -> None:
    """Each step leaves the pair next to its float32 result, to the bit: no noise is left in it."""
    torch._dynamo.reset()
    params = parameters(shapes=[(33, 17), (37,)])
    backend = CollageBackend(rounding="nearest")
    step: Callable[[], Any] = torch.compile(RoundsAtRandom(params).step, backend=backend)
    generator = torch.get_rng_state()
    for seed in range(4):
        set_gradients(params, seed)
        values = [full_value(p, torch.float32) for p in params]
        step()
        for p, value in zip(params, values, strict=True):
            assert p.grad is not None
            exact = value - LR * p.grad.float()
            assert torch.equal(full_value(p), exact.double())
            off, least = ((hi.double() - exact).abs() for hi in (p.detach(), exact.bfloat16()))
            assert torch.equal(off, least)  # one of the nearest: which of two is the format's choice
    assert torch.equal(torch.get_rng_state(), generator), "nobody needs random numbers"
    assert {row.selection for row in backend.report().tensors} == {
        "an error term replaces stochastic rounding"
    }


@pytest.mark.filterwarnings("ignore:.*rounded by operations on its bits")
def test_a_step_that_rounds_by_itself_is_refused() -> None:
    """Stochastic rounding, in the bits; whether the numbers are random is not to be seen in the graph."""

    class Stochastic(Recorded):
        def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
            bits = (p.float() - lr * g).view(torch.int32)
            noise = torch.randint_like(bits, 1 << 16)
            if noise.max() >= 0:
                p.copy_((bits + noise).bitwise_and(-65536).view(torch.float32))

    torch._dynamo.reset()
    (p,) = params = parameters(shapes=[(4, 3)])
    with pytest.raises(UncompensatedParameterError, match="operations on its bits"):
        run_steps(compiled(Stochastic(params)), params, [0])
    before = p.detach().clone()
    run_steps(compiled(Stochastic(params), strict=False), params, [0])
    assert float((p - before).abs().max()) <= 2**-6, "an ulp of the largest"


@pytest.mark.filterwarnings("ignore:.*rounded by operations on its bits")
def test_a_generator_of_ones_own_is_used() -> None:
    """Its numbers are drawn outside of the graph, as others would be missed."""

    class Stochastic(Recorded):
        def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
            bits = (p.float() - lr * g).view(torch.int32)
            noise = torch.randint(0, 1 << 16, p.shape, dtype=torch.int32, generator=generator)
            if p.norm() > 0:
                p.copy_((bits + noise).bitwise_and(-65536).view(torch.float32))

    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    params = parameters(shapes=[(4, 3)])
    with pytest.raises(UncompensatedParameterError, match="operations on its bits"):
        run_steps(compiled(Stochastic(params)), params, [0])
    assert not torch.equal(generator.get_state(), before)


def test_after_an_exception_in_a_step_all_is_as_before() -> None:
    """Nothing of the failed step is left over: no mode, no state, no tensor that isn't one."""
    torch._dynamo.reset()
    (p,) = params = parameters(shapes=[(3,)])
    optimizer = Fails(params)
    step = compiled(optimizer)
    run_steps(step, params, [0])
    before = p.detach().clone()
    p.grad = torch.full((3,), float("inf"), dtype=p.dtype)
    with pytest.raises(ArithmeticError, match="no such gradient"):
        step()
    assert torch.equal(p, before)
    assert not optimizer.state
    assert type(p + 1) is Tensor
    with pytest.raises(RuntimeError, match="left uncomputed"):
        optimizer.kept.sum()
    run_steps(step, params, [1])
    assert not torch.equal(p, before)


class RunsItsClosure(Recorded):
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        super().step()
        return loss

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        if g.norm() > 0:
            p.add_(g, alpha=-lr)


def test_a_closure_runs_as_if_nothing_were_recorded() -> None:
    """Autograd runs in it, and compiled models."""
    torch._dynamo.reset()
    (p,) = params = parameters(shapes=[(3,)])
    step: Callable[..., Any] = torch.compile(RunsItsClosure(params).step, backend=CollageBackend())

    @torch.compile(backend="eager")
    def loss_of(x: Tensor) -> Tensor:
        return (x.float() ** 2).sum()

    def closure() -> Tensor:
        p.grad = None
        loss = loss_of(p)
        loss.backward()
        return loss

    for _ in range(2):
        loss = step(closure)
        assert type(loss) is Tensor
        assert float(loss.detach()) == float((p.detach().float() ** 2).sum())
    assert p.grad is not None
    assert torch.equal(p.grad, 2 * p.detach())
    assert bool(error_terms(p)[0].any())


def test_steps_that_differ_in_numbers_are_compiled_a_few_times() -> None:
    """Step counters, bias corrections, learning rates and trust ratios are arguments of what is compiled."""
    torch._dynamo.reset()
    kinds: list[type[Recorded]] = [BranchesAfterItsState, TrustRatio]
    for kind in kinds:
        params = parameters(shapes=[(4, 3), (4, 3)])
        optimizer, backend = kind(params), CollageBackend()
        step: Callable[[], Any] = torch.compile(optimizer.step, backend=backend)
        compilations = []
        for seed in range(12):
            optimizer.param_groups[0]["lr"] = LR / (1 + seed)
            run_steps(step, params, [seed])
            compilations.append(len(backend.report().graphs))
        assert compilations[5] == compilations[-1]
        assert compilations[-1] <= 8


class NormsOfSeveralOrders(Recorded):
    """The Euclidean norm is computed in another way than others."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        state["step"] = state.get("step", -1) + 1
        norm = torch.linalg.vector_norm(g, ord=(3, 3.5, 4, 2)[state["step"] % 4])
        if norm > 0:
            p.add_(g / norm, alpha=-lr)


class ClampsWhatItTakesTheLogitOf(Recorded):
    """By a number that has to be a constant of the graph."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        state["step"] = state.get("step", -1) + 1
        if g.norm() > 0:
            p.add_(torch.logit(g.abs(), (0.1, 0.2)[state["step"] % 2]), alpha=-lr)


def compiled_after_each_step(kind: type[Recorded], shapes: list[tuple[int, ...]], steps: int) -> list[int]:
    """Count the graphs compiled for steps that are recorded, and as accurate as eager ones in float64."""
    torch._dynamo.reset()
    low, high = twins(kind, shapes)
    start = [q.detach().clone() for q in params_of(high)]
    backend = CollageBackend()
    step: Callable[[], Any] = torch.compile(low.step, backend=backend)
    compilations = []
    for seed in range(steps):
        give_gradients(low, high, seed)
        step()
        high.step()
        compilations.append(len(backend.report().graphs))
    assert is_recorded(low)
    assert largest_error(low, high, start) < 0.02
    return compilations


@pytest.mark.parametrize("kind", [NormsOfSeveralOrders, ClampsWhatItTakesTheLogitOf])
def test_a_number_that_decides_what_is_computed_is_looked_at(kind: type[Recorded]) -> None:
    compilations = compiled_after_each_step(kind, [(4, 3)], 9)
    assert compilations[4] == compilations[-1]


class TakesNoTensorForANumber(Recorded):
    """Nor can any of its numbers be a symbol while the graph is made."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        state["step"] = state.get("step", 0) + 1
        if g.norm() > 0:
            p.sub_(lr * g.fmod(0.5 + 0.1 * state["step"]))
            p.sub_(lr * torch.nan_to_num(g, nan=0.1 * state["step"]))


class WeighsItsProduct(Recorded):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        state["step"] = state.get("step", 0) + 1
        if g.norm() > 0:
            eye = torch.eye(g.shape[-1], dtype=g.dtype)
            p.sub_(lr * torch.addmm(g, g, eye, beta=0.1 * state["step"], alpha=1 / state["step"]))


@pytest.mark.parametrize("kind", [TakesNoTensorForANumber, WeighsItsProduct])
def test_an_operator_whose_numbers_are_burned_in_again_and_again_is_executed_at_once(
    kind: type[Recorded],
) -> None:
    compilations = compiled_after_each_step(kind, [(4, 3)], 11)
    assert compilations[7] == compilations[-1]


class DecaysSlowly(Recorded):
    """State that gets error terms in the first step, so that the second step's is of another kind."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        if not state:
            state |= {"v": torch.zeros_like(p), "step": 0}
        state["step"] += 1
        if g.norm() > 0:
            state["v"].mul_(0.999).add_(g, alpha=0.001)
            p.add_(state["v"] / (1 - 0.999 ** state["step"]), alpha=-lr)


def test_numbers_that_change_are_inputs_also_for_tensors_of_another_kind() -> None:
    """Of the second step's other numbers one knows from the first, for tensors that had no error terms."""
    compilations = compiled_after_each_step(DecaysSlowly, [(4, 3)], 6)
    assert compilations[0] < compilations[1] == compilations[-1]


class AsksOnceMore(Recorded):
    """State that gets its error terms in the second step; the seventh step asks for a value more."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        if not state:
            state |= {"v": torch.zeros_like(p), "step": 0}
        state["step"] += 1
        if state["step"] == 7:
            state["seen"] = float(g.float().sum())
        state["v"].lerp_(g, state["step"] ** -0.8)
        if state["v"].norm() > 0:
            p.add_(state["v"], alpha=-lr)


def test_code_that_gives_tensors_error_terms_is_that_for_such_tensors() -> None:
    """A step that is not matched compiled it again, however late: torch's Adafactor in the 66th step."""
    compilations = compiled_after_each_step(AsksOnceMore, [(4, 3)], 9)
    assert compilations[5] + 1 == compilations[-1]  # the sum


class MultipliesByNaN(Recorded):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        state["nothing"] = g * float("nan")
        if g.norm() > 0:
            p.add_(g, alpha=-lr)


def test_a_number_that_is_none_is_no_new_one_each_time() -> None:
    torch._dynamo.reset()
    params = parameters(shapes=[(4, 3)])
    backend = CollageBackend()
    step: Callable[[], Any] = torch.compile(MultipliesByNaN(params).step, backend=backend)
    run_steps(step, params, range(3))
    compilations = len(backend.report().graphs)
    run_steps(step, params, range(3))
    assert len(backend.report().graphs) == compilations


class SetsUpItsGroup(Descent):
    """Dynamo calls ``_init_group``, but does not see what it puts into the group: a KeyError."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params: list[Tensor] = []
            self._init_group(group, params)
            group["count"].add_(1)
            for p in params:
                assert p.grad is not None
                v = self.state[p]["v"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                p.addcdiv_(p.grad, v.sqrt() + 1e-3, value=-group["lr"] / group["count"].item())

    def _init_group(self, group: dict[str, Any], params: list[Tensor]) -> None:
        if "count" not in group:
            group["count"] = torch.tensor(0)
        for p in group["params"]:
            params.append(p)
            if not self.state[p]:
                self.state[p]["v"] = torch.zeros_like(p)


@pytest.mark.parametrize("options", [{}, {"state": "block16"}], ids=["", "packed"])
def test_a_step_is_captured_although_its_first_trace_ends_with_an_exception(options: dict[str, Any]) -> None:
    """Optimizers of optimi were recorded, in 5 times as long as an eager step, and refused to pack state."""
    torch._dynamo.reset()
    low, high = twins(SetsUpItsGroup, [(4, 3), (128, 64)])
    start = [q.detach().clone() for q in params_of(high)]
    install(low, **options)
    was_recorded = []
    for seed in range(8):
        give_gradients(low, high, seed)
        low.step()
        high.step()
        was_recorded.append(is_recorded(low))
    assert not any(was_recorded)
    assert is_packed(low.state[params_of(low)[1]]["v"]) == bool(options)
    assert largest_error(low, high, start) < 0.02


class ViewsItsResults(Recorded):
    """Views of results that end with the step, as ``@`` of two matrices in batches makes some, too."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        if not g.norm() > 0:
            return
        if not state:
            state["m"] = torch.zeros_like(p)
        shifted = (g + 0.1).unsqueeze(0)
        shifted.diagonal(dim1=-2, dim2=-1).add_(0.5)
        state["m"].lerp_((shifted @ shifted.mT @ shifted)[0], 0.1)
        p.add_(state["m"], alpha=-lr)


def test_a_result_does_not_outlive_its_views() -> None:
    """Torch refers to the base of a view; a result was kept, with an error term, as long as its segment."""
    torch._dynamo.reset()
    low, high = twins(ViewsItsResults, [(4, 3)])
    start = [q.detach().clone() for q in params_of(high)]
    backend = CollageBackend()
    step: Callable[[], Any] = torch.compile(low.step, backend=backend)
    for seed in range(5):
        give_gradients(low, high, seed)
        step()
        high.step()
    held = {tensor.name for tensor in backend.report().tensors if tensor.compensated}
    assert held == {"param_groups[0].params[0]"}
    assert largest_error(low, high, start) < 0.02


class AsksWithinAnOperation(Recorded):
    """``cond`` computes a norm, then an inverse, at once, and then needs the norm."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        wide = g.float() @ g.float().mT + torch.eye(len(g))
        if wide.norm() > 0:
            p.sub_(lr * g * torch.linalg.cond(wide, "fro").to(g.dtype))


class Differentiates(Recorded):
    """Results that autograd holds outlive a value that is asked for."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        with torch.enable_grad():
            x = (g.float() * 0.1).requires_grad_()
            loss = x.exp().tanh().sum()
            if not loss.isfinite():
                return
            (slope,) = torch.autograd.grad(loss, x)
        p.sub_(lr * slope.to(p.dtype))


@pytest.mark.parametrize("kind", [AsksWithinAnOperation, Differentiates])
def test_results_that_torch_alone_holds_are_kept(kind: type[Recorded]) -> None:
    torch._dynamo.reset()
    low, high = twins(kind, [(4, 4)])
    start = [q.detach().clone() for q in params_of(high)]
    step: Callable[[], Any] = torch.compile(low.step, backend=CollageBackend())
    for seed in range(5):
        give_gradients(low, high, seed)
        step()
        high.step()
    assert is_recorded(low)
    assert largest_error(low, high, start) < 0.02


def polar_factor(x: Tensor) -> Tensor:
    """Of a matrix, by 20 products."""
    x = x / x.square().sum().sqrt()
    for _ in range(10):
        x = 1.5 * x - 0.5 * (x @ x.mT @ x)
    return x


class DescendsAlongARoot(Recorded):
    """The polar factor of a momentum, in one graph with both updates."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        if not g.norm() > 0:
            return
        if not state:
            state["m"] = torch.zeros_like(p)
        state["m"].mul_(0.999).add_(g, alpha=0.001)
        x = polar_factor(state["m"].to(torch.promote_types(p.dtype, torch.float32)))
        p.add_(x.to(p.dtype), alpha=-lr)


def test_an_iteration_of_matrices_is_run_by_torch() -> None:
    """Inductor wrote loops for what stands between its products: half a minute, each time it did."""
    torch._dynamo.reset()
    low, high = twins(DescendsAlongARoot, [(4, 3)])
    start = [q.detach().clone() for q in params_of(high)]
    backend = CollageBackend()
    step: Callable[[], Any] = torch.compile(low.step, backend=backend)
    for seed in range(4):
        give_gradients(low, high, seed)
        step()
        high.step()
    norm, *iterations = backend.report().graphs
    assert norm.code
    assert [(graph.route.unit, graph.code) for graph in iterations] == [("operation by operation", ())] * 2
    assert all(graph.tensors for graph in iterations)
    assert str(iterations[0].route) == "recorded, run operation by operation"
    assert "not in parts: torch runs what has more than 16 products of matrices" in backend.report().why()
    assert largest_error(low, high, start) < 0.02


class BranchesAfterARoot(Recorded):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        x = polar_factor(g.to(torch.promote_types(p.dtype, torch.float32)))
        if x.norm() > 0:
            p.add_(x.to(p.dtype), alpha=-lr)


def test_an_iteration_in_which_nothing_is_compensated_is_run_as_it_is() -> None:
    torch._dynamo.reset()
    low, high = twins(BranchesAfterARoot, [(4, 3)])
    start = [q.detach().clone() for q in params_of(high)]
    backend = CollageBackend()
    step: Callable[[], Any] = torch.compile(low.step, backend=backend)
    for seed in range(3):
        give_gradients(low, high, seed)
        step()
        high.step()
    iteration, update = backend.report().graphs
    assert iteration.note.endswith("updates no bfloat16 or float16 tensor; run by torch as it is")
    assert (iteration.route.unit, iteration.code) == ("operation by operation", ())
    assert update.code
    assert largest_error(low, high, start) < 0.02


class ReplacesItsState(Recorded):
    """From the third step on, of all parameters at once.

    When the first is compiled, the state of the others is uncomputed.
    """

    steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = params_of(self)
        self.steps += 1
        gradients = [p.grad for p in params if p.grad is not None]
        if all(g.norm() > 0 for g in gradients):
            for p, g in zip(params, gradients, strict=True):
                v = self.state[p].setdefault("v", torch.zeros_like(p))
                if self.steps < 3:
                    v.mul_(0.999).add_(g, alpha=0.001)
                else:
                    self.state[p]["v"] = v * 0.999 + g * 0.001
                p.add_(self.state[p]["v"], alpha=-1000 * LR)


class WithGradientsData(Optimizer):
    """Step that averages ``p.grad.data``, and then asks for a value."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["m"] = torch.zeros_like(p)
            state["m"].mul_(0.9).add_(p.grad.data, alpha=0.1)
            if float(state["m"].float().norm()) > 0:
                p.data.add_(state["m"], alpha=-1e-3)


@pytest.mark.parametrize("is_piece", [False, True])
def test_the_data_of_a_gradient_are_a_gradient(is_piece: bool) -> None:
    """Also of a piece of a buffer. State made of something unknown may be one of weights: it has a term."""
    (p,) = params = parameters(shapes=[(6, 5)])
    optimizer = install(WithGradientsData(params, {}))
    for seed in range(3):
        set_gradients(params, seed)
        if is_piece:
            p.grad = torch.cat([cast(Tensor, p.grad)] * 2)[:6]
        optimizer.step()
        assert not error_terms(optimizer.state[p]["m"])  # after the first step, which makes it, too
    assert is_recorded(optimizer)


def test_a_step_may_replace_state_that_has_error_terms() -> None:
    torch._dynamo.reset()
    low, high = twins(ReplacesItsState, [(4, 3), (7,), (5,)])
    start = [q.detach().clone() for q in params_of(high)]
    step = compiled(low)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(5):
            give_gradients(low, high, seed)
            step()
            high.step()
    assert largest_error(low, high, start) < 0.02


class MaskOfAnotherCount(Recorded):
    """The gradient decides how many elements it moves."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        mask = g > 0
        moved = p[mask]
        p[mask] = moved - lr * g[mask]


class RemembersAllGradients(Recorded):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        state["seen"] = torch.cat([state["seen"], g[None]]) if state else g[None].clone()
        if g.norm() > 0:
            p.add_(state["seen"].mean(0), alpha=-lr)


class ResizesItsState(Recorded):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        sizes = state.setdefault("sizes", torch.zeros(1, dtype=p.dtype))
        sizes.resize_(len(sizes) + 1).fill_(1)
        p.add_(g * sizes.mean(), alpha=-lr)


@pytest.mark.parametrize("kind", [MaskOfAnotherCount, RemembersAllGradients, ResizesItsState])
def test_shapes_that_change_from_step_to_step_are_compiled_a_few_times(kind: type[Recorded]) -> None:
    compilations = compiled_after_each_step(kind, [(33, 5)], 10)
    assert compilations[4] == compilations[-1]


class GrowsEachStep(Recorded):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        state["n"] = state.get("n", 0) + 1
        if g.norm() > 0:
            for _ in range(state["n"]):
                p.add_(g, alpha=-lr)


def test_a_view_whose_data_has_been_replaced_is_updated_where_it_lies_now() -> None:
    torch._dynamo.reset()
    low, _ = twins(BranchesAfterItsState, [(8,)])
    (p,) = params_of(low)
    moment = torch.zeros(2, 8, dtype=p.dtype)[0]
    moment.data = torch.zeros(8, dtype=p.dtype)
    low.state[p].update(m=moment, step=0)
    p.grad = torch.ones_like(p)
    compiled(low)()
    assert torch.all((moment - 0.1).abs() <= 0.1 * 2.0**-7)  # a distance of bfloat16 numbers


def test_what_is_recorded_while_a_thread_compiles_is_compiled() -> None:
    """Dynamo marks what FX generates while it compiles, in whatever thread, as not to be compiled."""
    torch._dynamo.reset()
    branching, compiling, stepped = threading.Event(), threading.Event(), threading.Event()

    def slow(gm: Any, example_inputs: Any) -> Any:
        compiling.set()
        stepped.wait(1)
        return gm

    def compile_meanwhile() -> None:
        branching.wait()
        torch.compile(lambda x: x + 1, backend=slow)(torch.zeros(2))

    def rendezvous() -> None:
        branching.set()
        compiling.wait()

    params = parameters(shapes=[(3,)])
    optimizer = WaitsAtItsBranch(params)
    optimizer.at_the_branch = rendezvous
    thread = threading.Thread(target=compile_meanwhile)
    thread.start()
    run_steps(compiled(optimizer), params, [0])
    stepped.set()
    thread.join()
    assert is_recorded(optimizer)
    assert bool(error_terms(params[0])[0].any())


def test_that_a_step_always_needs_something_new_is_said() -> None:
    torch._dynamo.reset()
    params = parameters(shapes=[(3,)])
    step = compiled(GrowsEachStep(params))
    with recorded_steps_that_compile(3):
        (told,) = warned(lambda: run_steps(step, params, range(6)))
    assert "each of the last 3 steps of GrowsEachStep" in told
    assert bool(error_terms(params[0])[0].any())


def test_recorded_steps_of_backends_that_are_not_strict_warn_once() -> None:
    torch._dynamo.reset()
    dense, other = params = parameters(shapes=[(3,), (4,)])
    for strict in (True, False):
        other.grad = None
        optimizer = LeavesSparseGradients(params)
        step = compiled(optimizer, strict=strict)
        run_steps(step, params, [0])
        assert is_recorded(optimizer)
        other.grad = torch.ones_like(other).to_sparse()
        if strict:
            with pytest.raises(UnsupportedTensorError, match="sparse"):
                step()
    before = full_value(dense).clone()
    (told,) = warned(step)
    assert "sparse" in told
    assert not torch.equal(full_value(dense), before)
    assert warned(step) == []


def test_whoever_calls_the_step_has_it_recorded() -> None:
    """A scheduler's wrapper, a user's compiled function, and plain eager code."""
    torch._dynamo.reset()
    low, high = twins(TrustRatio, [(4, 3)])
    start = [q.detach().clone() for q in params_of(high)]
    scheduler = torch.optim.lr_scheduler.StepLR(low, 1000)
    step = compiled(low)
    function: Callable[[], Any] = torch.compile(lambda: low.step(), backend=CollageBackend())
    calls: list[Callable[[], Any]] = [step, function, low.step, function, step]
    for seed, call in enumerate(calls):
        give_gradients(low, high, seed)
        call()
        scheduler.step()
        high.step()
    assert largest_error(low, high, start) < 0.02


class Wraps(Optimizer):
    """A wrapper around an optimizer, both with branches of their own."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(params_of(inner), {})
        self.inner = inner

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if params_of(self)[0].norm() > 0:
            self.inner.step()


def test_what_is_recorded_is_compiled_where_dynamo_is_told_not_to() -> None:
    torch._dynamo.reset()
    low, high = twins(TrustRatio, [(4, 3)])
    start = [q.detach().clone() for q in params_of(high)]
    step = compiled(low)
    for seed, stance in enumerate(["default", "force_eager", "force_eager"]):
        give_gradients(low, high, seed)
        with torch.compiler.set_stance(stance):
            step()
        high.step()
    assert is_recorded(low)
    assert largest_error(low, high, start) < 0.02


def test_single_steps_that_are_recorded_are_one_recording() -> None:
    """Single steps share what the first has traced; a step that is recorded for good shares nothing."""
    torch._dynamo.reset()
    low, high = twins(torch.optim.SGD, [(4, 3)])
    step, found = compiled(low), []
    for seed, stance in enumerate(["force_eager", "force_eager", "default"]):
        give_gradients(low, high, seed)
        with torch.compiler.set_stance(stance):
            step()
        found.append(records.of(low, recording.Recorded).for_one_step)
    assert found[0] is not None
    assert found == [found[0]] * 3
    record(low, Request(CollageBackend(), {}, strict=True), "a test")
    assert vars(low)[RECORDING] is not found[0]
    assert not vars(low)[RECORDING].is_for_one_step


def test_an_optimizer_within_a_recorded_one_is_recorded_with_it() -> None:
    torch._dynamo.reset()
    low, high = twins(TrustRatio, [(4, 3)])
    start = [q.detach().clone() for q in params_of(high)]
    give_gradients(low, high, 0)
    compiled(low)()
    high.step()
    outer = compiled(Wraps(low))
    for seed in range(1, 4):
        give_gradients(low, high, seed)
        outer()
        high.step()
    assert largest_error(low, high, start) < 0.02


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copy_of_a_recorded_optimizer_is_one_of_its_own(copied: Callable[[Any], Any]) -> None:
    torch._dynamo.reset()
    (p,) = params = parameters(shapes=[(3,)])
    optimizer = BranchesAfterItsState(params)
    run_steps(compiled(optimizer), params, range(3))
    twin = copied(optimizer)
    (q,) = params_of(twin)
    assert not is_recorded(twin)
    run_steps(compiled(optimizer), params, [3])
    run_steps(compiled(twin), [q], [3])
    assert torch.equal(p, q)
    assert torch.equal(full_value(p), full_value(q))


def test_adafactor_with_a_tensor_for_lr_is_recorded() -> None:
    """It takes the smaller of that and a number, which is a branch."""
    torch._dynamo.reset()
    params = parameters(shapes=[(4, 3), (5,)])
    optimizer = torch.optim.Adafactor(params, lr=torch.tensor(1e-3))
    run_steps(compiled(optimizer), params, range(2))
    assert is_recorded(optimizer)
    assert all(bool(error_terms(p)[0].any()) for p in params)


def test_state_that_the_program_replaces_is_named() -> None:
    params = parameters(shapes=SHAPES)
    optimizer = BranchesAfterItsState(params)
    step = compiled(optimizer, strategy="full")

    def told() -> list[str]:
        return warned(lambda: run_steps(step, params, [0]))

    assert told() == told() == []
    assert is_recorded(optimizer)
    optimizer.state[params[2]]["m"] = optimizer.state[params[2]]["m"].clone()
    assert told() == []
    optimizer.state[params[2]]["m"] = 1.5 * optimizer.state[params[2]]["m"]
    (replaced,) = told()
    assert "param_groups[0].params[2].m of BranchesAfterItsState has been replaced by another" in replaced
    assert told() == []
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert told() == []


class DrawsItsState(Recorded):
    """An optimizer whose state is random numbers, drawn by a generator, which Dynamo does not capture."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        if not state:
            state["scale"] = torch.rand(p.shape, generator=torch.Generator().manual_seed(0)).to(p.dtype)
        p.sub_(g * (0.5 + state["scale"]), alpha=lr)


def test_a_recorded_step_of_several_parameters_is_measured_while_it_makes_their_state() -> None:
    """The metrics know tensors by weak references, and state that is only recorded yet must have none."""
    params = parameters(shapes=SHAPES)
    optimizer = DrawsItsState(params)
    backend = CollageBackend(metrics=True)
    run_steps(torch.compile(optimizer.step, backend=backend), params, range(3))
    assert is_recorded(optimizer)
    assert {f"param_groups[0].params[{i}]" for i in range(len(SHAPES))} <= {*backend.metrics()[3]}


class CountsInTheGroups(Optimizer):
    """Optimizer that writes to the groups of an optimizer within, as ScheduleFreeWrapper does."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self.param_groups = inner.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        self.inner.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_recorded_step_does_not_find_what_dynamo_has_left_in_the_groups(dtype: torch.dtype) -> None:
    """Dynamo traces with ``capturable=True``; on a CPU torch's step refuses that."""
    torch._dynamo.reset()
    params = parameters(dtype)
    optimizer = install(CountsInTheGroups(torch.optim.AdamW(params)))
    run_steps(optimizer.step, params, range(2))
    record(optimizer, Request(CollageBackend(), {}, strict=True), "of the test")
    run_steps(optimizer.step, params, range(2, 4))
    assert [group["capturable"] for group in optimizer.param_groups] == [False]
    assert optimizer.param_groups[0]["steps"] == 4


# Operators, as the recorder sees them. ----------------------------------------------------------------------

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("operator", "writes", "results", "returns_several", "reads_no_values"),
    [
        (aten.add.Tensor, (), (("new", ""),), False, False),
        (aten.add_.Tensor, ("self",), (("same", "self"),), False, False),
        (aten.add.out, ("out",), (("same", "out"),), False, False),
        (aten.t.default, (), (("view", "self"),), False, False),
        (aten.detach.default, (), (("view", "self"),), False, True),
        (aten.zeros_like.default, (), (("new", ""),), False, True),
        (aten.split.Tensor, (), (("view", "self"),), True, False),
        (aten.var_mean.default, (), (("new", ""), ("new", "")), True, False),
        (aten._foreach_mul.Scalar, (), (("new", ""),), True, False),
    ],
    ids=str,
)
def test_what_an_operator_does_to_its_arguments(
    operator: Any, writes: Any, results: Any, returns_several: bool, reads_no_values: bool
) -> None:
    found = signature_of(operator)
    assert (found.writes, found.results) == (writes, results)
    assert (found.returns_several, found.reads_no_values) == (returns_several, reads_no_values)
    assert (found.element_rule is not None) is ("_foreach_" in str(operator))


def test_numbers_to_calculate_with_and_sizes_are_told_apart() -> None:
    def of(operator: Any, *args: Any, **kwargs: Any) -> tuple[list[float], list[int], list[int]]:
        operation = Operation(signature_of(operator)).with_arguments(args, kwargs, lambda tensor: len(tensor))
        return operation.numbers, operation.sizes, operation.tensors

    p, q = torch.zeros(3), torch.zeros(4)
    assert of(aten.add.Tensor, p, q, alpha=2) == ([2.0], [], [3, 4])
    assert of(aten.clamp.default, p, None, 0.5) == ([0.5], [], [3])
    assert of(aten.view.default, p, [5, 1, -1, 2]) == ([], [5, 2], [3])
    assert of(aten.sum.dim_IntList, p, [2], True) == ([], [], [3])
    assert of(aten._foreach_add.ScalarList, [p, q], [1.0, 2.0]) == ([1.0, 2.0], [], [3, 4])


def test_random_bits_for_rounding_and_elements_by_their_index_are_recorded() -> None:
    randint = aten.randint.low
    assert draws_16_bits(randint, (0, 1 << 16, [3]), {})
    assert draws_16_bits(aten.randint.default, (1 << 16, [3]), {})
    assert not draws_16_bits(randint, (1, 1 << 16, [3]), {})
    assert not draws_16_bits(randint, (0, 1 << 15, [3]), {})
    assert not draws_16_bits(randint, (0, 1 << 16, [3]), {"generator": torch.Generator()})
    p, at = torch.zeros(3), torch.tensor([0, 2])
    assert is_index_of_integers(aten.index.Tensor, (p, [None, at]))
    assert not is_index_of_integers(aten.index.Tensor, (p, [at, p > 0]))
    assert not is_index_of_integers(aten.index.Tensor, (p, [torch.ones(3, dtype=torch.uint8)]))
    assert not is_index_of_integers(aten.nonzero.default, (p, []))
