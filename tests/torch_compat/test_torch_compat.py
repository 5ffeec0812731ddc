"""The one package that knows torch's internals, and what it says of a torch that it does not know."""

import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import TensorifyState
from torch._dynamo.utils import counters
from torch._inductor.cpp_builder import CppBuilder
from torch._inductor.exc import CppCompileError
from torch._inductor.utils import fresh_cache

from collage_fx import CollageBackend, backend_of, install, torch_compat
from collage_fx.torch_compat import InductorFault, load_cpp_library, patch_optimizers, patches, records
from collage_fx.torch_compat.optim_frames import key_of_code
from collage_fx.torch_compat.patch_numbers import BurnedIn, noticing_burned_in
from tests.support.printed import by_inductor
from tests.support.substitutes import compiled_for_vectors, processor, revision_of_torch_compat
from tests.support.training import Descent, parameters, run_steps, set_gradients

COMPAT = Path(torch_compat.__file__).parent

#: Before collage_fx is imported -> what the import is to say.
STRANGE = {
    "import torch; torch.__version__ = '2.10.1'": ["needs torch >= 2.11, found 2.10.1"],
    "import torch._inductor.cpp_builder as builder; del builder.CppBuilder": [
        "does not know torch",
        "cannot import name 'CppBuilder'",
        "install torch 2.11, 2.13, 2.15",
    ],
}


IMPORTS = "import collage_fx", "import collage_fx.torch_compat.tensors", "from collage_fx import install"


@pytest.mark.parametrize(
    ("before", "imported"),
    # A name of Inductor's is missed where it is imported, for the first use.
    [(each, of) for each in STRANGE for of in IMPORTS if "_inductor" not in each or of == IMPORTS[-1]],
)
def test_a_torch_that_is_not_known_is_refused_by_name_at_import(before: str, imported: str) -> None:
    code = f"{before}; {imported}"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=COMPAT.parent.parent, capture_output=True, text=True
    )
    last = run.stderr.splitlines()[-1]
    assert last.startswith("ImportError: collage_fx "), run.stderr
    assert all(said in last for said in STRANGE[before])


def test_what_is_relied_on_is_in_one_list() -> None:
    names = [each.name for each in pkgutil.iter_modules([str(COMPAT)])]
    modules = [importlib.import_module(f"collage_fx.torch_compat.{name}") for name in names]
    needed = [text for each in modules if each is not patches for text in vars(each).get("RELIED_ON", ())]
    assert needed
    assert sorted(patches.relied_on()) == sorted(needed)


#: Before collage_fx is imported, where results depend on it -> what a step says.
UNFIT = {
    "from torch._dynamo import eval_frame as e; f = e._callback_from_stance\n"
    "e._callback_from_stance = lambda c: f(c)": "_callback_from_stance takes c, not callback",
    "import torch._dynamo\ntorch._dynamo.mark_static_address = lambda t: None": (
        "mark_static_address takes t, not t, guard"
    ),
    "import torch\ntorch.nn.Module.load_state_dict = lambda self: None": (
        "load_state_dict takes self, not self, state_dict"
    ),
    "import torch; del torch.optim.swa_utils.AveragedModel.update_parameters": (
        "torch.optim.swa_utils:AveragedModel.update_parameters"
    ),
}

STEPS = """
import collage_fx, torch
from collage_fx import CollageBackend, CollageError
from collage_tools import doctor
from tests.support.training import parameters, set_gradients
params = parameters()
set_gradients(params)
before = [p.detach().clone() for p in params]
optimizer = torch.optim.SGD(params)
for ask in (lambda: collage_fx.install(optimizer), lambda: collage_fx.backend.collage_backend(
        torch.fx.symbolic_trace(torch.nn.Identity()), [torch.ones(2)])):
    try:
        ask()
    except CollageError as refusal:
        print(refusal.code, refusal)
assert all(map(torch.equal, params, before))
print(*doctor.patches())
"""


@pytest.mark.parametrize("before", UNFIT)
def test_what_results_depend_on_refuses_compilations_and_not_the_import(before: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"{before}\n{STEPS}"],
        cwd=COMPAT.parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    refusals, table = done.stdout.split("replaced in torch", 1)
    assert refusals.count("CFX016 collage_fx does not know torch") == 2
    assert refusals.count(UNFIT[before]) == 2
    assert refusals.count("what to do: install torch 2.11, 2.13, 2.15") == 2
    assert "FAILED" in table
    assert table.endswith(" False\n")


