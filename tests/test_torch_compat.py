"""The one package that knows torch's internals, and what it says of a torch that it does not know."""

import subprocess
import sys
from pathlib import Path

import pytest

from collage_fx import operators, torch_compat

COMPAT = Path(torch_compat.__file__).parent

#: Before collage_fx is imported -> what the import is to say.
STRANGE = {
    "import torch; torch.__version__ = '2.10.1'": ["needs torch >= 2.11, found 2.10.1"],
    "import torch._inductor.codegen.cpp as cpp; del cpp.CppVecKernel": [
        "does not know torch",
        "cannot import name 'CppVecKernel'",
        "tested with torch 2.11, 2.13, 2.15",
    ],
}


@pytest.mark.parametrize("before", STRANGE)
@pytest.mark.parametrize("imported", ["collage_fx", "collage_fx.torch_compat.inductor_cpp_sums"])
def test_a_torch_that_is_not_known_is_refused_by_name_at_import(before: str, imported: str) -> None:
    code = f"{before}; import {imported}"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=COMPAT.parent.parent, capture_output=True, text=True
    )
    last = run.stderr.splitlines()[-1]
    assert last.startswith("ImportError: collage_fx "), run.stderr
    assert all(said in last for said in STRANGE[before])


def test_code_compiled_by_another_torch_compat_is_not_found_in_a_cache() -> None:
    sources = list(operators._sources())
    assert all(path.read_text(encoding="utf-8") in sources for path in COMPAT.glob("*.py"))
