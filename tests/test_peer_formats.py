"""The plug-in ``examples/peer_formats.py``: compiled, trained, saved, in pieces, and how it is missed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import Parameter

from collage_fx import CollageBackend, full_value
from collage_fx.errors import CheckpointMismatchError, InvalidOptionError, UnsupportedTensorError
from collage_fx.examples import peer_formats
from collage_fx.graph import Unit
from collage_fx.numerics import PACKED_FORMATS
from collage_fx.state.checkpoint import adopt
from collage_fx.state.packed import is_packed
from collage_tools.cli import main
from tests.support import triton_offline as offline
from tests.support.agreement import assert_same, differences, trajectory
from tests.support.detours import DETOURS, direct_and_by
from tests.support.optimizers import CompiledOptimizer, gradients
from tests.support.processes import Processes
from tests.support.refusals import refused
from tests.support.substitutes import e4m3_as_on, lowered_as
from tests.support.training import compiled, parameters, run_steps, set_gradients
from tests.support.triton_steps import triton_trajectory
from tests.support.twin import TwinBackend
from tests.support.whole import pipeline

#: The least and the largest error of moments in a format, weights apart, that the study has on its recorded
#: gradients (docs/formats.md).
MEASURED = {"block8": (0.0063, 0.021), "fp8_lm": (0.016, 0.039), "coat": (0.025, 0.064)}

each_state = pytest.mark.parametrize("state", ["fp8_lm", "coat"])

SHAPES = ((32, 256), (32, 256), (16, 4, 128), (5,))


@pytest.fixture
def operation_by_operation() -> Iterator[None]:
    """Steps that torch runs: Inductor writes no vectors for these formats, and takes its time."""
    with lowered_as("operation by operation"):
        yield


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


@pytest.mark.parametrize("unit", ["by family", "in parts", "whole"])
@each_state
def test_compiled_bits_are_eager_bits(state: str, unit: Unit) -> None:
    ends = []
    for engine in ("compiled", "eager"):
        backend = TwinBackend(strategy="plus", state=state, passes=pipeline(by_family=unit == "by family"))
        rig = CompiledOptimizer(SHAPES, adamw, backend)
        backend.engine = engine
        with lowered_as(unit):
            for grads in gradients(SHAPES, 4):
                rig.step(grads)
        (graph,) = backend.report().graphs
        assert graph.route.unit == unit
        formats = {row.name.rpartition(".")[2]: row.error_format for row in graph.tensors[:3]}
        signed, positive = PACKED_FORMATS[state]
        assert (formats["exp_avg"], formats["exp_avg_sq"]) == (signed.name, positive.name)
        assert "has fewer than" in next(
            row.selection for row in graph.tensors if row.name.endswith("params[3].exp_avg")
        )
        ends.append(dict(rig.tensors()))
    assert not differences(*ends)
    assert {f"0.exp_avg.{spec.name}" for spec in signed.auxiliaries(rig.parameters[0])} < ends[0].keys()


def test_a_run_is_as_far_off_as_the_study_says() -> None:
    """And farther than with blocks. Gradients are others than there: by a factor of 2 at most."""
    found = {state: peer_formats.displacement_error(state, 50, "cpu") for state in MEASURED}
    for state, (least, most) in MEASURED.items():
        assert least / 2 <= found[state] <= 2 * most, found
    assert found["block8"] < min(found["fp8_lm"], found["coat"]), found


# On a GPU. ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not offline.HAVE_TRITON, reason="needs triton (Linux only) and numpy")
@pytest.mark.usefixtures("operation_by_operation")
@each_state
def test_triton_gives_the_same_bits(state: str) -> None:
    """As interpreted, with e4m3 as a GPU of capability 8.9 converts it. ``coat``'s powers are torch's there.

    What torch computes on the GPU for them, and Triton's logarithm, may be an ulp off: not seen here.
    """
    backend = TwinBackend(strategy="light", state=state, passes=pipeline(by_family=False))
    rig = CompiledOptimizer(SHAPES[1:], adamw, backend)
    start = rig.start()
    for _ in range(2):  # what is packed from the second step on is compiled once more
        rig.step([torch.ones(shape) for shape in SHAPES[1:]])
    start = {**rig.tensors(), **start}
    grads = list(gradients(SHAPES[1:], 3))
    found = triton_trajectory(rig, start, grads)
    assert_same(found, trajectory(rig, start, grads, engine="eager"))
    assert is_packed(rig.optimizer.state[rig.parameters[0]]["exp_avg_sq"])


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (12, 0)])
def test_numbers_of_8_bits_need_a_gpu_that_converts_them(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = mock.Mock(return_value=capability)
    monkeypatch.setattr("torch.cuda.get_device_capability", asked)
    cuda, cpu = torch.device("cuda", 1), torch.device("cpu")
    is_too_old = capability < (8, 9)
    with pytest.raises(UnsupportedTensorError) if is_too_old else nullcontext():
        peer_formats.require_e4m3(cuda)
    asked.assert_called_once_with(cuda)
    peer_formats.require_e4m3(cpu)
    asked.assert_called_once()


@each_state
def test_a_step_on_another_gpu_is_refused(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (8, 6))
    params = parameters(shapes=((64, 256),))
    optimizer = adamw(params)
    set_gradients(params)
    with e4m3_as_on(torch.device("cuda", 0)):
        text = refused(optimizer, UnsupportedTensorError, compiled(optimizer, state=state))
    assert "Triton converts torch.float8_e4m3fn on GPUs of compute capability 8.9 or later" in text
    assert "cuda:0 has 8.6" in text
    assert "state='block8'" in text


# Saved, loaded, copied. -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("operation_by_operation")
@pytest.mark.parametrize(
    ("detour", "dtype"),
    [*((detour, torch.bfloat16) for detour in DETOURS), ("plain torch", torch.float16)],
    ids=str,
)
@each_state
def test_a_resumed_run_is_the_uninterrupted_one(state: str, detour: str, dtype: torch.dtype) -> None:
    """Bit for bit, also where plain torch casts what is saved: codes and scales are saved as bytes."""
    one, other, resumed = direct_and_by(
        detour, adamw, ((64, 256), (5,)), (6, 2), dtype, strategy="plus", state=state, rounding="nearest"
    )
    assert not differences(one, other)
    assert list(map(is_packed, moments_of(resumed))) == [True, True, False, False]


@pytest.mark.usefixtures("operation_by_operation")
@each_state
def test_moments_are_those_that_were_saved(state: str) -> None:
    """As soon as they are loaded; also those that are not finite."""
    params = parameters(shapes=((64, 256), (64, 256)))
    optimizer = adamw(params)
    step = compiled(optimizer, strategy="plus", state=state)
    run_steps(step, params, range(2))
    set_gradients(params, 2)
    assert params[1].grad is not None
    params[1].grad[3, 40] = float("nan")
    step()
    saved = list(map(full_value, moments_of(optimizer)))
    assert [bool(each.isnan().any()) for each in saved] == [False, False, True, True]
    for name, detour in DETOURS.items():
        other = detour(optimizer, adamw)
        adopt(other)
        for moment, value in zip(moments_of(other), saved, strict=True):
            assert torch.equal(full_value(moment).nan_to_num(7), value.nan_to_num(7)), name
            assert torch.equal(moment.nan_to_num(7), value.to(moment.dtype).nan_to_num(7)), name


def moments_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [each for state in optimizer.state.values() for name, each in state.items() if name != "step"]


# In pieces. -----------------------------------------------------------------------------------------------


def in_pieces(state: Any) -> list[str]:
    """Why state of a matrix of which each process has half the rows is packed or not."""
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (2,))
    matrix = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    p = Parameter(distribute_tensor(matrix, mesh, [Shard(0)]))
    p.grad = distribute_tensor(matrix, mesh, [Shard(0)])
    backend = CollageBackend(strategy="plus", state=state)
    torch.compile(adamw([p]).step, backend=backend)()
    return [row.selection for row in backend.report().graphs[-1].tensors if row.symbol != "p"]


def test_state_in_pieces_is_packed_in_formats_that_are_by_rows(two_processes: Processes) -> None:
    for found in two_processes.run(in_pieces, "coat"):
        assert found == ["of either sign", "never negative"]
    for first, second in two_processes.run(in_pieces, "fp8_lm"):
        assert first.endswith("not packed: it is a shard, and fp8_lm needs whole tensors")
        assert second.endswith("not packed: it is a shard, and fp8_lm_positive needs whole tensors")


# Without the plug-in. -------------------------------------------------------------------------------------


def explained(*options: str) -> list[str]:
    return ["explain", "--optimizer", "torch.optim.AdamW", "--shape", "64,256", *options, "--state", "coat"]


def test_the_error_of_an_option_says_what_to_import(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(PACKED_FORMATS, "coat")
    with pytest.raises(
        InvalidOptionError, match=r"import .* collage_fx\.examples\.peer_formats has .* 'coat'"
    ):
        CollageBackend(state="coat")  # type: ignore[arg-type]
    assert main(explained()) == 2
    assert "'coat' is not allowed" in capsys.readouterr().err


def test_a_command_imports_the_plug_in(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(explained("--import", "collage_fx.examples.peer_formats")) == 0
    assert "moving average fine (2) coat" in " ".join(capsys.readouterr().out.split())


@pytest.mark.usefixtures("operation_by_operation")
def test_the_error_of_a_checkpoint_says_that_the_format_is_not_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = parameters(shapes=((64, 256),))
    optimizer = adamw(params)
    run_steps(compiled(optimizer, state="coat"), params, range(2))
    saved = optimizer.state_dict()
    monkeypatch.delitem(PACKED_FORMATS, "coat")
    other = adamw(parameters(shapes=((64, 256),)))
    other.load_state_dict(saved)
    with pytest.raises(CheckpointMismatchError, match=r"'coat'.*import the module that registers it"):
        adopt(other)
