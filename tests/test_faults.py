"""What goes wrong around a step: it works, or it is refused, and then nothing has been changed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from collage_fx import error_terms, full_value
from tests.support.processes import environment
from tests.support.substitutes import memory_for_error_terms
from tests.support.training import compiled, differences, everything, parameters, run_steps, set_gradients

ROOT = Path(__file__).parents[1]


def started(steps: int = 0) -> tuple[Optimizer, Callable[[], Any]]:
    optimizer = torch.optim.AdamW(parameters(), lr=1e-3, weight_decay=0.1)
    step = compiled(optimizer)
    run_steps(step, params_of(optimizer), range(steps))
    return optimizer, step


def params_of(optimizer: Optimizer) -> list[Parameter]:
    params: list[Parameter] = optimizer.param_groups[0]["params"]
    return params


def after(steps: int) -> dict[str, torch.Tensor]:
    """What a run leaves in which nothing goes wrong."""
    torch._dynamo.reset()
    return everything(started(steps)[0])


# Gradients. -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_gradient_that_is_not_finite_harms_its_own_element_alone(bad: float) -> None:
    """As in eager float32; also its error term stays a number, so that the value is what hi says."""
    optimizer, step = started(2)
    expected, other_step = started(2)
    set_gradients(params_of(expected), 2)
    other_step()
    set_gradients(params_of(optimizer), 2)
    gradient = params_of(optimizer)[0].grad
    assert gradient is not None
    gradient[1, 2] = bad
    step()
    spoiled = everything(optimizer)
    for name, tensor in everything(expected).items():
        if name.startswith("0.0.") and tensor.dim() == 2:
            differ = (tensor != spoiled[name]).nonzero().tolist()
            assert differ in ([[1, 2]], []), name
            if ".error." in name:
                assert spoiled[name].isfinite().all()
        else:
            assert torch.equal(tensor, spoiled[name]), name
    assert not full_value(params_of(optimizer)[0])[1, 2].isfinite()


# Interruptions. -------------------------------------------------------------------------------------------


@pytest.fixture
def alarm() -> Iterator[Callable[[float], None]]:
    """Have KeyboardInterrupt raised in some seconds."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds) and None
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("seconds", [0.05, 0.1, 0.15, 0.2, 0.25, 0.3])
def test_a_compilation_that_is_interrupted_changes_nothing(
    alarm: Callable[[float], None], seconds: float
) -> None:
    expected = after(3)
    torch._dynamo.reset()
    optimizer, step = started()
    start = everything(optimizer)
    set_gradients(params_of(optimizer), 0)
    try:
        alarm(seconds)
        step()
        alarm(0)
    except KeyboardInterrupt:
        left = everything(optimizer)  # state that torch makes before it is compiled may be there, zeros
        assert all(torch.equal(tensor, left[name]) for name, tensor in start.items())
        step()
    run_steps(step, params_of(optimizer), [1, 2])
    assert differences(expected, everything(optimizer)) == []


