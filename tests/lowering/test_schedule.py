"""A step lowered in parts: as many kernels as rules, the same bits, any layout, no memory, warm starts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.utils import fresh_cache

from collage_fx import CollageBackend, full_value
from collage_fx.lowering import forget_kernels
from collage_fx.torch_compat import inductor_config
from tests.support.agreement import assert_same, trajectory
from tests.support.optimizers import CompiledOptimizer
from tests.support.substitutes import rules_compiled, scratch_on
from tests.support.training import (
    Descent,
    LateMomentum,
    differences,
    everything,
    parameters,
    run_steps,
    set_gradients,
)
from tests.support.twin import TwinBackend

BOTH: Sequence[Any] = ("compiled", "eager")


def adamw(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1)


def adam_for_loop(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-3, foreach=False)


def adam_foreach(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-3, foreach=True)


@pytest.mark.parametrize("make", [adam_for_loop, adam_foreach])
def test_many_tensors_one_kernel(make: Any) -> None:
    shapes = tuple((i + 2, 3) for i in range(20))
    with rules_compiled() as rules:
        rig = CompiledOptimizer(shapes, make, TwinBackend(strategy="plus"))
        start = rig.start()
    assert len(rules) == 3  # the numbers', the phases' (of dither), the elements'
    grads = [
        [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for shape in shapes] for i in range(3)
    ]
    assert_same(*(trajectory(rig, start, grads, engine=engine) for engine in BOTH))


def test_matrix_products_of_one_shape_are_compiled_once() -> None:
    forget_kernels()
    for copies, is_new in ((1, True), (3, False)):
        params = parameters(shapes=((4, 3), (3, 4)) * copies)
        with rules_compiled() as rules:
            optimizer = torch.optim.Muon(params, ns_steps=1)
            run_steps(torch.compile(optimizer.step, backend=CollageBackend()), params, range(2))
        assert bool(rules) is is_new


def test_groups_have_kernels_in_common_whatever_their_learning_rates() -> None:
    found = []
    for groups in (3, 12):
        forget_kernels()
        params = parameters(shapes=[(4, 3)] * groups)
        rates = [{"params": [p], "lr": 1e-4 * (i + 1)} for i, p in enumerate(params)]
        with rules_compiled() as rules:
            optimizer = torch.optim.AdamW(rates, weight_decay=0.1)
            run_steps(torch.compile(optimizer.step, backend=CollageBackend()), params, range(2))
        found.append({rule.key for rule in rules})
    assert found[0] <= found[1]  # the first rate may be a constant, too


def test_optimizers_of_one_parameter_each_share_kernels() -> None:
    """As of a program that steps each parameter in its backward pass."""
    shapes = (4, 3), (5, 2), (6, 6)
    params, together = parameters(shapes=shapes), parameters(shapes=shapes)
    set_gradients(params)
    compiled, codes = [], []
    for p in params:
        backend = CollageBackend()
        with rules_compiled() as rules:
            torch.compile(adamw([p]).step, backend=backend)()
        compiled.append(len(rules))
        codes.append(backend.report().graphs[0].code)
    assert compiled == [3, 0, 0]
    assert codes == [codes[0]] * 3
    assert len(codes[0]) == 3

    torch.compiler.reset()
    with rules_compiled() as rules:
        run_steps(torch.compile(adamw(together).step, backend=CollageBackend()), together, [0])
    assert len(rules) == 3
    for one, other in zip(params, together, strict=True):
        assert torch.equal(full_value(one), full_value(other))


class Squashed(Descent):
    """A step that Inductor compiles: C++ has no spelling of its function."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(torch.tanh(p.grad), alpha=2.0**-10)


@pytest.mark.parametrize(("make", "printed", "by_inductor"), [(Descent, 2, 0), (Squashed, 2, 1)])
def test_a_kernel_is_not_used_where_it_would_be_written_otherwise(
    two_threads: None, make: Any, printed: int, by_inductor: int
) -> None:
    """Printed kernels do not depend on the number of threads; Inductor's do."""

    def compiled() -> int:
        params = parameters(shapes=((4096, 1),))
        with rules_compiled() as rules:
            run_steps(torch.compile(make(params).step, backend=CollageBackend()), params, [0])
        return len(rules)

    forget_kernels()
    for threads, expected in ((2, printed + by_inductor), (1, by_inductor), (2, 0)):
        torch.set_num_threads(threads)
        assert compiled() == expected
    with inductor_config.patch({"cpp.simdlen": 1}):
        assert compiled() == printed + by_inductor


