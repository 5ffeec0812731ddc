"""Train a small Llama in pure bfloat16 with torchtitan's containers: ``collage(default_adamw(...))``.

    python -m examples.trainers.torchtitan_containers [--resume]

A job of torchtitan needs GPUs: here are its containers of optimizers and schedulers. In a job:

    optimizer=collage(default_adamw(lr=1e-3), bytes_per_parameter=8, metrics=True, metrics_every=10),
    metrics=CollageMetrics.Config(log_freq=10, enable_tensorboard=True),
    training=TrainingConfig(dtype="bfloat16", ...),
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from transformers import LlamaConfig, LlamaForCausalLM

from collage_fx import backend_of
from collage_fx.integrations.torchtitan import collage


def train(out: Path, steps: int = 200, *, resume: bool = False) -> Any:
    torch.manual_seed(0)
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    rows: Any = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()[: steps * 8 * 64].view(-1, 8, 64)
    config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    every = max(1, steps // 10)
    options: Any = {"bytes_per_parameter": 8, "metrics": True, "metrics_every": every}
    optimizers = collage(default_adamw(lr=1e-3), **options).build(model_parts=[model])
    schedules = LRSchedulersContainer(optimizers, lambda step: 1 - step / steps)
    parts = {"model": model, "optimizer": optimizers, "lr_scheduler": schedules}
    if resume:
        states = {name: part.state_dict() for name, part in parts.items()}
        checkpoint.load(states, checkpoint_id=out)
        for name, part in parts.items():
            part.load_state_dict(states[name])
    for step, batch in list(enumerate(rows, 1))[steps // 2 if resume else 0 :]:
        (loss := model(input_ids=batch, labels=batch).loss).backward()
        optimizers.step()
        schedules.step()
        optimizers.zero_grad()
        if step % every == 0:
            print(f"step {step}: loss {loss.item():.3f}, {backend_of(optimizers).scalars()}")
        if step == steps // 2:
            checkpoint.save({name: part.state_dict() for name, part in parts.items()}, checkpoint_id=out)
    return optimizers


if __name__ == "__main__":
    train(Path("trained/torchtitan"), resume="--resume" in sys.argv)
