"""``python -m tests.error_page``: write ``docs/errors/``, a page for each kind of error, and a list of them.

What a kind means, and what to do, is its docstring; the examples are run, and a page shows the messages that
they raise. The last statement of an example is the one that raises.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import os
import re
import tempfile
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch.optim import Optimizer

from collage_fx import errors
from tests.support.training import differences, everything

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "errors"
INDEX = FOLDER / "index.md"

#: What the last paragraph of a kind's docstring begins with.
REMEDY = "What to do: "


@dataclass(frozen=True)
class Example:
    """A program that raises, or warns of, a kind of error.

    Attributes:
        caption: what it does, in a line.
        program: as a reader would paste it.
        is_late: whether something has changed when the step is refused; the caption says what.
    """

    caption: str
    program: str
    is_late: bool = False


EXAMPLES: dict[type[errors.CollageError], tuple[Example, ...]] = {
    errors.InvalidOptionError: (
        Example(
            "A value that is misspelt.",
            """\
            from collage_fx import CollageBackend

            CollageBackend(strategy="pluss")
            """,
        ),
        Example(
            "An option that does not exist, given by way of torch.compile: read at the first call.",
            """\
            import torch
            from torch.nn import Parameter

            p = Parameter(torch.ones(8, dtype=torch.bfloat16))
            p.grad = torch.ones_like(p)
            optimizer = torch.optim.SGD([p], lr=0.1)
            step = torch.compile(optimizer.step, backend="collage", options={"formats": "mcf"})
            step()
            """,
        ),
        Example(
            "A budget that is too small for this optimizer.",
            """\
            import torch
            from torch.nn import Parameter
            from collage_fx import install

            p = Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
            p.grad = torch.ones_like(p)
            optimizer = install(torch.optim.AdamW([p]), bytes_per_parameter=3)
            optimizer.step()
            """,
        ),
        Example(
            "Two options that exclude each other.",
            """\
            from collage_fx import CollageBackend

            CollageBackend(arithmetic="native", error_format="exact")
            """,
        ),
    ),
    errors.UnsupportedOptimizerError: (
        Example(
            "An optimizer that decides by losses what to compute.",
            """\
            import torch
            from torch.nn import Parameter
            from collage_fx import CollageBackend

            p = Parameter(torch.ones(8, dtype=torch.bfloat16))
            p.grad = torch.ones_like(p)
            optimizer = torch.optim.LBFGS([p])
            step = torch.compile(optimizer.step, backend=CollageBackend())
            step(lambda: p.sum())
            """,
        ),
        Example(
            "An optimizer that updates parameters elsewhere: its step can only raise.",
            """\
            import torch
            from torch.nn import Parameter
            from collage_fx import install


            class InHooks(torch.optim.Optimizer):
                def __init__(self, params):
                    super().__init__(params, {})

                def step(self, closure=None):
                    raise RuntimeError("parameters are updated in the backward pass")


            install(InHooks([Parameter(torch.ones(8, dtype=torch.bfloat16))]))
            """,
        ),
        Example(
            "An update that is one opaque operator.",
            """\
            import torch
            from torch.nn import Parameter
            from collage_fx import install


            class Fused(torch.optim.SGD):
                @torch.no_grad()
                def step(self):
                    params = self.param_groups[0]["params"]
                    how = dict.fromkeys(("weight_decay", "momentum", "dampening"), 0.0)
                    flags = dict.fromkeys(("nesterov", "maximize", "is_first_step"), False)
                    torch._fused_sgd_(params, [p.grad for p in params], [], lr=0.1, **how, **flags)


            p = Parameter(torch.ones(8, dtype=torch.bfloat16))
            p.grad = torch.ones_like(p)
            optimizer = install(Fused([p], lr=0.1))
            optimizer.step()
            """,
        ),
    ),
    errors.UnsupportedTensorError: (
        Example(
            "A complex parameter.",
            """\
            import torch
            from torch.nn import Parameter
            from collage_fx import install

            p = Parameter(torch.ones(8, dtype=torch.complex64))
            p.grad = torch.ones_like(p)
            optimizer = install(torch.optim.SGD([p], lr=0.1))
            optimizer.step()
            """,
        ),
        Example(
            "A sparse gradient.",
            """\
            import torch
            from collage_fx import install

            table = torch.nn.Embedding(8, 4, sparse=True, dtype=torch.bfloat16)
            table(torch.tensor([2, 3])).sum().backward()
            optimizer = install(torch.optim.SGD(table.parameters(), lr=0.1))
            optimizer.step()
            """,
        ),
    ),
    errors.AliasedStateError: (
        Example(
            "Two parameters that are views of one tensor and overlap.",
            """\
            import torch
            from torch.nn import Parameter
            from collage_fx import install

            memory = torch.ones(12, dtype=torch.bfloat16)
            params = [Parameter(memory[:8]), Parameter(memory[4:])]
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer = install(torch.optim.SGD(params, lr=0.1))
            optimizer.step()
            """,
        ),
        Example(
            "Tied weights, given twice.",
            """\
            import torch
            from collage_fx import install

            table = torch.nn.Embedding(8, 4, dtype=torch.bfloat16)
            head = torch.nn.Linear(4, 8, bias=False, dtype=torch.bfloat16)
            head.weight = table.weight
            head(table(torch.tensor([2, 3]))).sum().backward()
            optimizer = install(torch.optim.SGD([table.weight, head.weight], lr=0.1))
            optimizer.step()
            """,
        ),
    ),
    errors.ConflictingErrorFormatError: (
        Example(
            "Two steps of one optimizer, compiled with different formats.",
            """\
            import torch
            from torch.nn import Parameter
            from collage_fx import CollageBackend

            p = Parameter(torch.ones(8, dtype=torch.bfloat16))
            p.grad = torch.ones_like(p)
            optimizer = torch.optim.SGD([p], lr=0.1)
            torch.compile(optimizer.step, backend=CollageBackend())()
            other = torch.compile(optimizer.step, backend=CollageBackend(error_format="mcf"))
            other()
            """,
        ),
        Example(
            "A plain step after one with error terms.",
            """\
            import torch
            from torch.nn import Parameter
            from collage_fx import CollageBackend

            p = Parameter(torch.ones(8, dtype=torch.bfloat16))
            p.grad = torch.ones_like(p)
            optimizer = torch.optim.SGD([p], lr=0.1)
            torch.compile(optimizer.step, backend=CollageBackend())()
            plain = torch.compile(optimizer.step, backend=CollageBackend(strategy="none"))
            plain()
            """,
        ),
    ),
    errors.CheckpointMismatchError: (
        Example(
            "The state dict of a model with other shapes.",
            """\
            import torch
            from torch.nn import Parameter
            from collage_fx import install

            p, q = (Parameter(torch.ones(n, dtype=torch.bfloat16)) for n in (8, 6))
            p.grad = torch.ones_like(p)
            optimizer = install(torch.optim.SGD([p], lr=0.1))
            optimizer.step()
            other = install(torch.optim.SGD([q], lr=0.1))
            other.load_state_dict(optimizer.state_dict())
            """,
        ),
        Example(
            "A state dict from which the state has been taken, but not the error terms of it.",
            """\
            import torch
            from torch.nn import Parameter
            from collage_fx import install

            p = Parameter(torch.ones(8, dtype=torch.bfloat16))
            p.grad = torch.ones_like(p)
            optimizer = install(torch.optim.RMSprop([p], lr=0.1))
            optimizer.step()
            saved = optimizer.state_dict()
            del saved["state"][0]["square_avg"]
            optimizer.load_state_dict(saved)
            """,
        ),
        Example(
            "Weights that are not all there.",
            """\
            import torch
            from collage_fx import load_full_state_dict

            model = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            load_full_state_dict(model, optimizer, {"weight": torch.ones(4, 4)})
            """,
        ),
        Example(
            "A file that is cut off.",
            """\
            from pathlib import Path
            import torch
            from collage_fx import load_full_state_dict, save_full_state_dict

            model = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            save_full_state_dict(model, "weights.safetensors")
            file = Path("weights.safetensors")
            file.write_bytes(file.read_bytes()[:4])
            load_full_state_dict(model, optimizer, file)
            """,
        ),
    ),
    errors.ChangedTensorError: (
        Example(
            "A parameter that gets other strides.",
            """\
            import torch
            from torch.nn import Parameter
            from collage_fx import install

            p = Parameter(torch.ones(8, 4, dtype=torch.bfloat16))
            p.grad = torch.ones_like(p)
            optimizer = install(torch.optim.SGD([p], lr=0.1))
            optimizer.step()
            p.data = torch.ones(4, 8, dtype=torch.bfloat16).t()
            optimizer.step()
            """,
        ),
        Example(
            "A parameter that has become one of another dtype.",
            """\
            import torch
            from torch.nn import Parameter
            from collage_fx import install

            p = Parameter(torch.ones(8, dtype=torch.bfloat16))
            p.grad = torch.ones_like(p)
            optimizer = install(torch.optim.SGD([p], lr=0.1))
            optimizer.step()
            p.data = p.data.half()
            p.grad = torch.ones_like(p)
            optimizer.step()
            """,
        ),
    ),
    errors.LostErrorTermsError: (
        Example(
            "What runs inside of a compiled step, without the step around it that keeps the tensor alive.",
            """\
            import torch
            from collage_fx.graph import InputInfo, Role
            from collage_fx.numerics import ERROR_FORMATS
            from collage_fx.runtime.step import CompensatedStep, bind

            p = torch.ones(8, dtype=torch.bfloat16)
            info = InputInfo("weight", "p", Role.PARAMETER, p, bound=True)
            binding = bind(0, info, ERROR_FORMATS["exact"], reads=False)
            step = CompensatedStep(print, [binding])
            del p, info
            step([])
            """,
        ),
    ),
    errors.RecompileLimitError: (
        Example(
            "A function without an optimizer, of which an argument is another one at each call.",
            """\
            import torch
            from collage_fx import CollageBackend

            weight = torch.ones(8, dtype=torch.bfloat16)
            average = torch.ones(8, dtype=torch.bfloat16)


            @torch.compile(backend=CollageBackend())
            def follow(phase):
                if phase != "frozen":
                    average.lerp_(weight, 0.01)


            torch._dynamo.config.recompile_limit = 1  # 8, if it is not set: the 33rd phase would be refused
            for phase in "abcd":
                follow(phase)
            follow("e")
            """,
        ),
    ),
    errors.GraphBreakError: (
        Example(
            "A function with a loop that Dynamo cannot capture, which updates weights and may differentiate.",
            """\
            import torch
            from torch.nn import Parameter
            from collage_fx import CollageBackend

            weights = [Parameter(torch.ones(8, dtype=torch.bfloat16))]


            @torch.compile(backend=CollageBackend())
            def shrink():
                for p in weights:
                    if p.isfinite().all():
                        p.data.mul_(0.99)


            shrink()
            """,
        ),
    ),
    errors.EagerStepError: (
        Example(
            "A step by the optimizer's own method.",
            """\
            import torch
            from torch.nn import Parameter
            from collage_fx import CollageBackend

            p = Parameter(torch.ones(8, dtype=torch.bfloat16))
            p.grad = torch.ones_like(p)
            optimizer = torch.optim.SGD([p], lr=0.1)
            step = torch.compile(optimizer.step, backend=CollageBackend())
            step()
            optimizer.step()
            """,
        ),
        Example(
            "A loop that calls the optimizer's own method, and never what `torch.compile` has returned.",
            """\
            import torch
            from torch.nn import Parameter
            from collage_fx import CollageBackend

            p = Parameter(torch.ones(8, dtype=torch.bfloat16))
            p.grad = torch.ones_like(p)
            optimizer = torch.optim.SGD([p], lr=0.1)
            step = torch.compile(optimizer.step, backend=CollageBackend())
            optimizer.step()
            optimizer.step()
            """,
        ),
        Example(
            "Another optimizer of the same parameters that is not compiled.",
            """\
            import torch
            from torch.nn import Parameter
            from collage_fx import install

            p = Parameter(torch.ones(8, dtype=torch.bfloat16))
            p.grad = torch.ones_like(p)
            sgd = install(torch.optim.SGD([p], lr=0.1))
            sgd.step()
            torch.optim.AdamW([p]).step()
            """,
        ),
        Example(
            "A compiled model, and a step that is not compiled (a warning).",
            """\
            import torch
            from collage_fx import CollageBackend

            model = torch.compile(torch.nn.Linear(4, 4, dtype=torch.bfloat16), backend=CollageBackend())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                model(torch.ones(4, dtype=torch.bfloat16)).sum().backward()
                optimizer.step()
            """,
        ),
    ),
    errors.UncompensatedParameterError: (
        Example(
            "A matrix product of bfloat16 tensors.",
            """\
            import torch
            from torch.nn import Parameter
            from collage_fx import install


            class Own(torch.optim.SGD):
                @torch.no_grad()
                def step(self):
                    for p in self.param_groups[0]["params"]:
                        p.copy_(p @ p.grad)


            p = Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
            p.grad = torch.ones_like(p)
            optimizer = install(Own([p], lr=0.1))
            optimizer.step()
            """,
        ),
        Example(
            "Rounding by operations on bits, where x.to(p.dtype) would do.",
            """\
            import torch
            from torch.nn import Parameter
            from collage_fx import install


            class Own(torch.optim.SGD):
                @torch.no_grad()
                def step(self):
                    for p in self.param_groups[0]["params"]:
                        bits = (p.float() - 0.1 * p.grad).view(torch.int32)
                        p.copy_((bits + 0x8000).bitwise_and(-0x10000).view(torch.float32))


            p = Parameter(torch.ones(8, dtype=torch.bfloat16))
            p.grad = torch.ones_like(p)
            optimizer = install(Own([p], lr=0.1))
            optimizer.step()
            """,
        ),
    ),
    errors.FailedLoweringError: (
        Example(
            "No C++ compiler (a warning; the step is taken).",
            """\
            import torch
            from torch._inductor import config
            from torch.nn import Parameter
            from collage_fx import install

            p = Parameter(torch.ones(8, dtype=torch.bfloat16))
            p.grad = torch.ones_like(p)
            optimizer = install(torch.optim.SGD([p], lr=0.1))
            with config.patch({"cpp.cxx": "no-such-compiler"}):
                optimizer.step()
            """,
        ),
    ),
    errors.GraphInvariantError: (
        Example(
            "A pass that adds a node without saying what its value is, which GraphEditor.call does.",
            """\
            import torch
            from torch.nn import Parameter
            from collage_fx import install
            from collage_fx.passes.base import Pass
            from collage_fx.pipeline import inserted


            class Forgets(Pass):
                name = "forgets"

                def run(self, program):
                    graph = program.gm.graph
                    (store,) = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
                    with graph.inserting_before(store):
                        store.update_arg(1, graph.call_function(torch.ops.aten.neg.default, store.args[1:]))
                    return ""


            p = Parameter(torch.ones(8, dtype=torch.bfloat16))
            p.grad = torch.ones_like(p)
            optimizer = install(torch.optim.SGD([p], lr=0.1), passes=inserted(Forgets(), before="analyze"))
            optimizer.step()
            """,
        ),
    ),
    errors.FailedPassError: (
        Example(
            "A pass with a fault of its own.",
            """\
            import torch
            from torch.nn import Parameter
            from collage_fx import install
            from collage_fx.passes.base import Pass
            from collage_fx.pipeline import inserted


            class Fails(Pass):
                name = "fails"

                def run(self, program):
                    return program.no_such_attribute


            p = Parameter(torch.ones(8, dtype=torch.bfloat16))
            p.grad = torch.ones_like(p)
            optimizer = install(torch.optim.SGD([p], lr=0.1), passes=inserted(Fails(), before="analyze"))
            optimizer.step()
            """,
        ),
    ),
    errors.UnsupportedTorchError: (
        Example(
            "A torch that has renamed something (here no torch has).",
            """\
            from unittest import mock
            import torch
            from torch.nn import Parameter
            from collage_fx import install

            p = Parameter(torch.ones(8, dtype=torch.bfloat16))
            optimizer = torch.optim.SGD([p], lr=0.1)
            renamed = "torch._dynamo.guards:GuardBuilder.TYPE_MATCH: no such attribute"
            with mock.patch("collage_fx.torch_compat.misfits", lambda: [renamed]):
                install(optimizer)
            """,
        ),
    ),
    errors.GradientReleaseError: (
        Example(
            "A second backward pass before the step.",
            """\
            import torch
            from collage_fx import step_in_backward

            model = torch.nn.Linear(8, 8, dtype=torch.bfloat16)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            step_in_backward(model, optimizer)
            batch = torch.ones(4, 8, dtype=torch.bfloat16)
            model(batch).sum().backward()
            model(batch).sum().backward()
            """,
        ),
    ),
}


class Outcome(NamedTuple):
    """The outcome of an example.

    Attributes:
        told: the message.
        is_warning: whether the program went on.
        changed: the tensors of its optimizers that are not as they were before the last statement.
    """

    told: str
    is_warning: bool
    changed: list[str]


def program_of(example: Example) -> str:
    return textwrap.dedent(example.program)


def run(kind: type[errors.CollageError], example: Example) -> Outcome:
    """Run an example, which has to raise the kind of error in its last statement, or warn of it."""
    torch._dynamo.reset()
    pick_vec_isa()  # Inductor tests the compiler once a process: not one that an example has made unusable
    *setup, last = ast.parse(program_of(example)).body
    names: dict[str, Any] = {"__name__": "__main__"}
    with (
        tempfile.TemporaryDirectory() as folder,
        _working_in(folder),
        torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit),  # is put back
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        exec(_compiled(setup), names)
        before = _held(names)
        try:
            exec(_compiled([last]), names)
            told, is_warning = _told([str(each.message) for each in warned], kind), True
        except kind as error:
            told, is_warning = str(error), False
    torch._dynamo.reset()
    changed = differences(before, _held(names))
    # Behind an empty line stands what Dynamo adds; where torch has been installed is this machine's.
    told = re.sub(r"/\S*/(?=(?:torch|collage_fx)/)", "…/", told.partition("\n\n")[0])
    return Outcome(told, is_warning, changed)


def _compiled(statements: list[ast.stmt]) -> CodeType:
    return compile(ast.Module(statements, []), "example.py", "exec")


def _told(warned: list[str], kind: type[errors.CollageError]) -> str:
    (told,) = [each for each in warned if each.endswith(kind.code)]
    return told


@contextlib.contextmanager
def _working_in(folder: str) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _held(names: dict[str, Any]) -> dict[str, Tensor]:
    """Copies of all that a program's optimizers hold."""
    return {
        f"{name}.{key}": tensor
        for name, each in names.items()
        if isinstance(each, Optimizer)
        for key, tensor in everything(each).items()
    }


