"""Lightning's ``Trainer`` trains as float64 would and resumes to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from collage_fx import backend_of
from tests.support.replay import KEPT, Kept, Replay
from tests.support.training import differences, everything

lightning = pytest.importorskip("lightning", reason="pip install 'collage-fx[trainers]'")

from collage_fx.integrations.lightning import CollageCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("error:collage_fx")

EPOCHS, STEPS_PER_EPOCH, CLIP = 2, 8, 0.25


def data() -> Any:
    return torch.randint(0, 40, (4 * STEPS_PER_EPOCH, 8), generator=torch.Generator().manual_seed(0))


def train(folder: Path, kept: Kept, resume_from: Path | None = None) -> Replay:
    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]  # there are no types of it
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = torch.nn.Sequential(torch.nn.Embedding(64, 64), torch.nn.Linear(64, 64))

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return torch.nn.functional.cross_entropy(
                self.layers(batch).float().flatten(0, 1), batch.roll(-1, 1).flatten()
            )

        def configure_optimizers(self) -> Any:
            optimizer = AdamW(self.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
            self.replay = Replay(optimizer)
            warm_up = LambdaLR(optimizer, lambda step: min(step, 4) / 4)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warm_up, "interval": "step"}}

    saving = lightning.pytorch.callbacks.ModelCheckpoint(
        folder, filename="{epoch}", every_n_epochs=1, save_top_k=-1
    )
    callback = CollageCallback(**kept.options)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        precision="bf16-true",
        accelerator="cpu",
        gradient_clip_val=CLIP,
        accumulate_grad_batches=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback, saving],
    )
    module = Module()
    trainer.fit(module, DataLoader(data(), batch_size=2), ckpt_path=resume_from and str(resume_from))
    assert backend_of(trainer.optimizers[0]) is callback.backend
    return module.replay


@pytest.mark.parametrize("kept", KEPT)
def test_it_is_compensated_and_resumed_to_the_bit(kept: Kept, tmp_path: Path) -> None:
    replay = train(tmp_path, kept)
    assert replay.learning_rates[0] == 0 < replay.learning_rates[1]
    assert len(replay.learning_rates) == EPOCHS * STEPS_PER_EPOCH
    replay.assert_clipped(CLIP)
    replay.assert_compensated(kept)
    whole = everything(replay.optimizer)

    torch._dynamo.reset()
    resumed = train(tmp_path, kept, resume_from=tmp_path / "epoch=0.ckpt")
    assert len(resumed.learning_rates) == STEPS_PER_EPOCH
    assert not differences(everything(resumed.optimizer), whole)
