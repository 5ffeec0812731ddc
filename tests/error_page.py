"""``python -m tests.error_page``: write ``docs/errors.md``, a section for each kind of error.

What a kind means is its docstring; the examples are run, and the page shows the messages that they raise.
"""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path

import torch

from collage_fx import errors

PATH = Path(__file__).resolve().parent.parent / "docs" / "errors.md"

#: What examples begin with.
SETUP = """\
import torch
from torch.nn import Parameter
from collage_fx import CollageBackend, CollageError, error_terms, explain, install


def parameter(*shape, **how):
    p = Parameter(torch.ones(*shape, **{"dtype": torch.bfloat16, **how}))
    p.grad = torch.ones_like(p)
    return p
"""

#: Programs that raise, or warn of, each kind. A kind without one needs more than a few lines.
EXAMPLES: dict[type[errors.CollageError], str] = {
    errors.InvalidOptionError: """\
        CollageBackend(strategy="pluss")
    """,
    errors.UnsupportedOptimizerError: """\
        p = parameter(8)
        optimizer = torch.optim.LBFGS([p])
        torch.compile(optimizer.step, backend=CollageBackend())(lambda: p.sum())
    """,
    errors.UnsupportedTensorError: """\
        explain(torch.optim.SGD([parameter(8, dtype=torch.complex64)], lr=0.1))
    """,
    errors.AliasedStateError: """\
        memory = torch.ones(12, dtype=torch.bfloat16)
        params = [Parameter(memory[:8]), Parameter(memory[4:])]
        for p in params:
            p.grad = torch.ones_like(p)
        torch.compile(torch.optim.SGD(params, lr=0.1).step, backend=CollageBackend())()
    """,
    errors.ConflictingErrorFormatError: """\
        optimizer = torch.optim.SGD([parameter(8)], lr=0.1)
        for error_format in ("exact", "mcf"):
            torch.compile(optimizer.step, backend=CollageBackend(error_format=error_format))()
    """,
    errors.CheckpointMismatchError: """\
        optimizer = install(torch.optim.SGD([parameter(8)], lr=0.1))
        optimizer.step()
        saved = optimizer.state_dict()
        other = install(torch.optim.SGD([parameter(6)], lr=0.1))
        other.load_state_dict(saved)
    """,
    errors.ChangedTensorError: """\
        p = parameter(8, 4)
        step = torch.compile(torch.optim.SGD([p], lr=0.1).step, backend=CollageBackend())
        step()
        p.data = torch.ones(4, 8, dtype=torch.bfloat16).t()
        step()
    """,
    errors.EagerStepError: """\
        optimizer = torch.optim.SGD([parameter(8)], lr=0.1)
        torch.compile(optimizer.step, backend=CollageBackend())()
        optimizer.step()
    """,
    errors.UncompensatedParameterError: """\
        class Own(torch.optim.SGD):
            @torch.no_grad()
            def step(self):
                for p in self.param_groups[0]["params"]:
                    p.copy_(p @ p.grad)


        explain(Own([parameter(8, 8)], lr=0.1))
    """,
    errors.GraphInvariantError: """\
        from collage_fx.passes.base import Pass
        from collage_fx.pipeline import inserted


        class Forgets(Pass):
            name = "forgets"

            def run(self, program):
                graph = program.gm.graph
                with graph.inserting_before(graph.output_node()):  # GraphEditor.call also notes the value
                    graph.call_function(torch.ops.aten.neg.default, (next(iter(graph.nodes)),))
                return ""


        explain(torch.optim.SGD([parameter(8)], lr=0.1), passes=inserted(Forgets(), before="analyze"))
    """,
    errors.FailedPassError: """\
        from collage_fx.passes.base import Pass
        from collage_fx.pipeline import inserted


        class Fails(Pass):
            name = "fails"

            def run(self, program):
                return program.no_such_attribute


        explain(torch.optim.SGD([parameter(8)], lr=0.1), passes=inserted(Fails(), before="analyze"))
    """,
}


def message(kind: type[errors.CollageError]) -> str:
    """What an example raises."""
    torch._dynamo.reset()
    try:
        exec(SETUP + textwrap.dedent(EXAMPLES[kind]), {"__name__": "__main__"})
    except kind as error:
        return str(error).partition("\n\n")[0]  # behind it stands what Dynamo adds
    raise AssertionError(f"the example of {kind.__name__} raises nothing")


HEAD = """# Errors

Each message ends with the code of its kind, and `collage-fx error CFX001` says what it means. All kinds are
`collage_fx.CollageError`; with `strict=False` those that a step is refused with are warnings, and the step
goes on in plain low precision. A refused step has changed nothing.

The examples begin with

```python
{setup}```

Written by `python -m tests.error_page`, which runs them; not to be edited.
"""


def document() -> str:
    """The page."""
    sections = [HEAD.format(setup=SETUP)]
    for code, kind in errors.error_kinds().items():
        text = inspect.getdoc(kind)
        sections.append(f"## {code}\n\n**`{kind.__name__}`** {text}")
        if kind in EXAMPLES:
            example = textwrap.dedent(EXAMPLES[kind])
            sections.append(f"```python\n{example}```\n\n```text\n{message(kind)}\n```")
    return "\n\n".join(sections) + "\n"


if __name__ == "__main__":
    PATH.write_text(document(), encoding="utf-8")
