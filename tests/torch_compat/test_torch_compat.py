"""The one package that knows torch's internals, and what it says of a torch that it does not know."""

import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.cpu_vec_isa import VecAVX2, VecAVX512, pick_vec_isa
from torch._inductor.utils import fresh_cache

from collage_fx import CollageBackend, numerics, torch_compat
from collage_fx.graph import operators
from collage_fx.graph.program import Arithmetic, Strategy
from tests.support.training import Descent, parameters, run_steps

COMPAT = Path(torch_compat.__file__).parent

#: Before collage_fx is imported -> what the import is to say.
STRANGE = {
    "import torch; torch.__version__ = '2.10.1'": ["needs torch >= 2.11, found 2.10.1"],
    "import torch._inductor.codegen.cpp as cpp; del cpp.CppVecKernel": [
        "does not know torch",
        "cannot import name 'CppVecKernel'",
        "tested with torch 2.11, 2.13, 2.15",
    ],
    "import torch._dynamo.eval_frame as e; del e._callback_from_stance": [
        "does not know torch",
        "torch._dynamo.eval_frame:_callback_from_stance",
    ],
    "import torch; del torch._C._has_storage": [
        "does not know torch",
        "'_has_storage'",
    ],
    "from torch._inductor.scheduler import Scheduler as S; S.are_long_distant_nodes = lambda self: False": [
        "are_long_distant_nodes takes self, not self, node1, node2"
    ],
}


@pytest.mark.parametrize("before", STRANGE)
@pytest.mark.parametrize("imported", ["collage_fx", "collage_fx.torch_compat.patch_cpp_sums"])
def test_a_torch_that_is_not_known_is_refused_by_name_at_import(before: str, imported: str) -> None:
    code = f"{before}; import {imported}"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=COMPAT.parent.parent, capture_output=True, text=True
    )
    last = run.stderr.splitlines()[-1]
    assert last.startswith("ImportError: collage_fx "), run.stderr
    assert all(said in last for said in STRANGE[before])


def test_code_compiled_by_another_torch_compat_is_not_found_in_a_cache() -> None:
    """Nor by other lowerings, or from other arithmetic."""
    sources = list(operators._sources())
    files = [*COMPAT.rglob("*.py"), *Path(numerics.__file__).parent.rglob("*.py"), Path(operators.__file__)]
    assert all(path.read_text(encoding="utf-8") in sources for path in files)


@pytest.mark.skipif(not pick_vec_isa(), reason="Inductor knows no vector instructions of this processor")
@pytest.mark.parametrize(
    ("strategy", "arithmetic", "dtype"),
    [
        ("light", "wide", torch.bfloat16),
        ("plus", "wide", torch.float16),
        ("full", "native", torch.bfloat16),
    ],
)
def test_a_loop_is_as_wide_as_a_vector_of_what_it_stores(
    strategy: Strategy, arithmetic: Arithmetic, dtype: torch.dtype
) -> None:
    """In torch 2.15 a rounding is a node of its own, of float32 alone, by which Inductor would count."""
    params = parameters(dtype, shapes=[(64, 64)])
    backend = CollageBackend(strategy=strategy, arithmetic=arithmetic)
    run_steps(torch.compile(torch.optim.AdamW(params).step, backend=backend), params, range(1))
    (graph,) = backend.report().graphs
    code = graph.code[-1]  # that of the elements
    element = {torch.bfloat16: "at::BFloat16", torch.float16: "at::Half"}[dtype]
    loads = re.findall(rf"Vectorized<{element}>::loadu\([^,]*, static_cast<int64_t>\((\d+)\)\)", code)
    assert set(map(int, loads)) == {pick_vec_isa().nelements(dtype)}


@pytest.mark.skipif(sys.platform == "win32", reason="its compiler has no __builtin_prefetch")
def test_loops_fetch_ahead_and_remainders_do_not() -> None:
    params = parameters(shapes=[(64, 64)])
    backend = CollageBackend(strategy="light")
    run_steps(torch.compile(torch.optim.AdamW(params).step, backend=backend), params, [0])
    (graph,) = backend.report().graphs
    loop, remainder = graph.code[-1].split("C10_UNLIKELY", 1)
    loads = re.findall(r"::loadu\((?:in|out)_ptr", loop)
    assert loop.count("__builtin_prefetch") == len(loads) == 5
    assert remainder.count("__builtin_prefetch") == 0


#: A process that forks as soon as the threads have begun that prepare the compiler.
FORKING = """
import os
from collage_fx.torch_compat import prepare_cpp_compiler
prepare_cpp_compiler()
child = os.fork()
if child == 0:
    os._exit(0 if prepare_cpp_compiler().done() else 3)
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_waits_for_no_thread_that_it_does_not_have() -> None:
    """As a step does that it compiles, if the step of its parent was refused, or explained, before."""
    run = subprocess.run(
        [sys.executable, "-c", FORKING], cwd=COMPAT.parent.parent, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


def test_code_for_another_machines_vectors_is_not_found_in_a_cache() -> None:
    """Which Inductor takes for its own: AVX-512 code that is compiled for AVX2 computes something else."""
    hits = []
    with fresh_cache():
        for isa in (VecAVX512(), VecAVX512(), VecAVX2()):
            torch._dynamo.reset()
            counters.clear()
            params = parameters(shapes=[(3,)])
            with mock.patch("collage_fx.torch_compat.inductor.pick_vec_isa", return_value=isa):
                run_steps(torch.compile(Descent(params).step, backend=CollageBackend()), params, [0])
            hits.append(counters["inductor"]["fxgraph_cache_hit"])
    assert [bool(count) for count in hits] == [False, True, False]
