"""Moments whose rounding errors are repaid: which they are, by how much, and the error that is left."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch.fx import Node

from benchmarks.beyond_fp32 import moved, off
from collage_fx import backend_of, install
from collage_fx.graph import PASS_MARK, StepProgram, graph_text, new_value, placeholders, unless_skipped
from collage_fx.numerics import PACKED_FORMATS
from collage_fx.passes.repay import MOST
from tests.support.float_bits import same_bits
from tests.support.programs import after, captured
from tests.support.training import parameters, set_gradients

Step = Callable[..., Any]


def program_of(step: Step, symbols: str, last: str = "repay", state: str = "", **options: Any) -> StepProgram:
    given: dict[str, Any] = {
        "strategy": "light",
        "error_format": "exact",
        "shape": (64, 64) if state else (4,),
    }
    program = captured(step, symbols, **(given | options))
    program.rounding, program.changes = "repay", "summed"
    if state:
        program.packed, program.takes_float32 = PACKED_FORMATS[state], True
    return after(program, last)


def repaid(step: Step, symbols: str, **options: Any) -> dict[str, str]:
    """Return how each moment is stored whose roundings are repaid, by its name."""
    program = program_of(step, symbols, **options)
    nodes = [node for node in program.gm.graph.nodes if node.meta.get(PASS_MARK) == "repay"]
    read = {operand for node in nodes for operand in node.all_input_nodes}
    return {
        state.info.symbol: "nearest" if state.rounded else "dither"
        for state in program.states
        if unless_skipped(state.placeholder, new_value(state)) in read
    }


def text_of(program: StepProgram) -> str:
    lines = graph_text(program.gm.graph).splitlines()
    return "\n".join(line.replace("  # repay", "") for line in lines if "# repay" in line)


def sgd(p: Tensor, m: Tensor, g: Tensor) -> None:
    m.mul_(0.75).add_(g)
    p.sub_(m, alpha=0.125)


def adam(p: Tensor, m: Tensor, v: Tensor, g: Tensor, t: Tensor) -> None:
    t.add_(1)
    m.lerp_(g, 1 - 0.9)
    v.mul_(0.999).add_(g * g, alpha=0.001)
    size = 1e-3 / (1 - 0.9**t)
    p.sub_(size * m / (v.sqrt() / (1 - 0.999**t).sqrt() + 1e-8))


def test_a_moment_is_rounded_once_and_the_update_reads_what_compensates_for_that() -> None:
    assert_expected_inline(
        text_of(program_of(sgd, "p m g")),
        """\
to_bfloat16_2: bfloat16[4] = convert_element_type(add_1, bfloat16)
to_float32_3: float32[4] = convert_element_type(to_bfloat16_2, float32)
sub_3: float32[4] = sub(to_float32_3, add_1)
mul_4: float32[4] = mul(sub_3, 3.0)
sub_4: float32[4] = sub(add_1, mul_4)""",
    )


def test_the_share_follows_the_correction_that_the_update_is_divided_by() -> None:
    assert_expected_inline(
        text_of(program_of(adam, "p m v g t")),
        """\
