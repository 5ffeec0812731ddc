"""``python -m benchmarks.full_precision``: measure forward passes from hi + lo, for docs/full-precision.md.

The GPT of ``examples/train_gpt.py`` is trained in pure bfloat16 with error terms. The ways differ in the
modules that compute in float32, and in the weights that these see. Each setting is repeated with several
seeds, of weights and of the order of the data; differences are those of runs with the same seed.

    python -m benchmarks.full_precision [--seeds 4] [--steps 200]
    python -m benchmarks.full_precision --costs    # time and memory of a norm and of a head
"""

from __future__ import annotations

import argparse
import math
import statistics
import timeit
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.table import markdown, place, put_between
from benchmarks.timing import peak_extra_memory
from collage_fx import assign, full_precision_forward, install
from examples.train_gpt import GPT, VOCABULARY, Recipe, Text, batches, loss_of, validate

PLACE = place("full-precision.md", "full_precision")
COSTS = ("<!-- written by python -m benchmarks.full_precision --costs -->", "<!-- end of costs -->")


class HeadedGPT(GPT):
    """The demo's GPT, whose tied output matrix is a module."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.head = nn.Linear(recipe.width, VOCABULARY, bias=False)
        self.head.weight = self.bytes.weight

    def logits(self, x: Tensor) -> Tensor:
        return self.head(x)


def norms_of(model: HeadedGPT) -> list[nn.Module]:
    return [each for each in model.modules() if isinstance(each, nn.RMSNorm)]


def only_hi(model: HeadedGPT) -> None:
    """Compute norms and head in float32, of bfloat16 weights: for comparison."""
    for norm in norms_of(model):
        vars(norm)["forward"] = MethodType(_norm_of_hi, norm)
    vars(model.head)["forward"] = MethodType(_product_with_hi, model.head)


def _norm_of_hi(self: nn.RMSNorm, x: Tensor) -> Tensor:
    return F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps).to(x.dtype)


def _product_with_hi(self: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x.float(), self.weight.float())


def norms(model: HeadedGPT) -> None:
    full_precision_forward(norms_of(model))


def norms_and_head(model: HeadedGPT) -> None:
    norms(model)
    full_precision_forward(model.head, output_dtype=torch.float32)


def all_modules(model: HeadedGPT) -> None:
    norms_and_head(model)
    full_precision_forward(each for each in model.modules() if type(each) in (nn.Linear, nn.Embedding))


WAYS: dict[str, Callable[[HeadedGPT], None]] = {
    "hi": lambda model: None,
    "norms and head: float32, of hi": only_hi,
    "norms: float32, of hi + lo": norms,
    "norms and head: float32, of hi + lo": norms_and_head,
}


#: Row of the weights that a fine-tuning begins with.
BEFORE = "before the fine-tuning, hi"


@dataclass(frozen=True)
class Setting:
    """A kind of training.

    Attributes:
        title: heading of its table.
        peak_lr: learning rate after the warm-up.
        final_lr: learning rate in the end.
        begins: whether the weights are random; else they are those of a run of the first setting.
        trained: part of the names of the parameters that are trained.
    """

    title: str
    peak_lr: float
    final_lr: float
    begins: bool = False
    trained: str = ""


SETTINGS = (
    Setting("From random weights, learning rate 1e-3 to 1e-4", 1e-3, 1e-4, begins=True),
    Setting("Fine-tuning of all weights on C++ headers, learning rate 1e-5", 1e-5, 1e-5),
    Setting("Fine-tuning of the norms alone on C++ headers, learning rate 1e-5", 1e-5, 1e-5, trained="norm"),
)


def headers_of_torch() -> Text:
    """The C++ headers that torch ships: a text of another kind."""
    root = Path(torch.__file__).parent / "include"
    return Text.of_files(root, [path.relative_to(root) for path in root.rglob("*.h")])


def train(
    model: HeadedGPT, setting: Setting, way: Callable[[HeadedGPT], None], recipe: Recipe, text: Text
) -> tuple[float, float]:
    """Train a model; return its validation loss as trained, and with all modules from hi + lo."""
    torch.compiler.reset()
    way(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(setting.trained in name)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=recipe.lr(0), betas=recipe.betas, weight_decay=recipe.weight_decay
    )
    install(optimizer)
    data = batches(text.training, recipe.batch, recipe.context, recipe.seed, "cpu")
    for number in range(recipe.steps):
        optimizer.param_groups[0]["lr"] = recipe.lr(number)
        optimizer.zero_grad()
        loss_of(model, *next(data)).backward()
        nn.utils.clip_grad_norm_(trained, recipe.clip)
        optimizer.step()
    as_trained = validate(model, recipe, text, "cpu")
    restore(model)
    all_modules(model)
    return as_trained, validate(model, recipe, text, "cpu")


def restore(model: HeadedGPT) -> None:
    """Compute with hi alone again."""
    for each in model.modules():
        vars(each).pop("forward", None)


def begun(recipe: Recipe) -> HeadedGPT:
    torch.manual_seed(recipe.seed)
    return HeadedGPT(recipe).bfloat16()


def results(seeds: int, steps: int) -> Iterator[tuple[Setting, dict[str, list[tuple[float, float]]]]]:
    sources, headers = Text.of_standard_library(), headers_of_torch()
    whole = Recipe(steps=steps)
    first = begun(whole)
    train(first, SETTINGS[0], WAYS["hi"], whole, sources)
    restore(first)
    for setting in SETTINGS:
        recipe = replace(whole, peak_lr=setting.peak_lr, final_lr=setting.final_lr)
        losses: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
        if not setting.begins:
            of_seeds = [replace(recipe, seed=seed) for seed in range(1, seeds + 1)]
            before = [validate(first, each, headers, "cpu") for each in of_seeds]
            losses[BEFORE] = [(loss, loss) for loss in before]
        for seed in range(1, seeds + 1):
            for name, way in WAYS.items():
                of_seed = replace(recipe, seed=seed)
                model = begun(of_seed)
                if not setting.begins:
                    model.load_state_dict(first.state_dict())
                text = sources if setting.begins else headers
                losses[name].append(train(model, setting, way, of_seed, text))
                print(f"{setting.title}, seed {seed}, {name}: {losses[name][-1]}", flush=True)
        yield setting, losses


def table(losses: dict[str, list[tuple[float, float]]]) -> str:
    rows = []
    plain = [as_trained for as_trained, _ in losses["hi"]]
    for name, found in losses.items():
        apart = [loss - other for (loss, _), other in zip(found, plain, strict=True)]
        rows.append(
            [
                name,
                f"{statistics.fmean(loss for loss, _ in found):.4f}",
                "" if name == "hi" else with_error(apart),
                "" if name == BEFORE else with_error([whole - loss for loss, whole in found]),
            ]
        )
    headers = ["forward passes", "validation loss", "minus that of hi", "change if evaluated from hi + lo"]
    return markdown(headers, rows)


def with_error(numbers: list[float]) -> str:
    """Mean and its standard error."""
    error = statistics.stdev(numbers) / math.sqrt(len(numbers)) if len(numbers) > 1 else math.nan
    return f"{statistics.fmean(numbers):+.5f} ± {error:.5f}"


@dataclass(frozen=True)
class Cost:
    """Cost of a module's forward pass.

    Attributes:
        forward: seconds of a forward pass without gradients.
        both: seconds of a forward and a backward pass.
        peak: most bytes that a forward pass without gradients allocates.
        kept: bytes that wait for the backward pass, beside input, output and parameters.
    """

    forward: float
    both: float
    peak: int
    kept: int


def cost_of(module: nn.Module, x: Tensor, repeats: int) -> Cost:
    with torch.no_grad():
        forward = min(timeit.repeat(lambda: module(x), number=1, repeat=repeats))
        most = peak_extra_memory(lambda: module(x), "cpu")
    both = min(timeit.repeat(lambda: module(x).sum().backward(), number=1, repeat=repeats))
    saved: dict[int, Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.setdefault(t.data_ptr(), t), lambda t: t):
        out = module(x)
    mine = {x.data_ptr(), out.data_ptr(), *(p.data_ptr() for p in module.parameters())}
    kept = sum(t.nbytes for place, t in saved.items() if place not in mine)
    return Cost(forward, both, most, kept)


def costs() -> str:
    """Table of costs: of bfloat16 modules, and of the same from hi + lo."""
    rows = []
    kinds: list[tuple[str, nn.Module, int]] = [
        ("`RMSNorm(4096)`, 512 tokens", nn.RMSNorm(4096), 200),
        ("`Linear(1024, 32000)`, 512 tokens", nn.Linear(1024, 32000, bias=False), 5),
    ]
    for title, module, repeats in kinds:
        module.bfloat16()
        for p in module.parameters():
            assign(p, p.float() + torch.randn(p.shape) * 1e-3)
        width = next(module.parameters()).shape[-1]
        x = torch.randn(512, width).bfloat16().requires_grad_()
        before = cost_of(module, x, repeats)
        full_precision_forward(module)
        after = cost_of(module, x, repeats)
        rows += [[title, "hi", *shown(before)], ["", "hi + lo", *shown(after)]]
    headers = ["module", "from", "forward", "and backward", "peak", "kept for backward"]
    about = (
        f"One core of an x86-64 server, torch {torch.__version__.partition('+')[0]}, best of several times. "
        "*Peak* is the memory that a forward pass without gradients allocates, and *kept for backward* what "
        "autograd keeps beside input, output and parameters. The head has 32.8 million weights."
    )
    return f"{about}\n\n{markdown(headers, rows)}"


def shown(cost: Cost) -> list[str]:
    times = (f"{1e3 * seconds:.1f} ms" for seconds in (cost.forward, cost.both))
    return [*times, *(f"{count / 1e6:.1f} MB" for count in (cost.peak, cost.kept))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--costs", action="store_true", help="measure time and memory instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.costs:
        put_between(PLACE[0], *COSTS, costs())
        return
    sections = [
        f"**{setting.title}**\n\n{table(losses)}" for setting, losses in results(options.seeds, options.steps)
    ]
    about = f"{options.seeds} seeds, {options.steps} steps, torch {torch.__version__.partition('+')[0]}."
    text = "\n\n".join([about, *sections])
    print(text)
    put_between(*PLACE, text)


if __name__ == "__main__":
    main()
