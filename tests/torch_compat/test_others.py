"""What importing collage_fx, and compiling with it, changes for others: nothing."""

import gc
import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import collage_fx
from collage_fx import CollageBackend
from collage_fx.torch_compat import PATCHES
from tests.support.substitutes import is_entered
from tests.support.training import Descent, parameters, run_steps

ROOT = Path(collage_fx.__file__).parents[1]

#: A process that compiles training steps of a model and of optimizers, and tells the code and the bits.
PLAIN = """
import hashlib, json, math, sys
from unittest import mock
import torch
from torch import nn
from torch._inductor.graph import GraphLowering

if sys.argv[1] == "imported":
    import collage_fx

codes = []
torch.manual_seed(0)


class Corrected(torch.optim.Optimizer):
    \"\"\"A bias correction by ``math.pow``, and a count that is a number.\"\"\"

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2, "steps": 0})

    @torch.no_grad()
    def step(self):
        (group,) = self.param_groups
        group["steps"] += 1
        for p in group["params"]:
            m = self.state[p].setdefault("m", torch.zeros_like(p))
            m.lerp_(p.grad, 0.1)
            p.add_(m, alpha=-group["lr"] / (1 - math.pow(0.9, group["steps"])))


def bits(tensors):
    return [hashlib.sha256(t.detach().float().numpy().tobytes()).hexdigest() for t in tensors]


def trained(model, optimizer, **options):
    batch = torch.randn(16, 24, dtype=torch.bfloat16)
    forward = torch.compile(model, **options)
    step = torch.compile(optimizer.step, **options)
    for _ in range(3):
        optimizer.zero_grad()
        (forward(batch).float() ** 2).sum().backward()
        step()
    state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    return bits([*model.parameters(), *state])


def model():
    layers = [nn.Linear(24, 40), nn.LayerNorm(40), nn.GELU(), nn.Linear(40, 8), nn.Softmax(-1)]
    return nn.Sequential(*layers).to(torch.bfloat16)


found = []
options = eval(sys.argv[2])
for optimizer in (torch.optim.AdamW, Corrected):
    torch._dynamo.reset()
    trains = model()
    with mock.patch.object(GraphLowering, "save_output_code", codes.append):
        found += trained(trains, optimizer(trains.parameters()), **options)
print(json.dumps([codes, found]))
"""

#: Each process writes its code itself, and calls the C++ compiler only for what none has compiled before.
ENVIRONMENT = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}

#: From what a process does first, and what it gives ``torch.compile``, to the codes and the bits.
Compiling = Callable[[str, str], list[Any]]


@pytest.fixture(scope="module")
def compiling(tmp_path_factory: pytest.TempPathFactory) -> Compiling:
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("inductor"))}

    def codes_and_bits(imported: str, options: str) -> list[Any]:
        run = subprocess.run(
            [sys.executable, "-c", PLAIN, imported, options],
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT, **cache},
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stderr
        codes, bits = json.loads(run.stdout.splitlines()[-1])
        return [codes, bits]

    return codes_and_bits


@pytest.fixture(scope="module")
def inductors(compiling: Compiling) -> list[Any]:
    return compiling("not imported", "{'backend': 'inductor'}")


@pytest.mark.slow
def test_plain_inductor_has_the_same_code_and_bits_once_collage_fx_is_imported(
    compiling: Compiling, inductors: list[Any]
) -> None:
    assert len(inductors[0]) >= 4
    assert compiling("imported", "{'backend': 'inductor'}") == inductors


@pytest.mark.slow
def test_strategy_none_has_the_code_and_bits_of_plain_inductor(
    compiling: Compiling, inductors: list[Any]
) -> None:
    options = "{'backend': collage_fx.CollageBackend(strategy='none')}"
    assert compiling("imported", options) == inductors


