"""Measurements of a step: the sums that its kernels leave, and the numbers made of them."""

from collage_fx.metrics.meter import MeasuredInput, Meter, MeteredStep, Rows
from collage_fx.metrics.quality import Metrics, UpdateQuality

__all__ = [
    "MeasuredInput",
    "Meter",
    "MeteredStep",
    "Metrics",
    "Rows",
    "UpdateQuality",
]
