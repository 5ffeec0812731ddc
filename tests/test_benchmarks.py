"""The benchmarks' harness on toy sizes: every row is there and means what it says. Nothing here is timed."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from functools import partial
from itertools import pairwise, permutations
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

import collage_fx
from benchmarks import comparison, edits, few_bytes, gpu, which_default
from benchmarks.__main__ import main, opened, parse_arguments, stages
from benchmarks.beyond_fp32 import off
from benchmarks.by_hand import BETAS, EPS, LR, WEIGHT_DECAY, EagerCollage, KahanAdamW
from benchmarks.compiling import OPTIMIZERS
from benchmarks.measure import Failure, Process
from benchmarks.peers import OPTIONS, PEERS, Step, make_gradients, make_parameters
from benchmarks.sizes import LLAMA_LAYER, SIZES, elements
from benchmarks.table import BEGIN, END, MEASURED, compile_table, put_between
from benchmarks.timing import Clock, Traffic, launches, peak_extra_memory, ratio, rounds
from collage_fx.codegen.address_tables import CELL
from collage_fx.numerics.arithmetic import join

#: Nothing of other packages, and what compiles in seconds.
NAMES = ("light", "torch fp32 fused", "bf16 + fp32 master, fused", "eager Collage plus", "flashoptim 24 bit")


def test_a_run_on_a_card_goes_on_where_it_was_cut_off(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each part has its limit, and all have one; what has ended stays."""
    parts = [
        gpu.Part("quick", "one thing", 60, ["-c", "print('done')"]),
        gpu.Part("slow", "another", 1, ["-c", "print('begun', flush=True); import time; time.sleep(99)"]),
        gpu.Part(
            "wrong",
            "a third",
            60,
            ["-c", "import os; print(os.environ['MODE']); raise SystemExit(3)"],
            {"MODE": "x"},
        ),
    ]
    assert gpu.run(parts[:2], tmp_path, 60)["slow"]["status"] is None
    assert (tmp_path / "slow.txt").read_text() == "begun\n"
    ended = gpu.run(parts, tmp_path, 60)
    assert {name: each["status"] for name, each in ended.items()} == {"quick": 0, "slow": None, "wrong": 3}
    assert capfd.readouterr().out.splitlines() == [
        "quick: one thing",
        "slow: another",
        "slow: another",
        "wrong: a third",
    ]
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in (tmp_path / "summary.md").read_text().splitlines()
    ]
    assert [(name, result, says) for name, _, result, _, says in lines[2:5]] == [
        ("quick", "exit status 0", "done"),
        ("slow", "time was up", "begun"),
        ("wrong", "exit status 3", "x"),
    ]
    assert gpu.run(parts, tmp_path, 1) == ended  # no time for a part


