"""Measurements of the updates of a step, and quantities derived from them."""

from collage_fx.metrics.meter import Meter, MeteredStep
from collage_fx.metrics.quality import Metrics, UpdateQuality
