"""The study of storage formats: encodings are what they are said to be; a short run says what is known."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Annotation, Text

from benchmarks.formats.__main__ import main
from benchmarks.formats.asked import ASKED, Asked, hard, off, row
from benchmarks.formats.encodings import (
    E4M3,
    REHASHED,
    Encoding,
    Float8Components,
    Float8WithPlanes,
    StaticScale,
    dither,
)
from benchmarks.formats.page import drawing, page, undominated
from benchmarks.formats.peers import (
    SOURCES,
    BlockFloat8,
    Companded,
    DynamicMap,
    ErrorInUlps,
    Kahan,
    Remainder,
    StochasticBFloat16,
    dynamic_map,
)
from benchmarks.formats.replay import (
    BETA1,
    BETA2S,
    EPS,
    WEIGHT_DECAY,
    Cell,
    learning_rate,
    reference,
)
from benchmarks.formats.rows import CANDIDATE, LENGTHS, MOMENTS, OURS, STATES, TORCH, WEIGHTS, Row
from benchmarks.formats.traces import hard_trace

Results = dict[str, Any]


def values(signed: bool = True, spread: float = 3.0, count: int = 4096) -> Tensor:
    """Lognormal magnitudes, as gradients have them."""
    generator = torch.Generator().manual_seed(0)
    magnitude = (torch.randn(4, count, generator=generator) * spread).exp() * 1e-4
    return magnitude * torch.randn(4, count, generator=generator).sign() if signed else magnitude


def back(encoding: Encoding, value: Tensor) -> Tensor:
    return encoding.load(encoding.store(value, None))


def block_largest(value: Tensor, block: int) -> Tensor:
    return value.abs().unflatten(-1, (-1, block)).amax(-1).repeat_interleave(block, -1)


# The run. ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a quick run has written."""
    folder = tmp_path_factory.mktemp("formats")
    assert (
        main(["--quick", "--results", str(folder / "results.json"), "--page", str(folder / "formats.md")])
        == 0
    )
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    return dict(json.loads((folder / "results.json").read_text()))


def smallest(results: Results, kind: str, name: str) -> float:
    """The error at N(0, 1), lr 1e-5, beta2 = 0.95."""
    return float(row(results, kind, name)["recorded"]["whole"][0][0][0])


def test_the_page_is_that_of_the_results() -> None:
    """So that the next run changes figures alone."""
    root = Path(__file__).parents[1]
    results = json.loads((root / "benchmarks" / "results" / "formats" / "results.json").read_text())
    shown = (root / "docs" / "formats.md").read_text()
    assert page(results, "formats.svg") == shown, "./dev formats writes it"


def test_names_in_the_picture_are_clear_of_points_lines_and_each_other() -> None:
    root = Path(__file__).parents[1]
    results = json.loads((root / "benchmarks" / "results" / "formats" / "results.json").read_text())
    figure = drawing(results)
    FigureCanvasAgg(figure).draw()
    for axes in figure.axes:
        names = [each for each in axes.texts if isinstance(each, Annotation)]
        assert len(names) == len(results["states"])
        boxes = [Text.get_window_extent(each).padded(-1) for each in names]  # without the box's margin
        points = axes.transData.transform([each.xy for each in names])
        for name, box in zip(names, boxes, strict=True):
            assert not [
                each.get_text()
                for each, other in zip(names, boxes, strict=True)
                if each is not name and box.overlaps(other)
            ], name.get_text()
            assert box.count_contains(points) == 0, name.get_text()
            for other in names:
                if other is not name and other.arrow_patch:
                    line = other.arrow_patch.get_transform().transform_path(other.arrow_patch.get_path())
                    assert not line.intersects_bbox(box, filled=False), (other.get_text(), name.get_text())


