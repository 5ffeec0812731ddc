"""Stubs of the libraries of NVIDIA's that torch's build for CUDA is linked with.

The names that torch needs are read from its symbol tables. Each function returns 801, "not supported", but
for those of the fake driver.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

#: Patterns of the functions of each library.
PREFIXES = {
    "cublas": "cublas(?!Lt)",
    "cublasLt": "cublasLt",
    "cudnn": "cudnn",
    "cufft": "cufft",
    "cufile": "cuFile",
    "cupti": "cupti",
    "curand": "curand",
    "cusolver": "cusolver",
    "cusparse": "cusparse(?!Lt)",
    "cusparseLt": "cusparseLt",
    "nccl": "nccl",
    "nvrtc": "nvrtc",
    "nvshmem_host": "nvshmem",
}
#: The runtime and the driver, which are one library here.
RUNTIME, DRIVER = "cuda[A-Z]|__cuda", "cu(?!File)[A-Z]"
#: Functions of the driver that torch asks for by name.
BY_NAME = ("cuTensorMapEncodeIm2col", "cuTensorMapReplaceAddress")
#: Names of the runtime, and of the driver.
SONAME, ALIASES = "libcudart.so.13", ("libcuda.so.1", "libcuda.so")


def build(torch: Path, sources: Path, includes: Sequence[Path], folder: Path, compiler: str) -> None:
    """Compile the driver, and write it and the stubs.

    Args:
        torch: the package.
        sources: folder of the driver's C++.
        includes: folders of NVIDIA's headers.
        folder: where the libraries go.
        compiler: of C++.
    """
    folder.mkdir(parents=True, exist_ok=True)
    objects = []
    for source in sorted(sources.glob("*.cpp")):
        objects.append(folder / f"{source.stem}.o")
        options = ["-std=c++17", "-O1", "-Wall", "-fPIC", *(f"-I{each}" for each in includes)]
        _run(compiler, *options, "-c", source, "-o", objects[-1])
    names, symbols = _needed(torch)
    defined = {
        line.split()[-1] for each in objects for line in _run("nm", "--defined-only", each).splitlines()
    }
    of_driver = [each for each in symbols if re.match(f"{RUNTIME}|{DRIVER}", each)]
    stubs = set(of_driver) | set(BY_NAME)
    _link(folder / SONAME, stubs - defined, f"{SONAME} {{ global: cuda*; __cuda*; }};", objects, compiler)
    for alias in ALIASES:
        (folder / alias).unlink(missing_ok=True)
        (folder / alias).symlink_to(SONAME)
    for library, prefix in PREFIXES.items():
        file = next((each for each in sorted(names) if re.match(rf"lib{library}\.so\.\d+$", each)), None)
        if file is None:
            continue
        versions = defaultdict[str, list[str]](list)
        for symbol, version in symbols.items():
            if re.match(prefix, symbol):
                versions[version].append(symbol)
        script = "".join(f"{v} {{ global: {'; '.join(each)}; }};\n" for v, each in versions.items() if v)
        _link(folder / file, {each for some in versions.values() for each in some}, script, [], compiler)


def _run(*command: str | Path) -> str:
    return subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True, check=True).stdout


def _needed(torch: Path) -> tuple[set[str], dict[str, str]]:
    """Return the libraries that torch's need, and the version of each symbol that they do not define."""
    names, symbols = set(), {}
    for library in [*torch.glob("lib/*.so*"), *torch.glob("_C*.so")]:
        for line in _run("objdump", "-p", library).splitlines():
            if "NEEDED" in line:
                names.add(line.split()[1])
        for line in _run("readelf", "--dyn-syms", "-W", library).splitlines():
            fields = line.split()
            if len(fields) >= 8 and fields[6] == "UND":
                symbol, _, version = fields[7].partition("@")
                symbols[symbol] = version.strip("@")
    return names, symbols


def _link(library: Path, stubs: Iterable[str], script: str, objects: Sequence[Path], compiler: str) -> None:
    """Write a library of stubs and objects; a process may still have the old one."""
    source, versions, new = (library.with_suffix(each) for each in (".stubs.cpp", ".map", ".new"))
    functions = (f"int {name}() {{ return 801; }}\n" for name in sorted(stubs))
    source.write_text(f'extern "C" {{\n{"".join(functions)}}}\n')
    options = ["-w", "-fPIC", "-shared", f"-Wl,-soname,{library.name}"]
    if script:
        versions.write_text(script)
        options.append(f"-Wl,--version-script={versions}")
    _run(compiler, *options, source, *objects, "-ldl", "-lpthread", "-o", new)
    new.replace(library)