sub_8: float64[] = sub(1, sub_6)
mul_15: float64[] = mul(sub_8, 0.9486832980505138)
sub_9: float64[] = sub(sub_6, 0.09999999999999998)
mul_16: float64[] = mul(sub_9, 10.000000000000002)
sub_10: float64[] = sub(6, mul_15)
mul_17: float64[] = mul(mul_15, 4)
sub_11: float64[] = sub(6, mul_17)
div_3: float64[] = div(sub_10, sub_11)
mul_18: float64[] = mul(mul_16, div_3)
to_float32_10: float32[] = convert_element_type(mul_18, float32)
to_bfloat16_4: bfloat16[4] = convert_element_type(add_6, bfloat16)
to_float32_11: float32[4] = convert_element_type(to_bfloat16_4, float32)
sub_12: float32[4] = sub(to_float32_11, add_6)
mul_19: float32[4] = mul(sub_12, to_float32_10)
sub_13: float32[4] = sub(add_6, mul_19)""",
    )


# Which states are moments. ----------------------------------------------------------------------------------


def nesterov(p: Tensor, m: Tensor, g: Tensor) -> None:
    m.mul_(0.9).add_(g)
    p.sub_(g + m * 0.9, alpha=0.125)


def skipped(p: Tensor, m: Tensor, g: Tensor, t: Tensor) -> None:
    new = m * 0.9 + g
    p.copy_(torch.where(t > 1, p, p - new * 0.125))
    m.copy_(torch.where(t > 1, m, new))


def with_norms(p: Tensor, m: Tensor, g: Tensor) -> None:
    """As in LAMB."""
    m.lerp_(g, 0.1)
    p.sub_(m * (p.norm() / m.norm()), alpha=0.125)


def two_moments(p: Tensor, m: Tensor, n: Tensor, g: Tensor) -> None:
    """As in AdEMAMix."""
    m.lerp_(g, 0.1)
    n.lerp_(g, 0.08)
    p.sub_(m + 5 * n, alpha=0.125)


def in_two_branches(p: Tensor, m: Tensor, v: Tensor, g: Tensor, t: Tensor) -> None:
    """As in RAdam."""
    t.add_(1)
    m.lerp_(g, 0.1)
    v.mul_(0.999).addcmul_(g, g, value=0.001)
    p.sub_(torch.where(t > 5, m / (v.sqrt() + 1e-8), m), alpha=0.125)


def switched(p: Tensor, m: Tensor, v: Tensor, g: Tensor, t: Tensor) -> None:
    """As in RAdam, whose sixth step is the first with divisors of elements."""
    t.add_(1)
    m.lerp_(g, 1 - 0.9)
    v.mul_(0.999).addcmul_(g, g, value=0.001)
    p.sub_(m * torch.where(t > 5, 1 / (v.sqrt() + 1e-8), 1.0), alpha=0.125)


def switched_by_the_opposite(p: Tensor, m: Tensor, v: Tensor, g: Tensor, t: Tensor) -> None:
    t.add_(1)
    m.lerp_(g, 1 - 0.9)
    v.mul_(0.999).addcmul_(g, g, value=0.001)
    p.sub_(m * torch.where(t <= 5, 1.0, 1 / (v.sqrt() + 1e-8)), alpha=0.125)


def switched_among_numbers(p: Tensor, m: Tensor, g: Tensor, t: Tensor) -> None:
    t.add_(1)
    m.lerp_(g, 1 - 0.9)
    p.sub_(m * torch.where(t > 5, 0.5, 1.0), alpha=0.125)


def read_by_another(p: Tensor, m: Tensor, s: Tensor, g: Tensor) -> None:
    m.lerp_(g, 0.1)
    s.mul_(0.999).addcmul_(m, m, value=0.001)
    p.sub_(m, alpha=0.125)


def belief(p: Tensor, m: Tensor, s: Tensor, g: Tensor) -> None:
    """As in AdaBelief."""
    m.lerp_(g, 0.1)
    s.mul_(0.999).add_((g - m) ** 2, alpha=0.001)
    p.sub_(m / (s.sqrt() + 1e-8), alpha=0.125)


@pytest.mark.parametrize(
    ("step", "symbols", "expected"),
    [
        (sgd, "p m g", {"m": "nearest"}),
        (adam, "p m v g t", {"m": "nearest"}),
        (nesterov, "p m g", {"m": "nearest"}),
        (skipped, "p m g t", {"m": "nearest"}),
        (with_norms, "p m g", {"m": "nearest"}),
        (two_moments, "p m n g", {"m": "nearest", "n": "nearest"}),
        (switched, "p m v g t", {"m": "nearest"}),
        (switched_by_the_opposite, "p m v g t", {"m": "nearest"}),
        (read_by_another, "p m s g", {"m": "dither"}),
        (belief, "p m s g", {"m": "dither"}),
    ],
)
def test_moments_of_linear_updates_are_repaid(step: Step, symbols: str, expected: dict[str, str]) -> None:
    assert repaid(step, symbols) == expected
    for state in program_of(step, symbols).states:
        if (stored := expected.get(state.info.symbol)) is not None:
            why, *others = state.selection.split("; rounded ")
            way = "to nearest" if stored == "nearest" else "up or down"
            assert (why, others) == ("light: parameters only", [f"{way}, which each update repays"])


def sign_of(p: Tensor, m: Tensor, g: Tensor) -> None:
    p.sub_(torch.sign(m * 0.9 + g), alpha=0.125)
    m.lerp_(g, 0.01)


def sign_of_new(p: Tensor, m: Tensor, g: Tensor) -> None:
    m.lerp_(g, 0.1)
    p.sub_(torch.sign(m), alpha=0.125)


def product(p: Tensor, m: Tensor, g: Tensor) -> None:
    m.lerp_(g, 0.1)
    p.sub_((m @ m.t()) @ m, alpha=0.125)


def square(p: Tensor, m: Tensor, g: Tensor) -> None:
    m.lerp_(g, 0.1)
    p.sub_(m * m, alpha=0.125)


def divisor(p: Tensor, m: Tensor, g: Tensor) -> None:
    m.lerp_(g, 0.1)
    p.sub_(g / (m + 2), alpha=0.125)


def condition(p: Tensor, m: Tensor, g: Tensor) -> None:
    m.lerp_(g, 0.1)
    p.sub_(torch.where(m > 0, m, g), alpha=0.125)


def old_and_new(p: Tensor, m: Tensor, g: Tensor) -> None:
    new = m * 0.9 + g
    p.sub_(new - m, alpha=0.125)
    m.copy_(new)


def shared(p: Tensor, m: Tensor, s: Tensor, g: Tensor) -> None:
    """The update itself is kept."""
    m.lerp_(g, 0.1)
    update = m * 0.125
    p.sub_(update)
    s.copy_(update)


def masked(p: Tensor, m: Tensor, g: Tensor) -> None:
    """Two slopes: an element is kept, or an average of 0.9."""
    m.copy_(torch.where(g > 0, m, m * 0.9) + g)
    p.sub_(m, alpha=0.125)


def number(p: Tensor, m: Tensor, g: Tensor, lr: Tensor) -> None:
    """A share that is not known."""
    m.mul_(lr).add_(g)
    p.sub_(m, alpha=0.125)


def slow(p: Tensor, m: Tensor, g: Tensor) -> None:
    """A thousand errors of 2**-8 in bfloat16."""
    m.mul_(0.999).add_(g)
    p.sub_(m, alpha=0.125)


def no_parameter(p: Tensor, m: Tensor, g: Tensor) -> None:
    m.mul_(0.9).add_(g)
    p.sub_(g, alpha=0.125)


@pytest.mark.parametrize(
    ("step", "symbols"),
    [
        (sign_of, "p m g"),
        (sign_of_new, "p m g"),
        (product, "p m g"),
        (square, "p m g"),
        (divisor, "p m g"),
        (condition, "p m g"),
        (old_and_new, "p m g"),
        (shared, "p m s g"),
        (masked, "p m g"),
        (number, "p m g lr"),
        (in_two_branches, "p m v g t"),
        (switched_among_numbers, "p m g t"),
        (slow, "p m g"),
        (no_parameter, "p m g"),
    ],
)
def test_others_are_not(step: Step, symbols: str) -> None:
    assert repaid(step, symbols, **({"shape": (4, 4)} if step is product else {})) == {}


def test_a_moment_with_error_terms_has_nothing_to_repay() -> None:
    assert repaid(sgd, "p m g", strategy="full") == {}


def test_the_least_error_that_is_too_much_depends_on_the_format() -> None:
    """A decay of 0.95 adds up 19 errors, of 2**-8 in bfloat16, and of 2**-11 in float16."""

    def step(p: Tensor, m: Tensor, g: Tensor) -> None:
        m.lerp_(g, 0.05)
        p.sub_(m * g, alpha=0.125)

    assert repaid(step, "p m g") == {}
    assert repaid(step, "p m g", dtypes=torch.float16) == {"m": "nearest"}
    assert 19 * 2**-11 < MOST < 19 * 2**-8
    assert repaid(slow, "p m g", state="block16") == {"m": "nearest"}


def test_updates_of_one_size_may_be_repaid_more() -> None:
    """Integers of 8 bits are off by .0118 of a block's largest number, 9 times of which are below .12."""

    def divided(p: Tensor, m: Tensor, v: Tensor, g: Tensor) -> None:
        m.lerp_(g, 0.1)
        v.mul_(0.999).addcmul_(g, g, value=0.001)
        p.sub_(m / (v.sqrt() + 1e-8), alpha=0.125)

    assert repaid(nesterov, "p m g", state="block8") == {"m": "nearest"}
    assert repaid(divided, "p m v g", state="block8") == {}
    assert repaid(divided, "p m v g", state="block16") == {"m": "nearest"}
    assert repaid(slow, "p m g", state="block8") == {}


