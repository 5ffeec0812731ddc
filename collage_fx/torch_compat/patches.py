"""All replacements of functions of torch: Note [Patches] in ``patching.py``."""

from __future__ import annotations

import functools

from collage_fx.torch_compat import (
    aot_autograd,
    dynamo_counts,
    dynamo_trace,
    fake_tensors,
    inductor,
    optim_frames,
    own_steps,
    patch_averages,
    patch_conversions,
    patch_dtypes,
    patch_graph_breaks,
    patch_inductor,
    patch_numbers,
    patch_optimizers,
    patch_steps,
    tensors,
    triton_tables,
)
from collage_fx.torch_compat.patching import Patch, misfit

#: All patches, by module, roughly in the order of their use in a step.
PATCHES: tuple[Patch, ...] = tuple(
    value
    for module in (
        *(patch_steps, patch_averages),
        *(patch_conversions, patch_optimizers, patch_graph_breaks, patch_numbers),
        *(patch_dtypes, patch_inductor),
    )
    for value in vars(module).values()
    if isinstance(value, Patch)
)

#: Requirements of functions of torch that are called, not replaced.
RELIED_ON: tuple[str, ...] = (
    *(*aot_autograd.RELIED_ON, *dynamo_trace.RELIED_ON, *fake_tensors.RELIED_ON),
    *(*inductor.RELIED_ON, *tensors.RELIED_ON, *own_steps.RELIED_ON, *dynamo_counts.RELIED_ON),
    *(*optim_frames.RELIED_ON, *triton_tables.RELIED_ON),
)


@functools.cache
def misfits() -> tuple[str, ...]:
    """Return a sentence for each requirement that this version of torch does not meet."""
    needed = (patch.misfit for patch in PATCHES if patch.needed_for == "bits")
    return tuple(told for told in (*needed, *map(misfit, RELIED_ON)) if told is not None)
