"""Steps as a GPU runs them, with Triton kernels launched once for all tensors, in Triton's interpreter.

    with LaunchedSteps() as steps:
        outcome = steps.run("AdamW", options={"strategy": "light"}, shapes=[(33, 17)], lr=1e-3)

Triton decides when it is imported whether it interprets, so the steps are taken in a process of its own: this
module, run as a program. It captures a step on the CPU, moves the rewritten graph to "cuda", lowers it there
as for a card, and calls what comes of it, tables and all, with the tensors where they are, on the CPU. What
differs from a card is said in ``_triton_worker.py``.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["LaunchedSteps", "Outcome", "on_the_cpu", "step_on_cuda"]


@dataclass(frozen=True)
class Outcome:
    """What became of a step.

    Attributes:
        different: tensors of which elements have other bits than after eager's steps, and how many.
        changed: how many tensors the steps have changed, and how many there are, without counts.
        launches: kernels that are launched once for all their tensors.
        calls: kernels that are called for each of their tensors.
        unaligned: how many of the former have tensors at addresses that are not aligned.
        on_host: how many kernels run on the CPU.
        reasons: why kernels are called for each.
        measured: of the sums that metrics are made of, which differ from the twin's, and by what share of the
            most that their terms can add up to; and of counts, by how many.
    """

    different: dict[str, int] = field(default_factory=dict)
    changed: tuple[int, int] = (0, 0)
    launches: int = 0
    calls: int = 0
    unaligned: int = 0
    on_host: int = 0
    reasons: tuple[str, ...] = ()
    measured: dict[str, float] = field(default_factory=dict)


class LaunchedSteps:
    """The process that takes the steps. A context manager: it ends on exit."""

    def __enter__(self) -> LaunchedSteps:
        settings = {"TRITON_INTERPRET": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.launched"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **settings},
        )
        return self

    def __exit__(self, *exception: object) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.process.wait(60)

    def run(self, optimizer: str, **case: Any) -> Outcome:
        """Take some steps with launched kernels, and with the eager twin.

        Args:
            optimizer: a name in ``torch.optim``.
            case: the arguments of :func:`_outcome`.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"optimizer": optimizer, **case}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended with code {self.process.wait()}; see its stderr above")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"the step failed:\n{answer['error']}")
        answer["changed"], answer["reasons"] = tuple(answer["changed"]), tuple(answer["reasons"])
        return Outcome(**answer)


def step_on_cuda(program: Any, keep_on_cpu: Sequence[str] = ()) -> Any:
    """The step that a GPU would take for a program that was captured on the CPU: a ``StepInParts``.

    Args:
        program: after the pipeline; it is left as it is.
        keep_on_cpu: placeholders that are on the host there, too.
    """
    from dataclasses import replace

    from collage_fx.lowering import step_in_parts
    from collage_fx.runtime import StepInParts
    from tests.support import triton_offline as offline

    gm = offline.to_cuda(program.gm, keep_on_cpu=keep_on_cpu)
    with offline.imaginary_cuda():
        step = step_in_parts(replace(program, gm=gm))
    assert isinstance(step, StepInParts), step
    return step


def on_the_cpu(step: Any) -> Any:
    """The step, taken with tensors that are on the CPU in truth."""
    from dataclasses import replace
    from functools import partial

    import torch

    cpu = torch.device("cpu")
    step._allocated = [(i, (*memory[:3], cpu)) for i, memory in step._allocated]
    constants = [partial(each, device=cpu) if callable(each) else each for each in step.plan.constants]
    step.plan = replace(step.plan, constants=constants)
    for launches in step._launches.values():
        launches.device = cpu
    return step


