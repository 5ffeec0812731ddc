"""Everything that rests on torch's private interfaces, and so may differ from version to version.

Supported: torch 2.11 and newer (tested on 2.11, 2.13 and 2.15). A private name that has moved, or means
something else, is reported by name at import, with the versions that are known to work, rather than by an
AttributeError in the middle of a training run.

A module for each part of torch, all of whose names are imported from here:

- ``tensors``: tensors and operators themselves;
- ``fake_tensors``: tensors without elements, numbers without values;
- ``optim_frames``: torch.optim's wrapper around ``step``, in the frames that Python is running;
- ``dynamo_trace``: what is being traced;
- ``aot_autograd``: what the inputs of a graph are, what remains to be done around it;
- ``inductor``: calling it, its settings and its caches;
- ``inductor_lowerings``: what our operators are lowered to;
- ``inductor_libraries``: the functions of its C++ kernels, to be called from C++;
- ``cpp_sums``: the C++ text of the sums of measured steps;
- ``patching``: how something of torch's is replaced, and ``patches``: all that is;
- ``patch_*``: what is replaced, in Dynamo (``conversions``, ``graph_breaks``, ``optimizers``, ``numbers``),
  outside of compilations (``steps``, ``averages``), in Inductor (``inductor``) and in its C++
  (``cpp_roundings``, ``cpp_conversions``, ``cpp_loads``, ``cpp_sums``).
"""

from __future__ import annotations

from collage_fx.torch_compat.version import check_version, unknown_version

__all__ = [
    "ADDRESS_OF_TENSOR",
    "COMBINED_LAUNCHES",
    "DATA_ASSIGNMENTS",
    "PATCHES",
    "SET_GRAD_ENABLED",
    "BurnedIn",
    "CFunction",
    "ConvertAgain",
    "FakeTensorMode",
    "GraphBreak",
    "InductorFault",
    "OpOverload",
    "RunAsItIs",
    "ShortenTraceback",
    "Sums",
    "SymbolicScope",
    "Thin",
    "ThinnedLists",
    "TorchDispatchMode",
    "TraceWhole",
    "Watch",
    "add_to_cache_key",
    "another_fake",
    "aot_input_of",
    "assert_size_stride",
    "backend_being_traced_for",
    "base_of",
    "before_eager_steps",
    "c_function",
    "compile_lock",
    "compile_with_inductor",
    "compiling",
    "copy_cache_facts",
    "cpp_compilers",
    "current_size",
    "current_trace",
    "detect_fake_mode",
    "disabled_torch_function",
    "dynamo_recompile_limit",
    "functional_decompositions",
    "fusing_distant_nodes",
    "generated_code",
    "graph_module",
    "has_internal_overlap",
    "has_storage",
    "inductor_compile_as_it_is",
    "inductor_compile_inner",
    "inductor_config",
    "inductor_faults",
    "innermost_callable",
    "install_fused_updates",
    "is_being_stepped",
    "is_dynamos",
    "is_held_by_torch",
    "is_made_of_tensors",
    "is_step_wrapper",
    "laid_out_like",
    "load_cpp_library",
    "make_fx",
    "mode_options",
    "needs_autograd",
    "optimizer_being_stepped",
    "pointwise_of",
    "prepare_cpp_compiler",
    "pytree",
    "real_tensors",
    "register_pointwise_lowering",
    "register_realizing_lowering",
    "register_sampling_lowering",
    "register_summing_lowering",
    "rename",
    "reroute_steps",
    "rest_in_cpp",
    "rounded_in_cpp",
    "running_compiled_functions_as_they_are_if",
    "schema_of",
    "storage_of",
    "symbol_source",
    "takes_a_list",
    "takes_our_cpp",
    "thinned_lists",
    "traced_frame_name",
    "traced_frame_variables",
    "versions_to_increment",
    "watch_conversions",
    "without_modes",
    "without_outer_loop_fusion",
    "wrap_states",
    "wrapper_subclass",
    "writing_our_cpp",
]

check_version()

try:
    from collage_fx.torch_compat.aot_autograd import (
        DATA_ASSIGNMENTS,
        aot_input_of,
        needs_autograd,
        takes_a_list,
        versions_to_increment,
    )
    from collage_fx.torch_compat.cpp_sums import Sums
    from collage_fx.torch_compat.dynamo_trace import (
        ConvertAgain,
        RunAsItIs,
        ShortenTraceback,
        TraceWhole,
        backend_being_traced_for,
        current_trace,
        is_dynamos,
        traced_frame_name,
        traced_frame_variables,
    )
    from collage_fx.torch_compat.fake_tensors import (
        FakeTensorMode,
        SymbolicScope,
        another_fake,
        current_size,
        detect_fake_mode,
        make_fx,
        real_tensors,
        symbol_source,
    )
    from collage_fx.torch_compat.inductor import (
        COMBINED_LAUNCHES,
        InductorFault,
        add_to_cache_key,
        compile_with_inductor,
        copy_cache_facts,
        cpp_compilers,
        functional_decompositions,
        inductor_compile_as_it_is,
        inductor_compile_inner,
        inductor_config,
        inductor_faults,
        innermost_callable,
        mode_options,
        prepare_cpp_compiler,
    )
    from collage_fx.torch_compat.inductor_libraries import (
        ADDRESS_OF_TENSOR,
        CFunction,
        c_function,
        load_cpp_library,
    )
    from collage_fx.torch_compat.inductor_lowerings import (
        pointwise_of,
        register_pointwise_lowering,
        register_realizing_lowering,
        register_sampling_lowering,
        register_summing_lowering,
    )
    from collage_fx.torch_compat.optim_frames import (
        is_being_stepped,
        is_step_wrapper,
        optimizer_being_stepped,
    )
    from collage_fx.torch_compat.patch_conversions import (
        Watch,
        compile_lock,
        compiling,
        dynamo_recompile_limit,
        running_compiled_functions_as_they_are_if,
        watch_conversions,
    )
    from collage_fx.torch_compat.patch_cpp_roundings import (
        rest_in_cpp,
        rounded_in_cpp,
        takes_our_cpp,
        writing_our_cpp,
    )
    from collage_fx.torch_compat.patch_fused_updates import install_fused_updates
    from collage_fx.torch_compat.patch_graph_breaks import GraphBreak
    from collage_fx.torch_compat.patch_inductor import (
        fusing_distant_nodes,
        generated_code,
        without_outer_loop_fusion,
    )
    from collage_fx.torch_compat.patch_numbers import BurnedIn
    from collage_fx.torch_compat.patch_optimizers import (
        Thin,
        ThinnedLists,
        thinned_lists,
    )
    from collage_fx.torch_compat.patch_steps import before_eager_steps, reroute_steps, wrap_states
    from collage_fx.torch_compat.patches import PATCHES, misfits
    from collage_fx.torch_compat.tensors import (
        SET_GRAD_ENABLED,
        OpOverload,
        TorchDispatchMode,
        assert_size_stride,
        base_of,
        disabled_torch_function,
        graph_module,
        has_internal_overlap,
        has_storage,
        is_held_by_torch,
        is_made_of_tensors,
        laid_out_like,
        pytree,
        rename,
        schema_of,
        storage_of,
        without_modes,
        wrapper_subclass,
    )
except (ImportError, AttributeError) as error:
    raise unknown_version(error) from error

if told := misfits():
    raise unknown_version(told[0])
