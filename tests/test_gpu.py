"""The compiled step on a real card: ``python3 -m pytest -m gpu tests/test_gpu.py``, some minutes on an H200.

The other tests of compiled code run on any machine; here is what needs the card: what ptxas makes of the
kernels, approximate division and pow, CUDA graphs, and state that lives on a device.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.timing import launches
from collage_fx import CollageBackend, error_terms, full_value, move_state
from collage_fx.errors import ChangedTensorError
from collage_fx.state.fingerprints import fingerprint
from tests.support.agreement import (
    AdamW,
    assert_half_ulp,
    assert_same,
    assert_within_an_ulp_of_lo,
    lockstep,
    trajectory,
)
from tests.support.figures import Record, note
from tests.support.optimizers import Case, CompiledOptimizer, gradients
from tests.support.training import differences, everything, live_error_terms, parameters, run_steps
from tests.support.twin import TwinBackend
from tests.support.update_error import decay_achieved, displacement, second_moment_errors
from tests.test_compiled_bits import AUXILIARIES, CASES, EXPANSIONS

DEVICE = "cuda"
ROOT = Path(__file__).resolve().parent.parent

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device: torch.cuda.is_available() is False"
    ),
]

STEPS = 50
#: Neither fills the blocks of its kernel.
SHAPES = ((33, 17), (10_007,))
NUMBERS = AdamW(lr=1e-3, weight_decay=0.1)

#: Ulps between the kernel's pow and eager's: each is within 4 (CUDA C++ Programming Guide, powf).
POWF_ULPS = 8


def adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=NUMBERS.lr, weight_decay=NUMBERS.weight_decay)


def adamw_with_state(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """One that has taken an eager step: its step counters are on the host (``capturable=False``)."""
    optimizer = adamw(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def compiled_optimizer(case: Case, make: Any = adamw, **options: Any) -> CompiledOptimizer:
    backend = TwinBackend(**case.options(), **options)
    return CompiledOptimizer(SHAPES, make, backend, dtype=case.dtype, device=DEVICE)


def assert_agreement(case: Case, rig: CompiledOptimizer, grads: Sequence[Sequence[Tensor]]) -> None:
    """Assert the same bits, but that division and pow may move a parameter of a wide step by an ulp of lo."""
    start = rig.start()
    if case.arithmetic == "native":
        compiled = trajectory(rig, start, grads)
        assert_same(compiled, trajectory(rig, start, grads, engine="eager"))
    else:
        triples = lockstep(rig, start, grads)
        for (before, after, eager), grad in zip(triples, grads, strict=True):
            assert_within_an_ulp_of_lo(before, after, eager, grad, NUMBERS, POWF_ULPS)
        compiled = [after for _, after, _ in triples]
    for tensors in compiled:
        assert_half_ulp(tensors)
    last = compiled[-1]
    assert {name.split(".")[1] for name in last if name.endswith(AUXILIARIES)} == EXPANSIONS[case.strategy]
    for name in last:
        if name.endswith(AUXILIARIES):
            assert float((last[name] != 0).double().mean()) > 0.9, name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled_agrees_with_eager(case: Case) -> None:
    assert_agreement(case, compiled_optimizer(case), list(gradients(SHAPES, STEPS)))


@pytest.mark.parametrize("arithmetic", ["wide", "native"])
def test_counters_that_begin_on_the_host(arithmetic: Any) -> None:
    """Dynamo moves them to the device; those that stay are tested in Triton's interpreter."""
    case = Case("plus", arithmetic, "mcf", torch.bfloat16)
    rig = compiled_optimizer(case, adamw_with_state)
    assert rig.optimizer.state[rig.parameters[0]]["step"].device.type == "cpu"
    assert_agreement(case, rig, list(gradients(SHAPES, 5)))
    assert rig.optimizer.state[rig.parameters[0]]["step"].device.type == DEVICE


@pytest.mark.parametrize("arithmetic", ["wide", "native"])
def test_inf_and_nan_stay_where_they_are(arithmetic: Any) -> None:
    rig = compiled_optimizer(Case("full", arithmetic, "mcf", torch.bfloat16))
    start = rig.start()
    grads = list(gradients(SHAPES, 3))
    clean = trajectory(rig, start, grads)[-1]
    grads[0][1][:3] = torch.tensor([float("inf"), float("nan"), -float("inf")])
    spoilt = trajectory(rig, start, grads)[-1]
    assert_half_ulp(spoilt)  # which says that lo is zero beside what is not finite
    assert not spoilt["1.p"][:3].isfinite().any()
    for name, tensor in spoilt.items():
        others = slice(3, None) if name.startswith("1.") and tensor.dim() else ...
        assert torch.equal(tensor[others], clean[name][others]), name


