"""``collage-fx plan``: against torch's profiler on real tensors, bytes of real state, and its messages."""

from __future__ import annotations

import copy
import functools
import json
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.dom import minidom

import pytest
import torch
from torch import nn

import collage_fx
from benchmarks.timing import peak_extra_memory
from collage_fx.torch_compat.version import version
from collage_tools.cli import main
from collage_tools.plan import Plan, from_file, from_hf, json_of, page_of, shortage_of
from collage_tools.plan.activations import Allocations, meta_model, peak, repeated_layers
from collage_tools.plan.sources import Source
from tests.support.processes import environment

#: Share of the measured peak that a plan may be off by, which docs/plan.md promises. No bound: the profiler
#: also sees memory that kernels free inside of an operation, such as 0.06 to 0.3 MB of a bfloat16 product.
WITHIN = 0.03
WITHIN_OF_THE_SMALLEST = WITHIN_OF_SHARDS = 0.05

FILE = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

def model():
    return nn.Sequential(nn.Linear(16, 64), nn.Sequential(*(Layer() for _ in range(4))), nn.Linear(64, 2))

def loss(model, micro_batch, sequence):
    return model(torch.zeros(micro_batch, sequence, 16, dtype=torch.bfloat16)).float().square().mean()
"""
#: Models of transformers, and the tokens of a sequence.
LLAMA = {
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 768,
    "vocab_size": 2000,
}
NEOX = {
    "hidden_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 768,
    "vocab_size": 3000,
}


#: With dropout in its attention, as GPT-2 has by default.
GPT2 = {"n_embd": 128, "n_layer": 4, "n_head": 4, "vocab_size": 1000, "n_positions": 256}
ENTRIES = {"llama": LLAMA, "gpt_neox": NEOX, "gpt2": GPT2}

#: Tokens of a sequence of each model.
TOKENS = {"llama": 128, "gpt_neox": 128, "gpt2": 128, "file": 48}
#: Kinds of memory on one GPU.
KINDS = ("parameters", "gradients", "state", "activations")
#: Micro-batch of the peaks.
MICRO_BATCH = 3


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


@functools.cache
def source_of(name: str) -> Source:
    if name != "file":
        pytest.importorskip("transformers", reason="pip install 'collage-fx[trainers]'")
        return from_hf(name, ENTRIES[name])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "blocks.py"
        path.write_text(FILE)
        return from_file(path)


@functools.cache
def plan_of(name: str, make: Any = sgd, fsdp: int = 1) -> Plan:
    """Plan a job, once in this file for all tests: explaining the budgets of Adam takes ten seconds."""
    job = functools.partial(Plan, gpu=0.01, reserve=0, sequence=TOKENS[name], micro_batch=MICRO_BATCH)
    return job(source_of(name), make, fsdp=fsdp, squares=name == "gpt2")


def real(source: Source) -> torch.nn.Module:
    torch.manual_seed(0)
    return source.make().train().bfloat16()


@pytest.mark.parametrize(
    ("name", "make"), [("llama", sgd), ("gpt_neox", sgd), ("gpt2", sgd), ("file", adamw)]
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_peak_is_the_allocators(name: str, make: Any, checkpointing: bool) -> None:
    """Allocated by a job with fp32 masters: model, gradients, state, passes of a second micro-batch."""
    source = source_of(name)
    kept: list[Any] = []

    def job() -> None:
        model = real(source)
        masters = [p.detach().float().requires_grad_() for p in model.parameters()]
        optimizer = make(masters)
        kept.extend([model, optimizer])
        for master in masters if make is adamw else ():
            state = {key: torch.zeros_like(master) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[master] = state
        layers = repeated_layers(model) if checkpointing else []
        for layer in layers:
            forward = layer.forward
            layer.forward = lambda *args, f=forward, **kwargs: torch.utils.checkpoint.checkpoint(
                f, *args, use_reentrant=False, **kwargs
            )
        for _ in range(2):
            source.loss(model, MICRO_BATCH, TOKENS[name]).backward()

    measured = peak_extra_memory(job, "cpu")
    planned = plan_of(name, make).table(checkpointing)["fp32 masters"]["peak"]
    if version() < (2, 12) and name == "gpt2" and checkpointing:
        pytest.xfail("torch 2.11 allocates 3.2 % more than is planned")
    assert planned == pytest.approx(measured, rel=WITHIN_OF_THE_SMALLEST if name == "file" else WITHIN)


def test_on_a_cpu_attention_with_dropout_keeps_its_squares(command: str) -> None:
    """Scores, their softmax and what dropout leaves of it, in each layer; ``--squares`` counts them."""
    source = source_of("gpt2")
    model = meta_model(source, torch.bfloat16)
    fused, squares = (peak(source, model, [], MICRO_BATCH, 128, squares=each) for each in (False, True))
    scores = MICRO_BATCH * GPT2["n_head"] * 128**2
    assert squares - fused >= 3 * GPT2["n_layer"] * torch.bfloat16.itemsize * scores
    assert main([*command.split(), "0.01", "--squares"]) == 0


def adafactor(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(params)


@pytest.mark.parametrize("make", [adamw, adafactor])
def test_masters_are_those_of_the_optimizer_on_float32(make: Any) -> None:
    masters = [p.detach().float().requires_grad_() for p in real(source_of("file")).parameters()]
    optimizer = make(masters)
    for p in masters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    states = [each for state in optimizer.state.values() for each in state.values()]
    held = sum(each.nbytes for each in (*masters, *states) if isinstance(each, torch.Tensor))
    planned = plan_of("file", make).budgets["fp32 masters"]["state"]
    assert planned == pytest.approx(held, abs=4 * len(masters))  # counts of steps


def test_state_is_that_of_a_real_optimizer() -> None:
    found = plan_of("file", adamw)
    model = real(source_of("file"))
    *_, smallest = found.budgets
    for options, limit in {"default": None, smallest: float(smallest.removesuffix(" bytes"))}.items():
        report = collage_fx.explain(torch.optim.AdamW(model.parameters()), bytes_per_parameter=limit)
        held = report.bytes_per_parameter()
        state = (held["total"] - held["parameters"]) * found.count
        assert found.budgets[options]["state"] == pytest.approx(state, abs=1)


#: Peak of FSDP2's first process of eight, alone: bytes of shards, and bytes beyond them.
SHARDED = f"""
import torch
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from benchmarks.timing import peak_extra_memory
from collage_tools.plan import from_hf
from collage_tools.plan.activations import repeated_layers

torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
source = from_hf("llama", {LLAMA})
model = source.make().train().bfloat16()
for part in (*repeated_layers(model), model):
    fully_shard(part)
source.loss(model, {MICRO_BATCH}, 128).backward()
shards = sum(each.to_local().nbytes for p in model.parameters() for each in (p, p.grad))
print(shards, peak_extra_memory(lambda: source.loss(model, {MICRO_BATCH}, 128).backward(), "cpu"))
"""


def test_a_sharded_model_takes_what_fsdp2_takes() -> None:
    row = plan_of("llama", fsdp=8).table(False)["default"]
    command = [sys.executable, "-c", SHARDED]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    shards, beyond = map(int, done.stdout.split())
    assert row["parameters"] + row["gradients"] == shards
    assert row["peak"] - row["state"] == pytest.approx(shards + beyond, rel=WITHIN_OF_SHARDS)
    whole = plan_of("llama").budgets["default"]["state"]
    assert row["state"] == pytest.approx(whole / 8, rel=0.01)  # the last rows of some shards are padded


def test_the_largest_micro_batch_fits_and_the_next_does_not() -> None:
    found = plan_of("file", adamw)
    for checkpointing, activations in found.activations.items():
        for options, row in found.table(checkpointing).items():
            largest = int(row["largest micro-batch"])
            assert largest > 2
            assert found.total(options) + activations.at(largest) <= 10_000_000
            assert found.total(options) + activations.at(largest + 1) > 10_000_000
    most = [found.table(each)["default"]["largest micro-batch"] for each in (False, True)]
    assert most[0] < most[1]


def test_the_largest_micro_batch_fits_where_a_larger_one_has_its_peak_elsewhere() -> None:
    """A gradient of 2 MB while little else is kept, or the activations of all layers: which is more?"""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 8), *(nn.GELU() for _ in range(300)))

    def loss(model: nn.Module, micro_batch: int, sequence: int) -> torch.Tensor:
        return model(torch.zeros(micro_batch, sequence, 1024, dtype=torch.bfloat16)).float().sum()

    source = Source("wide", make, loss)
    found = Plan(source, sgd, gpu=0.05, reserve=0, sequence=16)
    largest = int(found.table(False)["default"]["largest micro-batch"])
    model = meta_model(source, torch.bfloat16)
    two = peak(source, model, [], 2, 16) - found.activations[False].first
    at_largest = peak(source, model, [], largest, 16)
    assert at_largest > found.activations[False].first + 2 * two * (largest - 1), "the peak is elsewhere"
    assert found.total("default") + at_largest <= 50_000_000


def test_attention_keeps_no_squares_with_dropout_either() -> None:
    pytest.importorskip("transformers", reason="pip install 'collage-fx[trainers]'")
    peaks = []
    for dropout in (0.0, 0.1):
        source = from_hf("gpt_neox", {**NEOX, "attention_dropout": dropout})
        peaks.append(peak(source, meta_model(source, torch.bfloat16), [], 1, sequence=512))
    assert peaks[0] == peaks[1]


def test_activations_are_linear_in_the_length_of_a_sequence() -> None:
    """A causal model of transformers is asked for no mask, which would be the square of the length."""
    source = source_of("gpt_neox")
    model = meta_model(source, torch.bfloat16)
    short, middle, long = (peak(source, model, [], 1, sequence) for sequence in (64, 128, 192))
    assert long - middle == middle - short


def test_a_checkpointed_layer_keeps_its_input_alone() -> None:
    pytest.importorskip("transformers", reason="pip install 'collage-fx[trainers]'")
    peaks = []
    for layers in (3, 5):
        source = from_hf("llama", {**LLAMA, "num_hidden_layers": layers})
        model = meta_model(source, torch.bfloat16)
        peaks.append(peak(source, model, repeated_layers(model), MICRO_BATCH, 128))
    assert peaks[1] - peaks[0] == 2 * MICRO_BATCH * 128 * LLAMA["hidden_size"] * torch.bfloat16.itemsize


def test_storages_count_as_long_as_they_are_there() -> None:
    known = torch.empty(1000, device="meta")
    with Allocations([known]) as found:
        first = torch.empty(100, device="meta")
        second = known[:10] + first[:10].view(2, 5).flatten()
        assert (found.now, found.peak) == (400 + 40, 400 + 40)
        del first
        assert (found.now, found.peak) == (40, 440)
        del second
        torch.ones(50, device="meta").split(25)
    assert (found.now, found.peak) == (0, 440)


def test_layers_that_repeat_are_those_of_the_outermost_list_of_one_class() -> None:
    layer = [nn.Linear(4, 4) for _ in range(4)]
    of_one = nn.Sequential(nn.Sequential(*layer[:2]))
    without_weights = nn.ModuleList([nn.Dropout(), nn.Dropout()])
    pair = nn.ModuleDict({"up": layer[2], "down": layer[3]})  # no list
    model = nn.Sequential(of_one, without_weights, nn.ModuleList([nn.Embedding(2, 4), pair]))
    assert repeated_layers(model) == layer[:2]


def test_frozen_parameters_have_neither_gradients_nor_state() -> None:
    source = source_of("file")

    def frozen() -> torch.nn.Module:
        model = source.make()
        next(model.children()).requires_grad_(False)
        return model

    found = Plan(Source("frozen", frozen, source.loss), sgd, gpu=1, sequence=48).budgets["fp32 masters"]
    count = sum(p.numel() for p in source.make().parameters())
    trained = count - sum(p.numel() for p in next(source.make().children()).parameters())
    assert found == {"parameters": 2 * count, "gradients": 2 * trained, "state": 4 * trained}


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("blocks.py").write_text(FILE)
    return "plan blocks.py --seq 48 --reserve 0 --optimizer SGD --lr 0.1 --gpu"


def test_json_has_all_columns() -> None:
    plan = plan_of("file", adamw)
    found = json.loads(text := json_of(plan))
    assert text == json.dumps(found, indent=1)
    for checkpointing, title in enumerate(
        ("Without activation checkpointing", "With activation checkpointing")
    ):
        rows = found[title]
        assert rows == plan.table(bool(checkpointing))
        assert [*rows][:2] == ["fp32 masters", "default"]
        assert rows["fp32 masters"]["state"] == pytest.approx(
            12 * found["count"], rel=1e-3
        )  # counts of steps
        assert all(row["tokens in flight"] == 48 * row["largest micro-batch"] > 0 for row in rows.values())


def test_the_page_has_a_bar_for_each_budget_as_wide_as_its_memory() -> None:
    """A GPU of 10 MB is as wide as the page."""
    plan = plan_of("file", adamw)
    page = page_of(plan)
    sizes = [row[kind] for each in (False, True) for row in plan.table(each).values() for kind in KINDS]
    widths = [float(width) for width in re.findall(r" style='width: ([\d.]+)%", page)]
    assert widths == pytest.approx([size / 100_000 for size in sizes], abs=0.0051)
    assert page.count("linear-gradient(#000, #000) 100.00%") == 2 * len(plan.budgets)
    beside = re.findall(r'<tr><td>([\w. ]+?) *</td><td style="text-align: right;">', page)
    assert beside == [*plan.budgets] * 2


def test_a_shortage_is_what_a_larger_gpu_would_have_to_have() -> None:
    found = copy.copy(plan_of("file", adamw))
    found.usable = 600_000
    told = re.search(r"([\d.]+) GB more are needed", shortage_of(found))
    assert told
    for part, fits in ((0.98, False), (1.02, True)):
        found.usable = 600_000 + int(part * float(told[1]) * 1e9)
        assert (shortage_of(found) == "") == fits


def test_a_gpu_that_is_too_small_says_by_how_much_and_how_many_are_enough(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Gradients and the least budget take more; FSDP2 holds 0.14 MB whole on each GPU."""
    assert main([*command.split(), "0.0006"]) == 1
    told = capsys.readouterr()
    assert "none" in told.out
    assert "a GPU of 0.0006 GB is too small for a sequence of 48 tokens" in told.err
    proposed = re.search(r"GB more are needed with [\d.]+ bytes, the least; .* (--fsdp \d+)$", told.err)
    assert proposed, told.err
    assert main([*command.split(), "0.0006", *proposed[1].split(), "--html", "page.html"]) == 0
    printed = capsys.readouterr().out
    assert "fp32 masters" in printed
    assert "With activation checkpointing:" in printed
    assert "Written: page.html" in printed
    minidom.parse(str(tmp_path / "page.html"))


