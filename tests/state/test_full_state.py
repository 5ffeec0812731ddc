"""A model's full values as one state dict, in a file and back; of DTensors: tests/test_parallel.py."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from collage_fx import (
    CollageBackend,
    CollageError,
    error_terms,
    full_state_dict,
    full_value,
    load_full_state_dict,
    save_full_state_dict,
)
from collage_fx.choices import ErrorFormatName
from collage_fx.errors import (
    CheckpointMismatchError,
    ConflictingErrorFormatError,
    InvalidOptionError,
    UnsupportedTensorError,
)
from collage_fx.numerics import ERROR_FORMATS
from collage_fx.state.error_terms import PART, ensure_record
from collage_fx.state.safetensors_file import SafetensorsFile
from tests.support.memory import peak
from tests.support.substitutes import parts_of_elements
from tests.support.training import compiled, differences, everything, live_error_terms, run_steps
from tests.support.warned import warned

#: Views of a flat buffer of 48 elements.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda flat: flat.view(6, 8),
    "part": lambda flat: flat[5:25].view(4, 5),
    "transposed": lambda flat: flat[8:40].view(4, 8).t(),
    "columns": lambda flat: flat.view(6, 8)[:, 2:5],
    "every third": lambda flat: flat[1::3],
    "one element": lambda flat: flat[17],
    "nothing": lambda flat: flat[3:3],
}


@pytest.mark.parametrize(
    ("cuts", "error_format"),
    [((0, 48), "exact"), ((0, 20, 48), "fp32"), ((8, 31), "mcf"), ((0, 20, 48), "byte")],
)
def test_views_of_flat_buffers_that_are_stepped(cuts: tuple[int, ...], error_format: ErrorFormatName) -> None:
    """As DeepSpeed, FSDP1 and Megatron have them; the optimizer steps the buffer, or slices of it."""
    flat = torch.randn(48, generator=torch.Generator().manual_seed(0)).bfloat16()
    stepped = [nn.Parameter(flat[first:last]) for first, last in pairwise(cuts)]
    model = nn.Module()
    for name, view in VIEWS.items():
        model.register_parameter(name.replace(" ", "_"), nn.Parameter(view(flat)))
    step = torch.compile(
        torch.optim.SGD(stepped, lr=1e-4).step, backend=CollageBackend(error_format=error_format)
    )
    for _ in range(3):
        for parameter in stepped:
            parameter.grad = torch.linspace(-1, 1, parameter.numel()).bfloat16()
        step()
    whole = flat.double()
    for parameter, (first, last) in zip(stepped, pairwise(cuts), strict=True):
        whole[first:last] = full_value(parameter)
    assert not torch.equal(whole, flat.double())
    assert torch.equal(full_value(flat), whole)
    state = full_state_dict(model, torch.float64)
    for name, view in VIEWS.items():
        assert torch.equal(state[name.replace(" ", "_")], view(whole)), name


def test_a_view_of_memory_that_has_been_replaced_has_no_error_terms() -> None:
    flat = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    flat.grad = torch.full_like(flat, 1e-3)
    view = flat.detach()[2:5]
    torch.compile(torch.optim.SGD([flat], lr=1.0).step, backend=CollageBackend())()
    assert full_value(view).ne(1).all()
    flat.data = flat.data.clone()
    assert full_value(view).eq(1).all()


class Model(nn.Module):
    """Tied weights, buffers of two dtypes, extra state, and parameters that differ in layout and dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.inner = nn.Linear(4, 4)
        self.out = nn.Linear(4, 6, bias=False)
        self.out.weight = self.embedding.weight
        self.transposed = nn.Parameter(torch.randn(3, 5).t())
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.bfloat16()
        self.wide = nn.Parameter(torch.randn(3))
        self.register_buffer("seen", torch.tensor(7))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("mean", torch.ones(3, dtype=torch.bfloat16))

    def low(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.named_parameters() if p.dtype == torch.bfloat16}


