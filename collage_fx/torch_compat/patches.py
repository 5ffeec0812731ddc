"""All that this package replaces in torch: Note [Patches] in ``patching.py``."""

from __future__ import annotations

from collage_fx.torch_compat import aot_autograd, dynamo_trace, fake_tensors, inductor
from collage_fx.torch_compat.patch_averages import AVERAGES
from collage_fx.torch_compat.patch_conversions import COMPILED_CALLS, CONVERSIONS, FRAMES
from collage_fx.torch_compat.patch_cpp_conversions import VECTOR_CONVERSIONS
from collage_fx.torch_compat.patch_cpp_loads import LOADS
from collage_fx.torch_compat.patch_cpp_roundings import FORMATS_OF_LOOPS, INLINE_CODE, TILINGS
from collage_fx.torch_compat.patch_cpp_sums import REDUCTIONS, VECTOR_REDUCTIONS
from collage_fx.torch_compat.patch_fused_updates import ADAGRAD, ADAM, ADAMW, SGD
from collage_fx.torch_compat.patch_graph_breaks import GRAPH_BREAKS
from collage_fx.torch_compat.patch_inductor import (
    DISTANT_NODES,
    KEPT_VALUES,
    LOADED_VALUES,
    OUTER_LOOPS,
    OUTPUT_CODE,
    PATTERN_PASSES,
    PATTERNS,
)
from collage_fx.torch_compat.patch_numbers import POWERS, SYMBOLIC_FLOATS
from collage_fx.torch_compat.patch_optimizers import LISTS, OPTIMIZERS, STATE_LISTS, UNFINISHED_STEPS
from collage_fx.torch_compat.patch_steps import EAGER_STEPS, LOADING, OWN_STEPS, PACKING, SAVING, UNPACKING
from collage_fx.torch_compat.patching import Patch, Shape

__all__ = ["PATCHES", "RELIED_ON", "misfits"]

#: In the order in which a step meets them.
PATCHES: tuple[Patch, ...] = (
    SAVING,
    LOADING,
    PACKING,
    UNPACKING,
    AVERAGES,
    ADAM,
    ADAMW,
    SGD,
    ADAGRAD,
    EAGER_STEPS,
    OWN_STEPS,
    COMPILED_CALLS,
    CONVERSIONS,
    FRAMES,
    OPTIMIZERS,
    STATE_LISTS,
    LISTS,
    UNFINISHED_STEPS,
    GRAPH_BREAKS,
    POWERS,
    SYMBOLIC_FLOATS,
    PATTERN_PASSES,
    PATTERNS,
    OUTPUT_CODE,
    DISTANT_NODES,
    OUTER_LOOPS,
    KEPT_VALUES,
    LOADED_VALUES,
    INLINE_CODE,
    TILINGS,
    FORMATS_OF_LOOPS,
    VECTOR_CONVERSIONS,
    REDUCTIONS,
    VECTOR_REDUCTIONS,
    LOADS,
)

#: What else is called by a name that nothing but its use would look up.
RELIED_ON: tuple[Shape, ...] = (
    *aot_autograd.RELIED_ON,
    *dynamo_trace.RELIED_ON,
    *fake_tensors.RELIED_ON,
    *inductor.RELIED_ON,
)


def misfits() -> list[str]:
    """What of torch is not as it has to be for this package, in a sentence each."""
    told = (*(patch.check() for patch in PATCHES), *(shape.misfit() for shape in RELIED_ON))
    return [each for each in told if each is not None]
