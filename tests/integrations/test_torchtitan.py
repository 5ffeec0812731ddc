"""torchtitan's optimizer container trains as float64 would and its checkpoints resume to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint

from collage_fx import backend_of
from tests.support.replay import KEPT, Kept, Replay
from tests.support.training import differences, everything

optimizers = pytest.importorskip(
    "torchtitan.components.optimizer", reason="pip install 'collage-fx[trainers]'"
)

from collage_fx.integrations.torchtitan import collage  # noqa: E402

pytestmark = pytest.mark.filterwarnings("error:collage_fx")

STEPS, SAVED_AFTER, ACCUMULATED, CLIP = 16, 8, 2, 0.25


class Job:
    """What torchtitan's ``Trainer`` does with containers of optimizers and schedulers, and their states."""

    def __init__(self, kept: Kept) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Embedding(64, 64), torch.nn.Linear(64, 64)).bfloat16()
        config = collage(optimizers.default_adamw(lr=1e-4), **kept.options)
        self.optimizers = config.build(model_parts=[self.model])
        self.schedulers = optimizers.LRSchedulersContainer(self.optimizers, lambda step: min(step, 4) / 4)
        self.replay = Replay(self.optimizers.optimizers[0])

    def states(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizers.state_dict(),
            "lr_scheduler": self.schedulers.state_dict(),
        }

    def save(self, folder: Path) -> None:
        checkpoint.save(self.states(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        states = self.states()
        checkpoint.load(states, checkpoint_id=folder)
        self.model.load_state_dict(states["model"])
        self.optimizers.load_state_dict(states["optimizer"])
        self.schedulers.load_state_dict(states["lr_scheduler"])

    def train(self, steps: range) -> None:
        for step in steps:
            self.optimizers.zero_grad()
            generator = torch.Generator().manual_seed(step)
            for _ in range(ACCUMULATED):
                batch = torch.randint(0, 40, (2, 8), generator=generator)
                loss = torch.nn.functional.cross_entropy(
                    self.model(batch).float().flatten(0, 1), batch.roll(-1, 1).flatten()
                )
                (loss / ACCUMULATED).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self.optimizers.step()
            self.schedulers.step()


@pytest.mark.parametrize("kept", KEPT)
def test_its_container_is_compensated_and_resumed_to_the_bit(kept: Kept, tmp_path: Path) -> None:
    job = Job(kept)
    job.train(range(SAVED_AFTER))
    job.save(tmp_path)
    job.train(range(SAVED_AFTER, STEPS))
    assert job.replay.learning_rates[0] == 0 < job.replay.learning_rates[1]
    job.replay.assert_clipped(CLIP)
    job.replay.assert_compensated(kept)
    assert job.replay.optimizer.param_groups[0]["fused"]
    assert backend_of(job.optimizers).report().graphs

    torch._dynamo.reset()
    resumed = Job(kept)
    resumed.load(tmp_path)
    resumed.train(range(SAVED_AFTER, STEPS))
    whole, after = (everything(each.optimizers.optimizers[0]) for each in (job, resumed))
    assert not differences(after, whole)