def model(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def adamw(of: nn.Module, **options: Any) -> tuple[torch.optim.Optimizer, Callable[[], Any]]:
    optimizer = torch.optim.AdamW(of.named_parameters(), lr=1e-3)
    return optimizer, compiled(optimizer, **options)


def trained(steps: int = 3, **options: Any) -> tuple[Model, torch.optim.Optimizer, Callable[[], Any]]:
    torch._dynamo.reset()
    of = model()
    optimizer, step = adamw(of, **options)
    run_steps(step, list(of.parameters()), range(steps))
    assert all(
        any(term.any() for term in error_terms(p)) for p in of.low().values() if p.dim() > 1 and p.numel()
    )
    return of, optimizer, step


@pytest.mark.parametrize("error_format", ["mcf", "fp32", "byte"])
def test_it_holds_hi_and_error_terms(error_format: str) -> None:
    of, *_ = trained(error_format=error_format)
    plain = of.state_dict()
    for dtype in (torch.float32, torch.float64):
        full = full_state_dict(of, dtype)
        assert list(full) == list(plain)
        assert len(full) == len(plain)
        for name, p in of.low().items():
            assert full[name].dtype == dtype
            assert torch.equal(full[name].double(), full_value(p)), name
        for name in ("wide", "seen", "flags", "mean"):
            assert full[name].dtype == plain[name].dtype
            assert torch.equal(full[name], plain[name])
        assert not any(each.requires_grad for each in full.values())
        kept = dict(full)
        assert kept["out.weight"] is kept["embedding.weight"]
    with torch.no_grad():
        of.embedding.weight.fill_(1)  # what is read later is what is there then
    with pytest.warns(UserWarning, match="written to between two steps"):
        assert (full["embedding.weight"] == 1).all()
    assert kept["embedding.weight"].std() > 0
    wide = model().float()
    wide.load_state_dict(full_state_dict(of))
    assert torch.equal(wide.inner.weight.double(), full_value(of.inner.weight))
    copied = copy.deepcopy(full_state_dict(of))
    assert type(copied) is dict
    assert torch.equal(copied["inner.weight"], full_value(of.inner.weight, torch.float32))


def test_those_of_an_averaged_model() -> None:
    of, *_ = trained(1)
    averaged = AveragedModel(of, avg_fn=lambda mine, new, count: mine * 0.999 + new * 0.001)
    update = torch.compile(averaged.update_parameters, backend=CollageBackend())
    for _ in range(2):
        with torch.no_grad():
            of.inner.weight.mul_(1.01)
        update(of)
    weight = averaged.get_parameter("module.inner.weight")
    assert error_terms(weight)[0].any()
    assert torch.equal(full_state_dict(averaged)["module.inner.weight"].double(), full_value(weight))


@pytest.mark.parametrize("error_format", ["mcf", "fp32"])
def test_a_run_goes_on_from_a_file_to_the_bit(error_format: str, tmp_path: Path) -> None:
    of, optimizer, step = trained(error_format=error_format)
    save_full_state_dict(of, tmp_path / "model.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    other = model(seed=1)
    other_optimizer, other_step = adamw(other, error_format=error_format)
    load_full_state_dict(other, other_optimizer, tmp_path / "model.safetensors", error_format=error_format)
    for name, tensor in full_state_dict(of).items():
        assert torch.equal(tensor, full_state_dict(other)[name]), name
    optimizer.state.clear()  # which is not in the file
    for each, run in ((of, step), (other, other_step)):
        run_steps(run, list(each.parameters()), range(5, 7))
    assert not differences(everything(optimizer), everything(other_optimizer))


def test_what_is_loaded_in_several_parts_has_one_count(tmp_path: Path) -> None:
    of, *_ = trained(error_format="byte")
    save_full_state_dict(of, tmp_path / "model.safetensors")
    other = model(seed=1)
    other_optimizer, other_step = adamw(other, error_format="byte")
    with parts_of_elements(5):
        load_full_state_dict(other, other_optimizer, tmp_path / "model.safetensors", error_format="byte")
    for name, tensor in full_state_dict(of).items():
        assert torch.equal(tensor, full_state_dict(other)[name]), name
    run_steps(other_step, list(other.parameters()), range(2))
    (_, count) = live_error_terms(other.embedding.weight)
    assert int(count) == 2


def test_a_file_is_of_the_format_and_holds_tied_weights_once(tmp_path: Path) -> None:
    of, *_ = trained(1)
    path = tmp_path / "model.safetensors"
    save_full_state_dict(of, path)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt", "out.weight": "embedding.weight"}
    assert set(header) == set(of.state_dict()) - {"out.weight"}
    end = 0
    for entry in header.values():
        start, end = end, entry["data_offsets"][1]
        assert entry["data_offsets"][0] == start
    assert 8 + length + end == len(data)
    start, end = header["inner.bias"]["data_offsets"]
    found = torch.frombuffer(bytearray(data[8 + length :][start:end]), dtype=torch.float32)
    assert header["inner.bias"]["dtype"] == "F32"
    assert torch.equal(found, full_value(of.inner.bias, torch.float32))
    full = full_state_dict(of)
    for name, tensor in SafetensorsFile(path).items():
        assert tensor.dtype == full[name].dtype
        assert tensor.shape == full[name].shape
        assert torch.equal(tensor, full[name]), name


def test_the_package_safetensors_reads_our_files_and_we_read_its(tmp_path: Path) -> None:
    theirs = pytest.importorskip("safetensors.torch", reason="transformers brings it")
    (of, *_), other = trained(1), model(1)
    path = tmp_path / "model.safetensors"
    save_full_state_dict(of, path)
    full = full_state_dict(of)
    for name, tensor in theirs.load_file(path).items():
        assert torch.equal(tensor, full[name]), name
    assert theirs.load_model(other.float(), path) == (set(), [])
    assert all(torch.equal(each, full[name].to(each.dtype)) for name, each in other.state_dict().items())
    theirs.save_model(of, path)
    plain = of.state_dict()
    for name, tensor in SafetensorsFile(path).items():
        assert torch.equal(tensor, plain[name]), name


def test_a_file_whose_tensors_begin_anywhere(tmp_path: Path) -> None:
    """Which the format permits, and compilers of other languages do."""
    header = json.dumps(
        {
            "flag": {"dtype": "BOOL", "shape": [1], "data_offsets": [0, 1]},
            "x": {"dtype": "F32", "shape": [], "data_offsets": [1, 5]},
        }
    ).encode()
    value = bytes(bytearray(torch.tensor([1.5]).view(torch.uint8).tolist()))
    path = tmp_path / "odd.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\1" + value)
    assert torch.equal(SafetensorsFile(path)["x"], torch.tensor(1.5))
    for broken in (path.read_bytes()[:-1], b"\0", b"", b"{}" * 8, (2).to_bytes(8, "little") + b"[]"):
        path.write_bytes(broken)
        with pytest.raises(CheckpointMismatchError, match="not in the safetensors format"):
            SafetensorsFile(path)


def test_a_float32_start_keeps_sixteen_bits() -> None:
    """u**2 for u = 2**-8, where bfloat16 alone keeps u; against float64."""
    of = model()
    optimizer, _ = adamw(of)
    torch.manual_seed(5)
    weights = {
        name: torch.randn(tensor.shape) if tensor.is_floating_point() else tensor
        for name, tensor in of.state_dict().items()
    }
    weights["out.weight"] = weights["embedding.weight"]
    load_full_state_dict(of, optimizer, weights)
    hi_off = []
    for name, p in of.low().items():
        exact = weights[name].double()
        off = ((full_value(p) - exact) / exact).abs()
        assert (off <= 2.0**-16).all(), name
        hi_off += ((p.detach().double() - exact) / exact).abs().flatten().tolist()
    assert max(hi_off) > 2.0**-9
    assert torch.equal(of.wide, weights["wide"])
    assert torch.equal(of.get_buffer("mean"), weights["mean"].bfloat16())


def test_what_the_optimizer_does_not_hold_is_rounded() -> None:
    of, _, _ = trained(1)
    optimizer = torch.optim.AdamW([of.inner.weight])
    load_full_state_dict(
        of,
        optimizer,
        {name: 1.001 * t if t.is_floating_point() else t for name, t in full_state_dict(of).items()},
    )
    assert error_terms(of.inner.weight)[0].any()
    assert not error_terms(of.embedding.weight)[0].any()  # which a step before has made


def test_it_may_be_loaded_over_a_checkpoint_that_no_step_has_used() -> None:
    """Nor over what ``load_state_dict`` has left of error terms: those of the full values are kept."""
    _, saved, _ = trained()
    of = model(seed=1)
    optimizer, step = adamw(of)
    optimizer.load_state_dict(copy.deepcopy(saved.state_dict()))
    for group in optimizer.param_groups:
        group.update(lr=0.0)
    for seed in (2, 3):
        weights = {
            name: t.float() / 3 if t.is_floating_point() else t
            for name, t in model(seed).state_dict().items()
        }
        load_full_state_dict(of, optimizer, weights)
        before = {name: full_value(p) for name, p in of.low().items()}
        run_steps(step, list(of.parameters()), [0])
        for name, p in of.low().items():
            assert torch.equal(full_value(p), before[name]), name
        of.load_state_dict(model(seed=4).state_dict())


def test_it_has_no_error_terms_of_other_weights_than_it_holds() -> None:
    _, saved, _ = trained()
    of = model(seed=1)
    of.temperature.data.fill_(2)
    optimizer, _ = adamw(of)
    optimizer.load_state_dict(saved.state_dict())
    full: dict[str, Any] = {}
    (told,) = warned(lambda: full.update(full_state_dict(of)))
    assert "holds error terms of other values than" in told
    for name, p in of.low().items():
        assert torch.equal(full[name], p.float()), name


def misfits(weights: dict[str, Any]) -> dict[str, dict[str, Any]]:
    without = {name: each for name, each in weights.items() if name != "inner.bias"}
    return {
        r"missing: \['inner.bias'\]": without,
        r"has not: \['inner.bia'\]": {**weights, "inner.bia": torch.ones(4)},
        r"\(5,\) where the model's is \(4,\)[\s\S]*inner.bias": {**weights, "inner.bias": torch.ones(5)},
        "torch.int64 where[\\s\\S]*inner.bias": {**weights, "inner.bias": torch.ones(4).long()},
        "a str where[\\s\\S]*inner.bias": {**weights, "inner.bias": "ones"},
    }


def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    of, optimizer, _ = trained(1)
    before = everything(optimizer)
    weights = {name: torch.zeros_like(tensor) for name, tensor in of.state_dict().items()}

    def refused(kind: type[CollageError], told: str, given: Any = weights, **options: Any) -> None:
        with pytest.raises(kind, match=told):
            load_full_state_dict(of, options.pop("optimizer", optimizer), given, **options)
        assert not differences(before, everything(optimizer))

    for told, given in misfits(weights).items():
        refused(CheckpointMismatchError, told, given)
    refused(InvalidOptionError, "did you mean", error_format="mfc")
    refused(ConflictingErrorFormatError, "'fp32'[\\s\\S]*'exact'", error_format="fp32")
    stranger = torch.optim.AdamW(model().parameters())
    refused(CheckpointMismatchError, "none of whose parameters", optimizer=stranger)
    (tmp_path / "other").write_bytes(b"PK" * 20)
    refused(CheckpointMismatchError, "not in the safetensors format", tmp_path / "other")


class ExtraState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale: Any = "some"
        self.weight = nn.Parameter(torch.ones(2).bfloat16())

    def get_extra_state(self) -> Any:
        return self.scale

    def set_extra_state(self, state: Any) -> None:
        self.scale = state


def test_what_is_no_tensor_is_kept_but_not_in_a_file(tmp_path: Path) -> None:
    one, other = ExtraState(), ExtraState()
    one.scale = "other"
    load_full_state_dict(other, torch.optim.SGD(other.parameters()), full_state_dict(one))
    assert other.scale == "other"
    with pytest.raises(UnsupportedTensorError, match="str, which a safetensors file cannot hold"):
        save_full_state_dict(one, tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())


class Copying(nn.Linear):
    """As FSDP1 does, its state dict holds other tensors than its parameters."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: tensor.detach().clone() for name, tensor in super().state_dict().items()}


def test_a_state_dict_of_other_tensors_is_refused() -> None:
    of = Copying(2, 2).bfloat16()
    ensure_record(of.weight, ERROR_FORMATS["mcf"], name="weight")
    with pytest.raises(UnsupportedTensorError, match=r"not in model.state_dict[\s\S]*weight[\s\S]*FSDP2"):
        full_state_dict(of)


def test_a_file_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = model()
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"old")

    def full(self: Tensor) -> Tensor:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Tensor, "cpu", full)
    with pytest.raises(OSError, match="No space left"):
        save_full_state_dict(of, path)
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {"model.safetensors": b"old"}


@pytest.mark.parametrize("error_format", ["mcf", "fp32"])
def test_extra_memory_is_one_tensor(error_format: str, tmp_path: Path) -> None:
    rows = columns = 2048
    of = nn.Sequential(*(nn.Linear(columns, rows, bias=False) for _ in range(3))).bfloat16()
    for p in of.parameters():
        ensure_record(p, ERROR_FORMATS[error_format], name="weight").auxiliaries[0].fill_(2.0**-20)
    whole = 4 * rows * columns  # bytes, in float32
    part = 4 * PART  # where a term has to be converted
    path, full = tmp_path / "model.safetensors", full_state_dict(of)
    assert whole <= peak(lambda: save_full_state_dict(of, path)) <= whole + part
    assert whole <= peak(lambda: {name: full[name].max().item() for name in full}) <= whole + part

    optimizer = torch.optim.AdamW(of.parameters())
    mapped = path.stat().st_size
    # In float32 what hi holds, the difference, what is finite of it, lo of the part before; two hi; a mask.
    of_split = (4 + 2 / 2 + 1 / 4) * part + 64
    assert (
        peak(lambda: load_full_state_dict(of, optimizer, path, error_format=error_format))
        <= mapped + of_split
    )
