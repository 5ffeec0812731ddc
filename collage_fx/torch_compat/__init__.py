"""Everything that rests on torch's private interfaces, and so may differ from version to version.

Supported: torch 2.11 and newer (tested on 2.11, 2.13 and 2.15). A private name that has moved is reported by
the first use of a name, with the versions that are known to work. Other changes in torch are reported when a
step is compiled (:func:`misfits`); by ``collage-fx doctor`` alone if they cost only time.

There is a module for each part of torch, which its docstring names. The modules ``patch_*`` replace functions
of torch: Note [Patches] in ``patching.py``. ``patches`` is a list of all replacements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from collage_fx.torch_compat.first_use import at_first_use, is_used

if TYPE_CHECKING or is_used(__name__):
    from collage_fx.torch_compat.version import unknown_version

    try:
        from torch._inductor import config as inductor_config

        from collage_fx.torch_compat.aot_autograd import (
            DATA_ASSIGNMENTS,
            aot_input_of,
            boxed_call,
            inputs_written,
            needs_autograd,
            remove_gradient_modes,
            versions_to_increment,
        )
        from collage_fx.torch_compat.dynamo_trace import (
            ConvertAgain,
            Refused,
            RunEagerly,
            WeakBackend,
            backend_being_traced_for,
            backend_within,
            conversions,
            current_trace,
            drop_code,
            forget_counts,
            is_in_dynamo,
            recompile_reasons,
            traced_frame_name,
            traced_frame_variables,
            untraced,
        )
        from collage_fx.torch_compat.fake_tensors import (
            FakeTensorMode,
            SymbolicScope,
            current_size,
            decides_by_number,
            decisions_by,
            detect_fake_mode,
            enable_python_dispatcher,
            fake_like,
            is_in_host_memory,
            real_tensors,
            symbol_source,
            symbols_of,
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
            innermost_callable,
            mode_options,
            note_generated_code,
            realize_results_of,
        )
        from collage_fx.torch_compat.inductor_libraries import ADDRESS_OF_TENSOR, CFunction, load_cpp_library
        from collage_fx.torch_compat.optim_frames import (
            ORIGINAL,
            calls_compiled_function,
            codes_of,
            compiled_callables_on_the_stack,
            compiled_callables_within,
            is_being_stepped,
            is_of_torch_optim,
            is_step_of,
            is_step_wrapper,
            is_torchs_step,
            is_traced_without_wrapper,
            key_of_code,
            optimizer_being_stepped,
            original_class,
            running_call,
            true_step,
            variables_on_the_stack,
            wrapped_steps_on_the_stack,
        )
        from collage_fx.torch_compat.own_steps import (
            has_foreign_step,
            is_in_own_step,
            note_true_step,
            own_step,
            remove_own_step,
            set_own_step,
            without_hooks,
            without_own_step,
        )
        from collage_fx.torch_compat.patch_conversions import (
            Watch,
            compile_lock,
            compiling,
            dynamo_recompile_limit,
            is_compiling_forbidden,
            watch_conversions,
        )
        from collage_fx.torch_compat.patch_gathers import GATHERED_SHARDS, gather_from
        from collage_fx.torch_compat.patch_graph_breaks import GraphBreak
        from collage_fx.torch_compat.patch_inductor import without_triton
        from collage_fx.torch_compat.patch_numbers import BurnedIn
        from collage_fx.torch_compat.patch_optimizers import (
            Place,
            ThinnedLists,
            is_traced_whole,
            restore_capturable,
            thinned_lists,
        )
        from collage_fx.torch_compat.patch_steps import (
            before_eager_steps,
            reroute_step,
            wrap_flat_states,
            wrap_loading_of_modules,
        )
        from collage_fx.torch_compat.patches import PATCHES, misfits
        from collage_fx.torch_compat.tensors import (
            SET_GRAD_ENABLED,
            OpOverload,
            Sharding,
            TorchDispatchMode,
            base_of,
            bytes_of,
            disabled_torch_function,
            distributed,
            distributed_like,
            gathers_other_dtype,
            gradient_dtype,
            guard_by_identity,
            has_internal_overlap,
            has_storage,
            is_class_traced,
            is_flattened,
            is_held_by_torch,
            is_wrapper,
            local_tensor,
            metadata_check,
            note_new_dtypes,
            offsets_of_shard,
            pytree,
            references_by_torch,
            schema_of,
            sharding_of,
            shares_memory,
            start_of_shard,
            storage_of,
            take_data,
            version_of,
            whole_tensor,
            without_modes,
            without_torch_function,
            wrapper_subclass,
        )
        from collage_fx.torch_compat.triton_tables import (
            ALIGNED_BYTES,
            TRITON_HEAD,
            TableKernel,
            launch,
            launches_of,
            no_kernels_ahead,
            on_device,
            triton_decorator,
            warp_size,
        )
        from collage_fx.torch_compat.version import OTHER_VERSIONS
    except (ImportError, AttributeError) as error:
        raise unknown_version(error) from error
else:
    __getattr__ = at_first_use(__name__)
