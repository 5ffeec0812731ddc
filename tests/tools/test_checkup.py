"""``checkup()``: what it says of checkpoints whose training is known, and how it reads files."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.dom import minidom

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

import collage_fx
from benchmarks.checkup import RESULTS as MEASURED
from benchmarks.checkup import Outcome, Run, fourier, of_initializers, stochastic, tables, train
from collage_fx.errors import CheckpointMismatchError, InvalidOptionError
from collage_fx.numerics import STORAGE_FORMATS
from collage_fx.state import SafetensorsFile
from collage_fx.state.safetensors_file import write_safetensors
from collage_tools.checkup.code_counts import (
    BELOW,
    COMPARED,
    COMPARED_EXPECTED,
    LEAST_EXPECTED,
    LEAST_FACTOR,
    MAGNITUDES,
    as_16_bits,
    count_codes,
    count_moves,
    count_stuck,
    is_table,
    magnitudes,
    moves,
    pile_ups,
    power_sums,
    reach,
    unevenness,
    values,
)
from collage_tools.checkup.files import checkpoint_tensors
from collage_tools.checkup.verdicts import CANNOT_TELL, NO_SIGN, ROUNDED_AWAY, Checkup, checkup
from collage_tools.cli import main

ROOT = Path(__file__).resolve().parents[2]
Weights = dict[str, Tensor]


def walk(
    way: str, *, lr: float = 1e-4, steps: int = 60, weight_decay: float = 0.1
) -> tuple[Weights, Weights]:
    """Weights before and after steps of AdamW with gradients that have a direction and noise."""
    torch.manual_seed(7)
    start = {
        "layers.0.weight": (0.02 * torch.randn(256, 256)).bfloat16(),
        "layers.1.weight": (0.02 * torch.randn(128, 256)).bfloat16(),
        "layers.0.norm.weight": torch.ones(256).bfloat16(),
        "layers.1.norm.weight": torch.ones(256).bfloat16(),
    }
    wide = way in ("masters", "stochastic")
    held = {name: nn.Parameter(value.float() if wide else value.clone()) for name, value in start.items()}
    optimizer = AdamW(held.values(), lr=lr, weight_decay=weight_decay)
    if way == "ours":
        collage_fx.install(optimizer)
    direction = {name: torch.randn(value.shape) for name, value in start.items()}
    for _ in range(steps):
        for name, p in held.items():
            p.grad = (direction[name] + torch.randn(p.shape)).to(p.dtype)
        optimizer.step()
        if way == "stochastic":
            for p in held.values():
                p.data.copy_(stochastic(p.data))
    return start, {name: p.detach().bfloat16() for name, p in held.items()}


def saved(weights: Weights, path: Path) -> Path:
    torch.save(weights, path)
    return path


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Checkpoints of a run in plain bf16: its start and its end."""
    folder = tmp_path_factory.mktemp("plain")
    start, end = walk("plain")
    return saved(start, folder / "start.pt"), saved(end, folder / "end.pt")


# Verdicts. --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["plain", "stochastic", "masters", "ours"])
def test_what_was_rounded_away_is_found_and_nothing_else(way: str, tmp_path: Path) -> None:
    start, end = walk(way)
    alone = checkup(saved(end, tmp_path / "end.pt"))
    both = checkup(tmp_path / "end.pt", saved(start, tmp_path / "start.pt"))
    assert (alone.verdict == ROUNDED_AWAY) == (way == "plain"), alone
    assert both.verdict == (ROUNDED_AWAY if way == "plain" else NO_SIGN), both
    assert alone.is_good == both.is_good == (way != "plain")


def test_a_training_is_judged_as_in_the_benchmark(tmp_path: Path) -> None:
    """A short run that the benchmark does not have, by a model that learns."""
    for way, verdict in (("plain", ROUNDED_AWAY), ("masters", NO_SIGN)):
        start, end = train(Run(way, "AdamW", "test", 3e-4, 300, 60, 64, True))
        found = checkup(saved(end, tmp_path / "end.pt"), saved(start, tmp_path / "start.pt"))
        assert found.verdict == verdict, found


