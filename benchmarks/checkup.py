"""``python -m benchmarks.checkup``: how often ``collage-fx checkup`` is right, on checkpoints made here.

Small language models are trained on a Markov chain, in five optimizers and four ways:

- plain: weights and state in bfloat16, rounded to nearest in each step;
- stochastic: bfloat16 weights with stochastic rounding, float32 state;
- masters: float32 weights and state, of which the checkpoint has the bfloat16 numbers;
- ours: plain's optimizers under ``collage_fx.install``.

``plain`` is to be found; the others are to be left alone. Stochastic rounding has no masters, but loses no
updates on average, so a finding there counts as false. The thresholds of ``collage_tools/checkup/``
were chosen on other runs: seeds below 10, other learning rates, lengths and widths.

Besides: initializers of torch, models of transformers as they are initialized, and hard cases. Results go to
``results/checkup.json``, and the tables into docs/checkup.md. On one core it takes about ten minutes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import SGD, Adafactor, Adam, AdamW, Muon, Optimizer

import collage_fx
from benchmarks.by_hand import Lion
from benchmarks.table import put_between
from collage_fx.state.safetensors_file import write_safetensors
from collage_tools.checkup.code_counts import LEAST_SIGNIFICANCE
from collage_tools.checkup.verdicts import CANNOT_TELL, NO_SIGN, ROUNDED_AWAY, checkup, strongest

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "checkup.json"
DOCUMENT = HERE.parent / "docs" / "checkup.md"

Weights = dict[str, Tensor]

# The models. ------------------------------------------------------------------------------------------------

WORDS, CONTEXT = 128, 16


class Norm(nn.Module):
    """RMSNorm, with a bias if asked for."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        x = F.rms_norm(x, x.shape[-1:], self.weight)
        return x if self.bias is None else x + self.bias


class Block(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.before_attention = Norm(width, bias)
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)
        self.before_mlp = Norm(width, bias)
        self.up = nn.Linear(width, 4 * width, bias=bias)
        self.down = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each.unflatten(-1, (4, -1)).transpose(1, 2)
            for each in self.qkv(self.before_attention(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(self.before_mlp(x))))