@pytest.mark.prose
def test_every_row_is_there(results: Results, folder: Path) -> None:
    text, drawn = (folder / "formats.md").read_text(), (folder / "formats.svg").read_text()
    for kind, rows in (("states", STATES), ("weights", WEIGHTS), ("moments", MOMENTS)):
        assert [(each["name"], each["whose"]) for each in results[kind]] == [
            (each.name, each.whose) for each in rows
        ]
        for each in rows:
            assert (f" {each.name} " in text) == (each.whose != CANDIDATE)
    for state in STATES:
        assert state.name in drawn
    for kind, name, size in (
        ("states", "FlashOptim, 24-bit weights", 5.125),
        ("states", "plus, exact", 10),
        ("weights", "exact", 4),
        ("moments", "torchao fp8", 2 + 8 / 256),
    ):
        assert row(results, kind, name)["bytes"] == pytest.approx(size, rel=1e-3)  # four digits are written
    for encoding in LENGTHS:
        assert len(results["lengths"][encoding.name]) == len(results["lengths"]["steps"])
    assert "](formats.svg)" in text


@pytest.mark.parametrize("each", [*STATES, *WEIGHTS, *MOMENTS], ids=lambda each: each.name)
def test_rows_are_somebodys(each: Row) -> None:
    assert each.whose in {*SOURCES, OURS, TORCH, CANDIDATE}


@pytest.mark.prose
def test_a_float32_number_in_two_halves_is_a_float32_number(results: Results) -> None:
    """To the bit, so to the four digits that are written."""
    assert off(results, "full, exact", "float32") == 0
    assert off(results, "Transformer Engine, remainders", "float32") == 0


@pytest.mark.prose
def test_what_has_fewer_bits_loses_more(results: Results) -> None:
    """Where updates are small beside weights: 1e-5 of them, of which bfloat16 keeps 2**-8."""
    exact, mcf, none = (smallest(results, "states", name) for name in ("full, exact", "full, mcf", "none"))
    assert 5 * exact < mcf < none / 5
    assert none == pytest.approx(1, abs=0.05)  # nothing moves but what is near zero
    assert smallest(results, "weights", "bfloat16, stochastic") > 1  # it is all noise


@pytest.mark.prose
def test_known_orderings_of_peers(results: Results) -> None:
    def weights(name: str) -> float:
        return smallest(results, "weights", name)

    assert weights("bfloat16 + int16 of its ulp") < weights("mcf")
    assert weights("bfloat16 + int8 of its ulp, stochastic") < weights("bfloat16 + int8 of its ulp") / 2
    assert weights("4 × e4m3, no scale") > 10 * weights("mcf")
    # 19 bits behind the leading one against 15.
    assert (
        weights("e4m3 + 2 × int8, dithered, static scale")
        < weights("bfloat16 + int8 of its ulp, stochastic") / 4
    )
    # Weight decay is a large part of how far weights of size 1 move, and Kahan's sum does not get it.
    assert weights("bfloat16, Kahan sum") > 5 * weights("mcf")
    # Second moments that are rounded to zero beside first ones that are not.
    updates = {each["name"]: max(each["hard"]["largest_update"][1]) for each in results["moments"]}
    for name in ("FlashOptim", "bitsandbytes 8-bit", "torchao fp8"):
        assert updates[name] > 100
    for name in ("float32", "bfloat16", "COAT", "HeavyBall bf16+8"):
        assert updates[name] < 4
    assert hard(results, "HeavyBall bf16+8") < hard(results, "bfloat16") / 10


def test_a_star_is_for_what_no_row_of_as_few_bytes_beats() -> None:
    def of(name: str, size: float, error: float) -> dict[str, Any]:
        return {"name": name, "bytes": size, "recorded": {"whole": [[[error]]]}}

    rows = [of("a", 4, 0.3), of("b", 4, 0.2), of("c", 5, 0.25), of("d", 6, 0.1)]
    assert undominated(rows, "recorded", 0) == {"b", "d"}


@pytest.mark.prose
def test_what_is_asked_of_rows_that_are_not_there_is_named(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds = (
        Asked("of nothing", 1, lambda r: hard(r, "no such moments")),
        Asked("kept", 1, lambda r: 0.5),
        Asked("not kept", 1, lambda r: 1.5),
    )
    monkeypatch.setattr("benchmarks.formats.page.ASKED", bounds)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page(results).splitlines()]
    for line in (
        ["of nothing", "1", "", "no such row yet"],
        ["kept", "1", "0.5", "yes"],
        ["not kept", "1", "1.5", "**no**"],
    ):
        assert line in lines
    assert ASKED[0].reached(results) == 0


