"""The examples run, and what the demo measures with is right."""

from __future__ import annotations

import io
import re
import signal
import socket
import struct
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

# What the examples need beyond the library; ./dev installs it, an interpreter given to ./dev may lack it.
for module in ("matplotlib", "tqdm"):
    pytest.importorskip(module)

from tqdm import tqdm  # noqa: E402

from collage_fx.metrics.quality import MeasuredTensor  # noqa: E402
from examples import train_fsdp, train_gpt  # noqa: E402
from tests.support.processes import environment  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]


def run_example(name: str, *arguments: str) -> str:
    """Run an example as a user does, in a process of its own; what it prints."""
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.prose
def test_lost_update() -> None:
    """The README shows what it prints, to four digits: other processors compute another pow()."""

    def rounded(text: str) -> str:
        return re.sub(r"\d\.\d{6}", lambda number: f"{float(number[0]):.4f}", text)

    printed = run_example("lost_update.py")
    shown = textwrap.indent("$ python examples/lost_update.py\n" + printed, " " * 4)
    assert rounded(shown) in rounded((ROOT / "README.md").read_text())
    moved = {line.split("  ")[0]: float(line.split()[-1].rstrip("%")) for line in printed.splitlines()[-3:]}
    assert moved["plain bfloat16"] == 0
    # Collage's moments and gradients are bfloat16 still: a relative error of its unit roundoff each, 0.4 %.
    assert moved["bfloat16 with Collage"] == pytest.approx(100, abs=2)
    assert moved["float64"] == 100


@pytest.mark.prose
def test_own_format() -> None:
    """It prints what the page shows: to nearest, a byte stands still where one that is dithered does not."""
    page = (ROOT / "docs" / "writing-a-format.md").read_text()
    printed = run_example("own_format.py")
    assert f"$ python examples/own_format.py\n{printed}```" in page
    errors = {line.split()[0]: float(line.split()[2]) for line in printed.splitlines()[2:]}
    assert errors["nearest-byte"] > 10 * errors["byte"]


@pytest.mark.prose
def test_peer_formats() -> None:
    """Each row is what the page shows, to a fifth: other processors compute another pow()."""
    page = (ROOT / "docs" / "writing-a-format.md").read_text()
    printed = run_example("peer_formats.py")
    shown = page.partition("$ python examples/peer_formats.py\n")[2].partition("```")[0]
    for line, expected in zip(printed.splitlines()[2:], shown.splitlines()[2:], strict=True):
        *found, error = line.split()
        *wanted, shown_error = expected.split()
        assert found == wanted
        assert float(error) == pytest.approx(float(shown_error), rel=0.2)


@pytest.mark.prose
def test_own_pass() -> None:
    printed = run_example("own_pass.py")
    assert re.search(r"clip-gradients +1 gradients", printed)
    assert "differ from those clipped by hand: 0 of 1000" in printed
    assert "differ from those not clipped: 0 of 1000" not in printed
    if torch.__version__.startswith("2.13."):  # what docs/writing-a-pass.md was written with
        assert f"\n{printed}```" in (ROOT / "docs" / "writing-a-pass.md").read_text()


def test_train_gpt(tmp_path: Path) -> None:
    names = ["none", "plus", "8 bytes", "5.1 bytes"]
    printed = run_example("train_gpt.py", "--quick", "--strategies", *names, "--out", str(tmp_path))
    rows = {
        name: line.removeprefix(name).split()
        for line in reversed(printed.splitlines())
        for name in names
        if line.startswith(f"{name} ")
    }
    lost, edq, off, bytes_each = (
        {name: float(row[i].rstrip("%")) for name, row in rows.items()} for i in (1, 3, 4, 5)
    )
    assert max(lost[name] for name in names[1:]) < 0.5 < 5 < lost["none"]
    assert edq["none"] < 0.99 < 0.9999 <= min(edq[name] for name in names[1:])
    assert max(edq.values()) <= 1.0001
    # Moments of 16 bits are closer to their recurrence than bfloat16's, and those of 8 bits are not.
    assert off["plus"] < off["8 bytes"] < off["none"] < off["5.1 bytes"]
    # One scale for 32 elements of a moment is 2/32 bytes; the positions and norms are not packed.
    recipe = train_gpt.QUICK
    count = sum(p.numel() for p in train_gpt.GPT(recipe).parameters())
    unpacked = recipe.context * recipe.width + 3 * recipe.width
    assert (bytes_each["none"], bytes_each["plus"]) == (6, 10)
    assert bytes_each["8 bytes"] == pytest.approx(8 + 2 / 32 * (1 - unpacked / count), abs=0.005)
    assert bytes_each["5.1 bytes"] == pytest.approx(5 + 2 / 32 + (2 - 2 / 32) * unpacked / count, abs=0.005)
    assert "Plain bfloat16 loses" in printed
    assert (tmp_path / "train_gpt.txt").read_text() in printed
    width, _ = struct.unpack(">II", (tmp_path / "train_gpt.png").read_bytes()[16:24])
    assert width >= 1200


