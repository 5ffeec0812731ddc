"""A step as a GPU takes it: which kernels are launched, for how many tensors at once, and their bits.

In Triton's interpreter, against the eager twin.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from collage_fx import CollageBackend
from collage_fx.errors import InvalidOptionError
from collage_fx.graph import Reason, placeholders
from collage_fx.lowering.lower import _whole
from collage_fx.lowering.schedule import lower_in_parts
from collage_fx.torch_compat import TableKernel, generated_code
from collage_tools.gpu_code.imaginary_cuda import machine_code
from tests.support import triton_offline as offline
from tests.support.launched import LaunchedSteps, step_on_cuda
from tests.support.substitutes import (
    kernels_begun,
    no_kernel_over_a_table,
    no_tables_of_addresses,
    numbers_frozen,
)
from tests.support.training import parameters, set_gradients

pytestmark = pytest.mark.skipif(
    not offline.HAVE_TRITON, reason="needs triton (Linux only) and numpy: pip install triton numpy"
)

#: Two alike; no multiple of a block's 1024; one that can be packed; several blocks and a rest.
SHAPES = [(33, 17), (33, 17), (7,), (64, 64), (4197,)]


@pytest.fixture(scope="module")
def steps() -> Iterator[LaunchedSteps]:
    with LaunchedSteps() as process:
        yield process


FORMATS: list[tuple[dict[str, Any], int]] = [
    # A launch for the counters, and one for the elements; those of packed tensors have another rule.
    ({"strategy": "full"}, 2),
    ({"strategy": "plus"}, 2),
    ({"strategy": "light", "rounding": "nearest"}, 2),
    ({"strategy": "light", "error_format": "mcf"}, 2),
    ({"strategy": "full", "error_format": "fp32"}, 2),
    ({"strategy": "light", "error_format": "byte"}, 2),
    ({"strategy": "light", "state": "block8"}, 3),
    ({"strategy": "light", "error_format": "byte", "state": "block16"}, 3),
    ({"strategy": "light", "arithmetic": "native", "error_format": "mcf", "rounding": "nearest"}, 2),
    ({"strategy": "full", "arithmetic": "native", "error_format": "mcf", "rounding": "nearest"}, 2),
]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(("options", "launches"), FORMATS, ids=lambda value: str(value))
def test_adamw_is_a_launch_for_each_rule(
    steps: LaunchedSteps, options: dict[str, Any], launches: int, foreach: bool
) -> None:
    outcome = steps.run("AdamW", shapes=SHAPES, options=options, lr=1e-3, foreach=foreach)
    assert outcome.different == {}
    assert outcome.changed[0] == outcome.changed[1]
    assert outcome.unaligned == 0
    assert (outcome.launches, outcome.calls, outcome.on_host) == (launches, 0, 0), outcome.reasons


@pytest.mark.parametrize("strategy", ["light", "plus"])
def test_tensors_of_one_element(steps: LaunchedSteps, strategy: str) -> None:
    """A row like others; scalars (``logit_scale``) are numbers to a kernel, with a launch of their own."""
    for shapes, launches in ([(1,), (5,), (1, 1)], 2), ([(1,)], 2), ([(), (5,), ()], 3):
        outcome = steps.run("AdamW", shapes=shapes, options={"strategy": strategy}, lr=1e-3)
        assert outcome.different == {}
        assert outcome.changed[0] == outcome.changed[1]
        assert (outcome.launches, outcome.calls) == (launches, 0), (shapes, outcome.reasons)


@pytest.mark.parametrize(
    ("optimizer", "keywords", "launches"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9}, 2),
        ("RMSprop", {"lr": 1e-3}, 3),  # which reads no number of the step counter that it counts
        ("Adagrad", {"lr": 1e-3}, 2),
        ("Adadelta", {}, 3),  # as little
        ("NAdam", {}, 2),
        ("Rprop", {}, 3),  # as little
        ("RAdam", {}, 2),
        ("Adamax", {}, 2),
        ("Adam", {"amsgrad": True}, 2),
    ],
)
def test_other_rules(steps: LaunchedSteps, optimizer: str, keywords: dict[str, Any], launches: int) -> None:
    outcome = steps.run(optimizer, shapes=SHAPES, options={}, **keywords)
    assert outcome.different == {}
    assert (outcome.launches, outcome.calls) == (launches, 0), outcome.reasons


def test_unaligned_gradients_have_a_kernel_of_their_own(steps: LaunchedSteps) -> None:
    outcome = steps.run("AdamW", shapes=SHAPES, options={}, offset=1, lr=1e-3)
    assert outcome.different == {}
    assert outcome.unaligned == 1


def test_a_learning_rate_of_the_host_is_current_at_every_step(steps: LaunchedSteps) -> None:
    """It is a word of the table: the kernels are those of the first step."""
    outcome = steps.run("AdamW", shapes=SHAPES, options={}, scheduled=True, lr=1e-3)
    assert outcome.different == {}
    assert outcome.calls == 0


def test_counters_on_the_host(steps: LaunchedSteps) -> None:
    outcome = steps.run("AdamW", shapes=SHAPES, options={}, host=["counters"], lr=1e-3)
    assert outcome.different == {}
    assert outcome.on_host == 1
    assert outcome.calls == 0


@pytest.mark.parametrize(
    ("options", "launches"),
    [
        ({"strategy": "light"}, 2),
        ({"strategy": "full", "arithmetic": "native"}, 2),
        ({"strategy": "light", "state": "block8"}, 3),
    ],
    ids=lambda value: str(value),
)
def test_a_measured_step_is_launched_as_another(
    steps: LaunchedSteps, options: dict[str, Any], launches: int
) -> None:
    shapes = [(33, 17), (7,), (1,), (64, 128), (2049,)]
    outcome = steps.run("AdamW", shapes=shapes, options={**options, "metrics": True}, steps=2, lr=1e-3)
    assert outcome.different == {}
    assert (outcome.launches, outcome.calls) == (launches, 0), outcome.reasons
    assert outcome.measured == {}


def test_reductions_are_called_for_each_tensor(steps: LaunchedSteps) -> None:
    outcome = steps.run("Adafactor", shapes=SHAPES, options={})
    assert outcome.calls > 0
    assert all("neither elementwise" in reason for reason in outcome.reasons)


def test_a_number_of_the_host_is_not_recorded_into_a_cuda_graph() -> None:
    """What no launch over a table can do is compiled as one, and may be recorded: not with such a number."""
    refused: list[str] = []

    class Backend(CollageBackend):
        def lower(self, program: Any, example_inputs: Any, inductor_options: Any) -> Any:
            numbers = [node.name for node in placeholders(program.gm.graph) if not node.meta["val"].dim()]
            gm = offline.to_cuda(program.gm, keep_on_cpu=numbers)
            with pytest.raises(InvalidOptionError, match="go on with that of its first step") as error:
                _whole(replace(program, gm=gm), example_inputs, {"cudagraphs": True})
            refused.append(str(error.value))
            return super().lower(program, example_inputs, inductor_options)

    params = parameters()
    set_gradients(params)
    with numbers_frozen():
        torch.compile(torch.optim.AdamW(params).step, backend=Backend())()
    assert len(refused) == 1


def test_a_number_of_the_host_is_handed_to_no_kernel_without_a_table() -> None:
    """Which would take its address for one of the device's."""
    found: list[Any] = []

    class Backend(CollageBackend):
        def lower(self, program: Any, example_inputs: Any, inductor_options: Any) -> Any:
            numbers = [node.name for node in placeholders(program.gm.graph) if not node.meta["val"].dim()]
            gm = offline.to_cuda(program.gm, keep_on_cpu=numbers)
            with offline.imaginary_cuda():
                found.append(lower_in_parts(gm, always=True))
            return super().lower(program, example_inputs, inductor_options)

    params = parameters()
    set_gradients(params)
    with no_kernel_over_a_table():
        torch.compile(torch.optim.AdamW(params).step, backend=Backend())()
    assert "it reads a number of the host's, and printed Triton has no such operation" in str(found)


