"""Train a small Llama in pure bfloat16 by a loop under accelerate: ``prepare(accelerator, ...)``.

    python -m examples.trainers.accelerate_loop [--resume]     # or: accelerate launch -m ...
    tensorboard --logdir trained

The text is the source code of Python's standard library, byte by byte.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from collage_fx import backend_of
from collage_fx.integrations.accelerate import prepare


def train(out: Path, steps: int = 200, *, resume: bool = False) -> Any:
    torch.manual_seed(0)
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    rows: Any = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().split(64)[:-1]
    config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    accelerator = Accelerator(log_with="tensorboard", project_dir=out, step_scheduler_with_optimizer=False)
    accelerator.init_trackers("log")
    objects = model, optimizer, DataLoader(rows[: steps * 8], batch_size=8), schedule
    options: Any = {"bytes_per_parameter": 8, "metrics": True, "metrics_every": max(1, steps // 10)}
    model, optimizer, batches, schedule = prepare(accelerator, *objects, **options)
    done = 0
    if resume:
        accelerator.load_state(str(out / "half"))
        done, batches = steps // 2, accelerator.skip_first_batches(batches, steps // 2)
    for step, batch in enumerate(batches, done + 1):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % options["metrics_every"] == 0:  # on all processes: shards are summed
            found = {"loss": loss.item(), **backend_of(optimizer).scalars()}
            accelerator.log(found, step=step)
            accelerator.print(f"step {step}: {found}")
        if step == steps // 2:
            accelerator.save_state(str(out / "half"))
    accelerator.end_training()
    return optimizer


if __name__ == "__main__":
    train(Path("trained/accelerate"), resume="--resume" in sys.argv)