# ------------------------------------------------------------------- CUDA graphs


@pytest.mark.parametrize(
    "case",
    [Case("plus", "wide", "mcf", torch.bfloat16), Case("light", "native", "mcf", torch.float16)],
    ids=str,
)
def test_cuda_graphs(case: Case) -> None:
    """``mode="reduce-overhead"`` leaves the bits of the default mode, in the same error terms throughout."""
    grads = list(gradients(SHAPES, 10))
    results = []
    for mode in (None, "reduce-overhead"):
        counters.clear()
        rig = CompiledOptimizer(
            SHAPES, adamw, CollageBackend(**case.options(), mode=mode), dtype=case.dtype, device=DEVICE
        )
        rig.step(grads[0])
        addresses = {name: tensor.data_ptr() for name, tensor in rig.live()}
        for grad in grads[1:]:
            rig.step(grad)
        assert {name: tensor.data_ptr() for name, tensor in rig.live()} == addresses
        assert counters["inductor"]["cudagraph_skips"] == 0
        results.append(rig.tensors())
    assert_same(results[1:], results[:1])


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("foreach", [False, True])
def test_a_learning_rate_is_that_of_each_step(foreach: bool, mode: Any) -> None:
    """A Python number that a scheduler sets: with the bits of eager's, in a new compilation or in none."""

    def make(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1.0, foreach=foreach)

    rig = CompiledOptimizer(SHAPES, make, CollageBackend(error_format="fp32", mode=mode), device=DEVICE)
    expected = [p.detach().double() for p in rig.parameters]
    for i, grads in enumerate(gradients(SHAPES, 8)):
        rig.optimizer.param_groups[0]["lr"] = lr = 2.0**-i
        rig.step(grads)
        for value, grad in zip(expected, grads, strict=True):
            value -= lr * grad.bfloat16().to(DEVICE).double()
    for parameter, value in zip(rig.parameters, expected, strict=True):
        assert float((full_value(parameter) - value).abs().max()) < 1e-4


