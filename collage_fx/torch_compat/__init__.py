"""Everything that rests on torch's private interfaces, and so may differ from version to version.

Supported: torch 2.11 and newer (tested on 2.11, 2.13 and 2.15). A private name that has moved is reported by
name at import, with the versions that are known to work, rather than by an AttributeError in the middle of a
training run.

A module for each part of torch, all of whose names are imported from here:

- ``tensors``: tensors and operators themselves;
- ``fake_tensors``: tensors without elements, numbers without values;
- ``optim_frames``: torch.optim's wrapper around ``step``, in the frames that Python is running;
- ``dynamo_*``: what is being traced, optimizers, conversions of frames, graph breaks, Python's numbers;
- ``aot_autograd``: what the inputs of a graph are, what remains to be done around it;
- ``inductor``: calling it, its settings and its caches;
- ``inductor_lowerings``: what our operators are lowered to;
- ``inductor_cpp*``: our code in its C++ kernels, that of conversions, of loads and of sums;
- ``inductor_libraries``: the functions of its C++ kernels, to be called from C++.
"""

from __future__ import annotations

from collage_fx.torch_compat.version import check_version, unknown_version

__all__ = [
    "ADDRESS_OF_TENSOR",
    "COMBINED_LAUNCHES",
    "DATA_ASSIGNMENTS",
    "CFunction",
    "ConvertAgain",
    "FakeTensorMode",
    "GraphBreak",
    "RunAsItIs",
    "ShortenTraceback",
    "SymbolicScope",
    "ThinnedLists",
    "TraceWhole",
    "add_to_cache_key",
    "another_fake",
    "aot_input_of",
    "assert_size_stride",
    "backend_being_traced_for",
    "bfloat16_by_instruction",
    "c_function",
    "compile_lock",
    "compile_with_inductor",
    "cpp_compilers",
    "current_trace",
    "depends_on_values",
    "detect_fake_mode",
    "disabled_torch_function",
    "dynamo_recompile_limit",
    "factorizes",
    "forget_static_addresses",
    "functional_decompositions",
    "fusing_distant_nodes",
    "generated_code",
    "generates_cpp",
    "graph_module",
    "has_internal_overlap",
    "has_storage",
    "inductor_compile_inner",
    "inductor_config",
    "innermost_callable",
    "is_being_stepped",
    "is_step_wrapper",
    "keep_numbers_symbolic",
    "laid_out_like",
    "load_cpp_library",
    "make_fx",
    "mode_options",
    "needs_autograd",
    "optimizer_being_stepped",
    "pointwise_of",
    "prepare_cpp_compiler",
    "prims_fma",
    "real_tensors",
    "register_pointwise_lowering",
    "register_realizing_lowering",
    "register_sampling_lowering",
    "register_summing_lowering",
    "rest_in_cpp",
    "rounded_in_cpp",
    "run_compiled_functions_as_they_are_if",
    "symbol_source",
    "thin_lists",
    "thinned_lists",
    "trace_instead",
    "traced_frame_name",
    "traced_frame_variables",
    "versions_to_increment",
    "watch_conversions",
    "watch_graph_breaks",
    "watch_traced_optimizers",
    "without_modes",
    "wrapper_subclass",
]

check_version()

try:
    from collage_fx.torch_compat.aot_autograd import (
        DATA_ASSIGNMENTS,
        aot_input_of,
        needs_autograd,
        versions_to_increment,
    )
    from collage_fx.torch_compat.dynamo_conversions import (
        compile_lock,
        dynamo_recompile_limit,
        run_compiled_functions_as_they_are_if,
        watch_conversions,
    )
    from collage_fx.torch_compat.dynamo_graph_breaks import GraphBreak, watch_graph_breaks
    from collage_fx.torch_compat.dynamo_numbers import keep_numbers_symbolic, trace_instead
    from collage_fx.torch_compat.dynamo_optimizers import (
        ThinnedLists,
        forget_static_addresses,
        thin_lists,
        thinned_lists,
        watch_traced_optimizers,
    )
    from collage_fx.torch_compat.dynamo_trace import (
        ConvertAgain,
        RunAsItIs,
        ShortenTraceback,
        TraceWhole,
        backend_being_traced_for,
        current_trace,
        traced_frame_name,
        traced_frame_variables,
    )
    from collage_fx.torch_compat.fake_tensors import (
        FakeTensorMode,
        SymbolicScope,
        another_fake,
        detect_fake_mode,
        make_fx,
        real_tensors,
        symbol_source,
    )
    from collage_fx.torch_compat.inductor import (
        COMBINED_LAUNCHES,
        add_to_cache_key,
        compile_with_inductor,
        cpp_compilers,
        functional_decompositions,
        fusing_distant_nodes,
        generated_code,
        generates_cpp,
        inductor_compile_inner,
        inductor_config,
        innermost_callable,
        mode_options,
        prepare_cpp_compiler,
    )
    from collage_fx.torch_compat.inductor_cpp import rest_in_cpp, rounded_in_cpp
    from collage_fx.torch_compat.inductor_cpp_conversions import bfloat16_by_instruction
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
    from collage_fx.torch_compat.tensors import (
        assert_size_stride,
        depends_on_values,
        disabled_torch_function,
        factorizes,
        graph_module,
        has_internal_overlap,
        has_storage,
        laid_out_like,
        prims_fma,
        without_modes,
        wrapper_subclass,
    )
except ImportError as error:
    raise unknown_version(error) from error
