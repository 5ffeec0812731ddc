"""Train a small Llama in pure bfloat16 by Lightning's ``Trainer``: ``callbacks=[CollageCallback()]``.

    python -m examples.trainers.lightning_trainer [--resume]

Lightning goes on to the bit where an epoch ends: here are two, with a checkpoint after each.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from collage_fx.integrations.lightning import CollageCallback


class Module(lightning.LightningModule):  # type: ignore[misc]  # Lightning has no types here
    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch: torch.Tensor, index: int) -> Any:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(out: Path, steps: int = 200, *, resume: bool = False) -> Any:
    lightning.seed_everything(0)
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    rows: Any = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().split(64)[:-1]
    trainer = lightning.Trainer(
        max_epochs=2,
        precision="bf16-true",
        gradient_clip_val=1.0,
        log_every_n_steps=max(1, steps // 10),
        default_root_dir=out,
        callbacks=[
            CollageCallback(bytes_per_parameter=8, metrics=True),
            lightning.pytorch.callbacks.ModelCheckpoint(out, filename="{epoch}", save_top_k=-1),
        ],
    )
    batches = DataLoader(rows[: steps // 2 * 8], 8)
    trainer.fit(Module(), batches, ckpt_path=str(out / "epoch=0.ckpt") if resume else None)
    return trainer


if __name__ == "__main__":
    print(train(Path("trained/lightning"), resume="--resume" in sys.argv).logged_metrics)