def test_a_step_that_a_program_captures_itself() -> None:
    """Replays of a CUDA graph are steps; where gradients have moved, nothing is captured."""
    grads = list(gradients(SHAPES, 6))
    results = []
    for is_captured in (False, True):
        rig = CompiledOptimizer(SHAPES, adamw, CollageBackend(), device=DEVICE)
        rig.step(grads[0])
        graph = torch.cuda.CUDAGraph()
        for i, each in enumerate(grads[1:]):
            for parameter, grad in zip(rig.parameters, each, strict=True):
                assert parameter.grad is not None
                parameter.grad.copy_(grad)
            if not is_captured or i < 2:  # on a card, the first may still compile
                rig.compiled()
                continue
            if i == 2:
                with torch.cuda.graph(graph):
                    rig.compiled()
            graph.replay()
        results.append(rig.tensors())
    assert_same(results[1:], results[:1])
    for parameter in rig.parameters:
        parameter.grad = torch.ones_like(parameter)
    before = rig.tensors()
    with pytest.raises(ChangedTensorError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        rig.compiled()
    assert_same([rig.tensors()], [before])


# ---------------------------------------------------------------------- launches


def test_a_step_is_two_launches() -> None:
    backend = CollageBackend()
    rig = CompiledOptimizer([(33, 17)] * 20 + [(10_007,)], adamw, backend, device=DEVICE)
    grads = list(gradients([tuple(p.shape) for p in rig.parameters], 3))
    rig.step(grads[0])
    rig.step(grads[1])
    assert backend.report().graphs[-1].route.unit == "by family"
    assert launches(rig.compiled, DEVICE) == 2


def test_a_measured_step_is_the_same_each_time() -> None:
    """All bits of its rows; and the step's are those of others."""
    shapes = [(33, 17)] * 20 + [(100_007,)]
    grads = list(gradients(shapes, 4))
    found = []
    for is_measured in (True, True, False):
        backend = CollageBackend(metrics=is_measured)
        rig = CompiledOptimizer(shapes, adamw, backend, device=DEVICE)
        for each in grads:
            rig.step(each)
        measured = backend.metrics() if is_measured else {}
        found.append((rig.tensors(), [measured[step] for step in measured]))
    (tensors, one), (_, other), (plain, _) = found
    assert one == other
    assert len(one) == len(grads)
    assert_same([tensors], [plain])


def test_unaligned_gradients() -> None:
    """They have a kernel of their own, of which the bits are those of the other."""
    results = []
    for offset in (0, 1):
        rig = compiled_optimizer(Case("plus", "wide", "exact", torch.bfloat16))
        for grads in gradients(SHAPES, 5):
            for parameter, grad in zip(rig.parameters, grads, strict=True):
                memory = torch.empty(grad.numel() + offset, dtype=parameter.dtype, device=DEVICE)
                parameter.grad = memory[offset:].view(grad.shape).copy_(grad)
            rig.compiled()
        assert rig.backend.report().graphs[-1].route.unit != "whole"
        results.append(rig.tensors())
    assert_same(results[:1], results[1:])


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "full", "rounding": "nearest"},
        {"strategy": "full", "rounding": "nearest", "metrics": True},
        {"strategy": "full", "error_format": "mcf"},
        {"strategy": "full", "arithmetic": "native"},
        {"rounding": "nearest"},
    ],
    ids=str,
)
@pytest.mark.parametrize("offset", [0, 1])
def test_bits_do_not_depend_on_the_place_in_a_block(options: dict[str, Any], offset: int) -> None:
    """The same numbers in the first, a full and the last block, and at each of a thread's elements.

    Rounded to nearest: the phase of dither depends on the index of an element by design.
    """
    period = 61  # prime, so that a number comes to stand at every place of a thread
    shapes = [(1, period), (34, period)]  # in a block of its own; in two full ones and the last
    rig = CompiledOptimizer(shapes, adamw, CollageBackend(**options), device=DEVICE)
    with torch.no_grad():
        rig.parameters[1].copy_(rig.parameters[0].expand(shapes[1]))
    for (grad,) in gradients([(period,)], 5):
        for parameter, shape in zip(rig.parameters, shapes, strict=True):
            memory = torch.empty(parameter.numel() + offset, dtype=parameter.dtype, device=DEVICE)
            parameter.grad = memory[offset:].view(shape).copy_(grad.expand(shape))
        rig.compiled()
    tensors = rig.tensors()
    for name in tensors:
        if name.startswith("1.") and tensors[name].dim() == 2:
            assert_same([{name: tensors[name]}], [{name: tensors[f"0{name[1:]}"].expand(shapes[1])}])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_parameters_on_another_device_than_the_current_one() -> None:
    results = []
    for device in ("cuda:0", "cuda:1"):
        rig = CompiledOptimizer(SHAPES, adamw, CollageBackend(), device=device)
        for grads in gradients(SHAPES, 5):
            rig.step(grads)
        results.append({name: tensor.cpu() for name, tensor in rig.tensors().items()})
    assert torch.cuda.current_device() == 0
    assert_same(results[:1], results[1:])


def test_on_another_stream() -> None:
    rig = compiled_optimizer(Case("plus", "wide", "exact", torch.bfloat16))
    grads = list(gradients(SHAPES, 6))
    start = rig.start()
    expected = trajectory(rig, start, grads)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        met = trajectory(rig, start, grads)
        torch.cuda.synchronize()
    assert_same(met, expected)


#: A program whose every tensor has memory of its own, and ends somewhere in a block.
ODD_LENGTHS = """
import torch
from collage_fx import CollageBackend

packed = {"strategy": "light", "error_format": "byte", "state": "block8"}
for options in ({}, {"metrics": True}, packed):
    lengths = (1, 7, 1023, 1025, 4096, 10007)
    params = [torch.nn.Parameter(torch.ones(n, dtype=torch.bfloat16, device="cuda")) for n in lengths]
    step = torch.compile(torch.optim.AdamW(params).step, backend=CollageBackend(**options))
    for _ in range(3):
        for p in params:
            p.grad = torch.ones_like(p)
        step()
torch.cuda.synchronize()
"""


@pytest.mark.skipif(
    shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer, of NVIDIA's CUDA toolkit"
)
def test_nothing_is_accessed_beside_tensors() -> None:
    command = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-c"]
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    subprocess.run([*command, ODD_LENGTHS], env=env, cwd=ROOT, timeout=240, check=True)


