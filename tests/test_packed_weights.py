"""Packed weights: parameters of which only codes are kept, and how models, files and programs see them."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import collage_fx
from collage_fx import assign, full_value, install
from collage_fx.errors import CheckpointMismatchError, InvalidOptionError
from collage_fx.numerics import Weights, format_named
from collage_fx.state.error_terms import record_of
from collage_fx.state.packed import is_packed
from tests.support.substitutes import fingerprints_without_scales
from tests.support.training import Lion

BUDGET = 4.1


def update_error(value: Tensor, exact: Tensor, start: Tensor) -> float:
    """Return the error of a value as a share of the way from the start to the exact value."""
    return float((value - exact).norm() / (exact - start).norm())


class Model(nn.Module):
    """Tied embedding, linear layer that is called twice, norm, convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 128)
        self.linear = nn.Linear(128, 128)
        self.norm = nn.LayerNorm(128)
        self.convolution = nn.Conv2d(32, 64, 3, padding=1)
        self.head = nn.Linear(128, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * 0.1
        x = self.norm(x + self.linear(F.gelu(self.linear(x))))
        image = self.convolution(x.reshape(len(tokens), 32, 8, -1)).mean((1, 2, 3))
        return self.head(x) + image[:, None, None]


#: Names of the weights that are packed.
WEIGHTS = ("embedding.weight", "linear.weight", "convolution.weight")


def made(kind: Any = torch.optim.AdamW, *, lr: float = 1e-3, **options: Any) -> tuple[Model, Any]:
    torch.manual_seed(0)
    model = Model().bfloat16()
    optimizer = kind(model.parameters(), lr=lr)
    return model, install(optimizer, **(options or {"bytes_per_parameter": BUDGET}))


def loss_of(model: Callable[[Tensor], Tensor], seed: int) -> Tensor:
    tokens = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(seed))
    return F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.roll(1).flatten())


def step(model: Any, optimizer: Any, seed: int) -> float:
    loss = loss_of(model, seed)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def trained(steps: int = 3, **options: Any) -> tuple[Model, Any]:
    model, optimizer = made(**options)
    for seed in range(steps):
        step(model, optimizer, seed)
    return model, optimizer


def plain_copy(model: nn.Module) -> Model:
    made = Model().bfloat16()
    made.load_state_dict(model.state_dict())
    return made


def packed_in(model: nn.Module) -> tuple[str, ...]:
    return tuple(name for name, p in model.named_parameters() if is_packed(p))


def whole(model: nn.Module) -> list[Tensor]:
    return [full_value(p).detach() for p in model.parameters()]


def are_same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


# Bits and errors. -----------------------------------------------------------------------------------------