class Looking(CollageBackend):
    """Calls a function while it compiles."""

    def __init__(self, look: Callable[[], object]) -> None:
        super().__init__()
        self.look = look

    def __call__(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        self.look()
        return super().__call__(*args, **kwargs)


def _compiled_while(look: Callable[[], object]) -> None:
    params = parameters(shapes=[(3,)])
    run_steps(torch.compile(Descent(params).step, backend=Looking(look)), params, [0])


BACKENDS: dict[str, Any] = {"eager": "eager", "collage": CollageBackend()}


def _power(backend: Any, base: float, exponent: float, *, dynamic: bool) -> list[float] | str:
    """What ``math.pow`` gives in a compiled function, or the name of what it raises."""
    torch._dynamo.reset()
    power = torch.compile(lambda x, b, e: x * math.pow(b, e), backend=backend, dynamic=dynamic)
    try:
        return list(power(torch.ones(1, dtype=torch.float64), base, exponent).tolist())
    except Exception as error:
        return type(error).__name__


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("base", "exponent", "expected"),
    [
        (-8.0, 1 / 3, "ValueError"),
        (0.0, -1.0, "ValueError"),
        (2.0, 0.5, [2.0**0.5]),
        (-2.0, 3.0, [-8.0]),
        (0.0, 2.0, [0.0]),
    ],
)
def test_math_pow_means_what_it_means(base: float, exponent: float, expected: object, backend: str) -> None:
    assert _power(BACKENDS[backend], base, exponent, dynamic=False) == expected
    # Of numbers that change, what Dynamo itself says of it.
    symbolic = _power(BACKENDS[backend], base, exponent, dynamic=True)
    assert symbolic == ("TorchRuntimeError" if expected == "ValueError" else expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_function_that_is_disabled_for_dynamo_alone_is_not_compiled(backend: str) -> None:
    """Dynamo knows it by its caller, and goes by Python's frames between the two."""
    compiling = []

    @torch.compiler.disable(recursive=False)
    def disabled(x: Tensor) -> Tensor:
        compiling.append(torch.compiler.is_compiling())
        return x + 1

    x = torch.zeros(3)
    torch.compile(lambda x: disabled(x) * 2, backend=BACKENDS[backend])(x)
    assert compiling == [False]


class Through(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_who_would_not_wait_for_dynamo_does_not_wait_for_us() -> None:
    """What runs under a dispatch mode is not compiled, so that it needs none of Dynamo's locks."""
    done = threading.Event()

    def run_under_a_mode() -> None:
        with Through():
            torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(2))
        done.set()

    def look() -> None:
        thread = threading.Thread(target=run_under_a_mode)
        thread.start()
        waited.append(not done.wait(20))

    waited: list[bool] = []
    _compiled_while(look)
    assert waited == [False]


def test_the_collector_looks_at_young_objects_alone_while_a_step_is_compiled() -> None:
    gc.unfreeze()  # what this suite has frozen
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    seen: list[tuple[bool, tuple[int, ...]]] = []
    _compiled_while(lambda: seen.append((gc.isenabled(), gc.get_threshold())))
    ((is_on, (*of_young, of_old)),) = seen
    assert is_on
    assert of_young == [*before[:2]]
    assert of_old > 1000 * before[2]
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() <= frozen


def test_the_collector_is_as_before_after_a_refusal() -> None:
    def refuse() -> None:
        raise KeyError("of the test")

    before = gc.get_threshold()
    with pytest.raises(Exception, match="of the test"):
        _compiled_while(refuse)
    assert gc.get_threshold() == before


def test_what_a_program_has_frozen_stays_frozen() -> None:
    gc.freeze()
    try:
        _compiled_while(lambda: None)
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_what_a_program_has_frozen_is_counted_once() -> None:
    """Python counts frozen objects one by one, which took a second for each of a step's eight conversions."""
    gc.freeze()
    try:
        with mock.patch("gc.get_freeze_count", wraps=gc.get_freeze_count) as count:
            _compiled_while(lambda: None)
            _compiled_while(lambda: None)
    finally:
        gc.unfreeze()
    assert count.call_count <= 1


def test_a_patch_is_there_for_the_process_or_while_a_step_is_compiled() -> None:
    seen: list[set[str]] = []
    in_another_thread: list[bool] = []

    def look() -> None:
        seen.append({patch.name for patch in PATCHES if is_entered(patch)})
        thread = threading.Thread(
            target=lambda: in_another_thread.append(any(is_entered(patch) for patch in PATCHES))
        )
        thread.start()
        thread.join()

    _compiled_while(look)
    assert seen == [{patch.name for patch in PATCHES if patch.during == "conversions" and patch.applies}]
    assert in_another_thread == [False]
    in_place = {patch.name for patch in PATCHES if patch.is_in_place}
    assert in_place <= {patch.name for patch in PATCHES if patch.during == "the process"}
