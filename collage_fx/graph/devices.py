"""Table of the device kinds that steps are compiled for, one row per kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from collage_fx.torch_compat import COMBINED_LAUNCHES


@dataclass(frozen=True)
class Device:
    """Properties of one kind of device.

    Attributes:
        in_parts: Whether a step is compiled part by part, equal parts once; otherwise the whole graph.
        compiles_cpp: Whether kernels for this device need a C++ compiler.
        is_launched: Whether its kernels are written in Triton, each launched once for many tensors.
        settings: Inductor settings while a step with tensors on this device is lowered.
        refused: Why steps with low-precision tensors on this device are refused; empty if they are not.
    """

    in_parts: bool = False
    compiles_cpp: bool = False
    is_launched: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    refused: str = ""


#: Rows by ``torch.device.type``.
DEVICES: Mapping[str, Device] = {
    "cpu": Device(in_parts=True, compiles_cpp=True),
    "cuda": Device(in_parts=True, is_launched=True, settings=COMBINED_LAUNCHES),
    "mps": Device(
        refused="MPS has no float64, which a step needs for learning rates, bias corrections and sums"
    ),
    "xpu": Device(refused="nobody has tested the roundings of the kernels that Inductor writes for XPU"),
}

#: Kinds on which low-precision tensors are compensated.
SUPPORTED = tuple(name for name, device in DEVICES.items() if not device.refused)

UNTESTED = Device(refused="nobody has tested the roundings of its kernels")


def device_facts(device: torch.device) -> Device:
    """Return the row of a device's kind; :data:`UNTESTED` if there is none."""
    return DEVICES.get(device.type, UNTESTED)