# The replay. ------------------------------------------------------------------------------------------------


def test_the_reference_is_torchs_adamw() -> None:
    """In float64, of which a step rounds some ten times; a displacement is of steps of either sign."""
    trace, cell = hard_trace((3,), steps=40, length=32), Cell(0.02, 1e-3)
    run = reference(trace, [cell])
    torch.manual_seed(0)
    start = (torch.randn(trace.gradients.shape[1:]) * cell.std).bfloat16().double()
    for i, beta2 in enumerate(BETA2S):
        parameter = torch.nn.Parameter(start.clone())
        optimizer = torch.optim.AdamW(
            [parameter], betas=(BETA1, beta2), eps=EPS, weight_decay=WEIGHT_DECAY, foreach=False
        )
        for step, gradient in enumerate(trace.gradients):
            optimizer.param_groups[0]["lr"] = cell.lr * learning_rate(step, len(trace))
            parameter.grad = gradient.double()
            optimizer.step()
        moved = parameter.detach() - start
        assert (run.moved[i, 0] - moved).norm() < 40 * 10 * 2**-53 * parameter.norm()


def test_the_learning_rate_warms_up_and_ends_near_zero() -> None:
    rates = [learning_rate(step, 1500) for step in range(1500)]
    assert rates[0] == 1 / 50
    assert rates[49] == rates[50] == max(rates) == 1
    assert rates[775] == pytest.approx(0.5)
    assert 0 < rates[-1] < 1e-5


# Encodings, by their definitions. ---------------------------------------------------------------------------


def test_all_bits_of_a_remainder_come_back() -> None:
    bits = torch.randint(-(2**31), 2**31, (1 << 20,), generator=torch.Generator().manual_seed(0))
    value = bits.to(torch.int32).view(torch.float32)
    value = value[(value.abs() < 2.0**127) & (value.abs() >= 2.0**-126)]
    hi = Remainder().store(value, None)[0].float()
    assert ((hi - value).abs() <= 2.0 ** (value.abs().double().log2().floor() - 8)).all()  # half an ulp
    assert torch.equal(back(Remainder(), value).view(torch.int32), value.view(torch.int32))


@pytest.mark.parametrize("bits", [8, 16])
def test_an_error_in_ulps_is_off_by_half_of_its_unit(bits: int) -> None:
    value = values()
    ulp = 2.0 ** (value.bfloat16().float().abs().log2().floor() - 7)
    unit = ulp / 2 / (2 ** (bits - 1) - 1)
    # The integer is 2**-24 of 1 off, and so is the sum in float32, of the value.
    bound = unit / 2 + ulp / 2 * 2**-23 + value.abs() * 2**-23
    assert ((back(ErrorInUlps(bits), value) - value).abs() <= bound).all()
    assert (back(ErrorInUlps(bits), value.bfloat16().float()) == value.bfloat16().float()).all()


def test_a_companded_code_is_off_by_half() -> None:
    value = values(signed=False)
    largest = block_largest(value, 32).sqrt()
    half = largest.half().float()
    # Rounding the scale to float16 is worth 2**-11 of it, or half of float16's smallest number.
    bound = largest * (0.5 / 255 + 2**-20) + (half - largest).abs()
    assert ((back(Companded(False), value).sqrt() - value.sqrt()).abs() <= bound).all()

    value = values() * 1e3  # scales far above float16's smallest number
    x = value / block_largest(value, 32)
    y = 2 * x / (1 + x.abs())
    low, high = ((y + side * (0.5 / 127 + 2**-20)).clamp(-1, 1) for side in (-1, 1))
    stored = back(Companded(True), value) / block_largest(value, 32)
    slack = stored.abs() * 2**-10  # of the scale
    assert (stored >= low / (2 - low.abs()) - slack).all()
    assert (stored <= high / (2 - high.abs()) + slack).all()


