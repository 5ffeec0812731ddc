"""From one rewritten program to kernels and a plan of calls. Works at compile time only."""

from collage_fx.lowering.lower import JOINT_GRAPH_SETTINGS, lower, lower_repeatedly, without_sums

__all__ = ["JOINT_GRAPH_SETTINGS", "lower", "lower_repeatedly", "without_sums"]
