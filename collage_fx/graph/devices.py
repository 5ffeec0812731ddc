"""The table of device kinds that steps are compiled for: a row for each, with what differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from collage_fx.torch_compat import COMBINED_LAUNCHES


@dataclass(frozen=True)
class Device:
    """A kind of device.

    Attributes:
        in_parts: Whether a step is compiled part by part, equal parts once; otherwise as one.
        compiles_cpp: Whether Inductor calls a C++ compiler for it.
        is_launched: Whether its kernels are Triton's, of which each is launched once for many tensors.
        settings: Inductor's, while a step is lowered that has tensors there.
    """

    in_parts: bool = False
    compiles_cpp: bool = False
    is_launched: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


#: The rows by ``torch.device.type``: of devices on which roundings are tested. Steps on others are refused.
DEVICES: Mapping[str, Device] = {
    "cpu": Device(in_parts=True, compiles_cpp=True),
    "cuda": Device(in_parts=True, is_launched=True, settings=COMBINED_LAUNCHES),
}

UNTESTED = Device()


def device_facts(device: torch.device) -> Device:
    """The row of a device's kind."""
    return DEVICES.get(device.type, UNTESTED)