# The pages. -------------------------------------------------------------------------------------------------

HEAD = """# Errors

Each message ends with the code of its kind, and `collage-fx error CFX001` prints what the page of that code
says. Codes stay: a new kind has a new one, and that of a kind that goes is not given again. All kinds are
`collage_fx.CollageError`, and classes in `collage_fx.errors`.

A refused step has changed nothing: no parameter, no state, no error term. There are three exceptions. A
[recorded](../limits.md#recorded-steps) step is compiled and executed part by part, so if a later part is
refused, the earlier parts have been executed. Where a graph breaks, [CFX010](CFX010.md), the code before an
earlier break has been run. A step in the backward pass, [CFX017](CFX017.md), has parts, too. With
`strict=False` many refusals are warnings with the same text, and the step is taken in plain low precision;
their pages say so.

The examples stand by themselves: each can be pasted into a file, `example.py`, and run, on a CPU.

| code | kind | |
|---|---|---|
"""
WRITTEN = "Written by `python -m tests.error_page`, which runs the examples; not to be edited."


class Explained(NamedTuple):
    """The three parts of a kind's docstring."""

    summary: str
    meaning: str
    remedy: str


def explained(kind: type[errors.CollageError]) -> Explained:
    """The parts of a kind's docstring, in Markdown as a page in ``docs/errors/`` has it."""
    text = re.sub(r"``docs/([\w-]+)\.md(#[\w-]+)?``", _link, inspect.getdoc(kind) or "").replace("``", "`")
    summary, *meaning, remedy = text.split("\n\n")
    assert remedy.startswith(REMEDY), kind
    remedy = remedy.removeprefix(REMEDY)
    filled = [_filled(each) for each in (*meaning, remedy[0].upper() + remedy[1:])]
    return Explained(summary, "\n\n".join(filled[:-1]), filled[-1])