@pytest.mark.parametrize("is_measured", [False, True])
def test_a_thousand_steps_take_no_more_memory(is_measured: bool) -> None:
    rig = CompiledOptimizer(SHAPES, adamw, CollageBackend(metrics=is_measured), device=DEVICE)
    (grads,) = gradients(SHAPES, 1)
    for _ in range(3):
        rig.step(grads)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(1000):
        rig.step(grads)
    assert torch.cuda.memory_allocated() <= before


def test_a_tensor_of_more_elements_than_32_bits_count() -> None:
    """2**31 + 1, of which both ends and the middle are looked at: 24 GiB."""
    parameter = torch.nn.Parameter(torch.ones(2**31 + 1, dtype=torch.bfloat16, device=DEVICE))
    parameter.grad = torch.ones_like(parameter)
    step = torch.compile(
        torch.optim.SGD([parameter], lr=2.0**-12).step, backend=CollageBackend(strategy="light")
    )
    for _ in range(3):
        step()
    (rest,) = error_terms(parameter)
    for at in (0, 2**30 - 1, 2**30, 2**31 - 1, 2**31):
        assert (parameter.detach()[at].float() + rest[at]).item() == 1 - 3 * 2.0**-12, at


# ------------------------------------------------------------------- checkpoints


def test_checkpoint_round_trip() -> None:
    """Five steps, a checkpoint, five steps: the same bits whether or not a new optimizer took the latter."""
    case = Case("plus", "wide", "mcf", torch.bfloat16)
    grads = list(gradients(SHAPES, 10))
    first = compiled_optimizer(case)
    for grad in grads[:5]:
        first.step(grad)
    file = io.BytesIO()
    torch.save({"model": first.parameters, "optimizer": first.optimizer.state_dict()}, file)
    for grad in grads[5:]:
        first.step(grad)
    expected = first.tensors()

    file.seek(0)
    saved = torch.load(file, weights_only=False)
    second = compiled_optimizer(case)
    for parameter, value in zip(second.parameters, saved["model"], strict=True):
        parameter.data.copy_(value)
    second.optimizer.load_state_dict(saved["optimizer"])
    for grad in grads[5:]:
        second.step(grad)
    assert any(name.endswith(AUXILIARIES) and bool(tensor.any()) for name, tensor in second.tensors().items())
    assert_same([second.tensors()], [expected])


#: Each fills less than a block, so that norms take one kernel.
FEW = ((33, 17), (37,))