def test_a_compiled_step_stores_the_bits_of_the_format() -> None:
    """Codes, scales and count are those that eager torch makes of the value, by the format's definition."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(96, 128).bfloat16())
    optimizer = install(torch.optim.SGD([p], lr=2.0**-9), weights="int16x32")
    fmt = Weights()
    inputs = [*fmt.split(p.detach().float(), p.dtype)[1:], torch.zeros((), dtype=torch.int32)]
    for seed in range(4):
        torch.manual_seed(seed)
        p.grad = torch.randn(96, 128).bfloat16()
        value = fmt.join(p, *inputs[:3]) - p.grad.float() * 2.0**-9
        inputs[:3] = fmt.store(value, p, *inputs)[1:]
        optimizer.step()
        record = record_of(p)
        assert record is not None
        for mine, expected in zip(record.auxiliaries, inputs[:3], strict=True):
            assert torch.equal(mine, expected)


@pytest.mark.parametrize("scale", [0.02, 1.0])
def test_the_rounding_is_right_on_average(scale: float) -> None:
    """Changes of a thousandth of a spacing arrive, where rounding to nearest would lose them all."""
    torch.manual_seed(0)
    p = nn.Parameter((torch.randn(64, 128) * scale).bfloat16())
    start = p.detach().double()
    largest = start.reshape(-1, 32).abs().amax(1, keepdim=True).expand(-1, 32).reshape(64, 128)
    spacing = float(2 * Weights().error_bound(torch.bfloat16).of_largest) * largest
    change = float(spacing.mean()) / 1000
    optimizer = install(torch.optim.SGD([p], lr=1.0), weights="int16x32")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*too few bits")
        for _ in range(1000):
            p.grad = torch.full_like(p, change)
            optimizer.step()
    moved = start - full_value(p).detach()
    exact = 1000 * float(torch.tensor(change).bfloat16())
    # Each of 8,192 elements moves by whole spacings, as often as a Poisson process says at most; the first
    # codes are off by half a spacing at most.
    variance = exact * float(spacing.mean()) + float(spacing.square().mean()) / 4
    assert abs(float(moved.mean()) - exact) < 4 * (variance / 8192) ** 0.5


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        (torch.optim.AdamW, "block8"),
        (torch.optim.NAdam, "block8"),
        (lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9, nesterov=True), "block8"),
        (torch.optim.RMSprop, "block8"),
        (Lion, "block8"),
        (torch.optim.Muon, None),
    ],
    ids=["AdamW", "NAdam", "Nesterov", "RMSprop", "Lion", "Muon"],
)
def test_any_optimizer_packs_weights_nearly_as_exactly_as_with_error_terms(kind: Any, state: Any) -> None:
    def error(**options: Any) -> float:
        torch.manual_seed(0)
        start = (torch.randn(64, 128) * 0.02).bfloat16()
        p, exact = nn.Parameter(start.clone()), nn.Parameter(start.double())
        optimizer, reference = install(kind([p], lr=1e-3), **options), kind([exact], lr=1e-3)
        mean = torch.randn(64, 128) * 0.3
        for _ in range(60):
            gradient = (mean + torch.randn(64, 128)).bfloat16()
            p.grad, exact.grad = gradient, gradient.double()
            optimizer.step()
            reference.step()
        return update_error(full_value(p).detach(), exact.detach(), start.double())

    # A spacing of 6e-5 of the largest weight, 0.06, is 0.4 % of a step of 1e-3.
    assert error(state=state, weights="int16x32") < error(state=state, error_format="byte") + 0.004


def test_the_error_is_predicted_and_too_large_a_one_is_told() -> None:
    torch.manual_seed(0)
    p = nn.Parameter((torch.randn(64, 128) * 0.5).bfloat16())
    exact, start = nn.Parameter(p.detach().double()), p.detach().double()
    optimizer = install(torch.optim.AdamW([p], lr=1e-5), bytes_per_parameter=BUDGET)
    reference = torch.optim.AdamW([exact], lr=1e-5)
    mean = torch.randn(64, 128) * 0.3
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(300):
            gradient = (mean + torch.randn(64, 128)).bfloat16()
            p.grad, exact.grad = gradient, gradient.double()
            optimizer.step()
            reference.step()
    (warning,) = (str(each.message) for each in told if "too few bits" in str(each.message))
    assert "bytes_per_parameter=5.1" in warning
    error = update_error(full_value(p).detach(), exact.detach(), start)
    predicted = collage_fx.backend_of(optimizer).report().predicted_error()
    assert predicted is not None
    assert 0.5 < predicted / error < 2


# The model's side. ----------------------------------------------------------------------------------------


def test_weights_have_no_memory_between_steps() -> None:
    model, optimizer = trained()
    assert packed_in(model) == WEIGHTS
    with torch._C.DisableTorchFunctionSubclass():
        assert [dict(model.named_parameters())[name].untyped_storage().nbytes() for name in WEIGHTS] == [
            2
        ] * 3
    report = collage_fx.backend_of(optimizer).report()
    elements = sum(p.numel() for p in model.parameters())
    packed = sum(dict(model.named_parameters())[name].numel() for name in WEIGHTS)
    assert sum(row.bytes for row in report.tensors if row.symbol == "p") < 2.04 * packed + 2 * (
        elements - packed
    )


def test_losses_and_gradients_are_those_of_decoded_weights() -> None:
    model, _ = trained()
    plain = plain_copy(model)
    assert not packed_in(plain)
    assert plain.head.weight is plain.embedding.weight
    for _ in range(2):  # gradients accumulate
        losses = [loss_of(each, 9) for each in (model, plain)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert mine.grad is not None
            assert other.grad is not None
            assert torch.equal(mine.grad, other.grad)
            assert mine.grad.stride() == other.grad.stride()
    assert packed_in(model) == WEIGHTS


@pytest.mark.parametrize("way", ["no_grad", "inference_mode", "reentrant", "not reentrant", "compiled"])
def test_other_forward_passes_see_the_same_weights(way: str) -> None:
    model, optimizer = trained()
    tokens = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(9))
    expected = plain_copy(model)(tokens)
    called: Callable[[Tensor], Tensor] = model
    if "reentrant" in way:
        called = lambda given: checkpoint(model, given, use_reentrant=way == "reentrant")  # noqa: E731
    elif way == "compiled":
        called = torch.compile(model, fullgraph=True)
    context: Any = getattr(torch, way)() if hasattr(torch, way) else torch.enable_grad()
    with context:
        result = called(tokens)
    if way == "compiled":  # other roundings between operations
        assert float((result - expected).abs().max()) < 0.02 * float(expected.abs().max())
        plain = plain_copy(model)
        for each in (model, plain):
            loss_of(torch.compile(each), 9).backward()
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad, other.grad)  # type: ignore[arg-type]
    else:
        assert torch.equal(result, expected)
    assert packed_in(model) == WEIGHTS
    step(model, optimizer, 4)


def test_operations_between_graph_breaks_are_not_compiled() -> None:
    """A frame that Dynamo skips, as it breaks in a loop, runs eagerly, and so do operations in it."""
    model, _ = trained()
    weight = model.linear.weight

    def looped(x: Tensor) -> Tensor:
        for _ in range(2):
            torch._dynamo.graph_break()
            x = x + weight.sum()
        return x

    counters.clear()
    found = torch.compile(looped, backend="eager")(torch.ones(()))
    assert torch.equal(found, 1 + weight.sum() + weight.sum())
    assert not counters["stats"]["unique_graphs"]


def live_bytes() -> int:
    gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, Tensor)]
    with torch._C.DisableTorchFunctionSubclass():
        return sum(
            {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}.values()
        )


def test_autograd_keeps_no_decoded_weight() -> None:
    """Between forward and backward pass there is no tensor as large as a weight."""
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4))).bfloat16()
    optimizer = install(torch.optim.SGD(model.parameters(), lr=1e-3), weights="int16x32")
    model(torch.randn(1, 256).bfloat16()).sum().backward()
    optimizer.step()
    x = torch.randn(1, 256).bfloat16()
    before = live_bytes()
    result = model(x)
    assert live_bytes() - before < 256 * 256 * 2
    result.sum().backward()


def test_an_update_between_forward_and_backward_pass_is_refused() -> None:
    model, optimizer = trained()
    loss = loss_of(model, 9)
    step(model, optimizer, 5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation: a weight of sizes"):
        loss.backward()


def test_parameters_without_gradients_stay() -> None:
    model, optimizer = trained()
    before = whole(model)
    loss_of(model, 9).backward()
    model.linear.weight.grad = None
    optimizer.step()
    after = whole(model)
    names = [name for name, _ in model.named_parameters()]
    for name, old, new in zip(names, before, after, strict=True):
        assert torch.equal(old, new) == (name == "linear.weight")
    model.linear.weight.requires_grad_(False)
    optimizer.zero_grad()
    step(model, optimizer, 7)
    assert torch.equal(full_value(model.linear.weight), after[1])
    assert packed_in(model) == WEIGHTS


# Writes. --------------------------------------------------------------------------------------------------


def test_torch_refuses_to_write_to_a_leaf_as_before() -> None:
    model, _ = trained()
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        model.linear.weight.mul_(2)
    assert packed_in(model) == WEIGHTS


def _zero_a_row(p: Tensor) -> None:
    p[0].zero_()


def _zero_a_row_of_data(p: Tensor) -> None:
    p.data[0] = 0


def _zero_a_row_of_a_view(p: Tensor) -> None:
    p.view(-1)[:128].zero_()


def _zero_a_row_of_an_alias(p: Tensor) -> None:
    p.detach()[0].mul_(0)


@pytest.mark.parametrize(
    "write", [_zero_a_row, _zero_a_row_of_data, _zero_a_row_of_a_view, _zero_a_row_of_an_alias]
)
def test_elements_that_nobody_writes_to_keep_their_bits(write: Callable[[Tensor], None]) -> None:
    model, optimizer = trained(lr=1e-7)
    p = model.linear.weight
    before = full_value(p).detach()
    with torch.no_grad():
        write(p)
    assert float(p[0].abs().max()) == 0
    with pytest.warns(UserWarning, match=r"params\[1\]: written to between two steps"):
        step(model, optimizer, 5)
    after = full_value(p).detach()
    spacing = 1.5 / 32767 * float(before.abs().max())
    assert float(after[0].abs().max()) <= spacing
    assert float((after[1:] - before[1:]).abs().max()) <= spacing  # bfloat16's is 60 times as large
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            write(p)
        step(model, optimizer, 6)  # told once
    assert packed_in(model) == WEIGHTS


def test_assign_writes_whole_values_and_keeps_the_weight_packed() -> None:
    model, optimizer = trained()
    p = model.linear.weight
    value = full_value(p).detach() * 1.001
    assign(p, value)
    assert is_packed(p)
    largest = value.reshape(-1, 32).abs().amax(1, keepdim=True).expand(-1, 32).reshape(p.shape)
    bound = float(Weights().error_bound(torch.bfloat16).of_largest)
    assert bool(((full_value(p).detach() - value).abs() <= bound * largest).all())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, optimizer, 5)


def test_a_loaded_model_is_what_the_next_step_goes_on_from() -> None:
    model, optimizer = trained()
    other, _ = trained(5)
    values = {name: each.clone() for name, each in other.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_state_dict(values)
        assert all(torch.equal(each, values[name]) for name, each in model.state_dict().items())
        step(model, optimizer, 5)
    assert packed_in(model) == WEIGHTS


# Files and copies. ----------------------------------------------------------------------------------------


def test_a_resumed_run_has_the_bits_of_going_on() -> None:
    model, optimizer = trained()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)  # plain tensors, without this package
    assert all(type(each) is Tensor for each in loaded["model"].values())
    assert packed_in(model) == WEIGHTS
    other, resumed = made()
    other.load_state_dict(loaded["model"])
    resumed.load_state_dict(loaded["optimizer"])
    for seed in range(3, 6):
        assert step(model, optimizer, seed) == step(other, resumed, seed)
        assert are_same(whole(model), whole(other))


@pytest.mark.parametrize(("of", "into"), [(5.1, 4.1), (4.1, 5.1), (10, 4.1), (4.1, 10)])
def test_a_checkpoint_is_loaded_into_other_budgets(of: float, into: float) -> None:
    model, optimizer = trained(bytes_per_parameter=of)
    other, resumed = made(bytes_per_parameter=into)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    assert are_same(whole(other), whole(model))
    assert step(model, optimizer, 4) == step(other, resumed, 4)
    assert packed_in(other) == (WEIGHTS if into == BUDGET else ())


@pytest.mark.parametrize("part", ["codes", "scales"])
@pytest.mark.parametrize("of", ["parameter.int16x32", "exp_avg.block8", "exp_avg_sq.block8_positive"])
def test_a_changed_byte_is_named(of: str, part: str) -> None:
    model, optimizer = trained()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file)
    saved["state"][1][f"collage_fx.{of}.{part}"].view(torch.uint8).flatten()[7] ^= 2
    other, resumed = made()
    other.load_state_dict(model.state_dict())
    if not of.startswith("parameter"):
        with pytest.raises(CheckpointMismatchError, match="with other bytes than were saved"):
            resumed.load_state_dict(saved)
        return
    resumed.load_state_dict(saved)
    with pytest.warns(UserWarning, match=r"params\[1\]"):
        step(other, resumed, 4)


def test_fingerprints_of_earlier_versions_are_taken() -> None:
    """They leave out scales."""
    model, optimizer = trained()
    with fingerprints_without_scales():
        saved = copy.deepcopy(optimizer.state_dict())
    other, resumed = made()
    other.load_state_dict(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.load_state_dict(saved)
        assert step(model, optimizer, 4) == step(other, resumed, 4)
    assert are_same(whole(model), whole(other))


def test_deep_copies_have_the_same_bits() -> None:
    model, optimizer = trained()
    other, copied = copy.deepcopy((model, optimizer))
    assert packed_in(other) == WEIGHTS
    assert other.head.weight is other.embedding.weight
    with torch.no_grad():
        model.linear.weight.zero_()
    assert float(other.linear.weight.abs().max()) > 0
    assign(model.linear.weight, full_value(other.linear.weight))
    for seed in range(3, 6):
        assert step(model, optimizer, seed) == step(other, copied, seed)
        assert are_same(whole(model), whole(other))


@pytest.mark.parametrize("way", ["pickle", "save"])
def test_files_of_a_model_are_plain(way: str) -> None:
    model, _ = trained()
    if way == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert not packed_in(other)
    assert packed_in(model) == WEIGHTS
    assert [type(p) for p in other.parameters()] == [nn.Parameter] * len([*model.parameters()])
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_readers_see_decoded_values() -> None:
    model, _ = trained()
    p = model.linear.weight
    value = full_value(p).detach()
    assert torch.equal(p.detach().double(), value.bfloat16().double())
    assert p.sum().item() == plain_copy(model).linear.weight.sum().item()
    assert (p.numel(), p.stride(), p.is_contiguous(), p.requires_grad) == (128 * 128, (128, 1), True, True)
    assert nn.utils.parameters_to_vector(model.parameters()).numel() == sum(
        each.numel() for each in model.parameters()
    )
    full = collage_fx.full_state_dict(model)
    assert torch.equal(full["linear.weight"], value.float())
    model.half()
    assert p.dtype is torch.float16


# Options. -------------------------------------------------------------------------------------------------


def test_the_format_is_found_by_its_name() -> None:
    found = format_named("int16x32")
    assert isinstance(found, Weights)
    assert not found.keeps_hi


@pytest.mark.parametrize("options", [{"strategy": "none"}, {"arithmetic": "native"}])
def test_options_that_do_not_go_with_it_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError, match="weights='int16x32' packs what a step has computed"):
        made(weights="int16x32", **options)


def test_a_budget_that_chooses_it_allows_no_other() -> None:
    with pytest.raises(InvalidOptionError, match=r"bytes_per_parameter=4\.1 chooses weights"):
        made(weights="int16x32", bytes_per_parameter=BUDGET)


class Branching(torch.optim.AdamW):
    """AdamW whose step Dynamo cannot capture."""

    def step(self, closure: Any = None) -> Any:
        if float(self.param_groups[0]["params"][1].sum()) > 1e9:
            return None
        return super().step(closure)


def test_recorded_steps_keep_error_terms() -> None:
    model, optimizer = made(Branching, weights="int16x32")
    for seed in range(2):
        step(model, optimizer, seed)
    assert not packed_in(model)
    assert all(record_of(p) is not None for p in model.parameters())


def test_an_average_compiled_with_the_backend_reads_packed_weights() -> None:
    model, optimizer = made()
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    update = torch.compile(average.update_parameters, backend=collage_fx.backend_of(optimizer))
    exact: list[Tensor] = []
    for seed in range(6):
        step(model, optimizer, seed)
        update(model)
        now = whole(model)
        exact = now if not exact else [0.9 * old + 0.1 * new for old, new in zip(exact, now, strict=True)]
    for mine, value in zip(average.module.parameters(), exact, strict=True):
        assert float((full_value(mine).detach() - value).norm() / value.norm()) < 2.0**-15


def test_writes_to_parameters_beside_packed_weights_are_noticed() -> None:
    """The detector of writes, made when all parameters had memory, goes on with those that have it."""
    model, optimizer = trained()
    with torch.no_grad():
        model.linear.bias.data.fill_(0.25)
    with pytest.warns(UserWarning, match=r"params\[2\] of AdamW: written to between two steps"):
        step(model, optimizer, 3)
    assert abs(float(full_value(model.linear.bias).mean()) - 0.25) < 0.01
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, optimizer, 4)


def _other_shape(state: dict[str, Any], name: str) -> None:
    state[name + "codes"] = state[name + "codes"][:64]


def _no_scales(state: dict[str, Any], name: str) -> None:
    del state[name + "scales"]


@pytest.mark.parametrize(
    ("damage", "met"), [(_other_shape, "is of a tensor of shape"), (_no_scales, "belong together")]
)
def test_codes_that_do_not_fit_are_refused_and_nothing_changes(damage: Any, met: str) -> None:
    _, optimizer = trained()
    saved = copy.deepcopy(optimizer.state_dict())
    damage(saved["state"][1], "collage_fx.parameter.int16x32.")
    other, resumed = trained(2)
    before = whole(other)
    with pytest.raises(CheckpointMismatchError, match=met):
        resumed.load_state_dict(saved)
    assert are_same(whole(other), before)


def test_a_scale_that_is_not_finite_is_told() -> None:
    model, optimizer = trained()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][1]["collage_fx.parameter.int16x32.scales"].flatten()[3] = 255
    other, resumed = made()
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(saved)
    with pytest.warns(UserWarning, match=r"params\[1\]"):
        step(other, resumed, 4)
    assert bool(full_value(other.linear.weight).isfinite().all())


def test_metrics_measure_packed_weights_and_change_no_bit() -> None:
    runs = [trained(6, bytes_per_parameter=BUDGET, metrics=each) for each in (False, True)]
    assert are_same(*(whole(model) for model, _ in runs))
    found = collage_fx.backend_of(runs[1][1]).metrics()
    assert len(found.tensors) == len([*runs[0][0].parameters()])
    assert 0.999 < collage_fx.backend_of(runs[1][1]).scalars()["collage/edq_ratio"] < 1.001


def test_assign_takes_a_value_of_another_layout() -> None:
    """Blocks are neighbours in the weight's memory, not in the value's."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(64, 32, 3, 3).bfloat16().to(memory_format=torch.channels_last))
    optimizer = install(torch.optim.SGD([p], lr=1e-3), weights="int16x32")
    for _ in range(2):
        p.grad = torch.randn(64, 32, 3, 3).bfloat16().to(memory_format=torch.channels_last)
        optimizer.step()
    assert is_packed(p)
    value = torch.randn(64, 32, 3, 3) * torch.logspace(-3, 0, 32).reshape(1, 32, 1, 1)
    assign(p, value)
    bound = float(Weights().error_bound(torch.bfloat16).of_largest) * float(value.abs().max())
    assert float((full_value(p).detach() - value).abs().max()) <= bound