def test_no_initializer_is_mistaken(tmp_path: Path) -> None:
    wrong = [each.what for each in of_initializers(tmp_path) if each.alone != CANNOT_TELL]
    # An identity matrix has large rows; it counts as trained, and nothing piles up.
    assert not [each for each in wrong if not each.startswith(("eye_", "sparse_"))]


def test_a_start_is_no_training(plain: tuple[Path, Path]) -> None:
    found = checkup(plain[0])
    assert found.verdict == CANNOT_TELL
    assert found.reasons[0] == "The weights do not differ from those of an untrained model."
    assert "100% of layers.*.norm.weight are exactly 1" in str(found)


def norms(*vectors: Tensor) -> Weights:
    """A model with these weights of norms, and matrices that show nothing."""
    torch.manual_seed(3)
    matrices = {f"layers.{i}.weight": torch.randn(64, 256).mul_(0.02) for i in range(4)}
    named = {f"layers.{i}.q_norm.weight": vector for i, vector in enumerate(vectors)}
    return {name: value.bfloat16() for name, value in {**matrices, **named}.items()}


def test_a_mixture_in_norms_is_evidence(tmp_path: Path) -> None:
    """Most entries at the constant, few beside it, the rest far away; and a spread without the peak."""
    torch.manual_seed(4)
    spread = 1 + 0.1 * torch.randn(2, 256)
    mixed = torch.where((torch.arange(256) - torch.tensor([[0], [100]])) % 256 < 200, 1.0, spread)
    at_constant = (mixed.bfloat16() == 1).float().mean()  # 200 of 256, and some that are next to 1
    found = checkup(saved(norms(*mixed), tmp_path / "mixed.pt"))
    assert found.verdict == ROUNDED_AWAY
    assert found.reasons[0].startswith(f"{at_constant:.0%} of layers.*.q_norm.weight are exactly 1, ")
    other = norms(mixed[0], mixed[1])
    other["layers.1.q_norm.weight"] *= 0.5
    assert " are exactly 1 or 0.5, " in checkup(saved(other, tmp_path / "other.pt")).reasons[0]
    lengths = saved(norms(mixed[0], mixed[1][:240]), tmp_path / "lengths.pt")
    assert checkup(lengths).verdict == ROUNDED_AWAY
    assert checkup(saved(norms(*spread), tmp_path / "spread.pt")).verdict == NO_SIGN
    near = 1 + 0.002 * torch.randn(2, 256)  # masters that have moved little: most of them round to 1
    assert (near.bfloat16() == 1).float().mean() > 0.7
    assert checkup(saved(norms(*near), tmp_path / "near.pt")).verdict != ROUNDED_AWAY


