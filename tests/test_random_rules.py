"""Optimizers drawn at random, compiled, against their own rules in float64.

Every optimizer of a bundle is a rule of :mod:`tests.support.rules`; one compiled function steps them all.
After each step two things are compared with the rule run on bounded numbers, elementwise and within the bound
that comes with them: the step itself, from the tensors as they really were, and all steps so far, from the
start. In wide arithmetic the compiled bits are those of the eager twin besides.

``COLLAGE_FX_RULES=1000`` draws about so many rules with a random seed, instead of the 300 that are the same
in every run of the same code. (Hypothesis also draws numbers that it finds in the project's modules.)
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from collage_fx import CollageBackend, error_terms, full_value
from collage_fx.errors import (
    AliasedStateError,
    InvalidOptionError,
    UnsupportedTensorError,
)
from collage_fx.numerics import ERROR_FORMATS, ErrorFormat
from collage_fx.state.error_terms import record_of
from collage_fx.state.packed import is_packed
from collage_fx.torch_compat.version import version
from tests.support.bounded import SMALLEST, Bounded
from tests.support.float_bits import unit_roundoff
from tests.support.rules import IN_BLOCKS, LAYOUTS, STEPS, DrawnOptimizer, Rule, rounding_of, rules
from tests.support.twin import TwinBackend

#: Optimizers of one compiled function; the first is what a counter-example shrinks to.
SIZES = (1, 5, *[12] * 16)
FEW = SIZES[:2]
ASKED = os.environ.get("COLLAGE_FX_RULES")
RULES = int(ASKED or 300)


@dataclass(frozen=True)
class Way:
    """Options of a backend under which drawn optimizers are compiled.

    Attributes:
        options: but for the strategy.
        error_format: of the parameters; of several that a budget may lead to, the coarsest.
        layouts: of the parameters.
        strategies: of which one is drawn; None leaves it to a budget.
    """

    options: dict[str, Any] = field(default_factory=dict)
    error_format: str = "exact"
    layouts: Collection[str] = tuple(LAYOUTS)
    strategies: Sequence[str] | None = ("plus", "light", "full")

    @property
    def arithmetic(self) -> str:
        return str(self.options.get("arithmetic", "wide"))


MIXED = (*LAYOUTS, *IN_BLOCKS)
WAYS = {
    "exact, dither": Way(),
    "native": Way({"arithmetic": "native"}, "mcf"),
    "mcf, nearest": Way({"error_format": "mcf", "rounding": "nearest"}, "mcf"),
    "byte": Way({"error_format": "byte"}, "byte", MIXED),
    "block16": Way({"state": "block16"}, layouts=IN_BLOCKS),
    "block8": Way({"state": "block8"}, layouts=IN_BLOCKS),
    "8 bytes": Way({"bytes_per_parameter": 8}, "byte", IN_BLOCKS, None),
    "5.1 bytes": Way({"bytes_per_parameter": 5.1}, "byte", IN_BLOCKS, None),
}


@st.composite
def bundles(draw: Any, way: Way, sizes: Sequence[int] = SIZES) -> tuple[str | None, str, list[Rule]]:
    """A strategy, how steps are counted, and the rules."""
    strategy = None if way.strategies is None else draw(st.sampled_from(way.strategies))
    counter = draw(st.sampled_from(["tensor"] * 7 + ["python"]))
    size = draw(st.sampled_from(sizes if counter == "tensor" else FEW))  # which is compiled twice
    each = rules(way.arithmetic, ERROR_FORMATS[way.error_format], way.layouts)
    return strategy, counter, draw(st.lists(each, min_size=size, max_size=size))


def step_all(optimizers: Sequence[DrawnOptimizer]) -> None:
    for optimizer in optimizers:
        optimizer.step()


def format_of(tensor: Tensor) -> ErrorFormat | None:
    found = record_of(tensor)
    return None if found is None else found.format


class Watched:
    """A drawn optimizer beside its float64 twin and its bounded numbers.

    Args:
        rule: what is drawn.
        counter: see :class:`DrawnOptimizer`.
        arithmetic: what its roundings are.
    """

    def __init__(self, rule: Rule, counter: str, arithmetic: str) -> None:
        self.rule = rule
        self.rounding = rounding_of(rule, arithmetic)
        self.optimizer = DrawnOptimizer(rule, counter=counter)
        self.exact = DrawnOptimizer(rule, counter=counter, float64=True)
        self.gradients = rule.gradients()
        self.bounded = rule.bounded()
        self.since_start = self._numbers(self.exact)
        self.told_apart = False
        self.repaid: dict[str, float] = {}

    def before(self, step: int) -> None:
        gradient = self.gradients[step]
        self.optimizer.parameter.grad, self.exact.parameter.grad = gradient.clone(), gradient.double()
        self.this_step = self._numbers(self.optimizer)
        self.since_start["g"] = Bounded(gradient, rounding=self.rounding)

    @torch.no_grad()
    def after(self, step: int) -> None:
        self.exact.step()
        exact, met = _tensors(self.exact), _tensors(self.optimizer)
        for numbers, since in ((self.this_step, "this step"), (self.since_start, "the start")):
            for name, tensor in met.items():
                fmt = format_of(tensor)
                if step == 0 and fmt is not None and not fmt.keeps_hi:
                    numbers[name] = numbers[name].encoded(tensor.dtype, fmt)
                numbers[name] = numbers[name].loaded(name, tensor.dtype, fmt, self._repaid(name, step + 1))
            self._run(numbers, step + 1)
            if since == "the start":
                # The two float64 runs, torch's and the bounded one, differ by less than float32 runs do.
                for name in numbers:
                    self._compare(exact[name], numbers[name], f"float64 {name} after step {step + 1}")
            for name, tensor in met.items():
                numbers[name] = numbers[name].stored(name, tensor.dtype, format_of(tensor))
                where = f"{name} after step {step + 1}, since {since}"
                self._compare(full_value(tensor), numbers[name], where)
        self._tell_apart(met)

    def stands_still(self) -> bool:
        """Whether all steps have moved the parameter by no more than what its error may be."""
        start, _ = self.rule.start()
        now = self.since_start["p"]
        return bool(((now.value - start.double()).abs() <= now.error).all())

    def starts_below_zero(self) -> bool:
        """Whether a state has negative numbers, which cannot be packed where no step makes it negative."""
        _, states = self.rule.start()
        return any(bool((state < 0).any()) for state in states.values())

    def compare_bits(self, different: Sequence[Tensor]) -> None:
        """With those of the eager twin, which computes everything alike but sums of many elements."""
        if "norm" in self.rule.body:
            return
        others = {id(tensor) for tensor in different}
        for name, tensor in _tensors(self.optimizer).items():
            found = record_of(tensor)
            mine = [tensor, *([] if found is None else found.auxiliaries)]
            assert not any(id(each) in others for each in mine), f"{name} has other bits:\n{self.rule!r}"

    def _numbers(self, optimizer: DrawnOptimizer) -> dict[str, Bounded]:
        return {
            name: Bounded(full_value(tensor), rounding=self.rounding)
            for name, tensor in _tensors(optimizer).items()
        }

    def lacking(self, strategy: str) -> list[str]:
        """States that the strategy should have given error terms: what a small change of the old value says.

        Under ``full`` those whose new value changes, under ``plus`` those where 0.9985 of the change or more
        is left (a decay of 0.999, or none).
        """
        least = {"full": 0.0, "plus": 0.9985, "light": float("inf")}[strategy]
        lacking = []
        for name, tensor in self.optimizer.state[self.optimizer.parameter].items():
            if name == "t" or tensor.dtype == torch.float32 or error_terms(tensor):
                continue
            left, changes = self._left_of(name, STEPS + 1)
            if bool(changes.any() and (left > 0).all() and (left >= least).all()):
                lacking.append(name)
        return lacking

    def _left_of(self, name: str, step: int) -> tuple[Tensor, Tensor]:
        """Which share of a small change of a state's value its new value has, and where that is another."""
        change = 2.0**-7
        old = {key: Bounded(full_value(tensor)) for key, tensor in _tensors(self.exact).items()}
        results = []
        for offset in (0.0, change):
            numbers = {**old, name: Bounded(old[name].value + offset)}
            numbers = {key: number.clone() for key, number in numbers.items()}
            self._run(numbers, step)
            results.append(numbers[name].value)
        return (results[1] - results[0]).abs() / change, results[0] != old[name].value

    def _repaid(self, name: str, step: int) -> float:
        """How many times the rounding error of a state the parameter may subtract: ``passes/repay.py``.

        With a share b that is the same for all elements, b / (1 - b); no other state is a moving average.
        """
        if name in ("p", "g"):
            return 0.0
        if name not in self.repaid:
            left, _ = self._left_of(name, step)
            b = float(left.flatten()[0]) if left.numel() else 0.0
            is_average = 0 < b < 1 and bool((left - b).abs().max() < 1e-9)
            self.repaid[name] = b / (1 - b) if is_average else 0.0
        return self.repaid[name]

    def _run(self, numbers: dict[str, Bounded], step: int) -> None:
        self.bounded(
            numbers["p"],
            numbers["g"],
            *(numbers[name] for name, _ in self.rule.states),
            Bounded(step, rounding=self.rounding),
        )

    def _compare(self, met: Tensor, wanted: Bounded, where: str) -> None:
        excess = (met - wanted.value).abs() > wanted.error
        if bool(excess.any()):
            i = tuple(excess.nonzero()[0].tolist())
            raise AssertionError(
                f"{where}: {met[i].item()!r} where {wanted.value[i].item()!r} was wanted, off by "
                f"{abs(met[i] - wanted.value[i]).item():.3g} and not {wanted.error[i].item():.3g}"
                f"\n{self.rule!r}"
            )
        assert bool(met.isfinite().all()), f"{where}: {met}\n{self.rule!r}"

    def _tell_apart(self, met: dict[str, Tensor]) -> None:
        """Note whether this step would have shown a parameter that is stored without its error term."""
        wanted = self.this_step["p"]
        plain = (wanted.value.to(self.rule.dtype).double() - wanted.value).abs() > wanted.error
        self.told_apart |= bool(plain.any())
        if bool(plain.any()):
            assert any(bool((lo != 0).any()) for lo in error_terms(met["p"])), (
                f"silently plain:\n{self.rule!r}"
            )


