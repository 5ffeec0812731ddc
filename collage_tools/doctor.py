"""Examination of an installation: ``collage-fx doctor``.

It checks that the functions of torch that collage_fx replaces still have the signatures that the replacements
need; ``--patches`` lists them. Compensation depends on the compiler: if it drops a rounding, every error term
is zero, without a message (see Note [Rounding must survive lowering] in ``numerics/arithmetic.py``). So a
step is compiled on every device and compared, bit for bit, with the same step in eager torch on the CPU.
Without a compiler the bits are right, but steps are so slow that the doctor reports it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
import subprocess
import warnings
from collections.abc import Iterator

import torch
from tabulate import tabulate
from torch import Tensor

from collage_fx import CollageBackend, error_terms, full_value
from collage_fx.choices import ErrorFormatName
from collage_fx.graph import SUPPORTED, device_facts
from collage_fx.numerics import ERROR_FORMATS
from collage_fx.tools import PATCHES, cpp_compilers, misfits

ELEMENTS = 1000
STEPS = 3
#: Learning rate, a power of two: the update is exact in float32 with or without a fused multiply-add.
LEARNING_RATE = 2.0**-10


#: Outcomes of a self-test, in which NONE is that of a device that is not supported, and SLOW that of steps
#: that are run operation by operation, because no compiler works. FAILED is also the outcome of a patch
#: without which results would differ.
OK, SLOW, FAILED, NONE = "ok", "SLOW", "FAILED", "none"


def examine() -> tuple[str, bool]:
    """Examine the installation; return the findings as text, the verdict first, and whether all is well."""
    rows = [
        [device, str(dtype).removeprefix("torch."), *self_test(device, dtype)]
        for device in devices()
        for dtype in (torch.bfloat16, torch.float16)
    ]
    table = tabulate(rows, headers=["device", "dtype", "self-test", ""], maxcolwidths=[16, 10, 10, 60])
    lost = [row for row in _patch_rows() if FAILED in row]
    outcomes = {outcome for _, _, outcome, _ in rows}
    is_right, is_slow = not lost and FAILED not in outcomes, SLOW in outcomes
    if not is_right:
        verdict = "Do not rely on error terms here: see the rows marked FAILED."
    elif is_slow:
        verdict = "Results are right, but each step is 10 to 50 times slower: install g++, or set CXX."
    else:
        verdict = "All is well."
    sections = [verdict, tabulate(list(versions()), tablefmt="plain"), table]
    return "\n\n".join([*sections, *([_patch_table(lost)] if lost else [])]), is_right and not is_slow


def patches() -> tuple[str, bool]:
    """Return a table of the functions of torch that are replaced, and whether steps can be compiled.

    Columns: when a function is replaced, whom this affects, whether the replacement fits this version of
    torch, why it is made, and which public function it waits for. A patch for speed that does not fit is off.
    """
    rows = _patch_rows()
    return _patch_table(rows), not any(FAILED in row for row in rows)


def _patch_rows() -> list[list[str]]:
    rows = []
    for patch in (each for each in PATCHES if each.is_needed):
        misfit = FAILED if patch.needed_for == "bits" else "off"
        told = patch.misfit or f"{patch.why}. Goes with: {patch.goes_with}"
        rows.append([patch.name, patch.during, patch.affects, misfit if patch.misfit else OK, told])
    of_patches = {patch.misfit for patch in PATCHES}
    return rows + [["(called)", "", "", FAILED, told] for told in misfits() if told not in of_patches]


def _patch_table(rows: list[list[str]]) -> str:
    headers = ["replaced in torch", "during", "affects", "fits", ""]
    return tabulate(rows, headers=headers, maxcolwidths=[18, 14, 11, 6, 42])


def versions() -> Iterator[tuple[str, str]]:
    """Yield the installed versions, the C++ compiler, and the devices, as ``(name, description)``."""
    yield "Python", f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    for name in ("collage-fx", "torch", "triton", "sympy"):
        yield name, _version(name)
    yield "C++ compiler", _compiler()
    for device in devices():
        yield device, _description(device)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        found = importlib.util.find_spec(package.replace("-", "_"))
        return "not installed" if found is None else "used from its sources, not installed"


def _compiler() -> str:
    for name in cpp_compilers():
        path = shutil.which(name)
        if path is not None:
            done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
            return f"{name}: {(done.stdout or done.stderr).splitlines()[0]}"
    return f"none found (looked for {', '.join(cpp_compilers())}); torch.compile needs one for the CPU"


def devices() -> list[str]:
    """Return the names of the CPU and of every accelerator that torch finds."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if accelerator is not None else 0
    return ["cpu", *(f"{accelerator}:{i}" for i in range(count))]


