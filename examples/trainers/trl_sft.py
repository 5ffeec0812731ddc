"""Fine-tune a small Llama in pure bfloat16 by TRL's ``SFTTrainer``: ``callbacks=[CollageCallback()]``.

    python -m examples.trainers.trl_sft [--resume]

Model and tokenizer have no files, so that nothing is downloaded: replace them by ``from_pretrained``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import trl

from collage_fx.integrations.transformers import CollageCallback


def train(out: Path, steps: int = 60, *, resume: bool = False) -> Any:
    transformers.set_seed(0)
    tokenizer = transformers.ByT5Tokenizer()  # bytes
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), **shape)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    text = "".join(path.read_text() for path in sorted(Path(os.__file__).parent.glob("[a-c]*.py")))
    texts = [text[i : i + 96] for i in range(0, 16 * 96 * 8, 96)]
    arguments = trl.SFTConfig(
        output_dir=str(out),
        max_steps=steps,
        save_steps=steps // 2,
        logging_steps=max(1, steps // 10),
        learning_rate=2e-4,
        warmup_steps=steps // 10,
        max_length=96,
        per_device_train_batch_size=8,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,  # the weights are bfloat16: no autocast
        report_to=["tensorboard"],
    )
    trainer = trl.SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=datasets.Dataset.from_dict({"text": texts}),
        processing_class=tokenizer,
        callbacks=[CollageCallback(bytes_per_parameter=8, metrics=True)],
    )
    trainer.train(resume_from_checkpoint=resume)  # True: from the last checkpoint
    return trainer


if __name__ == "__main__":
    train(Path("trained/trl"), resume="--resume" in sys.argv)