def _outcome(
    optimizer: str,
    shapes: Sequence[tuple[int, ...]],
    options: dict[str, Any],
    steps: int = 3,
    offset: int = 0,
    host: Sequence[str] = (),
    scheduled: bool = False,
    **keywords: Any,
) -> Outcome:
    """Take the steps.

    Args:
        optimizer: a name in ``torch.optim``.
        shapes: of the parameters, bfloat16.
        options: of the backend.
        steps: how many.
        offset: elements by which gradients begin behind an aligned address.
        host: ``"counters"``: numbers that are float32 are kept on the host.
        scheduled: whether the learning rate is another one at each step.
        keywords: of the optimizer.
    """
    import torch
    from torch import Tensor

    from collage_fx.runtime.launches import Launch
    from tests.support.agreement import differences
    from tests.support.optimizers import CompiledOptimizer, Tensors, gradients
    from tests.support.twin import TwinBackend

    aten = torch.ops.aten

    class LaunchedBackend(TwinBackend):
        """The twin's backend, which also makes the step that a GPU would take."""

        def lower(self, program: Any, example_inputs: Any, inductor_options: Any) -> Any:
            inputs = program.gm.graph.find_nodes(op="placeholder")
            numbers = [
                node for node in inputs if isinstance(node.meta["val"], Tensor) and not node.meta["val"].dim()
            ]
            of_host = {torch.float64, *([torch.float32] if "counters" in host else [])}
            kept = [node.name for node in numbers if node.meta["val"].dtype in of_host]
            self.step = step_on_cuda(program, kept)
            on_the_cpu(self.step)
            lowered = super().lower(program, example_inputs, inductor_options)
            # But on the CPU, Inductor multiplies by the reciprocal of a constant.
            for node in self.graphs[-1].graph.nodes if self.graphs else ():
                if node.target is aten.div.Tensor and isinstance(node.args[1], float):
                    node.target, node.args = aten.mul.Tensor, (node.args[0], 1 / node.args[1])
            return lowered

    class Rig(CompiledOptimizer):
        taken = 0

        def step(self, grads: Sequence[Tensor]) -> None:
            self.taken += 1
            if scheduled:
                self.optimizer.param_groups[0]["lr"] = 1e-3 / self.taken
            for parameter, grad in zip(self.parameters, grads, strict=True):
                memory = torch.empty(offset + grad.numel(), dtype=parameter.dtype)
                parameter.grad = memory[offset:].view(grad.shape).copy_(grad)
            self.compiled()

    backend = LaunchedBackend(compiles=False, **options)
    backend.engine = "eager"
    rig = Rig(shapes, lambda ps: getattr(torch.optim, optimizer)(ps, **keywords), backend)
    grads = list(gradients(shapes, steps))
    for grad in grads[:2]:  # in which states are born, and a number is found to change
        rig.step(grad)
    start, graphs = rig.tensors(), len(backend.graphs)

    def after(engine: Any) -> tuple[Tensors, Any]:
        rig.restore(start)
        rig.taken, backend.engine = 2, engine
        backend.forget_metrics()
        for grad in grads:
            rig.step(grad)
        measured = backend.metrics() if backend.options.metrics else {}
        return rig.tensors(), [measured[step] for step in measured]

    eager, of_eager = after("eager")
    launched, of_launched = after(backend.step)
    assert len(backend.graphs) == graphs, "the step was compiled again"
    kernels = backend.step.on_devices
    each = [group for group in kernels if isinstance(group, list)]
    return Outcome(
        differences(launched, eager),
        (len(_uncounted(differences(launched, start))), len(_uncounted(start))),
        len(kernels) - len(each),
        len(each),
        sum(isinstance(group, Launch) and False in group.programs for group in kernels),
        len(backend.step.on_host),
        tuple(str(reason) for group in each for _, reason in group[0].kernel.reasons),
        _different_sums(of_launched, of_eager),
    )


def _uncounted(names: Iterable[str]) -> list[str]:
    """Leave out counts, which stay the same where no rounding is dithered."""
    return [name for name in names if not name.endswith(".count")]


def _different_sums(found: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The differences of measured steps."""
    from collage_fx.metrics.rows import COUNTS, PRODUCTS

    factors = {"along_hi": ("intended", "effective_hi"), "along": ("intended", "effective")}
    different = {}
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.keys() == other.keys()
        for name, quality in other.items():
            for what in PRODUCTS:
                most = 1.0
                for factor in factors.get(what, (what, what)):
                    most *= getattr(quality, factor) ** 0.5
                apart = abs(getattr(one[name], what) - getattr(quality, what))
                if apart:
                    different[f"{name}, step {i}: {what}"] = apart / most
            for what in COUNTS:
                if apart := abs(getattr(one[name], what) - getattr(quality, what)):
                    different[f"{name}, step {i}: {what}"] = apart
            for size, (a, b) in enumerate(zip(one[name].sizes, quality.sizes, strict=True)):
                if a != b:
                    different[f"{name}, step {i}: size {size}"] = abs(a - b)
    return different


def _serve() -> None:
    import dataclasses
    import traceback

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a kernel's prints must not be taken for answers
    from tests.support import _triton_worker as worker

    worker.mend_interpreter()
    worker.mend_runtime()
    for line in sys.stdin:
        try:
            answer = dataclasses.asdict(_outcome(**json.loads(line)))
        except Exception:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
