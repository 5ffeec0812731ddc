"""Numerics: storage formats, compensated arithmetic, error formats, and the sums that measure an update.

They are eager functions of tensors, and facts about formats, and know no graphs, optimizers or compilers.
"""

from collage_fx.numerics.arithmetic import FIRST_INFINITE as FIRST_INFINITE
from collage_fx.numerics.arithmetic import DoubleWord as DoubleWord
from collage_fx.numerics.blocks import BLOCK as BLOCK
from collage_fx.numerics.blocks import BLOCK_CODES as BLOCK_CODES
from collage_fx.numerics.blocks import BLOCK_OPERATORS as BLOCK_OPERATORS
from collage_fx.numerics.blocks import BLOCK_SCALES as BLOCK_SCALES
from collage_fx.numerics.blocks import BLOCK_VALUES as BLOCK_VALUES
from collage_fx.numerics.blocks import FIRST_SCALE as FIRST_SCALE
from collage_fx.numerics.blocks import block_scale as block_scale
from collage_fx.numerics.blocks import block_unit as block_unit
from collage_fx.numerics.blocks import blocks_of as blocks_of
from collage_fx.numerics.blocks import code_of_number as code_of_number
from collage_fx.numerics.blocks import from_blocks as from_blocks
from collage_fx.numerics.blocks import is_dense as is_dense
from collage_fx.numerics.blocks import most_of_block as most_of_block
from collage_fx.numerics.blocks import number_of_code as number_of_code
from collage_fx.numerics.blocks import units_of_block as units_of_block
from collage_fx.numerics.blocks import why_no_blocks as why_no_blocks
from collage_fx.numerics.dither import dithered as dithered
from collage_fx.numerics.dither import dithered_sum as dithered_sum
from collage_fx.numerics.dither import places as places
from collage_fx.numerics.error_formats import ERROR_FORMATS as ERROR_FORMATS
from collage_fx.numerics.error_formats import PACKED_FORMATS as PACKED_FORMATS
from collage_fx.numerics.error_formats import SUM as SUM
from collage_fx.numerics.error_formats import WEIGHT_FORMATS as WEIGHT_FORMATS
from collage_fx.numerics.error_formats import AuxiliarySpec as AuxiliarySpec
from collage_fx.numerics.error_formats import ErrorBound as ErrorBound
from collage_fx.numerics.error_formats import ErrorFormat as ErrorFormat
from collage_fx.numerics.error_formats import format_named as format_named
from collage_fx.numerics.error_formats.base import COUNT as COUNT
from collage_fx.numerics.error_formats.blocks import Blocks as Blocks
from collage_fx.numerics.error_formats.dither import Dither as Dither
from collage_fx.numerics.error_formats.exact import Exact as Exact
from collage_fx.numerics.error_formats.weights import Weights as Weights
from collage_fx.numerics.float24 import dithered_upper as dithered_upper
from collage_fx.numerics.float24 import with_byte as with_byte
from collage_fx.numerics.formats import STORAGE_FORMATS as STORAGE_FORMATS
from collage_fx.numerics.formats import FloatFormat as FloatFormat
from collage_fx.numerics.formats import is_low_precision as is_low_precision
from collage_fx.numerics.formats import short_name as short_name
from collage_fx.numerics.formats import storage_format as storage_format
from collage_fx.numerics.operators import DITHERED_SUM as DITHERED_SUM
from collage_fx.numerics.operators import ELEMENTWISE as ELEMENTWISE
from collage_fx.numerics.operators import PHASE as PHASE
from collage_fx.numerics.operators import PHASES as PHASES
from collage_fx.numerics.operators import PLACED as PLACED
from collage_fx.numerics.operators import ROUND_TO_STORAGE as ROUND_TO_STORAGE
from collage_fx.numerics.operators import UPPER_HALF as UPPER_HALF
from collage_fx.numerics.operators import define_operator as define_operator
