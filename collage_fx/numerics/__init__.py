"""Numbers: storage formats, compensated arithmetic, error formats, and what measures an update.

Ordinary eager functions of tensors, and facts about formats; nothing here knows of graphs, optimizers or
compilers.
"""

from collage_fx.numerics.arithmetic import *
from collage_fx.numerics.blocks import *
from collage_fx.numerics.dither import *
from collage_fx.numerics.error_formats import *
from collage_fx.numerics.float24 import *
from collage_fx.numerics.formats import *
from collage_fx.numerics.operators import *
from collage_fx.numerics.update_sums import *
