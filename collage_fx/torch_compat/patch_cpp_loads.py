"""Loads of C++ kernels that fetch ahead: rests on the text that Inductor writes for a load.

Note [Fetching ahead]
---------------------
A processor notices that a loop goes through memory, and fetches what is next, but stops at the end of each
page of 4096 bytes, where it has to notice again. An AdamW step of ``light`` goes through five tensors at once
in 80 instructions for 64 bytes of each: too few bytes at a time for the processor to run far ahead by itself,
too many pages for it to lose time at the beginning of each. One more instruction a load asks for what will be
loaded eight iterations later.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch._inductor.codegen.cpp import CppVecKernel
from torch._inductor.codegen.cpp_utils import cexpr_index

__all__ = ["fetching_ahead"]

#: Bytes.
AHEAD = 512

_fetching: ContextVar[bool] = ContextVar("_fetching", default=False)


@contextlib.contextmanager
def fetching_ahead() -> Iterator[None]:
    """Within, C++ code whose vectors come from memory one after another fetches ahead."""
    token = _fetching.set(sys.platform != "win32")  # whose compiler has another name for it
    try:
        yield
    finally:
        _fetching.reset(token)


def _with_prefetch(original: Callable[..., str]) -> Callable[..., str]:
    """``_get_vec_load_line`` with an instruction that fetches; that may name any address without harm."""

    def line(kernel: Any, var: Any, index: Any, dtype: torch.dtype, load_mask: Any = None) -> str:
        load = original(kernel, var, index, dtype, load_mask)
        if not _fetching.get() or kernel.tail_size or index == 0:
            return load
        return f"(__builtin_prefetch((const char*)({var} + {cexpr_index(index)}) + {AHEAD}), {load})"

    return line


CppVecKernel._get_vec_load_line = _with_prefetch(CppVecKernel._get_vec_load_line)  # type: ignore[method-assign]
