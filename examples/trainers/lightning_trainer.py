"""Train a small GPT in pure bfloat16 by Lightning's ``Trainer``: ``callbacks=[CollageCallback()]``.

    python -m examples.trainers.lightning_trainer [--steps 300] [--quick]

Lightning itself goes on to the bit where an epoch ends: this one has two, of half of the steps each.
"""

from __future__ import annotations

from typing import Any

import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Subset

from collage_fx.integrations.lightning import CollageCallback
from examples.train_gpt import GPT
from examples.trainers.setting import ACCUMULATED, Setting, compare, loss_of


class Module(lightning.LightningModule):  # type: ignore[misc]  # Lightning has no types here
    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.setting = setting
        self.model = setting.model()

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        return loss_of(self.model, batch)

    def configure_optimizers(self) -> Any:
        recipe = self.setting.recipe
        optimizer = AdamW(
            self.parameters(),
            lr=recipe.peak_lr,
            betas=recipe.betas,
            weight_decay=recipe.weight_decay,
            fused=True,
        )
        schedule = LambdaLR(optimizer, self.setting.lr_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train(setting: Setting) -> GPT:
    module = Module(setting)
    trainer = lightning.Trainer(
        max_epochs=2,
        precision="bf16-true",
        accelerator="cpu",
        gradient_clip_val=setting.recipe.clip,
        accumulate_grad_batches=ACCUMULATED,
        callbacks=[
            CollageCallback(**setting.options),
            ModelCheckpoint(setting.folder, filename="{epoch}", every_n_epochs=1, save_top_k=-1),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    windows = Subset(setting.windows(), range(setting.half * setting.recipe.batch))
    checkpoint = str(setting.folder / "epoch=0.ckpt") if setting.resume else None
    trainer.fit(module, DataLoader(windows, setting.part), ckpt_path=checkpoint)
    return module.model


if __name__ == "__main__":
    compare(train, "Lightning's Trainer")
