"""Update rules drawn at random, as text: what an optimizer's author might write.

A rule is the body of a function ``update(p, g, s1, ..., t)`` that changes its tensors in place. Run with
``torch`` on low-precision tensors it is the optimizer under test, run with ``BOUNDED_TORCH`` on
:class:`~tests.support.bounded.Bounded` numbers it is its own oracle. The same thing is written in many ways,
as people do: out of place and in place, through ``.data``, ``torch._foreach_*``, ``alpha=``, ``copy_``.

Rules are well-conditioned by construction, so that the oracle's bounds are small: every root is that of a
number that is not negative, every denominator has an epsilon, states decay or grow by bounded steps, and the
parameter's step is a small learning rate times a direction of moderate size. What slips through is drawn
again: see :func:`is_a_test`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from collage_fx.numerics import ErrorFormat
from tests.support.bounded import BOUNDED_TORCH, WIDE, Bounded, Rounding

__all__ = [
    "IN_BLOCKS",
    "LAYOUTS",
    "PULLS",
    "STEPS",
    "WEIGHTS",
    "DrawnOptimizer",
    "Rule",
    "rounding_of",
    "rules",
]

#: How often a drawn optimizer is stepped.
STEPS = 4

Draw = Callable[[st.SearchStrategy[Any]], Any]

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "vector": lambda x: x[:5].clone(),
    "matrix": lambda x: x[:12].reshape(3, 4).clone(),
    "long": lambda x: x[:19].clone(),
    "scalar": lambda x: x[0].clone(),
    "one": lambda x: x[:1].clone(),
    "transposed": lambda x: x[:12].reshape(4, 3).clone().t(),
    "strided": lambda x: x[:24].reshape(3, 8).clone()[:, ::2],
}
ELEMENTS = 24

#: Of so many elements, in rows of whole blocks, that state is packed.
IN_BLOCKS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows of blocks": lambda x: x.reshape(32, 128).clone(),
    "rows of one block": lambda x: x.reshape(128, 32).clone(),
    "channels last": lambda x: x.reshape(8, 16, 8, 4).contiguous(memory_format=torch.channels_last),
}
ELEMENTS_IN_BLOCKS = 4096


@dataclass(frozen=True)
class Rule:
    """One drawn optimizer.

    Attributes:
        body: statements that update ``p``, the states and perhaps ``g`` in place.
        states: name -> how it starts: ``"zeros"``, ``"positive"``, ``"signed"`` or as ``"p"`` (of the
            parameter's dtype), or ``"float32"`` (zeros of that dtype).
        dtype: of the parameter and its gradient.
        layout: of the parameter: a key of ``LAYOUTS`` or ``IN_BLOCKS``.
        seed: of the initial values and the gradients.
    """

    body: str
    states: tuple[tuple[str, str], ...]
    dtype: torch.dtype
    layout: str
    seed: int

    def __repr__(self) -> str:
        body = textwrap.indent(self.body, "        ")
        return (
            f'Rule(\n    """\n{body}\n    """,\n    states={self.states!r},\n    dtype={self.dtype},\n'
            f"    layout={self.layout!r},\n    seed={self.seed},\n)"
        )

    def update(self, torch_module: Any = torch, *, float64: bool = False) -> Callable[..., None]:
        """The rule as a function of p, g, the states and t (the number of this step).

        Args:
            torch_module: what it finds by the name of ``torch``.
            float64: have ``.float()``, which only ever widens, give float64 instead.
        """
        names = ", ".join(["p", "g", *(name for name, _ in self.states), "t"])
        body = textwrap.dedent(self.body).strip()
        source = f"def update({names}):\n{textwrap.indent(body, '    ')}\n"
        namespace: dict[str, Any] = {"torch": torch_module}
        exec(source.replace(".float()", ".double()") if float64 else source, namespace)
        update: Callable[..., None] = namespace["update"]
        return update

    def bounded(self) -> Callable[..., None]:
        """The rule for bounded numbers."""
        return self.update(BOUNDED_TORCH)

    def start(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The parameter and its states before the first step."""
        generator = torch.Generator().manual_seed(self.seed)

        elements, laid_out = self._layout

        def drawn(kind: str) -> Tensor:
            magnitudes = torch.rand(elements, generator=generator) * 1.75 + 0.25
            signs = torch.randint(2, (elements,), generator=generator) * 2 - 1
            values = {"signed": magnitudes * signs, "positive": magnitudes}.get(kind, torch.zeros(elements))
            return laid_out(values.to(torch.float32 if kind == "float32" else self.dtype))

        p = drawn("signed")
        return p, {name: p.clone() if kind == "p" else drawn(kind) for name, kind in self.states}

    def gradients(self) -> list[Tensor]:
        """N(0, 1) times 2**-6 to 2, contiguous, one for each step."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        elements, laid_out = self._layout
        gradients = []
        for _ in range(STEPS):
            scale = torch.exp2(torch.rand(elements, generator=generator) * 7 - 6)
            values = (torch.randn(elements, generator=generator) * scale).to(self.dtype)
            gradients.append(laid_out(values).contiguous())
        return gradients

    @property
    def _layout(self) -> tuple[int, Callable[[Tensor], Tensor]]:
        """How many elements are drawn, and what they are made into."""
        if self.layout in IN_BLOCKS:
            return ELEMENTS_IN_BLOCKS, IN_BLOCKS[self.layout]
        return ELEMENTS, LAYOUTS[self.layout]


class DrawnOptimizer(torch.optim.Optimizer):
    """A rule as an optimizer of one parameter.

    Args:
        rule: what its step does.
        dtype: to run it in, with the rule's own initial values.
        counter: the step's number as a Python int or as a 0-d tensor.
        float64: run everything in float64.
    """

    def __init__(self, rule: Rule, *, counter: str = "tensor", float64: bool = False) -> None:
        parameter, states = rule.start()
        if float64:
            parameter, states = parameter.double(), {name: s.double() for name, s in states.items()}
        super().__init__([torch.nn.Parameter(parameter)], {"t": 0})
        self.update = rule.update(float64=float64)
        self.state[self.parameter].update(states)
        if counter == "tensor":
            self.state[self.parameter]["t"] = torch.zeros(
                (), dtype=torch.float64 if float64 else torch.float32
            )

    @property
    def parameter(self) -> torch.nn.Parameter:
        parameter: torch.nn.Parameter = self.param_groups[0]["params"][0]
        return parameter

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "t" in state:
                    state["t"] += 1
                    self.update(p, p.grad, **state)
                else:
                    group["t"] += 1
                    self.update(p, p.grad, **state, t=group["t"])


# The grammar. -----------------------------------------------------------------------------------------------

DECAYS = (0.5, 0.9, 0.99, 0.999, 0.9999)
#: Below half an ulp of most parameters, which lie between 1/4 and 2.
LEARNING_RATES = {torch.bfloat16: (1e-3, 1e-4), torch.float16: (1e-4, 2e-5)}


@dataclass
class _Names:
    """The names that an expression may read.

    Attributes:
        signed: names of tensors.
        positive: those among them that are never negative.
        plain: states of the parameter's dtype that may take any value.
        mixed: whether some are float32, so that an operand's dtype has to be put right.
    """

    signed: list[str]
    positive: list[str]
    plain: list[str]
    mixed: bool


def _signed(draw: Draw, names: _Names, depth: int) -> str:
    """A tensor of moderate size and any sign."""
    if depth == 0:
        return str(draw(st.sampled_from(names.signed)))
    x = _signed(draw, names, depth - 1)

    def y() -> str:
        return _signed(draw, names, depth - 1)

    def positive() -> str:
        return _positive(draw, names, depth - 1)

    forms: list[Callable[[], str]] = [
        lambda: x,
        lambda: f"(-{x})",
        lambda: f"{x}.sign()",
        lambda: f"torch.sign({x})",
        lambda: f"({x} + {_number(draw, 0.1, 0.9)} * {y()})",
        lambda: f"torch.add({x}, {y()}, alpha={_number(draw, 0.1, 0.9)})",
        lambda: f"({x} - {y()})",
        lambda: f"{x}.mul({_number(draw, 0.1, 2.0)})",
        lambda: f"torch.clamp({x}, min=-{(c := _number(draw, 0.1, 1.0))}, max={c})",
        lambda: f"{x}.clamp(-{_number(draw, 0.1, 1.0)}, 0.5)",
        lambda: f"{x}.clamp(min=-{(b := positive())}, max={b})",
        lambda: f"torch.minimum({x}, {positive()})",
        lambda: f"({x} / ({positive()}.sqrt() + {_epsilon(draw)}))",
        lambda: f"{x}.div({positive()}.sqrt().add_({_epsilon(draw)}))",
        lambda: f"{x} * ({positive()} + {_epsilon(draw)}).rsqrt()",
        lambda: f"({x} / (1.0 + {positive()}))",
        lambda: f"torch.where({y()} > {y()}, {x}, {_number(draw, 0.1, 0.5)} * {x})",
        lambda: f"torch.where({x} * {y()} > 0.0, {x}, torch.sign({x}))",
        lambda: f"({x} * {y()}.clamp(-1.0, 1.0))",
        lambda: f"({x} * (p.norm() / ({x}.norm() + {_epsilon(draw)})))",
        lambda: f"({x} / (torch.linalg.vector_norm({x}) + {_epsilon(draw)}))",
        lambda: f"torch._foreach_sign([{x}])[0]",
        lambda: f"torch._foreach_div([{x}], torch._foreach_norm([{x}])[0] + {_epsilon(draw)})[0]",
        lambda: f"{x}.float()",
    ]
    return f"({draw(st.sampled_from(forms))()})"


def _positive(draw: Draw, names: _Names, depth: int) -> str:
    """A tensor that is never negative."""
    if depth == 0 and names.positive:
        return str(draw(st.sampled_from(names.positive)))
    x = _signed(draw, names, max(0, depth - 1))
    forms: list[Callable[[], str]] = [
        lambda: f"{x}.abs()",
        lambda: f"{x} * {x}",
        lambda: f"{x}.square()",
        lambda: f"{x} ** 2",
        lambda: f"torch.maximum({x}.abs(), {_positive(draw, names, 0)})",
    ]
    return f"({draw(st.sampled_from(forms))()})"


def _number(draw: Draw, low: float, high: float) -> float:
    """A decimal between two others, the first one simplest."""
    return float(
        draw(st.sampled_from([low, round((low + high) / 2, 3), round(low + (high - low) / 3, 3), high]))
    )


def _epsilon(draw: Draw) -> float:
    return float(draw(st.sampled_from([0.1, 0.01, 1.0])))


def _like(target: str, x: str, mixed: bool) -> str:
    """Cast ``x`` to the dtype of ``target``, without which torch refuses some of what follows."""
    return f"({x}).to({target}.dtype)" if mixed or ".float()" in x else x


def _scaled_sum(draw: Draw, target: str, decay: float, weight: float, x: str, mixed: bool) -> list[str]:
    """Ways to write ``target = decay * target + weight * x``."""
    operand = _like(target, x, mixed)
    kept = [] if decay == 1 else [f"{target}.mul_({decay})"]
    scaled = target if decay == 1 else f"{decay} * {target}"
    foreach_kept = [] if decay == 1 else [f"torch._foreach_mul_([{target}], {decay})"]
    forms: list[list[str]] = [
        [*kept, f"{target}.add_({x}, alpha={weight})"],
        [*kept, f"{target}.add_({weight} * {x})"],
        [*kept, f"{target}.sub_({x}, alpha={-weight})"],
        [*kept, f"{target} += {weight} * {x}"],
        [*kept, f"{target}.data.add_({x}, alpha={weight})"],
        [f"{target}.copy_({scaled} + {weight} * {x})"],
        [f"{target}.data.copy_({scaled} - {-weight} * {x})"],
        [f"{target}.copy_(torch.add({scaled}, {x}, alpha={weight}))"],
        [f"{target}.data = ({scaled} + {weight} * {x}).to({target}.dtype)"],
        [f"{target}.copy_(-(-{scaled} - {weight} * {x}))"],
        [f"{target}.copy_({scaled.replace(target, target + '.float()')} + {x}.float() * {weight})"],
        [*foreach_kept, f"torch._foreach_add_([{target}], [{operand}], alpha={weight})"],
        [*kept, f"torch._foreach_sub_([{target}], [{operand}], alpha={-weight})"],
        [f"torch._foreach_copy_([{target}], [{scaled} + {weight} * {x}])"],
        [*kept, f"{target}.addcmul_({operand}, {operand}.abs(), value=0.0).add_({x}, alpha={weight})"],
    ]
    if abs(decay + weight - 1) < 1e-12:
        forms += [
            [f"{target}.lerp_({operand}, {weight})"],
            [f"{target}.copy_(torch.lerp({target}, {operand}, {weight}))"],
            [f"torch._foreach_lerp_([{target}], [{operand}], {weight})"],
            [f"{target}.sub_({weight} * ({target} - {x}))"],
        ]
    return list(draw(st.sampled_from(forms)))


def _product_sum(
    draw: Draw, target: str, decay: float, weight: float, a: str, b: str, mixed: bool
) -> list[str]:
    """Ways to write ``target = decay * target + weight * a * b``."""
    a, b = _like(target, a, mixed), _like(target, b, mixed)
    kept = [] if decay == 1 else [f"{target}.mul_({decay})"]
    forms = [
        [*kept, f"{target}.addcmul_({a}, {b}, value={weight})"],
        [*kept, f"torch._foreach_addcmul_([{target}], [{a}], [{b}], {weight})"],
        [f"{target}.copy_(torch.addcmul({decay} * {target}, {a}, {b}, value={weight}))"],
    ]
    return list(draw(st.sampled_from(forms)))


def _quotient_sum(draw: Draw, target: str, weight: float, a: str, b: str, mixed: bool) -> list[str]:
    """Ways to write ``target = target + weight * a / b``, b positive."""
    a, b = _like(target, a, mixed), _like(target, b, mixed)
    forms = [
        [f"{target}.addcdiv_({a}, {b}, value={weight})"],
        [f"torch._foreach_addcdiv_([{target}], [{a}], [{b}], {weight})"],
        [f"{target}.copy_(torch.addcdiv({target}, {a}, {b}, value={weight}))"],
    ]
    return list(draw(st.sampled_from(forms)))


#: kind of a state -> how it starts, and whether it stays positive.
STATE_KINDS = {
    "average": ("zeros", False),
    "second moment": ("positive", True),
    "momentum": ("zeros", False),
    "sum": ("positive", True),
    "maximum": ("positive", True),
    "average of p": ("signed", False),
    "previous": ("zeros", False),
    "clipped": ("signed", False),
    "limited": ("signed", False),
    "average, late": ("signed", False),
    "weights": ("p", False),
}

#: Updates of state of the size of weights.
WEIGHTS = {
    "average": "{s}.lerp_(p, 0.01)",
    "slow weights": "{s}.add_(p - {s}, alpha=0.5)",
    "last p": "{s}.copy_(p)",
    "average of its own way": "{s}.mul_(0.9).add_(p, alpha=0.1)",
    "anchor": "",
}
#: Updates of p that such state is subtracted in.
PULLS = (
    "p.add_(p - {s}, alpha=-0.1)",
    "p.lerp_({s}, 0.2)",
    "p.copy_(0.75 * p + 0.25 * {s})",
    "p.sub_(0.1 * p).add_({s}, alpha=0.1)",
    "p.add_(p - {s}, alpha=0.5)",
)


def _state_update(draw: Draw, state: str, kind: str, names: _Names) -> list[str]:
    """The update of a state in one step."""
    mixed, depth = names.mixed, draw(st.integers(0, 2))
    decay = draw(st.sampled_from(DECAYS))
    rest = float(f"{1 - decay:.6g}")
    if kind == "average":
        return _scaled_sum(draw, state, decay, rest, _signed(draw, names, depth), mixed)
    if kind == "second moment":
        x = _signed(draw, names, depth)
        if draw(st.booleans()):
            return _product_sum(draw, state, decay, rest, x, x, mixed)
        return _scaled_sum(draw, state, decay, rest, _positive(draw, names, depth), mixed)
    if kind == "momentum":
        return _scaled_sum(draw, state, decay, 1.0, _signed(draw, names, depth), mixed)
    if kind == "sum":
        return _scaled_sum(draw, state, 1, 0.1, _positive(draw, names, depth), mixed)
    if kind == "maximum":
        x = _positive(draw, names, depth)
        maximum = f"torch._foreach_maximum_([{state}], [({x}).to({state}.dtype)])"
        forms = [
            [f"{state}.copy_(torch.maximum({state}, {x}))"],
            [f"{state}.copy_(torch.maximum({decay} * {state}, {x}))"],
            [f"torch._foreach_mul_([{state}], {decay})", maximum],
        ]
        return list(draw(st.sampled_from(forms)))
    if kind == "average of p":
        return _scaled_sum(draw, state, decay, rest, "p", mixed)
    if kind == "weights":
        pull = draw(st.sampled_from(PULLS)).format(s=state)
        update = draw(st.sampled_from(sorted(WEIGHTS.values()))).format(s=state)
        return [line for line in draw(st.permutations([pull, update])) if line]
    if kind == "previous":
        return [f"{state}.copy_({_signed(draw, names, depth)})"]
    if kind == "limited":
        x, bound = _signed(draw, names, depth), _number(draw, 0.001, 0.01)
        return [f"{state}.copy_({x}.clamp(min={state} - {bound}, max={state} + {bound}))"]
    if kind == "average, late":
        return [
            f"old = {state}.clone()",
            *_scaled_sum(draw, state, decay, rest, _signed(draw, names, depth), mixed),
            f"{draw(st.sampled_from([name for name in names.plain if name != state] or [state]))}.copy_(old)",
        ]
    assert kind == "clipped"
    update = _scaled_sum(draw, state, 1, 0.01, _signed(draw, names, depth), mixed)
    bound = _number(draw, 0.5, 2.0)
    clip = [f"{state}.clamp_(-{bound}, {bound})", f"torch._foreach_clamp_max_([{state}], {bound})"]
    return [*update, draw(st.sampled_from(clip))]


def _parameter_update(draw: Draw, names: _Names, dtype: torch.dtype) -> list[str]:
    lr = draw(st.sampled_from(LEARNING_RATES[dtype]))
    lines = []
    decay, kept = lr * 0.1, 1 - lr * 0.1
    decays = [
        f"p.mul_({kept})",
        f"p.data.mul_({kept})",
        f"p.add_(p, alpha={-decay})",
        f"p.sub_({decay} * p)",
        f"torch._foreach_mul_([p], {kept})",
    ]
    if draw(st.integers(0, 2)):
        lines.append(draw(st.sampled_from(decays)))
    depth = draw(st.integers(0, 3))
    form = draw(st.integers(0, 10))
    if form == 0:
        lines += _quotient_sum(
            draw,
            "p",
            -lr,
            _signed(draw, names, depth),
            f"({_positive(draw, names, 1)}.sqrt() + 0.1)",
            names.mixed,
        )
    elif form == 1:
        lines += _product_sum(
            draw, "p", 1, -lr, _signed(draw, names, depth), _positive(draw, names, 0), names.mixed
        )
    elif form == 2:
        lines.append(f"step = {lr} * t ** 0.5 / (1.0 - 0.9 ** t)")
        lines.append(
            draw(
                st.sampled_from(
                    [f"p.sub_(step * {(d := _signed(draw, names, depth))})", f"p.copy_(p - step * {d})"]
                )
            )
        )
    elif form == 3:
        x = _signed(draw, names, depth)
        lines.append(f"p.copy_(torch.clamp({x}, min=p - {lr}, max=p + {lr}))")
    elif form == 4 and names.plain:
        # Nesterov's method by its iterates: the new value is computed from what the state's new value is.
        last = draw(st.sampled_from(names.plain))
        lines.append(f"new = p - {lr} * {_signed(draw, names, depth)}")
        lines += [f"p.copy_(new + 0.5 * (new - {last}))", f"{last}.copy_(new)"]
    elif form == 5:
        lines.append(draw(st.sampled_from(_factors(lr, _signed(draw, names, depth)))))
    else:
        lines += _scaled_sum(draw, "p", 1, -lr, _signed(draw, names, depth), names.mixed)
    if draw(st.integers(0, 5)) == 5:
        lines.append("p.clamp_(-1.9, 1.9)")
    return lines


def _factors(lr: float, x: str) -> list[str]:
    """Ways to move the parameter in proportion to itself."""
    return [
        f"p.mul_(1 - {lr} * {x})",
        f"p.copy_(p * (1.0 - {lr} * {x}))",
        f"p.div_(1 + {lr} * {x}.clamp(-1.0, 1.0))",
        f"torch._foreach_mul_([p], [(1 - {lr} * {x}).to(p.dtype)])",
        f"p.sub_({lr} * (p * {x}))",
    ]


def _anchored(draw: Draw, names: _Names, dtype: torch.dtype) -> list[str]:
    """A parameter that is what it was once, less a sum of all moves: dual averaging."""
    lr = draw(st.sampled_from(LEARNING_RATES[dtype]))
    summed = _scaled_sum(draw, "z", 1, 1.0, _signed(draw, names, draw(st.integers(0, 2))), names.mixed)
    forms = [
        f"p.copy_(a - {lr} * z)",
        f"p.copy_(a.sub(z, alpha={lr}))",
        f"p.data = torch.add(a, z, alpha=-{lr})",
        f"p.copy_(torch.addcmul(a, z, z.abs(), value=-{lr}))",
    ]
    return [*summed, draw(st.sampled_from(forms))]


#: What a rule may do to the gradient first; the last three change ``p.grad`` itself.
GRADIENT_FORMS = (
    "",
    "",
    "",
    "g = g + 0.01 * p",
    "g = g.add(p, alpha=0.01)",
    "g = g.float()",
    "g = g / (g.norm() + 0.1)",
    "g = -g",
    "g = g.clone().mul_(0.5)",
    "g.mul_(0.3)",
    "g.clamp_(-1.0, 1.0)",
    "g.add_(p, alpha=0.01)",
)


@st.composite
def any_rules(draw: Draw, layouts: Collection[str] = LAYOUTS) -> Rule:
    """One rule: what it does to the gradient, to 0 to 3 states, to the parameter, in this order or not."""
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16]))
    kinds: Sequence[str] = draw(st.lists(st.sampled_from(list(STATE_KINDS)), max_size=3))
    float32 = draw(st.integers(0, 9)) == 9
    states: list[tuple[str, str]] = []
    updates: list[str] = []
    late: list[str] = []
    names = _Names(["g", "p"], [], [], float32)
    lines = [line for line in [draw(st.sampled_from(GRADIENT_FORMS))] if line]
    for i, kind in enumerate(kinds, 1):
        name, (start, positive) = f"s{i}", STATE_KINDS[kind]
        states.append((name, "float32" if float32 and start == "zeros" else start))
        names.signed.append(name)
        names.positive += [name] * positive
        names.plain += [name] * (not positive and states[-1][1] != "float32")
    for (name, _), kind in zip(states, kinds, strict=True):
        (late if draw(st.booleans()) and kind != "second moment" else updates).extend(
            _state_update(draw, name, kind, names)
        )
    if draw(st.integers(0, 9)) == 9:
        states += [("a", "signed"), ("z", "zeros")]
        lines += [*updates, *_anchored(draw, names, dtype), *late]
    else:
        lines += [*updates, *_parameter_update(draw, names, dtype), *late]
    exchange = len(names.plain) >= 2 and draw(st.integers(0, 3)) == 3
    # Data that is assigned and then overwritten with another tensor's arrives as an alias of that, and is
    # refused.
    if exchange and not any(".data = " in line for line in lines):
        a, b = names.plain[:2]
        lines += [f"kept = {a}.clone()", f"{a}.copy_({b})", f"{b}.copy_(kept)"]
    return Rule(
        "\n".join(lines),
        tuple(states),
        dtype,
        draw(st.sampled_from(list(layouts))),
        draw(st.integers(0, 999)),
    )


def rounding_of(rule: Rule, arithmetic: str) -> Rounding:
    return WIDE if arithmetic == "wide" else Rounding.native(rule.dtype)


def is_a_test(rule: Rule, arithmetic: str, fmt: ErrorFormat) -> bool:
    """Whether a rule moves its parameter so that the error term shows, in a middle range of numbers.

    Seen in float64: no tensor reaches 2**10, whose square float16 can not hold, and some element's step
    differs from what is stored without an error term by at least twice the step's error bound.
    """
    rounding = rounding_of(rule, arithmetic)
    parameter, states = rule.start()
    tensors = {"p": parameter.double(), **{name: state.double() for name, state in states.items()}}
    dtypes = {"p": rule.dtype, **{name: state.dtype for name, state in states.items()}}
    shows = False
    for step, gradient in enumerate(rule.gradients(), 1):
        p, *numbers = (
            Bounded(tensor, rounding=rounding).loaded(name, dtypes[name], fmt if name == "p" else None)
            for name, tensor in tensors.items()
        )
        g = Bounded(gradient, rounding=rounding)
        rule.bounded()(p, g, *numbers, Bounded(step, rounding=rounding))
        stored = p.stored("p", rule.dtype, fmt)
        lost = (stored.value.to(rule.dtype).double() - stored.value).abs()
        shows |= bool((lost > 2 * stored.error).any())
        tensors = dict(zip(tensors, (number.value for number in (p, *numbers)), strict=True))
        if not all(bool((tensor.abs() < 2**10).all()) for tensor in tensors.values()):
            return False
    return shows


def rules(arithmetic: str, fmt: ErrorFormat, layouts: Collection[str] = LAYOUTS) -> st.SearchStrategy[Rule]:
    """Rules that test something.

    Args:
        arithmetic: what the roundings of a step are.
        fmt: in which parameters are kept.
        layouts: of the parameter, keys of ``LAYOUTS`` and ``IN_BLOCKS``.
    """
    return any_rules(layouts).filter(lambda rule: is_a_test(rule, arithmetic, fmt))