class Model(nn.Module):
    """Transformer of two blocks; ``bias``: with biases and torch's initializers, else N(0, 0.02²)."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, bias) for _ in range(2))
        self.norm = Norm(width, bias)
        self.head = nn.Linear(width, WORDS, bias=False)
        if not bias:
            for parameter in self.parameters():
                if parameter.ndim > 1:
                    nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x) + self.position.weight
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets, drawn from a Markov chain of order 2."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(2, WORDS, WORDS, generator=generator)
    while True:
        tokens = list(torch.randint(WORDS, (2, 16), generator=generator))
        for _ in range(CONTEXT):
            odds = torch.softmax(logits[0, tokens[-1]] + logits[1, tokens[-2]], -1)
            tokens.append(torch.multinomial(odds, 1, generator=generator)[:, 0])
        text = torch.stack(tokens[1:], 1)
        yield text[:, :-1], text[:, 1:]


Make = Callable[[list[nn.Parameter], float], list[Optimizer]]


def muon(params: list[nn.Parameter], lr: float) -> list[Optimizer]:
    """Muon for matrices, AdamW with a tenth of the learning rate for vectors."""
    vectors = [p for p in params if p.ndim != 2]
    return [
        Muon([p for p in params if p.ndim == 2], lr=lr, weight_decay=0.05),
        *([AdamW(vectors, lr=lr / 10)] if vectors else []),
    ]


#: Optimizers and the learning rates of a short, a middle and a long run.
OPTIMIZERS: Mapping[str, tuple[Make, tuple[float, float, float]]] = {
    "AdamW": (lambda params, lr: [AdamW(params, lr=lr, weight_decay=0.05)], (2e-3, 4e-5, 4e-4)),
    "Adam": (lambda params, lr: [Adam(params, lr=lr)], (5e-4, 1.2e-4, 2.5e-5)),
    "SGD": (lambda params, lr: [SGD(params, lr=lr, momentum=0.9)], (0.2, 0.05, 0.02)),
    "Lion": (lambda params, lr: [Lion(params, lr=lr, weight_decay=0.05)], (2e-4, 6e-5, 2e-5)),
    "Muon": (muon, (1.5e-2, 5e-3, 2e-3)),
}
#: Kinds of runs: steps, width, biases with torch's initializers, and whether norms are frozen on purpose in
#: runs that keep all updates.
KINDS = {
    "short": (120, 72, False, False),
    "middle": (300, 64, True, False),
    "long": (700, 56, False, True),
}
WAYS = ("plain", "stochastic", "masters", "ours")
FIRST_SEED = 100


# Training. --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """Training of a model."""

    way: str
    optimizer: str
    kind: str
    lr: float
    seed: int
    steps: int
    width: int
    bias: bool
    frozen: bool = False

    @property
    def make(self) -> Make:
        if self.optimizer == "Adafactor":
            return lambda params, lr: [Adafactor(params, lr=lr)]
        return OPTIMIZERS[self.optimizer][0]


def runs() -> list[Run]:
    """The sixty runs."""
    found: list[Run] = []
    for kind, (steps, width, bias, frozen) in KINDS.items():
        for name, (_, lrs) in OPTIMIZERS.items():
            for way in WAYS:
                lr = lrs[list(KINDS).index(kind)]
                keeps = frozen and way != "plain"
                found.append(Run(way, name, kind, lr, FIRST_SEED + len(found), steps, width, bias, keeps))
    return found


def stochastic(values: Tensor) -> Tensor:
    """Round float32 numbers to bfloat16 ones, up or down at random, without a change on average."""
    bits = values.view(torch.int32)
    return ((bits + torch.randint_like(bits, 1 << 16)) & ~0xFFFF).view(torch.float32)


def kept(folder: Path | None, run: Run) -> tuple[Weights, Weights]:
    """Train, or load what an earlier call with this folder has trained."""
    if folder is None:
        return train(run)
    path = folder / f"{run.seed}-{run.way}-{run.optimizer}-{run.kind}.pt"
    if not path.exists():
        torch.save(train(run), path)
    start, end = torch.load(path)
    return start, end


def train(run: Run, start: Weights | None = None) -> tuple[Weights, Weights]:
    """Train a model; return its bfloat16 weights before and after."""
    torch.manual_seed(run.seed)
    model = Model(run.width, run.bias)
    if start is None:
        start = {name: p.detach().bfloat16() for name, p in model.named_parameters()}
    narrow = run.way in ("plain", "ours")
    held = {name: nn.Parameter(p.clone() if narrow else p.float()) for name, p in start.items()}
    trained = [name for name in held if not (run.frozen and held[name].ndim == 1)]
    optimizers = run.make([held[name] for name in trained], run.lr)
    if run.way == "ours":
        for optimizer in optimizers:
            collage_fx.install(optimizer)
    rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    for step, (x, y) in zip(range(run.steps), batches(run.seed), strict=False):
        factor = min(1, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / run.steps))
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * factor
        weights = {name: p.detach().bfloat16().float().requires_grad_() for name, p in held.items()}
        loss = F.cross_entropy(functional_call(model, weights, (x,)).flatten(0, 1), y.flatten())
        loss.backward()
        for name in trained:
            gradient = weights[name].grad
            assert gradient is not None
            held[name].grad = gradient.bfloat16().to(held[name].dtype)
        for optimizer in optimizers:
            optimizer.step()
        if run.way == "stochastic":
            for name in trained:
                held[name].data.copy_(stochastic(held[name].data))
    return start, {name: p.detach().bfloat16() for name, p in held.items()}


# Judging. ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """Verdicts on a checkpoint: alone, and with the weights that its training began with."""

    what: str
    way: str
    alone: str
    compared: str
    factor: float
    significance: float


def judged(what: str, way: str, start: Weights | None, end: Weights, folder: Path) -> Outcome:
    """Save weights, and return the verdicts on the files."""
    torch.save(end, folder / "end.pt")
    alone = checkup(folder / "end.pt")
    compared = ""
    if start is not None:
        torch.save(start, folder / "start.pt")
        compared = checkup(folder / "end.pt", folder / "start.pt").verdict
    found = strongest(alone.tensors)
    return Outcome(
        what,
        way,
        alone.verdict,
        compared,
        round(found.factor, 2) if found else 1.0,
        round(found.significance, 1) if found else 0.0,
    )


def fourier(shape: Sequence[int]) -> Tensor:
    """Cosines as in a short-time Fourier transform that is a convolution."""
    rows, columns = torch.arange(shape[0]), torch.arange(shape[1])
    return (2 * math.pi / shape[1] * (rows[:, None] * columns)).cos()


def sinusoids(shape: Sequence[int]) -> Tensor:
    """Encodings of positions, as in the first transformer."""
    rates = 10000.0 ** (-torch.arange(shape[1]) // 2 * 2 / shape[1])
    angles = torch.arange(shape[0])[:, None] * rates
    return torch.where(torch.arange(shape[1]) % 2 == 0, angles.sin(), angles.cos())


def of_initializers(folder: Path) -> Iterator[Outcome]:
    """Judge tensors as the initializers of torch write them, in three dtypes, as bfloat16."""
    init = nn.init
    ways: dict[str, Callable[[Tensor], Any]] = {
        "uniform_": init.uniform_,
        "uniform_(-1/16, 1/16)": lambda x: init.uniform_(x, -0.0625, 0.0625),
        "normal_": init.normal_,
        "normal_(0, 0.02)": lambda x: init.normal_(x, 0, 0.02),
        "normal_() * 0.02": lambda x: x.normal_().mul_(0.02),
        "trunc_normal_": init.trunc_normal_,
        "trunc_normal_(2**-5, ±2**-4)": lambda x: init.trunc_normal_(x, 0, 2**-5, -(2**-4), 2**-4),
        "xavier_uniform_": init.xavier_uniform_,
        "xavier_normal_": init.xavier_normal_,
        "kaiming_uniform_": init.kaiming_uniform_,
        "kaiming_uniform_(a=5**0.5)": lambda x: init.kaiming_uniform_(x, a=math.sqrt(5)),
        "kaiming_normal_": init.kaiming_normal_,
        "orthogonal_": init.orthogonal_,
        "sparse_": lambda x: init.sparse_(x, 0.5),
        "eye_": init.eye_,
        "ones_": init.ones_,
        "zeros_": init.zeros_,
        "constant_(1e-4)": lambda x: init.constant_(x, 1e-4),
        "Fourier basis": lambda x: x.copy_(fourier(x.shape)),
        "Fourier basis in a window": lambda x: x.copy_(fourier(x.shape) * torch.hann_window(x.shape[1])),
        "sinusoidal positions": lambda x: x.copy_(sinusoids(x.shape)),
    }
    for name, fill in ways.items():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            if name == "orthogonal_" and dtype is not torch.float32:
                continue  # torch has no QR decomposition in 16 bits
            torch.manual_seed(FIRST_SEED)
            weights = {}
            for i, shape in enumerate([(512, 256), (256, 1024), (1024, 768)]):
                weights[f"layers.{i}.weight"] = torch.empty(shape, dtype=dtype)
                fill(weights[f"layers.{i}.weight"])
                weights[f"layers.{i}.norm.weight"] = torch.ones(shape[0])
            weights = {key: value.bfloat16() for key, value in weights.items()}
            yield judged(f"{name}, {str(dtype).removeprefix('torch.')}", "untrained", None, weights, folder)


#: Models of transformers: configuration class, and sizes for a model of some 100,000 weights.
MODELS: Mapping[str, dict[str, Any]] = {
    "BertConfig": {},
    "GPT2Config": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "LlamaConfig": {},
    "Gemma2Config": {"head_dim": 16},
    "Qwen3Config": {"head_dim": 16},
    "MixtralConfig": {"num_local_experts": 4},
    "T5Config": {"d_model": 64, "d_ff": 128, "num_heads": 4, "d_kv": 16},
    "ViTConfig": {},
    "Dinov2Config": {},
    "BeitConfig": {},
    "ConvNextV2Config": {"hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 1, 1]},
    "SwinConfig": {"embed_dim": 32, "depths": [1, 1], "num_heads": [2, 2]},
    "MambaConfig": {"state_size": 8},
    "Mamba2Config": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1},
    "RwkvConfig": {"attention_hidden_size": 64, "context_length": 32},
    "Wav2Vec2Config": {"conv_dim": (32,) * 7},
    "WhisperConfig": {
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "pad_token_id": 0,
    },
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def of_transformers(folder: Path) -> Iterator[Outcome]:
    """Judge models of transformers as they are initialized, as bfloat16."""
    if importlib.util.find_spec("transformers") is None:
        return
    import transformers

    transformers.utils.logging.set_verbosity_error()  # of token numbers outside these small vocabularies
    for name, sizes in MODELS.items():
        torch.manual_seed(FIRST_SEED)
        own = {} if {"n_embd", "d_model", "embed_dim", "hidden_sizes"} & set(sizes) else SMALL
        config = getattr(transformers, name)(**{**own, "vocab_size": 512, **sizes})
        model = transformers.AutoModel.from_config(config)
        weights = {
            key: value.bfloat16() for key, value in model.state_dict().items() if value.is_floating_point()
        }
        yield judged(f"transformers {name.removesuffix('Config')}", "untrained", None, weights, folder)


def of_hard_cases(folder: Path) -> Iterator[Outcome]:
    """Judge runs that leave weak traces, or mixed ones."""
    base = train(Run("masters", "AdamW", "base", 1e-3, 200, 500, 64, False))[1]
    averaged: list[Weights] = []
    for way in ("plain", "masters", "stochastic"):
        for lr in (2e-6, 1.5e-5, 1.5e-4):
            run = Run(way, "AdamW", "fine-tuned", lr, 201, 200, 64, False)
            start, end = train(run, base)
            yield judged(f"fine-tuned from masters, 200 steps, lr {lr:g}", way, start, end, folder)
            if way == "plain" and lr > 1e-5:
                averaged.append(end)
    for lr in (1.5e-3, 6e-3):
        for way in ("plain", "masters"):
            start, end = train(Run(way, "Adafactor", "hard", lr, 202, 300, 64, False))
            yield judged(f"Adafactor, 300 steps, lr {lr:g}", way, start, end, folder)
    mean = {name: ((averaged[0][name].float() + averaged[1][name].float()) / 2).bfloat16() for name in base}
    yield judged("mean of two fine-tuned plain models", "plain", base, mean, folder)
    for way in ("plain", "masters"):
        start, end = train(Run(way, "AdamW", "hard", 2e-4, 203, 300, 64, False))
        doubled = {name: (1.7 * value.float()).bfloat16() for name, value in end.items()}
        yield judged("weights times 1.7 after training", way, None, doubled, folder)


#: Program that prints seconds of the processor, seconds, and MiB beyond those of the imports.
TIMED = r"""
import re, sys, time
from collage_tools.checkup.verdicts import checkup
def peak(): return int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1]) / 1024
before, began, used = peak(), time.monotonic(), time.process_time()
checkup(sys.argv[1])
print(time.process_time() - used, time.monotonic() - began, peak() - before)
"""


def speed(folder: Path) -> dict[str, float]:
    """Measure a checkup of 2 GB of drawn bfloat16 weights, with a thread, from the page cache."""
    shapes = {"embedding": (50000, 2048)}
    for i in range(16):
        sizes = {"qkv": (4096, 2048), "up": (8192, 2048), "gate": (8192, 2048), "down": (2048, 8192)}
        shapes |= {f"layers.{i}.{name}": shape for name, shape in sizes.items()}
    like = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()}
    path = folder / "model.safetensors"
    write_safetensors(path, like, ((0.02 * torch.randn(shape)).bfloat16() for shape in shapes.values()), {})
    command = [sys.executable, "-c", TIMED, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    used, lasted, peak = map(float, done.stdout.split())
    return {
        "gigabytes": round(path.stat().st_size / 1e9, 2),
        "processor_seconds": round(used, 1),
        "seconds": round(lasted, 1),
        "peak_mib": round(peak),
        "largest_mib": round(max(each.nbytes for each in like.values()) / 2**20),
    }


# Tables. ----------------------------------------------------------------------------------------------------

VERDICTS = (ROUNDED_AWAY, NO_SIGN, CANNOT_TELL)


def confusion(outcomes: Sequence[Outcome], attribute: str) -> str:
    """Table of ways and verdicts in Markdown, with precision and recall below."""
    counts: dict[str, list[int]] = {}
    for way in WAYS:
        verdicts = [getattr(each, attribute) for each in outcomes if each.way == way]
        counts[way] = [verdicts.count(verdict) for verdict in VERDICTS]
    table = tabulate([(way, *row) for way, row in counts.items()], ("way", *VERDICTS), tablefmt="github")
    right, of_plain = counts["plain"][0], sum(counts["plain"])
    found = sum(row[0] for row in counts.values())
    return (
        f"{table}\n\nPrecision {right / max(1, found):.2f} ({right} of {found}), "
        f"recall {right / of_plain:.2f} ({right} of {of_plain})."
    )


def tables(results: Mapping[str, Any]) -> str:
    """All tables in Markdown."""
    trained = [Outcome(**each) for each in results["trained"]]
    untrained = [Outcome(**each) for each in results["untrained"]]
    hard = [Outcome(**each) for each in results["hard"]]
    mistaken = [each.what for each in untrained if each.alone == ROUNDED_AWAY]
    least = min(each.significance for each in trained if each.way == "plain")
    most = max(each.significance for each in trained if each.way != "plain")
    rates: dict[tuple[str, str, str, str], list[str]] = {}
    for each in hard:
        what, _, rate = each.what.partition(", lr ")
        rates.setdefault((what, each.way, each.alone, each.compared or "–"), []).append(rate)
    rows = [
        (f"{what}, lr {', '.join(of)}" if any(of) else what, *verdicts)
        for (what, *verdicts), of in rates.items()
    ]
    return "\n".join(
        [
            f"{len(trained)} checkpoints, judged alone:\n",
            confusion(trained, "alone"),
            "\nand together with the weights that their training began with:\n",
            confusion(trained, "compared"),
            f"\nA pile-up counts from {LEAST_SIGNIFICANCE:g} standard deviations on. The strongest "
            f"one of a checkpoint has {least:.1f} or more in `plain`, and {most:.1f} or less in the others.",
            f"\n{len(untrained)} untrained models (each initializer of torch in three dtypes, and "
            f"{sum('transformers' in each.what for each in untrained)} models of transformers): "
            f"{len(mistaken) or 'none'} mistaken for trained without masters.\n\nHard cases:\n",
            tabulate(rows, ("checkpoint", "way", "alone", "with the start"), tablefmt="github"),
            "\nSpeed: {gigabytes:g} GB of bf16 weights take {processor_seconds:g} s of a core, and "
            "{peak_mib} MiB beyond the imports; the largest tensor has {largest_mib} MiB.".format(
                **results["speed"]
            ),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkup", description=__doc__)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument(
        "--only", choices=("trained", "untrained", "hard", "speed"), help="other results stay as they are"
    )
    parser.add_argument("--folder", type=Path, help="folder that keeps the sixty, to judge them again later")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = (
        json.loads(RESULTS.read_text()) if RESULTS.exists() else {"trained": [], "untrained": [], "hard": []}
    )
    begun = time.monotonic()

    def keep(kind: str, outcome: Outcome) -> None:
        results[kind].append(asdict(outcome))
        print(f"{time.monotonic() - begun:5.0f} s", *asdict(outcome).values(), sep="  ", flush=True)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.only in (None, "trained"):
            results["trained"] = [each for each in results["trained"] if each["way"] not in options.ways]
            for run in runs():
                if run.way in options.ways:
                    start, end = kept(options.folder, run)
                    what = f"{run.optimizer}, {run.kind}, lr {run.lr:g}, seed {run.seed}"
                    keep("trained", judged(what, run.way, start, end, folder))
        for kind, makers in (("untrained", (of_initializers, of_transformers)), ("hard", (of_hard_cases,))):
            if options.only in (None, kind):
                results[kind] = []
                for outcome in (each for maker in makers for each in maker(folder)):
                    keep(kind, outcome)
        if options.only in (None, "speed"):
            results["speed"] = speed(folder)
    results["torch"] = torch.__version__
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\n{tables(results)}")
    put_between(DOCUMENT, "<!-- by python -m benchmarks.checkup -->", "<!-- to here -->", tables(results))


if __name__ == "__main__":
    main()
