"""What users see of the kernels that a GPU would be given."""

from __future__ import annotations

import pytest
import torch

from collage_fx import gpu_code
from collage_fx.choices import Architecture
from collage_fx.errors import InvalidOptionError
from collage_tools.cli import main
from collage_tools.gpu_code import imaginary_cuda
from collage_tools.gpu_code.sass import CARDS
from tests.support.substitutes import no_tables_of_addresses, no_triton
from tests.support.training import parameters

needs_triton = pytest.mark.skipif(
    not imaginary_cuda.have_triton(), reason="needs triton (Linux only) and numpy: pip install triton numpy"
)


@needs_triton
@pytest.mark.parametrize("arch", imaginary_cuda.ARCHITECTURES)
def test_kernels_of_a_step(arch: Architecture) -> None:
    optimizer = torch.optim.AdamW(parameters())
    before = torch.cuda.is_available(), torch.cuda.get_device_properties
    found = gpu_code(optimizer, arch=arch, strategy="light")
    assert (found.launches, found.reason) == (2, "")
    numbers, update = found.kernels
    assert (numbers.bytes_per_parameter, update.bytes_per_parameter) == (0, 18)
    assert sum(update.accesses) == 18
    assert min(update.accesses) > 0  # scalars are left out
    assert all(kernel.registers > 0 and not kernel.spilled for kernel in found.kernels)
    assert (numbers.tensors, update.tensors) == (2, 2)
    if arch.startswith("sm_"):  # the time of the bytes follows from the data sheet
        assert update.memory == pytest.approx(18 / CARDS[arch].bandwidth * 1e12)
        assert 0 < update.issue < 1.6 * update.memory
        assert update.milliseconds(1e9) == pytest.approx(max(update.issue, update.memory))
        assert f"{update.memory:.4g}" in found.to_table()
    assert not numbers.instructions
    for kernel in found.kernels:
        assert f"def {kernel.name}(" in kernel.source
        assert kernel.name in found.to_table()
        assert kernel.source.strip() in str(found)
    assert not optimizer.state
    assert (torch.cuda.is_available(), torch.cuda.get_device_properties) == before


@needs_triton
def test_the_same_kernel_has_the_same_name_and_others_have_others() -> None:
    names = [
        [kernel.name for kernel in gpu_code(kind(parameters())).kernels]
        for kind in (torch.optim.Adagrad, torch.optim.Adagrad, torch.optim.RMSprop)
    ]
    assert names[0] == names[1]
    assert not {*names[0]} & {*names[2]}


@needs_triton
def test_what_is_called_for_each_tensor_says_why() -> None:
    found = gpu_code(torch.optim.Adafactor(parameters(shapes=((8, 8),) * 2)))
    each = [kernel for kernel in found.kernels if not kernel.name]
    assert each
    assert all("neither elementwise" in kernel.reason for kernel in each)
    assert "For each tensor, because" in found.to_table()
    assert all(kernel.launches % kernel.tensors == 0 for kernel in each)
    for kernel in each:  # Inductor's own code is not compiled here
        facts = (
            kernel.bytes_per_parameter,
            kernel.registers,
            kernel.spilled,
            kernel.wide_accesses,
            kernel.ratio,
        )
        assert not any(facts), facts


@needs_triton
def test_every_launch_of_code_that_is_called_for_each_tensor_counts() -> None:
    """Muon's five Newton-Schulz iterations have three products each."""
    found = gpu_code(torch.optim.Muon(parameters(shapes=((32, 64),) * 2), lr=1e-3))
    of_stacks = [kernel for kernel in found.kernels if not kernel.name]
    assert sum(kernel.launches for kernel in found.kernels) == found.launches
    assert 5 * 3 < sum(kernel.launches for kernel in of_stacks) < 2 * 5 * 3
    assert found.launches - sum(kernel.launches for kernel in of_stacks) == len(found.kernels) - len(
        of_stacks
    )


@needs_triton
def test_single_bytes_are_accesses() -> None:
    _, update = gpu_code(torch.optim.SGD(parameters()), strategy="light", error_format="byte").kernels
    assert sorted(update.accesses) == [1, 1, 2, 2, 2]


@needs_triton
def test_a_step_that_is_no_kernels_over_tables_says_why() -> None:
    with no_tables_of_addresses(OSError("no compiler")), pytest.warns(UserWarning, match="Python's headers"):
        found = gpu_code(torch.optim.AdamW(parameters()))
    assert found.kernels == ()
    assert found.to_table().startswith("No kernels over tables for sm_90: ")


def test_what_is_missing_is_said() -> None:
    with pytest.raises(InvalidOptionError, match="did you mean sm_90"):
        gpu_code(torch.optim.AdamW(parameters()), arch="sm90")  # type: ignore[arg-type]
    with no_triton(), pytest.raises(InvalidOptionError, match="pip install triton numpy"):
        gpu_code(torch.optim.AdamW(parameters()))


@needs_triton
def test_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["explain", "--optimizer", "AdamW", "--shape", "64,64", "--code", "triton"]
    assert main([*asked, "--arch", "sm_80"]) == 0
    told = capsys.readouterr().out
    assert "For sm_80: 2 launches per step." in told
    assert "@triton.jit" in told
    assert main([*asked, "--arch", "sm_8"]) != 0
    assert "sm_80" in capsys.readouterr().err
    assert main([*asked[:-1], "ptx"]) != 0
    assert "'ptx' is not allowed" in capsys.readouterr().err
