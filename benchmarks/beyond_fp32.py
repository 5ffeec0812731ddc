"""``python -m benchmarks.beyond_fp32``: measure small learning rates, and write docs/beyond-fp32.md.

Weights from N(0, 0.5) take the same gradients in float64, in float32, and in the ways of this package. The
error of a run is the norm of its distance from float64's, relative to the way that float64 has gone. The last
table is of whole trainings by transformers' Trainer, each with gradients of its own. It takes half an hour on
one core; optimizers of packages that are not installed are left out.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from benchmarks.table import markdown, place, put_between
from collage_fx import full_value, install

PLACE = place("beyond-fp32.md", "beyond_fp32")

WEIGHTS, STEPS, STEPS_OF_DECAY, WEIGHT_DECAY = 4096, 1500, 1500, 0.01
RATES = (1e-7, 1e-6, 3e-6, 1e-5)
BETAS, STEPS_OF_AVERAGE = (0.999, 0.9999, 0.99999), 10_000
MATRIX, TOKENS, STEPS_OF_TRAINING = (32, 64), 200, 2000
DECAYS = (1e-9, 1e-8, 3e-8, 1e-7, 1e-6, 1e-4, 1e-2)

#: Ways to take a step: dtype of the weights, and options of the backend; None = torch's own step.
WAYS: dict[str, tuple[torch.dtype, dict[str, Any] | None]] = {
    "float32, or float32 masters": (torch.float32, None),
    "here, float32": (torch.float32, {}),
    "here, float32, `exact`": (torch.float32, {"error_format": "exact"}),
    "here, bfloat16, `plus`": (torch.bfloat16, {}),
    "here, bfloat16, `light`": (torch.bfloat16, {"strategy": "light"}),
    "here, bfloat16, `light`, `byte`": (torch.bfloat16, {"strategy": "light", "error_format": "byte"}),
    "here, bfloat16, `plus`, as written": (torch.bfloat16, {"changes": "as written"}),
}

#: Optimizers by the names of their classes, with options, which make weight decay decoupled where there is a
#: choice.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "torch.optim.AdamW": {},
    "torch.optim.Adam": {},
    "torch.optim.Adafactor": {"eps": (1e-30, 1e-3)},
    "torch.optim.Muon": {},
    "lion_pytorch.Lion": {},
    "schedulefree.AdamWScheduleFree": {},
}
RATES_OF_LONG_RUNS = RATES_BY_NAME = (1e-6, 1e-5)

#: Weights -> their optimizer.
Make = Callable[[list[torch.nn.Parameter]], Optimizer]


def drawn(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return a gradient of noise and a tenth of it in one direction."""
    return (torch.randn(*shape, generator=generator) * 1e-3 + 1e-4).bfloat16()


def directed(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return a gradient of noise, and three tenths of a direction that each element has of its own."""
    direction = torch.randn(*shape, generator=torch.Generator().manual_seed(2))
    return (torch.randn(*shape, generator=generator) + 0.3 * direction).bfloat16()


def none(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return a gradient of zeros, so that there is weight decay alone."""
    return torch.zeros(*shape, dtype=torch.bfloat16)


def moved(
    make: Make,
    dtype: torch.dtype,
    options: Mapping[str, Any] | None,
    *,
    steps: int,
    shape: Sequence[int] = (WEIGHTS,),
    gradients: Callable[[Sequence[int], torch.Generator], Tensor] = drawn,
    spread: float = 0.5,
) -> Tensor:
    """Return the way that weights have gone in some steps, in float64.

    Args:
        make: the optimizer.
        dtype: dtype of the weights.
        options: options of the backend; None = the optimizer's own step.
        steps: number of steps.
        shape: shape of the weights.
        gradients: gradient of a step.
        spread: standard deviation of the first weights; 0 for ones.
    """
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    start = (torch.randn(*shape, generator=generator) * spread if spread else torch.ones(shape)).bfloat16()
    weights = torch.nn.Parameter(start.to(dtype, copy=True))
    optimizer = make([weights])
    if options is not None:
        install(optimizer, **options)
    if hasattr(optimizer, "train"):  # of schedulefree
        optimizer.train()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s)collage_fx: .*Predicted error")  # measured here
        for _ in range(steps):
            weights.grad = gradients(shape, generator).to(dtype)
            optimizer.step()
    whole = weights if options is None else full_value(weights)
    return whole.detach().double() - start.double()