# Effects of steps. -----------------------------------------------------------------------------------------


def zeros_for(node: Node) -> Tensor:
    value = node.meta["val"]
    return torch.zeros(value.shape, dtype=value.dtype)


def shares(beta: float, steps: int) -> list[float]:
    """Return k of steps as the definition has it: a sum over all later steps, in which 1 / B falls."""
    ends = range(1, steps + 1)
    return [
        sum(beta**j * (1 - beta**t) / (1 - beta ** (t + j)) for j in range(1, 40 * int(1 / (1 - beta))))
        for t in ends
    ]


#: A moment divided by its bias correction, as optimizers write it.
CORRECTED: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "1 - beta**t": lambda m, t, beta: m / (1 - beta**t),
    "beta**t - 1": lambda m, t, beta: m / (beta**t - 1),  # torch's, foreach=True
    "reciprocal": lambda m, t, beta: m * (torch.pow(beta, t) - 1).div(0.5).reciprocal(),
    "negated": lambda m, t, beta: m / -(beta**t - 1),
    "a sum": lambda m, t, beta: m / (1 + -1 * beta**t),  # how numbers of Python arrive in a graph
    "rsub": lambda m, t, beta: m * (0.5 / torch.rsub(beta**t, 1)),
    "base in a tensor": lambda m, t, beta: m / (1 - torch.full((), beta, dtype=torch.float64) ** t),
}


