"""Train a small Llama in pure bfloat16 by Hugging Face's ``Trainer``: ``callbacks=[CollageCallback()]``.

    python -m examples.trainers.transformers_trainer [--resume]
    tensorboard --logdir trained

The text is the source code of Python's standard library, byte by byte.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from collage_fx.integrations.transformers import CollageCallback


def rows_of_text(length: int = 64) -> list[dict[str, torch.Tensor]]:
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().split(length)[:-1]
    return [{"input_ids": row, "labels": row} for row in rows]


def train(out: Path, steps: int = 200, *, resume: bool = False) -> Any:
    transformers.set_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(vocab_size=256, num_attention_heads=4, **shape)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)  # or from_pretrained(..., dtype=...)
    arguments = transformers.TrainingArguments(
        output_dir=str(out),
        max_steps=steps,
        save_steps=steps // 2,
        logging_steps=max(1, steps // 10),
        learning_rate=1e-3,
        warmup_steps=steps // 10,
        lr_scheduler_type="cosine",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        use_cpu=not torch.cuda.is_available(),
        report_to=["tensorboard"],
    )
    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=rows_of_text(),
        callbacks=[CollageCallback(bytes_per_parameter=8, metrics=True)],
    )
    trainer.train(resume_from_checkpoint=resume)  # True: from the last checkpoint
    return trainer


if __name__ == "__main__":
    train(Path("trained/transformers"), resume="--resume" in sys.argv)