def test_numbers_of_the_dynamic_map() -> None:
    signed, unsigned = dynamic_map(True), dynamic_map(False)
    assert len(signed) == len(unsigned) == 256
    # By hand: one part of [1e-7, 1e-6] has its middle at 5.5e-7, two of [1e-6, 1e-5] at 3.25e-6 and 7.75e-6.
    assert signed[127] == 0
    assert torch.allclose(signed[128:131], torch.tensor([5.5e-7, 3.25e-6, 7.75e-6]))
    assert torch.equal(signed[:127], -signed[128:255].flip(0))
    assert torch.allclose(unsigned[:3], torch.tensor([0, 3.25e-7, 7.75e-7]))
    assert signed[255] == unsigned[255] == 1
    assert signed[254] == pytest.approx(1 - 0.9 / 64 / 2)
    assert unsigned[254] == pytest.approx(1 - 0.9 / 128 / 2)


@pytest.mark.parametrize("signed", [True, False])
def test_the_dynamic_map_gives_the_nearest(signed: bool) -> None:
    value = values(signed)
    largest = block_largest(value, 256)
    wanted = (value / largest)[..., None] - dynamic_map(signed)
    assert torch.equal(
        (back(DynamicMap(signed), value) / largest - value / largest).abs() <= wanted.abs().amin(-1) + 2**-22,
        torch.ones_like(value, dtype=torch.bool),
    )


def test_e4m3_is_off_by_half_an_ulp() -> None:
    """2**-4 of the number, or 2**-10 where e4m3 is subnormal, and some roundings of float32."""
    value = values()
    unit = block_largest(value, 256) / 448
    error = (back(BlockFloat8(), value) - value).abs()
    assert (error <= torch.maximum(value.abs() * 2**-4, unit * 2**-10) * (1 + 2**-20)).all()


@pytest.mark.parametrize(
    ("encoding", "unit"),
    [(StochasticBFloat16(), 2.0**-7), (ErrorInUlps(8, stochastic=True), 2.0**-8 / 127)],
    ids=["bfloat16", "int8"],
)
def test_stochastic_rounding_has_no_bias(encoding: Encoding, unit: float) -> None:
    """Of numbers in [1, 2): off by less than a unit, and on average by what chance leaves, 4 sigma."""
    torch.manual_seed(0)
    value = 1 + torch.rand(1, 1 << 16) * 0.99  # none of which rounds to 2
    error = back(encoding, value) - value
    assert (error.abs() < unit * (1 + 2**-10)).all()
    assert abs(error.mean()) < 4 * unit / 2 / math.sqrt(value.numel())


def test_a_kahan_sum_keeps_small_updates_and_loses_decay() -> None:
    kahan, one = Kahan(), torch.ones(1)
    state = kahan.store(one, None)
    for _ in range(100):
        state = kahan.update(state, torch.zeros(()), torch.tensor([2.0**-12]))
    # The compensation stays below 2**-7, an ulp of 1; additions to it round to 2**-16 at most.
    assert abs(kahan.load(state) - 1 - 100 * 2.0**-12) <= 100 * 2.0**-16
    for _ in range(100):
        state = kahan.update(state, torch.tensor(1e-4), torch.zeros(1))
    assert kahan.load(state) > 1 + 90 * 2.0**-12


# Candidates. ------------------------------------------------------------------------------------------------


def test_dither_is_even_in_time_and_among_elements() -> None:
    count = 4096
    u = torch.stack([dither(count, step) for step in range(REHASHED)])
    assert ((u >= 0) & (u < 1)).all()
    # Multiples of the golden ratio leave gaps of three lengths, of 21 to 33 of them none above its 6th power.
    gaps = torch.cat([u.sort(0).values, u.sort(0).values[:1] + 1]).diff(dim=0)
    assert gaps.max() < ((5**0.5 - 1) / 2) ** 6 + 2**-20
    assert abs(u[0].mean() - 0.5) < 4 / math.sqrt(12 * count)
    assert not torch.equal(dither(count, 0), dither(count, REHASHED))