def test_the_commands_of_a_run_on_a_card_are_understood() -> None:
    """In less time than a machine is lent for at once, with rows that the benchmark has."""
    assert sum(part.seconds for part in gpu.PARTS) <= 540
    for part in gpu.PARTS:
        if part.command[:2] == ["-m", "benchmarks"]:
            assert {*part.command[part.command.index("--peers") + 1 :]} <= {*PEERS}
            assert part.command[part.command.index("--sizes") + 1] in SIZES
        if "pytest" in part.command:
            files = [each for each in part.command if each.startswith("tests/")]
            assert files
            assert all((Path(__file__).parents[1] / each).is_file() for each in files)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the document of a run of the command."""
    folder = tmp_path_factory.mktemp("bench")
    document = folder / "document.md"
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    others = folder / "paper-costs.json"  # another command's, in the same folder
    others.write_text(json.dumps({"runs": []}))
    arguments = ["--device", "cpu", "--sizes", "toy", "--quick", "--no-count", "--results", str(folder)]
    assert main([*arguments, "--document", str(document), "--peers", *NAMES]) == 0
    others.unlink()
    return folder, document.read_text()


@pytest.mark.prose
def test_every_row_is_there_with_numbers_or_a_reason(run: tuple[Path, str]) -> None:
    (path,) = run[0].glob("*.json")
    results = json.loads(path.read_text())
    assert results["torch"] == torch.__version__
    assert results["device"] == "cpu"
    assert results["parameters"] == {"toy": 33 * 17 + 16}
    rows = {row["peer"]: row for row in results["rows"]}
    assert tuple(rows) == NAMES
    assert rows.pop("flashoptim 24 bit")["status"] == "needs cuda"
    for row in rows.values():
        assert row["status"] == MEASURED
        numbers = ["ms", "host_ms", "copy_ms", "over_copy", "over_rewriting", "light_over", "first_step_s"]
        numbers += ["cold_s", "warm_s"] if row["peer"] == "light" else []
        for name in numbers:
            assert math.isfinite(row[name])
            assert row[name] > 0
        assert row["rounds"] >= 3
    assert rows["light"]["light_over"] == 1
    assert rows["eager Collage plus"]["extra_bytes_per_parameter"] >= 2  # a temporary, of the larger tensor
    scratch = 2 * 5 * CELL  # of each tensor two numbers, and the phases of its moments and of its sum
    assert rows["light"]["extra_bytes_per_parameter"] <= scratch / results["parameters"]["toy"]
    assert rows["eager Collage plus"]["launches"] > 2 * 30  # operators, of two tensors


@pytest.mark.prose
def test_toys_stay_out_of_the_document(run: tuple[Path, str]) -> None:
    assert run[1] == f"before\n{BEGIN}\n\nNothing has been measured yet.\n\n{END}\nafter\n"


@pytest.mark.prose
def test_a_run_goes_on_where_it_was_broken_off(run: tuple[Path, str]) -> None:
    (path,) = run[0].glob("*.json")
    before = json.loads(path.read_text())["rows"]
    arguments = ["--device", "cpu", "--sizes", "toy", "--no-count", "--results", str(run[0]), "--resume"]
    assert main([*arguments, "--peers", *NAMES]) == 0
    assert json.loads(path.read_text())["rows"] == before


def test_on_a_gpu_the_rows_that_say_most_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options = parse_arguments(["--device", "cuda"])
    planned = [(size, name) for size, names in stages(options) for name in names]
    first = ("light", "plus", "torch fp32 fused", "torch bf16 fused")
    assert planned[:16] == [(size, name) for size in ("d", "c", "e", "f") for name in first]
    assert sorted(planned) == sorted((s, n) for s in SIZES if "cuda" in SIZES[s].devices for n in PEERS)
    assert stages(parse_arguments(["--device", "cuda", "--peers", "full"]))[0] == ("d", ["full"])


def test_what_the_deadline_leaves_out_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "cpu", "--sizes", "toy", "--no-count", "--results", str(tmp_path)]
    assert main([*arguments, "--peers", "light", "full", "--deadline", "1e-9"]) == 0
    told = "not reached before the deadline (--resume goes on with them): (toy) light, (toy) full"
    assert told in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "kept"), [("--no-count", {"light": 10.5}), ("--quick", {"light": 10.5}), ("--count", {})]
)
def test_only_a_run_that_counts_forgets_instructions(
    asked: str, kept: dict[str, float], tmp_path: Path
) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"rows": [], "instructions": {"light": 10.5}}))
    options = parse_arguments(["--device", "cpu", asked, "--results", str(tmp_path)])
    assert opened(path, options)["instructions"] == kept


@pytest.mark.prose
def test_compile_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.__main__.TIMED", [("toy", "SGD, momentum")])
    assert main(["--device", "cpu", "--compile-times", "--results", str(tmp_path)]) == 0
    results = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert [row["optimizer"] for row in results["compile_times"]] == ["SGD, momentum"]
    for row in results["compile_times"]:
        assert row["status"] == MEASURED
        assert row["cold_s"] > row["warm_s"] > 0  # the C++ compiler ran in the first process alone
        assert row["explain_s"] > 0
    table = compile_table(results)
    assert len(table.splitlines()) == 2 + 1


def test_timed_optimizers_are_those_of_torch() -> None:
    names = {name.partition(",")[0] for name in OPTIMIZERS}
    assert names == {
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    } - {"Optimizer", "LBFGS", "SparseAdam"}


def test_what_takes_too_long_is_ended() -> None:
    process = Process()
    with pytest.raises(Failure, match="not done within 0 s"):
        process.ask("parameters", time_limit=0.01)
    try:
        process.ask("open", "toy", "cpu", time_limit=60)
        assert process.ask("parameters", time_limit=60) == 577
        with pytest.raises(Failure, match="KeyError"):
            process.ask("build", "no such peer", "", time_limit=60)
        assert process.ask("parameters", time_limit=60) == 577  # a failure costs nothing but its row
    finally:
        process.stop()


def test_sizes() -> None:
    assert elements(SIZES["a"].shapes(0)) == 124_439_808  # the published GPT-2
    assert len(SIZES["a"].shapes(0)) == len(SIZES["b"].shapes(0)) == 148
    assert elements(LLAMA_LAYER) == 218_112_000
    assert elements(SIZES["e"].shapes(140 * 10**9)) >= 10**9
    assert 1.3e9 < elements(SIZES["f"].shapes(0)) < 1.35e9


def test_bytes_are_those_of_the_state() -> None:
    """In and out what a peer keeps, and in the gradient."""
    shapes = [(64, 64)]
    for name in ("torch fp32 fused", "torch bf16 fused"):
        peer = PEERS[name]
        parameters = make_parameters(shapes, peer.dtype, "cpu", make_gradients(shapes, peer.dtype, "cpu"))
        optimizer = torch.optim.AdamW(parameters, **OPTIONS, fused=True)
        optimizer.step()
        state = [t for t in optimizer.state[parameters[0]].values() if t.shape == parameters[0].shape]
        assert peer.bytes == 2 * sum(t.itemsize for t in [*parameters, *state]) + parameters[0].itemsize


@pytest.mark.parametrize(
    "name",
    [
        "eager Collage light",
        "eager Collage plus",
        pytest.param(
            "compiled Kahan by hand",
            marks=pytest.mark.skipif(
                torch.__version__ < TorchVersion("2.12"),
                reason="torch 2.11 ignores emulate_precision_casts on the CPU",
            ),
        ),
    ],
)
def test_optimizers_written_for_comparison_are_right(name: str) -> None:
    """They move the parameter as their moments ask for, and keep what bfloat16 would lose of that."""
    steps, shapes = 20, [(64,)]
    gradients = make_gradients(shapes, torch.bfloat16, "cpu")
    (parameter,) = make_parameters(shapes, torch.bfloat16, "cpu", gradients)
    start, g = parameter.data.double(), gradients[0].double()
    peer: EagerCollage | KahanAdamW
    if name.startswith("eager"):
        peer = EagerCollage([parameter], plus=name.endswith("plus"))
        lo, m, *v = peer.state[0]
    else:
        peer = KahanAdamW([parameter])
        (lo,), (m,), v = peer.state
    (beta1, beta2), exact = BETAS, start.clone()
    for step in range(1, steps + 1):
        peer.step()
        mean, square = m.double(), torch.stack(list(v)).double().sum(0)
        denominator = (square / (1 - beta2**step)).sqrt() + EPS
        exact -= LR * (mean / (1 - beta1**step) / denominator + WEIGHT_DECAY * exact)
    u = 2**-8
    moved, wanted = join(parameter.data, lo).double() - start, exact - start
    # An update is eight operations, each of which rounds, the pair at most one more.
    assert ((moved - wanted).abs() <= 9 * u * wanted.abs()).all()
    assert (parameter.data.double() - start - wanted).norm() > 2 * (moved - wanted).norm()
    # Of a constant gradient both moments only grow, and are rounded twice a step; so is its square, once.
    assert ((mean / (1 - beta1**steps) - g).abs() <= 2 * steps * u * g.abs()).all()
    assert ((square / (1 - beta2**steps) - g**2).abs() <= (2 * steps + 2) * u * g**2).all()


def test_traffic_moves_the_bytes_and_allocates_nothing() -> None:
    traffic = Traffic([(100,), (3, 5)], 28, "cpu")
    for target in traffic.targets:
        target.zero_()
    traffic.copy(18)()
    traffic.rewriting(4)()
    for source, target in zip(traffic.sources, traffic.targets, strict=True):
        n = source.numel() // 14
        assert torch.equal(
            target, torch.cat([~source[: 2 * n], source[2 * n : 9 * n], torch.zeros_like(source[9 * n :])])
        )
    for step in (traffic.copy(14), traffic.rewriting(14)):
        step()
        assert peak_extra_memory(step, "cpu") == 0
        assert launches(step, "cpu") == 2


def test_memory_and_operators_are_counted() -> None:
    a, b = torch.zeros(1000), torch.zeros(1000)

    def step() -> None:
        a.copy_((a + 1) * b)

    assert peak_extra_memory(step, "cpu") in range(8000, 8100)  # two temporaries, and a number
    assert launches(step, "cpu") == 3


def test_ratio_is_of_rounds() -> None:
    assert ratio([1.0, 20.0, 3.0], [2.0, 40.0, 6.0]) == (0.5, 0)
    assert ratio([1.0, 2.0, 3.0, 4.0, 5.0], [1.0] * 5) == (3, 1)  # quartiles 2 and 4


def test_rounds_have_many_orders() -> None:
    """After which other a step runs does not stay the same, nor is it one of them more often than another."""
    calls: list[str] = []

    class Untimed(Clock):
        def __call__(self, step: Step, head_start: float = 0.0) -> tuple[float, float]:
            step()
            return 1.0, 1.0

    names = ("light", "plus", "it", "copy")
    steps: dict[str, Step] = {name: partial(calls.append, name) for name in names}
    times = rounds(Untimed("cpu"), steps, at_most=120, at_least=3, seconds=60)
    assert calls[:4] == list(names)  # for warmth
    assert all(len(samples) == 120 for samples in times.values())
    after = Counter(pairwise(calls[4:]))
    # 119 calls or 120 of each have one before it, each of the others with a chance of 5/16: 37.5 ± 5.1, the
    # same one again where rounds meet, 1/16.
    for name, other in permutations(names, 2):
        assert abs(after[other, name] - 37.5) < 4 * 5.1


def test_a_run_that_goes_on_says_when_it_began(tmp_path: Path) -> None:
    options = parse_arguments(["--device", "cpu", "--results", str(tmp_path), "--resume"])
    path = tmp_path / "cpu.json"
    path.write_text(json.dumps({"rows": [{"status": MEASURED}], "about": "A full run on 2020-02-02"}))
    about = opened(path, options)["about"]
    assert about.startswith("A full run on 2020-02-02; gone on with on ")
    path.write_text(json.dumps({"rows": [{"status": MEASURED}], "about": about}))
    assert opened(path, options)["about"] == about


def test_the_comparison_has_the_numbers_of_the_results(tmp_path: Path) -> None:
    text = comparison.PLACE[0].read_text()
    copy = tmp_path / "comparison.md"
    copy.write_text(text)
    put_between(copy, *comparison.PLACE[1:], comparison.table())
    assert text == copy.read_text(), "python -m benchmarks.comparison writes the table"
    assert all(any(name in line for line in text.splitlines()) for name, *_ in comparison.ROWS)


def test_a_size_without_rows_has_no_section() -> None:
    for section in re.split(
        r"^#### ", (comparison.ROOT / "benchmarks" / "README.md").read_text(), flags=re.MULTILINE
    )[1:]:
        assert re.search(r"^\|[^-\n]+\|$\n^\|-.*\|$\n^\| \S", section, re.MULTILINE), section[:80]


def test_few_bytes_are_those_of_the_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight takes 2 bytes, its error term 1, each momentum an integer of 1 and a scale of 1 for 32."""
    momentum = 1 + 1 / 32
    page, begin, _ = few_bytes.PLACE
    rows = page.read_text().partition(begin)[2].splitlines()
    shown = {cells[1].strip(): cells[-3].strip() for row in rows if len(cells := row.split("|")) > 9}
    two = {"AdamW", "NAdam", "RMSprop, momentum"}
    for name in few_bytes.OPTIMIZERS:
        assert shown[name] == f"{3 + (2 if name in two else 1) * momentum:.2f}", name
    monkeypatch.setattr(few_bytes, "STEPS", 20)
    exact, _ = few_bytes.run("Lion", None, torch.float64)
    plain, _ = few_bytes.run("Lion", None, torch.bfloat16)
    way, lion = few_bytes.run("Lion", few_bytes.WAYS["fewest bytes"], torch.bfloat16)
    held = collage_fx.backend_of(lion).report().bytes_per_parameter()["total"]
    count = 2 * 4 / math.prod(few_bytes.SHAPE)  # the weights' and the momentum's count of steps, for dither
    assert held == pytest.approx(3 + momentum + count)
    assert off(way, exact) < off(plain, exact)