def loaded(state: dict[str, Any], map_location: str | None) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return dict(torch.load(file, map_location=map_location, weights_only=False))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Adafactor])
@pytest.mark.parametrize("map_location", [None, DEVICE])
def test_a_resumed_run_is_the_one_that_goes_on(kind: Any, map_location: str | None) -> None:
    """In bits and in the way it is compiled, wherever its counters are loaded to."""

    def make(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        numbers = {"eps": (1e-12, 1e-3)} if kind is torch.optim.Adafactor else {}
        return kind(parameters, lr=1e-3, **numbers)

    grads = list(gradients(FEW, 6))

    def scheduled() -> tuple[CompiledOptimizer, LambdaLR]:
        rig = CompiledOptimizer(FEW, make, CollageBackend(), device=DEVICE)
        return rig, LambdaLR(rig.optimizer, lambda i: 1 / (i + 1))

    def take(run: tuple[CompiledOptimizer, LambdaLR], steps: Sequence[Sequence[Tensor]]) -> None:
        rig, schedule = run
        for each in steps:
            rig.step(each)
            schedule.step()

    one = scheduled()
    first, _ = one
    take(one, grads[:3])
    values = [parameter.detach().clone() for parameter in first.parameters]
    saved = loaded(first.optimizer.state_dict(), map_location)
    of_schedule = one[1].state_dict()
    take(one, grads[3:])
    other = scheduled()
    second, _ = other
    for parameter, value in zip(second.parameters, values, strict=True):
        parameter.data.copy_(value)
    second.optimizer.load_state_dict(saved)
    other[1].load_state_dict(of_schedule)
    take(other, grads[3:])
    places = [{each["step"].device.type for each in rig.optimizer.state.values()} for rig in (first, second)]
    assert places[0] == places[1]
    routes = [str(rig.backend.report().graphs[-1].route) for rig in (first, second)]
    assert routes[0] == routes[1]
    assert_same([second.tensors()], [first.tensors()])


@pytest.mark.parametrize(
    "options", [{}, {"error_format": "mcf"}, {"strategy": "full"}, {"bytes_per_parameter": 5.1}], ids=repr
)
def test_move_state_frees_the_memory_of_state_and_error_terms_until_the_next_step(
    options: dict[str, Any],
) -> None:
    """The next step moves them back: the bits of a run that never moved them, and nothing is compiled."""
    runs, shapes = [], ((64, 64), (64, 160))
    for moves in (False, True):
        torch._dynamo.reset()
        params = [torch.nn.Parameter(p.detach().to(DEVICE)) for p in parameters(shapes=shapes)]
        optimizer = adamw(params)
        backend = CollageBackend(**options)
        step = torch.compile(optimizer.step, backend=backend)
        run_steps(step, params, range(2))
        compilations = len(backend.reports)
        if moves:
            for seed in (2, 3):
                held = memory_of(optimizer)
                assert {kind for kind, _ in held} == {DEVICE}
                before = torch.cuda.memory_allocated()
                move_state(optimizer)
                there = memory_of(optimizer)
                assert [(kind, count) for kind, count in there] == [("cpu", count) for _, count in held]
                assert before - torch.cuda.memory_allocated() >= sum(count for _, count in held)
                run_steps(step, params, [seed])
                assert memory_of(optimizer) == held
        else:
            run_steps(step, params, (2, 3))
        assert len(backend.reports) == compilations
        runs.append(everything(optimizer))
    assert differences(*runs) == []


def memory_of(optimizer: torch.optim.Optimizer) -> list[tuple[str, int]]:
    """Kind of device and bytes of each buffer of error terms, and of each state tensor that is not packed."""
    found = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            tensors = [each for each in optimizer.state[p].values() if each.dim()]
            buffers = [each for tensor in (p, *tensors) for each in live_error_terms(tensor) if each.dim()]
            buffers += [each for each in tensors if type(each) is Tensor]
            found += [(each.device.type, each.nbytes) for each in buffers]
    return found


def test_an_eager_step_leaves_counters_where_a_compiled_one_makes_them() -> None:
    def make(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adafactor(parameters, lr=1e-3)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return optimizer

    rig = CompiledOptimizer(FEW, make, CollageBackend(), device=DEVICE)
    for grads in gradients(FEW, 3):
        rig.step(grads)
    assert {each["step"].device.type for each in rig.optimizer.state.values()} == {"cpu"}
    assert all(not graph.route.recorded for graph in rig.backend.report().graphs)


def test_a_fingerprint_where_hi_has_been_moved() -> None:
    """As by ``model.cpu()``: error terms follow at the next step, and may be saved before."""
    lo = torch.randn(SHAPES[0], device=DEVICE).bfloat16()
    hi = lo.cpu()
    assert fingerprint(hi, [lo]).item() == fingerprint(hi, [hi]).item()


# ------------------------------------------------------------------ update error


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ({"strategy": "light"}, 0.08),
        ({"strategy": "full", "error_format": "fp32"}, 0.006),
        ({"strategy": "light", "arithmetic": "native"}, 0.08),
    ],
    ids=["light", "fp32", "light-native"],
)
def test_displacement(options: dict[str, Any], bound: float, record_property: Record) -> None:
    """The bounds of ``tests/test_update_error.py``."""
    met = displacement(CollageBackend(**options), device=DEVICE)
    note(record_property, f"displacement error on {DEVICE}, {options}", met.error)
    assert met.error <= bound


@pytest.mark.parametrize("arithmetic", ["wide", "native"])
def test_second_moment(arithmetic: Any, record_property: Record) -> None:
    errors = second_moment_errors(
        CollageBackend(strategy="plus", arithmetic=arithmetic), (0.95, 0.999), device=DEVICE
    )
    for beta2, values in errors.items():
        note(record_property, f"second moment error on {DEVICE}, {arithmetic}, beta2 = {beta2}", values[-1])
        assert max(values) <= 2e-3


@pytest.mark.parametrize("arithmetic", ["wide", "native"])
def test_weight_decay_arrives(arithmetic: Any, record_property: Record) -> None:
    share = decay_achieved(CollageBackend(strategy="light", arithmetic=arithmetic), device=DEVICE)
    note(record_property, f"weight decay achieved on {DEVICE}, light {arithmetic}", share)
    assert abs(share - 1) <= 0.005


def test_plain_bfloat16_loses(record_property: Record) -> None:
    error = displacement(CollageBackend(strategy="none"), device=DEVICE).error
    note(record_property, f"displacement error on {DEVICE}, plain bfloat16", error)
    assert error >= 0.9
    assert decay_achieved(CollageBackend(strategy="none"), device=DEVICE) == 0