@pytest.mark.parametrize("planes", [1, 2])
def test_planes_are_off_by_less_than_their_unit(planes: int) -> None:
    encoding, value = Float8WithPlanes(planes), values() * 1e3
    value = value[value.abs() < 400].reshape(1, -1)
    unit = encoding.unit(value.abs())
    stored = back(encoding, value)
    assert ((stored - value).abs() < unit).all()
    assert torch.equal(back(encoding, stored), stored)
    # An e4m3 number from which it differs by half an ulp at most, in units of which a byte or two hold 2**7
    # or 2**15; below a power of two ulp and unit are half as large.
    hi = stored.to(E4M3).float()
    below = torch.where((hi.abs() > stored.abs()) & (hi.abs() > 2**-6), unit_below(hi, encoding), unit)
    integer = (stored - hi).abs() / below
    assert torch.equal(integer, integer.round())
    assert (integer <= 2 ** (8 * planes - 1)).all()


def test_planes_have_no_bias() -> None:
    """Not even where a large integer part leaves the fraction few bits; 4 sigma of what chance leaves."""
    encoding, steps = Float8WithPlanes(2), 2 * REHASHED
    value = 1 + torch.rand(1, 4096, generator=torch.Generator().manual_seed(0))
    states = [encoding.store(value, None)]
    while len(states) < steps:
        states.append(encoding.store(value, states[-1]))
    errors = (torch.stack([encoding.load(state) for state in states]) - value) / encoding.unit(value)
    assert abs(errors.mean()) < 4 * 0.5 / math.sqrt(errors.numel())


def unit_below(hi: Tensor, encoding: Float8WithPlanes) -> Tensor:
    """The unit of numbers just below e4m3 ones."""
    return encoding.unit(hi.abs() * (1 - 2.0**-20))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_components_of_e4m3_each_take_four_bits_more(count: int) -> None:
    """Down to half of the smallest subnormal, 2**-10 in units in which a block's largest is 128 to 256."""
    value = values(spread=1.0)
    unit = 2.0 ** (block_largest(value, 32).log2().floor() - 7)
    error = (back(Float8Components(count, 32), value) - value).abs()
    assert (error <= torch.maximum(value.abs() * 2.0 ** (-4 * count), unit * 2**-10)).all()


def test_a_static_scale_is_of_the_first_value() -> None:
    inner = Float8WithPlanes(2)
    encoding, value = StaticScale(inner), values(spread=0.5)
    state = encoding.store(value, None)
    scale = value.square().mean(-1, keepdim=True).sqrt()
    assert torch.equal(encoding.load(state), back(inner, value / scale) * scale)
    assert torch.equal(encoding.store(2 * value, state)[0], scale)


# Where other projects are installed: what they make of the same numbers. ------------------------------------


@pytest.mark.parametrize("signed", [True, False])
def test_torchaos_8_bits(signed: bool) -> None:
    theirs = pytest.importorskip("torchao.optim.quant_utils")
    numbers = torch.tensor(theirs.create_dynamic_map(signed))
    assert torch.allclose(numbers, dynamic_map(signed), rtol=2**-22, atol=0)
    value = values(signed)
    scaled, scale = theirs.scale_tensor(value, 256)
    wanted = theirs.dequant_with_qmap(theirs.quantize_8bit_with_qmap(scaled, numbers), numbers, scale)
    found = back(DynamicMap(signed, least=1e-12), value)
    # Both are nearest, but for ties, where their sums may round to either side.
    largest = block_largest(value, 256)
    assert ((found - value).abs() <= (wanted - value).abs() + largest * 2**-21).all()


def test_torchaos_fp8() -> None:
    theirs = pytest.importorskip("torchao.optim.subclass_fp8")
    value = values()
    codes, _ = theirs.quantize_fp8(value, 256)
    assert torch.equal(BlockFloat8().store(value, None)[0].flatten(-2).float(), codes.float())


def test_heavyballs_error_in_ulps() -> None:
    utils = pytest.importorskip("heavyball.utils")
    value = values()
    hi, error = ErrorInUlps(8).store(value, None)
    state = utils._ULPState(error.to(torch.int8), 127.0)
    ours = ErrorInUlps(8).load((hi, error))
    assert ((state.decode(hi) - ours).abs() <= ours.abs() * 2**-23).all()