def test_a_process_forked_after_a_compilation_goes_on() -> None:
    expected = after(4)
    torch._dynamo.reset()
    optimizer, step = started(2)
    child = os.fork()
    if child == 0:
        run_steps(step, params_of(optimizer), [2, 3])
        os._exit(0 if differences(expected, everything(optimizer)) == [] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    run_steps(step, params_of(optimizer), [2, 3])
    assert differences(expected, everything(optimizer)) == []


# Memory and disks. ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails_at", [0, 1, 3])
def test_out_of_memory_for_an_error_term_changes_nothing(fails_at: int) -> None:
    expected = after(2)
    torch._dynamo.reset()
    optimizer, step = started()
    start = [p.detach().clone() for p in params_of(optimizer)]
    set_gradients(params_of(optimizer), 0)
    with memory_for_error_terms(fails_at), pytest.raises(Exception, match="out of memory"):
        step()
    assert all(torch.equal(p, before) for p, before in zip(params_of(optimizer), start, strict=True))
    assert all(not state.any() for p in params_of(optimizer) for state in optimizer.state[p].values())
    run_steps(step, params_of(optimizer), range(2))
    assert differences(expected, everything(optimizer)) == []


TRAINED = """
import sys, torch
{before}
from tests.test_faults import params_of, started
from tests.support.training import everything
torch.save(everything(started(3)[0]), sys.argv[1])
"""

#: No file can be written any more: what a full disk comes to, whoever asks.
FULL = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
import collage_fx
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
"""
ROOM_AGAIN = "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)\n"


def process(program: str, result: Path, cache: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, str(result)]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def test_a_cache_that_cannot_be_written_costs_speed_alone(tmp_path: Path) -> None:
    """Where there is no folder for it at all, ``torch.compile`` itself cannot be called."""
    program = TRAINED.format(before=FULL).replace("torch.save(", "found = (").replace(", sys.argv[1])", ")\n")
    program += ROOM_AGAIN + "torch.save(found, sys.argv[1])\n"
    running = process(program, tmp_path / "result", tmp_path / "cache")
    _, told = running.communicate()
    assert running.returncode == 0, told
    assert "UserWarning: collage_fx: " in told
    assert differences(after(3), torch.load(tmp_path / "result")) == []


def test_two_processes_that_compile_at_once_into_one_cache(tmp_path: Path) -> None:
    program = TRAINED.format(before="")
    both = [process(program, tmp_path / name, tmp_path / "cache") for name in ("one", "other")]
    for running in both:
        _, told = running.communicate()
        assert running.returncode == 0, told
    expected = after(3)
    for name in ("one", "other"):
        assert differences(expected, torch.load(tmp_path / name)) == []


# Parameters that become others. ---------------------------------------------------------------------------


def test_a_parameter_that_is_resized_is_refused_or_right() -> None:
    optimizer, step = started(2)
    p = params_of(optimizer)[0]
    before = {name: tensor for name, tensor in everything(optimizer).items() if name.startswith("0.1.")}
    p.data = p.data[:2].clone()
    p.grad = None
    for slot in ("exp_avg", "exp_avg_sq"):
        optimizer.state[p][slot] = optimizer.state[p][slot][:2].clone()
    set_gradients(params_of(optimizer), 2)
    start = full_value(p)
    with pytest.warns(UserWarning, match="has changed its dtype or shape|replaced by another"):
        step()
    assert (full_value(p) - start).abs().max() > 0
    assert all(each.shape == (2, 6) for each in error_terms(p))
    assert before.keys() == {name for name in everything(optimizer) if name.startswith("0.1.")}


def test_a_parameter_that_a_compiled_step_knows_cannot_be_swapped() -> None:
    """Torch refuses what it refuses for parameters that any compiled step has guards on."""
    optimizer, _ = started(2)
    before = everything(optimizer)
    with pytest.raises(RuntimeError, match="Cannot swap"):
        torch.utils.swap_tensors(params_of(optimizer)[0], Parameter(torch.full((4, 6), 3.0).bfloat16()))
    assert differences(before, everything(optimizer)) == []


def test_a_parameter_that_is_replaced_is_a_new_one() -> None:
    optimizer, step = started(2)
    fresh = Parameter(torch.full((4, 6), 3.0).bfloat16())
    optimizer.param_groups[0]["params"][0] = fresh
    set_gradients(params_of(optimizer), 2)
    plain = torch.optim.AdamW([Parameter(fresh.detach().double())], lr=1e-3, weight_decay=0.1)
    assert fresh.grad is not None
    params_of(plain)[0].grad = fresh.grad.double()
    with pytest.warns(UserWarning, match="replaced by another tensor"):
        step()
    plain.step()
    exact = params_of(plain)[0].detach()
    # The pair's precision; and float32's of the first update, which is lr times a quotient near 1.
    assert torch.all((full_value(fresh) - exact).abs() <= exact.abs() * 2.0**-16 + 1e-3 * 2.0**-20)


WITHOUT_A_COMPILER = """
import torch
from collage_fx import error_terms
from tests.support.training import compiled, parameters, run_steps

params = parameters()
run_steps(compiled(torch.optim.AdamW(params, lr=1e-3)), params, range(2))
assert any(term.any() for p in params for term in error_terms(p))
"""


def test_a_machine_without_a_compiler_is_told_so_and_nothing_else(tmp_path: Path) -> None:
    """The step is run operation by operation, with one warning: no traceback of what was begun ahead."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_COMPILER],
        env={**environment(), "CXX": "no-such-compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "collage-fx error CFX013" in done.stderr
    assert "Traceback" not in done.stderr