def _filled(paragraph: str) -> str:
    return textwrap.fill(paragraph, 110, break_on_hyphens=False, break_long_words=False)


def _link(match: re.Match[str]) -> str:
    """A link to a page of docs/, from one in docs/errors/."""
    return f"[{match[1].replace('-', ' ')}](../{match[1]}.md{match[2] or ''})"


def error_kinds() -> dict[str, type[errors.CollageError]]:
    """All kinds of errors by their codes."""
    kinds = (each for each in vars(errors).values() if isinstance(each, type))
    return {
        each.code: each for each in kinds if issubclass(each, errors.CollageError) and each.code != "CFX000"
    }


def index() -> str:
    """The list of all kinds."""
    rows = [
        f"| [{code}]({code}.md) | `{kind.__name__}` | {explained(kind).summary} |\n"
        for code, kind in error_kinds().items()
    ]
    return f"{HEAD}{''.join(rows)}\n{WRITTEN}\n"


def frame(kind: type[errors.CollageError]) -> tuple[str, str]:
    """What stands on a kind's page before the examples, and behind them."""
    summary, meaning, remedy = explained(kind)
    title = "Example" if len(EXAMPLES[kind]) == 1 else "Examples"
    head = f"# {kind.code}: {kind.__name__}\n\n## What it means\n\n{summary}\n\n{meaning}\n\n## {title}\n\n"
    return head, f"## What to do\n\n{remedy}\n\n[All errors](index.md). {WRITTEN}\n"


def shown(example: Example, told: str) -> str:
    """An example on its page."""
    return f"{example.caption}\n\n```python\n{program_of(example)}```\n\n```text\n{told}\n```\n\n"


def page_of(kind: type[errors.CollageError]) -> Path:
    return FOLDER / f"{kind.code}.md"


def page(kind: type[errors.CollageError]) -> str:
    """A kind's page; its examples are run."""
    head, foot = frame(kind)
    return head + "".join(shown(each, run(kind, each).told) for each in EXAMPLES[kind]) + foot


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    INDEX.write_text(index(), encoding="utf-8")
    for each in error_kinds().values():
        page_of(each).write_text(page(each), encoding="utf-8")
