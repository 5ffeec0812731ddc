"""Integration with torchtitan: an optimizer container and a metrics processor, for a job's configuration."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.optimizer.utils import init_optim_state, load_flat_optim_state_dict
from typing_extensions import Unpack

from collage_fx.choices import takes_options
from collage_fx.installation import backend_of, install
from collage_fx.options import GivenOptions
from collage_fx.state import load_flat

__all__ = ["CollageMetrics", "CollageOptimizers", "collage"]


class CollageOptimizers(OptimizersContainer):  # type: ignore[misc]  # torchtitan has no types here
    """Variant of torchtitan's ``OptimizersContainer`` that installs each of its optimizers.

    Its state dict holds the error terms, for torchtitan's checkpoints.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):  # type: ignore[misc]  # likewise
        """``OptimizersContainer.Config`` with options for compensation.

        Attributes:
            collage: options of :func:`collage_fx.install`.
        """

        collage: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Config, *, model_parts: list[Any]) -> None:
        super().__init__(config, model_parts=model_parts)
        install(self, **config.collage)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a flat state dict, with the error terms that torchtitan's own function omits."""
        for optimizer in self.optimizers:
            init_optim_state(optimizer)
            load_flat(optimizer, state_dict, load_flat_optim_state_dict)


class CollageMetrics(MetricsProcessor):  # type: ignore[misc]  # likewise
    """Variant of torchtitan's ``MetricsProcessor`` that also logs :meth:`collage_fx.CollageBackend.scalars`.

    In the configuration of a job: ``metrics=CollageMetrics.Config(log_freq=10)``, with
    ``optimizer=collage(default_adamw(lr=3e-4), metrics=True, metrics_every=10)``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):  # type: ignore[misc]  # likewise
        """``MetricsProcessor.Config``."""

    def log(self, *args: Any, extra_metrics: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Log a step, on all processes."""
        found = backend_of(self.optimizers).scalars()
        super().log(*args, extra_metrics={**(extra_metrics or {}), **found}, **kwargs)


@takes_options
def collage(config: OptimizersContainer.Config, **options: Unpack[GivenOptions]) -> CollageOptimizers.Config:
    """Return a configuration like ``config``, with compensated optimizers.

    In the configuration of a job: ``optimizer=collage(default_adamw(lr=3e-4))``, with
    ``training.dtype="bfloat16"``.

    Args:
        config: torchtitan's configuration of the optimizers.
        options: options of :func:`collage_fx.install`, such as ``strategy="light"``.
    """
    same = {each.name: getattr(config, each.name) for each in fields(config)}
    return CollageOptimizers.Config(**same, collage=dict(options))