def test_the_default_is_best_at_what_its_page_says() -> None:
    """Uneven gradients, CPU time, and checkpoints; 8 bytes win on a GPU."""
    default, eight = which_default.WAYS["none: the default"], which_default.WAYS["`bytes_per_parameter=8`"]
    (*_, uneven, _), (*_, uneven_of_eight, _) = (
        which_default.errors_of(options, 50) for options, _ in (default, eight)
    )
    assert uneven < uneven_of_eight / 100
    assert [float(each) for each in which_default.times(default[1])] == [1, 1]
    on_cpu, on_gpu = (float(each) for each in which_default.times(eight[1]))
    assert on_gpu < 1 < on_cpu
    assert which_default.checkpoint_bytes(default[0]) < which_default.checkpoint_bytes(eight[0])


def test_a_block_of_a_page_ends_at_its_first_end(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<a>\n<end>\nbetween\n<b>\n<end>\n")
    put_between(page, "<a>", "<end>", "new")
    assert page.read_text() == "<a>\n\nnew\n\n<end>\nbetween\n<b>\n<end>\n"


def test_an_edit_in_place_loses_what_assign_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A factor of 0.999 is less than half a unit in the last place of many bfloat16 numbers."""
    monkeypatch.setattr(edits, "STEPS", 20)
    edit = edits.EDITS["QK-clip, `w * 0.999`"]
    exact = edits.moved(edit, torch.float64, installed=False, assigns=False)
    in_place, assigned = (
        off(edits.moved(edit, torch.bfloat16, installed=True, assigns=each), exact) for each in (False, True)
    )
    assert in_place > 0.1 > 0.01 > assigned


def test_layers_of_munit_scaling_have_unit_variance_and_static_scales() -> None:
    munit = pytest.importorskip("benchmarks.munit_scaling", reason="pip install 'collage-fx[examples]'")
    torch.manual_seed(0)
    recipe = munit.Recipe(width=256, layers=1, heads=4)
    made = munit.layers(recipe, None)
    text = torch.randint(munit.VOCABULARY, (8, 32))
    embedding, layer, norm, head = made
    x = embedding(text)
    # standard deviations of samples of 2**16 and more: within six of their own, 2**-8.5
    for found in (embedding.weight, layer.mlp_in.weight, head.weight, layer.mlp_in(x), norm(layer(x))):
        assert found.std().item() == pytest.approx(1, abs=6 * 2**-8.5)
    assert head(norm(x)).std().item() == pytest.approx(256**-0.5, rel=6 * 2**-8.5)
    optimizer = munit.AdamW(made.parameters(), lr=torch.tensor(1.0), weight_decay=1e-4)
    rates = {each: group["lr"] for group in optimizer.param_groups for each in group["params"]}
    assert rates[embedding.weight] == rates[head.weight] == 1
    assert rates[layer.mlp_in.weight] == 1 / 16
    assert rates[layer.mlp_out.weight] == 1 / 32
    for each in optimizer.param_groups:
        assert float(each["lr"] * each["weight_decay"]) == pytest.approx(1e-4)


def test_products_are_of_nvfp4_and_fp8() -> None:
    """Values of the format stay, others go to a neighbour, and those at random are right on average."""
    narrow = pytest.importorskip("benchmarks.narrow_products", reason="pip install 'collage-fx[examples]'")
    values = torch.cat([narrow.E2M1, -narrow.E2M1]).repeat(2, 1)
    for rounding in (narrow.nvfp4, narrow.nvfp4_stochastic):
        assert torch.equal(rounding(values), values)
    torch.manual_seed(0)
    x = torch.randn(64, 64)
    largest = x.unflatten(-1, (-1, narrow.BLOCK)).abs().amax(-1, keepdim=True)
    half_a_step = largest / 6 * (1 + 2**-4)  # numbers of e2m1 are 2 apart at most, its scale has 4 bits
    error = (narrow.nvfp4(x) - x).unflatten(-1, (-1, narrow.BLOCK)).abs()
    assert (error <= half_a_step).all()
    draws = torch.stack([narrow.nvfp4_stochastic(x) for _ in range(400)])
    # a rounding is off by one step at most, whose mean of 400 has a deviation of a fortieth
    bias = (draws.mean(0) - x).unflatten(-1, (-1, narrow.BLOCK)).abs() / (2 * half_a_step)
    assert (bias < 6 / 40 + (x.unflatten(-1, (-1, narrow.BLOCK)).abs() > largest * (1 - 2**-4))).all()

    layer = torch.nn.Linear(16, 16, bias=False)
    inputs = torch.randn(4, 16, requires_grad=True)
    with narrow.NarrowProducts(narrow.e4m3, narrow.e5m2):
        outputs = layer(inputs)
    gradient = torch.randn(4, 16)
    outputs.backward(gradient)
    factors = narrow.e4m3(inputs.detach()), narrow.e4m3(layer.weight.detach())
    assert torch.equal(outputs, factors[0] @ factors[1].T)
    torch.testing.assert_close(layer.weight.grad, narrow.e5m2(gradient).T @ factors[0])
    torch.testing.assert_close(inputs.grad, narrow.e5m2(gradient) @ factors[1])
