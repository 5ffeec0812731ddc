"""The lowering of a rewritten program to kernels and a plan of calls, all of it at compile time."""

from collage_fx.lowering.attempts import interpreted
from collage_fx.lowering.lower import JOINT_GRAPH_SETTINGS, Lowered, lower, without_sums
from collage_fx.lowering.plan import rules_of

__all__ = ["JOINT_GRAPH_SETTINGS", "Lowered", "interpreted", "lower", "rules_of", "without_sums"]
