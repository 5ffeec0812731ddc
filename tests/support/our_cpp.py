"""Which C++ a test has its kernels compiled to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch._inductor import config

from collage_fx.torch_compat.patch_cpp_roundings import writing_our_cpp

__all__ = ["compiled_by"]


@contextlib.contextmanager
def compiled_by(code: str) -> Iterator[None]:
    """Have kernels compiled with code of ours (``"our code"``), or as Inductor does it without."""
    torch._dynamo.reset()
    with contextlib.ExitStack() as stack:
        if code == "our code":
            stack.enter_context(writing_our_cpp())
            stack.enter_context(config.patch("force_disable_caches", True))
        yield