def off(way: Tensor, exact: Tensor) -> float:
    """Return the distance of two ends, relative to the way to the exact one."""
    return float((way - exact).norm() / exact.norm())


def _ways(way: str, lr: float, **course: Any) -> tuple[Tensor, Tensor]:
    """Return the way that AdamW's weights have gone in one of the ways, and in float64."""

    def make(weights: list[torch.nn.Parameter]) -> Optimizer:
        return torch.optim.AdamW(weights, lr=lr, weight_decay=WEIGHT_DECAY)

    return moved(make, *WAYS[way], **course), moved(make, torch.float64, None, **course)


def error(way: str, lr: float) -> float:
    """Return the distance from float64's weights, relative to the way that these have gone."""
    return off(*_ways(way, lr, steps=STEPS))


def decay_reached(way: str, decay: float) -> float:
    """Return the share of the weight decay that was asked for, in steps without gradients."""
    found, exact = _ways(way, decay / WEIGHT_DECAY, steps=STEPS_OF_DECAY, gradients=none)
    return float((exact * found).sum() / (exact * exact).sum())


def made(name: str, lr: float, weights: list[torch.nn.Parameter]) -> Optimizer:
    """Make one of :data:`OPTIMIZERS`."""
    module, _, kind = name.rpartition(".")
    optimizer: Optimizer = getattr(importlib.import_module(module), kind)(
        weights, lr=lr, weight_decay=WEIGHT_DECAY, **OPTIMIZERS[name]
    )
    return optimizer


def errors_of(name: str, lr: float) -> tuple[float, float]:
    """Return the errors of an optimizer in float32 and here, of a matrix of bfloat16."""
    course = partial(moved, partial(made, name, lr), steps=STEPS, shape=MATRIX)
    exact = course(torch.float64, None)
    return off(course(torch.float32, None), exact), off(course(torch.bfloat16, {}), exact)


#: Ways and steps of long runs.
LONG_WAYS = [way for way in tuple(WAYS)[:5] if "`exact`" not in way]
LONG = 6000


def long_rows() -> list[list[str]]:
    """Return errors after many steps, of weights that are 1, as those of norms are at first."""
    rows = []
    for lr in RATES_OF_LONG_RUNS:
        make = partial(torch.optim.AdamW, lr=lr, weight_decay=WEIGHT_DECAY)
        course = partial(moved, make, steps=LONG, spread=0.0)
        exact = course(torch.float64, None)
        errors = (off(course(*WAYS[way]), exact) for way in LONG_WAYS)
        rows.append([f"{lr:g}", *(f"{error:.4f}" for error in errors)])
    return rows


#: Standard deviations of weights: .02 is that of a language model's matrices when its training begins.
SPREADS, RATES_OF_SPREADS, STEPS_OF_SPREADS = (0.02, 0.1, 0.5, 1.0), (1e-4, 1e-5, 1e-6), 600

#: Spreads and learning rates at which several optimizers are measured.
CELLS = [(spread, lr) for spread in SPREADS[::2] for lr in RATES_OF_SPREADS]

#: Ways of weights of every size.
WAYS_OF_SPREADS: dict[str, tuple[torch.dtype, dict[str, Any] | None]] = {
    "float32, or float32 masters": (torch.float32, None),
    "default, 10 bytes": (torch.bfloat16, {}),
    "8 bytes": (torch.bfloat16, {"bytes_per_parameter": 8.1}),
    "5.1 bytes": (torch.bfloat16, {"bytes_per_parameter": 5.1}),
    "`full`, 12 bytes": (torch.bfloat16, {"strategy": "full"}),
}

#: Optimizers of torch that have a first moment.
WITH_MOMENTS: dict[str, Callable[..., Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, weight_decay=WEIGHT_DECAY),
    "AdamW, foreach": partial(torch.optim.AdamW, weight_decay=WEIGHT_DECAY, foreach=True),  # GPUs' default
    "AdamW, amsgrad": partial(torch.optim.AdamW, weight_decay=WEIGHT_DECAY, amsgrad=True),
    "NAdam": torch.optim.NAdam,
    # Its last steps are large beside the mean. Of its error at (0.02, 1e-4), 0.00012, the roundings of the
    # last ten moments make 0.0001, whatever repays them; it falls as one over the number of steps.
    "RAdam": torch.optim.RAdam,
    "SGD": partial(torch.optim.SGD, momentum=0.9),
    "SGD, Nesterov": partial(torch.optim.SGD, momentum=0.9, nesterov=True),
}