SLOWER = """
import torch
from torch._dynamo.guards import GuardBuilder
not_none = GuardBuilder.NOT_NONE_MATCH
GuardBuilder.NOT_NONE_MATCH = lambda self, *given, **named: not_none(self, *given, **named)
from collage_fx import CollageBackend
from collage_tools import doctor
from collage_fx.torch_compat import PATCHES
from tests.support.training import Lion, compiled, parameters, run_steps
from collage_fx import full_value

def taken(make, **options):
    torch._dynamo.reset()
    params = parameters(shapes=[(8, 32), (8, 32), (7,)])
    run_steps(compiled(make(params), **options), params, range(3))
    return torch.cat([full_value(p).flatten() for p in params])

kinds = [(torch.optim.AdamW, {}), (Lion, {"metrics": True}), (torch.optim.AdamW, {"error_format": "mcf"})]
usual = [taken(make, **options) for make, options in kinds]
(off,) = (patch.name for patch in PATCHES if patch.misfit)
print(off, *doctor.patches())
for patch in PATCHES:
    if patch.needed_for == "speed":
        vars(patch)["misfit"] = "renamed"
CollageBackend().reset()
for (make, options), bits in zip(kinds, usual, strict=True):
    assert torch.equal(taken(make, **options), bits), make
"""


def test_what_only_speed_depends_on_is_left_out(tmp_path: Path) -> None:
    """The patch that no longer fits, and then every one of that kind: the bits are the same without them."""
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", SLOWER],
        cwd=COMPAT.parent.parent,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("gradients replaced in torch")
    assert re.search(r"gradients +[a-z]+ +nobody else +off", done.stdout)
    assert done.stdout.endswith(" True\n")


def test_code_compiled_by_another_torch_compat_is_not_found_in_a_cache() -> None:
    """Its settings and patches decide what Inductor's code computes."""
    found = []
    with fresh_cache():
        for name in ("of today", "of today", "of yesterday"):
            before = counters["inductor"]["fxgraph_cache_hit"]
            torch._dynamo.reset()
            with revision_of_torch_compat(name):
                torch.compile(lambda x: x.exp() + 1.0, backend=by_inductor)(torch.ones(3))
            found.append(counters["inductor"]["fxgraph_cache_hit"] - before)
    assert found == [0, 1, 0]


@pytest.mark.usefixtures("by_inductor")
def test_code_for_another_machines_vectors_is_not_found_in_a_cache() -> None:
    """Which Inductor takes for its own: AVX-512 code that is compiled for AVX2 computes something else."""
    hits = []
    with fresh_cache():
        for kind in ("AVX512", "AVX512", "AVX2"):
            torch._dynamo.reset()
            counters.clear()
            params = parameters(shapes=[(3,)])
            with compiled_for_vectors(kind):
                run_steps(torch.compile(Descent(params).step, backend=CollageBackend()), params, [0])
            hits.append(counters["inductor"]["fxgraph_cache_hit"])
    assert [bool(count) for count in hits] == [False, True, False]


def test_a_library_for_another_processor_is_not_found_in_a_cache() -> None:
    """Nodes of a cluster may share a folder, although their processors have different instructions."""
    source = 'extern "C" int answer() { return 42; }'
    names = []
    for features in ("avx2", "avx2 avx512_f", "avx2"):
        with processor(features):
            library = load_cpp_library(source)
        assert library.answer() == 42
        names.append(library._name)
    assert names[0] == names[2] != names[1]


def test_cpp_of_a_newer_standard_than_the_oldest_torch_has_is_refused_and_the_reason_is_shown() -> None:
    """C++20 would compile with torch 2.13 alone: torch 2.11's Inductor asks for C++17."""
    source = '#include <bit>\nextern "C" float number(unsigned bits) { return std::bit_cast<float>(bits); }\n'
    with pytest.raises(CppCompileError) as refused:
        load_cpp_library(source)
    said = str(InductorFault(refused.value))
    assert re.match(r"CppCompileError: .*:4:\d+: error: .*bit_cast.*$", said), said
    assert str(InductorFault(RuntimeError("of\ntwo lines"))) == "RuntimeError: of"


