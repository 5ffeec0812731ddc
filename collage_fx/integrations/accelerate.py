"""Integration with Accelerate: ``Accelerator.prepare`` with compensated optimizers."""

from collage_fx.integrations.trainers import prepare

__all__ = ["prepare"]