#: Error that no run notices.
NEGLIGIBLE = 1e-4

#: Rows that the table leaves out, because they are others' to the last digit or nearly so.
LIKE_OTHERS = ("AdamW, foreach", "SGD, Nesterov")


def errors_of_spread(name: str, spread: float, lr: float, ways: Sequence[str]) -> list[float]:
    """Return the errors of an optimizer in some ways, of a matrix of weights of one size."""
    course = partial(
        moved,
        partial(WITH_MOMENTS[name], lr=lr),
        steps=STEPS_OF_SPREADS,
        shape=(64, 128),
        spread=spread,
        gradients=directed,
    )
    exact = course(torch.float64, None)
    return [off(course(*WAYS_OF_SPREADS[way]), exact) for way in ways]


def spread_rows() -> list[list[str]]:
    """Return AdamW's errors in all ways, by the size of weights and the learning rate."""
    rows = []
    for spread, lr in itertools.product(SPREADS, RATES_OF_SPREADS):
        errors = errors_of_spread("AdamW", spread, lr, [*WAYS_OF_SPREADS])
        rows.append([f"{spread:g}", f"{lr:g}", *(f"{error:.5f}" for error in errors)])
    return rows


def moment_rows() -> list[list[str]]:
    """Return the errors of optimizers in float32 and by default, likewise."""
    ways = [*WAYS_OF_SPREADS][:2]
    rows = []
    for name in WITH_MOMENTS:
        if name in LIKE_OTHERS:
            continue
        pairs = [errors_of_spread(name, *cell, ways) for cell in CELLS]
        most = max(here / max(of_float32, NEGLIGIBLE) for of_float32, here in pairs)
        rows.append([name, *(" / ".join(f"{each:.5f}" for each in pair) for pair in pairs), f"{most:.2f}"])
    return rows


def errors_of_average(beta2: float, steps: int = STEPS_OF_AVERAGE) -> tuple[float, float]:
    """Return the errors of Adam's second moment after a long run, in float32 and here."""
    averages = []
    for dtype, options in ((torch.float64, None), (torch.float32, None), (torch.bfloat16, {})):
        torch._dynamo.reset()
        generator = torch.Generator().manual_seed(0)
        weights = torch.nn.Parameter(torch.ones(WEIGHTS, dtype=dtype))
        optimizer = torch.optim.AdamW([weights], lr=1e-6, betas=(0.9, beta2))
        if options is not None:
            install(optimizer, **options)
        for _ in range(steps):
            weights.grad = drawn((WEIGHTS,), generator).to(dtype)
            optimizer.step()
        averages.append(full_value(optimizer.state[weights]["exp_avg_sq"]).double())
    exact, float32, here = averages
    return off(float32, exact), off(here, exact)


#: Trainings: dtype of the model, whether by autocast, and options of ``install``; None = torch's own step.
TRAININGS: dict[str, tuple[torch.dtype, bool, dict[str, Any] | None]] = {
    "float64": (torch.float64, False, None),
    "float32": (torch.float32, False, None),
    "float32 masters (autocast)": (torch.float32, True, None),
    "here, bfloat16, `plus`": (torch.bfloat16, False, {}),
    "here, bfloat16, 8 bytes": (torch.bfloat16, False, {"bytes_per_parameter": 8}),
}


