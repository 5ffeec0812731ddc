"""The safetensors file format, written and read a tensor at a time.

A file is the length of a header (8 bytes, little-endian), the header (JSON with the dtype, shape and byte
offsets of each tensor, and texts under ``__metadata__``), and the bytes of the tensors. The package
``safetensors`` is not used: its writer needs all tensors in memory at once, and refuses a mapping that makes
them one by one. Each reads the files of the other.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from collage_fx.errors import CheckpointMismatchError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

METADATA = "__metadata__"
ALIGNMENT = 8


def write_safetensors(
    path: Path, like: Mapping[str, Tensor], tensors: Iterable[Tensor], metadata: Mapping[str, str]
) -> None:
    """Write a file, taking one tensor after the other; the file gets its name only when it is complete.

    Args:
        path: path of the file.
        like: name -> tensor (on the meta device, say) with the dtype and shape of each tensor, wide dtypes
            first, so that a tensor begins at a multiple of its itemsize.
        tensors: the tensors to write, in the same order.
        metadata: texts for the header.
    """
    header: dict[str, Any] = {METADATA: dict(metadata)}
    end = 0
    for name, each in like.items():
        start, end = end, end + each.nbytes
        header[name] = {"dtype": NAMES[each.dtype], "shape": list(each.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for tensor in tensors:
                data = tensor.detach().cpu().contiguous()
                if data.numel():
                    file.write((ctypes.c_char * data.nbytes).from_address(data.data_ptr()))
                del tensor, data  # before the next tensor is made
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


class SafetensorsFile(Mapping[str, Tensor]):
    """Mapping of a file's tensors by name, on the CPU; each lookup maps the bytes of one tensor.

    The mapping ends with the tensor. Raises CheckpointMismatchError if the file does not have the format.
    ``metadata`` has the texts of the header.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        size = os.path.getsize(path)
        try:
            with open(path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header: dict[str, Any] = json.loads(file.read(length if 8 + length <= size else 0))
            self.metadata: Mapping[str, str] = header.get(METADATA, {})
            self._entries = {
                name: (DTYPES[entry["dtype"]], tuple(entry["shape"]), *entry["data_offsets"])
                for name, entry in header.items()
                if name != METADATA
            }
            for dtype, shape, start, end in self._entries.values():
                fits = 0 <= start <= end <= size - 8 - length
                if not fits or math.prod(shape) * dtype.itemsize != end - start:
                    raise ValueError(f"{start}, {end}")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointMismatchError(
                f"the file is not in the safetensors format, or is cut off ({type(error).__name__}: {error})",
                where=os.fspath(path),
                remedy="give a file that safetensors, or collage_fx.save_full_state_dict, has written",
            ) from error
        self._path = path
        self._begin = 8 + length

    def __getitem__(self, name: str) -> Tensor:
        dtype, shape, start, end = self._entries[name]
        if start == end:
            return torch.empty(shape, dtype=dtype)
        start, end = self._begin + start, self._begin + end
        page = start - start % mmap.ALLOCATIONGRANULARITY
        with open(self._path, "rb") as file:
            memory = mmap.mmap(file.fileno(), end - page, access=mmap.ACCESS_COPY, offset=page)
        data = torch.frombuffer(memory, dtype=torch.uint8, count=end - start, offset=start - page)
        if data.data_ptr() % dtype.itemsize:
            data = data.clone()
        return data.view(dtype).view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