def odd_parameters() -> list[Tensor]:
    """Every shape and layout that could trip a kernel that thinks in lengths."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    storage = normal(1000)
    return [
        normal(),
        normal(0),
        normal(0, 3),
        normal(1),
        normal(1, 1),
        normal(2),
        normal(37),
        normal(1, 37),
        normal(8, 6).t(),
        normal(2, 3, 4, 5).to(memory_format=torch.channels_last),
        normal(6, 14)[:, ::2],  # holes
        storage[3:45],  # at an odd address
        storage[100:184].view(7, 12).t(),
        normal(5, 9).float(),
        normal(45).half(),
        normal(129, 131),
    ]


class Odd(CompiledOptimizer):
    """Parameters of :func:`odd_parameters` and gradients with their strides."""

    def __init__(self, make: Any, backend: CollageBackend) -> None:
        super().__init__((), lambda _: torch.optim.SGD([torch.ones(1, requires_grad=True)]), backend)
        self.parameters = [torch.nn.Parameter(tensor) for tensor in odd_parameters()]
        self.optimizer = make(self.parameters)
        self.compiled = torch.compile(self.optimizer.step, backend=backend)

    def step(self, grads: Sequence[Tensor]) -> None:
        for parameter, grad in zip(self.parameters, grads, strict=True):
            parameter.grad = torch.empty_strided(parameter.size(), parameter.stride(), dtype=parameter.dtype)
            parameter.grad.copy_(grad)
        self.compiled()


@pytest.mark.parametrize("arithmetic", ["wide", "native"])
def test_every_layout(arithmetic: Any) -> None:
    rig = Odd(adam_for_loop, TwinBackend(strategy="plus", arithmetic=arithmetic))
    start = rig.start()
    generator = torch.Generator().manual_seed(3)
    grads = [[torch.randn(p.shape, generator=generator) for p in rig.parameters] for _ in range(3)]
    assert_same(*(trajectory(rig, start, grads, engine=engine) for engine in BOTH))


def test_gradients_of_other_strides() -> None:
    rig = CompiledOptimizer(((6, 4), (4, 6)), adamw, TwinBackend(strategy="plus"))
    grads = [[torch.randn(4, 6).t(), torch.randn(4, 6)] for _ in range(3)]
    rig.step(grads[0])
    start = rig.tensors()
    assert_same(*(trajectory(rig, start, grads, engine=engine) for engine in BOTH))


def test_parameters_may_move() -> None:
    """``p.data = ...``: nothing about a tensor's memory is remembered from call to call."""
    params = parameters()
    optimizer = Descent(params)
    step = torch.compile(optimizer.step, backend=CollageBackend())
    run_steps(step, params, [0])
    old = [p.data for p in params]
    before = [full_value(p) for p in params]
    for p in params:
        p.data = p.data.clone()
    left = [p.clone() for p in old]
    run_steps(step, params, [1])
    assert all(not torch.equal(full_value(p), value) for p, value in zip(params, before, strict=True))
    assert all(torch.equal(p, value) for p, value in zip(old, left, strict=True))


def test_a_step_may_run_while_new_tensors_go_to_another_device() -> None:
    found = []
    for device in ("cpu", "meta"):
        params = parameters()
        optimizer = adamw(params)
        step = torch.compile(optimizer.step, backend=CollageBackend())
        run_steps(step, params, [0])
        set_gradients(params, 1)
        with torch.device(device), scratch_on("cpu"):  # or the kernels write to address 0
            step()
        found.append(everything(optimizer))
    assert not differences(*found)


def test_state_that_is_born_in_the_step_has_its_own_memory_and_layout() -> None:
    params = parameters(shapes=[(4, 6), (6, 4), (7,)])
    params[0].data = params[0].data.t().contiguous().t()
    optimizer = LateMomentum(params)
    with rules_compiled() as rules:
        step = torch.compile(optimizer.step, backend=CollageBackend(strategy="full"))
        run_steps(step, params, [0])
        born = [optimizer.state[p]["moments"]["second"][0] for p in params]
        run_steps(step, params, [1, 2])
    assert rules
    assert [tensor.shape for tensor in born] == [p.shape for p in params]
    assert all(tensor._base is None for tensor in born)
    assert len({tensor.untyped_storage().data_ptr() for tensor in born}) == 3