OF_TORCH_OPTIM = [
    each
    for each in vars(torch.optim).values()
    if isinstance(each, type) and issubclass(each, torch.optim.Optimizer)
    if each not in (torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam)  # not traced
]


@pytest.mark.parametrize("kind", OF_TORCH_OPTIM)
def test_each_class_of_torch_optim_is_known_as_torchs(kind: type[torch.optim.Optimizer]) -> None:
    """Adafactor's and Muon's module is called torch.optim, that of the others begins so."""
    assert torch_compat.is_of_torch_optim(kind)
    assert torch_compat.is_of_torch_optim(kind.step)
    derived: Any = type(kind.__name__, (kind,), {"step": lambda self, closure=None: None})
    assert not torch_compat.is_of_torch_optim(derived)
    assert not torch_compat.is_of_torch_optim(derived.step)


@pytest.mark.parametrize("kind", OF_TORCH_OPTIM)
def test_a_frame_of_torchs_step_is_known(kind: Any) -> None:
    optimizer = kind([torch.nn.Parameter(torch.zeros(2, 2))])
    code = inspect.unwrap(kind.step).__code__
    assert torch_compat.is_torchs_step(optimizer, code, {"self": optimizer, "closure": None})
    assert not torch_compat.is_torchs_step(optimizer, code, {"self": optimizer, "closure": print})


def test_our_libraries_are_not_linked_with_torch() -> None:
    """Linking reads all of a library, and torch's have hundreds of megabytes."""
    with (
        fresh_cache(),
        mock.patch.object(CppBuilder, "build", side_effect=CppBuilder.build, autospec=True) as build,
    ):
        load_cpp_library('extern "C" int seven() { return 7; }')
    (call,) = build.call_args_list
    command = call.args[0].get_command_line()
    assert "-lgomp" in command
    assert not re.search(r"-l(torch|c10)", command)


class Resets:
    """Backend that counts its resets."""

    resets = 0

    def reset(self) -> None:
        self.resets += 1


def test_a_weak_backend_is_reset_while_it_is_alive() -> None:
    """``torch.compiler.reset()`` resets all that ``torch.compile`` has been given, for ever."""
    backend, other = Resets(), Resets()
    weak = torch_compat.WeakBackend(backend)
    assert weak == torch_compat.WeakBackend(backend)
    assert hash(weak) == hash(torch_compat.WeakBackend(backend))
    assert weak != torch_compat.WeakBackend(other)
    assert weak != backend
    weak.reset()
    assert (backend.resets, other.resets) == (1, 0)
    del backend
    weak.reset()
    assert weak.backend is None


def test_guards_of_a_gradient_are_omitted_only_while_its_step_is_compiled() -> None:
    """A function that is compiled later may depend on whether the gradient is None."""
    params = parameters(shapes=[(3,)] * 4)
    optimizer = install(torch.optim.AdamW(params))
    compilations = []
    for without in (None, 0, 1):
        set_gradients(params)
        if without is not None:
            params[without].grad = None
        optimizer.step()
        compilations.append(len(backend_of(optimizer).reports))
        assert not records.all_of(patch_optimizers._LookedFor)
    assert compilations == [1, 2, 2]


def test_code_that_dynamo_has_written_has_a_key_by_identity() -> None:
    """Its constants may have no hash."""
    code = (lambda: 1).__code__
    written = code.replace(co_consts=([],))
    assert key_of_code(code) == key_of_code(code.replace())
    assert {key_of_code(written): 1}[key_of_code(written)] == 1
    assert key_of_code(written) != key_of_code(code.replace(co_consts=([],)))


def test_numbers_that_another_compilation_has_burned_in_are_not_this_ones() -> None:
    """Dynamo forgets them when it traces, and our compilations do not trace."""
    TensorifyState.specialize("of_another")

    def compile_again() -> None:
        with noticing_burned_in():
            TensorifyState.specialize("of_this")
            raise TensorifyScalarRestartAnalysis

    with pytest.raises(BurnedIn) as found:
        compile_again()
    assert found.value.symbols == {"of_this"}
    assert not TensorifyState.force_specializations