@pytest.mark.parametrize(
    ("beta", "corrected"),
    [
        *((beta, CORRECTED["1 - beta**t"]) for beta in (0.5, 0.9, 0.95, 0.99)),
        *((0.9, each) for each in CORRECTED.values()),
    ],
)
def test_the_share_is_near_the_sum_over_later_steps(
    beta: float, corrected: Callable[[Tensor, Tensor, float], Tensor]
) -> None:
    """Nothing in the first step; a fifth too little, and ever less, once a fifth of the memory has passed."""

    def step(p: Tensor, m: Tensor, g: Tensor, t: Tensor) -> None:
        t.add_(1)
        m.lerp_(g, 1 - beta)
        p.sub_(corrected(m, t, beta))

    program = program_of(step, "p m g t", dtypes=torch.float16)  # whose errors are small enough for all four
    check_shares(program, placeholders(program.gm.graph)[3], beta)


def check_shares(program: StepProgram, count: Node, beta: float) -> None:
    """Check k of all steps, of which ``count`` says how many have been taken before."""
    graph = program.gm.graph
    (factor,) = (
        node
        for node in graph.nodes
        if node.meta.get(PASS_MARK) == "repay" and "to_float32" in node.name and node.meta["val"].dim() == 0
    )
    graph.output_node().args = ((factor,),)
    program.gm.recompile()
    memory = int(1 / (1 - beta))
    inputs = {node: zeros_for(node) for node in placeholders(graph)}
    for t, expected in enumerate(shares(beta, 12 * memory), start=1):
        inputs[count].fill_(t - 1)
        (found,) = program.gm(*inputs.values())
        if t == 1:
            assert abs(found) < 1e-6
        elif t > 10 * memory:
            assert abs(found - expected) <= 0.05 * expected
        else:
            assert 0 < found <= 1.02 * expected