def test_the_same_channels_at_one_in_every_norm_are_a_mask(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    is_pruned = torch.rand(256, generator=generator) < 0.5
    vectors = [torch.where(is_pruned, 1.0, 1 + torch.randn(256, generator=generator) * 0.2) for _ in range(8)]
    assert checkup(saved(norms(*vectors), tmp_path / "masked.pt")).verdict != ROUNDED_AWAY
    other = [torch.where(is_pruned.roll(17 * i), 1.0, each) for i, each in enumerate(vectors)]
    assert checkup(saved(norms(*other), tmp_path / "mixed.pt")).verdict == ROUNDED_AWAY


def test_the_file_of_an_optimizer_alone_tells_nothing(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(64, 64))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.randn(64, 64)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    found = checkup(tmp_path / "optimizer.pt")
    assert found.verdict == CANNOT_TELL
    assert "--optimizer" in found.reasons[0]


def test_a_tensor_frozen_on_purpose_is_none(tmp_path: Path) -> None:
    torch.manual_seed(4)
    trained = 1 + 0.1 * torch.randn(256)
    found = checkup(saved(norms(torch.ones(256), trained, torch.full((256,), 1e-4)), tmp_path / "one.pt"))
    assert found.verdict != ROUNDED_AWAY


def test_float32_numbers_of_bf16_are_bf16(plain: tuple[Path, Path], tmp_path: Path) -> None:
    wide = {name: value.float() for name, value in torch.load(plain[1]).items()}
    found = checkup(saved(wide, tmp_path / "wide.pt"))
    assert found.verdict == ROUNDED_AWAY
    assert "float32, but all values are bf16" in str(found)
    moved = {name: value + 1e-6 for name, value in wide.items()}
    assert checkup(saved(moved, tmp_path / "moved.pt")).verdict == NO_SIGN


def test_float16_is_judged_in_its_own_ulps(tmp_path: Path) -> None:
    """A step of 4e-6 is less than half an ulp of a float16 number beyond 2**-7."""
    torch.manual_seed(5)
    for narrow in (True, False):
        start = (0.02 * torch.randn(512, 512)).half()
        p = start.clone() if narrow else start.float()
        direction = torch.randn(p.shape)
        for _ in range(80):
            p = (p.float() - 4e-6 * (direction + torch.randn(p.shape))).to(p.dtype)
        found = checkup(
            saved({"weight": p.half()}, tmp_path / "half.pt"), saved({"weight": start}, tmp_path / "s.pt")
        )
        assert found.verdict == (ROUNDED_AWAY if narrow else NO_SIGN), found


def test_weight_decay_that_did_not_happen(plain: tuple[Path, Path], tmp_path: Path) -> None:
    start, end = plain
    found = checkup(end, start, lr=1e-4, weight_decay=0.1, steps=60)
    assert not found.findings  # 0.06 %: less than an ulp
    assert "on its own, it changes nothing" in found.notes[-1]
    found = checkup(end, start, lr=1e-4, weight_decay=0.1, steps=6000)
    assert found.findings[0].startswith("Weight decay that did not happen: 6,000 steps of lr 0.0001")
    masters = [saved(each, tmp_path / f"{i}.pt") for i, each in enumerate(walk("masters"))]
    found = checkup(masters[1], masters[0], lr=1e-4, weight_decay=0.1, steps=6000)
    assert not found.findings


@pytest.mark.parametrize(
    ("dtype", "beta", "installed", "stuck"),
    [
        (torch.bfloat16, 0.999, False, True),
        (torch.bfloat16, 0.95, False, False),
        (torch.bfloat16, 0.999, True, False),
        (torch.float32, 0.999, False, False),
    ],
)
def test_second_moments_that_cannot_decay(
    dtype: torch.dtype, beta: float, installed: bool, stuck: bool, plain: tuple[Path, Path], tmp_path: Path
) -> None:
    p = nn.Parameter(torch.ones(64, dtype=dtype))
    optimizer = AdamW([p], betas=(0.9, beta))
    if installed:
        collage_fx.install(optimizer)
    p.grad = torch.ones_like(p)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    found = checkup(plain[0], optimizer=tmp_path / "optimizer.pt")
    assert [each.is_stuck for each in found.second_moments] == [stuck]
    assert bool(found.findings) == stuck
    # The claim itself: a decay alone leaves each bf16 number as it is.
    every = values(torch.bfloat16)[0x80:0x7F80].bfloat16()
    assert bool((every * beta == every).all()) == (beta == 0.999)


# Statistics. ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", STORAGE_FORMATS)
def test_numbers_spread_evenly_have_no_pile_up(dtype: torch.dtype) -> None:
    """Each power of two has 3/4 of the numbers of a code above, exactly, but for a tie at each end."""
    precision = STORAGE_FORMATS[dtype].precision
    ulp = 2.0**-precision  # of the binade below 1
    numbers = torch.arange(0.5, 2, ulp / 64, dtype=torch.float64).float()
    sums = power_sums(magnitudes(count_codes(numbers.to(dtype))), dtype)
    (tested,) = (each for each in pile_ups(sums, dtype) if each.span == 1 and each.exponent == 0)
    assert abs(tested.observed - tested.expected) <= 1
    assert tested.expected == pytest.approx(0.75 * 128, abs=1)
    assert not tested.is_certain
    column = sums[:, tested.exponent - STORAGE_FORMATS[dtype].min_exponent - 1]
    assert column[BELOW] == pytest.approx(128, abs=1)
    assert column[COMPARED] == pytest.approx(
        float(column[COMPARED_EXPECTED]), rel=0.02
    )  # ties go to even codes


def test_numbers_rounded_twice_have_no_pile_up() -> None:
    """Ties of float16 numbers go to even codes of bf16, and powers of two are even."""
    torch.manual_seed(0)
    twice = (0.02 * torch.randn(1 << 20)).half().bfloat16()
    sums = power_sums(magnitudes(count_codes(twice)), torch.bfloat16)
    tested = [each for each in pile_ups(sums, torch.bfloat16) if each.expected > 1000]
    assert max(each.factor for each in tested) > LEAST_FACTOR
    assert not any(each.is_certain for each in tested)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_rounded_numbers_have_no_pile_up(dtype: torch.dtype) -> None:
    """Some factors put two numbers where one is expected; ``normal_`` of torch 2.11 has such factors."""
    for i in range(64):
        torch.manual_seed(i)
        products = torch.randn(3 << 18).to(dtype) * (2**-5 * (1 + (i + 0.43) / 64))
        sums = power_sums(magnitudes(count_codes(products)), dtype)
        assert not any(each.is_certain for each in pile_ups(sums, dtype)), i


def test_numbers_cut_off_have_no_pile_up() -> None:
    """Conversion without rounding: a power of two stands for a whole cell, 4/3 of its share otherwise."""
    torch.manual_seed(0)
    for numbers in (0.02 * torch.randn(1 << 20), torch.rand(1 << 20), 0.02 * torch.randn(1 << 15)):
        cut = (numbers.view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16()
        sums = power_sums(magnitudes(count_codes(cut)), torch.bfloat16)
        tested = pile_ups(sums, torch.bfloat16)
        assert len(tested) > 5
        assert not any(each.is_certain for each in tested)


@pytest.mark.parametrize("fan_in", [990, 1000, 1023, 4080])
def test_an_edge_beside_a_power_of_two_is_no_pile_up(fan_in: int) -> None:
    """Bounds of uniform initializers that lie a little above a power of two."""
    torch.manual_seed(0)
    bound = fan_in**-0.5
    drawn = torch.empty(1 << 20).uniform_(-bound, bound).bfloat16()
    assert not any(
        each.is_certain
        for each in pile_ups(power_sums(magnitudes(count_codes(drawn)), drawn.dtype), drawn.dtype)
    )


def test_a_table_of_numbers_is_told_from_weights() -> None:
    """A Fourier basis repeats numbers; an edge of the density, and even codes alone, are no table."""
    torch.manual_seed(0)
    window = torch.hann_window(1024)
    edge = torch.empty(512, 1024).uniform_(-0.09, 0.09)
    even = (edge.bfloat16().view(torch.int16) & ~1).view(torch.bfloat16)
    for numbers, expected in (
        (fourier((256, 1024)), True),
        (fourier((256, 1024)) * window, True),
        (edge, False),
        (even, False),
        (torch.randn(512, 1024), False),
    ):
        of_magnitudes = magnitudes(count_codes(numbers.bfloat16().flatten()))
        assert is_table(of_magnitudes, torch.bfloat16) == expected


def test_few_entries_are_not_tested() -> None:
    sums = power_sums(magnitudes(count_codes(torch.full((1000,), 0.5).bfloat16())), torch.bfloat16)
    assert all(each.expected >= LEAST_EXPECTED for each in pile_ups(sums, torch.bfloat16))
    assert not pile_ups(sums, torch.bfloat16)


@pytest.mark.parametrize("dtype", STORAGE_FORMATS)
def test_reach_is_the_least_change_that_is_not_lost(dtype: torch.dtype) -> None:
    """Check every normal number; float64 holds the expected values exactly."""
    positive = values(dtype)[:MAGNITUDES]
    normal = (positive >= 2.0 ** (STORAGE_FORMATS[dtype].min_exponent + 1)) & positive.isfinite()
    numbers, least = positive[normal], reach(dtype)[normal]
    # Rounded to float32 first: a change of 1/8 of the least one is seen there.
    assert torch.equal((numbers - 0.875 * least).to(dtype).double(), numbers)
    assert bool(((numbers - 1.125 * least).to(dtype).double() < numbers).all())


def test_entries_that_no_update_can_move_are_counted() -> None:
    numbers = torch.tensor([1.0, -1.0, 1.5, 0.5, 0.0, float("inf")]).bfloat16()
    of_magnitudes = magnitudes(count_codes(numbers))
    assert (
        count_stuck(of_magnitudes, torch.bfloat16, 1.9e-3, 0.0) == 3
    )  # half an ulp below 1: 2**-9 = 1.95e-3
    assert (
        count_stuck(of_magnitudes, torch.bfloat16, 1.9e-3, 0.1) == 1
    )  # with decay: 1.5, whose half ulp is 2**-8
    assert count_stuck(of_magnitudes, torch.bfloat16, 4e-3, 0.0) == 0
    assert count_stuck(of_magnitudes, torch.bfloat16, 1e-3, 0.0) == 3


def test_moves_are_compared_with_those_of_small_weights() -> None:
    """All small weights move by 2**-10; of those near 1/4, whose half ulp is 2**-10, a quarter does."""
    earlier = torch.cat([torch.full((400,), 2.0**-12), torch.full((400,), 0.25)]).bfloat16()
    later = earlier.clone()
    later[:400] += 2.0**-10
    later[400:500] += 2.0**-9
    found = moves(count_moves(earlier, later), 8)
    assert (found.entries, found.moved) == (800, 500)
    assert (found.judged, found.judged_moved, found.judged_expected) == (400, 100, 400)
    assert found.lost == 300
    still = moves(count_moves(earlier, earlier), 8)
    assert (still.moved, still.judged, still.lost) == (0, 0, 0)


def test_rows_of_a_trained_matrix_are_uneven() -> None:
    torch.manual_seed(0)
    drawn = torch.randn(128, 512)
    assert abs(unevenness(drawn)) < 6  # the larger of two numbers of deviation 1
    assert unevenness(drawn + torch.outer(torch.randn(128), torch.randn(512))) > 20
    assert unevenness(torch.zeros(8, 8)) == 0


def test_what_is_taken_for_16_bits() -> None:
    bf16, f16 = torch.tensor([1e30, 1.0]), torch.tensor([1 + 2.0**-10, 2.0])
    wide = {torch.bfloat16: bf16.bfloat16().float(), torch.float16: f16}
    for dtype, numbers in wide.items():
        narrow = as_16_bits(numbers)
        assert narrow is not None
        assert narrow.dtype is dtype
    for neither in (torch.tensor([0.1]), torch.tensor([1]), torch.empty(0), torch.tensor([1.0]).double()):
        assert as_16_bits(neither) is None


# Files. -----------------------------------------------------------------------------------------------------


def safetensors(weights: Weights, path: Path) -> Path:
    write_safetensors(path, weights, weights.values(), {})
    return path


def test_the_same_weights_in_every_kind_of_file(plain: tuple[Path, Path], tmp_path: Path) -> None:
    weights = torch.load(plain[1])
    expected = checkup(plain[1])
    first, *rest = weights
    names = {"a.safetensors": [first], "b.safetensors": rest}
    for kind in ("hub", "one", "bin", "nested"):
        (tmp_path / kind).mkdir()
    for file, members in names.items():
        safetensors({name: weights[name] for name in members}, tmp_path / "hub" / file)
    index = {"weight_map": {name: file for file, members in names.items() for name in members}}
    (tmp_path / "hub" / "model.safetensors.index.json").write_text(json.dumps(index))
    safetensors(weights, tmp_path / "one" / "model.safetensors")
    torch.save(weights, tmp_path / "bin" / "pytorch_model.bin")
    torch.save({"x": 1}, tmp_path / "bin" / "training_args.bin")
    nested = {"state_dict": {"model": {"layers": weights}}, "epoch": 3}
    torch.save(nested, tmp_path / "nested" / "last.ckpt")
    torch.save(weights, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.save(weights, tmp_path / "weights")
    for path in (
        *(tmp_path / kind for kind in ("hub", "one", "bin", "nested")),
        tmp_path / "hub" / "model.safetensors.index.json",
        tmp_path / "one" / "model.safetensors",
        tmp_path / "old.pt",
        tmp_path / "weights",
    ):
        found = checkup(path)
        assert {each.shape for each in found.tensors} == {each.shape for each in expected.tensors}
        assert len(found.tensors) == len(weights)
        assert found.verdict == expected.verdict
        assert found.reasons[0].partition(" Most of")[0] == expected.reasons[0].partition(" Most of")[0]


def test_a_tensor_is_mapped_while_it_is_held(tmp_path: Path) -> None:
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc/self/maps")
    path = safetensors(
        {"a": torch.ones(1 << 20), "b": torch.zeros(3).bfloat16(), "c": torch.empty(0)}, tmp_path / "x"
    )
    read = SafetensorsFile(path)
    held = read["a"]
    assert str(path) in maps.read_text()
    assert held.sum() == 1 << 20
    del held
    assert torch.equal(read["b"], torch.zeros(3).bfloat16())
    assert read["c"].shape == (0,)
    assert str(path) not in maps.read_text()


def _nothing(path: Path) -> None:
    pass


def _text(path: Path) -> None:
    path.write_text("no checkpoint")


def _object(path: Path) -> None:
    torch.save({"model": Path("x")}, path)


def _pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps(object))


@pytest.mark.parametrize(
    ("name", "write", "error"),
    [
        ("none.pt", _nothing, InvalidOptionError),
        ("x.safetensors", _text, CheckpointMismatchError),
        ("x.pt", _text, CheckpointMismatchError),
        ("x.pt", _object, CheckpointMismatchError),
        ("x.bin", _pickle, CheckpointMismatchError),
        ("model.safetensors.index.json", _text, CheckpointMismatchError),
        ("", _nothing, InvalidOptionError),
    ],
)
def test_what_is_no_checkpoint_is_refused(
    name: str,
    write: Callable[[Path], None],
    error: type[Exception],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(tmp_path / name)
    with pytest.raises(error):
        checkpoint_tensors(tmp_path / name)
    assert main(["checkup", str(tmp_path / name)]) == 2
    assert capsys.readouterr().err.startswith("collage-fx: ")


def test_tensors_that_cannot_be_judged_are_named(tmp_path: Path) -> None:
    weights = {
        "q": torch.ones(4, 4, dtype=torch.int8),
        "w": torch.tensor([[1.0, math.nan]]).bfloat16(),
        "e": torch.empty(0),
    }
    found = checkup(saved(weights, tmp_path / "x.pt"))
    assert found.verdict == CANNOT_TELL
    assert found.notes == ("1 infinities or NaN, in w.", "1 tensors of int8 were not judged.")
    other = checkup(tmp_path / "x.pt", saved({"z": torch.ones(1)}, tmp_path / "z.pt"))
    assert "The two checkpoints have no tensors in common." in other.notes
    assert repr(other) == f"<Checkup of {tmp_path / 'x.pt'}: cannot tell, 3 tensors>"
    state = checkup(tmp_path / "x.pt", saved({"state.0.exp_avg": torch.ones(1)}, tmp_path / "o.pt"))
    assert (
        "The earlier checkpoint is an optimizer's file: give it by optimizer= (--optimizer)." in state.notes
    )


def test_float32_checkpoints_with_the_same_names_are_not_said_to_differ_in_names(tmp_path: Path) -> None:
    later = saved({"w": torch.randn(4, 4), "z": torch.ones(1)}, tmp_path / "later.pt")
    for earlier in (torch.randn(4, 4), torch.randn(4, 4).bfloat16()):
        (note,) = checkup(later, saved({"w": earlier}, tmp_path / "earlier.pt")).notes
        assert note.startswith("Nothing was compared: no tensor of both checkpoints has one shape")


@pytest.mark.parametrize("name", ["result.json", "train.py"])
def test_a_file_of_no_known_kind_is_told_all_kinds_that_are_read(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointMismatchError, match=r"safetensors or torch\.save has written, an index"):
        checkup(tmp_path / name)


# The command. -----------------------------------------------------------------------------------------------


def test_the_command(plain: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start, end = map(str, plain)
    page = tmp_path / "page.html"
    assert main(["checkup", start]) == 0
    assert "Verdict: cannot tell." in capsys.readouterr().out
    assert main(["checkup", end, start, "--lr", "1e-4", "--html", str(page), "--full"]) == 1
    printed = capsys.readouterr().out
    assert "layers.1.weight" in printed
    assert "stuck at lr 0.0001" in printed
    assert f"Written: {page}" in printed
    text = page.read_text()
    drawn = minidom.parseString(text).getElementsByTagName("svg")
    assert len(drawn) > 2
    assert "trained without master weights" in text
    assert main(["checkup", end, start, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == ROUNDED_AWAY
    moved = {each["name"]: each["moves"]["moved"] for each in found["tensors"]}
    before, after = torch.load(start), torch.load(end)
    assert moved == {name: int((before[name] != after[name]).sum()) for name in before}
    assert (
        {each["dtype"] for each in found["tensors"]}
        == {each["held"] for each in found["tensors"]}
        == {"bf16"}
    )
    (matrices,) = (each for each in found["groups"] if each["name"] == "layers.*.weight")
    assert (matrices["tensors"], matrices["entries"]) == (2, 384 * 256)
    pile_up = matrices["pile_up"]
    assert pile_up["is_certain"]
    assert pile_up["factor"] == pile_up["observed"] / pile_up["expected"] > 1.1
    first, last = (pile_up["exponent"] - each for each in (pile_up["span"] - 1, 0))
    assert f"as many are ±2**{first} to 2**{last} as" in found["reasons"][0]


@pytest.mark.parametrize(
    "command",
    ["--lr=-1", "--steps=-3", "--weight-decay=nan", "--optimizer=none.pt", "--html=/no/such/x.html"],
)
def test_options_that_are_not_allowed(
    command: str, plain: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkup", str(plain[0]), command]) == 2
    assert capsys.readouterr().out == ""


def test_the_state_of_no_optimizer_is_refused(plain: tuple[Path, Path]) -> None:
    with pytest.raises(InvalidOptionError, match="there is no optimizer's state"):
        checkup(plain[0], optimizer=plain[0])


# What was measured. -----------------------------------------------------------------------------------------


def test_the_page_has_what_was_measured() -> None:
    results: dict[str, Any] = json.loads(MEASURED.read_text())
    assert tables(results) in (ROOT / "docs" / "checkup.md").read_text()


@pytest.mark.parametrize("attribute", ["alone", "compared"])
def test_precision_and_recall_as_measured(attribute: str) -> None:
    results = json.loads(MEASURED.read_text())
    trained = [Outcome(**each) for each in results["trained"]]
    assert len(trained) == 60
    found = [each.way == "plain" for each in trained if getattr(each, attribute) == ROUNDED_AWAY]
    of_plain = sum(each.way == "plain" for each in trained)
    assert sum(found) >= 0.95 * len(found)
    assert sum(found) >= 0.95 * of_plain
    assert not any(each["alone"] == ROUNDED_AWAY for each in results["untrained"])


def test_it_is_public(plain: tuple[Path, Path]) -> None:
    assert isinstance(collage_fx.checkup(plain[0]), Checkup)