class SharedCounter(Descent):
    """One step counter for all parameters, whose bias correction each of them reads."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=2.0**-6)
        self.state[self.first]["t"] = torch.zeros(())

    @property
    def first(self) -> Tensor:
        first: Tensor = self.param_groups[0]["params"][0]
        return first

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        t = self.state[self.first]["t"]
        t.add_(1)
        for p in self.param_groups[0]["params"]:
            p.addcdiv_(p.grad, 1 - 0.5**t, value=-self.param_groups[0]["lr"])


def test_a_shared_counter_is_a_kernel_of_its_own() -> None:
    params = parameters(shapes=[(5,), (6,), (2, 2)])
    optimizer = SharedCounter(params)
    with rules_compiled() as rules:
        step = torch.compile(optimizer.step, backend=CollageBackend())
        run_steps(step, params, [0, 1])
    assert len(rules) == 3  # and the phases'
    assert float(optimizer.state[params[0]]["t"]) == 2


# Numbers. -------------------------------------------------------------------------------------------------


def test_numbers_are_computed_by_a_kernel_of_their_own() -> None:
    backend = TwinBackend(strategy="plus")
    CompiledOptimizer(((64,), (1 << 15,)), adamw, backend).start()
    texts = [code[code.index('extern "C"') :] for code in backend.report().graphs[0].code]
    (elements,) = (text for text in texts if "const auto chunk" in text)
    assert len(texts) == 3
    assert sum(text.count("__builtin_pow(") for text in texts) == 2
    assert "__builtin_pow(" not in elements
    assert "#pragma omp parallel" not in elements  # its calls are divided among threads


def test_scheduled_numbers_are_inputs_of_the_kernels() -> None:
    forget_kernels()
    params = parameters(shapes=[(5,), (6,), (2, 2)])
    optimizer = torch.optim.AdamW(params, lr=1e-3)
    backend = CollageBackend()
    step = torch.compile(optimizer.step, backend=backend)
    with rules_compiled() as rules:
        for i in range(4):
            optimizer.param_groups[0]["lr"] = 1e-3 * (1 + i)
            run_steps(step, params, [i])
    assert len(backend.report().graphs) == 2  # a constant, then any number
    # Two kernels each, and for the second graph one more, of what all tensors have in common; for both one
    # of the phases of dither.
    assert len(rules) == 2 + 3 + 1


# Compile time. --------------------------------------------------------------------------------------------

COMPILER = """#!/bin/sh
# Passes on what asks or preprocesses; notes what generates code.
case " $* " in *" -E "*|*" --version "*|*" -dumpversion "*|"  -v "|" -v ") ;; *) echo "$@" >> {log} ;; esac
exec {cxx} "$@"
"""

STEPS = """
import torch
from collage_fx import CollageBackend
params = [torch.nn.Parameter(torch.ones(n).bfloat16()) for n in (5, 40000)]
for p in params:
    p.grad = torch.ones_like(p)
torch.compile(torch.optim.AdamW(params).step, backend=CollageBackend())()
"""


is_script = pytest.mark.skipif(
    sys.platform == "win32", reason="the stand-in for the compiler is a shell script"
)


def _noting_compiler(tmp_path: Path) -> tuple[Path, Path]:
    """Return a log, and a compiler that writes its arguments there."""
    log, compiler = tmp_path / "log", tmp_path / "c++"
    compiler.write_text(COMPILER.format(log=log, cxx=os.environ.get("CXX", "c++")))
    compiler.chmod(0o755)
    return log, compiler


@is_script
@pytest.mark.usefixtures("by_inductor")
def test_integers_of_inductor_are_modulo_2_to_the_32(tmp_path: Path) -> None:
    """An int that overflows is undefined in C++: GCC wrote a loop of dithered roundings without an end."""
    log, compiler = _noting_compiler(tmp_path)
    with fresh_cache(), config.patch({"cpp.cxx": (None, str(compiler))}):
        params = parameters(shapes=[(5,)])
        run_steps(torch.compile(Descent(params).step, backend=CollageBackend()), params, [0])
    kernels = [line for line in log.read_text().splitlines() if ".main.cpp" in line]
    assert kernels
    assert all("-fwrapv" in line.split() for line in kernels)


@is_script
def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    log, compiler = _noting_compiler(tmp_path)
    environment = {
        **os.environ,
        "CXX": str(compiler),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    compilations = []
    for _ in range(2):
        log.write_text("")
        subprocess.run([sys.executable, "-c", STEPS], env=environment, check=True, timeout=600)
        compilations.append(len(log.read_text().splitlines()))
    assert compilations[0] > 0
    assert compilations[1] == 0