def test_the_moment_counts_its_steps_for_a_correction_from_outside() -> None:
    """As in recorded steps: the number may be a bias correction, and then k is far too large at first."""

    def step(p: Tensor, m: Tensor, v: Tensor, g: Tensor, size: Tensor) -> None:
        m.lerp_(g, 1 - 0.9)
        v.mul_(0.999).addcmul_(g, g, value=0.001)
        p.sub_(size * m / (v.sqrt() + 1e-8))

    program = program_of(step, "p m v g size")
    (moment,) = (state for state in program.states if state.info.symbol == "m")
    assert moment.auxiliaries[-1] in moment.written
    check_shares(program, moment.auxiliaries[-1], 0.9)


def steps_of(
    step: Step, symbols: str, inputs: dict[str, Tensor], gradients: list[Tensor], **options: Any
) -> tuple[StepProgram, list[Tensor]]:
    """Run a rewritten graph eagerly; return the program, and its inputs after the last step."""
    program = program_of(step, symbols, "compensate-wide", **options)
    names = symbols.split()
    values = [inputs.get(name, torch.zeros(())) for name in names]
    added = placeholders(program.gm.graph)[len(names) :]
    values += map(zeros_for, added)
    for gradient in gradients:
        values[names.index("g")] = gradient
        program.gm(*values)
    return program, values


def test_a_parameter_is_off_by_what_the_moment_is_off_now() -> None:
    """The theorem, in exact arithmetic: after each number of steps, for drawn gradients of a few bits."""
    drawn = torch.Generator().manual_seed(3)
    gradients = [torch.randint(-40, 41, (64,), generator=drawn).bfloat16() / 32 for _ in range(40)]
    beta, k, lr = Fraction(3, 4), 3, Fraction(1, 8)
    for count in (1, 2, 7, 40):
        start = {"p": torch.zeros(64, dtype=torch.bfloat16), "m": torch.zeros(64, dtype=torch.bfloat16)}
        program, values = steps_of(sgd, "p m g", start, gradients[:count], shape=(64,))
        (p_state, m_state) = program.states
        rest = dict(zip(placeholders(program.gm.graph), values, strict=True))
        p = p_state.error_format.join(values[0], *(rest[node] for node in p_state.auxiliaries))
        for i in range(64):
            m_exact = p_exact = Fraction(0)
            for gradient in gradients[:count]:
                m_exact = beta * m_exact + Fraction(float(gradient[i]))
                p_exact -= lr * m_exact
            off = Fraction(float(values[1][i])) - m_exact
            # float32 rounds each of four operations on numbers below 64.
            assert abs(Fraction(float(p[i])) - (p_exact + lr * k * off)) <= count * Fraction(4 * 64, 2**24)
        assert len(m_state.written) == len(m_state.auxiliaries) - 1, "dither counts no step"
        assert not rest[m_state.auxiliaries[-1]].any()