def test_no_sharding_is_proposed_where_whole_layers_are_too_large() -> None:
    found = copy.copy(plan_of("llama"))
    found.usable = found.whole
    assert shortage_of(found).endswith("--fsdp alone is not enough: take a larger GPU or shorter sequences")


@pytest.mark.parametrize("logits", [True, False])
def test_a_model_of_tokens_needs_no_loss(logits: bool, tmp_path: Path) -> None:
    """Cross entropy of equal logits is the logarithm of their number."""
    path = tmp_path / "tokens.py"
    end = "return x" if logits else "return x.sum() + 7"
    path.write_text(f"""
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(5, 32)
        torch.nn.init.zeros_(self.words.weight)
    def forward(self, tokens):
        x = self.words(tokens)
        assert x.shape == (2, 8, 32)
        {end}
model = Model
""")
    source = from_file(path)
    assert float(source.loss(source.make(), 2, 8)) == pytest.approx(math.log(32) if logits else 7)


def test_a_file_imports_its_neighbours_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    (tmp_path / "colorsys.py").write_text("WIDTH = 3")  # Python has a module of this name
    (tmp_path / "blocks.py").write_text(
        "import colorsys, torch\ndef model(): return torch.nn.Linear(colorsys.WIDTH, 1)"
    )
    try:
        made = from_file(tmp_path / "blocks.py").make()
    finally:
        sys.modules.pop("colorsys", None)
    assert isinstance(made, nn.Linear)
    assert made.in_features == 3


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("blocks.py --seq 8", "the following arguments are required: --gpu"),
        ("blocks.py --gpu 8", "the following arguments are required: --seq"),
        ("blocks.py --seq 8 --gpu 0", "--gpu takes a positive number of GB"),
        ("blocks.py --seq 8 --gpu 8 --reserve 1", "--reserve a share from 0 to below 1"),
        ("blocks.py --seq 8 --gpu 8 --reserve=-0.1", "--reserve a share from 0 to below 1"),
        ("blocks.py --seq 8 --gpu 8 --checkpointing no", "'no' is not allowed"),
    ],
)
def test_what_a_plan_needs_is_said(command: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *command.split()]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("nothing.py", "there is no file 'nothing.py'"),
        ("empty.py", "empty.py defines no function model()"),
        (
            "broken.py",
            "broken does not run on the meta device: RuntimeError: Tensor.item()",
        ),
        ("constant.py", "a second sequence takes no memory in constant"),
        ("thawed.py", "no parameter of thawed requires a gradient"),
        ("--hf nowhere.json", "no configuration 'nowhere.json' can be read"),
        ("--hf nowhere.json", "what to do: give the path of a config.json: nothing is downloaded"),
        ("--hf lama", "what to do: did you mean llama or mllama or llama4? Or give the path"),
        ("--hf strange.json", "lama, the model_type of 'strange.json', is no causal"),
        ("--hf bare.json", "'bare.json' has no entry model_type"),
        ("--hf clip", "and a causal language model of transformers were looked for"),
        ("--hf llama --set hiden_size=4", "has no entry 'hiden_size'"),
        ("--hf llama --set num_hidden_layers=six", "llama refuses its configuration"),
        ("--hf llama --set hidden_size", "--set takes NAME=VALUE"),
        ("--hf gpt2 --set hidden_size=96", "sequences of 2048 tokens, where gpt2 has 1024 positions"),
        ("--hf llama --optimizer Muon", "Muon() is refused"),
        ("--hf llama --dtype float32", "'float32' is not allowed"),
        ("--hf llama --fsdp 0", "'0' is no positive integer"),
        ("", "file --hf is required"),
    ],
)
def test_a_mistake_is_named(
    command: str,
    told: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "--hf" in command:
        pytest.importorskip("transformers", reason="pip install 'collage-fx[trainers]'")
    monkeypatch.chdir(tmp_path)
    Path("empty.py").write_text("")
    made = "import torch\ndef model(): return torch.nn.Linear(4, 4)"
    Path("broken.py").write_text(f"{made}\ndef loss(m, b, s): return m.weight.sum() * m.weight.sum().item()")
    Path("constant.py").write_text(f"{made}\ndef loss(m, b, s): return m.weight.sum()")
    Path("thawed.py").write_text(f"{made}.requires_grad_(False)")
    Path("bare.json").write_text("{}")
    Path("strange.json").write_text('{"model_type": "lama"}')
    assert main(["plan", *command.split(), "--gpu", "80", "--seq", "2048"]) == 2
    assert told in capsys.readouterr().err
