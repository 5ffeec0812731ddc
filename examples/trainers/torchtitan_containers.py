"""Train a small GPT in pure bfloat16 with torchtitan's optimizers: ``optimizer=collage(default_adamw(...))``.

    python -m examples.trainers.torchtitan_containers [--steps 300] [--quick]

What a job of torchtitan's does with them is here in a loop: the containers of optimizers and schedulers that
its configuration builds, and torch.distributed.checkpoint.
"""

from __future__ import annotations

from itertools import islice

import torch
from torch.distributed import checkpoint
from torch.utils.data import DataLoader
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

from collage_fx.integrations.torchtitan import collage
from examples.train_gpt import GPT
from examples.trainers.setting import ACCUMULATED, Setting, compare, loss_of


def train(setting: Setting) -> GPT:
    recipe = setting.recipe
    model = setting.model()
    config = collage(
        default_adamw(lr=recipe.peak_lr, betas=recipe.betas, weight_decay=recipe.weight_decay),
        **setting.options,
    )
    optimizers = config.build(model_parts=[model])
    # torchtitan's own schedules begin above 0.
    schedules = LRSchedulersContainer(optimizers, setting.lr_factor)
    done = 0
    if setting.resume:
        done = setting.half
        states = {
            "model": model.state_dict(),
            "optimizer": optimizers.state_dict(),
            "lr_scheduler": schedules.state_dict(),
        }
        checkpoint.load(states, checkpoint_id=setting.folder)
        model.load_state_dict(states["model"])
        optimizers.load_state_dict(states["optimizer"])
        schedules.load_state_dict(states["lr_scheduler"])
    parts = islice(DataLoader(setting.windows(), setting.part), done * ACCUMULATED, None)
    for step in range(done, recipe.steps):
        optimizers.zero_grad()
        for part in islice(parts, ACCUMULATED):
            (loss_of(model, part) / ACCUMULATED).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizers.step()
        schedules.step()
        if step + 1 == setting.half:
            states = {
                "model": model.state_dict(),
                "optimizer": optimizers.state_dict(),
                "lr_scheduler": schedules.state_dict(),
            }
            checkpoint.save(states, checkpoint_id=setting.folder)
    return model


if __name__ == "__main__":
    compare(train, "torchtitan's containers")