@pytest.mark.parametrize("step", [switched, switched_by_the_opposite])
def test_nothing_is_repaid_before_a_switch_to_divisors_of_elements(step: Step) -> None:
    drawn = torch.Generator().manual_seed(5)
    gradients = [torch.randn(64, generator=drawn).bfloat16() for _ in range(4)]
    for is_on, t in ((False, 0.0), (True, 5.0)):
        start = {name: torch.zeros(64, dtype=torch.bfloat16) for name in "pmv"} | {"t": torch.tensor(t)}
        _, (p, *_) = steps_of(step, "p m v g t", start, gradients, shape=(64,))
        stored, v, unrepaid = torch.zeros(64), torch.zeros(64), torch.zeros(64)
        for gradient in gradients:
            m = torch.lerp(stored, gradient.float(), 1 - 0.9)
            v = v * 0.999 + gradient.float() ** 2 * 0.001
            unrepaid -= m * (1 / (v.sqrt() + 1e-8) if is_on else 1) / 8
            stored = m.bfloat16().float()
        # Rounded to nearest, p is off by 2**-9 of itself, and v by twice that in each step.
        most = (2**-8 if not is_on else 2**-6) * unrepaid.abs() + 1e-6
        assert bool(((p.float() - unrepaid).abs() > most).any()) == is_on


def test_a_skipped_step_keeps_every_bit() -> None:
    drawn = torch.Generator().manual_seed(4)
    start = {name: torch.randn(64, generator=drawn).bfloat16() for name in "pm"}
    kept = {name: each.clone() for name, each in start.items()}
    gradient = torch.randn(64, generator=drawn).bfloat16()
    steps_of(skipped, "p m g t", {**start, "t": torch.tensor(2.0)}, [gradient], shape=(64,))
    assert all(same_bits(start[name], kept[name]).all() for name in kept)


class CountsInPython(torch.optim.Optimizer):
    """Adam as most packages write it: the number of steps is one of Python's."""

    def __init__(self, params: Any, lr: float = 1e-3, *, branches: bool = False) -> None:
        self.branches = branches
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
            state["step"] += 1
            if self.branches and not p.grad.any():
                continue
            state["m"].lerp_(p.grad, 1 - 0.9)
            state["v"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
            size = math.sqrt(1 - 0.999 ** state["step"]) / (1 - 0.9 ** state["step"])
            p.addcdiv_(state["m"], state["v"].sqrt() + 1e-8, value=-self.param_groups[0]["lr"] * size)


def test_the_first_steps_are_repaid_where_python_counts_them() -> None:
    """The correction is a number that AOTAutograd writes as a sum and a product."""
    params = parameters(shapes=[(16,)])
    optimizer = install(CountsInPython(params))
    for i in range(4):
        set_gradients(params, i)
        optimizer.step()
    *_, last = backend_of(optimizer).report().graphs
    lines = graph_text(last.after.graph).splitlines()
    assert "float64[] = sub(6, " in "".join(line for line in lines if "# repay" in line)


@pytest.mark.parametrize("branches", [False, True])
def test_the_first_steps_are_nearer_than_with_dither(branches: bool) -> None:
    """The errors of dither add up, in 30 steps at random; those that are repaid do not.

    The present error of the moment is left, 1 / sqrt(30 (1 - 0.9**2)) of that sum, and a fifth of each error,
    by which k is too small at first. With k of the later steps from the beginning, nothing was gained.
    """
    way = partial(moved, partial(CountsInPython, lr=1e-3, branches=branches), steps=30, shape=(64, 64))
    exact = way(torch.float64, None)
    repaid, dithered = (off(way(torch.bfloat16, {"rounding": each}), exact) for each in ("repay", "dither"))
    assert repaid < (1 / math.sqrt(30 * (1 - 0.9**2)) + 0.2) * dithered


def test_radam_is_nearer_than_with_dither() -> None:
    """Left are the present error, and errors of the first steps, while the size of updates still grows.

    As parts of the sum of 300 errors: 1 / sqrt(300 (1 - 0.9**2)), and, if it grows for 20 steps,
    sqrt(20 / 300).
    """
    way = partial(moved, partial(torch.optim.RAdam, lr=1e-4), steps=300, shape=(64, 64))
    exact = way(torch.float64, None)
    repaid, dithered = (off(way(torch.bfloat16, {"rounding": each}), exact) for each in ("repay", "dither"))
    assert repaid < (1 / math.sqrt(300 * (1 - 0.9**2)) + math.sqrt(20 / 300)) * dithered