def test_the_demo_says_that_masters_take_14_bytes() -> None:
    """The README counts masters as people use them; the demo's reference has copies of moments besides."""

    class LossFree(train_gpt.Run):
        def mean(self, quality: str) -> float:
            return 0.0

    rows = (("plus", 10.0), (train_gpt.BASELINE, 18.0))
    runs = [
        LossFree(train_gpt.STRATEGIES[name], [(9, 1.8)], bytes_per_parameter=count) for name, count in rows
    ]
    plus, masters = train_gpt.conclusion(runs).splitlines()
    assert plus.endswith(", with 10 bytes per parameter.")
    assert masters.startswith("fp32 masters take 14 bytes: the 18 of this run ")


def test_the_small_picture_of_the_demo(tmp_path: Path) -> None:
    runs = [
        train_gpt.Run(train_gpt.STRATEGIES[name], [(step, loss + 1 / step) for step in (50, 100, 150, 200)])
        for name, loss in (("none", 1.93), ("5.1 bytes", 1.88), (train_gpt.BASELINE, 1.88))
    ]
    train_gpt.draw_panel(runs, tmp_path / "loss.svg")
    drawn = (tmp_path / "loss.svg").read_text()
    for label in ("plain bf16: 1.935", "here, 5.1 bytes: 1.885", "fp32 masters, 14 bytes: 1.885"):
        assert f"<!-- {label} -->" in drawn


def test_the_demo_does_not_take_compiling_for_a_step() -> None:
    """Its bar once said "1/4000 [00:20<22:13:00]"."""
    shown = io.StringIO()
    recipe = replace(train_gpt.QUICK, steps=3)
    with tqdm(total=4000, file=shown, mininterval=0) as bar:
        text = train_gpt.Text.of_standard_library()
        train_gpt.train(train_gpt.STRATEGIES["plus"], recipe, text, "cpu", bar)
    expected = re.findall(r"\[[^<]*<([^,]*)", shown.getvalue())
    assert "?" in expected
    assert any(re.fullmatch(r"\d\d:\d\d", each) for each in expected)
    assert [each for each in expected if re.fullmatch(r"\d+:\d\d:\d\d", each)] == []


def give_gradients(optimizer: torch.optim.AdamW) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = 0.1 + torch.rand_like(parameter)


def test_each_parameter_is_of_a_part() -> None:
    model = train_gpt.GPT(train_gpt.QUICK)
    parts: dict[str, set[str]] = {}
    for name, _ in model.named_parameters():
        tensor = MeasuredTensor(name, "parameter", name.rpartition(".")[0], 0, "AdamW")
        parts.setdefault(train_gpt.part_of(tensor), set()).add(name)
    assert parts == {
        "embedding": {"bytes.weight", "positions"},
        "norm": {"norm.weight", "blocks.0.attention_norm.weight", "blocks.0.mlp_norm.weight"},
        "attention": {"blocks.0.queries_keys_values.weight", "blocks.0.attention_out.weight"},
        "mlp": {"blocks.0.mlp_in.weight", "blocks.0.mlp_out.weight"},
    }