def _description(device: str) -> str:
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        told = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
        if torch.version.hip is None:
            return told
        return (
            f"{told}, ROCm {torch.version.hip}, {properties.warp_size} threads a warp\n"
            "assumed, not tested on hardware so far: Triton rounds to nearest even, fuses no pinned\n"
            "operations, and divides and takes roots as IEEE 754 does; the self-test checks this"
        )
    return f"{torch.get_num_threads()} threads" if device == "cpu" else ""


def self_test(device: str, dtype: torch.dtype) -> tuple[str, str]:
    """Compare compiled steps of SGD with eager arithmetic; return the outcome, and the result in words.

    Two error formats are tested. ``mcf`` (pairs) shows whether the compiler drops a rounding; ``exact``
    (whole float32 numbers) must give the same values as float32 weights.
    """
    if refused := device_facts(torch.device(device)).refused:
        told = f"not supported: steps on it are refused; supported are {', '.join(SUPPORTED)}. {refused}"
        return NONE, told
    generator = torch.Generator().manual_seed(0)
    weights, gradients = torch.randn(2, ELEMENTS, generator=generator).to(dtype)
    try:
        p, slow = _compiled_steps(weights.to(device), gradients.to(device), "mcf")
        whole, _ = _compiled_steps(weights.to(device), gradients.to(device), "exact")
    except Exception as error:  # any exception of compiler, driver, ... is a finding
        reason = next((line for line in str(error).splitlines() if line.strip()), "")
        return FAILED, f"the step does not run: {type(error).__name__}: {reason}"
    compiled, expected = (p.detach(), *error_terms(p)), _eager_steps(weights, gradients)
    different = sum(
        int((one.cpu().view(torch.int16) != other.view(torch.int16)).sum())
        for one, other in zip(compiled, expected, strict=True)
    )
    float32 = weights.float()
    for _ in range(STEPS):
        float32 = float32 - gradients.float() * LEARNING_RATE
    off = full_value(whole).cpu() - float32
    tolerated = float(STEPS * ERROR_FORMATS["exact"].error_bound(dtype).absolute)
    different += int((off.abs() > tolerated).sum())
    if not compiled[1].any():
        return FAILED, "every error term is zero: the compiler has dropped the rounding"
    if different:
        return FAILED, f"{different} of {3 * ELEMENTS} results differ from eager results"
    if slow:
        return SLOW, slow
    kept = int((expected[1] != 0).sum())
    return OK, f"{kept} of {ELEMENTS} weights hold bits in their error terms"


def _compiled_steps(weights: Tensor, gradients: Tensor, error_format: ErrorFormatName) -> tuple[Tensor, str]:
    """Return the parameter after some steps, and why they were not compiled (empty if they were)."""
    p = torch.nn.Parameter(weights.clone())
    p.grad = gradients
    backend = CollageBackend(error_format=error_format, rounding="nearest")
    step = torch.compile(torch.optim.SGD([p], lr=LEARNING_RATE).step, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the finding says the same
        for _ in range(STEPS):
            step()
    (route,) = (graph.route for graph in backend.report().graphs)
    return p, route.sentence() if route.unit == "operation by operation" else ""


def _eager_steps(weights: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Return (hi, lo) after the same steps, run eagerly with torch's own casts and float32 arithmetic."""
    hi, lo = weights, torch.zeros_like(weights)
    for _ in range(STEPS):
        value = (hi.float() + lo.float()) - gradients.float() * LEARNING_RATE
        hi = value.to(weights.dtype)
        lo = (value - hi.float()).to(weights.dtype)
    return hi, lo
