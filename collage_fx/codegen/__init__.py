"""Code that this package writes itself: the C++ of a rule's kernel, printed from its graph."""

from collage_fx.codegen.kernels import *
from collage_fx.codegen.spellings import *
