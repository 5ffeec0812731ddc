"""The lowering of a rewritten program to kernels and a plan of calls, all of it at compile time."""

from collage_fx.lowering.attempts import *
from collage_fx.lowering.kernels import *
from collage_fx.lowering.lower import *
from collage_fx.lowering.plan import *
