"""Train a small GPT in pure bfloat16 by Hugging Face's ``Trainer``: ``callbacks=[CollageCallback()]``.

    python -m examples.trainers.transformers_trainer [--steps 300] [--quick]

The optimizer is the trainer's own default, fused AdamW.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers import Trainer, TrainingArguments

from collage_fx.integrations.transformers import CollageCallback
from examples.train_gpt import GPT
from examples.trainers.setting import ACCUMULATED, Setting, compare


def loss_of_part(logits: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A part's share in the mean over a batch, as the trainer asks for it."""
    total = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
    return total / (num_items_in_batch or labels.numel())


def train(setting: Setting) -> GPT:
    recipe = setting.recipe
    arguments = TrainingArguments(
        output_dir=str(setting.folder),
        max_steps=recipe.steps,
        save_steps=setting.half,
        learning_rate=recipe.peak_lr,
        warmup_steps=setting.warmup,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr": recipe.final_lr},
        weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.clip,
        gradient_accumulation_steps=ACCUMULATED,
        per_device_train_batch_size=setting.part,
        train_sampling_strategy="sequential",
        label_names=["labels"],
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        dataloader_pin_memory=False,
    )
    model = setting.model()
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=setting.windows(),
        compute_loss_func=loss_of_part,
        callbacks=[CollageCallback(**setting.options)],
    )
    checkpoint = str(setting.folder / f"checkpoint-{setting.half}") if setting.resume else None
    trainer.train(resume_from_checkpoint=checkpoint)
    return model


if __name__ == "__main__":
    compare(train, "Hugging Face's Trainer")