def test_without_a_cpp_compiler_a_step_on_a_gpu_is_compiled_as_one() -> None:
    found: list[Any] = []

    class Backend(CollageBackend):
        def lower(self, program: Any, example_inputs: Any, inductor_options: Any) -> Any:
            found.append(lower_in_parts(offline.to_cuda(program.gm), always=True))
            return super().lower(program, example_inputs, inductor_options)

    params = parameters()
    set_gradients(params)
    told = "the C++ that writes tables of addresses is not compiled: OSError: no compiler"
    step = torch.compile(torch.optim.SGD(params).step, backend=Backend())
    with (
        no_tables_of_addresses(OSError("no compiler")),
        pytest.warns(UserWarning, match=re.escape(told)) as warned,
    ):
        step()
    assert found == [Reason(told)]
    assert "install g++ and Python's headers" in str(warned[0].message)


# -- What a card is given


@functools.cache
def elements_kernel(strategy: Any) -> TableKernel:
    """The kernel for the elements of AdamW's state."""
    found: list[TableKernel] = []

    class Backend(CollageBackend):
        def lower(self, program: Any, example_inputs: Any, inductor_options: Any) -> Any:
            found.extend(
                kernel.function
                for kernel in step_on_cuda(program).kernels
                if any(column.kind > 0 for column in kernel.columns)
            )
            return super().lower(program, example_inputs, inductor_options)

    params = parameters(shapes=((64, 128), (64, 128)))
    set_gradients(params)
    torch.compile(torch.optim.AdamW(params).step, backend=Backend(strategy=strategy))()
    (kernel,) = found
    return kernel


def test_a_kernel_is_begun_when_it_is_printed() -> None:
    """Compiling takes seconds, for which the first launch would wait."""
    with kernels_begun() as begun:
        kernel = elements_kernel.__wrapped__("light")
    assert any(each is kernel for each in begun)


def test_the_code_that_is_shown_is_that_for_aligned_memory() -> None:
    """Tensors have aligned memory as torch makes them."""
    with generated_code() as code:
        kernel = elements_kernel.__wrapped__("light")
    assert kernel.source[True] in code
    assert kernel.source[False] not in code


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize(("strategy", "loaded", "stored"), [("plus", 6, 5), ("light", 5, 4)])
def test_full_blocks_are_accessed_16_bytes_at_a_time(
    strategy: str, loaded: int, stored: int, arch: str
) -> None:
    """Eight elements a thread, of 2 bytes: an access for each tensor; and nothing spills."""
    kernel = elements_kernel(strategy)
    code = machine_code(kernel.name, kernel.source[True], arch)
    ptx = code.stages["ptx"]
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) == loaded
    assert len(re.findall(r"st\.global\.v4\.b32", ptx)) == stored
    assert code.accesses[16] == loaded + stored
    assert code.registers <= 96
    assert code.spilled == 0
