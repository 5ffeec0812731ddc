"""Code that this package writes itself: the C++ and Triton of a rule's kernel, printed from its graph."""

from collage_fx.codegen.address_tables import (
    CELL,
    FIRST,
    FIRST_OF_PIECE,
    LENGTH,
    MEAN,
    MOST_ARGUMENTS,
    NO_PLACE,
    PAIR,
    PEEKED,
    SECOND,
    TOTAL,
    Classify,
    Fill,
    Gather,
    Peek,
    is_library_loaded,
    load_library,
)
from collage_fx.codegen.elements import has_spelling
from collage_fx.codegen.kernels import FLAGS, flat_kernel, number_kernel
from collage_fx.codegen.spellings import NoSpelling
from collage_fx.codegen.triton_kernels import table_kernel
from collage_fx.codegen.whole_values import (
    are_halves,
    decode_blocks,
    differing_elements,
    dtype_of_indices,
    has_fast_passes,
    hash_sum,
    join_halves,
)