def _tensors(optimizer: DrawnOptimizer) -> dict[str, Tensor]:
    p = optimizer.parameter
    states = {name: tensor for name, tensor in optimizer.state[p].items() if name != "t"}
    return {"p": p, **({} if p.grad is None else {"g": p.grad}), **states}


def check(
    strategy: str | None, counter: str, drawn_rules: Sequence[Rule], way: Way = WAYS["exact, dither"]
) -> bool:
    """Compile, step and compare; False where there is nothing to compare.

    That is where no options are within the limit, as the error says, and where a state is packed as never
    negative, which holds for the recurrence, and does not start so.
    """
    torch._dynamo.reset()
    watched = [Watched(rule, counter, way.arithmetic) for rule in drawn_rules]
    optimizers = [each.optimizer for each in watched]
    options = {**way.options} if strategy is None else {"strategy": strategy, **way.options}
    backend = TwinBackend(**options)
    is_wide = way.arithmetic == "wide"
    backend.engine = "both" if is_wide else "compiled"
    compiled = torch.compile(step_all, backend=backend, fullgraph=True)
    for step in range(STEPS):
        for each in watched:
            each.before(step)
        try:
            compiled(optimizers)
        except InvalidOptionError:
            assert strategy is None
            assert step == 0
            return False
        except UnsupportedTensorError:  # a packed state that no step makes negative, and that is
            assert step == 0
            assert any(each.starts_below_zero() for each in watched)
            return False
        for each in watched:
            each.after(step)
            each.compare_bits(backend.different)
    for each in watched:
        lacking = each.lacking(strategy or "light")
        assert not lacking, f"{lacking} under {options}:\n{each.rule!r}"
        assert each.told_apart or each.stands_still(), f"a rule that tests nothing:\n{each.rule!r}"
    packed = any(is_packed(tensor) for each in watched for tensor in _tensors(each.optimizer).values())
    compilations = 1 if counter == "tensor" and not packed else 2
    least = 1 if version() < (2, 12) else compilations
    assert least <= len(backend.report().graphs) <= compilations
    return True


