"""C++ libraries, compiled and cached like Inductor's kernels."""

from __future__ import annotations

import ctypes
import functools
import getpass
import hashlib
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._C._dynamo.guards import _torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
from torch._inductor import cpp_builder

#: Address of the C function that takes a Python tensor and returns the address of its memory.
ADDRESS_OF_TENSOR: int = _torchinductor_pyobject_tensor_data_ptr


@dataclass(frozen=True)
class CFunction:
    """Compiled C++ function whose arguments are addresses and 64-bit integers.

    Attributes:
        arguments: for each argument, the index of the value to pass; for a tensor its address is passed.
        library: the library, which must stay loaded.
    """

    address: int
    arguments: tuple[int, ...]
    library: ctypes.CDLL


class _Options(cpp_builder.CppTorchOptions):
    """Inductor's options, without torch's libraries: our sources call none, and linking reads them all."""

    def get_libraries(self) -> list[str]:
        return [each for each in super().get_libraries() if not each.startswith(("torch", "c10"))]


def load_cpp_library(source: str, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """Compile ``extern "C"`` functions by Inductor's compiler and flags, or load them from its cache folder.

    The compiler may use every instruction of this processor; machines that share the folder and have others
    compile a library of their own. Inductor would first test which vectors its own C++ can be compiled for,
    which takes longer than all our kernels. ``flags`` are given to the compiler after Inductor's. The source
    is C++17, whatever Inductor's own is: that of the oldest supported torch.

    Raises:
        torch._inductor.exc.CppCompileError: the compiler refuses the source.
        torch._inductor.exc.InvalidCxxCompiler: there is no compiler.
    """
    options = _Options(extra_flags=["-std=c++17", *flags])
    command = cpp_builder.CppBuilder("library", "source", options).get_command_line()
    text = f"// For a processor with {processor_features()}\n// {command}\n{source}"
    folder, name = Path(_cache_folder(), "collage_fx"), hashlib.sha256(text.encode()).hexdigest()[:32]
    library = folder / f"{name}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:  # other processes see whole files only
            file = Path(scratch, f"{name}.cpp")
            file.write_text(text, encoding="utf-8")
            builder = cpp_builder.CppBuilder(name, str(file), options, scratch)
            builder.build()
            os.replace(file, folder / file.name)
            os.replace(builder.get_target_file_path(), library)
    return ctypes.CDLL(str(library))


def _cache_folder() -> str:
    """Return the folder of Inductor's cache, as torch's documentation names it."""
    user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    default = f"torchinductor_{user}"
    return os.environ.get("TORCHINDUCTOR_CACHE_DIR") or os.path.join(tempfile.gettempdir(), default)


@functools.cache
def processor_features() -> str:
    """Return the names of this processor's instruction sets, as far as torch tells them."""
    if not hasattr(torch.cpu, "get_capabilities"):
        return str(torch.backends.cpu.get_cpu_capability())
    features = torch.cpu.get_capabilities()
    return " ".join(sorted(name for name, present in features.items() if present is True))