def trained(training: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Train a small Llama by transformers' Trainer at lr 1e-6; return its first and its last weights."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    dtype, autocast, options = TRAININGS[training]
    torch._dynamo.reset()
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).bfloat16().to(dtype)
    start = {name: p.detach().double().clone() for name, p in model.named_parameters()}
    drawn_tokens = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, TOKENS, (32,), generator=drawn_tokens) for _ in range(256)]
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=STEPS_OF_TRAINING,
        per_device_train_batch_size=4,
        learning_rate=1e-6,
        weight_decay=WEIGHT_DECAY,
        lr_scheduler_type="constant",
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        bf16=autocast,
        use_cpu=True,
        seed=3,
    )
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": t, "labels": t} for t in texts])
    trainer.create_optimizer()
    if options is not None:
        install(trainer.optimizer, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    return start, {name: full_value(p).clone() for name, p in model.named_parameters()}


def training_rows() -> list[list[str]]:
    rows, exact = [], dict[str, Tensor]()
    for training in TRAININGS:
        start, end = trained(training)
        exact = exact or end
        ways = {name: end[name] - start[name] for name in end}
        error = sum((end[name] - exact[name]).square().sum() for name in end)
        length = sum((exact[name] - start[name]).square().sum() for name in end)
        unseen = [weights["model.embed_tokens.weight"][TOKENS:] for weights in (start, end)]
        change = float(unseen[1].norm() / unseen[0].norm()) - 1
        norms = [
            sum(float(weights[name].square().sum()) for name in ways if "proj" in name) ** 0.5
            for weights in (start, end)
        ]
        millionths = (f"{each * 1e6:.2f}" for each in (change, norms[1] / norms[0] - 1))
        rows.append([training, *millionths, f"{float(error / length) ** 0.5:.4f}"])
    return rows


def tables() -> str:
    decays = [[way, *(f"{decay_reached(way, decay):.3f}" for decay in DECAYS)] for way in WAYS]
    errors = [[way, *(f"{error(way, lr):.4f}" for lr in RATES)] for way in WAYS]
    by_name = [
        [name, *(f"{each:.4f}" for lr in RATES_BY_NAME for each in errors_of(name, lr))]
        for name in OPTIMIZERS
        if importlib.util.find_spec(name.partition(".")[0]) is not None
    ]
    columns = [f"{lr:g}, {way}" for lr in RATES_BY_NAME for way in ("float32", "here")]
    averages = [[f"{beta2:g}", *(f"{each:.1e}" for each in errors_of_average(beta2))] for beta2 in BETAS]
    cells = [f"{spread:g}, {lr:g}" for spread, lr in CELLS]
    parts = [
        f"AdamW's error after {STEPS_OF_SPREADS} steps with weights from N(0, spread), by `lr`:",
        markdown(["spread", "`lr`", *WAYS_OF_SPREADS], spread_rows()),
        "The same of several optimizers, float32 / default, by spread and `lr`. The worst ratio: the error "
        f"by default over that of float32, or over {NEGLIGIBLE:g} if that is larger:",
        markdown(["", *cells, "worst ratio"], moment_rows()),
        f"Share of the decay that was asked for, after {STEPS_OF_DECAY} steps without gradients, by "
        "`lr * weight_decay`:",
        markdown(["", *(f"{decay:g}" for decay in DECAYS)], decays),
        f"Error of the weights after {STEPS} steps with `weight_decay={WEIGHT_DECAY}`, by `lr`:",
        markdown(["", *(f"{lr:g}" for lr in RATES)], errors),
        f"The same after {LONG} steps, of weights that are 1 at first, as those of norms:",
        markdown(["`lr`", *LONG_WAYS], long_rows()),
        f"The same of a {MATRIX[0]}×{MATRIX[1]} matrix, by optimizer and `lr`, in float32 and here "
        "(bfloat16, `plus`):",
        markdown(["", *columns], by_name),
        f"Error of AdamW's second moment after {STEPS_OF_AVERAGE} steps, by `beta2`:",
        markdown(["", "float32", "here"], averages),
    ]
    if importlib.util.find_spec("transformers") is not None:
        headers = ["", "rows without gradients", "matrices of the layers", "error of the weights"]
        parts += [
            f"A Llama of two layers, trained by transformers' Trainer for {STEPS_OF_TRAINING} steps at lr "
            f"1e-6 and weight decay {WEIGHT_DECAY}: changes of norms, in millionths (of rows of the "
            "embedding that no token has, and of matrices), and the error of all weights:",
            markdown(headers, training_rows()),
        ]
    return "\n\n".join([*parts, f"torch {torch.__version__.partition('+')[0]}."])


if __name__ == "__main__":
    put_between(*PLACE, tables())
