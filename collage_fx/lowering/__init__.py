"""The lowering of a rewritten program to kernels and a plan of calls, all of it at compile time."""

from collage_fx.lowering.attempts import interpreted
from collage_fx.lowering.kernels import forget_kernels
from collage_fx.lowering.lower import JOINT_GRAPH_SETTINGS, Lowered, lower, step_in_parts, why_not_compiled
from collage_fx.lowering.schedule import rules_of