def draw_rules(examples: int, round_: int, way: Way, sizes: Sequence[int] = SIZES) -> int:
    """Check so many bundles, the same in every run unless asked otherwise; how many rules they had."""
    drawn = 0

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink) if ASKED else (Phase.generate,),
    )
    @given(bundles(way, sizes))
    def bundle_by_bundle(bundle: tuple[str | None, str, list[Rule]]) -> None:
        nonlocal drawn
        drawn += len(bundle[2]) if check(*bundle, way) else 0

    (bundle_by_bundle if ASKED else seed(round_)(bundle_by_bundle))()
    return drawn


def draw_so_many(count: int, way: Way) -> None:
    drawn, round_ = 0, 0
    while drawn < count:
        drawn += draw_rules(-(-(count - drawn) // max(SIZES)), round_, way)
        round_ += 1


@pytest.mark.slow
def test_random_rules() -> None:
    """300 drawn optimizers: some 3 minutes of one core, most of it Inductor's."""
    draw_so_many(RULES, WAYS["exact, dither"])


@pytest.mark.slow
@pytest.mark.parametrize("way", [name for name in WAYS if name != "exact, dither"])
def test_random_rules_in_other_formats(way: str) -> None:
    """A few of them. In native arithmetic, whose graphs are ten times as large, it takes a minute of a core.

    The bounds are those of the format, and of double words where the arithmetic has them.
    """
    draw_so_many(RULES // 15, WAYS[way])


# What it found. ---------------------------------------------------------------------------------------------


def _rule(body: str, *states: str, layout: str = "matrix") -> Rule:
    return Rule(body, tuple((state, "signed") for state in states), torch.bfloat16, layout, seed=1)


FOUND = {
    # The parameter seemed to be overwritten: only the clamped value was looked at, not the bounds.
    "moves within bounds around itself": _rule("p.copy_(g.clamp(min=p - 1e-4, max=p + 1e-4))"),
    # So it did where its old value comes by way of another tensor's new one.
    "Nesterov by iterates": _rule("new = p - 1e-4 * g\np.copy_(new + 0.5 * (new - s1))\ns1.copy_(new)", "s1"),
    # Neither new value is computed from the same tensor's old one, but after two steps it is.
    "states that change places": _rule(
        "s1.add_(g, alpha=1e-3)\nkept = s1.clone()\ns1.copy_(s2)\ns2.copy_(kept)\np.sub_(1e-4 * s1)",
        "s1",
        "s2",
    ),
    # Inductor's passes remove the clone, and the store of the old value came after that of the new one.
    "the old value is kept": _rule(
        "old = s1.clone()\ns1.add_(g, alpha=1e-3)\ns2.copy_(old)\np.sub_(1e-4 * s2)", "s1", "s2"
    ),
    # What dither rounds was read rounded, as what is compensated by hand has to be.
    "two states without error terms that read each other": _rule(
        "old = s1.clone()\ns1.copy_(0.9 * s1 + 0.1 * torch.sign(s2))\np.sub_(g, alpha=1e-3)\n"
        "s2.copy_(0.99 * old.float() + s1.clamp(-1.0, 0.5).float() * 0.01)",
        "s1",
        "s2",
    ),
    # As what is compensated by hand has to be, the state's new value was read rounded to its byte.
    "Nesterov by iterates of its own": _rule(
        "g.add_(p, alpha=0.01)\nnew = p - 0.001 * g\np.copy_(new + 0.5 * (new - s1))\ns1.copy_(new)", "s1"
    ),
    # Captured as set_, which was no store.
    "data is assigned": _rule("p.data = p.data - 1e-4 * g"),
    "data is assigned and updated": _rule("p.data = p.data.mul(0.9999)\np.data.add_(g, alpha=-1e-4)"),
    "data is assigned and taken back": _rule(
        "old = s1.clone()\ns1.data = s1 + g\ns1.copy_(old)\np.sub_(1e-4 * s1)", "s1"
    ),
    # Traced with a sample of two elements, whose shape was then every tensor's.
    "foreach copy": _rule("torch._foreach_copy_([p], [p - 1e-4 * g])"),
}


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.parametrize("strategy", ["plus", "full"])
def test_found(name: str, strategy: str) -> None:
    check(strategy, "tensor", [FOUND[name]])


@pytest.mark.parametrize("way", [name for name in WAYS if name not in ("exact, dither", "native")])
def test_a_few_in_other_formats(way: str) -> None:
    """Some drawn rules, and what was found, in bytes."""
    assert draw_rules(4, 0, WAYS[way], FEW)
    if way == "byte":
        for rule in FOUND.values():
            check("full", "tensor", [rule], WAYS[way])


@pytest.mark.parametrize("way", ["block16", "block8"])
def test_a_scale_of_numbers_that_the_second_loop_computes(way: str) -> None:
    """The kernel took the scale of the first loop's numbers, of which there were none."""
    body = (
        "s1.addcmul_((p * p), (p * p).abs(), value=0.0).add_((p * p), alpha=0.1)\n"
        "p.add_(g / (1.0 + s1) + 0.1 * s1.clamp(-1.0, 1.0)"
        " + 0.9 * (s1.clamp(-0.4, 0.4) + 0.5 * p), alpha=-1e-3)"
    )
    rule = Rule(body, (("s1", "positive"),), torch.bfloat16, "rows of blocks", seed=210)
    assert check("light", "tensor", [rule], WAYS[way])


FOUND_IN_NATIVE_ARITHMETIC = {
    # What torch promotes to float32 read hi, and the difference was taken for the whole new value.
    "a float32 step": _rule("p.copy_(p - 1e-3 * g.sign().float())"),
    # What was stored into the state, and read of it, was hi: neither was on p's own path.
    "the last parameter": _rule(
        "move = p - s1\ns1.copy_(p)\np.add_(move, alpha=0.5).sub_(g, alpha=1e-4)", "s1"
    ),
    "a scaled average": _rule("s1.lerp_(p, 0.1)\np.copy_(0.9 * p + 0.1 * s1 - 1e-4 * g)", "s1"),
}


@pytest.mark.parametrize("name", FOUND_IN_NATIVE_ARITHMETIC)
@pytest.mark.parametrize("strategy", ["plus", "full"])
def test_found_in_native_arithmetic(name: str, strategy: str) -> None:
    check(strategy, "tensor", [FOUND_IN_NATIVE_ARITHMETIC[name]], WAYS["native"])


#: ``p - step``, moved about and back by operators that used to round to the storage format.
MOVED = {
    "flip": "p.copy_((p.flip(0) - step.flip(0)).flip(0))",
    "roll": "p.copy_(p.roll(1).roll(-1) - step)",
    "gather": "p.copy_(p.gather(0, torch.arange(4)) - step)",
    "index": "p.copy_(p[torch.arange(4)] - step)",
    "index_put": "p[torch.arange(4)] -= step",
    "index_add": "p.index_add_(0, torch.arange(4), -step)",
    "index_copy": "p.index_copy_(0, torch.arange(4), p - step)",
    "scatter": "p.scatter_(0, torch.arange(4), p - step)",
    "scatter_add": "p.scatter_add_(0, torch.arange(4), -step)",
    "diagonal": "p.view(2, 2).diagonal().sub_(step[::3])\np[1:3].sub_(step[1:3])",
    "as_strided": "p.as_strided((4,), (1,)).sub_(step)",
    "unbind": "for x, y in zip(p.unbind(0), step.unbind(0)):\n    x.sub_(y)",
    "a constant of the step": "p.sub_(step * torch.tensor(1.0, dtype=torch.bfloat16))",
    "split": "p.copy_(torch.cat([x - y for x, y in zip(p.split(2), step.split(2))]))",
    # Operators of several results, some smaller than p: a row's or one for all.
    "sort": "p.sub_(step.sort()[0])",
    "topk": "p[:2] -= step.topk(2)[0]\np[2:] -= step[2:]",
    "the largest of a row": "p.view(2, 2).sub_(step.view(2, 2).max(1, keepdim=True)[0])",
    "split rows": "p.view(2, 2).sub_(torch.cat(step.view(2, 2).split(1, 1)[:1] * 2, 1))",
    "var_mean": "p.sub_(torch.var_mean(step)[1])",
    "aminmax": "p.view(2, 2).sub_(torch.aminmax(step.view(2, 2), dim=0, keepdim=True)[1])",
    "frexp": "p.sub_(torch.ldexp(*torch.frexp(step)))",
}


STEP = 2.0**-10
START = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.bfloat16)


def moved(body: str, arithmetic: Any) -> Tensor:
    """Where p goes: whole numbers up to 4 and the step 2**-10, so that a pair holds their difference."""
    rule = Rule(f"step = g * {STEP}\n{body}", (), torch.bfloat16, "vector", seed=0)
    optimizer = DrawnOptimizer(rule)
    p = optimizer.parameter
    p.data = START.clone()
    p.grad = torch.ones(4, dtype=torch.bfloat16)
    backend = CollageBackend(strategy="light", arithmetic=arithmetic)
    torch.compile(optimizer.step, backend=backend, fullgraph=True)()
    return full_value(p).detach()


@pytest.mark.parametrize("name", MOVED)
def test_moved(name: str) -> None:
    assert torch.equal(moved(MOVED[name], "wide"), START.double() - STEP)


@pytest.mark.parametrize("name", MOVED)
def test_moved_in_native_arithmetic(name: str) -> None:
    assert torch.equal(moved(MOVED[name], "native"), START.double() - STEP)


@pytest.mark.parametrize(
    "body", ["p.sub_(step)\np[:2] = step[:2]", "p.copy_(torch.cat([step[:2], (p - step)[2:]]))"]
)
@pytest.mark.parametrize("arithmetic", ["wide", "native"])
def test_overwritten_in_part(body: str, arithmetic: str) -> None:
    wanted = START.double() - STEP
    wanted[:2] = STEP
    assert torch.equal(moved(body, arithmetic), wanted)


KAHAN = "s1.add_(g, alpha=-1e-4)\nold = p.clone()\np.add_(s1)\ns1.add_(old.sub_(p))"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("arithmetic", "strategy"), [("wide", "plus"), ("wide", "light"), ("native", "plus")]
)
def test_kahan(dtype: torch.dtype, arithmetic: Any, strategy: Any) -> None:
    """Compensation by hand: p is off by one rounding to a pair, and s1 holds what that has left.

    s1 is off by a few roundings of ``1e-4 g``, which native arithmetic has in a single number, and of itself.
    """
    rule = Rule(KAHAN, (("s1", "zeros"),), dtype, "matrix", seed=1)
    optimizer, exact = DrawnOptimizer(rule), DrawnOptimizer(rule, float64=True)
    p = optimizer.parameter
    backend = CollageBackend(strategy=strategy, arithmetic=arithmetic)
    step = torch.compile(optimizer.step, backend=backend, fullgraph=True)
    u, quantum = unit_roundoff(dtype), 2.0 ** SMALLEST[dtype]
    rounding = {"wide": 4 * u**2, "native": 4 * u}[arithmetic]
    one_of_p = float(u**2 * full_value(p).abs().max()) + quantum / 2
    allowed = 0.0
    for gradient in rule.gradients():
        p.grad, exact.parameter.grad = gradient.clone(), gradient.double()
        step()
        exact.step()
        own_term = full_value(optimizer.state[p]["s1"])
        allowed += rounding * 1e-4 * float(gradient.double().abs().max())
        allowed += 4 * u * float(own_term.abs().max()) + quantum
        off = full_value(p) - exact.parameter.detach()
        assert float((off + own_term).abs().max()) <= allowed
        assert float(off.abs().max()) <= one_of_p + allowed


def test_data_that_is_another_tensors_is_refused() -> None:
    rule = _rule("p.data = s1\ns2.sub_(1e-4 * g)", "s1", "s2")
    optimizer = DrawnOptimizer(rule)
    optimizer.parameter.grad = rule.gradients()[0]
    with pytest.raises(AliasedStateError, match="s1"):
        torch.compile(optimizer.step, backend=CollageBackend(), fullgraph=True)()


def accumulate(optimizer: torch.optim.Optimizer, micro_batches: Sequence[Tensor]) -> None:
    for group in optimizer.param_groups:
        for p, gradient in zip(group["params"], micro_batches, strict=True):
            p.grad += gradient


@pytest.mark.parametrize("strategy", ["light", "plus", "full"])
def test_gradients_that_accumulate(strategy: Any) -> None:
    """Exact: 1 and a few times 2**-10, which plain bfloat16 rounds away."""
    p = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    p.grad = torch.ones(4, dtype=torch.bfloat16)
    step = torch.compile(accumulate, backend=CollageBackend(strategy=strategy), fullgraph=True)
    optimizer = torch.optim.SGD([p], lr=0.1)
    for _ in range(3):
        step(optimizer, [torch.full((4,), 2.0**-10, dtype=torch.bfloat16)])
    assert torch.equal(full_value(p.grad), torch.full((4,), 1 + 3 * 2.0**-10, dtype=torch.float64))


def test_a_clipped_gradient_gets_no_error_terms() -> None:
    rule = _rule("g.mul_(0.3)\np.sub_(1e-4 * g)")
    optimizer = DrawnOptimizer(rule)
    optimizer.parameter.grad = rule.gradients()[0]
    torch.compile(optimizer.step, backend=CollageBackend(strategy="full"), fullgraph=True)()
    assert error_terms(optimizer.parameter)
    assert optimizer.parameter.grad is not None
    assert not error_terms(optimizer.parameter.grad)
