"""State that outlives a step: error terms and packed state, with saving, loading and checks."""

from collage_fx.state.checkpoint import (
    adopt,
    adopted_by_storage,
    carry_along,
    files_of,
    load_flat,
    note_compiled,
    note_eager_step,
)
from collage_fx.state.error_terms import (
    ErrorTermRecord,
    StoredAs,
    change_layout,
    choose_new,
    ensure_record,
    full_value,
    hand_over,
    has_error_terms,
    holds_more,
    is_same_memory,
    note_new,
    record_of,
    records_version,
    require_format,
    reset_error_terms,
    stored_as,
    write,
)
from collage_fx.state.host_twins import host_twin, set_host_twin, uploading
from collage_fx.state.optimizers import (
    KnownTensor,
    bytes_held,
    clone_of,
    has_state,
    held_optimizers,
    held_per_parameter,
    known_tensors,
    optimizers_among,
    other_state_bytes,
    parameter_names,
    state_tensors,
    states_of,
    unpack_all,
)
from collage_fx.state.packed import is_packed, unpack
from collage_fx.state.replaced_state import (
    holds_the_same,
    note_bound,
    note_held,
    note_step,
    noting_steps,
    only_in_state,
    settle_replaced,
    stepped_optimizers,
)
from collage_fx.state.safetensors_file import SafetensorsFile, write_safetensors
from collage_fx.state.wide_state import is_spared
