"""The Triton code of a flat rule with blocks: generated, read and compiled to PTX, without a GPU."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch

from collage_fx import CollageBackend
from collage_fx.choices import PackedFormatName
from collage_fx.lowering import kernels
from collage_fx.lowering.lower import inductor_settings
from collage_fx.lowering.rule_graphs import graph_of
from collage_fx.lowering.rules import Rule
from collage_fx.torch_compat import SymbolicScope
from tests.support import triton_offline as offline
from tests.support.substitutes import rules_compiled

pytestmark = pytest.mark.skipif(
    not offline.HAVE_TRITON, reason="needs triton (Linux only) and numpy: pip install triton numpy"
)


def rule_with_blocks(state: PackedFormatName) -> Rule:
    """That of an AdamW step."""
    parameters = [torch.nn.Parameter(torch.randn(128, 64).bfloat16()) for _ in range(2)]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    kernels.forget_kernels()
    with rules_compiled() as rules:
        step = torch.compile(optimizer.step, backend=CollageBackend(strategy="light", state=state))
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        step()
    (rule,) = (rule for rule in rules if rule.width > 1)
    return rule


@pytest.mark.parametrize("state", ["block8", "block16"])
def test_a_step_is_one_kernel_that_reads_each_byte_once(state: PackedFormatName) -> None:
    """A persistent reduction: a program holds whole blocks, and keeps nothing but results in memory."""
    scope = SymbolicScope()
    rule = rule_with_blocks(state)
    with scope:
        graph = graph_of(rule, scope, kernels.HINT)
        settings = {**inductor_settings("wide", [torch.device("cuda")]), **kernels.INLINED}
        with torch._inductor.config.patch(settings):
            source = offline.triton_source(offline.to_cuda(graph))
    (kernel,) = offline.kernels(source).values()
    assert "persistent_reduction" in kernel
    loads = Counter(re.findall(r"tl\.load\((\w+_ptr\d+)", kernel))
    assert set(loads.values()) == {1}
    assert "empty_strided_cuda" not in source.split("def call(", 1)[1].split("def get_args", 1)[0]
    (ptx,) = offline.compile_to_ptx(source).values()
    assert ".local" not in ptx  # nothing is spilled
