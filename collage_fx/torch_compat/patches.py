"""All replacements of functions of torch: Note [Patches] in ``patching.py``."""

from __future__ import annotations

import functools

from collage_fx import torch_compat
from collage_fx.torch_compat import (
    patch_conversions,
    patch_dtypes,
    patch_gathers,
    patch_graph_breaks,
    patch_inductor,
    patch_numbers,
    patch_optimizers,
    patch_steps,
)
from collage_fx.torch_compat.patching import Patch, misfit

#: All patches, by module, roughly in the order of their use in a step.
PATCHES: tuple[Patch, ...] = tuple(
    value
    for module in (
        *(patch_steps, patch_conversions, patch_optimizers, patch_graph_breaks),
        *(patch_numbers, patch_dtypes, patch_inductor, patch_gathers),
    )
    for value in vars(module).values()
    if isinstance(value, Patch)
)


def relied_on() -> list[str]:
    """Return the requirements of functions of torch that modules of this folder call, not replace."""
    return [line for module in vars(torch_compat).values() for line in getattr(module, "RELIED_ON", ())]


@functools.cache
def misfits() -> tuple[str, ...]:
    """Return a sentence for each requirement that this version of torch does not meet."""
    needed = (patch.misfit for patch in PATCHES if patch.needed_for == "bits")
    return tuple(told for told in (*needed, *map(misfit, relied_on())) if told is not None)
