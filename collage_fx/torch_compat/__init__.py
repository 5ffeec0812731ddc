"""Everything that rests on torch's private interfaces, and so may differ from version to version.

Supported: torch 2.11 and newer (tested on 2.11, 2.13 and 2.15). A private name that a module imports and that
has moved is reported at import, with the versions that are known to work. Whatever else has moved, or looks
otherwise, is reported when a step is to be compiled (:func:`misfits`), not by an AttributeError in the middle
of a training run; if only time is lost without it, ``collage-fx doctor`` alone reports it.

A module for each part of torch; what its ``__all__`` names is imported from here:

- ``tensors``: tensors and operators themselves;
- ``fake_tensors``: tensors without elements, numbers without values;
- ``optim_frames``: torch.optim's wrapper around ``step``, in the frames that Python is running;
- ``own_steps``: a step of one optimizer, in the place of its class's;
- ``dynamo_trace``: what is being traced, and ``dynamo_counts``: how often;
- ``aot_autograd``: what the inputs of a graph are, what remains to be done around it;
- ``inductor``: calling it, its settings and its caches;
- ``inductor_lowerings``: what our operators are lowered to;
- ``inductor_libraries``: the functions of its C++ kernels, to be called from C++;
- ``triton_tables``: its Triton kernels, for many tensors in one launch, and ``triton_sums``: with sums;
- ``cpp_blocks``, ``cpp_dither``, ``cpp_halves``, ``cpp_sums``: the C++ text of our own elements and sums;
- ``patching``: how something of torch's is replaced, and ``patches``: all that is;
- ``patch_*``: what is replaced, in Dynamo (``conversions``, ``graph_breaks``, ``optimizers``, ``numbers``),
  outside of compilations (``steps``, ``averages``), in Inductor (``inductor``) and in its C++
  (``cpp_roundings``, ``cpp_conversions``, ``cpp_loads``, ``cpp_sums``).
"""

from __future__ import annotations

from collage_fx.torch_compat.version import check_version, unknown_version

check_version()

try:
    from collage_fx.torch_compat.aot_autograd import *
    from collage_fx.torch_compat.cpp_sums import *
    from collage_fx.torch_compat.dynamo_counts import *
    from collage_fx.torch_compat.dynamo_trace import *
    from collage_fx.torch_compat.fake_tensors import *
    from collage_fx.torch_compat.inductor import *
    from collage_fx.torch_compat.inductor_libraries import *
    from collage_fx.torch_compat.inductor_lowerings import *
    from collage_fx.torch_compat.optim_frames import *
    from collage_fx.torch_compat.own_steps import *
    from collage_fx.torch_compat.patch_conversions import *
    from collage_fx.torch_compat.patch_cpp_roundings import *
    from collage_fx.torch_compat.patch_fused_updates import *
    from collage_fx.torch_compat.patch_graph_breaks import *
    from collage_fx.torch_compat.patch_inductor import *
    from collage_fx.torch_compat.patch_numbers import *
    from collage_fx.torch_compat.patch_optimizers import *
    from collage_fx.torch_compat.patch_steps import *
    from collage_fx.torch_compat.patches import *
    from collage_fx.torch_compat.tensors import *
    from collage_fx.torch_compat.triton_sums import *
    from collage_fx.torch_compat.triton_tables import *
    from collage_fx.torch_compat.version import *
except (ImportError, AttributeError) as error:
    raise unknown_version(error) from error