def test_exact_second_moments() -> None:
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(
        [torch.nn.Parameter(torch.ones(4, dtype=torch.float64))], betas=(0.9, 0.999)
    )
    exact = train_gpt.ExactSecondMoments(optimizer)
    for _ in range(20):
        give_gradients(optimizer)
        exact.follow()
        optimizer.step()
    assert exact.mean_error() < 20 * 2**-52  # a rounding or two a step


def test_learning_rate_warms_up_and_decays() -> None:
    recipe = train_gpt.Recipe()
    rates = [recipe.lr(step) for step in range(recipe.steps + 1)]
    peak = recipe.longest_warmup
    assert rates[peak - 1] == rates[peak] == max(rates) == recipe.peak_lr
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] == pytest.approx(recipe.final_lr)


def test_text_is_the_same_every_time() -> None:
    first, second = train_gpt.Text.of_standard_library(), train_gpt.Text.of_standard_library()
    assert torch.equal(first.training, second.training)
    assert torch.equal(first.validation, second.validation)


def test_products_in_float32_are_rounded_once() -> None:
    """What a CPU without bfloat16 arithmetic gets: exact products of bfloat16 values, summed in float32."""
    torch.manual_seed(0)
    left, right = (torch.randn(8, 8).bfloat16().requires_grad_() for _ in range(2))
    with train_gpt.ProductsInFloat32():
        product, linear = left @ right, torch.nn.functional.linear(left, right)
    product.sum().backward()
    assert torch.equal(product, (left.float() @ right.float()).bfloat16())
    assert torch.equal(linear, (left.float() @ right.float().T).bfloat16())
    assert left.grad is not None
    assert torch.equal(left.grad, (torch.ones(8, 8) @ right.float().T).bfloat16())


FSDP_STEPS, FSDP_SAVE_EVERY = 24, 3


def fsdp_losses(printed: Iterable[str]) -> dict[int, str]:
    """What train_fsdp prints of its losses, of which no digit is missing, by step."""
    found = (re.fullmatch(r"step (\d+): loss (\S+)\n?", line) for line in printed)
    return {int(match[1]): match[2] for match in found if match}


def killed_at(step: int, command: list[str], count: int) -> dict[int, str]:
    """The losses that processes print until they are killed, when the first has got that far."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchruns = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    processes = [
        subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env={**environment(), **torchruns, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    printed: list[str] = []
    for line in processes[0].stdout or ():
        printed.append(line)
        if line.startswith(f"step {step}:"):
            for each in processes:
                each.kill()
    for each in processes:
        each.communicate()
        assert each.returncode == -signal.SIGKILL
    return fsdp_losses(printed)


@pytest.mark.parametrize("budget", [None, 5.1, 4.2])
def test_train_fsdp_goes_on_to_the_bit_after_sigkill(
    budget: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes, killed and resumed, have the losses of one without interruption."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    command = ["-m", "examples.train_fsdp", "--quick", "--device=cpu", f"--steps={FSDP_STEPS}", "--resume"]
    command += [f"--save-every={FSDP_SAVE_EVERY}", f"--out={tmp_path}"]
    command += [] if budget is None else [f"--bytes-per-parameter={budget}"]
    killed = killed_at(FSDP_SAVE_EVERY + 1, command, count=2)
    assert max(killed) < FSDP_STEPS - 1
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *command]
    done = subprocess.run(torchrun, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    resumed = fsdp_losses(done.stdout.splitlines())
    assert min(resumed) >= FSDP_SAVE_EVERY

    torch._dynamo.reset()
    recipe = replace(train_gpt.QUICK, steps=FSDP_STEPS)
    text = train_gpt.Text.of_standard_library()
    steps = train_fsdp.train(
        recipe,
        text,
        "cpu",
        tmp_path / "one",
        save_every=FSDP_STEPS + 1,
        resume=False,
        bytes_per_parameter=budget,
    )
    alone = {number: repr(loss) for number, loss in steps}
    assert alone.keys() == killed.keys() | resumed.keys() == set(range(FSDP_STEPS))
    assert killed.items() <= alone.items()
    assert resumed.items() <= alone.items()
    assert train_fsdp.lr_of(recipe, 0) == 0
