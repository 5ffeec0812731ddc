"""Measurements of a step: sums that its kernels compute, and quantities derived from the sums."""

from collage_fx.metrics.meter import MeasuredInput, Meter, MeteredStep, Rows
from collage_fx.metrics.quality import Metrics, UpdateQuality
