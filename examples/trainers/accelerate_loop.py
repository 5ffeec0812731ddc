"""Train a small GPT in pure bfloat16 by a loop of one's own under accelerate: ``prepare(accelerator, ...)``.

python -m examples.trainers.accelerate_loop [--steps 300] [--quick]
"""

from __future__ import annotations

from accelerate import Accelerator
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from collage_fx.integrations.accelerate import prepare
from examples.train_gpt import GPT
from examples.trainers.setting import ACCUMULATED, Setting, compare, loss_of


def train(setting: Setting) -> GPT:
    recipe = setting.recipe
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    model = setting.model()
    optimizer = AdamW(
        model.parameters(),
        lr=recipe.peak_lr,
        betas=recipe.betas,
        weight_decay=recipe.weight_decay,
        fused=True,
    )
    prepared, optimizer, loader, schedule = prepare(
        accelerator,
        model,
        optimizer,
        DataLoader(setting.windows(), setting.part),
        LambdaLR(optimizer, setting.lr_factor),
        **setting.options,
    )
    done = 0
    if setting.resume:
        done = setting.half
        accelerator.load_state(str(setting.folder))
        loader = accelerator.skip_first_batches(loader, done * ACCUMULATED)
    for batch in loader:
        with accelerator.accumulate(prepared):
            accelerator.backward(loss_of(prepared, batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), recipe.clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            done += 1
            if done == setting.half:
                accelerator.save_state(str(setting.folder))
    return model


if __name__ == "__main__":
    compare(train, "accelerate")
