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
- ``fused_updates``: ``fused=True``, computed as ``fused=False``;
- ``dynamo_trace``: what is being traced, and ``dynamo_counts``: how often;
- ``aot_autograd``: what the inputs of a graph are, what remains to be done around it;
- ``inductor``: calling it, its settings and its caches;
- ``inductor_lowerings``: what our operators are lowered to;
- ``inductor_libraries``: the functions of its C++ kernels, to be called from C++;
- ``triton_tables``: its Triton kernels, for many tensors in one launch, and ``triton_sums``: with sums;
- ``patching``: how something of torch's is replaced, and ``patches``: all that is;
- ``patch_*``: what is replaced, in Dynamo (``conversions``, ``graph_breaks``, ``optimizers``, ``numbers``),
  outside of compilations (``steps``, ``averages``), in Inductor (``inductor``).
"""

from __future__ import annotations

from collage_fx.torch_compat.version import check_version, unknown_version

check_version()

try:
    from torch._inductor import config as inductor_config

    from collage_fx.torch_compat.aot_autograd import (
        DATA_ASSIGNMENTS,
        aot_input_of,
        needs_autograd,
        takes_a_list,
        versions_to_increment,
    )
    from collage_fx.torch_compat.dynamo_counts import (
        conversions,
        forget_counts,
        graph_breaks,
        recompile_reasons,
    )
    from collage_fx.torch_compat.dynamo_trace import (
        ConvertAgain,
        RunAsItIs,
        ShortenTraceback,
        TraceWhole,
        backend_being_traced_for,
        backend_within,
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
        real_tensors,
        symbol_source,
    )
    from collage_fx.torch_compat.fused_updates import fused_operator, run_unfused, trace_unfused
    from collage_fx.torch_compat.inductor import (
        COMBINED_LAUNCHES,
        FREEZES_NUMBERS,
        InductorFault,
        add_to_cache_key,
        compile_with_inductor,
        copy_cache_facts,
        cpp_compilers,
        functional_decompositions,
        generated_code,
        inductor_compile_as_it_is,
        inductor_compile_inner,
        inductor_faults,
        innermost_callable,
        is_refused_by_compiler,
        mode_options,
        note_generated_code,
        prepare_cpp_compiler,
    )
    from collage_fx.torch_compat.inductor_libraries import ADDRESS_OF_TENSOR, CFunction, load_cpp_library
    from collage_fx.torch_compat.inductor_lowerings import (
        pointwise_of,
        register_block_lowerings,
        register_placed_lowering,
        register_pointwise_lowering,
        register_realizing_lowering,
        register_sampling_lowering,
        register_summing_lowering,
    )
    from collage_fx.torch_compat.optim_frames import (
        calls_what_is_compiled,
        compiled_callables_on_the_stack,
        compiled_callables_within,
        is_being_stepped,
        is_step_of,
        is_step_wrapper,
        is_torchs_step,
        optimizer_being_stepped,
        wrapped_steps_on_the_stack,
    )
    from collage_fx.torch_compat.own_steps import (
        give_own_step,
        has_foreign_step,
        is_in_own_step,
        own_step,
        take_own_step_back,
    )
    from collage_fx.torch_compat.patch_conversions import (
        Watch,
        compile_lock,
        compiling,
        dynamo_recompile_limit,
        heed_stances,
        is_told_not_to_compile,
        watch_conversions,
    )
    from collage_fx.torch_compat.patch_graph_breaks import GraphBreak
    from collage_fx.torch_compat.patch_inductor import (
        fusing_distant_nodes,
        without_outer_loop_fusion,
        without_triton,
    )
    from collage_fx.torch_compat.patch_numbers import BurnedIn
    from collage_fx.torch_compat.patch_optimizers import (
        Place,
        Thin,
        ThinnedLists,
        TracedRows,
        is_traced_whole,
        thinned_lists,
    )
    from collage_fx.torch_compat.patch_steps import (
        before_eager_steps,
        reroute_steps,
        wrap_flat_states,
        wrap_loading_of_modules,
    )
    from collage_fx.torch_compat.patches import PATCHES, misfits
    from collage_fx.torch_compat.tensors import (
        SET_GRAD_ENABLED,
        OpOverload,
        Pieces,
        TorchDispatchMode,
        base_of,
        disabled_torch_function,
        distributed_like,
        has_internal_overlap,
        has_storage,
        is_class_of_made_ones,
        is_held_by_torch,
        is_made_of_tensors,
        keep_sizes,
        known_by_identity,
        laid_out_like,
        local_tensor,
        pieces_of,
        pytree,
        schema_of,
        start_of_piece,
        storage_of,
        version_of,
        whole_tensor,
        without_modes,
        without_torch_function,
        wrapper_subclass,
    )
    from collage_fx.torch_compat.triton_sums import Sampling, SummedValues, TableSums
    from collage_fx.torch_compat.triton_tables import ALIGNED_BYTES, TableKernel, launch, table_kernel
    from collage_fx.torch_compat.version import OTHER_VERSIONS
except (ImportError, AttributeError) as error:
    raise unknown_version(error) from error

__all__ = [
    "ADDRESS_OF_TENSOR",
    "ALIGNED_BYTES",
    "COMBINED_LAUNCHES",
    "DATA_ASSIGNMENTS",
    "FREEZES_NUMBERS",
    "OTHER_VERSIONS",
    "PATCHES",
    "SET_GRAD_ENABLED",
    "BurnedIn",
    "CFunction",
    "ConvertAgain",
    "FakeTensorMode",
    "GraphBreak",
    "InductorFault",
    "OpOverload",
    "Pieces",
    "Place",
    "RunAsItIs",
    "Sampling",
    "ShortenTraceback",
    "SummedValues",
    "SymbolicScope",
    "TableKernel",
    "TableSums",
    "Thin",
    "ThinnedLists",
    "TorchDispatchMode",
    "TraceWhole",
    "TracedRows",
    "Watch",
    "add_to_cache_key",
    "another_fake",
    "aot_input_of",
    "backend_being_traced_for",
    "backend_within",
    "base_of",
    "before_eager_steps",
    "calls_what_is_compiled",
    "compile_lock",
    "compile_with_inductor",
    "compiled_callables_on_the_stack",
    "compiled_callables_within",
    "compiling",
    "conversions",
    "copy_cache_facts",
    "cpp_compilers",
    "current_size",
    "current_trace",
    "detect_fake_mode",
    "disabled_torch_function",
    "distributed_like",
    "dynamo_recompile_limit",
    "forget_counts",
    "functional_decompositions",
    "fused_operator",
    "fusing_distant_nodes",
    "generated_code",
    "give_own_step",
    "graph_breaks",
    "has_foreign_step",
    "has_internal_overlap",
    "has_storage",
    "heed_stances",
    "inductor_compile_as_it_is",
    "inductor_compile_inner",
    "inductor_config",
    "inductor_faults",
    "innermost_callable",
    "is_being_stepped",
    "is_class_of_made_ones",
    "is_dynamos",
    "is_held_by_torch",
    "is_in_own_step",
    "is_made_of_tensors",
    "is_refused_by_compiler",
    "is_step_of",
    "is_step_wrapper",
    "is_told_not_to_compile",
    "is_torchs_step",
    "is_traced_whole",
    "keep_sizes",
    "known_by_identity",
    "laid_out_like",
    "launch",
    "load_cpp_library",
    "local_tensor",
    "misfits",
    "mode_options",
    "needs_autograd",
    "note_generated_code",
    "optimizer_being_stepped",
    "own_step",
    "pieces_of",
    "pointwise_of",
    "prepare_cpp_compiler",
    "pytree",
    "real_tensors",
    "recompile_reasons",
    "register_block_lowerings",
    "register_placed_lowering",
    "register_pointwise_lowering",
    "register_realizing_lowering",
    "register_sampling_lowering",
    "register_summing_lowering",
    "reroute_steps",
    "run_unfused",
    "schema_of",
    "start_of_piece",
    "storage_of",
    "symbol_source",
    "table_kernel",
    "take_own_step_back",
    "takes_a_list",
    "thinned_lists",
    "trace_unfused",
    "traced_frame_name",
    "traced_frame_variables",
    "version_of",
    "versions_to_increment",
    "watch_conversions",
    "whole_tensor",
    "without_modes",
    "without_outer_loop_fusion",
    "without_torch_function",
    "without_triton",
    "wrap_flat_states",
    "wrap_loading_of_modules",
    "wrapped_steps_on_the_stack",
    "wrapper_subclass",
]
