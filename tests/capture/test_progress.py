"""While a step is compiled: lines of the log, a clock in a terminal, and Ctrl-C."""

from __future__ import annotations

import logging
import operator
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from collage_fx import CollageBackend, error_terms, install
from collage_fx.capture.recording import show_progress
from collage_fx.clock import is_taken
from collage_fx.torch_compat import PATCHES
from tests.support.substitutes import is_entered
from tests.support.training import (
    Descent,
    differences,
    everything,
    parameters,
    run_steps,
    set_gradients,
)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [re.sub(r"[\d.]+ s$", "# s", each.getMessage()) for each in caplog.records]


COMPILING = "Descent: compiling its step: about 10 s, or 2 s with a warm Inductor cache"
COMPILED = "Descent: 2 parameters compensated, 2.3 extra bytes/param, compiled in # s"


def test_the_log_says_when_a_step_is_compiled_and_when_it_is_done(caplog: pytest.LogCaptureFixture) -> None:
    params = parameters()
    optimizer = install(Descent(params))
    with caplog.at_level(logging.INFO, "collage_fx"):
        run_steps(optimizer.step, params, range(3))
    assert said(caplog)[0] == COMPILING
    assert said(caplog)[-1] == COMPILED
    assert said(caplog).count(COMPILING) == said(caplog).count(COMPILED) == 1


def test_recorded_steps_say_it_of_each_step_that_compiles(caplog: pytest.LogCaptureFixture) -> None:
    class Branching(Descent):
        @torch.no_grad()
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                if p.grad.abs().sum() > 0:
                    p.add_(p.grad, alpha=-self.defaults["lr"])

    params = parameters()
    optimizer = install(Branching(params))
    with caplog.at_level(logging.INFO, "collage_fx"):
        run_steps(optimizer.step, params, [0])
        lines = said(caplog)
        assert COMPILING.replace("Descent", "Branching") in lines[lines.index(recorded(lines)) :]
        assert re.match(r"Branching: .* compensated, .* compiled in # s", lines[-1])
        caplog.clear()
        run_steps(optimizer.step, params, range(1, 4))
    assert not said(caplog)


def recorded(lines: list[str]) -> str:
    (line,) = (each for each in lines if "are run by Python and recorded" in each)
    return line


def test_a_terminal_shows_a_clock() -> None:
    program = """
        import time
        from collage_fx import clock
        from collage_fx.capture import recording
        clock.PATIENCE = clock.PERIOD = 0.1
        with recording.show_progress("Descent"):
            with recording.show_progress("another"):
                time.sleep(0.35)
        clock.PATIENCE = 1000
        with recording.show_progress("Quick"):
            time.sleep(0.35)
        """
    master, slave = pty.openpty()
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], stderr=slave, check=True)
    os.close(slave)
    written = os.read(master, 10_000).decode()
    assert "\rcollage_fx: compiling the step of Descent, " in written
    assert written.endswith(" \r")
    assert "another" not in written
    assert "Quick" not in written
    assert "about 10 s" not in written


def test_a_log_file_has_the_estimate_once() -> None:
    """By a program that has configured no logging, as a warning, and of its first step alone."""
    program = """
        import torch
        import collage_fx
        torch.set_num_threads(1)
        for kind in (torch.optim.SGD, torch.optim.Adagrad):
            p = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
            p.grad = torch.ones_like(p)
            collage_fx.install(kind([p], lr=0.1)).step()
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    )
    lines = [line for line in done.stderr.splitlines() if "compiling" in line]
    assert lines == [COMPILING.replace("Descent", "SGD")]


@pytest.mark.parametrize(
    ("stop", "is_compiled", "options"),
    [
        (signal.SIGINT, False, {}),
        (signal.SIGINT, True, {"bytes_per_parameter": 8}),
        (signal.SIGTERM, True, {}),
    ],
    ids=["before", "after, 8 bytes", "SIGTERM"],
)
def test_a_compilation_that_is_interrupted_leaves_everything_as_before(
    stop: signal.Signals, is_compiled: bool, options: Any
) -> None:
    """By Ctrl-C, or by a signal on which a program exits, before and after the backend has compiled."""

    class Stopped(CollageBackend):
        def __call__(self, *arguments: Any, **keywords: Any) -> Any:
            if is_compiled:
                super().__call__(*arguments, **keywords)
            signal.raise_signal(stop)
            raise AssertionError("the signal has not been seen")

    def leave(*_: object) -> None:
        sys.exit(1)

    shapes = [(64, 64), (5,)]  # the first is packed
    params, others = parameters(shapes=shapes), parameters(shapes=shapes)
    undisturbed = install(torch.optim.AdamW(others), **options)
    run_steps(undisturbed.step, others, range(3))
    torch._dynamo.reset()

    optimizer = install(torch.optim.AdamW(params), backend=Stopped(**options))
    set_gradients(params)
    before, replaced = [p.detach().clone() for p in params], [each.is_in_place for each in PATCHES]
    gradients = [p.grad for p in params]
    # A process that a shell has started in the background ignores SIGINT.
    previous = signal.signal(stop, leave if stop is signal.SIGTERM else signal.default_int_handler)
    try:
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            optimizer.step()
    finally:
        signal.signal(stop, previous)
    assert all(map(torch.equal, params, before))
    assert not any(term.any() for p in params for term in error_terms(p))
    assert not optimizer.state
    assert all(map(operator.is_, [p.grad for p in params], gradients))
    assert [each.is_in_place for each in PATCHES] == replaced
    assert not any(is_entered(each) for each in PATCHES)
    assert not is_taken.get()

    install(optimizer, **options)
    run_steps(optimizer.step, params, range(3))
    assert not differences(everything(optimizer), everything(undisturbed))


def around(optimizer: Optimizer) -> Callable[[], None]:
    def train_step() -> None:
        optimizer.step()

    return train_step


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor, Descent])
@pytest.mark.parametrize("of", [lambda optimizer: optimizer.step, around], ids=["step", "around"])
def test_the_clock_is_on_while_graphs_are_compiled(make: Any, of: Any) -> None:
    """Whichever function of torch's they are captured from: the wrapper around a step, or that itself."""
    is_on = list[bool]()

    class Looking(CollageBackend):
        def __call__(self, *arguments: Any, **options: Any) -> Any:
            is_on.append(is_taken.get())
            return super().__call__(*arguments, **options)

    params = parameters()
    run_steps(torch.compile(of(make(params)), backend=Looking()), params, range(1))
    assert is_on
    assert all(is_on)


def test_what_fails_is_not_said_to_be_compiled(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "collage_fx"),
        pytest.raises(ZeroDivisionError),
        show_progress("Descent"),
    ):
        raise ZeroDivisionError
    assert said(caplog) == [COMPILING]
    with show_progress("Descent"):
        assert torch.get_num_threads() > 0
